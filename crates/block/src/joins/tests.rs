//! Joins, sets, lines and shared futures: order, wakes, places, drops.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};
use std::thread;
use std::time::Duration;

use cowslip_queue::{Completer, Pending, pending, yield_now};

use super::*;
use crate::random::Random;

/// A waker that counts.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// One task, polled by hand.
struct Task<F> {
    future: Pin<Box<F>>,
    count: Arc<Count>,
    waker: Waker,
}

fn task<F: Future>(future: F) -> Task<F> {
    let count = Arc::<Count>::default();
    let waker = Waker::from(Arc::clone(&count));
    let future = Box::pin(future);
    Task {
        future,
        count,
        waker,
    }
}

impl<F: Future> Task<F> {
    fn poll(&mut self) -> Poll<F::Output> {
        let mut context = Context::from_waker(&self.waker);
        self.future.as_mut().poll(&mut context)
    }

    /// Wakes since the last question.
    fn woken(&self) -> usize {
        self.count.0.swap(0, Ordering::SeqCst)
    }
}

fn pairs<T>(count: usize) -> (Vec<Completer<T>>, Vec<Pending<T>>) {
    (0..count).map(|_| pending()).unzip()
}

#[test]
fn joins_have_their_outputs_in_order_however_they_end() {
    // Few are polled together, many when they are woken.
    for count in [0, 1, 2, FEW, FEW + 1, 300] {
        let (completers, pendings) = pairs(count);
        let mut joined = task(join_all(pendings));
        let mut order: Vec<(usize, Completer<usize>)> =
            completers.into_iter().enumerate().collect();
        let mut random = Random(0x9e37_79b9 + count as u64);
        order.sort_by_cached_key(|_| random.next());
        for (number, completer) in order {
            assert!(joined.poll().is_pending(), "{count}");
            completer.complete(number);
            assert_eq!(joined.woken(), 1, "{count}");
        }
        assert_eq!(joined.poll(), Poll::Ready((0..count).collect()));
    }
}

#[test]
fn the_first_failure_ends_a_join_of_successes() {
    let (mut completers, pendings) = pairs::<Result<u32, &str>>(3);
    let mut joined = task(try_join_all(pendings));
    assert!(joined.poll().is_pending());
    completers.pop().unwrap().complete(Err("third"));
    assert_eq!(joined.poll(), Poll::Ready(Err("third")));
    drop(joined);
    assert!(!completers[0].is_awaited(), "the others are dropped");

    let (mut completers, mut pendings) = pairs::<Result<u32, &str>>(2);
    let (b, a) = (pendings.pop().unwrap(), pendings.pop().unwrap());
    let mut joined = task(try_join(a, b));
    assert!(joined.poll().is_pending());
    completers.remove(1).complete(Err("second"));
    assert_eq!(joined.poll(), Poll::Ready(Err("second")));

    let (completers, mut pendings) = pairs::<Result<u32, &str>>(2);
    let (b, a) = (pendings.pop().unwrap(), pendings.pop().unwrap());
    let mut joined = task(try_join(a, b));
    for (value, completer) in (1..).zip(completers) {
        assert!(joined.poll().is_pending());
        completer.complete(Ok(value));
    }
    assert_eq!(joined.poll(), Poll::Ready(Ok((1, 2))));
}

#[test]
fn a_join_of_two_polls_what_has_ended_no_more() {
    let polls = AtomicUsize::new(0);
    let counted = poll_fn(|_| {
        assert_eq!(polls.fetch_add(1, Ordering::Relaxed), 0, "polled again");
        Poll::Ready('a')
    });
    let (completer, other) = pending();
    let mut joined = task(async move { join(pin!(counted), other).await });
    assert!(joined.poll().is_pending() && joined.poll().is_pending());
    completer.complete('b');
    assert_eq!(joined.poll(), Poll::Ready(('a', 'b')));
}

#[test]
fn a_set_polls_what_was_woken_and_nothing_else() {
    let polls: Arc<Vec<AtomicUsize>> = Arc::new((0..100).map(|_| AtomicUsize::new(0)).collect());
    let (mut completers, pendings) = pairs(100);
    let mut set = Set::default();
    for (number, mut pending) in pendings.into_iter().enumerate() {
        let polls = Arc::clone(&polls);
        let place = set.insert(Box::pin(poll_fn(move |context| {
            polls[number].fetch_add(1, Ordering::Relaxed);
            Pin::new(&mut pending).poll(context)
        })));
        assert_eq!(place, number);
    }
    let mut next = task(poll_fn(|context| set.poll_next(context)));
    assert!(next.poll().is_pending() && next.poll().is_pending());
    completers.remove(70).complete("seventy");
    assert_eq!(next.poll(), Poll::Ready(Some((70, "seventy"))));
    for (number, polls) in polls.iter().enumerate() {
        let expected = 1 + usize::from(number == 70);
        assert_eq!(polls.load(Ordering::Relaxed), expected, "{number}");
    }
    drop(next);
    assert_eq!(set.len(), 99);
}

#[test]
fn places_are_used_again_and_late_wakes_do_no_harm() {
    let mut set = Set::default();
    let late = Arc::new(crate::sync::Mutex::new(None));
    let kept = Arc::clone(&late);
    let ready: Pin<Box<dyn Future<Output = u32>>> = Box::pin(poll_fn(move |context| {
        *crate::sync::lock(&kept) = Some(context.waker().clone());
        Poll::Ready(1)
    }));
    set.insert(ready);
    let context = &mut Context::from_waker(Waker::noop());
    assert_eq!(set.poll_next(context), Poll::Ready(Some((0, 1))));
    assert_eq!(set.poll_next(context), Poll::Ready(None));
    let late = crate::sync::lock(&late).take().unwrap();
    late.wake_by_ref();
    let (completer, pending) = pending();
    assert_eq!(set.insert(Box::pin(pending)), 0);
    late.wake();
    assert!(set.poll_next(context).is_pending());
    completer.complete(2);
    assert_eq!(set.poll_next(context), Poll::Ready(Some((0, 2))));
    assert!(set.is_empty());
}

#[test]
fn a_member_that_gives_way_lets_the_executor_go_on() {
    for count in [2, FEW + 2] {
        let mut joined = task(join_all((0..count).map(|number| async move {
            // Twice, as who waits for a queue's turn.
            yield_now().await;
            yield_now().await;
            number
        })));
        for _ in 0..2 {
            assert!(joined.poll().is_pending(), "it would spin otherwise");
            assert!(joined.woken() > 0, "it would sleep otherwise");
        }
        assert_eq!(joined.poll(), Poll::Ready((0..count).collect()));
    }
}

#[test]
fn a_line_keeps_its_order_and_asks_for_as_many_as_fit() {
    let begun = AtomicUsize::new(0);
    let waiting = crate::sync::Mutex::new(BTreeMap::new());
    let works = (0..10).map(|number| {
        begun.fetch_add(1, Ordering::Relaxed);
        let (completer, pending) = pending();
        crate::sync::lock(&waiting).insert(number, completer);
        pending
    });
    let finish = |number: usize| {
        let completer = crate::sync::lock(&waiting).remove(&number);
        completer.unwrap().complete(number);
    };
    let mut ahead = Ahead::new(works, 3);
    {
        let mut next = task(ahead.next());
        assert!(next.poll().is_pending());
        assert_eq!(begun.load(Ordering::Relaxed), 3);
        finish(2);
        finish(1);
        assert!(next.poll().is_pending(), "the first has not ended");
        finish(0);
        assert_eq!(next.poll(), Poll::Ready(Some(0)));
    }
    for number in 1..10 {
        if number > 2 {
            let mut next = task(ahead.next());
            assert!(next.poll().is_pending());
            finish(number);
            assert_eq!(next.poll(), Poll::Ready(Some(number)));
        } else {
            assert_eq!(task(ahead.next()).poll(), Poll::Ready(Some(number)));
        }
        assert_eq!(begun.load(Ordering::Relaxed), (number + 3).min(10));
    }
    assert_eq!(task(ahead.next()).poll(), Poll::Ready(None));
}

#[test]
fn all_handles_of_a_shared_future_learn_its_end() {
    let (completer, pending) = pending();
    let first = Shared::new(pending);
    let mut handles: Vec<_> = (0..5).map(|_| task(first.clone())).collect();
    drop(first);
    for handle in &mut handles {
        assert!(handle.poll().is_pending() && handle.poll().is_pending());
    }
    // The handle that polled last is gone: the others go on.
    handles.pop();
    completer.complete("done");
    for handle in &mut handles {
        assert_eq!(handle.woken(), 1);
        assert_eq!(handle.poll(), Poll::Ready("done"));
    }
}

#[test]
fn a_shared_future_is_dropped_with_its_last_handle() {
    let (completer, pending) = pending::<()>();
    let mut first = task(Shared::new(pending));
    let mut second = task((*first.future).clone());
    assert!(first.poll().is_pending() && second.poll().is_pending());
    drop(first);
    assert!(completer.is_awaited());
    drop(second);
    assert!(!completer.is_awaited());
}

#[test]
fn a_shared_future_that_panics_panics_for_all() {
    let first = Shared::new(async { panic!("as planned") });
    let mut handles = [task(first.clone()), task(first)];
    for handle in &mut handles {
        let polled: Result<Poll<()>, _> = catch_unwind(AssertUnwindSafe(|| handle.poll()));
        assert!(polled.is_err());
    }
}

/// Waits as a thread does.
fn wait<F: Future>(future: F) -> F::Output {
    struct Unpark(thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        thread::park_timeout(Duration::from_secs(60));
    }
}

#[test]
fn no_wake_is_lost_between_threads() {
    for round in 0..200 {
        let (completers, pendings) = pairs(FEW + 10);
        let (shared_end, shared) = pending();
        let shared = Shared::new(shared);
        let waiters: Vec<_> = (0..3)
            .map(|_| {
                let handle = shared.clone();
                thread::spawn(move || wait(handle))
            })
            .collect();
        // A handle that is polled once and dropped may have taken the others' call.
        let mut fickle = task(shared);
        let ending = thread::spawn(move || {
            for (number, completer) in completers.into_iter().enumerate() {
                completer.complete(number);
            }
            shared_end.complete(round);
        });
        let _either = fickle.poll();
        drop(fickle);
        assert_eq!(wait(join_all(pendings)), Vec::from_iter(0..FEW + 10));
        ending.join().unwrap();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), round);
        }
    }
}
