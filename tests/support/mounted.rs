//! File systems in files, mounted: what only a certain one does. Root and a loop device are needed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::{outcome, peers_are_installed, run, scratch};

/// A file system in a file, mounted.
pub struct Mounted {
    /// Mount point.
    pub at: PathBuf,
    _holder: crate::support::Scratch,
}

impl Mounted {
    /// Made by this command. `None` where that is not possible here.
    pub fn new(format: &[&str]) -> Option<Mounted> {
        Mounted::of_size(format, 400 << 20)
    }

    /// The same, if all these programs are installed.
    pub fn beside(programs: &[&str], format: &[&str]) -> Option<Mounted> {
        let is_possible = peers_are_installed(programs);
        is_possible.then(|| Mounted::new(format)).flatten()
    }

    /// The same in a file of this size.
    pub fn of_size(format: &[&str], bytes: u64) -> Option<Mounted> {
        Mounted::made(format, bytes, |file, at| {
            let mut mount = Command::new("mount");
            mount.args(["-o", "loop"]).arg(file).arg(at);
            mount
        })
    }

    /// In memory.
    pub fn tmpfs(bytes: u64) -> Option<Mounted> {
        Mounted::made(&["true"], bytes, |_, at| {
            let mut mount = Command::new("mount");
            let size = format!("size={bytes}");
            mount.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(at);
            mount
        })
    }

    /// ext4 that a process serves over FUSE.
    pub fn fuse(bytes: u64) -> Option<Mounted> {
        if !peers_are_installed(&["fuse2fs"]) {
            return None;
        }
        Mounted::made(&["mkfs.ext4", "-q"], bytes, |file, at| {
            let mut mount = Command::new("fuse2fs");
            mount.arg(file).arg(at);
            mount
        })
    }

    fn made(
        format: &[&str],
        bytes: u64,
        mount: impl Fn(&Path, &Path) -> Command,
    ) -> Option<Mounted> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: mounting needs root");
            return None;
        }
        if !peers_are_installed(&[format[0]]) {
            return None;
        }
        let holder = scratch();
        let file = holder.path().join("fs");
        let made = std::fs::File::create(&file);
        made.unwrap().set_len(bytes).unwrap();
        run(Command::new(format[0]).args(&format[1..]).arg(&file));
        let at = holder.path().join("at");
        std::fs::create_dir(&at).unwrap();
        let mounted = outcome(&mut mount(&file, &at));
        if !mounted.status.success() {
            eprintln!("SKIPPED: {}", String::from_utf8_lossy(&mounted.stderr));
            return None;
        }
        Some(Mounted {
            at,
            _holder: holder,
        })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // The kernel may hold the files of a process that has ended a moment longer: its ring is
        // taken down beside others' work.
        let begun = Instant::now();
        let unmount = || outcome(Command::new("umount").arg(&self.at));
        while !unmount().status.success() {
            assert!(begun.elapsed() < Duration::from_secs(20), "it stays busy");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
