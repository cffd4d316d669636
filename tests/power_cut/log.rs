//! A file that remembers all that is done to it, and what a power cut may leave of that.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use cowslip::IoVec;
use cowslip::file::{BlockFile, Durability, Space};
use cowslip_queue::{Pending, pending, spawn};

use crate::support::rng::Rng;

/// The sector that a disk writes whole or not at all.
pub const SECTOR_BYTES: usize = 512;
/// The unit in which a file system changes the allocation of space.
const BLOCK_BYTES: u64 = 4096;

/// The effect of an operation on its file.
#[derive(Clone, Debug)]
enum Effect {
    Write {
        offset: u64,
        data: Vec<u8>,
    },
    Zero {
        offset: u64,
        len: u64,
    },
    Allocate {
        end: u64,
    },
    SetLen(u64),
    Flush,
    /// The host could not do it, and said so.
    Nothing,
}

/// One operation.
#[derive(Debug)]
struct Record {
    file: usize,
    effect: Effect,
    /// Durable at completion, without a flush.
    durable: bool,
    issued: u64,
    completed: Option<u64>,
}

#[derive(Debug, Default)]
struct Records {
    time: u64,
    list: Vec<Record>,
}

impl Records {
    fn tick(&mut self) -> u64 {
        self.time += 1;
        self.time
    }
}

/// The operations on all files of an image, in the order in which they were issued. Time is the
/// number of issues and completions so far.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Records>>);

impl Log {
    fn lock(&self) -> MutexGuard<'_, Records> {
        self.0.lock().unwrap()
    }

    /// A moment that lies after all that has happened, and before all that will.
    pub fn now(&self) -> u64 {
        self.lock().tick()
    }

    /// When a flush of some file was issued or had completed.
    pub fn flush_times(&self) -> Vec<u64> {
        let records = self.lock();
        let flushes = records
            .list
            .iter()
            .filter(|record| matches!(record.effect, Effect::Flush));
        flushes
            .flat_map(|record| [Some(record.issued), record.completed])
            .flatten()
            .collect()
    }

    fn issue(&self, file: usize, effect: Effect, durable: bool) -> usize {
        let mut records = self.lock();
        let issued = records.tick();
        records.list.push(Record {
            file,
            effect,
            durable,
            issued,
            completed: None,
        });
        records.list.len() - 1
    }

    fn complete(&self, index: usize) {
        let mut records = self.lock();
        let now = records.tick();
        records.list[index].completed = Some(now);
    }

    fn withdraw(&self, index: usize) {
        self.lock().list[index].effect = Effect::Nothing;
    }

    /// Returns a possible content of one file after a power cut at a moment: all durable changes,
    /// and of the others each sector of a write and each block of another change, or not, as `rng`
    /// decides.
    pub fn after_cut(&self, file: usize, base: &[u8], at: u64, rng: &mut Rng) -> Vec<u8> {
        let records = self.lock();
        let own = || records.list.iter().filter(|r| r.file == file);
        let durable_up_to = own()
            .filter(|r| matches!(r.effect, Effect::Flush) && r.completed.is_some_and(|c| c <= at))
            .map(|r| r.issued)
            .max()
            .unwrap_or(0);
        let mut bytes = base.to_vec();
        // The share of the volatile operations that survives differs from cut to cut.
        let survive_in_8 = rng.below(9);
        for record in own().filter(|r| r.issued < at) {
            let is_durable = record
                .completed
                .is_some_and(|c| c <= durable_up_to || (record.durable && c <= at));
            let fate = if is_durable || rng.below(8) < survive_in_8 {
                Fate::Applied
            } else if rng.once_in(3) {
                Fate::Torn
            } else {
                continue;
            };
            apply(&mut bytes, &record.effect, fate, rng);
        }
        bytes
    }
}

/// The fate of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Applied,
    /// Each sector or block for itself.
    Torn,
}

fn apply(bytes: &mut Vec<u8>, effect: &Effect, fate: Fate, rng: &mut Rng) {
    let mut keeps = || fate == Fate::Applied || rng.once_in(2);
    match effect {
        Effect::Write { offset, data } => {
            let mut at = *offset as usize;
            let mut rest = data.as_slice();
            while !rest.is_empty() {
                let len = (SECTOR_BYTES - at % SECTOR_BYTES).min(rest.len());
                if keeps() {
                    if bytes.len() < at + len {
                        bytes.resize(at + len, 0);
                    }
                    bytes[at..at + len].copy_from_slice(&rest[..len]);
                }
                at += len;
                rest = &rest[len..];
            }
        }
        Effect::Zero { offset, len } => {
            let end = (offset + len).min(bytes.len() as u64);
            let mut at = *offset;
            while at < end {
                let next = end.min((at / BLOCK_BYTES + 1) * BLOCK_BYTES);
                if keeps() {
                    bytes[at as usize..next as usize].fill(0);
                }
                at = next;
            }
        }
        Effect::Allocate { end } => {
            if bytes.len() < *end as usize && keeps() {
                bytes.resize(*end as usize, 0);
            }
        }
        Effect::SetLen(len) => {
            if keeps() {
                bytes.resize(*len as usize, 0);
            }
        }
        Effect::Flush | Effect::Nothing => {}
    }
}

/// A file whose changes are logged.
#[derive(Debug)]
pub struct LoggedFile {
    inner: Arc<dyn BlockFile>,
    log: Log,
    index: usize,
}

impl LoggedFile {
    /// Logs as the file of this number.
    pub fn new(inner: Arc<dyn BlockFile>, log: &Log, index: usize) -> LoggedFile {
        let log = log.clone();
        LoggedFile { inner, log, index }
    }

    fn logged(
        &self,
        effect: Effect,
        durability: Durability,
        operation: impl FnOnce() -> Pending<io::Result<()>>,
    ) -> Pending<io::Result<()>> {
        let durable = durability == Durability::Durable;
        let index = self.log.issue(self.index, effect, durable);
        let log = self.log.clone();
        let (to, waiting) = pending();
        let running = operation();
        spawn(async move {
            let outcome = running.await;
            match &outcome {
                Ok(()) => log.complete(index),
                Err(error) if error.kind() == io::ErrorKind::Unsupported => log.withdraw(index),
                Err(error) => panic!("the host failed: {error}"),
            }
            to.complete(outcome);
        });
        waiting
    }
}

impl BlockFile for LoggedFile {
    cowslip_block::forward_to_file!(inner: name, capabilities, id, len, memory_alignment, read, extents, allocated_bytes, free_bytes);

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> Pending<io::Result<()>> {
        let bytes = data.to_vec();
        let effect = Effect::Write {
            offset,
            data: bytes,
        };
        self.logged(effect, durability, || {
            self.inner.write(offset, data, durability)
        })
    }

    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>> {
        if !self.capabilities().zeroes_fast {
            // It would be refused, and change nothing.
            return self.inner.zero(offset, len, space);
        }
        let effect = Effect::Zero { offset, len };
        self.logged(effect, Durability::Cached, || {
            self.inner.zero(offset, len, space)
        })
    }

    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        if !self.capabilities().punches_holes {
            return self.inner.discard(offset, len);
        }
        let effect = Effect::Zero { offset, len };
        self.logged(effect, Durability::Cached, || {
            self.inner.discard(offset, len)
        })
    }

    fn allocate(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        let effect = Effect::Allocate { end: offset + len };
        self.logged(effect, Durability::Cached, || {
            self.inner.allocate(offset, len)
        })
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        self.logged(Effect::Flush, Durability::Cached, || self.inner.flush())
    }

    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        let effect = Effect::SetLen(len);
        self.logged(effect, Durability::Cached, || self.inner.set_len(len))
    }
}
