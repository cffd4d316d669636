//! `cowslip serve` and the NBD programs of others: qemu-io, qemu-img, nbdinfo, nbdcopy, fio.
//!
//! The server is a process, the clients are processes, the image is checked by both checkers when
//! the server has ended. What the protocol says in every corner is tested in `cowslip-nbd`.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::fs;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::support::rng::Rng;
use crate::support::{
    cowslip, outcome, peers_are_installed, qemu_img, run, scratch, scratch_beside,
};

const DISK_BYTES: u64 = 64 << 20;

/// A running server and its files; killed if a test fails.
struct Served {
    directory: crate::support::Scratch,
    child: Child,
}

impl Served {
    /// Serves a fresh overlay with subclusters on a raw file with random data.
    fn overlay(rng: &mut Rng) -> Served {
        let directory = scratch();
        let base = fs::File::create(directory.path().join("base.raw")).unwrap();
        base.set_len(DISK_BYTES).unwrap();
        for _ in 0..64 {
            let bytes = rng.bytes(200 << 10);
            base.write_all_at(&bytes, rng.below(DISK_BYTES - (200 << 10)))
                .unwrap();
        }
        let image = directory.path().join("image.qcow2");
        let options = [
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            "extended_l2=on",
            "-F",
            "raw",
        ];
        run(cowslip()
            .args(options)
            .arg("-b")
            .arg(directory.path().join("base.raw"))
            .arg(&image));
        Served::start(directory, &[])
    }

    /// Serves `image.qcow2` of a directory.
    fn start(directory: crate::support::Scratch, options: &[&str]) -> Served {
        let socket = directory.path().join("socket");
        let mut child = cowslip()
            .args(["serve", "--format=qcow2", "--discard=unmap"])
            .args(options)
            .arg("--socket")
            .arg(&socket)
            .arg(directory.path().join("image.qcow2"))
            .stdin(Stdio::null())
            .spawn()
            .expect("the server can be started");
        let start = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "it does not listen"
            );
            assert!(child.try_wait().unwrap().is_none(), "it ended");
            sleep(Duration::from_millis(10));
        }
        Served { directory, child }
    }

    fn image(&self) -> PathBuf {
        self.directory.path().join("image.qcow2")
    }

    fn uri(&self) -> String {
        let socket = self.directory.path().join("socket");
        format!("nbd+unix:///?socket={}", socket.display())
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }

    /// Runs a command of qemu-io against it.
    fn qemu_io(&self, commands: &[String]) -> Command {
        let mut qemu_io = Command::new("qemu-io");
        qemu_io.args(["-f", "raw"]);
        for command in commands {
            qemu_io.args(["-c", command]);
        }
        qemu_io.arg(self.uri());
        qemu_io
    }

    /// Ends the server, which must end well, and has the image checked; the directory goes on.
    fn stop(mut self) -> Stopped {
        run(Command::new("kill").args(["-TERM", &self.pid()]));
        let status = self.child.wait().unwrap();
        assert!(status.success(), "the server: {status}");
        let image = self.image();
        qemu_img(&["check", "-q", "-f", "qcow2"], &[&image]);
        run(cowslip().args(["check", "-q", "-f", "qcow2"]).arg(&image));
        let empty = scratch();
        let directory = std::mem::replace(&mut self.directory, empty);
        Stopped { directory, image }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if self.child.try_wait().unwrap().is_none() {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
        }
    }
}

/// The files after the server has ended.
struct Stopped {
    directory: crate::support::Scratch,
    image: PathBuf,
}

impl Stopped {
    /// QEMU says that the image reads as this raw file.
    fn reads_as(&self, raw: &Path) {
        let words = ["compare", "-f", "qcow2", "-F", "raw"];
        assert_eq!(
            qemu_img(&words, &[&self.image, raw]),
            "Images are identical.\n"
        );
    }
}

#[test]
fn qemu_io_writes_zeroes_discards_and_reads_back() {
    if !peers_are_installed(&["qemu-io", "qemu-img"]) {
        return;
    }
    let mut rng = Rng::new(1);
    let served = Served::overlay(&mut rng);
    let model = served.directory.path().join("model.raw");
    fs::copy(served.directory.path().join("base.raw"), &model).unwrap();
    let file = fs::File::options().write(true).open(&model).unwrap();
    let mut commands = Vec::new();
    for _ in 0..80 {
        let unit = *rng.pick(&[512, 4096, 65536]);
        let len = unit * (1 + rng.below(8));
        let offset = rng.below((DISK_BYTES - len) / unit) * unit;
        let pattern = 1 + rng.below(255) as u8;
        let (command, byte) = match rng.below(5) {
            0 => (format!("write -z {offset} {len}"), 0),
            1 => (format!("write -z -u {offset} {len}"), 0),
            2 => (format!("write -f -P {pattern} {offset} {len}"), pattern),
            _ => (format!("aio_write -P {pattern} {offset} {len}"), pattern),
        };
        // Requests in flight at once must not overlap: each waits for those before it.
        commands.push(command);
        commands.push("aio_flush".to_string());
        commands.push(format!("read -P {byte} {offset} {len}"));
        file.write_all_at(&vec![byte; len as usize], offset)
            .unwrap();
    }
    let output = run(&mut served.qemu_io(&commands));
    assert!(!output.contains("verification failed"), "{output}");
    // Discards: what they leave is old or zero; the model takes over what QEMU reads.
    run(&mut served.qemu_io(&["discard 0 1M".to_string(), "discard 5M 70k".to_string()]));
    let stopped = served.stop();
    let truth = stopped.directory.path().join("truth.raw");
    qemu_img(
        &["convert", "-f", "qcow2", "-O", "raw"],
        &[&stopped.image, &truth],
    );
    let (mut read, mut expected) = (vec![0; DISK_BYTES as usize], vec![0; DISK_BYTES as usize]);
    fs::File::open(&truth)
        .unwrap()
        .read_exact_at(&mut read, 0)
        .unwrap();
    fs::File::open(&model)
        .unwrap()
        .read_exact_at(&mut expected, 0)
        .unwrap();
    let discarded = [0..1 << 20, 5 << 20..(5 << 20) + (70 << 10)];
    for (at, (byte, old)) in read.iter().zip(&expected).enumerate() {
        let may_be_zero = discarded.iter().any(|range| range.contains(&at));
        assert!(
            byte == old || (may_be_zero && *byte == 0),
            "byte {at}: {byte}, was {old}"
        );
    }
}

#[test]
fn a_request_beyond_the_end_fails_and_harms_nobody() {
    if !peers_are_installed(&["qemu-io", "qemu-img"]) {
        return;
    }
    let served = Served::overlay(&mut Rng::new(2));
    let output = outcome(&mut served.qemu_io(&[format!("write {DISK_BYTES} 512")]));
    assert!(!output.status.success());
    run(&mut served.qemu_io(&["write -P 7 0 4k".to_string(), "read -P 7 0 4k".to_string()]));
    served.stop();
}

#[test]
fn qemu_img_maps_converts_and_compares() {
    if !peers_are_installed(&["qemu-io", "qemu-img"]) {
        return;
    }
    let served = Served::overlay(&mut Rng::new(3));
    run(&mut served.qemu_io(&[
        "write -z 1M 2M".to_string(),
        "write -P 5 8M 64k".to_string(),
    ]));
    let uri = served.uri();
    let map = run(Command::new("qemu-img").args(["map", "--output=json", "-f", "raw", &uri]));
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let state = |offset: u64| {
        let extents = map.as_array().unwrap();
        let extent = extents.iter().find(|e| {
            let start = e["start"].as_u64().unwrap();
            (start..start + e["length"].as_u64().unwrap()).contains(&offset)
        });
        extent.unwrap()["zero"].as_bool().unwrap()
    };
    assert!(state(2 << 20), "zeroes are reported as zeroes");
    assert!(!state(8 << 20), "data is reported as data");
    let copy = served.directory.path().join("copy.raw");
    run(Command::new("qemu-img")
        .args(["convert", "-f", "raw", "-O", "raw", &uri])
        .arg(&copy));
    let words = ["compare", "-f", "raw", "-F", "raw", &uri];
    assert_eq!(qemu_img(&words, &[&copy]), "Images are identical.\n");
    served.stop().reads_as(&copy);
}

#[test]
fn nbdinfo_is_told_size_flags_and_contexts() {
    if !peers_are_installed(&["nbdinfo"]) {
        return;
    }
    let served = Served::overlay(&mut Rng::new(4));
    let text = run(Command::new("nbdinfo").args(["--json", &served.uri()]));
    let info: serde_json::Value = serde_json::from_str(&text).unwrap();
    let export = &info["exports"][0];
    assert_eq!(export["export-size"], DISK_BYTES);
    for can in [
        "can_flush",
        "can_fua",
        "can_trim",
        "can_zero",
        "can_multi_conn",
        "can_df",
        "can_fast_zero",
    ] {
        assert_eq!(export[can], true, "{can} in {text}");
    }
    assert_eq!(export["is_read_only"], false);
    assert_eq!(export["contexts"][0], "base:allocation");
    let map = run(Command::new("nbdinfo").args(["--map", "--json", &served.uri()]));
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let total: u64 = map
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["length"].as_u64().unwrap())
        .sum();
    assert_eq!(total, DISK_BYTES, "the map covers the disk");
}

#[test]
fn a_read_only_export_says_so_and_refuses_writes() {
    let Some(directory) = scratch_beside(&["nbdinfo", "qemu-img", "qemu-io"]) else {
        return;
    };
    qemu_img(
        &["create", "-q", "-f", "qcow2"],
        &[&directory.path().join("image.qcow2"), Path::new("8M")],
    );
    let served = Served::start(directory, &["--read-only"]);
    let text = run(Command::new("nbdinfo").args(["--json", &served.uri()]));
    let info: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(info["exports"][0]["is_read_only"], true);
    assert!(
        !outcome(&mut served.qemu_io(&["write 0 4k".to_string()]))
            .status
            .success()
    );
    served.stop();
}

#[test]
fn nbdcopy_copies_in_and_out() {
    if !peers_are_installed(&["nbdcopy", "qemu-img"]) {
        return;
    }
    let mut rng = Rng::new(5);
    let served = Served::overlay(&mut rng);
    let source = served.directory.path().join("source.raw");
    let file = fs::File::create(&source).unwrap();
    file.set_len(DISK_BYTES).unwrap();
    for _ in 0..40 {
        file.write_all_at(&rng.bytes(300 << 10), rng.below(DISK_BYTES - (300 << 10)))
            .unwrap();
    }
    run(Command::new("nbdcopy")
        .arg("--flush")
        .arg(&source)
        .arg(served.uri()));
    let target = served.directory.path().join("target.raw");
    run(Command::new("nbdcopy").arg(served.uri()).arg(&target));
    let stopped = served.stop();
    stopped.reads_as(&source);
    stopped.reads_as(&target);
}

#[test]
fn fio_verifies_what_it_wrote() {
    if !peers_are_installed(&["fio", "qemu-img"]) {
        return;
    }
    let served = Served::overlay(&mut Rng::new(6));
    for (block_sizes, fsync) in [
        ("--bs=4k", "--fsync=500"),
        ("--bsrange=512-96k", "--fsync=0"),
    ] {
        let mut fio = Command::new("fio");
        fio.args([
            "--name=verify",
            "--ioengine=nbd",
            "--rw=randwrite",
            "--iodepth=32",
        ]);
        fio.args([
            "--verify=crc32c",
            "--do_verify=1",
            "--verify_fatal=1",
            "--size=48M",
        ]);
        fio.args(["--blockalign=512", "--randseed=3", "--output-format=terse"]);
        fio.args([block_sizes, fsync]);
        // fio leaves a file with the state of its verification.
        fio.current_dir(served.directory.path());
        run(fio.arg(format!("--uri={}", served.uri())));
    }
    served.stop();
}

#[test]
fn eight_clients_on_ranges_of_their_own() {
    if !peers_are_installed(&["fio", "qemu-img"]) {
        return;
    }
    let served = Served::overlay(&mut Rng::new(7));
    let mut fio = Command::new("fio");
    fio.args([
        "--name=own",
        "--ioengine=nbd",
        "--rw=randwrite",
        "--bs=4k",
        "--iodepth=16",
    ]);
    fio.args([
        "--numjobs=8",
        "--size=8M",
        "--offset_increment=8M",
        "--thread",
    ]);
    fio.args([
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
        "--output-format=terse",
    ]);
    fio.current_dir(served.directory.path());
    run(fio.arg(format!("--uri={}", served.uri())));
    served.stop();
}

#[test]
fn eight_clients_on_the_same_range_leave_whole_sectors() {
    if !peers_are_installed(&["qemu-io", "qemu-img"]) {
        return;
    }
    const SHARED_BYTES: u64 = 1 << 20;
    let served = Served::overlay(&mut Rng::new(8));
    let clients: Vec<Child> = (1..=8u64)
        .map(|client| {
            let mut rng = Rng::new(client);
            let mut commands = vec![format!("write -P {client} 0 {SHARED_BYTES}")];
            for _ in 0..150 {
                let len = 512 * (1 + rng.below(40));
                let offset = rng.below((SHARED_BYTES - len) / 512) * 512;
                commands.push(format!("aio_write -P {client} {offset} {len}"));
            }
            commands.push("aio_flush".to_string());
            commands.push("flush".to_string());
            served
                .qemu_io(&commands)
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    for mut client in clients {
        assert!(client.wait().unwrap().success(), "a client failed");
    }
    let stopped = served.stop();
    let truth = stopped.directory.path().join("truth.raw");
    qemu_img(
        &["convert", "-f", "qcow2", "-O", "raw"],
        &[&stopped.image, &truth],
    );
    let mut bytes = vec![0; SHARED_BYTES as usize];
    fs::File::open(&truth)
        .unwrap()
        .read_exact_at(&mut bytes, 0)
        .unwrap();
    for (sector, bytes) in bytes.chunks_exact(512).enumerate() {
        let first = bytes[0];
        assert!(
            (1..=8).contains(&first),
            "sector {sector} holds {first}, nobody's byte"
        );
        assert!(bytes.iter().all(|b| *b == first), "sector {sector} is torn");
    }
}

#[test]
fn a_client_that_is_killed_in_the_middle_harms_nobody() {
    if !peers_are_installed(&["fio", "qemu-io", "qemu-img"]) {
        return;
    }
    let served = Served::overlay(&mut Rng::new(9));
    let mut fio = Command::new("fio")
        .args([
            "--name=victim",
            "--ioengine=nbd",
            "--rw=randwrite",
            "--bs=64k",
            "--iodepth=32",
        ])
        .args(["--size=32M", "--offset=32M", "--time_based", "--runtime=60"])
        .arg(format!("--uri={}", served.uri()))
        .current_dir(served.directory.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    sleep(Duration::from_millis(800));
    assert!(fio.try_wait().unwrap().is_none(), "fio ended by itself");
    // Its children, which do the I/O, first: they would outlive it.
    outcome(Command::new("pkill").args(["-KILL", "-P", &fio.id().to_string()]));
    fio.kill().unwrap();
    fio.wait().unwrap();
    run(&mut served.qemu_io(&[
        "write -P 7 1M 64k".to_string(),
        "read -P 7 1M 64k".to_string(),
    ]));
    served.stop();
}

/// Runs of a metadata context, neighbours of one state joined.
fn context_of(uri: &str, context: &str) -> Vec<(u64, u64, u64)> {
    let map = format!("--map={context}");
    let map = run(Command::new("nbdinfo").args([&map, "--json", uri]));
    let map: Vec<serde_json::Value> = serde_json::from_str(&map).unwrap();
    let mut runs: Vec<(u64, u64, u64)> = Vec::new();
    for extent in map {
        let number = |key: &str| extent[key].as_u64().unwrap();
        match runs.last_mut() {
            Some(last) if last.2 == number("type") => last.1 += number("length"),
            _ => runs.push((number("offset"), number("length"), number("type"))),
        }
    }
    runs
}

/// The allocation depth of a chain of three, with data, zeroes and gaps in each layer, is reported
/// as by qemu-nbd.
#[test]
fn allocation_depth_is_told_as_qemu_nbd_tells_it() {
    let Some(directory) = scratch_beside(&["nbdinfo", "qemu-img", "qemu-nbd", "qemu-io"]) else {
        return;
    };
    let name = |name: &str| directory.path().join(name);
    let layers: [(&str, &[&str]); 3] = [
        ("base.qcow2", &["write -P 1 0 4M", "write -P 2 30M 1M"]),
        (
            "middle.qcow2",
            &["write -P 3 2M 4M", "write -z 8M 1M", "write -z 30M 512k"],
        ),
        (
            "image.qcow2",
            &[
                "write -P 4 1M 2M",
                "write -z -u 5M 512k",
                "write -P 5 8256k 64k",
            ],
        ),
    ];
    let mut below: Option<PathBuf> = None;
    for (layer, commands) in layers {
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2"]);
        if let Some(below) = &below {
            create.args(["-F", "qcow2", "-b"]).arg(below);
        }
        run(create.arg(name(layer)).arg("64M"));
        let mut shell = Command::new("qemu-io");
        for command in commands {
            shell.args(["-c", command]);
        }
        run(shell.arg(name(layer)));
        below = Some(name(layer));
    }
    let maps = |program: &mut Command, socket: &str| {
        let socket = name(socket);
        let serving = program
            .args(["-t", "-A", "-r", "-f", "qcow2", "-k"])
            .arg(&socket);
        let mut child = serving.arg(name("image.qcow2")).spawn().unwrap();
        let begun = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "it does not listen"
            );
            sleep(Duration::from_millis(10));
        }
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        let maps = ["qemu:allocation-depth", "base:allocation"].map(|name| context_of(&uri, name));
        child.kill().unwrap();
        child.wait().unwrap();
        maps
    };
    let ours = maps(cowslip().arg("qemu-nbd"), "ours");
    let theirs = maps(&mut Command::new("qemu-nbd"), "theirs");
    assert_eq!(ours, theirs);
    let depths = |deep: u64| ours[0].iter().filter(|run| run.2 == deep).count();
    assert!(
        (0..4).all(|deep| depths(deep) > 0),
        "each layer shows: {ours:?}"
    );
    // A server without the option does not report it.
    let quiet = Served::start(directory, &["--read-only"]);
    let info = run(Command::new("nbdinfo").args(["--json", &quiet.uri()]));
    assert!(!info.contains("qemu:allocation-depth"), "{info}");
}
