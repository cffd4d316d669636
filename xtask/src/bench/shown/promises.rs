//! The promises of allocation: which cells, which measure, how much; and how rows are compared with
//! them.

use std::fmt::{self, Display, Formatter};
use std::rc::Rc;

use cowslip_testbed::Spread;
use serde::Deserialize;
use serde_json::{Value, json};

/// Figures of one contestant in one cell.
pub struct Row {
    table: &'static str,
    filesystem: String,
    cell: String,
    contestant: String,
    json: Value,
}

/// Which of a row's figures.
#[derive(Clone, Copy)]
enum Pick {
    /// The middle of its runs.
    Median,
    /// Those of the run in this repetition, in which all contestants of a cell followed one
    /// another.
    Run(usize),
}

impl Row {
    /// A row of a table, as the command prints it.
    pub fn new(table: &'static str, row: &Value) -> Row {
        let text = |name: &str| row[name].as_str().unwrap_or_default().to_string();
        Row {
            table,
            filesystem: text("filesystem"),
            cell: text("cell"),
            contestant: text("contestant"),
            json: row.clone(),
        }
    }

    /// A ratio that the command has made.
    fn ratio(&self, name: &str, pick: Pick) -> Option<f64> {
        match pick {
            Pick::Median => self.json[name].as_f64(),
            Pick::Run(index) => self.json["runs"][index][name].as_f64(),
        }
    }

    /// A figure of its runs.
    fn figure(&self, name: &str, pick: Pick) -> Option<f64> {
        match pick {
            Pick::Median => self.spread(name).map(|spread| spread.median),
            Pick::Run(index) => self.json["runs"][index][name].as_f64(),
        }
    }

    fn spread(&self, figure: &str) -> Option<Spread> {
        let runs = self.json["runs"].as_array()?.iter();
        Spread::of(runs.filter_map(|run| run[figure].as_f64()).collect())
    }

    fn runs(&self) -> usize {
        self.json["runs"].as_array().map_or(0, Vec::len)
    }

    /// Sizes of cluster and of subcluster, if it has them, in bytes: "64K/2K, empty, depth 32".
    fn sizes(&self) -> Option<(u64, Option<u64>)> {
        let sizes = self.cell.split(", ").next()?;
        match sizes.split_once('/') {
            Some((cluster, sub)) => Some((bytes(cluster)?, Some(bytes(sub)?))),
            None => Some((bytes(sizes)?, None)),
        }
    }

    fn says(&self, word: &str) -> bool {
        self.cell.split(", ").any(|part| part == word)
    }

    /// The row of another contestant in the same cell.
    fn beside<'a>(&self, rows: &'a [Row], contestant: &str) -> Option<&'a Row> {
        let cell = |row: &Row| (row.table, row.filesystem.clone(), row.cell.clone());
        let mut others = rows.iter().filter(|other| cell(other) == cell(self));
        others.find(|other| other.contestant == contestant)
    }

    /// Ours without subclusters: "64K, empty" of "64K/2K, empty". It is measured at another time,
    /// so runs cannot be paired.
    fn without_subclusters<'a>(&self, rows: &'a [Row]) -> Option<&'a Row> {
        let (sizes, rest) = self.cell.split_once(", ")?;
        let plain = format!("{}, {rest}", sizes.split('/').next()?);
        let mut ours = rows.iter().filter(|other| other.contestant == "cowslip");
        ours.find(|other| other.filesystem == self.filesystem && other.cell == plain)
    }
}

fn bytes(text: &str) -> Option<u64> {
    let (digits, unit) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 1 << 10),
        b'M' => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    digits.parse::<u64>().ok().map(|number| number * unit)
}

/// A promise: which rows of which table, what of them, how much. They are in `promises.json`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Promise {
    table: String,
    case: String,
    figure: String,
    must_reach: f64,
    rows: Rows,
    value: Figure,
}

/// Which rows; of what is missing, all.
#[derive(Deserialize)]
struct Rows {
    contestant: String,
    /// Parts of the cell's name, and one that it has not.
    #[serde(default)]
    parts: Vec<String>,
    without: Option<String>,
    /// The least and the greatest size of a cluster in bytes.
    cluster: Option<(u64, u64)>,
    subclusters: Option<Subclusters>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Subclusters {
    None,
    /// Of at most this many bytes.
    UpTo(u64),
}

/// Figure of a row that is held against what it must reach.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Figure {
    /// A ratio that the command has made.
    Ratio(String),
    /// A figure over that of another contestant in the same cell.
    Over(String, String),
    /// That of another contestant over its own.
    Under(String, String),
    /// A figure over that of the cell without subclusters.
    OverPlain(String),
    /// One over a figure: of space over live data, whose best is 1.
    Inverse(String),
    /// The most that a figure may be, over it.
    Within(f64, String),
}

impl Rows {
    fn contain(&self, row: &Row) -> bool {
        let (Some((cluster, sub)), has) = (row.sizes(), |part: &String| row.says(part)) else {
            return false;
        };
        row.contestant == self.contestant
            && self.parts.iter().all(has)
            && !self.without.as_ref().is_some_and(has)
            && self
                .cluster
                .is_none_or(|(least, most)| (least..=most).contains(&cluster))
            && match self.subclusters {
                None => true,
                Some(Subclusters::None) => sub.is_none(),
                Some(Subclusters::UpTo(most)) => sub.is_some_and(|bytes| bytes <= most),
            }
    }
}

impl Figure {
    fn of(&self, row: &Row, rows: &[Row], pick: Pick) -> Option<f64> {
        let over = |row: &Row, other: Option<&Row>, figure| {
            Some(row.figure(figure, pick)? / other?.figure(figure, pick)?)
        };
        match self {
            Figure::Ratio(name) => row.ratio(name, pick),
            Figure::Over(figure, other) => over(row, row.beside(rows, other), figure),
            Figure::Under(figure, other) => over(row.beside(rows, other)?, Some(row), figure),
            Figure::OverPlain(figure) => over(row, row.without_subclusters(rows), figure),
            Figure::Inverse(figure) => Some(1.0 / row.figure(figure, pick)?),
            Figure::Within(most, figure) => Some(most / row.figure(figure, pick)?),
        }
    }
}

fn promises() -> Vec<Promise> {
    serde_json::from_str(include_str!("promises.json")).expect("the file is one of promises")
}

/// How far apart the runs of the worst cell were, from the least to the most.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Apart {
    /// Their ratios.
    Ratios(f64, f64),
    /// Operations a second of both sides.
    Iops([(f64, f64); 2]),
}

impl Apart {
    /// `None` if there is a single run.
    fn of(promise: &Promise, row: &Row, rows: &[Row]) -> Option<Apart> {
        if row.runs() < 2 {
            return None;
        }
        let ends = |spread: Spread| (spread.least, spread.greatest);
        if let Figure::OverPlain(figure) = &promise.value {
            let theirs = row.without_subclusters(rows)?.spread(figure)?;
            return Some(Apart::Iops([ends(row.spread(figure)?), ends(theirs)]));
        }
        let ratios = (0..row.runs()).filter_map(|run| promise.value.of(row, rows, Pick::Run(run)));
        let (least, greatest) = ends(Spread::of(ratios.collect())?);
        Some(Apart::Ratios(least, greatest))
    }

    fn json(self) -> Value {
        match self {
            Apart::Ratios(least, most) => json!({ "ratio": [least, most] }),
            Apart::Iops([(a, b), (c, d)]) => json!({ "iops": [a, b], "other-iops": [c, d] }),
        }
    }
}

impl Display for Apart {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Apart::Ratios(least, most) => write!(f, "{least:.2}-{most:.2}"),
            Apart::Iops([(a, b), (c, d)]) => write!(f, "{a:.0}-{b:.0} / {c:.0}-{d:.0} IOPS"),
        }
    }
}

/// The result of a promise on one file system.
pub struct Verdict {
    filesystem: String,
    promise: Rc<Promise>,
    /// Cells that it is about.
    cells: usize,
    /// The middle of their ratios: of many cells with few runs the worst is below the truth.
    median: f64,
    worst: f64,
    worst_cell: String,
    apart: Option<Apart>,
}

impl Verdict {
    fn of(promise: &Rc<Promise>, filesystem: &str, rows: &[Row]) -> Option<Verdict> {
        let about = |row: &&Row| {
            row.filesystem == filesystem && row.table == promise.table && promise.rows.contain(row)
        };
        let value = |row| Some((promise.value.of(row, rows, Pick::Median)?, row));
        let values: Vec<(f64, &Row)> = rows.iter().filter(about).filter_map(value).collect();
        let (worst, row) = values.iter().min_by(|a, b| a.0.total_cmp(&b.0))?;
        let median = Spread::of(values.iter().map(|(value, _)| *value).collect())?.median;
        Some(Verdict {
            filesystem: filesystem.to_string(),
            promise: Rc::clone(promise),
            cells: values.len(),
            median,
            worst: *worst,
            worst_cell: row.cell.clone(),
            apart: Apart::of(promise, row, rows),
        })
    }

    fn is_reached(&self) -> bool {
        self.worst >= self.promise.must_reach
    }

    /// For programs.
    pub fn json(&self) -> Value {
        json!({
            "filesystem": self.filesystem,
            "case": self.promise.case,
            "figure": self.promise.figure,
            "must": self.promise.must_reach,
            "worst": self.worst,
            "worst-spread": self.apart.map(Apart::json),
            "reached": self.is_reached(),
            "cell": self.worst_cell,
            "cells": self.cells,
            "median": self.median,
        })
    }

    /// The titles of [`Verdict`]s, as they are displayed.
    pub fn titles() -> String {
        format!(
            "{:5} {:38} {:24} {:>7} {:>7} {:>7} {:>5}  {:4} {}",
            "fs",
            "promise",
            "figure",
            "must",
            "worst",
            "median",
            "cells",
            "",
            "worst cell, its runs from the least to the most"
        )
    }
}

impl Display for Verdict {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let reached = if self.is_reached() { "ok" } else { "LESS" };
        write!(
            f,
            "{:5} {:38} {:24} {:>7.2} {:>7.2} {:>7.2} {:>5}  {reached:4} {}",
            self.filesystem,
            self.promise.case,
            self.promise.figure,
            self.promise.must_reach,
            self.worst,
            self.median,
            self.cells,
            self.worst_cell,
        )?;
        match &self.apart {
            Some(apart) => write!(f, ", {apart}"),
            None => Ok(()),
        }
    }
}

/// Of each promise on each file system that there are rows for.
pub fn verdicts(filesystems: &[String], rows: &[Row]) -> Vec<Verdict> {
    let promises: Vec<Rc<Promise>> = promises().into_iter().map(Rc::new).collect();
    let on = |filesystem| promises.iter().map(move |promise| (promise, filesystem));
    let pairs = filesystems.iter().flat_map(on);
    pairs
        .filter_map(|(promise, filesystem)| Verdict::of(promise, filesystem, rows))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row whose figures are these, run by run.
    fn row_of(cell: &str, contestant: &str, runs: &[f64]) -> Row {
        let median = Spread::of(runs.to_vec()).unwrap().median;
        let runs = runs
            .iter()
            .map(|value| json!({ "iops": value, "CPU us": value, "times-qemu-img": value }));
        let row = json!({
            "filesystem": "ext4",
            "cell": cell,
            "contestant": contestant,
            "median-iops": median,
            "times-qemu-img": median,
            "runs": runs.collect::<Vec<_>>(),
        });
        Row::new("subclusters", &row)
    }

    fn row(cell: &str, contestant: &str, iops: f64) -> Row {
        row_of(cell, contestant, &[iops])
    }

    fn ext4(rows: &[Row]) -> Vec<Verdict> {
        verdicts(&["ext4".to_string(), "xfs".to_string()], rows)
    }

    fn of<'a>(verdicts: &'a [Verdict], case: &str, figure: &str) -> &'a Verdict {
        let mut found = verdicts
            .iter()
            .filter(|v| (&*v.promise.case, &*v.promise.figure) == (case, figure));
        found.next().unwrap()
    }

    #[test]
    fn sizes_are_read_from_the_names_of_cells() {
        let sizes = |cell| row(cell, "cowslip", 1.0).sizes();
        assert_eq!(sizes("64K, empty, depth 32"), Some((64 << 10, None)));
        assert_eq!(
            sizes("16K/512, backed, depth 1"),
            Some((16 << 10, Some(512)))
        );
        assert_eq!(sizes("2M/64K, empty"), Some((2 << 20, Some(64 << 10))));
    }

    #[test]
    fn rows_are_compared_within_their_cell() {
        let rows = [
            row("64K, empty, depth 32", "cowslip", 8.0),
            row("64K/2K, empty, depth 32", "cowslip", 4.0),
            row("64K/2K, empty, depth 32", "qemu-img", 1.0),
            row("64K/2K, empty, depth 32", "raw sparse", 2.0),
        ];
        let of = |index: usize, figure: Value| {
            let figure: Figure = serde_json::from_value(figure).unwrap();
            figure.of(&rows[index], &rows, Pick::Median)
        };
        assert_eq!(of(1, json!({ "over-plain": "iops" })), Some(0.5));
        assert_eq!(
            of(1, json!({ "under": ["CPU us", "qemu-img"] })),
            Some(0.25)
        );
        assert_eq!(of(1, json!({ "over": ["iops", "raw sparse"] })), Some(2.0));
        assert_eq!(of(0, json!({ "over": ["iops", "raw sparse"] })), None);
        assert_eq!(of(1, json!({ "inverse": "CPU us" })), Some(0.25));
        assert_eq!(of(1, json!({ "within": [20.0, "CPU us"] })), Some(5.0));
        let contained = |which: Value| {
            let which: Rows = serde_json::from_value(which).unwrap();
            rows.each_ref().map(|row| which.contain(row))
        };
        let plain = json!({ "contestant": "cowslip", "parts": ["empty"], "subclusters": "none" });
        assert_eq!(contained(plain), [true, false, false, false]);
        let small = json!({ "contestant": "cowslip", "subclusters": { "up-to": 2048 } });
        assert_eq!(contained(small), [false, true, false, false]);
        let large = json!({ "contestant": "cowslip", "cluster": [65537, 1 << 20] });
        assert_eq!(contained(large), [false; 4]);
        let others = json!({ "contestant": "cowslip", "without": "empty" });
        assert_eq!(contained(others), [false; 4]);
    }

    /// A promise that no cell is about would be kept by saying nothing.
    #[test]
    fn the_promises_are_read() {
        let all = promises();
        assert_eq!(all.len(), 33);
        assert!(
            all.iter()
                .all(|p| super::super::TABLES.contains(&&*p.table))
        );
    }

    #[test]
    fn the_worst_cell_decides_and_the_median_stands_beside_it() {
        let rows = [
            row_of("4K, empty, depth 32", "cowslip", &[30.0, 10.0, 14.0]),
            row_of("8K, empty, depth 32", "cowslip", &[20.0, 21.0, 22.0]),
            row_of("4K, backed, depth 32", "cowslip", &[40.0, 41.0, 42.0]),
            row_of("8K, backed, depth 32", "cowslip sparse", &[1.0, 1.0, 1.0]),
        ];
        let verdicts = ext4(&rows);
        // Nothing is said of what was not measured: no ratio to raw files, no other table, no XFS.
        assert_eq!(verdicts.len(), 1);
        let verdict = of(&verdicts, "4K and 8K clusters", "x QEMU");
        assert!((verdict.worst - 14.0).abs() < 1e-9 && (verdict.median - 21.0).abs() < 1e-9);
        assert_eq!((verdict.cells, verdict.is_reached()), (3, false));
        assert_eq!(verdict.apart, Some(Apart::Ratios(10.0, 30.0)));
        let line = verdict.to_string();
        assert!(
            line.ends_with("LESS 4K, empty, depth 32, 10.00-30.00"),
            "{line}"
        );
        let title_ends = |title: &str| Verdict::titles().find(title).unwrap() + title.len();
        for (title, number) in [("must", "15.00"), ("worst", "14.00"), ("median", "21.00")] {
            assert!(line[..title_ends(title)].ends_with(number), "{line}");
        }
    }

    #[test]
    fn a_single_run_has_no_spread_and_what_is_enough_is_reached() {
        let rows = [row("4K, empty, depth 32", "cowslip", 15.0)];
        let verdicts = ext4(&rows);
        let verdict = of(&verdicts, "4K and 8K clusters", "x QEMU");
        assert!(verdict.is_reached() && verdict.apart.is_none());
        assert!(verdict.json()["worst-spread"].is_null());
    }

    #[test]
    fn what_was_measured_at_other_times_tells_both_sides() {
        let rows = [
            row_of("64K, empty, depth 32", "cowslip", &[100.0, 300.0]),
            row_of("64K/2K, empty, depth 32", "cowslip", &[150.0, 250.0]),
        ];
        let verdicts = ext4(&rows);
        let verdict = of(&verdicts, "subclusters on against off", "on / off");
        assert!((verdict.worst - 1.0).abs() < 1e-9);
        let sides = [(150.0, 250.0), (100.0, 300.0)];
        assert_eq!(verdict.apart, Some(Apart::Iops(sides)));
        assert!(verdict.to_string().ends_with("150-250 / 100-300 IOPS"));
    }
}
