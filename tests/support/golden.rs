//! Command lines that are given to both programs: taking them apart, and what came of them.

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

/// The command under test, as qemu-img.
pub fn ours() -> Command {
    let mut command = super::cowslip();
    command.arg("qemu-img");
    command
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
