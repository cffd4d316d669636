//! QEMU's own acceptance tests (its `tests/qemu-iotests`) run against Cowslip under the names of
//! QEMU's programs. They are no part of this repository: running them requires QEMU's source.
//!
//! `iotests.txt` names the tests that differ, with the reason, and `iotests-7.2.txt` and its like
//! those of another release which differ beyond that. A test that differs without a reason is a
//! failure.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{libssl, run};

const KNOWN: &str = include_str!("../iotests.txt");
/// Releases whose tests expect something else beside that.
const RELEASES: &[(&str, &str)] = &[
    ("7.2.", include_str!("../iotests-7.2.txt")),
    ("10.0.13", include_str!("../iotests-10.0.13.txt")),
];

#[derive(clap::Args)]
pub struct Args {
    /// QEMU's unpacked source
    #[arg(long, value_name = "DIR")]
    source: PathBuf,
    /// The format under test
    #[arg(long, default_value = "qcow2")]
    format: String,
    /// Tests by name; without any, those that call the four programs and no machine of QEMU's
    tests: Vec<String>,
}

/// The verdict of QEMU's runner on a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Differs,
    NotRun,
}

/// Runs the tests and compares what comes of them with what is known.
///
/// # Errors
/// The tests could not be run; some differ, or pass, against what is known.
pub fn run(args: &Args) -> Result<(), String> {
    let directory = args.source.join("tests/qemu-iotests");
    let directory = fs::canonicalize(&directory)
        .map_err(|error| format!("{}: {error}", directory.display()))?;
    run::run(
        run::cargo()
            .args(["build", "--release"])
            .args(libssl::features()),
    )?;
    let executable = std::env::current_exe().map_err(|error| error.to_string())?;
    let target = executable
        .ancestors()
        .nth(2)
        .ok_or("the target directory is unknown")?;
    let scratch = target.join("iotests");
    let programs = links(target, &scratch)?;
    let tests = match args.tests.is_empty() {
        true => chosen(&directory)?,
        false => args.tests.clone(),
    };
    let output = check(&directory, (&scratch, &programs), (&args.format, &tests))?;
    let verdicts = verdicts(&output);
    let count = |wanted| {
        verdicts
            .values()
            .filter(|verdict| **verdict == wanted)
            .count()
    };
    println!(
        "{} passed, {} differ, {} not run",
        count(Verdict::Passed),
        count(Verdict::Differs),
        count(Verdict::NotRun)
    );
    judge(&verdicts, &known(&args.format, &version(&args.source)?))
}

/// The release that a source is of.
fn version(source: &Path) -> Result<String, String> {
    let file = source.join("VERSION");
    let text = fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    Ok(text.trim().to_string())
}

/// Links of the names of QEMU's programs to the command.
fn links(target: &Path, scratch: &Path) -> Result<PathBuf, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", scratch.display());
    if scratch.exists() {
        fs::remove_dir_all(scratch).map_err(failed)?;
    }
    let programs = scratch.join("programs");
    for directory in ["programs", "images", "sockets"] {
        fs::create_dir_all(scratch.join(directory)).map_err(failed)?;
    }
    for name in ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"] {
        symlink(target.join("release/cowslip"), programs.join(name)).map_err(failed)?;
    }
    Ok(programs)
}

/// Tests in Python of the storage daemon, which start no machine.
const OF_DAEMON: [&str; 3] = [
    "graph-changes-while-io",
    "mirror-change-copy-mode",
    "qsd-jobs",
];

/// Tests that start no machine: those of the shell by number, and those of the storage daemon.
fn chosen(directory: &Path) -> Result<Vec<String>, String> {
    const MACHINES: [&str; 7] = [
        "_launch_qemu",
        "$QEMU ",
        "run_qemu",
        "common.qemu",
        "$QMP",
        "_qemu_proc",
        "${QEMU}",
    ];
    let entries = fs::read_dir(directory).map_err(|error| error.to_string())?;
    let mut names: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.len() == 3 && name.bytes().all(|byte| byte.is_ascii_digit()))
        .collect();
    names.retain(|name| {
        let text = fs::read_to_string(directory.join(name)).unwrap_or_default();
        let is_shell = text
            .lines()
            .next()
            .is_some_and(|line| line.contains("bash"));
        is_shell && !MACHINES.iter().any(|word| text.contains(word))
    });
    let of_daemon = OF_DAEMON.iter().filter(|name| {
        let file = directory.join("tests").join(name);
        file.exists()
    });
    names.extend(of_daemon.map(|name| (*name).to_string()));
    names.sort();
    Ok(names)
}

fn check(
    directory: &Path,
    (scratch, programs): (&Path, &Path),
    (format, tests): (&str, &[String]),
) -> Result<String, String> {
    let program = |name: &str| programs.join(name);
    let output = Command::new("python3")
        .current_dir(directory)
        .arg("check")
        .arg(format!("-{format}"))
        .args(tests)
        .env("QEMU_IMG_PROG", program("qemu-img"))
        .env("QEMU_IO_PROG", program("qemu-io"))
        .env("QEMU_NBD_PROG", program("qemu-nbd"))
        .env("QEMU_PROG", "/usr/bin/qemu-system-x86_64")
        .env("QSD_PROG", program("qemu-storage-daemon"))
        .env("TEST_DIR", scratch.join("images"))
        .env("SOCK_DIR", scratch.join("sockets"))
        .output()
        .map_err(|error| format!("python3: {error}"))?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    print!("{printed}");
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    Ok(printed)
}

/// Of lines such as `001   pass   [13:00:00] …`, which a terminal's carriage returns may precede.
fn verdicts(output: &str) -> BTreeMap<String, Verdict> {
    let lines = output.split(['\n', '\r']);
    let verdict = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next()?.to_string();
        let verdict = match words.next()? {
            "pass" => Verdict::Passed,
            "fail" => Verdict::Differs,
            "not" if words.next() == Some("run") => Verdict::NotRun,
            _ => return None,
        };
        // Then the time; the tests' own words are printed too.
        words.next()?.starts_with('[').then_some((name, verdict))
    };
    lines.filter_map(verdict).collect()
}

/// Tests of a format that differ, and why, in a release.
fn known(format: &str, version: &str) -> BTreeMap<&'static str, &'static str> {
    let of_release = RELEASES.iter().filter(|(of, _)| version.starts_with(of));
    let texts = std::iter::once(KNOWN).chain(of_release.map(|(_, text)| *text));
    let entries = texts.flat_map(str::lines);
    entries
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            let (formats, rest) = line.split_once(' ')?;
            let (name, why) = rest.split_once(' ')?;
            formats
                .split(',')
                .any(|one| one == format)
                .then_some((name, why))
        })
        .collect()
}

fn judge(verdicts: &BTreeMap<String, Verdict>, known: &BTreeMap<&str, &str>) -> Result<(), String> {
    let mut surprises = Vec::new();
    for (name, verdict) in verdicts {
        match (verdict, known.get(name.as_str())) {
            (Verdict::Differs, None) => surprises.push(format!("{name} differs")),
            (Verdict::Differs, Some(why)) => println!("{name} differs, as is known: {why}"),
            (Verdict::Passed, Some(_)) => surprises.push(format!("{name} passes now")),
            _ => {}
        }
    }
    match surprises.is_empty() {
        true => Ok(()),
        false => Err(surprises.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_runner_says_is_understood() {
        let output = "PLATFORM -- Linux\n001   ...  [1]\r001   pass  [1] [2] 1.0s\n002   fail  [2]\n003  not run  [3]\nunexpected pass\n";
        let verdicts = verdicts(output);
        let expected = [
            ("001", Verdict::Passed),
            ("002", Verdict::Differs),
            ("003", Verdict::NotRun),
        ];
        let expected = expected.map(|(name, verdict)| (name.to_string(), verdict));
        assert_eq!(verdicts, BTreeMap::from(expected));
        assert_eq!(
            judge(&verdicts, &BTreeMap::from([("002", "words")])),
            Ok(())
        );
        let surprise = judge(&verdicts, &BTreeMap::from([("001", "words")])).unwrap_err();
        assert_eq!(surprise, "001 passes now; 002 differs");
    }

    #[test]
    fn every_known_difference_has_a_reason() {
        let texts = std::iter::once(KNOWN).chain(RELEASES.iter().map(|(_, text)| *text));
        let lines = texts.flat_map(str::lines);
        for line in lines.filter(|line| !line.starts_with('#')) {
            assert!(
                line.splitn(3, ' ').nth(2).is_some_and(|why| why.len() > 5),
                "{line}"
            );
        }
        assert!(known("qcow2", "10.0.2").contains_key("039"));
        assert!(!known("qcow2", "10.0.2").contains_key("043"));
        assert!(known("qcow2", "10.0.13").contains_key("046"));
        for both in ["039", "043"] {
            assert!(known("qcow2", "7.2.3").contains_key(both));
        }
    }
}
