//! Command lines that are given to both programs: taking them apart, and what came of them.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use super::{outcome, run};

/// Command lines, one a line of text, which begins with a line break; an empty one is a command
/// line without words.
pub fn lines(text: &str) -> impl Iterator<Item = &str> {
    text[1..].trim_end_matches('\n').split('\n')
}

/// The words of a command line; `''` is an empty one.
pub fn words(line: &str) -> Vec<&str> {
    let words = line.split_whitespace();
    words.map(|w| if w == "''" { "" } else { w }).collect()
}

/// Copies the files of a directory, for the other program. Holes stay holes.
pub fn copy_files(from: &Path, to: &Path) {
    let mut program = Command::new("cp");
    run(program
        .args(["--sparse=always", "-r", "-T"])
        .args([from, to]));
}

/// All that a program said, and how it ended.
pub fn said(output: &Output) -> String {
    format!(
        "{}{}[{}]\n",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
        output.status
    )
}

/// The difference between what both programs say to a command line, each in its directory; empty
/// if there is none.
pub fn difference(words: &[&str], here: &Path, there: &Path) -> String {
    let said =
        |mut program: Command, dir: &Path| said(&outcome(program.current_dir(dir).args(words)));
    let ours = said(ours(), here);
    let theirs = said(Command::new("qemu-img"), there);
    match ours == theirs {
        true => String::new(),
        false => {
            let line = words.join(" ");
            format!("{line}\n--- expected\n{theirs}--- actual\n{ours}")
        }
    }
}

/// Lines in which our programs, by QEMU's names, fail with the words and the status of QEMU's.
/// Marks in the lines stand for values.
pub fn refused_alike(dir: &Path, text: &str, values: &[(&str, String)]) {
    for line in lines(text) {
        let line = values.iter().fold(line.to_string(), |line, (mark, value)| {
            line.replace(mark, value)
        });
        let words = words(&line);
        let said =
            |mut program: Command| said(&outcome(program.current_dir(dir).args(&words[1..])));
        let (ours, theirs) = (said(our(words[0])), said(Command::new(words[0])));
        assert_eq!(ours, theirs, "{line}");
        assert!(theirs.contains("[exit status: 1]"), "{line}: {theirs}");
    }
}

/// The command under test, by the name of one of QEMU's programs.
pub fn our(program: &str) -> Command {
    let mut command = super::cowslip();
    command.arg(program);
    command
}

/// The command under test as qemu-io, by the name that its errors then begin with.
pub fn our_io() -> Command {
    let mut command = super::cowslip();
    command.arg0("qemu-io");
    command
}

/// Output of a shell like qemu-io's, without what depends on the clock.
pub fn timeless(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines = text.split('\n').map(|line| {
        let machine: Vec<&str> = line.split(',').collect();
        match (line.find(" ops; "), &machine[..]) {
            (Some(at), _) => line[..at + 5].to_string(),
            (None, [bytes, ops, _, _, _]) => format!("{bytes},{ops},..."),
            _ => line.to_string(),
        }
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// The command under test, as qemu-img.
pub fn ours() -> Command {
    our("qemu-img")
}

/// Runs of a disk with what `keys` say of them by `map`, neighbours of one kind joined.
pub fn mapped(dir: &Path, name: &str, keys: &[&str]) -> Vec<(u64, u64, Vec<bool>)> {
    let line = ["map", "--output=json", name];
    let map = run(Command::new("qemu-img").current_dir(dir).args(line));
    let map: Vec<serde_json::Value> = serde_json::from_str(&map).unwrap();
    let mut runs: Vec<(u64, u64, Vec<bool>)> = Vec::new();
    for extent in map {
        let number = |key: &str| extent[key].as_u64().unwrap();
        let kind: Vec<bool> = keys
            .iter()
            .map(|key| extent[key].as_bool().unwrap())
            .collect();
        match runs.last_mut() {
            Some(last) if last.2 == kind => last.1 += number("length"),
            _ => runs.push((number("start"), number("length"), kind)),
        }
    }
    runs
}
