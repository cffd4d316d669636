//! [`ImageFile`]: an image as a file, for another image or a filter above it.

use std::io;
use std::sync::Arc;

use cowslip::file::{BlockFile, Capabilities, Durability, FileExtent, Space, Storage};
use cowslip::image::{Format, ZeroOptions};
use cowslip::{BufMut, Error, Image, IoVec, IoVecMut};
use cowslip_block::disk::Disk;
use cowslip_block::errno::{EIO, ENOSPC};
use cowslip_block::file::split_at_end;
use cowslip_queue::{Pending, pending};

/// Extents that are asked for at a time.
const EXTENTS_MAX: usize = 1024;

/// The disk of an image, as a file of its size.
#[derive(Debug)]
pub struct ImageFile {
    image: Arc<Image>,
    name: String,
    capabilities: Capabilities,
}

impl ImageFile {
    /// The disk of an image that is this file's alone.
    pub fn new(image: Image) -> ImageFile {
        let layers = image.layers();
        let capabilities = Capabilities {
            writable: image.is_writable(),
            zeroes_fast: layers[0].format == Format::Qcow2,
            // A discard may leave bytes that are no zeroes.
            punches_holes: false,
            ..Capabilities::NONE
        };
        ImageFile {
            name: layers[0].name.clone(),
            image: Arc::new(image),
            capabilities,
        }
    }

    /// Runs a request; on a queue.
    fn run<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        request: impl FnOnce(Arc<dyn Disk>) -> F,
    ) -> Pending<T> {
        let (completer, done) = pending();
        let request = request(Arc::clone(&self.image) as Arc<dyn Disk>);
        cowslip_queue::spawn(async move { completer.complete(request.await) });
        done
    }

    /// Whether a range lies on the disk; nothing can be added to that.
    fn holds(&self, offset: u64, len: u64) -> io::Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.image.size() => Ok(()),
            _ => Err(io::Error::from_raw_os_error(ENOSPC)),
        }
    }
}

/// An image's error as a file's.
fn system_error(error: Error) -> io::Error {
    match error {
        Error::Io { source, .. } => match source.raw_os_error() {
            Some(code) => io::Error::from_raw_os_error(code),
            None => source.kind().into(),
        },
        Error::Unsupported { .. } => io::ErrorKind::Unsupported.into(),
        _ => io::Error::from_raw_os_error(EIO),
    }
}

impl BlockFile for ImageFile {
    fn storage(&self) -> Storage {
        self.image.storage()
    }

    cowslip_block::file_from_fields!(name, capabilities);

    fn len(&self) -> Pending<io::Result<u64>> {
        Pending::ready(Ok(self.image.size()))
    }

    fn read(&self, offset: u64, mut buf: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        let len = buf.len();
        let beyond = split_at_end(&mut buf, self.image.size().saturating_sub(offset));
        if buf.is_empty() {
            return Pending::ready((Ok(()), beyond));
        }
        self.run(|disk| async move {
            match disk.read(offset, buf).await {
                Ok(mut buf) => {
                    buf.append(beyond);
                    (Ok(()), buf)
                }
                Err(error) => (Err(system_error(error)), BufMut::zeroed(len).into()),
            }
        })
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> Pending<io::Result<()>> {
        if let Err(error) = self.holds(offset, data.len() as u64) {
            return Pending::ready(Err(error));
        }
        self.run(|disk| async move {
            let written = disk.write(offset, data, durability).await;
            written.map_err(system_error)
        })
    }

    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>> {
        if let Err(error) = self.holds(offset, len) {
            return Pending::ready(Err(error));
        }
        let options = ZeroOptions {
            space: Space::of_unmap(space == Space::Release),
            ..ZeroOptions::default()
        };
        self.run(|disk| async move {
            let zeroed = disk.zero(offset, len, options).await;
            zeroed.map_err(system_error)
        })
    }

    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        let there = self.image.size().saturating_sub(offset);
        if there == 0 {
            return Pending::ready(Ok(()));
        }
        self.run(|disk| async move {
            let discarded = disk.discard(offset, len.min(there)).await;
            discarded.map_err(system_error)
        })
    }

    fn extents(&self, start: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        self.run(|disk| async move {
            let (mut at, end) = (start, start + len);
            let mut extents: Vec<FileExtent> = Vec::new();
            while at < end {
                let there = disk.size().clamp(at, end) - at;
                let runs = match there {
                    // Beyond the end there is nothing.
                    0 => vec![(at, end - at, true)],
                    _ => {
                        let runs = disk.extents(at, there, EXTENTS_MAX).await;
                        let runs = runs.map_err(system_error)?;
                        runs.iter().map(|e| (e.start, e.len, e.zero)).collect()
                    }
                };
                for (start, len, hole) in runs {
                    at = start + len;
                    FileExtent { start, len, hole }.add_to(&mut extents);
                }
            }
            Ok(extents)
        })
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        self.run(|disk| async move { disk.flush().await.map_err(system_error) })
    }

    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        Pending::ready(match len == self.image.size() {
            true => Ok(()),
            false => Err(io::ErrorKind::Unsupported.into()),
        })
    }

    fn close(&self) -> Pending<io::Result<()>> {
        let (completer, done) = pending();
        let image = Arc::clone(&self.image);
        cowslip_queue::spawn(async move {
            completer.complete(image.close().await.map_err(system_error));
        });
        done
    }
}
