//! A file that other programs write: opened without following links, given space behind its end,
//! and truncated at its end when no other program has it open.
//!
//! No byte and no length that a program sees is ever changed. Space is allocated with
//! `FALLOC_FL_KEEP_SIZE`, which touches neither. Freeing it is the dangerous part: a length that
//! was read is stale as soon as a program appends, and both `ftruncate` and a punched hole would
//! then remove new data. So it is done under a lease ([`cowslip_queue::lease`]), which the kernel
//! grants only while no other program has the file open, and which delays other opens; directly
//! before the truncation the lease is checked once more.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use cowslip_queue::fiemap::beyond_end_bytes;
use cowslip_queue::lease::{self, Ended};
use rustix::fs::{
    FallocateFlags, FileType, Mode, OFlags, Stat, Timespec, Timestamps, fallocate, fgetxattr,
    fstat, ftruncate, futimens, openat,
};
use rustix::io::Errno;

/// Why a file is left alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The file does not exist, or not any more.
    Gone,
    /// A directory, a symbolic link, a device …
    NotRegular,
    /// Another process holds a lease on it, or runs it: for now.
    Busy,
    /// Another reason, in words.
    For(String),
}

/// Result of a request for space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allocated {
    /// All of the space is allocated.
    All,
    /// The file system, or a quota, is full; a part of it may be there.
    Full,
    /// The space will not be there the next time either; the reason, in words.
    Never(String),
}

/// Result of giving back the space behind the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trimmed {
    /// The file ends where its space does.
    Done {
        /// The file's length.
        size: u64,
        /// Bytes that were given back.
        given_back: u64,
        /// Bytes that the file system keeps all the same.
        left: u64,
    },
    /// Another process has the file open, or waits for it.
    InUse,
    /// The file was cut, but so late that the kernel may have let in a waiting opener.
    Late,
}

/// Why space stays behind an end that was cut.
pub const KEPT_BY_SYSTEM: &str = "its file system keeps space beyond an end that does not move";

/// Warning of a cut that came late.
pub const CUT_LATE: &str = "it was truncated so late that another program may have opened it \
                            (/proc/sys/fs/lease-break-time): data that this has appended may be lost";

/// Identity of a file, whatever its name.
pub type Id = (u64, u64);

/// Returns the identity from a file's status.
pub fn id(stat: &Stat) -> Id {
    (stat.st_dev, stat.st_ino)
}

/// The length of a file in bytes.
pub fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

/// The space that it has, in bytes.
pub fn space(stat: &Stat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0) * 512
}

/// The rights that an allocation or a truncation would remove from the file: the kernel strips
/// set-ID bits and capabilities of a program when its file is changed, by any process.
fn rights_at_stake(file: &File) -> Result<Option<&'static str>, Errno> {
    let mode = Mode::from_raw_mode(fstat(file)?.st_mode);
    if mode.contains(Mode::SUID) {
        return Ok(Some("the bit set-user-ID"));
    }
    if mode.contains(Mode::SGID | Mode::XGRP) {
        return Ok(Some("the bit set-group-ID"));
    }
    let mut nothing = [0_u8; 0];
    match fgetxattr(file, "security.capability", &mut nothing) {
        Ok(_) => Ok(Some("capabilities")),
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS | Errno::ACCESS | Errno::PERM) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Why a file is not touched at all.
fn protected(file: &File) -> Option<String> {
    match rights_at_stake(file) {
        Ok(None) => None,
        Ok(Some(rights)) => Some(format!("it has {rights}, which a change would remove")),
        Err(error) => Some(words(error)),
    }
}

/// Whether it is a regular file.
pub fn is_regular(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

fn words(error: Errno) -> String {
    cowslip::error::system_words(&io::Error::from(error))
}

/// A file by which it is known that it is the same, whatever its name, and that does not count as
/// open.
#[derive(Debug)]
pub struct Handle(OwnedFd);

/// Whether anybody else has a file open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Not in use.
    Nobody,
    /// In use by another process.
    InUse,
}

fn refused(error: Errno) -> Refused {
    match error {
        Errno::NOENT | Errno::NXIO => Refused::Gone,
        // NONBLOCK and a lease of another process; a program that runs.
        Errno::AGAIN | Errno::TXTBSY => Refused::Busy,
        error => Refused::For(words(error)),
    }
}

impl Handle {
    /// Finds a regular file of a directory, not through a symbolic link. Has no effect on other
    /// kinds of files: opening a device or a FIFO would have one.
    ///
    /// # Errors
    /// There is none.
    pub fn find(directory: impl AsFd, name: &OsStr) -> Result<Handle, Refused> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let handle = openat(directory, name, flags, Mode::empty()).map_err(refused)?;
        let handle = Handle(handle);
        match is_regular(&handle.stat().map_err(refused)?) {
            true => Ok(handle),
            false => Err(Refused::NotRegular),
        }
    }

    /// The status of the file, now.
    ///
    /// # Errors
    /// The file system's.
    pub fn stat(&self) -> rustix::io::Result<Stat> {
        fstat(&self.0)
    }

    /// Opens it for allocating, if space could be given back, too.
    ///
    /// # Errors
    /// Why it is left alone.
    pub fn open(&self) -> Result<(File, Use), Refused> {
        let name = format!("/proc/self/fd/{}", self.0.as_raw_fd());
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = rustix::fs::open(name, flags, Mode::empty()).map_err(refused)?;
        let file = File::from(file);
        if let Some(why) = protected(&file) {
            return Err(Refused::For(why));
        }
        let used = match lease::take_alone(&file) {
            Ok(Some(_)) => Use::Nobody,
            Ok(None) => Use::InUse,
            Err(error) => {
                let why = match error.raw_os_error() {
                    Some(libc::EINVAL | libc::EOPNOTSUPP) => {
                        "leases on its file system do not cover all processes that may open it"
                            .to_string()
                    }
                    Some(libc::EACCES) => "it is another user's".to_string(),
                    _ => cowslip::error::system_words(&error),
                };
                return Err(Refused::For(format!(
                    "{why}, so that space could not be freed safely"
                )));
            }
        };
        Ok((file, used))
    }
}

/// Allocates a range behind a file's end. Its length stays.
pub fn allocate(file: &File, range: &Range<u64>) -> Allocated {
    if let Some(why) = protected(file) {
        return Allocated::Never(why);
    }
    loop {
        let len = range.end - range.start;
        return match fallocate(file, FallocateFlags::KEEP_SIZE, range.start, len) {
            Ok(()) => Allocated::All,
            Err(Errno::INTR) => continue,
            Err(Errno::NOSPC | Errno::DQUOT) => Allocated::Full,
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                Allocated::Never("its file system allocates no space beyond the end".to_string())
            }
            Err(error) => Allocated::Never(words(error)),
        };
    }
}

/// Gives back what lies behind the end, if nobody else has the file open.
///
/// # Errors
/// The file system's.
pub fn trim(file: &File) -> io::Result<Trimmed> {
    let Some(lease) = lease::take_alone(file)? else {
        return Ok(Trimmed::InUse);
    };
    // From here on nobody can be writing: the length stays what it is.
    if let Some(why) = protected(file) {
        return Err(io::Error::other(why));
    }
    let before = fstat(file)?;
    if !lease.may_change()? {
        return Ok(Trimmed::InUse);
    }
    ftruncate(file, size(&before))?;
    let after = fstat(file)?;
    let time = |seconds, nanoseconds: u64| Timespec {
        tv_sec: seconds,
        tv_nsec: nanoseconds.cast_signed(),
    };
    let times = Timestamps {
        last_access: time(before.st_atime, before.st_atime_nsec),
        last_modification: time(before.st_mtime, before.st_mtime_nsec),
    };
    // Nothing of what the file holds was modified. Who may not set times still may give back space.
    futimens(file, &times).ok();
    // Not every file system looks beyond an end that stays where it is. Still under the lease:
    // bytes that are appended after it lie behind this end, too.
    let left = match beyond_end_bytes(file)? {
        Some(left) => left,
        None => beyond_end_by_blocks(&after),
    };
    if lease.give_back()? == Ended::Lost {
        return Ok(Trimmed::Late);
    }
    Ok(Trimmed::Done {
        size: size(&before),
        given_back: space(&before).saturating_sub(space(&after)),
        left,
    })
}

/// Bytes that the file has allocated beyond the need of its length, on file systems that do not
/// report extents. A small excess is the file system's own records.
fn beyond_end_by_blocks(stat: &Stat) -> u64 {
    const RECORDS_BYTES: u64 = 64 << 10;
    let block = u64::try_from(stat.st_blksize).unwrap_or(4096).max(1);
    let beyond = space(stat).saturating_sub(size(stat).next_multiple_of(block));
    if beyond > RECORDS_BYTES { beyond } else { 0 }
}
