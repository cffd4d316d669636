//! `cowslip daemon --metrics`: figures of exports, nodes and jobs over HTTP.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::support::server::Server;
use crate::support::{cowslip, run, scratch};

/// The answer to some bytes.
fn answer(dir: &Path, request: &[u8]) -> String {
    let mut stream = UnixStream::connect(dir.join("metrics")).unwrap();
    // One that it has no patience for may be cut off before its end.
    let _cut = stream.write_all(request);
    let mut text = String::new();
    let _cut = stream.read_to_string(&mut text);
    text
}

/// The samples, by name and labels.
fn samples(dir: &Path) -> BTreeMap<String, f64> {
    let answer = answer(dir, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(
        head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())),
        "{head}"
    );
    let is_sample = |line: &&str| !line.starts_with('#');
    let sample = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap();
        (name.to_string(), value.parse().unwrap())
    };
    body.lines().filter(is_sample).map(sample).collect()
}

fn ctl(dir: &Path, words: &[&str]) {
    run(cowslip()
        .current_dir(dir)
        .args(["ctl", "control"])
        .args(words));
}

/// A daemon with the disk `a`, which is exported as `e`.
fn start(dir: &Path) -> Server {
    let words = ["create", "-q", "-f", "qcow2", "a.qcow2", "8M"];
    run(cowslip().current_dir(dir).args(words));
    let mut command = cowslip();
    command.current_dir(dir).args([
        "daemon",
        "--control",
        "control",
        "--metrics",
        "./metrics",
        "--nbd-server",
        "addr.type=unix,addr.path=nbd",
        "--blockdev",
        "qcow2,node-name=a,file.driver=file,file.filename=a.qcow2",
        "--export",
        "nbd,id=e,node-name=a,writable=on",
    ]);
    let server = Server::start(&mut command, &dir.join("control"));
    // It answers once all that its command line asks for is there.
    ctl(dir, &["query-block-exports"]);
    server
}

#[test]
fn requests_are_counted_by_export_and_node() {
    let dir = scratch();
    let dir = dir.path();
    let _server = start(dir);
    let before = samples(dir);
    let of = |samples: &BTreeMap<String, f64>, name: &str| samples[name];
    let writes = "cowslip_export_requests_total{export=\"e\",kind=\"write\"}";
    let bytes = "cowslip_export_bytes_total{export=\"e\",kind=\"write\"}";
    assert_eq!(of(&before, writes), 0.0);
    assert_eq!(
        of(&before, "cowslip_node_size_bytes{node=\"a\"}"),
        8_388_608.0
    );
    let write = |command: &str| {
        let uri = "nbd+unix:///a?socket=nbd";
        let words = ["io", "-f", "raw", "-c", command, uri];
        run(cowslip().current_dir(dir).args(words));
    };
    write("write -P 7 0 64k");
    let after = samples(dir);
    assert_eq!(of(&after, bytes), 65536.0);
    assert!(of(&after, writes) >= 1.0);
    let seconds = "cowslip_export_request_seconds_total{export=\"e\",kind=\"write\"}";
    assert!(of(&after, seconds) > 0.0);
    let node_bytes =
        |node: &str| format!("cowslip_node_bytes_total{{node=\"{node}\",kind=\"write\"}}");
    assert_eq!(of(&after, &node_bytes("a")), 65536.0);
    // The export goes on with the overlay, and so do its counters.
    let snapshot = [
        "node-name=a",
        "snapshot-file=o.qcow2",
        "snapshot-node-name=o",
    ];
    ctl(dir, &[&["blockdev-snapshot-sync"], &snapshot[..]].concat());
    write("write -P 8 0 64k");
    let moved = samples(dir);
    assert_eq!(of(&moved, bytes), 131_072.0);
    assert_eq!(of(&moved, &node_bytes("a")), 65536.0);
    assert_eq!(of(&moved, &node_bytes("o")), 65536.0);
    let info = "cowslip_export_info{export=\"e\",type=\"nbd\",node=\"o\",access=\"read-write\"}";
    assert_eq!(of(&moved, info), 1.0);
    assert_eq!(of(&moved, "cowslip_node_backing_depth{node=\"o\"}"), 1.0);
}

#[test]
fn jobs_have_their_progress() {
    let dir = scratch();
    let dir = dir.path();
    let _server = start(dir);
    let words = [
        "io",
        "-f",
        "raw",
        "-c",
        "write -P 7 0 1M",
        "nbd+unix:///a?socket=nbd",
    ];
    run(cowslip().current_dir(dir).args(words));
    let words = ["create", "-q", "-f", "qcow2", "b.qcow2", "8M"];
    run(cowslip().current_dir(dir).args(words));
    let file = ["file.driver=file", "file.filename=b.qcow2"];
    let node = ["blockdev-add", "driver=qcow2", "node-name=b"];
    ctl(dir, &[&node[..], &file].concat());
    let mirror = [
        "blockdev-mirror",
        "device=a",
        "target=b",
        "sync=full",
        "job-id=m",
    ];
    ctl(dir, &[&mirror[..], &["--wait"]].concat());
    let samples = samples(dir);
    let info = "cowslip_job_info{job=\"m\",type=\"mirror\",status=\"ready\"}";
    assert_eq!(samples[info], 1.0);
    let done = samples["cowslip_job_done_bytes{job=\"m\"}"];
    assert!(done >= 1_048_576.0, "{done}");
    assert_eq!(done, samples["cowslip_job_total_bytes{job=\"m\"}"]);
}

#[test]
fn other_requests_are_refused_and_the_next_one_is_answered() {
    let dir = scratch();
    let dir = dir.path();
    let _server = start(dir);
    for (request, status) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
        (b"quit\n\n", "400"),
        (b"\xff\xfe\r\n\r\n", "400"),
    ] {
        let answer = answer(dir, request);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{answer}"
        );
    }
    answer(dir, &[b'x'; 64 << 10]);
    // More that say nothing than are served at a time: each is given up after a while.
    let silent: Vec<UnixStream> = (0..20)
        .map(|_| UnixStream::connect(dir.join("metrics")).unwrap())
        .collect();
    ctl(dir, &["jobs"]);
    drop(silent);
    assert!(samples(dir).contains_key("cowslip_control_clients"));
}
