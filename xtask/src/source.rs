//! `cargo xtask deb --source`: the source package from which `dpkg-buildpackage` builds the
//! packages of `cargo xtask deb`, without a network. The same sources make the same bytes.
//!
//! Its format is 3.0 (quilt), with two archives beside Debian's own directory: the sources, which
//! are upstream's as they are, and the crates of others (`orig-vendor`), which change at other
//! times. Of crates that are for tests alone, or for other systems, cargo reads the manifest, so
//! that is there, and nothing else.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::archive::{self, Put};
use crate::deb::{Facts, PACKAGES, copyright, wrapped};
use crate::install::Tree;
use crate::{musl, notices, run, tree};

/// Members of the workspace that building the packages takes.
const BUILT: [&str; 4] = ["cowslip-cli", "cowslip-capi", "cowslip-python", "xtask"];

/// Makes the package in a directory.
pub fn make(out: &Path, facts: &Facts) -> Result<(), String> {
    musl::require(&["dpkg-source", "tar", "xz"])?;
    let version = env!("CARGO_PKG_VERSION");
    let stage = out.join("source");
    let name = format!("cowslip-{version}");
    let sources = stage.join(&name);
    tree::remove(&stage)?;
    tree::export(&sources)?;
    archive::settle(&sources)?;
    let orig = |part: &str| out.join(format!("cowslip_{version}.orig{part}.tar"));
    compress(&sources, &name, &orig(""))?;
    let used = vendor(&sources.join("vendor"))?;
    archive::settle(&sources.join("vendor"))?;
    compress(&sources.join("vendor"), "vendor", &orig("-vendor"))?;
    debian(&Tree(sources.join("debian")), facts, &used)?;
    let mut pack = Command::new("dpkg-source");
    pack.current_dir(out).arg("-b").arg(&sources);
    run::output(pack.env("SOURCE_DATE_EPOCH", &facts.epoch))?;
    tree::remove(&stage)?;
    let description = format!("cowslip_{}.dsc", facts.version);
    println!("{}", out.join(description).display());
    Ok(())
}

/// Makes an archive, compressed, of a directory, which has this name in it.
fn compress(directory: &Path, name: &str, file: &Path) -> Result<(), String> {
    let below = format!("{name}/");
    let put = Put {
        owner: 0,
        below: &below,
    };
    archive::pack(directory, put, file)?;
    // With more threads than one, the result is that of any number.
    run::run(
        Command::new("xz")
            .args(["-6", "--threads=2", "-f"])
            .arg(file),
    )
}

/// Fills a directory with the crates of others. Returns those that are built, with their manifests'
/// words.
fn vendor(directory: &Path) -> Result<Vec<Value>, String> {
    let mut vendor = run::cargo();
    vendor.args(["vendor", "--locked", "--versioned-dirs", "--quiet"]);
    run::output(vendor.arg(directory))?;
    let kinds = [notices::Kind::Linked, notices::Kind::Building];
    let used = notices::crates(&notices::packaged(), &BUILT, &kinds)?;
    let names: BTreeSet<String> = used.iter().map(notices::folder_of).collect();
    let failed = |e: std::io::Error| format!("{}: {e}", directory.display());
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !names.contains(entry.file_name().to_string_lossy().as_ref()) {
            leave_the_manifest(&entry.path())?;
        }
    }
    Ok(used)
}

/// Takes the code out of a crate that is not built; cargo looks for a library in it.
fn leave_the_manifest(folder: &Path) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("{}: {e}", folder.display());
    let sums = folder.join(".cargo-checksum.json");
    let text = fs::read_to_string(&sums).map_err(failed)?;
    let mut known: Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
    let manifest = fs::read(folder.join("Cargo.toml")).map_err(failed)?;
    tree::remove(folder)?;
    let tree = Tree(folder.to_path_buf());
    tree.write("Cargo.toml", 0o644, &manifest)?;
    tree.write("src/lib.rs", 0o644, b"")?;
    known["files"] = Value::Object(serde_json::Map::new());
    tree.write(".cargo-checksum.json", 0o644, known.to_string().as_bytes())?;
    Ok(())
}

/// Debian's own directory.
fn debian(tree: &Tree, facts: &Facts, used: &[Value]) -> Result<(), String> {
    let rules = run::root().join("contrib/debian/rules");
    tree.copy(&rules, "rules", 0o755)?;
    for (name, text) in [
        ("control", control(facts)),
        ("changelog", facts.changelog()),
        (
            "copyright",
            copyright()? + &notices::paragraphs(used, "The text is in each crate's directory."),
        ),
        ("source/format", "3.0 (quilt)\n".to_string()),
    ] {
        tree.write(name, 0o644, text.as_bytes())?;
    }
    Ok(())
}

/// The source package and its binary packages.
fn control(facts: &Facts) -> String {
    let mut text = format!(
        "Source: cowslip\nSection: otherosfs\nPriority: optional\nMaintainer: {}\n\
         Build-Depends: binutils, cargo (>= {1}), rustc (>= {1})\n\
         Standards-Version: 4.6.2\nRules-Requires-Root: no\n",
        facts.maintainer,
        env!("CARGO_PKG_RUST_VERSION")
    );
    for package in &PACKAGES {
        let depends = package.depends.iter();
        let depends = depends.map(|one| one.replace("VERSION", "${binary:Version}"));
        let depends: Vec<String> = depends.collect();
        let _infallible = write!(
            text,
            "\nPackage: {}\nArchitecture: {}\nSection: {}\n{}{}Description: {}\n{}",
            package.name,
            if package.is_for_all { "all" } else { "any" },
            package.section,
            match depends.is_empty() {
                true => String::new(),
                false => format!("Depends: {}\n", depends.join(", ")),
            },
            match package.name.starts_with("lib") {
                true => "Multi-Arch: same\n",
                false => "",
            },
            package.title,
            wrapped(package.description)
        );
    }
    text
}
