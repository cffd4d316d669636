//! `x-cowslip-compact`: the file of a disk in use is compacted, with a guest that writes and reads
//! meanwhile; paused, cancelled, and with the daemon killed on the way.
//! `COWSLIP_TEST_COMPACTIONS` is how often the daemon is killed (6).

use super::*;
use crate::support::succeeds;

/// Length of the file of the full disk, with its tables, that is not exceeded by much.
const FULL_BYTES: u64 = DISK_BYTES + (1 << 20);

fn length(dir: &Path) -> u64 {
    std::fs::metadata(dir.join("n0.qcow2")).unwrap().len()
}

/// Has the guest write much of its disk while a snapshot keeps what there was: when the snapshot is
/// gone, what it kept is dead.
fn age(daemon: &mut Daemon, model: &Model) {
    let snapshot = json!({"device": "n0", "name": "s"});
    daemon.done("blockdev-snapshot-internal-sync", snapshot.clone());
    model.wait_for_writes();
    daemon.done("blockdev-snapshot-delete-internal-sync", snapshot);
}

fn start(dir: &Path, seed: u64, model: &Model) -> (Daemon, Guest) {
    let mut daemon = Daemon::start(dir);
    // The locks of a daemon that was killed end some time after it.
    let unlocked = without_lock(dir, &["check", "-q", "-r", "leaks", "n0.qcow2"]);
    assert!(unlocked.status.success(), "{unlocked:?}");
    daemon.add("n0", "n0.qcow2");
    daemon.serve("n0");
    let guest = Guest::start(&dir.join("nbd.sock"), seed, model);
    (daemon, guest)
}

/// The figures of the next compaction that has done its work.
fn figures(daemon: &mut Daemon) -> Value {
    loop {
        let event = daemon.client.next_event(PATIENCE).unwrap();
        let event = event.expect("the compaction does not end");
        if event.name == "X_COWSLIP_COMPACTED" {
            return event.data.into();
        }
    }
}

#[test]
fn the_file_of_a_disk_in_use_is_compacted() {
    let dir = &crate::support::scratch();
    for options in ["cluster_size=4k", "cluster_size=64k,extended_l2=on"] {
        drop(std::fs::remove_file(dir.join("n0.qcow2")));
        // All of the disk has space: a guest that is slow would let the file grow meanwhile.
        let options = format!("{options},preallocation=full");
        create(dir, &format!("-o {options} n0.qcow2 {DISK_BYTES}"));
        let model = Model::default();
        let (mut daemon, guest) = start(dir, 11, &model);
        let mut moved = 0;
        for round in 0..2 {
            age(&mut daemon, &model);
            let before = length(dir);
            daemon.done(
                "x-cowslip-compact",
                json!({"device": "n0", "job-id": "c", "budget": 1 << 20}),
            );
            let found = figures(&mut daemon);
            daemon.wait_for("c", "null").unwrap();
            assert_eq!(found["id"], "c");
            moved += found["moved-bytes"].as_u64().unwrap();
            let after = found["file-length"].as_u64().unwrap();
            assert!(after <= before, "{options}, {round}: {found}");
        }
        assert!(moved > 0, "{options}");
        model.wait_for_writes();
        guest.stop().unwrap();
        // Nobody writes any more.
        daemon.done("x-cowslip-compact", json!({"device": "n0", "job-id": "d"}));
        daemon.wait_for("d", "null").unwrap();
        assert!(length(dir) < FULL_BYTES, "{options}: {}", length(dir));
        daemon.quit();
        model.check(&bytes_of(dir, "n0.qcow2"));
        succeeds(dir, "check -q n0.qcow2");
        if peers_are_installed(&["qemu-img"]) {
            qemu_img(&["check", "-q"], &[&dir.join("n0.qcow2")]);
        }
    }
}

/// The clusters of a disk in use get the guest's order, as far as the guest lets them.
#[test]
fn the_clusters_of_a_disk_in_use_get_the_guests_order() {
    let dir = &crate::support::scratch();
    create(dir, &format!("-o cluster_size=4k n0.qcow2 {DISK_BYTES}"));
    let model = Model::default();
    let (mut daemon, guest) = start(dir, 12, &model);
    age(&mut daemon, &model);
    let order = json!({"device": "n0", "job-id": "c", "budget": 1 << 20, "defragment": true});
    daemon.done("x-cowslip-compact", order);
    let found = figures(&mut daemon);
    daemon.wait_for("c", "null").unwrap();
    let figure = |name: &str| found[name].as_u64().unwrap();
    assert!(figure("extents") < figure("extents-before"), "{found}");
    model.wait_for_writes();
    guest.stop().unwrap();
    // Nobody writes any more; by the short verb.
    let control = dir.join("control.sock");
    let mut line = cowslip();
    line.args(["ctl", "--wait"]).arg(control);
    run(line.args(["compact", "device=n0", "defragment=on"]));
    let found = figures(&mut daemon);
    let figure = |name: &str| found[name].as_u64().unwrap();
    assert!(
        5 * figure("extents") <= 6 * figure("extents-perfect"),
        "{found}"
    );
    daemon.quit();
    model.check(&bytes_of(dir, "n0.qcow2"));
    succeeds(dir, "check -q n0.qcow2");
}

#[test]
fn a_daemon_that_is_killed_amid_a_compaction_loses_nothing() {
    let dir = &crate::support::scratch();
    let rounds = number_from_environment("COWSLIP_TEST_COMPACTIONS").unwrap_or(6);
    let mut rng = Rng::new(number_from_environment("COWSLIP_SEED").unwrap_or(3));
    create(dir, &format!("-o cluster_size=4k n0.qcow2 {DISK_BYTES}"));
    let model = Model::default();
    let mut amid = 0;
    for round in 0..rounds {
        let (mut daemon, guest) = start(dir, 20 + round, &model);
        age(&mut daemon, &model);
        let speed = [0, 8 << 20][rng.below(2) as usize];
        daemon.done(
            "x-cowslip-compact",
            json!({
                "device": "n0", "job-id": "c", "budget": 256 << 10, "speed": speed,
                "defragment": round % 2 == 1,
            }),
        );
        std::thread::sleep(Duration::from_millis(rng.below(100)));
        let jobs = daemon.done("query-jobs", json!({}));
        amid += jobs.as_array().unwrap().len();
        drop(daemon);
        drop(guest.stop());
        let context = format!("round {round}");
        let checked = without_lock(dir, &["check", "-q", "-r", "leaks", "n0.qcow2"]);
        assert!(checked.status.success(), "{context}: {checked:?}");
        model.check_after_kill(&bytes_of(dir, "n0.qcow2"), &context);
    }
    assert!(amid > 0, "no compaction was killed");
    // What was begun comes to its end with the machine off.
    succeeds(dir, "compact -q n0.qcow2");
    assert!(length(dir) < FULL_BYTES, "{}", length(dir));
    model.check(&bytes_of(dir, "n0.qcow2"));
}

/// The job with its states and its pace, as clients see it.
#[test]
fn a_compaction_is_paused_resumed_hastened_and_cancelled() {
    let dir = &crate::support::scratch();
    create(dir, &format!("-o cluster_size=4k n0.qcow2 {DISK_BYTES}"));
    let model = Model::default();
    let (mut daemon, guest) = start(dir, 31, &model);
    model.wait_for_writes();
    age(&mut daemon, &model);
    let slow = json!({"device": "n0", "job-id": "c", "speed": 64 << 10, "auto-dismiss": false});
    daemon.done("x-cowslip-compact", slow);
    wait_for_work(&mut daemon);
    let twice = daemon.ask("x-cowslip-compact", json!({"device": "n0", "job-id": "d"}));
    assert!(twice.unwrap_err().contains("in use by block job"));
    daemon.done("job-pause", json!({"id": "c"}));
    std::thread::sleep(Duration::from_millis(150));
    let paused = daemon.done("query-jobs", json!({}))[0].clone();
    assert_eq!(paused["status"], "paused");
    assert_eq!(paused["type"], "x-cowslip-compact");
    // It keeps the guest from nothing.
    model.wait_for_writes();
    let later = daemon.done("query-jobs", json!({}))[0].clone();
    assert_eq!(later["current-progress"], paused["current-progress"]);
    daemon.done("job-resume", json!({"id": "c"}));
    let hasten = json!({"device": "c", "speed": 0});
    daemon.done("block-job-set-speed", hasten);
    daemon.wait_for("c", "concluded").unwrap();
    daemon.done("job-dismiss", json!({"id": "c"}));

    age(&mut daemon, &model);
    let slow = json!({"device": "n0", "job-id": "e", "speed": 64 << 10});
    daemon.done("x-cowslip-compact", slow);
    wait_for_work(&mut daemon);
    daemon.done("job-cancel", json!({"id": "e"}));
    daemon.wait_for("e", "null").unwrap();
    // Another one may begin, by the short verb.
    let control = dir.join("control.sock");
    let mut line = cowslip();
    line.args(["ctl", "--wait"]).arg(control);
    run(line.args(["compact", "device=n0", "budget=1M"]));
    guest.stop().unwrap();
    daemon.quit();
    model.check(&bytes_of(dir, "n0.qcow2"));
    succeeds(dir, "check -q n0.qcow2");
}

/// In the background it does nothing while a guest uses the disk, and its work once that ends.
#[test]
fn a_compaction_in_the_background_waits_for_the_guest() {
    let dir = &crate::support::scratch();
    create(dir, &format!("-o cluster_size=4k n0.qcow2 {DISK_BYTES}"));
    let model = Model::default();
    let (mut daemon, guest) = start(dir, 41, &model);
    model.wait_for_writes();
    age(&mut daemon, &model);
    let before = length(dir);
    let background = json!({"device": "n0", "job-id": "c", "background": true, "idle-ms": 2000});
    daemon.done("x-cowslip-compact", background);
    model.wait_for_writes();
    let jobs = daemon.done("query-jobs", json!({}));
    assert_eq!(jobs[0]["current-progress"], 0, "{jobs}");
    let found = daemon.done("query-block-jobs", json!({}));
    assert_eq!(found[0]["speed"], 20 << 20);
    guest.stop().unwrap();
    daemon.wait_for("c", "null").unwrap();
    assert!(length(dir) < before);
    daemon.quit();
    model.check(&bytes_of(dir, "n0.qcow2"));
    succeeds(dir, "check -q n0.qcow2");
}

/// Waits until the job has moved something.
fn wait_for_work(daemon: &mut Daemon) {
    for _ in 0..1000 {
        let jobs = daemon.done("query-jobs", json!({}));
        if jobs[0]["current-progress"].as_u64() > Some(0) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("the job does nothing");
}

#[test]
fn what_cannot_be_compacted_is_refused() {
    let dir = &crate::support::scratch();
    create(dir, "n0.qcow2 1M");
    std::fs::write(dir.join("plain.raw"), [0; 4096]).unwrap();
    let mut daemon = Daemon::start(dir);
    daemon.add("n0", "n0.qcow2");
    let file = json!({"driver": "file", "filename": "plain.raw"});
    let raw = json!({"driver": "raw", "node-name": "r", "file": file});
    daemon.done("blockdev-add", raw);
    let refused = |daemon: &mut Daemon, arguments: Value| {
        let asked = daemon.ask("x-cowslip-compact", arguments);
        asked.unwrap_err()
    };
    let words = refused(&mut daemon, json!({"device": "r"}));
    assert!(
        words.contains("format 'raw', which cannot be compacted"),
        "{words}"
    );
    refused(&mut daemon, json!({"device": "none"}));
    let short = json!({"device": "n0", "target-size": 4096, "auto-dismiss": false});
    daemon.done("x-cowslip-compact", short);
    loop {
        let event = daemon.client.next_event(PATIENCE).unwrap().unwrap();
        if event.name == "BLOCK_JOB_COMPLETED" {
            let error = event.data["error"].as_str().unwrap();
            assert!(error.contains("cannot be shorter than"), "{error}");
            break;
        }
    }
    daemon.quit();
}
