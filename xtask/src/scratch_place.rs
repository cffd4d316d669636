//! A file system for a measurement, made and mounted for it, with its options on the command line.

use std::fs;
use std::path::{Path, PathBuf};

use cowslip_testbed::{Place, Recipe, enter_namespace};

/// Where files of a measurement lie.
#[derive(clap::Args)]
pub struct PlaceArgs {
    /// The file system that is made and mounted (needs root), or `here` for the directory as it is
    #[arg(long, default_value = "ext4")]
    filesystem: String,
    /// Directory of the images, or of the file system's image; needs about 4 GiB
    #[arg(long)]
    dir: Option<PathBuf>,
}

/// Bytes of a file system that is made.
const PLACE_BYTES: u64 = 3 << 30;

impl PlaceArgs {
    /// Makes the file system, below `parent` if no directory was given, measures in a directory of
    /// it, and removes it.
    pub fn measure(
        &self,
        (name, parent): (&str, PathBuf),
        measure: impl FnOnce(&Path) -> Result<(), String>,
    ) -> Result<(), String> {
        if self.filesystem != "here" {
            enter_namespace()?;
        }
        let parent = self.dir.clone().unwrap_or(parent);
        let directory = parent.join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&directory).map_err(|e| format!("{}: {e}", directory.display()))?;
        let place = match self.filesystem.as_str() {
            "here" => Place::here("here", &directory)?,
            name => Place::mount_new(&Recipe::parse(name)?, &directory, PLACE_BYTES)?,
        };
        let measured = measure(&place.directory);
        drop(place);
        let removed = fs::remove_dir_all(&directory);
        measured.and(removed.map_err(|e| format!("cannot remove {}: {e}", directory.display())))
    }
}
