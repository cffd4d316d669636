//! [`RbdFile`]: an image in RBD as a file.
//!
//! Reads, writes, flushes and their like are requests of librbd, which end on its threads. Calls
//! that wait (a change of the length, the search for holes) are made one after the other by a
//! thread of the file's own, so that a cluster that does not answer holds up nothing else.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use cowslip_block::file::{
    BlockFile, Capabilities, Durability, FileExtent, Space, Storage, unsupported,
};
use cowslip_queue::{Buf, BufMut, Completer, IoVec, IoVecMut, Pending, pending};

use crate::ffi::{self, Answer, Code, Memory, OpenImage, Operation, Shape};
use crate::under_way::Finish;

/// Parts of a range at most that are holes or data: the rest counts as data.
const EXTENTS_MAX: usize = 1 << 20;

/// A call that waits.
type Job = Box<dyn FnOnce(&State) + Send>;

/// State that requests share with the thread of the calls that wait.
struct State {
    image: Arc<OpenImage>,
    /// Length of the image.
    bytes: AtomicU64,
    object_bytes: u64,
    /// Length of a row of stripes, after which other objects follow.
    period_bytes: u64,
    overlap_bytes: u64,
}

/// An image in RBD, as a file.
pub struct RbdFile {
    name: String,
    storage: Storage,
    capabilities: Capabilities,
    state: Arc<State>,
    /// The way to the thread of the calls that wait, once there is one.
    waiting: Mutex<Option<Sender<Job>>>,
}

cowslip_block::debug_by_name!(RbdFile, name);

impl RbdFile {
    pub(crate) fn new(
        (name, storage): (&str, Storage),
        image: Arc<OpenImage>,
        shape: Shape,
        writable: bool,
    ) -> RbdFile {
        let zeroes = image.writes_zeroes();
        RbdFile {
            name: name.to_string(),
            storage,
            capabilities: Capabilities {
                writable,
                extends_with_zeroes: true,
                zeroes_fast: zeroes,
                // A discard of Ceph's leaves what is no whole unit.
                punches_holes: zeroes,
                ..Capabilities::NONE
            },
            state: Arc::new(State {
                image,
                bytes: AtomicU64::new(shape.bytes),
                object_bytes: shape.object_bytes,
                period_bytes: shape.object_bytes.saturating_mul(shape.stripe_count),
                overlap_bytes: shape.overlap_bytes,
            }),
            waiting: Mutex::new(None),
        }
    }

    /// Has the thread of the calls that wait make one.
    fn wait<T: Send + 'static>(
        &self,
        call: impl FnOnce(&State) -> Result<T, Code> + Send + 'static,
    ) -> Pending<io::Result<T>> {
        let (to, result) = pending();
        self.post(finish(to), move |state, to| to.end(call(state)));
        result
    }

    /// Has that thread make a call that delivers its result itself.
    fn post<T: Send + 'static>(
        &self,
        to: Finish<T>,
        call: impl FnOnce(&State, Finish<T>) + Send + 'static,
    ) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let jobs = match &mut *waiting {
            Some(jobs) => jobs,
            none => match start(&self.state) {
                Ok(jobs) => none.insert(jobs),
                Err(_) => return to.end(Err(Code::NO_THREAD)),
            },
        };
        // The thread is there for as long as this end of the channel.
        drop(jobs.send(Box::new(move |state| call(state, to))));
    }

    fn writable<T>(&self) -> Result<(), Pending<io::Result<T>>> {
        match self.capabilities.writable {
            true => Ok(()),
            false => Err(Pending::ready(
                Err(io::ErrorKind::ReadOnlyFilesystem.into()),
            )),
        }
    }
}

/// Starts a thread for calls that wait.
fn start(state: &Arc<State>) -> io::Result<Sender<Job>> {
    let (to, jobs) = mpsc::channel::<Job>();
    let state = Arc::clone(state);
    let thread = thread::Builder::new().name("cowslip-rbd".to_string());
    thread.spawn(move || {
        ffi::block_signals();
        jobs.into_iter().for_each(|job| job(&state));
    })?;
    Ok(to)
}

impl State {
    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Acquire)
    }

    /// Begins a request that gives nothing back, and flushes after it if it is to be durable.
    fn run(
        &self,
        operation: Operation,
        range: (u64, u64),
        (memory, durability): (Memory, Durability),
        to: Finish<()>,
    ) {
        let image = Arc::clone(&self.image);
        let ended = move |answer: Answer, _| match (answer, durability) {
            (Ok(_), Durability::Durable) => {
                let flushed = move |answer: Answer, _| to.end(answer.map(drop));
                image.start(Operation::Flush, (0, 0), Memory::None, Box::new(flushed));
            }
            (answer, _) => to.end(answer.map(drop)),
        };
        self.image.start(operation, range, memory, Box::new(ended));
    }

    fn write(&self, offset: u64, (data, durability): (Buf, Durability), to: Finish<()>) {
        let range = (offset, data.len() as u64);
        let memory = Memory::Write(data);
        self.run(Operation::Write, range, (memory, durability), to);
    }

    fn set_len(&self, bytes: u64) -> Result<(), Code> {
        if bytes != self.bytes() {
            self.image.image().resize(bytes)?;
            self.bytes.store(bytes, Ordering::Release);
        }
        Ok(())
    }

    /// Makes the image at least as long as this, in units of an object: a change of the length is a
    /// matter of the whole cluster.
    fn grow_to(&self, end: u64) -> Result<(), Code> {
        match end <= self.bytes() {
            true => Ok(()),
            false => self.set_len(
                end.checked_next_multiple_of(self.object_bytes)
                    .unwrap_or(end),
            ),
        }
    }

    fn extents(&self, offset: u64, end: u64) -> Result<Vec<FileExtent>, Code> {
        let mut found = Extents {
            extents: Vec::new(),
            at: offset,
            end,
        };
        let image_end = end.min(self.bytes());
        // Of what an image below shows, versions that are in use may answer wrongly.
        let own = self.overlap_bytes.clamp(offset, image_end.max(offset));
        found.data(offset, own);
        if own < image_end {
            // Versions before 17 take an offset within an object for its beginning.
            let start = own - own % self.period_bytes;
            let len = image_end
                .next_multiple_of(self.period_bytes)
                .min(self.bytes())
                - start;
            let mut add = |at: u64, len: u64| {
                found.data(at.max(own), at.saturating_add(len).min(image_end));
                found.extents.len() < EXTENTS_MAX
            };
            self.image.image().data(start, len, &mut add)?;
            if found.extents.len() >= EXTENTS_MAX {
                let at = found.at;
                found.data(at, image_end);
            }
        }
        Ok(found.finish())
    }
}

/// Data and holes of a range, found in order.
struct Extents {
    extents: Vec<FileExtent>,
    /// The end of what is known.
    at: u64,
    end: u64,
}

impl Extents {
    fn push(&mut self, end: u64, hole: bool) {
        if end <= self.at {
            return;
        }
        let (start, len) = (self.at, end - self.at);
        FileExtent { start, len, hole }.add_to(&mut self.extents);
        self.at = end;
    }

    /// Adds data; what is between it and what is known is a hole.
    fn data(&mut self, start: u64, end: u64) {
        let end = end.min(self.end);
        if start < end && end > self.at {
            self.push(start, true);
            self.push(end, false);
        }
    }

    fn finish(mut self) -> Vec<FileExtent> {
        self.push(self.end, true);
        self.extents
    }
}

/// The end of a request whose result this delivers.
fn finish<T: Send + 'static>(to: Completer<io::Result<T>>) -> Finish<T> {
    Finish::new(move |outcome: Result<T, Code>| to.complete(outcome.map_err(io::Error::from)))
}

fn invalid<T>() -> Pending<io::Result<T>> {
    Pending::ready(Err(io::ErrorKind::InvalidInput.into()))
}

impl BlockFile for RbdFile {
    cowslip_block::file_from_fields!(name, capabilities, storage);

    fn len(&self) -> Pending<io::Result<u64>> {
        Pending::ready(Ok(self.state.bytes()))
    }

    fn read(&self, offset: u64, mut target: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        let len = target.len() as u64;
        if offset.checked_add(len).is_none() {
            return Pending::ready((Err(io::ErrorKind::InvalidInput.into()), target));
        }
        // Beyond its end are zeroes, of which librbd knows nothing.
        let kept = self.state.bytes().saturating_sub(offset).min(len) as usize;
        let beyond = target.split_off(kept);
        if target.is_empty() {
            return Pending::ready((Ok(()), with_zeroes(target, beyond)));
        }
        // Of its own: who waits may be given the list back before librbd has let go of the memory.
        let buf = BufMut::for_overwrite(kept);
        let (to, read) = pending();
        let finish = Finish::new(move |outcome: Result<(usize, BufMut), Code>| {
            let outcome = match outcome {
                Ok((bytes, buf)) if bytes == kept => {
                    target.copy_from_slice(0, &buf);
                    Ok(())
                }
                // It has become shorter meanwhile.
                Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
                Err(code) => Err(code.into()),
            };
            to.complete((outcome, with_zeroes(target, beyond)));
        });
        let ended = move |answer: Answer, memory| match memory {
            Memory::Read(buf) => finish.end(answer.map(|bytes| (bytes, buf))),
            Memory::None | Memory::Write(_) => unreachable!("a read comes back with its memory"),
        };
        let range = (offset, kept as u64);
        self.state
            .image
            .start(Operation::Read, range, Memory::Read(buf), Box::new(ended));
        read
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> Pending<io::Result<()>> {
        if let Err(refused) = self.writable() {
            return refused;
        }
        let Some(end) = offset.checked_add(data.len() as u64) else {
            return invalid();
        };
        if data.is_empty() {
            return Pending::ready(Ok(()));
        }
        let data = data.to_buf();
        let (to, written) = pending();
        let to = finish(to);
        match end <= self.state.bytes() {
            true => self.state.write(offset, (data, durability), to),
            false => self.post(to, move |state, to| match state.grow_to(end) {
                Ok(()) => state.write(offset, (data, durability), to),
                Err(code) => to.end(Err(code)),
            }),
        }
        written
    }

    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>> {
        if let Err(refused) = self.writable() {
            return refused;
        }
        if !self.capabilities.zeroes_fast {
            return unsupported();
        }
        let Some(end) = offset.checked_add(len) else {
            return invalid();
        };
        let operation = Operation::Zero {
            keeps_space: space == Space::Keep,
        };
        let nothing = (Memory::None, Durability::Cached);
        let (to, zeroed) = pending();
        let to = finish(to);
        match end <= self.state.bytes() {
            _ if len == 0 => to.end(Ok(())),
            true => self.state.run(operation, (offset, len), nothing, to),
            false => self.post(to, move |state, to| match state.grow_to(end) {
                Ok(()) => state.run(operation, (offset, len), nothing, to),
                Err(code) => to.end(Err(code)),
            }),
        }
        zeroed
    }

    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        if let Err(refused) = self.writable() {
            return refused;
        }
        let len = len.min(self.state.bytes().saturating_sub(offset));
        if len == 0 {
            return Pending::ready(Ok(()));
        }
        let operation = match self.capabilities.punches_holes {
            true => Operation::Zero { keeps_space: false },
            false => Operation::Discard,
        };
        let (to, discarded) = pending();
        let to = finish(to);
        let nothing = (Memory::None, Durability::Cached);
        self.state.run(operation, (offset, len), nothing, to);
        discarded
    }

    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        let end = offset.saturating_add(len);
        if offset == end {
            return Pending::ready(Ok(Vec::new()));
        }
        self.wait(move |state| state.extents(offset, end))
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        if !self.capabilities.writable {
            return Pending::ready(Ok(()));
        }
        let (to, flushed) = pending();
        let to = finish(to);
        let nothing = (Memory::None, Durability::Cached);
        self.state.run(Operation::Flush, (0, 0), nothing, to);
        flushed
    }

    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        match len == self.state.bytes() {
            true => Pending::ready(Ok(())),
            false => match self.writable() {
                Ok(()) => self.wait(move |state| state.set_len(len)),
                Err(refused) => refused,
            },
        }
    }
}

/// A list with a second one after it, which is filled with zeroes.
fn with_zeroes(mut list: IoVecMut, mut beyond: IoVecMut) -> IoVecMut {
    beyond.fill(0);
    list.append(beyond);
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_are_found_are_without_gaps() {
        let mut found = Extents {
            extents: Vec::new(),
            at: 10,
            end: 100,
        };
        // The first two touch, one is there twice, the last goes beyond the range.
        for (start, end) in [(10, 20), (20, 30), (25, 30), (50, 60), (90, 200)] {
            found.data(start, end);
        }
        let found: Vec<_> = found
            .finish()
            .iter()
            .map(|e| (e.start, e.len, e.hole))
            .collect();
        assert_eq!(
            found,
            [
                (10, 20, false),
                (30, 20, true),
                (50, 10, false),
                (60, 30, true),
                (90, 10, false)
            ]
        );
    }
}
