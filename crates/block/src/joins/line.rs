//! Futures whose outputs are wanted in the order in which they began.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::iter::Fuse;
use std::task::{Context, Poll};

use super::Set;

/// Futures in flight, which go on together and are handed out in their order.
pub struct Line<F: Future> {
    set: Set<F>,
    /// The number of the future at each place of the set.
    numbers: Vec<u64>,
    /// Outputs from number `first` on; `None` of those that have not ended.
    ends: VecDeque<Option<F::Output>>,
    first: u64,
}

impl<F: Future> Default for Line<F> {
    fn default() -> Self {
        Line {
            set: Set::default(),
            numbers: Vec::new(),
            ends: VecDeque::new(),
            first: 0,
        }
    }
}

impl<F: Future> Line<F> {
    /// Futures that were added and not handed out, ended or not.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether all that were added have been handed out.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Adds a future behind the others.
    pub fn push(&mut self, future: F) {
        let number = self.first + self.ends.len() as u64;
        let place = self.set.insert(Box::pin(future));
        if self.numbers.len() <= place {
            self.numbers.resize(place + 1, 0);
        }
        self.numbers[place] = number;
        self.ends.push_back(None);
    }

    /// Waits for the first in line. `None` if there is none.
    pub async fn next(&mut self) -> Option<F::Output> {
        poll_fn(|context| self.poll_next(context)).await
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<F::Output>> {
        loop {
            match self.ends.front_mut() {
                None => return Poll::Ready(None),
                Some(end) if end.is_some() => {
                    let output = end.take();
                    self.ends.pop_front();
                    self.first += 1;
                    return Poll::Ready(output);
                }
                Some(_) => {}
            }
            match self.set.poll_next(context) {
                Poll::Ready(Some((place, output))) => {
                    let index = self.numbers[place] - self.first;
                    self.ends[index as usize] = Some(output);
                }
                Poll::Ready(None) => unreachable!("the first in line is in flight"),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

/// The futures of an iterator, up to a number of them at once, handed out in their order. The next
/// is asked for when there is room for it.
pub struct Ahead<I: Iterator<Item: Future>> {
    rest: Fuse<I>,
    line: Line<I::Item>,
    at_once: usize,
}

impl<I: Iterator<Item: Future>> Ahead<I> {
    /// None of them has begun.
    ///
    /// # Panics
    /// If none may be in flight.
    pub fn new(futures: impl IntoIterator<IntoIter = I>, at_once: usize) -> Ahead<I> {
        assert!(at_once > 0, "one at a time at least");
        Ahead {
            rest: futures.into_iter().fuse(),
            line: Line::default(),
            at_once,
        }
    }

    /// Waits for the next. `None` after the last.
    pub async fn next(&mut self) -> Option<<I::Item as Future>::Output> {
        while self.line.len() < self.at_once
            && let Some(future) = self.rest.next()
        {
            self.line.push(future);
        }
        self.line.next().await
    }
}
