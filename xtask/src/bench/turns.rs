//! Programs that do the same work in turn: their runs, and how these are shown and kept.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use cowslip_testbed::Spread;
use serde_json::{Map, Value, json};
use wait4::Wait4;

use super::report;
use crate::run;

/// Names of the programs that have others beside them.
pub const COWSLIP: &str = "cowslip";
/// The one that others are held against.
pub const QEMU_IMG: &str = "qemu-img";

/// One run. CPU time and peak memory are those that the kernel accounts to the process and the
/// children that it has waited for.
#[derive(Clone, serde::Serialize)]
pub struct Measurement {
    wall_ms: f64,
    /// User and system.
    cpu_ms: f64,
    peak_rss_bytes: u64,
    /// Of the file that the run made, if it made one.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub target: Option<Usage>,
}

/// Space of a file.
#[derive(Clone, serde::Serialize)]
pub struct Usage {
    host_bytes: u64,
    host_extents: u64,
}

/// The runs of all programs with one piece of work.
pub struct Row {
    /// The file system, the work, and how the page cache is used.
    pub names: [String; 3],
    /// How many times as fast as qemu-img it is to be.
    pub goal: Option<f64>,
    /// Each with the name of its program.
    pub runs: Vec<(&'static str, Measurement)>,
}

/// Runs a program that must succeed, from its start to its end. What it prints comes back if it
/// goes to a pipe, which must be larger.
pub fn timed(command: &mut Command) -> Result<(Measurement, String), String> {
    let described = run::describe(command);
    let failed = |e: std::io::Error| format!("{described}: {e}");
    command.stdin(Stdio::null());
    let start = Instant::now();
    let mut child = command.spawn().map_err(failed)?;
    let used = child.wait4().map_err(failed)?;
    let wall = start.elapsed();
    let mut text = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        std::io::Read::read_to_string(&mut stdout, &mut text).map_err(failed)?;
    }
    if !used.status.success() {
        return Err(format!("{described}: {}\n{text}", used.status));
    }
    let measurement = Measurement {
        wall_ms: wall.as_secs_f64() * 1e3,
        cpu_ms: (used.rusage.utime + used.rusage.stime).as_secs_f64() * 1e3,
        peak_rss_bytes: used.rusage.maxrss,
        target: None,
    };
    Ok((measurement, text))
}

/// Runs each program as often as that, the order rotated with each repetition, whose number
/// `measure` gets.
pub fn in_turn(
    programs: &[&'static str],
    repetitions: usize,
    mut measure: impl FnMut(&'static str, usize) -> Result<Measurement, String>,
) -> Result<Vec<(&'static str, Measurement)>, String> {
    let mut runs = Vec::new();
    for repetition in 0..repetitions {
        for turn in 0..programs.len() {
            let program = programs[(turn + repetition) % programs.len()];
            runs.push((program, measure(program, repetition)?));
        }
    }
    Ok(runs)
}

impl Usage {
    /// Of a file, its extents as filefrag reports them.
    pub fn of(path: &Path) -> Result<Usage, String> {
        let metadata = fs::metadata(path).map_err(|e| e.to_string())?;
        let text = run::output(Command::new("filefrag").arg(path))?;
        // "PATH: 12 extents found"
        let extents = text
            .rsplit(": ")
            .next()
            .and_then(|rest| rest.split(' ').next())
            .and_then(|count| count.trim().parse().ok());
        Ok(Usage {
            host_bytes: metadata.blocks() * 512,
            host_extents: extents.ok_or_else(|| format!("filefrag says {text}"))?,
        })
    }
}

fn mebibytes(bytes: u64) -> f64 {
    report::as_f64(bytes) / f64::from(1 << 20)
}

type Figure = fn(&Measurement) -> f64;

const WALL: Figure = |run| run.wall_ms;
const CPU: Figure = |run| run.cpu_ms;

impl Row {
    fn spread(
        &self,
        program: &str,
        figure: impl Fn(&Measurement) -> Option<f64>,
    ) -> Option<Spread> {
        let runs = self.runs.iter().filter(|(name, _)| *name == program);
        Spread::of(runs.filter_map(|(_, run)| figure(run)).collect())
    }

    /// How many times as fast as qemu-img this is, by the medians of a figure.
    fn ratio(&self, program: &str, figure: Figure) -> Option<f64> {
        let median = |name| Some(self.spread(name, |run| Some(figure(run)))?.median);
        Some(median(QEMU_IMG)? / median(program)?)
    }

    /// The same by the fastest run of each: a virtual machine that waits for memory of its host now
    /// and then takes ten times as long as else, and with few runs such a one is soon the median.
    fn best_ratio(&self, program: &str) -> Option<f64> {
        let least = |name| Some(self.spread(name, |run| Some(run.wall_ms))?.least);
        Some(least(QEMU_IMG)? / least(program)?)
    }

    fn programs(&self) -> Vec<&'static str> {
        let mut programs: Vec<&str> = Vec::new();
        for (program, _) in &self.runs {
            if !programs.contains(program) {
                programs.push(program);
            }
        }
        programs
    }

    /// Titles of columns of numbers, their widths, and the numbers of a program.
    fn numbers(&self, program: &str) -> Vec<(&'static str, usize, String)> {
        let of = |figure: Figure| self.spread(program, |run| Some(figure(run)));
        let median = |spread: Option<Spread>, decimals: usize| {
            spread.map_or(String::new(), |spread| {
                format!("{:.decimals$}", spread.median)
            })
        };
        let wall = of(WALL).map_or(String::new(), |wall| {
            format!("{:.1}-{:.1}", wall.least, wall.greatest)
        });
        let ratio = |ratio: Option<f64>| ratio.map_or(String::new(), |ratio| format!("{ratio:.2}"));
        let mut numbers = vec![
            ("ms", 9, median(of(WALL), 1)),
            ("least-most", 17, wall),
            ("ratio", 6, ratio(self.ratio(program, WALL))),
        ];
        if self.goal.is_some() {
            numbers.push(("best", 6, ratio(self.best_ratio(program))));
        }
        let rss = of(|run| mebibytes(run.peak_rss_bytes));
        numbers.extend([
            ("CPU ms", 9, median(of(CPU), 1)),
            ("ratio", 6, ratio(self.ratio(program, CPU))),
            (
                "RSS MiB",
                8,
                rss.map_or(String::new(), |rss| format!("{:.1}", rss.greatest)),
            ),
        ]);
        let target = |figure: fn(&Usage) -> u64| {
            self.spread(program, |run| {
                run.target.as_ref().map(|t| report::as_f64(figure(t)))
            })
        };
        if let (Some(bytes), Some(extents)) = (target(|t| t.host_bytes), target(|t| t.host_extents))
        {
            let mebibytes = bytes.median / f64::from(1 << 20);
            numbers.push(("host MiB", 9, format!("{mebibytes:.0}")));
            numbers.push(("extents", 8, format!("{:.0}", extents.median)));
        }
        numbers
    }

    fn line(names: [&str; 4], numbers: impl Iterator<Item = (usize, String)>) -> String {
        let [filesystem, work, cache, program] = names;
        let mut line = format!("{filesystem:6} {work:38} {cache:8} {program:12}");
        for (width, text) in numbers {
            line += &format!(" {text:>width$}");
        }
        line
    }

    /// The titles of such rows.
    pub fn print_titles(&self, work: &str) {
        let numbers = self.numbers(COWSLIP).into_iter();
        let titles = numbers.map(|(title, width, _)| (width, title.to_string()));
        println!("{}", Row::line(["fs", work, "cache", "command"], titles));
    }

    /// A line for each program; what misses its goal says so.
    pub fn print(&self) {
        for program in self.programs() {
            let [filesystem, work, cache] = self.names.each_ref().map(String::as_str);
            let numbers = self.numbers(program).into_iter();
            let numbers = numbers.map(|(_, width, text)| (width, text));
            let mut line = Row::line([filesystem, work, cache, program], numbers);
            let reached = self.ratio(program, WALL).unwrap_or(f64::NAN);
            if let Some(goal) = self.goal
                && program == COWSLIP
                && reached < goal
            {
                line += &format!(" {goal:.1} wanted");
            }
            println!("{line}");
        }
    }

    fn json(&self, work: &str) -> Value {
        let runs = |program: &&str| {
            let runs = self.runs.iter().filter(|(name, _)| name == program);
            let runs: Vec<Value> = runs.map(|(_, run)| json!(run)).collect();
            (program.to_string(), json!(runs))
        };
        let [filesystem, name, cache] = &self.names;
        let mut row = json!({ "filesystem": filesystem, work: name, "cache": cache });
        if self.goal.is_some() {
            row["goal"] = json!(self.goal);
            row["best_ratio"] = json!(self.best_ratio(COWSLIP));
        }
        row["ratio"] = json!(self.ratio(COWSLIP, WALL));
        row["cpu_ratio"] = json!(self.ratio(COWSLIP, CPU));
        row["runs"] = json!(self.programs().iter().map(runs).collect::<Map<_, _>>());
        row
    }
}

/// Rows that are shown as they come, with what the work is called.
pub struct Rows {
    work: &'static str,
    rows: Vec<Row>,
}

impl Rows {
    /// Without rows.
    pub fn new(work: &'static str) -> Rows {
        Rows {
            work,
            rows: Vec::new(),
        }
    }

    /// Prints a row, and keeps it.
    pub fn add(&mut self, row: Row) {
        if self.rows.is_empty() {
            row.print_titles(self.work);
        }
        row.print();
        self.rows.push(row);
    }

    /// Prints all rows together and writes the results.
    pub fn end(&self, kind: &str, conditions: Value) -> Result<(), String> {
        println!(
            "\nMedians; ratio: how many times as fast as qemu-img, of time and of CPU time; best: the same of the \
             fastest run of each\n"
        );
        if let Some(first) = self.rows.first() {
            first.print_titles(self.work);
        }
        self.rows.iter().for_each(Row::print);
        let results = json!({
            "conditions": report::conditions(conditions),
            "rows": self.rows.iter().map(|row| row.json(self.work)).collect::<Vec<_>>(),
        });
        let written = report::write_results(kind, &results)?;
        println!("\nresults: {}", written.display());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_compared_by_medians_and_by_their_fastest_runs() {
        let run = |wall_ms: f64| Measurement {
            wall_ms,
            cpu_ms: 2.0 * wall_ms,
            peak_rss_bytes: 3 << 20,
            target: None,
        };
        let ours = [10.0, 30.0, 20.0].map(|wall| (COWSLIP, run(wall)));
        let theirs = [40.0, 400.0, 60.0].map(|wall| (QEMU_IMG, run(wall)));
        let row = Row {
            names: ["ext4", "raw to qcow2", "direct"].map(str::to_string),
            goal: Some(4.0),
            runs: [ours, theirs].concat(),
        };
        let json = row.json("case");
        let figures = ["ratio", "best_ratio", "cpu_ratio"].map(|name| json[name].as_f64());
        assert_eq!(figures, [Some(3.0), Some(4.0), Some(3.0)]);
        assert_eq!(json["runs"][QEMU_IMG][1]["wall_ms"], 400.0);
        let numbers = row.numbers(COWSLIP).into_iter().map(|(_, _, text)| text);
        let expected = ["20.0", "10.0-30.0", "3.00", "4.00", "40.0", "3.00", "3.0"];
        assert_eq!(numbers.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn the_order_rotates() {
        let mut order = Vec::new();
        let runs = in_turn(&[COWSLIP, QEMU_IMG], 2, |program, repetition| {
            order.push((program, repetition));
            timed(&mut Command::new("true")).map(|(run, _)| run)
        });
        assert_eq!(runs.unwrap().len(), 4);
        let names = order.iter().map(|(program, _)| *program);
        let expected = [COWSLIP, QEMU_IMG, QEMU_IMG, COWSLIP];
        assert_eq!(names.collect::<Vec<_>>(), expected);
    }
}
