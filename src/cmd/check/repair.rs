//! `check -r` and `check --plan`.

use std::collections::BTreeMap;
use std::sync::Arc;

use cowslip::file::BlockFile;
use cowslip::qcow2::check::{CheckResult, Observer as _};
use cowslip::qcow2::repair::{self, Event, Observer, RepairOptions, Scope, Step, Summary};
use serde_json::{Value, json};

use super::{Args, Reporter, end_progress};
use crate::error::CommandError;
use crate::interrupt::MessageOnInterrupt;
use crate::output::{self, OutputFormat};
use crate::repair_text::print_step;

/// Exit code of a plan that has steps: as that of a check that finds something.
const EXIT_CORRUPTIONS: u8 = 2;
const EXIT_LEAKS: u8 = 3;

/// Reports a repair, and the damage that remains.
struct RepairReporter {
    reporter: Reporter,
}

impl Observer for RepairReporter {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Remains(finding) => self.reporter.finding(finding),
            Event::Progress {
                done_bytes,
                total_bytes,
            } => self.reporter.progress(done_bytes, total_bytes),
            Event::Planned(_) | Event::Done(_) => print_step(&event),
        }
    }
}

/// Repairs an image and checks it.
pub(super) async fn run(
    file: &Arc<dyn BlockFile>,
    scope: Scope,
    (args, format): (&Args, OutputFormat),
) -> Result<(CheckResult, Summary), CommandError> {
    let mut reporter = RepairReporter {
        reporter: Reporter::new(args),
    };
    let _message = MessageOnInterrupt::new(
        "The repair is not complete. The image is no worse than before; run it again.".to_string(),
    );
    let outcome = repair::repair(file, &RepairOptions::new(scope), &mut reporter).await;
    let outcome = outcome.map_err(|error| CommandError::new(format!("Check failed: {error}")))?;
    end_progress(args);
    let done = outcome.done;
    if done.leaks + done.corruptions > 0 && !args.quiet && format == OutputFormat::Human {
        output::print(&format!(
            "The following inconsistencies were found and repaired:\n\n    {} leaked clusters\n    \
             {} corruptions\n\nDouble checking the fixed image now...\n",
            done.leaks, done.corruptions
        ));
    }
    Ok((outcome.check, done))
}

/// Steps of a kind that the text for people lists; a damaged table has thousands.
const STEPS_OF_A_KIND: u64 = 10;

/// Prints steps as they are planned.
struct Planner {
    format: OutputFormat,
    quiet: bool,
    steps: Vec<Value>,
    /// Steps by kind, those that may lose data apart.
    counts: BTreeMap<(&'static str, bool), u64>,
}

impl Planner {
    fn print(&mut self, step: &Step) {
        let kind = (step.kind(), step.may_lose().is_some());
        let count = self.counts.entry(kind).or_default();
        *count += 1;
        if *count <= STEPS_OF_A_KIND {
            output::print(&human_text(step));
        }
    }

    /// Says how many steps were not listed.
    fn print_rest(&self) {
        for ((kind, loses), count) in &self.counts {
            let more = count.saturating_sub(STEPS_OF_A_KIND);
            let which = if *loses { " that may lose data" } else { "" };
            if more > 0 {
                output::print(&format!(
                    "And {more} more {kind}{which}; --json lists all\n"
                ));
            }
        }
    }
}

impl Observer for Planner {
    fn event(&mut self, event: Event<'_>) {
        let Event::Planned(step) = event else {
            return;
        };
        match self.format {
            _ if self.quiet => {}
            OutputFormat::Human => self.print(step),
            OutputFormat::Json => self.steps.push(json_value(step)),
        }
    }
}

fn human_text(step: &Step) -> String {
    let what = step.what();
    let mut text = what[..1].to_uppercase() + &what[1..];
    if let Some(place) = step.place() {
        text += &format!(", at offset {:#x}", place.start);
    }
    text += &format!("\n    because: {}\n", step.why().replace('\n', " "));
    if let Some(loss) = step.may_lose() {
        text += &format!("    may lose: {loss}\n");
    }
    text
}

fn json_value(step: &Step) -> Value {
    let place = step.place();
    json!({
        "what": step.what(),
        "why": step.why(),
        "where": place.map(|place| json!({
            "offset": place.start,
            "length": place.end - place.start,
        })),
        "possible-data-loss": step.may_lose(),
    })
}

/// Prints the steps that a repair would take; the exit code is a check's.
pub(super) async fn plan(
    file: &Arc<dyn BlockFile>,
    scope: Scope,
    (args, format): (&Args, OutputFormat),
) -> Result<u8, CommandError> {
    let mut planner = Planner {
        format,
        quiet: args.quiet,
        steps: Vec::new(),
        counts: BTreeMap::new(),
    };
    let summary = repair::plan(file, &RepairOptions::new(scope), &mut planner).await;
    let summary = summary.map_err(|error| CommandError::new(format!("Check failed: {error}")))?;
    if !args.quiet {
        match format {
            OutputFormat::Human if summary.is_empty() => {
                output::print("There is nothing to repair.\n");
            }
            OutputFormat::Human => planner.print_rest(),
            OutputFormat::Json => output::print_json(&Value::Array(planner.steps)),
        }
    }
    Ok(match summary {
        Summary {
            corruptions: 1.., ..
        } => EXIT_CORRUPTIONS,
        Summary { leaks: 1.., .. } => EXIT_LEAKS,
        _ => 0,
    })
}
