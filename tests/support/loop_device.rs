//! Loop devices over files of a test. Root is needed.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{outcome, run};

/// A loop device, detached when it is dropped.
pub struct LoopDevice {
    /// Its node.
    pub path: PathBuf,
}

impl LoopDevice {
    /// A device over a file, with options of `losetup`. `None`, said loudly, where that is not
    /// possible.
    pub fn over(file: &Path, options: &[&str]) -> Option<LoopDevice> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: loop devices need root");
            return None;
        }
        let mut losetup = Command::new("losetup");
        let name = run(losetup.args(options).args(["-f", "--show"]).arg(file));
        let path = PathBuf::from(name.trim());
        Some(LoopDevice { path })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // Data cached for the device reaches its file only when it is written back: detaching the
        // device does not do that while another process has it open.
        drop(outcome(Command::new("sync").arg(&self.path)));
        // A panic is unwinding, or all is well: a device that stays is no failure of the test.
        drop(outcome(Command::new("losetup").arg("-d").arg(&self.path)));
    }
}
