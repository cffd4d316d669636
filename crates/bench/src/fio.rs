//! fio as the client of servers: random requests, each place once, and its figures.

use std::path::Path;
use std::process::Command;

use cowslip_console::error::CommandError;
use serde_json::Value;

use crate::cell::{CellLoad, Direction};
use crate::conditions::line_of;
use crate::run::run;

/// Where requests go.
#[derive(Clone, Copy, Debug)]
pub enum Target<'a> {
    /// The NBD server on this socket.
    Nbd(&'a Path),
    /// This file, with O_DIRECT.
    File(&'a Path),
}

/// A run of fio; writes end with a flush.
pub struct Fio {
    command: Command,
}

impl Fio {
    /// A load on a disk of this size.
    pub fn new(target: Target<'_>, load: &CellLoad, disk_bytes: u64) -> Fio {
        let mut command = Command::new("fio");
        command.args([
            "--name=served",
            "--randseed=7",
            "--refill_buffers",
            "--output-format=json",
        ]);
        command.args(match load.direction {
            Direction::Read => &["--rw=randread"][..],
            _ => &["--rw=randwrite", "--end_fsync=1"],
        });
        match target {
            Target::Nbd(socket) => {
                command.arg("--ioengine=nbd");
                command.arg(format!("--uri=nbd+unix:///?socket={}", socket.display()));
            }
            Target::File(path) => {
                command.args(["--ioengine=libaio", "--direct=1"]);
                command.arg(format!("--filename={}", path.display()));
            }
        }
        command.arg(format!("--bs={}", load.request_bytes));
        command.arg(format!("--iodepth={}", load.depth));
        command.arg(format!("--size={disk_bytes}"));
        command.arg(format!("--number_ios={}", load.requests));
        Fio { command }
    }

    /// Runs it.
    ///
    /// # Errors
    /// It fails, or prints no figures.
    pub fn run(&mut self) -> Result<FioFigures, CommandError> {
        FioFigures::parse(&run(&mut self.command)?.output)
    }

    /// Its command, as a shell takes it.
    pub fn line(&self) -> String {
        line_of(&self.command)
    }
}

/// Figures that fio printed.
#[derive(Debug)]
pub struct FioFigures {
    /// Requests that ended.
    pub requests: f64,
    /// Requests a second, with the flush at the end.
    pub iops: f64,
    /// Mean time until requests ended.
    pub mean_us: f64,
    /// Time in which half of them ended.
    pub p50_us: Option<f64>,
    /// Time in which all but a hundredth of them ended.
    pub p99_us: Option<f64>,
}

impl FioFigures {
    fn parse(output: &str) -> Result<FioFigures, CommandError> {
        // Warnings may come before the JSON.
        let json = &output[output.find('{').unwrap_or(output.len())..];
        let all: Value = serde_json::from_str(json).unwrap_or_default();
        let job = &all["jobs"][0];
        let is_write = job["write"]["total_ios"].as_f64() > Some(0.0);
        let part = &job[if is_write { "write" } else { "read" }];
        let latency = &part["clat_ns"];
        let figures = (
            part["total_ios"].as_f64(),
            part["iops"].as_f64(),
            latency["mean"].as_f64(),
        );
        let (0, (Some(requests), Some(iops), Some(mean))) =
            (job["error"].as_i64().unwrap_or(-1), figures)
        else {
            let text = format!("fio printed no figures, but:\n{}", output.trim());
            return Err(CommandError::new(text));
        };
        let percentile = |of: &str| Some(latency["percentile"][of].as_f64()? / 1e3);
        Ok(FioFigures {
            requests,
            iops,
            mean_us: mean / 1e3,
            p50_us: percentile("50.000000"),
            p99_us: percentile("99.000000"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_fio_are_read_behind_its_warnings() {
        let output = r#"note: something
            {"jobs": [{"error": 0, "write": {"total_ios": 40, "iops": 20.5,
             "clat_ns": {"mean": 1500.0, "percentile": {"99.000000": 9000}}}}]}"#;
        let figures = FioFigures::parse(output).unwrap();
        assert!((figures.iops - 20.5).abs() < 1e-9 && (figures.mean_us - 1.5).abs() < 1e-9);
        assert_eq!(figures.p99_us, Some(9.0));
        let reads = output.replace("\"write\"", "\"read\"");
        assert_eq!(FioFigures::parse(&reads).unwrap().p99_us, Some(9.0));
        let failed = output.replace("\"error\": 0", "\"error\": 5");
        for wrong in ["", "no room\n", failed.as_str()] {
            assert!(FioFigures::parse(wrong).is_err(), "{wrong}");
        }
    }
}
