//! A copy into an export, or a device, of exactly the size that `measure` reports, which is the
//! same for both programs.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;
use std::process::Command;

use crate::support::golden::ours;
use crate::support::loop_device::LoopDevice;
use crate::support::server::Server;
use crate::support::{cowslip, peers_are_installed, run, scratch, scratch_beside};

const ENCRYPTED: &str =
    "cluster_size=2k,encrypt.format=luks,encrypt.key-secret=s0,encrypt.iter-time=10";

/// A source, options of the target, and words for `convert`.
const COPIES: &[(&str, &str, &str)] = &[
    ("large.qcow2", "", "-c"),
    ("large.qcow2", "cluster_size=2M", "-c"),
    ("noise.raw", "", ""),
    ("noise.raw", "", "-c"),
    ("noise.raw", "cluster_size=512", ""),
    ("noise.raw", "cluster_size=512,refcount_bits=64", "-c"),
    ("noise.raw", "cluster_size=16k,extended_l2=on", "-W"),
    ("noise.raw", "cluster_size=4k,compression_type=zstd", "-c"),
    ("noise.raw", "cluster_size=4k,preallocation=falloc", ""),
    ("noise.raw", "preallocation=full", ""),
    ("noise.raw", "compat=0.10,cluster_size=1k", "-c -m 16"),
    ("noise.raw", ENCRYPTED, ""),
    ("top.qcow2", "cluster_size=1k", ""),
    ("marked.qcow2", "", "--bitmaps"),
    ("marked.qcow2", "cluster_size=512", "--bitmaps"),
    ("marked.qcow2", "cluster_size=4k", "-l then"),
];

/// Where the target is.
#[derive(Clone, Copy, Debug)]
enum Target {
    QemuNbd,
    OurServer,
    Device,
}

/// The target, gone when dropped.
struct Place {
    name: String,
    _device: Option<LoopDevice>,
    _server: Option<Server>,
}

impl Place {
    /// `None` where there are no loop devices.
    fn new(target: Target, file: &Path) -> Option<Place> {
        let socket = file.with_extension("socket");
        let server = match target {
            Target::Device => {
                let device = LoopDevice::over(file, &[])?;
                return Some(Place {
                    name: device.path.display().to_string(),
                    _device: Some(device),
                    _server: None,
                });
            }
            Target::QemuNbd => Server::of_qemu(file, &socket, &[]),
            Target::OurServer => {
                let mut command = cowslip();
                command.args(["qemu-nbd", "-t", "-f", "raw", "-k"]);
                Server::start(command.arg(&socket).arg(file), &socket)
            }
        };
        Some(Place {
            name: server.uri(),
            _device: None,
            _server: Some(server),
        })
    }
}

/// A little data on a large disk, noise everywhere, a chain, a disk with bitmaps and a snapshot.
fn make_sources(dir: &Path) {
    let noise = (0..3u64 << 20).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8);
    std::fs::write(dir.join("noise.raw"), noise.collect::<Vec<u8>>()).unwrap();
    let run_there = |program: &str, words: &[&str]| {
        run(Command::new(program).current_dir(dir).args(words));
    };
    let lines = [
        "create -q -f qcow2 large.qcow2 1G",
        "create -q -f qcow2 -b noise.raw -F raw top.qcow2",
        "convert -f raw -O qcow2 noise.raw marked.qcow2",
        "bitmap --add -g 512 marked.qcow2 one",
        "bitmap --add -g 512 marked.qcow2 two",
        "bitmap --add -g 64k marked.qcow2 three",
        "snapshot -c then marked.qcow2",
    ];
    for line in lines {
        run_there("qemu-img", &line.split(' ').collect::<Vec<_>>());
    }
    for (image, write) in [
        ("large.qcow2", "write 1M 64k"),
        ("top.qcow2", "write -P 7 100k 300k"),
        ("marked.qcow2", "write -P 9 0 1M"),
    ] {
        run_there("qemu-io", &["-f", "qcow2", "-c", write, image]);
    }
}

fn measured(mut program: Command, dir: &Path, line: &[&str]) -> (u64, u64) {
    let report = run(program.current_dir(dir).arg("measure").args(line));
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let number = |key: &str| report[key].as_u64().unwrap_or(0);
    (number("required"), number("bitmaps"))
}

fn check_copy(dir: &Path, target: Target, (source, options, words): (&str, &str, &str)) {
    let what = format!("{target:?}: {source} {options} {words}");
    let secret = ["--object", "secret,id=s0,data=abc"];
    let of_target: &[&str] = if options.is_empty() {
        &[]
    } else {
        &["-o", options]
    };
    let of_source: &[&str] = if words.contains("-l") {
        &["-l", "then"]
    } else {
        &[]
    };
    let line = [
        &secret[..],
        &["--output=json", "-O", "qcow2"],
        of_target,
        of_source,
        &[source],
    ]
    .concat();
    let (required, bitmaps) = measured(ours(), dir, &line);
    let (theirs, bits) = measured(Command::new("qemu-img"), dir, &line);
    // qemu-img does not count the clusters of the keys.
    let more = if options.contains("luks") { 2048 } else { 0 };
    assert_eq!((required, bitmaps), (theirs + more, bits), "{what}");
    let bytes = required
        + if words.contains("--bitmaps") {
            bitmaps
        } else {
            0
        };

    let file = dir.join("target");
    // Its old content is no part of the copy.
    std::fs::write(&file, vec![0xa5; bytes as usize]).unwrap();
    let Some(place) = Place::new(target, &file) else {
        return;
    };
    let words: Vec<&str> = words.split_whitespace().collect();
    let line = [
        &secret[..],
        &["-O", "qcow2"],
        of_target,
        &words,
        &[source, &place.name],
    ]
    .concat();
    let output = crate::support::outcome(ours().current_dir(dir).arg("convert").args(line));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}: {bytes} bytes: {said}");
    drop(place);
    assert_eq!(std::fs::metadata(&file).unwrap().len(), bytes, "{what}");

    let key = match options.contains("key-secret") {
        true => ",encrypt.key-secret=s0",
        false => "",
    };
    let copy = format!("driver=qcow2,file.filename=target{key}");
    let format = if source.ends_with(".raw") {
        "raw"
    } else {
        "qcow2"
    };
    let snapshot = if of_source.is_empty() {
        ""
    } else {
        ",snapshot.name=then"
    };
    let original = format!("driver={format},file.filename={source}{snapshot}");
    let compare = ["compare", "-q", "--image-opts", &original, &copy];
    run(ours().current_dir(dir).args(compare).args(secret));
    let check = ["check", "-q", "--image-opts", &copy];
    run(Command::new("qemu-img")
        .current_dir(dir)
        .args(check)
        .args(secret));
    std::fs::remove_file(file).unwrap();
}

#[test]
fn a_copy_fits_into_exactly_what_was_measured() {
    if !peers_are_installed(&["qemu-img", "qemu-io", "qemu-nbd"]) {
        return;
    }
    let targets = [Target::QemuNbd, Target::OurServer, Target::Device];
    let dir = scratch();
    make_sources(dir.path());
    for (at, copy) in COPIES.iter().enumerate() {
        check_copy(dir.path(), targets[at % targets.len()], *copy);
    }
}

/// Space on a device beyond the first refcount block, 2 GiB with the usual clusters, gets its
/// refcount blocks when they are needed, also in a later session.
#[test]
fn an_image_uses_all_of_its_device() {
    let Some(dir) = scratch_beside(&["qemu-img", "qemu-io", "losetup"]) else {
        return;
    };
    let file = dir.path().join("target");
    std::fs::write(&file, vec![0xa5; 700 << 10]).unwrap();
    let Some(place) = Place::new(Target::Device, &file) else {
        return;
    };
    let device = &place.name;
    run(ours()
        .args(["create", "-q", "-f", "qcow2", "-o", "cluster_size=512"])
        .args([device, "600k"]));
    for (pattern, at) in [("1", "0"), ("2", "300k")] {
        let write = format!("write -P {pattern} {at} 300k");
        run(cowslip().args(["io", "-f", "qcow2", "-c", &write, device]));
    }
    run(Command::new("qemu-img").args(["check", "-q", "-f", "qcow2", device]));
    let reads = [
        "-f",
        "qcow2",
        "-c",
        "read -P 1 0 300k",
        "-c",
        "read -P 2 300k 300k",
        device,
    ];
    let printed = run(Command::new("qemu-io").args(reads));
    assert!(!printed.contains("verification failed"), "{printed}");
}
