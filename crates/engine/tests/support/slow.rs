//! A file in memory on which some writes take as long as the test wants, and some fail.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

pub use cowslip::file::host::NoFiles;
use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, Durability, Space};
use cowslip::image::OpenOptions;
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Image, IoVec, IoVecMut};
use cowslip_queue::{Completer, Pending, pending};

use super::block_on;

/// Writes that begin with this byte wait until they are let go.
pub const HELD: u8 = 0xbb;
/// Writes that begin with this byte fail when they have been written, for want of space.
pub const FAILING: u8 = 0xee;

/// A write that waits.
type Waiting = (u64, IoVec, Completer<io::Result<()>>);

/// A read that waits.
type WaitingRead = (u64, IoVecMut, Completer<(io::Result<()>, IoVecMut)>);

/// A file in memory on which some writes take as long as the test wants.
pub struct SlowFile {
    pub memory: MemoryFile,
    waiting: Mutex<Vec<Waiting>>,
    writes: Mutex<Vec<Range<u64>>>,
    zeroing_fails: AtomicBool,
    reading_fails: AtomicBool,
    reads_held: AtomicBool,
    waiting_reads: Mutex<Vec<WaitingRead>>,
}

cowslip_block::debug_by_name!(SlowFile);

impl SlowFile {
    /// A file with these bytes.
    pub fn new(bytes: Vec<u8>) -> Arc<SlowFile> {
        Arc::new(SlowFile {
            memory: MemoryFile::new("a.qcow2", bytes, 1),
            waiting: Mutex::default(),
            writes: Mutex::default(),
            zeroing_fails: AtomicBool::new(false),
            reading_fails: AtomicBool::new(false),
            reads_held: AtomicBool::new(false),
            waiting_reads: Mutex::default(),
        })
    }

    /// An image in such a file, open for writing.
    pub fn with_image(options: &CreateOptions) -> (Arc<SlowFile>, Image) {
        let file = SlowFile::new(Vec::new());
        block_on(create(file.clone(), None, options)).unwrap();
        let options = OpenOptions {
            writable: true,
            ..OpenOptions::default()
        };
        let image = block_on(Image::open(file.clone(), options, &NoFiles)).unwrap();
        (file, image)
    }

    /// Writes that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.lock().unwrap().len()
    }

    /// Where the writes that wait begin.
    pub fn held(&self) -> Vec<u64> {
        let waiting = self.waiting.lock().unwrap();
        waiting.iter().map(|(offset, ..)| *offset).collect()
    }

    /// The writes so far, in the order in which they were begun.
    pub fn writes(&self) -> Vec<Range<u64>> {
        self.writes.lock().unwrap().clone()
    }

    /// Whether zeroing fails from now on.
    pub fn let_zeroing_fail(&self, fails: bool) {
        self.zeroing_fails.store(fails, Ordering::Relaxed);
    }

    /// Whether reading fails from now on, with half of the buffer filled.
    pub fn let_reading_fail(&self, fails: bool) {
        self.reading_fails.store(fails, Ordering::Relaxed);
    }

    /// Whether reads wait from now on.
    pub fn hold_reads(&self, held: bool) {
        self.reads_held.store(held, Ordering::Relaxed);
    }

    /// Reads that wait.
    pub fn waiting_reads(&self) -> usize {
        self.waiting_reads.lock().unwrap().len()
    }

    /// Carries out the reads that wait.
    pub fn let_reads_go(&self) {
        for (offset, buf, completer) in self.waiting_reads.lock().unwrap().drain(..) {
            completer.complete(block_on(self.memory.read(offset, buf)));
        }
    }

    /// Carries out the writes that wait.
    pub fn let_go(&self) {
        for (offset, data, completer) in self.waiting.lock().unwrap().drain(..) {
            completer.complete(block_on(self.memory.write(
                offset,
                data,
                Durability::Cached,
            )));
        }
    }
}

impl BlockFile for SlowFile {
    cowslip_block::forward_to_file!(memory: name, capabilities, len, discard, allocate, extents, flush, set_len, allocated_bytes);

    fn read(&self, offset: u64, mut buf: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        if self.reads_held.load(Ordering::Relaxed) {
            let (completer, result) = pending();
            let mut waiting = self.waiting_reads.lock().unwrap();
            waiting.push((offset, buf, completer));
            return result;
        }
        if !self.reading_fails.load(Ordering::Relaxed) {
            return self.memory.read(offset, buf);
        }
        let half = buf.len() / 2;
        buf.fill_range(0..half, 0);
        Pending::ready((Err(io::Error::from_raw_os_error(5)), buf))
    }
    fn write(&self, offset: u64, data: IoVec, how: Durability) -> Pending<io::Result<()>> {
        let range = offset..offset + data.len() as u64;
        self.writes.lock().unwrap().push(range);
        let first = data.slice(0, data.len().min(1)).to_vec().pop();
        if first != Some(HELD) {
            let done = self.memory.write(offset, data, how);
            return match first {
                Some(FAILING) => Pending::ready(Err(io::Error::from_raw_os_error(28))),
                _ => done,
            };
        }
        let (completer, result) = pending();
        self.waiting.lock().unwrap().push((offset, data, completer));
        result
    }
    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>> {
        match self.zeroing_fails.load(Ordering::Relaxed) {
            true => Pending::ready(Err(io::Error::from_raw_os_error(28))),
            false => self.memory.zero(offset, len, space),
        }
    }
}
