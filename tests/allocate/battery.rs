//! The tests that run on every file system.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use cowslip_queue::space::{FillMethod, give};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::layout::{self, State};
use super::library;
use crate::support::rng::Rng;
use crate::support::{cowslip, number_from_environment, run};

/// The size to which random files are allocated, in bytes.
const SIZE: u64 = 18 << 20;
/// The time within which everything here gets somewhere.
const LONG: Duration = Duration::from_secs(30);

/// A directory of a file system of some kind.
pub struct Battery<'a> {
    dir: &'a Path,
    /// The method that `auto` chooses.
    chosen: &'static str,
    /// All that work.
    methods: &'static [&'static str],
    /// Space that was never written is distinguished from holes.
    unwritten: bool,
    seed: u64,
}

/// The one line of a failure.
pub fn complaint(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let lines = text.lines().filter(|line| !line.starts_with("Try '"));
    assert_eq!(lines.count(), 1, "one line: {text}");
    text
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("{value} is no number"))
}

impl<'a> Battery<'a> {
    pub fn new(dir: &'a Path, chosen: &'static str, methods: &'static [&'static str]) -> Self {
        let seed = number_from_environment("COWSLIP_SEED").unwrap_or(0x5eed_a110);
        eprintln!("COWSLIP_SEED={seed:#x}");
        Battery {
            dir,
            chosen,
            methods,
            unwritten: true,
            seed,
        }
    }

    pub fn without_unwritten(mut self) -> Self {
        self.unwritten = false;
        self
    }

    pub fn run_all(&self) {
        self.run_on_new_files();
        self.an_interrupted_one_leaves_no_file();
        self.holes_get_space_and_data_stays();
        self.a_signal_at_any_moment_leaves_what_was();
        library::each_piece_can_be_the_last(self.dir, self.methods, self.unwritten);
        self.a_disk_that_fills_up_meanwhile_leaves_what_was();
        self.a_full_disk_is_an_error_of_a_mapping();
    }

    /// Enough where the same code of the kernel has passed all of it elsewhere.
    pub fn run_some(&self) {
        self.the_right_method_is_chosen();
        self.each_method_makes_a_file();
        self.a_signal_at_any_moment_leaves_what_was();
    }

    /// All that needs to know nothing about holes.
    pub fn run_on_new_files(&self) {
        self.the_right_method_is_chosen();
        self.each_method_makes_a_file();
        self.a_full_disk_is_predicted();
        self.a_killed_one_is_resumed();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn rng(&self, name: &str) -> Rng {
        Rng::named(self.seed, &format!("{name} {}", self.chosen))
    }

    fn report(&self, line: &str) -> Value {
        let words = line.split_whitespace();
        let mut command = cowslip();
        command.current_dir(self.dir).args(["allocate", "--json"]);
        serde_json::from_str(&run(command.args(words))).unwrap()
    }

    fn start(&self, line: &str) -> Child {
        let mut command = cowslip();
        command.current_dir(self.dir).arg("allocate");
        command.args(line.split_whitespace());
        let streams = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        streams.spawn().unwrap()
    }

    fn remove(&self, name: &str) {
        std::fs::remove_file(self.path(name)).unwrap();
    }

    fn the_right_method_is_chosen(&self) {
        let report = self.report("--size 24M new");
        assert_eq!(report["method"], self.chosen, "{report}");
        self.is_whole("new", 24 << 20, &report);
        let again = self.report("--size 24M new");
        assert_eq!(number(&again["allocated"]), 0, "{again}");
        assert!(number(&again["allocated-before"]) >= 24 << 20, "{again}");
        self.remove("new");
    }

    /// The space is there, by every account.
    fn is_whole(&self, name: &str, size: u64, report: &Value) {
        let found = self.path(name).metadata().unwrap();
        assert_eq!(found.len(), size, "{report}");
        assert!(found.blocks() * 512 >= size, "{} {report}", found.blocks());
        assert_eq!(number(&report["missing"]), 0, "{report}");
        if let Some(extents) = report["extents"].as_u64() {
            assert!(extents >= number(&report["perfect"]), "{report}");
        }
    }

    fn each_method_makes_a_file(&self) {
        for method in self.methods {
            let report = self.report(&format!("--size 9000001 --method {method} new"));
            assert_eq!(report["method"], *method);
            self.is_whole("new", 9_000_001, &report);
            let bytes = std::fs::read(self.path("new")).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0), "{method}");
            self.remove("new");
        }
    }

    /// libc's call is not the kernel's here, and it is said beforehand.
    pub fn the_library_writes(&self) {
        let mut command = cowslip();
        command.current_dir(self.dir);
        let said =
            run(command.args("allocate --size 1M --method posix_fallocate new".split_whitespace()));
        assert!(said.contains("writes one byte per block"), "{said}");
        self.remove("new");
        let file = File::create(self.path("new")).unwrap();
        let calls = give(&file, 0..1 << 20, FillMethod::Library).unwrap();
        let block = rustix::fs::statvfs(self.dir).unwrap().f_bsize;
        assert_eq!(calls.writes, Some((1 << 20) / block), "blocks of {block}");
        assert_eq!(calls.fallocate, 1);
        self.remove("new");
        let refused = self.start("--size 1M --method fallocate new");
        let text = complaint(&refused.wait_with_output().unwrap());
        assert!(
            text.contains("fallocate on this file system is not supported"),
            "{text}"
        );
        assert!(!self.path("new").exists());
    }

    /// Where the file system reports no holes, calls that find holes themselves fill them, and
    /// others are refused.
    pub fn hidden_holes_get_space(&self) {
        let mut rng = self.rng("hidden");
        layout::make(&self.path("file"), &mut rng, false);
        let bytes = std::fs::read(self.path("file")).unwrap();
        let child = self.start(&format!("--size {SIZE} --method write file"));
        let text = complaint(&child.wait_with_output().unwrap());
        assert!(text.contains("telling holes from data"), "{text}");
        assert_eq!(std::fs::read(self.path("file")).unwrap(), bytes);
        let report = self.report(&format!("--size {SIZE} file"));
        self.is_whole("file", SIZE, &report);
        let after = std::fs::read(self.path("file")).unwrap();
        assert_eq!(after[..bytes.len()], bytes);
        assert!(after[bytes.len()..].iter().all(|byte| *byte == 0));
        self.remove("file");
    }

    fn free_bytes(&self) -> u64 {
        let system = rustix::fs::statvfs(self.dir).unwrap();
        system.f_bfree * system.f_frsize
    }

    fn a_full_disk_is_predicted(&self) {
        let wanted = self.free_bytes() * 2;
        for method in self.methods {
            let child = self.start(&format!("--size {wanted} --method {method} new"));
            let text = complaint(&child.wait_with_output().unwrap());
            assert!(
                text.contains(&format!("{wanted} bytes are needed")),
                "{text}"
            );
            assert!(text.contains("No space left on device"), "{text}");
            assert!(!self.path("new").exists());
        }
    }

    /// Waits until the file has `bytes` of space, or its process has ended.
    fn wait_for_space(&self, child: &mut Child, name: &str, bytes: u64) {
        let begun = Instant::now();
        let space = || {
            let found = self.path(name).metadata();
            found.map_or(0, |found| found.blocks() * 512)
        };
        while space() < bytes && child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < LONG, "it does not get far");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn a_killed_one_is_resumed(&self) {
        let line = "--size 12M --method write new";
        let mut child = self.start(&format!("{line} --rate-limit 20M"));
        self.wait_for_space(&mut child, "new", 3 << 20);
        child.kill().unwrap();
        child.wait().unwrap();
        let report = self.report(line);
        assert!(number(&report["allocated-before"]) >= 2 << 20, "{report}");
        assert!(number(&report["allocated"]) > 0, "{report}");
        self.is_whole("new", 12 << 20, &report);
        self.remove("new");
    }

    /// Others than this kernel may have the file open, and have written to its end.
    pub fn an_interrupted_one_is_not_cut(&self) {
        std::fs::write(self.path("file"), [1; 4096]).unwrap();
        let mut child = self.start("--size 12M --method write --rate-limit 20M file");
        self.wait_for_space(&mut child, "file", 3 << 20);
        let output = interrupted(child, Signal::TERM);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains("the system grants no lease on it"), "{text}");
        assert!(self.path("file").metadata().unwrap().len() >= 3 << 20);
        self.remove("file");
    }

    pub fn an_interrupted_one_leaves_no_file(&self) {
        let mut child = self.start("--size 12M --method write --rate-limit 20M new");
        self.wait_for_space(&mut child, "new", 3 << 20);
        let output = interrupted(child, Signal::TERM);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains("was freed again"), "{text}");
        assert!(!self.path("new").exists());
    }

    fn holes_get_space_and_data_stays(&self) {
        let mut rng = self.rng("holes");
        for method in self.methods {
            layout::make(&self.path("file"), &mut rng, self.unwritten);
            let before = State::of(&self.path("file"), SIZE);
            let report = self.report(&format!("--size {SIZE} --method {method} file"));
            self.is_whole("file", SIZE, &report);
            let holes: u64 = before.holes.iter().map(|hole| hole.end - hole.start).sum();
            // Where places are not reported, a block that the file ends in counts as a hole and as
            // space.
            let off = number(&report["allocated"]).abs_diff(holes);
            let is_exact = report["verified-by"] == "extents";
            assert!(off == 0 || (!is_exact && off < 8192), "{holes} {report}");
            assert_eq!(
                number(&report["holes"]),
                before.holes.len() as u64,
                "{report}"
            );
            let after = State::of(&self.path("file"), SIZE);
            assert!(after.extends(&before), "{method}: the bytes are others");
            self.remove("file");
        }
    }

    fn a_signal_at_any_moment_leaves_what_was(&self) {
        let mut rng = self.rng("signal");
        for method in self.methods {
            layout::make(&self.path("file"), &mut rng, self.unwritten);
            let before = State::of(&self.path("file"), SIZE);
            let child = self.start(&format!(
                "--size {SIZE} --method {method} --rate-limit 40M file"
            ));
            let moment = Duration::from_millis(rng.below(200));
            std::thread::sleep(moment);
            let signal = *rng.pick(&[Signal::INT, Signal::TERM, Signal::HUP]);
            interrupted(child, signal);
            let after = State::of(&self.path("file"), SIZE);
            assert_eq!(after, before, "{method}, {signal:?} after {moment:?}");
            self.remove("file");
        }
    }

    /// There is room when it begins, but another program takes it first.
    fn a_disk_that_fills_up_meanwhile_leaves_what_was(&self) {
        let mut rng = self.rng("full");
        for method in self.methods {
            layout::make(&self.path("file"), &mut rng, self.unwritten);
            let before = State::of(&self.path("file"), SIZE);
            self.leave("filler", 32 << 20);
            let mut child = self.start(&format!(
                "--size {SIZE} --method {method} --rate-limit 16M file"
            ));
            let some = before.blocks * 512 + (1 << 20);
            self.wait_for_space(&mut child, "file", some);
            self.leave("rest", 0);
            let text = complaint(&child.wait_with_output().unwrap());
            assert!(text.contains("No space left on device"), "{method}: {text}");
            let after = State::of(&self.path("file"), SIZE);
            assert_eq!(after, before, "{method}");
            for name in ["file", "filler", "rest"] {
                self.remove(name);
            }
        }
    }

    /// Fills the file system with a file of this name until so much is left.
    fn leave(&self, name: &str, free: u64) {
        let mut file = File::create(self.path(name)).unwrap();
        let zeroes = vec![0; 1 << 20];
        while free == 0 || self.free_bytes() > free {
            if let Err(error) = file.write_all(&zeroes) {
                assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{error}");
                break;
            }
        }
        if free > 0 {
            file.sync_all().unwrap();
        }
    }

    /// A store into such a mapping would be answered by SIGBUS.
    fn a_full_disk_is_an_error_of_a_mapping(&self) {
        let sparse = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(self.path("sparse"))
            .unwrap();
        sparse.set_len(16 << 20).unwrap();
        self.leave("filler", 1 << 20);
        self.leave("rest", 0);
        let refused = give(&sparse, 0..16 << 20, FillMethod::Mapping).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::StorageFull, "{refused}");
        let child = self.start("--size 16M --method mmap sparse");
        let text = complaint(&child.wait_with_output().unwrap());
        assert!(text.contains("No space left on device"), "{text}");
        for name in ["sparse", "filler", "rest"] {
            self.remove(name);
        }
    }
}

/// Sends a signal, by which the process must have ended.
pub fn interrupted(child: Child, signal: Signal) -> Output {
    let id = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
    kill_process(id, signal).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(signal.as_raw()), "{output:?}");
    output
}
