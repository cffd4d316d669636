//! Packed rings (VIRTIO 1.2, section 2.8): one ring of descriptors, which the driver makes
//! available and the device marks used where they lie.

use std::collections::VecDeque;

use super::{
    Broken, Chain, Collector, DESCRIPTOR_BYTES, Descriptor, Features, Layout, Slot, broken,
    check_area, part, part_bytes, passes,
};
use crate::fields::Fields;
use crate::inflight::{PackedPosition, PackedTable, QueueTable};
use crate::memory::GuestMemory;

/// Flags of a descriptor in a ring: each is compared with a wrap counter.
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// Flag of a used descriptor: the device has written to its memory.
const WRITTEN: u16 = 2;
/// Event suppression: all events, none, or those of one descriptor.
const EVENTS_ALL: u16 = 0;
const EVENTS_NONE: u16 = 1;
const EVENTS_OF_ONE: u16 = 2;

/// A position in the ring, which goes round it with a wrap counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    index: u16,
    wrap: bool,
}

impl Position {
    fn of_bits(bits: u16) -> Position {
        Position {
            index: bits & 0x7FFF,
            wrap: bits & 0x8000 != 0,
        }
    }

    fn bits(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    /// The position `count` descriptors on, at most once round.
    fn advance(self, count: u16, size: u16) -> Position {
        let index = u32::from(self.index) + u32::from(count);
        let size = u32::from(size);
        match index < size {
            true => Position {
                index: index as u16,
                wrap: self.wrap,
            },
            false => Position {
                index: (index - size) as u16,
                wrap: !self.wrap,
            },
        }
    }
}

/// A packed ring, on the device's side.
#[derive(Debug)]
pub(crate) struct Packed {
    pub(super) size: u16,
    features: Features,
    ring: Fields,
    driver: Fields,
    device: Fields,
    next_available: Position,
    next_used: Position,
    /// Where used descriptors ended when the driver's wish was looked at last. At first, nothing is
    /// known.
    notified: Option<Position>,
    has_pushed: bool,
    table: Option<PackedTable>,
    /// Entries of the table whose chains were in flight when another server ended.
    again: VecDeque<u16>,
}

impl Packed {
    pub fn start(
        layout: &Layout,
        base: u32,
        features: Features,
        table: Option<QueueTable>,
    ) -> Result<Packed, Broken> {
        let size = layout.size;
        let [ring, driver, device] = part_bytes(size, true);
        check_area(
            "the descriptor ring",
            &layout.descriptors,
            ring as usize,
            16,
        )?;
        check_area(
            "the driver's event suppression",
            &layout.driver,
            driver as usize,
            4,
        )?;
        check_area(
            "the device's event suppression",
            &layout.device,
            device as usize,
            4,
        )?;
        let mut next_available = Position::of_bits(base as u16);
        let mut next_used = Position::of_bits((base >> 16) as u16);
        let ring = part(&layout.descriptors);
        let mut again = VecDeque::new();
        let mut known = None;
        if let Some(table) = table {
            let flags_at = |index: u16| {
                let is_in = index < size;
                is_in.then(|| ring.load_u16(usize::from(index) * 16 + 14))
            };
            let (table, recovered) =
                table.packed(size, PackedPosition(next_used.bits()), |at| {
                    let position = Position::of_bits(at.0);
                    let flags = flags_at(position.index)?;
                    Some(!is_available(flags, position.wrap))
                })?;
            if let Some(recovered) = recovered {
                next_used = Position::of_bits(recovered.used.0);
                next_available = next_used.advance(recovered.descriptors.min(size), size);
                again = recovered.entries.into();
            }
            known = Some(table);
        }
        if next_available.index >= size || next_used.index >= size {
            return broken(format!(
                "a position beyond a packed ring of {size} descriptors"
            ));
        }
        Ok(Packed {
            size,
            features,
            ring,
            driver: part(&layout.driver),
            device: part(&layout.device),
            next_available,
            next_used,
            notified: None,
            has_pushed: false,
            table: known,
            again,
        })
    }

    fn flags_at(&self, index: u16) -> u16 {
        self.ring
            .load_u16(usize::from(index) * DESCRIPTOR_BYTES as usize + 14)
    }

    pub fn pop(&mut self, guest: &GuestMemory) -> Result<Option<Chain>, Broken> {
        if let Some(entry) = self.again.pop_front() {
            let chain = self.pop_again(entry, guest).map(Some);
            let place = || format!("entry {entry} of the table of requests in flight");
            return chain.map_err(|broken| broken.at(place()));
        }
        if !self.has_new_chain() {
            return Ok(None);
        }
        let Position { index, .. } = self.next_available;
        let chain = self.pop_new(guest).map(Some);
        chain.map_err(|broken| broken.at(format_args!("the chain at descriptor {index}")))
    }

    /// Takes the chain at the next place.
    fn pop_new(&mut self, guest: &GuestMemory) -> Result<Chain, Broken> {
        let mut collector = Collector::new(guest);
        let mut found: smallvec::SmallVec<[Descriptor; 4]> = smallvec::SmallVec::new();
        loop {
            if found.len() == usize::from(self.size) {
                return broken("a chain is longer than its ring");
            }
            let place = self.next_available.advance(found.len() as u16, self.size);
            let at = usize::from(place.index) * DESCRIPTOR_BYTES as usize;
            let descriptor = Descriptor::of_packed(self.ring.load_bytes(at));
            found.push(descriptor);
            self.add(&mut collector, descriptor)?;
            if !descriptor.has_next() {
                break;
            }
        }
        let count = found.len() as u16;
        let id = found[found.len() - 1].link;
        let entry = match &mut self.table {
            Some(table) => table.take(&found)?,
            None => 0,
        };
        self.next_available = self.next_available.advance(count, self.size);
        Ok(collector.end(Slot { id, count, entry }))
    }

    /// Collects a chain from the table: the ring may have used descriptors in its place.
    fn pop_again(&mut self, entry: u16, guest: &GuestMemory) -> Result<Chain, Broken> {
        let table = self.table.as_ref();
        let found = table.map_or_else(Vec::new, |table| table.descriptors(entry));
        let Some(last) = found.last() else {
            return broken("a request in flight without descriptors");
        };
        let (count, id) = (found.len() as u16, last.link);
        let mut collector = Collector::new(guest);
        for descriptor in found {
            self.add(&mut collector, descriptor)?;
        }
        Ok(collector.end(Slot { id, count, entry }))
    }

    fn add(&self, collector: &mut Collector<'_>, descriptor: Descriptor) -> Result<(), Broken> {
        if !descriptor.is_indirect() {
            return collector.add(descriptor);
        }
        if !self.features.indirect {
            return broken("an indirect table, which was not negotiated");
        }
        // The bits of the ring are no flags of the table.
        let table = Descriptor {
            flags: descriptor.flags & !(AVAILABLE | USED),
            ..descriptor
        };
        // All entries, in order: NEXT has no meaning there.
        let next = |_, index: u32, count: u32| (index + 1 < count).then_some(index + 1);
        collector.add_table(table, Descriptor::of_packed, next)
    }

    pub fn push(&mut self, slot: Slot, written: u32) {
        let before = self.next_used;
        let at = usize::from(before.index) * DESCRIPTOR_BYTES as usize;
        self.next_used = before.advance(slot.count, self.size);
        if let Some(table) = &mut self.table {
            table.begin_completion(slot.entry, PackedPosition(self.next_used.bits()));
        }
        self.ring.store_u32(at + 8, written);
        self.ring.store_u16(at + 12, slot.id);
        let bits = match before.wrap {
            true => AVAILABLE | USED,
            false => 0,
        };
        let has_written = if written > 0 { WRITTEN } else { 0 };
        self.ring.store_u16(at + 14, bits | has_written);
        if let Some(table) = &mut self.table {
            table.end_completion(slot.entry);
        }
        self.has_pushed = true;
    }

    pub fn take_notification(&mut self) -> bool {
        if !std::mem::take(&mut self.has_pushed) {
            return false;
        }
        let now = self.next_used;
        let before = self.notified.replace(now);
        match self.driver.load_u16(2) & 3 {
            EVENTS_NONE => false,
            EVENTS_OF_ONE if self.features.event_idx => {
                let event = Position::of_bits(self.driver.load_u16(0));
                let Some(before) = before else {
                    return true;
                };
                // Positions of the round before count from below zero.
                let relative = |position: Position| match position.wrap == now.wrap {
                    true => position.index,
                    false => position.index.wrapping_sub(self.size),
                };
                passes(relative(event), relative(before), now.index)
            }
            _ => true,
        }
    }

    pub fn enable_kicks(&mut self) {
        match self.features.event_idx {
            true => {
                self.device.store_u16(0, self.next_available.bits());
                self.device.store_u16(2, EVENTS_OF_ONE);
            }
            false => self.device.store_u16(2, EVENTS_ALL),
        }
    }

    pub fn disable_kicks(&mut self) {
        self.device.store_u16(2, EVENTS_NONE);
    }

    fn has_new_chain(&self) -> bool {
        let Position { index, wrap } = self.next_available;
        is_available(self.flags_at(index), wrap)
    }

    pub fn has_chain(&self) -> bool {
        !self.again.is_empty() || self.has_new_chain()
    }

    pub fn base(&self) -> u32 {
        u32::from(self.next_available.bits()) | u32::from(self.next_used.bits()) << 16
    }
}

/// Whether a descriptor at a position of this wrap counter is available: neither used, nor made
/// available again after that.
fn is_available(flags: u16, wrap: bool) -> bool {
    (flags & AVAILABLE != 0) == wrap && (flags & USED != 0) != wrap
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_go_round_with_their_counters() {
        let start = Position::of_bits(0x8000);
        assert_eq!((start.index, start.wrap), (0, true));
        assert_eq!(start.advance(3, 4).bits(), 0x8003);
        assert_eq!(start.advance(4, 4).bits(), 0x0000);
        assert_eq!(start.advance(3, 4).advance(2, 4).bits(), 0x0001);
        assert_eq!(Position::of_bits(0x0003).advance(1, 4).bits(), 0x8000);
    }
}
