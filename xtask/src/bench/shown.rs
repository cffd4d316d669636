//! `cargo xtask bench --shown`: the promises of allocation, each with what it must reach, in one
//! run.
//!
//! The tables are the command's own (`cowslip bench TABLE --json`); here their rows are only
//! compared with the promises ([`promises`]), when each table is done and all together at the end.
//! For each promise the worst cell is reported. Before that, the rows of first writes are run with
//! the process killed ([`killed`]).

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use self::promises::{Row, Verdict, verdicts};
use super::{Args, GIB, on, place, report};
use crate::run;

mod killed;
mod promises;

/// Killed writers: no table, but named like one.
const KILLED: &str = "killed";
/// First writes over NBD.
const SERVED: &str = "served";
/// The command's own.
const TABLES: [&str; 9] = [
    SERVED,
    "vhost-user",
    "fuse",
    "threads",
    "subclusters",
    "flush",
    "steady",
    "discard",
    "metadata",
];
/// QEMU's servers, the faster first.
pub const SERVERS: [&str; 2] = ["qemu-storage-daemon", "qemu-nbd"];

/// The measurements so far.
#[derive(Default)]
struct Shown {
    tables: Vec<Value>,
    rows: Vec<Row>,
    killed: Vec<String>,
}

/// Measures, and reports the worst cell of each promise; after a failure, of the cells measured so
/// far.
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
    let all = || [KILLED].into_iter().chain(TABLES);
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
        if chosen.contains(&KILLED) {
            let place = place(filesystem, directory, if args.quick { 3 } else { 8 } * GIB)?;
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
        // These make file systems of their own, where that was.
        for table in TABLES.into_iter().filter(|table| chosen.contains(table)) {
            let is_of_servers = [SERVED, "vhost-user", "fuse"].contains(&table);
            if is_of_servers && run::find_program(SERVERS[0]).is_none() {
                println!("{filesystem}: {table} needs {}", SERVERS[0]);
                continue;
            }
            let mut command = command(args, binary, table);
            if !has_cells(args, &mut command)? {
                println!("{filesystem}: {table} has no such cell");
                continue;
            }
            println!("{filesystem}: {table}");
            command.arg("--json").args(on(filesystem, directory));
            command.stderr(Stdio::inherit());
            let report = run::output(&mut command)?;
            let report = serde_json::from_str(&report).map_err(|e| e.to_string())?;
            self.take(table, filesystem, report);
        }
        Ok(())
    }

    /// A table is done: takes its rows and says what they are to the promises.
    fn take(&mut self, table: &'static str, filesystem: &str, report: Value) {
        let rows: Vec<Row> = report["rows"].as_array().map_or(Vec::new(), |rows| {
            rows.iter().map(|row| Row::new(table, row)).collect()
        });
        print(&verdicts(&[filesystem.to_string()], &rows));
        self.rows.extend(rows);
        self.tables.push(report);
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

/// Returns the command that makes a table, without the arguments for its place and its output.
fn command(args: &Args, binary: &Path, table: &str) -> Command {
    let repetitions = args.repetitions.unwrap_or(if args.quick { 1 } else { 5 });
    let mut command = Command::new(binary);
    command.args(["bench", table]);
    command.arg(format!("--repetitions={repetitions}"));
    if table == SERVED {
        command.args(["--depths=32,128", "--peers", SERVERS[0]]);
        command.args(of_served(args));
        command.args(args.cells.as_ref().map(|part| format!("--cells={part}")));
        return command;
    }
    command.args(match table {
        "vhost-user" | "fuse" => Some("--depths=32,1"),
        // They have depths of their own.
        "flush" | "discard" => None,
        _ => Some("--depths=32"),
    });
    let (mut requests, mut cells) = (args.requests, args.cells.as_deref());
    if args.quick && table == "metadata" {
        // Its disks are sparse, and smaller ones ask another question; with clusters of 64 KiB it
        // takes minutes.
        requests = requests.or(Some(25_000));
        cells = cells.or(Some("1M/32K"));
    } else if args.quick {
        requests = requests.or(match table {
            // Fewer would take no time that could be measured.
            "vhost-user" | "fuse" => Some(50_000),
            "threads" => Some(500_000),
            _ => Some(2000),
        });
        command.arg("--size=1G");
    }
    // Its requests are those of its traces.
    let requests = requests.filter(|_| table != "discard");
    command.args(requests.map(|requests| format!("--requests={requests}")));
    command.args(cells.map(|part| format!("--cells={part}")));
    command
}

/// How much the table over NBD writes.
pub fn of_served(args: &Args) -> [String; 2] {
    let (requests, gib) = if args.quick { (5000, 1) } else { (20_000, 4) };
    let requests = args.operations.unwrap_or(requests);
    [format!("--requests={requests}"), format!("--size={gib}G")]
}

/// Whether the table has cells with the text of `--cells`. Which it has depends on its other
/// options.
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
        assert_eq!(chosen(&[]).unwrap().len(), 10);
        assert_eq!(
            chosen(&names("steady,served")),
            Ok(vec!["served", "steady"])
        );
        let refused = chosen(&names("steady,guest")).unwrap_err();
        assert!(refused.ends_with("metadata, not 'guest'"), "{refused}");
    }
}
