//! The values that a disk may read as while several threads write to it, sector by sector.
//!
//! Every write puts its own number into each sector, so a sector identifies its write. A value may
//! be read from the moment its write began, until another write that began after it had ended has
//! ended itself before the read began. The values that may be left by a crash follow the same rule:
//! a value is impossible once a later one was durable.

#![allow(dead_code)] // Shared by tests that use parts of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The unit in which writes are atomic.
pub const SECTOR_BYTES: usize = 512;
const WORDS: usize = SECTOR_BYTES / 8;

/// The value of a sector of zeroes.
pub const ZEROES: u64 = 0;

/// The writes that a sector may hold.
#[derive(Clone, Copy, Debug)]
struct Record {
    value: u64,
    begun: u64,
    /// `None` while the write is under way, and for ever if it failed.
    ended: Option<u64>,
    durable: bool,
}

#[derive(Clone, Default)]
struct Inner {
    clock: u64,
    sectors: Vec<Vec<Record>>,
    /// The beginnings of reads under way.
    reads: BTreeMap<u64, u32>,
    /// Sectors that may hold anything: a write to them was dropped half way.
    undefined: BTreeSet<usize>,
}

/// The history of a disk.
pub struct History(Mutex<Inner>);

/// A write under way.
#[must_use = "a write ends, or may show for ever"]
pub struct Writing {
    begun: u64,
    sectors: std::ops::Range<usize>,
}

/// A read under way.
#[must_use = "a read ends"]
pub struct Reading {
    begun: u64,
    first: usize,
}

/// The word at `index` of a sector that was written with `value`.
fn word(value: u64, sector: usize, index: usize) -> u64 {
    if value == ZEROES {
        return 0;
    }
    match index % 2 {
        0 => value,
        _ => (value ^ (sector as u64) << 32 ^ index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15),
    }
}

/// The bytes of sectors from `first` on, written with `value`.
pub fn content(value: u64, first: usize, sectors: usize) -> Vec<u8> {
    (first..first + sectors)
        .flat_map(|sector| (0..WORDS).map(move |index| word(value, sector, index)))
        .flat_map(u64::to_le_bytes)
        .collect()
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let chunks = bytes.chunks_exact(8);
    chunks.map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
}

fn reads_as(bytes: &[u8], sector: usize, value: u64) -> bool {
    words(bytes)
        .enumerate()
        .all(|(index, found)| found == word(value, sector, index))
}

impl Inner {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Values that a read from `begun` on may have seen.
    fn candidates(&self, sector: usize, begun: u64) -> impl Iterator<Item = Record> + '_ {
        let records = &self.sectors[sector];
        records.iter().copied().filter(move |record| {
            !records.iter().any(|later| {
                record.ended.is_some_and(|ended| ended < later.begun)
                    && later.ended.is_some_and(|ended| ended < begun)
            })
        })
    }

    /// Forgets what neither a read under way nor a crash can bring back.
    fn prune(&mut self, sector: usize) {
        let horizon = self.reads.keys().next().copied().unwrap_or(u64::MAX);
        let records = std::mem::take(&mut self.sectors[sector]);
        let kept = records.iter().filter(|record| {
            !records.iter().any(|later| {
                later.durable
                    && record.ended.is_some_and(|ended| ended < later.begun)
                    && later.ended.is_some_and(|ended| ended < horizon)
            })
        });
        self.sectors[sector] = kept.copied().collect();
    }
}

impl History {
    /// Returns the history of a disk of `sectors` sectors, each of which reads as `initial`,
    /// durably.
    pub fn new(sectors: usize, initial: u64) -> History {
        let record = Record {
            value: initial,
            begun: 0,
            ended: Some(0),
            durable: true,
        };
        History(Mutex::new(Inner {
            clock: 1,
            sectors: vec![vec![record]; sectors],
            reads: BTreeMap::new(),
            undefined: BTreeSet::new(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As it is now, to be asked later.
    pub fn snapshot(&self) -> History {
        History(Mutex::new(self.lock().clone()))
    }

    /// A number for a write, not used before.
    pub fn fresh_value(&self) -> u64 {
        self.lock().tick() + 1_000_000
    }

    /// A write of `value` begins.
    pub fn begin_write(&self, sectors: std::ops::Range<usize>, value: u64) -> Writing {
        let mut inner = self.lock();
        let begun = inner.tick();
        for sector in sectors.clone() {
            inner.sectors[sector].push(Record {
                value,
                begun,
                ended: None,
                durable: false,
            });
        }
        Writing { begun, sectors }
    }

    /// A write has ended well. One that failed is never ended: it may show or not.
    pub fn end_write(&self, writing: Writing, durable: bool) {
        let mut inner = self.lock();
        let now = inner.tick();
        for sector in writing.sectors {
            let record = inner.sectors[sector]
                .iter_mut()
                .find(|record| record.begun == writing.begun)
                .expect("a write under way is remembered");
            (record.ended, record.durable) = (Some(now), durable);
            inner.prune(sector);
        }
    }

    /// A flush begins.
    pub fn begin_flush(&self) -> u64 {
        self.lock().tick()
    }

    /// A flush that began at `begun` has ended well.
    pub fn end_flush(&self, begun: u64) {
        let mut inner = self.lock();
        for sector in 0..inner.sectors.len() {
            for record in &mut inner.sectors[sector] {
                record.durable |= record.ended.is_some_and(|ended| ended < begun);
            }
            inner.prune(sector);
        }
    }

    /// A write that may be dropped half way begins.
    pub fn undefine(&self, sectors: std::ops::Range<usize>) {
        self.lock().undefined.extend(sectors);
    }

    /// A read begins.
    pub fn begin_read(&self, first: usize) -> Reading {
        let mut inner = self.lock();
        let begun = inner.tick();
        *inner.reads.entry(begun).or_default() += 1;
        Reading { begun, first }
    }

    /// Checks the data that a read returned.
    ///
    /// # Errors
    /// A description of a value that no order of the writes explains.
    pub fn end_read(&self, reading: Reading, bytes: &[u8]) -> Result<(), String> {
        let mut inner = self.lock();
        inner.reads.remove(&reading.begun);
        for (index, found) in bytes.chunks_exact(SECTOR_BYTES).enumerate() {
            let sector = reading.first + index;
            let candidates: Vec<Record> = inner.candidates(sector, reading.begun).collect();
            let known = candidates.iter().any(|c| reads_as(found, sector, c.value));
            if known || inner.undefined.contains(&sector) {
                continue;
            }
            // Files of the host do not keep a read from seeing half of a write beside it.
            let beside = candidates
                .iter()
                .any(|c| c.ended.is_none_or(|ended| ended > reading.begun));
            let explained = words(found).enumerate().all(|(at, found)| {
                candidates
                    .iter()
                    .any(|candidate| word(candidate.value, sector, at) == found)
            });
            if !(beside && explained) {
                return Err(describe(found, sector, &inner.sectors[sector]));
            }
        }
        Ok(())
    }

    /// Checks the whole disk while no request is under way.
    ///
    /// # Errors
    /// As [`History::end_read`].
    pub fn verify_at_rest(&self, bytes: &[u8]) -> Result<(), String> {
        let reading = self.begin_read(0);
        self.end_read(reading, bytes)
    }

    /// Checks the whole disk after a crash.
    ///
    /// # Errors
    /// A description of a value that is older than a durable one, or was never written.
    pub fn verify_after_crash(&self, bytes: &[u8]) -> Result<(), String> {
        let inner = self.lock();
        for (sector, found) in bytes.chunks_exact(SECTOR_BYTES).enumerate() {
            if inner.undefined.contains(&sector) {
                continue;
            }
            let records = &inner.sectors[sector];
            let possible = records.iter().filter(|record| {
                !records.iter().any(|later| {
                    later.durable && record.ended.is_some_and(|ended| ended < later.begun)
                })
            });
            if !possible
                .into_iter()
                .any(|r| reads_as(found, sector, r.value))
            {
                return Err(describe(found, sector, records));
            }
        }
        Ok(())
    }
}

fn describe(found: &[u8], sector: usize, records: &[Record]) -> String {
    let begins: Vec<u64> = words(found).step_by(2).collect();
    let mut values = begins.clone();
    values.dedup();
    format!("sector {sector} reads as {values:?}; its history: {records:?}")
}
