//! A daemon that was killed amid a job, and the one that is started after it: each disk is what it
//! was, no job is there, and the same job, started again, comes to its end.

use super::*;

/// Bytes a second of a job that is to be killed: it takes longer than the test.
const SLOW: u64 = 1 << 20;

/// The jobs, and the image that shows the disk when each has ended.
const KINDS: [(&str, &str); 6] = [
    ("stream", "top"),
    ("commit below", "top"),
    ("commit", "base"),
    ("mirror", "copy"),
    ("mirror, write-blocking", "copy"),
    ("backup", "top"),
];

/// Three images over each other, with data in each, and an empty one.
fn images(dir: &Path) {
    create(dir, &format!("base.qcow2 {DISK_BYTES}"));
    create(dir, "-b base.qcow2 -F qcow2 middle.qcow2");
    create(dir, "-b middle.qcow2 -F qcow2 top.qcow2");
    create(dir, &format!("copy.qcow2 {DISK_BYTES}"));
    for (image, writes) in [
        ("base", ["write -q -P 1 0 6M", "write -q -P 2 7M 1M"]),
        ("middle", ["write -q -P 3 1M 3M", "write -q -P 4 6M 512k"]),
        ("top", ["write -q -P 5 2M 1500k", "write -q -P 6 5M 2100k"]),
    ] {
        let mut command = cowslip();
        command.current_dir(dir).arg("io");
        for write in writes {
            command.args(["-c", write]);
        }
        run(command.arg(format!("{image}.qcow2")));
    }
}

/// Starts a job of a kind.
fn begin(daemon: &mut Daemon, kind: &str, speed: u64) {
    let (command, mut arguments) = match kind {
        "stream" => ("block-stream", json!({"device": "top"})),
        "commit below" => (
            "block-commit",
            json!({"device": "top", "top-node": "middle", "base-node": "base"}),
        ),
        "commit" => (
            "block-commit",
            json!({"device": "top", "base-node": "base"}),
        ),
        "backup" => (
            "blockdev-backup",
            json!({"device": "top", "target": "copy", "sync": "full"}),
        ),
        _ => (
            "blockdev-mirror",
            json!({"device": "top", "target": "copy", "sync": "full"}),
        ),
    };
    if kind.ends_with("write-blocking") {
        arguments["copy-mode"] = "write-blocking".into();
    }
    arguments["job-id"] = "j".into();
    arguments["speed"] = speed.into();
    daemon.done(command, arguments);
}

/// Waits until a job has done a part of its work.
fn wait_for_progress(daemon: &mut Daemon) {
    for _ in 0..1000 {
        let jobs = daemon.done("query-jobs", json!({}));
        let done = |job: &Value| job["current-progress"].as_u64() > Some(0);
        if jobs.as_array().unwrap().iter().all(done) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("the job does nothing");
}

fn add_all(daemon: &mut Daemon) {
    for (name, below) in [
        ("base", Value::Null),
        ("middle", "base".into()),
        ("top", "middle".into()),
        ("copy", Value::Null),
    ] {
        let file = json!({"driver": "file", "filename": format!("{name}.qcow2")});
        let arguments =
            json!({"driver": "qcow2", "node-name": name, "file": file, "backing": below});
        // The locks of a process that was killed end some time after it.
        for _ in 0..200 {
            match daemon.ask("blockdev-add", arguments.clone()) {
                Err(error) if error.contains(" lock") => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                added => {
                    added.unwrap();
                    break;
                }
            }
        }
    }
}

#[test]
fn jobs_of_a_killed_daemon_are_started_again() {
    for (kind, shows) in KINDS {
        let dir = &crate::support::scratch();
        images(dir);
        let before = bytes_of(dir, "top.qcow2");
        let mut daemon = Daemon::start(dir);
        add_all(&mut daemon);
        begin(&mut daemon, kind, SLOW);
        wait_for_progress(&mut daemon);
        drop(daemon);
        assert!(bytes_of(dir, "top.qcow2") == before, "{kind}: killed");

        let mut daemon = Daemon::start(dir);
        assert_eq!(daemon.done("query-jobs", json!({})), json!([]), "{kind}");
        add_all(&mut daemon);
        begin(&mut daemon, kind, 0);
        match kind {
            "commit" | "mirror" | "mirror, write-blocking" => {
                daemon.wait_for("j", "ready").unwrap();
                daemon.done("job-complete", json!({"id": "j"}));
                daemon.wait_for("j", "null").unwrap();
            }
            _ => daemon.wait_for("j", "null").unwrap(),
        }
        daemon.quit();
        let shows = format!("{shows}.qcow2");
        assert!(bytes_of(dir, &shows) == before, "{kind}: {shows}");
        if kind == "backup" {
            assert!(bytes_of(dir, "copy.qcow2") == before, "{kind}: the copy");
        }
        for image in ["base", "middle", "top", "copy"] {
            let words = ["check", "-q", "-r", "leaks", &format!("{image}.qcow2")];
            let checked = without_lock(dir, &words);
            assert!(checked.status.success(), "{kind}: {image}");
        }
    }
}

/// A stream does not copy again what it had copied before its daemon was killed, and its pace does
/// not count it.
#[test]
fn a_stream_goes_on_after_a_restart() {
    let dir = &crate::support::scratch();
    images(dir);
    let before = bytes_of(dir, "top.qcow2");
    let mut daemon = Daemon::start(dir);
    add_all(&mut daemon);
    begin(&mut daemon, "stream", 0);
    daemon.wait_for("j", "null").unwrap();
    drop(daemon);
    // As if its last step had not been taken: all is copied, and the image has its old chain.
    let rebase = ["rebase", "-q", "-u", "-b", "middle.qcow2", "-F", "qcow2"];
    let rebased = without_lock(dir, &[&rebase[..], &["top.qcow2"]].concat());
    assert!(rebased.status.success(), "{rebased:?}");
    let mut daemon = Daemon::start(dir);
    add_all(&mut daemon);
    let begun = std::time::Instant::now();
    // To copy all of it would take more than an hour.
    begin(&mut daemon, "stream", 2048);
    daemon.wait_for("j", "null").unwrap();
    assert!(begun.elapsed() < Duration::from_secs(60));
    daemon.quit();
    assert!(bytes_of(dir, "top.qcow2") == before);
}
