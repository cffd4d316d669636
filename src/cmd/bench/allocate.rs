//! `bench allocate`: what it costs to give a file its space, by each method on each file system: the time until
//! the call returns and until the space is durable, extents beside the fewest that there could be, system
//! calls, CPU time.
//!
//! On file systems that it makes itself each method finds a new one, the order rotated with each repetition, and
//! then once one that was filled and half freed again (`age.rs`). `trial.rs` makes one run, `results.rs` holds what
//! was measured, plain data for programs and pages, `table.rs` puts it in words, `section.rs` on a page.

use std::fs::File;
use std::path::{Path, PathBuf};

use cowslip_testbed::{Place, Recipe, enter_namespace};
use serde_json::Value;

use crate::error::CommandError;
use crate::interrupt::{DoneOnInterrupt, PrintedOnInterrupt, RemovedOnInterrupt};
use crate::options::bytes_within;
use crate::output;
use crate::progress::Progress;

mod age;
mod results;
pub mod section;
mod table;
mod trial;

use results::{Results, Row, State};
use trial::Method;

use super::page::PageFile;
use super::{conditions, pages};

/// Made where none are named and the user may.
const LOOPS: [&str; 6] = ["ext2", "ext3", "ext4", "ext4:extents=off", "xfs", "btrfs"];
/// XFS refuses to be below 300 MiB.
const FILESYSTEM_BYTES_MIN: u64 = 512 << 20;
const PIECES: &str = "4K,8K,64K,1M,2M";

/// Command line of `bench allocate`.
#[derive(clap::Args)]
pub struct Args {
    /// Measure in a new directory in this one, on its file system as it is; repeat it for several. With --loop, where
    /// those are made
    #[arg(long, value_name = "PATH")]
    dir: Vec<PathBuf>,
    /// Make these file systems on fully written loop devices (root): ext2, ext3, ext4, ext4:extents=off, xfs, btrfs.
    /// All of them if neither --dir nor --loop is given
    #[arg(long = "loop", value_name = "KINDS", value_delimiter = ',')]
    loops: Vec<String>,
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

/// Measures; the exit code.
///
/// # Errors
/// An option's value, a file system that cannot be made, or a run that cannot be judged.
pub fn run(args: &Args) -> Result<u8, CommandError> {
    let plan = Plan::new(args)?;
    let page = args.html.as_deref().map(PageFile::new).transpose()?;
    if !plan.loops.is_empty() {
        enter_namespace().map_err(CommandError::new)?;
    }
    let mut bench = Bench::new(&plan, page);
    let outcome = plan.measure(&mut bench);
    if let Err(error) = &outcome {
        bench.results.failure = Some(error.to_string());
        bench.printed.give_way();
    }
    let finished = bench.finish();
    outcome.and(finished).map(|()| 0)
}

/// What is to be measured.
struct Plan {
    dirs: Vec<PathBuf>,
    loops: Vec<Recipe>,
    methods: Vec<Method>,
    size: u64,
    repetitions: usize,
    aged: bool,
    json: bool,
}

impl Plan {
    fn new(args: &Args) -> Result<Plan, CommandError> {
        let size = bytes_within("size", &args.size, 1 << 20..=1 << 44)?;
        if args.repetitions == 0 {
            return Err(CommandError::new("--repetitions expects a number above 0"));
        }
        let is_root = rustix::process::geteuid().is_root();
        let loops = match (args.loops.is_empty(), args.dir.is_empty()) {
            (true, true) if is_root => LOOPS.map(str::to_string).to_vec(),
            _ => args.loops.clone(),
        };
        let loops = loops.iter().map(|text| Recipe::parse(text));
        let loops: Vec<Recipe> = loops.collect::<Result<_, _>>().map_err(CommandError::new)?;
        let mut dirs = args.dir.clone();
        if dirs.is_empty() {
            dirs.push(std::env::temp_dir());
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
            dirs,
            aged: !args.no_aged && !loops.is_empty(),
            loops,
            methods,
            size,
            repetitions: args.repetitions,
            json: args.json,
        })
    }

    /// States of each place that are measured.
    fn states(&self) -> Vec<State> {
        match (self.loops.is_empty(), self.aged) {
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

    fn places(&self) -> usize {
        match self.loops.is_empty() {
            true => self.dirs.len(),
            false => self.loops.len(),
        }
    }

    /// Room for the file three times over: once for the file, and an aged file system is not nearly full of it.
    fn filesystem_bytes(&self) -> u64 {
        (self.size * 3).max(FILESYSTEM_BYTES_MIN)
    }

    fn measure(&self, bench: &mut Bench) -> Result<(), CommandError> {
        if self.loops.is_empty() {
            for directory in &self.dirs {
                let name = directory.display().to_string();
                let place = Place::here(&name, directory).map_err(CommandError::new)?;
                self.measure_at(place, None, bench)?;
            }
            return Ok(());
        }
        for recipe in &self.loops {
            bench.progress.say(&format!("making {}", recipe.name));
            let place = Place::mount_new(recipe, &self.dirs[0], self.filesystem_bytes());
            self.measure_at(place.map_err(CommandError::new)?, Some(recipe), bench)?;
        }
        Ok(())
    }

    fn measure_at(
        &self,
        mut place: Place,
        recipe: Option<&Recipe>,
        bench: &mut Bench,
    ) -> Result<(), CommandError> {
        let _removed = RemovedOnInterrupt::new(&place.directory);
        bench.add_place(&place);
        for state in self.states() {
            if state == State::Aged {
                bench.progress.say(&format!("ageing {}", place.name));
                anew(&mut place, recipe)?;
                age::age(&place.directory, self.size + self.size / 4)?;
            }
            let named = self
                .methods
                .iter()
                .map(|m| Row::new(&place.name, state, *m));
            let mut rows: Vec<Row> = named.collect();
            for repetition in 0..self.repetitions_in(state) {
                for turn in 0..rows.len() {
                    let index = (turn + repetition) % rows.len();
                    let row = &mut rows[index];
                    bench
                        .progress
                        .say(&format!("{} {} {}", row.place, state.name(), row.method));
                    if state == State::Fresh {
                        anew(&mut place, recipe)?;
                    }
                    let file = place.directory.join("file");
                    row.runs
                        .push(settled(&file, self.methods[index], self.size)?);
                    bench.progress.advance(1);
                }
            }
            bench.add(rows);
        }
        Ok(())
    }
}

fn anew(place: &mut Place, recipe: Option<&Recipe>) -> Result<(), CommandError> {
    match recipe {
        Some(recipe) => place.make_anew(recipe).map_err(CommandError::new),
        None => Ok(()),
    }
}

/// One run on a file system that has come to rest, which it leaves as it was.
fn settled(path: &Path, method: Method, size: u64) -> Result<results::Run, CommandError> {
    let file = RemovedOnInterrupt::new(path);
    let directory = path.parent().unwrap_or(Path::new("."));
    let sync = || -> std::io::Result<()> { Ok(rustix::fs::syncfs(File::open(directory)?)?) };
    let failed = |error| super::stage::failed("sync", directory, &error);
    sync().map_err(failed)?;
    let run = trial::run(file.path(), method, size);
    // It may not have been made.
    drop(std::fs::remove_file(file.path()));
    sync().map_err(failed)?;
    run
}

/// What was measured so far, and how it is told.
struct Bench {
    results: Results,
    table: table::Table,
    json: bool,
    page: Option<PageFile>,
    progress: Progress,
    printed: PrintedOnInterrupt,
    page_written: DoneOnInterrupt,
}

impl Bench {
    fn new(plan: &Plan, page: Option<PageFile>) -> Bench {
        let states = plan.states();
        let runs = states.iter().map(|state| plan.repetitions_in(*state));
        let runs = runs.sum::<usize>() * plan.methods.len() * plan.places();
        let names = plan.loops.iter().map(|recipe| recipe.name.clone());
        let dirs = plan.dirs.iter().map(|dir| dir.display().to_string());
        let names: Vec<String> = names.chain(dirs).collect();
        Bench {
            results: Results {
                conditions: results::conditions(plan.size, plan.repetitions),
                rows_planned: states.len() * plan.methods.len() * plan.places(),
                ..Results::default()
            },
            table: table::Table::new(&names, &plan.methods),
            json: plan.json,
            page,
            progress: Progress::of(runs as u64),
            printed: PrintedOnInterrupt::new(),
            page_written: DoneOnInterrupt::new(),
        }
    }

    /// A place has these conditions.
    fn add_place(&mut self, place: &Place) {
        let mut told = conditions::of_directory(&place.directory);
        told["filesystem"] = place.name.clone().into();
        if let Some(places) = self.results.conditions["places"].as_array_mut() {
            places.push(told);
        }
    }

    /// All methods of a place in one state are done.
    fn add(&mut self, rows: Vec<Row>) {
        let text = match self.json {
            true => String::new(),
            false => self.table.rows(&rows),
        };
        self.results.rows.extend(rows);
        let end = self.end(true);
        let print = || self.progress.suspend(|| output::print(&text));
        self.printed.replace(print, end);
        if let Some(page) = self.page.clone() {
            let document = self.document(true);
            self.page_written.replace(move || {
                // There is nobody left to tell.
                drop(pages::page(&[document]).map(|made| page.write_at_last(&made)));
            });
        }
    }

    /// All of it, for programs.
    fn document(&self, interrupted: bool) -> Value {
        let results = Results {
            interrupted,
            ..self.results.clone()
        };
        results.json()
    }

    /// What comes last.
    fn end(&self, interrupted: bool) -> String {
        if self.json {
            return output::json_text(&self.document(interrupted)) + "\n";
        }
        let ended = match (interrupted, &self.results.failure) {
            (true, _) => "Interrupted",
            (false, Some(_)) => "Stopped by a failure",
            (false, None) => return table::NOTES.to_string(),
        };
        format!(
            "{}\n{ended}: {} of {} rows are finished.\n",
            table::NOTES,
            self.results.rows.len(),
            self.results.rows_planned
        )
    }

    /// Prints what comes last and writes the page.
    fn finish(self) -> Result<(), CommandError> {
        if self.results.failure.is_some() && self.results.rows.is_empty() {
            return Ok(());
        }
        let text = self.end(false);
        self.printed.replace(|| output::print(&text), String::new());
        match &self.page {
            Some(page) => page.write(&pages::page(&[self.document(false)])?),
            None => Ok(()),
        }
    }
}
