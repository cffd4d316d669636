//! Command lines about files that are in use: under another name, through a device, as a part, as a
//! backing or data file, behind a server, by a process that writes to them; and about targets that
//! are full of something else. A line that would write what it reads is refused and leaves every
//! byte; any other does what qemu-img's does, and changes only the files that it names as targets.
//! Some cases are on XFS, where copies may share their data.
//!
//! `COWSLIP_CLI_SEED` and `COWSLIP_CLI_CASES` choose the cases, as in all tests here. Bind mounts
//! and loop devices need root.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use super::cast::Cast;
use super::known::Line;
use super::{LINES, Place, quoted, run_many_in, run_some_in};
use crate::support::golden;
use crate::support::judge::{Layout, comparable};
use crate::support::mounted::Mounted;
use crate::support::rng::Rng;
use crate::support::server::Server;
use crate::support::twins::{Twin, Verdict, compare_disks, compare_files, copy_all, qemu_img};
use crate::support::{cowslip, outcome, peers_are_installed, run};

/// Cases of an ordinary test run: some seconds.
const CASES: u64 = 40;
/// Cases about one thing.
const FOCUSED_CASES: u64 = 16;

/// Files, and what else is read with each: its backing chain and its data file.
const FILES: &[(&str, &[&str])] = &[
    ("a.raw", &[]),
    ("base.qcow2", &[]),
    ("mid.qcow2", &["base.qcow2"]),
    ("top.qcow2", &["mid.qcow2", "base.qcow2"]),
    ("over.qcow2", &["a.raw"]),
    ("data.qcow2", &["data.bin"]),
    ("img.qcow2", &[]),
    ("garbage.raw", &[]),
    ("disk.bin", &[]),
];

/// Other names of files; those behind a device or a mount only root can make.
const NAMES: &[(&str, &str)] = &[
    ("./a.raw", "a.raw"),
    ("hard.raw", "a.raw"),
    ("soft.raw", "a.raw"),
    ("hard.qcow2", "base.qcow2"),
    ("soft.qcow2", "base.qcow2"),
    ("hard-data", "data.bin"),
    ("data.bin", "data.bin"),
];
const NAMES_OF_ROOT: &[(&str, &str)] = &[
    ("bound.raw", "a.raw"),
    ("loop.raw", "a.raw"),
    ("disk", "disk.bin"),
    ("disk", "disk.bin"),
];

/// The address of the server of SERVED, in the directory of the case.
const EXPORT: &str = "nbd+unix:///?socket=export";
/// Full of garbage.
const SERVED: &str = "garbage.raw";

/// Bytes of most disks.
const DISK_BYTES: u64 = 1 << 20;

/// A command line, and what it has to do with the files.
struct Case {
    words: Vec<String>,
    reads: BTreeSet<&'static str>,
    writes: BTreeSet<&'static str>,
    /// It may write the file that it reads: a commit.
    in_place: bool,
    /// qemu-img has no such verb.
    is_ours_alone: bool,
    /// Ours runs under its own name, under which copies of raw files share their data.
    by_our_name: bool,
    /// A process has this file open for writing meanwhile.
    held: Option<&'static str>,
    /// The image that it makes or writes, and its format.
    target: Option<(String, &'static str)>,
}

impl Case {
    fn contradicts_itself(&self) -> bool {
        !self.in_place && !self.reads.is_disjoint(&self.writes)
    }

    /// Whether it is about an export, and needs the server.
    fn is_served(&self) -> bool {
        self.words.iter().any(|word| word.contains(EXPORT))
    }

    /// The files whose bytes it may change.
    fn may_change(&self) -> BTreeSet<&'static str> {
        match self.contradicts_itself() {
            true => BTreeSet::new(),
            false => self.writes.clone(),
        }
    }
}

/// The subject of most lines of a case, if it has a single one.
#[derive(Clone, Copy, Debug)]
enum Focus {
    /// Clones onto files below their source.
    FileBelow,
    /// Copies of parts that have as many sectors as their file. On XFS.
    PartLikeTheWhole,
    /// Copies of what a process writes to.
    Held,
    /// Parts of one file, compared and below overlays.
    Parts,
}

impl Focus {
    fn of(seed: u64) -> Focus {
        match seed % 4 {
            0 => Focus::FileBelow,
            1 => Focus::PartLikeTheWhole,
            2 => Focus::Held,
            _ => Focus::Parts,
        }
    }
}

/// The generator of one case's lines.
struct Aliases {
    rng: Rng,
    names: Vec<(&'static str, &'static str)>,
    focus: Option<Focus>,
}

/// The file, and all that is read with it.
fn closure(file: &'static str) -> BTreeSet<&'static str> {
    let below = FILES.iter().find(|(name, _)| *name == file);
    let below = below.map_or(&[][..], |(_, below)| below);
    std::iter::once(file).chain(below.iter().copied()).collect()
}

fn format_of(file: &str) -> &'static str {
    match file.ends_with(".qcow2") {
        true => "qcow2",
        false => "raw",
    }
}

/// A part of a file, described; to the end if no size is given.
fn part_of(driver: &str, name: &str, start: u64, size: Option<u64>) -> String {
    let size = size.map_or(String::new(), |size| format!(r#","size":{size}"#));
    format!(
        r#"json:{{"driver":"raw","offset":{start}{size},"file":{{"driver":"{driver}","filename":"{name}"}}}}"#
    )
}

impl Aliases {
    fn new(seed: u64, focus: Option<Focus>, is_root: bool) -> Aliases {
        let files = FILES.iter().map(|(file, _)| (*file, *file));
        let of_root = if is_root { NAMES_OF_ROOT } else { &[] };
        Aliases {
            rng: Rng::named(seed, "aliases"),
            focus,
            names: files
                .filter(|(file, _)| *file != "disk.bin")
                .chain(NAMES.iter().chain(of_root).copied())
                .collect(),
        }
    }

    /// A name, and the file that it is of.
    fn name(&mut self) -> (&'static str, &'static str) {
        *self.rng.pick(&self.names)
    }

    /// A name of one of these files; mostly another than its own.
    fn name_among(&mut self, files: &BTreeSet<&'static str>) -> (&'static str, &'static str) {
        let names = self.names.iter().filter(|(_, file)| files.contains(file));
        let names: Vec<_> = names.copied().collect();
        match names.is_empty() {
            true => self.name(),
            false => *self.rng.pick(&names),
        }
    }

    /// A part of a file, described.
    fn part(&mut self, (name, file): (&str, &str)) -> String {
        let driver = match matches!(name, "loop.raw" | "disk") {
            true => "host_device",
            false => "file",
        };
        let start = *self.rng.pick(&[0, 100, 512, 65536, DISK_BYTES / 2]);
        // To the end, which may be within a sector.
        let size = match self.rng.once_in(3) {
            true => None,
            false => Some(*self.rng.pick(&[65536, DISK_BYTES / 2])),
        };
        debug_assert_eq!(format_of(file), "raw");
        part_of(driver, name, start, size)
    }

    /// Something to read: its words, its format, and the files that it is of.
    fn source(&mut self) -> (String, &'static str, BTreeSet<&'static str>) {
        let (name, file) = self.name();
        let is_long_enough = ["a.raw", "garbage.raw", "disk.bin"].contains(&file);
        match is_long_enough && self.rng.once_in(3) {
            true => (self.part((name, file)), "raw", closure(file)),
            false => (name.to_string(), format_of(file), closure(file)),
        }
    }

    /// Something to write: one of what is read, something else that exists, or a new file.
    fn target(&mut self, reads: &BTreeSet<&'static str>) -> (String, Option<&'static str>) {
        match self.rng.below(9) {
            0..3 => {
                let (name, file) = self.name_among(reads);
                (name.to_string(), Some(file))
            }
            3 | 4 => {
                let (name, file) = self.name();
                (name.to_string(), Some(file))
            }
            5 => ("new.raw".to_string(), None),
            6 => (EXPORT.to_string(), Some(SERVED)),
            _ => ("new.qcow2".to_string(), None),
        }
    }

    fn line(&mut self) -> Case {
        match self.focus {
            Some(focus) if !self.rng.once_in(4) => self.line_about(focus),
            _ => self.any_line(),
        }
    }

    fn line_about(&mut self, focus: Focus) -> Case {
        match focus {
            Focus::FileBelow => {
                let overlay = self.overlay();
                let below = closure(overlay).into_iter().filter(|file| *file != overlay);
                let (target, of) = self.name_among(&below.collect());
                self.clone_onto((overlay, overlay), (target, Some(of)))
            }
            Focus::PartLikeTheWhole => {
                // A file without holes: where data and a hole meet within a sector of the part,
                // qemu-img 10.0.2 loses the bytes in front of the hole.
                let start = *self.rng.pick(&[1, 100, 511]);
                let part = part_of("file", SERVED, start, None);
                let target = *self.rng.pick(&["new.raw", "new.bin", "new.img"]);
                let words = ["convert", "-q", "-O", "raw", &part, target].map(str::to_string);
                let mut case = Case::new(words.to_vec(), closure(SERVED), BTreeSet::new());
                case.by_our_name = true;
                case.target = Some((target.to_string(), "raw"));
                case
            }
            Focus::Held => {
                const NAMES: [&str; 4] = ["a.raw", "./a.raw", "hard.raw", "soft.raw"];
                let (name, format, of) = match self.rng.once_in(3) {
                    true => ("over.qcow2", "qcow2", "over.qcow2"),
                    false => (*self.rng.pick(&NAMES), "raw", "a.raw"),
                };
                let format_of_target = *self.rng.pick(&["raw", "qcow2"]);
                let words = ["convert", "-f", format, "-O", format_of_target];
                let mut words = words.map(str::to_string).to_vec();
                if self.rng.once_in(4) {
                    words.push("-U".to_string());
                }
                words.extend([name, "new.img"].map(str::to_string));
                let mut case = Case::new(words, closure(of), BTreeSet::new());
                case.target = Some(("new.img".to_string(), format_of_target));
                case.held = Some("a.raw");
                case
            }
            Focus::Parts => {
                let file = *self.rng.pick(&["a.raw", "garbage.raw"]);
                let half = DISK_BYTES / 2;
                let parts = [0, half].map(|start| part_of("file", file, start, Some(half)));
                let mut words = vec!["compare".to_string()];
                words.extend(parts);
                Case::new(words, closure(file), BTreeSet::new())
            }
        }
    }

    fn any_line(&mut self) -> Case {
        let mut case = match self.rng.below(24) {
            0..10 => self.convert(),
            10..13 => self.create(),
            13..15 => self.dd(),
            15 => self.rebase(),
            16 => self.commit(),
            17..21 => self.compare(),
            _ => self.clone_of_ours(),
        };
        let may_be_held = !case.is_ours_alone && !case.contradicts_itself();
        if may_be_held && case.reads.contains("a.raw") && self.rng.once_in(3) {
            case.held = Some("a.raw");
        }
        case
    }

    /// The options that name a data file: one of what is read, something that exists, or a new one.
    fn data_file(
        &mut self,
        reads: &BTreeSet<&'static str>,
        writes: &mut BTreeSet<&'static str>,
    ) -> String {
        let full = BTreeSet::from(["disk.bin", "garbage.raw"]);
        let name = match self.rng.below(5) {
            0 => "new.bin",
            1 => {
                let (name, file) = self.name_among(&full);
                writes.insert(file);
                name
            }
            2 | 3 => {
                let (name, file) = self.name_among(reads);
                writes.insert(file);
                name
            }
            _ => {
                let (name, file) = self.name();
                writes.insert(file);
                name
            }
        };
        let more = [
            "",
            ",data_file_raw=on",
            ",data_file_raw=on",
            ",preallocation=metadata",
        ];
        format!("data_file={name}{}", self.rng.pick(&more))
    }

    fn convert(&mut self) -> Case {
        let (source, source_format, mut reads) = self.source();
        let mut words = vec!["convert".to_string()];
        let is_part = source.starts_with("json:");
        if !is_part {
            words.extend(["-f", source_format].map(str::to_string));
        }
        let mut writes = BTreeSet::new();
        let (mut target, mut file) = self.target(&reads);
        let mut format = match file {
            Some("disk.bin" | SERVED) | None if self.rng.once_in(2) => "qcow2",
            Some(file) => format_of(file),
            None => *self.rng.pick(&["raw", "qcow2"]),
        };
        let exists = file.is_some() && self.rng.once_in(2);
        if exists {
            words.push("-n".to_string());
            writes.extend(
                file.iter()
                    .filter(|file| **file == "data.qcow2")
                    .map(|_| "data.bin"),
            );
        } else if self.rng.once_in(3) {
            format = "qcow2";
            if self.rng.once_in(2) {
                (target, file) = ("new.qcow2".to_string(), None);
            }
            let options = self.data_file(&reads, &mut writes);
            words.extend(["-o".to_string(), options]);
        } else if format == "qcow2" && !is_part && self.rng.once_in(3) {
            let (below, of) = self.name();
            reads.extend(closure(of));
            words.extend(["-B", below, "-F", format_of(of)].map(str::to_string));
        }
        writes.extend(file);
        for (word, times) in [("-U", 8), ("-C", 10), ("-W", 10)] {
            if self.rng.once_in(times) && (word != "-C" || !words.contains(&"-B".to_string())) {
                words.push(word.to_string());
            }
        }
        words.extend(["-O", format].map(str::to_string));
        words.extend([source, target.clone()]);
        let mut case = Case::new(words, reads, writes);
        case.target = Some((target, format));
        case
    }

    fn create(&mut self) -> Case {
        let mut words = ["create", "-q", "-f", "qcow2"].map(str::to_string).to_vec();
        let (mut reads, mut writes) = (BTreeSet::new(), BTreeSet::new());
        if self.rng.once_in(2) {
            let (below, of) = self.name();
            reads = closure(of);
            words.extend(["-b", below, "-F", format_of(of)].map(str::to_string));
        }
        if self.rng.once_in(3) {
            let options = self.data_file(&reads, &mut writes);
            words.extend(["-o".to_string(), options]);
        }
        let (target, file) = self.target(&reads);
        writes.extend(file);
        words.extend([target.clone(), "1M".to_string()]);
        let mut case = Case::new(words, reads, writes);
        case.target = Some((target, "qcow2"));
        case
    }

    fn dd(&mut self) -> Case {
        let (source, format, reads) = self.source();
        let (target, file) = self.target(&reads);
        let mut words = vec!["dd".to_string()];
        if !source.starts_with("json:") {
            words.extend(["-f", format].map(str::to_string));
        }
        let format = file.map_or("raw", format_of);
        words.extend(["-O", format, "bs=64k"].map(str::to_string));
        words.extend([format!("if={source}"), format!("of={target}")]);
        Case::new(words, reads, file.into_iter().collect())
    }

    fn overlay(&mut self) -> &'static str {
        const OVERLAYS: [&str; 3] = ["top.qcow2", "mid.qcow2", "over.qcow2"];
        OVERLAYS[self.rng.below(3) as usize]
    }

    fn rebase(&mut self) -> Case {
        let overlay = self.overlay();
        let (below, format, mut reads) = self.source();
        let mut words = ["rebase", "-f", "qcow2", "-F", format]
            .map(str::to_string)
            .to_vec();
        words.extend(["-b".to_string(), below, overlay.to_string()]);
        reads.extend(closure(overlay).into_iter().filter(|file| *file != overlay));
        Case::new(words, reads, BTreeSet::from([overlay]))
    }

    fn commit(&mut self) -> Case {
        let overlay = self.overlay();
        let words = ["commit", "-q", "-f", "qcow2", overlay].map(str::to_string);
        let mut case = Case::new(words.to_vec(), closure(overlay), closure(overlay));
        case.in_place = true;
        case
    }

    fn compare(&mut self) -> Case {
        let (first, of_first, mut reads) = self.source();
        let is_part = first.starts_with("json:");
        let (second, of_second, more) = match !is_part && self.rng.once_in(2) {
            true => self.source(),
            false => {
                // A part of the same file, or another name of it.
                let (name, file) = self.name_among(&reads.clone());
                match format_of(file) == "raw" && file != "data.bin" {
                    true => (self.part((name, file)), "raw", closure(file)),
                    false => (name.to_string(), format_of(file), closure(file)),
                }
            }
        };
        reads.extend(more);
        let mut words = vec!["compare".to_string()];
        for (option, source, format) in [("-f", &first, of_first), ("-F", &second, of_second)] {
            if !source.starts_with("json:") {
                words.extend([option, format].map(str::to_string));
            }
        }
        words.extend([first, second]);
        Case::new(words, reads, BTreeSet::new())
    }

    fn clone_of_ours(&mut self) -> Case {
        let (name, file) = self.name();
        let (target, of) = self.target(&closure(file));
        self.clone_onto((name, file), (&target, of))
    }

    fn clone_onto(
        &self,
        (name, file): (&str, &'static str),
        (target, of): (&str, Option<&'static str>),
    ) -> Case {
        let format = format_of(file);
        let words = ["clone", "--copy", "--force", "-f", format, name, target];
        let words = words.map(str::to_string).to_vec();
        let mut case = Case::new(words, closure(file), of.into_iter().collect());
        case.is_ours_alone = true;
        case
    }
}

impl Case {
    fn new(
        words: Vec<String>,
        reads: BTreeSet<&'static str>,
        writes: BTreeSet<&'static str>,
    ) -> Case {
        Case {
            words,
            reads,
            writes,
            in_place: false,
            is_ours_alone: false,
            by_our_name: false,
            held: None,
            target: None,
        }
    }
}

/// Names, mounts and devices of one directory's files, gone when dropped.
struct Linked {
    loops: Vec<String>,
    mounts: Vec<PathBuf>,
}

impl Linked {
    fn new(directory: &Path, is_root: bool) -> Linked {
        let at = |name: &str| directory.join(name);
        let garbage: Vec<u8> = (0..2 * DISK_BYTES)
            .map(|byte| (byte % 251) as u8 + 1)
            .collect();
        for name in ["garbage.raw", "disk.bin"] {
            std::fs::write(at(name), &garbage).unwrap();
        }
        for (name, of) in [
            ("hard.raw", "a.raw"),
            ("hard.qcow2", "base.qcow2"),
            ("hard-data", "data.bin"),
        ] {
            std::fs::hard_link(at(of), at(name)).unwrap();
        }
        for (name, of) in [("soft.raw", "a.raw"), ("soft.qcow2", "base.qcow2")] {
            symlink(of, at(name)).unwrap();
        }
        let mut linked = Linked {
            loops: Vec::new(),
            mounts: Vec::new(),
        };
        if !is_root {
            return linked;
        }
        for (name, of) in [("loop.raw", "a.raw"), ("disk", "disk.bin")] {
            let device = run(Command::new("losetup").args(["-f", "--show"]).arg(at(of)));
            symlink(device.trim(), at(name)).unwrap();
            linked.loops.push(device.trim().to_string());
        }
        std::fs::write(at("bound.raw"), "").unwrap();
        run(Command::new("mount")
            .arg("--bind")
            .args([at("a.raw"), at("bound.raw")]));
        linked.mounts.push(at("bound.raw"));
        linked
    }

    /// Makes data written through a device reach its file, and reads through it return the content
    /// of the file.
    fn settle(&self) {
        for device in &self.loops {
            run(Command::new("blockdev").args(["--flushbufs", device]));
        }
    }
}

impl Drop for Linked {
    fn drop(&mut self) {
        for mount in &self.mounts {
            outcome(Command::new("umount").arg(mount));
        }
        for device in &self.loops {
            outcome(Command::new("losetup").args(["-d", device]));
        }
    }
}

/// A process that has a raw file open for writing.
struct Holder(Child);

impl Holder {
    fn new(directory: &Path, file: &str) -> Holder {
        let mut child = Command::new("qemu-io")
            .current_dir(directory)
            .args(["-f", "raw", file])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        writeln!(child.stdin.as_ref().unwrap(), "length").unwrap();
        let mut said = String::new();
        let mut reader = BufReader::new(child.stdout.as_mut().unwrap());
        // It answers once it has the file.
        reader.read_line(&mut said).unwrap();
        Holder(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        drop(self.0.wait());
    }
}

/// The files of one program, under all their names.
struct Side {
    is_ours: bool,
    twin: Twin,
    names: Linked,
}

impl Side {
    fn new(cast: &Cast, directory: PathBuf, is_ours: bool) -> Side {
        copy_all(&cast.directory, &directory);
        let is_root = rustix::process::geteuid().is_root();
        let names = Linked::new(&directory, is_root);
        let program = match is_ours {
            true => golden::ours,
            false => qemu_img as fn() -> Command,
        };
        Side {
            is_ours,
            twin: Twin { directory, program },
            names,
        }
    }

    /// Runs a line, while a process holds a file if it says so. What came of it is in the files.
    fn run(&self, case: &Case) -> Output {
        let directory = &self.twin.directory;
        self.names.settle();
        let _held = case.held.map(|file| Holder::new(directory, file));
        let socket = directory.join("export");
        let server = || Server::of_qemu(&directory.join(SERVED), &socket, &["--discard=unmap"]);
        let server = case.is_served().then(server);
        let by_our_name = case.is_ours_alone || (case.by_our_name && self.is_ours);
        let output = match by_our_name {
            true => outcome(cowslip().current_dir(directory).args(&case.words)),
            false => self.twin.run(&case.words),
        };
        if server.is_some() {
            drop(server);
            std::fs::remove_file(socket).unwrap();
        }
        self.names.settle();
        output
    }

    /// The bytes of all files.
    fn contents(&self) -> BTreeMap<&'static str, Vec<u8>> {
        let files = FILES.iter().map(|(name, _)| *name).chain(["data.bin"]);
        let bytes = |name| std::fs::read(self.twin.directory.join(name)).ok();
        files
            .filter_map(|name| Some((name, bytes(name)?)))
            .collect()
    }
}

/// XFS for every other number, if that can be mounted.
fn place(number: u64) -> Place {
    let is_root = rustix::process::geteuid().is_root();
    let mounted = match is_root && number % 2 == 1 {
        true => Mounted::new(&["mkfs.xfs", "-q"]),
        false => None,
    };
    mounted.map_or_else(|| Place::scratch(number), Place::Mounted)
}

/// Runs a line on both sides, and says whether another may follow.
fn check_line(
    case: &Case,
    theirs: &Side,
    ours: &Side,
    layout: &mut Layout,
) -> Result<bool, String> {
    let before = ours.contents();
    let got = ours.run(case);
    let printed = comparable(&got, *layout);
    let (after, may_change) = (ours.contents(), case.may_change());
    for (name, bytes) in &before {
        if !may_change.contains(name) && after.get(name) != Some(bytes) {
            return Err(format!(
                "{name} has other bytes than before; ours:\n{printed}\n"
            ));
        }
    }
    if case.contradicts_itself() {
        // qemu-img does not see that a device is a file's; what it would do then is its own affair.
        return match got.status.success() {
            true => Err("it writes what it reads, and is not refused\n".to_string()),
            false => Ok(false),
        };
    }
    if case.is_ours_alone {
        return Ok(false);
    }
    let expected = theirs.run(case);
    let line = Line {
        words: &case.words,
        theirs: &comparable(&expected, *layout),
        ours: &printed,
        layout: *layout,
    };
    let is_known = line.may_differ().is_some();
    if line.both_fail() || (line.theirs != line.ours && is_known) {
        return Ok(false);
    }
    if line.theirs != line.ours {
        let Line { theirs, ours, .. } = line;
        return Err(format!("qemu-img says:\n{theirs}\nours:\n{ours}\n"));
    }
    // The content of the target comes first: for a file that becomes a data file nothing else is
    // promised.
    if let Some((target, format)) = &case.target {
        let file = if target == EXPORT { SERVED } else { target };
        compare_disks(&theirs.twin, &ours.twin, file, format)
            .map_err(|why| format!("{target}: {why}"))?;
    }
    let is_data_file = case.words.iter().any(|word| word.starts_with("data_file="));
    if let Err(why) = compare_files(&theirs.twin, &ours.twin, layout) {
        // Ours ends with the disk.
        let is_its = case.writes.iter().any(|name| why.starts_with(name));
        return match is_data_file && is_its {
            true => Ok(false),
            false => Err(why),
        };
    }
    // The chains consist of the same files as in the beginning.
    Ok(case.in_place || case.writes.is_empty())
}

fn check_case(seed: u64, cast: &Cast, directory: &Path) -> Verdict {
    check_lines((seed, None), cast, directory)
}

fn check_focused(seed: u64, cast: &Cast, directory: &Path) -> Verdict {
    check_lines((seed, Some(Focus::of(seed))), cast, directory)
}

fn check_lines((seed, focus): (u64, Option<Focus>), cast: &Cast, directory: &Path) -> Verdict {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("SKIPPED: bind mounts and loop devices need root");
    }
    let theirs = Side::new(cast, directory.join("theirs"), false);
    let ours = Side::new(cast, directory.join("ours"), true);
    let mut generator = Aliases::new(seed, focus, is_root);
    let mut layout = Layout::Free;
    let mut log = String::new();
    for _ in 0..LINES {
        let case = generator.line();
        let held = case
            .held
            .map(|file| format!("  # a process writes to {file}"));
        log += &format!("  {}{}\n", quoted(&case.words), held.unwrap_or_default());
        let goes_on = check_line(&case, &theirs, &ours, &mut layout)
            .map_err(|why| format!("seed {seed}:\n{}{log}{why}", cast.log))?;
        if !goes_on {
            return Ok(());
        }
    }
    Ok(())
}

#[test]
fn files_in_use_are_left_alone() {
    if peers_are_installed(&["qemu-img", "qemu-io"]) {
        run_some_in(place, check_case, CASES);
    }
}

/// One thing at a time: files below, parts like the whole, files that are held, parts of one file.
#[test]
fn one_kind_of_line_after_another_leaves_files_alone() {
    if peers_are_installed(&["qemu-img", "qemu-io"]) {
        run_some_in(place, check_focused, FOCUSED_CASES);
    }
}

/// Differences beyond the seeds of an ordinary run: `cargo test --test command cli_differential --
/// --ignored`.
#[test]
#[ignore = "takes minutes"]
fn many_files_in_use_are_left_alone() {
    if peers_are_installed(&["qemu-img", "qemu-io"]) {
        run_many_in(place, check_case, 4000);
    }
}
