//! Turns of writes at blocks that they share: one that reads blocks and writes them back has them
//! to itself; whole blocks are written side by side.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker, ready};

use cowslip_queue::{Completer, Pending, pending};

use crate::sync::{Mutex, lock};

/// Treatment of the blocks at the ends of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ends {
    Whole,
    /// The write reads blocks and writes them back changed; no other write to them may come
    /// between.
    ReadModifyWrite,
}

/// The writes of a file, each at a place of its own until it has ended.
#[derive(Default)]
pub(super) struct Turns {
    places: Vec<Option<Write>>,
    unused: Vec<usize>,
    /// Those that wait, in order of arrival.
    waiting: VecDeque<(usize, Completer<()>)>,
    /// How many of all read blocks and write them back. While none does, no write waits, and whole
    /// blocks need not be compared with the others.
    exclusive: usize,
}

/// A write under way or waiting.
#[derive(Debug)]
struct Write {
    blocks: Range<u64>,
    ends: Ends,
    is_waiting: bool,
}

fn conflict(a: (&Range<u64>, Ends), b: (&Range<u64>, Ends)) -> bool {
    (a.1 == Ends::ReadModifyWrite || b.1 == Ends::ReadModifyWrite)
        && a.0.start < b.0.end
        && b.0.start < a.0.end
}

impl std::fmt::Debug for Turns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let writes: Vec<_> = self.writes().collect();
        write!(f, "Turns({writes:?})")
    }
}

impl Turns {
    fn writes(&self) -> impl Iterator<Item = &Write> {
        self.places.iter().flatten()
    }

    /// Returns whether no write is under way or waits.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.writes().next().is_none()
    }

    /// Whether a write has to wait for one that is under way, or for one that waits.
    fn is_blocked(&self, (blocks, ends): (&Range<u64>, Ends)) -> bool {
        let against = |other: &Write| conflict((blocks, ends), (&other.blocks, other.ends));
        let may_conflict = self.exclusive > 0 || ends == Ends::ReadModifyWrite;
        may_conflict && self.writes().any(against)
    }

    fn enter(&mut self, write: Write) -> usize {
        self.exclusive += usize::from(write.ends == Ends::ReadModifyWrite);
        match self.unused.pop() {
            Some(at) => {
                self.places[at] = Some(write);
                at
            }
            None => {
                self.places.push(Some(write));
                self.places.len() - 1
            }
        }
    }

    fn leave(&mut self, at: usize) {
        if let Some(write) = self.places[at].take() {
            self.exclusive -= usize::from(write.ends == Ends::ReadModifyWrite);
            self.unused.push(at);
        }
        if !self.waiting.is_empty() {
            self.waiting.retain(|(waiting, _)| *waiting != at);
            self.admit();
        }
    }

    /// Begins the writes that wait for nothing any more: neither for one under way nor for an
    /// earlier one that waits.
    fn admit(&mut self) {
        let mut still: VecDeque<(usize, Completer<()>)> = VecDeque::new();
        for (at, waiter) in std::mem::take(&mut self.waiting) {
            let write = self.places[at].as_ref().expect("it waits at its place");
            let against =
                |other: &Write| conflict((&write.blocks, write.ends), (&other.blocks, other.ends));
            let under_way = self.writes().filter(|other| !other.is_waiting);
            let earlier = still.iter().filter_map(|(at, _)| self.places[*at].as_ref());
            if under_way.chain(earlier).any(against) {
                still.push_back((at, waiter));
                continue;
            }
            if let Some(write) = &mut self.places[at] {
                write.is_waiting = false;
            }
            waiter.complete(());
        }
        self.waiting = still;
    }
}

/// A write's turn; dropping it admits the next ones.
pub(super) struct Turn {
    turns: Arc<Mutex<Turns>>,
    at: usize,
}

impl Turn {
    /// Registers a write of blocks, and returns what it has to wait for. It is registered from then
    /// on: one that is dropped while it waits leaves nothing behind.
    pub(super) fn take(
        turns: &Arc<Mutex<Turns>>,
        blocks: Range<u64>,
        ends: Ends,
    ) -> (Turn, Option<Pending<()>>) {
        let mut held = lock(turns);
        let is_waiting = held.is_blocked((&blocks, ends));
        let at = held.enter(Write {
            blocks,
            ends,
            is_waiting,
        });
        let waiting = is_waiting.then(|| {
            let (completer, waiting) = pending();
            held.waiting.push_back((at, completer));
            waiting
        });
        drop(held);
        let turns = Arc::clone(turns);
        (Turn { turns, at }, waiting)
    }

    /// Awaits an operation on the blocks, and ends the turn when it has ended, even if the returned
    /// future is dropped before.
    pub(super) fn until(self, operation: Pending<io::Result<()>>) -> UnderWay {
        UnderWay(Some((operation, self)))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        lock(&self.turns).leave(self.at);
    }
}

/// An operation, and the turn that it has.
type Claimed = (Pending<io::Result<()>>, Turn);

/// A future of [`Turn::until`].
pub(super) struct UnderWay(Option<Claimed>);

impl Future for UnderWay {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let (operation, _) = self
            .0
            .as_mut()
            .expect("a completed future is not polled again");
        let outcome = ready!(Pin::new(operation).poll(cx));
        self.0 = None;
        Poll::Ready(outcome)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Some(claimed) = self.0.take() {
            Arc::new(Abandoned(Mutex::new(Some(claimed)))).wake();
        }
    }
}

/// An operation whose future has been dropped: its completion releases the blocks.
struct Abandoned(Mutex<Option<Claimed>>);

impl Wake for Abandoned {
    fn wake(self: Arc<Self>) {
        let waker = Waker::from(Arc::clone(&self));
        let mut held = lock(&self.0);
        let Some((operation, _)) = held.as_mut() else {
            return;
        };
        // The range holds the old or the new bytes, as after any dropped request. The operation has
        // also ended if its driver is gone.
        if operation
            .poll_ended(&mut Context::from_waker(&waker))
            .is_ready()
        {
            *held = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Ends::{ReadModifyWrite, Whole};
    use super::*;

    fn is_ready(waiting: &mut Pending<()>) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        Pin::new(waiting).poll(&mut context).is_ready()
    }

    #[test]
    fn whole_blocks_are_written_side_by_side_and_parts_of_blocks_in_turn() {
        let turns = Arc::default();
        let take = |blocks, ends| Turn::take(&turns, blocks, ends);
        let (whole, none) = take(0..8, Whole);
        assert!(none.is_none() && take(4..12, Whole).1.is_none());
        let (first, waiting) = take(4..8, ReadModifyWrite);
        let mut waiting = waiting.expect("its block is being written");
        assert!(take(8..16, ReadModifyWrite).1.is_none(), "others are free");
        let (second, after) = take(4..8, Whole);
        let mut after = after.expect("an earlier write waits for the block");
        drop(whole);
        assert!(is_ready(&mut waiting) && !is_ready(&mut after));
        drop(first);
        assert!(is_ready(&mut after));
        drop(second);
        assert!(lock(&turns).is_empty() && lock(&turns).exclusive == 0);
    }

    #[test]
    fn a_write_that_is_dropped_while_it_waits_lets_others_by() {
        let turns = Arc::default();
        let take = |blocks, ends| Turn::take(&turns, blocks, ends);
        let (under_way, _) = take(0..4, ReadModifyWrite);
        let gives_up = take(0..8, ReadModifyWrite);
        let (last, waiting) = take(4..8, Whole);
        let mut waiting = waiting.expect("an earlier write waits for its block");
        drop(gives_up);
        assert!(is_ready(&mut waiting), "nothing is under way there");
        drop((under_way, last));
        assert!(lock(&turns).is_empty() && lock(&turns).waiting.is_empty());
    }
}
