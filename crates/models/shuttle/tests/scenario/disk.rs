//! A disk in memory with a thread of its own, which takes requests in any order and forgets on a
//! crash what no flush covered.

use std::io;
use std::sync::Arc;

use cowslip::file::{BlockFile, Capabilities, Durability, FileExtent, Space};
use cowslip::{IoVec, IoVecMut};
use cowslip_queue::{Completer, Pending, pending};
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::{Condvar, Mutex, MutexGuard};
use shuttle::thread;

/// A change of the file.
#[derive(Clone)]
enum Effect {
    Write(u64, IoVec),
    Zero(u64, u64),
    SetLen(u64),
    /// The end of file moves there if it was before.
    Reach(u64),
}

impl Effect {
    fn apply(&self, bytes: &mut Vec<u8>) {
        let reach = |bytes: &mut Vec<u8>, end: u64| {
            let end = bytes.len().max(end as usize);
            bytes.resize(end, 0);
        };
        match self {
            Effect::Write(offset, data) => {
                let end = *offset + data.len() as u64;
                reach(bytes, end);
                data.copy_to_slice(0, &mut bytes[*offset as usize..end as usize]);
            }
            Effect::Zero(offset, len) => {
                let end = bytes.len().min((offset + len) as usize);
                if (*offset as usize) < end {
                    bytes[*offset as usize..end].fill(0);
                }
            }
            Effect::SetLen(len) => bytes.resize(*len as usize, 0),
            Effect::Reach(end) => reach(bytes, *end),
        }
    }
}

enum Request {
    Read(u64, IoVecMut, Completer<(io::Result<()>, IoVecMut)>),
    Change(Effect, Durability, Completer<io::Result<()>>),
    /// Covers the changes up to a number.
    Flush(u64, Completer<io::Result<()>>),
}

struct Unflushed {
    number: u64,
    effect: Effect,
    /// It is durable without a flush.
    durable: bool,
}

#[derive(Default)]
struct Content {
    now: Vec<u8>,
    durable: Vec<u8>,
    unflushed: Vec<Unflushed>,
    changes: u64,
    /// With how many others go before each.
    waiting: Vec<(u32, Request)>,
    ended: bool,
}

/// The disk.
pub struct Disk {
    capabilities: Capabilities,
    content: Mutex<Content>,
    work: Condvar,
}

cowslip_block::debug_by_name!(Disk);

impl Disk {
    /// An empty one.
    pub fn new(alignment_bytes: u32) -> Arc<Disk> {
        Arc::new(Disk {
            capabilities: Capabilities::of_regular_file(alignment_bytes),
            content: Mutex::new(Content::default()),
            work: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Content> {
        self.content.lock().expect("nobody panics with it")
    }

    fn ask(&self, request: Request) {
        // Some are slow enough for others to go through whole cycles meanwhile.
        let others_first = match thread_rng().gen_range(0..10) {
            0 | 1 => thread_rng().gen_range(1..80),
            _ => 0,
        };
        self.lock().waiting.push((others_first, request));
        self.work.notify_one();
    }

    fn change(&self, effect: Effect, durability: Durability) -> Pending<io::Result<()>> {
        let (completer, result) = pending();
        self.ask(Request::Change(effect, durability, completer));
        result
    }

    /// Serves requests until [`Disk::end`].
    pub fn serve(&self) {
        loop {
            let mut content = self.lock();
            while content.waiting.is_empty() {
                if content.ended {
                    return;
                }
                content = self.work.wait(content).expect("nobody panics with it");
            }
            let Some(request) = content.choose() else {
                // All are slow: other threads that have something to do get the time.
                drop(content);
                thread::yield_now();
                continue;
            };
            match request {
                Request::Read(offset, mut buf, completer) => {
                    let start = content.now.len().min(offset as usize);
                    let present = buf.len().min(content.now.len() - start);
                    buf.copy_from_slice(0, &content.now[start..start + present]);
                    buf.fill_range(present..buf.len(), 0);
                    drop(content);
                    completer.complete((Ok(()), buf));
                }
                Request::Change(effect, durability, completer) => {
                    content.carry_out(effect, durability);
                    drop(content);
                    completer.complete(Ok(()));
                }
                Request::Flush(covers, completer) => {
                    content.flush(covers);
                    drop(content);
                    completer.complete(Ok(()));
                }
            }
        }
    }

    /// No more requests will come.
    pub fn end(&self) {
        self.lock().ended = true;
        self.work.notify_all();
    }

    /// Returns a state that a crash now might leave, and the result of `at_once` at the same
    /// moment.
    pub fn crash<T>(&self, at_once: impl FnOnce() -> T) -> (Vec<u8>, T) {
        let content = self.lock();
        let mut left = content.durable.clone();
        for change in &content.unflushed {
            if change.durable || thread_rng().gen_bool(0.5) {
                change.effect.apply(&mut left);
            }
        }
        (left, at_once())
    }

    /// The bytes now.
    pub fn bytes(&self) -> Vec<u8> {
        self.lock().now.clone()
    }
}

impl Content {
    /// One of the requests whose time has come; the others come closer.
    fn choose(&mut self) -> Option<Request> {
        let due = |(others_first, _): &(u32, Request)| *others_first == 0;
        let ready: Vec<usize> = (0..self.waiting.len())
            .filter(|&at| due(&self.waiting[at]))
            .collect();
        for (others_first, _) in &mut self.waiting {
            *others_first = others_first.saturating_sub(1);
        }
        let chosen = thread_rng().gen_range(0..ready.len().max(1));
        let at = *ready.get(chosen)?;
        Some(self.waiting.swap_remove(at).1)
    }

    fn carry_out(&mut self, effect: Effect, durability: Durability) {
        effect.apply(&mut self.now);
        self.changes += 1;
        self.unflushed.push(Unflushed {
            number: self.changes,
            effect,
            durable: durability == Durability::Durable,
        });
    }

    fn flush(&mut self, covers: u64) {
        let later = self
            .unflushed
            .partition_point(|change| change.number <= covers);
        for change in self.unflushed.drain(..later) {
            change.effect.apply(&mut self.durable);
        }
    }
}

impl BlockFile for Disk {
    fn name(&self) -> &str {
        "disk"
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn len(&self) -> Pending<io::Result<u64>> {
        Pending::ready(Ok(self.lock().now.len() as u64))
    }
    fn read(&self, offset: u64, buf: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        let (completer, result) = pending();
        self.ask(Request::Read(offset, buf, completer));
        result
    }
    fn write(&self, offset: u64, data: IoVec, how: Durability) -> Pending<io::Result<()>> {
        self.change(Effect::Write(offset, data), how)
    }
    fn zero(&self, offset: u64, len: u64, _: Space) -> Pending<io::Result<()>> {
        self.change(Effect::Zero(offset, len), Durability::Cached)
    }
    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.change(Effect::Zero(offset, len), Durability::Cached)
    }
    fn allocate(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.change(Effect::Reach(offset + len), Durability::Cached)
    }
    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        let extent = FileExtent {
            start: offset,
            len,
            hole: false,
        };
        Pending::ready(Ok(vec![extent]))
    }
    fn flush(&self) -> Pending<io::Result<()>> {
        let (completer, result) = pending();
        let covers = self.lock().changes;
        self.ask(Request::Flush(covers, completer));
        result
    }
    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        self.change(Effect::SetLen(len), Durability::Cached)
    }
}
