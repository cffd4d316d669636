//! The executor on both backends: tasks, wakes across threads, timers.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use cowslip_queue::{Backend, Queue, blocking, pending, sleep, spawn, yield_now};

/// The backends that this machine has.
fn queues() -> Vec<Queue> {
    let threads = Queue::new(Backend::Threads).expect("epoll works everywhere");
    assert_eq!(threads.backend(), Backend::Threads);
    match Queue::new(Backend::Uring) {
        Ok(ring) => vec![ring, threads],
        Err(error) => {
            eprintln!("no io_uring here ({error}): the ring is not tested");
            vec![threads]
        }
    }
}

#[test]
fn the_result_of_the_future_is_returned() {
    for queue in queues() {
        assert_eq!(queue.block_on(async { 6 * 7 }), 42);
        assert_eq!(queue.block_on(async { "again" }), "again");
    }
}

#[test]
fn thousands_of_tasks_finish() {
    const TASKS: usize = 5_000;
    for queue in queues() {
        let done = Rc::new(Cell::new(0));
        queue.block_on(async {
            for index in 0..TASKS {
                let done = Rc::clone(&done);
                spawn(async move {
                    for _ in 0..index % 4 {
                        yield_now().await;
                    }
                    done.set(done.get() + 1);
                });
            }
            while done.get() < TASKS {
                yield_now().await;
            }
        });
        assert_eq!(done.get(), TASKS);
    }
}

#[test]
fn tasks_may_spawn_tasks_and_outlive_a_run() {
    for queue in queues() {
        let (completer, result) = pending();
        let waiting = Rc::new(Cell::new(false));
        let seen = Rc::clone(&waiting);
        queue.block_on(async move {
            spawn(async move {
                spawn(async move {
                    seen.set(true);
                    result.await;
                    seen.set(false);
                });
            });
            yield_now().await;
            yield_now().await;
        });
        assert!(waiting.get(), "the inner task runs and waits");
        completer.complete(());
        queue.block_on(yield_now());
        assert!(!waiting.get(), "it is finished by the next run");
    }
}

#[test]
fn no_wake_from_another_thread_is_lost() {
    const ROUNDS: usize = 3_000;
    for queue in queues() {
        let (ask, asked) = std::sync::mpsc::channel::<cowslip_queue::Completer<usize>>();
        let helper = thread::spawn(move || {
            for (round, completer) in asked.into_iter().enumerate() {
                // Sometimes at once, sometimes when the queue has gone to sleep, and in between.
                match round % 3 {
                    0 => {}
                    1 => thread::yield_now(),
                    _ => (0..round % 700).for_each(|_| std::hint::spin_loop()),
                }
                completer.complete(round);
            }
        });
        queue.block_on(async move {
            for round in 0..ROUNDS {
                let (completer, result) = pending();
                ask.send(completer).expect("the helper lives");
                assert_eq!(result.await, round);
            }
        });
        helper.join().expect("the helper ends well");
    }
}

#[test]
fn many_threads_wake_many_tasks() {
    for queue in queues() {
        let sum = Rc::new(Cell::new(0));
        queue.block_on(async {
            for number in 0..500usize {
                let sum = Rc::clone(&sum);
                spawn(async move {
                    let number = blocking(move || number).await;
                    sum.set(sum.get() + number);
                });
            }
            while sum.get() < 499 * 500 / 2 {
                sleep(Duration::from_millis(1)).await;
            }
        });
    }
}

/// Ready once `done`; keeps its waker for the test.
struct Manual {
    done: Arc<AtomicBool>,
    waker: Rc<RefCell<Option<Waker>>>,
    polls: Arc<AtomicUsize>,
}

impl Future for Manual {
    type Output = ();
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.polls.fetch_add(1, Ordering::SeqCst);
        *self.waker.borrow_mut() = Some(cx.waker().clone());
        match self.done.load(Ordering::SeqCst) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }
}

#[test]
fn late_and_repeated_wakes_do_no_harm() {
    for queue in queues() {
        let done = Arc::new(AtomicBool::new(false));
        let waker = Rc::new(RefCell::new(None));
        let polls = Arc::new(AtomicUsize::new(0));
        let manual = Manual {
            done: Arc::clone(&done),
            waker: Rc::clone(&waker),
            polls: Arc::clone(&polls),
        };
        queue.block_on(async {
            spawn(manual);
            yield_now().await;
            let waker = waker.borrow().clone().expect("it was polled");
            for _ in 0..5 {
                waker.wake_by_ref();
            }
            yield_now().await;
            assert_eq!(polls.load(Ordering::SeqCst), 2, "five wakes are one poll");
            done.store(true, Ordering::SeqCst);
            waker.wake_by_ref();
            yield_now().await;
            // Its place now belongs to another task.
            spawn(std::future::pending());
            waker.wake_by_ref();
            thread::spawn(move || waker.wake())
                .join()
                .expect("wakes are harmless");
            yield_now().await;
            assert_eq!(polls.load(Ordering::SeqCst), 3);
        });
    }
}

#[test]
fn timers_fire_in_order_and_not_early() {
    for queue in queues() {
        let order = Rc::new(RefCell::new(Vec::new()));
        let start = Instant::now();
        queue.block_on(async {
            for millis in [40u64, 10, 30, 20, 10] {
                let order = Rc::clone(&order);
                spawn(async move {
                    sleep(Duration::from_millis(millis)).await;
                    assert!(start.elapsed() >= Duration::from_millis(millis));
                    order.borrow_mut().push(millis);
                });
            }
            sleep(Duration::from_millis(60)).await;
        });
        assert_eq!(*order.borrow(), [10, 10, 20, 30, 40]);
    }
}

#[test]
fn a_dropped_sleep_does_not_hold_the_queue() {
    for queue in queues() {
        let start = Instant::now();
        queue.block_on(async {
            let mut long = Box::pin(sleep(Duration::from_secs(3600)));
            std::future::poll_fn(|cx| {
                assert!(long.as_mut().poll(cx).is_pending());
                Poll::Ready(())
            })
            .await;
            drop(long);
            sleep(Duration::from_millis(5)).await;
        });
        assert!(start.elapsed() < Duration::from_secs(60));
    }
}

#[test]
fn a_task_that_never_rests_does_not_starve_the_others() {
    for queue in queues() {
        queue.block_on(async {
            spawn(async {
                loop {
                    yield_now().await;
                }
            });
            sleep(Duration::from_millis(5)).await;
            assert_eq!(blocking(|| 3).await, 3);
        });
    }
}

#[test]
fn dropping_a_queue_drops_its_tasks() {
    struct Noted(Rc<Cell<bool>>);
    impl Drop for Noted {
        fn drop(&mut self) {
            self.0.set(true);
        }
    }
    for queue in queues() {
        let dropped = Rc::new(Cell::new(false));
        let noted = Noted(Rc::clone(&dropped));
        queue.block_on(async move {
            spawn(async move {
                let _noted = noted;
                std::future::pending::<()>().await;
            });
            yield_now().await;
        });
        assert!(!dropped.get());
        drop(queue);
        assert!(dropped.get());
    }
}

#[test]
#[should_panic(expected = "spawned on a running queue")]
fn spawning_without_a_queue_is_loud() {
    spawn(async {});
}
