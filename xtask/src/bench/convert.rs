//! `cargo xtask bench convert`: `cowslip convert`, `qemu-img convert` and nbdcopy in turn on the
//! same sources.
//!
//! All run with the options that users give them, which is next to none, through the page cache as
//! they do by default and past it (`-t none -T none`; nbdcopy has no such option and is left out
//! there). Every target is compared with its source by `qemu-img compare`, and a qcow2 one checked.
//! Time is from the start to the end of the process; what is left in the page cache is written out
//! between runs and belongs to nobody. CPU time and peak memory are what the kernel accounts to the
//! process and those that it has waited for.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use cowslip_testbed::Spread;
use serde_json::{Value, json};
use wait4::Wait4;

use super::{Args, GIB, report, usage};
use crate::run;

mod sources;

use sources::Source;

/// Bytes of data of each source, unless `--data-mib` says otherwise.
const DATA_BYTES: u64 = GIB;
/// The same with `--quick`.
const DATA_BYTES_QUICK: u64 = GIB / 4;

/// The program that converts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tool {
    Cowslip,
    QemuImg,
    /// In any order: with `-c` it is the only way for it to use several processors.
    QemuImgAnyOrder,
    NbdCopy,
}

impl Tool {
    fn name(self) -> &'static str {
        match self {
            Tool::Cowslip => "cowslip",
            Tool::QemuImg => "qemu-img",
            Tool::QemuImgAnyOrder => "qemu-img -W",
            Tool::NbdCopy => "nbdcopy",
        }
    }
}

/// How files are used.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cache {
    Default,
    Direct,
}

impl Cache {
    fn name(self) -> &'static str {
        match self {
            Cache::Default => "default",
            Cache::Direct => "direct",
        }
    }
}

/// The target of a conversion.
#[derive(Clone, Copy, PartialEq, Eq)]
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

    fn is_compressed(self) -> bool {
        matches!(self, Target::Zlib | Target::Zstd)
    }
}

/// A row: a source and what is made of it.
struct Case {
    name: &'static str,
    source: Source,
    target: Target,
    /// How many times as fast as qemu-img it is to be.
    goal: f64,
}

const fn case(name: &'static str, source: Source, target: Target, goal: f64) -> Case {
    Case {
        name,
        source,
        target,
        goal,
    }
}

/// Cases of one source follow one another.
const CASES: &[Case] = &[
    case("raw to qcow2", Source::Raw, Target::Qcow2, 1.0),
    case("qcow2 to raw", Source::Qcow2, Target::Raw, 1.0),
    case(
        "sparse 1 TiB to qcow2",
        Source::SparseRaw,
        Target::Qcow2,
        1.0,
    ),
    case(
        "sparse 1 TiB qcow2 to raw",
        Source::SparseQcow2,
        Target::Raw,
        1.0,
    ),
    case(
        "raw in 4 KiB pieces to qcow2",
        Source::PiecesRaw,
        Target::Qcow2,
        1.5,
    ),
    case(
        "scattered qcow2 to raw",
        Source::Scattered,
        Target::Raw,
        1.0,
    ),
    case("chain of 5 to qcow2", Source::Chain, Target::Qcow2, 1.0),
    case("raw to zlib", Source::Compressible, Target::Zlib, 2.0),
    case("raw to zstd", Source::Compressible, Target::Zstd, 2.0),
    case("zlib to raw", Source::Zlib, Target::Raw, 1.5),
    case("zstd to raw", Source::Zstd, Target::Raw, 1.5),
    case("NBD export to qcow2", Source::Served, Target::Qcow2, 1.0),
    case("NBD export to raw", Source::Served, Target::Raw, 1.0),
    // Its bytes take longer than its distance.
    case(
        "NBD export 5 ms away to qcow2",
        Source::Distant(5),
        Target::Qcow2,
        1.0,
    ),
    case(
        "NBD export 20 ms away to qcow2",
        Source::Distant(20),
        Target::Qcow2,
        1.5,
    ),
];

/// One run.
#[derive(Clone, serde::Serialize)]
struct Measurement {
    wall_ms: f64,
    /// User and system.
    cpu_ms: f64,
    peak_rss_bytes: u64,
    /// Of the target's file.
    host_bytes: u64,
    host_extents: u64,
}

struct Row {
    filesystem: String,
    case: &'static Case,
    cache: Cache,
    runs: Vec<(Tool, Measurement)>,
}

impl Row {
    fn spread(&self, tool: Tool, figure: impl Fn(&Measurement) -> f64) -> Option<Spread> {
        let runs = self.runs.iter().filter(|(t, _)| *t == tool);
        Spread::of(runs.map(|(_, run)| figure(run)).collect())
    }

    /// How many times as fast as qemu-img without -W this is, by the medians of a figure.
    fn ratio(&self, tool: Tool, figure: impl Fn(&Measurement) -> f64 + Copy) -> Option<f64> {
        let its = self.spread(tool, figure)?.median;
        Some(self.spread(Tool::QemuImg, figure)?.median / its)
    }

    /// The same by the fastest run of each: a virtual machine that waits for memory of its host now
    /// and then takes ten times as long as else, and with few runs such a one is soon the median.
    fn best_ratio(&self, tool: Tool) -> Option<f64> {
        let its = self.spread(tool, |m| m.wall_ms)?.least;
        Some(self.spread(Tool::QemuImg, |m| m.wall_ms)?.least / its)
    }

    fn tools(&self) -> Vec<Tool> {
        let all = [
            Tool::Cowslip,
            Tool::QemuImg,
            Tool::QemuImgAnyOrder,
            Tool::NbdCopy,
        ];
        let ran = |tool: &Tool| self.runs.iter().any(|(t, _)| t == tool);
        all.into_iter().filter(ran).collect()
    }

    fn print(&self) {
        let mebibytes = |bytes: u64| report::as_f64(bytes) / f64::from(1 << 20);
        for tool in self.tools() {
            let of = |figure: &dyn Fn(&Measurement) -> f64| self.spread(tool, figure);
            let (Some(wall), Some(cpu), Some(rss), Some(host), Some(extents)) = (
                of(&|m| m.wall_ms),
                of(&|m| m.cpu_ms),
                of(&|m| mebibytes(m.peak_rss_bytes)),
                of(&|m| mebibytes(m.host_bytes)),
                of(&|m| report::as_f64(m.host_extents)),
            ) else {
                continue;
            };
            let ratio = self.ratio(tool, |m| m.wall_ms).unwrap_or(f64::NAN);
            let verdict = match tool {
                Tool::Cowslip if ratio < self.case.goal => format!("{:.1} wanted", self.case.goal),
                _ => String::new(),
            };
            println!(
                "{:5} {:30} {:8} {:12} {:9.0} {:>15} {:6.2} {:6.2} {:9.0} {:6.2} {:8.1} {:9.0} {:8.0} {}",
                self.filesystem,
                self.case.name,
                self.cache.name(),
                tool.name(),
                wall.median,
                format!("{:.0}-{:.0}", wall.least, wall.greatest),
                ratio,
                self.best_ratio(tool).unwrap_or(f64::NAN),
                cpu.median,
                self.ratio(tool, |m| m.cpu_ms).unwrap_or(f64::NAN),
                rss.greatest,
                host.median,
                extents.median,
                verdict,
            );
        }
    }

    fn json(&self) -> Value {
        let runs = |tool: Tool| {
            let runs = self.runs.iter().filter(|(t, _)| *t == tool);
            runs.map(|(_, run)| json!(run)).collect::<Vec<_>>()
        };
        let runs = self
            .tools()
            .into_iter()
            .map(|tool| (tool.name().to_string(), json!(runs(tool))));
        json!({
            "filesystem": self.filesystem,
            "case": self.case.name,
            "cache": self.cache.name(),
            "goal": self.case.goal,
            "ratio": self.ratio(Tool::Cowslip, |m| m.wall_ms),
            "best_ratio": self.best_ratio(Tool::Cowslip),
            "cpu_ratio": self.ratio(Tool::Cowslip, |m| m.cpu_ms),
            "runs": runs.collect::<serde_json::Map<_, _>>(),
        })
    }
}

/// Measures all cases and writes the table and the results.
pub(super) fn run(args: &Args, binary: &Path, directory: &Path) -> Result<(), String> {
    let repetitions = args
        .repetitions
        .unwrap_or(if args.quick { 1 } else { 3 })
        .max(1);
    let default_bytes = if args.quick {
        DATA_BYTES_QUICK
    } else {
        DATA_BYTES
    };
    let data_bytes = args.data_mib.map_or(default_bytes, |mib| mib << 20);
    let mut rows = Vec::new();
    for filesystem in &args.filesystems {
        // The source, what it is made of, and two targets beside each other; metadata of the sparse
        // ones.
        let place = super::place(filesystem, directory, 5 * data_bytes + GIB)?;
        let mut present: Option<Source> = None;
        for case in CASES {
            if args
                .cells
                .as_ref()
                .is_some_and(|part| !case.name.contains(part))
            {
                continue;
            }
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
            for cache in [Cache::Default, Cache::Direct] {
                let row = Row {
                    filesystem: place.name.clone(),
                    case,
                    cache,
                    runs: bench.run(cache, repetitions)?,
                };
                if rows.is_empty() {
                    print_head();
                }
                row.print();
                rows.push(row);
            }
            drop(server);
        }
        sources::remove(&place.directory)?;
    }
    println!(
        "\nMedians; ratio: how many times as fast as qemu-img, of time and of CPU time; best: the same of the fastest run of each\n"
    );
    print_head();
    rows.iter().for_each(Row::print);
    let results = json!({
        "conditions": report::conditions(json!({
            "load": "convert",
            "data_bytes": data_bytes,
            "repetitions": repetitions,
        })),
        "rows": rows.iter().map(Row::json).collect::<Vec<_>>(),
    });
    let written = report::write_results("convert", &results)?;
    println!("\nresults: {}", written.display());
    Ok(())
}

fn print_head() {
    println!(
        "{:5} {:30} {:8} {:12} {:>9} {:>15} {:>6} {:>6} {:>9} {:>6} {:>8} {:>9} {:>8}",
        "fs",
        "case",
        "cache",
        "command",
        "ms",
        "least-most",
        "ratio",
        "best",
        "CPU ms",
        "ratio",
        "RSS MiB",
        "host MiB",
        "extents"
    );
}

/// One case on one file system.
struct CaseBench<'a> {
    case: &'static Case,
    place: &'a Path,
    binary: &'a Path,
}

impl CaseBench<'_> {
    fn run(&self, cache: Cache, repetitions: usize) -> Result<Vec<(Tool, Measurement)>, String> {
        let mut runs = Vec::new();
        // Not among the others: a copy that follows one of nbdcopy's takes up to five times as
        // long, with any program.
        let all = self.tools(cache).into_iter();
        let (others, in_turn): (Vec<_>, Vec<_>) = all.partition(|tool| *tool == Tool::NbdCopy);
        let rounds = std::iter::repeat_n(in_turn, repetitions).enumerate();
        let rounds = rounds.chain(std::iter::repeat_n(others, repetitions).enumerate());
        for (repetition, mut tools) in rounds {
            let count = tools.len().max(1);
            tools.rotate_left(repetition % count);
            for tool in tools {
                let measurement = self.measure(tool, cache)?;
                if repetition == 0 {
                    self.compare(tool)?;
                }
                fs::remove_file(self.target()).map_err(|e| e.to_string())?;
                runs.push((tool, measurement));
            }
        }
        Ok(runs)
    }

    fn tools(&self, cache: Cache) -> Vec<Tool> {
        let mut tools = vec![Tool::Cowslip, Tool::QemuImg];
        if self.case.target.is_compressed() {
            tools.push(Tool::QemuImgAnyOrder);
        } else if cache == Cache::Default && run::find_program("nbdcopy").is_some() {
            tools.push(Tool::NbdCopy);
        }
        tools
    }

    fn target(&self) -> PathBuf {
        self.place.join("target")
    }

    fn command(&self, tool: Tool, cache: Cache) -> Command {
        let source = self.case.source.name(self.place);
        let format = self.case.source.format();
        let mut command = match tool {
            Tool::NbdCopy => return self.nbdcopy(),
            Tool::Cowslip => Command::new(self.binary),
            Tool::QemuImg | Tool::QemuImgAnyOrder => Command::new("qemu-img"),
        };
        command
            .args(["convert", "-f", format])
            .args(self.case.target.words());
        if cache == Cache::Direct {
            command.args(["-t", "none", "-T", "none"]);
        }
        if tool == Tool::QemuImgAnyOrder {
            command.arg("-W");
        }
        command.arg(source).arg(self.target());
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
    fn prepare(&self, tool: Tool) -> Result<(), String> {
        if tool != Tool::NbdCopy || self.case.target == Target::Raw {
            return Ok(());
        }
        let size = self.case.source.disk_bytes(self.place)?;
        let mut create = Command::new("qemu-img");
        create
            .args(["create", "-q", "-f", "qcow2"])
            .arg(self.target());
        run::output(create.arg(size.to_string())).map(drop)
    }

    fn measure(&self, tool: Tool, cache: Cache) -> Result<Measurement, String> {
        self.prepare(tool)?;
        run::run(&mut Command::new("sync"))?;
        let mut command = self.command(tool, cache);
        let failed = |e: std::io::Error| format!("{}: {e}", tool.name());
        command.stdin(Stdio::null());
        let start = Instant::now();
        let mut child = command.spawn().map_err(failed)?;
        let used = child.wait4().map_err(failed)?;
        let wall = start.elapsed();
        if !used.status.success() {
            return Err(format!("{}: {}", run::describe(&command), used.status));
        }
        run::run(&mut Command::new("sync"))?;
        let (host_bytes, host_extents) = usage::of(&self.target())?;
        Ok(Measurement {
            wall_ms: wall.as_secs_f64() * 1e3,
            cpu_ms: (used.rusage.utime + used.rusage.stime).as_secs_f64() * 1e3,
            peak_rss_bytes: used.rusage.maxrss,
            host_bytes,
            host_extents,
        })
    }

    /// A figure counts only if the copy is one.
    fn compare(&self, tool: Tool) -> Result<(), String> {
        let format = match self.case.target {
            Target::Raw => "raw",
            _ => "qcow2",
        };
        let left = |what: String| format!("{} left {what}", tool.name());
        if format == "qcow2" {
            let mut check = Command::new("qemu-img");
            let checked = run::output(check.args(["check", "-q", "-f", format]).arg(self.target()));
            checked.map_err(|e| left(format!("a bad image: {e}")))?;
        }
        let mut compare = Command::new("qemu-img");
        compare.args([
            "compare",
            "-q",
            "-f",
            self.case.source.format(),
            "-F",
            format,
        ]);
        compare
            .arg(self.case.source.path(self.place))
            .arg(self.target());
        let compared = run::output(&mut compare).map(drop);
        compared.map_err(|e| left(format!("another disk: {e}")))
    }
}
