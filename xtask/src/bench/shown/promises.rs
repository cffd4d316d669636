//! The promises of allocation: which cells, which measure, how much; and how rows are compared with
//! them.

use std::fmt::{self, Display, Formatter};

use cowslip_testbed::Spread;
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
    /// A row of a table, as the command tells it.
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
}

fn bytes(text: &str) -> Option<u64> {
    let (digits, unit) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 1 << 10),
        b'M' => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    digits.parse::<u64>().ok().map(|number| number * unit)
}

/// A promise: which cells of which table, what of them, how much.
struct Promise {
    table: &'static str,
    case: &'static str,
    figure: &'static str,
    must_reach: f64,
    applies: fn(&Row) -> bool,
    value: fn(&Row, &[Row], Pick) -> Option<f64>,
    /// The row to compare with, if it is in another cell: it is measured at another time, so runs
    /// cannot be paired.
    other: Option<OtherRow>,
}

type OtherRow = for<'a> fn(&Row, &'a [Row]) -> Option<&'a Row>;

fn ours(row: &Row) -> bool {
    row.contestant == "cowslip"
}

fn is_small(row: &Row) -> bool {
    ours(row) && matches!(row.sizes(), Some((4096 | 8192, None)))
}

fn has_subclusters(row: &Row, state: &str) -> bool {
    ours(row) && row.says(state) && matches!(row.sizes(), Some((_, Some(_))))
}

fn subclusters_empty(row: &Row) -> bool {
    has_subclusters(row, "empty")
}

fn subclusters_backed(row: &Row) -> bool {
    has_subclusters(row, "backed") && matches!(row.sizes(), Some((_, Some(0..=4096))))
}

fn plain(row: &Row, state: &str) -> bool {
    ours(row) && row.says(state) && matches!(row.sizes(), Some((65536.., None)))
}

fn times_qemu(row: &Row, _: &[Row], pick: Pick) -> Option<f64> {
    row.ratio("times-qemu-img", pick)
}

fn times_first(row: &Row, _: &[Row], pick: Pick) -> Option<f64> {
    row.ratio("times-raw-first-touch", pick)
}

fn times_written(row: &Row, _: &[Row], pick: Pick) -> Option<f64> {
    row.ratio("times-raw-written", pick)
}

/// The row of another contestant in the same cell.
fn beside<'a>(row: &Row, rows: &'a [Row], contestant: &str) -> Option<&'a Row> {
    rows.iter().find(|other| {
        (other.table, &other.filesystem, &other.cell) == (row.table, &row.filesystem, &row.cell)
            && other.contestant == contestant
    })
}

/// The row without subclusters: "64K, empty" of "64K/2K, empty".
fn without_subclusters<'a>(row: &Row, rows: &'a [Row]) -> Option<&'a Row> {
    let (sizes, rest) = row.cell.split_once(", ")?;
    let plain = format!("{}, {rest}", sizes.split('/').next()?);
    rows.iter()
        .find(|other| ours(other) && other.filesystem == row.filesystem && other.cell == plain)
}

fn on_against_off(row: &Row, rows: &[Row], pick: Pick) -> Option<f64> {
    let plain = without_subclusters(row, rows)?;
    Some(row.figure("iops", pick)? / plain.figure("iops", pick)?)
}

fn qemus_cpu_over_ours(row: &Row, rows: &[Row], pick: Pick) -> Option<f64> {
    let theirs = beside(row, rows, "qemu-img")?;
    Some(theirs.figure("CPU us", pick)? / row.figure("CPU us", pick)?)
}

fn over_sparse_raw(row: &Row, rows: &[Row], pick: Pick) -> Option<f64> {
    let raw = beside(row, rows, "raw sparse")?;
    Some(row.figure("iops", pick)? / raw.figure("iops", pick)?)
}

fn times_unlimited(row: &Row, _: &[Row], pick: Pick) -> Option<f64> {
    row.ratio("times-unlimited", pick)
}

/// With 64 MiB for tables.
fn laid_out(row: &Row, layout: &str) -> bool {
    row.contestant == "cowslip 64M" && row.says(layout)
}

/// Live data over space: 1 is the best there is.
fn live_over_space(row: &Row, _: &[Row], pick: Pick) -> Option<f64> {
    Some(1.0 / row.figure("over live", pick)?)
}

const fn promise(
    (table, case): (&'static str, &'static str),
    (figure, must_reach): (&'static str, f64),
    applies: fn(&Row) -> bool,
    value: fn(&Row, &[Row], Pick) -> Option<f64>,
) -> Promise {
    Promise {
        table,
        case,
        figure,
        must_reach,
        applies,
        value,
        other: None,
    }
}

const PROMISES: &[Promise] = &[
    promise(
        ("subclusters", "4K and 8K clusters"),
        ("x QEMU", 15.0),
        is_small,
        times_qemu,
    ),
    promise(
        ("subclusters", "4K and 8K clusters"),
        ("x written raw", 1.0),
        is_small,
        times_written,
    ),
    promise(
        ("subclusters", "16K to 2M, subclusters, empty"),
        ("x first touch of raw", 0.9),
        subclusters_empty,
        times_first,
    ),
    promise(
        ("subclusters", "16K to 2M, subclusters, empty"),
        ("x QEMU", 1.5),
        subclusters_empty,
        times_qemu,
    ),
    promise(
        ("subclusters", "subclusters up to 4K, backed"),
        ("x first touch of raw", 0.9),
        subclusters_backed,
        times_first,
    ),
    promise(
        ("subclusters", "subclusters up to 4K, backed"),
        ("x QEMU", 1.5),
        subclusters_backed,
        times_qemu,
    ),
    promise(
        ("subclusters", "64K to 2M, plain, empty"),
        ("x first touch of raw", 0.9),
        |row| plain(row, "empty"),
        times_first,
    ),
    promise(
        ("subclusters", "64K to 2M, plain, empty"),
        ("x QEMU", 1.5),
        |row| plain(row, "empty"),
        times_qemu,
    ),
    promise(
        ("subclusters", "64K to 2M, plain, backed"),
        ("x QEMU", 1.5),
        |row| plain(row, "backed"),
        times_qemu,
    ),
    Promise {
        other: Some(without_subclusters),
        ..promise(
            ("subclusters", "subclusters on against off"),
            ("on / off", 0.97),
            subclusters_empty,
            on_against_off,
        )
    },
    promise(
        ("subclusters", "sparse policy, empty"),
        ("x sparse raw", 0.9),
        |row| row.contestant == "cowslip sparse" && row.says("empty"),
        over_sparse_raw,
    ),
    promise(
        ("steady", "overwrites and reads"),
        ("x written raw", 0.97),
        |row| ours(row) && row.says("filled"),
        times_written,
    ),
    promise(
        ("steady", "overwrites and reads"),
        ("QEMU's CPU time / ours", 2.0),
        |row| ours(row) && row.says("filled"),
        qemus_cpu_over_ours,
    ),
    promise(
        ("flush", "flush after every write"),
        ("x QEMU", 1.5),
        |row| ours(row) && row.says("flush every 1"),
        times_qemu,
    ),
    promise(
        ("metadata", "8 TiB, 64 MiB for tables, contiguous"),
        ("x unlimited", 0.95),
        |row| laid_out(row, "contiguous"),
        times_unlimited,
    ),
    promise(
        ("metadata", "8 TiB, 64 MiB, 30% scattered"),
        ("x unlimited", 0.7),
        |row| laid_out(row, "30% scattered"),
        times_unlimited,
    ),
    promise(
        ("served", "served over NBD, depth 32"),
        ("x qemu-storage-daemon", 1.3),
        |row| ours(row) && row.says("depth 32"),
        times_qemu,
    ),
    promise(
        ("served", "served over NBD, depth 128"),
        ("x qemu-storage-daemon", 2.0),
        |row| ours(row) && row.says("depth 128"),
        times_qemu,
    ),
    promise(
        ("discard", "half discarded, 1M clusters, sparse"),
        ("live / space", 0.952),
        |row| {
            row.contestant == "cowslip sparse" && row.cell.starts_with("1M") && !row.says("churn")
        },
        live_over_space,
    ),
];

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
        if let Some(other) = promise.other {
            let theirs = other(row, rows)?.spread("iops")?;
            return Some(Apart::Iops([ends(row.spread("iops")?), ends(theirs)]));
        }
        let ratios = (0..row.runs()).filter_map(|run| (promise.value)(row, rows, Pick::Run(run)));
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
    promise: &'static Promise,
    /// Cells that it is about.
    cells: usize,
    /// The middle of their ratios: of many cells with few runs the worst is below the truth.
    median: f64,
    worst: f64,
    worst_cell: String,
    apart: Option<Apart>,
}

impl Verdict {
    fn of(promise: &'static Promise, filesystem: &str, rows: &[Row]) -> Option<Verdict> {
        let about = |row: &&Row| {
            row.filesystem == filesystem && row.table == promise.table && (promise.applies)(row)
        };
        let value = |row| Some(((promise.value)(row, rows, Pick::Median)?, row));
        let values: Vec<(f64, &Row)> = rows.iter().filter(about).filter_map(value).collect();
        let (worst, row) = values.iter().min_by(|a, b| a.0.total_cmp(&b.0))?;
        let median = Spread::of(values.iter().map(|(value, _)| *value).collect())?.median;
        Some(Verdict {
            filesystem: filesystem.to_string(),
            promise,
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
    let pairs = filesystems
        .iter()
        .flat_map(|filesystem| PROMISES.iter().map(move |promise| (promise, filesystem)));
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
            .filter(|v| (v.promise.case, v.promise.figure) == (case, figure));
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
        let median = Pick::Median;
        assert_eq!(on_against_off(&rows[1], &rows, median), Some(0.5));
        assert_eq!(qemus_cpu_over_ours(&rows[1], &rows, median), Some(0.25));
        assert_eq!(over_sparse_raw(&rows[1], &rows, median), Some(2.0));
        assert_eq!(over_sparse_raw(&rows[0], &rows, median), None);
        assert!(plain(&rows[0], "empty") && !plain(&rows[1], "empty"));
        assert!(subclusters_empty(&rows[1]) && !subclusters_empty(&rows[2]));
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
