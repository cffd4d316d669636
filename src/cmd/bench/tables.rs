//! The tables' common part: their options, their places, and who measures what.

use std::path::PathBuf;

use clap::Subcommand;
use cowslip_testbed::{Place, enter_namespace};
use serde_json::json;

use super::cell::{Cell, Contestant, RawFile};
use super::report::Report;
use super::stage::Stage;
use super::{flush, subclusters};
use crate::error::CommandError;
use crate::options::bytes_within;
use crate::output::{self, Program};
use crate::progress::Progress;

/// The file system is so many times as large as the disk: a written raw file, a new image of the
/// same size, and as much again so that it is not nearly full.
const FILESYSTEM_TIMES: u64 = 3;
/// No file system that is smaller, whatever the disk: XFS refuses to be below 300 MiB.
const FILESYSTEM_BYTES_MIN: u64 = 512 << 20;
/// Requests of a depth of one are fewer, because each waits for the last.
const FEWER_AT_DEPTH_ONE: u64 = 8;

/// The tables.
#[derive(Subcommand)]
pub enum Table {
    /// Random first writes: cluster sizes with and without subclusters, empty and on a raw file
    Subclusters(Options),
    /// The same with a flush after every 1, 8 and 32 writes
    Flush(Options),
}

/// What all tables take.
#[derive(clap::Args)]
pub struct Options {
    /// Work in a new directory in this one; repeat it for several file systems
    #[arg(long, value_name = "PATH")]
    dir: Vec<PathBuf>,
    /// Make file systems of these kinds on fully written loop devices, and work there (root): ext4, xfs, btrfs
    #[arg(long = "loop", value_name = "KINDS", value_delimiter = ',')]
    loops: Vec<String>,
    /// Size of the disks
    #[arg(long, value_name = "SIZE", default_value = "4G")]
    size: String,
    /// Requests of a run; an eighth of it at depth 1
    #[arg(long, value_name = "N", default_value_t = 8000)]
    requests: u64,
    /// Runs of each contestant in each cell
    #[arg(long, value_name = "N", default_value_t = 5)]
    repetitions: usize,
    /// Requests in flight
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "32,1"
    )]
    depths: Vec<u64>,
    /// Allocation policies, each a column: auto, contiguous, sparse
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "auto,sparse"
    )]
    policies: Vec<String>,
    /// Who writes the raw files that images are compared with: cowslip, qemu-img
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "cowslip"
    )]
    yardsticks: Vec<String>,
    /// Only the cells whose name contains this text
    #[arg(long, value_name = "TEXT")]
    cells: Option<String>,
    /// One run of each cell, few requests on a small disk: a first look
    #[arg(long, conflicts_with_all = ["size", "requests", "repetitions"])]
    quick: bool,
    /// Count system calls too, in one more run of each under strace
    #[arg(long)]
    system_calls: bool,
    /// Leave the last image of each contestant there
    #[arg(long)]
    keep: bool,
    /// Print the results as JSON
    #[arg(long)]
    json: bool,
}

/// The sizes of a run, and what else cells have in common.
#[derive(Clone)]
pub struct Scale {
    /// Size of the disks in bytes.
    pub disk_bytes: u64,
    /// Requests of a run.
    pub requests: u64,
    /// Requests in flight, by cell.
    pub depths: Vec<u64>,
    /// Runs of each contestant in each cell.
    pub repetitions: usize,
    /// Columns of ours.
    pub policies: Vec<&'static str>,
    /// Columns of raw files.
    pub yardsticks: Vec<fn(RawFile) -> Contestant>,
    /// Whether they are counted.
    pub system_calls: bool,
    /// Whether images stay.
    pub keep: bool,
}

impl Scale {
    fn new(options: &Options) -> Result<Scale, CommandError> {
        let (disk_bytes, requests, repetitions) = if options.quick {
            (1 << 30, 2000, 1)
        } else {
            let size = bytes_within("size", &options.size, 1 << 20..=1 << 43)?;
            (size, options.requests, options.repetitions)
        };
        if requests == 0 || repetitions == 0 || options.depths.contains(&0) {
            let text = "--requests, --repetitions and --depths expect numbers above 0";
            return Err(CommandError::new(text));
        }
        let policies = options.policies.iter().map(|name| policy(name));
        let yardsticks = options.yardsticks.iter().map(|name| yardstick(name));
        Ok(Scale {
            disk_bytes,
            requests,
            depths: options.depths.clone(),
            repetitions,
            policies: policies.collect::<Result<_, _>>()?,
            yardsticks: yardsticks.collect::<Result<_, _>>()?,
            system_calls: options.system_calls,
            keep: options.keep,
        })
    }

    /// Requests of a run at this depth: each place is visited once, so no more than there are.
    pub fn requests_at(&self, depth: u64, request_bytes: u64) -> u64 {
        let wanted = match depth {
            1 => self.requests / FEWER_AT_DEPTH_ONE,
            _ => self.requests,
        };
        wanted.clamp(1, self.disk_bytes / request_bytes)
    }

    /// Ours, QEMU's, and raw files of these states.
    pub fn contestants(&self, raw: &[RawFile]) -> Vec<Contestant> {
        let ours = self.policies.iter().map(|p| Contestant::Cowslip(p));
        let yardsticks = self.yardsticks.iter();
        let raw = yardsticks.flat_map(|yardstick| raw.iter().map(|state| yardstick(*state)));
        ours.chain([Contestant::QemuImg]).chain(raw).collect()
    }
}

/// A policy that there is.
fn policy(name: &str) -> Result<&'static str, CommandError> {
    let known = ["auto", "contiguous", "sparse"];
    let found = known.into_iter().find(|policy| *policy == name);
    found.ok_or_else(|| {
        let text = format!("--policies expects auto, contiguous and sparse, not '{name}'");
        CommandError::new(text)
    })
}

/// Who drives a raw file, by name.
fn yardstick(name: &str) -> Result<fn(RawFile) -> Contestant, CommandError> {
    match name {
        "cowslip" => Ok(Contestant::Raw),
        "qemu-img" => Ok(Contestant::QemuRaw),
        _ => Err(CommandError::new(format!(
            "--yardsticks expects cowslip and qemu-img, not '{name}'"
        ))),
    }
}

impl Table {
    fn options(&self) -> &Options {
        match self {
            Table::Subclusters(options) | Table::Flush(options) => options,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Table::Subclusters(_) => "subclusters",
            Table::Flush(_) => "flush",
        }
    }

    fn cells(&self, scale: &Scale) -> Vec<Cell> {
        match self {
            Table::Subclusters(_) => subclusters::cells(scale),
            Table::Flush(_) => flush::cells(scale),
        }
    }
}

/// Makes a table; the exit code.
///
/// # Errors
/// A place cannot be had, a run fails, or an image is not sound.
pub fn run(table: &Table, program: &Program) -> Result<u8, CommandError> {
    let options = table.options();
    let scale = Scale::new(options)?;
    for kind in &options.loops {
        if !["ext4", "xfs", "btrfs"].contains(&kind.as_str()) {
            let text = format!("--loop expects ext4, xfs or btrfs, not '{kind}'");
            return Err(CommandError::new(text));
        }
    }
    if !options.loops.is_empty() {
        if options.keep {
            let text =
                "--keep keeps nothing on file systems that vanish with the command; use --dir";
            return Err(CommandError::new(text));
        }
        if let Some(status) = enter_namespace().map_err(CommandError::new)? {
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            return Ok(code.unwrap_or(1));
        }
    }
    let mut report = Report {
        conditions: conditions(table, &scale),
        ..Report::default()
    };
    let cells = table.cells(&scale).into_iter();
    let cells: Vec<Cell> = cells
        .filter(|cell| {
            let wanted = options.cells.as_ref();
            wanted.is_none_or(|part| cell.name().contains(part))
        })
        .collect();
    if cells.is_empty() {
        return Err(CommandError::new(
            "No cell has a name with the text of --cells",
        ));
    }
    for place in Places::new(options, &scale) {
        measure_at(table, &place?, (&scale, &cells), &mut report)?;
    }
    match options.json {
        true => output::print_json(&report.json()),
        false => output::print(&report.text()),
    }
    if report.rows.iter().any(|row| row.is_outlier) {
        program.warn("cells that are marked are below half of both their neighbours");
    }
    Ok(0)
}

fn measure_at(
    table: &Table,
    place: &Place,
    (scale, cells): (&Scale, &[Cell]),
    report: &mut Report,
) -> Result<(), CommandError> {
    let contestants = cells.iter().map(|cell| cell.contestants.len());
    let runs = contestants.sum::<usize>() * scale.repetitions;
    let progress = Progress::of(runs as u64);
    let stage = Stage::new(place, scale, &progress)?;
    let first = report.rows.len();
    for cell in cells {
        report.rows.extend(stage.measure(cell)?);
    }
    if let Table::Subclusters(_) = table {
        subclusters::measure_outliers_again(&stage, cells, &mut report.rows[first..])?;
        let note = subclusters::by_unit(&report.rows[first..]);
        report.notes.extend(note);
    }
    if let Some(places) = report.conditions["places"].as_array_mut() {
        places.push(stage.conditions());
    }
    Ok(())
}

fn conditions(table: &Table, scale: &Scale) -> serde_json::Value {
    let read = |path: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.trim().to_string()
    };
    json!({
        "table": table.name(),
        "disk-bytes": scale.disk_bytes,
        "requests": scale.requests,
        "repetitions": scale.repetitions,
        "kernel": read("/proc/sys/kernel/osrelease"),
        "processors": std::thread::available_parallelism().map_or(0, usize::from),
        "load-average-before": read("/proc/loadavg"),
        "places": [],
    })
}

/// The places of a run, each made when it is its turn: file systems take space.
struct Places<'a> {
    options: &'a Options,
    filesystem_bytes: u64,
    next: usize,
}

impl<'a> Places<'a> {
    fn new(options: &'a Options, scale: &Scale) -> Places<'a> {
        Places {
            options,
            filesystem_bytes: (scale.disk_bytes * FILESYSTEM_TIMES).max(FILESYSTEM_BYTES_MIN),
            next: 0,
        }
    }

    fn make(&self, index: usize) -> Option<Result<Place, String>> {
        let temporary = std::env::temp_dir();
        let dirs = &self.options.dir;
        if let Some(kind) = self.options.loops.get(index) {
            let directory = dirs.first().unwrap_or(&temporary);
            let progress = Progress::of(1);
            progress.say(&format!("making {kind} on a fully written file"));
            return Some(Place::mount_new(kind, directory, self.filesystem_bytes));
        }
        if !self.options.loops.is_empty() {
            return None;
        }
        match dirs.get(index) {
            Some(dir) => Some(Place::here(&dir.display().to_string(), dir)),
            None if index == 0 => Some(Place::here("here", &temporary)),
            None => None,
        }
        .map(|place| {
            place.map(|place| match self.options.keep {
                true => place.keep(),
                false => place,
            })
        })
    }
}

impl Iterator for Places<'_> {
    type Item = Result<Place, CommandError>;

    fn next(&mut self) -> Option<Result<Place, CommandError>> {
        let place = self.make(self.next)?;
        self.next += 1;
        Some(place.map_err(CommandError::new))
    }
}
