//! Crates as others get them: complete packages, few dependencies for the core, licences that go
//! together with ours.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use run::run;
use serde_json::Value;

mod run;

/// Crates of others that the core may need: raw and qcow2 images in files, with deflate, which is
/// in by default. Those that are linked, macros, and what builds them count, tests do not.
const CORE_CRATES_MAX: usize = 10;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn cargo(arguments: &[&str]) -> String {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    run(Command::new(program).args(arguments).current_dir(root()))
}

fn packages(more: &[&str]) -> Vec<Value> {
    let arguments = ["metadata", "--offline", "--locked", "--format-version", "1"];
    let metadata = cargo(&[&arguments[..], more].concat());
    let metadata: Value = serde_json::from_str(&metadata).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

fn is_published(package: &Value) -> bool {
    package["publish"].is_null()
}

#[test]
fn crates_that_are_published_say_what_they_are() {
    let all = packages(&["--no-deps"]);
    let published: BTreeSet<&str> = all
        .iter()
        .filter(|package| is_published(package))
        .map(|package| package["name"].as_str().unwrap())
        .collect();
    assert!(published.contains("cowslip") && published.contains("cowslip-cli"));
    for package in all.iter().filter(|package| is_published(package)) {
        let name = package["name"].as_str().unwrap();
        let folder = Path::new(package["manifest_path"].as_str().unwrap());
        let folder = folder.parent().unwrap();
        let texts = ["description", "license", "readme", "rust_version"];
        for text in texts {
            assert!(package[text].is_string(), "{name} has no {text}");
        }
        for list in ["keywords", "categories"] {
            let len = package[list].as_array().unwrap().len();
            assert!((1..=5).contains(&len), "{name} has {len} {list}");
        }
        for file in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
            assert!(folder.join(file).is_file(), "{name} has no {file}");
        }
        for one in package["dependencies"].as_array().unwrap() {
            let needs = one["name"].as_str().unwrap();
            // A registry lacks what has a path and no version, but for tests, where it is left out.
            if one["path"].is_string() && one["kind"].is_null() {
                assert_ne!(one["req"], "*", "{name} needs {needs} of no version");
                assert!(
                    published.contains(needs),
                    "{name} needs {needs}, unpublished"
                );
            }
        }
    }
}

#[test]
fn packages_are_made_without_a_network() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("packages");
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("package").arg("--target-dir").arg(&target);
    let output = run(command.current_dir(root()));
    let order: Vec<&str> = output.lines().map(str::trim).collect();
    let place = |name| order.iter().position(|line| *line == name).unwrap();
    assert!(place("cowslip-queue") < place("cowslip-block"));
    assert!(place("cowslip") < place("cowslip-nodes"));
    assert!(place("cowslip-nodes") < place("cowslip-cli"));
    for package in packages(&["--no-deps"])
        .iter()
        .filter(|one| is_published(one))
    {
        let (name, version) = (&package["name"], &package["version"]);
        let (name, version) = (name.as_str().unwrap(), version.as_str().unwrap());
        let file = target.join(format!("package/{name}-{version}.crate"));
        assert!(file.is_file(), "{} is not there", file.display());
    }
    std::fs::remove_dir_all(target).unwrap();
}

/// Crates of others that a package is built with.
fn third_parties(arguments: &[&str]) -> BTreeSet<String> {
    let tree = [
        "tree",
        "--offline",
        "--locked",
        "-e",
        "normal,build",
        "--prefix",
        "none",
    ];
    let tree = cargo(&[&tree[..], arguments].concat());
    let names = tree.lines().filter(|line| !line.contains("(/"));
    names
        .filter_map(|line| line.split_whitespace().next().map(str::to_string))
        .collect()
}

#[test]
fn the_core_needs_few_crates_of_others() {
    let core = third_parties(&["-p", "cowslip"]);
    assert!(core.contains("io-uring"), "the tree is read: {core:?}");
    assert!(core.len() <= CORE_CRATES_MAX, "{}: {core:?}", core.len());
    let without = third_parties(&["-p", "cowslip", "--no-default-features"]);
    assert!(without.is_subset(&core) && without.len() < core.len());
    for absent in ["aes", "zstd", "rustls", "clap", "serde", "tokio"] {
        assert!(!core.contains(absent), "the core needs {absent}");
    }
    let all = third_parties(&["-p", "cowslip", "--all-features"]);
    assert!(all.contains("aes") && all.contains("zstd"), "{all:?}");
}

/// Cells of the rows of a document's tables whose first cell is one of these words.
fn rows<'a>(document: &'a str, words: &[&str]) -> Vec<Vec<&'a str>> {
    let cells =
        |line: &'a str| -> Vec<&'a str> { line.split('|').skip(1).map(str::trim).collect() };
    let rows = document.lines().filter(|line| line.starts_with('|'));
    rows.map(cells)
        .filter(|cells| words.contains(&cells[0].trim_matches('`')))
        .collect()
}

/// The numbers are those of x86-64: processors differ in crates for their instructions.
#[test]
#[cfg(target_arch = "x86_64")]
fn the_crates_that_a_feature_needs_are_as_many_as_is_said() {
    let document = std::fs::read_to_string(root().join("docs/embedding.md")).unwrap();
    let count = |package: &str, chosen: &[&str]| {
        let target = ["--target", "x86_64-unknown-linux-gnu", "-p", package];
        third_parties(&[&target[..], chosen].concat()).len()
    };
    let features = ["none", "deflate", "zstd", "luks", "portable", "all"];
    let said = rows(&document, &features);
    assert_eq!(said.len(), features.len(), "{said:?}");
    for row in said {
        let name = row[0].trim_matches('`');
        let chosen = match name {
            "none" => vec!["--no-default-features"],
            "all" => vec!["--all-features"],
            feature => vec!["--no-default-features", "--features", feature],
        };
        assert_eq!(row[2], count("cowslip", &chosen).to_string(), "{name}");
    }
    let packages = [
        "cowslip-nbd",
        "cowslip-vhost-user",
        "cowslip-fuse",
        "cowslip-qmp",
        "cowslip-graph",
        "cowslip-nodes",
        "cowslip-capi",
        "cowslip-python",
        "cowslip-cli",
    ];
    let said = rows(&document, &packages);
    assert_eq!(said.len(), packages.len(), "{said:?}");
    for row in said {
        let package = row[0].trim_matches('`');
        let states: [&[&str]; 3] = [&["--no-default-features"], &[], &["--all-features"]];
        let counts = states.map(|chosen| count(package, chosen).to_string());
        assert_eq!(row[1..4], counts, "{package}");
    }
}

/// Licences whose code may be part of ours, or of what is built from it.
const LICENCES: [&str; 11] = [
    "MIT",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "Zlib",
    "BSL-1.0",
    "Unicode-3.0",
    "Unlicense",
    // Of lists of certificates, which are data.
    "CDLA-Permissive-2.0",
];

/// Whether one choice of an expression of licences is among those above: `AND` binds more than
/// `OR`, and there are no brackets but around choices.
fn is_accepted(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ");
    let mut parts = Vec::new();
    let mut depth = 0;
    let mut last = String::new();
    for word in expression
        .replace('(', " ( ")
        .replace(')', " ) ")
        .split_whitespace()
    {
        match word {
            "(" => depth += 1,
            ")" => depth -= 1,
            "AND" if depth == 0 => parts.push(std::mem::take(&mut last)),
            word => last = format!("{last} {word}"),
        }
    }
    parts.push(last);
    let is_known = |one: &str| LICENCES.contains(&one.trim());
    parts.iter().all(|part| part.split(" OR ").any(is_known))
}

#[test]
fn licences_of_all_dependencies_go_together_with_ours() {
    assert!(is_accepted("(MIT OR GPL-2.0) AND Unicode-3.0") && is_accepted("MIT/Apache-2.0"));
    assert!(!is_accepted("MIT AND GPL-2.0") && !is_accepted("LGPL-2.1"));
    let mut refused = BTreeMap::new();
    let all = packages(&[]);
    assert!(all.len() > 50, "the metadata is read");
    for package in &all {
        let licence = package["license"].as_str().unwrap_or("none stated");
        if !is_accepted(licence) {
            refused.insert(package["name"].to_string(), licence.to_string());
        }
    }
    assert!(refused.is_empty(), "{refused:?}");
}
