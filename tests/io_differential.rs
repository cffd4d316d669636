//! The shell of `cowslip io` against qemu-io: the same command lines on twin images give the same
//! text, the same exit status, the same disk, and images that both checkers accept.
//!
//! `COWSLIP_IO_SEED` replays one case, or with `COWSLIP_IO_CASES` that number of cases from there
//! on. A failure prints the seed, the image's shape and the lines.
//!
//! Left out, because the programs differ on purpose: preallocation when resizing (`truncate -m`),
//! breakpoints. And where the format leaves a choice:
//! - after zeroes, discards and new sizes the programs may have allocated different clusters, so
//!   `map` and `alloc` are compared on images without that history only, and compressed writes,
//!   which QEMU refuses on stored clusters, happen there only;
//! - QEMU discards whole clusters only, so ranges discarded in an image with subclusters are then
//!   written;
//! - QEMU packs compressed clusters even where a refcount has one bit, and fails;
//! - QEMU cannot grow a version 2 image on a longer backing file;
//! - data that is discarded in a raw data file may stay;
//! - a backing file shows in QEMU's VM state (`-b`), and a VM state in QEMU's disk when that grows.
#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

mod vm_state;

use crate::support::golden::{our_io, timeless};
use crate::support::model::first_difference;
use crate::support::rng::Rng;
use crate::support::shape::{Entries, Files, Shape, Version};
use crate::support::{
    cowslip, number_from_environment, outcome, peers_are_installed, run, scratch,
};

/// Cases of an ordinary test run: some seconds.
const CASES: u64 = 24;

/// Times a script is run on one image.
const SCRIPTS: u64 = 3;

/// A qcow2 image in a directory, and the program that works on it.
struct Twin {
    files: Files,
    program: fn() -> Command,
}

fn qemu_io() -> Command {
    Command::new("qemu-io")
}

impl Twin {
    fn make(directory: PathBuf, program: fn() -> Command, case: &Case) -> Twin {
        std::fs::create_dir(&directory).unwrap();
        let files = Files::new(&directory);
        let mut rng = case.rng.clone();
        let below = files.make_below(&case.shape, case.disk_bytes, &mut rng);
        files.create_with_qemu(&case.shape, "", &below, case.disk_bytes);
        Twin { files, program }
    }

    /// Runs a script: its lines as `-c` options, or through standard input.
    fn run(&self, lines: &[String], way: Way) -> Output {
        let mut command = (self.program)();
        command.current_dir(&self.files.directory);
        command.args(["-f", "qcow2"]);
        match way {
            Way::Options => {
                for line in lines {
                    command.args(["-c", line]);
                }
                outcome(command.arg("image.qcow2").stdin(Stdio::null()))
            }
            Way::Input => {
                let mut child = command
                    .arg("image.qcow2")
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap();
                let mut input = child.stdin.take().unwrap();
                // A shell that quits early does not read the rest.
                drop(input.write_all((lines.join("\n") + "\n").as_bytes()));
                drop(input);
                child.wait_with_output().unwrap()
            }
        }
    }

    /// All that a run said, without the time and the directory.
    fn comparable(&self, output: &Output) -> String {
        let said = format!(
            "{}--- errors\n{}--- {:?}",
            timeless(&output.stdout),
            timeless(&output.stderr),
            output.status.code()
        );
        said.replace(&self.files.directory.display().to_string(), "DIR")
    }

    /// The disk as QEMU reads it.
    fn disk(&self) -> Vec<u8> {
        std::fs::read(self.files.read_with_qemu(&["-f", "qcow2"])).unwrap()
    }

    /// Returns the complaint of a checker, if it has one.
    fn complaint_of(&self, checker: &mut Command) -> Option<String> {
        let output = outcome(
            checker
                .args(["check", "-q", "-f", "qcow2"])
                .arg(&self.files.image),
        );
        (!output.status.success()).then(|| text(&output.stdout) + &text(&output.stderr))
    }
}

/// How commands are given.
#[derive(Clone, Copy, Debug)]
enum Way {
    Options,
    Input,
}

/// One image and what is done to it, all from a seed.
struct Case {
    seed: u64,
    shape: Shape,
    disk_bytes: u64,
    rng: Rng,
    allocation: Allocation,
    vm_state: VmState,
}

/// The operations on the VM state that a case may contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum VmState {
    Untouched,
    /// It is used: the disk keeps its size.
    Used,
    /// The disk has another size.
    Moved,
}

/// Whether both images have the same clusters allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Allocation {
    Equal,
    Free,
}

impl Case {
    fn new(seed: u64) -> Case {
        let mut rng = Rng::new(seed);
        let cluster_bytes = *rng.pick(&[512, 4096, 65536, 131_072, 2 << 20]);
        let shape = *rng.pick(&Shape::all(cluster_bytes));
        // Small disks, so that a comparison of all their bytes is cheap.
        let clusters = 1 + rng.below(24);
        let disk_bytes = clusters * cluster_bytes + rng.below(cluster_bytes / 512) * 512;
        Case {
            seed,
            shape,
            disk_bytes: disk_bytes.max(64 << 10),
            rng,
            allocation: Allocation::Equal,
            vm_state: VmState::Untouched,
        }
    }

    fn offset(&mut self) -> u64 {
        let size = self.disk_bytes;
        let unit = match self.rng.below(4) {
            0 => self.shape.cluster_bytes,
            1 => self.shape.subcluster_bytes(),
            2 => 512,
            _ => 1,
        };
        match self.rng.below(24) {
            0 => size,
            1 => size.saturating_sub(self.rng.below(2 * unit)),
            2 => size + self.rng.below(unit + 1),
            _ => self.rng.below(size) / unit * unit,
        }
    }

    fn length(&mut self) -> u64 {
        let unit = match self.rng.below(5) {
            0 | 1 => self.shape.cluster_bytes,
            2 => self.shape.subcluster_bytes(),
            3 => 512,
            _ => 1,
        };
        match self.rng.below(16) {
            0 => 0,
            1 => self.rng.below(unit),
            2 => self.disk_bytes,
            _ => unit * (1 + self.rng.below(3)),
        }
    }

    /// A number in one of the ways to write it.
    fn written(&mut self, number: u64) -> String {
        match self.rng.below(6) {
            0 => format!("{number:#x}"),
            1 if number.is_multiple_of(1024) => format!("{}k", number / 1024),
            2 if number.is_multiple_of(1 << 20) => format!("{}M", number >> 20),
            3 if number.is_multiple_of(512) && !number.is_multiple_of(1024) => {
                format!("{}.5k", number / 1024)
            }
            _ => number.to_string(),
        }
    }

    fn range(&mut self) -> String {
        let (offset, length) = (self.offset(), self.length());
        format!("{} {}", self.written(offset), self.written(length))
    }

    /// Some of these options.
    fn some_of(&mut self, options: &[&str]) -> String {
        let mut chosen = String::new();
        for option in options {
            if self.rng.once_in(3) {
                chosen.push_str(option);
                chosen.push(' ');
            }
        }
        chosen
    }

    /// Returns a range of up to `count` whole clusters.
    fn clusters(&mut self, count: u64) -> String {
        let cluster = self.shape.cluster_bytes;
        let first = self.rng.below(self.disk_bytes.div_ceil(cluster));
        let length = (cluster * count).min(self.disk_bytes - first * cluster);
        let offset = first * cluster;
        format!("{} {}", self.written(offset), self.written(length))
    }

    fn pattern(&mut self) -> String {
        match self.rng.below(40) {
            0 => "-P 256 ".to_string(),
            1..20 => String::new(),
            _ => format!("-P {} ", self.rng.below(4)),
        }
    }

    fn line(&mut self) -> String {
        match self.rng.below(40) {
            0..8 => {
                let (options, pattern) = (self.some_of(&["-f", "-q", "-p"]), self.pattern());
                format!("write {options}{pattern}{}", self.range())
            }
            8..12 => {
                let options = self.some_of(&["-u", "-f", "-q", "-C"]);
                format!("write -z {options}{}", self.range())
            }
            12 | 13 => format!("write -c {}{}", self.pattern(), self.clusters(1)),
            14 | 15 => {
                let (pattern, range) = (self.pattern(), self.range());
                let more = self.length();
                format!("writev {pattern}{range} {more}")
            }
            16 => format!("aio_write -q {}{}", self.pattern(), self.range()),
            17 => format!("aio_write -q -z -u {}", self.range()),
            18..24 => {
                let (options, pattern) = (self.some_of(&["-q", "-C"]), self.pattern());
                format!("read {options}{pattern}{}", self.range())
            }
            24 => format!("read -v {} 48", self.offset()),
            25 => format!("readv {}{} 512", self.pattern(), self.range()),
            26 => {
                let (pattern, range) = (self.pattern(), self.range());
                let part = format!("-s {} -l {}", self.rng.below(600), self.rng.below(600));
                format!("read {pattern}{part} {range}")
            }
            27..30 => {
                let options = self.some_of(&["-q", "-C"]);
                format!("discard {options}{}", self.range())
            }
            30 => format!("discard {}", self.clusters(2)),
            31 => "aio_flush".to_string(),
            32 => (*self.rng.pick(&["flush", "length", "info", "map"])).to_string(),
            33 => "map".to_string(),
            34 => format!("alloc {}", self.range()),
            35 => format!("alloc {}", self.offset()),
            36 => self.truncate(),
            37 => self.misshapen(),
            38 => self.in_vm_state(),
            _ => self.nonsense(),
        }
    }

    /// Writes what a line discards, where programs may discard different parts of it.
    fn rewritten(&mut self, line: &str) -> Option<String> {
        let words = line.strip_prefix("discard ")?.split(' ');
        let range: Vec<&str> = words.filter(|word| !word.starts_with('-')).collect();
        let may_differ = self.shape.entries == Entries::Extended;
        may_differ.then(|| format!("write -q -P {} {}", self.rng.below(4), range.join(" ")))
    }

    fn in_vm_state(&mut self) -> String {
        let verb = *self.rng.pick(&["write", "write", "read"]);
        let (options, pattern) = (self.some_of(&["-q", "-C"]), self.pattern());
        let offset = match self.rng.below(16) {
            0 => 1 << 30,
            1 => self.rng.below(1000),
            2 => 4 * self.shape.cluster_bytes * self.shape.cluster_bytes / 8,
            _ => self.rng.below(200) * 512,
        };
        let (offset, length) = (self.written(offset), self.length() / 512 * 512);
        format!("{verb} -b {options}{pattern}{offset} {length}")
    }

    fn truncate(&mut self) -> String {
        let size = match self.rng.below(4) {
            0 => self.disk_bytes / 2,
            1 => self.disk_bytes + 1 + self.rng.below(3 * self.shape.cluster_bytes),
            _ => self.disk_bytes + self.rng.below(3 * self.shape.cluster_bytes),
        };
        format!("truncate {}", size / 512 * 512)
    }

    /// A valid command with a word too many, too few or changed.
    fn misshapen(&mut self) -> String {
        let line = loop {
            let line = self.line();
            if !line.contains("truncate") {
                break line;
            }
        };
        let mut words: Vec<&str> = line.split(' ').collect();
        let at = self.rng.below(words.len() as u64) as usize;
        match self.rng.below(3) {
            0 => drop(words.remove(at)),
            1 => words.insert(
                at,
                *self.rng.pick(&["-q", "1", "-x", "-P", "--", "x", "-z"]),
            ),
            _ => {
                words[at] = *self
                    .rng
                    .pick(&["1.5", "0x", "-1", "9E", "3G", "1kk", "-C", "7"])
            }
        }
        words.join(" ")
    }

    fn nonsense(&mut self) -> String {
        let lines = [
            "",
            "foo",
            "write",
            "read 0",
            "close 1",
            "help discard",
            "help foo",
            "open image.qcow2",
            "sleep 0",
            "sleep x",
            "write -z -c 0 64k",
            "write -u 0 512",
            "write -b -z 0 512",
            "write -s nosuch 0 512",
            "aio_write -z 0 1 1",
            "aio_read -i 0 1",
            "read -s 1 0 512",
            "truncate 7",
            "truncate x",
            "zone_report 0 1",
            "break a b",
            "resume a",
        ];
        (*self.rng.pick(&lines)).to_string()
    }

    /// A script without what only qemu-io does.
    fn script(&mut self) -> Vec<String> {
        let count = 1 + self.rng.below(8);
        let mut lines = Vec::new();
        while (lines.len() as u64) < count {
            let line = self.line();
            if !self.is_comparable(&line) {
                continue;
            }
            let has = |sought: &str| line.split(' ').any(|word| word == sought);
            if has("-b") && !has("-z") {
                self.vm_state = VmState::Used;
            }
            if has("truncate") {
                self.vm_state = VmState::Moved;
            }
            if has("-z") || has("-c") || ["discard", "truncate"].iter().any(|verb| has(verb)) {
                self.allocation = Allocation::Free;
            }
            // Of two requests in flight either may end first.
            let started = line.starts_with("aio_");
            let rewritten = self.rewritten(&line);
            lines.push(line);
            lines.extend(rewritten);
            if started {
                lines.push("aio_flush".to_string());
            }
        }
        lines
    }

    /// Whether both programs are bound to do the same.
    fn is_comparable(&self, line: &str) -> bool {
        let words: Vec<&str> = line.split(' ').collect();
        let has = |word: &str| words.contains(&word);
        if has("-m") {
            return false;
        }
        match words[0] {
            "write" | "read" if has("-b") => {
                self.vm_state != VmState::Moved && !self.shape.has_backing()
            }
            "truncate" if self.vm_state == VmState::Used => false,
            "truncate" => !(self.shape.has_backing() && self.shape.version == Version::V2),
            "write" if has("-c") && !has("-z") => {
                self.allocation == Allocation::Equal && self.shape.refcount_bits > 1
            }
            _ => true,
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Text without what `map` and `alloc` said. A prompt before it stays.
fn without_allocation(text: &str) -> String {
    let mut kept = String::new();
    for line in text.split_inclusive('\n') {
        let said = line.rsplit("qemu-io> ").next().unwrap_or(line);
        let about_allocation = said.contains("allocated at offset");
        let prompts = &line[..line.len() - said.len()];
        kept.push_str(prompts);
        if !about_allocation {
            kept.push_str(said);
        }
    }
    kept
}

fn check_case(seed: u64, directory: &Path) {
    let mut case = Case::new(seed);
    let theirs = Twin::make(directory.join("theirs"), qemu_io, &case);
    let ours = Twin::make(directory.join("ours"), our_io, &case);
    for _ in 0..SCRIPTS {
        let lines = case.script();
        let way = *case.rng.pick(&[Way::Options, Way::Input]);
        let context = format!(
            "seed {seed}: {} of {} bytes, by {way:?}:\n  {}\n",
            case.shape,
            case.disk_bytes,
            lines.join("\n  ")
        );
        let (expected, got) = (theirs.run(&lines, way), ours.run(&lines, way));
        let (expected, got) = (theirs.comparable(&expected), ours.comparable(&got));
        let (expected, got) = match case.allocation {
            Allocation::Equal => (expected, got),
            Allocation::Free => (without_allocation(&expected), without_allocation(&got)),
        };
        assert!(
            expected == got,
            "{context}qemu-io:\n{expected}\nours:\n{got}"
        );
        let complaint = ours.complaint_of(&mut Command::new("qemu-img"));
        assert_eq!(complaint, None, "{context}qemu-img check");
        let complaint = ours.complaint_of(&mut cowslip());
        assert_eq!(complaint, None, "{context}cowslip check");
        let (expected, got) = (theirs.disk(), ours.disk());
        let different = first_difference(&expected, &got);
        assert_eq!(different, None, "{context}first byte that differs");
        assert_eq!(expected.len(), got.len(), "{context}size");
        let length = run(our_io()
            .args(["-f", "qcow2", "-c", "length"])
            .arg(&ours.files.image));
        assert!(!length.is_empty());
    }
}

#[test]
fn the_shell_does_what_qemu_io_does() {
    if !peers_are_installed(&["qemu-io", "qemu-img"]) {
        return;
    }
    let seed = number_from_environment("COWSLIP_IO_SEED");
    let cases = number_from_environment("COWSLIP_IO_CASES");
    let first = seed.unwrap_or(0);
    let count = cases.unwrap_or(if seed.is_some() { 1 } else { CASES });
    let seeds = first..first + count;
    let mut failures = Vec::new();
    for seed in seeds {
        let directory = scratch();
        let path = directory.path().to_path_buf();
        let checked = std::panic::catch_unwind(|| check_case(seed, &path));
        if let Err(panic) = checked {
            failures.push((seed, panic));
        }
    }
    let seeds: Vec<u64> = failures.iter().map(|(seed, _)| *seed).collect();
    assert!(seeds.is_empty(), "failing seeds: {seeds:?}");
}

#[test]
fn cases_cover_extended_entries_and_every_neighbourhood() {
    let shapes: Vec<Shape> = (0..200).map(|seed| Case::new(seed).shape).collect();
    assert!(
        shapes
            .iter()
            .any(|shape| shape.entries == Entries::Extended)
    );
    assert!(shapes.iter().any(Shape::has_backing));
    assert!(shapes.iter().any(Shape::has_data_file));
    assert!((0..9).all(|seed| Case::new(seed).seed == seed));
}
