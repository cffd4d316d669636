//! Tables that are no user's: conversions ([`convert`]), `--check` ([`check`]), and what allocation
//! costs held against what it must reach (`--shown`, [`shown`]). Without any of these, first writes
//! over NBD by the command's own table, on loop-mounted file systems whose own space is fully
//! written.
//!
//! Needs root for the mounts; it works in a mount namespace of its own and removes the files under
//! its mounts at once, so that whatever ends it also cleans up.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

mod check;
mod convert;
mod report;
mod shown;
mod turns;

use cowslip_testbed::{Place, Recipe};

use crate::{peers, run};

/// Options of `cargo xtask bench`.
#[derive(clap::Args)]
pub struct Args {
    /// Subject of the measurement: random writes over NBD, unless it is `convert` (beside qemu-img
    /// and nbdcopy)
    #[arg(conflicts_with_all = ["check", "shown"])]
    table: Option<Table>,
    /// Measure `check` beside `qemu-img check` instead
    #[arg(long)]
    check: bool,
    /// Hold what allocation costs against what it must reach, by the tables of `cowslip bench`
    #[arg(long, conflicts_with = "check")]
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
    /// MiB of data of each source of `convert`; 1024, or 256 with --quick
    #[arg(long, value_name = "MIB", requires = "table")]
    data_mib: Option<u64>,
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
    /// Cells, or images of `--check`, whose name contains this text
    #[arg(long, value_name = "TEXT")]
    cells: Option<String>,
    /// Where the file systems' images are made; needs about 14 GiB
    #[arg(long)]
    dir: Option<PathBuf>,
    /// The Cowslip binary to measure, rather than building one
    #[arg(long)]
    binary: Option<PathBuf>,
}

impl Args {
    /// Whether a cell or image of this name is asked for.
    fn wants(&self, name: &str) -> bool {
        self.cells.as_ref().is_none_or(|part| name.contains(part))
    }
}

/// Tables that have a name.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Table {
    /// `convert` beside qemu-img and nbdcopy.
    Convert,
}

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
    if args.table == Some(Table::Convert) {
        convert::run(args, &binary, &directory)?;
    } else if args.check {
        check::run(args, &binary, &directory)?;
    } else if args.shown {
        shown::run(args, &binary, &directory)?;
    } else {
        served(args, &binary, &directory)?;
    }
    fs::remove_dir(&directory).map_err(|e| format!("cannot remove {}: {e}", directory.display()))
}

/// First writes over NBD beside both servers of QEMU's: rows for people, and a page for each file
/// system.
fn served(args: &Args, binary: &Path, directory: &Path) -> Result<(), String> {
    let installed = |server: &&str| run::find_program(server).is_some();
    let servers: Vec<&str> = shown::SERVERS.into_iter().filter(installed).collect();
    let peers = if servers.is_empty() {
        "none".to_string()
    } else {
        servers.join(",")
    };
    for filesystem in &args.filesystems {
        let page = report::new_results(&format!("served-{filesystem}"), "html")?;
        let mut command = Command::new(binary);
        command.args(["bench", "served", "--depths=32", "--peers"]);
        command.arg(&peers);
        command.args(shown::of_served(args));
        let repetitions = args.repetitions.unwrap_or(if args.quick { 3 } else { 5 });
        command.arg(format!("--repetitions={repetitions}"));
        command.args(args.cells.as_ref().map(|part| format!("--cells={part}")));
        command
            .arg("--html")
            .arg(&page)
            .args(on(filesystem, directory));
        run::run(&mut command)?;
        println!("results: {}", page.display());
    }
    Ok(())
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
