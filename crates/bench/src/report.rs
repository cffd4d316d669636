//! Results of a table: runs, their medians and ratios, and the document for programs.

use cowslip_testbed::Spread;
use serde_json::{Value, json};

use crate::cell::Contestant;

/// Figure of each run in a table, in order: a title with its unit, and decimals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// The title; also the name for programs.
    pub title: &'static str,
    /// Decimals that are shown.
    pub decimals: usize,
}

/// A column.
pub const fn column(title: &'static str, decimals: usize) -> Column {
    Column { title, decimals }
}

/// A run of one contestant.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// Operations a second: what contestants are compared by.
    pub iops: f64,
    /// Other figures, each at most once.
    pub figures: Vec<(Column, f64)>,
    /// The JSON output of the program itself.
    pub output: Value,
    /// How it was started, as a shell takes it, where that is one command.
    pub command: Option<String>,
}

impl Measurement {
    /// A run without other figures.
    pub fn new(iops: f64, output: Value, command: Option<String>) -> Measurement {
        Measurement {
            iops,
            figures: Vec::new(),
            output,
            command,
        }
    }

    /// Adds a figure, if it is known.
    pub fn add(&mut self, column: Column, value: Option<f64>) {
        self.figures.extend(value.map(|value| (column, value)));
    }

    fn figure(&self, wanted: Column) -> Option<f64> {
        let found = self.figures.iter().find(|(column, _)| *column == wanted);
        found.map(|(_, value)| *value)
    }

    fn json(&self) -> Value {
        let mut run = json!({ "iops": self.iops });
        for (column, value) in &self.figures {
            run[column.title] = json!(value);
        }
        if !self.output.is_null() {
            run["told"] = self.output.clone();
        }
        run
    }
}

/// A contestant in one cell.
#[derive(Clone, Debug)]
pub struct Row {
    /// The file system.
    pub filesystem: String,
    /// The cell's name.
    pub cell: String,
    /// Contestant.
    pub contestant: Contestant,
    /// Its runs.
    pub runs: Vec<Measurement>,
    /// Whether it was below half of both its neighbours, and stayed there when it was measured
    /// again.
    pub is_outlier: bool,
}

impl Row {
    /// Without runs.
    pub fn new(filesystem: &str, cell: &str, contestant: Contestant) -> Row {
        Row {
            filesystem: filesystem.to_string(),
            cell: cell.to_string(),
            contestant,
            runs: Vec::new(),
            is_outlier: false,
        }
    }

    /// The median of operations a second; 0 without runs.
    pub fn iops(&self) -> f64 {
        self.spread().map_or(0.0, |spread| spread.median)
    }

    /// Operations a second of its runs.
    pub fn spread(&self) -> Option<Spread> {
        Spread::of(self.runs.iter().map(|run| run.iops).collect())
    }

    /// The median of a figure.
    pub fn median(&self, column: Column) -> Option<f64> {
        let values = self.runs.iter().filter_map(|run| run.figure(column));
        Spread::of(values.collect()).map(|spread| spread.median)
    }
}

/// How many times as fast one is as others of its cell.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ratios([Option<f64>; RATIOS.len()]);

/// A comparison with others of a cell, the best of which counts.
struct Comparison {
    title: &'static str,
    /// Name for programs.
    name: &'static str,
    is_with: fn(Contestant, Contestant) -> bool,
}

const RATIOS: [Comparison; 5] = [
    Comparison {
        title: "x QEMU",
        name: "times-qemu-img",
        is_with: |_, other| other.is_rival(),
    },
    // The better of sparse and allocated raw files.
    Comparison {
        title: "x first",
        name: "times-raw-first-touch",
        is_with: |_, other| other.is_raw_first_touch(),
    },
    Comparison {
        title: "x written",
        name: "times-raw-written",
        is_with: |_, other| other.is_raw_written(),
    },
    // The same with memory for all tables.
    Comparison {
        title: "x unlimited",
        name: "times-unlimited",
        is_with: |ours, other| ours.is_limited_form_of(other),
    },
    Comparison {
        title: "x 1 thread",
        name: "times-one-thread",
        is_with: |ours, other| ours.is_many_of(other),
    },
];

/// Names of ratios for programs, and their titles in tables.
pub const RATIO_TITLES: [(&str, &str); RATIOS.len()] = {
    let mut titles = [("", ""); RATIOS.len()];
    let mut index = 0;
    while index < RATIOS.len() {
        titles[index] = (RATIOS[index].name, RATIOS[index].title);
        index += 1;
    }
    titles
};

impl Ratios {
    /// Returns the ratios with their titles.
    pub fn titled(self) -> impl Iterator<Item = (&'static str, Option<f64>)> {
        RATIOS.iter().map(|ratio| ratio.title).zip(self.0)
    }

    fn write_to(self, object: &mut Value) {
        for (comparison, ratio) in RATIOS.iter().zip(self.0) {
            object[comparison.name] = json!(ratio);
        }
    }
}

/// The titles of those comparisons that there are among these contestants of a cell.
pub fn comparisons(contestants: &[Contestant]) -> Vec<&'static str> {
    let ours = || contestants.iter().filter(|c| c.is_cowslip());
    let compared = |comparison: &&Comparison| {
        ours().any(|ours| contestants.iter().any(|c| (comparison.is_with)(*ours, *c)))
    };
    let compared = RATIOS.iter().filter(compared);
    compared.map(|comparison| comparison.title).collect()
}

/// Returns the ratios of a row to those of its cell among these, by the medians.
pub fn ratios(row: &Row, rows: &[Row]) -> Ratios {
    ratios_of(row, rows, &|row| Some(row.iops()))
}

fn ratios_of(row: &Row, rows: &[Row], iops: &dyn Fn(&Row) -> Option<f64>) -> Ratios {
    let ours = row.contestant;
    let others = rows
        .iter()
        .filter(|other| other.cell == row.cell && other.filesystem == row.filesystem);
    let ratio = |comparison: &Comparison| {
        let others = others.clone();
        let others = others.filter(|other| (comparison.is_with)(ours, other.contestant));
        let best = others.filter_map(iops).reduce(f64::max)?;
        (ours.is_cowslip() && best > 0.0).then_some(iops(row)? / best)
    };
    Ratios(RATIOS.each_ref().map(ratio))
}

/// Returns a row, of these, for programs. Runs of one repetition, which followed one another, have
/// ratios of their own.
pub fn json(row: &Row, rows: &[Row]) -> Value {
    let runs = row.runs.iter().enumerate().map(|(index, run)| {
        let mut run = run.json();
        ratios_of(row, rows, &|row| Some(row.runs.get(index)?.iops)).write_to(&mut run);
        run
    });
    let mut object = json!({
        "filesystem": row.filesystem,
        "cell": row.cell,
        "contestant": row.contestant.name(),
        "median-iops": row.iops(),
    });
    ratios(row, rows).write_to(&mut object);
    object["outlier"] = json!(row.is_outlier);
    let command = row.runs.first().and_then(|run| run.command.as_deref());
    object["command"] = json!(command);
    object["runs"] = runs.collect();
    object
}
