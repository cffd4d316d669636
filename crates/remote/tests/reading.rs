//! Reads of objects whose servers work.

use std::time::Duration;

use cowslip_block::file::BlockFile;
use cowslip_testbed::web::{WebFault, WebLink, WebObject, WebServer};

use crate::support::{MIB, block_on, open, open_url, pattern, read, read_async, server_of};

const BLOCK: usize = 64 << 10;

#[test]
fn any_range_is_read_and_zeroes_follow_the_end() {
    let (server, bytes) = server_of(3 * BLOCK + 1234);
    let file = open(&server, "readahead=0").unwrap();
    let len = bytes.len();
    assert_eq!(block_on(file.len()).unwrap(), len as u64);
    for (offset, count) in [(0, 1), (1, BLOCK), (BLOCK - 1, 2), (len - 5, 5), (0, len)] {
        let found = read(&file, offset as u64, count).unwrap();
        assert!(
            found == bytes[offset..offset + count],
            "{count} bytes at {offset}"
        );
    }
    let beyond = read(&file, len as u64 - 3, 8).unwrap();
    assert_eq!(beyond, [&bytes[len - 3..], &[0; 5]].concat());
    assert_eq!(read(&file, 1 << 40, 4).unwrap(), [0; 4]);
    assert!(read(&file, u64::MAX - 1, 4).is_err());
}

#[test]
fn an_empty_object_and_one_of_a_byte_are_files() {
    let server = WebServer::start().unwrap();
    server.put("/a", WebObject::tagged(Vec::new(), "empty"));
    let file = open(&server, "").unwrap();
    assert_eq!(block_on(file.len()).unwrap(), 0);
    assert_eq!(read(&file, 0, 3).unwrap(), [0; 3]);
    server.put("/a", WebObject::tagged(vec![7], "short"));
    let file = open(&server, "").unwrap();
    assert_eq!(read(&file, 0, 3).unwrap(), [7, 0, 0]);
}

#[test]
fn requests_that_wait_together_are_joined() {
    let (server, bytes) = server_of(64 * BLOCK);
    let file = open(&server, "readahead=0,connections=1").unwrap();
    server.limit(WebLink {
        latency: Duration::from_millis(30),
        bytes_per_second: 0,
    });
    server.forget();
    // The first one takes the connection, the others wait for it.
    let found = block_on(async {
        let reads = (1..33).map(|block| read_async(&file, (block * BLOCK) as u64, 512));
        futures_util::future::join_all(reads).await
    });
    for (block, found) in (1..).zip(found) {
        assert!(found.unwrap() == bytes[block * BLOCK..block * BLOCK + 512]);
    }
    let requests = server.requests();
    assert!(requests.len() <= 3, "{} requests", requests.len());
    assert_eq!(server.sent(), 32 * BLOCK as u64, "each byte once");
}

#[test]
fn sequential_reads_are_fetched_ahead_and_scattered_ones_are_not() {
    let (server, bytes) = server_of(4 * MIB);
    let file = open(&server, "readahead=1M").unwrap();
    server.forget();
    for at in (0..2 * MIB).step_by(16 << 10) {
        assert!(read(&file, at as u64, 16 << 10).unwrap() == bytes[at..at + (16 << 10)]);
    }
    let requests = server.requests().len();
    assert!(
        requests < 16,
        "{requests} requests for {} blocks",
        2 * MIB / BLOCK
    );
    let far = open(&server, "readahead=1M").unwrap();
    server.forget();
    for at in [3 * MIB, MIB, 2 * MIB] {
        read(&far, at as u64, 512).unwrap();
    }
    assert_eq!(server.sent(), 3 * BLOCK as u64);
}

#[test]
fn memory_keeps_what_was_read_and_stays_within_its_limit() {
    let (server, _) = server_of(16 * BLOCK);
    let file = open(&server, "readahead=0,memory=256k").unwrap();
    for block in [1, 2, 3, 1, 2, 3, 1] {
        read(&file, (block * BLOCK) as u64, 100).unwrap();
    }
    assert_eq!(
        file.fetched_bytes(),
        4 * BLOCK as u64,
        "three, and the first at the opening"
    );
    for block in 4..8 {
        read(&file, (block * BLOCK) as u64, 100).unwrap();
    }
    server.forget();
    read(&file, BLOCK as u64, 100).unwrap();
    assert_eq!(server.sent(), BLOCK as u64, "it was forgotten");
}

#[test]
fn long_reads_pass_through_in_parts() {
    let (server, bytes) = server_of(20 * MIB);
    let file = open(&server, "memory=1M").unwrap();
    assert!(read(&file, 0, 20 * MIB).unwrap() == bytes);
}

#[test]
fn logins_and_cookies_reach_the_server() {
    let (server, _) = server_of(100);
    let url = server.url("/a").replace("http://", "http://me:secret@");
    let file = open_url(&url, "cookie=a=b").unwrap();
    assert_eq!(read(&file, 0, 4).unwrap().len(), 4);
    let headers = &server.requests()[0].headers;
    assert_eq!(headers["authorization"], "Basic bWU6c2VjcmV0");
    assert_eq!(headers["cookie"], "a=b");
    assert!(headers["user-agent"].starts_with("cowslip/"));
}

#[test]
fn redirects_are_followed_without_login_and_cookies() {
    let (server, _) = server_of(100);
    let (other, bytes) = server_of(100);
    let target = other.url("/a");
    server.judge(move |_| WebFault::Redirect(target.clone()));
    let url = server.url("/a").replace("http://", "http://me:secret@");
    let file = open_url(&url, "cookie=a=b").unwrap();
    assert!(read(&file, 10, 20).unwrap() == bytes[10..30]);
    assert!(server.requests()[0].headers.contains_key("authorization"));
    for request in other.requests() {
        assert!(
            !request.headers.contains_key("authorization"),
            "{request:?}"
        );
        assert!(!request.headers.contains_key("cookie"), "{request:?}");
    }
}

#[test]
fn queries_are_sent_and_objects_are_equal_by_their_versions() {
    let (server, _) = server_of(100);
    server.put("/b", WebObject::tagged(pattern(100, 1), "one"));
    let id = |url: &str| open_url(url, "").unwrap().content_id().unwrap();
    let one = id(&server.url("/a?Signature=x"));
    assert_eq!(server.requests()[0].target, "/a?Signature=x");
    assert_eq!(one, id(&server.url("/a?Signature=y")));
    assert_ne!(one, id(&server.url("/b")));
    server.put("/a", WebObject::tagged(pattern(100, 2), "two"));
    assert_ne!(one, id(&server.url("/a")));
}

#[test]
fn writes_are_refused() {
    let (server, _) = server_of(100);
    let file = open(&server, "").unwrap();
    let data = cowslip_queue::IoVec::from(cowslip_queue::Buf::copy_of(b"x"));
    let written = block_on(file.write(0, data, cowslip_block::file::Durability::Cached));
    assert_eq!(
        written.unwrap_err().kind(),
        std::io::ErrorKind::ReadOnlyFilesystem
    );
}
