//! The subject of a run: an image of the engine, or a disk so simple that it is right by
//! inspection, on which the simulator itself is tested.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cowslip::file::{BlockFile, Durability, FileRequest, Gate, Space};
use cowslip::image::ZeroOptions;
use cowslip::qcow2::bitmap::BitmapChange;
use cowslip::qcow2::compact::CompactOptions;
use cowslip::qcow2::create::Preallocation;
use cowslip::qcow2::snapshot::{NewSnapshot, SnapshotChoice};
use cowslip::{Error, Image, Job, Result};
use cowslip_queue::{Buf, BufMut};

use crate::bitmaps;
use crate::disk::SimDisk;
use crate::lists::GuestMemory;
use crate::remembered::Change;

/// The disk under test.
#[derive(Clone, Debug)]
pub enum Subject {
    /// The engine.
    Image(Arc<Image>),
    /// The reference: every request is one operation of the file.
    Plain(Arc<Plain>),
}

/// A file taken as a disk. A flush that fails latches it: nobody knows what was lost.
#[derive(Debug)]
pub struct Plain {
    file: Arc<dyn BlockFile>,
    latched: AtomicBool,
}

impl Plain {
    /// A disk in this file.
    pub fn new(file: Arc<dyn BlockFile>) -> Plain {
        Plain {
            file,
            latched: AtomicBool::new(false),
        }
    }

    async fn flush(&self) -> Result<()> {
        let flushed = self.file.flush().await;
        if flushed.is_err() {
            self.latched.store(true, Ordering::Relaxed);
        }
        if self.latched.load(Ordering::Relaxed) {
            return Err(Error::Latched(self.file.name().to_string()));
        }
        Ok(())
    }
}

fn failed(source: std::io::Error) -> Error {
    Error::io("plain disk", source)
}

impl Subject {
    /// Reads.
    ///
    /// # Errors
    /// The subject's.
    pub async fn read(&self, offset: u64, mut buf: BufMut) -> Result<BufMut> {
        match self {
            Subject::Image(image) => match GuestMemory::for_request(offset, buf.len()) {
                None => image.read(offset, buf).await,
                Some(guest) => {
                    image.read(offset, guest.target()).await?;
                    guest.copy_to(&mut buf);
                    Ok(buf)
                }
            },
            Subject::Plain(plain) => {
                let (outcome, buf) = plain.file.read(offset, buf.into()).await;
                outcome.map(|()| buf.into()).map_err(failed)
            }
        }
    }

    /// Writes.
    ///
    /// # Errors
    /// The subject's.
    pub async fn write(&self, offset: u64, data: Buf, durability: Durability) -> Result<()> {
        match self {
            Subject::Image(image) => match GuestMemory::for_request(offset, data.len()) {
                None => image.write(offset, data, durability).await,
                Some(guest) => {
                    let written = image.write(offset, guest.source(&data), durability).await;
                    guest.reuse();
                    written
                }
            },
            Subject::Plain(plain) => {
                let written = plain.file.write(offset, data.into(), durability).await;
                if durability == Durability::Durable && written.is_err() {
                    plain.latched.store(true, Ordering::Relaxed);
                }
                written.map_err(failed)
            }
        }
    }

    /// Reads from the area of the VM state.
    ///
    /// # Errors
    /// The subject's; `Unsupported` where there is none.
    pub async fn read_vm_state(&self, offset: u64, buf: BufMut) -> Result<BufMut> {
        self.with_vm_state()?.read_vm_state(offset, buf).await
    }

    /// Writes there.
    ///
    /// # Errors
    /// As for reads.
    pub async fn write_vm_state(&self, offset: u64, data: Buf) -> Result<()> {
        self.with_vm_state()?.write_vm_state(offset, data).await
    }

    fn with_vm_state(&self) -> Result<&Image> {
        match self {
            Subject::Image(image) => Ok(image),
            Subject::Plain(_) => Err(Error::Unsupported {
                file: "a plain disk".to_string(),
                feature: "a VM state".into(),
            }),
        }
    }

    /// Writes a cluster, compressed where the format can.
    ///
    /// # Errors
    /// The subject's.
    pub async fn write_compressed(&self, offset: u64, data: Buf) -> Result<()> {
        match self {
            Subject::Image(image) => image.write_compressed(offset, data).await,
            Subject::Plain(_) => self.write(offset, data, Durability::Cached).await,
        }
    }

    /// Writes zeroes.
    ///
    /// # Errors
    /// The subject's.
    pub async fn write_zeroes(&self, offset: u64, len: u64, options: ZeroOptions) -> Result<()> {
        match self {
            Subject::Image(image) => image.write_zeroes(offset, len, options).await,
            Subject::Plain(plain) => {
                let zeroed = plain.file.zero(offset, len, Space::Release).await;
                zeroed.map_err(failed)?;
                if options.durability == Durability::Durable {
                    plain.flush().await?;
                }
                Ok(())
            }
        }
    }

    /// Takes, applies or deletes a snapshot.
    ///
    /// # Errors
    /// The subject's; `Unsupported` where there are none.
    pub async fn change_snapshots(&self, change: &Change, job: &Job) -> Result<()> {
        let Subject::Image(image) = self else {
            return Err(Error::Unsupported {
                file: "a plain disk".to_string(),
                feature: "a snapshot".into(),
            });
        };
        let choice = |id: &String| SnapshotChoice::Id(id.clone());
        match change {
            Change::Take(id) => {
                let new = NewSnapshot {
                    name: format!("snapshot {id}"),
                    ..NewSnapshot::default()
                };
                let taken = image.create_snapshot(&new, job).await?;
                assert_eq!(taken, *id, "IDs are the next number");
                Ok(())
            }
            Change::Apply(id) => image.apply_snapshot(&choice(id), job).await,
            Change::Delete(id) => image.delete_snapshot(&choice(id), job).await,
        }
    }

    /// Changes a bitmap, or returns its dirty ranges.
    ///
    /// # Errors
    /// The subject's; `Unsupported` where there are none.
    pub async fn change_bitmaps(&self, change: &bitmaps::Change) -> Result<Vec<Range<u64>>> {
        use bitmaps::Change;
        let Subject::Image(image) = self else {
            return Err(Error::Unsupported {
                file: "a plain disk".to_string(),
                feature: "a bitmap".into(),
            });
        };
        let (name, change) = match change {
            Change::Look(name) => {
                let bits = image.dirty_bits(name).await?;
                return Ok(bits.dirty_ranges().collect());
            }
            Change::Add(name, granularity) => {
                let granularity = Some(*granularity);
                (name, BitmapChange::Add { granularity })
            }
            Change::Clear(name) => (name, BitmapChange::Clear),
            Change::Remove(name) => (name, BitmapChange::Remove),
            Change::Enable(name) => (name, BitmapChange::Enable),
            Change::Disable(name) => (name, BitmapChange::Disable),
            Change::Merge(name, source) => (name, BitmapChange::Merge(source.clone())),
        };
        image.change_bitmap(name, &change).await?;
        Ok(Vec::new())
    }

    /// All bitmaps, with what they say.
    ///
    /// # Errors
    /// The subject's.
    pub async fn bitmaps(&self) -> Result<Vec<bitmaps::Reading>> {
        let Subject::Image(image) = self else {
            return Ok(Vec::new());
        };
        let mut readings = Vec::new();
        for bitmap in image.bitmaps().await? {
            let dirty = match bitmap.in_use {
                true => Vec::new(),
                false => image
                    .dirty_bits(&bitmap.name)
                    .await?
                    .dirty_ranges()
                    .collect(),
            };
            readings.push(bitmaps::Reading {
                name: bitmap.name,
                granularity: bitmap.granularity,
                in_use: bitmap.in_use,
                auto: bitmap.auto,
                dirty,
            });
        }
        Ok(readings)
    }

    /// Discards.
    ///
    /// # Errors
    /// The subject's.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        match self {
            Subject::Image(image) => image.discard(offset, len).await,
            Subject::Plain(plain) => plain.file.discard(offset, len).await.map_err(failed),
        }
    }

    /// Allocates space in advance.
    ///
    /// # Errors
    /// The subject's; `Unsupported` where there is no way.
    pub async fn allocate(&self, offset: u64, len: u64) -> Result<()> {
        match self {
            Subject::Image(image) => image.allocate(offset, len).await,
            Subject::Plain(_) => Ok(()),
        }
    }

    /// Returns whether there are layers below.
    pub fn has_below(&self) -> bool {
        match self {
            Subject::Image(image) => image.layers().len() > 1,
            Subject::Plain(_) => false,
        }
    }

    /// Compacts the file.
    ///
    /// # Errors
    /// The subject's.
    pub async fn compact(&self, options: &CompactOptions, job: &Job) -> Result<()> {
        match self {
            Subject::Image(image) => image.compact(options, job).await.map(drop),
            Subject::Plain(_) => Ok(()),
        }
    }

    /// Flushes.
    ///
    /// # Errors
    /// The subject's.
    pub async fn flush(&self) -> Result<()> {
        match self {
            Subject::Image(image) => image.flush().await,
            Subject::Plain(plain) => plain.flush().await,
        }
    }

    /// Changes the size of the disk; an image allocates what is added, as asked.
    ///
    /// # Errors
    /// The subject's.
    pub async fn resize(&self, size: u64, how: Preallocation) -> Result<()> {
        match self {
            Subject::Image(image) => image.resize_as_job(size, how, &Job::default()).await,
            Subject::Plain(plain) => plain.file.set_len(size).await.map_err(failed),
        }
    }

    /// The size of the disk, where the subject knows one.
    pub fn size(&self) -> Option<u64> {
        match self {
            Subject::Image(image) => Some(image.size()),
            Subject::Plain(_) => None,
        }
    }

    /// Ends the session.
    ///
    /// # Errors
    /// The subject's.
    pub async fn close(&self) -> Result<()> {
        match self {
            Subject::Image(image) => image.close().await,
            Subject::Plain(plain) => plain.flush().await,
        }
    }

    /// The image's work beside its requests.
    pub async fn maintain(&self) {
        if let Subject::Image(image) = self {
            image.maintain().await;
        }
    }
}

/// Opens the files of a simulated disk by their names.
#[derive(Debug)]
pub struct SimGate(pub SimDisk);

impl Gate for SimGate {
    fn open(&self, request: &FileRequest<'_>) -> Result<Arc<dyn BlockFile>> {
        match self.0.open(request.name, request.writable) {
            Some(file) => Ok(file),
            None => Err(Error::io(
                format!("Could not open '{}'", request.name),
                std::io::Error::from_raw_os_error(2),
            )),
        }
    }
}
