//! The proof that the simulator finds mistakes: plants one after the other in the engine and runs
//! seeds until it is noticed. Only the engine of `cargo xtask mistakes` can make any.
//!
//! A mistake is noticed by the judgements that every run passes; nothing here knows what was
//! planted.

mod engine;

use std::ops::Range;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::config::Kind;
use crate::mixture::Mixture;
use crate::perform::run;
use crate::run::Changes;
use crate::trace::Trace;

/// Runs that a mistake meets.
#[derive(Clone, Debug)]
pub struct Trying {
    /// Numbers of the runs.
    pub runs: Range<u64>,
    /// Whether the seeds are successive ones, not those of the mixture.
    pub drawn: bool,
    /// Seconds after the start of the first run from which on no run begins.
    pub seconds: u64,
}

/// How a mistake was noticed.
#[derive(Clone, Debug)]
pub struct Caught {
    /// The seed.
    pub seed: u64,
    /// Check that has found it.
    pub judgement: &'static str,
    /// The message of the failure.
    pub what: String,
}

/// Outcome of a mistake.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The mistake.
    pub mistake: Mistake,
    /// How it was noticed; `None` if it survived.
    pub caught: Option<Caught>,
    /// Seeds that were run.
    pub seeds: u64,
    /// Crashes, and the checks after them.
    pub crashes: u64,
    /// Time that it took.
    pub seconds: f64,
}

/// A mistake that the engine of this build can make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// Name of the mistake.
    pub name: &'static str,
    /// The error that the engine makes.
    pub does: &'static str,
    /// Few seeds notice it: it is one of the gate's.
    pub is_quick: bool,
}

/// All that the engine of this build can make: none, but in the copy of `cargo xtask mistakes`.
fn known() -> impl Iterator<Item = Mistake> {
    engine::KNOWN.iter().map(|&(name, does, is_quick)| Mistake {
        name,
        does,
        is_quick,
    })
}

/// The mistakes of these names, `all` of them, or the `quick` ones.
///
/// # Errors
/// A name that is none, or none at all.
pub fn named(names: &str) -> Result<Vec<Mistake>, String> {
    let found: Vec<Mistake> = match names {
        "all" => known().collect(),
        "quick" => known().filter(|mistake| mistake.is_quick).collect(),
        _ => {
            let find = |name: &str| {
                let mistake = known().find(|mistake| mistake.name == name);
                mistake.ok_or_else(|| format!("no such mistake in this build: {name}"))
            };
            names.split(',').map(find).collect::<Result<_, _>>()?
        }
    };
    match found.is_empty() {
        true => Err("no mistake can be planted in this build: cargo xtask mistakes".to_string()),
        false => Ok(found),
    }
}

/// Plants a mistake, or none, for the images that this thread drives.
pub fn plant(mistake: Option<Mistake>) {
    engine::plant(mistake.map(|mistake| mistake.name));
}

/// Tries each mistake with these runs, in order, until it is noticed; some at a time.
pub fn suite(mistakes: &[Mistake], trying: &Trying, jobs: usize) -> Vec<Trial> {
    let next = AtomicUsize::new(0);
    let trials = Mutex::new(Vec::new());
    let work = || {
        while let Some(&mistake) = mistakes.get(next.fetch_add(1, Ordering::Relaxed)) {
            let trial = attempt(mistake, trying);
            eprintln!("{}: {} seeds", mistake.name, trial.seeds);
            let mut trials = trials.lock().unwrap_or_else(PoisonError::into_inner);
            trials.push(trial);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(work);
        }
    });
    let mut trials = trials.into_inner().unwrap_or_else(PoisonError::into_inner);
    trials.sort_by_key(|trial| mistakes.iter().position(|m| *m == trial.mistake));
    trials
}

/// A process of its own, since some mistakes end in a panic while another one unwinds.
fn attempt(mistake: Mistake, trying: &Trying) -> Trial {
    let begun = Instant::now();
    let mut trial = Trial {
        mistake,
        caught: None,
        seeds: 0,
        crashes: 0,
        seconds: 0.0,
    };
    let mut command = Command::new(std::env::current_exe().expect("this program is a file"));
    command.args(["--trial", mistake.name]);
    let Range { start, end } = trying.runs;
    command.args(["--start", &start.to_string()]);
    command.args(["--seeds", &(end - start).to_string()]);
    if trying.seconds != u64::MAX {
        command.args(["--seconds", &trying.seconds.to_string()]);
    }
    if trying.drawn {
        command.arg("--drawn");
    }
    let output = command.output().expect("this program runs again");
    let mut seed = 0;
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "seed" => {
                seed = rest.parse().unwrap_or(seed);
                trial.seeds += 1;
            }
            "crashes" => trial.crashes += rest.parse().unwrap_or(0),
            _ => {
                trial.caught = Some(Caught {
                    seed,
                    judgement: found_by(rest),
                    what: rest.to_string(),
                });
            }
        }
    }
    if trial.caught.is_none() && !output.status.success() {
        trial.caught = Some(Caught {
            seed,
            judgement: "panic",
            what: String::from_utf8_lossy(&output.stderr).trim().to_string(),
        });
    }
    trial.seconds = begun.elapsed().as_secs_f64();
    trial
}

/// Runs with one mistake, in this process, and prints its progress line by line.
pub fn trial(mistake: Mistake, trying: &Trying) {
    plant(Some(mistake));
    let (mixture, begun) = (Mixture::default(), Instant::now());
    let seeds = |run: u64| -> Vec<u64> {
        match trying.drawn {
            true => vec![run],
            false => mixture.seeds(run).collect(),
        }
    };
    for seed in trying.runs.clone().flat_map(seeds) {
        if begun.elapsed().as_secs() >= trying.seconds {
            return;
        }
        println!("seed {seed}");
        let report = run(seed, Kind::Qcow2, &Changes::default(), Trace::off());
        println!("crashes {}", report.totals.crashes);
        if let Some(what) = report.failure {
            // A failure of the engine without the mistake proves nothing.
            plant(None);
            let fails_anyway = run(seed, Kind::Qcow2, &Changes::default(), Trace::off());
            plant(Some(mistake));
            if fails_anyway.failure.is_some() {
                eprintln!("seed {seed} fails without any planted mistake");
                continue;
            }
            println!("caught {}", what.replace('\n', "; "));
            return;
        }
    }
}

/// Phrases of failures, and the judgement that says them.
const JUDGEMENTS: &[(&str, &str)] = &[
    ("nothing moves any more", "hang"),
    ("misses a change", "bitmaps"),
    ("has taken over", "cancelled job"),
    ("has moved a disk", "failed transaction"),
    ("in a backup", "bytes of a backup"),
    ("bytes of a backup", "size of a backup"),
    ("the bitmaps are", "bitmaps"),
    ("no end after", "hang"),
    ("panicked at", "panic"),
    ("is not protected", "protection"),
    ("found after reopening", "bytes after a crash"),
    ("size was found", "size after a crash"),
    ("were read;", "bytes of a read"),
    ("was read;", "bytes of a read"),
    ("snapshots reach", "bytes of a snapshot"),
    ("second reader", "second reader"),
    ("are leaked after", "lost space"),
    ("autoclear", "header bits"),
    ("raw data file", "raw data file"),
    ("what was committed into it", "bytes of a base"),
    ("the second opinion", "checks disagree"),
    ("check finds", "check"),
    ("the check fails", "check"),
    ("corrupt:", "second check"),
    ("although the disk did not", "request failed"),
    ("without a fault", "request failed"),
    ("does not open", "reopening"),
    ("after reopening", "reopening"),
];

fn found_by(what: &str) -> &'static str {
    let said = JUDGEMENTS.iter().find(|(phrase, _)| what.contains(phrase));
    said.map_or("preparation", |(_, judgement)| judgement)
}

/// The trials as a table.
pub fn table(trials: &[Trial]) -> String {
    let mut text = format!(
        "{:<32} {:<20} {:>7} {:>6} {:>8} {:>8}\n",
        "mistake", "caught by", "at seed", "seeds", "crashes", "seconds"
    );
    for trial in trials {
        let (by, at) = match &trial.caught {
            Some(caught) => (caught.judgement, caught.seed.to_string()),
            None => ("NOTHING", "-".to_string()),
        };
        text.push_str(&format!(
            "{:<32} {by:<20} {at:>7} {:>6} {:>8} {:>8.1}\n",
            trial.mistake.name, trial.seeds, trial.crashes, trial.seconds,
        ));
    }
    let caught = trials.iter().filter(|trial| trial.caught.is_some()).count();
    text.push_str(&format!("{caught} of {} mistakes caught", trials.len()));
    text
}

/// The trials as JSON.
pub fn json(trials: &[Trial]) -> String {
    let object = |trial: &Trial| {
        let caught = match &trial.caught {
            None => "null".to_string(),
            Some(caught) => format!(
                r#"{{"seed": {}, "judgement": "{}", "what": "{}"}}"#,
                caught.seed,
                caught.judgement,
                escaped(&caught.what)
            ),
        };
        format!(
            r#"  {{"mistake": "{}", "does": "{}", "caught": {caught}, "seeds": {}, "crashes": {}, "seconds": {:.2}}}"#,
            trial.mistake.name,
            escaped(trial.mistake.does),
            trial.seeds,
            trial.crashes,
            trial.seconds
        )
    };
    let objects: Vec<String> = trials.iter().map(object).collect();
    format!("[\n{}\n]", objects.join(",\n"))
}

fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '"' | '\\' => escaped.extend(['\\', c]),
            c if c.is_control() => escaped.push_str(&format!("\\u{:04x}", c as u32)),
            c => escaped.push(c),
        }
    }
    escaped
}
