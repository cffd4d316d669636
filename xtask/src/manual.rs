//! `cargo xtask manual`: the manual as static pages, with the reference that the command makes.

use std::path::PathBuf;
use std::{env, fs};

use cowslip_manual::{Manual, broken};

use crate::run;

/// Options of `cargo xtask manual`.
#[derive(clap::Args)]
pub struct Args {
    /// Directory for the pages; target/manual if left out
    #[arg(long)]
    output: Option<PathBuf>,
}

/// Writes the pages; fails if a link is broken.
pub fn run(args: &Args) -> Result<(), String> {
    let target = env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let target = run::root().join(target);
    let reference = target.join("manual-reference");
    // Pages of verbs that there are no more.
    if reference.exists() {
        fs::remove_dir_all(&reference).map_err(|e| format!("{}: {e}", reference.display()))?;
    }
    fs::create_dir_all(&reference).map_err(|e| format!("{}: {e}", reference.display()))?;
    let mut command = run::cargo();
    command.args([
        "run",
        "--quiet",
        "--package",
        "cowslip-cli",
        "--bin",
        "cowslip",
    ]);
    command.args(["--", "manual", "--markdown"]).arg(&reference);
    run::run(&mut command)?;
    let output = args.output.clone().unwrap_or_else(|| target.join("manual"));
    Manual::load(&run::root(), &reference)?.write(&output)?;
    let broken = broken(&output)?;
    if !broken.is_empty() {
        return Err(format!(
            "links that lead nowhere:\n  {}",
            broken.join("\n  ")
        ));
    }
    println!("{}", output.join("index.html").display());
    Ok(())
}
