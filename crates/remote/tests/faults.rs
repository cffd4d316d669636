//! Faults of servers and networks: a bounded wait, then an error; never wrong bytes.

use std::time::{Duration, Instant};

use cowslip_testbed::web::{WebFault, WebObject, WebServer};

use crate::support::{open, pattern, read, server_of};

const BLOCK: usize = 64 << 10;

/// Each disturbance of an answer is survived, and no byte is wrong afterwards.
#[test]
fn passing_faults_are_waited_out() {
    let faults = [
        WebFault::Status(429, String::new()),
        WebFault::Status(500, "oops".to_string()),
        WebFault::Status(503, "<Error><Code>SlowDown</Code></Error>".to_string()),
        WebFault::Status(403, "<Error><Code>ExpiredToken</Code></Error>".to_string()),
        WebFault::Reset,
        WebFault::CutAfter(0),
        WebFault::CutAfter(1000),
        WebFault::CutAfter(BLOCK + 1),
        WebFault::Shifted(512),
        WebFault::LongBody(512),
        WebFault::Bare,
        WebFault::Silence(Duration::from_millis(1500)),
        WebFault::EndlessError,
    ];
    let (server, bytes) = server_of(8 * BLOCK);
    for fault in faults {
        let file = open(&server, "readahead=0,timeout=1").unwrap();
        server.fail([fault.clone()]);
        let found = read(&file, BLOCK as u64 + 5, 3 * BLOCK);
        let found = found.unwrap_or_else(|why| panic!("{fault:?}: {why}"));
        assert!(found == bytes[BLOCK + 5..4 * BLOCK + 5], "{fault:?}");
        assert_eq!(server.faults_left(), 0);
    }
}

#[test]
fn what_has_arrived_is_not_fetched_again() {
    let (server, bytes) = server_of(8 * BLOCK);
    let file = open(&server, "readahead=0").unwrap();
    server.forget();
    server.fail([
        WebFault::CutAfter(3 * BLOCK + 10),
        WebFault::CutAfter(BLOCK),
    ]);
    assert!(read(&file, 0, 8 * BLOCK).unwrap() == bytes);
    let starts: Vec<u64> = server
        .requests()
        .iter()
        .map(|r| r.range.clone().unwrap().start)
        .collect();
    assert_eq!(starts, [1, 4, 5].map(|block| block * BLOCK as u64));
}

#[test]
fn a_lasting_failure_is_an_error_after_the_time_for_it() {
    let (server, bytes) = server_of(4 * BLOCK);
    let file = open(&server, "readahead=0,wait-timeout=1").unwrap();
    server.set_down(true);
    let begun = Instant::now();
    let error = read(&file, BLOCK as u64, 10).unwrap_err();
    let taken = begun.elapsed();
    assert!(
        taken >= Duration::from_millis(400) && taken < Duration::from_secs(5),
        "{taken:?}"
    );
    assert!(!error.to_string().is_empty());
    // The next request tries again.
    server.set_down(false);
    assert!(read(&file, BLOCK as u64, 10).unwrap() == bytes[BLOCK..BLOCK + 10]);
}

#[test]
fn with_stop_a_read_waits_until_the_server_is_back() {
    let (server, bytes) = server_of(4 * BLOCK);
    let file = open(&server, "readahead=0,wait-timeout=1,on-failure=stop").unwrap();
    server.set_down(true);
    let reader = std::thread::spawn(move || read(&file, BLOCK as u64, 10));
    std::thread::sleep(Duration::from_millis(1800));
    assert!(
        !reader.is_finished(),
        "it waits for longer than the time for errors"
    );
    server.set_down(false);
    assert!(reader.join().unwrap().unwrap() == bytes[BLOCK..BLOCK + 10]);
}

/// However the server answers a request for the old version, the change is an error that names
/// both, and no byte of the new one is read.
#[test]
fn an_object_that_changes_is_an_error_that_names_both_versions() {
    let tags = |server: &WebServer| {
        let mut new = WebObject::tagged(pattern(4 * BLOCK, 2), "two");
        new.last_modified = None;
        server.put("/a", new);
    };
    let (server, bytes) = server_of(4 * BLOCK);
    let file = open(&server, "readahead=0").unwrap();
    tags(&server);
    let error = read(&file, BLOCK as u64, 10).unwrap_err().to_string();
    let url = server.url("/a");
    assert_eq!(
        error,
        format!(
            "'{url}' has changed since it was opened: then ETag \\\"one\\\", 262144 bytes; \
             now ETag \\\"two\\\", 262144 bytes"
        )
    );
    // It stays an error when the old version is back: in between, anything may have been read.
    server.put("/a", WebObject::tagged(bytes, "one"));
    assert_eq!(read(&file, 0, 10).unwrap_err().to_string(), error);

    // Connections that end meanwhile.
    let (server, _) = server_of(4 * BLOCK);
    let file = open(&server, "readahead=0").unwrap();
    tags(&server);
    server.fail([WebFault::Nothing, WebFault::Reset, WebFault::Reset]);
    let error = read(&file, BLOCK as u64, 10).unwrap_err().to_string();
    assert!(
        error.ends_with("now ETag \\\"two\\\", 262144 bytes"),
        "{error}"
    );
    assert_eq!(server.faults_left(), 0);

    // A server that does not look at conditions.
    let (server, _) = server_of(4 * BLOCK);
    let file = open(&server, "readahead=0").unwrap();
    server.fail([WebFault::OtherTag("\"other\"".to_string())]);
    let error = read(&file, BLOCK as u64, 10).unwrap_err().to_string();
    assert!(error.ends_with("the server gives both versions"), "{error}");
    let file = open(&server, "readahead=0").unwrap();
    server.fail([WebFault::WrongLength(1)]);
    let error = read(&file, BLOCK as u64, 10).unwrap_err().to_string();
    assert!(error.contains("has changed since it was opened"), "{error}");
}

#[test]
fn without_an_etag_the_time_of_the_last_change_counts() {
    let server = WebServer::start().unwrap();
    let dated = |seed, time: &str| WebObject {
        e_tag: None,
        last_modified: Some(format!("Thu, 26 Nov 2026 {time} GMT")),
        ..WebObject::tagged(pattern(4 * BLOCK, seed), "")
    };
    server.put("/a", dated(1, "10:00:00"));
    let file = open(&server, "readahead=0").unwrap();
    assert!(read(&file, BLOCK as u64, 10).unwrap() == pattern(4 * BLOCK, 1)[BLOCK..BLOCK + 10]);
    server.put("/a", dated(2, "10:00:01"));
    let error = read(&file, 2 * BLOCK as u64, 10).unwrap_err().to_string();
    assert!(
        error.contains("has changed since it was opened: then changed 1"),
        "{error}"
    );
}

#[test]
fn a_weak_etag_is_compared_though_it_cannot_be_asked_for() {
    let server = WebServer::start().unwrap();
    let weak = |seed, tag: &str| WebObject {
        e_tag: Some(format!("W/\"{tag}\"")),
        ..WebObject::tagged(pattern(4 * BLOCK, seed), "")
    };
    server.put("/a", weak(1, "x"));
    let file = open(&server, "readahead=0").unwrap();
    assert!(read(&file, BLOCK as u64, 10).is_ok());
    server.put("/a", weak(2, "y"));
    assert!(
        read(&file, 2 * BLOCK as u64, 10)
            .unwrap_err()
            .to_string()
            .contains("W/")
    );
}

#[test]
fn what_cannot_be_opened_is_said_at_once() {
    let (server, _) = server_of(4 * BLOCK);
    let why = |server: &WebServer, fault: WebFault| {
        server.fail([fault]);
        let begun = Instant::now();
        let error = open(server, "").unwrap_err().to_string();
        assert!(begun.elapsed() < Duration::from_secs(2), "{error}");
        error
    };
    let status = |status| WebFault::Status(status, "<Error><Code>NoSuchKey</Code>".to_string());
    assert_eq!(
        why(&server, status(404)),
        "the server answers '404 Not Found' (NoSuchKey)"
    );
    assert_eq!(
        why(&server, status(403)),
        "the server answers '403 Forbidden' (NoSuchKey)"
    );
    assert_eq!(
        why(&server, WebFault::WholeObject),
        "the server does not serve ranges of it"
    );
    assert_eq!(
        why(&server, WebFault::WrongLength(1 << 60)),
        format!(
            "the server says that it has {} bytes; at most {} are supported",
            (1u64 << 60) + 4 * BLOCK as u64,
            1u64 << 46
        )
    );
    let nowhere = crate::support::open_url("http://127.0.0.1:1/x", "wait-timeout=1");
    let error = nowhere.unwrap_err().to_string();
    assert!(error.contains("refused"), "{error}");
}
