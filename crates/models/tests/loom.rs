//! Small programs that loom runs in every order: completions, wakes across queues, the write-back
//! turn, leases, epochs, and requests that take no lock. docs/testing.md lists the faults that each
//! of them has been seen to catch.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc as StdArc;
use std::task::{Context, Poll, Wake, Waker};

use cowslip_models::mailbox::{Mailbox, Scheduled};
use cowslip_models::pending::{Pending, pending};
use cowslip_models::primitives::Mutex;
use cowslip_models::qcow2::direct::{Access, DirectMap};
use cowslip_models::qcow2::geometry::{GuestCluster, HostCluster};
use cowslip_models::qcow2::inflight::{Epochs, LeaseKind, LeaseRequest, Leases, Ticket};
use cowslip_models::qcow2::visits::{Closed, Visit, Visits};
use cowslip_models::sync::{Turn, Waiters, lock};
use loom::future::block_on;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, Condvar};
use loom::thread;

/// Every order in which threads are interrupted at most `preemptions` times; all without a number.
fn model(preemptions: Option<usize>, program: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(program);
}

/// Something to sleep on; as a queue's eventfd, it remembers that it was signalled.
struct Bell {
    rung: Mutex<bool>,
    rang: Condvar,
}

impl Bell {
    fn new() -> Bell {
        Bell {
            rung: Mutex::new(false),
            rang: Condvar::new(),
        }
    }

    fn ring(&self) {
        *lock(&self.rung) = true;
        self.rang.notify_one();
    }

    fn wait(&self) {
        let mut rung = lock(&self.rung);
        while !std::mem::take(&mut *rung) {
            rung = self.rang.wait(rung).unwrap();
        }
    }
}

impl Wake for Bell {
    fn wake(self: StdArc<Self>) {
        self.ring();
    }
}

fn bell() -> (StdArc<Bell>, Waker) {
    let bell = StdArc::new(Bell::new());
    (StdArc::clone(&bell), Waker::from(bell))
}

fn poll<T>(waiting: &mut Pending<T>, waker: &Waker) -> Poll<T> {
    Pin::new(waiting).poll(&mut Context::from_waker(waker))
}

/// Counts how often it is dropped.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_completion_brings_its_value_and_what_was_done_before_it() {
    model(None, || {
        let data = Arc::new(AtomicUsize::new(0));
        let (completer, waiting) = pending();
        let filled = Arc::clone(&data);
        let helper = thread::spawn(move || {
            // Relaxed: it is the completion that orders it.
            filled.store(7, Ordering::Relaxed);
            completer.complete(5);
        });
        assert_eq!(block_on(waiting), 5);
        assert_eq!(data.load(Ordering::Relaxed), 7);
        helper.join().unwrap();
    });
}

#[test]
fn the_last_waker_is_woken_at_completion() {
    model(None, || {
        let (completer, mut waiting) = pending();
        let helper = thread::spawn(move || completer.complete(5));
        let (_, first) = bell();
        let (bell, second) = bell();
        let early = poll(&mut waiting, &first);
        if early.is_pending() && poll(&mut waiting, &second).is_pending() {
            bell.wait();
            assert_eq!(poll(&mut waiting, &second), Poll::Ready(5));
        }
        helper.join().unwrap();
    });
}

#[test]
fn a_value_is_on_exactly_one_side_when_both_end_at_once() {
    model(None, || {
        let drops = Arc::new(AtomicUsize::new(0));
        let value = Counted(Arc::clone(&drops));
        let (completer, mut waiting) = pending();
        let helper = thread::spawn(move || completer.deliver(value).is_ok());
        let (_, waker) = bell();
        let kept = match poll(&mut waiting, &waker) {
            Poll::Ready(_) => true,
            Poll::Pending => waiting.give_up(),
        };
        assert_eq!(helper.join().unwrap(), kept);
        assert_eq!(drops.load(Ordering::SeqCst), 1, "dropped once, by either");
    });
}

#[test]
fn halves_that_are_dropped_at_once_leave_nothing() {
    model(None, || {
        let drops = Arc::new(AtomicUsize::new(0));
        let value = Counted(Arc::clone(&drops));
        let (completer, mut waiting) = pending::<Counted>();
        let helper = thread::spawn(move || {
            if completer.is_awaited() {
                drop(completer);
                drop(value);
            } else {
                completer.complete(value);
            }
        });
        let (held, waker) = bell();
        if poll_is_pending(&mut waiting, &waker) {
            drop(waiting);
        }
        helper.join().unwrap();
        assert_eq!(drops.load(Ordering::SeqCst), 1);
        drop(waker);
        assert_eq!(StdArc::strong_count(&held), 1, "the waker is let go");
    });
}

/// Polls what may be broken off: that panics, and is as good as a value here.
fn poll_is_pending<T>(waiting: &mut Pending<T>, waker: &Waker) -> bool {
    !waiting.has_value() && {
        let polled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            poll(waiting, waker).is_pending()
        }));
        polled.unwrap_or(false)
    }
}

/// The loop of an executor, for one task: collects mail, polls the task if it was woken, and
/// sleeps.
fn run_queue(queue: &Queue, mut done: impl FnMut() -> bool) {
    loop {
        let mut woken = false;
        queue.mail.collect(|()| woken = true);
        if !woken {
            queue.mail.fall_asleep();
            queue.mail.collect(|()| woken = true);
            if !woken {
                queue.event.wait();
            }
            queue.mail.wake_up();
            queue.mail.collect(|()| woken = true);
        }
        if woken {
            queue.task.clear();
            if done() {
                return;
            }
        }
    }
}

struct Queue {
    mail: Mailbox<()>,
    task: Scheduled,
    event: Bell,
}

impl Queue {
    fn new() -> Arc<Queue> {
        Arc::new(Queue {
            mail: Mailbox::new(),
            task: Scheduled::new(false),
            event: Bell::new(),
        })
    }

    /// As the executor's waker does from another thread.
    fn wake(&self) {
        if self.task.set() && self.mail.post(()) {
            self.event.ring();
        }
    }
}

#[test]
fn no_wake_from_another_thread_is_lost() {
    model(Some(3), || {
        let queue = Queue::new();
        let data: [Arc<AtomicUsize>; 2] = std::array::from_fn(|_| Arc::new(AtomicUsize::new(0)));
        let helpers = data.clone().map(|data| {
            let queue = Arc::clone(&queue);
            thread::spawn(move || {
                // Relaxed: it is the wake that orders it.
                data.store(1, Ordering::Relaxed);
                queue.wake();
            })
        });
        run_queue(&queue, || {
            data.iter().all(|data| data.load(Ordering::Relaxed) == 1)
        });
        for helper in helpers {
            helper.join().unwrap();
        }
    });
}

#[test]
fn mail_for_a_queue_that_ends_is_dropped() {
    model(None, || {
        let drops = Arc::new(AtomicUsize::new(0));
        let mail = Arc::new(Mailbox::new());
        let (late, letter) = (Arc::clone(&mail), Counted(Arc::clone(&drops)));
        let helper = thread::spawn(move || late.post(letter));
        mail.collect(drop);
        mail.close();
        helper.join().unwrap();
        assert_eq!(drops.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn the_turn_is_one_tasks_at_a_time_and_never_lost() {
    model(Some(2), || {
        let turn = Arc::new(Turn::new(0));
        let helpers: [_; 2] = std::array::from_fn(|_| {
            let turn = Arc::clone(&turn);
            thread::spawn(move || {
                block_on(async {
                    let mut value = turn.take().await;
                    let before = *value;
                    thread::yield_now();
                    *value = before + 1;
                });
            })
        });
        // One that asks and goes away, perhaps as the turn arrives.
        {
            let mut asking = pin!(turn.take());
            let (_, waker) = bell();
            drop(asking.as_mut().poll(&mut Context::from_waker(&waker)));
        }
        for helper in helpers {
            helper.join().unwrap();
        }
        assert_eq!(*block_on(turn.take()), 2);
    });
}

#[test]
fn a_waiter_is_woken_by_the_change() {
    model(None, || {
        let state = Arc::new(Mutex::new((false, Waiters::default())));
        let changed = Arc::clone(&state);
        let helper = thread::spawn(move || {
            let mut state = lock(&changed);
            state.0 = true;
            state.1.wake();
        });
        loop {
            let waiting = {
                let mut state = lock(&state);
                if state.0 {
                    break;
                }
                state.1.wait()
            };
            block_on(waiting);
        }
        helper.join().unwrap();
    });
}

/// Gets a lease as `admit` does: looks, waits without the lock, and looks again.
fn take_lease(leases: &Mutex<Leases>, want: &LeaseRequest) -> Ticket {
    let mut place = None;
    loop {
        let waiting = {
            let mut leases = lock(leases);
            if leases
                .obstacle(0, std::slice::from_ref(want), place)
                .is_none()
            {
                if let Some(place) = place {
                    leases.release(place);
                }
                return leases.grant(0, want.clone());
            }
            let (ticket, waiting) = leases.wait(0, want.clone(), place);
            place = Some(ticket);
            waiting
        };
        block_on(waiting);
    }
}

/// Threads that want these leases, each with what it found where it was.
fn lease_model(wants: [(std::ops::Range<u64>, LeaseKind); 3]) {
    model(Some(2), move || {
        let leases = Arc::new(Mutex::new(Leases::default()));
        let inside = Arc::new(AtomicUsize::new(0));
        let [own, others @ ..] = wants.clone();
        let run = |(range, kind): (std::ops::Range<u64>, LeaseKind)| {
            let (leases, inside) = (Arc::clone(&leases), Arc::clone(&inside));
            move || {
                let ticket = take_lease(&leases, &LeaseRequest { range, kind });
                // Shared ones count by one, an exclusive one alone by a hundred.
                let add = if kind == LeaseKind::Exclusive { 100 } else { 1 };
                let before = inside.fetch_add(add, Ordering::SeqCst);
                assert!(before < 100 && (add == 1 || before == 0), "{before} {add}");
                inside.fetch_sub(add, Ordering::SeqCst);
                lock(&leases).release(ticket);
            }
        };
        let helpers = others.map(|other| thread::spawn(run(other)));
        run(own)();
        for helper in helpers {
            helper.join().unwrap();
        }
    });
}

#[test]
fn an_exclusive_lease_is_alone_and_everybody_gets_theirs() {
    lease_model([
        (0..8, LeaseKind::Exclusive),
        (4..12, LeaseKind::Exclusive),
        (0..12, LeaseKind::Exclusive),
    ]);
}

#[test]
fn shared_leases_go_together_and_keep_exclusive_ones_out() {
    lease_model([
        (0..8, LeaseKind::Shared),
        (4..12, LeaseKind::Exclusive),
        (0..12, LeaseKind::Shared),
    ]);
}

#[test]
fn nothing_is_reused_while_it_can_be_reached() {
    model(Some(3), || {
        // The place that the mapping refers to, and the content of the old place.
        let state = Arc::new(Mutex::new((true, Epochs::default())));
        let content = Arc::new(AtomicUsize::new(1));
        let (of_reader, old) = (Arc::clone(&state), Arc::clone(&content));
        let reader = thread::spawn(move || {
            let (mapped, epoch) = {
                let mut state = lock(&of_reader);
                (state.0, state.1.enter())
            };
            if mapped {
                assert_eq!(
                    old.load(Ordering::Relaxed),
                    1,
                    "it was reused under a reader"
                );
            }
            lock(&of_reader).1.leave(epoch);
        });
        let freed_in = {
            let mut state = lock(&state);
            state.0 = false;
            state.1.current()
        };
        lock(&state).1.advance();
        loop {
            let waiting = {
                let mut state = lock(&state);
                if state.1.all_left(freed_in) {
                    break;
                }
                let now = state.1.current();
                state.1.wait_for_end(now)
            };
            if let Some(waiting) = waiting {
                block_on(waiting);
            }
        }
        content.store(2, Ordering::Relaxed);
        reader.join().unwrap();
    });
}

const CLUSTER: GuestCluster = GuestCluster(0);
const PLACE: (GuestCluster, HostCluster) = (CLUSTER, HostCluster(5));
/// Words of a map, and counters of visits.
const FEW: usize = 2;

/// A map that knows one cluster.
fn direct_map() -> DirectMap {
    let map = DirectMap::new(16);
    assert!(map.fill_in(PLACE, Access::ReadWrite, FEW));
    map
}

/// Waits as a drain does.
fn wait_for_end(epochs: &Mutex<Epochs>) {
    loop {
        let waiting = {
            let mut epochs = lock(epochs);
            let now = epochs.current();
            epochs.wait_for_end(now)
        };
        match waiting {
            Some(waiting) => block_on(waiting),
            None => return,
        }
    }
}

/// Leaves as a request does that takes no lock.
fn leave(visits: &Visits, visit: Visit, epochs: &Mutex<Epochs>) {
    if visits.leave(visit, 1) {
        lock(epochs).visit_left();
    }
}

/// A sum that is added to in two steps: what is added at the same time, or without knowing of what
/// was added before, is lost.
struct Sum(AtomicUsize);

impl Sum {
    fn add(&self, more: usize) {
        let before = self.0.load(Ordering::Relaxed);
        self.0.store(before + more, Ordering::Relaxed);
    }

    fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

fn sums() -> [Arc<Sum>; 2] {
    std::array::from_fn(|_| Arc::new(Sum(AtomicUsize::new(0))))
}

#[test]
fn nothing_is_reused_while_a_request_without_the_lock_can_reach_it() {
    model(Some(3), || {
        let visits = StdArc::new(Visits::new(FEW));
        let epochs = Arc::new(Mutex::new(Epochs::beside(StdArc::clone(&visits))));
        let (map, content) = (Arc::new(direct_map()), Arc::new(AtomicUsize::new(1)));
        let (of_map, old) = (Arc::clone(&map), Arc::clone(&content));
        let (of_visits, of_epochs) = (StdArc::clone(&visits), Arc::clone(&epochs));
        let reader = thread::spawn(move || {
            let visit = of_visits.enter(1);
            if of_map.find(CLUSTER).is_some() {
                let found = old.load(Ordering::Relaxed);
                assert_eq!(found, 1, "it was reused under a reader");
            }
            leave(&of_visits, visit, &of_epochs);
        });
        let freed_in = {
            let epochs = lock(&epochs);
            map.forget(CLUSTER);
            epochs.current()
        };
        lock(&epochs).advance();
        while !lock(&epochs).all_left(freed_in) {
            wait_for_end(&epochs);
        }
        content.store(2, Ordering::Relaxed);
        reader.join().unwrap();
    });
}

#[test]
fn no_request_without_the_lock_is_behind_the_gate_when_all_have_ended() {
    model(Some(3), || {
        let visits = StdArc::new(Visits::new(FEW));
        visits.open(Closed::Unready);
        let epochs = Arc::new(Mutex::new(Epochs::beside(StdArc::clone(&visits))));
        let sums = sums();
        let helpers: [_; 2] = std::array::from_fn(|number| {
            let (visits, epochs) = (StdArc::clone(&visits), Arc::clone(&epochs));
            let sum = Arc::clone(&sums[number]);
            thread::spawn(move || {
                let visit = visits.enter(number);
                let admitted = visits.admits_writes();
                if admitted {
                    sum.add(1);
                }
                leave(&visits, visit, &epochs);
                usize::from(admitted)
            })
        });
        {
            let _epochs = lock(&epochs);
            visits.close(Closed::Changes);
        }
        wait_for_end(&epochs);
        sums.iter().for_each(|sum| sum.add(10));
        for (helper, sum) in helpers.into_iter().zip(sums) {
            assert_eq!(helper.join().unwrap() + 10, sum.get());
        }
    });
}

#[test]
fn writes_without_the_lock_and_exclusive_leases_keep_each_other_out() {
    model(Some(3), || {
        let (map, leases) = (
            Arc::new(direct_map()),
            Arc::new(Mutex::new(Leases::default())),
        );
        let sums = sums();
        let helpers: [_; 2] = std::array::from_fn(|number| {
            let (map, leases) = (Arc::clone(&map), Arc::clone(&leases));
            let sum = Arc::clone(&sums[number]);
            thread::spawn(move || {
                let admitted = map.begin_write(CLUSTER).is_some();
                if admitted {
                    sum.add(1);
                    if map.end_write(CLUSTER) {
                        lock(&leases).wake(0, &map.range(CLUSTER));
                    }
                }
                usize::from(admitted)
            })
        });
        let want = LeaseRequest {
            range: map.range(CLUSTER),
            kind: LeaseKind::Exclusive,
        };
        let mut place = None;
        loop {
            let waiting = {
                let mut leases = lock(&leases);
                if map.close(&want.range) {
                    break;
                }
                let (ticket, waiting) = leases.wait(0, want.clone(), place);
                place = Some(ticket);
                waiting
            };
            block_on(waiting);
        }
        sums.iter().for_each(|sum| sum.add(10));
        {
            // Given back; a write may begin again.
            let mut leases = lock(&leases);
            if let Some(place) = place {
                leases.release(place);
            }
            assert!(map.fill_in(PLACE, Access::ReadWrite, FEW));
        }
        for (helper, sum) in helpers.into_iter().zip(sums) {
            assert_eq!(helper.join().unwrap() + 10, sum.get());
        }
    });
}
