//! Where images are put: loop-mounted file systems on fully written files.
//!
//! A loop device on a sparse file would measure the file system below, and so would one whose `mkfs`
//! discarded the space: the file is written throughout and `mkfs` is told not to discard. The file
//! is removed once it is mounted and the device detaches itself with the mount, which lives in a
//! private namespace: however the process ends, nothing is left behind.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

const NAMESPACE_VARIABLE: &str = "COWSLIP_BENCH_NAMESPACE";

/// Runs this program again in a mount namespace of its own, unless this is that run already. Returns
/// how it ended, and the caller has nothing more to do.
///
/// # Errors
/// The user is not root, or the namespace cannot be had.
pub fn enter_namespace() -> Result<Option<ExitStatus>, String> {
    if std::env::var_os(NAMESPACE_VARIABLE).is_some() {
        return Ok(None);
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
    let status = command.status();
    status
        .map(Some)
        .map_err(|e| format!("cannot run unshare: {e}"))
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

/// A directory on a file system of a known kind.
pub struct Place {
    /// The file system, for the table.
    pub name: String,
    /// Where files go.
    pub directory: PathBuf,
    mounted: bool,
    kept: bool,
}

impl Place {
    /// Makes a file system of this kind, of `size` bytes, on a file in `directory`, and mounts it there.
    ///
    /// # Errors
    /// What went wrong, with the program that said so.
    pub fn mount_new(filesystem: &str, directory: &Path, size: u64) -> Result<Place, String> {
        let mount_point = directory.join(filesystem);
        fs::create_dir_all(&mount_point).map_err(|e| e.to_string())?;
        let mut place = Place {
            name: filesystem.to_string(),
            directory: mount_point,
            mounted: false,
            kept: false,
        };
        let file = directory.join("filesystem");
        let outcome = place.mount(&file, size);
        fs::remove_file(&file).map_err(|e| e.to_string())?;
        outcome.map(|()| place)
    }

    /// A new directory in `parent`, on whatever file system that is.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn here(name: &str, parent: &Path) -> Result<Place, String> {
        let directory = parent.join(format!("cowslip-bench-{}", std::process::id()));
        fs::create_dir(&directory)
            .map_err(|e| format!("Could not create '{}': {e}", directory.display()))?;
        Ok(Place {
            name: name.to_string(),
            directory,
            mounted: false,
            kept: false,
        })
    }

    /// Leaves the directory there, with what is in it.
    #[must_use]
    pub fn keep(mut self) -> Place {
        self.kept = true;
        self
    }

    fn mount(&mut self, file: &Path, size: u64) -> Result<(), String> {
        populate(file, size)?;
        let mut losetup = Command::new("losetup");
        losetup
            .args(["--find", "--show", "--direct-io=on"])
            .arg(file);
        let device = output(&mut losetup)?.trim().to_string();
        let outcome = self.make_and_mount(&device);
        // Detaches now if the mount failed, else together with the mount.
        output(Command::new("losetup").args(["--detach", &device]))?;
        outcome
    }

    fn make_and_mount(&mut self, device: &str) -> Result<(), String> {
        let mut mkfs = Command::new(format!("mkfs.{}", self.name));
        match self.name.as_str() {
            "ext4" => mkfs.args([
                "-q",
                "-F",
                "-E",
                "nodiscard,lazy_itable_init=0,lazy_journal_init=0",
            ]),
            "xfs" => mkfs.args(["-q", "-f", "-K"]),
            "btrfs" => mkfs.args(["-q", "-f", "-K"]),
            other => return Err(format!("no recipe for file system {other}")),
        };
        output(mkfs.arg(device))?;
        output(Command::new("mount").arg(device).arg(&self.directory))?;
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
        // What was under the mount point has gone with the mount; elsewhere files may be left.
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
