//! A file that records what is asked of it, that may be full, and that may be far longer than
//! memory.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use cowslip_queue::{Completer, IoVec, IoVecMut, Pending, pending};

use crate::file::{BlockFile, Capabilities, Durability, FileExtent};
use crate::sync::{Mutex, MutexGuard, lock};

const PAGE: u64 = 4096;

/// An operation that was requested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    Read(Range<u64>),
    Write(Range<u64>),
    Discard(Range<u64>),
    Allocate(Range<u64>),
    SetLen(u64),
    Flush,
}

/// Which operations fail from now on, with which error.
type Fault = Box<dyn Fn(&Op) -> Option<io::Error> + Send>;

#[derive(Default)]
struct Inside {
    len: u64,
    /// Pages that are not zeroes.
    pages: BTreeMap<u64, Vec<u8>>,
    log: Vec<Op>,
    /// Ranges of durable writes that have succeeded.
    durable: Vec<Range<u64>>,
    fault: Option<Fault>,
    /// Flushes that do not end yet, if they are to wait.
    held: Option<Vec<Completer<io::Result<()>>>>,
}

/// The file.
pub struct Disk {
    capabilities: Capabilities,
    is_called_a_hole: bool,
    inside: Mutex<Inside>,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Disk")
    }
}

impl Disk {
    pub fn new(alignment_bytes: u32) -> Arc<Disk> {
        Arc::new(Disk {
            capabilities: Capabilities::of_regular_file(alignment_bytes),
            is_called_a_hole: false,
            inside: Mutex::default(),
        })
    }

    /// A file of which all is called a hole, as FUSE does where the system has not handed it yet
    /// what was written.
    pub fn called_a_hole(punches_holes: bool) -> Arc<Disk> {
        let mut disk = Arc::into_inner(Disk::new(1)).expect("nobody else has it");
        disk.capabilities.punches_holes = punches_holes;
        disk.is_called_a_hole = true;
        Arc::new(disk)
    }

    /// A device of that length with the bytes of this file: it cannot grow.
    pub fn device(file: Arc<Disk>, len: u64) -> Arc<Disk> {
        let mut disk = Arc::into_inner(file).expect("nobody else has it");
        disk.capabilities.extends_with_zeroes = false;
        disk.lock().len = len;
        Arc::new(disk)
    }

    /// A copy of a file that is not long, its holes as other files have them.
    pub fn contents(&self) -> Vec<u8> {
        let inside = self.lock();
        assert!(inside.len < 1 << 30);
        let mut bytes = vec![0; inside.len.next_multiple_of(PAGE) as usize];
        let pages = inside.len.div_ceil(PAGE);
        for (page, content) in inside.pages.range(..pages) {
            bytes[(page * PAGE) as usize..][..PAGE as usize].copy_from_slice(content);
        }
        bytes.truncate(inside.len as usize);
        bytes
    }

    pub fn len_bytes(&self) -> u64 {
        self.lock().len
    }

    /// Returns the operations since the last call.
    pub fn take_log(&self) -> Vec<Op> {
        std::mem::take(&mut self.lock().log)
    }

    /// Returns the ranges of durable writes that have succeeded since the last call.
    pub fn take_durable(&self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.lock().durable)
    }

    pub fn fail(&self, fault: impl Fn(&Op) -> Option<io::Error> + Send + 'static) {
        self.lock().fault = Some(Box::new(fault));
    }

    /// There is no more space than `len` bytes.
    pub fn fill_up(&self, len: u64) {
        self.fail(move |op| {
            let end = match op {
                Op::Write(range) | Op::Allocate(range) => range.end,
                Op::SetLen(end) => *end,
                Op::Read(_) | Op::Discard(_) | Op::Flush => 0,
            };
            (end > len).then(|| io::Error::from_raw_os_error(super::ENOSPC))
        });
    }

    pub fn mend(&self) {
        self.lock().fault = None;
    }

    /// Flushes that are issued from now on do not end before they are released.
    pub fn hold_flushes(&self) {
        self.lock().held = Some(Vec::new());
    }

    /// Lets the flushes end that are held, and those to come.
    pub fn release_flushes(&self) {
        let held = self.lock().held.take().unwrap_or_default();
        held.into_iter().for_each(|flush| flush.complete(Ok(())));
    }

    /// Puts bytes in, without a record.
    pub fn patch(&self, at: u64, bytes: &[u8]) {
        self.lock().put(at, bytes);
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        lock(&self.inside)
    }

    fn begin(&self, op: Op) -> io::Result<MutexGuard<'_, Inside>> {
        let mut inside = self.lock();
        if let Op::Read(range) | Op::Write(range) | Op::Discard(range) = &op {
            let alignment = u64::from(self.capabilities.alignment_bytes);
            assert!(
                range.start.is_multiple_of(alignment) && range.end.is_multiple_of(alignment),
                "{op:?} is not aligned"
            );
        }
        let error = inside.fault.as_ref().and_then(|fault| fault(&op));
        inside.log.push(op);
        error.map_or(Ok(inside), Err)
    }
}

impl Inside {
    fn get(&self, mut at: u64, mut bytes: &mut [u8]) {
        while !bytes.is_empty() {
            let within = (at % PAGE) as usize;
            let len = bytes.len().min(PAGE as usize - within);
            let (piece, rest) = bytes.split_at_mut(len);
            match self.pages.get(&(at / PAGE)) {
                Some(page) => piece.copy_from_slice(&page[within..within + len]),
                None => piece.fill(0),
            }
            bytes = rest;
            at += len as u64;
        }
    }

    fn put(&mut self, mut at: u64, mut bytes: &[u8]) {
        self.len = self.len.max(at + bytes.len() as u64);
        while !bytes.is_empty() {
            let within = (at % PAGE) as usize;
            let len = bytes.len().min(PAGE as usize - within);
            let page = self.pages.entry(at / PAGE);
            let page = page.or_insert_with(|| vec![0; PAGE as usize]);
            page[within..within + len].copy_from_slice(&bytes[..len]);
            bytes = &bytes[len..];
            at += len as u64;
        }
    }

    fn zero(&mut self, range: Range<u64>) {
        for (page, bytes) in self.pages.range_mut(range.start / PAGE..=range.end / PAGE) {
            let within = |at: u64| at.clamp(page * PAGE, (page + 1) * PAGE) - page * PAGE;
            bytes[within(range.start) as usize..within(range.end) as usize].fill(0);
        }
    }
}

impl BlockFile for Disk {
    fn name(&self) -> &str {
        "a.qcow2"
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn len(&self) -> Pending<io::Result<u64>> {
        Pending::ready(Ok(self.len_bytes()))
    }
    fn read(&self, offset: u64, mut buf: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        let outcome = self.begin(Op::Read(offset..offset + buf.len() as u64));
        let outcome = outcome.map(|inside| {
            let mut bytes = vec![0; buf.len()];
            inside.get(offset, &mut bytes);
            buf.copy_from_slice(0, &bytes);
        });
        Pending::ready((outcome, buf))
    }
    fn write(&self, offset: u64, data: IoVec, how: Durability) -> Pending<io::Result<()>> {
        let bytes = data.to_vec();
        let range = offset..offset + bytes.len() as u64;
        let outcome = self.begin(Op::Write(range.clone()));
        Pending::ready(outcome.map(|mut inside| {
            inside.put(offset, &bytes);
            if how == Durability::Durable {
                inside.durable.push(range);
            }
        }))
    }
    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        let outcome = self.begin(Op::Discard(offset..offset + len));
        Pending::ready(outcome.map(|mut inside| inside.zero(offset..offset + len)))
    }
    fn allocate(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        let outcome = self.begin(Op::Allocate(offset..offset + len));
        Pending::ready(outcome.map(|mut inside| inside.len = inside.len.max(offset + len)))
    }
    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        let whole = FileExtent {
            start: offset,
            len,
            hole: self.is_called_a_hole,
        };
        Pending::ready(Ok(vec![whole]))
    }
    fn flush(&self) -> Pending<io::Result<()>> {
        let mut inside = match self.begin(Op::Flush) {
            Ok(inside) => inside,
            Err(error) => return Pending::ready(Err(error)),
        };
        match &mut inside.held {
            None => Pending::ready(Ok(())),
            Some(held) => {
                let (completer, flush) = pending();
                held.push(completer);
                flush
            }
        }
    }
    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        let outcome = self.begin(Op::SetLen(len));
        Pending::ready(outcome.map(|mut inside| {
            let end = inside.len.max(len);
            inside.zero(len..end);
            inside.len = len;
        }))
    }
}
