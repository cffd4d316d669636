//! Requests over memory of a guest: scatter lists of any shape over memory that is not the
//! engine's.
//!
//! A part of the requests goes so, as their ranges decide, so that a seed replays. What a request
//! has written from is overwritten as soon as it has ended, as a guest does with its buffers: an
//! engine that looked again later would show it.

use std::sync::Arc;

use cowslip::{Buf, BufMut, IoVec, IoVecMut, SharedMemory};

/// The byte that a guest leaves in its memory afterwards.
const LATER: u8 = 0xD7;

/// Bytes between two segments, at most.
const GAP_BYTES_MAX: usize = 600;
const SEGMENTS_MAX: u64 = 6;

/// Segments of a guest's memory, in the order of a request.
pub(crate) struct GuestMemory {
    memory: Arc<SharedMemory>,
    /// Where each begins, and how long it is.
    segments: Vec<(usize, usize)>,
}

impl GuestMemory {
    /// Memory for a request of `len` bytes at `offset`; `None` for those that take a buffer.
    pub(crate) fn for_request(offset: u64, len: usize) -> Option<GuestMemory> {
        let mut numbers = Numbers(offset ^ (len as u64) << 40);
        if len == 0 || numbers.below(2) == 0 {
            return None;
        }
        let count = 1 + numbers.below(SEGMENTS_MAX);
        // Whole sectors as a rule, as guests have it: then direct I/O may do without a copy.
        let unit = [1, 512, 512][numbers.below(3) as usize];
        let mut cuts: Vec<usize> = (1..count)
            .map(|_| numbers.below(len as u64 + 1) as usize / unit * unit)
            .collect();
        cuts.extend([0, len]);
        cuts.sort_unstable();
        let mut at = 0;
        let mut segments = Vec::new();
        for pair in cuts.windows(2) {
            at += numbers.below(GAP_BYTES_MAX as u64) as usize / unit * unit;
            segments.push((at, pair[1] - pair[0]));
            at += pair[1] - pair[0];
        }
        // The last part of a request need not be the last in memory.
        if numbers.below(2) == 0 {
            let mut lens: Vec<usize> = segments.iter().map(|segment| segment.1).collect();
            lens.reverse();
            let mut at = 0;
            for (segment, len) in segments.iter_mut().rev().zip(lens.into_iter().rev()) {
                *segment = (at, len);
                at += len + unit;
            }
        }
        let end = segments.iter().map(|(at, len)| at + len).max();
        Some(GuestMemory {
            memory: SharedMemory::new(end.unwrap_or(0)),
            segments,
        })
    }

    /// The list to be filled.
    pub(crate) fn target(&self) -> IoVecMut {
        let segments = self.segments.iter();
        segments
            .map(|&(at, len)| IoVecMut::shared(&self.memory, at..at + len))
            .collect()
    }

    /// Copies what the list has been filled with.
    pub(crate) fn copy_to(&self, buf: &mut BufMut) {
        let mut from = 0;
        for &(at, len) in &self.segments {
            self.memory.read(at, &mut buf[from..from + len]);
            from += len;
        }
    }

    /// The list to be written from, which holds the bytes.
    pub(crate) fn source(&self, data: &Buf) -> IoVec {
        let mut from = 0;
        let mut list = IoVec::default();
        for &(at, len) in &self.segments {
            self.memory.write(at, &data[from..from + len]);
            list.append(IoVec::shared(&self.memory, at..at + len));
            from += len;
        }
        list
    }

    /// Uses the memory for something else.
    pub(crate) fn reuse(&self) {
        self.memory.write(0, &vec![LATER; self.memory.len()]);
    }
}

/// Numbers that follow from a request's range.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_many_shapes_holds_what_a_request_has() {
        let mut counts = [0; 2];
        let mut most_segments = 0;
        for request in 0..2000u64 {
            let (offset, len) = (request * 512, 512 * (1 + request as usize % 9));
            let Some(guest) = GuestMemory::for_request(offset, len) else {
                counts[0] += 1;
                continue;
            };
            counts[1] += 1;
            let bytes: Vec<u8> = (0..len).map(|at| (at / 7) as u8 ^ request as u8).collect();
            let data = Buf::copy_of(&bytes);
            let list = guest.source(&data);
            assert_eq!(list.to_vec(), bytes);
            most_segments = most_segments.max(list.segment_count());
            guest.reuse();
            assert_eq!(list.to_vec(), vec![LATER; len]);
            let mut target = guest.target();
            target.copy_from_slice(0, &bytes);
            let mut read = BufMut::zeroed(len);
            guest.copy_to(&mut read);
            assert_eq!(read[..], bytes);
        }
        assert!(counts.iter().all(|&count| count > 500), "{counts:?}");
        assert!(most_segments > 3);
    }
}
