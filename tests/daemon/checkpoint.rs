//! Checkpoints, and backups that copy what changes, of a disk that a guest writes.

use std::path::Path;

use serde_json::{Value, json};

use super::guest::{DISK_BYTES, Guest, Model};
use super::{Daemon, bytes_of, create};
use crate::support::{
    cowslip, number_from_environment, peers_are_installed, qemu_img, run, succeeds,
};

/// The bytes of an export of the daemon.
fn exported(dir: &Path, name: &str) -> Vec<u8> {
    let raw = dir.join("exported.raw");
    let uri = format!("nbd+unix:///{name}?socket=nbd.sock");
    let words = ["convert", "-q", "-f", "raw", "-O", "raw", &uri];
    run(cowslip().current_dir(dir).args(words).arg(&raw));
    std::fs::read(raw).unwrap()
}

/// The ranges that a context of an export says are dirty.
fn dirty(dir: &Path, name: &str, context: &str) -> Vec<std::ops::Range<usize>> {
    let uri = format!("nbd+unix:///{name}?socket=nbd.sock");
    let map = format!("--map=qemu:dirty-bitmap:{context}");
    let mut nbdinfo = std::process::Command::new("nbdinfo");
    let text = run(nbdinfo.current_dir(dir).args(["--json", &map, &uri]));
    let runs: Vec<Value> = serde_json::from_str(&text).unwrap();
    let dirty = runs.iter().filter(|run| run["type"] == 1);
    let number = |run: &Value, member: &str| run[member].as_u64().unwrap() as usize;
    let range = |run| number(run, "offset")..number(run, "offset") + number(run, "length");
    dirty.map(range).collect()
}

/// A daemon that serves the disk `n0`, and another disk, `m`.
fn with_disks(dir: &Path) -> Daemon {
    let mut daemon = Daemon::start(dir);
    daemon.add("n0", "n0.qcow2");
    daemon.add("m", "m.qcow2");
    daemon.serve("n0");
    daemon
}

fn make_disks(dir: &Path) {
    create(dir, &format!("n0.qcow2 {DISK_BYTES}"));
    create(dir, "m.qcow2 1M");
}

fn take(daemon: &mut Daemon, name: &str, parent: Option<&str>) -> Result<Value, String> {
    let mut arguments = json!({"name": name, "disks": [{"node": "m"}, {"node": "n0"}]});
    if let Some(parent) = parent {
        arguments["parent"] = parent.into();
    }
    daemon.ask("x-cowslip-checkpoint-create", arguments)
}

fn names(daemon: &mut Daemon, node: &str) -> Vec<String> {
    let found = daemon.done("x-cowslip-query-checkpoints", json!({}));
    let of_node = found.as_array().unwrap().iter();
    let of_node = of_node.filter(|it| it["node"] == node);
    of_node
        .map(|it| it["name"].as_str().unwrap().to_string())
        .collect()
}

#[test]
fn backups_of_checkpoints_restore_each_moment_under_load() {
    if !peers_are_installed(&["nbdinfo", "qemu-img"]) {
        return;
    }
    let dir = &crate::support::scratch();
    let rounds = number_from_environment("COWSLIP_ROUNDS").unwrap_or(5);
    let seed = number_from_environment("COWSLIP_SEED").unwrap_or(3);
    make_disks(dir);
    let mut daemon = with_disks(dir);
    let model = Model::default();
    let guest = Guest::start(&dir.join("nbd.sock"), seed, &model);
    let mut restored = vec![0; DISK_BYTES as usize];
    for round in 0..rounds {
        let (name, parent) = (format!("c{round}"), format!("c{}", round.max(1) - 1));
        let parent = (round > 0).then_some(parent.as_str());
        let before = model.versions();
        take(&mut daemon, &name, parent).unwrap();
        let export = format!("n0-{name}");
        let shown = exported(dir, &export);
        model.check_moment(&shown, &before);
        let changed = match parent {
            None => std::iter::once(0..shown.len()).collect(),
            Some(parent) => dirty(dir, &export, &format!("since-{parent}")),
        };
        for range in &changed {
            restored[range.clone()].copy_from_slice(&shown[range.clone()]);
        }
        assert!(restored == shown, "seed {seed} round {round}");
        assert!(exported(dir, &export) == shown, "it is the same later");
        daemon.done("x-cowslip-checkpoint-end", json!({"name": name}));
        if round == 2 {
            // What has changed since then counts for the one before.
            daemon.done("x-cowslip-checkpoint-delete", json!({"name": "c1"}));
            let since = json!({"name": "d", "parent": "c0", "disks": [{"node": "n0"}]});
            daemon.done("x-cowslip-checkpoint-create", since);
            let of_deleted = dirty(dir, "n0-d", "since-c0");
            assert!(!of_deleted.is_empty());
            daemon.done("x-cowslip-checkpoint-end", json!({"name": "d"}));
            daemon.done("x-cowslip-checkpoint-delete", json!({"name": "d"}));
        }
    }
    guest.stop().unwrap();
    daemon.quit();
    // Bitmaps are in the image: the chain of backups goes on with another daemon.
    let info = qemu_img(&["info"], &[&dir.join("n0.qcow2")]);
    assert!(
        info.contains(&format!("checkpoint-c{}", rounds - 1)),
        "{info}"
    );
    qemu_img(&["check", "-q"], &[&dir.join("n0.qcow2")]);
    let mut daemon = with_disks(dir);
    let last = format!("c{}", rounds - 1);
    take(&mut daemon, "next", Some(&last)).unwrap();
    let shown = exported(dir, "n0-next");
    for range in dirty(dir, "n0-next", &format!("since-{last}")) {
        restored[range.clone()].copy_from_slice(&shown[range]);
    }
    model.check(&restored);
    daemon.done("x-cowslip-checkpoint-end", json!({"name": "next"}));
    // Nothing has changed since.
    take(&mut daemon, "quiet", Some("next")).unwrap();
    assert_eq!(dirty(dir, "n0-quiet", "since-next"), []);
    daemon.quit();
}

#[test]
fn copies_of_checkpoints_restore_each_moment() {
    let dir = &crate::support::scratch();
    make_disks(dir);
    create(dir, &format!("full.qcow2 {DISK_BYTES}"));
    create(dir, "-b full.qcow2 -F qcow2 next.qcow2");
    let mut daemon = with_disks(dir);
    for node in ["full", "next"] {
        let file = json!({"driver": "file", "filename": format!("{node}.qcow2")});
        daemon.done(
            "blockdev-add",
            json!({"driver": "qcow2", "node-name": node, "backing": null, "file": file}),
        );
    }
    let model = Model::default();
    let guest = Guest::start(&dir.join("nbd.sock"), 4, &model);
    let push = |name: &str, parent: Option<&str>, target: &str| {
        let disks = [json!({"node": "n0", "target": target})];
        let mut arguments = json!({"name": name, "disks": disks});
        if let Some(parent) = parent {
            arguments["parent"] = parent.into();
        }
        arguments
    };
    daemon.done("x-cowslip-checkpoint-create", push("a", None, "full"));
    daemon.wait_for("a-n0", "null").unwrap();
    let before = model.versions();
    daemon.done("x-cowslip-checkpoint-create", push("b", Some("a"), "next"));
    daemon.wait_for("b-n0", "null").unwrap();
    guest.stop().unwrap();
    assert_eq!(names(&mut daemon, "n0"), ["a", "b"]);
    daemon.quit();
    model.check_moment(&bytes_of(dir, "next.qcow2"), &before);
}

#[test]
fn a_copy_that_has_failed_leaves_no_checkpoint_to_rest_on() {
    let dir = &crate::support::scratch();
    make_disks(dir);
    run(cowslip()
        .current_dir(dir)
        .args(["io", "-c", "write -q -P 7 0 128k", "m.qcow2"]));
    std::fs::write(dir.join("bad.raw"), vec![0; 1 << 20]).unwrap();
    let mut daemon = with_disks(dir);
    let fails = json!({
        "driver": "blkdebug",
        "image": {"driver": "file", "filename": "bad.raw"},
        "inject-error": [{"event": "none", "iotype": "write", "errno": 28}],
    });
    daemon.done(
        "blockdev-add",
        json!({"driver": "raw", "node-name": "bad", "file": fails}),
    );
    take(&mut daemon, "mon", None).unwrap();
    daemon.done("x-cowslip-checkpoint-end", json!({"name": "mon"}));
    let push = json!({"name": "tue", "disks": [{"node": "m", "target": "bad"}]});
    daemon.done("x-cowslip-checkpoint-create", push);
    loop {
        let event = daemon.client.next_event(super::PATIENCE).unwrap();
        let event = event.expect("the job ends");
        if event.name == "BLOCK_JOB_COMPLETED" {
            assert!(event.data.contains_key("error"), "{:?}", event.data);
            break;
        }
    }
    assert_eq!(names(&mut daemon, "m"), ["mon"]);
    let wed = |parent: &str| json!({"name": "wed", "parent": parent, "disks": [{"node": "m"}]});
    let error = daemon
        .ask("x-cowslip-checkpoint-create", wed("tue"))
        .unwrap_err();
    assert!(error.contains("'m' has no checkpoint 'tue'"), "{error}");
    daemon.done("x-cowslip-checkpoint-create", wed("mon"));
    daemon.done("x-cowslip-checkpoint-end", json!({"name": "wed"}));
    daemon.quit();
}

#[test]
fn a_kill_within_a_copy_leaves_no_checkpoint_to_rest_on() {
    let dir = &crate::support::scratch();
    create(dir, "m.qcow2 1M");
    let listed = |said: &str| {
        let listed = succeeds(dir, "checkpoint m.qcow2");
        assert_eq!(listed, said);
    };
    succeeds(dir, "checkpoint --create mon m.qcow2");
    run(cowslip()
        .current_dir(dir)
        .args(["io", "-c", "write -q -P 7 0 128k", "m.qcow2"]));
    let mut daemon = Daemon::start(dir);
    // Nothing but the checkpoint writes the image.
    daemon.add("m", "m.qcow2");
    let slow = json!({
        "driver": "null-co",
        "node-name": "slow",
        "size": 1 << 20,
        "latency-ns": 1_000_000_000_000_u64,
    });
    daemon.done("blockdev-add", slow);
    let push = json!({"name": "tue", "disks": [{"node": "m", "target": "slow"}]});
    daemon.done("x-cowslip-checkpoint-create", push);
    assert_eq!(names(&mut daemon, "m"), ["mon", "tue"]);
    daemon.process.kill().unwrap();
    daemon.process.wait().unwrap();
    listed("m.qcow2: mon: 131072 bytes changed so far\n");
}

#[test]
fn a_checkpoint_that_fails_on_one_disk_leaves_none_changed() {
    let dir = &crate::support::scratch();
    make_disks(dir);
    create(dir, "t.qcow2 1M");
    let mut daemon = with_disks(dir);
    let file = json!({"driver": "file", "filename": "t.qcow2"});
    daemon.done(
        "blockdev-add",
        json!({"driver": "qcow2", "node-name": "t", "read-only": true, "file": file}),
    );
    take(&mut daemon, "first", None).unwrap();
    daemon.done("x-cowslip-checkpoint-end", json!({"name": "first"}));
    let before = daemon.done("x-cowslip-query-checkpoints", json!({}));
    let n0 = json!({"node": "n0"});
    for (disks, why) in [
        (
            json!([n0, {"node": "m", "target": "t"}]),
            "'t' is read-only",
        ),
        (json!([n0, {"node": "zz"}]), "Cannot find device='zz'"),
        (
            json!([n0, {"node": "m", "export-name": "x"}]),
            "has export named 'x'",
        ),
        (json!([n0, n0]), "named once"),
        (json!([]), "at least one disk"),
    ] {
        let error = daemon.ask(
            "x-cowslip-checkpoint-create",
            json!({"name": "c", "disks": disks}),
        );
        let error = error.unwrap_err();
        assert!(error.contains(why), "{error}");
        assert_eq!(
            daemon.done("x-cowslip-query-checkpoints", json!({})),
            before
        );
    }
    let scratch = json!({"name": "c", "disks": [n0], "scratch": "/nowhere"});
    let error = daemon
        .ask("x-cowslip-checkpoint-create", scratch)
        .unwrap_err();
    assert!(
        error.contains("no space for what changes in '/nowhere'"),
        "{error}"
    );
    let error = take(&mut daemon, "first", None).unwrap_err();
    assert!(error.contains("'first' exists already on 'm'"), "{error}");
    assert_eq!(
        daemon.done("x-cowslip-query-checkpoints", json!({})),
        before
    );
    daemon.quit();
}

#[test]
fn after_a_kill_a_full_backup_is_asked_for() {
    let dir = &crate::support::scratch();
    make_disks(dir);
    let mut daemon = with_disks(dir);
    take(&mut daemon, "before", None).unwrap();
    daemon.done("x-cowslip-checkpoint-end", json!({"name": "before"}));
    take(&mut daemon, "a", Some("before")).unwrap();
    daemon.quit();
    let mut daemon = with_disks(dir);
    let model = Model::default();
    let guest = Guest::start(&dir.join("nbd.sock"), 5, &model);
    take(&mut daemon, "b", Some("a")).unwrap();
    model.wait_for_writes();
    drop(daemon);
    drop(guest.stop());
    // The image's locks end with the process.
    model.check_after_kill(&bytes_of(dir, "n0.qcow2"), "after the kill");
    let mut daemon = with_disks(dir);
    for (parent, why) in [
        ("a", "is inconsistent; without"),
        ("before", "'checkpoint-a' is inconsistent; without"),
        ("b", "no checkpoint 'b': it was"),
    ] {
        let error = take(&mut daemon, "c", Some(parent)).unwrap_err();
        assert!(error.contains(why), "{error}");
        assert!(error.contains("a full backup is made"), "{error}");
    }
    let clear = json!({"node": "n0", "name": "checkpoint-before"});
    let error = daemon.ask("block-dirty-bitmap-clear", clear).unwrap_err();
    assert!(error.contains("is a checkpoint"), "{error}");
    daemon.done("x-cowslip-checkpoint-delete", json!({"name": "a"}));
    // Without it the one before would seem to know what has changed.
    let error = take(&mut daemon, "c", Some("before")).unwrap_err();
    assert!(error.contains("no checkpoint 'before'"), "{error}");
    take(&mut daemon, "c", None).unwrap();
    model.check(&exported(dir, "n0-c"));
    assert_eq!(names(&mut daemon, "n0"), ["c"]);
    daemon.quit();
}

/// Changes since a published version rest on its bitmap.
#[test]
fn a_bitmap_of_a_published_version_is_removed_and_not_changed() {
    let dir = &crate::support::scratch();
    create(dir, "n0.qcow2 1M");
    let mut daemon = Daemon::start(dir);
    daemon.add("n0", "n0.qcow2");
    let bitmap = json!({"node": "n0", "name": "published-0a"});
    let new = json!({"node": "n0", "name": "published-0a", "persistent": true});
    daemon.done("block-dirty-bitmap-add", new);
    for verb in ["clear", "disable", "enable"] {
        let verb = format!("block-dirty-bitmap-{verb}");
        let error = daemon.ask(&verb, bitmap.clone()).unwrap_err();
        assert!(error.contains("it can be removed"), "{error}");
    }
    daemon.done("block-dirty-bitmap-remove", bitmap);
    daemon.quit();
}

/// An image that was committed shows the disk as its base does, whatever is written there later: so
/// it must not say what has changed.
#[test]
fn a_committed_image_has_no_checkpoints() {
    let dir = &crate::support::scratch();
    create(dir, "base.qcow2 1M");
    create(dir, "-b base.qcow2 -F qcow2 n0.qcow2");
    let mut daemon = Daemon::start(dir);
    daemon.add("n0", "n0.qcow2");
    daemon.serve("n0");
    let write = |pattern: &str| {
        let write = format!("write -q -P {pattern} 64k 64k");
        let words = ["io", "-f", "raw", "-c", &write];
        let socket = "nbd+unix:///x?socket=nbd.sock";
        run(cowslip().current_dir(dir).args(words).arg(socket));
    };
    write("1");
    let disks = json!([{"node": "n0"}]);
    daemon.done(
        "x-cowslip-checkpoint-create",
        json!({"name": "c", "disks": disks}),
    );
    daemon.done("x-cowslip-checkpoint-end", json!({"name": "c"}));
    daemon.done("block-commit", json!({"device": "n0", "job-id": "j"}));
    daemon.wait_for("j", "ready").unwrap();
    daemon.done("job-complete", json!({"id": "j"}));
    daemon.wait_for("j", "null").unwrap();
    write("2");
    daemon.quit();
    let bytes = bytes_of(dir, "n0.qcow2");
    assert_eq!(bytes[64 << 10], 2, "it shows what was written to the base");
    let since = ["checkpoint", "--since", "c", "n0.qcow2"];
    let since = super::without_lock(dir, &since);
    assert!(!since.status.success(), "{since:?}");
}

#[test]
fn a_target_over_a_disk_shows_it_as_it_was() {
    let dir = &crate::support::scratch();
    make_disks(dir);
    create(dir, &format!("f.qcow2 {DISK_BYTES}"));
    let mut daemon = with_disks(dir);
    let model = Model::default();
    let guest = Guest::start(&dir.join("nbd.sock"), 6, &model);
    let file = json!({"driver": "file", "filename": "f.qcow2"});
    let target = json!({"driver": "qcow2", "node-name": "f", "backing": "n0", "file": file});
    daemon.done("blockdev-add", target);
    let export = json!({"type": "nbd", "id": "f", "node-name": "f", "name": "f"});
    let error = daemon.ask("block-export-add", export.clone()).unwrap_err();
    assert!(
        error.contains("'n0' is busy: it is being written"),
        "{error}"
    );
    let before = model.versions();
    // A bitmap of the target begins at the same moment.
    let backup = json!({"device": "n0", "target": "f", "sync": "none", "job-id": "j"});
    let actions = json!([
        {"type": "block-dirty-bitmap-add", "data": {"node": "f", "name": "b"}},
        {"type": "blockdev-backup", "data": backup},
    ]);
    daemon.done("transaction", json!({"actions": actions}));
    daemon.done("block-export-add", export);
    let shown = exported(dir, "f");
    model.check_moment(&shown, &before);
    model.wait_for_writes();
    assert!(exported(dir, "f") == shown, "it is the same later");
    // A backup that cannot begin leaves its target as it was: over its disk.
    create(dir, "g.qcow2 1M");
    let writer = json!({"type": "nbd", "id": "m", "node-name": "m", "name": "m", "writable": true});
    daemon.done("block-export-add", writer);
    let file = json!({"driver": "file", "filename": "g.qcow2"});
    let target = json!({"driver": "qcow2", "node-name": "g", "backing": "m", "file": file});
    daemon.done("blockdev-add", target);
    let backup = json!({"device": "m", "target": "g", "sync": "none", "job-id": "j"});
    let error = daemon.ask("blockdev-backup", backup).unwrap_err();
    assert!(error.contains("'j' already in use"), "{error}");
    let uri = "nbd+unix:///m?socket=nbd.sock";
    let write = ["io", "-f", "raw", "-c", "write -q -P 7 0 64k", uri];
    run(cowslip().current_dir(dir).args(write));
    daemon.done("block-export-del", json!({"id": "m"}));
    let reader = json!({"type": "nbd", "id": "g", "node-name": "g", "name": "g"});
    daemon.done("block-export-add", reader);
    assert!(exported(dir, "g").starts_with(&[7; 64 << 10]));
    daemon.done("block-export-del", json!({"id": "g"}));
    daemon.done("block-export-del", json!({"id": "f"}));
    daemon.done("block-job-cancel", json!({"device": "j"}));
    daemon.wait_for("j", "null").unwrap();
    daemon.done("blockdev-del", json!({"node-name": "f"}));
    guest.stop().unwrap();
    daemon.quit();
    model.check(&bytes_of(dir, "n0.qcow2"));
}
