//! Measurement: a start that reads a part of an image behind a link of 5 ms and 200 Mbit/s.
//! `cargo nextest run -p cowslip-remote --run-ignored only --no-capture measure`

use std::fmt::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cowslip_block::file::BlockFile;
use cowslip_block::random::Random;
use cowslip_remote::Defaults;
use cowslip_testbed::web::{WebLink, WebServer};

use crate::support::{MIB, block_on, open, read_async, server_of};

const IMAGE: usize = 256 * MIB;
const READ: usize = 32 << 10;
/// Part of the image that is read: that of a start of Debian is about as large.
const PARTS: usize = 8;

/// Reads of a start: files from here and there, each in sequence, 32 KiB at a time.
fn reads() -> Vec<u64> {
    let mut random = Random(0xb007);
    let mut all = Vec::new();
    while all.len() * READ < IMAGE / PARTS {
        let len = (READ as u64) << random.below(5);
        let start = random.below(IMAGE as u64 - len) / 4096 * 4096;
        all.extend((start..start + len).step_by(READ));
    }
    all
}

/// The time of a start, in which the processor works between reads.
fn start(server: &WebServer, options: &str, bytes: &[u8]) -> (Duration, u64) {
    server.forget();
    let begun = Instant::now();
    let file = open(server, options).unwrap();
    block_on(async {
        for at in reads() {
            let found = read_async(&file, at, READ).await.unwrap();
            assert!(found == bytes[at as usize..at as usize + READ]);
            std::thread::sleep(Duration::from_micros(300));
        }
    });
    let taken = begun.elapsed();
    block_on(file.close()).unwrap();
    (taken, server.sent())
}

fn download(server: &WebServer) -> (Duration, u64) {
    server.forget();
    let begun = Instant::now();
    let file = open(server, "").unwrap();
    block_on(async {
        for at in (0..IMAGE).step_by(16 * MIB) {
            let parts = (0..4).map(|part| read_async(&file, (at + part * 4 * MIB) as u64, 4 * MIB));
            futures_util::future::try_join_all(parts).await.unwrap();
        }
    });
    (begun.elapsed(), server.sent())
}

/// The same reads by qemu-io, if QEMU has the driver.
fn by_qemu(server: &WebServer, name: &str) -> Option<(Duration, u64)> {
    server.forget();
    let begun = Instant::now();
    let mut commands = String::new();
    for at in reads() {
        writeln!(commands, "read {at} {READ}").unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("reads");
    std::fs::write(&script, commands).unwrap();
    let ran = Command::new("qemu-io")
        .args(["-r", "-f", "raw", name])
        .stdin(std::fs::File::open(&script).unwrap())
        .stdout(Stdio::null())
        .status();
    let is_done = ran.is_ok_and(|status| status.success());
    is_done.then(|| (begun.elapsed(), server.sent()))
}

/// The same through nbdkit's plugin curl.
fn by_nbdkit(server: &WebServer) -> Option<(Duration, u64)> {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let started = Command::new("nbdkit")
        .args(["-f", "-U"])
        .arg(&socket)
        .args(["curl", &server.url("/a")])
        .spawn();
    let mut child = started.ok()?;
    let begun = Instant::now();
    while !socket.exists() && begun.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let figures = by_qemu(server, &format!("nbd+unix:///?socket={}", socket.display()));
    child.kill().unwrap();
    child.wait().unwrap();
    figures
}

fn local(bytes: &[u8], dir: &Path) -> Duration {
    use std::os::unix::fs::FileExt;
    let path = dir.join("local");
    std::fs::write(&path, bytes).unwrap();
    let file = std::fs::File::open(path).unwrap();
    let begun = Instant::now();
    let mut target = vec![0; READ];
    for at in reads() {
        file.read_exact_at(&mut target, at).unwrap();
        assert!(target == bytes[at as usize..at as usize + READ]);
        std::thread::sleep(Duration::from_micros(300));
    }
    begun.elapsed()
}

#[test]
#[ignore = "a measurement of a minute"]
fn starts_behind_a_link() {
    let dir = tempfile::tempdir().unwrap();
    let shown = dir.path().display();
    let (server, bytes) = server_of(IMAGE);
    server.limit(WebLink {
        latency: Duration::from_millis(5),
        bytes_per_second: 25_000_000,
    });
    let (full, full_bytes) = download(&server);
    let line = |what: &str, (taken, sent): (Duration, u64)| {
        let (seconds, share) = (
            taken.as_secs_f64(),
            taken.as_secs_f64() / full.as_secs_f64(),
        );
        let mib = sent as f64 / MIB as f64;
        // Those of the run before, where nothing was sent.
        let requests = if sent == 0 {
            0
        } else {
            server.requests().len()
        };
        println!(
            "{what:<28} {seconds:7.2} s  {share:5.2} of the download  {mib:7.1} MiB  {requests:5} requests"
        );
    };
    line("download", (full, full_bytes));
    line("on demand, no cache", start(&server, "", &bytes));
    let one = format!("cache-dir={shown}/one");
    let recorded = Defaults {
        record: Some(dir.path().join("trace")),
        ..Defaults::default()
    };
    recorded.set();
    line("on demand, cache", start(&server, &one, &bytes));
    Defaults::default().set();
    line(
        "second start",
        start(&server, &format!("cache-dir={shown}/one"), &bytes),
    );
    let trace = format!("trace={shown}/trace,cache-dir={shown}/two");
    line("with a trace", start(&server, &trace, &bytes));
    line("local file", (local(&bytes, dir.path()), 0));
    match by_qemu(&server, &server.url("/a")) {
        Some(figures) => line("QEMU's driver http", figures),
        None => println!("QEMU's driver http: not installed"),
    }
    match by_nbdkit(&server) {
        Some(figures) => line("nbdkit curl", figures),
        None => println!("nbdkit curl: not installed"),
    }
}
