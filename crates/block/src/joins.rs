//! Several futures at once, by the standard library alone: joined, in a set, in a line, or one that
//! many wait for.
//!
//! The core has ten crates of others below it at most, and these forms need no more than
//! [`Wake`](std::task::Wake). Crates that have a library of such forms anyway use that.
//!
//! A future that is dropped drops those in it. Nothing here begins before it is polled.

mod line;
mod set;
mod shared;
#[cfg(test)]
mod tests;

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

pub use line::{Ahead, Line};
pub use set::Set;
pub use shared::Shared;

/// Members of a join that are all polled whenever one of them is woken. Of more than these only
/// those that were woken are.
const FEW: usize = 30;

/// Waits for both. They are pinned where the caller has them (`join(pin!(a), pin!(b))`), so that
/// the caller's future has room for each once.
pub async fn join<A, B>(mut a: A, mut b: B) -> (A::Output, B::Output)
where
    A: Future + Unpin,
    B: Future + Unpin,
{
    let mut ends = (None, None);
    poll_fn(|context| {
        poll_once(Pin::new(&mut a), &mut ends.0, context);
        poll_once(Pin::new(&mut b), &mut ends.1, context);
        both(&mut ends)
    })
    .await
}

/// Waits for both to succeed, or for one to fail; the other is not polled then any more.
///
/// # Errors
/// The first failure.
pub async fn try_join<A, B, T, U, E>(mut a: A, mut b: B) -> Result<(T, U), E>
where
    A: Future<Output = Result<T, E>> + Unpin,
    B: Future<Output = Result<U, E>> + Unpin,
{
    let mut ends = (None, None);
    poll_fn(|context| {
        poll_once(Pin::new(&mut a), &mut ends.0, context);
        if let Some(Err(_)) = ends.0
            && let Some(Err(error)) = ends.0.take()
        {
            return Poll::Ready(Err(error));
        }
        poll_once(Pin::new(&mut b), &mut ends.1, context);
        if let Some(Err(_)) = ends.1
            && let Some(Err(error)) = ends.1.take()
        {
            return Poll::Ready(Err(error));
        }
        both(&mut ends).map(|(a, b)| Ok((a?, b?)))
    })
    .await
}

/// Polls a future that has not ended, and keeps its end.
fn poll_once<F: Future>(future: Pin<&mut F>, end: &mut Option<F::Output>, context: &mut Context) {
    if end.is_none()
        && let Poll::Ready(output) = future.poll(context)
    {
        *end = Some(output);
    }
}

fn both<A, B>(ends: &mut (Option<A>, Option<B>)) -> Poll<(A, B)> {
    match std::mem::take(ends) {
        (Some(a), Some(b)) => Poll::Ready((a, b)),
        some => {
            *ends = some;
            Poll::Pending
        }
    }
}

/// Waits for all; returns their outputs in their order.
pub fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> JoinAll<F> {
    let mut futures = futures.into_iter();
    let few: Vec<Member<F>> = futures
        .by_ref()
        .take(FEW)
        .map(|future| Member::Running(Box::pin(future)))
        .collect();
    let mut rest = futures.peekable();
    if rest.peek().is_none() {
        return JoinAll::Few(few);
    }
    let few = few.into_iter().filter_map(|member| match member {
        Member::Running(future) => Some(future),
        Member::Ended(_) => None,
    });
    let set: Set<F> = few.chain(rest.map(Box::pin)).collect();
    let ends = (0..set.len()).map(|_| None).collect();
    JoinAll::Many(set, ends)
}

/// The future of [`join_all`].
pub enum JoinAll<F: Future> {
    /// All running members are polled each time.
    Few(Vec<Member<F>>),
    /// Members and their outputs; the place of one in the set is its place in the order.
    Many(Set<F>, Vec<Option<F::Output>>),
}

/// One of few.
pub enum Member<F: Future> {
    /// It has not ended.
    Running(Pin<Box<F>>),
    /// Its output.
    Ended(F::Output),
}

// Outputs are moved, never pinned.
impl<F: Future> Unpin for JoinAll<F> {}

impl<F: Future> Future for JoinAll<F> {
    type Output = Vec<F::Output>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            JoinAll::Few(members) => {
                let mut is_running = false;
                for member in members.iter_mut() {
                    if let Member::Running(future) = member {
                        match future.as_mut().poll(context) {
                            Poll::Ready(output) => *member = Member::Ended(output),
                            Poll::Pending => is_running = true,
                        }
                    }
                }
                if is_running {
                    return Poll::Pending;
                }
                let ends = std::mem::take(members).into_iter();
                let ends = ends.filter_map(|member| match member {
                    Member::Ended(output) => Some(output),
                    Member::Running(_) => None,
                });
                Poll::Ready(ends.collect())
            }
            JoinAll::Many(set, ends) => {
                while let Some((place, output)) = ready!(set.poll_next(context)) {
                    ends[place] = Some(output);
                }
                Poll::Ready(std::mem::take(ends).into_iter().flatten().collect())
            }
        }
    }
}

/// Waits until all have succeeded, or the first failure; the others are dropped then.
///
/// # Errors
/// The first failure.
pub async fn try_join_all<F, T, E>(futures: impl IntoIterator<Item = F>) -> Result<Vec<T>, E>
where
    F: Future<Output = Result<T, E>>,
{
    let mut set: Set<F> = futures.into_iter().map(Box::pin).collect();
    let mut ends: Vec<Option<T>> = (0..set.len()).map(|_| None).collect();
    while let Some((place, output)) = poll_fn(|context| set.poll_next(context)).await {
        ends[place] = Some(output?);
    }
    Ok(ends.into_iter().flatten().collect())
}
