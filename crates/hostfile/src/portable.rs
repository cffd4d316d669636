//! [`PortableFile`]: a regular file by the calls that all systems like Unix have: positioned reads
//! and writes, a flush, a change of length. Each is made by the pool of threads, or by the calling
//! thread where that makes its calls itself.
//!
//! Slower than the files of [`crate::host`] and without what those know of Linux: no direct I/O,
//! no ring, no holes, no calls that zero, no locks. Bytes are copied where a request is not one
//! buffer, since the calls of the standard library take slices.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use cowslip_queue::{IoVec, IoVecMut, Pending, blocking};

use crate::file::{BlockFile, Capabilities, Claim, Durability, FileExtent, FileId, Protection};

/// A regular file by calls that all systems have.
#[derive(Debug)]
pub struct PortableFile {
    name: String,
    capabilities: Capabilities,
    id: FileId,
    file: Arc<File>,
}

impl PortableFile {
    /// A file that is open already, by a name for messages. It is written if `writable`.
    ///
    /// # Errors
    /// It is no regular file, or the system's refusal.
    pub fn new(name: &str, file: File, writable: bool) -> io::Result<PortableFile> {
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            let text = "only regular files have portable calls";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        Ok(PortableFile {
            name: name.to_string(),
            capabilities: Capabilities {
                writable,
                extends_with_zeroes: true,
                ..Capabilities::NONE
            },
            id: FileId(metadata.dev(), metadata.ino()),
            file: Arc::new(file),
        })
    }

    fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&File) -> T + Send + 'static,
    ) -> Pending<T> {
        let file = Arc::clone(&self.file);
        blocking(move || call(&file))
    }
}

/// Fills a slice, with zeroes beyond the end of file.
fn read_or_zero(file: &File, offset: u64, target: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < target.len() {
        match file.read_at(&mut target[done..], offset + done as u64) {
            Ok(0) => {
                target[done..].fill(0);
                break;
            }
            Ok(got) => done += got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl BlockFile for PortableFile {
    cowslip_block::file_from_fields!(name, capabilities, id, content_id);

    fn len(&self) -> Pending<io::Result<u64>> {
        self.call(|file| Ok(file.metadata()?.len()))
    }

    fn read(&self, offset: u64, target: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        self.call(move |file| {
            let (mut buf, bounce) = target.bounce();
            let read = read_or_zero(file, offset, &mut buf);
            if read.is_err() {
                // What was not read is nothing of an earlier owner's.
                buf.fill(0);
            }
            (read, bounce.end(buf))
        })
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> Pending<io::Result<()>> {
        self.call(move |file| {
            let mut at = offset;
            for buf in data.to_bufs() {
                file.write_all_at(&buf, at)?;
                at += buf.len() as u64;
            }
            match durability {
                Durability::Durable => file.sync_data(),
                Durability::Cached => Ok(()),
            }
        })
    }

    /// All of the file is data, as nobody says what is a hole.
    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        self.call(move |file| {
            let size = file.metadata()?.len();
            Ok(FileExtent::split_at_end(offset, len, size))
        })
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        self.call(File::sync_data)
    }

    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        self.call(move |file| file.set_len(len))
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }

    fn claim(&self, _wanted: Claim) -> crate::Result<Protection> {
        let why = "portable files have no locks".to_string();
        Ok(Protection::Unprotected(why))
    }
}
