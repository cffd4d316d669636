//! `bench check`: `cowslip check` and `qemu-img check` in turn on the same images, as users run
//! them, with the default cache mode. A cold run finds none of the image in the page cache, a warm
//! one all of it. Both must find the image sound and say the same.

use std::fs::{self, File};
use std::path::Path;

use cowslip_console::error::{CommandError, failed};
use cowslip_testbed::image::Design;
use cowslip_testbed::populate_compressible;
use rustix::fs::{Advice, fadvise};
use serde::Deserialize;

use crate::cell::{Cell, Contestant};
use crate::description::Description;
use crate::peer_path;
use crate::report::{Measurement, column};
use crate::run::run;
use crate::scale::Scale;
use crate::stage::{Stage, Turn, by_program};

/// Space for the metadata of the largest image.
const FILESYSTEM_BYTES: u64 = 6 << 30;
/// States of the page cache when a run begins.
const COLD: &str = "cold";
const WARM: &str = "warm";

/// The table.
pub const TABLE: Description = Description {
    // Larger images are left out.
    disk_bytes: 8 << 40,
    quick_disk_bytes: 1 << 40,
    policies: &["auto"],
    files_bytes: |_| FILESYSTEM_BYTES,
    rate: column("checks/s", 2),
    measure,
    has_depths: false,
    has_requests: false,
    ..Description::usual("check", cells)
};

/// An image, and how it is made.
#[derive(Deserialize)]
struct Image {
    name: String,
    made: Recipe,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Recipe {
    /// Written here, in the worst order.
    Own(Design),
    /// All metadata of an empty disk, in the order in which qemu-img allocates it.
    Preallocated {
        disk_bytes: u64,
        options: String,
        snapshots: u32,
    },
    /// This many bytes of data that compress well.
    Compressed(u64),
    /// Nothing.
    Sparse(u64),
}

fn images() -> Vec<Image> {
    serde_json::from_str(include_str!("check.json")).expect("the file is one of images")
}

fn cells(scale: &Scale) -> Vec<Cell> {
    let images = images().into_iter();
    let images = images.filter(|image| image.disk_bytes() <= scale.disk_bytes);
    let contestants = vec![Contestant::Cowslip("auto"), Contestant::QemuImg];
    let cells = images.flat_map(|image| {
        let contestants = contestants.clone();
        let cell = move |cache| Cell::of_work(format!("{}, {cache}", image.name), &contestants);
        [COLD, WARM].map(cell)
    });
    cells.collect()
}

/// Makes one run.
///
/// # Errors
/// A program fails, or the two say different things.
fn measure(stage: &Stage<'_>, cell: &Cell, turn: Turn) -> Result<Measurement, CommandError> {
    let cell = cell.name();
    let (name, cache) = cell.rsplit_once(", ").unwrap_or((&cell, WARM));
    let of_name = images().into_iter().find(|image| image.name == name);
    let design = of_name.expect("cells are made of images");
    let directory = stage.shared_files(name, |directory| design.make(&directory.join("image")))?;
    let image = directory.join("image");
    let mut command = stage.program(turn.contestant);
    command.args(["check", "-f", "qcow2"]).arg(&image);
    if cache == COLD {
        evict(&image).map_err(|e| failed("evict", &image, &e))?;
    } else if turn.repetition == 0 {
        // Fills the cache.
        run(&mut command)?;
    }
    let checked = run(&mut command)?;
    say_the_same(&directory.join("outcome"), &checked.output)?;
    Ok(by_program(1.0, &checked, &command))
}

/// Compares an outcome with the first one on this image, which is kept in a file.
fn say_the_same(kept: &Path, outcome: &str) -> Result<(), CommandError> {
    let Ok(first) = fs::read_to_string(kept) else {
        return fs::write(kept, outcome).map_err(|e| failed("write", kept, &e));
    };
    match first == outcome {
        true => Ok(()),
        false => Err(CommandError::new(format!(
            "The outcomes differ:\n{first}\n{outcome}"
        ))),
    }
}

/// Drops the image, and no other file, from the page cache.
fn evict(image: &Path) -> std::io::Result<()> {
    let file = File::open(image)?;
    file.sync_all()?;
    Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
}

impl Image {
    fn disk_bytes(&self) -> u64 {
        match &self.made {
            Recipe::Own(design) => design.disk_bytes,
            Recipe::Preallocated { disk_bytes, .. } => *disk_bytes,
            Recipe::Compressed(bytes) | Recipe::Sparse(bytes) => *bytes,
        }
    }

    fn make(&self, path: &Path) -> Result<(), CommandError> {
        let create = |options: &str, disk_bytes: u64| {
            let mut create = peer_path::command("qemu-img");
            create.args(["create", "-q", "-f", "qcow2", "-o", options]);
            run(create.arg(path).arg(disk_bytes.to_string())).map(drop)
        };
        match &self.made {
            Recipe::Own(design) => design.write(path).map_err(|e| failed("write", path, &e)),
            Recipe::Preallocated {
                disk_bytes,
                options,
                snapshots,
            } => {
                // With a hint XFS would give each table a MiB.
                let options = format!("preallocation=metadata,extent_size_hint=0,{options}");
                create(&options, *disk_bytes)?;
                for snapshot in 0..*snapshots {
                    let mut command = peer_path::command("qemu-img");
                    command.args(["snapshot", "-c", &format!("s{snapshot}")]);
                    run(command.arg(path))?;
                }
                Ok(())
            }
            Recipe::Compressed(bytes) => {
                let source = path.with_extension("raw");
                populate_compressible(&source, *bytes).map_err(CommandError::new)?;
                let mut convert = peer_path::command("qemu-img");
                convert.args(["convert", "-c", "-f", "raw", "-O", "qcow2"]);
                let converted = run(convert.arg(&source).arg(path));
                fs::remove_file(&source).map_err(|e| failed("remove", &source, &e))?;
                converted.map(drop)
            }
            Recipe::Sparse(bytes) => create("cluster_size=65536", *bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_words_about_one_image_are_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let kept = directory.path().join("outcome");
        for outcome in ["No errors\n", "No errors\n"] {
            say_the_same(&kept, outcome).unwrap();
        }
        let differ = say_the_same(&kept, "1 leak\n").unwrap_err().to_string();
        assert!(differ.contains("No errors\n\n1 leak"), "{differ}");
    }
}
