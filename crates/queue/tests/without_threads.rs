//! A process that gets no further thread makes blocking calls all the same, beside a task that
//! waits for signals. A process of its own, since its memory is limited.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::process::Command;
use std::time::{Duration, Instant};

use cowslip_queue::{Backend, Queue, Signals, blocking, spawn, yield_now};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Says that this process is the one with the limit.
const LIMITED: &str = "COWSLIP_TEST_WITHOUT_THREADS";

/// Bytes of memory beyond what is mapped: less than the stack of a thread.
const LEFT: u64 = 1 << 20;

fn mapped_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = text.split(' ').next().unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

fn limited() {
    let signals = Signals::take_over().unwrap();
    let queue = Queue::new(Backend::Threads).unwrap();
    let sum = queue.block_on(async move {
        spawn(async move { drop(signals.asked().await) });
        // It waits, wherever it does.
        for _ in 0..10 {
            yield_now().await;
        }
        std::thread::sleep(Duration::from_millis(50));
        let limits = Rlimit {
            current: Some(mapped_bytes() + LEFT),
            ..getrlimit(Resource::As)
        };
        setrlimit(Resource::As, limits).unwrap();
        let refused = std::thread::Builder::new().spawn(|| ());
        assert!(refused.is_err(), "there is a thread after all");
        let mut sum = 0;
        for number in 0..100 {
            sum += blocking(move || number).await;
        }
        sum
    });
    assert_eq!(sum, 4950);
    // The task that waits for signals goes with the process.
    std::process::exit(0);
}

#[test]
fn calls_are_made_where_no_thread_can_be() {
    if std::env::var_os(LIMITED).is_some() {
        return limited();
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "calls_are_made_where_no_thread_can_be",
            "--nocapture",
        ])
        .env(LIMITED, "1")
        .spawn()
        .unwrap();
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{status}");
            return;
        }
        if begun.elapsed() > Duration::from_secs(20) {
            drop(child.kill());
            drop(child.wait());
            panic!("a call waits for ever");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
