//! Rings: how chains of descriptors come from the driver and go back to it.
//!
//! Everything that a driver writes is untrusted. It is loaded once, checked, and only the copy is
//! used. What cannot be is [`Broken`]: the ring is not touched any more, as a device does that
//! needs a reset (VIRTIO 1.2, section 2.1.2).

use std::fmt;
use std::sync::atomic::{Ordering, fence};

use cowslip_queue::{IoVec, IoVecMut};
use smallvec::SmallVec;

use crate::fields::Fields;
use crate::inflight::QueueTable;
use crate::memory::{BadAddress, GuestMemory, Place};

// By their paths, so that other crates can build this file.
#[path = "ring/packed.rs"]
mod packed;
#[path = "ring/split.rs"]
mod split;

pub(crate) use packed::Packed;
pub(crate) use split::Split;

/// Largest ring, in descriptors (VIRTIO 1.2, sections 2.7 and 2.8.10.1).
pub(crate) const SIZE_MAX: u16 = 1 << 15;
/// Most descriptors of a chain with an indirect table. A table may be longer than the ring: drivers
/// were seen to do that with small rings.
const INDIRECT_MAX: u32 = 4096;
/// Most bytes of a chain (VIRTIO 1.2, sections 2.7.5 and 2.8.7).
const CHAIN_BYTES_MAX: u64 = 1 << 32;
/// Bytes of a descriptor, in rings of both kinds.
const DESCRIPTOR_BYTES: u64 = 16;

/// Flags of a descriptor.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Content of a ring that no driver may produce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Broken(pub String);

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Broken {
    /// Adds where it is.
    pub fn at(self, place: impl fmt::Display) -> Broken {
        Broken(format!("{place}: {}", self.0))
    }
}

impl From<BadAddress> for Broken {
    fn from(error: BadAddress) -> Broken {
        Broken(error.to_string())
    }
}

fn broken<T>(why: impl Into<String>) -> Result<T, Broken> {
    Err(Broken(why.into()))
}

/// The three parts of a ring and its number of descriptors.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub size: u16,
    pub descriptors: Place,
    /// Part that the driver writes: available ring, or its event suppression.
    pub driver: Place,
    /// Part that the device writes: used ring, or its event suppression.
    pub device: Place,
}

/// Features of a ring that were negotiated.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Features {
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC.
    pub indirect: bool,
}

/// Identity of a chain while it is with the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Split rings: index of the first descriptor. Packed rings: the buffer's id.
    id: u16,
    /// Descriptors of the ring that it takes, in packed rings.
    count: u16,
    /// Entry in the table of requests in flight.
    entry: u16,
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the chain with id {}", self.id)
    }
}

/// A request's memory.
#[derive(Debug)]
pub(crate) struct Chain {
    pub slot: Slot,
    /// Bytes that the device reads.
    pub readable: IoVec,
    /// Bytes that the device writes, behind the others.
    pub writable: IoVecMut,
    /// Guest addresses and lengths of the writable bytes.
    pub written: SmallVec<[(u64, u64); 2]>,
}

/// A descriptor, without the ring's own bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub address: u64,
    pub len: u32,
    pub flags: u16,
    /// Split rings: the next descriptor. Packed rings: the buffer's id.
    pub link: u16,
}

impl Descriptor {
    /// A descriptor of a split ring or of its indirect tables (VIRTIO 1.2, section 2.7.5).
    fn of_split(bytes: [u8; 16]) -> Descriptor {
        let value = u128::from_le_bytes(bytes);
        Descriptor {
            address: value as u64,
            len: (value >> 64) as u32,
            flags: (value >> 96) as u16,
            link: (value >> 112) as u16,
        }
    }

    /// A descriptor of a packed ring (VIRTIO 1.2, section 2.8.14): id and flags change places.
    fn of_packed(bytes: [u8; 16]) -> Descriptor {
        let split = Descriptor::of_split(bytes);
        Descriptor {
            flags: split.link,
            link: split.flags,
            ..split
        }
    }

    fn has_next(self) -> bool {
        self.flags & NEXT != 0
    }

    fn is_indirect(self) -> bool {
        self.flags & INDIRECT != 0
    }
}

/// A part of a ring.
fn part(place: &Place) -> Fields {
    Fields::new(&place.memory, place.range.start)
}

/// Checks that a part of a ring has its length and alignment.
fn check_area(name: &str, place: &Place, len: usize, alignment: usize) -> Result<(), Broken> {
    if place.range.len() < len || !place.range.start.is_multiple_of(alignment) {
        return broken(format!(
            "{name} is not {len} bytes at a multiple of {alignment}"
        ));
    }
    Ok(())
}

/// Bytes of the three parts of a ring: descriptors, driver's, device's.
pub(crate) fn part_bytes(size: u16, is_packed: bool) -> [u64; 3] {
    let size = u64::from(size);
    match is_packed {
        false => [DESCRIPTOR_BYTES * size, 6 + 2 * size, 6 + 8 * size],
        true => [DESCRIPTOR_BYTES * size, 4, 4],
    }
}

/// Collects the descriptors of a chain.
struct Collector<'a> {
    guest: &'a GuestMemory,
    readable: IoVec,
    writable: IoVecMut,
    written: SmallVec<[(u64, u64); 2]>,
    bytes: u64,
}

impl<'a> Collector<'a> {
    fn new(guest: &'a GuestMemory) -> Collector<'a> {
        Collector {
            guest,
            bytes: 0,
            readable: IoVec::default(),
            writable: IoVecMut::default(),
            written: SmallVec::new(),
        }
    }

    /// Adds a descriptor of memory.
    fn add(&mut self, descriptor: Descriptor) -> Result<(), Broken> {
        let range = (descriptor.address, u64::from(descriptor.len));
        if descriptor.flags & WRITE != 0 {
            self.guest.append_to_mut(&mut self.writable, range)?;
            self.written.push(range);
        } else if self.written.is_empty() {
            self.guest.append_to(&mut self.readable, range)?;
        } else {
            return broken("a chain has memory to read behind memory to write");
        }
        self.bytes += range.1;
        match self.bytes > CHAIN_BYTES_MAX {
            true => broken(format!("a chain of more than {CHAIN_BYTES_MAX} bytes")),
            false => Ok(()),
        }
    }

    /// Adds what an indirect table lists; `next` finds the descriptor that follows another one, if
    /// any does.
    fn add_table(
        &mut self,
        table: Descriptor,
        decode: fn([u8; 16]) -> Descriptor,
        next: fn(Descriptor, u32, u32) -> Option<u32>,
    ) -> Result<(), Broken> {
        let count = table.len / DESCRIPTOR_BYTES as u32;
        if table.flags & (NEXT | WRITE) != 0
            || !u64::from(table.len).is_multiple_of(DESCRIPTOR_BYTES)
            || !(1..=INDIRECT_MAX).contains(&count)
        {
            let (len, flags) = (table.len, table.flags);
            return broken(format!(
                "an indirect table of {len} bytes with flags {flags:#x}"
            ));
        }
        let place = self.guest.place(table.address, u64::from(table.len))?;
        let table = part(&place);
        let mut index = 0;
        for _ in 0..count {
            let descriptor = decode(table.load_bytes(index as usize * DESCRIPTOR_BYTES as usize));
            if descriptor.is_indirect() {
                return broken("an indirect table in an indirect table");
            }
            self.add(descriptor)?;
            match next(descriptor, index, count) {
                None => return Ok(()),
                Some(next) if next < count => index = next,
                Some(next) => {
                    return broken(format!("descriptor {next} of an indirect table of {count}"));
                }
            }
        }
        broken("an indirect table that goes round in a circle")
    }

    fn end(self, slot: Slot) -> Chain {
        Chain {
            slot,
            readable: self.readable,
            writable: self.writable,
            written: self.written,
        }
    }
}

/// Whether moving an index from `old` to `new` passes `event` (VIRTIO 1.2, section 2.7.10.1).
fn passes(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// A ring of either kind.
#[derive(Debug)]
pub(crate) enum Ring {
    Split(Split),
    Packed(Packed),
}

impl Ring {
    /// A ring at the place where another server left it, or the driver begins: `base` as of the
    /// messages SET_VRING_BASE. Requests that were in flight by the table come back first.
    ///
    /// # Errors
    /// The parts are no ring, or the table does not fit it.
    pub fn start(
        layout: &Layout,
        (base, is_packed): (u32, bool),
        features: Features,
        table: Option<QueueTable>,
    ) -> Result<Ring, Broken> {
        if layout.size == 0 || layout.size > SIZE_MAX {
            return broken(format!("a ring of {} descriptors", layout.size));
        }
        match is_packed {
            false => Split::start(layout, base, features, table).map(Ring::Split),
            true => Packed::start(layout, base, features, table).map(Ring::Packed),
        }
    }

    /// Number of its descriptors.
    pub fn size(&self) -> u16 {
        match self {
            Ring::Split(ring) => ring.size,
            Ring::Packed(ring) => ring.size,
        }
    }

    /// The next chain: one that was in flight when another server ended, or a new one.
    ///
    /// # Errors
    /// Its descriptors are broken, or the ring is.
    pub fn pop(&mut self, guest: &GuestMemory) -> Result<Option<Chain>, Broken> {
        match self {
            Ring::Split(ring) => ring.pop(guest),
            Ring::Packed(ring) => ring.pop(guest),
        }
    }

    /// Gives a chain back, of which the first `written` writable bytes were written.
    pub fn push(&mut self, slot: Slot, written: u32) {
        match self {
            Ring::Split(ring) => ring.push(slot, written),
            Ring::Packed(ring) => ring.push(slot, written),
        }
    }

    /// Whether the driver wants to be notified of the chains that were given back since this was
    /// asked last.
    pub fn take_notification(&mut self) -> bool {
        // The chains are in the ring before the driver's wish is looked at: a driver does both in
        // the other order.
        fence(Ordering::SeqCst);
        match self {
            Ring::Split(ring) => ring.take_notification(),
            Ring::Packed(ring) => ring.take_notification(),
        }
    }

    /// Asks the driver for a notification of the next chain, and returns whether there is one
    /// already.
    pub fn wait_for_chain(&mut self) -> bool {
        match self {
            Ring::Split(ring) => ring.enable_kicks(),
            Ring::Packed(ring) => ring.enable_kicks(),
        }
        fence(Ordering::SeqCst);
        match self {
            Ring::Split(ring) => ring.has_chain(),
            Ring::Packed(ring) => ring.has_chain(),
        }
    }

    /// Asks the driver not to notify, for as long as the ring is looked at anyhow.
    pub fn disable_kicks(&mut self) {
        match self {
            Ring::Split(ring) => ring.disable_kicks(),
            Ring::Packed(ring) => ring.disable_kicks(),
        }
    }

    /// The place where another server goes on, as of the messages GET_VRING_BASE.
    pub fn base(&self) -> u32 {
        match self {
            Ring::Split(ring) => ring.base(),
            Ring::Packed(ring) => ring.base(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_passed_once() {
        for start in [0u16, 5, u16::MAX - 2] {
            let at = |offset: u16| start.wrapping_add(offset);
            assert!(passes(at(0), at(0), at(1)));
            assert!(passes(at(2), at(0), at(3)));
            assert!(!passes(at(3), at(0), at(3)));
            assert!(!passes(at(0), at(1), at(3)));
            assert!(!passes(at(0), at(0), at(0)));
        }
    }

    #[test]
    fn descriptors_have_their_fields_where_the_specification_has_them() {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&0x1122_3344_5566_7788_u64.to_le_bytes());
        bytes[8..12].copy_from_slice(&7u32.to_le_bytes());
        bytes[12..14].copy_from_slice(&WRITE.to_le_bytes());
        bytes[14..].copy_from_slice(&9u16.to_le_bytes());
        let expected = Descriptor {
            address: 0x1122_3344_5566_7788,
            len: 7,
            flags: WRITE,
            link: 9,
        };
        assert_eq!(Descriptor::of_split(bytes), expected);
        bytes[12..14].copy_from_slice(&9u16.to_le_bytes());
        bytes[14..].copy_from_slice(&WRITE.to_le_bytes());
        assert_eq!(Descriptor::of_packed(bytes), expected);
    }
}
