//! Where cells are measured: fresh files for each run, the same command line for each engine, order
//! alternated, what is left behind checked.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use cowslip_testbed::Place;
use rustix::fs::FallocateFlags;

use super::cell::{Backing, Cell, Contestant, RawFile, Shape, scattering_step};
use super::report::{Measurement, Row};
use super::run::{Run, run, system_calls};
use super::tables::Scale;
use crate::cmd::demo::own_path;
use crate::error::CommandError;
use crate::host_usage::{HostUsage, device_flushes};
use crate::interrupt::RemovedOnInterrupt;
use crate::progress::Progress;

/// Written by every load: zeroes might be treated apart.
const PATTERN: &str = "--pattern=165";

/// One place with all that its cells share.
pub struct Stage<'a> {
    place: &'a Place,
    scale: &'a Scale,
    progress: &'a Progress,
    cowslip: PathBuf,
    /// `--cache` of every run.
    cache: &'static str,
    /// `--aio` of every run.
    aio: &'static str,
    has_qemu_img: bool,
}

impl<'a> Stage<'a> {
    /// Finds out what this place and machine can do.
    ///
    /// # Errors
    /// Nothing can be written there.
    pub fn new(
        place: &'a Place,
        scale: &'a Scale,
        progress: &'a Progress,
    ) -> Result<Stage<'a>, CommandError> {
        let direct = cowslip_testbed::supports_direct_io(&place.directory);
        let direct = direct.map_err(|e| failed("write to", &place.directory, &e))?;
        Ok(Stage {
            place,
            scale,
            progress,
            cowslip: own_path()?,
            cache: if direct { "none" } else { "writeback" },
            aio: match cowslip_queue::file::ring_available() {
                Ok(()) => "io_uring",
                Err(_) => "threads",
            },
            has_qemu_img: qemu_img_is_installed(),
        })
    }

    /// What all runs here have in common.
    pub fn conditions(&self) -> serde_json::Value {
        serde_json::json!({
            "filesystem": self.place.name,
            "cache": self.cache,
            "aio": self.aio,
        })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.place.directory.join(name)
    }

    /// A raw file that is written throughout: backing file, and yardstick of overwrites. What it holds
    /// is of no importance, so both may be one.
    fn written(&self) -> PathBuf {
        self.file("written.raw")
    }

    /// Measures all contestants of a cell, the order rotated with each repetition.
    ///
    /// # Errors
    /// A run fails, or leaves an image that is not sound.
    pub fn measure(&self, cell: &Cell) -> Result<Vec<Row>, CommandError> {
        let contestants = cell.contestants.iter().copied();
        let present: Vec<Contestant> = contestants.filter(|c| self.can_run(*c)).collect();
        let mut rows: Vec<Row> = present
            .iter()
            .map(|contestant| Row::new(&self.place.name, cell, *contestant))
            .collect();
        for repetition in 0..self.scale.repetitions {
            for turn in 0..rows.len() {
                let index = (turn + repetition) % rows.len();
                let row = &mut rows[index];
                self.progress
                    .say(&format!("{} {}", row.cell, row.contestant.name()));
                row.runs.push(self.measure_one(cell, row.contestant)?);
                self.progress.advance(1);
            }
        }
        if self.scale.system_calls {
            for row in &mut rows {
                row.system_calls = Some(self.count_system_calls(cell, row.contestant)?);
            }
        }
        Ok(rows)
    }

    fn can_run(&self, contestant: Contestant) -> bool {
        match contestant {
            Contestant::QemuImg | Contestant::QemuRaw(_) => self.has_qemu_img,
            Contestant::Raw(RawFile::Clone) => self.can_clone(),
            Contestant::Cowslip(_) | Contestant::Raw(_) => true,
        }
    }

    fn can_clone(&self) -> bool {
        let (source, target) = (self.file("clone-source"), self.file("clone-target"));
        let outcome = fs::write(&source, [1; 4096]).and_then(|()| reflink(&source, &target));
        for file in [source, target] {
            // What was not made needs no removing.
            drop(fs::remove_file(file));
        }
        outcome.is_ok()
    }

    fn measure_one(
        &self,
        cell: &Cell,
        contestant: Contestant,
    ) -> Result<Measurement, CommandError> {
        let file = RemovedOnInterrupt::new(&self.prepare(cell, contestant)?);
        let flushes_before = device_flushes(file.path());
        let run = run(&mut self.command(cell, contestant, file.path()))?;
        let flushes_after = device_flushes(file.path());
        self.check(contestant, file.path())?;
        let usage = HostUsage::of(file.path())?;
        self.dispose(contestant, file.path())?;
        let device_flushes = flushes_before.zip(flushes_after).map(|(b, a)| a - b);
        measurement(cell, run, usage, device_flushes)
    }

    fn count_system_calls(&self, cell: &Cell, contestant: Contestant) -> Result<u64, CommandError> {
        let file = RemovedOnInterrupt::new(&self.prepare(cell, contestant)?);
        let command = self.command(cell, contestant, file.path());
        let calls = system_calls(&command, &self.place.directory)?;
        self.dispose(contestant, file.path())?;
        Ok(calls)
    }

    /// Makes the file that is measured, and lets what that has caused come to rest.
    fn prepare(&self, cell: &Cell, contestant: Contestant) -> Result<PathBuf, CommandError> {
        let path = match contestant {
            Contestant::Cowslip(policy) => {
                let mut options = cell.shape.options();
                if policy != "auto" {
                    options += &format!(",alloc_policy={policy}");
                }
                self.create(Command::new(&self.cowslip), &cell.shape, &options)?
            }
            Contestant::QemuImg => {
                self.create(Command::new("qemu-img"), &cell.shape, &cell.shape.options())?
            }
            Contestant::Raw(state) | Contestant::QemuRaw(state) => self.prepare_raw(state)?,
        };
        let file = File::open(&path).map_err(|e| failed("open", &path, &e))?;
        rustix::fs::syncfs(&file).map_err(|e| failed("sync", &path, &e.into()))?;
        Ok(path)
    }

    fn create(
        &self,
        mut command: Command,
        shape: &Shape,
        options: &str,
    ) -> Result<PathBuf, CommandError> {
        let path = self.file("image.qcow2");
        command.args(["create", "-q", "-f", "qcow2", "-o", options]);
        if shape.backing == Backing::Raw {
            self.make_written()?;
            command.args(["-F", "raw", "-b"]).arg(self.written());
        }
        command.arg(&path).arg(self.scale.disk_bytes.to_string());
        run(&mut command)?;
        Ok(path)
    }

    fn make_written(&self) -> Result<(), CommandError> {
        let path = self.written();
        if path.exists() {
            return Ok(());
        }
        self.progress.say("writing a raw file throughout");
        let guarded = RemovedOnInterrupt::new(&path);
        cowslip_testbed::populate(guarded.path(), self.scale.disk_bytes).map_err(CommandError::new)
    }

    fn prepare_raw(&self, state: RawFile) -> Result<PathBuf, CommandError> {
        if state == RawFile::Written {
            self.make_written()?;
            return Ok(self.written());
        }
        let path = self.file("image.raw");
        if state == RawFile::Clone {
            self.make_written()?;
            reflink(&self.written(), &path).map_err(|e| failed("clone to", &path, &e))?;
            return Ok(path);
        }
        let file = File::create(&path).map_err(|e| failed("create", &path, &e))?;
        let made = match state {
            RawFile::Allocated => {
                let none = FallocateFlags::empty();
                rustix::fs::fallocate(&file, none, 0, self.scale.disk_bytes).map_err(Into::into)
            }
            _ => file.set_len(self.scale.disk_bytes),
        };
        made.map_err(|e| failed("extend", &path, &e))?;
        Ok(path)
    }

    /// The same words for each engine but those that ask ours for its figures.
    fn command(&self, cell: &Cell, contestant: Contestant, file: &Path) -> Command {
        let (program, format) = match contestant {
            Contestant::Cowslip(_) => (self.cowslip.as_path(), "qcow2"),
            Contestant::Raw(_) => (self.cowslip.as_path(), "raw"),
            Contestant::QemuImg => (Path::new("qemu-img"), "qcow2"),
            Contestant::QemuRaw(_) => (Path::new("qemu-img"), "raw"),
        };
        let load = &cell.load;
        let step = scattering_step(self.scale.disk_bytes, load.request_bytes);
        let mut command = Command::new(program);
        command.args(["bench", "-w", PATTERN, "-f", format]);
        command.args(["-t", self.cache, "-i", self.aio]);
        for (name, value) in [
            ("-c", load.requests),
            ("-d", load.depth),
            ("-s", load.request_bytes),
            ("-S", step),
            ("--flush-interval", load.flush_interval),
        ] {
            command.args([name, &value.to_string()]);
        }
        if let Contestant::Cowslip(_) | Contestant::Raw(_) = contestant {
            command.arg("--json");
        }
        command.arg(file);
        command
    }

    /// A figure counts only if the image survived. QEMU judges all images where it is installed.
    fn check(&self, contestant: Contestant, image: &Path) -> Result<(), CommandError> {
        if let Contestant::Raw(_) | Contestant::QemuRaw(_) = contestant {
            return Ok(());
        }
        let checker = match self.has_qemu_img {
            true => Path::new("qemu-img"),
            false => &self.cowslip,
        };
        let mut command = Command::new(checker);
        command.args(["check", "-q", "-f", "qcow2"]).arg(image);
        run(&mut command).map(drop)
    }

    fn dispose(&self, contestant: Contestant, file: &Path) -> Result<(), CommandError> {
        let is_shared = contestant.is_raw_written();
        match (is_shared, self.scale.keep) {
            (true, _) => Ok(()),
            (false, true) => {
                let kept = self.file(&format!("{}.kept", contestant.name().replace(' ', "-")));
                fs::rename(file, &kept).map_err(|e| failed("keep", &kept, &e))
            }
            (false, false) => fs::remove_file(file).map_err(|e| failed("remove", file, &e)),
        }
    }
}

fn measurement(
    cell: &Cell,
    run: Run,
    host: HostUsage,
    device_flushes: Option<u64>,
) -> Result<Measurement, CommandError> {
    let requests = cell.load.requests as f64;
    // QEMU tells no figures; without them the output is two lines of text.
    let told: Option<serde_json::Value> = serde_json::from_str(&run.output).ok();
    if let Some(told) = &told {
        let interval = cell.load.flush_interval;
        let due = cell.load.requests.checked_div(interval).unwrap_or(0);
        if told["flushes"] != due {
            let flushes = &told["flushes"];
            return Err(CommandError::new(format!(
                "{flushes} flushes where {due} were due"
            )));
        }
    }
    Ok(Measurement {
        seconds: run.seconds,
        iops: requests / run.seconds,
        cpu_us: run.cpu_seconds * 1e6 / requests,
        peak_rss_bytes: run.peak_rss_bytes,
        host,
        device_flushes,
        told,
    })
}

fn reflink(source: &Path, target: &Path) -> std::io::Result<()> {
    let source = File::open(source)?;
    let target = File::create(target)?;
    Ok(rustix::fs::ioctl_ficlone(&target, &source)?)
}

fn qemu_img_is_installed() -> bool {
    let mut command = Command::new("qemu-img");
    run(command.arg("--version")).is_ok()
}

/// `Could not VERB 'PATH': why`.
pub fn failed(verb: &str, path: &Path, error: &std::io::Error) -> CommandError {
    let words = cowslip::error::system_words(error);
    CommandError::new(format!("Could not {verb} '{}': {words}", path.display()))
}
