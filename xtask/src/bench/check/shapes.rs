//! The images that checks are measured on.

use std::fs;
use std::path::Path;
use std::process::Command;

use cowslip_testbed::image::Design;
use cowslip_testbed::populate_compressible;
use serde::Deserialize;

use crate::run;

const TIB: u64 = 1 << 40;

/// An image, and how it is made.
#[derive(Deserialize)]
pub struct Shape {
    /// Its name in tables and filters.
    pub name: String,
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

/// All, in the order of the table.
pub fn all() -> Vec<Shape> {
    serde_json::from_str(include_str!("shapes.json")).expect("the file is one of images")
}

impl Shape {
    /// Measured in part of the repetitions, or not at all where there is little time.
    pub fn is_large(&self) -> bool {
        matches!(&self.made, Recipe::Own(design) if design.disk_bytes > TIB)
    }

    /// Makes the image.
    pub fn make(&self, path: &Path) -> Result<(), String> {
        let create = |options: &str, disk_bytes: u64| {
            let mut create = Command::new("qemu-img");
            create.args(["create", "-q", "-f", "qcow2", "-o", options]);
            run::output(create.arg(path).arg(disk_bytes.to_string())).map(drop)
        };
        match &self.made {
            Recipe::Own(design) => design
                .write(path)
                .map_err(|e| format!("cannot write {}: {e}", path.display())),
            Recipe::Preallocated {
                disk_bytes,
                options,
                snapshots,
            } => {
                // With a hint XFS would give each table a MiB.
                let options = format!("preallocation=metadata,extent_size_hint=0,{options}");
                create(&options, *disk_bytes)?;
                for snapshot in 0..*snapshots {
                    let mut command = Command::new("qemu-img");
                    command.args(["snapshot", "-c", &format!("s{snapshot}")]);
                    run::output(command.arg(path))?;
                }
                Ok(())
            }
            Recipe::Compressed(bytes) => {
                let source = path.with_extension("raw");
                populate_compressible(&source, *bytes)?;
                let mut convert = Command::new("qemu-img");
                convert.args(["convert", "-c", "-f", "raw", "-O", "qcow2"]);
                let converted = run::output(convert.arg(&source).arg(path));
                fs::remove_file(&source).map_err(|e| e.to_string())?;
                converted.map(drop)
            }
            Recipe::Sparse(bytes) => create("cluster_size=65536", *bytes),
        }
    }
}
