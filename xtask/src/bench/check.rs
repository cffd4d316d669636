//! `cargo xtask bench --check`: `cowslip check` and `qemu-img check` in turn on the same images.
//!
//! Both run as users run them, with the default cache mode. A cold run finds none of the image in
//! the page cache, a warm one all of it. Both must find the image sound and say the same. CPU time
//! and peak memory are what the kernel accounts to the process.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use cowslip_testbed::Spread;
use rustix::fs::{Advice, fadvise};
use serde_json::{Value, json};
use wait4::Wait4;

use super::report;
use super::{Args, GIB};

mod shapes;

use shapes::Shape;

/// Space for the metadata of the largest image.
const FILESYSTEM_BYTES: u64 = 6 * GIB;

/// The program that checks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tool {
    Cowslip,
    QemuImg,
}

impl Tool {
    fn name(self) -> &'static str {
        match self {
            Tool::Cowslip => "cowslip",
            Tool::QemuImg => "qemu-img",
        }
    }
}

/// The state of the page cache when a run begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cache {
    Cold,
    Warm,
}

impl Cache {
    fn name(self) -> &'static str {
        match self {
            Cache::Cold => "cold",
            Cache::Warm => "warm",
        }
    }
}

/// One run.
#[derive(Clone, serde::Serialize)]
struct Measurement {
    wall_ms: f64,
    /// User and system.
    cpu_ms: f64,
    peak_rss_bytes: u64,
}

struct Row {
    filesystem: String,
    shape: &'static str,
    cache: Cache,
    runs: Vec<(Tool, Measurement)>,
}

impl Row {
    fn spread(&self, tool: Tool, figure: impl Fn(&Measurement) -> f64) -> Option<Spread> {
        let runs = self.runs.iter().filter(|(t, _)| *t == tool);
        Spread::of(runs.map(|(_, run)| figure(run)).collect())
    }

    /// How many times as fast as qemu-img, by the medians of a figure.
    fn ratio(&self, figure: impl Fn(&Measurement) -> f64 + Copy) -> Option<f64> {
        let ours = self.spread(Tool::Cowslip, figure)?.median;
        Some(self.spread(Tool::QemuImg, figure)?.median / ours)
    }

    fn print(&self) {
        for tool in [Tool::Cowslip, Tool::QemuImg] {
            let (Some(wall), Some(cpu), Some(rss)) = (
                self.spread(tool, |m| m.wall_ms),
                self.spread(tool, |m| m.cpu_ms),
                self.spread(tool, |m| {
                    report::as_f64(m.peak_rss_bytes) / f64::from(1 << 20)
                }),
            ) else {
                continue;
            };
            let ratio = |ratio: Option<f64>| match (tool, ratio) {
                (Tool::Cowslip, Some(ratio)) => format!("{ratio:.2}"),
                _ => String::new(),
            };
            println!(
                "{:6} {:36} {:5} {:9} {:9.1} {:>17} {:>6} {:9.1} {:>6} {:8.1}",
                self.filesystem,
                self.shape,
                self.cache.name(),
                tool.name(),
                wall.median,
                format!("{:.1}-{:.1}", wall.least, wall.greatest),
                ratio(self.ratio(|m| m.wall_ms)),
                cpu.median,
                ratio(self.ratio(|m| m.cpu_ms)),
                rss.greatest,
            );
        }
    }

    fn json(&self) -> Value {
        let runs = |tool: Tool| {
            let runs = self.runs.iter().filter(|(t, _)| *t == tool);
            runs.map(|(_, run)| json!(run)).collect::<Vec<_>>()
        };
        json!({
            "filesystem": self.filesystem,
            "image": self.shape,
            "cache": self.cache.name(),
            "ratio": self.ratio(|m| m.wall_ms),
            "cpu_ratio": self.ratio(|m| m.cpu_ms),
            "runs": {
                Tool::Cowslip.name(): runs(Tool::Cowslip),
                Tool::QemuImg.name(): runs(Tool::QemuImg),
            },
        })
    }
}

/// Measures all shapes and writes the table and the results.
pub(super) fn run(args: &Args, binary: &Path, directory: &Path) -> Result<(), String> {
    let default_repetitions = if args.quick { 3 } else { 9 };
    let repetitions = args.repetitions.unwrap_or(default_repetitions).max(1);
    let mut rows = Vec::new();
    for filesystem in &args.filesystems {
        let place = super::place(filesystem, directory, FILESYSTEM_BYTES)?;
        for shape in shapes::all() {
            let wanted = args.cells.as_ref();
            if wanted.is_some_and(|part| !shape.name.contains(part)) || args.quick && shape.is_large
            {
                continue;
            }
            let image = place.directory.join("image.qcow2");
            let bench = ShapeBench {
                shape: &shape,
                image: &image,
                binary,
            };
            for (cache, runs) in bench.run(repetitions)? {
                let row = Row {
                    filesystem: place.name.clone(),
                    shape: shape.name,
                    cache,
                    runs,
                };
                if rows.is_empty() {
                    print_head();
                }
                row.print();
                rows.push(row);
            }
        }
    }
    println!("\nMedians; ratio: how many times as fast as qemu-img, of time and of CPU time\n");
    print_head();
    rows.iter().for_each(Row::print);
    let results = json!({
        "conditions": report::conditions(json!({
            "load": "check of a sound image, default cache mode",
            "repetitions": repetitions,
        })),
        "rows": rows.iter().map(Row::json).collect::<Vec<_>>(),
    });
    let written = report::write_results("check", &results)?;
    println!("\nresults: {}", written.display());
    Ok(())
}

fn print_head() {
    println!(
        "{:6} {:36} {:5} {:9} {:>9} {:>17} {:>6} {:>9} {:>6} {:>8}",
        "fs",
        "image",
        "cache",
        "command",
        "ms",
        "least-most",
        "ratio",
        "CPU ms",
        "ratio",
        "RSS MiB"
    );
}

/// One shape on one file system.
struct ShapeBench<'a> {
    shape: &'a Shape,
    image: &'a Path,
    binary: &'a Path,
}

type Runs = Vec<(Tool, Measurement)>;

impl ShapeBench<'_> {
    fn run(&self, repetitions: usize) -> Result<Vec<(Cache, Runs)>, String> {
        self.shape.make(self.image)?;
        let repetitions = match self.shape.is_large {
            true => repetitions.div_ceil(3),
            false => repetitions,
        };
        let mut rows = Vec::new();
        for cache in [Cache::Cold, Cache::Warm] {
            let mut runs = Vec::new();
            let mut said: Option<String> = None;
            if cache == Cache::Warm {
                // Fills the cache; its figures are those of neither row.
                self.measure(Tool::QemuImg)?;
            }
            for repetition in 0..repetitions {
                let mut tools = [Tool::Cowslip, Tool::QemuImg];
                tools.rotate_left(repetition % 2);
                for tool in tools {
                    if cache == Cache::Cold {
                        self.evict()?;
                    }
                    let (measurement, text) = self.measure(tool)?;
                    let first = said.get_or_insert_with(|| text.clone());
                    if *first != text {
                        return Err(format!("the outcomes differ:\n{first}\n{text}"));
                    }
                    runs.push((tool, measurement));
                }
            }
            rows.push((cache, runs));
        }
        fs::remove_file(self.image).map_err(|e| e.to_string())?;
        Ok(rows)
    }

    /// Drops the image from the page cache, and nothing of anybody else's.
    fn evict(&self) -> Result<(), String> {
        let evicted = File::open(self.image).and_then(|file| {
            file.sync_all()?;
            fadvise(&file, 0, None, Advice::DontNeed)?;
            Ok(())
        });
        evicted.map_err(|e| format!("cannot evict {}: {e}", self.image.display()))
    }

    fn measure(&self, tool: Tool) -> Result<(Measurement, String), String> {
        let program = match tool {
            Tool::Cowslip => self.binary.to_path_buf(),
            Tool::QemuImg => PathBuf::from("qemu-img"),
        };
        let failed = |e: std::io::Error| format!("{}: {e}", tool.name());
        let mut command = Command::new(program);
        command.args(["check", "-f", "qcow2"]).arg(self.image);
        // The report is far smaller than a pipe.
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let start = Instant::now();
        let mut child = command.spawn().map_err(failed)?;
        let used = child.wait4().map_err(failed)?;
        let wall = start.elapsed();
        let mut text = String::new();
        if let Some(mut stdout) = child.stdout.take() {
            std::io::Read::read_to_string(&mut stdout, &mut text).map_err(failed)?;
        }
        if !used.status.success() {
            return Err(format!("{}: {}\n{text}", tool.name(), used.status));
        }
        let measurement = Measurement {
            wall_ms: wall.as_secs_f64() * 1e3,
            cpu_ms: (used.rusage.utime + used.rusage.stime).as_secs_f64() * 1e3,
            peak_rss_bytes: used.rusage.maxrss,
        };
        Ok((measurement, text))
    }
}
