//! `bench guest`: what a guest sees. A small Linux in QEMU has the disk as virtio-blk and takes the
//! load inside: our NBD export, which QEMU attaches with its own client; our vhost-user-blk device;
//! QEMU's own qcow2 driver on the image; and a raw file that is written throughout.
//!
//! The guest ([`crate::machine`]) runs this program's `bench` on the raw disk that it sees, with
//! the same words for each contestant, so that operations, their order and places are equal. Each
//! run has a fresh image and a fresh guest, and does its requests twice: first writes, then the
//! same again, which overwrites. Both count with the flush that ends them. Times are the guest's.
//! Figures of a guest that runs without KVM, on QEMU's translation (TCG), say little about a guest
//! that runs with it, so all are labelled.

use std::path::Path;
use std::time::Duration;

use cowslip_console::error::CommandError;
use cowslip_console::interrupt::RemovedOnInterrupt;
use serde_json::{Value, json};

use crate::cell::{Backing, Cell, CellLoad, Contestant, RawFile, Shape, Subclusters};
use crate::description::Description;
use crate::machine::{Guest, GuestDisk, init};
use crate::peers::Peer;
use crate::report::{Column, Measurement, column};
use crate::scale::Scale;
use crate::server::{Server, Transport};
use crate::stage::{EXTENTS, P50, P99, SPACE, Stage, Turn, mebibytes};

const REQUEST_BYTES: u64 = 4096;
/// A guest boots in seconds, without KVM and on a busy machine in tens of them.
const BOOT_WITHIN: Duration = Duration::from_secs(120);
/// Reads before the clock starts, as many as requests but no more than these: without KVM, code
/// that runs for the first time is translated.
const WARM_UP_MAX: u64 = 500;
/// A run may take so long and, for each request, this.
const RUN_WITHIN: Duration = Duration::from_secs(120);
const REQUEST_WITHIN: Duration = Duration::from_millis(100);

const OVERWRITES: Column = column("overwrites", 0);
/// CPU time that QEMU, with the guest, and the server took for a first write.
const CPU: Column = column("host CPU us", 1);
const FLUSH: Column = column("flush ms", 1);

/// The table.
pub const TABLE: Description = Description {
    // Enough places for few requests.
    disk_bytes: 1 << 30,
    // Without KVM they are slow.
    requests: 2000,
    policies: &["auto"],
    peers: &[Peer::System],
    measure,
    ..Description::usual("guest", cells)
};

/// Its cells.
fn cells(scale: &Scale) -> Vec<Cell> {
    use Subclusters::{Off, On};
    let mut cells = Vec::new();
    for depth in &scale.depths {
        for backing in [Backing::None, Backing::Raw] {
            for (cluster_bytes, subclusters) in [(64 << 10, Off), (64 << 10, On), (1 << 20, On)] {
                let ours = scale.policies.iter().map(|p| Contestant::Cowslip(p));
                let others = [
                    Contestant::CowslipVhostUser,
                    Contestant::QemuDriver,
                    Contestant::Raw(RawFile::Written),
                ];
                cells.push(Cell::new(
                    Shape::new(cluster_bytes, subclusters, backing),
                    scale.writes(*depth, REQUEST_BYTES),
                    ours.chain(others).collect(),
                ));
            }
        }
    }
    cells
}

/// Makes one run: a guest with a fresh image, first writes, overwrites.
///
/// # Errors
/// The guest, QEMU or the server fails, or the image is not sound.
fn measure(stage: &Stage<'_>, cell: &Cell, turn: Turn) -> Result<Measurement, CommandError> {
    let contestant = turn.contestant;
    let machine = stage.machine()?;
    let file = RemovedOnInterrupt::new(&stage.prepare(cell, contestant)?);
    let is_served = contestant.is_cowslip();
    let transport = match contestant {
        Contestant::CowslipVhostUser => Transport::VhostUser,
        _ => Transport::Nbd,
    };
    let server = is_served.then(|| stage.serve(contestant, file.path(), transport));
    let server = server.transpose()?;
    let socket = server
        .as_ref()
        .map(|server| RemovedOnInterrupt::new(server.at()));
    let disk = match (contestant, &server) {
        (Contestant::CowslipVhostUser, Some(server)) => {
            GuestDisk::VhostUser(server.at().to_path_buf())
        }
        _ => GuestDisk::Block(disk(
            stage,
            cell,
            (contestant, file.path()),
            server.as_ref(),
        )),
    };
    let mut guest = Guest::boot(machine, &disk, BOOT_WITHIN)?;
    let cpu_seconds = |guest: &Guest| -> Result<f64, CommandError> {
        let server = server.as_ref().map(|server| server.cost_so_far());
        let server = server.transpose()?.map_or(0.0, |cost| cost.cpu_seconds);
        Ok(guest.cpu_seconds()? + server)
    };
    let words = words(stage, &cell.load);
    let requests = cell.load.requests;
    let limit = RUN_WITHIN + REQUEST_WITHIN * u32::try_from(requests).unwrap_or(u32::MAX);
    let cpu_before = cpu_seconds(&guest)?;
    let first = RunFigures::parse(&guest.run(&words, limit)?)?;
    let cpu = cpu_seconds(&guest)? - cpu_before;
    let again = RunFigures::parse(&guest.run(&words, limit)?)?;
    guest.turn_off()?;
    if let Some(server) = server {
        server.stop()?;
    }
    drop(socket);
    let usage = stage.finish(contestant, file.path())?;
    let output = json!({ "first": first.all, "overwrites": again.all });
    let mut measurement = Measurement::new(first.iops(), output, None);
    measurement.add(OVERWRITES, Some(again.iops()));
    measurement.add(CPU, Some(cpu * 1e6 / requests as f64));
    measurement.add(P50, first.all["latency-us"]["p50"].as_f64());
    measurement.add(P99, first.all["latency-us"]["p99"].as_f64());
    measurement.add(FLUSH, Some(first.close_seconds * 1e3));
    measurement.add(SPACE, Some(mebibytes(usage.bytes)));
    measurement.add(EXTENTS, usage.extents.map(|extents| extents as f64));
    Ok(measurement)
}

/// Returns the command line of the guest.
fn words(stage: &Stage<'_>, load: &CellLoad) -> Vec<String> {
    let fixed = ["bench", "--json", "-f", "raw", "-t", "none", "--warm-up"];
    let mut words = fixed.map(str::to_string).to_vec();
    words.push(load.requests.min(WARM_UP_MAX).to_string());
    words.extend(stage.load_words(load));
    words.push(init::DISK.to_string());
    words
}

/// The guest's disk, as `-blockdev` takes it. Files are opened as `bench FILE` opens them.
fn disk(
    stage: &Stage<'_>,
    cell: &Cell,
    (contestant, path): (Contestant, &Path),
    server: Option<&Server>,
) -> Value {
    let cache = json!({ "direct": stage.cache() == "none" });
    let file = |path: &Path| {
        json!({
            "driver": "file",
            "filename": path.to_string_lossy(),
            "aio": stage.aio(),
            "cache": cache,
            "discard": "unmap",
        })
    };
    let mut disk = match server {
        Some(server) => json!({
            "driver": "nbd",
            "server": { "type": "unix", "path": server.at().to_string_lossy() },
        }),
        None => json!({
            "driver": if contestant == Contestant::QemuDriver { "qcow2" } else { "raw" },
            "file": file(path),
        }),
    };
    if contestant == Contestant::QemuDriver && cell.shape.backing == Backing::Raw {
        disk["backing"] = json!({
            "driver": "raw",
            "read-only": true,
            "file": file(&stage.written()),
        });
        disk["backing"]["file"]["read-only"] = json!(true);
    }
    disk["node-name"] = json!("disk");
    disk["cache"] = cache.clone();
    disk["discard"] = json!("unmap");
    disk
}

/// Figures that `bench` printed for one run in the guest.
#[derive(Debug)]
struct RunFigures {
    requests: f64,
    seconds: f64,
    /// The close of a raw disk is a flush.
    close_seconds: f64,
    all: Value,
}

impl RunFigures {
    fn parse(output: &str) -> Result<RunFigures, CommandError> {
        let all: Value = serde_json::from_str(output).unwrap_or_default();
        let number = |name: &str| all[name].as_f64();
        let figures = (
            number("requests"),
            number("seconds"),
            number("close-seconds"),
        );
        let (Some(requests), Some(seconds), Some(close_seconds)) = figures else {
            let text = format!("The guest printed no figures, but:\n{}", output.trim());
            return Err(CommandError::new(text));
        };
        Ok(RunFigures {
            requests,
            seconds,
            close_seconds,
            all,
        })
    }

    fn iops(&self) -> f64 {
        self.requests / (self.seconds + self.close_seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flush_counts() {
        let figures =
            RunFigures::parse(r#"{"requests": 30, "seconds": 2.0, "close-seconds": 1.0}"#);
        assert!((figures.unwrap().iops() - 10.0).abs() < 1e-9);
    }

    #[test]
    fn output_without_figures_is_shown() {
        let error = RunFigures::parse("Killed\n").unwrap_err().to_string();
        assert!(error.contains("Killed"), "{error}");
        assert!(RunFigures::parse("{\"requests\": 3}").is_err());
    }
}
