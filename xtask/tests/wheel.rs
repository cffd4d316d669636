//! `cargo xtask wheel`, twice, and `pip install` of the package's directory: what people get is
//! complete, the same each time, and works in an environment without other packages.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::path::{Path, PathBuf};
use std::process::Command;

use run::run;

mod run;

/// Files of a wheel that a checker of types, an editor and a lawyer look for.
const FILES: [&str; 6] = [
    "cowslip/_cowslip.abi3.so",
    "cowslip/_cowslip.pyi",
    "cowslip/py.typed",
    "licenses/LICENSE-APACHE",
    "licenses/LICENSE-MIT",
    "licenses/THIRD-PARTY",
];

/// An environment without packages; its Python.
fn environment(at: &Path) -> PathBuf {
    run(Command::new("python3").args(["-m", "venv"]).arg(at));
    at.join("bin/python")
}

/// An environment with maturin; `None`, with a word about it, where there is none to be had.
fn maturin(scratch: &Path) -> Option<PathBuf> {
    let is_new = "import sys, venv; sys.exit(sys.version_info < (3, 11))";
    let python = Command::new("python3").args(["-c", is_new]).status();
    if !python.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: not installed: python3 of 3.11 or newer, with venv");
        return None;
    }
    let at = scratch.join("maturin");
    let mut install = Command::new(environment(&at));
    install.args(["-m", "pip", "install", "--quiet", "maturin>=1.9.4,<2"]);
    let installed = install.output().unwrap();
    if !installed.status.success() {
        let why = String::from_utf8_lossy(&installed.stderr);
        eprintln!("SKIPPED: maturin cannot be installed from PyPI: {why}");
        return None;
    }
    Some(at.join("bin/maturin"))
}

/// Makes the wheel, with or without its tests; its path.
fn wheel(maturin: &Path, out: &Path, more: &[&str]) -> PathBuf {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(["wheel", "--profile", "dev", "--maturin"]);
    command.arg(maturin).arg("--out").arg(out).args(more);
    let said = run(&mut command);
    PathBuf::from(said.lines().last().unwrap())
}

#[test]
#[ignore = "installs maturin from PyPI, and builds the module twice"]
fn the_wheel_is_complete_the_same_each_time_and_works() {
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let scratch = scratch.path();
    let Some(maturin) = maturin(scratch) else {
        return;
    };
    let made = wheel(&maturin, &scratch.join("one"), &[]);
    let name = made.file_name().unwrap().to_str().unwrap();
    let version = env!("CARGO_PKG_VERSION");
    assert!(
        name.starts_with(&format!("cowslip-{version}-cp311-abi3-")),
        "{name}"
    );
    let list = "import sys, zipfile\nfor name in zipfile.ZipFile(sys.argv[1]).namelist():\n    print(name)";
    let names = run(Command::new("python3").args(["-c", list]).arg(&made));
    for file in FILES {
        let is_there = names.lines().any(|name| name.ends_with(file));
        assert!(is_there, "{file} is not in {names}");
    }
    let mut clean = Command::new(env!("CARGO"));
    run(clean.args(["clean", "--quiet", "--package", "cowslip-python"]));
    let again = wheel(&maturin, &scratch.join("two"), &["--no-tests"]);
    let is_same = std::fs::read(&made).unwrap() == std::fs::read(&again).unwrap();
    assert!(is_same, "{} and {} differ", made.display(), again.display());
    // What `pip install ./crates/python` makes, with pip's own isolated environment.
    let python = environment(&scratch.join("pip"));
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet"]);
    install.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/python"));
    run(install.env("MATURIN_PEP517_ARGS", "--profile dev"));
    let look =
        "import cowslip, importlib.metadata as m; print(cowslip.__version__, m.version('cowslip'))";
    let said = run(Command::new(&python)
        .args(["-c", look])
        .current_dir(scratch));
    assert_eq!(said.trim(), format!("{version} {version}"));
}
