//! One-shot completions: the result of an I/O operation that is still under way.
//!
//! The two halves may live on different threads. The value arrives exactly once; a [`Completer`]
//! that is dropped without a value is a bug of its driver and panics in the waiting task.
//!
//! Every I/O operation makes one, so it is one allocation, one atomic exchange for waiting and one
//! for completing. The allocation is shared by a rule instead of a count of owners:
//!
//! | stage     | waker in it | value in it | who may touch it      | who frees it                     |
//! |-----------|-------------|-------------|-----------------------|----------------------------------|
//! | `IDLE`    | no          | no          | the `Pending`: waker  | nobody yet                       |
//! | `WAITING` | yes         | no          | who changes it next   | nobody yet                       |
//! | `BUSY`    | maybe       | maybe       | the `Completer`       | nobody; it lasts a few copies    |
//! | `DONE`    | no          | yes         | the `Pending`         | the `Pending`                    |
//! | `BROKEN`  | no          | no          | the `Pending`         | the `Pending`                    |
//! | `GONE`    | no          | no          | the `Completer`       | the `Completer`                  |
//!
//! The `Completer` only enters `BUSY`, and from there `DONE` or `BROKEN`; the `Pending` does the
//! rest.
#![allow(unsafe_code)] // The table above is the proof; each block names its stage.

use std::future::Future;
use std::mem::ManuallyDrop;
use std::pin::Pin;
use std::ptr::NonNull;
use std::task::{Context, Poll, Waker};

use crate::primitives::{AtomicU8, Ordering, SharedCell, spin_loop, yield_now};

const IDLE: u8 = 0;
const WAITING: u8 = 1;
const BUSY: u8 = 2;
const DONE: u8 = 3;
const BROKEN: u8 = 4;
const GONE: u8 = 5;

struct Slot<T> {
    stage: AtomicU8,
    waker: SharedCell<Option<Waker>>,
    value: SharedCell<Option<T>>,
}

impl<T> Slot<T> {
    /// Moves between stages, or returns the stage that it is in instead.
    fn step(&self, from: u8, to: u8) -> Result<u8, u8> {
        self.stage
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
    }
}

/// Frees a slot.
///
/// # Safety
/// The stage makes the caller its only owner.
unsafe fn free<T>(slot: NonNull<Slot<T>>) {
    // SAFETY: made by `Box::leak` in `pending`; the caller is the only owner.
    drop(unsafe { Box::from_raw(slot.as_ptr()) });
}

/// A value that will arrive; a future.
#[must_use = "an operation that nobody awaits loses its result"]
pub struct Pending<T>(Inner<T>);

enum Inner<T> {
    Ready(Option<T>),
    Slot(NonNull<Slot<T>>),
}

/// The other half of [`Pending`]: delivers the value.
pub struct Completer<T> {
    slot: NonNull<Slot<T>>,
}

// SAFETY: the halves hand over a `T` and a `Waker` (which is `Send`), each touched by one side at a
// time as the stages say.
unsafe impl<T: Send> Send for Pending<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Completer<T> {}
// SAFETY: a shared `Pending` gives access to nothing.
unsafe impl<T: Send> Sync for Pending<T> {}
// SAFETY: a shared `Completer` only reads the stage.
unsafe impl<T: Send> Sync for Completer<T> {}

/// A pair of a value to wait for and the right to deliver it.
pub fn pending<T>() -> (Completer<T>, Pending<T>) {
    let slot = NonNull::from(Box::leak(Box::new(Slot {
        stage: AtomicU8::new(IDLE),
        waker: SharedCell::new(None),
        value: SharedCell::new(None),
    })));
    (Completer { slot }, Pending(Inner::Slot(slot)))
}

impl<T> Pending<T> {
    /// A value that is there already.
    pub fn ready(value: T) -> Pending<T> {
        Pending(Inner::Ready(Some(value)))
    }

    /// Whether the value has arrived; it may arrive right after.
    pub fn has_value(&self) -> bool {
        match &self.0 {
            Inner::Ready(value) => value.is_some(),
            // SAFETY: this half has the slot until it says otherwise or frees it.
            Inner::Slot(slot) => wait_while_busy(&unsafe { slot.as_ref() }.stage) == DONE,
        }
    }

    /// Ends the wait and returns whether the value had arrived. If not, [`Completer::deliver`]
    /// gives it back from now on: of the two, exactly one has it.
    pub fn give_up(mut self) -> bool {
        match std::mem::replace(&mut self.0, Inner::Ready(None)) {
            Inner::Ready(value) => value.is_some(),
            Inner::Slot(slot) => let_go(slot),
        }
    }
}

impl<T> Completer<T> {
    /// Delivers the value and wakes the waiting task.
    pub fn complete(self, value: T) {
        // A caller that needs to know whether anyone waits calls `deliver`.
        drop(self.deliver(value));
    }

    /// Delivers the value and wakes the waiting task.
    ///
    /// # Errors
    /// No task waits any more: the value comes back.
    pub fn deliver(self, value: T) -> Result<(), T> {
        ManuallyDrop::new(self)
            .finish(Some(value))
            .map_or(Ok(()), Err)
    }

    /// Whether the waiting half still exists.
    pub fn is_awaited(&self) -> bool {
        // SAFETY: only the completer frees before it has finished, and it is here.
        let slot = unsafe { self.slot.as_ref() };
        slot.stage.load(Ordering::Relaxed) != GONE
    }

    /// Ends this half; the value comes back if the other half is gone.
    fn finish(&mut self, value: Option<T>) -> Option<T> {
        // SAFETY: nobody else frees the slot before this half has left `BUSY`.
        let slot = unsafe { self.slot.as_ref() };
        let before = slot.stage.swap(BUSY, Ordering::AcqRel);
        if before == GONE {
            // SAFETY: stage `GONE`: the other half is no more.
            unsafe { free(self.slot) };
            return value;
        }
        let waker = match before {
            // SAFETY: this half took the stage from `WAITING` to `BUSY`, so the waker is its own.
            WAITING => slot.waker.with_mut(|waker| unsafe { (*waker).take() }),
            _ => None,
        };
        let after = if value.is_some() { DONE } else { BROKEN };
        // SAFETY: stage `BUSY`: the other half stays away.
        slot.value.with_mut(|place| unsafe { *place = value });
        // The slot may be freed from here on.
        slot.stage.store(after, Ordering::Release);
        if let Some(waker) = waker {
            waker.wake();
        }
        None
    }
}

impl<T> Drop for Completer<T> {
    fn drop(&mut self) {
        let nothing = self.finish(None);
        debug_assert!(nothing.is_none());
    }
}

/// Waits while the other thread copies a value; gives way in case it was interrupted there.
fn wait_while_busy(stage: &AtomicU8) -> u8 {
    loop {
        for _ in 0..64 {
            match stage.load(Ordering::Acquire) {
                BUSY => spin_loop(),
                stage => return stage,
            }
        }
        yield_now();
    }
}

/// Registers the waker, or takes the value if it has arrived.
fn poll_slot<T>(slot: &Slot<T>, waker: &Waker) -> Poll<Option<T>> {
    let mut stage = slot.stage.load(Ordering::Acquire);
    loop {
        match stage {
            IDLE => {
                // SAFETY: stage `IDLE`: the waker's place belongs to this half.
                slot.waker
                    .with_mut(|place| unsafe { *place = Some(waker.clone()) });
                stage = match slot.step(IDLE, WAITING) {
                    Ok(_) => return Poll::Pending,
                    Err(stage) => stage,
                };
            }
            // Polled again before the value came, perhaps with another waker: take the stage back.
            WAITING => {
                stage = match slot.step(WAITING, IDLE) {
                    Ok(_) => IDLE,
                    Err(stage) => stage,
                };
            }
            BUSY => stage = wait_while_busy(&slot.stage),
            _ => {
                // SAFETY: stages `DONE` and `BROKEN`: all is this half's.
                let value = slot.value.with_mut(|value| unsafe { (*value).take() });
                return Poll::Ready(value);
            }
        }
    }
}

// A `Pending` never holds a pinned value: it moves its result out.
impl<T> Unpin for Pending<T> {}

impl<T> Pending<T> {
    /// Polls as [`Future::poll`], for callers that have to go on after any outcome of the
    /// operation: `None` if its driver went away without completing it.
    ///
    /// # Panics
    /// If it was ready before.
    pub fn poll_ended(&mut self, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let slot = match &mut self.0 {
            Inner::Ready(value) => {
                let value = value.take();
                return Poll::Ready(Some(value.expect("a completed future is not polled again")));
            }
            Inner::Slot(slot) => *slot,
        };
        // SAFETY: this half has the slot until it says otherwise or frees it.
        let value = std::task::ready!(poll_slot(unsafe { slot.as_ref() }, cx.waker()));
        self.0 = Inner::Ready(None);
        // SAFETY: stage `DONE` or `BROKEN`, and nothing refers to the slot any more.
        unsafe { free(slot) };
        Poll::Ready(value)
    }
}

impl<T> Future for Pending<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        self.poll_ended(cx)
            .map(|value| value.expect("an I/O driver dropped an operation"))
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if let Inner::Slot(slot) = self.0 {
            let_go(slot);
        }
    }
}

/// Ends the waiting half; whether there was a value, which is dropped.
fn let_go<T>(slot: NonNull<Slot<T>>) -> bool {
    // SAFETY: this half has the slot until it says otherwise or frees it.
    let shared = unsafe { slot.as_ref() };
    let mut stage = shared.stage.load(Ordering::Acquire);
    loop {
        stage = match stage {
            // From here on the slot is the completer's.
            IDLE => match shared.step(IDLE, GONE) {
                Ok(_) => return false,
                Err(stage) => stage,
            },
            WAITING => match shared.step(WAITING, IDLE) {
                Ok(_) => {
                    // SAFETY: stage `IDLE`: the waker's place belongs to this half.
                    shared.waker.with_mut(|waker| unsafe { *waker = None });
                    IDLE
                }
                Err(stage) => stage,
            },
            BUSY => wait_while_busy(&shared.stage),
            last => {
                // SAFETY: stage `DONE` or `BROKEN`: the completer is done with the slot.
                unsafe { free(slot) };
                return last == DONE;
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;
    use std::thread;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn poll<T>(waiting: &mut Pending<T>, waker: &Waker) -> Poll<T> {
        Pin::new(waiting).poll(&mut Context::from_waker(waker))
    }

    #[test]
    fn a_value_wakes_its_waiter_and_arrives_once() {
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let (completer, mut waiting) = pending();
        assert!(poll(&mut waiting, &waker).is_pending());
        completer.complete(7);
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert_eq!(poll(&mut waiting, &waker), Poll::Ready(7));
    }

    #[test]
    fn a_value_can_be_asked_for_without_waiting() {
        let (completer, waiting) = pending();
        assert!(!waiting.has_value());
        assert_eq!(completer.deliver(7), Ok(()));
        assert!(waiting.has_value());
        assert!(waiting.give_up());
        assert!(Pending::ready(7).give_up());
        let (completer, waiting) = pending();
        assert!(!waiting.give_up());
        assert!(!completer.is_awaited());
        assert_eq!(completer.deliver(7), Err(7));
        let (completer, waiting) = pending::<i32>();
        drop(completer);
        assert!(!waiting.has_value());
    }

    #[test]
    fn only_the_last_waker_is_woken() {
        let counts = [Arc::new(Count::default()), Arc::new(Count::default())];
        let (completer, mut waiting) = pending();
        for count in &counts {
            let waker = Waker::from(Arc::clone(count));
            assert!(poll(&mut waiting, &waker).is_pending());
        }
        completer.complete(7);
        assert_eq!(counts[0].0.load(Ordering::SeqCst), 0);
        assert_eq!(counts[1].0.load(Ordering::SeqCst), 1);
        assert_eq!(Arc::strong_count(&counts[0]), 1, "wakers are let go");
        assert_eq!(Arc::strong_count(&counts[1]), 1);
    }

    #[test]
    #[should_panic(expected = "dropped an operation")]
    fn an_abandoned_operation_is_loud() {
        let (completer, mut waiting) = pending::<()>();
        drop(completer);
        let _ready = poll(&mut waiting, Waker::noop());
    }

    #[test]
    #[should_panic(expected = "not polled again")]
    fn a_value_is_taken_once() {
        let (completer, mut waiting) = pending();
        completer.complete(7);
        assert_eq!(poll(&mut waiting, Waker::noop()), Poll::Ready(7));
        let _again = poll(&mut waiting, Waker::noop());
    }

    #[test]
    fn whichever_half_goes_first_value_and_waker_are_dropped_once() {
        let value = Arc::new(());
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        for polled in [false, true] {
            for order in 0..3 {
                let (completer, mut waiting) = pending();
                assert!(completer.is_awaited());
                if polled {
                    assert!(poll(&mut waiting, &waker).is_pending());
                }
                match order {
                    0 => {
                        completer.complete(Arc::clone(&value));
                        drop(waiting);
                    }
                    1 => {
                        drop(waiting);
                        assert!(!completer.is_awaited());
                        completer.complete(Arc::clone(&value));
                    }
                    _ => {
                        drop(waiting);
                        drop(completer);
                    }
                }
                assert_eq!(Arc::strong_count(&value), 1, "{polled} {order}");
                assert_eq!(Arc::strong_count(&count), 2, "{polled} {order}");
            }
        }
    }

    /// Waits for a value on a thread of its own, by parking.
    fn wait<T>(mut waiting: Pending<T>) -> T {
        struct Unpark(thread::Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        loop {
            match poll(&mut waiting, &waker) {
                Poll::Ready(value) => return value,
                // Now and then polled again without a wake.
                Poll::Pending => thread::park_timeout(std::time::Duration::from_micros(50)),
            }
        }
    }

    #[test]
    fn halves_on_two_threads_meet_in_any_order() {
        const ROUNDS: usize = if cfg!(miri) { 300 } else { 20_000 };
        let alive = Arc::new(());
        let (send, receive) = std::sync::mpsc::sync_channel::<Completer<(usize, Arc<()>)>>(4);
        let token = Arc::clone(&alive);
        let helper = thread::spawn(move || {
            for (round, completer) in receive.into_iter().enumerate() {
                completer.complete((round, Arc::clone(&token)));
            }
        });
        for round in 0..ROUNDS {
            let (completer, mut waiting) = pending();
            let polled_before = round % 5 == 0;
            if polled_before {
                assert!(poll(&mut waiting, Waker::noop()).is_pending());
            }
            send.send(completer).unwrap();
            match round % 3 {
                0 => drop(waiting),
                _ => assert_eq!(wait(waiting).0, round),
            }
        }
        drop(send);
        helper.join().unwrap();
        assert_eq!(Arc::strong_count(&alive), 1, "no value is lost or leaked");
    }

    #[test]
    fn a_value_is_on_exactly_one_side_when_both_end_at_once() {
        const ROUNDS: usize = if cfg!(miri) { 300 } else { 20_000 };
        let (send, receive) = std::sync::mpsc::sync_channel::<Completer<()>>(1);
        let helper = thread::spawn(move || {
            let outcomes = receive.into_iter().map(|half| half.deliver(()).is_ok());
            outcomes.collect::<Vec<bool>>()
        });
        let mut kept = Vec::new();
        for round in 0..ROUNDS {
            let (completer, waiting) = pending();
            send.send(completer).unwrap();
            (0..round % 97).for_each(|_| std::hint::spin_loop());
            kept.push(waiting.give_up());
        }
        drop(send);
        assert!(helper.join().unwrap() == kept, "delivered is received");
    }
}
