//! Locks on ranges of a file's bytes that belong to the open file, not to the process.
//!
//! They keep out everybody else, another open file of the same process included, and end with the
//! last descriptor of the open file. None of the calls waits for a lock.

use std::io;
use std::os::fd::BorrowedFd;

use crate::sys::file_lock;

/// Takes a shared lock on `len` bytes from `start` on. Taking it again changes nothing.
///
/// # Errors
/// `EAGAIN` if another open file has an exclusive lock there; else the system cannot lock.
pub fn share(fd: BorrowedFd<'_>, start: u64, len: u64) -> io::Result<()> {
    file_lock(fd, libc::F_OFD_SETLK, libc::F_RDLCK, (start, len))?;
    Ok(())
}

/// Takes an exclusive lock on `len` bytes from `start` on, in place of a shared one that this open
/// file has there.
///
/// # Errors
/// `EAGAIN` if another open file has any lock there; else the system cannot lock.
pub fn exclude(fd: BorrowedFd<'_>, start: u64, len: u64) -> io::Result<()> {
    file_lock(fd, libc::F_OFD_SETLK, libc::F_WRLCK, (start, len))?;
    Ok(())
}

/// Lets go of any lock on `len` bytes from `start` on.
///
/// # Errors
/// The system cannot lock.
pub fn release(fd: BorrowedFd<'_>, start: u64, len: u64) -> io::Result<()> {
    file_lock(fd, libc::F_OFD_SETLK, libc::F_UNLCK, (start, len))?;
    Ok(())
}

/// Whether another open file has any lock on one of `len` bytes from `start` on.
///
/// # Errors
/// The system cannot lock.
pub fn is_locked_by_others(fd: BorrowedFd<'_>, start: u64, len: u64) -> io::Result<bool> {
    let found = file_lock(fd, libc::F_OFD_GETLK, libc::F_WRLCK, (start, len))?;
    Ok(found != libc::F_UNLCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn locks_are_seen_by_other_open_files_and_end_with_theirs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, "").unwrap();
        // An exclusive lock needs a file that is open for writing.
        let open = || std::fs::File::options().read(true).write(true).open(&path);
        let [one, two] = [(); 2].map(|()| open().unwrap());
        share(one.as_fd(), 100, 2).unwrap();
        assert!(!is_locked_by_others(one.as_fd(), 100, 2).unwrap());
        assert!(is_locked_by_others(two.as_fd(), 101, 1).unwrap());
        assert!(!is_locked_by_others(two.as_fd(), 102, 1).unwrap());
        share(two.as_fd(), 101, 1).unwrap();
        release(one.as_fd(), 101, 1).unwrap();
        assert!(!is_locked_by_others(two.as_fd(), 101, 1).unwrap());
        exclude(one.as_fd(), 100, 1).unwrap();
        assert!(share(two.as_fd(), 100, 1).is_err() && exclude(two.as_fd(), 100, 1).is_err());
        assert!(
            exclude(one.as_fd(), 101, 1).is_err(),
            "the other one shares it"
        );
        share(one.as_fd(), 100, 1).unwrap();
        share(two.as_fd(), 100, 1).unwrap();
        release(two.as_fd(), 100, 1).unwrap();
        let copy = one.try_clone().unwrap();
        drop(one);
        assert!(is_locked_by_others(two.as_fd(), 100, 1).unwrap());
        drop(copy);
        assert!(!is_locked_by_others(two.as_fd(), 100, 1).unwrap());
    }
}
