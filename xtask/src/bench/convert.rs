//! `cargo xtask bench convert`: `cowslip convert`, `qemu-img convert` and nbdcopy in turn on the
//! same sources.
//!
//! All run with the options that users give them, which is next to none, through the page cache as
//! they do by default and past it (`-t none -T none`; nbdcopy has no such option and is left out
//! there). Every target is compared with its source by `qemu-img compare`, and a qcow2 one checked.
//! Time is from the start to the end of the process; dirty pages that remain in the page cache are
//! written out between runs and not accounted to any.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;
use serde_json::json;

use super::turns::{self, COWSLIP, Measurement, QEMU_IMG, Row, Rows, Usage};
use super::{Args, GIB};
use crate::run;

mod sources;

use sources::Source;

/// Bytes of data of each source, unless `--data-mib` says otherwise.
const DATA_BYTES: u64 = GIB;
/// The same with `--quick`.
const DATA_BYTES_QUICK: u64 = GIB / 4;

/// In any order: with `-c` it is the only way for it to use several processors.
const QEMU_IMG_ANY_ORDER: &str = "qemu-img -W";
const NBDCOPY: &str = "nbdcopy";

/// How files are used.
const DEFAULT: &str = "default";
const DIRECT: &str = "direct";

/// The target of a conversion.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Target {
    Raw,
    Qcow2,
    Zlib,
    Zstd,
}

impl Target {
    fn words(self) -> &'static [&'static str] {
        match self {
            Target::Raw => &["-O", "raw"],
            Target::Qcow2 => &["-O", "qcow2"],
            Target::Zlib => &["-O", "qcow2", "-c"],
            Target::Zstd => &["-O", "qcow2", "-c", "-o", "compression_type=zstd"],
        }
    }

    fn format(self) -> &'static str {
        match self {
            Target::Raw => "raw",
            Target::Qcow2 | Target::Zlib | Target::Zstd => "qcow2",
        }
    }
}

/// A row: a source and what is made of it.
#[derive(Deserialize)]
struct Case {
    name: String,
    source: Source,
    target: Target,
    /// How many times as fast as qemu-img it is to be.
    goal: f64,
}

/// Cases of one source follow one another. An export that is 5 ms away is to be as fast as with
/// qemu-img, no more: its bytes take longer than its distance.
fn cases() -> Vec<Case> {
    serde_json::from_str(include_str!("convert/cases.json")).expect("the file is one of cases")
}

/// Measures all cases and writes the table and the results.
pub(super) fn run(args: &Args, binary: &Path, directory: &Path) -> Result<(), String> {
    let (repetitions, data_bytes) = match args.quick {
        true => (1, DATA_BYTES_QUICK),
        false => (3, DATA_BYTES),
    };
    let repetitions = args.repetitions.unwrap_or(repetitions).max(1);
    let data_bytes = args.data_mib.map_or(data_bytes, |mib| mib << 20);
    let mut rows = Rows::new("case");
    for filesystem in &args.filesystems {
        // The source, what it is made of, and two targets beside each other; metadata of the sparse
        // ones.
        let place = super::place(filesystem, directory, 5 * data_bytes + GIB)?;
        let mut present: Option<Source> = None;
        for case in cases().iter().filter(|case| args.wants(&case.name)) {
            let bench = CaseBench {
                case,
                place: &place.directory,
                binary,
            };
            if present != Some(case.source) {
                sources::remove(&place.directory)?;
                case.source.make(&place.directory, data_bytes)?;
                present = Some(case.source);
            }
            let server = case.source.serve(&place.directory)?;
            for cache in [DEFAULT, DIRECT] {
                rows.add(Row {
                    names: [place.name.clone(), case.name.clone(), cache.to_string()],
                    goal: Some(case.goal),
                    runs: bench.run(cache, repetitions)?,
                });
            }
            drop(server);
        }
        sources::remove(&place.directory)?;
    }
    let conditions = json!({
        "load": "convert",
        "data_bytes": data_bytes,
        "repetitions": repetitions,
    });
    rows.end("convert", conditions)
}

/// One case on one file system.
struct CaseBench<'a> {
    case: &'a Case,
    place: &'a Path,
    binary: &'a Path,
}

impl CaseBench<'_> {
    fn run(
        &self,
        cache: &str,
        repetitions: usize,
    ) -> Result<Vec<(&'static str, Measurement)>, String> {
        let mut run = |program, repetition| {
            let measurement = self.measure(program, cache)?;
            if repetition == 0 {
                self.compare(program)?;
            }
            fs::remove_file(self.target()).map_err(|e| e.to_string())?;
            Ok(measurement)
        };
        let is_compressed = matches!(self.case.target, Target::Zlib | Target::Zstd);
        let in_turn: &[_] = match is_compressed {
            true => &[COWSLIP, QEMU_IMG, QEMU_IMG_ANY_ORDER],
            false => &[COWSLIP, QEMU_IMG],
        };
        let mut runs = turns::in_turn(in_turn, repetitions, &mut run)?;
        // Not among the others: a copy that follows one of nbdcopy's takes up to five times as
        // long, with any program.
        if !is_compressed && cache == DEFAULT && run::find_program(NBDCOPY).is_some() {
            runs.extend(turns::in_turn(&[NBDCOPY], repetitions, &mut run)?);
        }
        Ok(runs)
    }

    fn target(&self) -> PathBuf {
        self.place.join("target")
    }

    fn command(&self, program: &str, cache: &str) -> Command {
        let mut command = match program {
            NBDCOPY => return self.nbdcopy(),
            COWSLIP => Command::new(self.binary),
            _ => Command::new(QEMU_IMG),
        };
        command
            .args(["convert", "-f", self.case.source.format()])
            .args(self.case.target.words());
        if cache == DIRECT {
            command.args(["-t", "none", "-T", "none"]);
        }
        if program == QEMU_IMG_ANY_ORDER {
            command.arg("-W");
        }
        command.arg(self.case.source.name(self.place));
        command.arg(self.target());
        command
    }

    /// qcow2 goes through qemu-nbd, as nbdcopy's manual has it. A target of its own making is the
    /// size of its source's disk.
    fn nbdcopy(&self) -> Command {
        let source = self.case.source.name(self.place);
        let mut command = Command::new("nbdcopy");
        // The arguments of the servers are not options of its own.
        command.arg("--");
        match self.case.source.format() {
            "qcow2" => command
                .args(["[", "qemu-nbd", "-r", "-f", "qcow2"])
                .arg(source)
                .arg("]"),
            _ => command.arg(source),
        };
        match self.case.target {
            Target::Raw => command.arg(self.target()),
            _ => command
                .args(["[", "qemu-nbd", "-f", "qcow2"])
                .arg(self.target())
                .arg("]"),
        };
        command
    }

    /// Makes what nbdcopy does not make itself.
    fn prepare(&self, program: &str) -> Result<(), String> {
        if program != NBDCOPY || self.case.target == Target::Raw {
            return Ok(());
        }
        let size = self.case.source.disk_bytes(self.place)?;
        let mut create = Command::new("qemu-img");
        create
            .args(["create", "-q", "-f", "qcow2"])
            .arg(self.target());
        run::output(create.arg(size.to_string())).map(drop)
    }

    fn measure(&self, program: &str, cache: &str) -> Result<Measurement, String> {
        self.prepare(program)?;
        run::run(&mut Command::new("sync"))?;
        let (mut measurement, _) = turns::timed(&mut self.command(program, cache))?;
        run::run(&mut Command::new("sync"))?;
        measurement.target = Some(Usage::of(&self.target())?);
        Ok(measurement)
    }

    /// A figure counts only if the copy is one.
    fn compare(&self, program: &str) -> Result<(), String> {
        let (source, format) = (self.case.source, self.case.target.format());
        let left = |what: String| format!("{program} left {what}");
        if format == "qcow2" {
            let mut check = Command::new(QEMU_IMG);
            let checked = run::output(check.args(["check", "-q", "-f", format]).arg(self.target()));
            checked.map_err(|e| left(format!("a bad image: {e}")))?;
        }
        let mut compare = Command::new(QEMU_IMG);
        compare.args(["compare", "-q", "-f", source.format(), "-F", format]);
        compare.arg(source.path(self.place)).arg(self.target());
        let compared = run::output(&mut compare).map(drop);
        compared.map_err(|e| left(format!("another disk: {e}")))
    }
}
