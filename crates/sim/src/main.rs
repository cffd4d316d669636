//! The command `cowslip-sim`: many runs on several threads, or one seed with its record.

use std::collections::BTreeSet;
use std::io;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Parser;
use cowslip_sim::config::{Kind, Part};
use cowslip_sim::perform::run;
use cowslip_sim::planted::{self, Trying};
use cowslip_sim::run::{Changes, Report};
use cowslip_sim::seeds;
use cowslip_sim::shrink;
use cowslip_sim::soak::Soak;
use cowslip_sim::summary::Summary;
use cowslip_sim::trace::Trace;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};

/// Runs the engine on simulated disks.
///
/// Every run follows from its seed; a run that fails prints the command that replays it. Without
/// --replay, --shrink or --planted it makes the runs of the mixture: drawn ones, directed ones,
/// stories and chains of images. Where no --start says which, it makes others each time, and prints
/// which ones.
#[derive(Parser)]
#[command(name = "cowslip-sim", bin_name = "cowslip-sim", max_term_width = 100)]
struct Options {
    /// Runs of the mixture, or of successive seeds where there is none (--kind, --drawn)
    #[arg(long, default_value_t = 1000, value_name = "N")]
    seeds: u64,
    /// The number of the first run; the clock says which if this does not
    #[arg(long, value_name = "S")]
    start: Option<u64>,
    /// Threads
    #[arg(long, default_value_t = 1, value_name = "J")]
    jobs: usize,
    /// Subject of the runs
    #[arg(long, default_value = "qcow2", value_name = "KIND", value_parser = kind)]
    kind: Kind,
    /// Successive seeds instead of the mixture: drawn runs alone
    #[arg(long, conflicts_with = "graph")]
    drawn: bool,
    /// Runs about graphs alone: disks whose chains change under their guests
    #[arg(long)]
    graph: bool,
    /// Runs about compactions alone: each session has one that its end cuts short
    #[arg(long, conflicts_with_all = ["graph", "drawn"])]
    compactions: bool,
    /// Go on after a run that fails
    #[arg(long)]
    keep_going: bool,
    /// Begins no run later than this after the first
    #[arg(long, value_name = "N")]
    seconds: Option<u64>,
    /// Prints where crashes and faults fell
    #[arg(long, group = "wanted")]
    coverage: bool,
    /// First aims runs at all places where they can fall, and fails if one stays empty; that is so
    /// by itself from 1000 runs on, but with --seconds, --without or --no-coverage
    #[arg(long, group = "wanted")]
    require_coverage: bool,
    /// Asks for no coverage
    #[arg(long, group = "wanted")]
    no_coverage: bool,
    /// Prints the figures as JSON
    #[arg(long)]
    json: bool,
    /// Performs the run of this seed and prints its record
    #[arg(long, value_name = "SEED", conflicts_with = "shrink")]
    replay: Option<u64>,
    /// Makes the run of this seed, which fails, smaller
    #[arg(long, value_name = "SEED")]
    shrink: Option<u64>,
    /// Number that selects another order of events
    #[arg(long, default_value_t = 0, value_name = "N")]
    salt: u64,
    /// Requests that are left out
    #[arg(long, value_delimiter = ',', value_name = "ID,...")]
    skip: Vec<u32>,
    /// Number of last lines of the record to print
    #[arg(long, value_name = "LINES")]
    tail: Option<usize>,
    /// Rounds that are kept
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Number of issues and completions after which the last round ends
    #[arg(long, value_name = "N")]
    moment: Option<u64>,
    /// Parts of runs that are left out
    #[arg(long, value_delimiter = ',', value_name = "PART,...", value_parser = part)]
    without: Vec<Part>,
    /// Plants one mistake after the other in the engine ("all", "quick" or names) and fails unless
    /// each is noticed; with --replay and --shrink it plants that one. In a build of cargo xtask
    /// mistakes
    #[arg(long, value_name = "NAME,...")]
    planted: Option<String>,
    /// Runs in which a planted mistake has to be noticed
    #[arg(long, default_value_t = 6000, value_name = "RUNS")]
    budget: u64,
    /// Run with one mistake, in this process
    #[arg(long, value_name = "NAME", hide = true)]
    trial: Option<String>,
}

fn kind(name: &str) -> Result<Kind, String> {
    match name {
        "qcow2" => Ok(Kind::Qcow2),
        "raw" => Ok(Kind::Raw),
        "plain" => Ok(Kind::Plain),
        _ => Err("it is qcow2, raw or plain".to_string()),
    }
}

fn part(name: &str) -> Result<Part, String> {
    let known = Part::NAMES.iter().find(|(known, _)| *known == name);
    known.map(|(_, part)| *part).ok_or_else(|| {
        let names: Vec<&str> = Part::NAMES.iter().map(|(name, _)| *name).collect();
        format!("the parts are {}", names.join(", "))
    })
}

/// Demands on the coverage.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    No,
    Printed,
    Required,
}

/// Number of runs from which a soak demands a full matrix, unless some part is left out of its
/// runs.
const DEMANDING_SEEDS: u64 = 1000;
/// Starts that the clock chooses from. Campaigns look through 20 000 seeds for each.
const STARTS: u64 = 1 << 24;

impl Options {
    fn wanted(&self) -> Wanted {
        let complete = self.kind == Kind::Qcow2
            && self.seeds >= DEMANDING_SEEDS
            && self.seconds.is_none()
            && self.first_seed().is_none()
            && self.without.is_empty();
        match (self.coverage, self.require_coverage, self.no_coverage) {
            (_, true, _) => Wanted::Required,
            (_, _, true) => Wanted::No,
            // The requested output is printed; a soak demands it as well.
            _ if complete => Wanted::Required,
            (true, ..) => Wanted::Printed,
            _ => Wanted::No,
        }
    }

    /// The first seed of the runs that are about one thing alone, if they are.
    fn first_seed(&self) -> Option<u64> {
        match (self.graph, self.compactions) {
            (true, _) => Some(seeds::GRAPHS),
            (_, true) => Some(seeds::COMPACTIONS),
            _ => None,
        }
    }

    fn changes(&self) -> Changes {
        Changes {
            skip: self.skip.iter().copied().collect::<BTreeSet<_>>(),
            salt: self.salt,
            edit: None,
            without: self.without.iter().copied().collect(),
            rounds: self.rounds,
            moment: self.moment,
        }
    }
}

/// The time between two lines about the progress of a soak.
const PROGRESS_EVERY: Duration = Duration::from_secs(60);
/// The exit code of an interrupted soak: a shell's for SIGINT.
const EXIT_INTERRUPTED: u8 = 130;

/// A start that no soak before had, as a rule.
fn start_by_clock() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let nanos = since.map_or(0, |since| since.as_nanos());
    (nanos % u128::from(STARTS)) as u64
}

fn main() -> ExitCode {
    let options = Options::parse();
    let changes = options.changes();
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
        let report = run(seed, options.kind, &changes, Trace::kept());
        return show(&report, options.tail.unwrap_or(usize::MAX));
    }
    if let Some(seed) = options.shrink {
        return match shrink::shrink(seed, options.kind, &changes, |text| eprintln!("{text}")) {
            None => {
                println!("seed {seed} passes");
                ExitCode::SUCCESS
            }
            Some(changes) => {
                let report = run(seed, options.kind, &changes, Trace::kept());
                let code = show(&report, options.tail.unwrap_or(usize::MAX));
                println!("replay: {}", shrink::command(seed, options.kind, &changes));
                code
            }
        };
    }
    many(&options, &changes)
}

/// Runs the suite of planted mistakes; with a replay it plants the one that is named, and no more.
fn plant(options: &Options, names: &str) -> Result<Option<ExitCode>, String> {
    let mistakes = planted::named(names)?;
    let start = options.start.unwrap_or(0);
    let first = options.first_seed().filter(|_| options.trial.is_none());
    let start = first.unwrap_or(0) + start;
    let trying = |runs: u64| Trying {
        runs: start..start + runs,
        drawn: options.drawn || options.first_seed().is_some(),
        seconds: options.seconds.unwrap_or(u64::MAX),
    };
    if options.trial.is_some() {
        planted::trial(mistakes[0], &trying(options.seeds));
        return Ok(Some(ExitCode::SUCCESS));
    }
    if options.replay.is_some() || options.shrink.is_some() {
        planted::plant(mistakes.first().copied());
        return Ok(None);
    }
    let trials = planted::suite(&mistakes, &trying(options.budget), options.jobs.max(1));
    let text = match options.json {
        true => planted::json(&trials),
        false => planted::table(&trials),
    };
    println!("{text}");
    let survived = trials.iter().any(|trial| trial.caught.is_none());
    Ok(Some(ExitCode::from(u8::from(survived))))
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

fn many(options: &Options, changes: &Changes) -> ExitCode {
    let start = options.start.unwrap_or_else(start_by_clock);
    let said = format!("start {start} (--start {start} makes the same runs again)");
    match options.json {
        // Standard output is the figures'.
        true => eprintln!("{said}"),
        false => println!("{said}"),
    }
    let mut soak = Soak::new(options.kind, changes, options.jobs.max(1));
    soak.keep_going = options.keep_going;
    soak.limit(options.seconds.map_or(Duration::MAX, Duration::from_secs));
    soak.report_progress(PROGRESS_EVERY, |summary, elapsed| {
        let (runs, failed) = (summary.totals.runs, summary.failed);
        let seconds = elapsed.as_secs();
        eprintln!("{runs} runs in {seconds} s, {failed} failed");
    });
    if let Err(err) = end_on_signals(&soak) {
        eprintln!("signals end the soak without its figures: {err}");
    }
    let on_failure = |seed: u64, what: &str| {
        let command = shrink::command(seed, options.kind, changes);
        println!("seed {seed} failed: {what}\n  replay: {command}");
    };
    if options.wanted() == Wanted::Required {
        soak.campaign(start % STARTS, options.seeds > 0, on_failure);
    }
    let runs = start..start + options.seeds;
    match options.first_seed() {
        Some(first) => soak.range(first + runs.start..first + runs.end, on_failure),
        None if options.kind == Kind::Qcow2 && !options.drawn => soak.mixture(runs, on_failure),
        None => soak.range(runs, on_failure),
    }
    let code = report(options, &soak.summary(), soak.elapsed());
    match soak.was_interrupted() {
        true => ExitCode::from(EXIT_INTERRUPTED),
        false => code,
    }
}

/// The first SIGINT or SIGTERM ends a soak after the runs under way, and its figures are printed;
/// the second ends the process.
///
/// # Errors
/// No handler could be installed.
fn end_on_signals(soak: &Soak<'_>) -> io::Result<()> {
    for signal in [SIGINT, SIGTERM] {
        let flag = soak.interruption();
        register_conditional_shutdown(signal, i32::from(EXIT_INTERRUPTED), flag.clone())?;
        register(signal, flag)?;
    }
    Ok(())
}

/// Prints what many runs came to.
fn report(options: &Options, summary: &Summary, took: Duration) -> ExitCode {
    let wanted = options.wanted();
    if options.json {
        println!("{}", summary.json(took));
    } else {
        if options.coverage || options.require_coverage {
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
