//! `cowslip advise`: images of known make, of which the advice is known; the commands that it
//! names are run, and lead where it says; traces and statistics of real servers; bad input.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::path::Path;
use std::process::Output;

use cowslip_trace::{Kind, Reader};
use serde_json::Value;

use crate::support::mounted::Mounted;
use crate::support::server::Server;
use crate::support::{cowslip, eventually, outcome, run, scratch, succeeds};

fn ours(dir: &Path, line: &str) -> Output {
    outcome(cowslip().current_dir(dir).args(line.split_whitespace()))
}

/// Runs a command line of the advice in a shell whose `cowslip` is ours.
fn obey(dir: &Path, line: &str) {
    let ours = cowslip();
    let program = ours.get_program().to_string_lossy();
    let line = line.replacen("cowslip ", &format!("'{program}' "), 1);
    run(std::process::Command::new("sh")
        .current_dir(dir)
        .args(["-c", &line]));
}

fn advice(dir: &Path, words: &str) -> Value {
    let text = succeeds(dir, &format!("advise --json {words}"));
    serde_json::from_str(&text).unwrap()
}

fn on<'a>(advice: &'a Value, subject: &str) -> &'a Value {
    let all = advice["advice"].as_array().unwrap();
    let found = all.iter().find(|answer| answer["subject"] == subject);
    found.unwrap_or_else(|| panic!("no {subject} in {advice:#}"))
}

fn commands(answer: &Value) -> Vec<String> {
    assert_eq!(answer["verdict"], "change", "{answer:#}");
    let lines = answer["commands"].as_array().unwrap().iter();
    lines
        .map(|line| line.as_str().unwrap().to_string())
        .collect()
}

fn io(dir: &Path, image: &str, lines: &[&str]) {
    let mut command = cowslip();
    command.current_dir(dir).args(["io", "-f", "qcow2"]);
    for line in lines {
        command.args(["-c", line]);
    }
    run(command.arg(image));
}

#[test]
fn an_overlay_is_made_afresh_with_subclusters_and_holds_the_same() {
    let dir = &scratch();
    succeeds(dir, "create -q -f qcow2 golden.qcow2 64M");
    io(dir, "golden.qcow2", &["write -P 7 0 8M"]);
    succeeds(dir, "create -q -f qcow2 -b golden.qcow2 -F qcow2 vm.qcow2");
    io(dir, "vm.qcow2", &["write -P 9 1M 64k"]);
    succeeds(dir, "convert -O raw vm.qcow2 before.raw");
    let before = advice(dir, "--workload random-writes vm.qcow2");
    assert_eq!(before["verdict"], "change");
    let facts = &before["facts"];
    assert_eq!(facts["depth"], 2);
    assert_eq!(facts["data-bytes"], 65_536);
    assert_eq!(facts["disk-bytes"], 64 << 20);
    assert_eq!(facts["cluster-bytes"], 65_536);
    if facts["file-system"] == "btrfs" {
        return;
    }
    for line in commands(on(&before, "clusters")) {
        obey(dir, &line);
    }
    let after = advice(dir, "--workload random-writes vm.qcow2");
    assert_eq!(after["facts"]["subclusters"], true);
    assert_eq!(after["facts"]["depth"], 2);
    assert_eq!(on(&after, "clusters")["verdict"], "leave it");
    assert_eq!(after["verdict"], "leave it", "{after:#}");
    let same = ours(dir, "compare -f raw -F qcow2 before.raw vm.qcow2");
    assert!(same.status.success(), "{same:?}");
    succeeds(dir, "check -q vm.qcow2");
    let text = succeeds(dir, "advise --workload random-writes vm.qcow2");
    assert!(text.contains("\nLeave it.\n"), "{text}");
}

#[test]
fn a_chain_is_shortened_for_qemu_and_holds_the_same() {
    let dir = &scratch();
    succeeds(dir, "create -q -f qcow2 0.qcow2 16M");
    for at in 1..20 {
        let below = at - 1;
        succeeds(
            dir,
            &format!("create -q -f qcow2 -b {below}.qcow2 -F qcow2 {at}.qcow2"),
        );
        let write = format!("write -P {at} {}k 64k", at * 64);
        io(dir, &format!("{at}.qcow2"), &[&write]);
    }
    succeeds(dir, "convert -O raw 19.qcow2 before.raw");
    let ours = advice(dir, "--workload read-mostly 19.qcow2");
    assert_eq!(on(&ours, "chain")["verdict"], "leave it");
    let theirs = advice(dir, "--workload read-mostly --engine qemu 19.qcow2");
    for line in commands(on(&theirs, "chain")) {
        obey(dir, &line);
    }
    let after = advice(dir, "--workload read-mostly --engine qemu 19.qcow2");
    assert_eq!(after["facts"]["depth"], 2);
    let line = "compare -f raw -F qcow2 before.raw 19.qcow2";
    succeeds(dir, line);
}

#[test]
fn a_sparse_policy_and_an_allocation_do_what_they_say() {
    let dir = &scratch();
    succeeds(dir, "create -q -f qcow2 -o cluster_size=2M a.qcow2 64M");
    io(dir, "a.qcow2", &["write 0 32M", "discard 1M 64k"]);
    let answer = advice(dir, "--workload discards a.qcow2");
    for line in commands(on(&answer, "policy")) {
        obey(dir, &line);
    }
    let after = advice(dir, "--workload discards a.qcow2");
    assert_eq!(after["facts"]["alloc-policy"], "sparse");
    assert_eq!(on(&after, "policy")["verdict"], "leave it");
    std::fs::File::create(dir.join("b.raw"))
        .unwrap()
        .set_len(8 << 20)
        .unwrap();
    let answer = advice(dir, "-f raw --workload fill b.raw");
    for line in commands(on(&answer, "preallocation")) {
        obey(dir, &line);
    }
    let after = advice(dir, "-f raw --workload fill b.raw");
    let held = after["facts"]["host-bytes"].as_u64().unwrap();
    assert!(held >= 8 << 20, "{held}");
    assert_eq!(after["verdict"], "leave it", "{after:#}");
}

#[test]
fn space_that_nothing_uses_comes_back_by_the_command_that_is_named() {
    let dir = &scratch();
    succeeds(dir, "create -q -f qcow2 a.qcow2 256M");
    io(dir, "a.qcow2", &["write -P 3 0 160M"]);
    succeeds(dir, "snapshot -c s a.qcow2");
    let held = advice(dir, "--workload read-mostly a.qcow2");
    assert_eq!(held["facts"]["snapshots"], 1);
    assert_eq!(on(&held, "snapshots")["verdict"], "leave it");
    io(dir, "a.qcow2", &["write -P 4 0 100M"]);
    let held = advice(dir, "--workload read-mostly a.qcow2");
    let other = held["facts"]["other-bytes"].as_u64().unwrap();
    // The snapshot's clusters, and what is allocated ahead.
    assert!((99 << 20..240 << 20).contains(&other), "{other}");
    succeeds(dir, "convert -O raw a.qcow2 before.raw");
    // Discarding without punching leaves clusters that nothing refers to.
    succeeds(dir, "snapshot -d s a.qcow2");
    let answer = advice(dir, "--workload read-mostly a.qcow2");
    let dead = answer["facts"]["other-bytes"].as_u64().unwrap();
    let space = on(&answer, "space");
    if dead > 64 << 20 {
        for line in commands(space) {
            obey(dir, &line);
        }
    } else {
        assert_eq!(space["verdict"], "leave it");
    }
    let after = advice(dir, "--workload read-mostly a.qcow2");
    assert_eq!(on(&after, "space")["verdict"], "leave it", "{after:#}");
    succeeds(dir, "compare -f raw -F qcow2 before.raw a.qcow2");
}

#[test]
fn a_fragmented_image_on_xfs_is_found_and_put_in_order() {
    let Some(mounted) = Mounted::of_size(&["mkfs.xfs", "-q"], 600 << 20) else {
        return;
    };
    let dir = mounted.at.as_path();
    succeeds(
        dir,
        "create -q -f qcow2 -o alloc_policy=sparse,cluster_size=4k a.qcow2 128M",
    );
    // In an order that is not the guest's: a step that is coprime to the disk.
    let line = "bench -w --pattern 7 -c 24000 -d 32 -s 4096 -S 53252096 -t none a.qcow2";
    succeeds(dir, line);
    let answer = advice(dir, "--workload sequential a.qcow2");
    let facts = &answer["facts"];
    assert_eq!(facts["file-system"], "xfs");
    assert_eq!(
        facts["rotational"], false,
        "a loop device has no moving parts"
    );
    let runs = facts["read-runs"].as_u64().unwrap();
    assert!(runs > 10_000, "{runs}");
    for line in commands(on(&answer, "order")) {
        obey(dir, &line);
    }
    // What is not written back has no place yet.
    run(std::process::Command::new("sync").arg(dir.join("a.qcow2")));
    let after = advice(dir, "--workload sequential a.qcow2");
    let then = after["facts"]["read-runs"].as_u64().unwrap();
    assert!(then < runs / 10, "{then} of {runs}");
    assert_eq!(on(&after, "order")["verdict"], "leave it");
}

#[test]
fn a_compressed_image_and_a_raw_file_are_left() {
    let dir = &scratch();
    succeeds(dir, "create -q -f qcow2 a.qcow2 64M");
    io(dir, "a.qcow2", &["write -P 3 0 32M"]);
    succeeds(dir, "convert -c -O qcow2 a.qcow2 c.qcow2");
    let answer = advice(dir, "--workload read-mostly c.qcow2");
    assert_eq!(answer["facts"]["compressed-bytes"], 32 << 20);
    assert_eq!(on(&answer, "compression")["verdict"], "leave it");
    assert_eq!(answer["verdict"], "leave it", "{answer:#}");
    let answer = advice(dir, "--workload random-writes c.qcow2");
    for line in commands(on(&answer, "compression")) {
        obey(dir, &line);
    }
    succeeds(dir, "compare c.qcow2 c.disk.qcow2");
    std::fs::write(dir.join("disk.raw"), vec![5; 8 << 20]).unwrap();
    let answer = advice(dir, "-f raw --workload mixed disk.raw");
    assert_eq!(answer["verdict"], "leave it", "{answer:#}");
    assert_eq!(on(&answer, "format")["text"], "it should stay raw");
}

#[test]
fn a_directory_is_looked_at_image_by_image() {
    let dir = &scratch();
    succeeds(dir, "create -q -f qcow2 golden.qcow2 16M");
    for name in ["a", "b", "c"] {
        let line = format!("create -q -f qcow2 -b golden.qcow2 -F qcow2 {name}.qcow2");
        succeeds(dir, &line);
    }
    std::fs::write(dir.join("notes.txt"), "no image").unwrap();
    std::fs::write(dir.join("disk.raw"), vec![1; 1 << 20]).unwrap();
    std::fs::create_dir(dir.join("sub")).unwrap();
    let answer = advice(dir, ".");
    let images = answer["images"].as_array().unwrap();
    let names: Vec<&str> = images
        .iter()
        .map(|it| it["image"].as_str().unwrap().trim_start_matches("./"))
        .collect();
    let expected = ["a.qcow2", "b.qcow2", "c.qcow2", "disk.raw", "golden.qcow2"];
    assert_eq!(names, expected);
    assert_eq!(images[0]["facts"]["siblings"], 2);
    assert_eq!(images[4]["facts"]["siblings"], 0);
    let text = succeeds(dir, "advise .");
    assert_eq!(text.matches("\nworkload: ").count(), 5, "{text}");
    // One that cannot be read does not hide the others.
    std::fs::write(dir.join("x.qcow2"), b"QFI\xfb and nothing more").unwrap();
    let output = ours(dir, "advise --json .");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("x.qcow2"));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["images"].as_array().unwrap().len(), 5);
    let output = ours(dir, "advise sub");
    assert!(String::from_utf8_lossy(&output.stderr).contains("no image in it"));
}

#[test]
fn a_trace_of_a_server_is_a_workload() {
    let dir = &scratch();
    succeeds(dir, "create -q -f qcow2 golden.qcow2 64M");
    io(dir, "golden.qcow2", &["write -P 7 0 32M"]);
    succeeds(dir, "create -q -f qcow2 -b golden.qcow2 -F qcow2 vm.qcow2");
    let socket = dir.join("socket");
    let mut command = cowslip();
    command.current_dir(dir).args(["serve", "--record", "t"]);
    command.arg("--socket").arg(&socket).arg("vm.qcow2");
    let server = Server::start(&mut command, &socket);
    let mut command = cowslip();
    command.args(["io", "-f", "raw"]);
    for at in 0..40 {
        let line = format!("write -P 9 {}k 4k", at * 37 % 40 * 256);
        command.args(["-c", &line]);
    }
    run(command.arg(server.uri()));
    eventually("the trace is written", || {
        let file = std::fs::File::open(dir.join("t")).unwrap();
        let requests = Reader::new(file).unwrap().map(Result::unwrap);
        requests.filter(|it| it.kind == Kind::Write).count() == 40
    });
    drop(server);
    let before = advice(dir, "--trace t vm.qcow2");
    let workload = &before["workload"];
    assert_eq!(workload["writes"]["requests"], 40);
    assert_eq!(workload["writes"]["bytes"], 40 * 4096);
    assert_eq!(workload["writes"]["in-order"], 0.0);
    assert_eq!(on(&before, "clusters")["verdict"], "change", "{before:#}");
}

#[test]
fn the_model_is_shown_beside_its_measurements() {
    let dir = scratch();
    let text = succeeds(dir.path(), "advise --check");
    assert!(
        text.contains("first-writes") && text.contains("<- wrong"),
        "{text}"
    );
    let json: Value = serde_json::from_str(&succeeds(dir.path(), "advise --check --json")).unwrap();
    assert!(json["measurements"].as_array().unwrap().len() > 100);
    assert!(json["typical-factor"].as_f64().unwrap() < 1.3);
    assert!(text.contains("answers are confirmed"), "{text}");
    assert!(json["situations"].as_array().unwrap().len() > 12);
    let row = |contestant: &str, iops: u64| {
        serde_json::json!({
            "filesystem": "xfs", "cell": "64K, backed", "contestant": contestant,
            "median-iops": iops,
        })
    };
    let rows = [row("cowslip", 3000), row("raw sparse", 10_000)];
    let results = serde_json::json!({ "conditions": {}, "rows": rows }).to_string();
    std::fs::write(dir.path().join("b.json"), results).unwrap();
    let text = succeeds(dir.path(), "advise --check b.json");
    assert!(
        text.contains("64K, backed") && text.contains("0.300"),
        "{text}"
    );
}

#[test]
fn bad_input_is_one_line_that_names_it() {
    let dir = &scratch();
    succeeds(dir, "create -q -f qcow2 a.qcow2 1M");
    std::fs::write(dir.join("junk"), "no trace").unwrap();
    std::fs::write(dir.join("cut"), b"cowtrace").unwrap();
    for (words, expected) in [
        ("--trace junk a.qcow2", "the trace 'junk': it is no trace"),
        ("--trace cut a.qcow2", "the trace 'cut': damaged at byte 0"),
        ("--trace none a.qcow2", "the trace 'none': No such file"),
        (
            "--statistics junk a.qcow2",
            "the statistics 'junk': these are no statistics",
        ),
        ("--check junk", "the results 'junk': "),
        ("--check none", "the results 'none': No such file"),
        ("none.qcow2", "Could not open 'none.qcow2'"),
        ("--cache-size x a.qcow2", "cache-size"),
    ] {
        let output = ours(dir, &format!("advise {words}"));
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words}: {text}");
        assert!(text.contains(expected), "{words}: {text}");
        assert!(text.lines().count() <= 3, "{text}");
    }
    for words in [
        "--workload quick a.qcow2",
        "",
        "--check --trace t",
        "--node x a.qcow2",
    ] {
        let output = ours(dir, &format!("advise {words}"));
        assert!(!output.status.success(), "{words}");
    }
}
