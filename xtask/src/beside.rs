//! `cargo xtask beside`: our engine and others written in Rust, in one process, on a loop-mounted
//! file system. The program is `bench/beside`, which is no part of the workspace.

use std::env;
use std::fs;
use std::path::PathBuf;

use cowslip_testbed::{Place, Recipe, enter_namespace};

use crate::run;

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
    /// The file system that is made and mounted (needs root), or `here` for the directory as it is
    #[arg(long, default_value = "ext4")]
    filesystem: String,
    /// Directory of the images, or of the file system's image; needs about 4 GiB
    #[arg(long)]
    dir: Option<PathBuf>,
}

/// Bytes of the file system: both images, with whole clusters written.
const PLACE_BYTES: u64 = 3 << 30;

/// Builds the program, makes the file system, and prints the table.
pub fn run(args: &Args) -> Result<(), String> {
    if args.filesystem != "here" {
        enter_namespace()?;
    }
    let mut build = run::cargo();
    build.args(["build", "--release", "--manifest-path"]);
    run::run(build.arg(run::root().join("bench/beside/Cargo.toml")))?;
    let target = match env::var_os("CARGO_TARGET_DIR") {
        Some(directory) => run::root().join(directory),
        None => run::root().join("bench/beside/target"),
    };
    let parent = args.dir.clone().unwrap_or_else(|| target.clone());
    let directory = parent.join(format!("beside-{}", std::process::id()));
    fs::create_dir_all(&directory).map_err(|e| format!("{}: {e}", directory.display()))?;
    let place = match args.filesystem.as_str() {
        "here" => Place::here("here", &directory)?,
        name => Place::mount_new(&Recipe::parse(name)?, &directory, PLACE_BYTES)?,
    };
    let mut command = std::process::Command::new(target.join("release/beside"));
    command.arg(format!("--dir={}", place.directory.display()));
    command.arg(format!("--rounds={}", args.rounds));
    command.args(args.cached.then_some("--cached"));
    command.args(args.only.as_ref().map(|only| format!("--only={only}")));
    let measured = run::run(&mut command);
    drop(place);
    let removed = fs::remove_dir_all(&directory);
    measured.and(removed.map_err(|e| format!("cannot remove {}: {e}", directory.display())))
}
