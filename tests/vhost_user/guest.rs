//! A guest with Linux on a vhost-user-blk device, on QEMU's translation: fio verifies what it
//! writes, file systems are made, mounted, trimmed and checked, the disk grows, while the server is
//! killed and replaced. Afterwards fio verifies the image's content outside, and both checkers the
//! image.
//!
//! `COWSLIP_TEST_GUEST_SECONDS` is the time for which fio writes to the disk meanwhile (a soak).

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use cowslip_bench::machine::{Accelerator, Guest, GuestDisk, Machine, MachineOptions};
use cowslip_console::output::Program;

use super::*;
use crate::bench::guest_kernel;
use crate::support::rng::Rng;
use crate::support::{number_from_environment, peers_are_installed, program, run};

const TOOLS: [&str; 9] = [
    "fio",
    "mkfs.ext4",
    "e2fsck",
    "mkfs.xfs",
    "xfs_repair",
    "mount",
    "umount",
    "fstrim",
    "blockdev",
];
/// Limits for a busy machine.
const BOOT_WITHIN: Duration = Duration::from_secs(240);
const ORDER_WITHIN: Duration = Duration::from_secs(240);
const DISK_BYTES: u64 = 1 << 30;
const GROWN_BYTES: u64 = DISK_BYTES + (256 << 20);
const GROWN_AGAIN_BYTES: u64 = GROWN_BYTES + (128 << 20);
/// Where fio writes beyond the file systems, and how much.
const VERIFIED_AT: u64 = 768 << 20;
const VERIFIED_BYTES: u64 = 16 << 20;

fn tool(name: &str) -> PathBuf {
    let directories = ["/usr/bin", "/usr/sbin", "/bin", "/sbin"];
    let mut paths = directories.iter().map(|dir| Path::new(dir).join(name));
    paths.find(|path| path.is_file()).expect("it is installed")
}

/// A guest, and the server of its disk.
struct Rig {
    guest: Guest,
    image: PathBuf,
    socket: PathBuf,
    served: Served,
}

const OPTIONS: [&str; 2] = ["--discard", "unmap"];

/// Kills and replaces a server until it is to stop. Returns the last one, and how often each
/// happened.
fn disturb(
    mut served: Served,
    (image, socket): (&Path, &Path),
    is_over: &AtomicBool,
) -> (Served, [u32; 2]) {
    let mut rng = Rng::new(11);
    let mut counts = [0; 2];
    while !is_over.load(Ordering::Relaxed) {
        // QEMU needs a second to connect again; then some work shall be done.
        std::thread::sleep(Duration::from_millis(1200 + rng.below(1000)));
        let kills = rng.once_in(2);
        counts[usize::from(!kills)] += 1;
        if kills {
            served.kill();
            served = Served::start(image, socket, &OPTIONS);
            continue;
        }
        let next = Served::start(image, socket, &[&OPTIONS[..], &["--handover"]].concat());
        let mut before = std::mem::replace(&mut served, next);
        let begun = Instant::now();
        while before.child.try_wait().unwrap().is_none() {
            // Not connected yet, and so on: a handover always ends, one way or the other.
            assert!(begun.elapsed() < Duration::from_secs(30), "no handover");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    (served, counts)
}

impl Rig {
    fn start(dir: &Path, kernel: PathBuf) -> Rig {
        let (image, socket) = (dir.join("a.qcow2"), dir.join("socket"));
        let bytes = DISK_BYTES.to_string();
        run(cowslip()
            .args(["create", "-q", "-f", "qcow2"])
            .arg(&image)
            .arg(bytes));
        let mut served = Served::start(&image, &socket, &OPTIONS);
        served.wait();
        // Without what only a debugger reads.
        let stripped = dir.join("init");
        let strip = Command::new("strip")
            .arg("-o")
            .args([&stripped, program()])
            .status();
        let init = match strip.is_ok_and(|status| status.success()) {
            true => &stripped,
            false => program(),
        };
        let options = MachineOptions {
            kernel: Some(kernel),
            accel: Some(Accelerator::Tcg),
        };
        let name = Program::called("cowslip".as_ref());
        let tools = TOOLS.map(tool);
        let machine = Machine::with_tools(&options, &name, (init, &tools)).unwrap();
        let disk = GuestDisk::VhostUser(socket.clone());
        Rig {
            guest: Guest::boot(&machine, &disk, BOOT_WITHIN).unwrap(),
            image,
            socket,
            served,
        }
    }

    /// Runs a tool in the guest.
    fn order(&mut self, line: &str) -> String {
        let begun = Instant::now();
        let mut words: Vec<String> = line.split(' ').map(str::to_string).collect();
        words[0] = tool(&words[0]).display().to_string();
        let output = self.guest.run(&words, ORDER_WITHIN);
        let output = output.unwrap_or_else(|e| panic!("{line}: {e}"));
        eprintln!("{line}: {:.1} s", begun.elapsed().as_secs_f64());
        output
    }

    /// Does something in the guest while the server is killed and replaced. Returns how often each
    /// happened.
    fn disturbed(self, work: impl FnOnce(&mut Rig)) -> (Rig, [u32; 2]) {
        let Rig {
            guest,
            image,
            socket,
            served,
        } = self;
        let is_over = AtomicBool::new(false);
        let over = &is_over;
        std::thread::scope(|scope| {
            let place = (image.clone(), socket.clone());
            let disturbing = scope.spawn(move || disturb(served, (&place.0, &place.1), over));
            let idle = Command::new("true").stderr(Stdio::piped()).spawn().unwrap();
            let mut rig = Rig {
                guest,
                image: image.clone(),
                socket: socket.clone(),
                served: Served {
                    child: idle,
                    socket: socket.clone(),
                },
            };
            let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&mut rig)));
            is_over.store(true, Ordering::Relaxed);
            let (served, counts) = disturbing.join().expect("servers come and go");
            rig.served = served;
            if let Err(panic) = worked {
                std::panic::resume_unwind(panic);
            }
            (rig, counts)
        })
    }
}

/// A job of fio's; its words are the same in the guest and outside.
fn fio(file: &str, more: &str) -> String {
    format!(
        "fio --name=job --filename={file} --rw=randwrite --bsrange=4k-64k --bs_unaligned=0 \
         --verify=crc32c --verify_fatal=1 --randrepeat=1 --direct=1 --thread {more}"
    )
}

fn verified(file: &str) -> String {
    let place = format!("--offset={VERIFIED_AT} --size={VERIFIED_BYTES}");
    fio(file, &format!("{place} --ioengine=psync"))
}

fn on_disk(more: &str) -> String {
    fio(
        "/dev/vda",
        &format!("--ioengine=libaio --iodepth=16 {more}"),
    )
}

/// File systems on the whole disk: made, written by fio, trimmed, checked.
fn file_systems(rig: &mut Rig) {
    for (make, check) in [
        ("mkfs.ext4 -q -F /dev/vda 512M", "e2fsck -fn /dev/vda"),
        (
            "mkfs.xfs -q -f -d size=512m /dev/vda",
            "xfs_repair -n /dev/vda",
        ),
    ] {
        rig.order(make);
        rig.order("mount /dev/vda /mnt");
        let job = "--size=6M --ioengine=psync --end_fsync=1";
        rig.order(&fio("/mnt/file", job));
        rig.order("fstrim /mnt");
        rig.order("umount /mnt");
        rig.order(check);
    }
}

/// Waits until the guest's disk has this size, and writes at its end.
fn expect_size(rig: &mut Rig, bytes: u64) {
    let begun = Instant::now();
    while rig.order("blockdev --getsize64 /dev/vda").trim() != bytes.to_string() {
        assert!(begun.elapsed() < Duration::from_secs(20), "not {bytes}");
        std::thread::sleep(Duration::from_millis(100));
    }
    let last = bytes - (4 << 20);
    rig.order(&on_disk(&format!("--offset={last} --size=4M")));
}

/// The disk grows while the guest has it, and no server.
fn grow(rig: &mut Rig) {
    rig.served.kill();
    let bytes = GROWN_BYTES.to_string();
    run(cowslip().args(["resize", "-q"]).arg(&rig.image).arg(bytes));
    rig.served = Served::start(&rig.image, &rig.socket, &OPTIONS);
    expect_size(rig, GROWN_BYTES);
}

/// The disk grows as a file, while the guest and a server have it.
fn grow_as_file(rig: &mut Rig, dir: &Path) {
    let file = dir.join("disk");
    rig.served.kill();
    let options = [&OPTIONS[..], &["--growable", "--fuse"]].concat();
    let options = [&options[..], &[file.to_str().unwrap()]].concat();
    rig.served = Served::start(&rig.image, &rig.socket, &options);
    // The server is there, with the guest, when this has been read.
    rig.order("fio --name=job --filename=/dev/vda --rw=read --size=1M --direct=1 --thread");
    let disk = std::fs::File::options().write(true).open(&file).unwrap();
    disk.set_len(GROWN_AGAIN_BYTES).unwrap();
    drop(disk);
    expect_size(rig, GROWN_AGAIN_BYTES);
}

/// The image after the guest: sound for both checkers, with the content that fio has left.
fn expect_sound(rig: Rig, dir: &Path) {
    rig.guest.turn_off().unwrap();
    rig.served.end();
    check(&rig.image);
    let mut theirs = Command::new("qemu-img");
    let output = theirs.arg("check").arg(&rig.image).output().unwrap();
    // Leaks are what a killed server may leave.
    assert!(matches!(output.status.code(), Some(0 | 3)), "{output:?}");
    let raw = dir.join("raw");
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-f", "qcow2", "-O", "raw"]);
    run(convert.args([&rig.image, &raw]));
    let line = verified(raw.to_str().unwrap()) + " --verify_only";
    let words: Vec<&str> = line.split(' ').collect();
    run(Command::new(words[0]).args(&words[1..]).current_dir(dir));
}

#[test]
fn linux_keeps_its_data_while_its_server_is_killed_replaced_and_grown() {
    if !cfg!(target_arch = "x86_64") {
        return eprintln!("SKIPPED: guests are for x86-64 only");
    }
    if !peers_are_installed(&["qemu-system-x86_64", "qemu-img"]) || !peers_are_installed(&TOOLS) {
        return;
    }
    let Some(kernel) = guest_kernel() else { return };
    let dir = tempfile::tempdir().unwrap();
    let seconds = number_from_environment("COWSLIP_TEST_GUEST_SECONDS").unwrap_or(0);
    let (mut rig, counts) = Rig::start(dir.path(), kernel).disturbed(|rig| {
        let load = match seconds {
            0 => "--size=24M".to_string(),
            seconds => format!("--size=700M --loops=1000 --time_based --runtime={seconds}"),
        };
        rig.order(&on_disk(&load));
        file_systems(rig);
        rig.order(&verified("/dev/vda"));
    });
    eprintln!("{} kills, {} handovers", counts[0], counts[1]);
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    grow(&mut rig);
    if rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists() {
        grow_as_file(&mut rig, dir.path());
    } else {
        eprintln!("SKIPPED: growing: /dev/fuse and root are needed");
    }
    expect_sound(rig, dir.path());
}
