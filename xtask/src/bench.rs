//! The command's own tables (`cowslip bench TABLE`) on loop-mounted file systems whose own space is
//! fully written; and what allocation costs held against what it must reach (`--shown`, [`shown`]).
//!
//! Needs root for the mounts; it works in a mount namespace of its own and removes the files under
//! its mounts at once, so that whatever ends it also cleans up.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

mod report;
mod shown;

use cowslip_testbed::{Place, Recipe};

use crate::{peers, run};

/// Options of `cargo xtask bench`.
#[derive(clap::Args)]
pub struct Args {
    /// The table, such as check or convert
    #[arg(conflicts_with = "shown", default_value = SERVED)]
    table: String,
    /// Hold what allocation costs against what it must reach, by the tables of `cowslip bench`
    #[arg(long)]
    shown: bool,
    /// Fewer operations on a smaller disk, three repetitions
    #[arg(long)]
    quick: bool,
    /// Operations of each run over NBD
    #[arg(long)]
    operations: Option<u64>,
    /// Requests of each run in the tables of --shown
    #[arg(long, value_name = "N", requires = "shown")]
    requests: Option<u64>,
    /// Repetitions of each cell with each server or contestant
    #[arg(long, value_name = "N")]
    repetitions: Option<usize>,
    /// Only these of --shown: killed, served, vhost-user, fuse, threads, subclusters, flush,
    /// steady, discard, metadata
    #[arg(long, value_name = "LIST", value_delimiter = ',', requires = "shown")]
    tables: Vec<String>,
    /// File systems to mount; `here` uses the work directory as it is
    #[arg(long, value_delimiter = ',', default_value = "ext4,xfs")]
    filesystems: Vec<String>,
    /// Cells whose name contains this text
    #[arg(long, value_name = "TEXT")]
    cells: Option<String>,
    /// Where the file systems' images are made; needs about 14 GiB
    #[arg(long)]
    dir: Option<PathBuf>,
    /// The Cowslip binary to measure, rather than building one
    #[arg(long)]
    binary: Option<PathBuf>,
}

/// First writes over NBD.
const SERVED: &str = "served";
const GIB: u64 = 1 << 30;

/// Measures what the arguments ask for and writes the table and the results.
pub fn run(args: &Args) -> Result<(), String> {
    let missing = peers::ensure();
    for needed in ["fio", "qemu-img"] {
        if missing.contains(&needed) {
            return Err(format!("{needed} is needed for the bench"));
        }
    }
    let needs_mount = args.filesystems.iter().any(|f| f != "here");
    if needs_mount {
        cowslip_testbed::enter_namespace()?;
    }
    let binary = match &args.binary {
        Some(binary) => binary.clone(),
        None => build()?,
    };
    let directory = work_directory(args)?;
    match args.shown {
        true => shown::run(args, &binary, &directory)?,
        false => table(args, &binary, &directory)?,
    }
    fs::remove_dir(&directory).map_err(|e| format!("cannot remove {}: {e}", directory.display()))
}

/// A table on each file system: rows for people, and a page.
fn table(args: &Args, binary: &Path, directory: &Path) -> Result<(), String> {
    for filesystem in &args.filesystems {
        let page = report::new_results(&format!("{}-{filesystem}", args.table), "html")?;
        let mut command = Command::new(binary);
        command.args(["bench", &args.table]);
        let repetitions = args.repetitions.unwrap_or(if args.quick { 3 } else { 5 });
        if args.table == SERVED {
            command.args(["--depths=32", "--peers", &servers()]);
            command.args(shown::of_served(args));
            command.arg(format!("--repetitions={repetitions}"));
        } else if args.quick {
            command.arg("--quick");
        } else {
            command.arg(format!("--repetitions={repetitions}"));
        }
        command.args(args.cells.as_ref().map(|part| format!("--cells={part}")));
        command.arg("--html").arg(&page);
        run::run(command.args(on(filesystem, directory)))?;
        println!("results: {}", page.display());
    }
    Ok(())
}

/// Both servers of QEMU's, as far as they are installed.
fn servers() -> String {
    let servers = shown::SERVERS.into_iter();
    let installed: Vec<&str> = servers
        .filter(|name| run::find_program(name).is_some())
        .collect();
    match installed.is_empty() {
        true => "none".to_string(),
        false => installed.join(","),
    }
}

/// Where a table of the command's is measured: a new file system, or the directory as it is for
/// `here`.
fn on(filesystem: &str, directory: &Path) -> Vec<OsString> {
    let mut words = vec!["--dir".into(), directory.into()];
    if filesystem != "here" {
        words.push(format!("--loop={filesystem}").into());
    }
    words
}

/// A new file system, or the directory as it is for `here`.
fn place(filesystem: &str, directory: &Path, bytes: u64) -> Result<Place, String> {
    if filesystem == "here" {
        return Place::here(filesystem, directory);
    }
    println!("making {filesystem} on {} GiB, fully written", bytes >> 30);
    Place::mount_new(&Recipe::parse(filesystem)?, directory, bytes)
}

/// Builds the command and returns where it is.
fn build() -> Result<PathBuf, String> {
    println!("building the release binary");
    let mut command = run::cargo();
    command.args([
        "build",
        "--release",
        "--package",
        "cowslip-cli",
        "--message-format=json",
    ]);
    let messages = run::output(&mut command)?;
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| message["executable"].as_str().map(PathBuf::from))
        .next_back()
        .ok_or_else(|| "cargo built no executable".to_string())
}

fn work_directory(args: &Args) -> Result<PathBuf, String> {
    let parent = args
        .dir
        .clone()
        .unwrap_or_else(|| run::root().join("target"));
    let directory = parent.join(format!("bench-{}", std::process::id()));
    fs::create_dir_all(&directory)
        .map_err(|e| format!("cannot make {}: {e}", directory.display()))?;
    Ok(directory)
}

fn remove(path: &Path) -> Result<(), String> {
    fs::remove_file(path).map_err(|e| format!("cannot remove {}: {e}", path.display()))
}
