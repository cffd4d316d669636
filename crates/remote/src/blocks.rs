//! [`Blocks`]: the blocks of an object, and the order in which they are fetched.
//!
//! A block that is wanted waits in a queue for a request; neighbours that wait with it are fetched
//! by one request. A block is in one request at a time, whose result all get that want it. Requests
//! of the guest go first, then those ahead of its sequences, then those of a trace, and those of
//! the background while nothing else is wanted.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::oneshot;

use crate::ahead::Ahead;
use crate::cache::{CacheFile, Look};
use crate::memory::Memory;
use crate::notice::Notice;
use crate::object::{Object, Take};
use crate::runtime;

/// Urgency of a block, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Urgency {
    /// A read waits for it.
    Guest,
    /// It follows in a sequence of reads.
    Ahead,
    /// A trace says that it will be read.
    Trace,
    /// It belongs to the object.
    Background,
}

const URGENCIES: [Urgency; 4] = [
    Urgency::Guest,
    Urgency::Ahead,
    Urgency::Trace,
    Urgency::Background,
];

/// Bytes of one request of the guest.
const GUEST_REQUEST_MAX: u64 = 4 << 20;
/// Bytes of one request that nobody waits for. It is short, since what the guest asks for meanwhile
/// shares the connection with it.
const OTHER_REQUEST_MAX: u64 = 256 << 10;
/// Requests under way that nobody waits for.
const OTHERS_MAX: usize = 3;

/// Time for which another process may take to fetch a block.
const OTHERS_PATIENCE: Duration = Duration::from_secs(15);

/// Result of a block, for all that want it.
pub(crate) type Outcome = Result<Bytes, Arc<str>>;
type Waiter = oneshot::Sender<Outcome>;

/// Bounds of the work for a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Requests under way.
    pub(crate) connections: usize,
    /// Bytes in memory.
    pub(crate) memory_bytes: usize,
    /// Bytes ahead of a sequence.
    pub(crate) ahead_bytes: u64,
}

/// The blocks of an object.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) object: Object,
    pub(crate) cache: Option<Arc<CacheFile>>,
    block_bytes: u64,
    connections: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Blocks without a request, by urgency.
    wanted: [Queue; 4],
    /// Blocks with a request, and those that want them.
    fetching: HashMap<u64, Vec<Waiter>>,
    /// Requests under way, by urgency.
    requests: [usize; 4],
    memory: Memory,
    ahead: Ahead,
    traced: Traced,
    /// The last read that had to wait.
    missed: Option<Instant>,
    fetched_bytes: u64,
}

/// Blocks that wait, in the order in which they were asked for.
#[derive(Debug, Default)]
struct Queue {
    blocks: BTreeMap<u64, Vec<Waiter>>,
    order: VecDeque<u64>,
}

impl Queue {
    /// The next run of blocks that are wanted, and at most `most` of them.
    fn pop(&mut self, most: u64) -> Option<(u64, Vec<Vec<Waiter>>)> {
        let first = loop {
            let block = self.order.pop_front()?;
            if self.blocks.contains_key(&block) {
                break block;
            }
        };
        let mut run = Vec::new();
        self.pop_after(first, &mut run, most);
        Some((first, run))
    }

    /// Adds blocks to a run that directly follow it, at most `most` of them.
    fn pop_after(&mut self, first: u64, run: &mut Vec<Vec<Waiter>>, most: u64) {
        for _ in 0..most {
            let Some(waiters) = self.blocks.remove(&(first + run.len() as u64)) else {
                return;
            };
            run.push(waiters);
        }
    }
}

/// Blocks of a trace, a bit each.
#[derive(Debug, Default)]
pub(crate) struct Traced(Vec<u64>);

impl Traced {
    pub(crate) fn add(&mut self, blocks: Range<u64>) {
        let words = blocks.end.div_ceil(64) as usize;
        if self.0.len() < words {
            self.0.resize(words, 0);
        }
        for block in blocks {
            self.0[(block / 64) as usize] |= 1 << (block % 64);
        }
    }

    /// Whether all of some blocks are among them.
    fn has_all(&self, mut blocks: Range<u64>) -> bool {
        blocks.all(|block| {
            let word = self.0.get((block / 64) as usize);
            word.is_some_and(|word| word & (1 << (block % 64)) != 0)
        })
    }
}

/// Blocks that are fetched by one task, in their order.
#[derive(Debug)]
struct Run {
    /// The first block that is not delivered.
    next: AtomicU64,
    end: u64,
    urgency: Urgency,
}

impl Run {
    /// The blocks that are not delivered.
    fn left(&self) -> Range<u64> {
        self.next.load(Ordering::Relaxed)..self.end
    }
}

impl Blocks {
    pub(crate) fn new(
        object: Object,
        cache: Option<Arc<CacheFile>>,
        block_bytes: u64,
        bounds: Bounds,
    ) -> Blocks {
        Blocks {
            object,
            cache,
            block_bytes,
            connections: bounds.connections.max(1),
            state: Mutex::new(State::new(block_bytes, bounds)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Length of the object in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.object.version().bytes
    }

    /// Number of blocks.
    pub(crate) fn count(&self) -> u64 {
        self.bytes().div_ceil(self.block_bytes)
    }

    /// The bytes of some blocks.
    pub(crate) fn range_of(&self, blocks: Range<u64>) -> Range<u64> {
        let end = (blocks.end * self.block_bytes).min(self.bytes());
        blocks.start * self.block_bytes..end
    }

    /// The blocks that have some of these bytes.
    pub(crate) fn blocks_of(&self, bytes: &Range<u64>) -> Range<u64> {
        let end = bytes.end.min(self.bytes());
        match bytes.start < end {
            true => bytes.start / self.block_bytes..end.div_ceil(self.block_bytes),
            false => 0..0,
        }
    }

    /// Bytes of a block, but for the last one.
    pub(crate) fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Bytes that have come from the server.
    pub(crate) fn fetched_bytes(&self) -> u64 {
        self.lock().fetched_bytes
    }

    /// Keeps the block that has arrived with the opening.
    pub(crate) async fn keep_first(&self, bytes: Bytes) {
        {
            let mut state = self.lock();
            state.fetched_bytes += bytes.len() as u64;
            state.memory.put(0, bytes.clone());
        }
        if let Some(cache) = &self.cache
            && let Look::Absent(blocks) = cache.look(0..1).await
        {
            let stored = cache.store(0, bytes).await;
            cache.release(blocks);
            if let Err(why) = stored {
                self.object.notify(&Notice::CacheUnused { why: &why });
            }
        }
    }

    /// The time since a read of the guest had to wait, or none did.
    pub(crate) fn is_quiet_since(&self) -> Option<Duration> {
        let state = self.lock();
        let is_busy = !state.wanted[0].blocks.is_empty() || state.requests[0] > 0;
        match (is_busy, state.missed) {
            (true, _) => None,
            (false, Some(missed)) => Some(missed.elapsed()),
            (false, None) => Some(Duration::MAX),
        }
    }

    /// Notes a read of the guest. Returns the blocks that are worth asking for as they will follow
    /// it; they may be none.
    pub(crate) fn note_read(&self, bytes: &Range<u64>) -> Range<u64> {
        let mut state = self.lock();
        // What follows in a trace is being fetched, and other blocks that follow are not read.
        let next = match state.traced.has_all(self.blocks_of(bytes)) {
            true => None,
            false => state.ahead.note(bytes),
        };
        next.map_or(0..0, |next| self.blocks_of(&next))
    }

    /// Says which blocks a trace has that is being replayed.
    pub(crate) fn expect(&self, traced: Traced) {
        self.lock().traced = traced;
    }

    /// All blocks of a range, if they are in memory.
    pub(crate) fn in_memory(&self, blocks: Range<u64>) -> Option<Vec<Bytes>> {
        let mut state = self.lock();
        let all = blocks.clone().all(|block| state.memory.has(block));
        let mut found = Vec::new();
        if all {
            found.extend(blocks.map_while(|block| state.memory.get(block)));
        }
        all.then_some(found)
    }

    /// Asks for blocks that will follow a read which needs no request.
    pub(crate) fn ask(self: &Arc<Self>, blocks: Range<u64>) {
        let is_more = self.lock().want_ahead(blocks, self.cache.as_deref());
        // Where the runtime cannot be started, reads will say so.
        if is_more && let Ok(entered) = runtime::enter() {
            let all = Arc::clone(self);
            entered.spawn(async move { all.dispatch() });
        }
    }

    /// Notes that blocks are wanted which will follow a read that is about to ask for its own, so
    /// that neighbours come by one request.
    pub(crate) fn expect_after(&self, blocks: Range<u64>) {
        self.lock().want_ahead(blocks, self.cache.as_deref());
    }

    /// The bytes of blocks, in their order.
    ///
    /// # Errors
    /// In words: some block cannot be fetched.
    pub(crate) async fn read(
        self: &Arc<Self>,
        blocks: Range<u64>,
        urgency: Urgency,
    ) -> Result<Vec<Bytes>, Arc<str>> {
        let mut parts = Vec::new();
        {
            let mut state = self.lock();
            for block in blocks {
                if let Some(bytes) = state.memory.get(block) {
                    parts.push(Ok(bytes));
                    continue;
                }
                let (waiter, comes) = oneshot::channel();
                state.want(block, urgency, Some(waiter));
                parts.push(Err(comes));
            }
            if urgency == Urgency::Guest {
                state.missed = Some(Instant::now());
            }
        }
        self.dispatch();
        let mut found = Vec::with_capacity(parts.len());
        for part in parts {
            found.push(match part {
                Ok(bytes) => bytes,
                Err(comes) => comes
                    .await
                    .unwrap_or_else(|_| Err("it was given up".into()))?,
            });
        }
        Ok(found)
    }

    /// Starts requests for what is wanted, as many as there may be.
    fn dispatch(self: &Arc<Self>) {
        loop {
            let Some(run) = self.next_run() else {
                return;
            };
            let all = Arc::clone(self);
            runtime::spawn_here(async move {
                let urgency = run.urgency;
                let ends = EndOfRun { all, run };
                ends.all.bring(&ends.run).await;
                let all = Arc::clone(&ends.all);
                drop(ends);
                all.lock().requests[urgency as usize] -= 1;
                all.dispatch();
            });
        }
    }

    fn next_run(&self) -> Option<Run> {
        let mut state = self.lock();
        for urgency in URGENCIES {
            let under_way: usize = state.requests.iter().sum();
            let others = under_way - state.requests[0];
            let may = match urgency {
                Urgency::Guest => state.requests[0] < self.connections,
                Urgency::Ahead | Urgency::Trace => others < OTHERS_MAX,
                Urgency::Background => under_way == 0,
            };
            if !may {
                // A guest that waits for a connection keeps out all others.
                match urgency == Urgency::Guest && !state.wanted[0].blocks.is_empty() {
                    true => return None,
                    false => continue,
                }
            }
            let most = match urgency {
                Urgency::Guest => GUEST_REQUEST_MAX,
                Urgency::Ahead | Urgency::Trace | Urgency::Background => OTHER_REQUEST_MAX,
            };
            let most = (most / self.block_bytes).max(1);
            let Some((first, mut waiters)) = state.wanted[urgency as usize].pop(most) else {
                continue;
            };
            if urgency == Urgency::Guest {
                // What follows the guest's sequence comes along.
                let more = (OTHER_REQUEST_MAX / self.block_bytes).max(1);
                state.wanted[Urgency::Ahead as usize].pop_after(first, &mut waiters, more);
            }
            let count = waiters.len() as u64;
            for (block, waiters) in (first..).zip(waiters) {
                state.fetching.insert(block, waiters);
            }
            state.requests[urgency as usize] += 1;
            return Some(Run {
                next: AtomicU64::new(first),
                end: first + count,
                urgency,
            });
        }
        None
    }

    /// Gets the blocks of a run, from the cache or from the server.
    async fn bring(self: &Arc<Self>, run: &Run) {
        let mut busy_since: Option<Instant> = None;
        while !run.left().is_empty() {
            let look = match &self.cache {
                Some(cache) => cache.look(run.left()).await,
                None => Look::Absent(run.left()),
            };
            let absent = match look {
                Look::Present(found) => {
                    for bytes in found {
                        self.deliver(run, &Ok(bytes));
                    }
                    busy_since = None;
                    continue;
                }
                // Another process fetches it. One that stands still is not waited for.
                Look::Busy => {
                    let since = *busy_since.get_or_insert_with(Instant::now);
                    if self.object.is_abandoned() {
                        return;
                    }
                    if since.elapsed() < OTHERS_PATIENCE {
                        continue;
                    }
                    run.left().start..run.left().start + 1
                }
                Look::Absent(blocks) => blocks,
                Look::Unreadable(why) => {
                    if let Some(why) = why {
                        self.object.notify(&Notice::CacheUnused { why: &why });
                    }
                    run.left().start..run.left().start + 1
                }
                Look::Damaged(block) => {
                    let offset = block * self.block_bytes;
                    self.object.notify(&Notice::CacheDamaged { offset });
                    continue;
                }
            };
            busy_since = None;
            let mut arriving = Arriving { all: self, run };
            let range = self.range_of(absent.clone());
            let fetched = self.object.fetch(range, self.block_bytes, &mut arriving);
            let fetched = fetched.await;
            if let Some(cache) = &self.cache {
                cache.release(absent.clone());
            }
            if let Err(why) = fetched {
                let why: Arc<str> = why.into();
                for _ in run.left() {
                    self.deliver(run, &Err(Arc::clone(&why)));
                }
                return;
            }
        }
    }

    /// Delivers a block to those that wait for it, and leaves it among those that are fetched.
    fn deliver_early(&self, block: u64, bytes: &Bytes) {
        let waiters = match self.lock().fetching.get_mut(&block) {
            Some(waiters) => std::mem::take(waiters),
            None => return,
        };
        for waiter in waiters {
            // Who has gone needs nothing.
            drop(waiter.send(Ok(bytes.clone())));
        }
    }

    /// Delivers the next block of a run.
    fn deliver(&self, run: &Run, outcome: &Outcome) {
        let block = run.next.fetch_add(1, Ordering::Relaxed);
        let waiters = {
            let mut state = self.lock();
            let is_uncached = self.cache.as_ref().is_none_or(|cache| cache.is_off());
            if let (Ok(bytes), true) = (outcome, is_uncached) {
                state.memory.put(block, bytes.clone());
            }
            state.fetching.remove(&block)
        };
        for waiter in waiters.into_iter().flatten() {
            // Who has gone needs nothing.
            drop(waiter.send(outcome.clone()));
        }
    }

    /// Ends all work: nobody reads any more.
    pub(crate) fn abandon(&self) {
        self.object.abandon();
        let mut state = self.lock();
        state.wanted = Default::default();
    }
}

impl State {
    fn new(block_bytes: u64, bounds: Bounds) -> State {
        State {
            wanted: Default::default(),
            fetching: HashMap::new(),
            requests: [0; 4],
            memory: Memory::new(bounds.memory_bytes),
            ahead: Ahead::new(block_bytes, bounds.ahead_bytes),
            traced: Traced::default(),
            missed: None,
            fetched_bytes: 0,
        }
    }

    /// Notes blocks that are wanted ahead of a sequence, but for those that are there. Returns
    /// whether some were not wanted so far.
    fn want_ahead(&mut self, blocks: Range<u64>, cache: Option<&CacheFile>) -> bool {
        let mut is_more = false;
        for block in blocks {
            let is_cached = cache.is_some_and(|cache| cache.had(block));
            if !is_cached && !self.memory.has(block) {
                is_more |= self.want(block, Urgency::Ahead, None);
            }
        }
        is_more
    }

    /// Notes that a block is wanted. Returns whether it was not wanted as urgently so far.
    fn want(&mut self, block: u64, urgency: Urgency, waiter: Option<Waiter>) -> bool {
        if let Some(waiters) = self.fetching.get_mut(&block) {
            waiters.extend(waiter);
            return false;
        }
        let mut waiters = Vec::new();
        for (index, queue) in self.wanted.iter_mut().enumerate() {
            if index <= urgency as usize {
                if let Some(waiters) = queue.blocks.get_mut(&block) {
                    waiters.extend(waiter);
                    return false;
                }
            } else if let Some(earlier) = queue.blocks.remove(&block) {
                waiters.extend(earlier);
            }
        }
        waiters.extend(waiter);
        let queue = &mut self.wanted[urgency as usize];
        queue.blocks.insert(block, waiters);
        queue.order.push_back(block);
        true
    }
}

/// Delivers blocks as they arrive, and stores them in the cache.
struct Arriving<'a> {
    all: &'a Arc<Blocks>,
    run: &'a Run,
}

impl Take for Arriving<'_> {
    async fn take(&mut self, offset: u64, bytes: Bytes) {
        let block = offset / self.all.block_bytes;
        self.all.lock().fetched_bytes += bytes.len() as u64;
        debug_assert_eq!(block, self.run.left().start, "blocks arrive in order");
        // Nobody waits for the cache. Who asks meanwhile is served afterwards: before the block is
        // stored, it would be fetched again.
        self.all.deliver_early(block, &bytes);
        if let Some(cache) = &self.all.cache
            && let Err(why) = cache.store(block, bytes.clone()).await
        {
            self.all.object.notify(&Notice::CacheUnused { why: &why });
        }
        self.all.deliver(self.run, &Ok(bytes));
    }
}

/// Whatever ends a run, nobody waits for its blocks afterwards.
struct EndOfRun {
    all: Arc<Blocks>,
    run: Run,
}

impl Drop for EndOfRun {
    fn drop(&mut self) {
        let mut state = self.all.lock();
        for block in self.run.left() {
            state.fetching.remove(&block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_is_wanted_again_and_again_is_noted_once() {
        let bounds = Bounds {
            connections: 1,
            memory_bytes: 0,
            ahead_bytes: 0,
        };
        let mut state = State::new(4096, bounds);
        for _ in 0..100 {
            state.want(7, Urgency::Ahead, None);
        }
        assert_eq!(state.wanted[Urgency::Ahead as usize].order.len(), 1);
        state.want(7, Urgency::Guest, None);
        state.want(7, Urgency::Background, None);
        let wanted = URGENCIES.map(|urgency| state.wanted[urgency as usize].blocks.len());
        assert_eq!(wanted, [1, 0, 0, 0]);
    }

    #[test]
    fn what_follows_a_run_directly_is_added_to_it() {
        let bounds = Bounds {
            connections: 1,
            memory_bytes: 0,
            ahead_bytes: 0,
        };
        let mut state = State::new(4096, bounds);
        for block in [8, 9, 10, 12] {
            state.want(block, Urgency::Ahead, None);
        }
        state.want(7, Urgency::Guest, None);
        let (first, mut run) = state.wanted[Urgency::Guest as usize].pop(64).unwrap();
        let ahead = &mut state.wanted[Urgency::Ahead as usize];
        ahead.pop_after(first, &mut run, 2);
        assert_eq!((first, run.len()), (7, 3));
        // The order still names what is gone.
        let left = [ahead.pop(64).unwrap(), ahead.pop(64).unwrap()];
        assert_eq!(
            left.map(|(first, run)| (first, run.len())),
            [(10, 1), (12, 1)]
        );
        assert!(ahead.pop(64).is_none());
    }
}
