//! Work ahead of the guest.

use std::time::{Duration, Instant};

use cowslip_remote::{Environment, ObjectUrl, RemoteName, Secrets};
use cowslip_testbed::web::WebLink;

use crate::support::{MIB, block_on, open, read, server_of};

const BLOCK: usize = 64 << 10;

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(10), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_trace_is_fetched_in_its_order_and_once() {
    let dir = tempfile::tempdir().unwrap();
    let (server, bytes) = server_of(2 * MIB);
    let file = open(
        &server,
        &format!("cache-dir={},readahead=0", dir.path().display()),
    )
    .unwrap();
    server.forget();
    let blocks = [20, 3, 4, 9, 30, 1, 12, 17, 25, 6, 28];
    let trace = blocks.map(|block| block * BLOCK as u64..(block * BLOCK as u64) + 4096);
    file.prefetch([&trace[..], &trace[..]].concat());
    let all = (blocks.len() * BLOCK) as u64;
    wait_for("the trace is fetched", || server.sent() >= all);
    let requests = server.requests().into_iter();
    let starts = requests.map(|request| request.range.unwrap().start / BLOCK as u64);
    // A few at a time, neighbours together.
    for (place, block) in starts.enumerate() {
        let meant = blocks.iter().position(|it| *it == block).unwrap();
        assert!(
            place.abs_diff(meant) <= 3,
            "{block} comes as number {place}"
        );
    }
    for block in blocks {
        let at = block as usize * BLOCK;
        assert!(read(&file, at as u64, BLOCK).unwrap() == bytes[at..at + BLOCK]);
    }
    assert_eq!(server.sent(), all, "once");
}

/// A trace says all that is fetched: reads in sequence add nothing to it.
#[test]
fn reads_of_a_trace_are_not_read_ahead_of() {
    let dir = tempfile::tempdir().unwrap();
    let (server, bytes) = server_of(4 * MIB);
    let options = format!("cache-dir={},readahead=1M", dir.path().display());
    let file = open(&server, &options).unwrap();
    server.limit(WebLink {
        latency: Duration::from_millis(2),
        bytes_per_second: 50_000_000,
    });
    server.forget();
    let runs = [5, 40, 20].map(|block| block * BLOCK..(block + 6) * BLOCK);
    let trace = runs.clone().map(|run| run.start as u64..run.end as u64);
    file.prefetch(trace.to_vec());
    for run in runs {
        for at in run.step_by(32 << 10) {
            assert!(read(&file, at as u64, 32 << 10).unwrap() == bytes[at..at + (32 << 10)]);
        }
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(server.sent(), 18 * BLOCK as u64);
}

#[test]
fn a_recorded_start_is_fetched_ahead_by_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let shown = dir.path().display();
    let (server, bytes) = server_of(4 * MIB);
    let url = ObjectUrl::of_name(&server.url("/a")).unwrap().unwrap();
    let name = RemoteName {
        readahead_bytes: 0,
        record: Some(dir.path().join("trace")),
        ..RemoteName::of_url(url)
    };
    let environment = Environment::default();
    let opened = cowslip_remote::open(&name, Secrets::default(), &environment, ("a", false));
    let file = block_on(opened).unwrap();
    let starts = [40, 3, 17, 18, 3].map(|block| block * BLOCK as u64);
    for start in starts {
        read(&file, start + 10, 512).unwrap();
    }
    drop(file);
    server.forget();
    let options = format!("readahead=0,trace={shown}/trace,cache-dir={shown}/cache");
    let file = open(&server, &options).unwrap();
    wait_for("the trace is fetched", || server.sent() > 4 * BLOCK as u64);
    server.forget();
    for start in starts {
        let at = start as usize;
        assert!(read(&file, start, BLOCK).unwrap() == bytes[at..at + BLOCK]);
    }
    assert_eq!(server.sent(), 0);
}

#[test]
fn the_background_fetches_the_rest_within_its_budget() {
    let dir = tempfile::tempdir().unwrap();
    let (server, bytes) = server_of(MIB + 100);
    let shown = dir.path().display();
    let begun = Instant::now();
    let file = open(&server, &format!("cache-dir={shown},background=2M")).unwrap();
    wait_for("all is cached", || server.sent() > MIB as u64 + 100);
    let taken = begun.elapsed();
    assert!(
        taken > Duration::from_millis(350),
        "{taken:?} for 1 MiB at 2 MiB/s"
    );
    server.forget();
    assert!(read(&file, 0, MIB + 100).unwrap() == bytes);
    assert_eq!(server.sent(), 0);
}

/// A read of the guest does not wait behind all that was asked for ahead of it.
#[test]
fn the_guest_goes_first() {
    let dir = tempfile::tempdir().unwrap();
    let (server, bytes) = server_of(16 * MIB);
    let file = open(
        &server,
        &format!("cache-dir={},readahead=0", dir.path().display()),
    )
    .unwrap();
    server.limit(WebLink {
        latency: Duration::from_millis(2),
        bytes_per_second: 10 << 20,
    });
    file.prefetch(std::iter::once(0..12 * MIB as u64).collect());
    std::thread::sleep(Duration::from_millis(100));
    let at = 15 * MIB;
    let begun = Instant::now();
    assert!(read(&file, at as u64, 4096).unwrap() == bytes[at..at + 4096]);
    let taken = begun.elapsed();
    assert!(
        taken < Duration::from_millis(400),
        "{taken:?}, where the trace takes 1.2 s"
    );
}
