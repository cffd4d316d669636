//! Where a table is measured: directories that are there, or file systems that are made for it. In
//! both cases an interruption leaves nothing of them behind.

use std::path::{Path, PathBuf};

use cowslip_console::error::CommandError;
use cowslip_console::interrupt::RemovedOnInterrupt;
use cowslip_console::progress::Progress;
use cowslip_testbed::{Place, Recipe, enter_namespace};

/// The place, if none is given.
const HERE: &str = "here";

/// Where to measure: options of all tables.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct PlaceOptions {
    /// Work in a new directory in this one; repeat it for several file systems
    #[arg(long, value_name = "PATH")]
    pub dir: Vec<PathBuf>,
    /// Make file systems of these kinds on fully written loop devices, and work there (root): ext4,
    /// xfs, btrfs, ext2, ext3; with conditions after colons: xfs:log=8M has a log of that size,
    /// xfs:allocsize=64k is mounted with that option, ext4:extents=off finds blocks as ext3 does,
    /// ext4:full=95 is 95 percent full with the files of the table, ext4:memory is on a device in
    /// memory, where programs set the pace and not a disk
    #[arg(long = "loop", value_name = "KINDS", value_delimiter = ',')]
    pub loops: Vec<String>,
    /// How directories are called in rows, if not by their names
    #[arg(skip)]
    pub names: Vec<String>,
}

impl PlaceOptions {
    /// Returns the recipes of the file systems that are to be made.
    ///
    /// # Errors
    /// One is not known.
    pub fn recipes(&self) -> Result<Vec<Recipe>, CommandError> {
        let recipes = self.loops.iter().map(|text| Recipe::parse(text));
        let recipes: Result<Vec<Recipe>, String> = recipes.collect();
        recipes.map_err(CommandError::new)
    }

    /// Makes this process one that may mount, if it is to.
    ///
    /// # Errors
    /// The user is not root.
    pub fn enter(&self) -> Result<(), CommandError> {
        match self.loops.is_empty() {
            true => Ok(()),
            false => enter_namespace().map_err(CommandError::new),
        }
    }

    /// Where file systems are made.
    pub fn parent(&self) -> PathBuf {
        let first = self.dir.first().cloned();
        first.unwrap_or_else(std::env::temp_dir)
    }

    /// Returns the names of the places in rows, in their order.
    pub fn names(&self) -> Vec<String> {
        if !self.loops.is_empty() {
            return self.loops.clone();
        }
        if self.dir.is_empty() {
            return vec![HERE.to_string()];
        }
        let name_of = |(index, dir): (usize, &PathBuf)| {
            let given = self.names.get(index).cloned();
            given.unwrap_or_else(|| dir.display().to_string())
        };
        self.dir.iter().enumerate().map(name_of).collect()
    }

    /// The places, each made when it is its turn, because file systems take space: those of recipes
    /// by `make`, in the directory that it is given.
    pub fn each<'a>(
        &'a self,
        recipes: &'a [Recipe],
        make: impl Fn(&Recipe, &Path) -> Result<Place, String> + 'a,
    ) -> impl Iterator<Item = Result<Held, CommandError>> + 'a {
        let names = self.names();
        (0..names.len()).map(move |index| match recipes.get(index) {
            Some(recipe) => Held::made(recipe, &self.parent(), &make),
            None => {
                let dir = self.dir.get(index).cloned();
                Held::here(&names[index], &dir.unwrap_or_else(std::env::temp_dir))
            }
        })
    }
}

/// A place of which an interruption leaves nothing.
pub struct Held {
    /// The place.
    pub place: Place,
    _removed: Vec<RemovedOnInterrupt>,
}

impl Held {
    /// Makes a file system by a recipe in this directory.
    ///
    /// # Errors
    /// What went wrong, with the program that said so.
    pub fn made(
        recipe: &Recipe,
        directory: &Path,
        make: impl FnOnce(&Recipe, &Path) -> Result<Place, String>,
    ) -> Result<Held, CommandError> {
        // Before they are there: to write the file takes the longest.
        let paths = Place::paths(recipe, directory);
        let removed = paths.map(|path| RemovedOnInterrupt::new(&path)).into();
        let progress = Progress::of(1);
        progress.say(&format!("making {} on a fully written file", recipe.name));
        Ok(Held {
            place: make(recipe, directory).map_err(CommandError::new)?,
            _removed: removed,
        })
    }

    /// Makes a directory in this one.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn here(name: &str, parent: &Path) -> Result<Held, CommandError> {
        let place = Place::here(name, parent).map_err(CommandError::new)?;
        let removed = vec![RemovedOnInterrupt::new(&place.directory)];
        Ok(Held {
            place,
            _removed: removed,
        })
    }
}

/// Makes a file system by a recipe in this directory, for tables whose files take no more than two
/// thirds of this many bytes.
///
/// # Errors
/// The error, with the program that failed.
pub fn make_loop(
    recipe: &Recipe,
    directory: &Path,
    filesystem_bytes: u64,
) -> Result<Place, String> {
    let Some(percent) = recipe.full_percent else {
        return Place::mount_new(recipe, directory, filesystem_bytes);
    };
    // A third of what a table's file system has is room to spare; with half as much again there is
    // some at 50 %.
    let files = filesystem_bytes / 3 * 2;
    let bytes = filesystem_bytes / 2 * 3;
    let filler = (bytes / 100 * percent).checked_sub(files).ok_or_else(|| {
        format!(
            "--loop {}: the files of the table alone are more",
            recipe.name
        )
    })?;
    let place = Place::mount_new(recipe, directory, bytes)?;
    place.fill(filler)?;
    Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_called_by_their_kinds_directories_or_given_names() {
        let of = |dir: &[&str], loops: &[&str], names: &[&str]| {
            let strings = |words: &[&str]| words.iter().map(|word| word.to_string()).collect();
            let options = PlaceOptions {
                dir: dir.iter().map(PathBuf::from).collect(),
                loops: strings(loops),
                names: strings(names),
            };
            options.names()
        };
        assert_eq!(of(&[], &[], &[]), ["here"]);
        assert_eq!(of(&["/a", "/b"], &[], &[]), ["/a", "/b"]);
        assert_eq!(of(&["/a", "/b"], &[], &["xfs"]), ["xfs", "/b"]);
        assert_eq!(of(&["/a"], &["xfs:log=8M"], &[]), ["xfs:log=8M"]);
    }
}
