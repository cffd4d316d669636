//! Disks that lie below others, and change: nobody is shown what they have become.

use std::path::Path;

use serde_json::{Value, json};

use super::{Daemon, create};
use crate::support::{cowslip, outcome, run};

fn image(node: &str, below: Value) -> Value {
    json!({"driver": "qcow2", "node-name": node, "backing": below,
        "file": {"driver": "file", "filename": format!("{node}.qcow2")}})
}

fn export(node: &str, is_writable: bool) -> Value {
    json!({"type": "nbd", "id": node, "node-name": node, "writable": is_writable})
}

/// A request to an export, which a reader opens to be read alone.
fn io(dir: &Path, export: &str, request: &str) -> std::process::Output {
    let uri = format!("nbd+unix:///{export}?socket=nbd.sock");
    let mut command = cowslip();
    command.current_dir(dir).args(["io", "-f", "raw"]);
    if request.starts_with("read") {
        command.arg("-r");
    }
    outcome(command.args(["-c", request, &uri]))
}

fn start(dir: &Path) -> Daemon {
    let mut daemon = Daemon::start(dir);
    let addr = json!({"type": "unix", "data": {"path": "nbd.sock"}});
    daemon.done("nbd-server-start", json!({"addr": addr}));
    daemon
}

/// Also of one that fails.
fn wait_for_the_end_of_jobs(daemon: &mut Daemon) {
    for _ in 0..3000 {
        if daemon.done("query-jobs", json!({})) == json!([]) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("the job goes on");
}

#[test]
fn a_node_is_not_put_over_a_chain_that_is_written() {
    let dir = &crate::support::scratch();
    for name in ["low", "mid", "other", "top"] {
        create(dir, &format!("{name}.qcow2 1M"));
    }
    let mut daemon = start(dir);
    daemon.done("blockdev-add", image("low", Value::Null));
    for node in ["mid", "other"] {
        daemon.done("blockdev-add", image(node, "low".into()));
    }
    daemon.done("blockdev-add", image("top", Value::Null));
    daemon.done("block-export-add", export("other", true));
    let commit = json!({"device": "other", "base-node": "low", "job-id": "c"});
    daemon.done("block-commit", commit);
    daemon.wait_for("c", "ready").unwrap();
    let over = json!({"options": [image("top", "mid".into())]});
    let error = daemon.ask("blockdev-reopen", over.clone()).unwrap_err();
    let why = "Node 'low' is busy: it is being written";
    assert!(error.contains(why), "{error}");
    daemon.done("job-cancel", json!({"id": "c"}));
    daemon.wait_for("c", "null").unwrap();
    daemon.done("blockdev-reopen", over);
    daemon.quit();
}

/// A chunk could not be copied before it was overwritten.
#[test]
fn clients_of_a_view_of_no_use_get_errors_until_they_have_left() {
    let dir = &crate::support::scratch();
    for name in ["low", "view"] {
        create(dir, &format!("{name}.qcow2 1M"));
    }
    run(cowslip()
        .current_dir(dir)
        .args(["io", "-c", "write -q -P 5 0 1M", "low.qcow2"]));
    let mut daemon = start(dir);
    daemon.done("blockdev-add", image("low", Value::Null));
    daemon.done("block-export-add", export("low", true));
    let mut view = image("view", "low".into());
    view["file"] = json!({"driver": "blkdebug", "image": view["file"],
        "inject-error": [{"event": "none", "iotype": "write", "errno": 28}]});
    daemon.done("blockdev-add", view);
    let backup = json!({"device": "low", "target": "view", "sync": "none", "job-id": "j"});
    daemon.done("blockdev-backup", backup);
    daemon.done("block-export-add", export("view", false));
    assert!(io(dir, "view", "read -q -P 5 0 64k").status.success());
    assert!(io(dir, "low", "write -q -P 7 0 64k").status.success());
    wait_for_the_end_of_jobs(&mut daemon);
    let read = io(dir, "view", "read -q 0 64k");
    assert!(
        !read.status.success(),
        "it is not what the disk was: {read:?}"
    );
    daemon.done("block-export-del", json!({"id": "view"}));
    daemon.done("block-export-del", json!({"id": "low"}));
    daemon.done("block-export-add", export("view", false));
    let read = io(dir, "view", "read -q -P 7 0 64k");
    assert!(read.status.success(), "the node shows its chain: {read:?}");
}
