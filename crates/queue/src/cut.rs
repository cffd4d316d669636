//! Truncation of a file to its former length that never cuts off data appended by others meanwhile.
//!
//! A length that was read may be stale at once. So the file is examined and truncated under a lease
//! ([`crate::lease`]), which the kernel grants only while no other process has the file open, and
//! which delays other openers. The lease is checked once more directly before each call that takes
//! something from the file, and at the end: nothing is cut off while another process waits.

use std::io;
use std::ops::{Range, RangeInclusive};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, fstat, ftruncate, seek};
use rustix::io::Errno;

use crate::lease::{self, Ended, Lease};

/// Number of tries, and the time between them: a process that forks beside us has our descriptors
/// for a moment, and a program that looks at new files has them open no longer.
const TRIES: usize = 20;
const APART: Duration = Duration::from_millis(10);
/// Bytes that are read at once where another process may have written.
const READ_BYTES: usize = 256 << 10;
/// Bytes that are read in all: an opener waits meanwhile, and a lease lasts for a limited time
/// only.
const LOOK_BYTES_MAX: u64 = 1 << 30;

/// Truncation of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Lengths that the file can have by our own doing.
    pub expected: RangeInclusive<u64>,
    /// Its length afterwards. Space beyond it goes too, if the file has this length already.
    pub to: u64,
    /// Becomes a hole afterwards, where the file system has holes: blocks that moving the end has
    /// given space.
    pub punch: Range<u64>,
    /// Treatment of data in the range that is cut off.
    pub data: Data,
}

/// Content that may lie between the length that a file had and the one that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// Zeroes that were written; the range is not read.
    Ours,
    /// Nothing of ours was written there: bytes that are not zero belong to another writer.
    Others,
}

/// Result of a truncation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The file has the length.
    Cut,
    /// Another process has it open, or waits for it: nothing is cut off, or not all.
    InUse,
    /// Untouched: it has another length, or holds data that is not ours.
    Changed,
    /// Untouched: it has too much data beyond the length to find out in time whose it is.
    Unknown,
    /// The file has the length, but the cut took so long that the kernel has let in a waiting
    /// opener: bytes that it has appended meanwhile may be lost.
    Late,
}

/// Owner of the data beyond the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Zeroes,
    Data,
    TooMuch,
    /// The range was not read to its end, since an opener waits for the file.
    Awaited,
}

/// Next step of a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Reads what may be others'.
    Look,
    /// Asks whether it may begin, and changes the length.
    Cut,
    /// Asks whether it may go on, and makes the file shorter again by what it was made longer.
    Shorten,
    /// Asks whether it may go on, and punches.
    Punch,
    /// Gives the lease back.
    End,
}

/// Cuts a file that is open for writing, and for reading if it is looked for data.
///
/// # Errors
/// `EINVAL` where the file system has no leases, `EACCES` if the file is another user's and the
/// process lacks `CAP_LEASE`; then it is untouched. The system's.
pub fn cut_alone(file: impl AsFd, cut: &Cut) -> io::Result<Outcome> {
    cut_alone_with(file.as_fd(), cut, &|_| {})
}

/// Like [`cut_alone`]; `before` is called before each step, so that tests can interfere.
fn cut_alone_with(file: BorrowedFd<'_>, cut: &Cut, before: &dyn Fn(Step)) -> io::Result<Outcome> {
    for _ in 0..TRIES {
        if let Some(lease) = lease::take_alone(&file)? {
            let outcome = cut_under_lease(file, cut, &lease, before);
            before(Step::End);
            let ended = lease.give_back();
            return match (outcome?, ended?) {
                (Outcome::Cut, Ended::Lost) => Ok(Outcome::Late),
                (outcome, _) => Ok(outcome),
            };
        }
        std::thread::sleep(APART);
    }
    Ok(Outcome::InUse)
}

/// While the lease lasts nobody else can be writing: what is found stays.
fn cut_under_lease(
    file: BorrowedFd<'_>,
    cut: &Cut,
    lease: &Lease<'_>,
    before: &dyn Fn(Step),
) -> io::Result<Outcome> {
    let len = || -> io::Result<u64> { Ok(u64::try_from(fstat(file)?.st_size).unwrap_or(0)) };
    let now = len()?;
    if !cut.expected.contains(&now) {
        return Ok(Outcome::Changed);
    }
    if cut.data == Data::Others {
        before(Step::Look);
        match look(file, cut.to..now, LOOK_BYTES_MAX, lease)? {
            Found::Zeroes => {}
            Found::Data => return Ok(Outcome::Changed),
            Found::TooMuch => return Ok(Outcome::Unknown),
            Found::Awaited => return Ok(Outcome::InUse),
        }
    }
    before(Step::Cut);
    // A lease that has not lasted may have let in an opener, which may have changed the length.
    if !lease.may_change()? || len()? != now || !lease.may_change()? {
        return Ok(Outcome::InUse);
    }
    if now == cut.to && i64::try_from(cut.to).is_ok_and(|to| to < i64::MAX) {
        // Not every file system looks beyond an end that stays where it is.
        ftruncate(file, cut.to + 1)?;
        before(Step::Shorten);
        if !lease.may_finish()? {
            return Ok(Outcome::InUse);
        }
    }
    ftruncate(file, cut.to)?;
    before(Step::Punch);
    let Range { start, end } = cut.punch;
    // The rest has space, and is otherwise as it was.
    if start < end && lease.may_finish()? {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(file, flags, start, end - start) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Outcome::Cut)
}

/// Looks at the content of a range of a file; holes and space that was never written are not read,
/// as far as the file system knows them. Stops when an opener waits for the file.
fn look(
    file: BorrowedFd<'_>,
    range: Range<u64>,
    most: u64,
    lease: &Lease<'_>,
) -> io::Result<Found> {
    let mut buffer = vec![0; READ_BYTES];
    let mut at = range.start;
    let mut left = most;
    while at < range.end {
        at = match seek(file, SeekFrom::Data(at)) {
            Err(Errno::NXIO) => break,
            data => data?,
        };
        let hole = seek(file, SeekFrom::Hole(at))?.min(range.end);
        while at < hole {
            let len = usize::try_from(hole - at).map_or(READ_BYTES, |len| len.min(READ_BYTES));
            if left < len as u64 {
                return Ok(Found::TooMuch);
            }
            if !lease.may_change()? {
                return Ok(Found::Awaited);
            }
            match rustix::io::pread(file, &mut buffer[..len], at) {
                Ok(0) => return Ok(Found::Zeroes),
                Ok(read) if buffer[..read].iter().any(|byte| *byte != 0) => {
                    return Ok(Found::Data);
                }
                Ok(read) => {
                    at += read as u64;
                    left -= read as u64;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(Found::Zeroes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, OpenOptions};
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    fn file(path: &Path, len: u64) -> File {
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(true);
        let file = options.open(path).unwrap();
        file.write_all_at(&[1; 100], 0).unwrap();
        file.set_len(len).unwrap();
        file
    }

    /// A process that forks beside us has our descriptors for a moment.
    fn alone(file: &File) -> Lease<'_> {
        for _ in 0..1000 {
            if let Some(lease) = lease::take_alone(file).unwrap() {
                return lease;
            }
            std::thread::sleep(APART);
        }
        panic!("another process has the file open");
    }

    fn cut(expected: u64, data: Data) -> Cut {
        Cut {
            expected: expected..=expected,
            to: 100,
            punch: 0..0,
            data,
        }
    }

    #[test]
    fn only_the_expected_length_is_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let file = file(&path, 9000);
        let len = || file.metadata().unwrap().len();
        for wrong in [8999, 9001] {
            let outcome = cut_alone(&file, &cut(wrong, Data::Ours)).unwrap();
            assert_eq!((outcome, len()), (Outcome::Changed, 9000));
        }
        let outcome = cut_alone(&file, &cut(9000, Data::Ours)).unwrap();
        assert_eq!((outcome, len()), (Outcome::Cut, 100));
        let outcome = cut_alone(&file, &cut(100, Data::Ours)).unwrap();
        assert_eq!((outcome, len()), (Outcome::Cut, 100));
        assert_eq!(std::fs::read(&path).unwrap(), [1; 100]);
    }

    #[test]
    fn what_others_have_written_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let file = file(&path, 3 << 20);
        file.write_all_at(&[0; 5000], 50_000).unwrap();
        let whole = cut(3 << 20, Data::Others);
        file.write_all_at(b"x", (2 << 20) + 77).unwrap();
        assert_eq!(cut_alone(&file, &whole).unwrap(), Outcome::Changed);
        assert_eq!(file.metadata().unwrap().len(), 3 << 20);
        file.write_all_at(b"\0", (2 << 20) + 77).unwrap();
        assert_eq!(cut_alone(&file, &whole).unwrap(), Outcome::Cut);
    }

    #[test]
    fn no_more_is_read_than_there_is_time_for() {
        let dir = tempfile::tempdir().unwrap();
        let file = file(&dir.path().join("a"), 0);
        file.write_all_at(&[0; 1 << 20], 0).unwrap();
        let lease = alone(&file);
        let look = |most| look(file.as_fd(), 0..1 << 20, most, &lease).unwrap();
        assert_eq!(look((1 << 20) - 1), Found::TooMuch);
        assert_eq!(look(1 << 20), Found::Zeroes);
    }

    #[test]
    fn a_file_that_is_open_elsewhere_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let file = file(&path, 9000);
        let reader = File::open(&path).unwrap();
        let request = cut(9000, Data::Ours);
        assert_eq!(cut_alone(&file, &request).unwrap(), Outcome::InUse);
        assert_eq!(file.metadata().unwrap().len(), 9000);
        drop(reader);
        assert_eq!(cut_alone(&file, &request).unwrap(), Outcome::Cut);
    }

    /// A process that was forked has our descriptor, and no lease is in its way.
    #[test]
    fn what_is_appended_by_a_holder_of_the_same_descriptor_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let file = file(&path, 9000);
        let inherited = file.try_clone().unwrap();
        let before = |next| {
            if next == Step::Cut {
                inherited.write_all_at(b"PRECIOUS", 9000).unwrap();
            }
        };
        let whole = cut(9000, Data::Ours);
        let outcome = cut_alone_with(file.as_fd(), &whole, &before).unwrap();
        assert_eq!(outcome, Outcome::InUse);
        assert_eq!(&std::fs::read(&path).unwrap()[9000..], b"PRECIOUS");
    }

    #[test]
    fn reading_stops_while_an_opener_waits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let file = file(&path, 0);
        file.write_all_at(&[0; 1 << 20], 0).unwrap();
        let lease = alone(&file);
        let opener = std::thread::spawn(move || append(&path));
        lease::testing::wait_for_opener(file.as_fd());
        let found = look(file.as_fd(), 0..1 << 20, u64::MAX, &lease).unwrap();
        assert_eq!(found, Found::Awaited);
        drop(lease);
        opener.join().unwrap();
    }

    /// The kernel admits an opener that has waited too long, while the truncation is half done.
    #[test]
    fn a_cut_that_takes_too_long_does_not_go_on() {
        for (step, expected) in [(Step::Shorten, Outcome::InUse), (Step::Punch, Outcome::Cut)] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("a");
            let file = file(&path, 100);
            let lease = lease::testing::with_limit(alone(&file), Duration::from_millis(300));
            let before = |next| {
                if next == step {
                    let waiting = path.clone();
                    let opener = std::thread::spawn(move || append(&waiting));
                    lease::testing::wait_for_opener(file.as_fd());
                    std::thread::sleep(Duration::from_millis(400));
                    lease::testing::lose(file.as_fd());
                    opener.join().unwrap();
                }
            };
            let request = Cut {
                punch: 100..8192,
                ..cut(100, Data::Ours)
            };
            let outcome = cut_under_lease(file.as_fd(), &request, &lease, &before).unwrap();
            assert_eq!(outcome, expected, "{step:?}");
            let found = std::fs::read(&path).unwrap();
            assert!(found.ends_with(b"PRECIOUS"), "{step:?}: {found:?}");
        }
    }

    /// Appends as another program would, which waits for the lease.
    fn append(path: &Path) {
        let mut options = OpenOptions::new();
        let mut other = options.append(true).open(path).unwrap();
        std::io::Write::write_all(&mut other, b"PRECIOUS").unwrap();
    }

    #[test]
    fn bytes_that_a_waiting_opener_appends_stay() {
        for (step, data) in [
            (Step::Cut, Data::Ours),
            (Step::Cut, Data::Others),
            (Step::Look, Data::Others),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("a");
            let file = file(&path, 9000);
            file.write_all_at(&[0; 1000], 4000).unwrap();
            let opener = std::sync::Mutex::new(None);
            let before = |next| {
                if next == step {
                    let path = path.clone();
                    let thread = std::thread::spawn(move || append(&path));
                    *opener.lock().unwrap() = Some(thread);
                    lease::testing::wait_for_opener(file.as_fd());
                }
            };
            let outcome = cut_alone_with(file.as_fd(), &cut(9000, data), &before).unwrap();
            assert_eq!(outcome, Outcome::InUse, "{step:?} {data:?}");
            opener.into_inner().unwrap().unwrap().join().unwrap();
            let found = std::fs::read(&path).unwrap();
            assert_eq!((found.len(), &found[9000..]), (9008, &b"PRECIOUS"[..]));
        }
    }

    #[test]
    fn nothing_is_cut_without_the_lease_and_its_loss_is_reported() {
        for (step, expected) in [
            (Step::Look, Outcome::InUse),
            (Step::Cut, Outcome::InUse),
            (Step::Punch, Outcome::Late),
            (Step::End, Outcome::Late),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("a");
            let file = file(&path, 9000);
            file.write_all_at(&[0; 1000], 4000).unwrap();
            let before = |next| {
                if next == step {
                    lease::testing::lose(file.as_fd());
                    append(&path);
                }
            };
            let whole = cut(9000, Data::Others);
            let outcome = cut_alone_with(file.as_fd(), &whole, &before).unwrap();
            assert_eq!(outcome, expected, "{step:?}");
            let found = std::fs::read(&path).unwrap();
            assert_eq!(&found[found.len() - 8..], b"PRECIOUS", "{step:?}");
        }
    }
}
