//! A file system that has been used: filled with small files, of which a random part is removed.
//! The same seed, so the same files on each.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use cowslip_console::error::{CommandError, failed};
use cowslip_queue::space::{FillMethod, give};
use cowslip_testbed::Random;

const SEED: u64 = 0x5EED_0003;
/// Files from 16 KiB to 2 MiB, each power of two as likely as another.
const SIZES: (u64, u64) = (14, 7);
/// Full is what has less than a thirtieth left.
const FULL_PART: u64 = 30;

/// Fills the file system of a directory with files there, and removes random ones until
/// `free_bytes` are free.
///
/// # Errors
/// An error of the file system, or it is too small to have that much free.
pub fn age(directory: &Path, free_bytes: u64) -> Result<(), CommandError> {
    let home = directory.join("aged");
    let failed = |error: io::Error| failed("age", &home, &error);
    fs::create_dir(&home).map_err(failed)?;
    let mut random = Random::new(SEED);
    let mut files = fill(&home, &mut random).map_err(failed)?;
    let sync = || -> io::Result<()> { Ok(rustix::fs::syncfs(File::open(&home)?)?) };
    sync().map_err(failed)?;
    while space(&home).map_err(failed)?.0 < free_bytes {
        // Removed space is free when the removal is written back, on some; so several at a time.
        for _ in 0..16 {
            if files.is_empty() {
                let text = format!("'{}' is too small to be aged", home.display());
                return Err(CommandError::new(text));
            }
            let index = random.below(files.len() as u64) as usize;
            let file = files.swap_remove(index);
            fs::remove_file(file).map_err(failed)?;
        }
        if files.len().is_multiple_of(256) || files.len() < 256 {
            sync().map_err(failed)?;
        }
    }
    sync().map_err(failed)
}

/// Free bytes and all.
fn space(directory: &Path) -> io::Result<(u64, u64)> {
    let system = rustix::fs::statvfs(directory)?;
    let bytes = |blocks: u64| blocks.saturating_mul(system.f_frsize);
    Ok((bytes(system.f_bavail), bytes(system.f_blocks)))
}

fn fill(home: &Path, random: &mut Random) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    loop {
        let (free, all) = space(home)?;
        if free < all / FULL_PART {
            return Ok(files);
        }
        let path = home.join(files.len().to_string());
        let (smallest, kinds) = SIZES;
        let size = 1 << (smallest + random.below(kinds + 1));
        let file = File::create(&path)?;
        files.push(path);
        let chunk_bytes = 2 << 20;
        match give(&file, 0..size, FillMethod::Writes { chunk_bytes }) {
            Ok(_) => {}
            // btrfs says so before its figures do.
            Err(error) if error.kind() == io::ErrorKind::StorageFull => return Ok(files),
            Err(error) => return Err(error),
        }
    }
}
