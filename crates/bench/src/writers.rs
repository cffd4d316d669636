//! `bench writers`: files that grow side by side in one directory, and how many pieces they end up
//! in.
//!
//! `cell.rs` says what is measured, `stream.rs` writes raw files, `space.rs` only allocates,
//! `measure.rs` makes a run and looks at its files, `table.rs` puts it in words,
//! `section/writers.rs` on a page. `model.json` and `model.txt` have the results of a simulation of
//! what no machine here holds. The story is in docs/writers.md.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Parser;
use cowslip_console::error::CommandError;
use cowslip_console::options::bytes_within;
use cowslip_console::output;
use cowslip_console::progress::Progress;
use cowslip_testbed::{Place, Recipe, TextColumns};
use serde_json::{Value, json};

use crate::deadline::{Shares, is_over};
use crate::places::{PlaceOptions, make_loop};
use crate::reporter::{Made, Outlet, Results};
use crate::run::own_path;

pub mod cell;
mod measure;
mod space;
mod stream;
mod table;

use cell::{BYTES_OF_A_CELL, Cell, filesystem_bytes};
use measure::Bench;

/// Command line of `bench writers`.
#[derive(Parser)]
#[command(no_binary_name = true)]
pub struct Args {
    #[command(flatten)]
    places: PlaceOptions,
    /// Total size that the writers of a cell write
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
    /// Print results of a simulation instead: sizes that no machine here holds, several rules; with
    /// the error of the model
    #[arg(long, conflicts_with_all = ["dir", "loops", "cells", "list"])]
    model: bool,
    /// Allocate what 4, 16 and 64 writers of 64 GiB would, on sparse file systems of 15 TiB, and
    /// write nothing
    #[arg(long, conflicts_with_all = ["size", "model"], requires = "loops")]
    space: bool,
    /// Print the results as JSON, at the end
    #[arg(long)]
    json: bool,
    /// Also write the results to this file, as a page
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    html: Option<PathBuf>,
}

/// Results of the simulation, for people and for programs.
const MODEL: (&str, &str) = (
    include_str!("writers/model.txt"),
    include_str!("writers/model.json"),
);

/// Measures, or prints what was simulated.
///
/// # Errors
/// A place cannot be had, or a run fails.
pub fn run(args: &Args) -> Result<(), CommandError> {
    if args.model {
        match args.json {
            true => output::print_json(&model()),
            false => output::print(MODEL.0),
        }
        return Ok(());
    }
    let plan = Plan::new(args)?;
    if args.list {
        let names = plan.cells.iter().map(|cell| cell.name() + "\n");
        output::print(&names.collect::<String>());
        return Ok(());
    }
    let outlet = Outlet::alone(args.json, args.html.as_deref())?;
    plan.places.enter()?;
    let (_, outcome) = plan.make(outlet, None)?;
    outcome
}

/// Plan of the measurement.
pub struct Plan {
    places: PlaceOptions,
    recipes: Vec<Recipe>,
    cells: Vec<Cell>,
    bytes: u64,
    runs: u64,
    /// Whether nothing is written, on file systems that hold more than there is.
    is_space: bool,
}

impl Plan {
    fn new(args: &Args) -> Result<Plan, CommandError> {
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
        if args.runs == 0 {
            return Err(CommandError::new("--runs expects a number above 0"));
        }
        let bytes = match args.space {
            true => space::FILE_BYTES,
            false => bytes_within("size", &args.size, BYTES_OF_A_CELL)?,
        };
        let places = args.places.clone();
        Ok(Plan {
            recipes: places.recipes()?,
            places,
            cells,
            bytes,
            runs: args.runs,
            is_space: args.space,
        })
    }

    /// Makes a plan from the words of a line; directories have these names in rows.
    ///
    /// # Errors
    /// They contradict each other.
    pub fn of_words(words: &[String], names: &[String]) -> Result<Plan, CommandError> {
        let parsed = Args::try_parse_from(words);
        let mut plan = Plan::new(&parsed.map_err(|e| CommandError::new(e.to_string()))?)?;
        plan.places.names = names.to_vec();
        Ok(plan)
    }

    /// Space that a file system needs for it.
    pub fn filesystem_bytes(&self) -> u64 {
        filesystem_bytes(self.bytes)
    }

    /// Runs the measurement. No cell is begun after the deadline, if there is one; each place has
    /// its share of the time until then.
    ///
    /// # Errors
    /// The results cannot be written. Earlier errors are reported with the results.
    pub fn make(&self, outlet: Outlet, deadline: Option<Instant>) -> Result<Made, CommandError> {
        let names = self.places.names();
        let cells: Vec<String> = self.cells.iter().map(Cell::name).collect();
        let asked = json!({
            "table": "writers",
            "bytes-of-a-cell": self.bytes,
            "size-bytes": self.bytes,
            "repetitions": self.runs,
            "write-bytes": cell::WRITE_BYTES,
        });
        let mut columns = table::columns(&names, &cells);
        let mut results = Results::new(asked, names.len() * cells.len(), outlet);
        let mut shares = Shares::new(deadline, u32::try_from(names.len()).unwrap_or(u32::MAX));
        let make = |recipe: &Recipe, directory: &Path| match self.is_space {
            true => Place::mount_sparse(recipe, directory, space::FILESYSTEM_BYTES),
            false => make_loop(recipe, directory, self.filesystem_bytes()),
        };
        let mut places = self.places.each(&self.recipes, make);
        let outcome = places.try_for_each(|held| {
            self.measure_at(&held?.place, shares.next(1), (&mut results, &mut columns))
        });
        results.finish(outcome)
    }

    fn measure_at(
        &self,
        place: &Place,
        deadline: Option<Instant>,
        (results, columns): (&mut Results, &mut TextColumns),
    ) -> Result<(), CommandError> {
        results.add_place(place);
        let progress = Progress::of(self.cells.len() as u64 * self.runs);
        let cowslip = own_path()?;
        let bench = Bench {
            directory: Path::new(&place.directory),
            cowslip: &cowslip,
            bytes: self.bytes,
        };
        for cell in &self.cells {
            if is_over(deadline) {
                break;
            }
            let name = cell.name();
            if !bench.can(cell) {
                results.leave_out(format!(
                    "{} has no {name}: it takes no extent size hint",
                    place.name
                ));
                progress.advance(self.runs);
                continue;
            }
            let mut runs = Vec::new();
            for seed in 0..self.runs {
                progress.say(&format!("{} {name}", place.name));
                runs.push(bench.measure(cell, seed)?);
                progress.advance(1);
            }
            let row = table::row(&place.name, &name, &runs);
            results.add(columns, vec![(table::fields(&row), row)], &progress);
        }
        Ok(())
    }
}

fn model() -> Value {
    serde_json::from_str(MODEL.1).expect("the file is JSON")
}

#[cfg(test)]
mod tests {
    use super::*;
    use cowslip::growth::Steps;

    /// Other steps would have other results: the simulation, which is in the history of this file,
    /// has to be repeated for them.
    #[test]
    fn the_model_is_of_todays_steps_in_both_files() {
        let simulated = Steps {
            first_bytes: 64 << 10,
            doubling_bytes: 4 << 20,
            file_fraction: 2,
            ample_fraction: 1024,
            leap_times: 64,
            max_bytes: (8 << 30) - (2 << 20),
            blind_bytes: 64 << 20,
            free_fraction: 16,
        };
        assert_eq!(Steps::DYNAMIC, simulated);
        for row in model()["rows"].as_array().unwrap() {
            let (scene, rule) = (
                row["scene"].as_str().unwrap(),
                row["rule"].as_str().unwrap(),
            );
            let line = MODEL
                .0
                .lines()
                .find(|line| line.starts_with(scene) && line.contains(rule));
            let extents = ["extents-min", "extents-median", "extents-max"];
            let extents = extents.map(|name| format!("{:.0}", row[name].as_f64().unwrap()));
            assert!(line.unwrap().contains(&extents.join("/")), "{row}");
        }
    }
}
