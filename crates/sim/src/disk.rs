//! A disk that is simulated: files whose operations complete when a seed says so, that lose what
//! was not flushed when the power fails, and that fail when asked to.
//!
//! [`SimFile`] implements the engine's `BlockFile`. [`SimDisk::step`] moves one operation on.
//! [`SimDisk::crash`] ends it and leaves the surviving bytes; the media assumptions are in
//! [`crash`]. Requests that break the file's alignment or its read-only mode panic: they are
//! mistakes of the engine.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cowslip::file::{
    BlockFile, Capabilities, ContentId, Durability, FileExtent, FileId, Holes, Space,
};
use cowslip_queue::{IoVec, IoVecMut, Pending, pending};

use crate::rng::Rng;
use crate::trace::Trace;

pub mod content;
pub mod crash;
pub mod effect;
pub mod fault;
mod state;
pub mod structure;
mod terms;

use content::Content;
use effect::Effect;
use fault::{Fault, Faults, Verb};
use state::{Answer, Asked, FileState, State};
pub use state::{Counters, Moment};
use structure::Structures;
pub use terms::{Allocates, Lie, Losses, Pace};

/// A simulated disk; a handle that can be cloned.
#[derive(Clone)]
pub struct SimDisk {
    state: Arc<Mutex<State>>,
    allocates: Allocates,
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimDisk({:?})", self.counters())
    }
}

/// A file that has the length that it has.
pub fn device(alignment_bytes: u32, block_bytes: u32) -> Capabilities {
    Capabilities {
        alignment_bytes,
        space_alignment_bytes: block_bytes.max(alignment_bytes),
        writable: true,
        extends_with_zeroes: false,
        zeroes_fast: true,
        punches_holes: false,
    }
}

impl SimDisk {
    /// A disk without files.
    pub fn new(rng: Rng, trace: Trace) -> SimDisk {
        SimDisk {
            state: Arc::new(Mutex::new(State::new(rng, trace))),
            allocates: Allocates::Yes,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets how operations are delayed.
    pub fn set_pace(&self, pace: Pace) {
        self.lock().pace = pace;
    }

    /// Sets how the disk lies.
    pub fn set_lie(&self, lie: Lie) {
        self.lock().lie = lie;
    }

    /// Sets what power failures take.
    pub fn set_losses(&self, losses: Losses) {
        self.lock().losses = losses;
    }

    /// Sets whether files opened from now on can allocate.
    pub fn set_allocates(&mut self, allocates: Allocates) {
        self.allocates = allocates;
    }

    /// Replaces the failures to come.
    pub fn set_faults(&self, faults: &[Fault]) {
        self.lock().faults = Faults::new(faults);
    }

    /// Adds a failure to come.
    pub fn add_fault(&self, fault: Fault) {
        self.lock().faults.add(fault);
    }

    /// Sets failures as they were.
    pub fn put_faults(&self, faults: Faults) {
        self.lock().faults = faults;
    }

    /// How many operations have failed so far, and the last of them.
    pub fn delivered(&self) -> (u64, Option<(Verb, i32)>) {
        let state = self.lock();
        (state.faults.delivered, state.faults.last)
    }

    /// Sets the power to fail right after this number of further issues and completions. Operations
    /// that are issued afterwards get no answer, and nothing moves any more.
    pub fn fail_power_after(&self, events: u64) {
        self.lock().power_left = Some(events.max(1));
    }

    /// The power will fail at one of the coming issues and completions of flushes, the first of
    /// which is 1, or `then` issues and completions later.
    pub fn fail_power_at_flush(&self, flushes: u64, then: u64) {
        self.lock().power_flushes = Some((flushes.max(1), then));
    }

    /// The power will fail with the issue or completion, of that number, of operations of a kind.
    pub fn fail_power_at(&self, (verb, moment, number): (Verb, Moment, u64)) {
        self.lock().power_at = Some((verb, moment, number.max(1)));
    }

    /// Returns the last event: the one at which the power failed, if it has.
    pub fn last_event(&self) -> Option<(Verb, Moment)> {
        self.lock().last_event
    }

    /// Sets the power to fail this number of issues and completions after an operation that fails.
    pub fn fail_power_after_fault(&self, events: u64) {
        self.lock().power_after_fault = Some(events);
    }

    /// The power stays on; the events that were left, if it was about to fail and has not.
    pub fn hold_power(&self) -> Option<u64> {
        let mut state = self.lock();
        state.power_flushes = None;
        state.power_at = None;
        state.power_after_fault = None;
        state.power_left.take_if(|left| *left > 0)
    }

    /// Whether the power is on.
    pub fn has_power(&self) -> bool {
        self.lock().has_power()
    }

    /// The failures so far.
    pub fn faults(&self) -> Faults {
        self.lock().faults.clone()
    }

    /// Names the task that runs now, for traces.
    pub fn set_caller(&self, name: &str) {
        let mut state = self.lock();
        state.caller.clear();
        state.caller.push_str(name);
    }

    /// Adds a file whose bytes are on the medium.
    pub fn add_file(&self, name: &str, capabilities: Capabilities, content: Content) {
        let mut state = self.lock();
        assert!(
            state.files.iter().all(|file| file.name != name),
            "'{name}' exists"
        );
        state
            .files
            .push(FileState::new(name, capabilities, content));
    }

    /// A handle to a file, if there is one of that name.
    pub fn open(&self, name: &str, writable: bool) -> Option<Arc<SimFile>> {
        let state = self.lock();
        let index = state.files.iter().position(|file| file.name == name)?;
        let mut capabilities = state.files[index].capabilities.clone();
        capabilities.writable = writable;
        Some(Arc::new(SimFile {
            disk: self.clone(),
            index,
            name: name.to_string(),
            capabilities,
        }))
    }

    /// Returns the content that reads of a file see now.
    pub fn content(&self, name: &str) -> Option<Content> {
        let state = self.lock();
        let file = state.files.iter().find(|file| file.name == name)?;
        Some(file.volatile.clone())
    }

    /// Names of all files.
    pub fn names(&self) -> Vec<String> {
        let state = self.lock();
        state.files.iter().map(|file| file.name.clone()).collect()
    }

    /// Moves one pending operation on; false if there is none.
    pub fn step(&self) -> bool {
        self.lock().step()
    }

    /// Moves one pending operation on if one is due; else time passes.
    pub fn step_if_due(&self) -> bool {
        self.lock().step_if_due()
    }

    /// Operations that have not completed.
    pub fn in_flight(&self) -> usize {
        self.lock().pending.len()
    }

    /// Returns its counters so far.
    pub fn counters(&self) -> Counters {
        self.lock().counters
    }

    /// Whether a hole is being punched in a file, or was punched and no flush covers it.
    pub fn has_hole_at_risk(&self, name: &str) -> bool {
        self.lock().has_hole_at_risk(name)
    }

    /// Whether bytes of a file are at risk that were written by a process that has died since.
    pub fn has_outlived_at_risk(&self, name: &str) -> bool {
        self.lock().has_outlived_at_risk(name)
    }

    /// Changes the bytes of a file on the medium, as another program would between two sessions.
    pub fn edit(&self, name: &str, change: impl FnOnce(&mut Content)) {
        let mut state = self.lock();
        let file = state.files.iter_mut().find(|file| file.name == name);
        file.expect("the run has made it").edit(change);
    }

    /// How many effects a crash would have to decide now.
    pub fn at_risk(&self) -> usize {
        self.lock().undecided()
    }

    /// Puts all effects so far on the medium: for the preparation of a run.
    pub fn persist_all(&self) {
        self.lock().persist_all();
    }

    /// The power fails. Operations in flight are never answered; their tasks must be gone, or never
    /// be polled again. The surviving bytes are a disk of their own, with honest defaults.
    pub fn crash(&self, rng: Rng, next: Rng) -> SimDisk {
        let trace = self.lock().trace.clone();
        let state = std::mem::replace(&mut *self.lock(), State::new(next.clone(), trace.clone()));
        let disk = SimDisk::new(next, trace);
        disk.lock().files = state.crash(rng);
        SimDisk {
            allocates: self.allocates,
            ..disk
        }
    }

    /// Returns the files that a power failure at this moment would leave, as a disk of its own: a
    /// draw from `rng`. Nothing happens to this one.
    pub fn if_power_failed(&self, rng: &Rng, (losses, trace): (Losses, &Trace)) -> SimDisk {
        let files = self.lock().if_power_failed(rng.clone(), (losses, trace));
        let disk = SimDisk::new(rng.clone(), Trace::off());
        disk.lock().files = files;
        disk
    }

    /// Returns the structures at risk when a flush was issued since the last call, if one was.
    pub fn issued_flush(&self) -> Option<Structures> {
        self.lock().flush_issued.take()
    }

    /// The process dies; the bytes that the system holds stay, flushed or not.
    pub fn kill(&self, rng: Rng) {
        self.lock().kill(rng);
    }
}

/// A file of a simulated disk.
pub struct SimFile {
    disk: SimDisk,
    index: usize,
    name: String,
    capabilities: Capabilities,
}

impl fmt::Debug for SimFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimFile({})", self.name)
    }
}

impl SimFile {
    fn check_alignment(&self, offset: u64, len: u64) {
        self.check_unit(self.capabilities.alignment_bytes, (offset, len));
    }

    fn check_unit(&self, alignment_bytes: u32, (offset, len): (u64, u64)) {
        let alignment = u64::from(alignment_bytes);
        assert!(
            offset.is_multiple_of(alignment) && len.is_multiple_of(alignment),
            "{offset:#x}+{len:#x} in '{}' is not aligned to {alignment}",
            self.name
        );
        assert!(len > 0, "an empty operation on '{}'", self.name);
    }

    fn check_writable(&self) {
        assert!(
            self.capabilities.writable,
            "a change of '{}', which was opened read-only",
            self.name
        );
    }

    /// Checks that nothing lies beyond the end of a device.
    fn check_end(&self, end: u64) {
        let len = || self.disk.lock().files[self.index].volatile.len();
        assert!(
            self.capabilities.extends_with_zeroes || end <= len(),
            "a change up to {end:#x} of '{}', which ends before",
            self.name
        );
    }

    fn change(&self, verb: Verb, effects: Vec<Effect>) -> Pending<io::Result<()>> {
        self.check_writable();
        let (to, waiting) = pending();
        let unsupported = match verb {
            Verb::Zero => !self.capabilities.zeroes_fast,
            Verb::Allocate => {
                self.disk.allocates == Allocates::No || !self.capabilities.extends_with_zeroes
            }
            _ => false,
        };
        self.disk.lock().issue(Asked {
            file: self.index,
            verb,
            effects,
            durable: false,
            unsupported,
            answer: Answer::Done(to),
        });
        waiting
    }

    fn ask(&self, verb: Verb, answer: Answer) {
        self.disk.lock().issue(Asked {
            file: self.index,
            verb,
            effects: Vec::new(),
            durable: false,
            unsupported: false,
            answer,
        });
    }
}

impl BlockFile for SimFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn id(&self) -> Option<FileId> {
        Some(FileId(1, self.index as u64))
    }

    fn content_id(&self) -> Option<ContentId> {
        self.id().map(ContentId::whole)
    }

    fn len(&self) -> Pending<io::Result<u64>> {
        let (to, waiting) = pending();
        self.ask(Verb::Query, Answer::Len(to));
        waiting
    }

    fn read(&self, offset: u64, buf: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        self.check_alignment(offset, buf.len() as u64);
        let (to, waiting) = pending();
        self.ask(Verb::Read, Answer::Read { offset, buf, to });
        waiting
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> Pending<io::Result<()>> {
        self.check_writable();
        self.check_alignment(offset, data.len() as u64);
        self.check_end(offset + data.len() as u64);
        let (to, waiting) = pending();
        self.disk.lock().issue(Asked {
            file: self.index,
            verb: Verb::Write,
            effects: vec![Effect::Write {
                offset,
                data: data.to_buf(),
            }],
            durable: durability == Durability::Durable,
            unsupported: false,
            answer: Answer::Done(to),
        });
        waiting
    }

    fn zero(&self, offset: u64, len: u64, _: Space) -> Pending<io::Result<()>> {
        self.check_unit(self.capabilities.space_alignment_bytes, (offset, len));
        self.check_end(offset + len);
        self.change(Verb::Zero, vec![Effect::Zero { offset, len }])
    }

    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.check_unit(self.capabilities.space_alignment_bytes, (offset, len));
        self.check_end(offset + len);
        let mut effects = Effect::Punch { offset, len }.atoms(512);
        if !self.capabilities.punches_holes {
            // The content after such a discard is unspecified: old bytes here, zeroes there.
            let mut state = self.disk.lock();
            effects.retain(|_| state.rng.chance(50));
        } else {
            effects = vec![Effect::Punch { offset, len }];
        }
        self.change(Verb::Discard, effects)
    }

    fn allocate(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.change(Verb::Allocate, vec![Effect::Allocate { offset, len }])
    }

    fn allocate_keeping_end(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        let end = self.disk.lock().files[self.index].volatile.len();
        let len = end.min(offset + len).saturating_sub(offset);
        self.change(Verb::Allocate, vec![Effect::Allocate { offset, len }])
    }

    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        let (to, waiting) = pending();
        self.ask(Verb::Query, Answer::Extents { offset, len, to });
        waiting
    }

    fn holes(&self, range: Range<u64>, most: usize) -> Pending<io::Result<Holes>> {
        let (to, waiting) = pending();
        self.ask(Verb::Query, Answer::Holes { range, most, to });
        waiting
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        let (to, waiting) = pending();
        self.ask(Verb::Flush, Answer::Flush(to));
        waiting
    }

    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        if !self.capabilities.extends_with_zeroes {
            let is_so = self.disk.lock().files[self.index].volatile.len() == len;
            let refused = || Err(io::Error::from(io::ErrorKind::Unsupported));
            return Pending::ready(if is_so { Ok(()) } else { refused() });
        }
        self.change(Verb::SetLen, vec![Effect::SetLen(len)])
    }

    fn allocated_bytes(&self) -> Option<u64> {
        let state = self.disk.lock();
        Some(state.files[self.index].volatile.allocated_bytes())
    }
}
