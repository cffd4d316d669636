//! Images that were aged in several ways, on several file systems, get their space and their order
//! back: `cargo nextest run -p cowslip-cli --run-ignored only aged`. `COWSLIP_COMPACT_AGED_MIB` is
//! the size of their disks (64).

use super::*;
use crate::support::rng::Rng;
use crate::support::server::Server;
use crate::support::whose::Whose;

/// Bytes that are written at once.
const PART_KIB: u64 = 64;
/// The part of the space that may be neither data nor metadata.
const LOST_PERCENT: u64 = 2;

/// How an image has become what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Age {
    /// Written in no order.
    Written,
    /// Discarded and written again, part by part.
    Discarded,
    /// With 20 snapshots that were taken between writes; two are left.
    Snapshots,
}

struct Aging<'a> {
    dir: &'a Path,
    /// The owner of the program that writes it.
    writer: Whose,
    parts: u64,
    rng: Rng,
}

impl Aging<'_> {
    /// Does these things to the disk.
    fn request(&self, lines: &[String]) {
        for some in lines.chunks(500) {
            if self.writer == Whose::Theirs {
                qemu_io(self.dir, "a.qcow2", some);
                continue;
            }
            let socket = self.dir.join("s.sock");
            let mut serve = cowslip();
            serve.current_dir(self.dir).args(["serve", "--socket"]);
            serve.arg(&socket).args(["--discard", "unmap", "a.qcow2"]);
            let server = Server::start(&mut serve, &socket);
            let mut command = Command::new("qemu-io");
            command.args(["-f", "raw", "-d", "unmap"]);
            for line in some {
                command.args(["-c", line]);
            }
            run(command.arg(server.uri()));
            server.stop();
        }
    }

    fn snapshot(&self, line: &str) {
        match self.writer {
            Whose::Theirs => qemu(self.dir, "qemu-img", &format!("snapshot {line} a.qcow2")),
            Whose::Ours => succeeds(self.dir, &format!("snapshot {line} a.qcow2")),
        };
    }

    fn write(&mut self, part: u64) -> String {
        let byte = 1 + self.rng.below(250);
        format!("write -q -P {byte} {}k {PART_KIB}k", part * PART_KIB)
    }

    /// Writes all parts in no order.
    fn write_all(&mut self) {
        // It has no factor in common with a power of two.
        let parts = self.parts;
        let lines = (0..parts).map(|part| self.write(part * 1_000_003 % parts));
        let lines: Vec<String> = lines.collect();
        self.request(&lines);
    }

    fn grow_old(&mut self, age: Age) {
        self.write_all();
        let parts = self.parts;
        match age {
            Age::Written => {}
            Age::Discarded => {
                let mut lines = Vec::new();
                for _ in 0..2 * parts {
                    let part = self.rng.below(parts);
                    lines.push(match self.rng.below(5) {
                        0 | 1 => self.write(part),
                        _ => format!("discard -q {}k {PART_KIB}k", part * PART_KIB),
                    });
                }
                self.request(&lines);
            }
            Age::Snapshots => {
                for number in 0..20 {
                    self.snapshot(&format!("-c s{number}"));
                    let some = (0..parts / 20).map(|_| {
                        let part = self.rng.below(parts);
                        self.write(part)
                    });
                    let some: Vec<String> = some.collect();
                    self.request(&some);
                }
                for number in (0..20).filter(|number| !KEPT.contains(number)) {
                    self.snapshot(&format!("-d s{number}"));
                }
            }
        }
    }
}

/// Snapshots that are left.
const KEPT: [u64; 2] = [6, 19];

/// The disk, and its snapshots.
fn versions(age: Age) -> Vec<(String, String)> {
    let kept = KEPT.iter().map(|number| {
        let name = format!("s{number}.raw");
        (format!("-l s{number}"), name)
    });
    let kept = kept.filter(|_| age == Age::Snapshots);
    std::iter::once((String::new(), "disk.raw".into()))
        .chain(kept)
        .collect()
}

/// Returns the figures of what was done, for a table.
fn get_young(dir: &Path, copies: &Path, age: Age) -> String {
    for (of, name) in versions(age) {
        let to = copies.join(name);
        let line = format!("convert -O raw {of} a.qcow2 {}", to.display());
        qemu(dir, "qemu-img", &line);
    }
    let before = blocks(dir, "a.qcow2");
    let done = json(&succeeds(dir, "compact --json a.qcow2"));
    let plan = json(&succeeds(dir, "compact --plan --json a.qcow2"));
    let figure = |of: &Value, name: &str| of[name].as_u64().unwrap();
    let judge = |what: &str| {
        std::fs::File::open(dir.join("a.qcow2"))
            .and_then(|file| file.sync_all())
            .unwrap();
        let (used, has) = (figure(&plan, "used-bytes"), blocks(dir, "a.qcow2"));
        assert!(
            has * 100 <= used * (100 + LOST_PERCENT),
            "{what}: {has} bytes for {used}"
        );
        qemu(dir, "qemu-img", "check a.qcow2");
        for (of, name) in versions(age) {
            let was = copies.join(name);
            let read = copies.join("read.raw");
            let line = format!("convert -O raw {of} a.qcow2 {}", read.display());
            qemu(dir, "qemu-img", &line);
            let line = format!("compare -f raw -F raw {} {}", was.display(), read.display());
            qemu(dir, "qemu-img", &line);
        }
        has
    };
    let compacted = judge("compacted");
    let ordered = json(&succeeds(dir, "compact --json --defragment a.qcow2"));
    let extents = figure(&ordered, "extents");
    let perfect = figure(&ordered, "extents-perfect");
    assert!(5 * extents <= 6 * perfect, "{ordered}");
    let in_order = judge("in order");
    format!(
        "{} to {} MiB, {} moved; {} to {extents} of {perfect} extents, {} moved; {} MiB",
        before >> 20,
        compacted >> 20,
        figure(&done, "moved-bytes") >> 20,
        figure(&ordered, "extents-before"),
        figure(&ordered, "moved-bytes") >> 20,
        in_order >> 20
    )
}

#[test]
#[ignore = "takes minutes"]
fn aged_images_get_their_space_and_their_order_back() {
    if !peers_are_installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    let mib = number_from_environment("COWSLIP_COMPACT_AGED_MIB").unwrap_or(64);
    let formats: [&[&str]; 3] = [
        &["mkfs.ext4", "-q"],
        &["mkfs.xfs", "-q"],
        &["mkfs.btrfs", "-q"],
    ];
    for format in formats {
        let Some(mounted) = Mounted::of_size(format, (mib * 4 + 400) << 20) else {
            continue;
        };
        let dir = mounted.at.as_path();
        for writer in [Whose::Theirs, Whose::Ours] {
            for age in [Age::Written, Age::Discarded, Age::Snapshots] {
                let copies = scratch();
                succeeds(dir, &format!("create -q -f qcow2 a.qcow2 {mib}M"));
                let mut aging = Aging {
                    dir,
                    writer,
                    parts: mib * 1024 / PART_KIB,
                    rng: Rng::new(mib),
                };
                aging.grow_old(age);
                let figures = get_young(dir, copies.path(), age);
                println!("{} {writer:?} {age:?}: {figures}", format[0]);
                std::fs::remove_file(dir.join("a.qcow2")).unwrap();
            }
        }
    }
}
