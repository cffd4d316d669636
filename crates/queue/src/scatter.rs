//! The progress of a write through its list of buffers.

use std::io::IoSlice;

use crate::buf::Buf;

/// Most buffers that one call takes (`IOV_MAX`).
pub(crate) const SLICES_MAX: usize = 1024;

/// Buffers to be written one after the other, and how far that has come.
pub(crate) struct Scatter {
    bufs: Vec<Buf>,
    /// The first buffer that is not done, and how many of its bytes are.
    first: usize,
    skip: usize,
    /// Bytes that are done, of all.
    done: u64,
}

impl Scatter {
    pub(crate) fn new(bufs: Vec<Buf>) -> Scatter {
        let mut scatter = Scatter {
            bufs,
            first: 0,
            skip: 0,
            done: 0,
        };
        scatter.advance(0);
        scatter
    }

    pub(crate) fn is_done(&self) -> bool {
        self.first == self.bufs.len()
    }

    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    /// What is left, as far as one call takes it; never an empty slice.
    pub(crate) fn rest(&self) -> impl Iterator<Item = &[u8]> {
        let head = self.bufs.get(self.first).map(|buf| &buf[self.skip..]);
        let tail = self.bufs.iter().skip(self.first + 1);
        let tail = tail.map(|buf| &buf[..]).filter(|slice| !slice.is_empty());
        head.into_iter().chain(tail).take(SLICES_MAX)
    }

    pub(crate) fn slices(&self) -> Vec<IoSlice<'_>> {
        self.rest().map(IoSlice::new).collect()
    }

    /// Counts `sent` more bytes as done.
    ///
    /// # Panics
    /// If there are not that many left.
    pub(crate) fn advance(&mut self, sent: usize) {
        self.done += sent as u64;
        let mut left = sent;
        while let Some(buf) = self.bufs.get(self.first) {
            let rest = buf.len() - self.skip;
            if left < rest {
                self.skip += left;
                return;
            }
            left -= rest;
            self.first += 1;
            self.skip = 0;
        }
        assert!(left == 0, "more was written than there is");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes that writes of the given sizes would see.
    fn written(bufs: &[&[u8]], step: usize) -> Vec<u8> {
        let mut scatter = Scatter::new(bufs.iter().map(|bytes| Buf::copy_of(bytes)).collect());
        let mut seen = Vec::new();
        while !scatter.is_done() {
            let rest: Vec<u8> = scatter.rest().flatten().copied().collect();
            assert!(scatter.rest().all(|slice| !slice.is_empty()));
            let taken = step.min(rest.len());
            seen.extend_from_slice(&rest[..taken]);
            scatter.advance(taken);
        }
        assert_eq!(scatter.done(), seen.len() as u64);
        seen
    }

    #[test]
    fn steps_of_any_size_write_everything_once() {
        let bufs: [&[u8]; 6] = [b"", b"abc", b"", b"d", b"efghij", b""];
        for step in 1..=11 {
            assert_eq!(written(&bufs, step), b"abcdefghij", "step {step}");
        }
    }

    #[test]
    fn one_call_takes_no_more_slices_than_the_system() {
        let scatter = Scatter::new(vec![Buf::copy_of(b"x"); SLICES_MAX + 1]);
        assert_eq!(scatter.slices().len(), SLICES_MAX);
    }
}
