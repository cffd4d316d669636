//! A load on one queue: requests of one kind and size at places that an iterator gives, up to a
//! depth in flight.

use std::io;
use std::time::{Duration, Instant};

use crate::queue::{FrontQueue, Make};
use crate::{DATA_AT, MEMORY_BYTES};

/// VIRTIO_BLK_T_IN.
pub const READ: u32 = 0;
/// VIRTIO_BLK_T_OUT.
pub const WRITE: u32 = 1;

const SECTOR_BYTES: u64 = 512;

/// Requests to a queue, some of them in flight. A load survives its server: what was in flight
/// completes by the next one.
pub struct Load<I> {
    kind: u32,
    bytes: usize,
    /// Offsets on the disk in bytes.
    places: I,
    /// Offset in the memory of the first request's data.
    data_at: usize,
    begun: Vec<Instant>,
    free: Vec<usize>,
}

impl<I: Iterator<Item = u64>> Load<I> {
    /// A load of requests of this kind ([`READ`] or [`WRITE`]) and size in bytes, `depth` of which
    /// are in flight. Of several queues each needs a number of its own, from 0.
    ///
    /// # Errors
    /// The memory has no room for the data of as many requests.
    pub fn new(
        queue: u32,
        (kind, bytes): (u32, usize),
        depth: usize,
        places: I,
    ) -> io::Result<Load<I>> {
        let data_at = DATA_AT + queue as usize * depth * bytes;
        if (data_at + depth * bytes) as u64 > MEMORY_BYTES {
            let text = "the data of these requests does not fit the guest's memory";
            return Err(io::Error::other(text));
        }
        Ok(Load {
            kind,
            bytes,
            places,
            data_at,
            begun: vec![Instant::now(); depth],
            free: (0..depth).collect(),
        })
    }

    /// Number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.begun.len() - self.free.len()
    }

    /// Makes requests until the depth is reached or no place is left, and notifies the device.
    ///
    /// # Errors
    /// The queue has no room for as many, or the device cannot be notified.
    pub fn submit(&mut self, queue: &mut FrontQueue) -> io::Result<()> {
        while let Some(&slot) = self.free.last() {
            let Some(place) = self.places.next() else {
                break;
            };
            self.free.pop();
            self.begun[slot] = Instant::now();
            queue.submit(&Make {
                kind: self.kind,
                sector: place / SECTOR_BYTES,
                data: &[(self.data_at + slot * self.bytes, self.bytes)],
                tag: slot as u64,
                header_cuts: &[],
                is_indirect: false,
            })?;
        }
        queue.kick()
    }

    /// Takes all completions that there are; `note` gets the latency of each. Returns their number.
    ///
    /// # Errors
    /// A request failed, or the queue's.
    pub fn take(
        &mut self,
        queue: &mut FrontQueue,
        mut note: impl FnMut(Duration),
    ) -> io::Result<usize> {
        let before = self.free.len();
        while let Some((made, status)) = queue.try_complete()? {
            if status != 0 {
                let text = format!("a request has failed with status {status}");
                return Err(io::Error::other(text));
            }
            let slot = made.tag as usize;
            note(self.begun[slot].elapsed());
            self.free.push(slot);
        }
        Ok(self.free.len() - before)
    }

    /// Runs it until no place is left and all requests have completed.
    ///
    /// # Errors
    /// As [`Load::submit`] and [`Load::take`], or the device does not notify in time.
    pub fn run(
        &mut self,
        queue: &mut FrontQueue,
        mut note: impl FnMut(Duration),
    ) -> io::Result<()> {
        loop {
            self.submit(queue)?;
            if self.in_flight() == 0 {
                return Ok(());
            }
            queue.wait()?;
            self.take(queue, &mut note)?;
        }
    }
}
