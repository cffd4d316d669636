//! Shared code of the tests against peers: finding the peers, seeds, running programs.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub mod engine;
pub mod golden;
#[cfg(feature = "remote")]
pub mod golden_image;
#[path = "../../crates/engine/tests/support/headers.rs"]
pub mod headers;
pub mod judge;
pub mod loop_device;
pub mod model;
pub mod mounted;
pub mod rng;
pub mod running;
pub mod server;
pub mod shape;
pub mod twins;
pub mod whose;

/// Whether all these programs are installed. If not, the test says so and has nothing to do; with
/// `COWSLIP_REQUIRE_PEERS` set it fails instead.
pub fn peers_are_installed(programs: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let installed = |program: &&&str| {
        std::env::split_paths(&path)
            .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
            .any(|directory| directory.join(program).is_file())
    };
    let missing: Vec<_> = programs.iter().filter(|p| !installed(p)).collect();
    if missing.is_empty() {
        return true;
    }
    assert!(
        std::env::var_os("COWSLIP_REQUIRE_PEERS").is_none(),
        "not installed: {missing:?}"
    );
    eprintln!("SKIPPED: not installed: {missing:?}");
    false
}

/// The program under test: what cargo has built beside the tests, or another one, such as the
/// static program, by `COWSLIP_PROGRAM`.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let named = std::env::var_os("COWSLIP_PROGRAM");
        let named = named.unwrap_or_else(|| env!("CARGO_BIN_EXE_cowslip").into());
        let program = std::path::absolute(named).unwrap();
        assert!(program.is_file(), "no program: {}", program.display());
        program
    })
}

/// The command under test.
pub fn cowslip() -> Command {
    Command::new(program())
}

/// Runs a program, whatever its exit status.
pub fn outcome(command: &mut Command) -> Output {
    command
        .output()
        .unwrap_or_else(|e| panic!("cannot run {command:?}: {e}"))
}

/// Runs a program that must succeed and returns its standard output.
pub fn run(command: &mut Command) -> String {
    let output = outcome(command);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs the command under test with the words of a line in a directory; it must succeed. Returns
/// its standard output.
pub fn succeeds(dir: &Path, line: &str) -> String {
    run(cowslip().current_dir(dir).args(golden::words(line)))
}

/// The same of another program, whose name is the first word.
pub fn peer_succeeds(dir: &Path, line: &str) -> String {
    let words = golden::words(line);
    run(Command::new(words[0]).current_dir(dir).args(&words[1..]))
}

/// Makes a qcow2 image whose disk has this size.
pub fn create_image(path: &Path, size: &str) {
    run(cowslip()
        .args(["create", "-q", "-f", "qcow2"])
        .arg(path)
        .arg(size));
}

/// Waits until something holds.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// `qemu-img` with these words and then the paths.
pub fn qemu_img(words: &[&str], paths: &[&Path]) -> String {
    run(Command::new("qemu-img").args(words).args(paths))
}

/// A directory for a test's files, which is removed when this is dropped.
pub struct Scratch(tempfile::TempDir);

impl Scratch {
    /// Its path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Deref for Scratch {
    type Target = Path;

    fn deref(&self) -> &Path {
        self.path()
    }
}

impl<T: ?Sized> AsRef<T> for Scratch
where
    Path: AsRef<T>,
{
    fn as_ref(&self) -> &T {
        self.path().as_ref()
    }
}

/// A directory below the target directory: on a real disk, as images are.
pub fn scratch() -> Scratch {
    let dir = tempfile::Builder::new()
        .prefix("cowslip-test-")
        .tempdir_in(env!("CARGO_TARGET_TMPDIR"));
    Scratch(dir.expect("the target directory is writable"))
}

/// Such a directory in memory, where the system has a file system there.
pub fn scratch_in_memory() -> Scratch {
    tempfile::tempdir_in("/dev/shm").map_or_else(|_| scratch(), Scratch)
}

/// Such a directory, if all these programs are installed.
pub fn scratch_beside(programs: &[&str]) -> Option<Scratch> {
    peers_are_installed(programs).then(scratch)
}

/// A number from the environment.
pub fn number_from_environment(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    Some(parsed.unwrap_or_else(|e| panic!("{variable}={text}: {e}")))
}

/// Waits until the lock of an image can be had: the ring of a killed process keeps its files, and
/// their locks, until the system has ended it.
pub fn wait_for_lock(dir: &Path, image: &str) {
    for _ in 0..1000 {
        let info = outcome(cowslip().current_dir(dir).args(["info", image]));
        if !String::from_utf8_lossy(&info.stderr).contains(" lock") {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the lock of {image} is not released");
}
