//! `bench convert`: `cowslip convert`, `qemu-img convert` and nbdcopy in turn on the same sources.
//!
//! All run with the options that users give them, which is next to none, through the page cache as
//! they do by default and past it (`-t none -T none`; nbdcopy has no such option and is left out
//! there). Every target is compared with its source by `qemu-img compare`, and a qcow2 one checked.
//! Time is from the start to the end of the process; dirty pages that remain in the page cache are
//! written out between runs and not accounted to any.

use std::fs;
use std::path::Path;
use std::process::Command;

use cowslip_console::error::{CommandError, failed};
use cowslip_console::interrupt::RemovedOnInterrupt;
use serde::Deserialize;

use self::sources::Source;
use crate::cell::{Cell, Contestant};
use crate::description::Description;
use crate::host_usage::HostUsage;
use crate::peer_path;
use crate::peers::Peer;
use crate::report::{Column, Measurement, column};
use crate::run::run;
use crate::scale::Scale;
use crate::stage::{EXTENTS, SPACE, Stage, Turn, by_program, mebibytes};

mod sources;

/// How files are used.
const CACHED: &str = "page cache";
const DIRECT: &str = "direct";
/// nbdcopy's cell: a copy that follows one of its own takes up to five times as long, with any
/// program, so it has no turns among the others.
const NBDCOPY: &str = "page cache, nbdcopy";

/// How many times as fast as qemu-img it is to be.
const MUST: Column = column("must x QEMU", 1);

/// The table.
pub const TABLE: Description = Description {
    disk_bytes: 1 << 30,
    quick_disk_bytes: 256 << 20,
    policies: &["auto"],
    peers: &[Peer::QemuImg, Peer::Nbdcopy],
    // The source, its target, and metadata of the sparse ones.
    files_bytes: |data_bytes| data_bytes * 5 + (1 << 30),
    rate: column("MiB/s", 0),
    measure,
    has_depths: false,
    has_requests: false,
    ..Description::usual("convert", cells)
};

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
        self.words()[1]
    }

    fn is_compressed(self) -> bool {
        matches!(self, Target::Zlib | Target::Zstd)
    }
}

/// A source and what is made of it.
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

fn cells(_: &Scale) -> Vec<Cell> {
    let cells = cases().into_iter().flat_map(|case| {
        let mut in_turn = vec![Contestant::Cowslip("auto"), Contestant::QemuImg];
        in_turn.extend(
            case.target
                .is_compressed()
                .then_some(Contestant::QemuImgAnyOrder),
        );
        let mut cells = vec![(CACHED, in_turn.clone()), (DIRECT, in_turn)];
        if !case.target.is_compressed() {
            cells.insert(1, (NBDCOPY, vec![Contestant::Nbdcopy]));
        }
        let cell = move |(how, contestants): (&str, Vec<_>)| {
            Cell::of_work(format!("{}, {how}", case.name), &contestants)
        };
        cells.into_iter().map(cell).collect::<Vec<_>>()
    });
    cells.collect()
}

/// Makes one run.
///
/// # Errors
/// A program fails, or its target is no copy.
fn measure(stage: &Stage<'_>, cell: &Cell, turn: Turn) -> Result<Measurement, CommandError> {
    let cell = cell.name();
    let (name, how) = cell.split_once(", ").unwrap_or((&cell, CACHED));
    let of_name = cases().into_iter().find(|case| case.name == name);
    let case = of_name.expect("cells are made of cases");
    let make = |directory: &Path| case.source.make(directory, stage.disk_bytes());
    let directory = stage.shared_files(&format!("{:?}", case.source), make)?;
    let server = case.source.serve(&directory)?;
    let target = RemovedOnInterrupt::new(&stage.directory().join("target"));
    let conversion = Conversion {
        case: &case,
        source: &directory,
        target: target.path(),
    };
    if turn.contestant == Contestant::Nbdcopy && case.target != Target::Raw {
        conversion.create_target()?;
    }
    let mut command = conversion.command(stage, turn.contestant, how);
    rustix::fs::sync();
    let converted = run(&mut command)?;
    rustix::fs::sync();
    let usage = HostUsage::of(target.path())?;
    if turn.repetition == 0 {
        conversion.compare(turn.contestant)?;
    }
    drop(server);
    fs::remove_file(target.path()).map_err(|e| failed("remove", target.path(), &e))?;
    let mebibytes_of_data = mebibytes(case.source.data_bytes(stage.disk_bytes()));
    let mut measurement = by_program(mebibytes_of_data, &converted, &command);
    measurement.add(SPACE, Some(mebibytes(usage.bytes)));
    measurement.add(EXTENTS, usage.extents.map(|extents| extents as f64));
    measurement.add(MUST, turn.contestant.is_cowslip().then_some(case.goal));
    Ok(measurement)
}

struct Conversion<'a> {
    case: &'a Case,
    /// Directory of the source.
    source: &'a Path,
    target: &'a Path,
}

impl Conversion<'_> {
    fn command(&self, stage: &Stage<'_>, contestant: Contestant, how: &str) -> Command {
        if contestant == Contestant::Nbdcopy {
            return self.nbdcopy();
        }
        let mut command = stage.program(contestant);
        command.args(["convert", "-f", self.case.source.format()]);
        command.args(self.case.target.words());
        if how == DIRECT {
            command.args(["-t", "none", "-T", "none"]);
        }
        if contestant == Contestant::QemuImgAnyOrder {
            command.arg("-W");
        }
        command.arg(self.case.source.name(self.source));
        command.arg(self.target);
        command
    }

    /// qcow2 goes through qemu-nbd, as nbdcopy's manual has it.
    fn nbdcopy(&self) -> Command {
        let mut command = Command::new("nbdcopy");
        // The arguments of the servers are not options of its own.
        command.arg("--");
        let source = self.case.source.name(self.source);
        match self.case.source.format() {
            "qcow2" => {
                command.args(["[", "qemu-nbd", "-r", "-f", "qcow2"]);
                command.arg(source).arg("]");
            }
            _ => drop(command.arg(source)),
        }
        match self.case.target {
            Target::Raw => drop(command.arg(self.target)),
            _ => {
                command.args(["[", "qemu-nbd", "-f", "qcow2"]);
                command.arg(self.target).arg("]");
            }
        }
        command
    }

    /// Makes what nbdcopy does not make itself, of the size of the source's disk.
    fn create_target(&self) -> Result<(), CommandError> {
        let size = self.case.source.disk_bytes(self.source)?;
        let mut create = peer_path::command("qemu-img");
        create
            .args(["create", "-q", "-f", "qcow2"])
            .arg(self.target);
        run(create.arg(size.to_string())).map(drop)
    }

    /// A figure counts only if the copy is one.
    fn compare(&self, contestant: Contestant) -> Result<(), CommandError> {
        let (source, format) = (self.case.source, self.case.target.format());
        let left = |what: &str, error: &CommandError| {
            CommandError::new(format!("{} left {what}: {error}", contestant.name()))
        };
        if format == "qcow2" {
            let mut check = peer_path::command("qemu-img");
            check.args(["check", "-q", "-f", format]).arg(self.target);
            run(&mut check).map_err(|e| left("a bad image", &e))?;
        }
        let mut compare = peer_path::command("qemu-img");
        compare.args(["compare", "-q", "-f", source.format(), "-F", format]);
        compare.arg(source.path(self.source)).arg(self.target);
        let compared = run(&mut compare).map(drop);
        compared.map_err(|e| left("another disk", &e))
    }
}
