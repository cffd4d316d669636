//! The table for people and the results for programs.

use std::fmt::Write;

use cowslip_testbed::Spread;
use serde::Serialize;
use serde_json::{Value, json};

use super::cell::{Cell, Contestant, Shape};
use crate::host_usage::HostUsage;

/// One run of one contestant.
#[derive(Clone, Debug, Serialize)]
pub struct Measurement {
    /// The whole process, with its start and its close.
    pub seconds: f64,
    /// Requests a second of that time.
    pub iops: f64,
    /// CPU time a request, user and system, in microseconds.
    pub cpu_us: f64,
    /// The most memory that the process had at a time.
    pub peak_rss_bytes: u64,
    /// What the file takes afterwards.
    pub host: HostUsage,
    /// Flushes that the device completed meanwhile, where the system tells.
    pub device_flushes: Option<u64>,
    /// What `bench --json` told from inside.
    pub told: Option<Value>,
}

/// One contestant in one cell.
#[derive(Clone, Debug)]
pub struct Row {
    /// The file system.
    pub filesystem: String,
    /// The cell's name.
    pub cell: String,
    /// The cell's image.
    pub shape: Shape,
    /// Requests in flight.
    pub depth: u64,
    /// Requests of a run.
    pub requests: u64,
    /// Who.
    pub contestant: Contestant,
    /// Its runs.
    pub runs: Vec<Measurement>,
    /// System calls of one more run, which is not timed.
    pub system_calls: Option<u64>,
    /// It was below half of both its neighbours, and was measured again.
    pub is_outlier: bool,
}

impl Row {
    /// Without runs.
    pub fn new(filesystem: &str, cell: &Cell, contestant: Contestant) -> Row {
        Row {
            filesystem: filesystem.to_string(),
            cell: cell.name(),
            shape: cell.shape,
            depth: cell.load.depth,
            requests: cell.load.requests,
            contestant,
            runs: Vec::new(),
            system_calls: None,
            is_outlier: false,
        }
    }

    /// Of a figure that all runs have.
    fn spread(&self, figure: impl Fn(&Measurement) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.runs.iter().filter_map(figure).collect())
    }

    /// The median of requests a second; 0 without runs.
    pub fn iops(&self) -> f64 {
        let spread = self.spread(|run| Some(run.iops));
        spread.map_or(0.0, |spread| spread.median)
    }

    fn latency(&self, percentile: &str) -> Option<f64> {
        let spread = self.spread(|run| run.told.as_ref()?["latency-us"][percentile].as_f64());
        spread.map(|spread| spread.median)
    }

    fn median(&self, figure: impl Fn(&Measurement) -> Option<f64>) -> Option<f64> {
        self.spread(figure).map(|spread| spread.median)
    }

    fn calls_per_request(&self) -> Option<f64> {
        self.system_calls
            .map(|calls| calls as f64 / self.requests as f64)
    }
}

/// How many times as fast a row is as others of its cell, by the medians.
#[derive(Clone, Copy, Debug, Default)]
struct Ratios {
    qemu_img: Option<f64>,
    /// The better of sparse and allocated raw files.
    raw_first_touch: Option<f64>,
    raw_written: Option<f64>,
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
        let is_ours = matches!(row.contestant, Contestant::Cowslip(_));
        let best = |wanted: fn(Contestant) -> bool| {
            let others = self.rows.iter().filter(|other| {
                other.cell == row.cell
                    && other.filesystem == row.filesystem
                    && wanted(other.contestant)
            });
            let best = others.map(Row::iops).reduce(f64::max)?;
            (is_ours && best > 0.0).then(|| row.iops() / best)
        };
        Ratios {
            qemu_img: best(|contestant| contestant == Contestant::QemuImg),
            raw_first_touch: best(Contestant::is_raw_first_touch),
            raw_written: best(Contestant::is_raw_written),
        }
    }

    /// The table, with its notes.
    pub fn text(&self) -> String {
        let widest = self.rows.iter().map(|row| row.filesystem.len());
        let width = widest.max().unwrap_or(0).max(5);
        let mut text = head(width);
        for row in &self.rows {
            text += &self.line(row, width);
        }
        for note in &self.notes {
            text += &format!("\n{note}\n");
        }
        text
    }

    /// One line of the table.
    fn line(&self, row: &Row, width: usize) -> String {
        let Some(iops) = row.spread(|run| Some(run.iops)) else {
            return String::new();
        };
        let ratios = self.ratios(row);
        let mark = if row.is_outlier { "!" } else { "" };
        let mut line = format!(
            "{:width$} {:32} {:20} {:>8.0}{mark:1} {:>15}",
            row.filesystem,
            row.cell,
            row.contestant.name(),
            iops.median,
            format!("{:.0}-{:.0}", iops.least, iops.greatest),
        );
        let mebibytes = |run: &Measurement| Some(run.host.bytes as f64 / f64::from(1 << 20));
        let extents = |run: &Measurement| run.host.extents.map(|extents| extents as f64);
        let device_flushes = |run: &Measurement| run.device_flushes.map(|flushes| flushes as f64);
        for (value, decimals) in [
            (ratios.qemu_img, 2),
            (ratios.raw_first_touch, 2),
            (ratios.raw_written, 2),
            (row.median(|run| Some(run.cpu_us)), 1),
            (row.calls_per_request(), 2),
            (row.latency("p50"), 0),
            (row.latency("p99"), 0),
            (row.latency("p99.9"), 0),
            (row.median(mebibytes), 0),
            (row.median(extents), 0),
            (row.median(device_flushes), 0),
        ] {
            let cell = value.map_or(String::new(), |value| format!("{value:.decimals$}"));
            // Formatting into a string cannot fail.
            write!(line, " {cell:>8}").expect("a string takes all");
        }
        line + "\n"
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
                "outlier": row.is_outlier,
                "system-calls-per-request": row.calls_per_request(),
                "runs": row.runs,
            })
        });
        let rows: Vec<Value> = rows.collect();
        json!({ "conditions": self.conditions, "rows": rows, "notes": self.notes })
    }
}

fn head(width: usize) -> String {
    let mut line = format!(
        "{:width$} {:32} {:20} {:>8}  {:>15}",
        "fs", "cell", "contestant", "IOPS", "least-most"
    );
    for title in [
        "x QEMU",
        "x first",
        "x written",
        "CPU us",
        "calls",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "MiB",
        "extents",
        "flushes",
    ] {
        write!(line, " {title:>8}").expect("a string takes all");
    }
    line + "\n"
}
