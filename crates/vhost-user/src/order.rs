//! The order in which completed requests go back to the driver: as they complete, or as they were
//! taken, where VIRTIO_F_IN_ORDER was negotiated (VIRTIO 1.2, sections 2.7.9 and 2.8.11).

use std::collections::VecDeque;

use crate::ring::Slot;

/// Requests that the driver gets back in the order in which they were taken.
#[derive(Debug, Default)]
pub(crate) struct InOrder {
    /// Those that it has not got back, with what was written for those that have completed.
    waiting: VecDeque<(Slot, Option<u32>)>,
}

impl InOrder {
    /// Number of requests that the driver has not got back.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn take(&mut self, slot: Slot) {
        self.waiting.push_back((slot, None));
    }

    /// Notes that a request has completed. Those that go back now follow from [`InOrder::next`].
    pub fn complete(&mut self, slot: Slot, written: u32) {
        // A driver that offers a chain twice gets either first.
        let mut waiting = self.waiting.iter_mut();
        let found = waiting.find(|(known, done)| *known == slot && done.is_none());
        if let Some((_, done)) = found {
            *done = Some(written);
        }
    }

    /// The next request to give back, with the bytes that were written.
    pub fn next(&mut self) -> Option<(Slot, u32)> {
        let &(slot, written) = self.waiting.front()?;
        let written = written?;
        self.waiting.pop_front();
        Some((slot, written))
    }
}
