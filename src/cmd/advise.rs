//! `advise`: which clusters, policy, preallocation, cache and chain would serve an image. Here
//! facts and workloads are collected; what follows from them is in the crate of that name.

use std::io::{BufReader, Read};
use std::path::Path;

use cowslip_advise::{
    Engine, Facts, Statistics, Workload, advise, as_json, as_text, check, directory_json,
    situations,
};
use cowslip_trace::{Reader, Request};
use serde_json::Value;

use crate::error::CommandError;
use crate::open::Trust;
use crate::options;
use crate::output::{OutputArgs, OutputFormat, Program, print, print_json};

mod facts;
#[cfg(test)]
mod tests;

use facts::Collect;

/// Most bytes of statistics, or of the results of a bench.
const TEXT_MAX: u64 = 64 << 20;

/// Command line of `advise`.
#[derive(clap::Args)]
#[command(after_help = "\
Workloads: random-writes, sequential, read-mostly, mixed, boot, discards, streams (files that grow side by side), fill \
(one file of known size, written once). A trace is one of 'cowslip serve --record'; statistics are those of 'cowslip \
daemon --metrics', of query-blockstats, or what a server reports on SIGUSR1. Nothing is changed. More: docs/advise.md.")]
pub struct Args {
    /// Format of the images, raw or qcow2; probed by default
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    /// Look at images although another process writes to them
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    trust: Trust,
    /// The guest's workload, by name
    #[arg(long, value_name = "NAME", value_parser = named, conflicts_with_all = ["trace", "statistics"])]
    workload: Option<Workload>,
    /// The guest's workload: a trace that was recorded
    #[arg(long, value_name = "FILE", conflicts_with = "statistics")]
    trace: Option<String>,
    /// The guest's workload: statistics of a daemon or a server
    #[arg(long, value_name = "FILE")]
    statistics: Option<String>,
    /// The node whose statistics count
    #[arg(long, value_name = "NAME", requires = "statistics")]
    node: Option<String>,
    /// Memory that tables may take, as served now
    #[arg(long, value_name = "SIZE", default_value = "32M")]
    cache_size: String,
    /// The engine that serves the images
    #[arg(long, value_enum, default_value = "cowslip", value_name = "NAME")]
    engine: EngineName,
    /// The device has moving parts, so that a seek takes milliseconds; by default so if the system
    /// says that of a SCSI or ATA disk
    #[arg(long)]
    rotational: bool,
    /// Show the model's predictions beside the measurements that they rest on, or, if files are
    /// named, beside those of 'bench subclusters --json' in them
    #[arg(long, conflicts_with_all = ["workload", "trace", "statistics"])]
    check: bool,
    #[command(flatten)]
    output: OutputArgs,
    /// Images, or a directory of them
    #[arg(value_name = "IMAGE|DIR", required_unless_present = "check")]
    names: Vec<String>,
}

/// Names of engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum EngineName {
    Cowslip,
    Qemu,
}

fn named(name: &str) -> Result<Workload, String> {
    Workload::named(name).ok_or_else(|| {
        let names: Vec<&str> = Workload::names().collect();
        format!("expected one of {}", names.join(", "))
    })
}

/// Runs `advise`. Returns the exit code.
pub fn run(args: &Args, program: &Program) -> u8 {
    program.exit_code(advised(args, program))
}

fn advised(args: &Args, program: &Program) -> Result<(), CommandError> {
    let format = args.output.format("advise", program)?;
    if args.check {
        let all = args.compared()?;
        // Prepared situations were measured on the machine of the documents.
        let prepared = match args.names.is_empty() {
            true => situations::compare(),
            false => Vec::new(),
        };
        match format {
            OutputFormat::Human if prepared.is_empty() => print(&check::as_text(&all)),
            OutputFormat::Human => {
                print(&(check::as_text(&all) + &situations::as_text(&prepared)));
            }
            OutputFormat::Json => {
                let mut value = check::as_json(&all);
                if !prepared.is_empty() {
                    value["situations"] = situations::as_json(&prepared);
                }
                print_json(&value);
            }
        }
        return Ok(());
    }
    let workload = args.workload()?;
    let collect = Collect {
        format: args.format.as_deref(),
        force_share: args.force_share,
        policy: args.trust.backing_policy,
        cache_bytes: options::size("cache-size", &args.cache_size)?,
        engine: match args.engine {
            EngineName::Cowslip => Engine::Cowslip,
            EngineName::Qemu => Engine::Qemu,
        },
        is_rotational: args.rotational,
    };
    let is_list = args.names.len() > 1 || args.names.iter().any(|name| Path::new(name).is_dir());
    let names = all_names(&args.names)?;
    let (found, complaints) = found(&names, &collect, program);
    let answers = found.iter().map(|facts| {
        let advice = advise(facts, &workload);
        match format {
            OutputFormat::Human => Value::from(as_text(facts, &workload, &advice)),
            OutputFormat::Json => as_json(facts, &workload, &advice),
        }
    });
    let answers: Vec<Value> = answers.collect();
    match (format, is_list) {
        (OutputFormat::Human, _) => {
            let texts = answers.iter().filter_map(Value::as_str);
            print(&texts.collect::<Vec<_>>().join("\n"));
        }
        (OutputFormat::Json, true) => print_json(&directory_json(answers)),
        (OutputFormat::Json, false) => answers.iter().for_each(print_json),
    }
    match complaints {
        0 => Ok(()),
        _ => Err(CommandError::already_reported()),
    }
}

/// The facts about all of these, and how many could not be looked at, of which is complained.
fn found(names: &[String], collect: &Collect<'_>, program: &Program) -> (Vec<Facts>, usize) {
    let mut found = Vec::new();
    let mut complaints = 0;
    for name in names {
        match collect.facts(name) {
            Ok(facts) => found.push(facts),
            Err(error) => {
                program.complain(error);
                complaints += 1;
            }
        }
    }
    // An image of the same golden one in another directory is not counted.
    let bases: Vec<_> = found
        .iter()
        .map(|facts| facts.image.backing.clone())
        .collect();
    for (facts, base) in found.iter_mut().zip(&bases) {
        if base.is_some() {
            let same = bases.iter().filter(|other| *other == base).count();
            facts.siblings = same as u64 - 1;
        }
    }
    (found, complaints)
}

impl Args {
    /// The model's predictions beside measurements.
    fn compared(&self) -> Result<Vec<check::Compared>, CommandError> {
        if self.names.is_empty() {
            return Ok(check::compare());
        }
        let mut all = Vec::new();
        for name in &self.names {
            let text = text_of("results", name)?;
            let results: Value =
                serde_json::from_str(&text).map_err(|error| unread("results", name, error))?;
            let compared = check::of_bench(&results, name);
            if compared.is_empty() {
                let why = "there is no cell of first writes beside a raw file in it";
                return Err(unread("results", name, why));
            }
            all.extend(compared);
        }
        Ok(all)
    }

    /// The workload that the command line names; a mixed one by default.
    fn workload(&self) -> Result<Workload, CommandError> {
        match (&self.workload, &self.trace, &self.statistics) {
            (Some(workload), _, _) => Ok(workload.clone()),
            (None, Some(file), _) => of_trace(file),
            (None, None, Some(file)) => of_statistics(file, self.node.as_deref()),
            (None, None, None) => {
                named("mixed").map_err(|why| CommandError::new(format!("--workload: {why}")))
            }
        }
    }
}

fn unread(kind: &str, file: &str, why: impl std::fmt::Display) -> CommandError {
    CommandError::new(format!("Could not read the {kind} '{file}': {why}"))
}

fn opened(kind: &str, file: &str) -> Result<std::fs::File, CommandError> {
    let failed = |error| unread(kind, file, cowslip::error::system_words(&error));
    std::fs::File::open(file).map_err(failed)
}

/// The text of a file, as far as it is of bearable length.
fn text_of(kind: &str, name: &str) -> Result<String, CommandError> {
    let failed = |error| unread(kind, name, cowslip::error::system_words(&error));
    let mut bytes = Vec::new();
    let read = opened(kind, name)?.take(TEXT_MAX).read_to_end(&mut bytes);
    read.map_err(failed)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn of_trace(name: &str) -> Result<Workload, CommandError> {
    let file = BufReader::new(opened("trace", name)?);
    let mut reader = Reader::new(file).map_err(|error| unread("trace", name, error))?;
    let mut failure = None;
    let requests = std::iter::from_fn(|| match reader.next()? {
        Ok(request) => Some(request),
        Err(error) => {
            failure = Some(error);
            None::<Request>
        }
    });
    let mut workload = Workload::of_trace(&format!("the trace '{name}'"), requests);
    if let Some(error) = failure {
        return Err(unread("trace", name, error));
    }
    workload.unknown = workload.unknown.saturating_add(reader.dropped());
    Ok(workload)
}

fn of_statistics(name: &str, node: Option<&str>) -> Result<Workload, CommandError> {
    let text = text_of("statistics", name)?;
    let statistics = Statistics::parse(&text);
    let workload = statistics.and_then(|statistics| statistics.workload(node));
    workload.map_err(|error| unread("statistics", name, error))
}

/// The images of directories among these names, in the order of their names, and the other names.
fn all_names(given: &[String]) -> Result<Vec<String>, CommandError> {
    let mut names = Vec::new();
    for name in given {
        if !Path::new(name).is_dir() {
            names.push(name.clone());
            continue;
        }
        let failed = |error: std::io::Error| unread("directory", name, error);
        let mut inside = Vec::new();
        for entry in std::fs::read_dir(name).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if is_image(&path) {
                inside.push(path.to_string_lossy().into_owned());
            }
        }
        if inside.is_empty() {
            return Err(unread("directory", name, "there is no image in it"));
        }
        inside.sort();
        names.append(&mut inside);
    }
    Ok(names)
}

/// Whether a file of a directory is an image: by its first bytes, or as raw by its name.
fn is_image(path: &Path) -> bool {
    if !std::fs::metadata(path).is_ok_and(|found| found.is_file()) {
        return false;
    }
    let is_raw = path
        .extension()
        .is_some_and(|it| it == "raw" || it == "img");
    let mut start = [0; 4];
    let file = std::fs::File::open(path);
    let read = file.and_then(|mut file| file.read_exact(&mut start));
    is_raw || (read.is_ok() && &start == b"QFI\xfb")
}
