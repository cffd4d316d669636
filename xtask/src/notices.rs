//! Crates of others that are needed, and their licences, which go along with programs and libraries
//! that have them inside: into packages, archives, images and wheels.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::Value;

use crate::run;

/// Beginnings of names of files with licences, in capitals.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"];

/// Directories below a crate's own: libraries in C are there, with licences of theirs.
const DEPTH: usize = 2;

/// Way in which a crate is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Its code is part of what is built.
    Linked,
    /// A script of a package runs it before the package is built.
    Building,
}

/// The name that files with the licences of others have.
pub const FILE: &str = "THIRD-PARTY";

/// The target of builds that are linked with this system's C library.
pub fn host() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}

/// The targets that packages are made for: what is the same on all architectures, such as documents
/// of packages that are installed for several, is about all of these.
pub fn packaged() -> Vec<String> {
    let triplet = |architecture| format!("{architecture}-unknown-linux-gnu");
    ["x86_64", "aarch64", "riscv64gc"].map(triplet).to_vec()
}

/// All crates that members of the workspace are linked with, with their licences; then each text
/// once. For the targets of these names. The same crates make the same bytes.
///
/// # Errors
/// cargo does not describe the workspace; a crate cannot be read, or has no text of a licence and
/// names none that is known.
pub fn of(members: &[&str], targets: &[String]) -> Result<String, String> {
    let mut list = String::new();
    // Users of a text, by the text.
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in crates(targets, members, &[Kind::Linked])? {
        let of = |field: &str| package[field].as_str().unwrap_or("not stated");
        let name = format!("{} {}", of("name"), of("version"));
        let _infallible = writeln!(list, "{name}: {} ({})", of("license"), of("repository"));
        let folder = Path::new(of("manifest_path")).parent();
        let mut own = BTreeSet::new();
        let folder = folder.ok_or("a manifest is in a directory")?;
        licences(folder, DEPTH, &mut own)?;
        if own.is_empty() {
            own.insert(known_text(of("license")).map_err(|e| format!("{name}: {e}"))?);
        }
        for text in own {
            texts.entry(text).or_default().push(name.clone());
        }
    }
    let is_musl = targets.iter().any(|target| target.ends_with("-musl"));
    let musl = match is_musl {
        true => ",\nand with the C library musl (MIT, https://musl.libc.org)",
        false => "",
    };
    let mut notices = format!(
        "Cowslip is linked with these crates, under the licences that each names, with the\n\
         standard library of Rust (MIT OR Apache-2.0, https://www.rust-lang.org){musl}.\n\n{list}"
    );
    for (text, users) in texts {
        let rule = "-".repeat(78);
        let _infallible = write!(notices, "\n{rule}\n{}:\n\n{text}\n", users.join(", "));
    }
    Ok(notices)
}

/// Crates of others that members of the workspace need for any of the targets, in these ways, as
/// `cargo metadata` describes them; in the order of their names.
///
/// # Errors
/// cargo does not describe the workspace.
pub fn crates(targets: &[String], members: &[&str], kinds: &[Kind]) -> Result<Vec<Value>, String> {
    let mut found = BTreeMap::new();
    for target in targets {
        for package in needed(&*metadata(target)?, members, kinds) {
            found.insert(folder_of(package), package.clone());
        }
    }
    Ok(found.into_values().collect())
}

/// All that cargo knows of the workspace for a target; it is asked once.
fn metadata(target: &str) -> Result<Arc<Value>, String> {
    static KNOWN: Mutex<BTreeMap<String, Arc<Value>>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().map_err(|e| e.to_string())?;
    if let Some(metadata) = known.get(target) {
        return Ok(Arc::clone(metadata));
    }
    let mut metadata = run::cargo();
    metadata.args(["metadata", "--locked", "--format-version=1"]);
    metadata.args(["--filter-platform", target]);
    let metadata: Value =
        serde_json::from_str(&run::output(&mut metadata)?).map_err(|e| e.to_string())?;
    let metadata = Arc::new(metadata);
    known.insert(target.to_string(), Arc::clone(&metadata));
    Ok(metadata)
}

/// Values of a list.
fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn needed<'a>(metadata: &'a Value, members: &[&str], kinds: &[Kind]) -> Vec<&'a Value> {
    let by_id = |value: &'a Value| -> BTreeMap<&'a str, &'a Value> {
        list(value)
            .map(|one| (one["id"].as_str().unwrap_or_default(), one))
            .collect()
    };
    let packages = by_id(&metadata["packages"]);
    let nodes = by_id(&metadata["resolve"]["nodes"]);
    let is_wanted = |kind: &Value| match kind["kind"].as_str() {
        None => kinds.contains(&Kind::Linked),
        Some("build") => kinds.contains(&Kind::Building),
        // For tests.
        Some(_) => false,
    };
    let is_member = |one: &&&Value| {
        let name = one["name"].as_str().unwrap_or_default();
        members.contains(&name) && one["source"].is_null()
    };
    let mut waiting: Vec<&str> = packages
        .values()
        .filter(is_member)
        .filter_map(|one| one["id"].as_str())
        .collect();
    let mut seen = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        if let (true, Some(node)) = (seen.insert(id), nodes.get(id)) {
            let needs = list(&node["deps"]).filter(|one| list(&one["dep_kinds"]).any(is_wanted));
            waiting.extend(needs.filter_map(|one| one["pkg"].as_str()));
        }
    }
    let known = seen.iter().filter_map(|id| packages.get(id).copied());
    let mut others: Vec<&Value> = known.filter(|one| !one["source"].is_null()).collect();
    others.sort_by_key(|one| (one["name"].to_string(), one["version"].to_string()));
    others
}

/// The text of the licence of a crate that brings none along.
fn known_text(expression: &str) -> Result<String, String> {
    let words = expression.split(|c: char| c.is_whitespace() || "()/".contains(c));
    let words: Vec<&str> = words.collect();
    if !words.contains(&"Apache-2.0") || words.contains(&"AND") || words.contains(&"WITH") {
        return Err(format!("it has no text of its licence, {expression}"));
    }
    let path = run::root().join("LICENSE-APACHE");
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(text.trim().to_string())
}

/// Adds the texts of the licences in a crate's directory, and in directories down to a depth.
fn licences(folder: &Path, depth: usize, texts: &mut BTreeSet<String>) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("{}: {e}", folder.display());
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.to_uppercase();
        if path.is_dir() {
            if depth > 0 {
                licences(&path, depth - 1, texts)?;
            }
        } else if NAMES.iter().any(|start| name.starts_with(start)) {
            let text = fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
            texts.insert(String::from_utf8_lossy(&text).trim().to_string());
        }
    }
    Ok(())
}

/// Paragraphs of Debian's file `copyright` about crates of others, in the directories that a source
/// package has them in: those with one licence together, with a sentence about its text.
pub fn paragraphs(used: &[Value], text_place: &str) -> String {
    let mut folders: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in used {
        let licence = package["license"].as_str().unwrap_or("not-stated");
        let licence = licence
            .replace("/", " OR ")
            .replace("-exception", " exception");
        let words = licence.split_whitespace().map(|word| match word {
            "OR" => "or",
            "AND" => "and",
            "WITH" => "with",
            word => word,
        });
        let words: Vec<&str> = words.collect();
        let folder = format!("vendor/{}/*", folder_of(package));
        folders.entry(words.join(" ")).or_default().push(folder);
    }
    let mut text = String::new();
    for (licence, folders) in &folders {
        let _infallible = write!(
            text,
            "\nFiles: {}\nCopyright: the authors that each crate names\nLicense: {licence}\n \
             {text_place}\n",
            folders.join("\n       ")
        );
    }
    text
}

/// The directory of a crate in a source package.
pub fn folder_of(package: &Value) -> String {
    let of = |field: &str| package[field].as_str().unwrap_or_default();
    format!("{}-{}", of("name"), of("version"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_are_those_that_are_needed_in_the_ways_that_are_asked_about() {
        let metadata = serde_json::json!({
            "packages": [
                {"id": "r", "name": "root", "source": null},
                {"id": "a", "name": "linked", "source": "registry"},
                {"id": "b", "name": "below", "source": "registry"},
                {"id": "m", "name": "member", "source": null},
                {"id": "t", "name": "for-tests", "source": "registry"},
                {"id": "s", "name": "script", "source": "registry"},
            ],
            "resolve": {"nodes": [
                {"id": "r", "deps": [
                    {"pkg": "m", "dep_kinds": [{"kind": null}]},
                    {"pkg": "t", "dep_kinds": [{"kind": "dev"}]},
                    {"pkg": "s", "dep_kinds": [{"kind": "build"}]},
                ]},
                {"id": "m", "deps": [{"pkg": "a", "dep_kinds": [{"kind": "dev"}, {"kind": null}]}]},
                {"id": "a", "deps": [{"pkg": "b", "dep_kinds": [{"kind": null}]}]},
            ]},
        });
        let names = |kinds: &[Kind]| -> Vec<&str> {
            let needed = needed(&metadata, &["root"], kinds);
            needed
                .iter()
                .filter_map(|one| one["name"].as_str())
                .collect()
        };
        assert_eq!(names(&[Kind::Linked]), ["below", "linked"]);
        let all = names(&[Kind::Linked, Kind::Building]);
        assert_eq!(all, ["below", "linked", "script"]);
    }

    #[test]
    fn crates_without_a_text_are_taken_under_one_that_is_known() {
        for expression in ["MIT OR Apache-2.0", "Apache-2.0/MIT", "(Apache-2.0)"] {
            let text = known_text(expression).unwrap();
            assert!(text.contains("Apache License"), "{expression}");
        }
        for expression in [
            "MIT",
            "MIT AND Apache-2.0",
            "Apache-2.0 WITH LLVM-exception",
        ] {
            assert!(known_text(expression).is_err(), "{expression}");
        }
    }
}
