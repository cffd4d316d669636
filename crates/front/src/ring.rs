//! The driver's side of rings, split and packed. It can be made to write anything.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use cowslip_queue::SharedMemory;

/// Flag of a descriptor: another one follows.
pub const NEXT: u16 = 1;
/// Flag of a descriptor: the device writes.
pub const WRITE: u16 = 2;
/// Flag of a descriptor: it is of a table of descriptors.
pub const INDIRECT: u16 = 4;

/// A piece of memory of a request: guest address, length, whether the device writes it.
pub type Piece = (u64, u32, bool);

/// A ring in memory, with its parts at fixed offsets from its start.
#[derive(Clone)]
pub struct DriverRing {
    /// The guest's memory.
    pub memory: Arc<SharedMemory>,
    /// Number of its descriptors.
    pub size: u16,
    /// Offset in the memory.
    pub start: usize,
    /// Whether it is packed, rather than split.
    pub is_packed: bool,
    /// Whether events are asked for by index.
    pub has_event_idx: bool,
    /// Split: next available index. Packed: next descriptor.
    next: u16,
    wrap: bool,
    used: u16,
    used_wrap: bool,
    free: Vec<u16>,
    /// Descriptors of each chain, by id.
    chains: Vec<Vec<u16>>,
    counts: Vec<u16>,
    notified: u16,
}

/// Offset of the driver's part from the descriptors, with which a ring begins.
pub const DRIVER_AT: usize = 0x4000;
/// Offset of the device's part.
pub const DEVICE_AT: usize = 0x6000;
/// Distance of rings in the memory.
pub const RING_BYTES: usize = 0x10_000;

impl DriverRing {
    /// An empty ring at an offset of the memory with a number of descriptors; whether it is packed,
    /// and events are asked for by index.
    pub fn new(
        memory: &Arc<SharedMemory>,
        (start, size): (usize, u16),
        (is_packed, has_event_idx): (bool, bool),
    ) -> DriverRing {
        memory.write(start, &vec![0; RING_BYTES]);
        DriverRing {
            memory: Arc::clone(memory),
            size,
            start,
            is_packed,
            has_event_idx,
            next: 0,
            wrap: true,
            used: 0,
            used_wrap: true,
            free: (0..size).rev().collect(),
            chains: vec![Vec::new(); usize::from(size)],
            counts: vec![0; usize::from(size)],
            notified: 0,
        }
    }

    /// Offset of a descriptor.
    pub fn descriptor_at(&self, index: u16) -> usize {
        self.start + usize::from(index) * 16
    }

    /// Number of descriptors that are free.
    pub fn free_count(&self) -> usize {
        self.free.len()
    }

    /// Bytes of a descriptor of this kind of ring.
    pub fn encode(&self, (address, len, flags): (u64, u32, u16), link: u16) -> [u8; 16] {
        let (third, fourth) = match self.is_packed {
            true => (link, flags),
            false => (flags, link),
        };
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&third.to_le_bytes());
        bytes[14..].copy_from_slice(&fourth.to_le_bytes());
        bytes
    }

    fn take_free(&mut self) -> u16 {
        let free = self.free.pop();
        free.expect("the caller leaves room for its chains")
    }

    /// Makes a chain available; returns its id.
    pub fn add(&mut self, pieces: &[Piece]) -> u16 {
        let flags = |write: bool| if write { WRITE } else { 0 };
        let list: Vec<(u64, u32, u16)> = pieces
            .iter()
            .map(|&(address, len, write)| (address, len, flags(write)))
            .collect();
        self.add_raw(&list)
    }

    /// Makes a chain available whose data is listed in a table at this offset of the memory.
    pub fn add_indirect(&mut self, pieces: &[Piece], (table, guest): (usize, u64)) -> u16 {
        for (index, &(address, len, write)) in pieces.iter().enumerate() {
            let last = index + 1 == pieces.len();
            let mut flags = if write { WRITE } else { 0 };
            let link = match self.is_packed || last {
                true => 0,
                false => {
                    flags |= NEXT;
                    index as u16 + 1
                }
            };
            let bytes = self.encode((address, len, flags), link);
            self.memory.write(table + index * 16, &bytes);
        }
        self.add_raw(&[(guest, pieces.len() as u32 * 16, INDIRECT)])
    }

    /// Makes a chain of such descriptors available.
    pub fn add_raw(&mut self, list: &[(u64, u32, u16)]) -> u16 {
        match self.is_packed {
            false => self.add_split(list),
            true => self.add_packed(list),
        }
    }

    fn add_split(&mut self, list: &[(u64, u32, u16)]) -> u16 {
        let indexes: Vec<u16> = list.iter().map(|_| self.take_free()).collect();
        for (place, &(address, len, flags)) in list.iter().enumerate() {
            let next = indexes.get(place + 1);
            let flags = flags | if next.is_some() { NEXT } else { 0 };
            let bytes = self.encode((address, len, flags), next.copied().unwrap_or(0));
            self.memory
                .write(self.descriptor_at(indexes[place]), &bytes);
        }
        let head = indexes[0];
        self.chains[usize::from(head)] = indexes;
        self.offer(head);
        head
    }

    /// Makes the chain at a descriptor of a split ring available.
    pub fn offer(&mut self, head: u16) {
        let at = self.start + DRIVER_AT + 4 + usize::from(self.next % self.size) * 2;
        self.memory.store_u16(at, head);
        self.next = self.next.wrapping_add(1);
        self.memory.store_u16(self.start + DRIVER_AT + 2, self.next);
    }

    fn add_packed(&mut self, list: &[(u64, u32, u16)]) -> u16 {
        let id = self.take_free();
        // The other descriptors of the chain take room, too.
        for _ in 1..list.len() {
            let taken = self.free.remove(0);
            self.chains[usize::from(id)].push(taken);
        }
        self.counts[usize::from(id)] = list.len() as u16;
        let mut first = None;
        for (place, &(address, len, flags)) in list.iter().enumerate() {
            let next = if place + 1 < list.len() { NEXT } else { 0 };
            let (available, used) = (1 << 7, 1 << 15);
            let bits = if self.wrap { available } else { used };
            let at = self.descriptor_at(self.next);
            let bytes = self.encode((address, len, flags | next | bits), id);
            self.memory.write(at, &bytes[..14]);
            match first {
                // The first one makes the chain available.
                None => first = Some((at + 14, flags | next | bits)),
                Some(_) => self.memory.write(at + 14, &bytes[14..]),
            }
            self.next += 1;
            if self.next == self.size {
                self.next = 0;
                self.wrap = !self.wrap;
            }
        }
        let (at, flags) = first.expect("a chain has a descriptor");
        self.memory.store_u16(at, flags);
        id
    }

    /// Whether the device asked for a notification of what was added since the last call.
    pub fn wants_kick(&mut self) -> bool {
        fence(Ordering::SeqCst);
        let device = self.start + DEVICE_AT;
        match (self.is_packed, self.has_event_idx) {
            (false, false) => self.memory.load_u16(device) & 1 == 0,
            (false, true) => {
                let event = self
                    .memory
                    .load_u16(device + 4 + 8 * usize::from(self.size));
                let before = std::mem::replace(&mut self.notified, self.next);
                self.next.wrapping_sub(event).wrapping_sub(1) < self.next.wrapping_sub(before)
            }
            // A driver may always notify where one event is asked for.
            (true, _) => self.memory.load_u16(device + 2) & 3 != 1,
        }
    }

    /// Says that a notification of the next used chain is wanted.
    pub fn wants_call(&self) {
        let driver = self.start + DRIVER_AT;
        match (self.is_packed, self.has_event_idx) {
            (false, false) => {}
            (false, true) => {
                let at = driver + 4 + 2 * usize::from(self.size);
                self.memory.store_u16(at, self.used);
            }
            (true, false) => self.memory.store_u16(driver + 2, 0),
            (true, true) => {
                let wrap = u16::from(self.used_wrap) << 15;
                self.memory.store_u16(driver, self.used | wrap);
                self.memory.store_u16(driver + 2, 2);
            }
        }
        fence(Ordering::SeqCst);
    }

    /// Whether the device has used a chain that was not taken.
    pub fn has_used(&self) -> bool {
        match self.is_packed {
            false => self.memory.load_u16(self.start + DEVICE_AT + 2) != self.used,
            true => {
                let flags = self.memory.load_u16(self.descriptor_at(self.used) + 14);
                let bits = (flags >> 7 & 1 == 1, flags >> 15 == 1);
                bits == (self.used_wrap, self.used_wrap)
            }
        }
    }

    /// The next used chain: its id, and the bytes that the device has written. The id may be of no
    /// chain that was made.
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        if !self.has_used() {
            return None;
        }
        let (id, len) = match self.is_packed {
            false => {
                let device = self.start + DEVICE_AT;
                let at = device + 4 + usize::from(self.used % self.size) * 8;
                self.used = self.used.wrapping_add(1);
                (
                    self.memory.load_u32(at) as u16,
                    self.memory.load_u32(at + 4),
                )
            }
            true => {
                let at = self.descriptor_at(self.used);
                let found = (self.memory.load_u16(at + 12), self.memory.load_u32(at + 8));
                let count = self.counts.get(usize::from(found.0));
                self.used += count.copied().unwrap_or(0);
                if self.used >= self.size {
                    self.used -= self.size;
                    self.used_wrap = !self.used_wrap;
                }
                found
            }
        };
        if let Some(chain) = self.chains.get_mut(usize::from(id)) {
            self.free.extend(std::mem::take(chain));
            self.free.extend(self.is_packed.then_some(id));
        }
        Some((id, len))
    }
}
