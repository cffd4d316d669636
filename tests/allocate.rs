//! `allocate` on file systems of each kind: the method that fits is chosen, holes get space and
//! data stays, and whatever ends it, a signal, a full disk, the job's caller, leaves the file as it
//! was. What mounts a file system needs root and a loop device, and says so if it has neither.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;

use self::battery::{Battery, complaint};
use crate::support::mounted::Mounted;
use crate::support::{cowslip, outcome, program, run, scratch, succeeds};

mod battery;
mod layout;
mod library;
mod others;

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
    let mounted = Mounted::of_size(&["mkfs.ext2", "-q", "-b", "4096"], 96 << 20);
    without_call(mounted, |battery| battery.run_some());
}

#[test]
fn on_ext3_with_small_blocks() {
    let mounted = Mounted::of_size(&["mkfs.ext3", "-q", "-b", "1024"], 96 << 20);
    without_call(mounted, |battery| battery.run_all());
}

#[test]
fn on_ext4() {
    with_call(Mounted::of_size(&["mkfs.ext4", "-q"], 96 << 20));
}

#[test]
fn on_ext4_without_extents() {
    let mounted = Mounted::of_size(&["mkfs.ext4", "-q", "-O", "^extent,^64bit"], 96 << 20);
    without_call(mounted, |battery| battery.run_some());
}

#[test]
fn on_xfs() {
    with_call(Mounted::of_size(&["mkfs.xfs", "-q"], 320 << 20));
}

#[test]
fn room_on_xfs_is_what_there_will_be() {
    if let Some(mounted) = Mounted::of_size(&["mkfs.xfs", "-q"], 320 << 20) {
        library::what_was_just_removed_is_free(&mounted.at);
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
    battery.an_interrupted_one_is_not_cut();
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
    let said = succeeds(&mounted.at, "allocate --size 16M x");
    assert!(said.contains("by fallocate"), "{said}");
    assert!(said.contains("Note: the file system compresses"), "{said}");
    // A file that was never allocated so is what the note is about.
    let zeroes = "allocate --size 16M --method write --json y".split_whitespace();
    let printed = run(cowslip().current_dir(&mounted.at).args(zeroes));
    assert!(printed.contains("\"missing\": 0"), "{printed}");
}

#[test]
fn what_others_write_meanwhile_survives_an_interruption() {
    let dir = &scratch();
    others::alone_it_is_cut(dir);
    others::what_is_appended_beyond_an_end_that_stays_is_kept(dir);
    others::what_is_appended_to_an_end_that_moves_is_kept(dir);
    others::what_is_written_behind_the_old_end_is_kept(dir);
    others::a_file_that_is_open_elsewhere_is_not_cut(dir);
}

fn refused(dir: &Path, line: &str) -> String {
    let words = line.split_whitespace();
    complaint(&outcome(
        cowslip().current_dir(dir).arg("allocate").args(words),
    ))
}

#[test]
fn bad_requests_get_one_line_and_leave_no_file() {
    let dir = &scratch();
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
    let expected = "its file system does not support files of 1125899906842624 bytes";
    assert!(text.contains(expected), "{text}");
    assert!(!mounted.at.join("x").exists());
}

#[test]
fn a_limit_on_lengths_is_an_error_and_no_signal() {
    let dir = scratch();
    let binary = program().display();
    let line = format!("ulimit -f 1024; exec {binary} allocate --size 64M x");
    let output = outcome(
        std::process::Command::new("bash")
            .args(["-c", &line])
            .current_dir(&dir),
    );
    let text = complaint(&output);
    let expected = "limited to 1048576 bytes (RLIMIT_FSIZE, 'ulimit -f')";
    assert!(text.contains(expected), "{text}");
    assert!(!dir.path().join("x").exists());
}

#[test]
fn a_handle_for_direct_io_is_refused() {
    library::direct_handles_are_refused(scratch().path());
}

#[test]
fn what_fits_is_allocated_where_a_trial_does_not() {
    let Some(mounted) = Mounted::tmpfs(4 << 20) else {
        return;
    };
    let free = || {
        let space = rustix::fs::statvfs(&mounted.at).unwrap();
        space.f_bfree * space.f_frsize
    };
    let filler = std::fs::File::create(mounted.at.join("filler")).unwrap();
    let none = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(&filler, none, 0, free() - (700 << 10)).unwrap();
    for method in ["auto", "posix_fallocate"] {
        let mut command = cowslip();
        command.current_dir(&mounted.at).arg("allocate");
        let line = format!("--json --size 64K --method {method} x");
        let printed = run(command.args(line.split_whitespace()));
        assert!(printed.contains("\"missing\": 0"), "{printed}");
        std::fs::remove_file(mounted.at.join("x")).unwrap();
    }
}

#[test]
fn where_nothing_may_be_tried_and_the_call_is_refused_zeroes_are_written_and_told() {
    let format = ["mkfs.ext3", "-q", "-b", "4096"];
    let Some(mounted) = Mounted::of_size(&format, 96 << 20) else {
        return;
    };
    let dir = mounted.at.join("dir");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("file"), "text").unwrap();
    let immutable = |sign: &str| {
        run(std::process::Command::new("chattr")
            .arg(format!("{sign}i"))
            .arg(&dir))
    };
    immutable("+");
    let line = "allocate --progress=json --size 8M file".split_whitespace();
    let output = outcome(cowslip().current_dir(&dir).args(line));
    immutable("-");
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout);
    let by: Vec<&str> = said.lines().filter(|l| l.contains(" by ")).collect();
    assert_eq!(by.len(), 2, "{said}");
    assert!(by[0].contains("by fallocate"), "{said}");
    assert!(
        by[1].contains("by writes of 1 MiB: the file system does not support fallocate"),
        "{said}"
    );
    let shown = String::from_utf8_lossy(&output.stderr);
    let last: serde_json::Value = serde_json::from_str(shown.lines().last().unwrap()).unwrap();
    assert_eq!(last["done"], last["total"], "{shown}");
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
