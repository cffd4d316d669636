//! The structure in figures: lines by part, and the methods and fields of the largest type, as
//! docs/decisions.md has them.
//!
//! Lines are those of the Rust sources that git knows, with comments, tests in files and blanks.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::run;

/// Parts of the tree and the beginnings of their files' paths; a file is of the first that fits.
const PARTS: &[(&str, &[&str])] = &[
    (
        "simulator, models, hostile peers, testbed, fuzzers, xtask",
        &[
            "crates/sim/",
            "crates/models/",
            "crates/hostile/",
            "crates/testbed/",
            "fuzz/",
            "xtask/",
        ],
    ),
    ("integration tests", &["tests/"]),
    (
        "the engine and the crates below it",
        &[
            "crates/engine/",
            "crates/qcow2/",
            "crates/qcow2-format/",
            "crates/qcow2-offline/",
            "crates/block/",
            "crates/boxed/",
            "crates/hostfile/",
            "crates/luks/",
        ],
    ),
    ("NBD and the queue", &["crates/nbd/", "crates/queue/"]),
    (
        "benchmarks and viewers",
        &["crates/bench/", "crates/load/", "crates/extents/", "bench/"],
    ),
    ("the daemon", &["crates/daemon/"]),
    (
        "the command and the names of images",
        &[
            "src/",
            "crates/cmdline/",
            "crates/clients/",
            "crates/exports/",
            "crates/shell/",
            "crates/nodes/",
        ],
    ),
    ("crates that came since the first review", &["crates/"]),
];
/// The type with most methods, and where its `impl` blocks are.
const LARGEST: (&str, &str) = ("Qcow2", "crates/qcow2/src/");

/// Options of `cargo xtask figures`.
#[derive(clap::Args)]
pub struct Args {
    /// Another checkout of the project
    #[arg(long, value_name = "DIR")]
    source: Option<std::path::PathBuf>,
}

/// Prints the figures.
pub fn run(args: &Args) -> Result<(), String> {
    let root = args.source.clone().unwrap_or_else(run::root);
    let mut list = Command::new("git");
    list.current_dir(&root).args(["ls-files", "*.rs"]);
    let listed = run::output(&mut list)?;
    let (mut lines, mut methods) = (BTreeMap::new(), Vec::new());
    for name in listed.lines() {
        let text = fs::read_to_string(root.join(name));
        let text = text.map_err(|error| format!("cannot read {name}: {error}"))?;
        *lines.entry(part_of(name)).or_insert(0) += text.lines().count();
        let (largest, at) = LARGEST;
        let found = methods_of(largest, &text);
        if name.starts_with(at) && found > 0 {
            methods.push(found);
        }
    }
    for (part, count) in &lines {
        println!("{count:8} {part}");
    }
    println!("{:8} all", lines.values().sum::<usize>());
    let (sum, files) = (methods.iter().sum::<usize>(), methods.len());
    println!("{sum:8} methods of {}, in {files} files", LARGEST.0);
    Ok(())
}

/// The part that a file belongs to. Tests of crates are integration tests, but for those of the
/// crates that test.
fn part_of(name: &str) -> &'static str {
    let is_tests = Path::new(name).components().nth(2);
    let is_tests = is_tests.is_some_and(|part| part.as_os_str() == "tests");
    let (testing, tests) = (PARTS[0], PARTS[1]);
    let is_of = |part: &(&str, &[&str])| part.1.iter().any(|start| name.starts_with(start));
    match is_tests && !is_of(&testing) {
        true => tests.0,
        false => PARTS
            .iter()
            .find(|part| is_of(part))
            .map_or("others", |part| part.0),
    }
}

/// Functions in the `impl` blocks of a type, those of traits apart; rustfmt has put the blocks at
/// the line's start.
fn methods_of(name: &str, text: &str) -> usize {
    let mut is_within = false;
    let is_method = |line: &&str| {
        if line.starts_with("impl") {
            is_within = **line == *format!("impl {name} {{");
        } else if *line == "}" {
            is_within = false;
        }
        let is_item = line.starts_with("    ") && !line.starts_with("     ");
        let is_code = !line.trim_start().starts_with("//");
        let words = line.split([' ', '(']);
        is_within && is_item && is_code && words.into_iter().any(|word| word == "fn")
    };
    text.lines().filter(is_method).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_has_a_part() {
        let of = [
            ("crates/engine/src/image.rs", PARTS[2].0),
            ("crates/engine/tests/main.rs", PARTS[1].0),
            ("crates/sim/tests/smoke.rs", PARTS[0].0),
            ("crates/daemon/src/job.rs", PARTS[5].0),
            ("src/cmd/check.rs", PARTS[6].0),
            ("crates/qmp/src/lib.rs", PARTS[7].0),
            ("elsewhere.rs", "others"),
        ];
        for (name, part) in of {
            assert_eq!(part_of(name), part, "{name}");
        }
    }

    #[test]
    fn methods_are_those_of_the_type() {
        let text = "impl Qcow2 {\n    pub fn a(&self) {\n        fn inner() {}\n    }\n    \
                    /// The fn b.\n    async fn b() {}\n}\nimpl Other {\n    fn c() {}\n}\n\
                    impl Disk for Qcow2 {\n    fn d() {}\n}\n";
        assert_eq!(methods_of("Qcow2", text), 2);
    }
}
