//! `cargo xtask bench --check`: `cowslip check` and `qemu-img check` in turn on the same images.
//!
//! Both run as users run them, with the default cache mode. A cold run finds none of the image in
//! the page cache, a warm one all of it. Both must find the image sound and say the same.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{Advice, fadvise};
use serde_json::json;

use super::turns::{self, COWSLIP, Measurement, QEMU_IMG, Row, Rows};
use super::{Args, GIB};

mod shapes;

use shapes::Shape;

/// Space for the metadata of the largest image.
const FILESYSTEM_BYTES: u64 = 6 * GIB;
/// States of the page cache when a run begins.
const COLD: &str = "cold";
const WARM: &str = "warm";

/// Measures all shapes and writes the table and the results.
pub(super) fn run(args: &Args, binary: &Path, directory: &Path) -> Result<(), String> {
    let default_repetitions = if args.quick { 3 } else { 9 };
    let repetitions = args.repetitions.unwrap_or(default_repetitions).max(1);
    let mut rows = Rows::new("image");
    for filesystem in &args.filesystems {
        let place = super::place(filesystem, directory, FILESYSTEM_BYTES)?;
        for shape in shapes::all() {
            if !args.wants(&shape.name) || args.quick && shape.is_large() {
                continue;
            }
            let bench = ShapeBench {
                image: &place.directory.join("image.qcow2"),
                binary,
                repetitions: match shape.is_large() {
                    true => repetitions.div_ceil(3),
                    false => repetitions,
                },
            };
            for (cache, runs) in bench.run(&shape)? {
                rows.add(Row {
                    names: [place.name.clone(), shape.name.clone(), cache.to_string()],
                    goal: None,
                    runs,
                });
            }
        }
    }
    let conditions = json!({
        "load": "check of a sound image, default cache mode",
        "repetitions": repetitions,
    });
    rows.end("check", conditions)
}

/// One image on one file system.
struct ShapeBench<'a> {
    image: &'a Path,
    binary: &'a Path,
    repetitions: usize,
}

type Runs = Vec<(&'static str, Measurement)>;

impl ShapeBench<'_> {
    fn run(&self, shape: &Shape) -> Result<Vec<(&'static str, Runs)>, String> {
        shape.make(self.image)?;
        let mut rows = Vec::new();
        for cache in [COLD, WARM] {
            let mut said: Option<String> = None;
            if cache == WARM {
                // Fills the cache; its figures are those of neither row.
                self.measure(QEMU_IMG)?;
            }
            let programs = [COWSLIP, QEMU_IMG];
            let runs = turns::in_turn(&programs, self.repetitions, |program, _| {
                if cache == COLD {
                    self.evict()?;
                }
                let (measurement, text) = self.measure(program)?;
                let first = said.get_or_insert_with(|| text.clone());
                match *first == text {
                    true => Ok(measurement),
                    false => Err(format!("the outcomes differ:\n{first}\n{text}")),
                }
            })?;
            rows.push((cache, runs));
        }
        fs::remove_file(self.image).map_err(|e| e.to_string())?;
        Ok(rows)
    }

    /// Drops the image, and no other file, from the page cache.
    fn evict(&self) -> Result<(), String> {
        let evicted = File::open(self.image).and_then(|file| {
            file.sync_all()?;
            fadvise(&file, 0, None, Advice::DontNeed)?;
            Ok(())
        });
        evicted.map_err(|e| format!("cannot evict {}: {e}", self.image.display()))
    }

    fn measure(&self, program: &str) -> Result<(Measurement, String), String> {
        let mut command = match program {
            COWSLIP => Command::new(self.binary),
            _ => Command::new(program),
        };
        command.args(["check", "-f", "qcow2"]).arg(self.image);
        // The report is far smaller than a pipe.
        turns::timed(command.stdout(Stdio::piped()))
    }
}
