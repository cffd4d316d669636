//! Slices of a caller that waits, as lists: a blocking call needs no buffer of its own.
#![allow(unsafe_code)] // Borrowed memory in lists that have no lifetime; the guard is the proof.

use std::io::{IoSlice, IoSliceMut};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::iovec::{IoVec, IoVecMut, Keeper};

/// Slices that are lent out.
#[derive(Default)]
struct Lent {
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Default)]
struct State {
    /// Slices that have not been returned.
    count: usize,
    /// The lender waits. Most requests have ended before: to wake nobody would be a system call
    /// in each of them.
    is_awaited: bool,
}

impl Lent {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The owner of a slice, as lists know it; dropped with the last of them.
struct Token(Arc<Lent>);

impl Drop for Token {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.count -= 1;
        if state.is_awaited && state.count == 0 {
            self.0.returned.notify_all();
        }
    }
}

/// Memory that is lent out. Waits at its end until it is returned, by a panic too: the borrow that
/// the memory comes from outlives this.
#[derive(Default)]
struct Loan(Arc<Lent>);

impl Loan {
    fn owner(&self) -> Keeper {
        self.0.state().count += 1;
        Arc::new(Token(Arc::clone(&self.0)))
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let mut state = self.0.state();
        while state.count > 0 {
            state.is_awaited = true;
            let waited = self.0.returned.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Calls `f` with a list of memory that is lent, part by part, and waits for its return.
fn with_loan<P, L: FromIterator<L>, R>(
    parts: impl IntoIterator<Item = P>,
    mut lend: impl FnMut(P, Keeper) -> L,
    f: impl FnOnce(L) -> R,
) -> R {
    let loan = Loan::default();
    let lent = parts.into_iter().map(|part| lend(part, loan.owner()));
    let result = f(lent.collect());
    drop(loan);
    result
}

/// Calls `f` with a list of borrowed memory to write from, and returns when no request has the list
/// or a part of it any more. It waits for ever if `f` returns the list, or leaves it with a ring
/// that this thread is to drive.
pub fn lend<R>(data: &[u8], f: impl FnOnce(IoVec) -> R) -> R {
    lend_all(&[IoSlice::new(data)], f)
}

/// As [`lend`], with several slices.
pub fn lend_all<R>(data: &[IoSlice<'_>], f: impl FnOnce(IoVec) -> R) -> R {
    let lend = |slice: &IoSlice<'_>, owner| {
        let start = NonNull::from(&**slice).cast();
        // SAFETY: nobody writes borrowed memory, and it is borrowed until the loan is dropped,
        // which is when all owners are gone.
        unsafe { IoVec::lent(start, slice.len(), owner) }
    };
    with_loan(data, lend, f)
}

/// Calls `f` with a list of borrowed memory to read into, and returns as [`lend`] does.
pub fn lend_mut<R>(target: &mut [u8], f: impl FnOnce(IoVecMut) -> R) -> R {
    lend_all_mut(&mut [IoSliceMut::new(target)], f)
}

/// As [`lend_mut`], with several slices.
pub fn lend_all_mut<R>(target: &mut [IoSliceMut<'_>], f: impl FnOnce(IoVecMut) -> R) -> R {
    let lend = |slice: &mut IoSliceMut<'_>, owner| {
        let (start, len) = (NonNull::from(&mut **slice).cast(), slice.len());
        // SAFETY: the memory is borrowed exclusively until the loan is dropped, which is when all
        // owners are gone; each slice is in the list once.
        unsafe { IoVecMut::lent(start, len, owner) }
    };
    with_loan(target, lend, f)
}

/// As [`lend_all`], with memory that others may change meanwhile, such as a guest's: each range by
/// its start and its length in bytes. For callers that wait and have such memory for the length of
/// the call only, so no owner to pass to [`IoVec::foreign`].
///
/// # Safety
/// Until this returns, what [`IoVec::foreign`] asks for while the owner lives holds for each range.
pub unsafe fn lend_foreign<R>(
    ranges: impl IntoIterator<Item = (NonNull<u8>, usize)>,
    f: impl FnOnce(IoVec) -> R,
) -> R {
    // SAFETY: as the caller promises, until the loan is dropped, which is when all owners are gone.
    // Each range has an owner of its own, so none is joined to its neighbour.
    let lend = |(start, len), owner| unsafe { IoVec::foreign(start, len, owner) };
    with_loan(ranges, lend, f)
}

/// As [`lend_foreign`], with memory to read into.
///
/// # Safety
/// Until this returns, what [`IoVecMut::foreign`] asks for while the owner lives holds for each
/// range.
pub unsafe fn lend_foreign_mut<R>(
    ranges: impl IntoIterator<Item = (NonNull<u8>, usize)>,
    f: impl FnOnce(IoVecMut) -> R,
) -> R {
    // SAFETY: as above.
    let lend = |(start, len), owner| unsafe { IoVecMut::foreign(start, len, owner) };
    with_loan(ranges, lend, f)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SharedMemory;
    use crate::buf::MemoryAlignment;
    use std::time::Duration;

    #[test]
    fn slices_are_read_and_written_in_place() {
        let (mut a, mut b) = (vec![1u8; 3], [2u8; 5]);
        let all = lend_all(&[IoSlice::new(&a), IoSlice::new(&b)], |list| {
            assert_eq!((list.len(), list.segment_count()), (8, 2));
            assert!(!list.is_zero() && list.fits(MemoryAlignment::NONE));
            (list.to_vec(), list.to_buf().to_vec())
        });
        assert_eq!(
            all,
            (vec![1, 1, 1, 2, 2, 2, 2, 2], vec![1, 1, 1, 2, 2, 2, 2, 2])
        );
        let mut slices = [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b)];
        lend_all_mut(&mut slices, |mut list| {
            list.copy_from_slice(1, &[7; 4]);
            let mut rest = list.split_off(6);
            rest.fill(9);
            assert!(!list.is_buffer());
            let (mut buf, bounce) = rest.bounce();
            buf.fill(8);
            assert_eq!(bounce.end(buf).to_vec(), [8, 8]);
        });
        assert_eq!((&a[..], b), (&[1, 7, 7][..], [7, 7, 2, 8, 8]));
        assert!(lend(&[0; 100], |list| list.is_zero()));
        assert_eq!(lend(&[], |list| list.len()), 0);
    }

    #[test]
    fn a_list_that_a_request_still_has_is_waited_for() {
        let mut memory = [0u8; 64];
        let thread = lend_mut(&mut memory, |mut list| {
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                list.fill(5);
            })
        });
        assert_eq!(memory, [5; 64]);
        thread.join().unwrap();
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lend_mut(&mut memory, |mut list| {
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(30));
                    list.fill(6);
                });
                panic!("a request has failed");
            });
        }));
        assert!(unwound.is_err());
        assert_eq!(memory, [6; 64]);
    }
    #[test]
    fn memory_of_others_is_lent_until_the_last_request_lets_go_of_it() {
        let memory = SharedMemory::new(64);
        let range = |start: usize, len: usize| (memory.at(&(start..start + len)), len);
        memory.write(0, &[3; 64]);
        let ranges = [range(8, 3), range(11, 0), range(11, 2), range(40, 1)];
        // SAFETY: shared memory is mapped as whole words, and accessed by atomic operations.
        let read = unsafe {
            lend_foreign(ranges, |list| {
                assert_eq!((list.len(), list.segment_count()), (6, 3));
                list.to_vec()
            })
        };
        assert_eq!(read, [3; 6]);
        // SAFETY: as above.
        let thread = unsafe {
            lend_foreign_mut(ranges, |mut list| {
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(30));
                    list.fill(9);
                })
            })
        };
        let mut bytes = [0; 64];
        memory.read(0, &mut bytes);
        let mut expected = [3; 64];
        expected[8..13].fill(9);
        expected[40] = 9;
        assert_eq!(bytes, expected);
        thread.join().unwrap();
    }
}
