//! Images made by QEMU's tools, bytes of them changed, and how to run both checkers on them.

pub mod crash;
pub mod failing;
pub mod headers;
pub mod slow;
pub mod sparse;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use cowslip::Buf;
use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, Durability};
use cowslip::qcow2::check::{CheckOptions, CheckResult, Finding, check};

/// Whether the peers are installed; says so loudly if not.
pub fn peers_are_installed() -> bool {
    let installed = ["qemu-img", "qemu-io"]
        .iter()
        .all(|program| Command::new(program).arg("--version").output().is_ok());
    if !installed {
        eprintln!("SKIPPED: qemu-img and qemu-io are not installed");
    }
    installed
}

/// Polls until it is done: files in memory never make one wait for long.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
    }
}

/// Writes a range with one byte.
pub fn write(
    image: &cowslip::Image,
    offset: u64,
    len: u64,
    byte: u8,
) -> impl Future<Output = cowslip::Result<()>> {
    let data = Buf::copy_of(&vec![byte; len as usize]);
    image.write(offset, data, Durability::Cached)
}

/// An image file in a scratch directory.
pub struct Image {
    dir: tempfile::TempDir,
    pub bytes: Vec<u8>,
}

pub const COPIED: u64 = 1 << 63;
pub const COMPRESSED: u64 = 1 << 62;
pub const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

impl Image {
    /// An image of `size` with these creation options, after these qemu-io commands.
    pub fn create(options: &str, size: &str, commands: &[&str]) -> Image {
        let mut image = Image::create_beside(options, size, |_| {});
        image.io(commands);
        image
    }

    /// An empty image, in a directory in which there are other files.
    pub fn create_beside(options: &str, size: &str, others: impl FnOnce(&Path)) -> Image {
        let dir = tempfile::tempdir().unwrap();
        others(dir.path());
        let mut image = Image {
            dir,
            bytes: Vec::new(),
        };
        let mut args = vec!["create", "-q", "-f", "qcow2"];
        if !options.is_empty() {
            args.extend(["-o", options]);
        }
        args.extend(["image.qcow2", size]);
        image.img(&args);
        image
    }

    /// The same bytes in a directory of its own, with the other files.
    pub fn copy_beside(&self) -> Image {
        let copy = self.copy();
        for entry in std::fs::read_dir(self.dir()).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, copy.dir().join(path.file_name().unwrap())).unwrap();
        }
        copy
    }

    /// The same bytes in a directory of its own.
    pub fn copy(&self) -> Image {
        Image {
            dir: tempfile::tempdir().unwrap(),
            bytes: self.bytes.clone(),
        }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("image.qcow2")
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn run(&mut self, program: &str, args: &[&str]) {
        let output = Command::new(program)
            .args(args)
            .current_dir(self.dir.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{program} {args:?}: {output:?}");
        self.bytes = std::fs::read(self.path()).unwrap();
    }

    /// Runs qemu-img in the image's directory, where the image is `image.qcow2`.
    pub fn img(&mut self, args: &[&str]) {
        self.run("qemu-img", args);
    }

    /// Runs qemu-io commands on the image.
    pub fn io(&mut self, commands: &[&str]) {
        if commands.is_empty() {
            return;
        }
        let mut args = vec!["-f", "qcow2"];
        for command in commands {
            args.extend(["-c", command]);
        }
        args.push("image.qcow2");
        self.run("qemu-io", &args);
    }

    /// A big-endian number of `len` bytes.
    pub fn get(&self, at: u64, len: usize) -> u64 {
        let bytes = &self.bytes[at as usize..at as usize + len];
        bytes
            .iter()
            .fold(0, |value, &byte| value << 8 | u64::from(byte))
    }

    pub fn word(&self, at: u64) -> u64 {
        self.get(at, 8)
    }

    /// Sets a big-endian number of `len` bytes.
    pub fn set(&mut self, at: u64, len: usize, value: u64) {
        let bytes = &value.to_be_bytes()[8 - len..];
        self.bytes[at as usize..at as usize + len].copy_from_slice(bytes);
    }

    pub fn set_word(&mut self, at: u64, value: u64) {
        self.set(at, 8, value);
    }

    /// Changes a word.
    pub fn map_word(&mut self, at: u64, f: impl FnOnce(u64) -> u64) {
        let value = f(self.word(at));
        self.set_word(at, value);
    }

    /// Offset of the active L1 table.
    pub fn l1(&self) -> u64 {
        self.word(40)
    }

    /// Offset of the first L2 table.
    pub fn l2(&self) -> u64 {
        self.word(self.l1()) & OFFSET_MASK
    }

    /// Offset of the refcount table.
    pub fn refcount_table(&self) -> u64 {
        self.word(48)
    }

    /// Offset of the first refcount block.
    pub fn refcount_block(&self) -> u64 {
        self.word(self.refcount_table())
    }

    /// Offset of the snapshot table.
    pub fn snapshots(&self) -> u64 {
        self.word(64)
    }

    /// Offset of the data of the bitmaps extension in the header.
    pub fn bitmaps_extension(&self) -> u64 {
        let mut at = self.get(100, 4);
        while self.get(at, 4) != 0x2385_2875 {
            assert_ne!(self.get(at, 4), 0, "no bitmaps extension");
            at += 8 + self.get(at + 4, 4).next_multiple_of(8);
        }
        at + 8
    }

    /// Offset of the bitmap directory.
    pub fn bitmap_directory(&self) -> u64 {
        self.word(self.bitmaps_extension() + 16)
    }

    pub fn save(&self) {
        std::fs::write(self.path(), &self.bytes).unwrap();
    }

    /// Returns the verdict of qemu-img's check on the bytes.
    pub fn qemu_check(&self) -> Verdict {
        self.save();
        let output = Command::new("qemu-img")
            .args(["check", "-f", "qcow2", "--output=json", "image.qcow2"])
            .current_dir(self.dir.path())
            .output()
            .unwrap();
        Verdict::of_qemu(&output)
    }

    /// Returns the verdict and the findings of our check on the bytes.
    pub fn our_check(&self) -> (Verdict, Vec<Finding>) {
        let mut findings = Vec::new();
        let verdict = match our_check(self.bytes.clone(), &mut findings) {
            Ok(result) => Verdict::of_ours(&result, &findings),
            Err(error) => {
                eprintln!("ours: {error}");
                Verdict::failed()
            }
        };
        (verdict, findings)
    }
}

/// Runs our check on the bytes of an image.
pub fn our_check(bytes: Vec<u8>, findings: &mut Vec<Finding>) -> cowslip::Result<CheckResult> {
    let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::new("image", bytes, 4096));
    block_on(check(&file, &CheckOptions::default(), findings))
}

/// The outcome of a check, comparable.
#[derive(Debug, PartialEq, Eq, Clone, Default)]
pub struct Verdict {
    pub exit_code: i32,
    pub numbers: std::collections::BTreeMap<String, u64>,
    /// Lines on stderr, sorted: the order in which tables are visited is not compared.
    pub lines: Vec<String>,
}

impl Verdict {
    fn failed() -> Verdict {
        Verdict {
            exit_code: 1,
            ..Verdict::default()
        }
    }

    fn of_qemu(output: &Output) -> Verdict {
        let exit_code = output.status.code().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let mut numbers = std::collections::BTreeMap::new();
        for line in text.lines().filter_map(|line| line.split_once("\": ")) {
            if let Ok(number) = line.1.trim_end_matches(',').parse() {
                let name = line.0.trim_start().trim_start_matches('"');
                numbers.insert(name.to_string(), number);
            }
        }
        if exit_code == 1 {
            return Verdict {
                exit_code,
                numbers,
                lines: Vec::new(),
            };
        }
        let mut lines: Vec<String> = String::from_utf8_lossy(&output.stderr)
            .lines()
            .map(String::from)
            .collect();
        lines.sort();
        // We report a flaw of a shared table once, QEMU once for each reference.
        lines.dedup();
        Verdict {
            exit_code,
            numbers,
            lines,
        }
    }

    fn of_ours(result: &CheckResult, findings: &[Finding]) -> Verdict {
        let exit_code = match result {
            r if r.check_errors > 0 => 1,
            r if r.corruptions > 0 => 2,
            r if r.leaks > 0 => 3,
            _ => 0,
        };
        let mut numbers = std::collections::BTreeMap::new();
        numbers.insert("check-errors".to_string(), result.check_errors);
        for (name, value) in [
            ("image-end-offset", result.image_end_offset),
            ("compressed-clusters", result.compressed_clusters),
            ("total-clusters", result.total_clusters),
            ("corruptions", result.corruptions),
            ("leaks", result.leaks),
            ("allocated-clusters", result.allocated_clusters),
            ("fragmented-clusters", result.fragmented_clusters),
        ] {
            if value != 0 {
                numbers.insert(name.to_string(), value);
            }
        }
        let mut lines: Vec<String> = findings
            .iter()
            .flat_map(|finding| {
                finding
                    .to_string()
                    .lines()
                    .map(String::from)
                    .collect::<Vec<_>>()
            })
            .collect();
        lines.sort();
        // We report a flaw of a shared table once, QEMU once for each reference.
        lines.dedup();
        if exit_code == 1 {
            lines.clear();
        }
        Verdict {
            exit_code,
            numbers,
            lines,
        }
    }
}
