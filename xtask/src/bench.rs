//! The side-by-side table: Cowslip and QEMU's two NBD servers in turn, the same client, the same
//! operations, on loop-mounted file systems whose own space is fully written.
//!
//! What is equal: the number of operations (not the time: a small image is soon full and then
//! measures overwrites), their order and places (a fixed seed, each block once), the client, the
//! options of the image, O_DIRECT, io_uring. The order of the servers rotates with each repetition.
//! Each run starts on a fresh image, ends with a flush, and its image is checked by qemu-img.
//! `convert` measures conversions instead ([`convert`]), `--check` checks ([`check`]), `--shown` what allocation
//! costs ([`shown`]).
//!
//! Needs root for the mounts; it works in a mount namespace of its own and removes the files under
//! its mounts at once, so that whatever ends it also cleans up.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

mod cell;
mod check;
mod convert;
mod load;
mod report;
mod server;
mod shown;
mod usage;

use cowslip_testbed::{Place, Recipe, populate};

use crate::{peers, run};
use cell::{Backing, Cell, Creator, Subclusters};
use server::{Kind, Server};

/// Options of `cargo xtask bench`.
#[derive(clap::Args)]
pub struct Args {
    /// What is measured: random writes over NBD, unless it is `convert` (beside qemu-img and nbdcopy)
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
    /// Only these of --shown: killed, nbd, subclusters, flush, steady, discard, metadata
    #[arg(long, value_name = "LIST", value_delimiter = ',', requires = "shown")]
    tables: Vec<String>,
    /// File systems to mount; `here` uses the work directory as it is
    #[arg(long, value_delimiter = ',', default_value = "ext4,xfs")]
    filesystems: Vec<String>,
    /// Cells, or images of `--check`, whose name contains this text
    #[arg(long, value_name = "TEXT")]
    cells: Option<String>,
    /// Also an overlay on a populated qcow2 image
    #[arg(long)]
    qcow2_backing: bool,
    /// Where the file systems' images are made; needs about 10 GiB
    #[arg(long)]
    dir: Option<PathBuf>,
    /// The Cowslip binary to measure, rather than building one
    #[arg(long)]
    binary: Option<PathBuf>,
}

/// Tables that have a name.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Table {
    /// `convert` beside qemu-img and nbdcopy.
    Convert,
}

/// The sizes of a run.
#[derive(Clone, Copy)]
pub struct Scale {
    /// Size of the guest's disk in bytes.
    pub disk_bytes: u64,
    /// Size of the file system under the images in bytes.
    pub filesystem_bytes: u64,
    /// Operations of each run.
    pub operations: u64,
    /// Repetitions.
    pub repetitions: usize,
    /// Requests in flight.
    pub depth: u64,
}

const GIB: u64 = 1 << 30;

impl Scale {
    fn new(args: &Args) -> Scale {
        let (disk, filesystem, operations, repetitions) = if args.quick {
            (GIB, 3 * GIB, 5_000, 3)
        } else {
            (4 * GIB, 8 * GIB, 20_000, 5)
        };
        Scale {
            disk_bytes: disk,
            filesystem_bytes: filesystem,
            operations: args.operations.unwrap_or(operations),
            repetitions: args.repetitions.unwrap_or(repetitions).max(1),
            depth: 32,
        }
    }
}

/// One run of one server in one cell.
#[derive(Clone, serde::Serialize)]
pub struct Measurement {
    /// Operations a second.
    pub iops: f64,
    /// CPU time of the server a request, user and system, in microseconds.
    pub cpu_us: f64,
    /// Mean and 99th percentile of completion latency in microseconds.
    pub latency_us: (f64, f64),
    /// From the request to end to the server's end, in milliseconds: what the flush left to do.
    pub close_ms: f64,
    /// Bytes of host storage that the image occupies afterwards.
    pub host_bytes: u64,
    /// Extents of the image's file on the host.
    pub host_extents: u64,
}

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
        random_writes(args, &binary, &directory)?;
    }
    fs::remove_dir(&directory).map_err(|e| format!("cannot remove {}: {e}", directory.display()))
}

/// Measures random writes in all cells.
fn random_writes(args: &Args, binary: &Path, directory: &Path) -> Result<(), String> {
    let scale = Scale::new(args);
    let servers = Kind::installed(binary);
    let mut report = report::Report::new(&scale, &servers);
    for filesystem in &args.filesystems {
        let place = place(filesystem, directory, scale.filesystem_bytes)?;
        for cell in cell::all(args.qcow2_backing) {
            if args
                .cells
                .as_ref()
                .is_some_and(|part| !cell.name_at(scale.depth).contains(part))
            {
                continue;
            }
            let bench = CellBench {
                place: &place,
                cell: &cell,
                scale: &scale,
                binary,
            };
            bench.run(&servers, &mut report)?;
            report.print_last();
        }
    }
    report.print();
    let written = report.write()?;
    println!("results: {}", written.display());
    Ok(())
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

/// One cell on one file system.
struct CellBench<'a> {
    place: &'a Place,
    cell: &'a Cell,
    scale: &'a Scale,
    binary: &'a Path,
}

impl CellBench<'_> {
    fn run(&self, servers: &[Kind], report: &mut report::Report) -> Result<(), String> {
        self.prepare_backing()?;
        let name = self.cell.name_at(self.scale.depth);
        report.begin(&self.place.name, &name);
        for repetition in 0..self.scale.repetitions {
            let mut order = servers.to_vec();
            order.rotate_left(repetition % servers.len());
            for kind in order {
                let measurement = self.measure(kind)?;
                report.add(kind, measurement);
            }
        }
        self.remove_backing()
    }

    fn image(&self) -> PathBuf {
        self.place.directory.join("image.qcow2")
    }

    fn backing(&self) -> PathBuf {
        self.place.directory.join("backing")
    }

    fn prepare_backing(&self) -> Result<(), String> {
        match self.cell.backing {
            Backing::None => Ok(()),
            Backing::Raw => populate(&self.backing(), self.scale.disk_bytes),
            Backing::Qcow2 => {
                let raw = self.place.directory.join("source");
                populate(&raw, self.scale.disk_bytes / 2)?;
                let mut convert = Command::new("qemu-img");
                convert.args(["convert", "-f", "raw", "-O", "qcow2", "-t", "none"]);
                run::output(convert.arg(&raw).arg(self.backing()))?;
                remove(&raw)?;
                let mut resize = Command::new("qemu-img");
                resize
                    .args(["resize", "-q", "-f", "qcow2"])
                    .arg(self.backing());
                run::output(resize.arg(self.scale.disk_bytes.to_string())).map(drop)
            }
        }
    }

    fn remove_backing(&self) -> Result<(), String> {
        match self.cell.backing {
            Backing::None => Ok(()),
            Backing::Raw | Backing::Qcow2 => remove(&self.backing()),
        }
    }

    fn create(&self) -> Result<(), String> {
        let mut options = "cluster_size=65536".to_string();
        options.push_str(match self.cell.subclusters {
            Subclusters::On => ",extended_l2=on",
            Subclusters::Off => ",extended_l2=off",
        });
        let mut command = match self.cell.creator {
            Creator::QemuImg => Command::new("qemu-img"),
            Creator::Cowslip => Command::new(self.binary),
        };
        command.args(["create", "-q", "-f", "qcow2", "-o", &options]);
        match self.cell.backing {
            Backing::None => {}
            Backing::Raw => drop(command.args(["-F", "raw", "-b"]).arg(self.backing())),
            Backing::Qcow2 => drop(command.args(["-F", "qcow2", "-b"]).arg(self.backing())),
        }
        command
            .arg(self.image())
            .arg(self.scale.disk_bytes.to_string());
        run::output(&mut command).map(drop)
    }

    fn measure(&self, kind: Kind) -> Result<Measurement, String> {
        self.create()?;
        run::run(&mut Command::new("sync"))?;
        let socket = self.place.directory.join("socket");
        let server = Server::start(kind, self.binary, &self.image(), &socket)?;
        let cpu_before = server.cpu_seconds()?;
        let load = load::random_writes(&socket, self.scale)?;
        let cpu = server.cpu_seconds()? - cpu_before;
        let closing = Instant::now();
        server.stop()?;
        let close_ms = closing.elapsed().as_secs_f64() * 1e3;
        self.check(kind)?;
        let (host_bytes, host_extents) = usage::of(&self.image())?;
        remove(&self.image())?;
        #[expect(
            clippy::cast_precision_loss,
            reason = "a count of operations, for a mean"
        )]
        let operations = load.operations as f64;
        Ok(Measurement {
            iops: load.iops,
            cpu_us: cpu * 1e6 / operations,
            latency_us: load.latency_us,
            close_ms,
            host_bytes,
            host_extents,
        })
    }

    /// A figure counts only if the image survived.
    fn check(&self, kind: Kind) -> Result<(), String> {
        let mut check = Command::new("qemu-img");
        run::output(check.args(["check", "-f", "qcow2"]).arg(self.image()))
            .map(drop)
            .map_err(|e| format!("{} left a bad image: {e}", kind.name()))
    }
}

fn remove(path: &Path) -> Result<(), String> {
    fs::remove_file(path).map_err(|e| format!("cannot remove {}: {e}", path.display()))
}
