//! Crates of others that are needed, and their licences, which go into archives and images with a
//! program that has all of them inside.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

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

/// All crates that the command is linked with, with their licences; then each text once. For the
/// target of this name.
///
/// # Errors
/// cargo does not describe the workspace, or a crate cannot be read.
pub fn of_command(target: &str) -> Result<String, String> {
    let mut list = String::new();
    // Users of a text, by the text.
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in crates(target, &["cowslip-cli"], &[Kind::Linked])? {
        let of = |field: &str| package[field].as_str().unwrap_or("not stated");
        let name = format!("{} {}", of("name"), of("version"));
        let _infallible = writeln!(list, "{name}: {} ({})", of("license"), of("repository"));
        let folder = Path::new(of("manifest_path")).parent();
        let mut own = BTreeSet::new();
        let folder = folder.ok_or("a manifest is in a directory")?;
        licences(folder, DEPTH, &mut own)?;
        for text in own {
            texts.entry(text).or_default().push(name.clone());
        }
    }
    let mut notices = format!(
        "The program cowslip is linked with these crates, under the licences that each names, and,\n\
         where it is built for musl, with that C library (MIT, https://musl.libc.org).\n\n{list}"
    );
    for (text, users) in texts {
        let rule = "-".repeat(78);
        let _infallible = write!(notices, "\n{rule}\n{}:\n\n{text}\n", users.join(", "));
    }
    Ok(notices)
}

/// Crates of others that members of the workspace need for a target, in these ways, as
/// `cargo metadata` describes them; in the order of their names.
///
/// # Errors
/// cargo does not describe the workspace.
pub fn crates(target: &str, members: &[&str], kinds: &[Kind]) -> Result<Vec<Value>, String> {
    let mut metadata = run::cargo();
    metadata.args(["metadata", "--locked", "--format-version=1"]);
    metadata.args(["--filter-platform", target]);
    let metadata: Value =
        serde_json::from_str(&run::output(&mut metadata)?).map_err(|e| e.to_string())?;
    let needed = needed(&metadata, members, kinds);
    Ok(needed.into_iter().cloned().collect())
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
}
