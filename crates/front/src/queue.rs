//! A queue on the driver's side: requests are made, and their completions taken.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use cowslip_queue::SharedMemory;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::guest;
use crate::ring::{DriverRing, Piece, RING_BYTES};

/// Offset in the memory of headers, status bytes and tables, behind the rings.
const SLOTS_AT: usize = 1 << 20;
const SLOT_BYTES: usize = 4096;
/// Longest wait for a completion.
const PATIENCE: Duration = Duration::from_secs(20);

/// A request that was made, by its memory.
#[derive(Clone, Debug)]
pub struct Made {
    /// Offset of its status byte.
    pub status_at: usize,
    /// Offsets and lengths of the data in the memory.
    pub data: Vec<(usize, usize)>,
    /// A number of the caller.
    pub tag: u64,
}

/// A queue, on the driver's side.
pub struct FrontQueue {
    /// Its number.
    pub index: u32,
    /// Its ring.
    pub ring: DriverRing,
    kick: OwnedFd,
    call: OwnedFd,
    /// Requests in flight, by the memory that they take.
    pub requests: Vec<Option<Made>>,
}

/// A request of a kind, at a sector, with pieces of data: offsets in the memory, and lengths.
pub struct Make<'a> {
    /// VIRTIO_BLK_T_*.
    pub kind: u32,
    /// Sector of 512 bytes at which it begins.
    pub sector: u64,
    /// Offsets and lengths of its data in the memory.
    pub data: &'a [(usize, usize)],
    /// A number of the caller.
    pub tag: u64,
    /// Offsets at which the header is cut into descriptors.
    pub header_cuts: &'a [u32],
    /// Whether its descriptors are in a table of their own.
    pub is_indirect: bool,
}

impl<'a> Make<'a> {
    /// A request with its header in one piece, in the ring itself.
    pub fn plain(kind: u32, sector: u64, data: &'a [(usize, usize)]) -> Make<'a> {
        Make {
            kind,
            sector,
            data,
            tag: 0,
            header_cuts: &[],
            is_indirect: false,
        }
    }
}

impl FrontQueue {
    /// A queue of this number, whose ring is at its place in the memory.
    pub(crate) fn new(
        memory: &Arc<SharedMemory>,
        (index, size): (u32, u16),
        kinds: (bool, bool),
    ) -> io::Result<FrontQueue> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(FrontQueue {
            index,
            ring: DriverRing::new(memory, (index as usize * RING_BYTES, size), kinds),
            kick: eventfd(0, flags)?,
            call: eventfd(0, flags)?,
            requests: (0..size).map(|_| None).collect(),
        })
    }

    /// The event by which the device is notified.
    pub(crate) fn kick_event(&self) -> &OwnedFd {
        &self.kick
    }

    /// The event by which the device notifies.
    pub(crate) fn call_event(&self) -> &OwnedFd {
        &self.call
    }

    /// Memory for the header, status and table of the request that comes next.
    fn slot(&self) -> Option<usize> {
        let free = self.requests.iter().position(Option::is_none)?;
        Some(SLOTS_AT + (free + self.index as usize * 256) * SLOT_BYTES)
    }

    /// Makes a request available; returns the id of its chain.
    ///
    /// # Errors
    /// The queue is full.
    pub fn submit(&mut self, make: &Make<'_>) -> io::Result<u16> {
        let slot = self.slot();
        let slot = slot.ok_or_else(|| io::Error::other("the queue is full"))?;
        let memory = Arc::clone(&self.ring.memory);
        let mut header = [0; 16];
        header[..4].copy_from_slice(&make.kind.to_le_bytes());
        header[8..].copy_from_slice(&make.sector.to_le_bytes());
        memory.write(slot, &header);
        let status_at = slot + 16;
        memory.store_u8(status_at, 0xEE);
        let device_writes = matches!(make.kind, 0 | 8);
        let mut pieces: Vec<Piece> = Vec::new();
        let mut at = 0;
        for &cut in make.header_cuts.iter().chain(&[16]) {
            pieces.push((guest(slot) + u64::from(at), cut - at, false));
            at = cut;
        }
        for &(offset, len) in make.data {
            pieces.push((guest(offset), len as u32, device_writes));
        }
        pieces.push((guest(status_at), 1, true));
        let id = match make.is_indirect {
            true => {
                let table = slot + 64;
                self.ring.add_indirect(&pieces, (table, guest(table)))
            }
            false => self.ring.add(&pieces),
        };
        // Slots are found by the requests that take them.
        let index = (slot - SLOTS_AT) / SLOT_BYTES - self.index as usize * 256;
        let made = Made {
            status_at,
            data: make.data.to_vec(),
            tag: make.tag,
        };
        self.requests[index] = Some(made);
        self.by_id(id, index);
        Ok(id)
    }

    fn by_id(&mut self, id: u16, index: usize) {
        self.ring
            .memory
            .store_u16(ids_at(self.index) + usize::from(id) * 2, index as u16);
    }

    /// Notifies the device of what is available, if it asks for that.
    ///
    /// # Errors
    /// The system's.
    pub fn kick(&mut self) -> io::Result<()> {
        match self.ring.wants_kick() {
            true => self.kick_always(),
            false => Ok(()),
        }
    }

    /// Notifies the device.
    ///
    /// # Errors
    /// The system's.
    pub fn kick_always(&self) -> io::Result<()> {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes())?;
        Ok(())
    }

    /// Waits for a notification, and takes it; returns whether there was one in time.
    ///
    /// # Errors
    /// The system's.
    pub fn is_notified(&self, limit: Duration) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
        let limit = Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        let ready = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&limit)))?;
        Ok(ready == 1 && rustix::io::read(&self.call, &mut [0u8; 8]).is_ok())
    }

    /// The next completion, if there is one: the request and its status.
    ///
    /// # Errors
    /// The device completes a request that was not made.
    pub fn try_complete(&mut self) -> io::Result<Option<(Made, u8)>> {
        let Some((id, _)) = self.ring.take_used() else {
            return Ok(None);
        };
        let known = id < self.ring.size;
        let made = known.then(|| {
            let at = ids_at(self.index) + usize::from(id) * 2;
            let index = usize::from(self.ring.memory.load_u16(at));
            self.requests.get_mut(index)?.take()
        });
        let made = made.flatten();
        let made = made
            .ok_or_else(|| io::Error::other(format!("request {id} completes, but was not made")))?;
        let status = self.ring.memory.load_u8(made.status_at);
        Ok(Some((made, status)))
    }

    /// Waits until a completion is there, by the notification that the driver asks for.
    ///
    /// # Errors
    /// There is none in time.
    pub fn wait(&mut self) -> io::Result<()> {
        loop {
            if self.ring.has_used() {
                return Ok(());
            }
            self.ring.wants_call();
            if self.ring.has_used() {
                return Ok(());
            }
            if !self.is_notified(PATIENCE)? {
                let text = "the device does not notify";
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
        }
    }

    /// Waits for a completion: the request and its status.
    ///
    /// # Errors
    /// As [`FrontQueue::wait`] and [`FrontQueue::try_complete`].
    pub fn complete(&mut self) -> io::Result<(Made, u8)> {
        self.wait()?;
        let done = self.try_complete()?;
        done.ok_or_else(|| io::Error::other("a completion has vanished"))
    }

    /// Makes a request and waits for it, with nothing else in flight; returns its status.
    ///
    /// # Errors
    /// As [`FrontQueue::submit`] and [`FrontQueue::complete`].
    pub fn request(&mut self, kind: u32, sector: u64, data: &[(usize, usize)]) -> io::Result<u8> {
        self.submit(&Make::plain(kind, sector, data))?;
        self.kick()?;
        Ok(self.complete()?.1)
    }
}

/// Where the ids of the requests of a queue are noted, behind its ring.
fn ids_at(queue: u32) -> usize {
    queue as usize * RING_BYTES + 0x8000
}
