//! `cargo xtask beside`: our engine and others written in Rust, in one process, on a loop-mounted
//! file system. The program is `bench/beside`, which is no part of the workspace.

use std::env;
use std::process::Command;

use crate::run;
use crate::scratch_place::PlaceArgs;

/// Options of `cargo xtask beside`.
#[derive(clap::Args)]
pub struct Args {
    /// Through the page cache, with the engine that has no direct I/O
    #[arg(long)]
    cached: bool,
    /// Runs of each engine in each row
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Only rows whose name contains this text
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Builds the program, makes the file system, and prints the table.
pub fn run(args: &Args) -> Result<(), String> {
    let mut build = run::cargo();
    build.args(["build", "--release", "--manifest-path"]);
    run::run(build.arg(run::root().join("bench/beside/Cargo.toml")))?;
    let target = match env::var_os("CARGO_TARGET_DIR") {
        Some(directory) => run::root().join(directory),
        None => run::root().join("bench/beside/target"),
    };
    let program = target.join("release/beside");
    args.place.measure(("beside", target), |directory| {
        let mut command = Command::new(&program);
        command.arg(format!("--dir={}", directory.display()));
        command.arg(format!("--rounds={}", args.rounds));
        command.args(args.cached.then_some("--cached"));
        command.args(args.only.as_ref().map(|only| format!("--only={only}")));
        run::run(&mut command)
    })
}
