//! `cargo xtask bench --shown`: the promises of allocation, each with what it must reach, in one run.
//!
//! The tables are the command's own (`cowslip bench TABLE --json`), but for the one over NBD; here their
//! rows are only held against the promises ([`promises`]), when each table is done and all together at the end. Of each
//! promise the worst cell is told. Before that, the rows of first writes are run with the process killed ([`killed`]).

use std::path::Path;
use std::process::{Command, Stdio};

use cowslip_testbed::Place;
use serde_json::{Value, json};

use self::promises::{Row, Verdict, verdicts};
use super::server::Kind;
use super::{Args, CellBench, Scale, cell, place, report};
use crate::run;

mod killed;
mod promises;

/// Killed writers: no table, but named like one.
const KILLED: &str = "killed";
/// First writes over NBD.
const NBD: &str = "nbd";
/// The command's own.
const TABLES: [&str; 5] = ["subclusters", "flush", "steady", "discard", "metadata"];
/// In flight in all of the command's tables.
const DEPTHS: &str = "--depths=32";

/// What was measured so far.
#[derive(Default)]
struct Shown {
    tables: Vec<Value>,
    rows: Vec<Row>,
    killed: Vec<String>,
}

/// Measures and tells of each promise the worst cell; if something fails, of what is measured.
pub fn run(args: &Args, binary: &Path, directory: &Path) -> Result<(), String> {
    let chosen = chosen(&args.tables)?;
    let mut shown = Shown::default();
    let outcome = args.filesystems.iter().try_for_each(|filesystem| {
        shown.measure_on(filesystem, args, &chosen, (binary, directory))
    });
    let verdicts = verdicts(&args.filesystems, &shown.rows);
    println!();
    print(&verdicts);
    let results = json!({
        "conditions": report::conditions(json!({})),
        "promises": verdicts.iter().map(Verdict::json).collect::<Vec<_>>(),
        "killed": shown.killed,
        "tables": shown.tables,
    });
    println!(
        "results: {}",
        report::write_results("shown", &results)?.display()
    );
    outcome
}

/// All that there are, or those that are named, in their order here.
fn chosen(names: &[String]) -> Result<Vec<&'static str>, String> {
    let all = || [KILLED, NBD].into_iter().chain(TABLES);
    if let Some(unknown) = names.iter().find(|name| !all().any(|known| known == *name)) {
        let all: Vec<&str> = all().collect();
        return Err(format!(
            "--tables expects some of {}, not '{unknown}'",
            all.join(", ")
        ));
    }
    let is_chosen = |table: &&str| names.is_empty() || names.iter().any(|name| name == table);
    Ok(all().filter(is_chosen).collect())
}

impl Shown {
    fn measure_on(
        &mut self,
        filesystem: &str,
        args: &Args,
        chosen: &[&'static str],
        (binary, directory): (&Path, &Path),
    ) -> Result<(), String> {
        let scale = Scale::new(args);
        if chosen.contains(&KILLED) || chosen.contains(&NBD) {
            let place = place(filesystem, directory, scale.filesystem_bytes)?;
            if chosen.contains(&KILLED) {
                println!("{filesystem}: killed writers");
                let killed = killed::run(binary, &place)?;
                let verdict = format!(
                    "{filesystem}: {} processes killed among their writes, {} writes flushed before: all there, no \
                     corruption",
                    killed.kills, killed.writes
                );
                println!("{verdict}");
                self.killed.push(verdict);
            }
            if chosen.contains(&NBD) {
                println!("{filesystem}: NBD");
                let told = over_nbd(args, binary, &place)?;
                let told = json!({ "conditions": { "table": NBD }, "rows": told });
                self.take(NBD, filesystem, told);
            }
        }
        // These make file systems of their own, where that was.
        for table in TABLES.into_iter().filter(|table| chosen.contains(table)) {
            let mut command = command(args, binary, table);
            if !has_cells(args, &mut command)? {
                println!("{filesystem}: {table} has no such cell");
                continue;
            }
            println!("{filesystem}: {table}");
            command.args(["--json", "--dir"]).arg(directory);
            if filesystem != "here" {
                command.arg(format!("--loop={filesystem}"));
            }
            command.stderr(Stdio::inherit());
            let told = run::output(&mut command)?;
            let told = serde_json::from_str(&told).map_err(|e| e.to_string())?;
            self.take(table, filesystem, told);
        }
        Ok(())
    }

    /// A table is done: takes its rows and says what they are to the promises.
    fn take(&mut self, table: &'static str, filesystem: &str, told: Value) {
        let rows: Vec<Row> = told["rows"].as_array().map_or(Vec::new(), |rows| {
            rows.iter().map(|row| Row::new(table, row)).collect()
        });
        print(&verdicts(&[filesystem.to_string()], &rows));
        self.rows.extend(rows);
        self.tables.push(told);
    }
}

fn print(verdicts: &[Verdict]) {
    if !verdicts.is_empty() {
        println!("{}", Verdict::titles());
    }
    for verdict in verdicts {
        println!("{verdict}");
    }
}

/// Ours and qemu-storage-daemon, with one client, at two depths; rows as the command's tables have them.
fn over_nbd(args: &Args, binary: &Path, place: &Place) -> Result<Vec<Value>, String> {
    let servers = [Kind::Cowslip, Kind::StorageDaemon];
    if run::find_program(Kind::StorageDaemon.name()).is_none() {
        return Ok(Vec::new());
    }
    let mut rows = Vec::new();
    for depth in [32, 128] {
        let scale = Scale {
            depth,
            ..Scale::new(args)
        };
        let mut report = report::Report::new(&scale, &servers);
        for cell in &cell::all(false) {
            let name = cell.name_at(depth);
            if args.cells.as_ref().is_some_and(|part| !name.contains(part)) {
                continue;
            }
            let bench = CellBench {
                place,
                cell,
                scale: &scale,
                binary,
            };
            bench.run(&servers, &mut report)?;
            report.print_last();
        }
        rows.extend(report.rows_json().iter().map(as_row_of_a_table));
    }
    Ok(rows)
}

/// Our side of a row over NBD, with its ratios.
fn as_row_of_a_table(row: &Value) -> Value {
    let runs_of = |kind: Kind| row["runs"][kind.name()].as_array();
    let ours = runs_of(Kind::Cowslip).into_iter().flatten();
    let theirs = runs_of(Kind::StorageDaemon);
    let runs = ours.enumerate().map(|(repetition, run)| {
        let iops = |run: &Value| run["iops"].as_f64();
        let theirs = theirs.and_then(|runs| iops(runs.get(repetition)?));
        let ratio = iops(run).zip(theirs).map(|(ours, theirs)| ours / theirs);
        let mut run = run.clone();
        run["times-qemu-img"] = json!(ratio);
        run
    });
    json!({
        "filesystem": row["filesystem"],
        "cell": row["cell"],
        "contestant": "cowslip",
        "times-qemu-img": row["ratio"],
        "runs": runs.collect::<Vec<_>>(),
        "runs-of-qemu-storage-daemon": theirs,
    })
}

/// The command that makes a table; where, and how it is told, is still to be said.
fn command(args: &Args, binary: &Path, table: &str) -> Command {
    let repetitions = args.repetitions.unwrap_or(if args.quick { 1 } else { 5 });
    let mut command = Command::new(binary);
    command.args(["bench", table, DEPTHS]);
    command.arg(format!("--repetitions={repetitions}"));
    let (mut requests, mut cells) = (args.requests, args.cells.as_deref());
    if args.quick && table == "metadata" {
        // Its disks are sparse, and smaller ones ask another question; with clusters of 64 KiB it takes minutes.
        requests = requests.or(Some(25_000));
        cells = cells.or(Some("1M/32K"));
    } else if args.quick {
        requests = requests.or(Some(2000));
        command.arg("--size=1G");
    }
    command.args(requests.map(|requests| format!("--requests={requests}")));
    command.args(cells.map(|part| format!("--cells={part}")));
    command
}

/// Whether the table has cells with the text of `--cells`. Which it has depends on its other options.
fn has_cells(args: &Args, command: &mut Command) -> Result<bool, String> {
    let Some(part) = &args.cells else {
        return Ok(true);
    };
    let mut list = Command::new(command.get_program());
    let words = command.get_args();
    let words = words.filter(|word| !word.to_string_lossy().starts_with("--cells="));
    let names = run::output(list.args(words).arg("--list"))?;
    Ok(names.lines().any(|name| name.contains(part)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_chosen_by_name() {
        let names = |text: &str| text.split(',').map(str::to_string).collect::<Vec<_>>();
        assert_eq!(chosen(&[]).unwrap().len(), 7);
        assert_eq!(chosen(&names("steady,nbd")), Ok(vec!["nbd", "steady"]));
        let refused = chosen(&names("steady,guest")).unwrap_err();
        assert!(refused.ends_with("metadata, not 'guest'"), "{refused}");
    }

    #[test]
    fn runs_over_nbd_are_paired_by_repetition() {
        let row = json!({
            "filesystem": "ext4",
            "cell": "no backing, depth 32",
            "ratio": 2.5,
            "runs": {
                "cowslip": [{ "iops": 6.0 }, { "iops": 8.0 }],
                "qemu-storage-daemon": [{ "iops": 3.0 }, { "iops": 2.0 }],
            },
        });
        let row = as_row_of_a_table(&row);
        let ratios = [0, 1].map(|run| row["runs"][run]["times-qemu-img"].as_f64());
        assert_eq!(ratios, [Some(2.0), Some(4.0)]);
        assert_eq!(row["times-qemu-img"], 2.5);
    }
}
