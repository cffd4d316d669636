//! The command `cowslip-sim`: many seeds on several threads, or one seed with its record.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use cowslip_sim::config::{Kind, Part};
use cowslip_sim::run::{Changes, Report, Totals, run};
use cowslip_sim::shrink;
use cowslip_sim::trace::Trace;

const USAGE: &str = "\
usage: cowslip-sim [--seeds N] [--start S] [--jobs J] [--kind qcow2|raw|plain] [--keep-going]
       cowslip-sim --replay SEED [--kind K] [--salt N] [--skip ID,ID,...] [--tail LINES]
       cowslip-sim --shrink SEED [--kind K]

Every form takes --without PART,...: kills, faults, compressed, discards, maintenance, alignment,
raw-data, small-caches.
Runs the engine on simulated disks. Every run follows from its seed; a run that fails prints the
command that replays it.";

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
    };
    while let Some(name) = args.next() {
        if name == "--keep-going" {
            options.keep_going = true;
            continue;
        }
        let value = args.next().ok_or_else(|| format!("{name} needs a value"))?;
        let number = || {
            value
                .parse::<u64>()
                .map_err(|_| format!("{name}: not a number: {value}"))
        };
        match name.as_str() {
            "--seeds" => options.seeds = number()?,
            "--start" => options.start = number()?,
            "--jobs" => options.jobs = number()?.max(1) as usize,
            "--replay" => options.replay = Some(number()?),
            "--shrink" => options.shrink = Some(number()?),
            "--salt" => options.changes.salt = number()?,
            "--tail" => options.tail = number()? as usize,
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
    }
    Ok(options)
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(what) => {
            eprintln!("{what}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
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

fn show(report: &Report, tail: usize) -> ExitCode {
    let lines = report.trace.lines();
    for line in &lines[lines.len().saturating_sub(tail)..] {
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
    let begun = Instant::now();
    let next = AtomicU64::new(options.start);
    let end = options.start + options.seeds;
    let stop = AtomicBool::new(false);
    let totals = Mutex::new(Totals::default());
    let failures = AtomicU64::new(0);
    let work = || {
        while !stop.load(Ordering::Relaxed) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end {
                break;
            }
            let report = run(seed, options.kind, &options.changes, Trace::off());
            totals
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .add(&report.totals);
            if let Some(what) = report.failure {
                failures.fetch_add(1, Ordering::Relaxed);
                let first = what.lines().next().unwrap_or_default();
                println!(
                    "seed {seed} failed: {what}\n  replay: {}",
                    shrink::command(seed, options.kind, &options.changes)
                );
                debug_assert!(!first.is_empty(), "a failure says what is wrong");
                stop.fetch_or(!options.keep_going, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..options.jobs {
            scope.spawn(work);
        }
    });
    let totals = totals.into_inner().unwrap_or_else(PoisonError::into_inner);
    let seconds = begun.elapsed().as_secs_f64().max(1e-6);
    println!(
        "{} runs, {} requests, {} disk operations ({:.0}/s), {} crashes ({:.1}/s, {} with 8 or more \
         requests in flight), {} closes, {} faults in {seconds:.1} s; {} failed",
        totals.runs,
        totals.requests,
        totals.operations,
        totals.operations as f64 / seconds,
        totals.crashes,
        totals.crashes as f64 / seconds,
        totals.busy_crashes,
        totals.closes,
        totals.faults,
        failures.load(Ordering::Relaxed),
    );
    ExitCode::from(u8::from(failures.load(Ordering::Relaxed) > 0))
}
