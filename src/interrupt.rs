//! Files that must not survive an interrupted process.
//!
//! A thread waits for the signals that end a process; it removes what is listed and then lets the
//! signal do what it would have done. Nothing is set up before the first file is listed.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

static FILES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
static WATCH: Once = Once::new();

fn files() -> MutexGuard<'static, Vec<PathBuf>> {
    FILES
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A file that an interruption removes while this value lives.
#[derive(Debug)]
pub struct RemovedOnInterrupt {
    path: PathBuf,
}

impl RemovedOnInterrupt {
    /// Lists a file.
    pub fn new(path: &Path) -> RemovedOnInterrupt {
        WATCH.call_once(watch);
        files().push(path.to_path_buf());
        RemovedOnInterrupt {
            path: path.to_path_buf(),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for RemovedOnInterrupt {
    fn drop(&mut self) {
        files().retain(|path| *path != self.path);
    }
}

fn watch() {
    // Without the watch an interruption leaves a file that is no valid image; no reason to stop.
    let Ok(mut signals) = Signals::new([SIGHUP, SIGINT, SIGTERM]) else {
        return;
    };
    std::thread::spawn(move || {
        for signal in signals.forever() {
            // A file that is finished just now goes too: whoever interrupts does not want it.
            for path in files().iter() {
                drop(std::fs::remove_file(path));
            }
            if emulate_default_handler(signal).is_err() {
                std::process::exit(1);
            }
        }
    });
}
