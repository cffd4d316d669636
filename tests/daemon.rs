//! `cowslip daemon`: disks in use are snapshotted, streamed, committed, mirrored and backed up,
//! with a guest that writes and reads them meanwhile, and with the daemon killed on the way.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use cowslip_qmp::client::Client;
use serde_json::{Value, json};

use crate::support::rng::Rng;
use crate::support::running::Running;
use crate::support::{
    cowslip, number_from_environment, outcome, peers_are_installed, qemu_img, run, succeeds,
};

mod atomic;
mod below;
mod checkpoint;
mod compaction;
mod guest;
mod restarted;

use guest::{DISK_BYTES, Guest, Model};

const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

/// A daemon that runs in a directory, and a client of it.
struct Daemon {
    process: Running,
    client: Client,
}

impl Daemon {
    fn start(dir: &Path) -> Daemon {
        let socket = dir.join("control.sock");
        let mut command = cowslip();
        command.args(["daemon", "--control", "control.sock"]);
        let mut process = Running::start(command.current_dir(dir).stdin(Stdio::null()));
        for _ in 0..1000 {
            if let Ok(client) = Client::connect(&socket, PATIENCE) {
                return Daemon { process, client };
            }
            assert!(process.try_wait().unwrap().is_none(), "it has ended");
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("nobody listens on the control socket");
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        let done = self.client.execute(command, arguments);
        done.map_err(|error| error.to_string())
    }

    fn done(&mut self, command: &str, arguments: Value) -> Value {
        let asked = format!("{command} {arguments}");
        self.ask(command, arguments)
            .unwrap_or_else(|error| panic!("{asked}: {error}"))
    }

    /// Waits until a job has a state.
    fn wait_for(&mut self, job: &str, status: &str) -> Result<(), String> {
        loop {
            let event = self.client.next_event(PATIENCE);
            let event = event.map_err(|error| error.to_string())?;
            let event = event.unwrap_or_else(|| panic!("{job} does not become {status}"));
            let has = |member: &str, value: &str| {
                event.data.get(member).is_some_and(|found| found == value)
            };
            if event.name == "BLOCK_JOB_COMPLETED" && has("device", job) {
                assert!(!event.data.contains_key("error"), "{:?}", event.data);
            }
            if event.name == "JOB_STATUS_CHANGE" && has("id", job) && has("status", status) {
                return Ok(());
            }
        }
    }

    /// Adds the image in a file as a node, with the chain that its header names.
    fn add(&mut self, node: &str, file: &str) {
        let file = json!({"driver": "file", "filename": file});
        self.done(
            "blockdev-add",
            json!({"driver": "qcow2", "node-name": node, "file": file}),
        );
    }

    fn serve(&mut self, node: &str) {
        let addr = json!({"type": "unix", "data": {"path": "nbd.sock"}});
        self.done("nbd-server-start", json!({"addr": addr}));
        self.done(
            "block-export-add",
            json!({"type": "nbd", "id": "e", "node-name": node, "name": "x", "writable": true}),
        );
    }

    fn quit(mut self) {
        self.done("quit", json!({}));
        assert!(self.process.wait().unwrap().success());
    }
}

fn create(dir: &Path, words: &str) {
    let mut command = cowslip();
    command
        .current_dir(dir)
        .args(["create", "-q", "-f", "qcow2"]);
    run(command.args(words.split(' ')));
}

/// The chain of a disk in use, as the test knows it: names of nodes, the lowest first. The file of
/// each is named after it.
struct Chain {
    nodes: Vec<String>,
    made: u64,
    /// The image that was committed last, if nothing was done since: it shows the disk, too.
    committed: Option<String>,
}

/// Something that is done to a chain.
#[derive(Clone, Copy, Debug)]
enum Deed {
    Snapshot,
    Stream,
    CommitBelow,
    CommitActive,
    Mirror,
    Backup,
}

/// Deeds after which, if the daemon is killed, the image that the disk was in still shows it.
const CRASH_SAFE: [Deed; 5] = [
    Deed::Snapshot,
    Deed::Snapshot,
    Deed::Stream,
    Deed::CommitBelow,
    Deed::CommitActive,
];

impl Chain {
    fn top(&self) -> String {
        self.nodes.last().unwrap().clone()
    }

    fn new_name(&mut self) -> String {
        self.made += 1;
        format!("n{}", self.made)
    }

    /// Does something. An error is the end of the connection.
    fn act(
        &mut self,
        (daemon, dir): (&mut Daemon, &Path),
        (deed, rng): (Deed, &mut Rng),
    ) -> Result<(), String> {
        let (top, depth) = (self.top(), self.nodes.len());
        let job = format!("j{}", self.made);
        match deed {
            Deed::Snapshot if depth < 8 => {
                self.committed = None;
                let name = self.new_name();
                let arguments = json!({"node-name": top, "snapshot-node-name": name,
                    "snapshot-file": format!("{name}.qcow2")});
                // After a crash the overlay shows the disk as soon as it is one.
                self.nodes.push(name);
                daemon.ask("blockdev-snapshot-sync", arguments)?;
            }
            Deed::Stream if depth > 1 => {
                let base = rng.below(depth as u64) as usize;
                let mut arguments = json!({"device": top, "job-id": job});
                if base > 0 {
                    arguments["base-node"] = self.nodes[base - 1].as_str().into();
                }
                daemon.ask("block-stream", arguments)?;
                daemon.wait_for(&job, "null")?;
                self.nodes.drain(base..depth - 1);
                self.committed = None;
            }
            Deed::CommitBelow if depth > 2 => {
                let upper = 1 + rng.below(depth as u64 - 2) as usize;
                let base = rng.below(upper as u64) as usize;
                let arguments = json!({"device": top, "job-id": job,
                    "top-node": self.nodes[upper], "base-node": self.nodes[base]});
                daemon.ask("block-commit", arguments)?;
                daemon.wait_for(&job, "null")?;
                self.nodes.drain(base + 1..=upper);
                self.committed = None;
            }
            Deed::CommitActive if depth > 1 => {
                let base = rng.below(depth as u64 - 1) as usize;
                let arguments = json!({"device": top, "job-id": job,
                    "base-node": self.nodes[base]});
                daemon.ask("block-commit", arguments)?;
                daemon.wait_for(&job, "ready")?;
                daemon.ask("job-complete", json!({"id": job}))?;
                daemon.wait_for(&job, "null")?;
                self.nodes.truncate(base + 1);
                self.committed = Some(top);
            }
            Deed::Mirror | Deed::Backup => {
                let name = self.new_name();
                create(dir, &format!("{name}.qcow2 {DISK_BYTES}"));
                daemon.add(&name, &format!("{name}.qcow2"));
                let mut arguments = json!({"device": top, "target": name, "job-id": job,
                    "sync": "full"});
                if matches!(deed, Deed::Backup) {
                    daemon.ask("blockdev-backup", arguments)?;
                    daemon.wait_for(&job, "null")?;
                    daemon.ask("blockdev-del", json!({"node-name": name}))?;
                    return Ok(());
                }
                if rng.once_in(2) {
                    arguments["copy-mode"] = "write-blocking".into();
                }
                daemon.ask("blockdev-mirror", arguments)?;
                daemon.wait_for(&job, "ready")?;
                daemon.ask("job-complete", json!({"id": job}))?;
                daemon.wait_for(&job, "null")?;
                self.nodes = vec![name];
                self.committed = None;
            }
            _ => {}
        }
        Ok(())
    }
}

/// The bytes of the disk in an image and its chain. The ring of a killed process keeps its files,
/// and their locks, until the system has ended it.
fn bytes_of(dir: &Path, image: &str) -> Vec<u8> {
    let raw = dir.join("check.raw");
    let words = [
        "convert",
        "-q",
        "-f",
        "qcow2",
        "-O",
        "raw",
        image,
        "check.raw",
    ];
    let outcome = without_lock(dir, &words);
    let said = String::from_utf8_lossy(&outcome.stderr);
    assert!(outcome.status.success(), "{image}: {said}");
    std::fs::read(raw).unwrap()
}

/// The outcome of a command when no image of it is locked: the locks of a process that was killed
/// end some milliseconds after it.
fn without_lock(dir: &Path, words: &[&str]) -> Output {
    for _ in 0..200 {
        let outcome = outcome(cowslip().current_dir(dir).args(words));
        if !String::from_utf8_lossy(&outcome.stderr).contains(" lock") {
            return outcome;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("locks are not released: {words:?}");
}

#[test]
fn a_disk_keeps_its_bytes_through_snapshots_and_jobs() {
    let dir = &crate::support::scratch();
    let rounds = number_from_environment("COWSLIP_ROUNDS").unwrap_or(24);
    let seed = number_from_environment("COWSLIP_SEED").unwrap_or(1);
    let mut rng = Rng::new(seed);
    create(dir, &format!("n0.qcow2 {DISK_BYTES}"));
    let mut daemon = Daemon::start(dir);
    daemon.add("n0", "n0.qcow2");
    daemon.serve("n0");
    let model = Model::default();
    let guest = Guest::start(&dir.join("nbd.sock"), seed, &model);
    let mut chain = Chain {
        nodes: vec!["n0".to_string()],
        made: 0,
        committed: None,
    };
    let deeds = [&CRASH_SAFE[..], &[Deed::Mirror, Deed::Backup]].concat();
    for _ in 0..rounds {
        let deed = *rng.pick(&deeds);
        let done = chain.act((&mut daemon, dir), (deed, &mut rng));
        done.unwrap_or_else(|error| panic!("seed {seed}: {deed:?}: {error}"));
    }
    guest.stop().unwrap();
    let exports = daemon.done("query-block-exports", json!({}));
    assert_eq!(exports[0]["node-name"], chain.top());
    daemon.quit();
    model.check(&bytes_of(dir, &format!("{}.qcow2", chain.top())));
    for node in &chain.nodes {
        run(cowslip()
            .current_dir(dir)
            .args(["check", "-q", &format!("{node}.qcow2")]));
    }
    if peers_are_installed(&["qemu-img"]) {
        let top = dir.join(format!("{}.qcow2", chain.top()));
        qemu_img(&["check", "-q"], &[&top]);
        let raw = dir.join("theirs.raw");
        qemu_img(&["convert", "-O", "raw"], &[&top, &raw]);
        model.check(&std::fs::read(raw).unwrap());
    }
}

#[test]
fn a_killed_daemon_leaves_the_disk_in_the_image_that_it_was_in() {
    let dir = &crate::support::scratch();
    let rounds = number_from_environment("COWSLIP_TEST_KILLS").unwrap_or(12);
    let seed = number_from_environment("COWSLIP_SEED").unwrap_or(2);
    let mut rng = Rng::new(seed);
    create(dir, &format!("n0.qcow2 {DISK_BYTES}"));
    let model = Model::default();
    let mut chain = Chain {
        nodes: vec!["n0".to_string()],
        made: 0,
        committed: None,
    };
    for round in 0..rounds {
        let mut daemon = Daemon::start(dir);
        let top = chain.top();
        daemon.add(&top, &format!("{top}.qcow2"));
        daemon.serve(&top);
        // Names of the nodes below are the daemon's own now.
        chain.nodes = vec![top];
        let guest = Guest::start(&dir.join("nbd.sock"), seed + round, &model);
        let pid = daemon.process.id();
        let delay = Duration::from_millis(rng.below(400));
        let killer = std::thread::spawn(move || {
            std::thread::sleep(delay);
            let kill = ["-KILL", &pid.to_string()];
            drop(Command::new("kill").args(kill).status());
        });
        let mut lost = None;
        for _ in 0..100 {
            let deed = *rng.pick(&CRASH_SAFE);
            if chain.committed.is_some() && rng.once_in(2) {
                // The guest has time to write, and to flush.
                std::thread::sleep(Duration::from_millis(20));
            }
            if let Err(error) = chain.act((&mut daemon, dir), (deed, &mut rng)) {
                lost = Some((deed, error));
                break;
            }
        }
        killer.join().unwrap();
        drop(daemon);
        drop(guest.stop());
        // An overlay that was not finished is no image yet.
        let is_image = |name: &String| {
            let words = ["info", "-f", "qcow2", &format!("{name}.qcow2")];
            without_lock(dir, &words).status.success()
        };
        if !is_image(&chain.top()) {
            assert!(matches!(lost, Some((Deed::Snapshot, _))), "{lost:?}");
            chain.nodes.pop();
        }
        let context = format!("round {round}: {lost:?}");
        if let Some(committed) = &chain.committed {
            let bytes = bytes_of(dir, &format!("{committed}.qcow2"));
            model.check_possible(&bytes, &format!("{context}: {committed} is committed"));
        }
        let top = format!("{}.qcow2", chain.top());
        model.check_after_kill(&bytes_of(dir, &top), &context);
        let checked = without_lock(dir, &["check", "-q", "-r", "leaks", &top]);
        assert!(checked.status.success(), "{context}");
    }
}

#[test]
fn thirty_three_snapshots_are_flattened_twice_under_load() {
    let dir = &crate::support::scratch();
    create(dir, &format!("n0.qcow2 {DISK_BYTES}"));
    let mut daemon = Daemon::start(dir);
    daemon.add("n0", "n0.qcow2");
    daemon.serve("n0");
    let model = Model::default();
    let guest = Guest::start(&dir.join("nbd.sock"), 5, &model);
    let mut top = "n0".to_string();
    for number in 1..=33 {
        let name = format!("s{number}");
        daemon.done(
            "blockdev-snapshot-sync",
            json!({"node-name": top, "snapshot-node-name": name,
                "snapshot-file": format!("{name}.qcow2")}),
        );
        top = name;
        if number == 16 || number == 33 {
            // All below the active image goes into the lowest one.
            let job = format!("f{number}");
            let upper = format!("s{}", number - 1);
            daemon.done(
                "block-commit",
                json!({"device": top, "job-id": job, "top-node": upper, "base-node": "n0"}),
            );
            daemon.wait_for(&job, "null").unwrap();
        }
    }
    guest.stop().unwrap();
    let nodes = daemon.done("query-named-block-nodes", json!({"flat": true}));
    let names: Vec<&str> = nodes
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|it| it["node-name"].as_str())
        .collect();
    assert!(names.contains(&"s33") && names.contains(&"n0"), "{names:?}");
    assert!(!names.contains(&"s20"), "{names:?}");
    daemon.quit();
    model.check(&bytes_of(dir, "s33.qcow2"));
    let info = succeeds(dir, "info s33.qcow2");
    assert!(info.contains("backing file: n0.qcow2"), "{info}");
}

#[test]
fn what_would_change_a_disk_under_another_use_is_refused() {
    let dir = &crate::support::scratch();
    create(dir, "base.qcow2 1M");
    create(dir, "-b base.qcow2 -F qcow2 over.qcow2");
    create(dir, "alone.qcow2 1M");
    create(dir, "spare.qcow2 1M");
    let mut daemon = Daemon::start(dir);
    daemon.add("base", "base.qcow2");
    let file = json!({"driver": "file", "filename": "over.qcow2"});
    let over = json!({"driver": "qcow2", "node-name": "over", "backing": "base", "file": file});
    daemon.done("blockdev-add", over);
    daemon.add("alone", "alone.qcow2");
    daemon.serve("alone");
    let mut refused = |command: &str, arguments: Value, why: &str| {
        let error = daemon.ask(command, arguments).unwrap_err();
        assert!(error.contains(why), "{command}: {error}");
    };
    let export = |node: &str| json!({"type": "nbd", "id": format!("of-{node}"), "node-name": node, "writable": true});
    refused(
        "block-export-add",
        export("base"),
        "used as backing hd of 'over'",
    );
    let file = json!({"driver": "file", "filename": "over.qcow2"});
    let second = json!({"driver": "qcow2", "node-name": "o2", "backing": "alone", "file": file});
    daemon.done("blockdev-add", second);
    let mut refused = |command: &str, arguments: Value, why: &str| {
        let error = daemon.ask(command, arguments).unwrap_err();
        assert!(error.contains(why), "{command}: {error}");
    };
    refused("block-export-add", export("o2"), "it is being written");
    daemon.done("blockdev-del", json!({"node-name": "o2"}));
    let mut refused = |command: &str, arguments: Value, why: &str| {
        let error = daemon.ask(command, arguments).unwrap_err();
        assert!(error.contains(why), "{command}: {error}");
    };
    let backup = |target: &str| json!({"device": "over", "target": target, "sync": "full"});
    refused("blockdev-backup", backup("alone"), "in use");
    refused(
        "blockdev-backup",
        backup("base"),
        "used as backing hd of 'over'",
    );
    refused(
        "block_resize",
        json!({"node-name": "base", "size": 2 << 20}),
        "backing hd",
    );
    let reader = json!({"type": "nbd", "id": "r", "node-name": "base", "name": "r"});
    daemon.done("block-export-add", reader);
    let commit = json!({"device": "over", "base-node": "base", "job-id": "c"});
    let error = daemon.ask("block-commit", commit.clone()).unwrap_err();
    assert!(error.contains("Node 'base' is in use"), "{error}");
    daemon.done("block-export-del", json!({"id": "r"}));
    daemon.done("block-commit", commit);
    daemon.wait_for("c", "ready").unwrap();
    let late = json!({"type": "nbd", "id": "late", "node-name": "base", "name": "late"});
    let error = daemon.ask("block-export-add", late).unwrap_err();
    assert!(error.contains("in use by block job: commit"), "{error}");
    daemon.done("job-complete", json!({"id": "c"}));
    daemon.wait_for("c", "null").unwrap();
    let file = json!({"driver": "file", "filename": "over.qcow2"});
    let inner = json!({"driver": "qcow2", "node-name": "twice", "backing": null, "file": file});
    let outer = json!({"driver": "qcow2", "node-name": "twice", "backing": inner,
        "file": {"driver": "file", "filename": "spare.qcow2"}});
    let error = daemon.ask("blockdev-add", outer).unwrap_err();
    assert!(
        error.contains("Duplicate nodes with node-name='twice'"),
        "{error}"
    );
    let error = daemon
        .ask("blockdev-del", json!({"node-name": "twice"}))
        .unwrap_err();
    assert!(
        error.contains("Failed to find node"),
        "nothing is added: {error}"
    );
    daemon.quit();
}

/// The ID of a job is refused before the marks are taken out of its bitmap.
#[test]
fn a_backup_that_cannot_begin_leaves_its_bitmap_as_it_was() {
    let dir = &crate::support::scratch();
    for name in ["n0", "copy"] {
        create(dir, &format!("{name}.qcow2 {DISK_BYTES}"));
    }
    let mut daemon = Daemon::start(dir);
    daemon.add("n0", "n0.qcow2");
    daemon.add("copy", "copy.qcow2");
    daemon.serve("n0");
    daemon.done("block-dirty-bitmap-add", json!({"node": "n0", "name": "b"}));
    let model = Model::default();
    let guest = Guest::start(&dir.join("nbd.sock"), 5, &model);
    model.wait_for_writes();
    guest.stop().unwrap();
    // A job of this ID has ended, and waits to be dismissed.
    let file = json!({"driver": "file", "filename": "other", "size": 4096});
    daemon.done("blockdev-create", json!({"job-id": "j", "options": file}));
    daemon.wait_for("j", "concluded").unwrap();
    let dirty = |daemon: &mut Daemon| {
        let nodes = daemon.done("query-named-block-nodes", json!({"flat": true}));
        let mut nodes = nodes.as_array().unwrap().iter();
        let node = nodes.rfind(|node| node["node-name"] == "n0");
        node.unwrap()["dirty-bitmaps"][0]["count"].as_u64().unwrap()
    };
    let before = dirty(&mut daemon);
    let error = daemon.ask(
        "blockdev-backup",
        json!({"device": "n0", "target": "copy", "sync": "incremental", "bitmap": "b",
            "job-id": "j"}),
    );
    assert!(error.unwrap_err().contains("already in use"));
    assert_eq!(dirty(&mut daemon), before);
    assert!(before > 0, "the guest has written");
    daemon.quit();
}
