//! `bench all`: every table, within a time that is given, as one page and a summary for a mail; and
//! `bench report`: a page of results that were made before, here or elsewhere.
//!
//! Each table has a share of the time. What it leaves goes to those after it; what does not fit is
//! left out by whole cells, and the page says so. So the command ends in the time that it was
//! given, but for the cell that it is in.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cowslip_console::error::CommandError;
use cowslip_console::interrupt::RemovedOnInterrupt;
use cowslip_console::output::{self, Program};
use cowslip_testbed::{Recipe, enter_namespace};
use serde_json::{Value, json};

use crate::conditions::{command_line, quoted};
use crate::deadline::Shares;
use crate::page::file::PageFile;
use crate::places::{Held, make_loop};
use crate::reporter::{Made, Outlet, ReportStyle};
use crate::tables::Plan;
use crate::{allocate, pages, writers};

/// Minutes, if it is not said.
const MINUTES: f64 = 40.0;
/// The same for a first look.
const MINUTES_QUICK: f64 = 10.0;
const MINUTES_MAX: f64 = 1440.0;
/// Size limit of a result; a file that is larger is none.
const RESULT_BYTES_MAX: u64 = 256 << 20;

/// A table, what it is asked for, and its part of the time.
#[derive(serde::Deserialize)]
struct Share {
    /// Arguments for a first look.
    quick: String,
    /// Otherwise.
    words: String,
    /// Weight against the other tables.
    weight: u32,
}

/// The shortest first, so that most tables are there if the last one is short of time.
fn shares() -> Vec<Share> {
    serde_json::from_str(include_str!("all.json")).expect("the file is one of shares")
}

/// Options of `bench all`.
#[derive(clap::Args)]
pub struct AllOptions {
    /// Write the results as a page, to attach to a mail. After an interruption it contains the
    /// finished cells
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print all results as JSON at the end, for `bench report`, instead of the summary
    #[arg(long)]
    json: bool,
    /// Work in a new directory in this one; repeat it for several file systems
    #[arg(long, value_name = "PATH")]
    dir: Vec<PathBuf>,
    /// Make file systems of these kinds on fully written loop devices, as the tables do (root)
    #[arg(long = "loop", value_name = "KINDS", value_delimiter = ',')]
    loops: Vec<String>,
    /// Fewer requests, smaller disks and one run of each, for a first impression
    #[arg(long)]
    quick: bool,
    /// Time limit in minutes: cells that do not fit are left out; 40 by default, with --quick 10
    #[arg(long, value_name = "N")]
    minutes: Option<f64>,
    /// Only these tables, in the time for all of them
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    tables: Vec<String>,
}

/// Options of `bench report`.
#[derive(clap::Args)]
pub struct ReportOptions {
    /// Output of --json; `-` is standard input
    #[arg(required = true, value_name = "RESULTS")]
    results: Vec<PathBuf>,
    /// Write the page to this file
    #[arg(long, value_name = "FILE")]
    html: PathBuf,
}

/// Maker of a table.
enum Maker {
    /// Maker of a table of images.
    Table(Box<Plan>),
    Allocate(allocate::Plan),
    Writers(writers::Plan),
}

impl Maker {
    /// Space that a file system needs for it; `None` if it makes its own.
    fn filesystem_bytes(&self) -> Option<u64> {
        match self {
            Maker::Table(plan) => Some(plan.filesystem_bytes()),
            Maker::Writers(plan) => Some(plan.filesystem_bytes()),
            Maker::Allocate(_) => None,
        }
    }

    fn make(
        self,
        outlet: Outlet,
        deadline: Option<Instant>,
        program: &Program,
    ) -> Result<Made, CommandError> {
        match self {
            Maker::Table(plan) => plan.make(outlet, deadline, program),
            Maker::Allocate(plan) => plan.make(outlet, deadline),
            Maker::Writers(plan) => plan.make(outlet, deadline),
        }
    }
}

/// A table that is to be made.
struct Planned {
    maker: Maker,
    /// Command line that would make it alone.
    words: Vec<String>,
    weight: u32,
}

impl AllOptions {
    /// Returns the arguments of a table.
    fn words_of(&self, share: &Share) -> Vec<String> {
        let words = if self.quick {
            &share.quick
        } else {
            &share.words
        };
        words.split(' ').map(str::to_string).collect()
    }

    /// Where a table that is made alone would go.
    fn places(&self) -> Vec<String> {
        let directories = self.dir.iter();
        let mut words: Vec<String> = directories
            .map(|d| format!("--dir={}", d.display()))
            .collect();
        if !self.loops.is_empty() {
            words.push(format!("--loop={}", self.loops.join(",")));
        }
        if words.is_empty() {
            // Without a word some would make file systems of their own choice.
            words.push(format!("--dir={}", std::env::temp_dir().display()));
        }
        words
    }

    /// Returns the tables that are asked for, on these grounds if there are any.
    fn planned(&self, grounds: Option<&Grounds>) -> Result<Vec<Planned>, CommandError> {
        let known: Vec<Vec<String>> = shares().iter().map(|share| self.words_of(share)).collect();
        let is_unknown = |name: &&String| !known.iter().any(|words| words[0] == **name);
        if let Some(name) = self.tables.iter().find(is_unknown) {
            let known: Vec<&str> = known.iter().map(|words| words[0].as_str()).collect();
            return Err(CommandError::new(format!(
                "--tables expects {}, not '{name}'",
                known.join(", ")
            )));
        }
        let mut planned = Vec::new();
        for (words, share) in known.into_iter().zip(shares()) {
            if !self.tables.is_empty() && !self.tables.contains(&words[0]) {
                continue;
            }
            let alone = [&words[..], &self.places()].concat();
            let (on_grounds, names) = match grounds {
                None => (alone.clone(), &[][..]),
                Some(grounds) => ([&words[..], &grounds.words()].concat(), &self.loops[..]),
            };
            let maker = match words[0].as_str() {
                // Each of its runs is on a file system that was just made.
                "allocate" => Maker::Allocate(allocate::Plan::of_words(&alone[1..])?),
                "writers" => Maker::Writers(writers::Plan::of_words(&on_grounds[1..], names)?),
                _ => Maker::Table(Box::new(Plan::of_words(&on_grounds, names)?)),
            };
            planned.push(Planned {
                maker,
                words: alone,
                weight: share.weight,
            });
        }
        Ok(planned)
    }
}

/// File systems on which all tables are made: to write their files throughout for each table would
/// take longer than most tables. They go before the directory that they are in.
struct Grounds {
    mounted: Vec<Held>,
    _removed: Vec<RemovedOnInterrupt>,
    _holder: Held,
}

impl Grounds {
    fn make(options: &AllOptions, filesystem_bytes: u64) -> Result<Grounds, CommandError> {
        let temporary = std::env::temp_dir();
        let parent = options.dir.first().unwrap_or(&temporary);
        let holder = Held::here("", parent)?;
        let mut removed = Vec::new();
        let mut mounted = Vec::new();
        for (index, text) in options.loops.iter().enumerate() {
            let recipe = Recipe::parse(text).map_err(CommandError::new)?;
            let directory = holder.place.directory.join(index.to_string());
            removed.push(RemovedOnInterrupt::new(&directory));
            mounted.push(Held::made(&recipe, &directory, |recipe, directory| {
                make_loop(recipe, directory, filesystem_bytes)
            })?);
        }
        Ok(Grounds {
            mounted,
            _removed: removed,
            _holder: holder,
        })
    }

    fn words(&self) -> Vec<String> {
        let directories = self.mounted.iter().map(|held| &held.place.directory);
        directories
            .map(|d| format!("--dir={}", d.display()))
            .collect()
    }
}

/// Makes all tables; returns the exit code.
///
/// # Errors
/// The page cannot be written, no table can be made, or options are wrong. Later errors of a table
/// are reported with its results.
pub fn run(options: &AllOptions, program: &Program) -> Result<u8, CommandError> {
    let usual = if options.quick {
        MINUTES_QUICK
    } else {
        MINUTES
    };
    let minutes = options.minutes.unwrap_or(usual);
    if !(minutes > 0.0 && minutes <= MINUTES_MAX) {
        let text = format!("--minutes expects a number above 0, up to {MINUTES_MAX}");
        return Err(CommandError::new(text));
    }
    let mut planned = options.planned(None)?;
    let page = options.html.as_deref().map(PageFile::new).transpose()?;
    let mut grounds = None;
    if !options.loops.is_empty() {
        enter_namespace().map_err(CommandError::new)?;
        let bytes = planned
            .iter()
            .filter_map(|planned| planned.maker.filesystem_bytes());
        let made = Grounds::make(options, bytes.max().unwrap_or(0))?;
        planned = options.planned(Some(&made))?;
        grounds = Some(made);
    }
    let end = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
    let style = ReportStyle::Together { json: options.json };
    let (results, failures) = make(planned, (style, page.as_ref(), end), program);
    drop(grounds);
    if let Some(page) = &page {
        page.write(&pages::page(&results)?)?;
    }
    match options.json {
        true => output::print_json(&Value::from(results)),
        false => output::print(&summary(&results, options.html.as_deref())),
    }
    Ok(if failures == 0 { 0 } else { 1 })
}

/// Makes tables one after the other: their results, and how many failed.
fn make(
    planned: Vec<Planned>,
    (style, page, end): (ReportStyle, Option<&PageFile>, Instant),
    program: &Program,
) -> (Vec<Value>, usize) {
    let mut results: Vec<Value> = Vec::new();
    let mut failures = 0;
    let weights = planned.iter().map(|planned| planned.weight).sum();
    let mut shares = Shares::new(Some(end), weights);
    for Planned {
        maker,
        words,
        weight,
    } in planned
    {
        let name = std::env::args_os().next().unwrap_or_default();
        let line = words.iter().map(AsRef::as_ref);
        let outlet = Outlet {
            style,
            page: page.cloned(),
            earlier: results.clone(),
            command: Some(format!("{} bench {}", quoted(&name), command_line(line))),
        };
        let made = maker.make(outlet, shares.next(weight), program);
        let (document, outcome) =
            made.unwrap_or_else(|error| (nothing(&words[0], &error), Err(error)));
        if let Err(error) = outcome {
            failures += 1;
            program.fail(&error);
        }
        results.push(document);
    }
    (results, failures)
}

/// The result of a table that could not be begun.
fn nothing(table: &str, error: &CommandError) -> Value {
    json!({
        "conditions": { "table": table },
        "failure": error.to_string(),
        "rows": [],
    })
}

/// Returns the text of the mail that the page is attached to.
fn summary(results: &[Value], page: Option<&Path>) -> String {
    let summaries = results.iter().map(pages::summary);
    let conditions = results.iter().map(|document| &document["conditions"]);
    let mut machines = conditions.filter(|conditions| conditions["machine"].is_object());
    let mut text = String::new();
    if let Some(conditions) = machines.next() {
        let word = |value: &Value| match value {
            Value::String(text) => text.clone(),
            Value::Null => "unknown".to_string(),
            other => other.to_string(),
        };
        let machine = &conditions["machine"];
        text += &format!(
            "{}, {}; {} x {}, Linux {}\n",
            word(&conditions["versions"]["cowslip"]),
            conditions["versions"]["qemu-img"]
                .as_str()
                .unwrap_or("no qemu-img"),
            word(&machine["processors"]),
            word(&machine["processor"]),
            word(&machine["kernel"]),
        );
        for warning in conditions["warnings"].as_array().into_iter().flatten() {
            text += &format!("Note: {}\n", word(warning));
        }
        text += "Ratios of medians: x QEMU is how many times as fast as QEMU, x first as the first touch of a raw file,\n\
                 x written as a raw file that is written throughout, x unlimited as with memory for all tables.\n\n";
    }
    text += &summaries.collect::<String>();
    if let Some(page) = page {
        text += &format!("\nThe page: {}\n", page.display());
    }
    text
}

/// Makes a page of results that were printed as JSON; the exit code.
///
/// # Errors
/// A file cannot be read, is no such result, or the page cannot be written.
pub fn report(options: &ReportOptions) -> Result<u8, CommandError> {
    let page = PageFile::new(&options.html)?;
    let mut documents = Vec::new();
    for path in &options.results {
        match results_of(path)? {
            // The output of `bench all`.
            Value::Array(several) => documents.extend(several),
            one => documents.push(one),
        }
    }
    page.write(&pages::page(&documents)?)?;
    Ok(0)
}

fn results_of(path: &Path) -> Result<Value, CommandError> {
    let failed =
        |words: String| CommandError::new(format!("Could not read '{}': {words}", path.display()));
    let mut bytes = Vec::new();
    let read = match path.to_str() {
        Some("-") => std::io::stdin()
            .take(RESULT_BYTES_MAX)
            .read_to_end(&mut bytes),
        _ => std::fs::File::open(path)
            .and_then(|file| file.take(RESULT_BYTES_MAX).read_to_end(&mut bytes)),
    };
    read.map_err(|e| failed(cowslip::error::system_words(&e)))?;
    serde_json::from_slice(&bytes).map_err(|e| failed(format!("it is not JSON ({e})")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(quick: bool, tables: &[&str]) -> AllOptions {
        AllOptions {
            html: None,
            json: false,
            dir: vec![PathBuf::from("/a b")],
            loops: Vec::new(),
            quick,
            minutes: None,
            tables: tables.iter().map(|table| table.to_string()).collect(),
        }
    }

    #[test]
    fn each_table_can_be_asked_for_with_its_words() {
        for quick in [true, false] {
            let planned = options(quick, &[]).planned(None).unwrap();
            assert_eq!(planned.len(), shares().len());
            for Planned { words, .. } in planned {
                assert_eq!(words.last().unwrap(), "--dir=/a b");
            }
        }
    }

    #[test]
    fn tables_are_chosen_by_name() {
        let planned = options(true, &["flush"]).planned(None).unwrap();
        assert_eq!(planned.len(), 1);
        let refused = options(true, &["flush", "x"]).planned(None).map(drop);
        let refused = refused.unwrap_err().to_string();
        assert!(
            refused.contains("steady") && refused.contains("not 'x'"),
            "{refused}"
        );
    }

    #[test]
    fn a_table_that_failed_is_a_section_all_the_same() {
        let failed = nothing("flush", &CommandError::new("no <kernel>"));
        let html = pages::page(&[failed]).unwrap().html();
        assert!(
            html.contains("Stopped by a failure: 0 of 0 cells are finished. no &lt;kernel&gt;")
        );
    }
}
