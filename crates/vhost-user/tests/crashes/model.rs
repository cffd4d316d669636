//! A guest, the servers that it has one after the other, and what must hold:
//!
//! - A request completes once for the guest, after it was carried out, with its own bytes in its
//!   chain.
//! - What the ring has as completed is not carried out again. Other requests are repeated at most
//!   once for each end of a server.
//! - A server takes requests in the order in which they were made available, those of its
//!   predecessor first. With VIRTIO_F_IN_ORDER the guest gets them back in that order.
//! - In the end all have completed, and the ring takes as many requests as ever.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;

use cowslip_front::ring::{DEVICE_AT, DRIVER_AT, DriverRing, RING_BYTES};
use cowslip_queue::SharedMemory;

use crate::inflight::{Shape, Table};
use crate::memory::{GuestMemory, RegionDescription};
use crate::order::InOrder;
use crate::ring::{Features, Layout, Ring, Slot, part_bytes};
use crate::stores;

const GUEST: u64 = 0x10_0000;
const MEMORY_BYTES: u64 = 2 * RING_BYTES as u64;
/// Numbers of requests, by slots of the guest's memory that come round again long after.
const NUMBERS_AT: usize = RING_BYTES;
const NUMBERS: u64 = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Split,
    Packed,
}

/// A step of the guest or of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The guest makes a request of two descriptors available, or of the whole ring if that is
    /// empty.
    Submit,
    SubmitWhole,
    /// The server takes a request.
    Take,
    /// The server carries out and completes the request that it took first, or last.
    CompleteFirst,
    CompleteLast,
    /// The guest takes a completion.
    Reap,
}

impl Step {
    pub const ALL: [Step; 6] = [
        Step::Submit,
        Step::SubmitWhole,
        Step::Take,
        Step::CompleteFirst,
        Step::CompleteLast,
        Step::Reap,
    ];
}

/// A generator of numbers (splitmix64).
pub struct Draw(pub u64);

impl Draw {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % limit
    }
}

/// The moment at which a successor starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    AtOnce,
    /// When the guest has requests that have not completed; it goes on meanwhile.
    Later,
}

/// A server.
struct Server {
    ring: Ring,
    /// Requests that it has taken: slots and numbers.
    taken: Vec<(Slot, u64)>,
    /// The request that it took last.
    last: Option<u64>,
    /// Requests that the guest has not got back, if it gets them back in order.
    order: Option<InOrder>,
    /// Requests among them that were carried out.
    waiting: usize,
}

pub struct World {
    kind: Kind,
    is_in_order: bool,
    size: u16,
    memory: Arc<SharedMemory>,
    guest: GuestMemory,
    table: Table,
    table_memory: Arc<SharedMemory>,
    driver: DriverRing,
    /// Requests of the guest that have not completed, by their ids.
    outstanding: BTreeMap<u16, u64>,
    /// The request that the guest got back last.
    reaped: Option<u64>,
    next_number: u64,
    /// How often each request was carried out, and the number of ends when it was submitted.
    carried_out: BTreeMap<u64, (usize, usize)>,
    server: Option<Server>,
    /// Stores that the coming servers make before they end.
    lives: Vec<u64>,
    left: Option<u64>,
    starts: Start,
    ends: usize,
}

impl World {
    pub fn new(kind: Kind, size: u16, is_in_order: bool) -> World {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create("guest", flags).unwrap();
        rustix::fs::ftruncate(&file, MEMORY_BYTES).unwrap();
        let region = RegionDescription {
            guest: GUEST,
            len: MEMORY_BYTES,
            user: GUEST,
            offset: 0,
        };
        let mut guest = GuestMemory::default();
        guest.add(region, file.as_fd()).unwrap();
        let shape = Shape {
            queues: 1,
            queue_size: size,
            is_packed: kind == Kind::Packed,
        };
        let table_file = Table::make_file(shape).unwrap();
        let memory = SharedMemory::map(file.as_fd(), 0, MEMORY_BYTES).unwrap();
        let mut world = World {
            kind,
            is_in_order,
            size,
            guest,
            table: Table::map(table_file.as_fd(), (0, shape.bytes()), shape).unwrap(),
            table_memory: SharedMemory::map(table_file.as_fd(), 0, shape.bytes()).unwrap(),
            driver: driver(&memory, kind, size),
            memory,
            outstanding: BTreeMap::new(),
            reaped: None,
            next_number: 0,
            carried_out: BTreeMap::new(),
            server: None,
            lives: Vec::new(),
            left: None,
            starts: Start::Later,
            ends: 0,
        };
        world.reset();
        world
    }

    /// Begins again, with a server that does not end.
    pub fn reset(&mut self) {
        self.table_memory
            .write(0, &vec![0; self.table_memory.len()]);
        self.driver = driver(&self.memory, self.kind, self.size);
        self.outstanding.clear();
        self.reaped = None;
        self.carried_out.clear();
        self.next_number = 0;
        self.lives.clear();
        self.left = None;
        self.ends = 0;
        self.server = None;
    }

    /// Has the servers end before these stores of theirs: this one, its successor, and so on.
    pub fn end_after(&mut self, lives: &[u64], starts: Start) {
        self.starts = starts;
        self.lives = lives.iter().rev().copied().collect();
        self.left = self.lives.pop();
    }

    pub fn name(&self) -> String {
        let order = if self.is_in_order { ", in order" } else { "" };
        format!("{:?}{order}, {} descriptors", self.kind, self.size)
    }

    pub fn ends(&self) -> usize {
        self.ends
    }

    /// The server; where there is none, one is started, until one lives long enough to begin.
    fn server(&mut self) -> Server {
        loop {
            if let Some(server) = self.server.take() {
                return server;
            }
            let is_packed = self.kind == Kind::Packed;
            let place = |at: usize, len: u64| self.guest.place(GUEST + at as u64, len).unwrap();
            let [descriptors, driver, device] = part_bytes(self.size, is_packed);
            let layout = Layout {
                size: self.size,
                descriptors: place(0, descriptors),
                driver: place(DRIVER_AT, driver),
                device: place(DEVICE_AT, device),
            };
            // As QEMU has it: it does not know where the server before was.
            let base = if is_packed { 0x8000_8000 } else { 0 };
            let table = self.table.queue(0);
            let start = || {
                let ring = Ring::start(&layout, (base, is_packed), Features::default(), table);
                ring.expect("it is a sound ring, with a sound table")
            };
            let (ring, left) = stores::live_for(self.left, start);
            self.left = left;
            match ring {
                Some(ring) => {
                    return Server {
                        ring,
                        taken: Vec::new(),
                        last: None,
                        order: self.is_in_order.then(InOrder::default),
                        waiting: 0,
                    };
                }
                None => self.end(),
            }
        }
    }

    /// The process has ended. The guest goes on; another one is started when it has work.
    fn end(&mut self) {
        self.ends += 1;
        self.left = self.lives.pop();
    }

    /// Whether a step has something to do.
    pub fn can(&self, step: Step) -> bool {
        let size = self.size;
        let taken = self.server.as_ref().map_or(0, |server| server.taken.len());
        let waiting = self.server.as_ref().map_or(0, |server| server.waiting);
        match step {
            Step::Submit => self.driver.free_count() >= 2,
            Step::SubmitWhole => size > 2 && self.driver.free_count() == usize::from(size),
            Step::Take => self.outstanding.len() > taken + waiting + self.completed().len(),
            Step::CompleteFirst => taken > 0,
            Step::CompleteLast => taken > 1,
            Step::Reap => !self.completed().is_empty(),
        }
    }

    /// Does a step, if there is something to do. Returns whether there was.
    pub fn step(&mut self, step: Step) -> bool {
        if !self.can(step) {
            return false;
        }
        match step {
            Step::Submit => self.submit(2),
            Step::SubmitWhole => self.submit(self.size),
            Step::Take => self.take(),
            Step::CompleteFirst => self.complete(0),
            Step::CompleteLast => self.complete(usize::MAX),
            Step::Reap => self.reap(),
        }
        if self.server.is_none() && self.starts == Start::AtOnce {
            self.server = Some(self.server());
        }
        true
    }

    /// The ids that the ring has as completed and the guest has not taken yet.
    fn completed(&self) -> Vec<u16> {
        let mut driver = self.driver.clone();
        let used = std::iter::from_fn(|| driver.take_used());
        used.map(|(id, _)| id).collect()
    }

    fn submit(&mut self, descriptors: u16) {
        let number = self.next_number;
        self.next_number += 1;
        let at = NUMBERS_AT + (number % NUMBERS) as usize * 16;
        self.memory.store_u64(at, number);
        let address = GUEST + at as u64;
        let mut pieces = vec![(address, 8, false)];
        pieces.resize(usize::from(descriptors), (address + 8, 1, true));
        let id = self.driver.add(&pieces);
        assert_eq!(self.outstanding.insert(id, number), None);
        self.carried_out.insert(number, (0, self.ends));
    }

    fn take(&mut self) {
        let mut server = self.server();
        let (popped, left) = stores::live_for(self.left, || server.ring.pop(&self.guest));
        self.left = left;
        let Some(popped) = popped else {
            return self.end();
        };
        let chain = popped.expect("no chain is broken").expect("one is there");
        let mut number = [0; 8];
        chain.readable.copy_to_slice(0, &mut number);
        let number = u64::from_le_bytes(number);
        assert_eq!(chain.readable.len(), 8, "the chain of {number}");
        assert!(
            server.last < Some(number),
            "{number} after {:?}",
            server.last
        );
        server.last = Some(number);
        server.taken.push((chain.slot, number));
        if let Some(order) = &mut server.order {
            order.take(chain.slot);
        }
        self.server = Some(server);
    }

    fn complete(&mut self, index: usize) {
        let mut server = self.server();
        let (slot, number) = server.taken.remove(index.min(server.taken.len() - 1));
        let completed = self.completed();
        let has_completed = |id: &u16| self.outstanding.get(id) == Some(&number);
        assert!(!completed.iter().any(has_completed), "{number} again");
        let (count, first) = self.carried_out.get_mut(&number).expect("it was submitted");
        *count += 1;
        assert!(*count <= 1 + self.ends - *first, "{number}: {count} times");
        let Server { ring, order, .. } = &mut server;
        let mut done = 0;
        let give_back = || match order {
            None => ring.push(slot, 1),
            Some(order) => {
                order.complete(slot, 1);
                while let Some((slot, written)) = order.next() {
                    ring.push(slot, written);
                    done += 1;
                }
            }
        };
        let (pushed, left) = stores::live_for(self.left, give_back);
        self.left = left;
        if self.is_in_order {
            server.waiting = server.waiting + 1 - done;
        }
        match pushed {
            Some(()) => self.server = Some(server),
            None => self.end(),
        }
    }

    fn reap(&mut self) {
        let (id, _) = self.driver.take_used().expect("a completion");
        let number = self.outstanding.remove(&id);
        let number = number.unwrap_or_else(|| panic!("{id} is not outstanding"));
        if self.is_in_order {
            assert!(
                self.reaped < Some(number),
                "{number} after {:?}",
                self.reaped
            );
            self.reaped = Some(number);
        }
        let (count, _) = self.carried_out.remove(&number).expect("it was submitted");
        assert!(count > 0, "{number} was not carried out");
    }

    /// Completes everything; then the ring goes round twice.
    pub fn finish(&mut self) {
        let mut rounds = 0;
        let end = self.next_number + 2 * u64::from(self.size);
        loop {
            let mut has_moved = self.next_number < end && self.step(Step::Submit);
            for step in [
                Step::Take,
                Step::CompleteLast,
                Step::CompleteFirst,
                Step::Reap,
            ] {
                has_moved |= self.step(step);
            }
            if !has_moved {
                break;
            }
            rounds += 1;
            assert!(rounds < 10_000, "it goes on for ever");
        }
        assert!(
            self.outstanding.is_empty(),
            "{:?} are lost",
            self.outstanding
        );
        assert_eq!(self.next_number, end, "the ring takes no more");
        assert_eq!(self.driver.free_count(), usize::from(self.size));
    }
}

fn driver(memory: &Arc<SharedMemory>, kind: Kind, size: u16) -> DriverRing {
    DriverRing::new(memory, (0, size), (kind == Kind::Packed, false))
}
