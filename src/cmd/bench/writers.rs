//! `bench writers`: files that grow side by side in one directory, and how many pieces they end up in.
//!
//! `cell.rs` says what is measured, `stream.rs` writes raw files, `space.rs` only allocates, `measure.rs` makes a run and looks at its files,
//! `table.rs` puts it in words. [`mod@model`] simulates what no machine here holds. The story is in docs/writers.md.

use std::path::{Path, PathBuf};

use cowslip_testbed::{Place, Recipe, enter_namespace};
use serde_json::json;

use crate::cmd::demo::own_path;
use crate::error::CommandError;
use crate::interrupt::{PrintedOnInterrupt, RemovedOnInterrupt};
use crate::options::bytes_within;
use crate::output;
use crate::progress::Progress;

mod cell;
mod measure;
mod model;
mod space;
mod stream;
mod table;

use cell::Cell;
use measure::Bench;
use table::{Layout, Row};

/// File systems are so many times as large as what is written: it is to fit into one allocation group of XFS, of
/// which there are four, and images and space ahead are to have room.
const FILESYSTEM_TIMES: u64 = 6;

/// Command line of `bench writers`.
#[derive(clap::Args)]
pub struct Args {
    /// Work in a new directory in this one; repeat it for several file systems
    #[arg(long, value_name = "PATH")]
    dir: Vec<PathBuf>,
    /// Make file systems of these kinds on fully written loop devices, and work there (root): ext4, xfs, btrfs;
    /// xfs:allocsize=64k is mounted with that option
    #[arg(long = "loop", value_name = "KINDS", value_delimiter = ',')]
    loops: Vec<String>,
    /// What the writers of a cell write together
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    size: String,
    /// Runs of each cell
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: u64,
    /// Only the cells whose name contains this text
    #[arg(long, value_name = "TEXT")]
    cells: Option<String>,
    /// Print the names of the cells, and measure nothing
    #[arg(long, conflicts_with = "json")]
    list: bool,
    /// Simulate instead: sizes that no machine here holds, several rules; with the error of the model
    #[arg(long, conflicts_with_all = ["dir", "loops", "cells", "list"])]
    model: bool,
    /// Fit the model to the rows of this file, as --json has printed them, instead of those that it comes with
    #[arg(long, value_name = "FILE", requires = "model")]
    fit: Option<PathBuf>,
    /// Allocate what 4, 16 and 64 writers of 64 GiB would, on sparse file systems of 15 TiB, and write nothing
    #[arg(long, conflicts_with_all = ["size", "model"], requires = "loops")]
    space: bool,
    /// Print the results as JSON, at the end
    #[arg(long)]
    json: bool,
}

/// Measures, or simulates.
///
/// # Errors
/// A place cannot be had, or a run fails.
pub fn run(args: &Args) -> Result<(), CommandError> {
    match args.model {
        true => model::run(args.fit.as_deref(), args.json),
        false => measured(args),
    }
}

fn measured(args: &Args) -> Result<(), CommandError> {
    let part = args.cells.as_deref().unwrap_or_default();
    let mut cells = match args.space {
        true => cell::of_space(),
        false => cell::all(),
    };
    cells.retain(|cell| cell.name().contains(part));
    if cells.is_empty() {
        let text = "No cell has a name with the text of --cells";
        return Err(CommandError::new(text));
    }
    if args.list {
        let names = cells.iter().map(|cell| cell.name() + "\n");
        output::print(&names.collect::<String>());
        return Ok(());
    }
    if args.runs == 0 {
        return Err(CommandError::new("--runs expects a number above 0"));
    }
    let bytes = match args.space {
        true => space::FILE_BYTES,
        false => bytes_within("size", &args.size, 64 << 20..=1 << 42)?,
    };
    let recipes = args.loops.iter().map(|text| Recipe::parse(text));
    let recipes: Result<Vec<Recipe>, String> = recipes.collect();
    let recipes = recipes.map_err(CommandError::new)?;
    if !recipes.is_empty() {
        enter_namespace().map_err(CommandError::new)?;
    }
    let mut sheet = Sheet::new(args, bytes, (&recipes, &cells));
    let outcome = places(args, &recipes, bytes)
        .try_for_each(|place| measure_at(&place?, args, (bytes, &cells), &mut sheet));
    match &outcome {
        Ok(()) => sheet.finish(End::Complete),
        Err(error) => sheet.finish(End::Failed(&error.to_string())),
    }
    outcome
}

/// Each made when it is its turn: file systems take space.
fn places<'a>(
    args: &'a Args,
    recipes: &'a [Recipe],
    bytes: u64,
) -> impl Iterator<Item = Result<Place, CommandError>> + 'a {
    let temporary = std::env::temp_dir();
    let count = match recipes.len() {
        0 => args.dir.len().max(1),
        count => count,
    };
    (0..count).map(move |index| {
        let place = match (recipes.get(index), args.dir.get(index)) {
            (Some(recipe), _) => {
                let progress = Progress::of(1);
                progress.say(&format!("making {} on a fully written file", recipe.name));
                let parent = args
                    .dir
                    .first()
                    .map_or(temporary.as_path(), PathBuf::as_path);
                let size = (bytes * FILESYSTEM_TIMES).max(1 << 30);
                match args.space {
                    true => Place::mount_sparse(recipe, parent, space::FILESYSTEM_BYTES),
                    false => Place::mount_new(recipe, parent, size),
                }
            }
            (None, Some(dir)) => Place::here(&dir.display().to_string(), dir),
            (None, None) => Place::here("here", &temporary),
        };
        place.map_err(CommandError::new)
    })
}

fn measure_at(
    place: &Place,
    args: &Args,
    (bytes, cells): (u64, &[Cell]),
    sheet: &mut Sheet,
) -> Result<(), CommandError> {
    let _removed = RemovedOnInterrupt::new(&place.directory);
    let progress = Progress::of(cells.len() as u64 * args.runs);
    let cowslip = own_path()?;
    let bench = Bench {
        directory: Path::new(&place.directory),
        cowslip: &cowslip,
        bytes,
    };
    for cell in cells {
        let name = cell.name();
        if !bench.can(cell) {
            sheet.note(format!(
                "{} has no {name}: it takes no extent size hint",
                place.name
            ));
            progress.advance(args.runs);
            continue;
        }
        let mut runs = Vec::new();
        for seed in 0..args.runs {
            progress.say(&format!("{} {name}", place.name));
            runs.push(bench.measure(cell, seed)?);
            progress.advance(1);
        }
        sheet.add(Row::new(&place.name, &name, runs), &progress);
    }
    Ok(())
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End<'a> {
    /// All is measured.
    Complete,
    /// A signal.
    Interrupted,
    /// This went wrong.
    Failed(&'a str),
}

/// What is told while it is measured.
struct Sheet {
    conditions: serde_json::Value,
    rows: Vec<Row>,
    notes: Vec<String>,
    layout: Layout,
    is_json: bool,
    cells_planned: usize,
    printed: PrintedOnInterrupt,
}

impl Sheet {
    fn new(args: &Args, bytes: u64, (recipes, cells): (&[Recipe], &[Cell])) -> Sheet {
        let read = |path: &str| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            text.trim().to_string()
        };
        let names: Vec<String> = cells.iter().map(Cell::name).collect();
        let dirs: Vec<String> = args
            .dir
            .iter()
            .map(|dir| dir.display().to_string())
            .collect();
        let loops = recipes.iter().map(|recipe| recipe.name.as_str());
        let places: Vec<&str> = match recipes.is_empty() {
            true => dirs.iter().map(String::as_str).chain(["here"]).collect(),
            false => loops.collect(),
        };
        let count = match (recipes.len(), dirs.len()) {
            (0, dirs) => dirs.max(1),
            (recipes, _) => recipes,
        };
        Sheet {
            conditions: json!({
                "table": "writers",
                "bytes-of-a-cell": bytes,
                "runs": args.runs,
                "write-bytes": cell::WRITE_BYTES,
                "kernel": read("/proc/sys/kernel/osrelease"),
                "processors": std::thread::available_parallelism().map_or(0, usize::from),
                "load-average-before": read("/proc/loadavg"),
            }),
            rows: Vec::new(),
            notes: Vec::new(),
            layout: Layout::new(places.into_iter(), names.iter().map(String::as_str)),
            is_json: args.json,
            cells_planned: cells.len() * count,
            printed: PrintedOnInterrupt::new(),
        }
    }

    fn add(&mut self, row: Row, progress: &Progress) {
        let mut text = String::new();
        if !self.is_json {
            if self.rows.is_empty() {
                text += &self.layout.titles();
            }
            text += &self.layout.row(&row);
        }
        self.rows.push(row);
        let end = self.end(End::Interrupted);
        let print = || progress.suspend(|| output::print(&text));
        self.printed.replace(print, end);
    }

    fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    fn end(&self, end: End<'_>) -> String {
        if self.is_json {
            let failure = match end {
                End::Failed(words) => Some(words),
                End::Complete | End::Interrupted => None,
            };
            let value = json!({
                "conditions": self.conditions,
                "cells-planned": self.cells_planned,
                "interrupted": end == End::Interrupted,
                "failure": failure,
                "rows": self.rows,
                "notes": self.notes,
            });
            return output::json_text(&value) + "\n";
        }
        let notes = self.notes.iter().map(|note| format!("{note}\n"));
        let notes: String = notes.collect();
        let ended = match end {
            End::Complete => return notes,
            End::Interrupted => "Interrupted",
            End::Failed(_) => "Stopped by a failure",
        };
        let (done, planned) = (self.rows.len(), self.cells_planned);
        format!("{notes}{ended}: {done} of {planned} cells are finished.\n")
    }

    fn finish(self, end: End<'_>) {
        if let End::Failed(_) = end {
            self.printed.give_way();
            if self.rows.is_empty() {
                return;
            }
        }
        let text = self.end(end);
        self.printed.replace(|| output::print(&text), String::new());
    }
}
