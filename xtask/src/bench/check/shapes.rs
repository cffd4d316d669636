//! The images that checks are measured on.

use std::fs;
use std::path::Path;
use std::process::Command;

use cowslip_testbed::image::{Design, Mapping};
use cowslip_testbed::populate_compressible;

use crate::run;

const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// An image, and how it is made.
pub struct Shape {
    /// Its name in tables and filters.
    pub name: &'static str,
    recipe: Recipe,
    /// Measured in part of the repetitions, or not at all where there is little time.
    pub is_large: bool,
}

enum Recipe {
    /// Written here, in the worst order.
    Own(Design),
    /// All metadata of an empty disk, in the order in which qemu-img allocates it.
    Preallocated {
        disk_bytes: u64,
        options: &'static str,
        snapshots: u32,
    },
    /// This many bytes of data that compress well.
    Compressed(u64),
    /// Nothing.
    Sparse(u64),
}

const fn own(
    name: &'static str,
    disk_bytes: u64,
    cluster_bits: u32,
    extended_l2: bool,
    mapping: Mapping,
) -> Shape {
    Shape {
        name,
        recipe: Recipe::Own(Design {
            disk_bytes,
            cluster_bits,
            extended_l2,
            mapping,
        }),
        is_large: disk_bytes > TIB,
    }
}

const fn made(name: &'static str, recipe: Recipe) -> Shape {
    Shape {
        name,
        recipe,
        is_large: false,
    }
}

/// All, in the order of the table.
pub fn all() -> [Shape; 12] {
    let preallocated = |disk_bytes, options, snapshots| Recipe::Preallocated {
        disk_bytes,
        options,
        snapshots,
    };
    [
        own(
            "1 TiB, 64 KiB, 60 000 writes",
            TIB,
            16,
            false,
            Mapping::Scattered(60_000),
        ),
        own(
            "1 TiB, 64 KiB, 300 000 writes",
            TIB,
            16,
            false,
            Mapping::Scattered(300_000),
        ),
        own(
            "1 TiB, 64 KiB, extended, 60 000 writes",
            TIB,
            16,
            true,
            Mapping::Scattered(60_000),
        ),
        own(
            "64 GiB, 64 KiB, shuffled",
            64 * GIB,
            16,
            false,
            Mapping::Shuffled,
        ),
        made(
            "1 TiB, 64 KiB, contiguous",
            preallocated(TIB, "cluster_size=65536", 0),
        ),
        made(
            "1 TiB, 64 KiB, extended, contiguous",
            preallocated(TIB, "cluster_size=65536,extended_l2=on", 0),
        ),
        made(
            "100 GiB, 4 KiB, contiguous",
            preallocated(100 * GIB, "cluster_size=4096", 0),
        ),
        own(
            "4 GiB, 4 KiB, shuffled",
            4 * GIB,
            12,
            false,
            Mapping::Shuffled,
        ),
        made(
            "128 GiB, 64 KiB, 20 snapshots",
            preallocated(128 * GIB, "cluster_size=65536", 20),
        ),
        made("512 MiB, compressed", Recipe::Compressed(512 << 20)),
        made("1 GiB, empty", Recipe::Sparse(GIB)),
        own(
            "8 TiB, 64 KiB, in order",
            8 * TIB,
            16,
            false,
            Mapping::InOrder,
        ),
    ]
}

impl Shape {
    /// Makes the image.
    pub fn make(&self, path: &Path) -> Result<(), String> {
        let create = |options: &str, disk_bytes: u64| {
            let mut create = Command::new("qemu-img");
            create.args(["create", "-q", "-f", "qcow2", "-o", options]);
            run::output(create.arg(path).arg(disk_bytes.to_string())).map(drop)
        };
        match self.recipe {
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
                create(&options, disk_bytes)?;
                for snapshot in 0..snapshots {
                    let mut command = Command::new("qemu-img");
                    command.args(["snapshot", "-c", &format!("s{snapshot}")]);
                    run::output(command.arg(path))?;
                }
                Ok(())
            }
            Recipe::Compressed(bytes) => {
                let source = path.with_extension("raw");
                populate_compressible(&source, bytes)?;
                let mut convert = Command::new("qemu-img");
                convert.args(["convert", "-c", "-f", "raw", "-O", "qcow2"]);
                let converted = run::output(convert.arg(&source).arg(path));
                fs::remove_file(&source).map_err(|e| e.to_string())?;
                converted.map(drop)
            }
            Recipe::Sparse(bytes) => create("cluster_size=65536", bytes),
        }
    }
}
