//! Traces of remote files: which parts of an object were read, in the order in which each was read
//! first. A start that is recorded shows the next one what it will need.
//!
//! A trace is text, a line for each object and for each range of it, in bytes:
//!
//! ```text
//! cowslip remote trace 1
//! object 2147483648 https://images.example/golden.qcow2
//! 0 65536
//! 1048576 196608
//! ```
//!
//! A start without a cache, or of another version of equal length, is a trace as good as any: it
//! decides what is fetched early, never what is read.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cowslip_block::error::system_words;
use cowslip_block::{Error, Result};

use crate::url::ObjectUrl;

const FIRST_LINE: &str = "cowslip remote trace 1";
/// Parts of an object that are recorded or replayed at most.
const PARTS_MAX: usize = 1 << 20;
/// Bytes of a line.
const LINE_MAX: u64 = 16 << 10;

/// The files that traces of this process go to: those of several objects share one.
static FILES: Mutex<BTreeMap<PathBuf, Weak<Mutex<File>>>> = Mutex::new(BTreeMap::new());

/// Reads of one object that are being recorded.
#[derive(Debug)]
pub(crate) struct Recording {
    file: Arc<Mutex<File>>,
    object: String,
    parts: Mutex<Parts>,
}

#[derive(Debug, Default)]
struct Parts {
    seen: HashSet<u64>,
    /// Blocks in the order in which they were read.
    order: Vec<u64>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Recording {
    /// Begins to record an object into a file, which is made, or emptied by the first object of the
    /// process.
    pub(crate) fn begin(path: &Path, url: &ObjectUrl, bytes: u64) -> Result<Recording> {
        let failed = |error: io::Error| {
            let (path, words) = (path.display(), system_words(&error));
            Error::invalid(format!("Could not record into '{path}': {words}"))
        };
        let mut files = lock(&FILES);
        let open = files.get(path).and_then(Weak::upgrade);
        let file = match open {
            Some(file) => file,
            None => {
                let mut file = File::create(path).map_err(failed)?;
                writeln!(file, "{FIRST_LINE}").map_err(failed)?;
                let file = Arc::new(Mutex::new(file));
                files.insert(path.to_path_buf(), Arc::downgrade(&file));
                file
            }
        };
        Ok(Recording {
            file,
            object: format!("object {bytes} {}", url.identity()),
            parts: Mutex::default(),
        })
    }

    /// Notes a read of some blocks.
    pub(crate) fn note(&self, blocks: Range<u64>) {
        let parts = &mut *lock(&self.parts);
        for block in blocks {
            if parts.order.len() < PARTS_MAX && parts.seen.insert(block) {
                parts.order.push(block);
            }
        }
    }

    /// Writes what was noted, once.
    pub(crate) fn finish(&self, block_bytes: u64) {
        let order = std::mem::take(&mut lock(&self.parts).order);
        if order.is_empty() {
            return;
        }
        let mut text = format!("{}\n", self.object);
        for run in order.chunk_by(|a, b| a + 1 == *b) {
            let (start, len) = (run[0] * block_bytes, run.len() as u64 * block_bytes);
            text += &format!("{start} {len}\n");
        }
        // A trace that cannot be written is a start that takes longer.
        drop(lock(&self.file).write_all(text.as_bytes()));
    }
}

/// The ranges of an object in a trace; none if it is not in there with this length.
pub(crate) fn read(path: &Path, url: &ObjectUrl, bytes: u64) -> Result<Vec<Range<u64>>> {
    let shown = path.display();
    let file = File::open(path).map_err(|error| {
        Error::invalid(format!(
            "Could not open trace '{shown}': {}",
            system_words(&error)
        ))
    })?;
    let object = format!("object {bytes} {}", url.identity());
    let mut source = BufReader::new(file);
    let (mut ranges, mut is_meant) = (Vec::new(), false);
    for number in 1.. {
        let mut line = Vec::new();
        let mut limited = io::Read::take(&mut source, LINE_MAX);
        let read = limited.read_until(b'\n', &mut line).map_err(|error| {
            Error::invalid(format!(
                "Could not read trace '{shown}': {}",
                system_words(&error)
            ))
        })?;
        if read == 0 {
            break;
        }
        let wrong = || Error::invalid(format!("Line {number} of '{shown}' is of no trace"));
        let line = std::str::from_utf8(&line).map_err(|_| wrong())?.trim_end();
        if number == 1 && line != FIRST_LINE {
            return Err(wrong());
        }
        if number == 1 {
            continue;
        }
        if line.starts_with("object ") {
            is_meant = line == object;
            continue;
        }
        let (start, len) = line.split_once(' ').ok_or_else(wrong)?;
        let (start, len) = (start.parse(), len.parse());
        let (Ok(start), Ok(len)) = (start, len) else {
            return Err(wrong());
        };
        let end = u64::checked_add(start, len).ok_or_else(wrong)?;
        if is_meant && start < bytes && ranges.len() < PARTS_MAX {
            ranges.push(start..end.min(bytes));
        }
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_are_read_as_recorded_and_others_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace");
        let url = |name: &str| {
            ObjectUrl::of_name(&format!("https://h/{name}"))
                .unwrap()
                .unwrap()
        };
        let (one, two) = (
            Recording::begin(&path, &url("a"), 1000).unwrap(),
            Recording::begin(&path, &url("b"), 500).unwrap(),
        );
        one.note(3..5);
        one.note(4..6);
        one.note(0..1);
        two.note(2..3);
        one.finish(100);
        two.finish(100);
        one.finish(100);
        assert_eq!(
            read(&path, &url("a?signed"), 1000).unwrap(),
            [300..600, 0..100]
        );
        let of_b = read(&path, &url("b"), 500).unwrap();
        assert_eq!(of_b, std::slice::from_ref(&(200..300)));
        assert_eq!(read(&path, &url("b"), 501).unwrap(), []);
        for (text, line) in [
            ("", 0),
            ("something else\n", 1),
            ("cowslip remote trace 1\n12\n", 2),
            ("cowslip remote trace 1\n1 x\n", 2),
            ("cowslip remote trace 1\n18446744073709551615 1\n", 2),
        ] {
            std::fs::write(&path, text).unwrap();
            let read = read(&path, &url("a"), 10);
            match line {
                0 => assert_eq!(read.unwrap(), []),
                line => {
                    let why = read.unwrap_err().to_string();
                    assert!(why.starts_with(&format!("Line {line} of")), "{why}");
                }
            }
        }
    }
}
