//! The table for people and the results for programs.

use std::fmt::Write;

use cowslip_testbed::Spread;
use serde_json::{Value, json};

use super::cell::Contestant;

/// What a table tells of each run, in order: a title with its unit, and decimals.
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

/// One run of one contestant.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// Operations a second: what contestants are compared by.
    pub iops: f64,
    /// What else is known, each at most once.
    pub figures: Vec<(Column, f64)>,
    /// What the program itself told, for programs.
    pub told: Value,
}

impl Measurement {
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
        if !self.told.is_null() {
            run["told"] = self.told.clone();
        }
        run
    }
}

/// One contestant in one cell.
#[derive(Clone, Debug)]
pub struct Row {
    /// The file system.
    pub filesystem: String,
    /// The cell's name.
    pub cell: String,
    /// Who.
    pub contestant: Contestant,
    /// Its runs.
    pub runs: Vec<Measurement>,
    /// It was below half of both its neighbours, and stayed there when it was measured again.
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
        let spread = Spread::of(self.runs.iter().map(|run| run.iops).collect());
        spread.map_or(0.0, |spread| spread.median)
    }

    fn median(&self, column: Column) -> Option<f64> {
        let values = self.runs.iter().filter_map(|run| run.figure(column));
        Spread::of(values.collect()).map(|spread| spread.median)
    }
}

/// How many times as fast a row is as others of its cell, by the medians.
#[derive(Clone, Copy, Debug, Default)]
struct Ratios {
    qemu_img: Option<f64>,
    /// The better of sparse and allocated raw files.
    raw_first_touch: Option<f64>,
    raw_written: Option<f64>,
    /// The same with memory for all tables.
    unlimited: Option<f64>,
}

impl Ratios {
    fn named(self) -> [(&'static str, Option<f64>); 4] {
        [
            ("x QEMU", self.qemu_img),
            ("x first", self.raw_first_touch),
            ("x written", self.raw_written),
            ("x unlimited", self.unlimited),
        ]
    }
}

/// All that was measured.
#[derive(Debug, Default)]
pub struct Report {
    /// What was asked for, and on what machine.
    pub conditions: Value,
    /// In the order of measurement.
    pub rows: Vec<Row>,
    /// Said below the table.
    pub notes: Vec<String>,
}

impl Report {
    fn ratios(&self, row: &Row) -> Ratios {
        let ours = row.contestant;
        let best = |wanted: &dyn Fn(Contestant) -> bool| {
            let others = self.rows.iter().filter(|other| {
                other.cell == row.cell
                    && other.filesystem == row.filesystem
                    && wanted(other.contestant)
            });
            let best = others.map(Row::iops).reduce(f64::max)?;
            (ours.is_cowslip() && best > 0.0).then(|| row.iops() / best)
        };
        Ratios {
            qemu_img: best(&|other| ours.is_rivalled_by(other)),
            raw_first_touch: best(&Contestant::is_raw_first_touch),
            raw_written: best(&Contestant::is_raw_written),
            unlimited: best(&|other| ours.is_limited_form_of(other)),
        }
    }

    /// Every column that a run has, in the order of the fullest run.
    fn columns(&self) -> Vec<Column> {
        let runs = self.rows.iter().flat_map(|row| &row.runs);
        let fullest = runs.max_by_key(|run| run.figures.len());
        let figures = fullest.iter().flat_map(|run| &run.figures);
        figures.map(|(column, _)| *column).collect()
    }

    /// Whether no row has that ratio, so that its column would be empty.
    fn has_ratio(&self, index: usize) -> bool {
        let mut ratios = self.rows.iter().map(|row| self.ratios(row).named());
        ratios.any(|ratios| ratios[index].1.is_some())
    }

    /// The table, with its notes.
    pub fn text(&self) -> String {
        let mut lines = vec![self.head()];
        lines.extend(self.rows.iter().map(|row| self.cells_of(row)));
        let mut text = aligned(&lines);
        for note in &self.notes {
            text += &format!("\n{note}\n");
        }
        text
    }

    fn head(&self) -> Vec<String> {
        let mut head = vec!["fs", "cell", "contestant", "IOPS", "least-most"];
        let ratios = Ratios::default().named();
        let shown = (0..ratios.len()).filter(|index| self.has_ratio(*index));
        head.extend(shown.map(|index| ratios[index].0));
        head.extend(self.columns().iter().map(|column| column.title));
        head.into_iter().map(str::to_string).collect()
    }

    fn cells_of(&self, row: &Row) -> Vec<String> {
        let iops = Spread::of(row.runs.iter().map(|run| run.iops).collect());
        let mark = if row.is_outlier { "!" } else { "" };
        let mut cells = vec![
            row.filesystem.clone(),
            row.cell.clone(),
            row.contestant.name(),
            format!("{mark}{:.0}", row.iops()),
            iops.map_or(String::new(), |iops| {
                format!("{:.0}-{:.0}", iops.least, iops.greatest)
            }),
        ];
        let mut push = |value: Option<f64>, decimals: usize| {
            cells.push(value.map_or(String::new(), |value| format!("{value:.decimals$}")));
        };
        for (index, (_, ratio)) in self.ratios(row).named().into_iter().enumerate() {
            if self.has_ratio(index) {
                push(ratio, 2);
            }
        }
        for column in self.columns() {
            push(row.median(column), column.decimals);
        }
        cells
    }

    /// The results for programs.
    pub fn json(&self) -> Value {
        let rows = self.rows.iter().map(|row| {
            let ratios = self.ratios(row);
            json!({
                "filesystem": row.filesystem,
                "cell": row.cell,
                "contestant": row.contestant.name(),
                "median-iops": row.iops(),
                "times-qemu-img": ratios.qemu_img,
                "times-raw-first-touch": ratios.raw_first_touch,
                "times-raw-written": ratios.raw_written,
                "times-unlimited": ratios.unlimited,
                "outlier": row.is_outlier,
                "runs": row.runs.iter().map(Measurement::json).collect::<Vec<_>>(),
            })
        });
        let rows: Vec<Value> = rows.collect();
        json!({ "conditions": self.conditions, "rows": rows, "notes": self.notes })
    }
}

/// Lines of cells as a table: names to the left, numbers to the right.
fn aligned(lines: &[Vec<String>]) -> String {
    /// Columns that hold names.
    const NAMES: usize = 3;
    let columns = lines.first().map_or(0, Vec::len);
    let width = |index: usize| {
        let lengths = lines.iter().filter_map(|line| line.get(index));
        lengths.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let mut row = String::new();
        for (index, (cell, width)) in line.iter().zip(&widths).enumerate() {
            let written = match index < NAMES {
                true => write!(row, "{cell:<width$}  "),
                false => write!(row, "{cell:>width$}  "),
            };
            written.expect("a string takes all");
        }
        text += row.trim_end();
        text.push('\n');
    }
    text
}
