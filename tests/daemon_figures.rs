//! Figures of the daemon, beside qemu-storage-daemon: what a disk costs, what a chain costs, and
//! what a guest notices of jobs.
//!
//! The measurements are ignored: they print tables, for a machine with nothing else to do, and take
//! minutes. `COWSLIP_MEASURED` names the program that is measured, built for that:
//!
//! ```sh
//! cargo build --release
//! COWSLIP_MEASURED=target/release/cowslip cargo test --test command -- daemon_figures:: \
//!     --ignored --nocapture --test-threads=1
//! ```
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cowslip_qmp::Client;
use serde_json::{Value, json};

use crate::support::rng::Rng;
use crate::support::server::Server;
use crate::support::{cowslip, number_from_environment, peers_are_installed, run, scratch};

mod load;

use load::{Load, Rhythm};

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(600);

/// A daemon that is measured.
struct Measured {
    name: &'static str,
    _server: Server,
    client: Client,
    process: String,
}

fn program(name: &'static str) -> Command {
    match (name, std::env::var_os("COWSLIP_MEASURED")) {
        ("qemu", _) => Command::new("qemu-storage-daemon"),
        (_, Some(path)) => {
            let mut command = Command::new(path);
            command.arg("daemon");
            command
        }
        (_, None) => {
            let mut command = cowslip();
            command.arg("daemon");
            command
        }
    }
}

/// The names of the programs, as far as they are there.
fn contestants() -> Vec<&'static str> {
    let mut names = vec!["ours"];
    if peers_are_installed(&["qemu-storage-daemon"]) {
        names.push("qemu");
    }
    names
}

impl Measured {
    fn start(name: &'static str, dir: &Path) -> Measured {
        let mut command = program(name);
        command.current_dir(dir).args([
            "--chardev",
            "socket,path=control,server=on,wait=off,id=c",
            "--monitor",
            "c",
            "--pidfile",
            "pid",
            "--nbd-server",
            "addr.type=unix,addr.path=nbd,max-connections=0",
        ]);
        let server = Server::start(&mut command, &dir.join("control"));
        let client = Client::connect(&dir.join("control"), Some(PATIENCE)).unwrap();
        let process = std::fs::read_to_string(dir.join("pid")).unwrap();
        Measured {
            name,
            _server: server,
            client,
            process: process.trim().to_string(),
        }
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Value {
        let answer = self.client.execute(command, arguments);
        answer.unwrap_or_else(|error| panic!("{}: {command}: {error}", self.name))
    }

    fn add(&mut self, node: &str, file: &str) {
        let cache = json!({"direct": false});
        self.ask(
            "blockdev-add",
            json!({"driver": "qcow2", "node-name": node, "discard": "unmap",
                "file": {"driver": "file", "filename": file, "cache": cache}}),
        );
    }

    fn export(&mut self, node: &str) {
        let export = json!({"type": "nbd", "id": node, "node-name": node, "writable": true});
        self.ask("block-export-add", export);
    }

    /// Bytes of memory that are its own, in use now.
    fn memory(&self) -> u64 {
        let file = format!("/proc/{}/smaps_rollup", self.process);
        let text = std::fs::read_to_string(file).unwrap();
        let of = |field: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(field));
            let number = line.unwrap().split_whitespace().next().unwrap();
            number.parse::<u64>().unwrap() * 1024
        };
        of("Private_Dirty:") + of("Private_Clean:")
    }

    /// Waits until a job is in a state.
    fn wait(&mut self, job: &str, status: &str) {
        let wanted = |event: &cowslip_qmp::client::Received| {
            let of = |name: &str| event.data.get(name).and_then(Value::as_str);
            assert!(of("error").is_none(), "{event:?}");
            of("id") == Some(job) && of("status") == Some(status)
        };
        let found = self.client.wait_for(PATIENCE, wanted).unwrap();
        assert!(found.is_some(), "{}: {job} is not {status}", self.name);
    }
}

fn create(dir: &Path, words: &[&str]) {
    run(cowslip()
        .current_dir(dir)
        .args(["create", "-q", "-f", "qcow2"])
        .args(words));
}

/// Disks that nobody uses, and what each adds.
fn idle_disks(daemon: &mut Measured, dir: &Path, count: usize) -> (u64, Duration) {
    let name = |at: usize| format!("d{at}");
    for at in 0..=count {
        create(dir, &[&format!("{}.qcow2", name(at)), "1G"]);
    }
    // What the first one costs is not the disk's.
    daemon.add(&name(0), "d0.qcow2");
    daemon.export(&name(0));
    let before = daemon.memory();
    for at in 1..count {
        daemon.add(&name(at), &format!("{}.qcow2", name(at)));
        daemon.export(&name(at));
    }
    let each = (daemon.memory().saturating_sub(before)) / count as u64;
    let begun = Instant::now();
    daemon.add(&name(count), &format!("{}.qcow2", name(count)));
    daemon.export(&name(count));
    (each, begun.elapsed())
}

#[test]
fn an_idle_disk_takes_little_memory() {
    let dir = &scratch();
    let mut daemon = Measured::start("ours", dir);
    let (each, _) = idle_disks(&mut daemon, dir, 50);
    assert!(each < 2 * MIB, "{each} bytes a disk");
}

#[test]
#[ignore = "a measurement"]
fn five_hundred_disks() {
    println!("500 disks: memory of a further one that is idle, time to add and export it");
    for name in contestants() {
        let dir = scratch();
        let mut daemon = Measured::start(name, dir.path());
        let (each, time) = idle_disks(&mut daemon, dir.path(), 500);
        println!("  {name}: {} KiB, {time:.2?}", each >> 10);
    }
}

/// A chain whose layers hold some clusters each; its uppermost image.
fn chain(dir: &Path, layers: usize) -> String {
    for layer in 0..layers {
        let (name, below) = (
            format!("l{layer}.qcow2"),
            format!("l{}.qcow2", layer.max(1) - 1),
        );
        match layer {
            0 => create(dir, &[&name, "4G"]),
            _ => create(dir, &["-b", &below, "-F", "qcow2", &name]),
        }
        let mut io = cowslip();
        io.current_dir(dir).arg("io");
        // 40 clusters a layer, spread over the disk.
        for at in 0..40 {
            let offset = (((layer * 40 + at) as u64 * 2_654_435_761) % (4 << 30)) & !0xffff;
            io.args([
                "-c",
                &format!("write -q -P {} {offset} 64k", layer % 250 + 1),
            ]);
        }
        run(io.arg(&name));
    }
    format!("l{}.qcow2", layers - 1)
}

#[test]
#[ignore = "a measurement"]
fn chains_of_300_layers() {
    println!("chains: time to open (warm), memory with reads, 20 000 random reads of 4 KiB");
    for layers in [1, 300] {
        let dir = &scratch();
        let top = chain(dir, layers);
        for name in contestants() {
            let mut daemon = Measured::start(name, dir);
            let before = daemon.memory();
            daemon.add("warm", &top);
            daemon.ask("blockdev-del", json!({"node-name": "warm"}));
            let begun = Instant::now();
            daemon.add("n", &top);
            let opened = begun.elapsed();
            daemon.export("n");
            let reads = load::reads(&dir.join("nbd"), "n", 20_000);
            let memory = daemon.memory().saturating_sub(before);
            println!(
                "  {layers} layers, {name}: {opened:.2?}, {} KiB, {:.1} us a read",
                memory >> 10,
                reads.as_secs_f64() * 1e6 / 20_000.0
            );
        }
    }
}

/// Bytes of data that a job copies.
const COPIED: u64 = 1 << 30;

/// Images for a job: `base` with data, `a` over it, with data if the job copies its own, and an
/// empty `t`.
fn images(dir: &Path, kind: &str) {
    let size = (2 * COPIED).to_string();
    create(dir, &["base.qcow2", &size]);
    create(dir, &["-b", "base.qcow2", "-F", "qcow2", "a.qcow2"]);
    create(dir, &["t.qcow2", &size]);
    let filled = match kind {
        "stream" => 1,
        _ => 2,
    };
    for name in ["base.qcow2", "a.qcow2"].into_iter().take(filled) {
        let write = format!("write -q -P 5 0 {COPIED}");
        run(cowslip()
            .current_dir(dir)
            .args(["io", "-c", &write, "-c", "flush", name]));
    }
}

/// A job that copies the data of `a`, or of `base`, until a further command would end it.
fn job(daemon: &mut Measured, kind: &str) {
    let (command, arguments) = match kind {
        "mirror" => ("blockdev-mirror", json!({"target": "t", "sync": "top"})),
        "backup" => ("blockdev-backup", json!({"target": "t", "sync": "top"})),
        "stream" => ("block-stream", json!({"auto-dismiss": false})),
        _ => ("block-commit", json!({})),
    };
    let mut arguments = arguments;
    arguments["job-id"] = "j".into();
    arguments["device"] = "a".into();
    daemon.ask(command, arguments);
    match kind {
        "backup" | "stream" => daemon.wait("j", "concluded"),
        _ => daemon.wait("j", "ready"),
    }
}

#[test]
#[ignore = "a measurement"]
fn guests_beside_jobs() {
    println!("a guest that has its next request at once:");
    // It writes all that a stream would copy before that begins.
    beside_jobs(Rhythm::Steady, &["mirror", "backup", "commit"]);
}

#[test]
#[ignore = "a measurement"]
fn even_guests_beside_jobs() {
    println!("a guest of 3000 requests a second:");
    beside_jobs(
        Rhythm::Even(3000),
        &["mirror", "backup", "commit", "stream"],
    );
}

fn beside_jobs(rhythm: Rhythm, kinds: &[&str]) {
    println!(
        "a guest of 4 KiB at depth 4, half writes, alone and beside a job of 1 GiB: requests a \
         second, median, p99, the longest"
    );
    let way = (2 * COPIED, rhythm);
    for kind in kinds {
        for name in contestants() {
            let dir = &scratch();
            images(dir, kind);
            run(Command::new("sync").arg("-f").arg(dir));
            let mut daemon = Measured::start(name, dir);
            daemon.add("a", "a.qcow2");
            daemon.add("t", "t.qcow2");
            daemon.export("a");
            let socket: PathBuf = dir.join("nbd");
            let alone = Load::start(&socket, "a", way);
            std::thread::sleep(Duration::from_secs(4));
            let alone = alone.stop();
            run(Command::new("sync").arg("-f").arg(dir));
            let beside = Load::start(&socket, "a", way);
            std::thread::sleep(Duration::from_millis(200));
            let begun = Instant::now();
            job(&mut daemon, kind);
            let time = begun.elapsed();
            let beside = beside.stop();
            println!(
                "  {kind}, {name}: alone {alone}; beside {beside}; {:.1} x; job {:.0} MiB/s",
                beside.p99.as_secs_f64() / alone.p99.as_secs_f64(),
                COPIED as f64 / MIB as f64 / time.as_secs_f64()
            );
        }
    }
}

/// An image whose clusters were written in no order, of which every second one behind the first
/// half is dead.
fn disordered(dir: &Path, (disk_bytes, cluster_bytes): (u64, u64)) {
    let clusters = disk_bytes / cluster_bytes;
    let mut places: Vec<u64> = (0..clusters).collect();
    let mut rng = Rng::new(1);
    places.sort_by_cached_key(|_| rng.next());
    let writes = places
        .iter()
        .map(|at| format!("write -q -P 5 {} {cluster_bytes}\n", at * cluster_bytes));
    let dead = (clusters / 2..clusters).step_by(2);
    let discards = dead.map(|at| format!("discard -q {} {cluster_bytes}\n", at * cluster_bytes));
    std::fs::write(
        dir.join("lines"),
        writes.chain(discards).collect::<String>(),
    )
    .unwrap();
    let options = format!("cluster_size={cluster_bytes}");
    create(dir, &["-o", &options, "a.qcow2", &disk_bytes.to_string()]);
    let lines = std::fs::File::open(dir.join("lines")).unwrap();
    let mut shell = cowslip();
    let shell = shell
        .current_dir(dir)
        .args(["io", "-d", "unmap", "a.qcow2"]);
    let output = shell.stdin(lines).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
#[ignore = "a measurement"]
fn guests_beside_compactions() {
    let cluster_bytes = number_from_environment("COWSLIP_COMPACT_CLUSTER").unwrap_or(65_536);
    let disk_bytes = COPIED.min(cluster_bytes << 17);
    println!(
        "a guest of 4 KiB at depth 4, half writes, alone and beside a compaction in order of an \
         image of {} MiB in clusters of {cluster_bytes}: requests a second, median, p99, the \
         longest",
        disk_bytes / MIB
    );
    let background = json!({"speed": 20 * MIB, "background": true, "idle-ms": 100});
    for (kind, rhythm, options) in [
        ("at full rate", Rhythm::Steady, json!({})),
        ("at 20 MiB/s", Rhythm::Steady, json!({"speed": 20 * MIB})),
        ("in the background", Rhythm::Steady, background.clone()),
        ("in the background, in bursts", Rhythm::InBursts, background),
    ] {
        let dir = &scratch();
        disordered(dir, (disk_bytes, cluster_bytes));
        run(Command::new("sync").arg("-f").arg(dir));
        let mut daemon = Measured::start("ours", dir);
        daemon.add("a", "a.qcow2");
        daemon.export("a");
        let socket: PathBuf = dir.join("nbd");
        let beside = |daemon: &mut Measured, options: Option<&Value>| {
            let load = Load::start(&socket, "a", (disk_bytes, rhythm));
            if let Some(options) = options {
                let mut arguments = options.clone();
                arguments["job-id"] = "j".into();
                arguments["device"] = "a".into();
                arguments["defragment"] = true.into();
                daemon.ask("x-cowslip-compact", arguments);
            }
            std::thread::sleep(Duration::from_secs(8));
            load.stop()
        };
        let alone = beside(&mut daemon, None);
        let with = beside(&mut daemon, Some(&options));
        let jobs = daemon.ask("query-jobs", json!({}));
        println!(
            "  {kind}: alone {alone}; beside {with}; {:.1} x; job {:?}",
            with.p99.as_secs_f64() / alone.p99.as_secs_f64(),
            jobs[0]["current-progress"]
        );
    }
}
