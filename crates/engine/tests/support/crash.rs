//! A file in memory that records what is done to it, and the states that a crash may leave.

use cowslip_block::random::Random;
use std::io;
use std::sync::{Arc, Mutex};

use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, Capabilities, Durability, FileExtent};
use cowslip_queue::{IoVec, Pending};

/// Something that a crash may lose.
#[derive(Clone, Debug)]
pub enum Op {
    Write(u64, Vec<u8>),
    /// A write that is durable when the next operation begins.
    Durable(u64, Vec<u8>),
    SetLen(u64),
    Flush,
}

impl Op {
    /// Does it, or the first `sectors` of it.
    pub fn apply(&self, bytes: &mut Vec<u8>, sectors: usize) {
        match self {
            Op::Write(offset, data) | Op::Durable(offset, data) => {
                // A sector is written whole or not at all.
                let first = (512 - (*offset as usize % 512)).min(data.len());
                let len = match sectors {
                    usize::MAX => data.len(),
                    0 => 0,
                    n => (first + (n - 1) * 512).min(data.len()),
                };
                let end = *offset as usize + len;
                if len > 0 && bytes.len() < end {
                    bytes.resize(end, 0);
                }
                bytes[*offset as usize..][..len].copy_from_slice(&data[..len]);
            }
            Op::SetLen(len) if sectors > 0 => bytes.resize(*len as usize, 0),
            Op::SetLen(_) | Op::Flush => {}
        }
    }

    fn sectors(&self) -> usize {
        match self {
            Op::Write(_, data) | Op::Durable(_, data) => data.len().div_ceil(512),
            Op::SetLen(_) | Op::Flush => 1,
        }
    }
}

/// The file, and what was done to it.
#[derive(Debug)]
pub struct Recorder {
    file: MemoryFile,
    capabilities: Capabilities,
    ops: Mutex<Vec<Op>>,
    /// Writes and flushes that succeed before all fail.
    budget: Mutex<usize>,
}

impl Recorder {
    pub fn new(bytes: Vec<u8>) -> Arc<Recorder> {
        Recorder::failing_after(bytes, usize::MAX)
    }

    /// Returns a file on which the first `budget` writes and flushes succeed.
    pub fn failing_after(bytes: Vec<u8>, budget: usize) -> Arc<Recorder> {
        let file = MemoryFile::new("image", bytes, 1);
        Arc::new(Recorder {
            capabilities: file.capabilities().clone(),
            file,
            ops: Mutex::default(),
            budget: Mutex::new(budget),
        })
    }

    /// A device: it has its length.
    pub fn device(bytes: Vec<u8>) -> Arc<Recorder> {
        let mut recorder = Recorder::new(bytes);
        let device = Arc::get_mut(&mut recorder).unwrap();
        device.capabilities.extends_with_zeroes = false;
        recorder
    }

    /// A file in which nothing becomes a hole.
    pub fn without_holes(bytes: Vec<u8>) -> Arc<Recorder> {
        let mut recorder = Recorder::new(bytes);
        let file = Arc::get_mut(&mut recorder).unwrap();
        file.capabilities.punches_holes = false;
        recorder
    }

    pub fn contents(&self) -> Vec<u8> {
        self.file.contents()
    }

    pub fn ops(&self) -> Vec<Op> {
        self.ops.lock().unwrap().clone()
    }

    fn record(&self, op: Op) -> io::Result<()> {
        let mut budget = self.budget.lock().unwrap();
        if *budget == 0 {
            return Err(io::Error::from_raw_os_error(28));
        }
        *budget -= 1;
        self.ops.lock().unwrap().push(op);
        Ok(())
    }
}

impl BlockFile for Recorder {
    cowslip_block::forward_to_file!(file: name, len, read);
    cowslip_block::file_from_fields!(capabilities);
    fn write(&self, offset: u64, data: IoVec, how: Durability) -> Pending<io::Result<()>> {
        let bytes = data.to_vec();
        let op = match how {
            Durability::Cached => Op::Write(offset, bytes),
            Durability::Durable => Op::Durable(offset, bytes),
        };
        match self.record(op) {
            Ok(()) => self.file.write(offset, data, how),
            Err(error) => Pending::ready(Err(error)),
        }
    }
    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        // A crash leaves a part of it, like a write of zeroes.
        match self.record(Op::Write(offset, vec![0; len as usize])) {
            Ok(()) => self.file.discard(offset, len),
            Err(error) => Pending::ready(Err(error)),
        }
    }
    /// Blocks of zeroes are holes.
    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        let contents = self.contents();
        let mut extents: Vec<FileExtent> = Vec::new();
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let next = end.min((at / 4096 + 1) * 4096);
            let last = contents.len().min(next as usize);
            let block = contents.get(at as usize..last).unwrap_or(&[]);
            let hole = block.iter().all(|&byte| byte == 0);
            let (start, len) = (at, next - at);
            FileExtent { start, len, hole }.add_to(&mut extents);
            at = next;
        }
        Pending::ready(Ok(extents))
    }
    fn flush(&self) -> Pending<io::Result<()>> {
        match self.record(Op::Flush) {
            Ok(()) => self.file.flush(),
            Err(error) => Pending::ready(Err(error)),
        }
    }
    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        if !self.capabilities.extends_with_zeroes {
            return Pending::ready(Err(io::ErrorKind::InvalidInput.into()));
        }
        match self.record(Op::SetLen(len)) {
            Ok(()) => self.file.set_len(len),
            Err(error) => Pending::ready(Err(error)),
        }
    }
}

/// Passes each state that a crash may leave to `judge`: at every operation, with unflushed writes
/// applied, dropped, torn, or reordered in some combinations.
pub fn each_crash(start: &[u8], ops: &[Op], mut judge: impl FnMut(&str, &[u8])) -> usize {
    let mut durable = start.to_vec();
    let mut pending: Vec<&Op> = Vec::new();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut states = 0;
    let mut tell = |name: String, durable: &[u8], applied: &[(&Op, usize)]| {
        let mut bytes = durable.to_vec();
        for (op, sectors) in applied {
            op.apply(&mut bytes, *sectors);
        }
        judge(&name, &bytes);
        states += 1;
    };
    for (index, op) in ops.iter().enumerate() {
        if let Op::Flush = op {
            for op in pending.drain(..) {
                op.apply(&mut durable, usize::MAX);
            }
            tell(format!("flushed at {index}"), &durable, &[]);
            continue;
        }
        pending.push(op);
        let all: Vec<(&Op, usize)> = pending.iter().map(|op| (*op, usize::MAX)).collect();
        tell(format!("cut after {index}"), &durable, &all);
        for torn in [1, op.sectors() / 2] {
            if torn > 0 && torn < op.sectors() {
                let mut some = all.clone();
                some.last_mut().unwrap().1 = torn;
                tell(format!("torn at {index}:{torn}"), &durable, &some);
            }
        }
        if pending.len() > 1 {
            let is_durable = |at: usize| at + 1 < all.len() && matches!(all[at].0, Op::Durable(..));
            let only = (0..all.len()).filter(|&at| is_durable(at) || at + 1 == all.len());
            let only: Vec<(&Op, usize)> = only.map(|at| all[at]).collect();
            tell(format!("only {index}"), &durable, &only);
            for round in 0..2 {
                // In the other order, but for what is durable: nothing older comes over that.
                let mut some: Vec<(&Op, usize)> = Vec::new();
                let mut after = Vec::new();
                for (at, &one) in all.iter().enumerate() {
                    if is_durable(at) {
                        some.extend(after.drain(..).rev());
                        some.push(one);
                    } else if random.next().is_multiple_of(2) {
                        after.push(one);
                    }
                }
                some.extend(after.into_iter().rev());
                tell(format!("some at {index}, {round}"), &durable, &some);
            }
        }
    }
    states
}
