//! `allocate` on file systems of each kind: the method that fits is chosen, holes get space and data stays, and whatever
//! ends it, a signal, a full disk, the job's caller, leaves the file as it was. What mounts a file system needs
//! root and a loop device, and says so if it has neither.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;

use allocate::battery::{Battery, complaint};
use support::mounted::Mounted;
use support::{cowslip, outcome, run, scratch};

mod allocate {
    pub mod battery;
    pub mod layout;
    pub mod library;
}
mod support;

/// The calls of file systems that allocate at once.
const ALL: &[&str] = &["fallocate", "posix_fallocate", "mmap", "write"];
/// Those of file systems that have no call for it.
const WITHOUT_CALL: &[&str] = &["posix_fallocate", "mmap", "write"];

fn with_call(mounted: Option<Mounted>) {
    let Some(mounted) = mounted else { return };
    Battery::new(&mounted.at, "fallocate", ALL).run_all();
}

fn without_call(mounted: Option<Mounted>, run: impl Fn(&Battery<'_>)) {
    let Some(mounted) = mounted else { return };
    let battery = Battery::new(&mounted.at, "write", WITHOUT_CALL);
    run(&battery);
    battery.the_library_writes();
}

#[test]
fn on_ext2() {
    let format = ["mkfs.ext2", "-q", "-b", "4096"];
    without_call(Mounted::of_size(&format, 96 << 20), |battery| {
        battery.run_some()
    });
}

#[test]
fn on_ext3_with_small_blocks() {
    let format = ["mkfs.ext3", "-q", "-b", "1024"];
    without_call(Mounted::of_size(&format, 96 << 20), |battery| {
        battery.run_all()
    });
}

#[test]
fn on_ext4() {
    with_call(Mounted::of_size(&["mkfs.ext4", "-q"], 96 << 20));
}

#[test]
fn on_ext4_without_extents() {
    let format = ["mkfs.ext4", "-q", "-O", "^extent,^64bit"];
    without_call(Mounted::of_size(&format, 96 << 20), |battery| {
        battery.run_some()
    });
}

#[test]
fn on_xfs() {
    with_call(Mounted::of_size(&["mkfs.xfs", "-q"], 320 << 20));
}

#[test]
fn room_on_xfs_is_what_there_will_be() {
    if let Some(mounted) = Mounted::of_size(&["mkfs.xfs", "-q"], 320 << 20) {
        allocate::library::what_was_just_removed_is_free(&mounted.at);
    }
}

#[test]
fn on_btrfs() {
    with_call(Mounted::of_size(&["mkfs.btrfs", "-q"], 256 << 20));
}

#[test]
fn on_tmpfs() {
    let Some(mounted) = Mounted::tmpfs(128 << 20) else {
        return;
    };
    Battery::new(&mounted.at, "fallocate", ALL)
        .without_unwritten()
        .run_all();
}

#[test]
fn on_fuse() {
    let Some(mounted) = Mounted::fuse(128 << 20) else {
        return;
    };
    let battery = Battery::new(&mounted.at, "fallocate", ALL);
    battery.run_on_new_files();
    battery.hidden_holes_get_space();
}

#[test]
fn compressing_file_systems_are_told_of() {
    let Some(mounted) = Mounted::of_size(&["mkfs.btrfs", "-q"], 256 << 20) else {
        return;
    };
    run(std::process::Command::new("mount")
        .args(["-o", "remount,compress-force=zstd"])
        .arg(&mounted.at));
    let said = run(cowslip()
        .current_dir(&mounted.at)
        .args(["allocate", "--size", "16M", "x"]));
    assert!(said.contains("by fallocate"), "{said}");
    assert!(said.contains("Note: the file system compresses"), "{said}");
    // A file that was never allocated so is what the note is about.
    let zeroes = "allocate --size 16M --method write --json y".split_whitespace();
    let told = run(cowslip().current_dir(&mounted.at).args(zeroes));
    assert!(told.contains("\"missing\": 0"), "{told}");
}

fn refused(dir: &Path, line: &str) -> String {
    let words = line.split_whitespace();
    complaint(&outcome(
        cowslip().current_dir(dir).arg("allocate").args(words),
    ))
}

#[test]
fn bad_requests_get_one_line_and_leave_no_file() {
    let dir = scratch();
    let dir = dir.path();
    std::fs::write(dir.join("long"), [1; 5000]).unwrap();
    std::fs::create_dir(dir.join("directory")).unwrap();
    for (line, why) in [
        ("--size 1M directory", "it is a directory"),
        ("--size 1M /dev/null", "it is a character device"),
        ("--size 0 x", "Must be between 1 and"),
        ("--size -1 x", "Must be between 1 and"),
        ("--size 9E x", "Must be between 1 and"),
        ("--size much x", "size"),
        ("--size 4096 long", "is 5000 bytes long"),
        ("--size 1M nowhere/x", "No such file or directory"),
        ("--size 1M --method magic x", "--method expects"),
        ("--size 1M --chunk 4K x", "--chunk is for"),
        ("--size 1M --method write --chunk 1 x", "chunk"),
        ("--size 1M --method write --keep-size x", "fallocate alone"),
        ("--size 1M --rate-limit 0 x", "--rate-limit"),
        ("--size 4T x", "bytes are needed, its file system has"),
        ("x", "--size"),
    ] {
        let text = refused(dir, line);
        assert!(text.contains(why), "{line}: {text}");
        assert!(!dir.join("x").exists(), "{line}");
    }
    assert_eq!(std::fs::read(dir.join("long")).unwrap(), [1; 5000]);
}

#[test]
fn a_length_that_the_file_system_cannot_have_is_refused() {
    let Some(mounted) = Mounted::of_size(&["mkfs.ext2", "-q", "-b", "1024"], 64 << 20) else {
        return;
    };
    let text = refused(&mounted.at, "--size 1P x");
    let expected = "its file system takes no files of 1125899906842624 bytes";
    assert!(text.contains(expected), "{text}");
    assert!(!mounted.at.join("x").exists());
}

#[test]
fn a_limit_on_lengths_is_an_error_and_no_signal() {
    let dir = scratch();
    let binary = env!("CARGO_BIN_EXE_cowslip");
    let line = format!("ulimit -f 1024; exec {binary} allocate --size 64M x");
    let output = outcome(
        std::process::Command::new("bash")
            .args(["-c", &line])
            .current_dir(&dir),
    );
    complaint(&output);
    assert!(!dir.path().join("x").exists());
}

#[test]
fn a_block_device_is_refused_with_what_to_do() {
    use std::os::unix::fs::FileTypeExt;
    let devices = std::fs::read_dir("/dev").unwrap();
    let is_block = |entry: &std::fs::DirEntry| entry.file_type().unwrap().is_block_device();
    let Some(device) = devices.map(Result::unwrap).find(is_block) else {
        eprintln!("SKIPPED: no block device");
        return;
    };
    let line = format!("--size 1M {}", device.path().display());
    let text = refused(Path::new("/"), &line);
    assert!(text.contains("blkdiscard --zeroout"), "{text}");
}
