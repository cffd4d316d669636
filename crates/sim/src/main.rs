//! The command `cowslip-sim`: many seeds on several threads, or one seed with its record.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use cowslip_sim::config::{Kind, Part};
use cowslip_sim::run::{Changes, Report, run};
use cowslip_sim::shrink;
use cowslip_sim::soak::Soak;
use cowslip_sim::summary::Summary;
use cowslip_sim::trace::Trace;

const USAGE: &str = "\
usage: cowslip-sim [--seeds N] [--start S] [--jobs J] [--kind qcow2|raw|plain] [--keep-going]
                   [--seconds N] [--coverage | --require-coverage | --no-coverage]
                   [--json]
       cowslip-sim --replay SEED [--kind K] [--salt N] [--skip ID,ID,...] [--tail LINES]
                   [--rounds N] [--moment N]
       cowslip-sim --shrink SEED [--kind K]
       cowslip-sim --planted all|quick|NAME,... [--budget SEEDS] [--start S] [--jobs J] [--json]

Every form takes --without PART,...: kills, faults, compressed, discards, maintenance, alignment,
raw-data, small-caches, resizes, recoveries, dirty, crammed, growth, snapshots, vm-state, bitmaps,
copy-on-read.
--coverage prints where crashes and faults fell; --require-coverage first aims runs at all places where
they can fall, and fails if one stays empty. That is so by itself from 1000 seeds on, but with
--seconds, --without or --no-coverage.
Runs the engine on simulated disks. Every run follows from its seed; a run that fails prints the
command that replays it. --planted, in a build with the feature of that name, plants one mistake
after the other in the engine and fails unless each is noticed within its budget of seeds; with
--replay and --shrink it plants that one.";

struct Options {
    seeds: u64,
    start: u64,
    jobs: usize,
    kind: Kind,
    keep_going: bool,
    replay: Option<u64>,
    shrink: Option<u64>,
    changes: Changes,
    tail: usize,
    json: bool,
    /// None: by the number of seeds.
    coverage: Option<Wanted>,
    /// No run begins later than this.
    limit: Duration,
    planted: Option<String>,
    trial: Option<String>,
    budget: u64,
}

/// What is wanted of the coverage.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    No,
    Printed,
    Required,
}

/// Soaks of so many seeds demand a full matrix, unless something is left out of their runs.
const DEMANDING_SEEDS: u64 = 1000;

impl Options {
    fn wanted(&self) -> Wanted {
        let complete = self.kind == Kind::Qcow2
            && self.seeds >= DEMANDING_SEEDS
            && self.limit == Duration::MAX
            && self.changes.without.is_empty();
        match self.coverage {
            // What was asked for is printed; a soak demands it as well.
            Some(Wanted::Printed) if complete => Wanted::Required,
            Some(wanted) => wanted,
            None if complete => Wanted::Required,
            None => Wanted::No,
        }
    }
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        seeds: 1000,
        start: 0,
        jobs: 1,
        kind: Kind::Qcow2,
        keep_going: false,
        replay: None,
        shrink: None,
        changes: Changes::default(),
        tail: usize::MAX,
        json: false,
        coverage: None,
        limit: Duration::MAX,
        planted: None,
        trial: None,
        budget: 6000,
    };
    while let Some(name) = args.next() {
        match name.as_str() {
            "--keep-going" => options.keep_going = true,
            "--json" => options.json = true,
            "--coverage" => options.coverage = Some(Wanted::Printed),
            "--require-coverage" => options.coverage = Some(Wanted::Required),
            "--no-coverage" => options.coverage = Some(Wanted::No),
            _ => option(&mut options, &name, args.next())?,
        }
    }
    Ok(options)
}

/// An option that has a value.
fn option(options: &mut Options, name: &str, value: Option<String>) -> Result<(), String> {
    let value = value.ok_or_else(|| format!("{name} needs a value"))?;
    let number = || {
        value
            .parse::<u64>()
            .map_err(|_| format!("{name}: not a number: {value}"))
    };
    match name {
        "--seeds" => options.seeds = number()?,
        "--start" => options.start = number()?,
        "--jobs" => options.jobs = number()?.max(1) as usize,
        "--replay" => options.replay = Some(number()?),
        "--shrink" => options.shrink = Some(number()?),
        "--seconds" => options.limit = Duration::from_secs(number()?),
        "--salt" => options.changes.salt = number()?,
        "--rounds" => options.changes.rounds = Some(number()? as usize),
        "--moment" => options.changes.moment = Some(number()?),
        "--tail" => options.tail = number()? as usize,
        "--planted" => options.planted = Some(value),
        "--trial" => options.trial = Some(value),
        "--budget" => options.budget = number()?,
        "--kind" => {
            options.kind = match value.as_str() {
                "qcow2" => Kind::Qcow2,
                "raw" => Kind::Raw,
                "plain" => Kind::Plain,
                _ => return Err(format!("no such kind: {value}")),
            }
        }
        "--without" => {
            for name in value.split(',') {
                let part = Part::NAMES.iter().find(|(known, _)| *known == name);
                let (_, part) = part.ok_or_else(|| format!("no such part: {name}"))?;
                options.changes.without.insert(*part);
            }
        }
        "--skip" => {
            let ids: Result<BTreeSet<u32>, _> = value.split(',').map(str::parse).collect();
            options.changes.skip = ids.map_err(|_| format!("not numbers: {value}"))?;
        }
        _ => return Err(format!("no such option: {name}")),
    }
    Ok(())
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(what) => {
            eprintln!("{what}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    if let Some(names) = options.planted.as_ref().or(options.trial.as_ref()) {
        match plant(&options, names) {
            Ok(None) => {}
            Ok(Some(code)) => return code,
            Err(what) => {
                eprintln!("{what}");
                return ExitCode::from(2);
            }
        }
    }
    if let Some(seed) = options.replay {
        let report = run(seed, options.kind, &options.changes, Trace::kept());
        return show(&report, options.tail);
    }
    if let Some(seed) = options.shrink {
        return match shrink::shrink(seed, options.kind, &options.changes, |text| {
            eprintln!("{text}")
        }) {
            None => {
                println!("seed {seed} passes");
                ExitCode::SUCCESS
            }
            Some(changes) => {
                let report = run(seed, options.kind, &changes, Trace::kept());
                let code = show(&report, options.tail);
                println!("replay: {}", shrink::command(seed, options.kind, &changes));
                code
            }
        };
    }
    many(&options)
}

/// Runs the suite of planted mistakes; with a replay it plants the one that is named, and no more.
#[cfg(feature = "planted")]
fn plant(options: &Options, names: &str) -> Result<Option<ExitCode>, String> {
    use cowslip_sim::planted;
    let mistakes = planted::named(names)?;
    if options.trial.is_some() {
        planted::trial(mistakes[0], options.start..options.start + options.seeds);
        return Ok(Some(ExitCode::SUCCESS));
    }
    if options.replay.is_some() || options.shrink.is_some() {
        cowslip::planted::plant(mistakes.first().copied());
        return Ok(None);
    }
    let seeds = options.start..options.start + options.budget;
    let trials = planted::suite(&mistakes, seeds, options.jobs);
    let text = match options.json {
        true => planted::json(&trials),
        false => planted::table(&trials),
    };
    println!("{text}");
    let survived = trials.iter().any(|trial| trial.caught.is_none());
    Ok(Some(ExitCode::from(u8::from(survived))))
}

#[cfg(not(feature = "planted"))]
fn plant(_: &Options, _: &str) -> Result<Option<ExitCode>, String> {
    Err("no mistake can be planted in this build: cargo xtask sim --planted all".to_string())
}

fn show(report: &Report, tail: usize) -> ExitCode {
    let lines = report.trace.lines();
    for line in &lines[lines.len().saturating_sub(tail)..] {
        println!("{line}");
    }
    let story = report.trace.story();
    if !story.is_empty() {
        println!("\nWhat concerns the place where it failed:");
    }
    for line in &story {
        println!("{line}");
    }
    println!("fingerprint {:016x}", report.trace.fingerprint());
    match &report.failure {
        None => {
            println!("passed: {:?}", report.totals);
            ExitCode::SUCCESS
        }
        Some(what) => {
            println!("failed: {what}");
            ExitCode::FAILURE
        }
    }
}

fn many(options: &Options) -> ExitCode {
    let mut soak = Soak::new(options.kind, &options.changes, options.jobs);
    soak.keep_going = options.keep_going;
    soak.limit(options.limit);
    let told = |seed: u64, what: &str| {
        let command = shrink::command(seed, options.kind, &options.changes);
        println!("seed {seed} failed: {what}\n  replay: {command}");
    };
    let wanted = options.wanted();
    if wanted == Wanted::Required {
        soak.campaign(options.start, options.seeds > 0, told);
    }
    soak.range(options.start..options.start + options.seeds, told);
    report(options, &soak.summary(), soak.elapsed())
}

/// Prints what many runs came to.
fn report(options: &Options, summary: &Summary, took: Duration) -> ExitCode {
    let wanted = options.wanted();
    if options.json {
        println!("{}", summary.json(took));
    } else {
        if options.coverage.is_some_and(|wanted| wanted != Wanted::No) {
            println!("{}", summary.coverage.describe());
        }
        println!("{}", summary.figures(took));
    }
    let gaps = match wanted {
        Wanted::Required => summary.gaps(),
        Wanted::No | Wanted::Printed => Vec::new(),
    };
    for gap in &gaps {
        eprintln!("coverage: {gap}");
    }
    ExitCode::from(u8::from(summary.failed > 0 || !gaps.is_empty()))
}
