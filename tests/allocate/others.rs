//! Another process writes to the file while it is given space, and the allocation is interrupted:
//! not a byte of his is lost.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::battery::interrupted;
use crate::support::cowslip;

const BEFORE: u64 = 1 << 20;
const SIZE: u64 = 3 << 30;
/// Bytes that the first call allocates, which is also the offset at which they end.
const FIRST: u64 = 1 << 30;
const END: u64 = BEFORE + FIRST;

/// Allocates, lets another program write when the first call is done, and interrupts; returns the
/// output.
fn interrupt(dir: &Path, words: &str, write: impl FnOnce(&Path)) -> String {
    let path = dir.join("recording");
    std::fs::write(&path, vec![1; BEFORE as usize]).unwrap();
    let mut command = cowslip();
    command.current_dir(dir).arg("allocate");
    let line = format!("--size {SIZE} --rate-limit 500M {words} recording");
    command.args(line.split_whitespace());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let begun = Instant::now();
    while path.metadata().unwrap().blocks() * 512 < FIRST {
        assert!(begun.elapsed() < Duration::from_secs(20), "no space comes");
        std::thread::sleep(Duration::from_millis(2));
    }
    write(&path);
    let output = interrupted(child, Signal::INT);
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn append(path: &Path) {
    let mut file = OpenOptions::new().append(true).open(path).unwrap();
    file.write_all(&[2; 2 << 20]).unwrap();
}

fn expect(path: &Path, len: u64, at: u64, bytes: &[u8]) {
    let file = File::open(path).unwrap();
    assert_eq!(file.metadata().unwrap().len(), len);
    let mut found = vec![0; bytes.len()];
    file.read_exact_at(&mut found, at).unwrap();
    assert!(found == bytes, "other bytes at {at}");
    let mut first = vec![0; BEFORE as usize];
    file.read_exact_at(&mut first, 0).unwrap();
    assert!(first.iter().all(|byte| *byte == 1));
}

/// With `--keep-size` only the program that appends moves the end of the file.
pub fn what_is_appended_beyond_an_end_that_stays_is_kept(dir: &Path) {
    let said = interrupt(dir, "--keep-size", append);
    assert!(said.contains("another process has written"), "{said}");
    let path = dir.join("recording");
    expect(&path, BEFORE + (2 << 20), BEFORE, &[2; 2 << 20]);
}

/// An end that moves is where others append.
pub fn what_is_appended_to_an_end_that_moves_is_kept(dir: &Path) {
    let said = interrupt(dir, "", append);
    assert!(said.contains("another process has written"), "{said}");
    let path = dir.join("recording");
    expect(&path, END + (2 << 20), END, &[2; 2 << 20]);
}

/// Another program writes behind the old end, which does not show in the length.
pub fn what_is_written_behind_the_old_end_is_kept(dir: &Path) {
    let said = interrupt(dir, "", |path| {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(b"mine", 20 << 20).unwrap();
    });
    assert!(said.contains("another process has written"), "{said}");
    expect(&dir.join("recording"), END, 20 << 20, b"mine");
}

/// He may append at any moment.
pub fn a_file_that_is_open_elsewhere_is_not_cut(dir: &Path) {
    for words in ["--keep-size", ""] {
        let mut open = None;
        let said = interrupt(dir, words, |path| {
            open = Some(OpenOptions::new().append(true).open(path).unwrap());
        });
        assert!(said.contains("has the file open"), "{said}");
        let path = dir.join("recording");
        let len = match words {
            "" => END,
            _ => BEFORE,
        };
        expect(&path, len, 0, &[1; 10]);
        assert!(path.metadata().unwrap().blocks() * 512 >= FIRST);
        drop(open);
    }
}

/// No other program writes: all of the space is released.
pub fn alone_it_is_cut(dir: &Path) {
    for words in ["--keep-size", ""] {
        let said = interrupt(dir, words, |_| {});
        assert!(said.contains("was freed again"), "{said}");
        let path = dir.join("recording");
        expect(&path, BEFORE, 0, &[1; 10]);
        assert!(path.metadata().unwrap().blocks() * 512 <= 2 * BEFORE);
    }
}
