//! A moment alone with a file: `F_SETLEASE` with `F_WRLCK`.
//!
//! The kernel grants it only if nobody else has the file open, for reading or writing, or mapped; and from then on
//! holds up whoever opens or truncates it until the lease is given back (or the time of
//! `/proc/sys/fs/lease-break-time` is over, 45 s as a rule). So what is done meanwhile is done to a file that nobody
//! can be writing to, which no lock can say: those are kept by who knows of them.
//!
//! Who opens with `O_NONBLOCK` is not held up but refused with `EWOULDBLOCK`.
#![allow(unsafe_code)] // Two commands of fcntl that rustix lacks.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// `F_SETSIG` of asm-generic/fcntl.h, which libc lacks: which signal tells that somebody waits.
const F_SETSIG: libc::c_int = 10;

/// The file is ours alone while this lives.
#[derive(Debug)]
pub struct Lease<'a> {
    file: BorrowedFd<'a>,
}

/// Takes the lease on a file that is open for writing; `None` if somebody else has it open.
///
/// # Errors
/// `EACCES` if the file is another user's and the process lacks `CAP_LEASE`, `EINVAL` where the file system has no
/// leases.
pub fn take_alone(file: &impl AsFd) -> io::Result<Option<Lease<'_>>> {
    let file = file.as_fd();
    // Somebody waits for the file: SIGIO would end a process that does not expect it, SIGURG is ignored by default.
    control(file, F_SETSIG, libc::SIGURG)?;
    match control(file, libc::F_SETLEASE, libc::F_WRLCK) {
        Ok(()) => Ok(Some(Lease { file })),
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(None),
        Err(error) => Err(error),
    }
}

fn control(file: BorrowedFd<'_>, command: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: both commands take a number, and no address.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, value) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // Closing the file gives it back too, so a failure holds nobody up for long.
        drop(control(self.file, libc::F_SETLEASE, libc::F_UNLCK));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, OpenOptions};
    use std::time::{Duration, Instant};

    /// What a caller does who finds the file in use.
    fn is_free(file: &File) -> bool {
        // A process that forks beside us has our descriptors for a moment.
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(2) {
            if take_alone(file).expect("leases").is_some() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }

    #[test]
    fn nobody_is_alone_with_a_file_that_others_have_open() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, "a").unwrap();
        let open = || OpenOptions::new().read(true).write(true).open(&path);
        let ours = open().unwrap();
        assert!(is_free(&ours));
        let writer = OpenOptions::new().append(true).open(&path).unwrap();
        assert!(take_alone(&ours).unwrap().is_none());
        drop(writer);
        let reader = File::open(&path).unwrap();
        assert!(take_alone(&ours).unwrap().is_none());
        drop(reader);
        assert!(is_free(&ours));
    }

    #[test]
    fn whoever_opens_the_file_waits_for_the_end_of_the_lease() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let ours = File::create_new(&path).unwrap();
        assert!(is_free(&ours));
        let lease = take_alone(&ours).unwrap().unwrap();
        let opener = std::thread::spawn(move || OpenOptions::new().append(true).open(&path));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!opener.is_finished());
        drop(lease);
        assert!(opener.join().unwrap().is_ok());
    }
}
