//! Writers: a thread each, with files of their own, started together.
//!
//! Each writer allocates space ahead by the library's policy, and frees it: no other thread writes
//! to its file, so truncating it to the length that the writer knows loses nothing.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use cowslip::Buf;
use cowslip::growth::{Ahead, AtClose, CutPoint, Refill, Rule, at_close};
use cowslip_testbed::Random;
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::Errno;

use super::cell::{Cell, Help, Pattern, TORRENT_BYTES, Target, WRITE_BYTES};

/// Waits for others to give back what they hold, before a full file system counts as such.
const FULL_TRIES: u32 = 200;
const FULL_WAIT: Duration = Duration::from_millis(5);

/// State that all writers of a run share.
#[derive(Debug, Default)]
pub struct Shared {
    /// Bytes ahead of all ends.
    held: AtomicU64,
    /// Incremented by a writer that finds no space: all writers free the space that they hold
    /// ahead.
    calls_for_space: AtomicU64,
    /// Writes that found no space although some was allocated behind ends of files.
    pub short_of_space: AtomicU64,
}

/// A run's writers.
pub struct Writers<'a> {
    /// Pattern.
    pub cell: &'a Cell,
    /// Directory of the files.
    pub directory: &'a Path,
    /// How much each writes.
    pub bytes: u64,
    /// Seed of the sizes and orders.
    pub seed: u64,
}

impl Writers<'_> {
    /// Writes everything; the files. All are closed, not all are durable.
    ///
    /// # Errors
    /// The first that a writer met.
    pub fn run(&self, shared: &Arc<Shared>) -> io::Result<Vec<PathBuf>> {
        let start = Barrier::new(self.cell.writers);
        std::thread::scope(|scope| {
            let writers = (0..self.cell.writers).map(|number| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    self.write_all(number, shared)
                })
            });
            let writers: Vec<_> = writers.collect();
            let mut files = Vec::new();
            for writer in writers {
                let written = writer.join();
                files.extend(written.map_err(|_| io::Error::other("a writer panicked"))??);
            }
            Ok(files)
        })
    }

    fn write_all(&self, number: usize, shared: &Shared) -> io::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        let mut left = self.bytes;
        let mut random = Random::new(self.seed ^ (number as u64) << 32);
        while left > 0 {
            let bytes = match self.cell.pattern {
                Pattern::Small => small_file(&mut random).min(left),
                _ => left,
            };
            left -= bytes;
            let path = self.directory.join(format!("{number}-{}", files.len()));
            let mut writer = Writer::new(self.cell, &path, shared)?;
            match self.cell.pattern {
                Pattern::Torrent => writer.torrent(bytes, &mut random)?,
                Pattern::Restart => {
                    writer.stream(bytes / 2)?;
                    writer.restart()?;
                    writer.stream(bytes)?;
                }
                _ => writer.stream(bytes)?,
            }
            writer.end()?;
            files.push(path);
        }
        Ok(files)
    }
}

/// 1 to 64 MiB, as many of each power of two, in whole writes.
fn small_file(random: &mut Random) -> u64 {
    let bytes = (1_u64 << 20) as f64 * 64_f64.powf(random.share());
    (bytes as u64).next_multiple_of(WRITE_BYTES)
}

/// The writer of one file.
struct Writer<'a> {
    cell: &'a Cell,
    path: &'a Path,
    shared: &'a Shared,
    /// Closed for a moment between two writes, perhaps.
    file: Option<File>,
    data: Buf,
    at: u64,
    ahead: Ahead,
    closes: u8,
    calls_seen: u64,
    begun: Instant,
}

fn open(path: &Path, target: Target) -> io::Result<File> {
    let flags = match target {
        Target::Direct => OFlags::DIRECT,
        Target::Buffered | Target::Qcow2 | Target::Space => OFlags::empty(),
    };
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true);
    options.custom_flags(flags.bits().cast_signed()).open(path)
}

impl<'a> Writer<'a> {
    fn new(cell: &'a Cell, path: &'a Path, shared: &'a Shared) -> io::Result<Writer<'a>> {
        let file = open(path, cell.target)?;
        if let Help::Hint(bytes) = cell.help {
            cowslip_queue::attributes::set_extent_hint(&file, bytes)?;
        }
        let rule = match cell.help {
            Help::Rule(rule) => rule,
            _ => Rule::None,
        };
        let piece = match cell.pattern {
            Pattern::Torrent => TORRENT_BYTES,
            _ => WRITE_BYTES,
        };
        Ok(Writer {
            cell,
            path,
            shared,
            file: Some(file),
            data: Buf::copy_of(&vec![0xA5; usize::try_from(piece).unwrap_or(0)]),
            at: 0,
            ahead: Ahead::new(rule, 0),
            closes: 0,
            calls_seen: shared.calls_for_space.load(Ordering::Relaxed),
            begun: Instant::now(),
        })
    }

    /// Writes up to this length.
    fn stream(&mut self, bytes: u64) -> io::Result<()> {
        while self.at < bytes {
            let len = WRITE_BYTES.min(bytes - self.at);
            self.make_room(len)?;
            let held = self.ahead.held_bytes(self.at);
            let piece = usize::try_from(len).unwrap_or(self.data.len());
            self.write(&self.data.slice(0, piece), self.at)?;
            self.at += len;
            let used = held - self.ahead.held_bytes(self.at);
            self.shared.held.fetch_sub(used, Ordering::Relaxed);
            if self.cell.pattern == Pattern::Reopen {
                self.reopen()?;
            }
            self.keep_pace();
        }
        Ok(())
    }

    /// All pieces, in random order.
    fn torrent(&mut self, bytes: u64, random: &mut Random) -> io::Result<()> {
        match self.cell.help {
            Help::Whole => fallocate(self.file()?, FallocateFlags::empty(), 0, bytes)?,
            _ => self.file()?.set_len(bytes)?,
        }
        let mut pieces: Vec<u64> = (0..bytes / TORRENT_BYTES).collect();
        for last in (1..pieces.len()).rev() {
            let other = random.below(last as u64 + 1);
            pieces.swap(last, usize::try_from(other).unwrap_or(0));
        }
        for piece in pieces {
            self.write(&self.data, piece * TORRENT_BYTES)?;
        }
        self.at = bytes;
        Ok(())
    }

    /// Allocates ahead if it is time.
    fn make_room(&mut self, len: u64) -> io::Result<()> {
        let calls = self.shared.calls_for_space.load(Ordering::Relaxed);
        if calls != self.calls_seen {
            self.calls_seen = calls;
            self.trim()?;
        }
        let next = |ahead: &Ahead, at: u64, free| ahead.next(at, len, Refill::WhenUsedUp, free);
        if next(&self.ahead, self.at, Some(u64::MAX)).is_none() {
            return Ok(());
        }
        // All files together: what is held is neither free nor taken, and both count.
        let held = self.shared.held.load(Ordering::Relaxed);
        let free = free_bytes(self.file()?)?.saturating_sub(held);
        let Some(step) = next(&self.ahead, self.at, Some(free)) else {
            return Ok(());
        };
        match fallocate(
            self.file()?,
            FallocateFlags::KEEP_SIZE,
            step.start,
            step.end - step.start,
        ) {
            Ok(()) => {
                let before = self.ahead.held_bytes(self.at);
                self.ahead.granted(&step);
                let more = self.ahead.held_bytes(self.at) - before;
                self.shared.held.fetch_add(more, Ordering::Relaxed);
            }
            // The write finds out.
            Err(Errno::NOSPC) => self.file()?.set_len(self.at)?,
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn write(&self, data: &[u8], at: u64) -> io::Result<()> {
        let mut tries = 0;
        loop {
            match self.file()?.write_all_at(data, at) {
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && tries < FULL_TRIES => {
                    if tries == 0 && self.shared.held.load(Ordering::Relaxed) > 0 {
                        self.shared.short_of_space.fetch_add(1, Ordering::Relaxed);
                    }
                    tries += 1;
                    self.shared.calls_for_space.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(FULL_WAIT);
                }
                outcome => return outcome,
            }
        }
    }

    /// Gives back what lies ahead.
    fn trim(&mut self) -> io::Result<()> {
        let held = self.ahead.held_bytes(self.at);
        if held > 0 {
            self.file()?.set_len(self.at)?;
            self.shared.held.fetch_sub(held, Ordering::Relaxed);
        }
        self.ahead.trimmed(self.at, CutPoint::AtEnd);
        Ok(())
    }

    fn reopen(&mut self) -> io::Result<()> {
        if self.ahead.held_bytes(self.at) > 0 {
            match at_close(Some(self.closes)) {
                AtClose::Trim(closes) => {
                    self.closes = closes;
                    self.trim()?;
                }
                AtClose::Keep => {}
            }
        }
        // The file is closed first: a file system may treat the last close specially.
        self.file = None;
        self.file = Some(open(self.path, self.cell.target)?);
        Ok(())
    }

    fn file(&self) -> io::Result<&File> {
        self.file
            .as_ref()
            .ok_or_else(|| io::Error::other("it is closed"))
    }

    fn restart(&mut self) -> io::Result<()> {
        let held = self.ahead.held_bytes(self.at);
        self.shared.held.fetch_sub(held, Ordering::Relaxed);
        self.file()?.set_len(0)?;
        self.at = 0;
        self.ahead.trimmed(0, CutPoint::Shorter);
        Ok(())
    }

    fn keep_pace(&self) {
        if let Some(pace) = self.cell.pace {
            let due = Duration::from_secs_f64(self.at as f64 / pace as f64);
            std::thread::sleep(due.saturating_sub(self.begun.elapsed()));
        }
    }

    fn end(mut self) -> io::Result<()> {
        match self.ahead.held_bytes(self.at) {
            0 => Ok(()),
            _ => self.trim(),
        }
    }
}

/// Free space of the file system.
///
/// # Errors
/// Its.
pub fn free_bytes(file: &File) -> io::Result<u64> {
    let stats = rustix::fs::fstatvfs(file)?;
    Ok(stats.f_bavail.saturating_mul(stats.f_frsize))
}

/// Samples how much space is allocated but unused; returns the maximum when `stop` is set.
pub fn watch_unused(directory: PathBuf, stop: Arc<AtomicU64>) -> std::thread::JoinHandle<u64> {
    use std::os::unix::fs::MetadataExt;
    std::thread::spawn(move || {
        let mut most = 0;
        while stop.load(Ordering::Relaxed) == 0 {
            let found = fs::read_dir(&directory).into_iter().flatten().flatten();
            let unused = found
                .filter_map(|entry| entry.metadata().ok())
                .map(|found| {
                    let needed = found.len().next_multiple_of(4096);
                    (found.blocks() * 512).saturating_sub(needed)
                });
            most = most.max(unused.sum::<u64>());
            std::thread::sleep(Duration::from_millis(20));
        }
        most
    })
}
