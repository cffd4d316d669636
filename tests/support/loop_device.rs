//! Loop devices: block devices of any block size on files. Root is needed.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{outcome, peers_are_installed, run, scratch};

/// A loop device on a file of its own; detached when dropped.
pub struct LoopDevice {
    /// Its name.
    pub path: PathBuf,
    _holder: tempfile::TempDir,
}

impl LoopDevice {
    /// A device with blocks of this size and these bytes. `None`, loudly, where that is not
    /// possible.
    pub fn new(block_bytes: u32, bytes: &[u8]) -> Option<LoopDevice> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: loop devices need root");
            return None;
        }
        if !peers_are_installed(&["losetup"]) {
            return None;
        }
        let holder = scratch();
        let file = holder.path().join("disk");
        std::fs::write(&file, bytes).unwrap();
        let block = block_bytes.to_string();
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--sector-size", &block]);
        let made = outcome(losetup.arg(&file));
        if !made.status.success() {
            let why = String::from_utf8_lossy(&made.stderr);
            eprintln!("SKIPPED: no loop device: {why}");
            return None;
        }
        let path = String::from_utf8(made.stdout).unwrap();
        Some(LoopDevice {
            path: PathBuf::from(path.trim()),
            _holder: holder,
        })
    }

    /// What is on it.
    pub fn contents(&self) -> Vec<u8> {
        std::fs::read(&self.path).unwrap()
    }

    /// Puts bytes on it, from its beginning.
    pub fn fill(&self, bytes: &[u8]) {
        use std::os::unix::fs::FileExt;
        let device = std::fs::File::options().write(true).open(&self.path);
        let device = device.unwrap();
        device.write_all_at(bytes, 0).unwrap();
        device.sync_all().unwrap();
    }

    /// Its name as a word.
    pub fn name(&self) -> &str {
        self.path.to_str().unwrap()
    }
}

impl AsRef<Path> for LoopDevice {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        run(Command::new("losetup").arg("--detach").arg(&self.path));
    }
}
