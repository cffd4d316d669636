//! Block devices with blocks of 512 and of 4096 bytes, through the page cache and past it: what
//! every verb writes, at odd places and of odd lengths. Beside QEMU, on a device of the same kind.
//! Needs root and loop devices, and says so if it has neither.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::support::golden::{self, said};
use crate::support::loop_device::LoopDevice;
use crate::support::rng::Rng;
use crate::support::{cowslip, outcome, peers_are_installed, qemu_img, run, scratch};

const DEVICE_BYTES: usize = 2 << 20;
const BLOCKS: [u32; 2] = [512, 4096];
const CACHES: [&str; 5] = ["none", "writeback", "unsafe", "directsync", "writethrough"];

/// Ranges that are no whole blocks, in the first megabyte.
const ODD: [(usize, usize); 7] = [
    (512, 512),
    (100, 100),
    (4095, 2),
    (8192, 4096),
    (70_000, 30_001),
    (131_072, 65_536),
    (512 * 1000, 512 * 9),
];

/// A loop device on a file of its own.
struct Device {
    device: LoopDevice,
    _dir: tempfile::TempDir,
}

impl Device {
    fn new(block_bytes: u32, bytes: &[u8]) -> Option<Device> {
        let dir = scratch();
        let file = dir.path().join("disk");
        std::fs::write(&file, bytes).unwrap();
        let block = block_bytes.to_string();
        let device = LoopDevice::over(&file, &["--sector-size", &block])?;
        Some(Device { device, _dir: dir })
    }

    fn path(&self) -> &Path {
        &self.device.path
    }

    fn name(&self) -> &str {
        self.path().to_str().unwrap()
    }

    fn contents(&self) -> Vec<u8> {
        std::fs::read(self.path()).unwrap()
    }

    /// Puts bytes on it, from its beginning.
    fn fill(&self, bytes: &[u8]) {
        let device = std::fs::File::options().write(true).open(self.path());
        let device = device.unwrap();
        device.write_all_at(bytes, 0).unwrap();
        device.sync_all().unwrap();
    }
}

/// A device of ours and one of QEMU's, with the same bytes.
struct Twins {
    ours: Device,
    theirs: Device,
    before: Vec<u8>,
}

impl Twins {
    fn new(block_bytes: u32) -> Option<Twins> {
        if !peers_are_installed(&["qemu-img", "qemu-io"]) {
            return None;
        }
        let before = Rng::new(u64::from(block_bytes)).bytes(DEVICE_BYTES);
        Some(Twins {
            ours: Device::new(block_bytes, &before)?,
            theirs: Device::new(block_bytes, &before)?,
            before,
        })
    }

    fn reset(&self) {
        self.ours.fill(&self.before);
        self.theirs.fill(&self.before);
    }
}

/// A program as QEMU calls it, ours or theirs.
fn program(name: &str, is_ours: bool) -> Command {
    if !is_ours {
        return Command::new(name);
    }
    let mut command = cowslip();
    command.arg(name);
    command
}

fn must(line: &str, output: &Output) {
    assert!(output.status.success(), "{line}: {}", said(output));
}

/// What a range reads as after a discard: of each byte what it was, or zero.
fn assert_discarded(now: &[u8], before: &[u8], range: std::ops::Range<usize>, line: &str) {
    for at in 0..now.len() {
        let may_be_zero = range.contains(&at) && now[at] == 0;
        assert!(now[at] == before[at] || may_be_zero, "{line}: byte {at}");
    }
}

#[test]
fn zeroes_and_writes_at_odd_places_are_those_of_qemu() {
    for block in BLOCKS {
        let Some(twins) = Twins::new(block) else {
            return;
        };
        for cache in CACHES {
            twins.reset();
            let mut commands = Vec::new();
            for (at, len) in ODD {
                let behind = at + (1 << 20);
                commands.push(format!("write -z {at} {len}"));
                commands.push(format!("write -z -u {behind} {len}"));
                commands.push(format!("write -z -f {} {len}", at + len + 17));
                commands.push(format!("write -P 0x5a {} {len}", behind + len + 5));
            }
            let run = |is_ours: bool, device: &Device| {
                let mut shell = program("qemu-io", is_ours);
                shell.args(["-f", "raw", "-d", "unmap", "-t", cache]);
                for command in &commands {
                    shell.args(["-c", command]);
                }
                let output = outcome(shell.arg(device.path()));
                let line = format!("{block} {cache} {is_ours}");
                must(&line, &output);
                let told = String::from_utf8_lossy(&output.stdout).into_owned();
                let wrote: Vec<String> = told
                    .lines()
                    .filter(|line| line.starts_with("wrote") || line.contains("failed"))
                    .map(str::to_string)
                    .collect();
                assert_eq!(wrote.len(), commands.len(), "{line}: {told}");
                wrote
            };
            assert_eq!(run(true, &twins.ours), run(false, &twins.theirs));
            let is_same = twins.ours.contents() == twins.theirs.contents();
            assert!(is_same, "{block} {cache}");
        }
    }
}

#[test]
fn discards_at_odd_places_touch_nothing_else() {
    for block in BLOCKS {
        let Some(twins) = Twins::new(block) else {
            return;
        };
        let device = &twins.ours;
        for cache in CACHES {
            for (at, len) in ODD {
                device.fill(&twins.before);
                let line = format!("discard {at} {len}");
                let mut shell = program("qemu-io", true);
                shell.args(["-f", "raw", "-d", "unmap", "-t", cache, "-c", &line]);
                let output = outcome(shell.arg(device.path()));
                let line = format!("{block} {cache} {line}");
                must(&line, &output);
                assert!(!said(&output).contains("failed"), "{line}");
                let now = device.contents();
                assert_discarded(&now, &twins.before, at..at + len, &line);
            }
        }
    }
}

/// Files of lengths that are no multiple of a block.
fn sources(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let lengths = [512 * 1001, 512 * 9, 1000, (1 << 20) + 512];
    let make = |(number, len): (u64, usize)| {
        let mut bytes = Rng::new(number).bytes(len);
        // Zeroes at both ends and in between, which are not copied.
        bytes[..len / 4].fill(0);
        bytes[len / 2..len / 2 + len / 8].fill(0);
        bytes[len - len / 8..].fill(0);
        let name = format!("source{number}");
        std::fs::write(dir.join(&name), &bytes).unwrap();
        (name, bytes)
    };
    (0..).zip(lengths).map(make).collect()
}

#[test]
fn disks_of_odd_lengths_are_copied_to_devices() {
    let dir = scratch();
    let sources = sources(dir.path());
    for block in BLOCKS {
        let Some(twins) = Twins::new(block) else {
            return;
        };
        let device = twins.ours.name();
        for cache in CACHES {
            for (name, bytes) in &sources {
                for line in [
                    format!("convert -f raw -O raw -t {cache} {name} {device}"),
                    format!("convert -n -f raw -O raw -t {cache} {name} {device}"),
                    format!("convert -W -n -S 0 -f raw -O raw -t {cache} {name} {device}"),
                ] {
                    twins.ours.fill(&twins.before);
                    let line_words = golden::words(&line);
                    let mut copy = golden::ours();
                    let output = outcome(copy.current_dir(&dir).args(line_words));
                    must(&format!("{block} {line}"), &output);
                    let now = twins.ours.contents();
                    assert!(now[..bytes.len()] == bytes[..], "{block} {line}");
                }
            }
        }
    }
}

#[test]
fn images_on_devices_hold_what_was_copied_into_them() {
    let dir = scratch();
    let sources = sources(dir.path());
    for block in BLOCKS {
        let Some(twins) = Twins::new(block) else {
            return;
        };
        let device = twins.ours.name();
        for cache in ["none", "writeback"] {
            for cluster in ["2k", "64k"] {
                for (name, bytes) in &sources {
                    twins.ours.fill(&twins.before);
                    let options = format!("cluster_size={cluster}");
                    let line =
                        format!("convert -f raw -O qcow2 -o {options} -t {cache} {name} {device}");
                    let mut copy = golden::ours();
                    let output = outcome(copy.current_dir(&dir).args(golden::words(&line)));
                    must(&format!("{block} {line}"), &output);
                    let (middle, end) = (bytes.len() / 2 + 100, bytes.len() - 300);
                    let mut shell = program("qemu-io", true);
                    shell.args(["-f", "qcow2", "-d", "unmap", "-t", cache]);
                    for command in [
                        format!("write -z {middle} 211"),
                        format!("write -z -u {end} 205"),
                        "write -P 0x5a 90 101".to_string(),
                        "discard 0 80".to_string(),
                    ] {
                        shell.args(["-c", &command]);
                    }
                    let output = outcome(shell.arg(device));
                    must(&format!("{block} {line}"), &output);
                    assert!(!said(&output).contains("failed"), "{}", said(&output));
                    let mut expected = bytes.clone();
                    expected[middle..middle + 211].fill(0);
                    expected[end..end + 205].fill(0);
                    expected[90..191].fill(0x5a);
                    std::fs::write(dir.path().join("expected"), &expected).unwrap();
                    let compare = ["compare", "-q", "-f", "raw", "-F", "qcow2"];
                    qemu_img(&compare, &[&dir.path().join("expected"), twins.ours.path()]);
                    qemu_img(&["check", "-q", "-f", "qcow2"], &[twins.ours.path()]);
                }
            }
        }
    }
}

#[test]
fn layers_are_committed_into_devices_and_rebased_onto_them() {
    let dir = scratch();
    for block in BLOCKS {
        let Some(twins) = Twins::new(block) else {
            return;
        };
        let device = twins.ours.name();
        for cache in ["none", "writeback"] {
            twins.ours.fill(&twins.before);
            let ours = |line: &str| {
                let mut program = golden::ours();
                let output = outcome(program.current_dir(&dir).args(golden::words(line)));
                must(&format!("{block} {line}"), &output);
            };
            ours(&format!(
                "create -q -f qcow2 -o cluster_size=512 -b {device} -F raw top"
            ));
            let mut expected = twins.before.clone();
            let mut shell = program("qemu-io", true);
            for (at, len) in ODD {
                let at = at + 512;
                shell.args(["-c", &format!("write -z {at} {len}")]);
                expected[at..at + len].fill(0);
                let at = at + (1 << 20);
                shell.args(["-c", &format!("write -P 3 {at} {len}")]);
                expected[at..at + len].fill(3);
            }
            must("io", &outcome(shell.current_dir(&dir).arg("top")));
            std::fs::copy(dir.path().join("top"), dir.path().join("kept")).unwrap();
            ours(&format!("commit -q -t {cache} top"));
            assert!(twins.ours.contents() == expected, "{block} {cache}");
            // The copy shows the same disk, and so it does on the other device.
            ours(&format!(
                "rebase -t {cache} -b {} -F raw kept",
                twins.theirs.name()
            ));
            std::fs::write(dir.path().join("expected"), &expected).unwrap();
            let compare = ["compare", "-q", "-f", "raw", "-F", "qcow2"];
            let names = ["expected", "kept"].map(|name| dir.path().join(name));
            qemu_img(&compare, &[&names[0], &names[1]]);
        }
    }
}

/// A client may ask for zeroes and trims of any length: the least block is one byte.
#[test]
fn clients_zero_and_trim_odd_ranges_of_devices() {
    for block in BLOCKS {
        let Some(twins) = Twins::new(block) else {
            return;
        };
        for cache in ["none", "writeback"] {
            twins.reset();
            let dir = scratch();
            let socket = dir.path().join("socket");
            let mut serve = cowslip();
            serve.args(["qemu-nbd", "-f", "raw", "--discard=unmap", "--cache", cache]);
            serve.args(["--fork", "-k"]).arg(&socket);
            run(serve.arg(twins.ours.path()));
            let export = format!("nbd+unix:///?socket={}", socket.display());
            let mut shell = Command::new("qemu-io");
            shell.args(["-f", "raw", "-d", "unmap"]);
            let mut expected = twins.before.clone();
            for (at, len) in ODD {
                shell.args(["-c", &format!("write -z {at} {len}")]);
                expected[at..at + len].fill(0);
                let at = at + (1 << 20);
                shell.args(["-c", &format!("write -z -u {at} {len}")]);
                expected[at..at + len].fill(0);
                // All of it is zeroes already, whatever a trim takes.
                shell.args(["-c", &format!("discard {at} {len}")]);
            }
            let output = outcome(shell.arg(&export));
            must(&format!("{block} {cache}"), &output);
            assert!(!said(&output).contains("failed"), "{}", said(&output));
            assert!(twins.ours.contents() == expected, "{block} {cache}");
        }
    }
}

/// The device refuses the calls, whose ranges begin within its blocks: the zeroes are written.
#[test]
fn parts_of_devices_may_begin_within_a_block() {
    for block in BLOCKS {
        let Some(twins) = Twins::new(block) else {
            return;
        };
        let part = format!(
            "driver=raw,offset=100,size=1M,file.driver=host_device,file.filename={}",
            twins.ours.name()
        );
        let mut shell = program("qemu-io", true);
        shell.args(["--image-opts", "-d", "unmap"]);
        let mut expected = twins.before.clone();
        for (at, len) in ODD {
            shell.args(["-c", &format!("write -z -u {at} {len}")]);
            expected[100 + at..100 + at + len].fill(0);
            shell.args(["-c", &format!("discard {at} {len}")]);
        }
        let output = outcome(shell.arg(&part));
        must(&format!("{block}"), &output);
        assert!(!said(&output).contains("failed"), "{}", said(&output));
        assert!(twins.ours.contents() == expected, "{block}");
    }
}
