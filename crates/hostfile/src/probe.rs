//! A trial of the calls for space of a directory's file system, on a scratch file there that has no
//! name or loses it at once.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use cowslip_queue::fiemap::{self, Flags};
use cowslip_queue::space::{FillMethod, give};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::allocate::{Abilities, LibraryMakes, ZeroesTake};
use crate::scratch::unnamed;
use crate::{Error, Result};

/// Bytes of each trial: more than file systems keep beside metadata, fewer than anybody misses.
const TRIAL_BYTES: u64 = 1 << 20;
/// Bytes of the trial in which libc may write.
const LIBRARY_BYTES: u64 = 64 << 10;

/// Tries what the file system of `directory` does with each call for space. Blocks for a few
/// milliseconds, or as long as a megabyte takes to become durable.
///
/// # Errors
/// No file can be made there, or the file system has no room for the trial.
#[doc(hidden)]
pub fn probe_space(directory: &Path) -> Result<Abilities> {
    let failed = |error: io::Error| {
        let text = format!("Could not try a file in '{}'", directory.display());
        Error::io(text, error)
    };
    let file = unnamed(directory).map_err(|error| failed(error.into()))?;
    let written = unnamed(directory).map_err(|error| failed(error.into()))?;
    abilities(&file, &written).map_err(failed)
}

/// Whether a file of `directory` can have this length. Blocks, not for long.
///
/// # Errors
/// No file can be made there.
#[doc(hidden)]
pub fn takes_length(directory: &Path, len: u64) -> Result<bool> {
    let failed = |error: io::Error| {
        let text = format!("Could not make a file in '{}'", directory.display());
        Error::io(text, error)
    };
    let scratch = unnamed(directory).map_err(|error| failed(error.into()))?;
    match rustix::fs::ftruncate(&scratch, len) {
        Ok(()) => Ok(true),
        Err(Errno::FBIG | Errno::INVAL | Errno::OVERFLOW) => Ok(false),
        Err(error) => Err(failed(error.into())),
    }
}

fn space_of(file: &OwnedFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(file)?.st_blocks as u64 * 512)
}

/// Whether a call works; a full file system is a failure of the trial.
fn works(result: rustix::io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error @ (Errno::NOSPC | Errno::DQUOT)) => Err(error.into()),
        Err(_) => Ok(false),
    }
}

/// Tries one file with each call, and another, which btrfs may still compress, with written zeroes.
fn abilities(file: &OwnedFd, written: &OwnedFd) -> io::Result<Abilities> {
    let call = |flags, offset| {
        let result = rustix::fs::fallocate(file, flags, offset, TRIAL_BYTES);
        works(result)
    };
    let fallocate = call(FallocateFlags::empty(), 0)?;
    let fallocate_takes_space = fallocate && space_of(file)? >= TRIAL_BYTES;
    let keeps_end = call(FallocateFlags::KEEP_SIZE, TRIAL_BYTES)?;
    rustix::fs::ftruncate(file, 0)?;
    let library = library_makes(file, fallocate)?;
    rustix::fs::ftruncate(file, 0)?;
    Ok(Abilities {
        fallocate,
        fallocate_takes_space,
        keeps_end,
        library,
        zeroes: zeroes_take(written)?,
    })
}

fn library_makes(file: &OwnedFd, fallocate: bool) -> io::Result<LibraryMakes> {
    let calls = match give(file, 0..LIBRARY_BYTES, FillMethod::Library) {
        Ok(calls) => calls,
        Err(error) if is_full(&error) => return Err(error),
        Err(_) => return Ok(LibraryMakes::Nothing),
    };
    Ok(match (calls.writes, fallocate) {
        (Some(0), _) | (None, true) => LibraryMakes::KernelCall,
        (Some(_), _) | (None, false) => LibraryMakes::Writes,
    })
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::NOSPC | Errno::DQUOT)
    )
}

fn zeroes_take(file: &OwnedFd) -> io::Result<ZeroesTake> {
    let whole = FillMethod::Writes {
        chunk_bytes: TRIAL_BYTES as usize,
    };
    give(file, 0..TRIAL_BYTES, whole)?;
    rustix::fs::fdatasync(file)?;
    // btrfs counts compressed data as long as it reads.
    let first = fiemap::records(file, fiemap::Sync::First).next();
    let is_encoded = matches!(first, Some(Ok(record)) if record.flags.has(Flags::ENCODED));
    Ok(match space_of(file)? >= TRIAL_BYTES && !is_encoded {
        true => ZeroesTake::Space,
        false => ZeroesTake::Less,
    })
}
