//! The progress of a transfer through its list of segments.
#![allow(unsafe_code)] // System calls that are given the list's memory; each says why it is sound.

use std::io;
use std::os::fd::BorrowedFd;

use smallvec::SmallVec;

use crate::iovec::{IoVec, IoVecMut, Segments};
use crate::sys;

/// Most segments that one call takes (`IOV_MAX`).
pub(crate) const SLICES_MAX: usize = 1024;

/// Arguments of one call.
pub(crate) type Slices = SmallVec<[libc::iovec; 4]>;

/// Memory to be transferred, and how far that has come.
pub(crate) struct Scatter<L> {
    list: L,
    /// The first segment that is not done, and how many of its bytes are.
    first: usize,
    skip: usize,
    /// Bytes that are done, of all.
    done: u64,
}

impl<L: Segments> Scatter<L> {
    pub(crate) fn new(list: L) -> Scatter<L> {
        let mut scatter = Scatter {
            list,
            first: 0,
            skip: 0,
            done: 0,
        };
        scatter.advance(0);
        scatter
    }

    pub(crate) fn is_done(&self) -> bool {
        self.first >= self.list.segments().len()
    }

    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    /// Returns the rest, as far as one call takes it; never an empty slice.
    pub(crate) fn rest(&self) -> impl Iterator<Item = libc::iovec> {
        let segments = self.list.segments()[self.first..].iter();
        let slices = segments.enumerate().map(|(index, segment)| {
            let skip = if index == 0 { self.skip } else { 0 };
            libc::iovec {
                iov_base: segment.start().wrapping_add(skip).cast(),
                iov_len: segment.len() - skip,
            }
        });
        slices.take(SLICES_MAX)
    }

    /// Returns the rest, if that is one slice.
    pub(crate) fn only(&self) -> Option<libc::iovec> {
        match self.first + 1 < self.list.segments().len() {
            false => self.rest().next(),
            true => None,
        }
    }

    pub(crate) fn slices(&self) -> Slices {
        self.rest().collect()
    }

    /// Counts `sent` more bytes as done.
    ///
    /// # Panics
    /// If there are not that many left.
    pub(crate) fn advance(&mut self, sent: usize) {
        self.done += sent as u64;
        let mut left = sent;
        while let Some(segment) = self.list.segments().get(self.first) {
            let rest = segment.len() - self.skip;
            if left < rest {
                self.skip += left;
                return;
            }
            left -= rest;
            self.first += 1;
            self.skip = 0;
        }
        assert!(left == 0, "more was transferred than there is");
    }

    pub(crate) fn into_list(self) -> L {
        self.list
    }
}

impl Scatter<IoVec> {
    /// Sends some of what is left.
    pub(crate) fn send(&self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let mut slices = self.slices();
        // SAFETY: the slices are of the list, which is borrowed.
        unsafe { sys::send(fd, &mut slices) }
    }

    /// Writes some of what is left, with flags as of `pwritev2`.
    pub(crate) fn write_at(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        flags: i32,
    ) -> io::Result<usize> {
        // SAFETY: the slices are of the list, which is borrowed.
        unsafe { sys::write_at(fd, &self.slices(), offset, flags) }
    }
}

impl Scatter<IoVecMut> {
    /// Reads into some of what is left.
    pub(crate) fn read_at(&mut self, fd: BorrowedFd<'_>, offset: u64) -> io::Result<usize> {
        // SAFETY: the slices are of the list, which is borrowed exclusively and may be written.
        unsafe { sys::read_at(fd, &self.slices(), offset) }
    }

    /// Zeroes what is left.
    pub(crate) fn fill_rest(&mut self) {
        self.list.fill_range(self.done as usize..self.list.len(), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buf::Buf;
    use crate::shared::SharedMemory;

    /// The bytes that transfers of the given sizes would see.
    fn transferred(list: IoVec, step: usize) -> Vec<u8> {
        let bytes = list.to_vec();
        let segments = list.segments().iter();
        let places: Vec<_> = segments.map(|s| (s.start(), s.len())).collect();
        let byte_at = |address: usize| {
            let mut before = 0;
            for &(start, len) in &places {
                if (start.addr()..start.addr() + len).contains(&address) {
                    return bytes[before + address - start.addr()];
                }
                before += len;
            }
            panic!("an address that is not in the list");
        };
        let mut scatter = Scatter::new(list);
        let mut seen = Vec::new();
        while !scatter.is_done() {
            assert!(scatter.rest().all(|slice| slice.iov_len > 0));
            let addresses = scatter.rest().flat_map(|slice| {
                let start = slice.iov_base.addr();
                start..start + slice.iov_len
            });
            let rest: Vec<u8> = addresses.map(byte_at).collect();
            let is_one = scatter.rest().count() == 1;
            assert_eq!(scatter.only().is_some(), is_one);
            let taken = step.min(rest.len());
            seen.extend_from_slice(&rest[..taken]);
            scatter.advance(taken);
        }
        assert_eq!(scatter.done(), seen.len() as u64);
        seen
    }

    #[test]
    fn steps_of_any_size_transfer_everything_once() {
        let bufs: [&[u8]; 6] = [b"", b"abc", b"", b"d", b"efghij", b""];
        let shared = SharedMemory::new(8);
        shared.write(0, b"klmnopqr");
        for step in 1..=19 {
            let mut list: IoVec = bufs.iter().map(|bytes| Buf::copy_of(bytes)).collect();
            list.append(IoVec::shared(&shared, 0..3));
            list.append(IoVec::shared(&shared, 5..8));
            assert_eq!(transferred(list, step), b"abcdefghijklmpqr", "step {step}");
        }
    }

    #[test]
    fn one_call_takes_no_more_slices_than_the_system() {
        let many = (0..=SLICES_MAX).map(|_| Buf::copy_of(b"x"));
        let scatter = Scatter::new(many.collect::<IoVec>());
        assert_eq!(scatter.slices().len(), SLICES_MAX);
    }

    #[test]
    fn what_is_left_of_a_read_is_zeroed() {
        let mut list = IoVecMut::default();
        for _ in 0..3 {
            list.append(crate::buf::BufMut::copy_of(&[7; 4]).into());
        }
        let mut scatter = Scatter::new(list);
        scatter.advance(6);
        scatter.fill_rest();
        assert_eq!(scatter.into_list().to_vec(), [[7; 6], [0; 6]].concat());
    }
}
