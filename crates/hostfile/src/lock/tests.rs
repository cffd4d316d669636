//! The protocol on files that two of this process have open, and on file systems without locks.

use std::fs::File;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::file::Sharing;

/// A file whose file system answers every call about locks with this error.
struct Lockless(File, Errno);

impl AsFd for Lockless {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl ByteLocks for Lockless {
    fn share(&self, _: u64) -> io::Result<()> {
        Err(self.1.into())
    }
    fn release(&self, _: u64) -> io::Result<()> {
        Err(self.1.into())
    }
    fn is_locked_by_others(&self, _: u64) -> io::Result<bool> {
        Err(self.1.into())
    }
}

fn scratch() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    fs::write(&path, "").unwrap();
    (dir, path)
}

fn claim(file: &File, claims: &Claims, wanted: Claim) -> Result<Protection> {
    claims.change(&file.as_fd(), "a", (wanted, Ask::Others))
}

/// Returns the protocol's bytes that others have locked.
fn seen_by(file: &File) -> Vec<u64> {
    let bytes = (100..104).chain(200..204);
    bytes
        .filter(|byte| file.as_fd().is_locked_by_others(*byte).unwrap())
        .collect()
}

#[test]
fn the_bytes_are_qemus() {
    let (_dir, path) = scratch();
    let [ours, theirs] = [(); 2].map(|()| File::open(&path).unwrap());
    let claims = Claims::new(Locking::On);
    let cases: [(Claim, &[u64]); 6] = [
        (Claim::qcow2(true), &[100, 101, 103, 201, 203]),
        (Claim::qcow2(false), &[100, 201, 203]),
        (Claim::data_file(true), &[100, 101, 103, 203]),
        (Claim::raw(true, Sharing::FixedLength), &[100, 101, 203]),
        (Claim::DESCRIBE, &[201, 203]),
        (Claim::NONE, &[]),
    ];
    for (wanted, bytes) in cases {
        assert_eq!(claim(&ours, &claims, wanted).unwrap(), Protection::Claimed);
        assert_eq!(seen_by(&theirs), bytes, "{wanted:?}");
    }
}

#[test]
fn what_is_refused_changes_nothing() {
    let (_dir, path) = scratch();
    let [one, two] = [(); 2].map(|()| File::open(&path).unwrap());
    let [first, second] = [(); 2].map(|()| Claims::new(Locking::Auto));
    let reader = Claim::qcow2(false);
    for (file, claims) in [(&one, &first), (&two, &second)] {
        assert_eq!(claim(file, claims, reader).unwrap(), Protection::Claimed);
    }
    let error = claim(&one, &first, Claim::qcow2(true)).unwrap_err();
    let Error::Locked(conflict) = &error else {
        panic!("{error}");
    };
    assert_eq!(conflict.side, Side::Held);
    assert_eq!(conflict.permission.name(), "write");
    let us = format!("this process (pid {})", std::process::id());
    assert_eq!(conflict.holders, [us]);
    assert_eq!(first.current(), reader);
    assert_eq!(seen_by(&two), [100, 201, 203]);
    drop(two);
    assert_eq!(
        claim(&one, &first, Claim::qcow2(true)).unwrap(),
        Protection::Claimed
    );
}

#[test]
fn of_contenders_never_two_write() {
    let (_dir, path) = scratch();
    let writers = AtomicU32::new(0);
    let times_held = AtomicU32::new(0);
    let start = Barrier::new(3);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                start.wait();
                for _ in 0..300 {
                    let file = File::open(&path).unwrap();
                    let claims = Claims::new(Locking::On);
                    if claims
                        .change(&Silent(&file), "a", (Claim::qcow2(true), Ask::Others))
                        .is_err()
                    {
                        continue;
                    }
                    assert_eq!(writers.fetch_add(1, Ordering::SeqCst), 0, "two write");
                    times_held.fetch_add(1, Ordering::SeqCst);
                    std::thread::yield_now();
                    writers.fetch_sub(1, Ordering::SeqCst);
                }
            });
        }
    });
    assert!(times_held.into_inner() > 10, "they let each other in");
}

/// The file's locks; a conflict asks about another file, so that nobody searches all processes.
struct Silent<'a>(&'a File);

impl AsFd for Silent<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        static NULL: std::sync::OnceLock<File> = std::sync::OnceLock::new();
        NULL.get_or_init(|| File::open("/dev/null").unwrap())
            .as_fd()
    }
}

impl ByteLocks for Silent<'_> {
    fn share(&self, byte: u64) -> io::Result<()> {
        self.0.as_fd().share(byte)
    }
    fn release(&self, byte: u64) -> io::Result<()> {
        self.0.as_fd().release(byte)
    }
    fn is_locked_by_others(&self, byte: u64) -> io::Result<bool> {
        self.0.as_fd().is_locked_by_others(byte)
    }
}

#[test]
fn without_locks_auto_goes_on_and_says_so() {
    let (_dir, path) = scratch();
    for errno in [Errno::INVAL, Errno::NOLCK, Errno::OPNOTSUPP, Errno::NOSYS] {
        let file = Lockless(File::open(&path).unwrap(), errno);
        let wanted = (Claim::qcow2(true), Ask::Others);
        let auto = Claims::new(Locking::Auto).change(&file, "a", wanted);
        assert!(matches!(auto.unwrap(), Protection::Unprotected(_)));
        let on = Claims::new(Locking::On)
            .change(&file, "a", wanted)
            .unwrap_err();
        assert!(
            on.to_string()
                .starts_with("Failed to lock byte 100 of 'a': "),
            "{on}"
        );
        let off = Claims::new(Locking::Off).change(&file, "a", wanted);
        assert_eq!(off.unwrap(), Protection::Claimed);
    }
    // Another failure is one in any mode.
    let file = Lockless(File::open(&path).unwrap(), Errno::IO);
    let auto = Claims::new(Locking::Auto).change(&file, "a", (Claim::FORCED, Ask::Others));
    assert!(auto.is_err());
}

#[test]
fn lines_about_locks_are_read() {
    let line = "lock:\t1: OFDLCK  ADVISORY  READ -1 fe:00:1234 100 101";
    assert!(locks_byte(line, 1234, 100) && locks_byte(line, 1234, 101));
    assert!(!locks_byte(line, 1234, 102) && !locks_byte(line, 234, 100));
    assert!(locks_byte(
        "lock:\t1: POSIX  ADVISORY  READ 7 fe:00:5 0 EOF",
        5,
        203
    ));
    assert!(!locks_byte("flags:\t0100000", 0, 100));
    assert!(!locks_byte("lock:\t1", 0, 0));
}
