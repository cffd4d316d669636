//! `mount`, `umount` and `serve --fuse`: programs use the disk of an image as a file.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{cowslip, create_image, outcome, peers_are_installed, run};

mod at_close;
mod failed;
mod model;
mod ring;
mod user;

const SIZE: u64 = 16 << 20;

/// Whether a file can be mounted here; if not, the test says so and has nothing to do.
fn can_mount() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    let can = is_root && Path::new("/dev/fuse").exists();
    if !can {
        eprintln!("SKIPPED: /dev/fuse and root are needed");
    }
    can
}

/// An image that is mounted, by a server in the foreground.
struct Mounted {
    dir: tempfile::TempDir,
    child: Child,
}

impl Mounted {
    fn new(options: &[&str]) -> Mounted {
        let dir = tempfile::tempdir().unwrap();
        run(cowslip()
            .args(["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k"])
            .arg(dir.path().join("a.qcow2"))
            .arg(SIZE.to_string()));
        Mounted::of(dir, options)
    }

    fn of(dir: tempfile::TempDir, options: &[&str]) -> Mounted {
        let image = dir.path().join("a.qcow2").into_os_string();
        Mounted::named(dir, &image, options)
    }

    /// An image in the directory, under any kind of name.
    fn named(dir: tempfile::TempDir, image: &OsStr, options: &[&str]) -> Mounted {
        let child = cowslip()
            .args(["mount", "--foreground", "-f", "qcow2"])
            .args(options)
            .arg(image)
            .arg(dir.path().join("disk"))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut mounted = Mounted { dir, child };
        mounted.wait();
        mounted
    }

    fn wait(&mut self) {
        let begun = Instant::now();
        while !is_mounted(&self.file()) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "the server ended: {}", self.said());
            assert!(begun.elapsed() < Duration::from_secs(20), "no mount");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn said(&mut self) -> String {
        let mut said = String::new();
        let mut stderr = self.child.stderr.take().unwrap();
        stderr.read_to_string(&mut said).unwrap();
        said
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("a.qcow2")
    }

    fn open(&self) -> File {
        File::options()
            .read(true)
            .write(true)
            .open(self.file())
            .unwrap()
    }

    /// Ends the server by a signal; the image is closed and sound then.
    fn end(self) {
        let (image, _dir) = self.unmount();
        run(cowslip().arg("check").arg(image));
    }

    /// Ends the server by a signal. Returns the image, which is closed then, and its directory.
    fn unmount(mut self) -> (PathBuf, tempfile::TempDir) {
        let pid = i32::try_from(self.child.id()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {}", self.said());
        assert!(!self.file().exists(), "what was made is removed");
        let image = self.image();
        let elsewhere = tempfile::tempdir().unwrap();
        (image, std::mem::replace(&mut self.dir, elsewhere))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        drop(Command::new("umount").arg("-l").arg(self.file()).output());
    }
}

fn is_mounted(path: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.contains(path.to_str().unwrap())
}

#[test]
fn a_daemon_shows_the_file_until_it_is_unmounted() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [image, file] = ["a.qcow2", "disk"].map(|name| dir.path().join(name));
    create_image(&image, "1M");
    run(cowslip().arg("mount").args([&image, &file]));
    let disk = File::options().read(true).write(true).open(&file).unwrap();
    disk.write_all_at(&[5; 1000], 123).unwrap();
    // In use.
    let refused = outcome(cowslip().arg("umount").arg(&file));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && said.contains("--lazy"),
        "{said}"
    );
    let twice = outcome(cowslip().arg("mount").args([&image, &file]));
    let said = String::from_utf8_lossy(&twice.stderr).into_owned();
    assert!(said.contains("mounted there already"), "{said}");
    drop(disk);
    run(cowslip().arg("umount").arg(&file));
    assert!(!file.exists());
    // It is closed: nobody has its locks.
    run(cowslip().arg("check").arg(&image));
    run(cowslip()
        .args(["mount", "--read-only"])
        .args([&image, &file]));
    let mut bytes = [0; 1002];
    File::open(&file)
        .unwrap()
        .read_exact_at(&mut bytes, 122)
        .unwrap();
    assert_eq!((bytes[0], bytes[1], bytes[1000], bytes[1001]), (0, 5, 5, 0));
    let written = File::options().write(true).open(&file);
    assert_eq!(written.unwrap_err().raw_os_error(), Some(30), "EROFS");
    run(cowslip().arg("umount").arg(&file));
    let none = outcome(cowslip().arg("umount").arg(&file));
    assert!(!none.status.success());
    let directory = outcome(cowslip().arg("mount").arg(&image).arg(dir.path()));
    let said = String::from_utf8_lossy(&directory.stderr).into_owned();
    assert!(said.contains("no regular file"), "{said}");
}

#[test]
fn ends_holes_and_sizes_are_those_of_a_file() {
    if !can_mount() {
        return;
    }
    let mounted = Mounted::new(&[]);
    let file = mounted.open();
    assert_eq!(file.metadata().unwrap().len(), SIZE);
    let mut bytes = [9; 100];
    assert_eq!(file.read_at(&mut bytes, SIZE - 10).unwrap(), 10);
    assert_eq!(file.read_at(&mut bytes, SIZE).unwrap(), 0);
    assert_eq!(file.write_at(&bytes, SIZE - 10).unwrap(), 10);
    assert_eq!(
        file.write_at(&bytes, SIZE).unwrap_err().raw_os_error(),
        Some(28)
    );
    assert!(file.set_len(SIZE + 1).is_err() && file.set_len(SIZE - 1).is_err());
    file.write_all_at(&[1; 8192], 1 << 20).unwrap();
    let data = seek(&file, SeekFrom::Data(0)).unwrap();
    let hole = seek(&file, SeekFrom::Hole(1 << 20)).unwrap();
    assert_eq!((data, hole), (1 << 20, (1 << 20) + 8192));
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, punch, 1 << 20, 8192).unwrap();
    assert_eq!(seek(&file, SeekFrom::Data(0)).unwrap(), SIZE - 4096);
    file.sync_all().unwrap();
    assert!(file.metadata().unwrap().blocks() <= SIZE / 512);
    drop(file);
    mounted.end();
}

#[test]
fn a_growable_file_grows_by_writes_and_truncate() {
    if !can_mount() {
        return;
    }
    let mounted = Mounted::new(&["--growable", "--threads", "2"]);
    let file = mounted.open();
    file.set_len(SIZE + 4096).unwrap();
    assert_eq!(file.metadata().unwrap().len(), SIZE + 4096);
    file.write_all_at(&[3; 512], SIZE + 8192).unwrap();
    assert_eq!(file.metadata().unwrap().len(), SIZE + 8192 + 512);
    let more = SIZE + (1 << 20);
    fallocate(
        &file,
        FallocateFlags::empty(),
        SIZE + 8192 + 512,
        more - (SIZE + 8704),
    )
    .unwrap();
    assert_eq!(file.metadata().unwrap().len(), more);
    assert!(file.set_len(SIZE).is_err(), "it does not shrink");
    drop(file);
    let image = mounted.image();
    let dir = mounted.dir.path().to_path_buf();
    let info = || run(cowslip().args(["info", "-U", "--output=json"]).arg(&image));
    assert!(
        info().contains(&format!("\"virtual-size\": {more}")),
        "{}",
        info()
    );
    assert!(dir.exists());
    mounted.end();
}

#[test]
fn allocated_space_is_there_and_bytes_stay() {
    if !can_mount() {
        return;
    }
    let mounted = Mounted::new(&[]);
    let file = mounted.open();
    file.write_all_at(&[7; 100_000], 12_345).unwrap();
    let taken = || {
        let stat = std::fs::metadata(mounted.image()).unwrap();
        stat.blocks() * 512
    };
    assert!(taken() < SIZE / 4);
    fallocate(&file, FallocateFlags::KEEP_SIZE, 1 << 20, 4 << 20).unwrap();
    assert!((4 << 20..SIZE / 2).contains(&taken()), "{}", taken());
    fallocate(&file, FallocateFlags::empty(), 0, SIZE).unwrap();
    assert!(taken() >= SIZE, "{}", taken());
    let mut bytes = vec![1; SIZE as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let is_written = |at: usize| (12_345..112_345).contains(&at);
    assert!((0..bytes.len()).all(|at| bytes[at] == if is_written(at) { 7 } else { 0 }));
    file.sync_all().unwrap();
    let space = taken();
    file.write_all_at(&vec![8; SIZE as usize], 0).unwrap();
    file.sync_all().unwrap();
    assert_eq!(taken(), space, "what was allocated is used");
    drop(file);
    mounted.end();
}

#[test]
fn a_killed_server_leaves_errors_and_the_next_mount_mends_it() {
    if can_mount() {
        kill(Mounted::new(&[]));
    }
}

fn kill(mut mounted: Mounted) {
    let file = mounted.open();
    file.write_all_at(&[1; 65536], 0).unwrap();
    file.sync_all().unwrap();
    file.write_all_at(&[2; 65536], 65536).unwrap();
    mounted.child.kill().unwrap();
    mounted.child.wait().unwrap();
    assert!(file.read_at(&mut [0], 0).is_err());
    drop(file);
    assert!(File::open(mounted.file()).is_err());
    let (image, path) = (mounted.image(), mounted.file());
    let again = outcome(cowslip().arg("mount").args([&image, &path]));
    let said = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(
        again.status.success() && said.contains("had ended"),
        "{said}"
    );
    let mut bytes = vec![0; 131_072];
    File::open(&path)
        .unwrap()
        .read_exact_at(&mut bytes, 0)
        .unwrap();
    assert!(bytes[..65536] == [1; 65536], "what was flushed is there");
    assert!(bytes[65536..].iter().all(|byte| matches!(byte, 0 | 2)));
    run(cowslip().arg("umount").arg(&path));
    let check = outcome(cowslip().arg("check").arg(&image));
    assert!(matches!(check.status.code(), Some(0 | 3)), "{check:?}");
}

#[test]
fn the_server_ends_in_order_under_load() {
    if can_mount() {
        end_under_load(Mounted::new(&["--threads", "2"]));
    }
}

fn end_under_load(mut mounted: Mounted) {
    let file = mounted.open();
    let writers: Vec<_> = (0..4u64)
        .map(|index| {
            let file = file.try_clone().unwrap();
            std::thread::spawn(move || {
                let mut written = 0u64;
                while file
                    .write_all_at(
                        &[index as u8 + 1; 4096],
                        (index * 256 + written % 256) * 4096,
                    )
                    .is_ok()
                {
                    written += 1;
                }
                written
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(200));
    let pid = i32::try_from(mounted.child.id()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
    assert!(mounted.child.wait().unwrap().success());
    assert!(mounted.said().contains("was in use"));
    let written: Vec<u64> = writers.into_iter().map(|it| it.join().unwrap()).collect();
    drop(file);
    let raw = mounted.dir.path().join("a.raw");
    run(cowslip()
        .args(["convert", "-O", "raw"])
        .args([&mounted.image(), &raw]));
    let bytes = std::fs::read(&raw).unwrap();
    for (index, count) in written.into_iter().enumerate() {
        for block in 0..count.min(256) as usize {
            let at = (index * 256 + block) * 4096;
            assert!(
                bytes[at..at + 4096]
                    .iter()
                    .all(|&byte| byte == index as u8 + 1)
            );
        }
    }
    run(cowslip().arg("check").arg(mounted.image()));
}

#[test]
fn other_programs_use_the_file() {
    let programs = ["losetup", "mkfs.ext4", "fsck.ext4", "qemu-img", "fio"];
    if !can_mount() || !peers_are_installed(&programs) {
        return;
    }
    let mounted = Mounted::new(&["--threads", "2", "--sandbox", "on"]);
    let (path, dir) = (mounted.file(), mounted.dir.path());
    run(Command::new("fio")
        .current_dir(dir)
        .args([
            "--name=v",
            "--rw=randwrite",
            "--bs=4k",
            "--ioengine=libaio",
            "--iodepth=32",
        ])
        .args([
            "--direct=1",
            "--size=8M",
            "--verify=crc32c",
            "--do_verify=1",
            "--output=/dev/null",
        ])
        .arg(format!("--filename={}", path.display())));
    let raw = dir.join("a.raw");
    run(Command::new("qemu-img")
        .args(["convert", "-f", "raw", "-O", "raw"])
        .args([&path, &raw]));
    run(Command::new("qemu-img")
        .args(["compare", "-f", "raw", "-F", "raw"])
        .args([&path, &raw]));
    let overlay = dir.join("overlay.qcow2");
    run(cowslip()
        .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
        .args([&path, &overlay]));
    run(cowslip().args(["compare"]).args([&overlay, &raw]));
    let random: Vec<u8> = (0..SIZE).map(|at| (at / 512 * 7) as u8).collect();
    std::fs::write(&raw, &random).unwrap();
    run(Command::new("qemu-img")
        .args(["convert", "-n", "-f", "raw", "-O", "raw"])
        .args([&raw, &path]));
    assert!(std::fs::read(&path).unwrap() == random);
    let device = run(Command::new("losetup")
        .args(["-f", "--show", "--direct-io=on"])
        .arg(&path));
    let device = device.trim();
    let made = outcome(Command::new("mkfs.ext4").args(["-q", "-F", device]));
    let sound = outcome(Command::new("fsck.ext4").args(["-f", "-n", device]));
    run(Command::new("losetup").args(["-d", device]));
    assert!(
        made.status.success() && sound.status.success(),
        "{made:?} {sound:?}"
    );
    mounted.end();
}

/// A server that looked at the name of its image would wait for itself.
#[test]
fn a_file_is_mounted_over_its_own_image() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("a.qcow2");
    run(cowslip()
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&image)
        .arg(SIZE.to_string()));
    for options in [&["--sandbox", "off"][..], &["--sandbox", "auto"]] {
        let mut mount = cowslip();
        mount.arg("mount").args(options).args([&image, &image]);
        let mut child = mount.spawn().unwrap();
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if begun.elapsed() > Duration::from_secs(20) {
                drop(Command::new("umount").arg("-l").arg(&image).status());
                panic!("the server waits for itself");
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(status.success());
        let disk = File::options().write(true).open(&image).unwrap();
        assert_eq!(disk.metadata().unwrap().len(), SIZE);
        disk.write_all_at(b"through the disk", 0).unwrap();
        drop(disk);
        run(cowslip().arg("umount").arg(&image));
        run(cowslip().arg("check").arg(&image));
    }
    let read = run(cowslip().args(["io", "-c", "read -v 0 16"]).arg(&image));
    assert!(read.contains("through.the.disk"), "{read}");
}

#[test]
fn a_lazy_unmount_returns_while_programs_go_on() {
    if !can_mount() {
        return;
    }
    let mut mounted = Mounted::new(&[]);
    let file = mounted.open();
    let mut umount = cowslip()
        .args(["umount", "--lazy"])
        .arg(mounted.file())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = umount.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > Duration::from_secs(20) {
            umount.kill().unwrap();
            panic!("it waits for the program");
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    assert!(status.success());
    assert!(!is_mounted(&mounted.file()));
    file.write_all_at(&[4; 4096], 8192).unwrap();
    drop(file);
    assert!(mounted.child.wait().unwrap().success());
    let read = run(cowslip()
        .args(["io", "-c", "read -P 4 8k 4k"])
        .arg(mounted.image()));
    assert!(!read.contains("failed"), "{read}");
}
