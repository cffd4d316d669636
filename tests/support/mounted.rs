//! File systems in files, mounted: what only a certain one does. Root and a loop device are needed.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use super::{outcome, peers_are_installed, run, scratch};

/// A file system in a file, mounted.
pub struct Mounted {
    /// Where.
    pub at: PathBuf,
    _holder: tempfile::TempDir,
}

impl Mounted {
    /// Made by this command. `None` where that is not possible here.
    pub fn new(format: &[&str]) -> Option<Mounted> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: mounting needs root");
            return None;
        }
        if !peers_are_installed(&[format[0]]) {
            return None;
        }
        let holder = scratch();
        let file = holder.path().join("fs");
        std::fs::File::create(&file)
            .unwrap()
            .set_len(400 << 20)
            .unwrap();
        run(Command::new(format[0]).args(&format[1..]).arg(&file));
        let at = holder.path().join("at");
        std::fs::create_dir(&at).unwrap();
        let mounted = outcome(
            Command::new("mount")
                .arg("-o")
                .arg("loop")
                .arg(&file)
                .arg(&at),
        );
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
        // The kernel may hold the files of a process that has ended a moment longer: its ring is taken down
        // beside others' work.
        let begun = Instant::now();
        let unmount = || outcome(Command::new("umount").arg(&self.at));
        while !unmount().status.success() {
            assert!(begun.elapsed() < Duration::from_secs(20), "it stays busy");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
