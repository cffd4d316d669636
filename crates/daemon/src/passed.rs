//! [`Passed`]: files that clients have passed (`add-fd`), as files of a node by the names of their
//! sets.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use cowslip_nodes::PassedFiles;
use cowslip_qmp::FdSets;
use rustix::fs::OFlags;

/// The files of a node. It keeps those of a set that it has opened once, for both kinds of access:
/// it is opened again when its first writer comes, and when the last one leaves, and the set may be
/// gone by then.
#[derive(Debug)]
pub struct Passed {
    sets: Arc<FdSets>,
    kept: Mutex<Vec<Kept>>,
}

#[derive(Debug)]
struct Kept {
    name: String,
    access: OFlags,
    fd: OwnedFd,
}

impl Passed {
    /// Those of the sets of a server.
    pub fn of(sets: &Arc<FdSets>) -> Passed {
        Passed {
            sets: Arc::clone(sets),
            kept: Mutex::default(),
        }
    }

    fn find(&self, name: &str, access: OFlags) -> Option<Result<OwnedFd, String>> {
        // Nothing that holds the lock panics.
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |it: &&Kept| it.name == name && it.access == access;
        let copy = |fd: &OwnedFd| {
            let copied = fd.try_clone();
            copied.map_err(|error| cowslip::error::system_words(&error))
        };
        if let Some(found) = kept.iter().find(is_it) {
            return Some(copy(&found.fd));
        }
        let found = self.sets.open(Path::new(name), access).transpose()?;
        Some(match found {
            Ok(fd) => {
                let copied = copy(&fd);
                let name = name.to_string();
                kept.push(Kept { name, access, fd });
                copied
            }
            Err(error) => Err(error.desc),
        })
    }
}

impl PassedFiles for Passed {
    /// Nodes are open to be read until they are written, so a set whose only file is open for both
    /// serves a reader as well.
    fn open(&self, name: &str, writable: bool) -> Option<Result<OwnedFd, String>> {
        let both = self.find(name, OFlags::RDWR)?;
        match (writable, self.find(name, OFlags::RDONLY)?) {
            (true, _) => Some(both),
            (false, Ok(fd)) => Some(Ok(fd)),
            (false, Err(why)) => Some(both.map_err(|_| why)),
        }
    }
}
