//! `cargo xtask bench --shown`: the promises of allocation, each with what it must reach, in one run.
//!
//! The tables are the command's own (`cowslip bench TABLE --json`), but for the one over NBD; here their
//! rows are only held against the promises. Of each promise the worst cell is told. Before
//! that, the rows of first writes are run with the process killed ([`killed`]).

use std::path::Path;
use std::process::{Command, Stdio};

use cowslip_testbed::Place;
use serde_json::{Value, json};

use super::server::Kind;
use super::{Args, CellBench, Scale, cell, place, report};
use crate::run;

mod killed;

/// Figures of one contestant in one cell.
struct Row {
    table: &'static str,
    filesystem: String,
    cell: String,
    contestant: String,
    json: Value,
}

impl Row {
    fn new(table: &'static str, row: &Value) -> Row {
        let text = |name: &str| row[name].as_str().unwrap_or_default().to_string();
        Row {
            table,
            filesystem: text("filesystem"),
            cell: text("cell"),
            contestant: text("contestant"),
            json: row.clone(),
        }
    }

    fn number(&self, name: &str) -> Option<f64> {
        self.json[name].as_f64()
    }

    /// The median of a figure of its runs.
    fn median(&self, figure: &str) -> Option<f64> {
        let runs = self.json["runs"].as_array()?.iter();
        let values = runs.filter_map(|run| run[figure].as_f64()).collect();
        cowslip_testbed::Spread::of(values).map(|spread| spread.median)
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
    value: fn(&Row, &[Row]) -> Option<f64>,
}

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

fn times_qemu(row: &Row, _: &[Row]) -> Option<f64> {
    row.number("times-qemu-img")
}

fn times_first(row: &Row, _: &[Row]) -> Option<f64> {
    row.number("times-raw-first-touch")
}

fn times_written(row: &Row, _: &[Row]) -> Option<f64> {
    row.number("times-raw-written")
}

/// The row of another contestant in the same cell.
fn beside<'a>(row: &Row, rows: &'a [Row], contestant: &str) -> Option<&'a Row> {
    rows.iter().find(|other| {
        (other.table, &other.filesystem, &other.cell) == (row.table, &row.filesystem, &row.cell)
            && other.contestant == contestant
    })
}

/// Subclusters on against off.
fn on_against_off(row: &Row, rows: &[Row]) -> Option<f64> {
    let (sizes, rest) = row.cell.split_once(", ")?;
    let plain = format!("{}, {rest}", sizes.split('/').next()?);
    let plain = rows
        .iter()
        .find(|other| ours(other) && other.filesystem == row.filesystem && other.cell == plain)?;
    Some(row.number("median-iops")? / plain.number("median-iops")?)
}

fn qemus_cpu_over_ours(row: &Row, rows: &[Row]) -> Option<f64> {
    Some(beside(row, rows, "qemu-img")?.median("CPU us")? / row.median("CPU us")?)
}

fn over_sparse_raw(row: &Row, rows: &[Row]) -> Option<f64> {
    let raw = beside(row, rows, "raw sparse")?;
    Some(row.number("median-iops")? / raw.number("median-iops")?)
}

fn times_unlimited(row: &Row, _: &[Row]) -> Option<f64> {
    row.number("times-unlimited")
}

/// With 64 MiB for tables.
fn laid_out(row: &Row, layout: &str) -> bool {
    row.contestant == "cowslip 64M" && row.says(layout)
}

/// Live data over space: 1 is the best there is.
fn live_over_space(row: &Row, _: &[Row]) -> Option<f64> {
    Some(1.0 / row.median("over live")?)
}

const fn promise(
    (table, case): (&'static str, &'static str),
    (figure, must_reach): (&'static str, f64),
    applies: fn(&Row) -> bool,
    value: fn(&Row, &[Row]) -> Option<f64>,
) -> Promise {
    Promise {
        table,
        case,
        figure,
        must_reach,
        applies,
        value,
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
    promise(
        ("subclusters", "subclusters on against off"),
        ("on / off", 0.97),
        subclusters_empty,
        on_against_off,
    ),
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
        ("nbd", "served over NBD, depth 32"),
        ("x qemu-storage-daemon", 1.3),
        |row| row.says("depth 32"),
        times_qemu,
    ),
    promise(
        ("nbd", "served over NBD, depth 128"),
        ("x qemu-storage-daemon", 2.0),
        |row| row.says("depth 128"),
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

/// Measures and tells of each promise the worst cell.
pub fn run(args: &Args, binary: &Path, directory: &Path) -> Result<(), String> {
    let mut tables = Vec::new();
    let mut rows: Vec<Row> = Vec::new();
    let mut verdicts = Vec::new();
    for filesystem in &args.filesystems {
        let scale = Scale::new(args);
        let place = place(filesystem, directory, scale.filesystem_bytes)?;
        println!("{filesystem}: killed writers");
        let killed = killed::run(binary, &place)?;
        let verdict = format!(
            "{filesystem}: {} processes killed among their writes, {} writes flushed before: all there, no corruption",
            killed.kills, killed.writes
        );
        println!("{verdict}");
        verdicts.push(verdict);
        println!("{filesystem}: NBD");
        let told = over_nbd(binary, &place, scale)?;
        rows.extend(told.iter().map(|row| Row::new("nbd", row)));
        tables.push(json!({ "conditions": { "table": "nbd" }, "rows": told }));
        // The tables make file systems of their own.
        drop(place);
        for table in ["subclusters", "flush", "steady", "discard", "metadata"] {
            let told = measure(args, (binary, directory), (table, filesystem))?;
            let new = told["rows"].as_array().cloned().unwrap_or_default();
            rows.extend(new.iter().map(|row| Row::new(table, row)));
            tables.push(told);
        }
    }
    let lines = lines(args, &rows);
    for line in &lines {
        println!(
            "{:5} {:38} {:24} {:>7.2} {:>7.2}  {:4} {}",
            line["filesystem"].as_str().unwrap_or_default(),
            line["case"].as_str().unwrap_or_default(),
            line["figure"].as_str().unwrap_or_default(),
            line["must"].as_f64().unwrap_or_default(),
            line["worst"].as_f64().unwrap_or_default(),
            if line["reached"] == true {
                "ok"
            } else {
                "LESS"
            },
            line["cell"].as_str().unwrap_or_default(),
        );
    }
    let results = json!({
        "conditions": report::conditions(json!({})),
        "promises": lines,
        "killed": verdicts,
        "tables": tables,
    });
    println!(
        "results: {}",
        report::write_results("shown", &results)?.display()
    );
    Ok(())
}

fn lines(args: &Args, rows: &[Row]) -> Vec<Value> {
    let mut lines = Vec::new();
    for filesystem in &args.filesystems {
        for promise in PROMISES {
            let cells = rows
                .iter()
                .filter(|row| row.filesystem == *filesystem && row.table == promise.table);
            let values = cells
                .filter(|row| (promise.applies)(row))
                .filter_map(|row| Some(((promise.value)(row, rows)?, &row.cell)));
            let Some((worst, cell)) = values.min_by(|a, b| a.0.total_cmp(&b.0)) else {
                continue;
            };
            lines.push(json!({
                "filesystem": filesystem,
                "case": promise.case,
                "figure": promise.figure,
                "must": promise.must_reach,
                "worst": worst,
                "reached": worst >= promise.must_reach,
                "cell": cell,
            }));
        }
    }
    lines
}

/// Ours and qemu-storage-daemon, with one client, at two depths; rows as the command's tables have them.
fn over_nbd(binary: &Path, place: &Place, scale: Scale) -> Result<Vec<Value>, String> {
    let servers = [Kind::Cowslip, Kind::StorageDaemon];
    if run::find_program(Kind::StorageDaemon.name()).is_none() {
        return Ok(Vec::new());
    }
    let mut rows = Vec::new();
    for depth in [32, 128] {
        let scale = Scale { depth, ..scale };
        let mut report = report::Report::new(&scale, &servers);
        for cell in &cell::all(false) {
            let bench = CellBench {
                place,
                cell,
                scale: &scale,
                binary,
            };
            bench.run(&servers, &mut report)?;
            report.print_last();
        }
        rows.extend(report.rows_json().into_iter().map(|mut row| {
            row["contestant"] = json!("cowslip");
            row["times-qemu-img"] = row["ratio"].clone();
            row
        }));
    }
    Ok(rows)
}

fn measure(
    args: &Args,
    (binary, directory): (&Path, &Path),
    (table, filesystem): (&str, &str),
) -> Result<Value, String> {
    println!("{filesystem}: {table}");
    let repetitions = args.repetitions.unwrap_or(if args.quick { 1 } else { 5 });
    let mut command = Command::new(binary);
    command.args(["bench", table, "--json", "--depths=32"]);
    command.arg(format!("--repetitions={repetitions}"));
    match (table, args.quick) {
        // Its disks are sparse, and smaller ones ask another question; with clusters of 64 KiB it
        // takes minutes.
        ("metadata", true) => command.args(["--requests=25000", "--cells=1M/32K"]),
        ("metadata", false) => &mut command,
        (_, true) => command.args(["--size=1G", "--requests=2000"]),
        (_, false) => &mut command,
    };
    if let Some(operations) = args.operations {
        command.arg(format!("--requests={operations}"));
    }
    command.arg("--dir").arg(directory);
    if filesystem != "here" {
        command.arg(format!("--loop={filesystem}"));
    }
    command.stderr(Stdio::inherit());
    serde_json::from_str(&run::output(&mut command)?).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cell: &str, contestant: &str, iops: f64) -> Row {
        let row = json!({
            "filesystem": "ext4",
            "cell": cell,
            "contestant": contestant,
            "median-iops": iops,
            "times-qemu-img": iops,
            "runs": [{ "CPU us": iops }],
        });
        Row::new("subclusters", &row)
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
        assert_eq!(on_against_off(&rows[1], &rows), Some(0.5));
        assert_eq!(qemus_cpu_over_ours(&rows[1], &rows), Some(0.25));
        assert_eq!(over_sparse_raw(&rows[1], &rows), Some(2.0));
        assert_eq!(over_sparse_raw(&rows[0], &rows), None);
        assert!(plain(&rows[0], "empty") && !plain(&rows[1], "empty"));
        assert!(subclusters_empty(&rows[1]) && !subclusters_empty(&rows[2]));
    }
}
