//! Operations of the ring as others know them: [`Tag`], and what a watch has seen.

use std::cell::{Cell, RefCell};
use std::io;
use std::task::{Context, Poll, Waker};

/// Tag of an operation: its place in the slab and the number of its submission, so that a late
/// cancellation does not hit another one in the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag(pub u64);

impl Tag {
    pub(crate) fn new(index: usize, generation: u32) -> Tag {
        Tag(index as u64 | u64::from(generation) << 32)
    }

    pub(crate) fn index(self) -> usize {
        self.0 as u32 as usize
    }
}

/// State of a watch that the ring reports to.
#[derive(Default)]
pub(crate) struct Watched {
    /// The operation that watches.
    pub(crate) tag: Cell<Option<Tag>>,
    is_signalled: Cell<bool>,
    failure: RefCell<Option<io::Error>>,
    waker: RefCell<Option<Waker>>,
}

impl Watched {
    /// Notes what happened to the descriptor, as bits of poll(2). Returns whether it can be watched
    /// further.
    pub(crate) fn note(&self, events: io::Result<u32>) -> bool {
        let failure = match events {
            // A pipe or socket whose other side is closed.
            Ok(events) if events & libc::POLLHUP as u32 != 0 => {
                Some(io::ErrorKind::UnexpectedEof.into())
            }
            Ok(_) => None,
            Err(error) => Some(error),
        };
        let goes_on = failure.is_none();
        self.is_signalled.set(goes_on);
        if !goes_on {
            *self.failure.borrow_mut() = failure;
        }
        let waker = self.waker.borrow_mut().take();
        if let Some(waker) = waker {
            waker.wake();
        }
        goes_on
    }

    /// Ready once there was an event since this was ready last, or a failure.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(error) = self.failure.borrow_mut().take() {
            return Poll::Ready(Err(error));
        }
        if self.is_signalled.replace(false) {
            return Poll::Ready(Ok(()));
        }
        *self.waker.borrow_mut() = Some(cx.waker().clone());
        Poll::Pending
    }
}
