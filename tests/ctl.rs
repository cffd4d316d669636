//! `cowslip ctl`: the commands of a daemon as verbs, tables, waits for jobs, and exit codes.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::server::Server;
use crate::support::{cowslip, outcome, peers_are_installed, run, scratch, succeeds};

/// A directory with two disks of 64 MiB of which the first is full, and a daemon that has both.
struct Daemon {
    dir: crate::support::Scratch,
    server: Server,
}

impl Daemon {
    fn start(command: &mut Command, words: &[&str]) -> Daemon {
        let dir = scratch();
        for name in ["a", "b"] {
            let name = format!("{name}.qcow2");
            run(cowslip()
                .current_dir(dir.path())
                .args(["create", "-q", "-f", "qcow2", &name, "64M"]));
        }
        run(cowslip()
            .current_dir(dir.path())
            .args(["io", "-c", "write -P 5 0 64M", "a.qcow2"]));
        let socket = dir.path().join("control");
        let server = Server::start(command.current_dir(dir.path()).args(words), &socket);
        let daemon = Daemon { dir, server };
        for name in ["a", "b"] {
            let line = format!(
                "blockdev-add driver=qcow2 node-name={name} file.driver=file \
                 file.filename={name}.qcow2"
            );
            assert_eq!(daemon.output(&line), "");
        }
        daemon
    }

    fn ours() -> Daemon {
        Daemon::start(cowslip().arg("daemon"), &["--control", "control"])
    }

    fn command(&self, line: &str) -> Command {
        let mut command = cowslip();
        command.current_dir(self.dir.path());
        command.args(["ctl", "control"]);
        command.args(line.split_whitespace());
        command
    }

    fn outcome(&self, line: &str) -> Output {
        outcome(&mut self.command(line))
    }

    /// Standard output of a line that succeeds.
    fn output(&self, line: &str) -> String {
        run(&mut self.command(line))
    }

    /// The exit code of a line that fails, and what it says.
    fn complaint(&self, line: &str) -> (i32, String) {
        let output = self.outcome(line);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code().unwrap(), text)
    }
}

#[test]
fn results_are_tables_for_people_and_json_for_programs() {
    let daemon = Daemon::ours();
    let table = daemon.output("nodes");
    let lines: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(lines[0][..3], ["NODE", "DRIVER", "ACCESS"]);
    assert_eq!(lines[1][..5], ["b", "qcow2", "read-write", "64", "MiB"]);
    assert_eq!(lines[2][0], "a");
    let nodes: Value = serde_json::from_str(&daemon.output("nodes --json")).unwrap();
    assert_eq!(nodes[1]["node-name"], "a");
    assert_eq!(nodes[1]["image"]["virtual-size"], 64 << 20);
    assert_eq!(daemon.output("jobs").lines().count(), 1);
    assert!(daemon.output("stats").starts_with("NODE  READS"));
    assert_eq!(
        daemon.output("block_resize node-name=b size=32M --shrink"),
        ""
    );
    assert!(daemon.output("nodes").contains("32 MiB"));
}

#[test]
fn a_disk_becomes_smaller_only_where_that_is_allowed() {
    let daemon = Daemon::ours();
    let size = || {
        let nodes: Value = serde_json::from_str(&daemon.output("nodes --json")).unwrap();
        nodes[1]["image"]["virtual-size"].as_u64().unwrap()
    };
    for size in ["5M", "0", "67108863"] {
        let (code, text) = daemon.complaint(&format!("block_resize node-name=a size={size}"));
        assert_eq!(code, 1, "{text}");
        assert!(text.contains("Use the --shrink option"), "{text}");
    }
    for (words, expected) in [
        (
            "block_resize node-name=a size=+5M",
            "'size' expects the new value",
        ),
        (
            "block_resize node-name=a size=+5M --shrink",
            "rather than '+5M'",
        ),
        (
            "block_resize node-name=a size=+80000000",
            "rather than '+80000000'",
        ),
        ("block_resize node-name=a size=10GB", "k, M, G, T, P or E"),
        (
            "block_resize --shrink node-name=a size=ten",
            "expects integer",
        ),
        (
            "nbd-server-start max-connections=+3 addr.type=unix addr.path=n",
            "'max-connections' expects the new value",
        ),
        ("nodes --shrink", "does not take it"),
    ] {
        let (code, text) = daemon.complaint(words);
        assert_eq!(code, 1, "{words}: {text}");
        assert!(text.contains(expected), "{words}: {text}");
    }
    let blank = ["ctl", "control", "block_resize", "node-name=a", "size= 80M"];
    let output = outcome(cowslip().current_dir(daemon.dir.path()).args(blank));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("rather than ' 80M'"), "{text}");
    assert_eq!(size(), 64 << 20);
    daemon.output("block_resize node-name=a size=64M");
    daemon.output("block_resize node-name=a size=80M");
    assert_eq!(size(), 80 << 20);
    daemon.output("block_resize --shrink node-name=a size=0x100000");
    assert_eq!(size(), 1 << 20);
}

#[test]
fn exports_have_the_names_by_which_clients_find_them() {
    let daemon = Daemon::ours();
    daemon.output("nbd-server-start addr.type=unix addr.data.path=nbd");
    daemon.output("block-export-add type=nbd id=e node-name=a name=disk");
    daemon.output(
        "block-export-add type=vhost-user-blk id=v node-name=b addr.type=unix addr.path=guest",
    );
    let checkpoint = "checkpoint name=c disks.0.node=a disks.0.export-name=view";
    daemon.output(checkpoint);
    let rows = |table: String| {
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        table.lines().map(words).collect::<Vec<_>>()
    };
    let expected = [
        "EXPORT TYPE NODE STATE NAME",
        "v vhost-user-blk b offered guest",
        "e nbd a offered disk",
        "c nbd a checkpoint view",
    ];
    assert_eq!(rows(daemon.output("exports")), expected);
    daemon.output("checkpoint-end name=c");
    assert_eq!(rows(daemon.output("exports")), expected[..3]);
    let exports: Value = serde_json::from_str(&daemon.output("exports --json")).unwrap();
    assert_eq!(exports.as_array().unwrap().len(), 2);
}

#[test]
fn a_compaction_that_is_waited_for_says_what_came_back() {
    let daemon = Daemon::ours();
    let dir = daemon.dir.path();
    daemon.output("blockdev-del node-name=a");
    run(cowslip()
        .current_dir(dir)
        .args(["io", "-d", "unmap", "-c", "discard 0 60M", "a.qcow2"]));
    daemon.output("blockdev-add driver=qcow2 node-name=a file.driver=file file.filename=a.qcow2");
    let line = daemon.output("compact device=a --wait");
    assert!(
        line.starts_with("The file had 64") && line.contains(" MiB moved"),
        "{line}"
    );
    let ended: Value =
        serde_json::from_str(&daemon.output("compact device=a --wait --json")).unwrap();
    let figures = &ended[0]["compacted"];
    assert_eq!(
        figures["file-length"], figures["file-length-before"],
        "{ended}"
    );
}

#[test]
fn each_verb_has_help() {
    let help = run(cowslip().args(["ctl", "nowhere", "compact", "--help"]));
    assert!(help.starts_with("Usage: cowslip ctl [OPTIONS] SOCKET compact NAME=VALUE...\n"));
    assert!(
        help.contains("\n  device=TEXT  ") && help.contains("default: off"),
        "{help}"
    );
    let general = run(cowslip().args(["ctl", "--help"]));
    assert!(general.contains("VERB --help"), "{general}");
}

#[test]
fn words_and_json_are_the_same_arguments() {
    let daemon = Daemon::ours();
    let json = r#"{"node":"a","name":"x","granularity":4096}"#;
    daemon.output(&format!("block-dirty-bitmap-add {json}"));
    daemon.output("block-dirty-bitmap-add node=a name=y granularity=4096");
    daemon.output(r#"block-dirty-bitmap-merge node=a target=x bitmaps:=["y"]"#);
    let nodes: Value = serde_json::from_str(&daemon.output("nodes --json")).unwrap();
    let bitmaps = nodes[1]["dirty-bitmaps"].as_array().unwrap();
    let names: Vec<&Value> = bitmaps.iter().map(|it| &it["name"]).collect();
    assert_eq!(names, ["y", "x"]);
    assert!(bitmaps.iter().all(|it| it["granularity"] == 4096));
}

#[test]
fn images_are_closed_when_quit_has_ended() {
    let daemon = Daemon::ours();
    daemon.output("nbd-server-start addr.type=unix addr.data.path=nbd");
    daemon.output("block-export-add type=nbd id=e node-name=b writable=on");
    let uri = format!("nbd+unix:///b?socket={}/nbd", daemon.dir.path().display());
    // Tables of many clusters are in memory, and written when the image is closed.
    let mut words = vec!["io".to_string(), "-f".into(), "raw".into()];
    for at in 0..256 {
        words.extend(["-c".to_string(), format!("write -q -P 7 {}k 4k", at * 256)]);
    }
    run(cowslip().args(words).arg(uri));
    assert_eq!(daemon.output("quit"), "");
    // What would still be locked, or not clean, were it not closed.
    let check = ["check", "-q", "-r", "all", "b.qcow2"];
    run(cowslip().current_dir(daemon.dir.path()).args(check));
    assert!(!daemon.dir.path().join("nbd").exists());
}

#[test]
fn mistakes_and_refusals_have_exit_codes() {
    let daemon = Daemon::ours();
    let (code, text) = daemon.complaint("blockdev-del node-name=zz");
    assert_eq!(code, 1);
    assert_eq!(text, "cowslip: Failed to find node with node-name='zz'\n");
    // Without a daemon, the form of the line is checked all the same.
    let nowhere = |line: &str| {
        let output = outcome(
            cowslip()
                .current_dir(daemon.dir.path())
                .args(["ctl", "nowhere"])
                .args(line.split_whitespace()),
        );
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code().unwrap(), text)
    };
    for (line, expected) in [
        ("block-commit", "Parameter 'device' is missing"),
        ("job-cancel id", "Expected '=' after parameter 'id'"),
        ("job-cancel id=j x=y", "Parameter 'x' is unexpected"),
        ("frobnicate", "There is no command 'frobnicate'"),
        ("events BLOCK_FROBNICATED", "There is no event"),
        (
            "nodes --wait",
            "'query-named-block-nodes' has no job to wait for",
        ),
    ] {
        let (code, text) = nowhere(line);
        assert_eq!(code, 1, "{line}: {text}");
        assert!(text.contains(expected), "{line}: {text}");
    }
    let (code, text) = nowhere("jobs");
    assert_eq!(code, 2);
    assert_eq!(
        text,
        "cowslip: Could not connect to 'nowhere': No such file or directory\n"
    );
}

/// Waits for jobs of all kinds, of a daemon with `a` and `b`.
fn waits(daemon: &Daemon) {
    // A job that ends by itself.
    let backup = "blockdev-backup device=a target=b sync=full job-id=k --wait";
    assert_eq!(daemon.output(backup), "");
    assert_eq!(daemon.output("jobs").lines().count(), 1);
    // One that follows its disk until it is completed.
    let mirror = "blockdev-mirror device=a target=b sync=full job-id=m";
    assert_eq!(
        daemon.output(&format!("{mirror} --wait")),
        "Job 'm' is ready\n"
    );
    assert!(daemon.output("jobs").contains("ready"));
    assert_eq!(daemon.output("job-complete id=m --wait"), "");
    let ended = daemon.output(&format!("{mirror} --complete --json"));
    let ended: Value = serde_json::from_str(&ended).unwrap();
    assert_eq!(ended[0]["end"], "completed");
    // One that waits to be finalised.
    let pending = format!("{backup} auto-finalize=false");
    assert_eq!(daemon.output(&pending), "Job 'k' is pending\n");
    assert_eq!(daemon.output("job-finalize id=k --wait"), "");
    // One that fails, and is gone.
    let (code, text) = daemon.complaint(
        "blockdev-create job-id=c options.driver=file options.filename=/nowhere/x \
         options.size=1M --wait",
    );
    assert_eq!(code, 3, "{text}");
    assert!(text.contains("Job 'c': "), "{text}");
    assert!(text.contains("/nowhere/x"), "{text}");
    assert_eq!(daemon.output("jobs").lines().count(), 1);
    // The copies are there; QEMU writes its tables when the node is closed.
    assert_eq!(daemon.output("blockdev-del node-name=b"), "");
    let compared = succeeds(daemon.dir.path(), "compare -U a.qcow2 b.qcow2");
    assert!(compared.contains("identical"), "{compared}");
}

#[test]
fn the_end_of_a_job_is_waited_for() {
    waits(&Daemon::ours());
}

#[test]
fn jobs_of_qemus_daemon_are_waited_for() {
    if !peers_are_installed(&["qemu-storage-daemon"]) {
        return;
    }
    let chardev = "socket,path=control,server=on,wait=off,id=c";
    let words = ["--chardev", chardev, "--monitor", "chardev=c"];
    waits(&Daemon::start(
        &mut Command::new("qemu-storage-daemon"),
        &words,
    ));
}

/// A line that waits for a slow job, until it has begun.
fn slow(daemon: &Daemon, more: &str) -> std::process::Child {
    let line = format!(
        "blockdev-backup device=a target=b sync=full job-id=k speed=1048576 --wait --watch {more}"
    );
    let mut command = daemon.command(&line);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap());
    let mut line = String::new();
    while !line.contains("status=running") {
        line.clear();
        assert_ne!(lines.read_line(&mut line).unwrap(), 0);
    }
    child
}

fn interrupt(child: &mut std::process::Child) -> (Option<i32>, String) {
    use std::os::unix::process::ExitStatusExt;
    let pid = Pid::from_child(child);
    kill_process(pid, Signal::INT).unwrap();
    let status = child.wait().unwrap();
    let mut text = String::new();
    let errors = child.stderr.as_mut().unwrap();
    errors.read_to_string(&mut text).unwrap();
    (status.signal(), text)
}

#[test]
fn an_interruption_cancels_the_job_unless_it_is_to_go_on() {
    let daemon = Daemon::ours();
    let (signal, text) = interrupt(&mut slow(&daemon, ""));
    assert_eq!(signal, Some(Signal::INT.as_raw()), "{text}");
    assert!(
        text.contains("Cancelled: job 'k' has ended without its effect"),
        "{text}"
    );
    assert_eq!(daemon.output("jobs").lines().count(), 1);
    let (signal, text) = interrupt(&mut slow(&daemon, "--no-cancel"));
    assert_eq!(signal, Some(Signal::INT.as_raw()));
    assert_eq!(text, "");
    assert!(daemon.output("jobs").contains("running"));
    // Another client cancels it: that is a failure of the line that waits.
    let mut waiting = daemon
        .command("block-job-set-speed device=k speed=2M --wait")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    while !daemon.output("query-block-jobs").contains("2 MiB") {}
    daemon.output("job-cancel id=k");
    assert_eq!(waiting.wait().unwrap().code(), Some(3));
}

#[test]
fn events_are_lines_until_the_daemon_has_gone() {
    let mut daemon = Daemon::ours();
    let mut follower = daemon
        .command("events JOB_STATUS_CHANGE --json")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap());
    let mut line = String::new();
    // It may not listen yet.
    let begun = std::thread::spawn(move || {
        lines.read_line(&mut line).unwrap();
        (line, lines)
    });
    while !begun.is_finished() {
        daemon.output("blockdev-backup device=a target=b sync=full job-id=k --wait");
    }
    let (line, _lines) = begun.join().unwrap();
    let event: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(event["event"], "JOB_STATUS_CHANGE");
    assert_eq!(event["data"]["id"], "k");
    daemon.output("quit");
    assert_eq!(follower.wait().unwrap().code(), Some(2));
    daemon.server.wait();
    assert!(!daemon.dir.path().join("control").exists());
}
