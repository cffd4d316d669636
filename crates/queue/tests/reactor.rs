//! Reactors in other loops, and blocking calls: which threads there are, when the descriptor is
//! readable, what becomes of operations that nobody waits for.
#![allow(clippy::unwrap_used)] // Failing a test is a panic.

use std::cell::Cell;
use std::future::poll_fn;
use std::io::Write;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use cowslip_queue::file::{MemoryAlignment, Persistence, Route};
use cowslip_queue::{
    Backend, Buf, BufMut, File, PreparedQueue, Reactor, block_here, blocking, pending, sleep,
    yield_now,
};

fn scratch(bytes: &[u8]) -> Arc<File> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    File::new(file.into(), Route::Ring, MemoryAlignment::NONE)
}

fn is_readable(reactor: &Reactor) -> bool {
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(
        reactor.as_fd(),
        rustix::event::PollFlags::IN,
    )];
    rustix::event::poll(&mut fds, Some(&rustix::time::Timespec::default())).unwrap() == 1
}

fn reactors() -> Vec<Reactor> {
    let mut all = vec![
        Reactor::new(Backend::Auto).unwrap(),
        Reactor::new(Backend::Threads).unwrap(),
    ];
    for backend in [Backend::Auto, Backend::Threads] {
        let queue = PreparedQueue::new(backend).unwrap();
        all.push(queue.without_threads().start_reactor().unwrap());
    }
    all
}

/// Drives a reactor as a loop does, until something is true.
fn drive(reactor: &Reactor, until: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !until() {
        let left = reactor.turn();
        if until() {
            return;
        }
        assert!(Instant::now() < end, "the descriptor was never readable");
        let max = left.unwrap_or(Duration::from_secs(5));
        reactor.wait(Some(max)).unwrap();
    }
}

#[test]
fn tasks_finish_when_the_loop_follows_the_descriptor() {
    for reactor in reactors() {
        let file = scratch(&[7; 8192]);
        let done = Rc::new(Cell::new(0));
        for index in 0..200u64 {
            let (file, done) = (Arc::clone(&file), Rc::clone(&done));
            reactor.spawn(async move {
                let offset = index % 4 * 1024;
                let (read, buf) = file.read_at(offset, BufMut::zeroed(1024)).await;
                read.unwrap();
                assert_eq!(BufMut::from(buf)[..], [7; 1024]);
                let data = Buf::copy_of(&index.to_le_bytes());
                let written = file.write_at(8192 + index * 8, data, Persistence::Cached);
                written.await.unwrap();
                done.set(done.get() + 1);
            });
        }
        drive(&reactor, || done.get() == 200);
        let (read, buf) = block_here(file.read_at(8192 + 199 * 8, BufMut::zeroed(8)));
        read.unwrap();
        assert_eq!(BufMut::from(buf)[..], 199u64.to_le_bytes());
    }
}

#[test]
fn a_quiet_reactor_is_not_readable_and_wakes_of_other_threads_are_seen() {
    for reactor in reactors() {
        assert_eq!(reactor.turn(), None);
        assert!(!is_readable(&reactor));
        let (completer, value) = pending();
        let seen = Rc::new(Cell::new(0));
        let to = Rc::clone(&seen);
        reactor.spawn(async move { to.set(value.await) });
        reactor.turn();
        assert!(!is_readable(&reactor));
        let other = std::thread::spawn(move || completer.complete(5));
        drive(&reactor, || seen.get() == 5);
        other.join().unwrap();
        reactor.turn();
        assert!(!is_readable(&reactor));
    }
}

#[test]
fn another_executor_polls_futures_whose_operations_the_ring_takes() {
    for reactor in reactors() {
        let file = scratch(&[3; 4096]);
        let twice = async {
            for _ in 0..2 {
                let (read, buf) = file.read_at(0, BufMut::zeroed(4096)).await;
                read.unwrap();
                assert_eq!(BufMut::from(buf)[..], [3; 4096]);
            }
            4
        };
        // The executor: it polls when the descriptor is readable, or when it is woken.
        let mut future = std::pin::pin!(reactor.within(twice));
        let woken = Arc::new(Flag::default());
        let waker = std::task::Waker::from(Arc::clone(&woken));
        let mut cx = std::task::Context::from_waker(&waker);
        let end = Instant::now() + Duration::from_secs(20);
        let output = loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
                break output;
            }
            while !woken.0.swap(false, std::sync::atomic::Ordering::AcqRel) {
                assert!(Instant::now() < end, "nothing woke the future");
                reactor.wait(Some(Duration::from_millis(2))).unwrap();
                reactor.turn();
            }
        };
        assert_eq!(output, 4);
    }
}

#[derive(Default)]
struct Flag(std::sync::atomic::AtomicBool);

impl std::task::Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, std::sync::atomic::Ordering::Release);
    }
}

#[test]
fn timers_are_the_time_that_a_turn_returns() {
    let reactor = Reactor::new(Backend::Auto).unwrap();
    let done = Rc::new(Cell::new(false));
    let to = Rc::clone(&done);
    reactor.spawn(async move {
        sleep(Duration::from_millis(20)).await;
        to.set(true);
    });
    let begun = Instant::now();
    assert!(reactor.turn().unwrap() <= Duration::from_millis(20));
    drive(&reactor, || done.get());
    assert!(begun.elapsed() >= Duration::from_millis(20));
}

#[test]
fn tasks_that_wake_each_other_for_ever_leave_the_loop_its_turn() {
    let reactor = Reactor::new(Backend::Auto).unwrap();
    let turns = Rc::new(Cell::new(0u64));
    let count = Rc::clone(&turns);
    let task = reactor.spawn(async move {
        loop {
            count.set(count.get() + 1);
            yield_now().await;
        }
    });
    reactor.turn();
    assert!(turns.get() > 0);
    assert!(is_readable(&reactor), "the loop is to come back");
    reactor.abort(&task);
    reactor.turn();
    let at = turns.get();
    reactor.turn();
    assert_eq!(turns.get(), at);
    assert!(!is_readable(&reactor));
}

#[test]
fn without_threads_blocking_calls_are_made_by_the_caller() {
    let here = std::thread::current().id();
    let id = || blocking(|| std::thread::current().id());
    assert_eq!(block_here(async { id().await }), here);
    for backend in [Backend::Auto, Backend::Threads] {
        let queue = PreparedQueue::new(backend).unwrap().without_threads();
        let queue = queue.start().unwrap();
        assert_eq!(queue.block_on(async { id().await }), here);
        let reactor = PreparedQueue::new(backend).unwrap().without_threads();
        let reactor = reactor.start_reactor().unwrap();
        assert_eq!(reactor.block_on(async { id().await }).unwrap(), here);
        // Within a queue, too, and the queue is there again afterwards.
        let inner = queue.block_on(async {
            assert_eq!(block_here(async { id().await }), here);
            yield_now().await;
            id().await
        });
        assert_eq!(inner, here);
    }
    let queue = cowslip_queue::Queue::new(Backend::Auto).unwrap();
    assert_ne!(queue.block_on(async { id().await }), here);
}

#[test]
fn memory_of_dropped_tasks_is_kept_until_the_kernel_has_let_go() {
    let memory = cowslip_queue::SharedMemory::new(1 << 20);
    for reactor in reactors() {
        let file = scratch(&[9; 1 << 20]);
        for _ in 0..8 {
            let (file, memory) = (Arc::clone(&file), Arc::clone(&memory));
            let task = reactor.spawn(async move {
                let list = cowslip_queue::IoVecMut::shared(&memory, 0..1 << 20);
                let (read, list) = file.read_at(0, list).await;
                read.unwrap();
                drop(list);
                poll_fn(|_| Poll::<()>::Pending).await;
            });
            reactor.turn();
            reactor.abort(&task);
        }
        drop(reactor);
        let end = Instant::now() + Duration::from_secs(20);
        // Those of the pool may end later; nothing holds the memory then.
        while Arc::strong_count(&memory) > 1 {
            assert!(Instant::now() < end, "the memory is never released");
            std::thread::yield_now();
        }
    }
}
