//! Split rings (VIRTIO 1.2, section 2.7): a table of descriptors, a ring of available chains that
//! the driver writes, and one of used chains that the device writes.

use std::collections::VecDeque;
use std::fmt;

use super::{
    Broken, Chain, Collector, DESCRIPTOR_BYTES, Descriptor, Features, Layout, Slot, broken,
    check_area, part, part_bytes, passes,
};
use crate::fields::Fields;
use crate::inflight::{QueueTable, SplitTable};
use crate::memory::GuestMemory;

/// The driver does not want notifications (of chains that were used).
const NO_INTERRUPT: u16 = 1;
/// The device does not want notifications (of chains that are available).
const NO_NOTIFY: u16 = 1;

/// The chain that begins with a descriptor, in messages.
struct Head(u16);

impl fmt::Display for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the chain at descriptor {}", self.0)
    }
}

/// A split ring, on the device's side.
#[derive(Debug)]
pub(crate) struct Split {
    pub(super) size: u16,
    features: Features,
    descriptors: Fields,
    available: Fields,
    used: Fields,
    next_available: u16,
    next_used: u16,
    /// The used index when the driver's wish was looked at last. At first, nothing is known.
    notified: Option<u16>,
    has_pushed: bool,
    table: Option<SplitTable>,
    /// Chains that were in flight when another server ended, by their first descriptors.
    again: VecDeque<u16>,
}

impl Split {
    pub fn start(
        layout: &Layout,
        base: u32,
        features: Features,
        table: Option<QueueTable>,
    ) -> Result<Split, Broken> {
        let size = layout.size;
        if !size.is_power_of_two() {
            return broken(format!(
                "a split ring of {size} descriptors, no power of two"
            ));
        }
        let [descriptors, available, used] = part_bytes(size, false);
        check_area(
            "the descriptor table",
            &layout.descriptors,
            descriptors as usize,
            16,
        )?;
        check_area("the available ring", &layout.driver, available as usize, 2)?;
        check_area("the used ring", &layout.device, used as usize, 4)?;
        let used = part(&layout.device);
        let next_used = used.load_u16(2);
        let mut ring = Split {
            size,
            features,
            descriptors: part(&layout.descriptors),
            available: part(&layout.driver),
            used,
            next_available: base as u16,
            next_used,
            notified: None,
            has_pushed: false,
            table: None,
            again: VecDeque::new(),
        };
        if let Some(table) = table {
            let mut table = table.split(size)?;
            ring.again = table.recover(next_used).into();
            // What was taken and not completed is known by the table alone.
            let in_flight = ring.again.len() as u16;
            ring.next_available = next_used.wrapping_add(in_flight);
            ring.table = Some(table);
        }
        Ok(ring)
    }

    pub fn pop(&mut self, guest: &GuestMemory) -> Result<Option<Chain>, Broken> {
        if let Some(head) = self.again.pop_front() {
            let chain = self.walk(head, guest);
            return chain.map(Some).map_err(|broken| broken.at(Head(head)));
        }
        let available = self.available.load_u16(2);
        let waiting = available.wrapping_sub(self.next_available);
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > self.size {
            let size = self.size;
            return broken(format!(
                "{waiting} chains are available in a ring of {size}"
            ));
        }
        let place = usize::from(self.next_available % self.size);
        let head = self.available.load_u16(4 + 2 * place);
        if head >= self.size {
            let size = self.size;
            return broken(format!("a chain at descriptor {head} of a ring of {size}"));
        }
        let chain = self.walk(head, guest);
        let chain = chain.map_err(|broken| broken.at(Head(head)))?;
        if let Some(table) = &mut self.table {
            table.take(head)?;
        }
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(chain))
    }

    /// Collects the chain that begins with a descriptor.
    fn walk(&self, head: u16, guest: &GuestMemory) -> Result<Chain, Broken> {
        let mut collector = Collector::new(guest);
        let mut index = head;
        for _ in 0..self.size {
            let at = usize::from(index) * DESCRIPTOR_BYTES as usize;
            let descriptor = Descriptor::of_split(self.descriptors.load_bytes(at));
            if descriptor.is_indirect() {
                if !self.features.indirect {
                    return broken("an indirect table, which was not negotiated");
                }
                let next = |d: Descriptor, _, _| d.has_next().then_some(u32::from(d.link));
                collector.add_table(descriptor, Descriptor::of_split, next)?;
            } else {
                collector.add(descriptor)?;
            }
            if !descriptor.has_next() {
                return Ok(collector.end(Slot {
                    id: head,
                    count: 1,
                    entry: head,
                }));
            }
            index = descriptor.link;
            if index >= self.size {
                let size = self.size;
                return broken(format!("a chain goes on at descriptor {index} of {size}"));
            }
        }
        broken("a chain goes round in a circle")
    }

    pub fn push(&mut self, slot: Slot, written: u32) {
        if let Some(table) = &mut self.table {
            table.begin_completion(slot.entry);
        }
        let at = 4 + 8 * usize::from(self.next_used % self.size);
        self.used.store_u32(at, u32::from(slot.id));
        self.used.store_u32(at + 4, written);
        self.next_used = self.next_used.wrapping_add(1);
        self.used.store_u16(2, self.next_used);
        if let Some(table) = &mut self.table {
            table.end_completion(slot.entry, self.next_used);
        }
        self.has_pushed = true;
    }

    pub fn take_notification(&mut self) -> bool {
        if !std::mem::take(&mut self.has_pushed) {
            return false;
        }
        let now = self.next_used;
        if !self.features.event_idx {
            return self.available.load_u16(0) & NO_INTERRUPT == 0;
        }
        let event = self.available.load_u16(4 + 2 * usize::from(self.size));
        match self.notified.replace(now) {
            Some(before) => passes(event, before, now),
            None => true,
        }
    }

    pub fn enable_kicks(&mut self) {
        match self.features.event_idx {
            true => {
                let at = 4 + 8 * usize::from(self.size);
                self.used.store_u16(at, self.next_available);
            }
            false => self.used.store_u16(0, 0),
        }
    }

    pub fn disable_kicks(&mut self) {
        // With event indexes an old index is as good: the driver passes it once.
        if !self.features.event_idx {
            self.used.store_u16(0, NO_NOTIFY);
        }
    }

    pub fn has_chain(&self) -> bool {
        !self.again.is_empty() || self.available.load_u16(2) != self.next_available
    }

    pub fn base(&self) -> u32 {
        u32::from(self.next_available)
    }
}
