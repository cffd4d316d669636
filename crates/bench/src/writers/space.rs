//! The sizes of the mail that asked first, without its data: what writers of 64 GiB would allocate,
//! on file systems of 15 TiB.
//!
//! Where data comes to lie is decided by the allocations alone, and with space ahead those are few.
//! So they are made for real, by a real file system on a sparse file, and nothing is written: a run
//! takes seconds and some hundred megabytes. The writers' turns are drawn: each gets a step when
//! its turn comes, which is as bad an order as there is.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use cowslip::growth::{Ahead, Refill, Rule};
use cowslip_testbed::Random;
use rustix::fs::{FallocateFlags, fallocate};

use super::cell::{Cell, Help, WRITE_BYTES};
use super::stream::free_bytes;

/// Size that each writer would write.
pub const FILE_BYTES: u64 = 64 << 30;
/// The file systems; ext4 below has files of up to 16 TiB.
pub const FILESYSTEM_BYTES: u64 = 15 << 40;

/// Allocates what the cell's writers would; the files, of their full length.
///
/// # Errors
/// The file system's.
pub fn allocate(cell: &Cell, directory: &Path, seed: u64) -> io::Result<Vec<PathBuf>> {
    let rule = match cell.help {
        Help::Rule(rule) => rule,
        _ => Rule::None,
    };
    let names = (0..cell.writers).map(|number| directory.join(number.to_string()));
    let paths: Vec<PathBuf> = names.collect();
    let mut writers = Vec::new();
    for path in &paths {
        writers.push((File::create_new(path)?, Ahead::new(rule, 0), 0));
    }
    let mut random = Random::new(seed);
    // Bytes ahead of all files at the moment.
    let mut held = 0;
    while !writers.is_empty() {
        let turn = usize::try_from(random.below(writers.len() as u64)).unwrap_or(0);
        let (file, ahead, at) = &mut writers[turn];
        // All that was ahead of him is written by now, and a write more is due.
        held -= ahead.held_bytes(*at);
        *at += ahead.held_bytes(*at);
        file.set_len((*at).min(FILE_BYTES))?;
        if *at >= FILE_BYTES {
            // Space behind goes when a file is cut at the length that it has.
            file.set_len(FILE_BYTES)?;
            drop(writers.swap_remove(turn));
            continue;
        }
        let free = free_bytes(file)?.saturating_sub(held);
        let step = ahead.next(*at, WRITE_BYTES, Refill::WhenUsedUp, Some(free));
        let step = step.unwrap_or(*at..*at + WRITE_BYTES);
        let len = step.end - step.start;
        fallocate(&*file, FallocateFlags::KEEP_SIZE, step.start, len)?;
        ahead.granted(&step);
        held += ahead.held_bytes(*at);
    }
    Ok(paths)
}
