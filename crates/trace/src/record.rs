//! [`Recorder`]: requests on their way into a trace, in memory of a fixed size.

use std::collections::VecDeque;
use std::time::Instant;

use cowslip_block::sync::{Mutex, lock};

use crate::format::{Before, ChunkHead, REQUEST_MAX, Request};

/// Length of the requests of a chunk that is full.
const CHUNK_FULL: usize = 64 << 10;

/// Limits of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of memory for requests that are not in the file yet.
    pub memory_bytes: usize,
    /// Most bytes of the file.
    pub file_bytes: u64,
}

impl Default for Limits {
    /// 4 MiB of memory, some 600 000 requests at random; a file of 256 MiB.
    fn default() -> Limits {
        Limits {
            memory_bytes: 4 << 20,
            file_bytes: 256 << 20,
        }
    }
}

/// Requests that were noted and not yet taken.
#[derive(Debug)]
pub struct Recorder {
    began: Instant,
    limits: Limits,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Chunks that are complete, the oldest first.
    full: VecDeque<Chunk>,
    filling: Chunk,
    before: Before,
    /// Bytes of all chunks.
    bytes: usize,
    /// Requests that were dropped since the last one that was noted.
    dropped: u64,
    is_stopped: bool,
}

/// Requests that lie one behind another in the file.
#[derive(Clone, Debug, Default)]
pub struct Chunk {
    /// Its beginning.
    pub head: ChunkHead,
    /// Its requests.
    pub payload: Vec<u8>,
}

impl Recorder {
    /// A recorder whose time begins now.
    pub fn new(limits: Limits) -> Recorder {
        Recorder {
            began: Instant::now(),
            limits,
            state: Mutex::default(),
        }
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Notes a request that came now, whatever its time says. One that finds no room is dropped
    /// and counted. Waits for no I/O.
    pub fn note(&self, request: Request) {
        let state = &mut *lock(&self.state);
        // Under the lock, so that times are in order.
        let at_us = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        let request = Request { at_us, ..request };
        if state.is_stopped || state.bytes + REQUEST_MAX > self.limits.memory_bytes {
            state.seal();
            state.dropped += 1;
            return;
        }
        state.push(&request);
    }

    /// Takes all that was noted so far, as chunks, and those that were dropped since.
    pub(crate) fn take(&self) -> (VecDeque<Chunk>, u64) {
        let state = &mut *lock(&self.state);
        state.seal();
        state.bytes = 0;
        (std::mem::take(&mut state.full), state.dropped)
    }

    /// Notes nothing more, and counts `dropped` requests with those that are dropped from now on.
    pub(crate) fn stop(&self, dropped: u64) {
        let state = &mut *lock(&self.state);
        state.is_stopped = true;
        state.dropped += dropped;
    }
}

impl State {
    fn push(&mut self, request: &Request) {
        let is_first = self.filling.head.count == 0;
        if is_first {
            self.filling.head.base_us = request.at_us;
            self.filling.head.dropped = std::mem::take(&mut self.dropped);
            self.before = Before::first(request.at_us);
        }
        let len = self.filling.payload.len();
        if !self.before.encode(request, &mut self.filling.payload) {
            self.dropped += 1;
            if is_first {
                self.dropped += std::mem::take(&mut self.filling.head.dropped);
            }
            return;
        }
        self.filling.head.count += 1;
        self.bytes += self.filling.payload.len() - len;
        if self.filling.payload.len() >= CHUNK_FULL {
            self.seal();
        }
    }

    /// Ends the chunk that is being filled.
    fn seal(&mut self) {
        if self.filling.head.count == 0 {
            return;
        }
        let mut chunk = std::mem::take(&mut self.filling);
        chunk.head.payload_bytes = chunk.payload.len() as u32;
        self.full.push_back(chunk);
    }
}
