//! Where images are put: loop-mounted file systems on fully written files.
//!
//! A loop device on a sparse file would measure the file system below, and so would one whose `mkfs`
//! discarded the space: the file is written throughout and `mkfs` is told not to discard. The file
//! is removed once it is mounted and the device detaches itself with the mount, which lives in a
//! private namespace: however the process ends, nothing is left behind.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run;

const NAMESPACE_VARIABLE: &str = "COWSLIP_BENCH_NAMESPACE";

/// Runs this program again in a mount namespace of its own. Returns whether it did, so that the
/// caller is done.
pub fn enter_namespace() -> Result<bool, String> {
    if std::env::var_os(NAMESPACE_VARIABLE).is_some() {
        return Ok(false);
    }
    if !rustix::process::geteuid().is_root() {
        return Err(
            "mounting file systems needs root; --filesystems here measures without".to_string(),
        );
    }
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private"])
        .arg(program);
    command
        .args(std::env::args_os().skip(1))
        .env(NAMESPACE_VARIABLE, "1");
    run::run(&mut command).map(|()| true)
}

/// A directory on a file system of a known kind.
pub struct Place {
    /// The file system, for the table.
    pub name: String,
    /// Where files go.
    pub directory: PathBuf,
    mounted: bool,
}

impl Place {
    /// Makes and mounts a file system, or takes the directory as it is for `here`.
    pub fn make(filesystem: &str, directory: &Path, size: u64) -> Result<Place, String> {
        let mount_point = directory.join(filesystem);
        fs::create_dir_all(&mount_point).map_err(|e| e.to_string())?;
        let mut place = Place {
            name: filesystem.to_string(),
            directory: mount_point,
            mounted: false,
        };
        if filesystem != "here" {
            println!("making {filesystem} on {} GiB, fully written", size >> 30);
            let file = directory.join("filesystem");
            let outcome = place.mount(&file, size);
            fs::remove_file(&file).map_err(|e| e.to_string())?;
            outcome?;
        }
        Ok(place)
    }

    fn mount(&mut self, file: &Path, size: u64) -> Result<(), String> {
        populate(file, size)?;
        let mut losetup = Command::new("losetup");
        losetup
            .args(["--find", "--show", "--direct-io=on"])
            .arg(file);
        let device = run::output(&mut losetup)?.trim().to_string();
        let outcome = self.make_and_mount(&device);
        // Detaches now if the mount failed, else together with the mount.
        run::output(Command::new("losetup").args(["--detach", &device]))?;
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
        run::output(mkfs.arg(device))?;
        run::output(Command::new("mount").arg(device).arg(&self.directory))?;
        self.mounted = true;
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.mounted
            && let Err(message) = run::output(Command::new("umount").arg(&self.directory))
        {
            eprintln!("xtask: {message}");
        }
        if let Err(error) = fs::remove_dir(&self.directory) {
            eprintln!("xtask: cannot remove {}: {error}", self.directory.display());
        }
    }
}

/// Writes a file throughout with bytes that do not compress to nothing, and syncs it.
pub fn populate(path: &Path, size: u64) -> Result<(), String> {
    write_throughout(path, size, |noise| noise)
}

/// The same with bytes that compress well, but not to nothing.
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

/// Bytes that a file occupies and the number of its extents.
pub fn host_usage(path: &Path) -> Result<(u64, u64), String> {
    let metadata = fs::metadata(path).map_err(|e| e.to_string())?;
    let text = run::output(Command::new("filefrag").arg(path))?;
    // "PATH: 12 extents found"
    let extents = text
        .rsplit(": ")
        .next()
        .and_then(|rest| rest.split(' ').next())
        .and_then(|count| count.trim().parse().ok())
        .ok_or_else(|| format!("filefrag says {text}"))?;
    Ok((metadata.blocks() * 512, extents))
}
