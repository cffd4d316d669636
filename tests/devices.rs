//! Block devices with blocks of 512 and of 4096 bytes, through the page cache and past it: what
//! every verb writes, at odd places and of odd lengths. Beside QEMU, on a device of the same kind.
//! Needs root and loop devices, and says so if it has neither.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::support::golden::{self, said};
use crate::support::loop_device::LoopDevice;
use crate::support::mounted::Mounted;
use crate::support::rng::Rng;
use crate::support::whose::Whose;
use crate::support::{cowslip, create_image, outcome, peers_are_installed, qemu_img, run, scratch};
use cowslip::file::host::{CreateMode, HostOptions, PageCache, open_host_file};

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
    _dir: crate::support::Scratch,
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

    /// Those of each size of blocks, if there can be any.
    fn all() -> impl Iterator<Item = (u32, Twins)> {
        let blocks = BLOCKS.into_iter();
        blocks.map_while(|block| Some((block, Twins::new(block)?)))
    }

    fn reset(&self) {
        self.ours.fill(&self.before);
        self.theirs.fill(&self.before);
    }
}

fn must(line: &str, output: &Output) {
    assert!(output.status.success(), "{line}: {}", said(output));
}

/// Asserts that after a discard each byte of a range is unchanged or zero.
fn assert_discarded(now: &[u8], before: &[u8], range: std::ops::Range<usize>, line: &str) {
    for at in 0..now.len() {
        let may_be_zero = range.contains(&at) && now[at] == 0;
        assert!(now[at] == before[at] || may_be_zero, "{line}: byte {at}");
    }
}

#[test]
fn zeroes_and_writes_at_odd_places_are_those_of_qemu() {
    for (block, twins) in Twins::all() {
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
            let run = |whose: Whose, device: &Device| {
                let mut shell = whose.program("qemu-io");
                shell.args(["-f", "raw", "-d", "unmap", "-t", cache]);
                for command in &commands {
                    shell.args(["-c", command]);
                }
                let output = outcome(shell.arg(device.path()));
                let line = format!("{block} {cache} {whose:?}");
                must(&line, &output);
                let printed = String::from_utf8_lossy(&output.stdout).into_owned();
                let wrote: Vec<String> = printed
                    .lines()
                    .filter(|line| line.starts_with("wrote") || line.contains("failed"))
                    .map(str::to_string)
                    .collect();
                assert_eq!(wrote.len(), commands.len(), "{line}: {printed}");
                wrote
            };
            assert_eq!(
                run(Whose::Ours, &twins.ours),
                run(Whose::Theirs, &twins.theirs)
            );
            let is_same = twins.ours.contents() == twins.theirs.contents();
            assert!(is_same, "{block} {cache}");
        }
    }
}

#[test]
fn discards_at_odd_places_touch_nothing_else() {
    for (block, twins) in Twins::all() {
        let device = &twins.ours;
        for cache in CACHES {
            for (at, len) in ODD {
                device.fill(&twins.before);
                let line = format!("discard {at} {len}");
                let mut shell = Whose::Ours.program("qemu-io");
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
    for (block, twins) in Twins::all() {
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
    for (block, twins) in Twins::all() {
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
                    let mut shell = Whose::Ours.program("qemu-io");
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
    for (block, twins) in Twins::all() {
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
            let mut shell = Whose::Ours.program("qemu-io");
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
    for (block, twins) in Twins::all() {
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
    for (block, twins) in Twins::all() {
        let part = format!(
            "driver=raw,offset=100,size=1M,file.driver=host_device,file.filename={}",
            twins.ours.name()
        );
        let mut shell = Whose::Ours.program("qemu-io");
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

/// Lines of qemu-img about DEVICE, full of noise, and files beside it. What a raw device and
/// `out.raw` hold afterwards is the same byte by byte.
const LINES_OF_RAW: &[&str] = &[
    "dd -f raw -O raw bs=4k if=source0 of=DEVICE",
    "dd -f raw -O raw bs=1000 count=256 skip=128 if=source0 of=DEVICE",
    "dd -f raw -O raw bs=333 if=source1 of=DEVICE",
    "dd -f raw -O raw bs=100 count=7 if=source0 of=DEVICE",
    "dd -f raw -O raw bs=1000 count=9 skip=1 if=source0 of=DEVICE",
    "dd -f raw -O raw bs=333 count=300 skip=3 if=source0 of=DEVICE",
    "dd -f raw -O raw bs=4097 count=1 if=source0 of=DEVICE",
    "dd -f raw -O raw bs=1 count=1 if=source0 of=DEVICE",
    "dd -f raw -O raw bs=512 if=source2 of=DEVICE",
    "dd -f raw -O raw bs=1M if=source3 of=DEVICE",
    "dd -f raw -O raw bs=3000 count=11 skip=7 if=DEVICE of=out.raw",
    "dd -f raw -O raw bs=1M skip=5 if=DEVICE of=out.raw",
    "dd --image-opts -O raw bs=3000 count=11 skip=7 if=DIRECT of=out.raw",
    "dd --image-opts -O raw bs=1537 if=DIRECT of=out.raw",
    "create -f raw DEVICE 1M",
    "create -f raw DEVICE 2M",
    "create -f raw DEVICE 3M",
    "create -f raw DEVICE 1000",
    "create -f raw -o preallocation=falloc DEVICE 1000k",
    "create -f raw -o preallocation=full DEVICE 1000k",
    "resize -f raw DEVICE 2M",
    "resize -f raw DEVICE +1M",
    "resize -f raw --shrink DEVICE 1M",
    "resize -f raw --shrink DEVICE 1000",
    "resize -f raw --preallocation=full DEVICE +512",
    "resize --shrink --image-opts DIRECT 1M",
    "resize --image-opts DIRECT +1M",
    "convert -n -f raw -O raw source3 DEVICE",
    "convert -f raw -O raw DEVICE out.raw",
    "convert -T none -f raw -O raw DEVICE out.raw",
];

/// The same of images on it, a few lines one after the other. What the disk shows is the same.
const LINES_OF_IMAGES: &[&[&str]] = &[
    &["create -q -f qcow2 DEVICE 3M", "WRITES"],
    &[
        "create -q -f qcow2 -o cluster_size=512 DEVICE 1000k",
        "WRITES",
        "resize -f qcow2 DEVICE +51200",
        "WRITES",
        "resize -f qcow2 --shrink DEVICE 700k",
        "WRITES",
        "resize -f qcow2 DEVICE 1000k",
        "WRITES",
    ],
    &[
        "create -q -f qcow2 -o cluster_size=512,preallocation=metadata DEVICE 1M",
        "WRITES",
        "snapshot -c one DEVICE",
        "WRITES",
        "snapshot -a one DEVICE",
        "snapshot -d one DEVICE",
        "amend -f qcow2 -o refcount_bits=64 DEVICE",
        "bitmap -f qcow2 --add DEVICE b",
        "WRITES",
    ],
    &[
        "create -q -f qcow2 -o cluster_size=16k,extended_l2=on DEVICE 1M",
        "WRITES",
        "amend -f qcow2 -o lazy_refcounts=on DEVICE",
        "WRITES",
    ],
    &["dd -f raw -O qcow2 bs=1000 if=source0 of=DEVICE", "WRITES"],
    &[
        "create -q -f qcow2 -o cluster_size=512,backing_file=BASE,backing_fmt=raw DEVICE 900k",
        "WRITES",
        "commit -q -f qcow2 DEVICE",
        "WRITES",
        "rebase -f qcow2 -b  DEVICE",
        "WRITES",
    ],
];

/// A line of qemu-img for one side; `WRITES` is a run of qemu-io at odd places.
fn run_line(line: &str, (whose, cache): (Whose, &str), device: &Device, dir: &Path) -> Output {
    let name = device.name();
    if line == "WRITES" {
        let mut shell = whose.program("qemu-io");
        shell.args(["-f", "qcow2", "-d", "unmap", "-t", cache]);
        for (at, len) in ODD {
            shell.args(["-c", &format!("write -P {} {at} {len}", 1 + at % 251)]);
            let at = at + 300_000;
            shell.args(["-c", &format!("write -z -u {at} {len}")]);
        }
        return outcome(shell.current_dir(dir).arg(name));
    }
    let direct = format!("driver=raw,file.driver=host_device,file.filename={name},cache.direct=on");
    let line = line.replace("DEVICE", name).replace("DIRECT", &direct);
    let base = dir.join("source3");
    let line = line.replace("BASE", base.to_str().unwrap());
    // Two blanks are around an empty word.
    let words = line.split(' ');
    outcome(whose.program("qemu-img").current_dir(dir).args(words))
}

/// Directories with the same files for both.
fn directories() -> [crate::support::Scratch; 2] {
    [(); 2].map(|()| {
        let dir = scratch();
        sources(dir.path());
        dir
    })
}

#[test]
fn every_verb_does_to_a_raw_device_what_qemus_does() {
    for (block, twins) in Twins::all() {
        for line in LINES_OF_RAW {
            twins.reset();
            let [our_dir, their_dir] = directories();
            let ours = run_line(line, (Whose::Ours, ""), &twins.ours, our_dir.path());
            let theirs = run_line(line, (Whose::Theirs, ""), &twins.theirs, their_dir.path());
            let context = format!("{block} {line}: {}{}", said(&ours), said(&theirs));
            assert_eq!(ours.status.code(), theirs.status.code(), "{context}");
            let is_same = twins.ours.contents() == twins.theirs.contents();
            assert!(is_same, "{context}");
            let written = [our_dir, their_dir].map(|dir| std::fs::read(dir.path().join("out.raw")));
            assert!(
                written[0].as_ref().ok() == written[1].as_ref().ok(),
                "{context}"
            );
        }
    }
}

#[test]
fn images_on_devices_show_what_those_of_qemu_show() {
    for (block, twins) in Twins::all() {
        for (number, lines) in LINES_OF_IMAGES.iter().enumerate() {
            // Past the page cache, and in one of the other modes.
            for cache in [CACHES[0], CACHES[1 + number % 4]] {
                twins.reset();
                let dirs = directories();
                for line in *lines {
                    let ours = run_line(line, (Whose::Ours, cache), &twins.ours, dirs[0].path());
                    let theirs =
                        run_line(line, (Whose::Theirs, cache), &twins.theirs, dirs[1].path());
                    let context = format!(
                        "{block} {cache} {line} of {lines:?}: {}{}",
                        said(&ours),
                        said(&theirs)
                    );
                    assert_eq!(ours.status.code(), theirs.status.code(), "{context}");
                    if !ours.status.success() {
                        continue;
                    }
                    let failed = |output: &Output| said(output).matches("failed").count();
                    assert_eq!(failed(&ours), failed(&theirs), "{context}");
                    let devices = [twins.ours.path(), twins.theirs.path()];
                    let compare = ["compare", "-q", "-f", "qcow2", "-F", "qcow2"];
                    let compared = outcome(Command::new("qemu-img").args(compare).args(devices));
                    assert!(compared.status.success(), "{context}{}", said(&compared));
                    qemu_img(&["check", "-q", "-f", "qcow2"], &[twins.ours.path()]);
                }
            }
        }
    }
}

/// Allocated ahead, the new end of an image shows nothing of what the device held, as it does with
/// QEMU.
#[test]
fn the_new_end_of_an_image_on_a_device_is_zeroes() {
    for (block, twins) in Twins::all() {
        for mode in ["off", "metadata", "falloc", "full"] {
            twins.reset();
            let grow = format!("resize -f qcow2 --preallocation={mode} DEVICE 1000k");
            let dir = scratch();
            for line in [
                "create -q -f qcow2 -o cluster_size=512 DEVICE 700k",
                &grow,
                "convert -f qcow2 -O raw DEVICE out.raw",
            ] {
                let output = run_line(line, (Whose::Ours, ""), &twins.ours, dir.path());
                must(&format!("{block} {line}"), &output);
            }
            let shown = std::fs::read(dir.path().join("out.raw")).unwrap();
            assert!(shown.iter().all(|&byte| byte == 0), "{block} {mode}");
        }
    }
}

/// A file system writes some blocks that are smaller than a page through its cache, where a direct
/// write beside them would fail the next flush.
#[test]
fn direct_writes_are_whole_pages_where_blocks_are_smaller() {
    for format in [
        ["mkfs.ext4", "-q", "-b", "1024"],
        ["mkfs.xfs", "-q", "-b", "size=1024"],
    ] {
        if !peers_are_installed(&format[..1]) {
            return;
        }
        let Some(mounted) = Mounted::new(&format) else {
            return;
        };
        let options = HostOptions {
            writable: true,
            create: CreateMode::CreateNew,
            page_cache: PageCache::Bypass,
            ..HostOptions::default()
        };
        let file = open_host_file(&mounted.at.join("a"), &options).unwrap();
        let alignment = file.capabilities().alignment_bytes as usize;
        assert_eq!(alignment, rustix::param::page_size(), "{format:?}");
    }
}

/// The kernel shows whole sectors of a file, so the last bytes of an image's table may be missing.
#[test]
fn an_image_whose_end_a_loop_device_lacks_is_refused_with_the_reason() {
    let dir = scratch();
    let file = dir.path().join("image");
    create_image(&file, "1M");
    let len = std::fs::metadata(&file).unwrap().len();
    assert_eq!(len % 512, 8, "an L1 table of one entry is the last of it");
    let Some(device) = LoopDevice::over(&file, &["-r"]) else {
        return;
    };
    let info = |path: &Path| said(&outcome(cowslip().arg("info").arg(path)));
    let refused = info(&device.path);
    let reason = format!(
        "beyond the end of the file; the loop device lacks the last 8 bytes of '{}', which fill \
         no sector",
        file.display()
    );
    assert!(refused.contains(&reason), "{refused}");
    drop(device);
    let image = std::fs::File::options().write(true).open(&file);
    image.unwrap().set_len(len.next_multiple_of(512)).unwrap();
    let device = LoopDevice::over(&file, &["-r"]).unwrap();
    let opened = info(&device.path);
    assert!(opened.contains("virtual size: 1 MiB"), "{opened}");
    // What is damaged otherwise has no such reason.
    let image = std::fs::File::options().write(true).open(&file);
    image.unwrap().set_len(64 << 10).unwrap();
    let refused = info(&file);
    assert!(!refused.contains("loop device"), "{refused}");
}
