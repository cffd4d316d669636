//! Memory that rings know (io_uring_register(2), `IORING_REGISTER_BUFFERS`): the kernel finds its
//! pages when a ring is made, not at each request.
//!
//! It is memory of buffers of this process alone. A guest's may be replaced under its addresses,
//! as when a balloon gives it back to the host; a ring would go on with the pages that were there.
//! Where a process forks, the kernel copies such pages for the child at once, since Linux 5.9.
#![allow(unsafe_code)] // The one registration, which says why the memory lives.

use std::sync::OnceLock;

use io_uring::Submitter;

use crate::memory;

/// One huge page, which is cheap to register. Each ring counts it against what its user may pin, 8
/// MiB by default, so of a user's many rings the first few know it.
pub(crate) const REGION_BYTES: usize = 2 << 20;

static REGION: OnceLock<Fixed> = OnceLock::new();

/// A range of addresses that a ring knows; empty if it knows none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fixed {
    start: usize,
    len: usize,
}

impl Fixed {
    /// The range's place in the ring's table.
    pub(crate) const INDEX: u16 = 0;

    /// Whether a request to this memory may refer to the table.
    pub(crate) fn has(&self, start: *const u8, len: u32) -> bool {
        let offset = (start as usize).wrapping_sub(self.start);
        offset < self.len && len as usize <= self.len - offset
    }
}

/// Makes 2 MiB of memory for buffers that are to be overwritten, which the rings that are made from
/// now on know: for programs that move much. Requests from and to it take less of a processor. A
/// ring for which the system pins no memory works as others do.
pub fn fix_buffers() {
    REGION.get_or_init(|| {
        let start = memory::reserve(REGION_BYTES);
        Fixed {
            start: start.as_ptr() as usize,
            len: REGION_BYTES,
        }
    });
}

/// Has a ring know the memory, if there is any; returns what it knows.
pub(crate) fn register(submitter: &Submitter<'_>) -> Fixed {
    let Some(region) = REGION.get() else {
        return Fixed::default();
    };
    let list = [libc::iovec {
        iov_base: region.start as *mut libc::c_void,
        iov_len: region.len,
    }];
    // SAFETY: the memory lives as long as the process, and the kernel copies the list.
    let registered = unsafe { submitter.register_buffers(&list) };
    registered.map_or(Fixed::default(), |()| *region)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buf::BufMut;
    use crate::ring::{Ring, Width};

    #[test]
    fn a_range_has_what_lies_in_it_to_the_end() {
        let fixed = Fixed {
            start: 8192,
            len: 4096,
        };
        for (start, len, has) in [
            (8192, 4096, true),
            (8193, 4095, true),
            (12_287, 1, true),
            (8193, 4096, false),
            (8191, 2, false),
            (12_288, 1, false),
            (0, u32::MAX, false),
            (8192, u32::MAX, false),
        ] {
            assert_eq!(fixed.has(start as *const u8, len), has, "{start} {len}");
        }
        assert!(!Fixed::default().has(std::ptr::null(), 1));
    }

    #[test]
    fn rings_know_small_buffers_that_are_made_afterwards() {
        fix_buffers();
        for width in [Width::Narrow, Width::Wide] {
            let Ok(ring) = Ring::prepare(width) else {
                return eprintln!("SKIPPED: no io_uring here");
            };
            for len in [4096, 60 << 10] {
                let buf = BufMut::for_overwrite(len);
                assert!(ring.fixed().has(buf.as_ptr(), len as u32), "{len}");
            }
            let other = BufMut::zeroed(4096);
            assert!(!ring.fixed().has(other.as_ptr(), 4096));
        }
    }
}
