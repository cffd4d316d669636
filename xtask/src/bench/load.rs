//! The client: fio's NBD engine, 4 KiB random writes.

use std::path::Path;
use std::process::Command;

use super::Scale;
use crate::run;

/// What fio measured.
pub struct Load {
    /// Operations that it did.
    pub operations: u64,
    /// Operations a second, the final flush included.
    pub iops: f64,
    /// Mean and 99th percentile of completion latency in microseconds.
    pub latency_us: (f64, f64),
}

/// Writes random blocks, each at most once, the same ones in every run, then flushes.
pub fn random_writes(socket: &Path, scale: &Scale) -> Result<Load, String> {
    let mut fio = Command::new("fio");
    fio.args([
        "--name=randwrite",
        "--ioengine=nbd",
        &format!("--uri=nbd+unix:///?socket={}", socket.display()),
        "--rw=randwrite",
        "--bs=4k",
        "--randseed=7",
        "--refill_buffers",
        "--end_fsync=1",
        "--output-format=json",
    ]);
    fio.arg(format!("--iodepth={}", scale.depth));
    fio.arg(format!("--size={}", scale.disk_bytes));
    fio.arg(format!("--number_ios={}", scale.operations));
    parse(&run::output(&mut fio)?)
}

fn parse(output: &str) -> Result<Load, String> {
    // Warnings may come before the JSON.
    let start = output.find('{').ok_or("fio printed no result")?;
    let result: serde_json::Value =
        serde_json::from_str(&output[start..]).map_err(|e| format!("fio's result: {e}"))?;
    let job = &result["jobs"][0];
    if job["error"] != 0 {
        return Err(format!("fio failed: {}", job["error"]));
    }
    let write = &job["write"];
    let number = |value: &serde_json::Value, what: &str| {
        value
            .as_f64()
            .ok_or_else(|| format!("fio's result has no {what}"))
    };
    Ok(Load {
        operations: write["total_ios"]
            .as_u64()
            .ok_or("fio's result has no total_ios")?,
        iops: number(&write["iops"], "iops")?,
        latency_us: (
            number(&write["clat_ns"]["mean"], "latency")? / 1e3,
            number(&write["clat_ns"]["percentile"]["99.000000"], "percentiles")? / 1e3,
        ),
    })
}
