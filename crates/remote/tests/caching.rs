//! The cache: shared, crash-safe, bounded, inspectable.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Barrier};

use cowslip_block::file::BlockFile;
use cowslip_remote::CacheDirectory;
use cowslip_testbed::web::{WebFault, WebObject, WebServer};

use crate::support::{MIB, block_on, open, open_url, pattern, read, server_of};

const BLOCK: usize = 64 << 10;

fn cached(dir: &Path) -> String {
    format!("cache-dir={},readahead=0", dir.display())
}

fn file_of(dir: &Path, extension: &str) -> std::path::PathBuf {
    let entries = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut found = entries.filter(|path| path.extension().is_some_and(|it| it == extension));
    found.next().unwrap()
}

#[test]
fn a_second_start_fetches_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (server, bytes) = server_of(MIB);
    let first = open(&server, &cached(dir.path())).unwrap();
    assert!(read(&first, 100, 5 * BLOCK).unwrap() == bytes[100..100 + 5 * BLOCK]);
    drop(first);
    server.forget();
    let second = open(&server, &cached(dir.path())).unwrap();
    assert!(read(&second, 100, 5 * BLOCK).unwrap() == bytes[100..100 + 5 * BLOCK]);
    assert!(read(&second, 200, BLOCK).unwrap() == bytes[200..200 + BLOCK]);
    assert_eq!(
        server.sent(),
        1,
        "the byte by which the version is found out"
    );
    // Reads at the end of the object are zeroes there, too.
    let len = bytes.len();
    let end = read(&second, len as u64 - 2, 4).unwrap();
    assert_eq!(end, [bytes[len - 2], bytes[len - 1], 0, 0]);
    let again = read(&second, len as u64 - 2, 4).unwrap();
    assert_eq!(again, end);
}

#[test]
fn two_hundred_clients_together_fetch_each_byte_once() {
    let dir = tempfile::tempdir().unwrap();
    let (server, bytes) = server_of(2 * MIB);
    let (server, bytes) = (Arc::new(server), Arc::new(bytes));
    let start = Arc::new(Barrier::new(200));
    let clients: Vec<_> = (0..200)
        .map(|client| {
            let (server, bytes, start) = (server.clone(), bytes.clone(), start.clone());
            let options = cached(dir.path());
            std::thread::spawn(move || {
                start.wait();
                let file = open(&server, &options).unwrap();
                // Each in an order of its own.
                for step in 0..8 {
                    let at = (client * 7 + step * 5) % 8 * (MIB / 4);
                    assert!(read(&file, at as u64, MIB / 4).unwrap() == bytes[at..at + MIB / 4]);
                }
            })
        })
        .collect();
    for client in clients {
        client.join().unwrap();
    }
    assert_eq!(
        server.sent(),
        2 * MIB as u64 + 200,
        "and each the byte of the opening"
    );
}

#[test]
fn damage_is_found_and_mended() {
    let dir = tempfile::tempdir().unwrap();
    let (server, bytes) = server_of(MIB);
    let file = open(&server, &cached(dir.path())).unwrap();
    assert!(read(&file, 0, MIB).unwrap() == bytes);
    drop(file);
    let data = std::fs::File::options()
        .write(true)
        .open(file_of(dir.path(), "data"))
        .unwrap();
    data.write_all_at(b"?", 3 * BLOCK as u64 + 77).unwrap();
    server.forget();
    let file = open(&server, &cached(dir.path())).unwrap();
    assert!(read(&file, 0, MIB).unwrap() == bytes);
    assert_eq!(server.sent(), 1 + BLOCK as u64, "the damaged block alone");

    data.write_all_at(b"?", 5 * BLOCK as u64).unwrap();
    let cache = CacheDirectory::open(dir.path(), 1 << 30).unwrap();
    let verified = cache.verify().unwrap();
    assert_eq!(
        (verified[0].blocks, &verified[0].damaged[..]),
        (16, &[5 * BLOCK as u64][..])
    );
    assert!(cache.verify().unwrap()[0].damaged.is_empty());
    // A damaged index is made again.
    block_on(file.close()).unwrap();
    drop(file);
    let index = std::fs::File::options()
        .write(true)
        .open(file_of(dir.path(), "index"))
        .unwrap();
    index.write_all_at(&[0; 64], 0).unwrap();
    let file = open(&server, &cached(dir.path())).unwrap();
    assert!(read(&file, 0, MIB).unwrap() == bytes);
}

#[test]
fn versions_are_kept_apart_and_a_change_reaches_no_file_of_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let (server, old) = server_of(MIB);
    let file = open(&server, &cached(dir.path())).unwrap();
    assert!(read(&file, 0, BLOCK).unwrap() == old[..BLOCK]);
    let new = pattern(MIB, 2);
    server.put("/a", WebObject::tagged(new.clone(), "two"));
    assert!(read(&file, BLOCK as u64, BLOCK).is_err());
    assert!(
        read(&file, 0, BLOCK).is_err(),
        "cached blocks of an object that is gone, too"
    );
    let other = open(&server, &cached(dir.path())).unwrap();
    assert!(read(&other, 0, 2 * BLOCK).unwrap() == new[..2 * BLOCK]);
    drop((file, other));
    server.put("/a", WebObject::tagged(old.clone(), "one"));
    let file = open(&server, &cached(dir.path())).unwrap();
    server.forget();
    assert!(read(&file, 0, 2 * BLOCK).unwrap() == old[..2 * BLOCK]);
    assert_eq!(
        server.sent(),
        BLOCK as u64,
        "the first block is there from before"
    );
}

#[test]
fn what_was_used_last_stays_when_space_is_short() {
    let dir = tempfile::tempdir().unwrap();
    let server = WebServer::start().unwrap();
    let options = format!("{},cache-limit=8M", cached(dir.path()));
    for name in ["/a", "/b", "/c"] {
        let bytes = pattern(3 * MIB, u64::from(name.as_bytes()[1]));
        server.put(name, WebObject::tagged(bytes.clone(), name));
        let file = open_url(&server.url(name), &options).unwrap();
        assert!(read(&file, 0, 3 * MIB).unwrap() == bytes);
        block_on(file.close()).unwrap();
        drop(file);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let cache = CacheDirectory::open(dir.path(), 8 << 20).unwrap();
    let names = |cache: &CacheDirectory| {
        let all = cache.list().unwrap().into_iter();
        all.map(|it| it.url.rsplit('/').next().unwrap().to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&cache), ["c", "b"], "the oldest made room");
    // One that is in use is not removed.
    let held = open_url(&server.url("/b"), &options).unwrap();
    let (removed, taken) = cache.prune(0).unwrap();
    assert_eq!(removed.len(), 1);
    assert!(taken >= 3 << 20);
    assert_eq!(names(&cache), ["b"]);
    assert!(cache.list().unwrap()[0].is_in_use);
    block_on(held.close()).unwrap();
    drop(held);
    assert_eq!(cache.prune(0).unwrap().1, 0);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn an_image_longer_than_the_cache_is_read_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let (server, bytes) = server_of(6 * MIB);
    let options = format!("{},cache-limit=2M", cached(dir.path()));
    let file = open(&server, &options).unwrap();
    for _ in 0..2 {
        for at in (0..6 * MIB).step_by(MIB) {
            assert!(read(&file, at as u64, MIB).unwrap() == bytes[at..at + MIB]);
        }
    }
    let taken = CacheDirectory::open(dir.path(), 0).unwrap().list().unwrap()[0].disk_bytes;
    assert!(taken < 3 << 20, "{taken}");
}

#[test]
fn an_object_without_a_version_is_not_cached() {
    let dir = tempfile::tempdir().unwrap();
    let server = WebServer::start().unwrap();
    let mut object = WebObject::tagged(pattern(MIB, 1), "");
    (object.e_tag, object.last_modified) = (None, None);
    server.put("/a", object);
    let file = open(&server, &cached(dir.path())).unwrap();
    assert!(read(&file, 0, BLOCK).unwrap() == pattern(MIB, 1)[..BLOCK]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn failed_fetches_leave_nothing_in_the_cache_and_hold_up_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let (server, bytes) = server_of(MIB);
    let options = format!("{},wait-timeout=1", cached(dir.path()));
    let file = open(&server, &options).unwrap();
    server.judge(
        |request| match request.range.as_ref().is_some_and(|it| it.start > 0) {
            true => WebFault::CutAfter(1000),
            false => WebFault::Nothing,
        },
    );
    assert!(read(&file, BLOCK as u64, 10).is_err());
    server.judge(|_| WebFault::Nothing);
    let other = open(&server, &options).unwrap();
    assert!(read(&other, 0, MIB).unwrap() == bytes);
    assert!(read(&file, 0, MIB).unwrap() == bytes);
    block_on(file.close()).unwrap();
}
