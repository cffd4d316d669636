//! `cowslip daemon --metrics`: figures of exports, nodes and jobs over HTTP.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;

use crate::support::server::{EXPORTED_DISK, Server};
use crate::support::{cowslip, eventually, run, scratch};

mod exposition;

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
    let metrics = exposition::parse(body);
    for metric in &metrics {
        metric.check();
    }
    let samples = metrics.iter().flat_map(|metric| &metric.samples);
    let samples = samples.map(|sample| (sample.written.clone(), sample.value));
    samples.collect()
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
    command
        .current_dir(dir)
        .args(["daemon", "--control", "control", "--metrics", "./metrics"]);
    command.args(EXPORTED_DISK);
    let server = Server::start(&mut command, &dir.join("control"));
    // It answers once all that its command line asks for is there.
    ctl(dir, &["query-block-exports"]);
    server
}

#[test]
fn requests_are_counted_by_export_and_node() {
    let dir = &scratch();
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
    let of_writes = "{export=\"e\",kind=\"write\"}";
    let seconds = format!("cowslip_export_request_duration_seconds_sum{of_writes}");
    assert!(of(&after, &seconds) > 0.0);
    let count = format!("cowslip_export_request_duration_seconds_count{of_writes}");
    assert_eq!(of(&after, &count), of(&after, writes));
    let in_flight = "cowslip_export_requests_in_flight{export=\"e\"}";
    assert_eq!(of(&after, in_flight), 0.0);
    // The space that the write took.
    let new = "cowslip_node_written_clusters_total{node=\"a\",space=\"new\"}";
    assert_eq!(of(&after, new), 1.0);
    let grown = of(&after, "cowslip_node_file_grown_bytes{node=\"a\"}");
    assert!(grown >= 65536.0, "{grown}");
    assert_eq!(of(&after, "cowslip_node_latched{node=\"a\"}"), 0.0);
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

/// The images of a chain share one budget for their tables, however often figures are asked for.
#[test]
fn figures_leave_the_budget_of_a_chain_as_it_is() {
    let dir = &scratch();
    let _server = start(dir);
    let snapshot = [
        "blockdev-snapshot-sync",
        "node-name=a",
        "snapshot-file=o.qcow2",
        "snapshot-node-name=o",
    ];
    ctl(dir, &snapshot);
    let budget = |samples: BTreeMap<String, f64>| {
        let name = "cowslip_node_cache_budget_bytes";
        let of_nodes = samples.into_iter().filter(|(it, _)| it.starts_with(name));
        of_nodes.map(|(_, value)| value).sum::<f64>()
    };
    let first = budget(samples(dir));
    assert!(first <= f64::from(32 << 20), "{first}");
    assert_eq!(budget(samples(dir)), first);
}

#[test]
fn jobs_have_their_progress() {
    let dir = &scratch();
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
    ctl(dir, &["job-cancel", "id=m"]);
    let ended = "cowslip_jobs_ended_total{type=\"mirror\",outcome=\"cancelled\"}";
    eventually("the job has ended", || {
        self::samples(dir).get(ended) == Some(&1.0)
    });
}

#[test]
fn other_requests_are_refused_and_the_next_one_is_answered() {
    let dir = &scratch();
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

/// The lines that a daemon has reported, after it was asked to end.
fn reported(dir: &Path, words: &[&str]) -> (Option<i32>, Vec<String>) {
    let mut command = cowslip();
    command.current_dir(dir).arg("daemon").args(words);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let child = command.stderr(Stdio::piped()).spawn().unwrap();
    let said = child.wait_with_output().unwrap();
    let text = String::from_utf8(said.stderr).unwrap();
    (
        said.status.code(),
        text.lines().map(str::to_string).collect(),
    )
}

#[test]
fn a_log_of_json_has_an_object_a_line() {
    let dir = &scratch();
    let client = std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            eventually("the daemon listens", || {
                UnixStream::connect(dir.join("control")).is_ok()
            });
            ctl(dir, &["blockdev-add", "driver=null-co", "node-name=n"]);
            let refused = cowslip()
                .current_dir(dir)
                .args(["ctl", "control", "blockdev-del", "node-name=x\"\n"])
                .output();
            assert_eq!(refused.unwrap().status.code(), Some(1));
            ctl(dir, &["quit"]);
        });
        let words = ["--control", "control", "--verbose", "--log-format", "json"];
        let reported = reported(dir, &words);
        asking.join().unwrap();
        reported
    });
    assert_eq!(client.0, Some(0));
    let objects: Vec<serde_json::Value> = client
        .1
        .iter()
        .map(|line| serde_json::from_str(line).expect(line))
        .collect();
    for object in &objects {
        let time = object["time"].as_str().unwrap();
        assert!(time.len() == 27 && time.ends_with('Z'), "{time}");
        assert!(object["level"].is_string() && object["message"].is_string());
    }
    let commands: Vec<_> = objects
        .iter()
        .filter(|it| it["message"] == "command")
        .map(|it| {
            (
                it["data"]["name"].as_str().unwrap(),
                it["data"]["error"].is_string(),
            )
        })
        .collect();
    let expected = [
        ("blockdev-add", false),
        ("blockdev-del", true),
        ("quit", false),
    ];
    assert_eq!(commands, expected);
}

#[test]
fn a_daemon_that_cannot_begin_reports_that_in_the_form_of_its_log() {
    let dir = scratch();
    let words = ["--blockdev", "qcow2,node-name=n,file=zz"];
    let (code, lines) = reported(
        dir.path(),
        &[&words[..], &["--log-format", "json"]].concat(),
    );
    assert_eq!((code, lines.len()), (Some(1), 1), "{lines:?}");
    let object: serde_json::Value = serde_json::from_str(&lines[0]).unwrap();
    assert_eq!(object["level"], "error");
    let message = object["message"].as_str().unwrap().to_string();
    let (_, lines) = reported(dir.path(), &words);
    assert_eq!(lines, [format!("cowslip: {message}")]);
}
