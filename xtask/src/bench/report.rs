//! The table for people and the results for programs.

use std::fs;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use cowslip_testbed::Spread;

use super::server::Kind;
use super::{Measurement, Scale};
use crate::run;

/// All measurements.
pub struct Report {
    conditions: Value,
    servers: Vec<Kind>,
    rows: Vec<Row>,
}

struct Row {
    filesystem: String,
    cell: String,
    measurements: Vec<(Kind, Measurement)>,
}

impl Row {
    fn spread(&self, kind: Kind, figure: impl Fn(&Measurement) -> f64) -> Option<Spread> {
        let mine = self.measurements.iter().filter(|(k, _)| *k == kind);
        Spread::of(mine.map(|(_, m)| figure(m)).collect())
    }

    /// Median IOPS of Cowslip over those of the faster of QEMU's servers.
    fn ratio(&self) -> Option<f64> {
        let ours = self.spread(Kind::Cowslip, |m| m.iops)?.median;
        let theirs = [Kind::StorageDaemon, Kind::QemuNbd]
            .iter()
            .filter_map(|kind| self.spread(*kind, |m| m.iops))
            .map(|spread| spread.median)
            .reduce(f64::max)?;
        Some(ours / theirs)
    }

    fn print(&self, servers: &[Kind]) {
        for kind in servers {
            let (Some(iops), Some(cpu), Some(latency), Some(close), Some(space), Some(extents)) = (
                self.spread(*kind, |m| m.iops),
                self.spread(*kind, |m| m.cpu_us),
                self.spread(*kind, |m| m.latency_us.1),
                self.spread(*kind, |m| m.close_ms),
                self.spread(*kind, |m| as_f64(m.host_bytes) / f64::from(1 << 20)),
                self.spread(*kind, |m| as_f64(m.host_extents)),
            ) else {
                continue;
            };
            let ratio = match self.ratio() {
                Some(ratio) if *kind == Kind::Cowslip => format!("{ratio:.2}"),
                _ => String::new(),
            };
            println!(
                "{:6} {:38} {:20} {:7.0} {:>15} {:>6} {:8.1} {:9.0} {:8.0} {:8.0} {:8.0}",
                self.filesystem,
                self.cell,
                kind.name(),
                iops.median,
                format!("{:.0}-{:.0}", iops.least, iops.greatest),
                ratio,
                cpu.median,
                latency.median,
                close.median,
                space.median,
                extents.median,
            );
        }
    }

    fn json(&self) -> Value {
        let mut servers = serde_json::Map::new();
        for (kind, measurement) in &self.measurements {
            let runs = servers.entry(kind.name()).or_insert_with(|| json!([]));
            if let Value::Array(runs) = runs {
                runs.push(json!(measurement));
            }
        }
        json!({
            "filesystem": self.filesystem,
            "cell": self.cell,
            "ratio": self.ratio(),
            "runs": servers,
        })
    }
}

/// A figure to show.
#[expect(clippy::cast_precision_loss, reason = "for display")]
pub fn as_f64(value: u64) -> f64 {
    value as f64
}

impl Report {
    /// An empty one, with what the runs have in common.
    pub fn new(scale: &Scale, servers: &[Kind]) -> Report {
        Report {
            conditions: conditions(json!({
                "load": "fio nbd engine, 4 KiB random writes, each block once, final flush",
                "image": "64 KiB clusters, O_DIRECT, io_uring, fresh for each run",
                "operations": scale.operations,
                "repetitions": scale.repetitions,
                "disk_bytes": scale.disk_bytes,
                "depth": scale.depth,
            })),
            servers: servers.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Starts a row.
    pub fn begin(&mut self, filesystem: &str, cell: &str) {
        self.rows.push(Row {
            filesystem: filesystem.to_string(),
            cell: cell.to_string(),
            measurements: Vec::new(),
        });
    }

    /// Adds a run to the last row.
    pub fn add(&mut self, kind: Kind, measurement: Measurement) {
        let row = self.rows.last_mut().expect("a row was begun");
        row.measurements.push((kind, measurement));
    }

    fn print_head() {
        println!(
            "{:6} {:38} {:20} {:>7} {:>15} {:>6} {:>8} {:>9} {:>8} {:>8} {:>8}",
            "fs",
            "image",
            "server",
            "IOPS",
            "least-most",
            "ratio",
            "CPU us",
            "p99 us",
            "close ms",
            "MiB",
            "extents"
        );
    }

    /// Prints the row that has just been finished.
    pub fn print_last(&self) {
        if self.rows.len() == 1 {
            Report::print_head();
        }
        if let Some(row) = self.rows.last() {
            row.print(&self.servers);
        }
    }

    /// Prints the whole table.
    pub fn print(&self) {
        println!("\n4 KiB random writes; medians; ratio to the faster of QEMU's servers\n");
        Report::print_head();
        for row in &self.rows {
            row.print(&self.servers);
        }
        println!();
    }

    /// The rows for programs.
    pub fn rows_json(&self) -> Vec<Value> {
        self.rows.iter().map(Row::json).collect()
    }

    /// Writes the results and returns the file.
    pub fn write(&self) -> Result<PathBuf, String> {
        let results = json!({ "conditions": self.conditions, "rows": self.rows_json() });
        write_results("randwrite", &results)
    }
}

/// What runs have in common: these, and the machine.
pub fn conditions(mut conditions: Value) -> Value {
    let read = |path: &str| {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.trim().to_string()
    };
    conditions["kernel"] = json!(read("/proc/sys/kernel/osrelease"));
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    conditions["processors"] = json!(processors);
    conditions["load_average_before"] = json!(read("/proc/loadavg"));
    conditions
}

/// Writes results as JSON to a new file and returns its path.
pub fn write_results(kind: &str, results: &Value) -> Result<PathBuf, String> {
    let directory = run::root().join("bench/results");
    let failed = |e: std::io::Error| format!("cannot write to {}: {e}", directory.display());
    fs::create_dir_all(&directory).map_err(failed)?;
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs());
    let file = directory.join(format!("{kind}-{now}.json"));
    let text = serde_json::to_string_pretty(results).map_err(|e| e.to_string())?;
    fs::write(&file, text + "\n").map_err(failed)?;
    Ok(file)
}
