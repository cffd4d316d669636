//! Files of random layout, and what they are at a moment: length, blocks, holes, bytes.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use cowslip_queue::space::holes;
use rustix::fs::{FallocateFlags, fallocate};

use crate::support::rng::Rng;

/// All that must be as before when an allocation has not come about.
#[derive(Clone, PartialEq, Eq)]
pub struct State {
    pub len: u64,
    pub blocks: u64,
    pub holes: Vec<std::ops::Range<u64>>,
    pub bytes: Vec<u8>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let State { len, blocks, .. } = self;
        write!(f, "{len} bytes, {blocks} blocks, {:?}", self.holes)
    }
}

impl State {
    /// Of a file, once all of it is written back; holes up to `until`.
    pub fn of(path: &Path, until: u64) -> State {
        let file = File::open(path).unwrap();
        file.sync_all().unwrap();
        let found = file.metadata().unwrap();
        let ranges = holes(&file, 0..until, usize::MAX).unwrap().ranges;
        State {
            len: found.len(),
            blocks: found.blocks(),
            holes: ranges,
            bytes: std::fs::read(path).unwrap(),
        }
    }

    /// Whether the first bytes are these, and zeroes follow.
    pub fn extends(&self, before: &State) -> bool {
        let (old, new) = self.bytes.split_at(before.bytes.len());
        old == before.bytes && new.iter().all(|byte| *byte == 0)
    }
}

/// Makes a file of random data and holes, some of it allocated and never written if the file system
/// can.
pub fn make(path: &Path, rng: &mut Rng, unwritten: bool) {
    let file = File::create(path).unwrap();
    let pieces = 14;
    for piece in 0..pieces {
        let at = piece * (1 << 20) + rng.below(64) * 4096;
        let len = 1 + rng.below(200_000);
        match rng.below(4) {
            0 => {}
            1 if unwritten => {
                let keeps = FallocateFlags::KEEP_SIZE;
                // Not every file system has it, and then it is a hole.
                fallocate(&file, keeps, at, len).ok();
            }
            _ => file.write_all_at(&rng.bytes(len as usize), at).unwrap(),
        }
    }
    if rng.once_in(2) {
        file.set_len(pieces * (1 << 20) + rng.below(100_000))
            .unwrap();
    }
    file.sync_all().unwrap();
}
