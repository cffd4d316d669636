//! `cargo xtask wheel`: the wheel of the Python package, made by maturin, installed into an
//! environment without other packages, and tested there. The same sources make the same bytes:
//! times are those of the last commit, or of `SOURCE_DATE_EPOCH`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{notices, run};

/// Options of `cargo xtask wheel`.
#[derive(clap::Args)]
pub struct Args {
    /// maturin; if left out that of the path, or one from PyPI in an environment of its own
    #[arg(long, value_name = "PROGRAM")]
    maturin: Option<PathBuf>,
    /// The Python that the wheel is tested with
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: PathBuf,
    /// Profile of cargo with which the module is built
    #[arg(long, value_name = "NAME", default_value = "release")]
    profile: String,
    /// Directory for the wheel
    #[arg(long, value_name = "DIR", default_value = "target/wheels")]
    out: PathBuf,
    /// Leave out the tests
    #[arg(long)]
    no_tests: bool,
}

/// Files of tests in crates/python/tests/py.
const TESTS: [&str; 5] = [
    "test_types",
    "test_images",
    "test_jobs",
    "test_aio",
    "test_examples",
];

/// Makes the wheel, installs and tests it; prints its path.
pub fn run(args: &Args) -> Result<(), String> {
    let scratch = run::target().join("wheel");
    let made = scratch.join("made");
    empty(&made)?;
    let maturin = match &args.maturin {
        Some(maturin) => maturin.clone(),
        None => maturin(args, &scratch)?,
    };
    // maturin takes it along, as pyproject.toml says.
    let licences = notices::of(&["cowslip-python"], &[notices::host()])?;
    let path = package().join(notices::FILE);
    fs::write(&path, licences).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut build = Command::new(&maturin);
    build.args(["build", "--locked", "--profile", &args.profile]);
    build.arg("--out").arg(&made).current_dir(package());
    build.env("SOURCE_DATE_EPOCH", run::epoch());
    run::run(&mut build)?;
    let wheel = wheel_in(&made)?;
    if !args.no_tests {
        test(args, &scratch, &wheel)?;
    }
    let name = wheel.file_name().unwrap_or_default();
    let out = run::root().join(&args.out);
    let kept = out.join(name);
    let failed = |e| format!("{}: {e}", kept.display());
    fs::create_dir_all(&out).map_err(failed)?;
    fs::copy(&wheel, &kept).map_err(failed)?;
    println!("{}", kept.display());
    Ok(())
}

fn package() -> PathBuf {
    run::root().join("crates/python")
}

/// Makes a directory, or removes all that is in it.
fn empty(directory: &Path) -> Result<(), String> {
    let failed = |e| format!("{}: {e}", directory.display());
    if directory.exists() {
        fs::remove_dir_all(directory).map_err(failed)?;
    }
    fs::create_dir_all(directory).map_err(failed)
}

/// Makes an environment without packages; its Python.
fn environment(python: &Path, at: &Path) -> Result<PathBuf, String> {
    run::run(Command::new(python).args(["-m", "venv", "--clear"]).arg(at))?;
    Ok(at.join("bin/python"))
}

/// maturin of the path, or installed in an environment that later runs find again.
fn maturin(args: &Args, scratch: &Path) -> Result<PathBuf, String> {
    if let Some(installed) = run::find_program("maturin") {
        return Ok(installed);
    }
    let at = scratch.join("maturin");
    let program = at.join("bin/maturin");
    if !program.is_file() {
        let wanted = backend(&package().join("pyproject.toml"))?;
        let python = environment(&args.python, &at)?;
        let mut install = Command::new(python);
        install.args(["-m", "pip", "install", "--quiet", &wanted]);
        run::run(&mut install)?;
    }
    Ok(program)
}

/// The requirement of the backend that a package names, such as `maturin>=1,<2`.
fn backend(path: &Path) -> Result<String, String> {
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let wanted = text.split_once("requires = [\"").map(|(_, rest)| rest);
    let wanted = wanted.and_then(|rest| rest.split_once('"'));
    let (wanted, _) = wanted.ok_or(format!("{}: it names no backend", path.display()))?;
    Ok(wanted.to_string())
}

fn wheel_in(directory: &Path) -> Result<PathBuf, String> {
    let failed = |e: std::io::Error| format!("{}: {e}", directory.display());
    let entries = fs::read_dir(directory).map_err(failed)?;
    let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let wheel = paths.find(|path| path.extension().is_some_and(|end| end == "whl"));
    wheel.ok_or(format!("{} holds no wheel", directory.display()))
}

/// Installs the wheel where no other package is, and runs the package's tests with it.
fn test(args: &Args, scratch: &Path, wheel: &Path) -> Result<(), String> {
    let python = environment(&args.python, &scratch.join("environment"))?;
    let mut install = Command::new(&python);
    // The wheel needs no other.
    install.args(["-m", "pip", "install", "--quiet", "--no-index"]);
    run::run(install.arg(wheel))?;
    let directory = scratch.join("tests");
    empty(&directory)?;
    for tests in TESTS {
        let mut command = Command::new(&python);
        command.args(["-X", "dev", "-W", "error::ResourceWarning"]);
        command.args(["-m", "unittest", tests]);
        command.env("PYTHONPATH", package().join("tests/py"));
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        command.env("SCRATCH", &directory);
        command.env("COWSLIP_REPOSITORY", run::root());
        run::run(command.current_dir(&directory))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_package_names_its_backend() {
        let backend = backend(&package().join("pyproject.toml")).unwrap();
        assert!(backend.starts_with("maturin>="), "{backend}");
    }

    #[test]
    fn all_tests_of_the_package_are_run() {
        let files = fs::read_dir(package().join("tests/py")).unwrap();
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names
            .filter_map(|name| name.strip_suffix(".py").map(str::to_string))
            .filter(|name| name.starts_with("test_"))
            .collect();
        names.sort();
        let mut run = TESTS.map(str::to_string);
        run.sort();
        assert_eq!(names, run);
    }
}
