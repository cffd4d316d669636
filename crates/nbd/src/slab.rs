//! Aligned memory for payloads, which is recycled.
//!
//! A small payload gets a part of a larger piece, since an aligned allocation for each would cost
//! more than the copy; a large payload gets memory of its own. Pieces whose parts have all been
//! dropped are reused, which saves the page faults of fresh memory. So memory is not zeroed: it
//! holds data that the same connection transferred before. The user of a part overwrites all of it,
//! or drops it.

use std::collections::VecDeque;

use cowslip_queue::BufMut;

/// Sixteen payloads of 4 KiB; small enough for a few pieces to stay in the processor's cache.
const PIECE_BYTES: usize = 64 << 10;
/// Payloads up to this length share a piece.
const SHARED_BYTES_MAX: usize = PIECE_BYTES / 4;
/// Alignment of the start of a buffer for direct I/O.
const ALIGNMENT_BYTES: usize = 4096;
/// Memory that is kept for use again once nothing needs it any more: enough for a deep queue of
/// small payloads or for some large ones.
const KEPT_BYTES_MAX: usize = 4 << 20;
/// Pieces that are looked at for one to use again; requests end nearly in the order of their start.
const LOOKS: usize = 4;

/// Memory for the payloads of one connection.
#[derive(Default)]
pub(crate) struct Slab {
    /// The piece that small payloads are cut from.
    current: Option<BufMut>,
    /// Pieces that were handed out, oldest first, each as a remainder that keeps its memory alive.
    used: VecDeque<Used>,
    used_bytes: usize,
}

struct Used {
    len: usize,
    remainder: BufMut,
}

impl Slab {
    /// `len` bytes at an aligned address, with any content.
    pub(crate) fn take(&mut self, len: usize) -> BufMut {
        let room = len.next_multiple_of(ALIGNMENT_BYTES);
        let mut taken = match room {
            ..=SHARED_BYTES_MAX => self.take_shared(room),
            _ => self.take_whole(room),
        };
        taken.truncate(len);
        taken
    }

    fn take_shared(&mut self, room: usize) -> BufMut {
        if self.current.as_ref().is_none_or(|piece| piece.len() < room) {
            let fresh = self.piece(PIECE_BYTES);
            if let Some(exhausted) = self.current.replace(fresh) {
                self.keep(PIECE_BYTES, exhausted);
            }
        }
        let piece = self.current.as_mut().expect("there is a piece by now");
        piece.split_to(room)
    }

    fn take_whole(&mut self, room: usize) -> BufMut {
        let mut piece = self.piece(room);
        let taken = piece.split_to(room);
        self.keep(room, piece);
        taken
    }

    /// A piece of `len` bytes: one that nothing uses any more, or a new one.
    fn piece(&mut self, len: usize) -> BufMut {
        for at in 0..self.used.len().min(LOOKS) {
            if self.used[at].len == len && self.used[at].remainder.try_reclaim() {
                let used = self.used.remove(at).expect("it was just looked at");
                self.used_bytes -= len;
                return used.remainder;
            }
        }
        BufMut::zeroed(len)
    }

    /// Remembers a piece that was handed out; the oldest ones beyond the limit are forgotten, and
    /// freed when their parts are.
    fn keep(&mut self, len: usize, remainder: BufMut) {
        self.used.push_back(Used { len, remainder });
        self.used_bytes += len;
        while self.used_bytes > KEPT_BYTES_MAX {
            let forgotten = self
                .used
                .pop_front()
                .expect("it has bytes, so it has pieces");
            self.used_bytes -= forgotten.len;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_aligned_and_have_the_length_that_was_asked_for() {
        let mut slab = Slab::default();
        let lengths = [
            0,
            1,
            512,
            4095,
            4096,
            4097,
            16_384,
            16_385,
            100_000,
            1 << 20,
        ];
        let mut taken = Vec::new();
        for len in lengths.into_iter().cycle().take(200) {
            let mut buf = slab.take(len);
            assert_eq!(buf.len(), len);
            if len > 0 {
                assert_eq!(buf.as_ptr() as usize % ALIGNMENT_BYTES, 0);
            }
            buf.fill(taken.len() as u8);
            taken.push(buf);
        }
        for (nth, buf) in taken.iter().enumerate() {
            assert!(buf.iter().all(|&byte| byte == nth as u8), "part {nth}");
        }
    }

    #[test]
    fn memory_that_was_given_back_is_used_again() {
        for len in [4096, 200_000] {
            let mut slab = Slab::default();
            let mut addresses = std::collections::HashSet::new();
            for _ in 0..1000 {
                addresses.insert(slab.take(len).as_ptr() as usize);
            }
            let pieces = 2 * (PIECE_BYTES / 4096);
            assert!(addresses.len() <= pieces, "{} addresses", addresses.len());
        }
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut slab = Slab::default();
        let taken: Vec<BufMut> = (0..100).map(|_| slab.take(1 << 20)).collect();
        assert!(slab.used_bytes <= KEPT_BYTES_MAX);
        drop(taken);
        slab.take(8 << 20);
        assert!(slab.used_bytes <= KEPT_BYTES_MAX);
    }
}
