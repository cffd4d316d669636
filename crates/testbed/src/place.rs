//! Where images are put: loop-mounted file systems on fully written files.
//!
//! A loop device on a sparse file would measure the file system below, and so would one whose
//! `mkfs` discarded the space: the file is written completely and `mkfs` is called with the option
//! not to discard.
//! The file is removed once it is mounted and the device detaches itself with the mount, which
//! lives in a private namespace: however the process ends, nothing is left behind.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const NAMESPACE_VARIABLE: &str = "COWSLIP_BENCH_NAMESPACE";

/// Makes this process the same program, from its start, in a mount namespace of its own, unless
/// that has been done. It stays the process that it was, so a signal reaches what it is meant for.
///
/// # Errors
/// The user is not root, or the namespace cannot be had.
pub fn enter_namespace() -> Result<(), String> {
    if std::env::var_os(NAMESPACE_VARIABLE).is_some() {
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        return Err("mounting file systems needs root".to_string());
    }
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private"])
        .arg(program);
    command
        .args(std::env::args_os().skip(1))
        .env(NAMESPACE_VARIABLE, "1");
    Err(format!("cannot run unshare: {}", command.exec()))
}

/// Runs a program and takes its standard output.
fn output(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(|e| format!("cannot run {name}: {e}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    Err(format!("{name}: {}: {}", output.status, words.trim()))
}

/// Smallest log, in bytes, that `mkfs.xfs` makes without `--unsupported`, from version 5.19 on.
const XFS_LOG_BYTES_MIN: u64 = 64 << 20;

/// A kind of file system and its conditions:
/// `KIND[:memory][:log=SIZE][:allocsize=SIZE][:extents=off][:full=PERCENT]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// As it was given.
    pub name: String,
    /// ext2, ext3, ext4, xfs or btrfs.
    pub kind: String,
    /// On a device in memory, where programs set the pace and not a disk.
    pub in_memory: bool,
    /// ext4 that finds blocks as ext3 does.
    pub without_extents: bool,
    /// Size of the log in bytes (XFS); `mkfs` decides otherwise.
    pub log_bytes: Option<u64>,
    /// The mount option of that name (XFS), as it was given.
    pub allocsize: Option<String>,
    /// How full it is to be with what is measured, in percent.
    pub full_percent: Option<u64>,
}

impl Recipe {
    /// Parses a recipe.
    ///
    /// # Errors
    /// A description of the mistake.
    pub fn parse(text: &str) -> Result<Recipe, String> {
        let mut parts = text.split(':');
        let kind = parts.next().unwrap_or_default();
        if !["ext4", "xfs", "btrfs", "ext2", "ext3"].contains(&kind) {
            return Err(format!(
                "--loop expects ext4, xfs, btrfs, ext2 or ext3, not '{kind}'"
            ));
        }
        let mut recipe = Recipe {
            name: text.to_string(),
            kind: kind.to_string(),
            in_memory: false,
            without_extents: false,
            log_bytes: None,
            allocsize: None,
            full_percent: None,
        };
        let number = |text: &str| text.parse::<u64>().ok().filter(|number| *number > 0);
        for part in parts {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let is_known = match name {
                "log" if kind == "xfs" => {
                    let mebibytes = value.strip_suffix(['M', 'm']).and_then(number);
                    recipe.log_bytes = mebibytes.and_then(|count| count.checked_mul(1 << 20));
                    recipe.log_bytes.is_some()
                }
                "allocsize" if kind == "xfs" => {
                    let size = value.strip_suffix(['k', 'm', 'g']).and_then(number);
                    recipe.allocsize = size.map(|_| value.to_string());
                    recipe.allocsize.is_some()
                }
                "extents" if kind == "ext4" && value == "off" => {
                    recipe.without_extents = true;
                    true
                }
                "memory" if value.is_empty() => {
                    recipe.in_memory = true;
                    true
                }
                "full" => {
                    recipe.full_percent = number(value).filter(|percent| *percent < 100);
                    recipe.full_percent.is_some()
                }
                _ => false,
            };
            if !is_known {
                return Err(format!(
                    "--loop: '{part}' is not memory, log=SIZE or allocsize=SIZE of xfs, such as \
                     log=64M or allocsize=64k, extents=off of ext4, or full=PERCENT"
                ));
            }
        }
        Ok(recipe)
    }
}

/// The file that a file system is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Below {
    /// Written throughout.
    Written,
    /// A hole.
    Sparse,
}

/// A directory on a file system of a known kind.
pub struct Place {
    /// The file system, for the table.
    pub name: String,
    /// Where files go.
    pub directory: PathBuf,
    mounted: bool,
    kept: bool,
    /// The loop device.
    device: Option<(String, Below)>,
}

impl Place {
    /// Makes a file system by this recipe, of `size` bytes, on a file in `directory`, and mounts it
    /// there.
    ///
    /// # Errors
    /// A description of the failure, with the program that reported it.
    pub fn mount_new(recipe: &Recipe, directory: &Path, size: u64) -> Result<Place, String> {
        Place::mount_on(recipe, directory, (size, Below::Written))
    }

    /// The same on a sparse file: for measurements of layout, not of time. The size may exceed the
    /// available space, as long as the data written fits.
    ///
    /// # Errors
    /// A description of the failure, with the program that reported it.
    pub fn mount_sparse(recipe: &Recipe, directory: &Path, size: u64) -> Result<Place, String> {
        Place::mount_on(recipe, directory, (size, Below::Sparse))
    }

    /// Returns the paths that a file system of this recipe uses in `directory`: its backing file,
    /// which exists only while it is made, and its mount point.
    pub fn paths(recipe: &Recipe, directory: &Path) -> [PathBuf; 2] {
        [own(directory, "filesystem"), own(directory, &recipe.kind)]
    }

    fn mount_on(
        recipe: &Recipe,
        directory: &Path,
        (size, below): (u64, Below),
    ) -> Result<Place, String> {
        let [file, mount_point] = Place::paths(recipe, directory);
        fs::create_dir_all(directory).map_err(|e| e.to_string())?;
        create(&mount_point)?;
        let mut place = Place {
            name: recipe.name.clone(),
            directory: mount_point,
            mounted: false,
            kept: false,
            device: None,
        };
        if recipe.in_memory {
            place.mount_in_memory(recipe, (size, below))?;
            return Ok(place);
        }
        let made = write_below(&file, size, below);
        let outcome = made.and_then(|()| place.mount(recipe, &file, below));
        fs::remove_file(&file).map_err(|e| e.to_string())?;
        outcome.map(|()| place)
    }

    /// Mounts this place on a file of a tmpfs, which goes with the loop device.
    fn mount_in_memory(
        &mut self,
        recipe: &Recipe,
        (size, below): (u64, Below),
    ) -> Result<(), String> {
        let options = format!("size={}", size.saturating_add(1 << 20));
        let mut tmpfs = Command::new("mount");
        tmpfs.args(["-t", "tmpfs", "-o", &options, "none"]);
        output(tmpfs.arg(&self.directory))?;
        let file = self.directory.join("filesystem");
        let attached = write_below(&file, size, below).and_then(|()| attach(&file, false));
        // The device has the file open, whose file system stays until it is closed.
        output(Command::new("umount").arg("--lazy").arg(&self.directory))?;
        self.mount_device(recipe, attached?, below)
    }

    /// Recreates the file system of this place, on the same device: all of its files are lost.
    ///
    /// # Errors
    /// The place is a directory of a foreign file system, or is in use; or a program failed.
    pub fn remake(&mut self, recipe: &Recipe) -> Result<(), String> {
        let (device, below) = self
            .device
            .clone()
            .ok_or("only a file system of its own can be made again")?;
        // While the device is open it does not detach itself.
        let open = File::open(&device).map_err(|e| format!("cannot open {device}: {e}"))?;
        output(Command::new("umount").arg(&self.directory))?;
        self.mounted = false;
        self.make_and_mount(recipe, &device, below)?;
        drop(open);
        Ok(())
    }

    /// A new directory in `parent`, on whatever file system that is.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn here(name: &str, parent: &Path) -> Result<Place, String> {
        let directory = own(parent, "files");
        create(&directory)?;
        Ok(Place {
            name: name.to_string(),
            directory,
            mounted: false,
            kept: false,
            device: None,
        })
    }

    /// Leaves the directory there, with what is in it.
    #[must_use]
    pub fn keep(mut self) -> Place {
        self.kept = true;
        self
    }

    /// Fills `bytes` bytes of the file system with a separate file.
    ///
    /// # Errors
    /// The file system's.
    pub fn fill(&self, bytes: u64) -> Result<(), String> {
        let path = self.directory.join("filler");
        let failed = |e: std::io::Error| format!("cannot fill {}: {e}", path.display());
        let file = File::create(&path).map_err(failed)?;
        let none = rustix::fs::FallocateFlags::empty();
        let filled = match bytes {
            0 => Ok(()),
            _ => rustix::fs::fallocate(&file, none, 0, bytes),
        };
        filled.map_err(|e| failed(e.into()))
    }

    fn mount(&mut self, recipe: &Recipe, file: &Path, below: Below) -> Result<(), String> {
        self.mount_device(recipe, attach(file, true)?, below)
    }

    fn mount_device(
        &mut self,
        recipe: &Recipe,
        device: String,
        below: Below,
    ) -> Result<(), String> {
        let outcome = self.make_and_mount(recipe, &device, below);
        // Detaches now if the mount failed, else together with the mount.
        output(Command::new("losetup").args(["--detach", &device]))?;
        self.device = Some((device, below));
        outcome
    }

    fn make_and_mount(
        &mut self,
        recipe: &Recipe,
        device: &str,
        below: Below,
    ) -> Result<(), String> {
        let mut mkfs = Command::new(format!("mkfs.{}", recipe.kind));
        match (recipe.kind.as_str(), below) {
            // All inode tables of a large one would be hundreds of gigabytes.
            ("ext2" | "ext3" | "ext4", Below::Sparse) => mkfs.args(["-q", "-F", "-E", "nodiscard"]),
            ("ext2" | "ext3" | "ext4", Below::Written) => mkfs.args([
                "-q",
                "-F",
                "-E",
                "nodiscard,lazy_itable_init=0,lazy_journal_init=0",
            ]),
            ("xfs" | "btrfs", _) => mkfs.args(["-q", "-f", "-K"]),
            (other, _) => return Err(format!("no recipe for file system {other}")),
        };
        if recipe.without_extents {
            mkfs.args(["-O", "^extent,^64bit"]);
        }
        if let Some(bytes) = recipe.log_bytes {
            if bytes < XFS_LOG_BYTES_MIN {
                mkfs.arg("--unsupported");
            }
            mkfs.args(["-l", &format!("size={bytes}")]);
        }
        output(mkfs.arg(device))?;
        let mut mount = Command::new("mount");
        if below == Below::Sparse && recipe.kind == "ext4" {
            mount.args(["-o", "noinit_itable"]);
        }
        if let Some(size) = &recipe.allocsize {
            mount.args(["-o", &format!("allocsize={size}")]);
        }
        output(mount.arg(device).arg(&self.directory))?;
        self.mounted = true;
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.mounted
            && let Err(message) = output(Command::new("umount").arg(&self.directory))
        {
            eprintln!("{message}");
        }
        // Files under the mount point have gone with the mount; elsewhere some may be left.
        let removed = match (self.kept, self.mounted) {
            (true, _) => Ok(()),
            (false, true) => fs::remove_dir(&self.directory),
            (false, false) => fs::remove_dir_all(&self.directory),
        };
        if let Err(error) = removed {
            eprintln!("Could not remove {}: {error}", self.directory.display());
        }
    }
}

/// Returns a path that belongs to this process alone: another one that measures in the same
/// directory must not mount over it.
fn own(directory: &Path, what: &str) -> PathBuf {
    directory.join(format!("cowslip-bench-{}-{what}", std::process::id()))
}

/// Makes a directory that was not there.
fn create(directory: &Path) -> Result<(), String> {
    fs::create_dir(directory)
        .map_err(|e| format!("Could not create '{}': {e}", directory.display()))
}

/// Attaches a loop device to a file, and returns its path.
fn attach(file: &Path, direct: bool) -> Result<String, String> {
    let mut losetup = Command::new("losetup");
    losetup.args(["--find", "--show"]);
    if direct {
        losetup.arg("--direct-io=on");
    }
    Ok(output(losetup.arg(file))?.trim().to_string())
}

/// Makes the file that a file system is on.
fn write_below(path: &Path, size: u64, below: Below) -> Result<(), String> {
    match below {
        Below::Written => populate(path, size),
        Below::Sparse => make_sparse(path, size),
    }
}

fn make_sparse(path: &Path, size: u64) -> Result<(), String> {
    let made = File::create(path).and_then(|file| file.set_len(size));
    made.map_err(|e| format!("cannot make {}: {e}", path.display()))
}

/// Writes a file throughout with bytes that do not compress to nothing, and syncs it.
///
/// # Errors
/// The file system's, with the file's name.
pub fn populate(path: &Path, size: u64) -> Result<(), String> {
    write_throughout(path, size, |noise| noise)
}

/// The same with bytes that compress well, but not to nothing.
///
/// # Errors
/// The file system's, with the file's name.
pub fn populate_compressible(path: &Path, size: u64) -> Result<(), String> {
    write_throughout(path, size, |noise| noise & 0x0101_0101_0101_0101)
}

fn write_throughout(path: &Path, size: u64, word: impl Fn(u64) -> u64) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("cannot write {}: {e}", path.display());
    let mut file = File::create(path).map_err(failed)?;
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut chunk = Vec::with_capacity(4 << 20);
    while chunk.len() < 4 << 20 {
        // xorshift64
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.extend_from_slice(&word(state).to_le_bytes());
    }
    let mut left = size;
    while left > 0 {
        let length = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.len());
        file.write_all(&chunk[..length]).map_err(failed)?;
        left -= length as u64;
    }
    file.sync_all().map_err(failed)
}

/// Whether files in this directory can be opened with O_DIRECT.
///
/// # Errors
/// No file can be made there.
pub fn supports_direct_io(directory: &Path) -> std::io::Result<bool> {
    use rustix::fs::{Mode, OFlags, open};
    let path = directory.join(".direct-io-probe");
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    drop(open(&path, flags, Mode::RUSR | Mode::WUSR)?);
    let direct = open(
        &path,
        OFlags::WRONLY | OFlags::DIRECT | OFlags::CLOEXEC,
        Mode::empty(),
    );
    fs::remove_file(&path)?;
    Ok(direct.is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipes_are_kinds_with_conditions() {
        let parsed = |text| Recipe::parse(text).map(|r| (r.kind, r.log_bytes, r.full_percent));
        assert_eq!(parsed("ext4"), Ok(("ext4".to_string(), None, None)));
        let all = ("xfs".to_string(), Some(8 << 20), Some(95));
        assert_eq!(parsed("xfs:log=8M:full=95"), Ok(all));
        let indirect = Recipe::parse("ext4:extents=off").map(|r| (r.kind, r.without_extents));
        assert_eq!(indirect, Ok(("ext4".to_string(), true)));
        let allocsize = Recipe::parse("xfs:allocsize=64k").map(|r| r.allocsize);
        assert_eq!(allocsize, Ok(Some("64k".to_string())));
        let memory = Recipe::parse("xfs:memory:log=64M").map(|r| (r.in_memory, r.log_bytes));
        assert_eq!(memory, Ok((true, Some(64 << 20))));
        for wrong in [
            "zfs",
            "ext4:memory=1",
            "ext4:extents=on",
            "xfs:extents=off",
            "ext4:log=8M",
            "xfs:log=8",
            "ext4:allocsize=64k",
            "xfs:allocsize=k",
            "xfs:full=100",
            "xfs:full=95:log=",
            "xfs:",
        ] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
