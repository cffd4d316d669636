//! Claims on host files, published to other processes in QEMU's way: shared locks on single bytes
//! that belong to the open file description.
//!
//! A permission that is held locks byte 100 + its number, one that is not shared byte 200 + its
//! number. All locks are shared ones, so taking them never fails because of another claim; a
//! conflict is found by querying afterwards whether others have locked the opposite bytes. The
//! later process always sees the earlier one: of two that come together both may be refused, but
//! never both admitted.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use cowslip_queue::lock;
use rustix::io::Errno;

use crate::file::{Claim, Conflict, Permissions, Protection, Side};
use crate::sync::{self, Mutex};
use crate::{Error, Result};

/// Whether claims are made known by locks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Locking {
    /// Locks are taken where the file system has them.
    #[default]
    Auto,
    /// Locks are taken; a file system without them is an error.
    On,
    /// No locks are taken.
    Off,
}

const HELD_BASE: u64 = 100;
const UNSHARED_BASE: u64 = 200;

/// Locks on single bytes of one open file; the seam at which tests put a file system without them.
pub(super) trait ByteLocks {
    fn share(&self, byte: u64) -> io::Result<()>;
    fn release(&self, byte: u64) -> io::Result<()>;
    fn is_locked_by_others(&self, byte: u64) -> io::Result<bool>;
}

impl ByteLocks for BorrowedFd<'_> {
    fn share(&self, byte: u64) -> io::Result<()> {
        lock::share(*self, byte, 1)
    }

    fn release(&self, byte: u64) -> io::Result<()> {
        lock::release(*self, byte, 1)
    }

    fn is_locked_by_others(&self, byte: u64) -> io::Result<bool> {
        lock::is_locked_by_others(*self, byte, 1)
    }
}

/// Whether others are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Other holders are asked: their claims may forbid ours.
    Others,
    /// Other holders are not asked: another open file of this process has the same claim, and has
    /// asked.
    Nobody,
    /// Other holders are asked when the claim is made the next time, even if it does not change:
    /// the process that hands the file over holds its own until then.
    Later,
}

/// The claim of one open file.
#[derive(Debug)]
pub(super) struct Claims {
    locking: Locking,
    current: Mutex<Current>,
}

#[derive(Debug)]
struct Current {
    claim: Claim,
    /// Whether others are still to be asked.
    is_unasked: bool,
}

/// Why a claim could not be made.
#[derive(Debug)]
enum Refusal {
    Conflict {
        byte: u64,
        side: Side,
        permission: crate::file::Permission,
    },
    /// Locking this byte failed.
    System(u64, io::Error),
}

impl Claims {
    pub(super) fn new(locking: Locking) -> Claims {
        Claims {
            locking,
            current: Mutex::new(Current {
                claim: Claim::NONE,
                is_unasked: false,
            }),
        }
    }

    pub(super) fn current(&self) -> Claim {
        sync::lock(&self.current).claim
    }

    /// Changes the claim to `wanted`, or leaves it as it was.
    pub(super) fn change(
        &self,
        locks: &(impl ByteLocks + AsFd),
        name: &str,
        (wanted, ask): (Claim, Ask),
    ) -> Result<Protection> {
        let mut current = sync::lock(&self.current);
        let is_due = current.is_unasked && ask == Ask::Others;
        if self.locking == Locking::Off || (current.claim == wanted && !is_due) {
            current.claim = wanted;
            return Ok(Protection::Claimed);
        }
        match change(locks, (current.claim, wanted), ask) {
            Ok(()) => {
                current.claim = wanted;
                current.is_unasked = match ask {
                    Ask::Others => false,
                    Ask::Nobody => current.is_unasked,
                    Ask::Later => true,
                };
                Ok(Protection::Claimed)
            }
            Err(Refusal::System(_, error))
                if self.locking == Locking::Auto && lacks_locks(&error) =>
            {
                Ok(Protection::Unprotected(crate::error::system_words(&error)))
            }
            Err(Refusal::System(byte, error)) => Err(Error::io(
                format!("Failed to lock byte {byte} of '{name}'"),
                error,
            )),
            Err(Refusal::Conflict {
                byte,
                side,
                permission,
            }) => Err(Error::Locked(Box::new(Conflict {
                file: name.to_string(),
                context: String::new(),
                permission,
                side,
                holders: holders(locks.as_fd(), byte),
            }))),
        }
    }
}

/// Whether a file system without locks answers so.
fn lacks_locks(error: &io::Error) -> bool {
    let lacking = [
        Errno::INVAL,
        Errno::NOLCK,
        Errno::OPNOTSUPP,
        Errno::NOSYS,
        Errno::NOTTY,
    ];
    let number = error.raw_os_error();
    lacking
        .iter()
        .any(|errno| Some(errno.raw_os_error()) == number)
}

/// The bytes that are locked for a claim.
fn bytes(claim: Claim) -> impl Iterator<Item = u64> {
    let of = |base: u64, set: Permissions| set.iter().map(move |p| base + u64::from(p.index()));
    of(HELD_BASE, claim.held).chain(of(UNSHARED_BASE, claim.shared.others()))
}

/// Takes what is new, then asks, and only then lets go: of what is wanted no more, or, after a
/// refusal, of what was new.
fn change(
    locks: &impl ByteLocks,
    (current, wanted): (Claim, Claim),
    ask: Ask,
) -> std::result::Result<(), Refusal> {
    let had: Vec<u64> = bytes(current).collect();
    let wants: Vec<u64> = bytes(wanted).collect();
    let release_all_but = |kept: &[u64], from: &[u64]| {
        for byte in from.iter().filter(|byte| !kept.contains(byte)) {
            // Locks that cannot be released go when the file is closed.
            drop(locks.release(*byte));
        }
    };
    let mut outcome = Ok(());
    for byte in wants.iter().filter(|byte| !had.contains(byte)) {
        if let Err(error) = locks.share(*byte) {
            outcome = Err(Refusal::System(*byte, error));
            break;
        }
    }
    if outcome.is_ok() && ask == Ask::Others {
        outcome = find_conflict(locks, wanted);
    }
    match &outcome {
        Ok(()) => release_all_but(&wants, &had),
        Err(_) => release_all_but(&had, &wants),
    }
    outcome
}

fn find_conflict(locks: &impl ByteLocks, wanted: Claim) -> std::result::Result<(), Refusal> {
    let sides = [
        (UNSHARED_BASE, wanted.held, Side::Held),
        (HELD_BASE, wanted.shared.others(), Side::Shared),
    ];
    for (base, permissions, side) in sides {
        for permission in permissions.iter() {
            let byte = base + u64::from(permission.index());
            match locks.is_locked_by_others(byte) {
                Ok(false) => {}
                Ok(true) => {
                    return Err(Refusal::Conflict {
                        byte,
                        side,
                        permission,
                    });
                }
                Err(error) => return Err(Refusal::System(byte, error)),
            }
        }
    }
    Ok(())
}

/// The programs that have locked `byte` of this file, as far as this process may know.
///
/// The kernel names no process for locks that belong to open files, but shows each process which of
/// its descriptors have locks.
fn holders(file: BorrowedFd<'_>, byte: u64) -> Vec<String> {
    let Ok(stat) = rustix::fs::fstat(file) else {
        return Vec::new();
    };
    let Ok(processes) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for process in processes.flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        if has_locked(&process.path(), (stat.st_dev, stat.st_ino), byte) {
            found.push(described(&process.path(), pid));
        }
    }
    found
}

/// Whether a descriptor of this process is the file and has locked the byte. No to what is hidden.
fn has_locked(process: &Path, (device, inode): (u64, u64), byte: u64) -> bool {
    let Ok(descriptors) = fs::read_dir(process.join("fdinfo")) else {
        return false;
    };
    descriptors.flatten().any(|descriptor| {
        let Ok(info) = fs::read_to_string(descriptor.path()) else {
            return false;
        };
        let locked = info.lines().any(|line| locks_byte(line, inode, byte));
        locked
            && fs::metadata(process.join("fd").join(descriptor.file_name()))
                .is_ok_and(|file| (file.dev(), file.ino()) == (device, inode))
    })
}

/// Whether a line of `fdinfo` is about this byte of a file of this number:
/// `lock: 1: OFDLCK  ADVISORY  READ -1 fe:00:1234 100 101`.
fn locks_byte(line: &str, inode: u64, byte: u64) -> bool {
    let Some(line) = line.strip_prefix("lock:") else {
        return false;
    };
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [.., file, start, end] = fields[..] else {
        return false;
    };
    let of_inode = file.rsplit(':').next() == Some(inode.to_string().as_str());
    let start = start.parse::<u64>();
    let end = if end == "EOF" {
        Ok(u64::MAX)
    } else {
        end.parse::<u64>()
    };
    of_inode && matches!((start, end), (Ok(start), Ok(end)) if (start..=end).contains(&byte))
}

/// "qemu-nbd (pid 17)".
fn described(process: &Path, pid: u32) -> String {
    if pid == std::process::id() {
        return format!("this process (pid {pid})");
    }
    let program = fs::read_link(process.join("exe"));
    let program = program.ok().and_then(|path| {
        let name = path.file_name()?.to_string_lossy().into_owned();
        Some(name.trim_end_matches(" (deleted)").to_string())
    });
    let program = program.or_else(|| {
        let name = fs::read_to_string(process.join("comm")).ok()?;
        Some(name.trim().to_string())
    });
    match program {
        Some(program) => format!("{program} (pid {pid})"),
        None => format!("pid {pid}"),
    }
}

#[cfg(test)]
mod tests;
