//! Transactions whose last disk cannot be flushed: all that was done before is taken back.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::{Daemon, create};
use crate::support::{peers_are_installed, qemu_img, run};

/// The bitmaps of a node, by name.
fn bitmaps(daemon: &mut Daemon, node: &str) -> Vec<Value> {
    let nodes = daemon.done("query-named-block-nodes", json!({"flat": true}));
    let nodes = nodes.as_array().unwrap();
    let node = nodes.iter().find(|it| it["node-name"] == node).unwrap();
    let mut bitmaps = node["dirty-bitmaps"].as_array().unwrap().clone();
    bitmaps.sort_by_key(|bitmap| bitmap["name"].to_string());
    bitmaps
}

fn export(daemon: &mut Daemon, node: &str) {
    let export = json!({"type": "nbd", "id": node, "node-name": node, "writable": true});
    daemon.done("block-export-add", export);
}

/// The nodes that clients use, and jobs.
fn in_use(daemon: &mut Daemon) -> (Vec<Value>, Value) {
    let exports = daemon.done("query-block-exports", json!({}));
    let exports = exports.as_array().unwrap().iter();
    let nodes = exports.map(|export| export["node-name"].clone()).collect();
    (nodes, daemon.done("query-jobs", json!({})))
}

fn write(dir: &Path, export: &str, offset: &str) {
    let write = format!("write -P 7 {offset} 64k");
    let uri = format!("nbd+unix:///{export}?socket=nbd.sock");
    let words = ["-f", "raw", "-c", &write, &uri];
    run(Command::new("qemu-io").current_dir(dir).args(words));
}

/// Disks `t`, whose first flush fails, and `b`, which has bitmaps of each kind.
fn with_disks(dir: &Path) -> Daemon {
    for name in ["t", "b", "copy", "over-t", "over-b"] {
        create(dir, &format!("{name}.qcow2 4M"));
    }
    let mut daemon = Daemon::start(dir);
    let addr = json!({"type": "unix", "data": {"path": "nbd.sock"}});
    daemon.done("nbd-server-start", json!({"addr": addr}));
    let image = |name: &str| {
        let file = json!({"driver": "file", "filename": format!("{name}.qcow2")});
        json!({"driver": "qcow2", "file": file})
    };
    let fault = json!({"event": "none", "iotype": "flush", "once": true, "errno": 5});
    let failing = json!({"driver": "blkdebug", "node-name": "t", "image": image("t"),
        "inject-error": [fault]});
    daemon.done("blockdev-add", failing);
    for name in ["b", "copy", "over-t", "over-b"] {
        let mut node = image(name);
        node["node-name"] = name.into();
        daemon.done("blockdev-add", node);
    }
    for (name, is_kept) in [
        ("disabled", false),
        ("removed", false),
        ("cleared", true),
        ("forgotten", true),
        ("copied", true),
    ] {
        let bitmap = json!({"node": "b", "name": name, "persistent": is_kept});
        daemon.done("block-dirty-bitmap-add", bitmap);
    }
    export(&mut daemon, "t");
    export(&mut daemon, "b");
    write(dir, "b", "0");
    daemon
}

#[test]
fn a_transaction_that_fails_late_leaves_bitmaps_disks_and_jobs_as_they_were() {
    if !peers_are_installed(&["qemu-io", "qemu-img"]) {
        return;
    }
    let dir = &crate::support::scratch();
    let mut daemon = with_disks(dir);
    let of_bitmap = |verb: &str, name: &str| {
        let data = json!({"node": "b", "name": name});
        json!({"type": format!("block-dirty-bitmap-{verb}"), "data": data})
    };
    let overlay = |node: &str| {
        let data = json!({"node": node, "overlay": format!("over-{node}")});
        json!({"type": "blockdev-snapshot", "data": data})
    };
    let backup = json!({"device": "b", "target": "copy", "sync": "incremental",
        "bitmap": "copied", "job-id": "j", "auto-finalize": false});
    let actions = json!({"actions": [
        of_bitmap("disable", "disabled"),
        of_bitmap("remove", "removed"),
        of_bitmap("clear", "cleared"),
        of_bitmap("remove", "forgotten"),
        overlay("b"),
        {"type": "blockdev-backup", "data": backup},
        overlay("t"),
    ]});
    let before = (bitmaps(&mut daemon, "b"), in_use(&mut daemon));
    assert_eq!(before.0.len(), 5);
    let refused = daemon.ask("transaction", actions.clone()).unwrap_err();
    assert!(refused.contains("Input/output error"), "{refused}");
    let after = (bitmaps(&mut daemon, "b"), in_use(&mut daemon));
    assert_eq!(before, after);

    // All of them note what is written, in the image that clients still have.
    write(dir, "b", "1M");
    for bitmap in bitmaps(&mut daemon, "b") {
        assert_eq!(bitmap["count"], 2 << 16, "{bitmap}");
    }
    let without_failing = &actions["actions"].as_array().unwrap()[..6];
    daemon.done("transaction", json!({"actions": without_failing}));
    daemon.wait_for("j", "pending").unwrap();
    let (exports, _) = in_use(&mut daemon);
    assert_eq!(exports, ["over-b", "t"]);
    write(dir, "b", "2M");

    // The image lies below an overlay, and has the marks again.
    daemon.done("job-cancel", json!({"id": "j"}));
    daemon.wait_for("j", "null").unwrap();
    let left = bitmaps(&mut daemon, "b");
    let left: Vec<_> = left.iter().map(|it| (&it["name"], &it["count"])).collect();
    let expected = [("cleared", 0), ("copied", 2 << 16), ("disabled", 2 << 16)];
    let expected = expected.map(|(name, count)| (json!(name), json!(count)));
    assert_eq!(left, expected.each_ref().map(|(name, count)| (name, count)));
    daemon.quit();
    for name in ["b", "over-b"] {
        qemu_img(&["check", "-q"], &[&dir.join(format!("{name}.qcow2"))]);
    }
}
