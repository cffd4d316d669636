//! `bench allocate`: what it costs to give a file its space, by each method on each file system:
//! the time until the call returns and until the space is durable, extents beside the fewest that
//! there could be, system calls, CPU time.
//!
//! On file systems that it makes itself each method finds a new one, the order rotated with each
//! repetition, and then once one that was filled and half freed again (`age.rs`). `trial.rs` makes
//! one run, `results.rs` holds what was measured, plain data for programs and pages, `table.rs`
//! puts it in words, `section/allocate.rs` on a page.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Parser;
use cowslip_console::error::CommandError;
use cowslip_console::interrupt::RemovedOnInterrupt;
use cowslip_console::options::bytes_within;
use cowslip_console::progress::Progress;
use cowslip_testbed::{Place, Recipe};
use serde_json::json;

use crate::deadline::{Shares, is_over};
use crate::places::PlaceOptions;
use crate::reporter::{Made, Outlet, Results};

mod age;
mod method;
mod results;
mod table;
mod trial;

use method::Method;
use results::{Row, State};

/// Made where none are named and the user may.
const LOOPS: [&str; 6] = ["ext2", "ext3", "ext4", "ext4:extents=off", "xfs", "btrfs"];
/// XFS refuses to be below 300 MiB.
const FILESYSTEM_BYTES_MIN: u64 = 512 << 20;
const PIECES: &str = "4K,8K,64K,1M,2M";

/// Below that ageing leaves free space that is in one piece.
const AGED_BYTES_MIN: u64 = 64 << 20;

/// Command line of `bench allocate`.
#[derive(Parser)]
#[command(no_binary_name = true)]
pub struct Args {
    #[command(flatten)]
    places: PlaceOptions,
    /// Bytes to allocate
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    size: String,
    /// Runs of each method on fresh file systems, or in each directory
    #[arg(long, value_name = "N", default_value_t = 5)]
    repetitions: usize,
    /// Only the methods whose name contains this text
    #[arg(long, value_name = "TEXT")]
    methods: Option<String>,
    /// Bytes of written pieces, each a row
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = PIECES)]
    chunks: Vec<String>,
    /// Leave out the aged file systems
    #[arg(long)]
    no_aged: bool,
    /// Print the results as JSON, at the end
    #[arg(long)]
    json: bool,
    /// Also write the results to this file, as a page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Measures; returns the exit code.
///
/// # Errors
/// An option's value is invalid, a file system cannot be made, or a run has no valid result.
pub fn run(mut args: Args) -> Result<u8, CommandError> {
    let is_root = rustix::process::geteuid().is_root();
    if is_root && args.places.loops.is_empty() && args.places.dir.is_empty() {
        args.places.loops = LOOPS.map(str::to_string).to_vec();
    }
    let plan = Plan::new(&args)?;
    let outlet = Outlet::alone(args.json, args.html.as_deref())?;
    plan.places.enter()?;
    let (_, outcome) = plan.make(outlet, None)?;
    outcome.map(|()| 0)
}

/// Plan of the measurement.
pub struct Plan {
    places: PlaceOptions,
    recipes: Vec<Recipe>,
    methods: Vec<Method>,
    size: u64,
    repetitions: usize,
    aged: bool,
}

impl Plan {
    fn new(args: &Args) -> Result<Plan, CommandError> {
        let size = bytes_within("size", &args.size, 1 << 20..=1 << 44)?;
        if args.repetitions == 0 {
            return Err(CommandError::new("--repetitions expects a number above 0"));
        }
        let places = args.places.clone();
        let recipes = places.recipes()?;
        if let Some(recipe) = recipes.iter().find(|recipe| recipe.full_percent.is_some()) {
            return Err(CommandError::new(format!(
                "--loop {}: this table makes new file systems and fills none; use --dir on one that is full",
                recipe.name
            )));
        }
        let aged = !args.no_aged && !recipes.is_empty();
        if aged && size < AGED_BYTES_MIN {
            let text = "--size below 64M needs --no-aged: space of an aged file system is not in such small pieces";
            return Err(CommandError::new(text));
        }
        let chunks = args.chunks.iter();
        let chunks = chunks.map(|text| bytes_within("chunk", text, 512..=64 << 20));
        let chunks: Vec<u64> = chunks.collect::<Result<_, _>>()?;
        let mut methods = Method::all(&chunks);
        let part = args.methods.as_deref().unwrap_or_default();
        methods.retain(|method| method.name().contains(part));
        if methods.is_empty() {
            let text = "No method has a name with the text of --methods";
            return Err(CommandError::new(text));
        }
        Ok(Plan {
            places,
            aged,
            recipes,
            methods,
            size,
            repetitions: args.repetitions,
        })
    }

    /// Makes a plan from the arguments of a line.
    ///
    /// # Errors
    /// They contradict each other.
    pub fn of_words(words: &[String]) -> Result<Plan, CommandError> {
        let parsed = Args::try_parse_from(words);
        Plan::new(&parsed.map_err(|e| CommandError::new(e.to_string()))?)
    }

    /// States of each place that are measured.
    fn states(&self) -> Vec<State> {
        match (self.recipes.is_empty(), self.aged) {
            (true, _) => vec![State::AsItIs],
            (false, true) => vec![State::Fresh, State::Aged],
            (false, false) => vec![State::Fresh],
        }
    }

    fn repetitions_in(&self, state: State) -> usize {
        match state {
            State::Aged => 1,
            State::AsItIs | State::Fresh => self.repetitions,
        }
    }

    /// Room for the file three times over: once for the file, and an aged file system is not nearly
    /// full of it.
    fn filesystem_bytes(&self) -> u64 {
        (self.size * 3).max(FILESYSTEM_BYTES_MIN)
    }

    /// Runs the measurement. No repetition is begun after the deadline, if there is one.
    ///
    /// # Errors
    /// The results cannot be written. Earlier errors are reported with the results.
    pub fn make(&self, outlet: Outlet, deadline: Option<Instant>) -> Result<Made, CommandError> {
        let (states, names) = (self.states(), self.places.names());
        let methods = self.methods.len() * names.len();
        let runs = states.iter().map(|state| self.repetitions_in(*state));
        let progress = Progress::of((runs.sum::<usize>() * methods) as u64);
        let asked = json!({
            "table": "allocate",
            "size-bytes": self.size,
            "repetitions": self.repetitions,
        });
        let mut results = Results::new(asked, states.len() * methods, outlet);
        results.notes.push(table::NOTE.to_string());
        let outcome = self.measure((&mut results, &progress), deadline);
        results.finish(outcome)
    }

    fn measure(
        &self,
        (results, progress): (&mut Results, &Progress),
        deadline: Option<Instant>,
    ) -> Result<(), CommandError> {
        let states = self.states();
        let mut columns = table::columns(&self.places.names(), &self.methods);
        let count = self.places.names().len() * states.len();
        let mut shares = Shares::new(deadline, u32::try_from(count).unwrap_or(u32::MAX));
        let make =
            |recipe: &Recipe, dir: &Path| Place::mount_new(recipe, dir, self.filesystem_bytes());
        for (index, held) in self.places.each(&self.recipes, make).enumerate() {
            let mut held = held?;
            results.add_place(&held.place);
            let recipe = self.recipes.get(index);
            for state in &states {
                let rows = self.measure_in(
                    &mut held.place,
                    (recipe, *state),
                    (progress, shares.next(1)),
                )?;
                let rows = rows.iter().map(|row| (table::fields(row), row.json()));
                results.add(&mut columns, rows.collect(), progress);
            }
        }
        Ok(())
    }

    /// All methods in one state of a place; those that have a run.
    fn measure_in(
        &self,
        place: &mut Place,
        (recipe, state): (Option<&Recipe>, State),
        (progress, deadline): (&Progress, Option<Instant>),
    ) -> Result<Vec<Row>, CommandError> {
        if is_over(deadline) {
            return Ok(Vec::new());
        }
        if state == State::Aged {
            progress.say(&format!("ageing {}", place.name));
            recreate(place, recipe)?;
            age::age(&place.directory, self.size + self.size / 4)?;
        }
        let methods = self.methods.iter();
        let mut rows: Vec<Row> = methods.map(|m| Row::new(&place.name, state, *m)).collect();
        for repetition in 0..self.repetitions_in(state) {
            for turn in 0..rows.len() {
                if is_over(deadline) {
                    rows.retain(|row| !row.runs.is_empty());
                    return Ok(rows);
                }
                let index = (turn + repetition) % rows.len();
                let row = &mut rows[index];
                let what = format!("{} {} {}", row.place, state.name(), row.method);
                progress.say(&what);
                if state == State::Fresh {
                    recreate(place, recipe)?;
                }
                let file = place.directory.join("file");
                row.runs
                    .push(settled(&file, self.methods[index], self.size)?);
                progress.advance(1);
            }
        }
        Ok(rows)
    }
}

fn recreate(place: &mut Place, recipe: Option<&Recipe>) -> Result<(), CommandError> {
    match recipe {
        Some(recipe) => place.remake(recipe).map_err(CommandError::new),
        None => Ok(()),
    }
}

/// Makes one run on a file system that has come to rest, which it leaves as it was.
fn settled(path: &Path, method: Method, size: u64) -> Result<results::Run, CommandError> {
    let file = RemovedOnInterrupt::new(path);
    let directory = path.parent().unwrap_or(Path::new("."));
    let sync = || -> std::io::Result<()> { Ok(rustix::fs::syncfs(File::open(directory)?)?) };
    let failed = |error| cowslip_console::error::failed("sync", directory, &error);
    sync().map_err(failed)?;
    let run = trial::run(file.path(), method, size);
    // It may not have been made.
    drop(std::fs::remove_file(file.path()));
    sync().map_err(failed)?;
    run
}
