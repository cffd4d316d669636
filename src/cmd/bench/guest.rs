//! `bench guest`: what a guest sees. A small Linux in QEMU has the disk as virtio-blk and takes the load
//! inside: our NBD export, which QEMU attaches with its own client; QEMU's own qcow2 driver on the image;
//! and a raw file that is written throughout.
//!
//! The guest is a kernel and an archive that is made on the fly ([`initramfs`]), whose only program is this
//! one ([`init`]): it runs `bench` on the raw disk that it sees, with the same words for each contestant,
//! so that operations, their order and places are equal. Each run has a fresh image and a fresh guest, and
//! does its requests twice: first writes, then the same again, which overwrites. Both count with the flush
//! that ends them. Times are the guest's. Figures of a guest that runs without KVM, on QEMU's translation
//! (TCG), say little about a guest that runs with it, so all are labelled.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use self::boot::{Guest, MEMORY_MIB, PROCESSORS};
use self::kernel::Kernel;
use super::cell::{Backing, Cell, CellLoad, Contestant, RawFile, Shape, Subclusters};
use super::report::{Column, Measurement, column};
use super::run::run;
use super::stage::{Stage, Turn, mebibytes};
use super::tables::{Options, Scale};
use crate::cmd::demo::own_path;
use crate::cmd::demo::server::{Kind, PageCache, Server};
use crate::error::CommandError;
use crate::host_usage::HostUsage;
use crate::interrupt::RemovedOnInterrupt;
use crate::output::Program;

mod boot;
pub mod init;
mod initramfs;
mod kernel;

const QEMU: &str = "qemu-system-x86_64";
const REQUEST_BYTES: u64 = 4096;
/// A guest boots in seconds, without KVM and on a busy machine in tens of them.
const BOOT_WITHIN: Duration = Duration::from_secs(120);
/// With KVM it takes 2 s. What takes much longer is no KVM that runs this kernel.
const PROBE_WITHIN: Duration = Duration::from_secs(10);
/// Reads before the clock starts, as many as requests but no more than these: without KVM, code that runs for
/// the first time is translated.
const WARM_UP_MAX: u64 = 500;
/// A run may take so long and, for each request, this.
const RUN_WITHIN: Duration = Duration::from_secs(120);
const REQUEST_WITHIN: Duration = Duration::from_millis(100);

const OVERWRITES: Column = column("overwrites", 0);
/// CPU time that QEMU, with the guest, and the server took for a first write.
const CPU: Column = column("host CPU us", 1);
const P50: Column = column("p50 us", 0);
const P99: Column = column("p99 us", 0);
const FLUSH: Column = column("flush ms", 1);
const SPACE: Column = column("MiB", 0);
const EXTENTS: Column = column("extents", 0);

/// What the table takes.
#[derive(clap::Args)]
pub struct GuestOptions {
    #[command(flatten)]
    pub(super) table: Options,
    /// The guest's kernel; the newest cloud kernel in /boot, if not given. Its modules are looked for beside it
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// What runs the guest: kvm, or tcg; kvm where it boots one, if not given
    #[arg(long, value_name = "NAME", value_parser = accelerator)]
    accel: Option<Accelerator>,
}

/// What runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor.
    Kvm,
    /// QEMU, by translation.
    Tcg,
}

fn accelerator(name: &str) -> Result<Accelerator, String> {
    match name {
        "kvm" => Ok(Accelerator::Kvm),
        "tcg" => Ok(Accelerator::Tcg),
        _ => Err(format!("--accel expects kvm or tcg, not '{name}'")),
    }
}

impl Accelerator {
    /// As figures are labelled.
    fn label(self) -> &'static str {
        match self {
            Accelerator::Kvm => "KVM",
            Accelerator::Tcg => "TCG",
        }
    }
}

/// What all guests of a run have in common.
#[derive(Debug)]
pub struct Machine {
    accelerator: Accelerator,
    kernel: Kernel,
    /// The guest's files. In memory, so that nothing of them is on the disk that is measured.
    archive: File,
    /// QEMU's own words.
    qemu_version: String,
}

impl Machine {
    /// Finds what guests need, and whether KVM runs them.
    ///
    /// # Errors
    /// QEMU or a kernel is not there, or a kernel does not boot with what was asked for.
    pub fn new(options: &GuestOptions, program: &Program) -> Result<Machine, CommandError> {
        if std::env::consts::ARCH != "x86_64" {
            return Err(CommandError::new("Guests are for x86-64 only"));
        }
        let kernel = Kernel::find(options.kernel.as_deref())?;
        let version = run(Command::new(QEMU).arg("--version")).map_err(|error| {
            CommandError::new(format!(
                "{error}: install QEMU's system emulator (Debian: qemu-system-x86)"
            ))
        })?;
        let archive = initramfs::build(&own_path()?, &kernel)?;
        let mut machine = Machine {
            accelerator: options.accel.unwrap_or(Accelerator::Kvm),
            kernel,
            archive: in_memory(&archive).map_err(|e| {
                let words = cowslip::error::system_words(&e);
                CommandError::new(format!(
                    "Could not keep the guest's files in memory: {words}"
                ))
            })?,
            qemu_version: version
                .output
                .lines()
                .next()
                .unwrap_or_default()
                .to_string(),
        };
        if options.accel.is_none() && !machine.runs_with_kvm(program) {
            machine.accelerator = Accelerator::Tcg;
        }
        Ok(machine)
    }

    /// Whether a guest comes up with KVM: a device alone does not tell, as virtual machines may have one
    /// that runs only kernels that know it.
    fn runs_with_kvm(&self, program: &Program) -> bool {
        let device = File::options().read(true).write(true).open("/dev/kvm");
        if device.is_err() {
            return false;
        }
        let disk = json!({ "driver": "null-co", "node-name": "disk", "read-zeroes": true });
        let guest = Guest::boot(self, &disk, PROBE_WITHIN);
        match guest.and_then(Guest::turn_off) {
            Ok(()) => true,
            Err(_) => {
                program.warn("KVM is there, but boots no guest; they run without it");
                false
            }
        }
    }

    /// Runs of each contestant, if it is not said: without KVM they take long.
    pub fn repetitions(&self) -> usize {
        match self.accelerator {
            Accelerator::Kvm => 3,
            Accelerator::Tcg => 1,
        }
    }

    /// For programs.
    pub fn conditions(&self) -> Value {
        json!({
            "accelerator": self.accelerator.label(),
            "kernel": self.kernel.release,
            "qemu": self.qemu_version,
            "processors": PROCESSORS,
            "memory-mib": MEMORY_MIB,
        })
    }

    /// For people.
    pub fn note(&self) -> String {
        let mut note = format!(
            "{}: guests of {PROCESSORS} processor and {MEMORY_MIB} MiB, Linux {}, {}. \
             IOPS are the guest's, with the flush at the end; so are overwrites, of the same places.",
            self.accelerator.label(),
            self.kernel.release,
            self.qemu_version,
        );
        if self.accelerator == Accelerator::Tcg {
            note += "\nWithout KVM most of the CPU time is the guest's, which is translated.";
        }
        note
    }
}

fn in_memory(bytes: &[u8]) -> std::io::Result<File> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::memfd_create("initramfs", flags)?);
    file.write_all(bytes)?;
    Ok(file)
}

/// Its cells.
pub fn cells(scale: &Scale) -> Vec<Cell> {
    use Subclusters::{Off, On};
    let mut cells = Vec::new();
    for depth in &scale.depths {
        for backing in [Backing::None, Backing::Raw] {
            for (cluster_bytes, subclusters) in [(64 << 10, Off), (64 << 10, On), (1 << 20, On)] {
                let ours = scale.policies.iter().map(|p| Contestant::Cowslip(p));
                let others = [Contestant::QemuDriver, Contestant::Raw(RawFile::Written)];
                let requests = scale.requests_at(*depth, REQUEST_BYTES);
                cells.push(Cell {
                    shape: Shape::new(cluster_bytes, subclusters, backing),
                    load: CellLoad::writes(requests, *depth, REQUEST_BYTES),
                    contestants: ours.chain(others).collect(),
                });
            }
        }
    }
    cells
}

/// One run: a guest with a fresh image, first writes, overwrites.
///
/// # Errors
/// The guest, QEMU or the server fails, or the image is not sound.
pub fn measure(stage: &Stage<'_>, cell: &Cell, turn: Turn) -> Result<Measurement, CommandError> {
    let contestant = turn.contestant;
    let machine = stage.machine()?;
    let file = RemovedOnInterrupt::new(&stage.prepare(cell, contestant)?);
    let page_cache = PageCache::probe(stage.directory())?;
    let server = match contestant {
        Contestant::Cowslip(_) => {
            let directory = stage.directory();
            Some(Server::start(
                Kind::Cowslip,
                file.path(),
                directory,
                page_cache,
            )?)
        }
        _ => None,
    };
    let socket = server
        .as_ref()
        .map(|server| RemovedOnInterrupt::new(server.socket()));
    let disk = disk(stage, cell, (contestant, file.path()), server.as_ref());
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
    let first = Told::parse(&guest.run(&words, limit)?)?;
    let cpu = cpu_seconds(&guest)? - cpu_before;
    let again = Told::parse(&guest.run(&words, limit)?)?;
    guest.turn_off()?;
    if let Some(server) = server {
        server.stop()?;
    }
    drop(socket);
    stage.check(contestant, file.path())?;
    let usage = HostUsage::of(file.path())?;
    stage.dispose(contestant, file.path())?;
    let mut measurement = Measurement {
        iops: first.iops(),
        figures: Vec::new(),
        told: json!({ "first": first.all, "overwrites": again.all }),
        command: None,
    };
    measurement.add(OVERWRITES, Some(again.iops()));
    measurement.add(CPU, Some(cpu * 1e6 / requests as f64));
    measurement.add(P50, first.all["latency-us"]["p50"].as_f64());
    measurement.add(P99, first.all["latency-us"]["p99"].as_f64());
    measurement.add(FLUSH, Some(first.close_seconds * 1e3));
    measurement.add(SPACE, Some(mebibytes(usage.bytes)));
    measurement.add(EXTENTS, usage.extents.map(|extents| extents as f64));
    Ok(measurement)
}

/// What the guest runs.
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
            "server": { "type": "unix", "path": server.socket().to_string_lossy() },
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

/// What `bench` told of one run in the guest.
#[derive(Debug)]
struct Told {
    requests: f64,
    seconds: f64,
    /// The close of a raw disk is a flush.
    close_seconds: f64,
    all: Value,
}

impl Told {
    fn parse(output: &str) -> Result<Told, CommandError> {
        let all: Value = serde_json::from_str(output).unwrap_or_default();
        let number = |name: &str| all[name].as_f64();
        let figures = (
            number("requests"),
            number("seconds"),
            number("close-seconds"),
        );
        let (Some(requests), Some(seconds), Some(close_seconds)) = figures else {
            let text = format!("The guest tells no figures, but:\n{}", output.trim());
            return Err(CommandError::new(text));
        };
        Ok(Told {
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
        let told = Told::parse(r#"{"requests": 30, "seconds": 2.0, "close-seconds": 1.0}"#);
        assert!((told.unwrap().iops() - 10.0).abs() < 1e-9);
    }

    #[test]
    fn what_is_no_figure_is_told() {
        let error = Told::parse("Killed\n").unwrap_err().to_string();
        assert!(error.contains("Killed"), "{error}");
        assert!(Told::parse("{\"requests\": 3}").is_err());
    }
}
