//! `bench served`: random first writes over NBD. Each server has a fresh image and the same client,
//! fio with its engine for NBD: the same places in the same order, each once, and a flush at the
//! end.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use cowslip_console::error::CommandError;
use cowslip_console::interrupt::RemovedOnInterrupt;
use serde_json::Value;

use crate::cell::{Backing, Cell, CellLoad, Shape, Subclusters};
use crate::conditions::line_of;
use crate::description::Description;
use crate::peers::Peer;
use crate::report::{Column, Measurement, column};
use crate::run::run;
use crate::scale::Scale;
use crate::stage::{Stage, Turn, mebibytes};

const CLUSTER_BYTES: u64 = 64 << 10;
const REQUEST_BYTES: u64 = 4096;

/// CPU time of the server for a request, user and system.
const CPU: Column = column("CPU us", 1);
const MEAN: Column = column("mean us", 0);
const P99: Column = column("p99 us", 0);
/// Time from the request to end to the server's end: the work that the flush left.
const CLOSE: Column = column("close ms", 0);
const SPACE: Column = column("MiB", 0);
const EXTENTS: Column = column("extents", 0);

/// The table.
pub const TABLE: Description = Description {
    policies: &["auto"],
    peers: &[Peer::StorageDaemon, Peer::QemuNbd],
    measure,
    ..Description::usual("served", cells)
};

/// Its cells.
fn cells(scale: &Scale) -> Vec<Cell> {
    let mut cells = Vec::new();
    for depth in &scale.depths {
        for backing in [Backing::None, Backing::Raw] {
            for subclusters in [Subclusters::Off, Subclusters::On] {
                cells.push(Cell {
                    shape: Shape::new(CLUSTER_BYTES, subclusters, backing),
                    load: scale.writes(*depth, REQUEST_BYTES),
                    contestants: scale.servers(),
                });
            }
        }
    }
    cells
}

/// Makes one run: served, written, flushed, closed, checked.
///
/// # Errors
/// The server or fio fails, or the image is not sound.
fn measure(stage: &Stage<'_>, cell: &Cell, turn: Turn) -> Result<Measurement, CommandError> {
    let file = RemovedOnInterrupt::new(&stage.prepare(cell, turn.contestant)?);
    let server = stage.serve(turn.contestant, file.path())?;
    let socket = RemovedOnInterrupt::new(server.socket());
    let before = server.cost_so_far()?.cpu_seconds;
    let mut client = client(server.socket(), &cell.load, stage.disk_bytes());
    let figures = FioFigures::parse(&run(&mut client)?.output)?;
    let cpu = server.cost_so_far()?.cpu_seconds - before;
    let closing = Instant::now();
    server.stop()?;
    let close = closing.elapsed();
    drop(socket);
    let usage = stage.finish(turn.contestant, file.path())?;
    let mut measurement = Measurement::new(figures.iops, Value::Null, Some(line_of(&client)));
    measurement.add(CPU, Some(cpu * 1e6 / figures.requests));
    measurement.add(MEAN, Some(figures.mean_us));
    measurement.add(P99, figures.p99_us);
    measurement.add(CLOSE, Some(close.as_secs_f64() * 1e3));
    measurement.add(SPACE, Some(mebibytes(usage.bytes)));
    measurement.add(EXTENTS, usage.extents.map(|extents| extents as f64));
    Ok(measurement)
}

fn client(socket: &Path, load: &CellLoad, disk_bytes: u64) -> Command {
    let mut fio = Command::new("fio");
    fio.args([
        "--name=served",
        "--ioengine=nbd",
        "--rw=randwrite",
        "--randseed=7",
        "--refill_buffers",
        "--end_fsync=1",
        "--output-format=json",
    ]);
    fio.arg(format!("--uri=nbd+unix:///?socket={}", socket.display()));
    fio.arg(format!("--bs={}", load.request_bytes));
    fio.arg(format!("--iodepth={}", load.depth));
    fio.arg(format!("--size={disk_bytes}"));
    fio.arg(format!("--number_ios={}", load.requests));
    fio
}

/// Figures that fio printed.
#[derive(Debug)]
struct FioFigures {
    requests: f64,
    /// Requests a second, with the flush at the end.
    iops: f64,
    /// Mean time until requests ended.
    mean_us: f64,
    p99_us: Option<f64>,
}

impl FioFigures {
    fn parse(output: &str) -> Result<FioFigures, CommandError> {
        // Warnings may come before the JSON.
        let json = &output[output.find('{').unwrap_or(output.len())..];
        let all: Value = serde_json::from_str(json).unwrap_or_default();
        let job = &all["jobs"][0];
        let write = &job["write"];
        let latency = &write["clat_ns"];
        let figures = (
            write["total_ios"].as_f64(),
            write["iops"].as_f64(),
            latency["mean"].as_f64(),
        );
        let (0, (Some(requests), Some(iops), Some(mean))) =
            (job["error"].as_i64().unwrap_or(-1), figures)
        else {
            let text = format!("fio printed no figures, but:\n{}", output.trim());
            return Err(CommandError::new(text));
        };
        Ok(FioFigures {
            requests,
            iops,
            mean_us: mean / 1e3,
            p99_us: latency["percentile"]["99.000000"]
                .as_f64()
                .map(|ns| ns / 1e3),
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
        let failed = output.replace("\"error\": 0", "\"error\": 5");
        for wrong in ["", "no room\n", failed.as_str()] {
            assert!(FioFigures::parse(wrong).is_err(), "{wrong}");
        }
    }
}
