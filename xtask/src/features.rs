//! `cargo xtask features`: packages with none of their features, with each alone, and with all,
//! which the gate does not build; with an older compiler too.

use std::process::Command;

use serde_json::Value;

use crate::run;

/// Options of `cargo xtask features`.
#[derive(clap::Args)]
pub struct Args {
    /// Only these packages; all of the workspace that have features if left out
    #[arg(short, long, value_name = "NAME")]
    package: Vec<String>,
    /// A toolchain of rustup, such as the oldest that is supported, `rust-version` of Cargo.toml
    #[arg(long, value_name = "VERSION")]
    toolchain: Option<String>,
    /// Print the command lines only
    #[arg(long)]
    dry_run: bool,
}

/// Checks each state; all of them, before it says which failed.
pub fn run(args: &Args) -> Result<(), String> {
    let mut failed = Vec::new();
    for (package, features) in packages(args)? {
        for chosen in states(&features) {
            let mut command = cargo(args);
            command.args(["check", "--locked", "--package", &package]);
            command.args(&chosen);
            println!("{}", run::describe(&command));
            if !args.dry_run && run::run(&mut command).is_err() {
                failed.push(format!("{package} {}", chosen.join(" ")));
            }
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("these do not build:\n  {}", failed.join("\n  "))),
    }
}

/// Options of cargo for each state of a package: no feature, the defaults, each alone, all.
fn states(features: &[String]) -> Vec<Vec<String>> {
    let mut states = vec![vec!["--no-default-features".to_string()], Vec::new()];
    states.extend(features.iter().map(|feature| {
        let alone = format!("--features={feature}");
        vec!["--no-default-features".to_string(), alone]
    }));
    states.push(vec!["--all-features".to_string()]);
    states
}

/// Packages to check, with their features.
fn packages(args: &Args) -> Result<Vec<(String, Vec<String>)>, String> {
    let mut metadata = run::cargo();
    metadata.args(["metadata", "--no-deps", "--locked", "--format-version=1"]);
    let metadata: Value =
        serde_json::from_str(&run::output(&mut metadata)?).map_err(|e| e.to_string())?;
    let all = metadata["packages"].as_array().into_iter().flatten();
    let mut packages: Vec<(String, Vec<String>)> = all.map(features_of).collect();
    if let Some(unknown) = args
        .package
        .iter()
        .find(|name| packages.iter().all(|(package, _)| package != *name))
    {
        return Err(format!("there is no package {unknown}"));
    }
    packages.retain(|(name, features)| match args.package.is_empty() {
        true => !features.is_empty(),
        false => args.package.contains(name),
    });
    Ok(packages)
}

fn features_of(package: &Value) -> (String, Vec<String>) {
    let name = package["name"].as_str().unwrap_or_default().to_string();
    let features = package["features"].as_object().into_iter().flatten();
    let names = features.map(|(feature, _)| feature.clone());
    (name, names.filter(|feature| feature != "default").collect())
}

fn cargo(args: &Args) -> Command {
    let Some(toolchain) = &args.toolchain else {
        return run::cargo();
    };
    let mut command = Command::new("rustup");
    command.args(["run", toolchain, "cargo"]);
    command.current_dir(run::root());
    // It has a compiler of its own, which this process's is not.
    command.env_remove("RUSTC").env_remove("RUSTUP_TOOLCHAIN");
    command.env_remove("CARGO");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_feature_has_a_state_alone() {
        let names = ["a", "b"].map(str::to_string);
        let states: Vec<String> = states(&names).iter().map(|words| words.join(" ")).collect();
        let expected = [
            "--no-default-features",
            "",
            "--no-default-features --features=a",
            "--no-default-features --features=b",
            "--all-features",
        ];
        assert_eq!(states, expected);
    }
}
