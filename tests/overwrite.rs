//! Commands that would overwrite a file that they read: refused under whatever name the file is
//! given, and no byte of it changes.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cowslip_testbed::Random;

use crate::support::loop_device::LoopDevice;
use crate::support::server::Server;
use crate::support::{
    cowslip, outcome, peers_are_installed, qemu_img, run, scratch, scratch_beside,
};

/// Another name of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Alias {
    SameName,
    HardLink,
    SymbolicLink,
    BindMount,
    LoopDevice,
    /// The victim is a loop device over the file, the other name another node of the device.
    OtherNode,
    /// A description of a part of the file.
    Part,
}

const FILE_NAMES: [Alias; 6] = [
    Alias::SameName,
    Alias::HardLink,
    Alias::SymbolicLink,
    Alias::BindMount,
    Alias::LoopDevice,
    Alias::OtherNode,
];

/// The resources that keep an alias alive.
#[derive(Default)]
struct Kept {
    devices: Vec<LoopDevice>,
    mounted: Option<PathBuf>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(at) = &self.mounted {
            drop(outcome(Command::new("umount").arg(at)));
        }
    }
}

/// Files that are read, and two names of one of them: as the command reads it, and as it writes it.
struct Scene {
    dir: crate::support::Scratch,
    read: String,
    written: String,
    kept: Kept,
}

/// `over.qcow2` on `s.raw`, `top.qcow2` on that, `ext.qcow2` with its data in `d.raw`, `t.qcow2`
/// with a bitmap.
fn files(dir: &Path) {
    let at = |name: &str| dir.join(name);
    for (name, seed) in [("s.raw", 1), ("d.raw", 2)] {
        let mut bytes = vec![0; 1 << 20];
        Random::new(seed).fill(&mut bytes);
        fs::write(at(name), bytes).unwrap();
    }
    let data = fs::read(at("d.raw")).unwrap();
    let create = |line: &str| {
        let words = line.split_whitespace();
        run(Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2"])
            .args(words)
            .current_dir(dir));
    };
    create("-b s.raw -F raw over.qcow2");
    create("-b over.qcow2 -F qcow2 top.qcow2");
    create("-o data_file=d.raw,data_file_raw=on ext.qcow2 1M");
    fs::write(at("d.raw"), data).unwrap();
    create("-b ext.qcow2 -F qcow2 overext.qcow2");
    create("t.qcow2 1M");
    create("old.qcow2 1M");
    fs::write(at("old.raw"), vec![9; 1 << 20]).unwrap();
    qemu_img(&["bitmap", "--add"], &[&at("t.qcow2"), Path::new("b")]);
    // A device over it has whole sectors.
    let image = fs::OpenOptions::new().write(true).open(at("t.qcow2"));
    image.unwrap().set_len(1 << 20).unwrap();
}

impl Scene {
    /// `None` where the alias cannot be made here.
    fn new(victim: &str, alias: Alias) -> Option<Scene> {
        let dir = scratch();
        files(dir.path());
        Scene::of(dir, victim, alias)
    }

    /// The same of files that are there already.
    fn of(dir: crate::support::Scratch, victim: &str, alias: Alias) -> Option<Scene> {
        let at = |name: &str| dir.path().join(name);
        let mut kept = Kept::default();
        let is_root = rustix::process::geteuid().is_root();
        let mut read = at(victim).display().to_string();
        let mut written = "alias".to_string();
        match alias {
            Alias::SameName => written = victim.to_string(),
            Alias::HardLink => fs::hard_link(at(victim), at("alias")).unwrap(),
            Alias::SymbolicLink => std::os::unix::fs::symlink(victim, at("alias")).unwrap(),
            Alias::BindMount | Alias::OtherNode if !is_root => {
                eprintln!("SKIPPED: {alias:?} needs root");
                return None;
            }
            Alias::BindMount => {
                fs::write(at("alias"), "").unwrap();
                let mut mount = Command::new("mount");
                run(mount.args([Path::new("--bind"), &at(victim), &at("alias")]));
                kept.mounted = Some(at("alias"));
            }
            Alias::LoopDevice => {
                let device = LoopDevice::over(&at(victim), &[])?;
                written = device.path.display().to_string();
                kept.devices.push(device);
            }
            Alias::OtherNode => {
                let device = LoopDevice::over(&at(victim), &[])?;
                read = device.path.display().to_string();
                let number = read.trim_start_matches("/dev/loop").to_string();
                let mut node = Command::new("mknod");
                run(node.arg(at("alias")).args(["b", "7", &number]));
                kept.devices.push(device);
            }
            Alias::Part => {
                written = format!("driver=raw,offset=64k,size=512k,file.filename={victim}");
            }
        }
        Some(Scene {
            dir,
            read,
            written,
            kept,
        })
    }

    /// Files alone, for command lines that name them.
    fn without_alias(dir: crate::support::Scratch) -> Scene {
        Scene {
            dir,
            read: String::new(),
            written: String::new(),
            kept: Kept::default(),
        }
    }

    /// All files, by their names.
    fn regular(&self) -> BTreeMap<String, PathBuf> {
        let files = fs::read_dir(self.dir.path()).unwrap();
        let regular = files.map(Result::unwrap).filter(|entry| {
            let kind = fs::metadata(entry.path()).map(|found| found.is_file());
            kind.unwrap_or(false)
        });
        regular
            .map(|entry| {
                let name = entry.file_name().to_string_lossy().into_owned();
                (name, entry.path())
            })
            .collect()
    }

    /// All files and their bytes.
    fn bytes(&self) -> BTreeMap<String, Vec<u8>> {
        let files = self.regular().into_iter();
        files
            .map(|(name, path)| (name, fs::read(path).unwrap()))
            .collect()
    }

    /// Whether these are all files and their bytes. One buffer takes them in turn: memory that is
    /// new for each was half of the time of these tests.
    fn has(&self, bytes: &BTreeMap<String, Vec<u8>>) -> bool {
        let files = self.regular();
        let mut buffer = Vec::new();
        files.keys().eq(bytes.keys())
            && files.iter().all(|(name, path)| {
                buffer.clear();
                let mut file = fs::File::open(path).unwrap();
                file.read_to_end(&mut buffer).unwrap();
                buffer == bytes[name]
            })
    }

    /// A line with the names of this scene.
    fn named(&self, line: &str) -> String {
        line.replace("READ", &self.read)
            .replace("WRITTEN", &self.written)
            .replace("DIR", &self.dir.path().display().to_string())
    }

    fn command(&self, line: &str) -> Command {
        let line = self.named(line);
        let mut command = Command::new("timeout");
        command.arg("60").arg(cowslip().get_program());
        command.args(line.split_whitespace());
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        command
    }

    /// Refused with a message, and nothing that was there has changed; a new file is gone.
    fn is_refused(&self, line: &str, context: &str) {
        let before = self.bytes();
        let output = outcome(&mut self.command(line));
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let context = format!("{context}: {line}\n{errors}");
        assert_eq!(output.status.code(), Some(1), "{context}");
        assert!(self.has(&before), "changed a file: {context}");
        let words = [
            "must not be overwritten: it",
            "Failed to get \"write\" lock",
            "Failed to get shared \"write\" lock",
            "with the same filename as the backing file",
            "would be a loop",
            "is a loop",
            "creates an infinite loop",
            "is stored where another file of ",
            "it is the data file of an image of the chain",
            "the image names itself as its data file",
            "its data file is in use by an image of its chain",
            "itself: leave out -b to merge bitmaps",
        ];
        let is_clear = |line: &str| words.iter().any(|words| line.contains(words));
        assert!(errors.lines().any(is_clear), "{context}");
        assert!(errors.lines().count() <= 3, "{context}");
    }

    /// Refused, or done with all files as they were but `x.qcow2`, whatever its other names are.
    fn changes_the_image_alone(&self, line: &str) {
        let others = || {
            let inode = |name: &str| {
                let found = fs::metadata(self.dir.path().join(name)).unwrap();
                (found.dev(), found.ino())
            };
            let mut bytes = self.bytes();
            bytes.retain(|name, _| inode(name) != inode("x.qcow2"));
            bytes
        };
        let before = others();
        let output = outcome(&mut self.command(line));
        assert!(before == others(), "changed a file: {line}: {output:?}");
    }
}

/// Command lines that read READ and would write WRITTEN, which is another name of it.
const LINES_OF_RAW: &[&str] = &[
    "convert -f raw -O raw READ WRITTEN",
    "convert -f raw -O qcow2 READ WRITTEN",
    "convert -n -f raw -O raw READ WRITTEN",
    "convert -n -U -f raw -O raw READ WRITTEN",
    "convert -f raw -O raw -C READ WRITTEN",
    "convert -n -f raw -O raw old.raw READ WRITTEN",
    "convert -f raw -O qcow2 -o data_file=WRITTEN READ new.qcow2",
    "convert -f raw -O qcow2 -o data_file=WRITTEN READ old.qcow2",
    "convert -f raw -O qcow2 -c -o data_file=WRITTEN,data_file_raw=on READ new.qcow2",
    "dd -f raw -O raw if=READ of=WRITTEN",
    "dd -U -f raw -O qcow2 if=READ of=WRITTEN",
    "clone --copy -f raw READ WRITTEN",
    "create -f qcow2 -b READ -F raw WRITTEN",
    "create -f qcow2 -b READ -F raw -o data_file=WRITTEN new.qcow2",
    "create -f qcow2 -b READ -F raw -o data_file=WRITTEN old.qcow2",
    "create -u -f qcow2 -b READ -F raw WRITTEN 1M",
    "qemu-img convert -f raw -O raw READ WRITTEN",
    "qemu-img convert -n -f raw -O raw READ WRITTEN",
    "qemu-img convert -f raw -O qcow2 -o data_file=WRITTEN READ new.qcow2",
    "qemu-img dd -f raw -O raw if=READ of=WRITTEN",
];

/// The same where READ is named by images: `s.raw` lies below `over.qcow2` and `top.qcow2`.
const LINES_OF_BASE: &[&str] = &[
    "convert -O raw over.qcow2 WRITTEN",
    "convert -O qcow2 top.qcow2 WRITTEN",
    "convert -n -O raw top.qcow2 WRITTEN",
    "convert -O qcow2 -o data_file=WRITTEN top.qcow2 new.qcow2",
    "convert -O qcow2 -o data_file=WRITTEN top.qcow2 old.qcow2",
    "convert -O qcow2 -B DIR/s.raw -F raw top.qcow2 WRITTEN",
    "convert -O qcow2 -B DIR/s.raw -F raw -o data_file=WRITTEN top.qcow2 new.qcow2",
    "convert -O qcow2 -B DIR/over.qcow2 -F qcow2 -o data_file=WRITTEN t.qcow2 old.qcow2",
    "convert -n -O raw -B DIR/over.qcow2 t.qcow2 WRITTEN",
    "convert -O raw old.qcow2 top.qcow2 WRITTEN",
    "dd -O raw if=top.qcow2 of=WRITTEN",
    "clone --copy over.qcow2 WRITTEN",
    "clone --copy top.qcow2 WRITTEN",
    "create -f qcow2 -b DIR/top.qcow2 -F qcow2 WRITTEN",
    "create -f qcow2 -b DIR/top.qcow2 -F qcow2 -o data_file=WRITTEN new.qcow2",
    "create -u -f qcow2 -b DIR/top.qcow2 -F qcow2 WRITTEN 1M",
    "qemu-img convert -n -O raw over.qcow2 WRITTEN",
    "qemu-img convert -O qcow2 -B DIR/s.raw -F raw -o data_file=WRITTEN over.qcow2 new.qcow2",
];

/// The same of a data file: `d.raw` holds the data of `ext.qcow2`, below `overext.qcow2`.
const LINES_OF_DATA: &[&str] = &[
    "convert -O raw ext.qcow2 WRITTEN",
    "convert -n -O raw overext.qcow2 WRITTEN",
    "convert -n -O qcow2 ext.qcow2 ext.qcow2",
    "convert -O qcow2 -o data_file=WRITTEN overext.qcow2 new.qcow2",
    "convert -O qcow2 -B DIR/ext.qcow2 -F qcow2 -o data_file=WRITTEN t.qcow2 old.qcow2",
    "convert -n -f raw -O qcow2 READ ext.qcow2",
    "dd -O raw if=overext.qcow2 of=WRITTEN",
    "clone --copy --data-file WRITTEN ext.qcow2 new.qcow2",
    "clone --copy --data-file new.raw ext.qcow2 WRITTEN",
    "create -f qcow2 -b DIR/ext.qcow2 -F qcow2 WRITTEN",
    "create -f qcow2 -b DIR/overext.qcow2 -F qcow2 -o data_file=WRITTEN new.qcow2",
];

/// The same of an image that is changed, and of what it would be put on.
const LINES_OF_IMAGES: &[&str] = &[
    "convert -O qcow2 READ WRITTEN",
    "convert -n -O qcow2 READ WRITTEN",
    "convert -O qcow2 -B READ -F qcow2 t.qcow2 WRITTEN",
    "dd -O qcow2 if=READ of=WRITTEN",
    "clone --copy READ WRITTEN",
    "create -f qcow2 -b READ -F qcow2 WRITTEN",
    "rebase -b READ -F qcow2 WRITTEN",
    "rebase -u -b READ -F qcow2 WRITTEN",
    "bitmap --add --merge b -b READ -F qcow2 WRITTEN c",
];

fn refused(victim: &str, aliases: &[Alias], lines: &[&str]) {
    if !peers_are_installed(&["qemu-img"]) {
        return;
    }
    for &alias in aliases {
        let Some(scene) = Scene::new(victim, alias) else {
            continue;
        };
        for line in lines {
            scene.is_refused(line, &format!("{alias:?} of {victim}"));
        }
    }
}

#[test]
fn a_raw_source_or_backing_file_is_not_overwritten() {
    refused("s.raw", &FILE_NAMES, LINES_OF_RAW);
}

#[test]
fn a_file_below_a_source_is_not_overwritten() {
    refused("s.raw", &FILE_NAMES[..5], LINES_OF_BASE);
}

#[test]
fn a_data_file_of_what_is_read_is_not_overwritten() {
    refused("d.raw", &FILE_NAMES[..5], LINES_OF_DATA);
}

#[test]
fn an_image_is_not_written_from_itself() {
    refused("t.qcow2", &FILE_NAMES, LINES_OF_IMAGES);
}

#[test]
fn a_part_of_a_source_is_not_overwritten() {
    let lines = [
        "convert -n -f raw --target-image-opts READ WRITTEN",
        "convert -n --target-image-opts over.qcow2 WRITTEN",
        "convert -n --target-image-opts top.qcow2 WRITTEN",
        "qemu-img convert -n -f raw --target-image-opts READ WRITTEN",
        "qemu-img convert -n --target-image-opts top.qcow2 WRITTEN",
    ];
    refused("s.raw", &[Alias::Part], &lines);
}

/// Images, each `x.qcow2`, that write a file which they also read, as lines of qemu-img make them.
/// WRITTEN and READ are two names of this file, which is named first.
const TANGLED: &[(&str, &[&str])] = &[
    // The data file is the backing file, one further below, or the data file of one below.
    (
        "s.raw",
        &[
            "create -q -u -f qcow2 -b READ -F raw -o data_file=dummy x.qcow2 1M",
            "amend -q -o data_file=WRITTEN x.qcow2",
        ],
    ),
    (
        "s.raw",
        &[
            "create -q -u -f qcow2 -b READ -F raw m.qcow2 1M",
            "create -q -u -f qcow2 -b m.qcow2 -F qcow2 -o data_file=dummy x.qcow2 1M",
            "amend -q -o data_file=WRITTEN x.qcow2",
        ],
    ),
    (
        "d.raw",
        &[
            "amend -q -o data_file=READ ext.qcow2",
            "create -q -u -f qcow2 -b overext.qcow2 -F qcow2 -o data_file=dummy x.qcow2 1M",
            "amend -q -o data_file=WRITTEN x.qcow2",
        ],
    ),
    // It is an image below.
    (
        "t.qcow2",
        &[
            "create -q -u -f qcow2 -b READ -F qcow2 -o data_file=dummy x.qcow2 1M",
            "amend -q -o data_file=WRITTEN x.qcow2",
        ],
    ),
    // The image lies below itself, at once or further down, or stores its data in itself.
    (
        "x.qcow2",
        &[
            "create -q -f qcow2 x.qcow2 1M",
            "rebase -u -b WRITTEN -F qcow2 x.qcow2",
        ],
    ),
    (
        "x.qcow2",
        &[
            "create -q -f qcow2 x.qcow2 1M",
            "rebase -u -b WRITTEN -F raw x.qcow2",
        ],
    ),
    (
        "x.qcow2",
        &[
            "create -q -u -f qcow2 -b WRITTEN -F qcow2 m.qcow2 1M",
            "create -q -u -f qcow2 -b m.qcow2 -F qcow2 x.qcow2 1M",
        ],
    ),
    (
        "x.qcow2",
        &[
            "create -q -u -f qcow2 -o data_file=dummy x.qcow2 1M",
            "amend -q -o data_file=WRITTEN x.qcow2",
        ],
    ),
];

/// Every verb that changes one image in place.
const CHANGES: &[&str] = &[
    "resize x.qcow2 +1M",
    "resize --shrink x.qcow2 512k",
    "resize --preallocation=full x.qcow2 2M",
    "amend -o lazy_refcounts=on x.qcow2",
    "amend -o compat=0.10 x.qcow2",
    "amend -o refcount_bits=64 x.qcow2",
    "amend -o data_file=d.raw x.qcow2",
    "snapshot -c one x.qcow2",
    "snapshot -a one x.qcow2",
    "snapshot -d one x.qcow2",
    "commit x.qcow2",
    "commit -d x.qcow2",
    "rebase -b old.raw -F raw x.qcow2",
    "convert -n -O qcow2 old.qcow2 x.qcow2",
    "io x.qcow2",
    "serve -k DIR/sock x.qcow2",
    "qemu-img resize x.qcow2 +1M",
    "qemu-img amend -o refcount_bits=64 x.qcow2",
    "qemu-img snapshot -c one x.qcow2",
    "qemu-io x.qcow2",
    "qemu-nbd -k DIR/sock x.qcow2",
];

/// Verbs that open the image alone, and so read nothing that they write.
const CHANGES_OF_THE_IMAGE_ALONE: &[&str] = &[
    "bitmap --add x.qcow2 b",
    "bitmap --add --merge b -b old.qcow2 -F qcow2 x.qcow2 m",
    "bitmap --disable x.qcow2 b",
    "bitmap --remove x.qcow2 b",
    "qemu-img bitmap --add x.qcow2 c",
];

/// An image is changed by a verb that names nothing else: all that it reads is its own chain.
#[test]
fn an_image_that_reads_what_it_writes_is_not_changed() {
    if !peers_are_installed(&["qemu-img"]) {
        return;
    }
    for (number, (victim, lines)) in TANGLED.iter().enumerate() {
        for (kind, alias) in FILE_NAMES.into_iter().enumerate() {
            let dir = scratch();
            files(dir.path());
            fs::write(dir.path().join("x.qcow2"), vec![0; 1 << 20]).unwrap();
            let Some(scene) = Scene::of(dir, victim, alias) else {
                continue;
            };
            for line in *lines {
                let line = scene.named(line);
                run(Command::new("qemu-img")
                    .args(line.split_whitespace())
                    .current_dir(scene.dir.path()));
            }
            // A device over it has whole sectors, and shows them as they are now.
            let image = fs::OpenOptions::new()
                .write(true)
                .open(scene.dir.path().join("x.qcow2"));
            image.unwrap().set_len(1 << 20).unwrap();
            for device in &scene.kept.devices {
                run(Command::new("blockdev")
                    .arg("--flushbufs")
                    .arg(&device.path));
            }
            // A sixth of them: over all images every line meets every kind of name.
            for line in CHANGES.iter().skip((number + kind) % 6).step_by(6) {
                scene.is_refused(line, &format!("{alias:?} of {victim}, {lines:?}"));
            }
            for line in CHANGES_OF_THE_IMAGE_ALONE {
                scene.changes_the_image_alone(line);
            }
        }
    }
}

/// An image that is changed while its own chain leads to the place where it is stored.
#[test]
fn an_image_on_a_device_over_itself_is_not_changed() {
    let Some(dir) = scratch_beside(&["qemu-img"]) else {
        return;
    };
    files(dir.path());
    let Some(device) = LoopDevice::over(&dir.path().join("t.qcow2"), &[]) else {
        return;
    };
    let name = device.path.display().to_string();
    run(Command::new("qemu-img")
        .args([
            "create", "-q", "-u", "-f", "qcow2", "-b", &name, "-F", "qcow2",
        ])
        .args(["loop.qcow2", "1M"])
        .current_dir(dir.path()));
    fs::copy(dir.path().join("loop.qcow2"), dir.path().join("t.qcow2")).unwrap();
    let scene = Scene::without_alias(dir);
    for line in [
        "resize t.qcow2 +1M",
        "commit t.qcow2",
        "convert -n -O qcow2 old.qcow2 t.qcow2",
    ] {
        scene.is_refused(line, "its own backing file");
    }
}

/// The file behind an export is not known by name; the locks of its server identify it.
#[test]
fn an_export_of_a_source_is_not_overwritten() {
    let Some(dir) = scratch_beside(&["qemu-img"]) else {
        return;
    };
    files(dir.path());
    let scene = Scene::without_alias(dir);
    let lines = [
        "convert -f raw -O raw EXPORT s.raw",
        "convert -n -f raw -O raw EXPORT s.raw",
        "convert -f raw -O qcow2 -o data_file=s.raw EXPORT new.qcow2",
        "convert -f raw -O raw s.raw EXPORT",
        "convert -n -f raw -O raw s.raw EXPORT",
        "convert -n -O raw top.qcow2 EXPORT",
        "convert -n -f raw -O raw EXPORT EXPORT",
        "dd -f raw -O raw if=EXPORT of=s.raw",
        "dd -f raw -O raw if=s.raw of=EXPORT",
        "create -f qcow2 -b DIR/s.raw -F raw EXPORT",
        "create -f qcow2 -b DIR/s.raw -F raw EXPORT 64k",
        "create -f qcow2 -b DIR/top.qcow2 -F qcow2 EXPORT 64k",
        "create -f qcow2 -b s.raw -F raw -o data_file=EXPORT new.qcow2",
        "qemu-img create -f qcow2 -b DIR/s.raw -F raw EXPORT 64k",
        "qemu-img convert -n -f raw -O raw EXPORT s.raw",
        "qemu-img convert -n -f raw -O raw s.raw EXPORT",
    ];
    for words in [&["-f", "raw", "s.raw"][..], &["-r", "-f", "raw", "s.raw"]] {
        let mut serve = cowslip();
        serve.current_dir(scene.dir.path());
        serve.args(["serve", "-k", "sock"]).args(words);
        let server = Server::start(&mut serve, &scene.dir.path().join("sock"));
        let before = scene.bytes();
        for line in lines {
            let line = line.replace("EXPORT", &server.uri());
            let output = outcome(&mut scene.command(&line));
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{words:?} {line}\n{errors}");
            assert!(scene.has(&before), "{words:?} {line}\n{errors}");
        }
    }
}

/// The same where it is the data file of the source.
#[test]
fn an_export_of_a_data_file_is_not_made_an_image() {
    let Some(dir) = scratch_beside(&["qemu-img"]) else {
        return;
    };
    files(dir.path());
    let scene = Scene::without_alias(dir);
    let mut serve = cowslip();
    serve.current_dir(scene.dir.path());
    serve.args(["serve", "-k", "sock", "-f", "raw", "d.raw"]);
    let server = Server::start(&mut serve, &scene.dir.path().join("sock"));
    for backing in ["ext.qcow2", "overext.qcow2"] {
        let line = format!("create -f qcow2 -F qcow2 -b DIR/{backing} EXPORT 64k");
        let before = scene.bytes();
        let output = outcome(&mut scene.command(&line.replace("EXPORT", &server.uri())));
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{line}\n{errors}");
        let lock = "Failed to get shared \"write\" lock";
        assert!(errors.contains(lock), "{line}\n{errors}");
        assert!(scene.has(&before), "{line}\n{errors}");
    }
}

/// An image in one part of a file, over another part as its backing file. It may be written only if
/// they do not meet.
#[test]
fn an_image_is_not_written_over_a_part_that_it_reads() {
    if !peers_are_installed(&["qemu-img"]) {
        return;
    }
    for (start, meets) in [(0, false), ((1 << 20) + (512 << 10), true), (3 << 20, true)] {
        let dir = scratch();
        let below = format!(
            "json:{{\"driver\":\"raw\",\"offset\":{start},\"size\":1048576,\"file\":{{\"driver\":\
             \"file\",\"filename\":\"ab.raw\"}}}}"
        );
        let bytes = [vec![b'b'; 2 << 20], vec![0; 2 << 20]].concat();
        fs::write(dir.path().join("ab.raw"), &bytes).unwrap();
        let create = ["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b"];
        let made = as_qemu_img(
            dir.path(),
            &[&create[..], &[&below, "o.qcow2", "1M"]].concat(),
        );
        assert!(made.status.success(), "{made:?}");
        let image = fs::read(dir.path().join("o.qcow2")).unwrap();
        let mut whole = bytes;
        whole[2 << 20..(2 << 20) + image.len()].copy_from_slice(&image);
        fs::write(dir.path().join("ab.raw"), &whole).unwrap();
        let top = "driver=qcow2,file.driver=raw,file.offset=2M,file.size=2M,\
                   file.file.filename=ab.raw";
        let write = |words: &[&str]| {
            let mut shell = cowslip();
            shell.arg0("qemu-io").args(words).current_dir(dir.path());
            outcome(shell.args(["-c", "write -P 7 0 64k", "--image-opts", top]))
        };
        let after = || fs::read(dir.path().join("ab.raw")).unwrap();
        let written = write(&[]);
        if meets {
            let said = String::from_utf8_lossy(&written.stderr).into_owned();
            let words = "it is stored where another file of the chain is";
            assert!(said.contains(words), "{start}: {written:?}");
            assert!(after() == whole, "{start}: changed the file");
        } else {
            assert!(written.status.success(), "{start}: {written:?}");
            assert!(after()[..2 << 20] == whole[..2 << 20], "the other part");
            assert!(after() != whole, "nothing was written");
        }
        // Reading does not need exclusive access to any part.
        let read = write(&["-r"]);
        let said = String::from_utf8_lossy(&read.stderr).into_owned();
        assert!(!said.contains("is stored where"), "{start}: {read:?}");
    }
}

/// Parts that do not meet are different disks: they may be one another's source, target and backing
/// file.
#[test]
fn parts_of_one_file_that_do_not_meet_are_different_disks() {
    let Some(dir) = scratch_beside(&["qemu-img"]) else {
        return;
    };
    let at = |name: &str| dir.path().join(name);
    let (a, b) = (vec![b'a'; 1 << 20], vec![b'b'; 1 << 20]);
    fs::write(at("ab.raw"), [a.clone(), b.clone()].concat()).unwrap();
    let part = |offset: &str| format!("driver=raw,offset={offset},size=1M,file.filename=ab.raw");
    let json = |offset: u64| {
        format!(
            "json:{{\"driver\":\"raw\",\"offset\":{offset},\"size\":1048576,\"file\":{{\"driver\":\
             \"file\",\"filename\":\"ab.raw\"}}}}"
        )
    };
    let ours = |words: &[&str]| {
        let mut command = cowslip();
        command.arg0("qemu-img").args(words).current_dir(dir.path());
        command
    };
    let compared = outcome(&mut ours(&[
        "compare",
        "--image-opts",
        &part("0"),
        &part("1M"),
    ]));
    assert_eq!(compared.status.code(), Some(1), "{compared:?}");
    let same = outcome(&mut ours(&[
        "compare",
        "--image-opts",
        &part("1M"),
        &part("1M"),
    ]));
    assert_eq!(same.status.code(), Some(0), "{same:?}");
    let overlay = |name: &str| {
        let words = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"];
        run(&mut ours(&[&words[..], &[&json(0), name]].concat()));
    };
    overlay("top.qcow2");
    run(&mut ours(&[
        "rebase",
        "-b",
        &json(1 << 20),
        "-F",
        "raw",
        "top.qcow2",
    ]));
    run(&mut ours(&[
        "convert",
        "-O",
        "raw",
        "top.qcow2",
        "shown.raw",
    ]));
    assert!(
        fs::read(at("shown.raw")).unwrap() == a,
        "rebase changed the disk"
    );
    // An overlay in one part, over the other part as its backing file.
    overlay("o.qcow2");
    let image = fs::read(at("o.qcow2")).unwrap();
    let mut whole = vec![0; 4 << 20];
    whole[2 << 20..(2 << 20) + image.len()].copy_from_slice(&image);
    whole[..1 << 20].copy_from_slice(&b);
    fs::write(at("ab.raw"), &whole).unwrap();
    let nested =
        "driver=qcow2,file.driver=raw,file.offset=2M,file.size=2M,file.file.filename=ab.raw";
    run(&mut ours(&[
        "convert",
        "--image-opts",
        "-O",
        "raw",
        nested,
        "shown.raw",
    ]));
    assert!(
        fs::read(at("shown.raw")).unwrap() == b,
        "a chain of two parts of one file"
    );
}

fn as_qemu_img(dir: &Path, words: &[&str]) -> std::process::Output {
    let mut command = cowslip();
    command.arg0("qemu-img").args(words).current_dir(dir);
    outcome(&mut command)
}

/// The exit code of a comparison of two descriptions.
fn compared(dir: &Path, before: &[&str], images: [&str; 2]) -> Option<i32> {
    let words = [&["compare"], before, &["--image-opts"], &images].concat();
    as_qemu_img(dir, &words).status.code()
}

#[test]
fn snapshots_of_one_image_are_different_disks() {
    let Some(dir) = &scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    qemu_img(
        &["create", "-q", "-f", "qcow2"],
        &[&dir.join("a.qcow2"), Path::new("1M")],
    );
    for (byte, name) in [("1", "one"), ("2", "two")] {
        let write = format!("write -P {byte} 0 1M");
        let mut io = Command::new("qemu-io");
        run(io.args(["-c", &write, "a.qcow2"]).current_dir(dir));
        let taken = as_qemu_img(dir, &["snapshot", "-c", name, "a.qcow2"]);
        assert!(taken.status.success(), "{taken:?}");
    }
    let disk = "driver=qcow2,file.filename=a.qcow2";
    let [one, two] = ["one", "two"].map(|name| format!("{disk},snapshot.name={name}"));
    assert_eq!(compared(dir, &[], [&one, &two]), Some(1));
    assert_eq!(compared(dir, &[], [&two, disk]), Some(0));
    assert_eq!(compared(dir, &[], [&one, disk]), Some(1));
}

/// In QEMU's old encryption the password is the key: another one shows another disk.
#[test]
fn views_of_one_image_under_two_passwords_are_different_disks() {
    let Some(dir) = &scratch_beside(&["qemu-img"]) else {
        return;
    };
    fs::write(dir.join("s.raw"), vec![1; 1 << 20]).unwrap();
    let secrets = [
        "--object",
        "secret,id=k1,data=first",
        "--object",
        "secret,id=k2,data=second",
    ];
    let options = "encryption=on,encrypt.key-secret=k1";
    let convert = ["convert", "-f", "raw", "-O", "qcow2", "-o", options];
    let words = [&convert[..], &secrets, &["s.raw", "e.qcow2"]].concat();
    let made = as_qemu_img(dir, &words);
    assert!(made.status.success(), "{made:?}");
    let [first, second] = ["k1", "k2"]
        .map(|key| format!("driver=qcow2,file.filename=e.qcow2,encrypt.key-secret={key}"));
    assert_eq!(compared(dir, &secrets, [&first, &first]), Some(0));
    assert_eq!(compared(dir, &secrets, [&first, &second]), Some(1));
}

/// A part with a small offset has as many sectors as the file, and is not the file.
#[test]
fn a_part_of_a_file_is_not_shared_as_the_whole() {
    if !peers_are_installed(&["mkfs.xfs"]) {
        return;
    }
    let Some(mounted) = crate::support::mounted::Mounted::new(&["mkfs.xfs", "-q"]) else {
        return;
    };
    let bytes = [vec![b'X'; 100], vec![b'Y'; 900]].concat();
    fs::write(mounted.at.join("p.raw"), &bytes).unwrap();
    let part = "driver=raw,offset=100,file.filename=p.raw";
    run(cowslip()
        .args([
            "convert",
            "--source-image-opts",
            "-O",
            "raw",
            part,
            "out.raw",
        ])
        .current_dir(&mounted.at));
    let copied = fs::read(mounted.at.join("out.raw")).unwrap();
    assert!(copied[..900] == bytes[100..], "{:?}", &copied[..4]);
}

/// Pictures and process numbers are no images, and do not take the place of one.
#[test]
fn a_picture_or_a_process_number_does_not_overwrite_the_image() {
    if !peers_are_installed(&["qemu-img"]) {
        return;
    }
    let Some(scene) = Scene::new("t.qcow2", Alias::HardLink) else {
        return;
    };
    for line in [
        "extents --svg WRITTEN READ",
        "serve -k DIR/sock --pid-file WRITTEN READ",
        "qemu-nbd -k DIR/sock --pid-file=WRITTEN READ",
    ] {
        scene.is_refused(line, "a file of text");
    }
}
