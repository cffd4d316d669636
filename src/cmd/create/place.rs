//! Where an image is made: a file of the host, or what is there already and as long as it is, a
//! device or an export of a server.

use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use cowslip::file::host::{CreateMode, FlushPolicy, HostOptions, open_host_file};
use cowslip::file::{BlockFile, Claim, ReadAs, ReadSet};
use cowslip::image::Format;

use super::{FIXED_OPTIONS, Request, options_of, options_of_format, same_as_backing};
use crate::error::CommandError;
use crate::interrupt::RemovedOnInterrupt;
use crate::open::{claim_file, local_name, open_export};
use crate::options::{self, Known};
use crate::output::warn;
use cowslip_nbd::remote::ExportName;

/// The extent size hint where space is allocated ahead, as QEMU's.
const EXTENT_HINT_BYTES: u64 = 1 << 20;

/// Where an image is made.
#[derive(Clone, Debug)]
pub enum Place {
    /// A file of the host or a device, by its path.
    Host(String),
    /// An export of an NBD server, and the name that it was given by.
    Export(ExportName, String),
}

impl Place {
    /// The place of that name.
    ///
    /// # Errors
    /// It is behind a protocol that is not supported, or no name of an export.
    pub fn named(name: &str) -> Result<Place, CommandError> {
        match ExportName::of_file_name(name) {
            Some(export) => Ok(Place::Export(export?, name.to_string())),
            None => Ok(Place::Host(local_name(name)?)),
        }
    }

    /// The name, for messages, and for names that begin where it is.
    pub fn name(&self) -> &str {
        match self {
            Place::Host(name) | Place::Export(_, name) => name,
        }
    }

    /// The path, of what has one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Place::Host(path) => Some(Path::new(path)),
            Place::Export(..) => None,
        }
    }

    /// Whether it is as long as it is, and holds what it held.
    pub fn is_fixed(&self) -> bool {
        let Some(path) = self.path() else { return true };
        let kind = std::fs::metadata(path).map(|found| found.file_type());
        kind.is_ok_and(|kind| kind.is_block_device() || kind.is_char_device())
    }

    /// The options that an image of a format has here.
    pub(super) fn options_of(&self, format: Format) -> Vec<Known> {
        if !self.is_fixed() {
            return options_of(format);
        }
        let mut known = options_of_format(format);
        for option in FIXED_OPTIONS {
            if known.iter().all(|other| other.name != option.name) {
                known.push(*option);
            }
        }
        known
    }

    /// Makes the file, or opens what is there, and claims it. What it holds is lost only when the
    /// image is written.
    ///
    /// # Errors
    /// It cannot be made or opened, stores a file of `read`, or others use it.
    pub(super) async fn make(
        &self,
        read: &ReadSet,
        claim: Claim,
        flush: FlushPolicy,
    ) -> Result<(NewFile, Arc<dyn BlockFile>), CommandError> {
        let (export, name) = match self {
            Place::Host(path) => return NewFile::open_with(path, read, claim, flush),
            Place::Export(export, name) => (export, name),
        };
        // Some servers take one client at a time: the second would wait for the first.
        refused_overwrite(read.check_stored(name, &export.storage()))?;
        let file = open_export(export, name, true).await.map_err(|why| {
            CommandError::new(format!(
                "Protocol driver 'nbd' does not support creating new images, so an existing image must be selected as \
                 the target; however, opening the given target as an existing image failed: {why}"
            ))
        })?;
        Ok((NewFile { remove: None }, file))
    }
}

/// The refusal to overwrite a file, in QEMU's words where it is a backing file.
fn refused_overwrite(checked: cowslip::Result<()>) -> Result<(), CommandError> {
    checked.map_err(|error| match error {
        cowslip::Error::Overwrites(overwrite) if overwrite.read_as == ReadAs::Backing => {
            same_as_backing()
        }
        other => other.into(),
    })
}

/// A file of the host that is being made. If it was new it is removed when this is dropped, or the
/// process interrupted, before it is finished.
pub struct NewFile {
    remove: Option<RemovedOnInterrupt>,
}

impl NewFile {
    /// Makes or opens the file `name`, which must store nothing of `read`, and claims it. What it
    /// holds is lost only when the image is written.
    pub fn open(
        name: &str,
        read: &ReadSet,
        claim: Claim,
    ) -> Result<(NewFile, Arc<dyn BlockFile>), CommandError> {
        NewFile::open_with(name, read, claim, FlushPolicy::Honour)
    }

    /// The same, with a say about whether flushes count.
    pub(super) fn open_with(
        name: &str,
        read: &ReadSet,
        claim: Claim,
        flush: FlushPolicy,
    ) -> Result<(NewFile, Arc<dyn BlockFile>), CommandError> {
        let refused = |error: cowslip::Error| {
            CommandError::new(match &error {
                cowslip::Error::Io { source, .. } => format!(
                    "Could not create '{name}': {}",
                    cowslip::error::system_words(source)
                ),
                cowslip::Error::Locked(_) => error.to_string(),
                other => format!("Could not create '{name}': {other}"),
            })
        };
        let path = Path::new(name);
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
        refused_overwrite(read.check(file.as_ref()))?;
        claim_file(&file, claim).map_err(refused)?;
        // Only a file that no other process has opened is removed.
        let remove = is_new.then(|| RemovedOnInterrupt::new(path));
        Ok((NewFile { remove }, file))
    }

    /// Keeps the file.
    pub fn finished(mut self) {
        self.remove = None;
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(file) = &self.remove {
            // The failure that led here is reported; a file that cannot be removed is no image.
            drop(std::fs::remove_file(file.path()));
        }
    }
}

/// Passes the allocation hints for a new file to the file system before the file has any space. The
/// default depends on the policy: whole extents where space is preallocated, no hint where only
/// written data takes space.
pub(super) fn set_file_system_options(
    request: &Request,
    file: &dyn BlockFile,
) -> Result<(), CommandError> {
    let value = |name| options::value(&request.options, name);
    let nocow = value("nocow").map(|on| options::switch("nocow", on));
    if nocow.transpose()? == Some(true) {
        // As in QEMU, which does not say either where it has no effect.
        drop(file.set_nocow());
    }
    let asked = value("extent_size_hint");
    let bytes = match asked {
        Some(text) => options::size("extent_size_hint", text)?,
        None if value("alloc_policy") == Some("sparse") => 0,
        None => EXTENT_HINT_BYTES,
    };
    if bytes > u64::from(u32::MAX) {
        return Err(CommandError::new("Extent size hint is too large"));
    }
    let outcome = if bytes > 0 {
        file.set_extent_hint(bytes)
    } else {
        Ok(())
    };
    if let (Err(error), Some(_)) = (outcome, asked) {
        let why = cowslip::error::system_words(&error);
        warn(&format!("Failed to set extent size hint: {why}"));
    }
    Ok(())
}
