//! The packages of all crates that are published, made from what is there and without a network:
//! each holds its licences and a description, and names no path that others lack.

use std::path::PathBuf;

use serde_json::Value;

use crate::run;

#[derive(clap::Args)]
pub struct Args {
    /// Directory for what is made, in place of the workspace's own
    #[arg(long)]
    target_dir: Option<PathBuf>,
    /// Builds each crate from its package, too
    #[arg(long)]
    verify: bool,
}

/// Programs that check what cannot be checked here, and the way each is called.
const CHECKERS: [(&str, &str); 3] = [
    ("cargo-semver-checks", "cargo semver-checks --workspace"),
    ("cargo-deny", "cargo deny check"),
    ("cargo-audit", "cargo audit"),
];

/// A crate of the workspace.
struct Member {
    name: String,
    is_published: bool,
    /// The crates of the workspace that it is built with.
    needs: Vec<String>,
}

pub fn run(args: &Args) -> Result<(), String> {
    let members = members()?;
    let mut command = run::cargo();
    command.args(["package", "--workspace", "--offline", "--allow-dirty"]);
    if !args.verify {
        command.arg("--no-verify");
    }
    if let Some(directory) = &args.target_dir {
        command.arg("--target-dir").arg(directory);
    }
    for member in members.iter().filter(|member| !member.is_published) {
        command.args(["--exclude", &member.name]);
    }
    run::run(command.arg("--quiet"))?;
    println!("packages, in the order in which they are published:");
    for name in in_order(&members) {
        println!("  {name}");
    }
    for (program, call) in CHECKERS {
        match run::find_program(program) {
            Some(_) => println!("{program} is here: {call}"),
            None => println!("{program} is not here, and has checked nothing"),
        }
    }
    Ok(())
}

fn members() -> Result<Vec<Member>, String> {
    let mut command = run::cargo();
    command.args([
        "metadata",
        "--offline",
        "--no-deps",
        "--format-version",
        "1",
    ]);
    let metadata: Value = serde_json::from_str(&run::output(&mut command)?)
        .map_err(|error| format!("cargo's metadata: {error}"))?;
    let packages = metadata["packages"].as_array().cloned().unwrap_or_default();
    Ok(packages.iter().map(member).collect())
}

fn member(package: &Value) -> Member {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let dependencies = package["dependencies"].as_array();
    let needs = dependencies.into_iter().flatten();
    let needs = needs.filter(|one| one["kind"].is_null() && one["path"].is_string());
    Member {
        name: text(&package["name"]),
        // An empty list of registries is `publish = false`.
        is_published: package["publish"].is_null(),
        needs: needs.map(|one| text(&one["name"])).collect(),
    }
}

/// Each crate behind those that it needs.
fn in_order(members: &[Member]) -> Vec<&str> {
    let published = || members.iter().filter(|member| member.is_published);
    let mut order: Vec<&str> = Vec::new();
    while let Some(next) = published().find(|member| {
        let is_there = |name: &String| order.contains(&name.as_str());
        !is_there(&member.name) && member.needs.iter().all(is_there)
    }) {
        order.push(&next.name);
    }
    order
}
