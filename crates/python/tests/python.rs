//! The package as people have it, from the module that was built with these tests: `py/` in a
//! Python without any other package, the examples, and the manual's chapter.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest Python that has what the module needs.
const OLDEST: &str = "import sys; sys.exit(sys.version_info < (3, 11))";

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The Python to test with, `COWSLIP_PYTHON` or the first of the path; `None`, with a word about
/// it, if there is none that is new enough.
fn python() -> Option<String> {
    let program = std::env::var("COWSLIP_PYTHON").unwrap_or_else(|_| "python3".to_string());
    let is_new = Command::new(&program).args(["-c", OLDEST]).status();
    if is_new.is_ok_and(|status| status.success()) {
        return Some(program);
    }
    eprintln!("SKIPPED: not installed: {program} of 3.11 or newer");
    None
}

/// The module, built beside these tests.
fn module() -> PathBuf {
    let deps = std::env::current_exe().unwrap();
    let module = deps.with_file_name("lib_cowslip.so");
    assert!(module.is_file(), "{} is not built", module.display());
    module
}

/// A directory with the package: its own files, and the module.
fn package(directory: &Path) {
    let package = directory.join("cowslip");
    std::fs::create_dir(&package).unwrap();
    for entry in std::fs::read_dir(here().join("cowslip")).unwrap() {
        let entry = entry.unwrap();
        // Compiled files, of another Python perhaps, are none of the package's.
        if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), package.join(entry.file_name())).unwrap();
        }
    }
    symlink(module(), package.join("_cowslip.abi3.so")).unwrap();
}

/// Runs the tests of a file, with all that Python checks in development.
fn run(file: &str) {
    let Some(python) = python() else { return };
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    package(scratch.path());
    let tests = here().join("tests/py");
    let paths = std::env::join_paths([scratch.path(), &tests]).unwrap();
    let output = Command::new(python)
        .args(["-X", "dev", "-W", "error::ResourceWarning"])
        .args(["-m", "unittest", "--verbose", file])
        .env("PYTHONPATH", paths)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("SCRATCH", scratch.path())
        .env("COWSLIP_REPOSITORY", here().join("../.."))
        .current_dir(scratch.path())
        .output()
        .unwrap();
    let report = String::from_utf8_lossy(&output.stderr);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}{report}");
    assert!(!report.contains("Exception ignored"), "{report}");
    assert!(
        report.contains("\nOK") && !report.contains("Ran 0"),
        "{report}"
    );
}

#[test]
fn images_work_as_objects() {
    run("test_images");
}

#[test]
fn types_are_as_declared() {
    run("test_types");
}

#[test]
fn jobs_show_progress_and_are_cancelled() {
    run("test_jobs");
}

#[test]
fn asyncio_has_images_too() {
    run("test_aio");
}

#[test]
fn examples_and_the_chapter_of_the_manual_work() {
    run("test_examples");
}
