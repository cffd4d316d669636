//! Results, as plain data: for JSON, for the table, for pages.

use cowslip_testbed::Spread;
use serde::Serialize;
use serde_json::{Value, json};

use super::method::Method;

/// The state of a file system before a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// A place of another user, whatever is in it.
    AsItIs,
    /// Just made.
    Fresh,
    /// Filled with small files of which a random part was removed.
    Aged,
}

impl State {
    /// Returns the state in one word.
    pub fn name(self) -> &'static str {
        match self {
            State::AsItIs => "as it is",
            State::Fresh => "fresh",
            State::Aged => "aged",
        }
    }
}

/// System calls of a run, as they were counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SystemCalls {
    /// `fallocate`, successful or not.
    pub fallocate: u64,
    /// `ftruncate`.
    pub ftruncate: u64,
    /// Writes; `None` where those of libc are not counted by the system.
    pub writes: Option<u64>,
    /// Reads of zeroes into a mapping.
    pub reads: u64,
    /// `mmap`.
    pub mappings: u64,
}

/// A run that came to its end.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Measured {
    /// Seconds until the call, or the last of the calls, returned.
    pub call_seconds: f64,
    /// Seconds until `fsync` after it returned.
    pub durable_seconds: f64,
    /// CPU time of the calling thread, `fsync` included; what the kernel's own threads write back
    /// is not in it.
    pub cpu_seconds: f64,
    /// Page faults during the run, if the system reports them.
    pub faults: Option<u64>,
    /// System calls that were made.
    pub calls: SystemCalls,
    /// Mapping records afterwards, if the file system lists them.
    pub extents: Option<u64>,
    /// The fewest that there could be.
    pub perfect: u64,
    /// Bytes of space afterwards.
    pub allocated_bytes: u64,
}

/// How a run ended.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Run {
    /// A run that was measured.
    Measured(Measured),
    /// The method failed, in the system's words.
    Failed(String),
}

/// A method in one state of one place.
#[derive(Clone, Debug)]
pub struct Row {
    /// The file system.
    pub place: String,
    /// Its state.
    pub state: State,
    /// The method.
    pub method: String,
    /// Its runs.
    pub runs: Vec<Run>,
}

impl Row {
    /// Without runs.
    pub fn new(place: &str, state: State, method: Method) -> Row {
        Row {
            place: place.to_string(),
            state,
            method: method.name(),
            runs: Vec::new(),
        }
    }

    /// The runs that came to their end.
    pub fn measured(&self) -> impl Iterator<Item = &Measured> {
        self.runs.iter().filter_map(|run| match run {
            Run::Measured(measured) => Some(measured),
            Run::Failed(_) => None,
        })
    }

    /// Why a run failed, if one did.
    pub fn failure(&self) -> Option<&str> {
        self.runs.iter().find_map(|run| match run {
            Run::Measured(_) => None,
            Run::Failed(words) => Some(words.as_str()),
        })
    }

    /// The middle and the ends of a figure.
    pub fn spread(&self, figure: impl Fn(&Measured) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.measured().filter_map(figure).collect())
    }

    /// Returns the results for programs.
    pub fn json(&self) -> Value {
        let median = |figure: fn(&Measured) -> Option<f64>| self.spread(figure).map(|s| s.median);
        json!({
            "filesystem": self.place,
            "state": self.state.name(),
            "method": self.method,
            "median-call-seconds": median(|run| Some(run.call_seconds)),
            "median-durable-seconds": median(|run| Some(run.durable_seconds)),
            "median-cpu-seconds": median(|run| Some(run.cpu_seconds)),
            "median-extents": median(|run| run.extents.map(|count| count as f64)),
            "perfect": self.measured().map(|run| run.perfect).max(),
            "called": self.measured().last().map(|run| calls(&run.calls, run.faults)),
            "runs": self.runs,
        })
    }
}

/// Returns the calls that were made, in words.
pub fn calls(calls: &SystemCalls, faults: Option<u64>) -> String {
    let named = [
        (Some(calls.ftruncate), "ftruncate"),
        (Some(calls.fallocate), "fallocate"),
        (Some(calls.mappings), "mmap"),
        (Some(calls.reads), "read"),
        (calls.writes, "write"),
    ];
    let mut words: Vec<String> = Vec::new();
    for (count, name) in named {
        match count {
            Some(0) => {}
            Some(1) => words.push(format!("1 {name}")),
            Some(count) => words.push(format!("{count} {name}s")),
            None => words.push("writes unknown".to_string()),
        }
    }
    if let (true, Some(faults)) = (calls.mappings > 0, faults) {
        words.push(format!("{faults} faults"));
    }
    words.join(", ")
}
