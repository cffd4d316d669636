//! A moment alone with a file: `F_SETLEASE` with `F_WRLCK`.
//!
//! The kernel grants it only if no other process has the file open, for reading or writing, or
//! mapped; and from then on holds up every process that opens or truncates it until the lease is
//! given back. So an operation under the lease is on a file that no other process can be writing
//! to. No lock can promise that: locks are kept only by programs that know of them.
//!
//! It does not last. When an opener has waited for as long as `/proc/sys/fs/lease-break-time` says
//! (45 s as a rule), the kernel takes the lease away and lets it in, and the holder is not asked.
//! As long as `F_GETLEASE` still says `F_WRLCK` nobody waits, and all of that time is left: so
//! [`Lease::may_change`] is asked directly before each call that could destroy what others write.
//! Between its answer and the call lie microseconds, unless the process is stopped just there or
//! the call itself hangs; then [`Lease::give_back`] says afterwards that the lease was lost.
//!
//! Only file systems whose files nobody opens behind this kernel's back are trusted with leases
//! ([`is_local`]): elsewhere some grant them too, and they hold up nobody on other machines.
//!
//! An open with `O_NONBLOCK` is not held up but refused with `EWOULDBLOCK`.
#![allow(unsafe_code)] // Three commands of fcntl that rustix lacks.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::fs::{FsWord, fstatfs};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

/// `F_SETSIG` of asm-generic/fcntl.h, which libc lacks: the signal that announces an opener.
const F_SETSIG: libc::c_int = 10;

/// Where the kernel says for how many seconds a lease keeps others waiting; 0 is without end.
const BREAK_TIME: &str = "/proc/sys/fs/lease-break-time";
/// The break time where it cannot be read: the least that can be set.
const BREAK_TIME_LEAST: Duration = Duration::from_secs(1);

/// File systems all of whose openers this kernel knows, by the magic numbers of `<linux/magic.h>`
/// and the kernel's sources. Not here, on purpose: what other machines or processes serve (NFS,
/// SMB, 9p, Ceph, GFS2, OCFS2, AFS, FUSE with virtiofs and sshfs) and what shows another file
/// system's files (overlayfs, eCryptfs), which can be opened there too.
const LOCAL: &[FsWord] = &[
    0xEF53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683E, // btrfs
    0xF2F5_2010, // F2FS
    0x0102_1994, // tmpfs
    0x8584_58F6, // ramfs
    0xCA45_1A4E, // bcachefs
    0x3153_464A, // JFS
    0x3434,      // NILFS
    0x5265_4973, // ReiserFS
    0x2FC1_2FC1, // ZFS
    0x4D44,      // FAT
    0x2011_BAB0, // exFAT
    0x7366_746E, // NTFS, by the kernel's own driver
    0x482B,      // HFS+
    0x1501_3346, // UDF
];

/// The file is ours alone while this lives, or until others have waited for too long.
#[derive(Debug)]
pub struct Lease<'a> {
    file: BorrowedFd<'a>,
    /// How long after nobody waited the file is ours for certain; `None` is for ever.
    limit: Option<Duration>,
    /// When it was last known that nobody waits.
    whole_at: Cell<Duration>,
}

/// How a lease has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The lease was given back: no other process had the file open until then.
    GivenBack,
    /// The kernel had taken it away before.
    Lost,
}

/// Takes the lease on a file that is open for writing; `None` if it is open elsewhere.
///
/// # Errors
/// `EACCES` if the file is another user's and the process lacks `CAP_LEASE`, `EINVAL` where the
/// file system has no leases, `EOPNOTSUPP` where others than this kernel may open the file.
pub fn take_alone(file: &impl AsFd) -> io::Result<Option<Lease<'_>>> {
    let file = file.as_fd();
    if !is_local(file)? {
        return Err(Errno::OPNOTSUPP.into());
    }
    // An opener waits for the file: SIGIO would end a process that does not expect it, SIGURG is
    // ignored by default.
    control(file, F_SETSIG, libc::SIGURG)?;
    let asked = now();
    match control(file, libc::F_SETLEASE, libc::F_WRLCK) {
        Ok(_) => Ok(Some(Lease {
            file,
            limit: limit(),
            whole_at: Cell::new(asked),
        })),
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether all who can open a file do so through this kernel, and through this file system.
///
/// # Errors
/// The file system's.
pub fn is_local(file: impl AsFd) -> io::Result<bool> {
    Ok(LOCAL.contains(&fstatfs(file)?.f_type))
}

/// How long a call may rely on an answer of the kernel: half of what is left at least. `None` where
/// leases last until they are given back.
fn limit() -> Option<Duration> {
    let text = std::fs::read_to_string(BREAK_TIME).ok();
    let seconds = text.and_then(|text| text.trim().parse().ok());
    match seconds.map(Duration::from_secs) {
        Some(Duration::ZERO) => None,
        Some(time) => Some(time / 2),
        None => Some(BREAK_TIME_LEAST / 2),
    }
}

/// Time that also passes while the machine sleeps.
fn now() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(
        time.tv_sec.cast_unsigned(),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

impl Lease<'_> {
    /// Whether a change of the file may begin: nobody waits for it, and so nobody will be let in
    /// for longer than a call takes.
    ///
    /// # Errors
    /// The system's.
    pub fn may_change(&self) -> io::Result<bool> {
        Ok(self.is_whole(&now)? && self.may_finish_by(&now))
    }

    /// Whether a change that has begun may go on: an opener may wait by now, but none has been let
    /// in.
    ///
    /// # Errors
    /// The system's.
    pub fn may_finish(&self) -> io::Result<bool> {
        self.is_whole(&now)?;
        Ok(self.may_finish_by(&now))
    }

    fn may_finish_by(&self, now: &dyn Fn() -> Duration) -> bool {
        let passed = now().saturating_sub(self.whole_at.get());
        self.limit.is_none_or(|limit| passed < limit)
    }

    /// Whether it is held and no opener waits for its end. While one does, the kernel returns the
    /// type that it waits for instead (fcntl(2)).
    fn is_whole(&self, now: &dyn Fn() -> Duration) -> io::Result<bool> {
        let asked = now();
        let is_whole = control(self.file, libc::F_GETLEASE, 0)? == libc::F_WRLCK;
        if is_whole {
            self.whole_at.set(asked);
        }
        Ok(is_whole)
    }

    /// Gives it back, and returns whether it had lasted until then.
    ///
    /// # Errors
    /// The system's.
    pub fn give_back(self) -> io::Result<Ended> {
        let given = control(self.file, libc::F_SETLEASE, libc::F_UNLCK);
        std::mem::forget(self);
        match given {
            Ok(_) => Ok(Ended::GivenBack),
            // There is none.
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(Ended::Lost),
            Err(error) => Err(error),
        }
    }
}

fn control(
    file: BorrowedFd<'_>,
    command: libc::c_int,
    value: libc::c_int,
) -> io::Result<libc::c_int> {
    // SAFETY: these commands take a number, and no address.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, value) } {
        answer @ 0.. => Ok(answer),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // Closing the file gives it back too, so a failure holds nobody up for long.
        drop(control(self.file, libc::F_SETLEASE, libc::F_UNLCK));
    }
}

/// Operations of tests on a lease.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// Takes it away as the kernel does when an opener has waited for too long.
    pub(crate) fn lose(file: BorrowedFd<'_>) {
        control(file, libc::F_SETLEASE, libc::F_UNLCK).unwrap();
    }

    /// The same lease, of which an answer of the kernel counts for so long.
    pub(crate) fn with_limit(mut lease: Lease<'_>, limit: Duration) -> Lease<'_> {
        lease.limit = Some(limit);
        lease
    }

    /// Waits until an opener waits for its end.
    pub(crate) fn wait_for_opener(file: BorrowedFd<'_>) {
        while control(file, libc::F_GETLEASE, 0).unwrap() == libc::F_WRLCK {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, OpenOptions};
    use std::time::Instant;

    /// A caller's way to find out that the file is in use.
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

    /// A file that we alone have open.
    fn alone(path: &std::path::Path) -> File {
        let file = File::create_new(path).unwrap();
        assert!(is_free(&file));
        file
    }

    #[test]
    fn nothing_may_be_changed_while_an_opener_waits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let ours = alone(&path);
        let lease = take_alone(&ours).unwrap().unwrap();
        assert!(lease.may_change().unwrap());
        let opener = std::thread::spawn(move || OpenOptions::new().append(true).open(&path));
        testing::wait_for_opener(ours.as_fd());
        assert!(!lease.may_change().unwrap());
        // The lease is still there: the waiting opener is not in yet.
        assert!(!opener.is_finished());
        assert_eq!(lease.give_back().unwrap(), Ended::GivenBack);
        assert!(opener.join().unwrap().is_ok());
    }

    #[test]
    fn an_answer_of_the_kernel_counts_for_half_of_the_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let ours = alone(&path);
        let mut lease = take_alone(&ours).unwrap().unwrap();
        lease.limit = Some(Duration::from_secs(20));
        let at = |seconds| move || Duration::from_secs(seconds);
        assert!(lease.is_whole(&at(1000)).unwrap());
        for (time, may) in [(1000, true), (1019, true), (1020, false), (1047, false)] {
            assert_eq!(lease.may_finish_by(&at(time)), may, "{time}");
        }
        // Nobody has waited, so the time begins again.
        assert!(lease.is_whole(&at(1047)).unwrap());
        assert!(lease.may_finish_by(&at(1066)));
        let opener = std::thread::spawn(move || File::open(path));
        testing::wait_for_opener(ours.as_fd());
        assert!(!lease.is_whole(&at(1060)).unwrap());
        assert!(lease.may_finish_by(&at(1066)));
        assert!(!lease.may_finish_by(&at(1067)));
        lease.limit = None;
        assert!(lease.may_finish_by(&at(1_000_000)));
        drop(lease);
        assert!(opener.join().unwrap().is_ok());
    }

    #[test]
    fn a_lost_lease_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let ours = alone(&dir.path().join("a"));
        let lease = take_alone(&ours).unwrap().unwrap();
        testing::lose(ours.as_fd());
        assert!(!lease.may_change().unwrap());
        assert_eq!(lease.give_back().unwrap(), Ended::Lost);
    }

    #[test]
    fn there_are_none_where_others_may_open_the_file() {
        // FUSE, NFS, SMB, 9p, Ceph, GFS2, OCFS2, overlayfs, eCryptfs.
        for magic in [
            0x6573_5546,
            0x6969,
            0xFF53_4D42,
            0xFE53_4D42,
            0x0102_1997,
            0x00C3_6400,
            0x0116_1970,
            0x7461_636F,
            0x794C_7630,
            0xF15F,
        ] {
            assert!(!LOCAL.contains(&magic), "{magic:#x}");
        }
        // Another one that is not in the list.
        let proc = File::open("/proc/self/status").unwrap();
        assert!(!is_local(&proc).unwrap());
        let error = take_alone(&proc).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
    }
}
