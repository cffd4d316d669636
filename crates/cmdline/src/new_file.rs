//! The files of a new image: made or opened, and removed or emptied if the image is not finished.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cowslip::file::host::{CreateMode, FlushPolicy, HostOptions, open_host_file};
use cowslip::file::{BlockFile, Claim, ReadAs, ReadSet};
use cowslip::job::{Job, Stage};
use cowslip_console::error::CommandError;
use cowslip_console::interrupt::RemovedOnInterrupt;

use crate::open::{self, Destination, claim_file};

/// Symbolic links of one name at most, as the kernel has it.
const LINKS_MAX: usize = 40;

/// The refusal to overwrite a file, in QEMU's words where it is a backing file.
fn refused_overwrite(checked: cowslip::Result<()>) -> Result<(), CommandError> {
    checked.map_err(|error| match error {
        cowslip::Error::Overwrites(overwrite) if overwrite.read_as == ReadAs::Backing => {
            same_as_backing()
        }
        other => other.into(),
    })
}

/// The refusal to make an image in the place of its backing file.
pub fn same_as_backing() -> CommandError {
    CommandError::new("Error: Trying to create an image with the same filename as the backing file")
}

/// Why a file is not made or opened.
enum Refusal {
    /// Another process uses it, in QEMU's words.
    Locked(String),
    Other(CommandError),
}

/// A file that is being made. A new one of the host is removed when this is dropped, or the process
/// interrupted, before it is finished. One that existed is emptied then if it was overwritten, so
/// that an unfinished image does not pass for an image.
pub struct NewFile {
    remove: Option<RemovedOnInterrupt>,
    /// A regular file that existed.
    existed: Option<PathBuf>,
    /// The old contents are lost.
    is_overwritten: bool,
}

impl NewFile {
    /// Makes the file of a destination, or opens the one that exists, and claims it. Its bytes are
    /// lost only when the image is written.
    ///
    /// # Errors
    /// It cannot be made or opened, stores a file of `read`, or is in use.
    pub async fn create(
        destination: &Destination,
        read: &ReadSet,
        claim: Claim,
        flush: FlushPolicy,
    ) -> Result<(NewFile, Arc<dyn BlockFile>), CommandError> {
        let node = match destination {
            Destination::Host(path) => return NewFile::open_with(path, read, claim, flush),
            Destination::Node(node) => node,
        };
        refused_overwrite(node.check(read))?;
        let file = node.create(flush, &open::settings()).await?;
        refused_overwrite(read.check(file.as_ref()))?;
        claim_file(&file, claim)?;
        let new = NewFile {
            remove: None,
            existed: None,
            is_overwritten: false,
        };
        Ok((new, file))
    }

    /// Makes or opens the file `name`, which must store nothing of `read`, and claims it. What it
    /// holds is lost only when the image is written.
    ///
    /// # Errors
    /// As [`NewFile::create`]; one that is in use could not be opened.
    pub fn open(
        name: &str,
        read: &ReadSet,
        claim: Claim,
    ) -> Result<(NewFile, Arc<dyn BlockFile>), CommandError> {
        let opened = NewFile::open_or_refuse(name, read, claim, FlushPolicy::Honour);
        opened.map_err(|refusal| match refusal {
            Refusal::Locked(words) => CommandError::opening(name, words),
            Refusal::Other(error) => error,
        })
    }

    /// As [`NewFile::open`]; with [`FlushPolicy::Ignore`] flushes of the file do nothing.
    ///
    /// # Errors
    /// As [`NewFile::open`], without its beginning where the file is in use.
    pub fn open_with(
        name: &str,
        read: &ReadSet,
        claim: Claim,
        flush: FlushPolicy,
    ) -> Result<(NewFile, Arc<dyn BlockFile>), CommandError> {
        let opened = NewFile::open_or_refuse(name, read, claim, flush);
        opened.map_err(|refusal| match refusal {
            Refusal::Locked(words) => CommandError::new(words),
            Refusal::Other(error) => error,
        })
    }

    fn open_or_refuse(
        name: &str,
        read: &ReadSet,
        claim: Claim,
        flush: FlushPolicy,
    ) -> Result<(NewFile, Arc<dyn BlockFile>), Refusal> {
        let refused = |error: cowslip::Error| {
            Refusal::Other(CommandError::new(match &error {
                cowslip::Error::Io { source, .. } => format!(
                    "Could not create '{name}': {}",
                    cowslip::error::system_words(source)
                ),
                cowslip::Error::Locked(_) => return Refusal::Locked(error.to_string()),
                other => format!("Could not create '{name}': {other}"),
            }))
        };
        let path = &end_of_links(Path::new(name));
        let options = |create| HostOptions {
            writable: true,
            create,
            flush,
            ..HostOptions::default()
        };
        let mut is_new = true;
        let file = match open_host_file(path, &options(CreateMode::CreateNew)) {
            Err(cowslip::Error::Io { source, .. }) if source.kind() == ErrorKind::AlreadyExists => {
                is_new = false;
                open_host_file(path, &options(CreateMode::OpenExisting))
            }
            other => other,
        };
        let file = file.map_err(refused)?;
        refused_overwrite(read.check(file.as_ref())).map_err(Refusal::Other)?;
        claim_file(&file, claim).map_err(refused)?;
        // Only a file that no other process has opened is removed.
        let remove = is_new.then(|| RemovedOnInterrupt::new(path));
        let existed = (!is_new && path.is_file()).then(|| path.to_path_buf());
        let new = NewFile {
            remove,
            existed,
            is_overwritten: false,
        };
        Ok((new, file))
    }

    /// Whether a regular file of this name existed.
    pub fn has_existed(&self) -> bool {
        self.existed.is_some()
    }

    /// Notes that what the file held is lost.
    pub fn mark_overwritten(&mut self) {
        self.is_overwritten = true;
    }

    /// Leaves the file alone, instead of removing or emptying it, if another process has claimed it
    /// since. This one must not have it open.
    pub fn leave_if_claimed(&mut self) {
        let made = self.remove.as_ref().map(RemovedOnInterrupt::path);
        let Some(path) = made.or(self.existed.as_deref()) else {
            return;
        };
        let options = HostOptions {
            writable: true,
            ..HostOptions::default()
        };
        let file = open_host_file(path, &options);
        let claimed = file.and_then(|file| file.claim(Claim::CREATE_RAW));
        if let Err(cowslip::Error::Locked(_)) = claimed {
            self.remove = None;
            self.existed = None;
        }
    }

    /// Keeps the file.
    pub fn finished(mut self) {
        self.remove = None;
        self.existed = None;
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // The failure that led here is reported.
        if let Some(file) = &self.remove {
            drop(std::fs::remove_file(file.path()));
        }
        if let Some(path) = self.existed.as_ref().filter(|_| self.is_overwritten) {
            let opened = std::fs::OpenOptions::new().write(true).open(path);
            drop(opened.and_then(|file| file.set_len(0)));
        }
    }
}

/// The path at which a file that is not there is made: where the symbolic links of this name lead.
fn end_of_links(path: &Path) -> PathBuf {
    let mut end = path.to_path_buf();
    for _ in 0..LINKS_MAX {
        // A relative link is relative to the directory that it is in.
        match (end.exists(), std::fs::read_link(&end), end.parent()) {
            (false, Ok(link), Some(directory)) => end = directory.join(link),
            _ => break,
        }
    }
    end
}

/// Describes the leftovers of a cancelled job that makes an image of this name.
pub fn what_is_left(name: &str, job: &Job) -> String {
    let begun = job.progress().stage != Stage::Begin;
    format!("'{name}' {}", state_of_target(name, begun))
}

/// The state of a target whose making was cancelled after or before its file was opened.
fn state_of_target(name: &str, begun: bool) -> &'static str {
    let destination = open::destination(name).ok();
    let path = destination.as_ref().and_then(Destination::path);
    match (path.map(|path| path.metadata().ok()), begun) {
        (Some(None), false) => "was not created",
        (_, false) => "is unchanged",
        (Some(None), true) => "was removed",
        (Some(Some(left)), true) if left.is_file() && left.len() == 0 => "was emptied",
        (_, true) => "contains an incomplete image",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_are_those_that_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let name = path.to_str().unwrap();
        assert_eq!(state_of_target(name, false), "was not created");
        assert_eq!(state_of_target(name, true), "was removed");
        std::fs::write(&path, "").unwrap();
        assert_eq!(state_of_target(name, true), "was emptied");
        std::fs::write(&path, "data").unwrap();
        assert_eq!(state_of_target(name, true), "contains an incomplete image");
        assert_eq!(state_of_target(name, false), "is unchanged");
        assert_eq!(
            state_of_target("/dev/null", true),
            "contains an incomplete image"
        );
        let export = "nbd://localhost/x";
        assert_eq!(
            state_of_target(export, true),
            "contains an incomplete image"
        );
    }
}
