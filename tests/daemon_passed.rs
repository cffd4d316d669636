//! Files that clients pass to a daemon, beside QEMU's machines (its daemon has no such commands);
//! who may connect; and the sandbox, in which images are opened in some directories, or passed.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use cowslip_qmp::Client;
use cowslip_qmp::client::ClientError;
use serde_json::{Value, json};

use crate::support::server::Server;
use crate::support::{cowslip, eventually, outcome, run, scratch, scratch_beside, succeeds};

const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Read,
    Both,
}

fn open(path: &Path, mode: Mode) -> File {
    let both = mode == Mode::Both;
    OpenOptions::new()
        .read(true)
        .write(both)
        .open(path)
        .unwrap()
}

/// The result of a command, or the text of its error.
fn answer(result: Result<Value, ClientError>) -> Value {
    match result {
        Ok(mut value) => {
            // Numbers of descriptors are the process's own, and QEMU has the last ones first.
            if let Some(sets) = value.as_array_mut() {
                for set in sets.iter_mut() {
                    let members = set["fds"].as_array_mut().unwrap();
                    for member in members.iter_mut() {
                        member.as_object_mut().unwrap().remove("fd");
                    }
                    members.sort_by_key(|member| member["opaque"].to_string());
                }
                sets.sort_by_key(|set| set["fdset-id"].as_u64());
            }
            if let Some(object) = value.as_object_mut() {
                object.remove("fd");
            }
            value
        }
        Err(ClientError::Refused(error)) => error.desc.into(),
        Err(error) => panic!("{error}"),
    }
}

fn make(dir: &Path, name: &str) -> PathBuf {
    let words = ["create", "-q", "-f", "qcow2", name, "8M"];
    run(cowslip().current_dir(dir).args(words));
    dir.join(name)
}

/// Writes to an export of a socket, and reads it.
fn use_export(dir: &Path, name: &str) {
    let uri = format!("nbd+unix:///{name}?socket=nbd");
    let commands = [
        "-c",
        "write -P 9 64k 64k",
        "-c",
        "read -P 9 64k 64k",
        "-c",
        "flush",
    ];
    run(cowslip()
        .current_dir(dir)
        .args(["io", "-f", "raw"])
        .args(commands)
        .arg(&uri));
}

/// Plays commands with passed files.
fn play(dir: &Path, socket: &Path) -> Vec<Value> {
    let image = make(dir, "a.qcow2");
    let small = make(dir, "b.qcow2");
    let mut client = Client::connect(socket, PATIENCE).unwrap();
    let mut answers = Vec::new();
    let mut pass = |client: &mut Client, path: &Path, mode, arguments| {
        let file = open(path, mode);
        answers.push(answer(client.execute_passing(
            "add-fd",
            arguments,
            &[file.as_fd()],
        )));
    };
    pass(
        &mut client,
        &image,
        Mode::Read,
        json!({"fdset-id": 1, "opaque": "r"}),
    );
    pass(
        &mut client,
        &image,
        Mode::Both,
        json!({"fdset-id": 1, "opaque": "rw"}),
    );
    pass(&mut client, &small, Mode::Read, json!({"fdset-id": 2}));
    let mut ask = |command: &str, arguments: Value| {
        answers.push(answer(client.execute(command, arguments)));
    };
    ask("query-fdsets", json!({}));
    let file = |set: &str, read_only: bool| {
        json!({"driver": "file", "filename": format!("/dev/fdset/{set}"),
            "read-only": read_only})
    };
    let mut add = |name: &str, set: &str, read_only| {
        ask(
            "blockdev-add",
            json!({"driver": "qcow2", "node-name": name, "read-only": read_only,
                "file": file(set, read_only)}),
        );
    };
    add("a", "1", false);
    add("b", "2", true);
    add("c", "7", false);
    add("d", "x", true);
    ask(
        "nbd-server-start",
        json!({"addr": {"type": "unix", "data": {"path": "nbd"}}}),
    );
    let export = |node: &str, writable: bool| json!({"type": "nbd", "id": node, "node-name": node, "writable": writable});
    ask("block-export-add", export("a", true));
    ask("block-export-add", export("b", false));
    use_export(dir, "a");
    // The set may go: the files that are open stay.
    ask("remove-fd", json!({"fdset-id": 1}));
    use_export(dir, "a");
    ask("block-export-del", json!({"id": "a", "mode": "hard"}));
    ask("block-export-del", json!({"id": "b", "mode": "hard"}));
    for node in ["a", "b"] {
        ask("blockdev-del", json!({"node-name": node}));
    }
    ask("query-fdsets", json!({}));
    answers
}

fn bytes_are_there(dir: &Path) {
    let words = ["io", "-r", "-c", "read -P 9 64k 64k", "a.qcow2"];
    run(cowslip().current_dir(dir).args(words));
    succeeds(dir, "check -q a.qcow2");
}

fn daemon(dir: &Path, words: &[&str]) -> Server {
    let mut command = cowslip();
    command
        .current_dir(dir)
        .args(["daemon", "--control", "control"])
        .args(words);
    Server::start(&mut command, &dir.join("control"))
}

#[test]
fn nodes_are_opened_from_passed_files_as_in_a_machine_of_qemu() {
    let dir = scratch();
    let ours = dir.path();
    let server = daemon(ours, &[]);
    let our_answers = play(ours, &ours.join("control"));
    assert_eq!(our_answers[4..6], [json!({}), json!({})], "{our_answers:?}");
    succeeds(ours, "ctl control quit");
    eventually("it has ended", || !ours.join("control").exists());
    drop(server);
    bytes_are_there(ours);
    let Some(theirs) = &scratch_beside(&["qemu-system-x86_64"]) else {
        return;
    };
    let none = [
        "-M", "none", "-display", "none", "-serial", "none", "-monitor", "none",
    ];
    let mut command = Command::new("qemu-system-x86_64");
    command
        .current_dir(theirs)
        .args(none)
        .args(["-qmp", "unix:control,server=on,wait=off"]);
    let _machine = Server::start(&mut command, &theirs.join("control"));
    let their_answers = play(theirs, &theirs.join("control"));
    for (our, their) in our_answers.iter().zip(&their_answers) {
        assert_eq!(our, their);
    }
}

#[test]
fn a_set_without_a_file_for_writing_serves_readers_only() {
    let dir = &scratch();
    let _server = daemon(dir, &["--nbd-server", "addr.type=unix,addr.path=nbd"]);
    let image = make(dir, "a.qcow2");
    let mut client = Client::connect(&dir.join("control"), PATIENCE).unwrap();
    let file = open(&image, Mode::Read);
    let set = json!({"fdset-id": 1});
    client
        .execute_passing("add-fd", set, &[file.as_fd()])
        .unwrap();
    let node = json!({"driver": "qcow2", "node-name": "a",
        "file": {"driver": "file", "filename": "/dev/fdset/1"}});
    client.execute("blockdev-add", node).unwrap();
    let mut export = json!({"type": "nbd", "id": "e", "node-name": "a", "writable": true});
    let refused = answer(client.execute("block-export-add", export.clone()));
    assert_eq!(
        refused,
        "Failed to find file descriptor with matching flags=0x2"
    );
    export["writable"] = false.into();
    client.execute("block-export-add", export).unwrap();
    // An image may not name what clients have passed.
    let words = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-u",
        "-b",
        "/dev/fdset/1",
        "-F",
        "qcow2",
    ];
    run(cowslip()
        .current_dir(dir)
        .args(words)
        .args(["o.qcow2", "8M"]));
    let over = json!({"driver": "qcow2", "node-name": "o",
        "file": {"driver": "file", "filename": "o.qcow2"}});
    let refused = answer(client.execute("blockdev-add", over));
    let refused = refused.as_str().unwrap().to_string();
    assert!(refused.contains("No such file or directory"), "{refused}");
}

fn mode(path: &Path) -> (u32, u32) {
    let metadata = fs::metadata(path).unwrap();
    (metadata.permissions().mode() & 0o777, metadata.gid())
}

#[test]
fn the_socket_is_its_owners_or_a_groups() {
    let dir = &scratch();
    let own = fs::metadata(dir).unwrap().gid();
    drop(daemon(dir, &[]));
    assert_eq!(mode(&dir.join("control")), (0o600, own));
    fs::remove_file(dir.join("control")).unwrap();
    let group = match own {
        // Root may give it to any group.
        0 => 12,
        own => own,
    };
    let server = daemon(dir, &["--monitor-group", &group.to_string()]);
    assert_eq!(mode(&dir.join("control")), (0o660, group));
    drop(server);
    let words = [
        "daemon",
        "--control",
        "x",
        "--monitor-group",
        "no-such-group",
    ];
    let said = outcome(cowslip().current_dir(dir).args(words));
    let text = String::from_utf8_lossy(&said.stderr);
    assert_eq!(said.status.code(), Some(1), "{text}");
    assert!(text.contains("no group 'no-such-group'"), "{text}");
}

/// Whether the kernel has all of the sandbox.
fn sandbox_is_there(dir: &Path) -> bool {
    let words = [
        "daemon",
        "--sandbox",
        "on",
        "--blockdev",
        "null-co,node-name=n,size=x",
    ];
    let said = outcome(cowslip().current_dir(dir).args(words));
    let text = String::from_utf8_lossy(&said.stderr);
    let is_there = !text.contains("demands the whole sandbox");
    if !is_there {
        eprintln!("SKIPPED: {text}");
    }
    is_there
}

/// A confined daemon with a directory `in`, which has the images `a` and `t`; none if the kernel
/// has no sandbox.
fn confined(dir: &Path) -> Option<(Server, Client)> {
    if !sandbox_is_there(dir) {
        return None;
    }
    fs::create_dir(dir.join("in")).unwrap();
    for name in ["in/a.qcow2", "in/t.qcow2"] {
        make(dir, name);
    }
    let sandbox = ["--sandbox", "on", "--sandbox-dir", "in"];
    let server = daemon(
        dir,
        &[&sandbox[..], &["--pidfile", "pid", "--metrics", "./m"]].concat(),
    );
    let client = Client::connect(&dir.join("control"), PATIENCE).unwrap();
    Some((server, client))
}

fn add(client: &mut Client, name: &str, file: &str) -> Value {
    let node = json!({"driver": "qcow2", "node-name": name,
        "file": {"driver": "file", "filename": file}});
    answer(client.execute("blockdev-add", node))
}

#[test]
fn in_the_sandbox_images_outside_of_its_directories_are_refused_by_the_kernel() {
    let dir = &scratch();
    let Some((_server, mut client)) = confined(dir) else {
        return;
    };
    make(dir, "outside.qcow2");
    std::os::unix::fs::symlink("../outside.qcow2", dir.join("in/link")).unwrap();
    let words = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        "../outside.qcow2",
        "-F",
        "qcow2",
    ];
    run(cowslip().current_dir(dir).args(words).arg("in/over.qcow2"));
    for file in [
        "outside.qcow2",
        "in/../outside.qcow2",
        "in/link",
        "in/over.qcow2",
    ] {
        let refused = add(&mut client, "o", file);
        let text = refused.as_str().unwrap_or_default();
        let advice = "Permission denied (the sandbox lets files be opened in 'in': give another \
                      --sandbox-dir";
        assert!(text.contains(advice), "{file}: {refused}");
    }
    let made = json!({"job-id": "c", "options": {"driver": "file", "filename": "new",
        "size": 1 << 20}});
    client.execute("blockdev-create", made).unwrap();
    let failed = |event: &cowslip_qmp::client::Received| {
        event.name == "JOB_STATUS_CHANGE" && event.data["status"] == "concluded"
    };
    assert!(
        client
            .wait_for(PATIENCE.unwrap(), failed)
            .unwrap()
            .is_some()
    );
    let jobs = client.execute("query-jobs", json!({})).unwrap();
    let error = jobs[0]["error"].as_str().unwrap();
    let advice = "Permission denied (the sandbox lets files be opened in 'in'";
    assert!(error.contains(advice), "{error}");
    let fuse = json!({"type": "fuse", "id": "f", "node-name": "a", "mountpoint": "in/file"});
    assert_eq!(add(&mut client, "a", "in/a.qcow2"), json!({}));
    let refused = answer(client.execute("block-export-add", fuse));
    assert!(refused.as_str().unwrap().contains("sandbox"), "{refused}");
    let tcp = json!({"addr": {"type": "inet", "data": {"host": "127.0.0.1", "port": "0"}}});
    let refused = answer(client.execute("nbd-server-start", tcp));
    let text = refused.as_str().unwrap_or_default();
    assert!(text.contains("Permission denied"), "{refused}");
}

#[test]
fn in_the_sandbox_everything_else_works() {
    let dir = &scratch();
    let Some((_server, mut client)) = confined(dir) else {
        return;
    };
    assert_eq!(add(&mut client, "a", "in/a.qcow2"), json!({}));
    assert_eq!(add(&mut client, "t", "in/t.qcow2"), json!({}));
    let mut ask = |command: &str, arguments: Value| {
        let answer = answer(client.execute(command, arguments));
        assert!(!answer.is_string(), "{command}: {answer}");
    };
    let unix = |path: &str| json!({"type": "unix", "path": path});
    let of_nbd = json!({"type": "unix", "data": {"path": "in/nbd"}});
    ask("nbd-server-start", json!({"addr": of_nbd}));
    ask(
        "block-export-add",
        json!({"type": "nbd", "id": "e", "node-name": "a", "writable": true}),
    );
    ask(
        "block-export-add",
        json!({"type": "vhost-user-blk", "id": "v", "node-name": "t", "addr": unix("in/v")}),
    );
    ask("block-export-del", json!({"id": "v"}));
    use_export(&dir.join("in"), "a");
    ask(
        "blockdev-snapshot-sync",
        json!({"node-name": "a", "snapshot-file": "in/o.qcow2", "snapshot-node-name": "o"}),
    );
    use_export(&dir.join("in"), "a");
    ask(
        "blockdev-mirror",
        json!({"job-id": "m", "device": "o", "target": "t", "sync": "full"}),
    );
    let is_ready = |event: &cowslip_qmp::client::Received| event.name == "BLOCK_JOB_READY";
    let ready = client.wait_for(PATIENCE.unwrap(), is_ready).unwrap();
    assert!(ready.is_some());
    client.execute("job-complete", json!({"id": "m"})).unwrap();
    let pid = fs::read_to_string(dir.join("pid")).unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", pid.trim())).unwrap();
    assert!(status.lines().any(|line| line == "Seccomp:\t2"), "{status}");
    client.execute("quit", json!({})).unwrap();
    eventually("its names are gone", || {
        let names = ["control", "pid", "m", "in/nbd"];
        !names.iter().any(|name| dir.join(name).exists())
    });
}

#[test]
fn in_a_sandbox_without_directories_images_are_passed() {
    let dir = &scratch();
    if !sandbox_is_there(dir) {
        return;
    }
    let words = [
        "--sandbox",
        "on",
        "--nbd-server",
        "addr.type=unix,addr.path=nbd",
    ];
    let mut command = cowslip();
    command
        .current_dir(dir)
        .args(["daemon", "--control", "control", "--verbose"])
        .args(words)
        .stderr(Stdio::null());
    let _server = Server::start(&mut command, &dir.join("control"));
    let image = make(dir, "a.qcow2");
    let mut client = Client::connect(&dir.join("control"), PATIENCE).unwrap();
    for (mode, opaque) in [(Mode::Read, "r"), (Mode::Both, "rw")] {
        let file = open(&image, mode);
        let set = json!({"fdset-id": 1, "opaque": opaque});
        client
            .execute_passing("add-fd", set, &[file.as_fd()])
            .unwrap();
    }
    let node = |file: &str| {
        json!({"driver": "qcow2", "node-name": "a",
            "file": {"driver": "file", "filename": file}})
    };
    let refused = answer(client.execute("blockdev-add", node("a.qcow2")));
    let words = "Could not open 'a.qcow2': Permission denied (the sandbox lets no file be opened: \
                 give --sandbox-dir, or pass it with add-fd)";
    assert_eq!(refused, words);
    client
        .execute("blockdev-add", node("/dev/fdset/1"))
        .unwrap();
    let export = json!({"type": "nbd", "id": "e", "node-name": "a", "writable": true});
    client.execute("block-export-add", export).unwrap();
    use_export(dir, "a");
    client.execute("quit", json!({})).unwrap();
    eventually("it has ended", || !dir.join("control").exists());
    bytes_are_there(dir);
}
