//! [`PublishedFile`]: a published disk as a file, read-only, which reads ahead of a guest that
//! reads in order.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use cowslip_block::errno::EIO;
use cowslip_block::file::{
    BlockFile, Capabilities, Durability, FileExtent, split_at_end, unsupported,
};
use cowslip_block::{BufMut, Error, IoVec, IoVecMut};
use cowslip_queue::{Pending, pending};

use crate::cut::BLOCK_BYTES;
use crate::disk::PublishedDisk;
use crate::index::Content;

/// First bytes that are read ahead, after the second request in order.
const AHEAD_BYTES_MIN: u64 = 256 << 10;
/// Most bytes that are read ahead.
const AHEAD_BYTES_MAX: u64 = 8 << 20;

/// A published disk as a file.
#[derive(Debug)]
pub struct PublishedFile {
    disk: Arc<PublishedDisk>,
    capabilities: Capabilities,
    ahead: Arc<Mutex<Ahead>>,
}

/// How requests follow each other.
#[derive(Debug, Default)]
struct Ahead {
    /// Where a request in order begins.
    next: u64,
    /// Bytes that are read ahead of one.
    window: u64,
    /// The end of what was read ahead.
    end: u64,
    is_under_way: bool,
}

impl Ahead {
    /// Notes a request. Returns what is to be read ahead of the next.
    fn note(&mut self, start: u64, end: u64, size: u64) -> Option<std::ops::Range<u64>> {
        let is_in_order = start == self.next && start > 0;
        self.next = end;
        if !is_in_order {
            (self.window, self.end) = (0, end);
            return None;
        }
        // Half of the window is left before the next part of it is asked for.
        let left = self.end.saturating_sub(end);
        if self.is_under_way || left > self.window / 2 {
            return None;
        }
        self.window = (self.window * 2).clamp(AHEAD_BYTES_MIN, AHEAD_BYTES_MAX);
        let from = self.end.max(end);
        let until = (end + self.window).min(size);
        if from >= until {
            return None;
        }
        self.end = until;
        self.is_under_way = true;
        Some(from..until)
    }
}

impl PublishedFile {
    /// The file of a disk.
    pub fn new(disk: Arc<PublishedDisk>) -> PublishedFile {
        PublishedFile {
            disk,
            capabilities: Capabilities {
                punches_holes: true,
                ..Capabilities::NONE
            },
            ahead: Arc::default(),
        }
    }

    /// The disk.
    pub fn disk(&self) -> &Arc<PublishedDisk> {
        &self.disk
    }

    fn read_ahead(&self, start: u64, end: u64) {
        let noted = lock(&self.ahead).note(start, end, self.disk.size());
        let Some(range) = noted else { return };
        let (disk, ahead) = (Arc::clone(&self.disk), Arc::clone(&self.ahead));
        cowslip_queue::spawn_anywhere(async move {
            disk.prefetch(range).await;
            lock(&ahead).is_under_way = false;
        });
    }
}

fn lock(ahead: &Mutex<Ahead>) -> std::sync::MutexGuard<'_, Ahead> {
    ahead.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A disk's error as a file's, with its words.
fn system_error(error: Error) -> io::Error {
    match error {
        Error::Io { context, source } if source.raw_os_error().is_none() => {
            io::Error::new(source.kind(), format!("{context}: {source}"))
        }
        Error::Io { source, .. } => source,
        Error::Corrupt { .. } => io::Error::new(io::ErrorKind::InvalidData, error.to_string()),
        _ => io::Error::from_raw_os_error(EIO),
    }
}

impl BlockFile for PublishedFile {
    fn name(&self) -> &str {
        self.disk.name()
    }

    cowslip_block::file_from_fields!(capabilities);

    fn len(&self) -> Pending<io::Result<u64>> {
        Pending::ready(Ok(self.disk.size()))
    }

    fn read(&self, offset: u64, mut target: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        let len = target.len();
        let beyond = split_at_end(&mut target, self.disk.size().saturating_sub(offset));
        if target.is_empty() {
            return Pending::ready((Ok(()), beyond));
        }
        let there = target.len() as u64;
        let (completer, done) = pending();
        let disk = Arc::clone(&self.disk);
        cowslip_queue::spawn_anywhere(async move {
            completer.complete(match disk.read(offset, target).await {
                Ok(mut target) => {
                    target.append(beyond);
                    (Ok(()), target)
                }
                Err(error) => (Err(system_error(error)), BufMut::zeroed(len).into()),
            });
        });
        self.read_ahead(offset, offset + there);
        done
    }

    fn write(&self, _: u64, _: IoVec, _: Durability) -> Pending<io::Result<()>> {
        unsupported()
    }

    fn extents(&self, start: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        let end = start.saturating_add(len);
        let mut extents: Vec<FileExtent> = Vec::new();
        let parts = self.disk.parts(start..end, usize::MAX);
        let parts = parts.iter().map(|part| {
            let hole = !matches!(part.content, Content::Chunk(_));
            (part.len, hole)
        });
        let size = self.disk.size().clamp(start, end);
        let beyond = (end - size > 0).then_some((end - size, true));
        let mut at = start;
        for (len, hole) in parts.chain(beyond) {
            let start = at;
            FileExtent { start, len, hole }.add_to(&mut extents);
            at += len;
        }
        Pending::ready(Ok(extents))
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        Pending::ready(Ok(()))
    }

    fn allocated_bytes(&self) -> Option<u64> {
        let chunks = self.disk.index().chunks.iter();
        Some(chunks.map(|chunk| u64::from(chunk.stored_bytes)).sum())
    }
}

const _: () = assert!(AHEAD_BYTES_MIN.is_multiple_of(BLOCK_BYTES as u64));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_ahead_begins_with_order_and_grows() {
        let mut ahead = Ahead::default();
        let size = 1 << 30;
        assert_eq!(ahead.note(0, 4096, size), None);
        let first = ahead.note(4096, 8192, size).unwrap();
        assert_eq!(first, 8192..8192 + AHEAD_BYTES_MIN);
        assert_eq!(
            ahead.note(8192, 8192 + (200 << 10), size),
            None,
            "under way"
        );
        ahead.is_under_way = false;
        let at = 8192 + (200 << 10);
        let second = ahead.note(at, at + 4096, size).unwrap();
        assert_eq!(second.start, first.end);
        assert_eq!(second.end, at + 4096 + 2 * AHEAD_BYTES_MIN);
        ahead.is_under_way = false;
        assert_eq!(ahead.note(1 << 20, 2 << 20, size), None, "out of order");
        assert!(ahead.note(2 << 20, 3 << 20, size).is_some());
        ahead.is_under_way = false;
        ahead.next = size - 4096;
        assert_eq!(ahead.note(size - 4096, size, size), None, "the end");
    }
}
