//! A copy of a raw file that shares its data, where the file system can.

use std::sync::Arc;

use cowslip::convert::Converted;
use cowslip::file::host::{HostOptions, open_host_file, reflink};
use cowslip::file::{BlockFile, Claim};
use cowslip::{Error, Image, Job};

use super::super::create::{NewFile, Place};
use crate::error::CommandError;

/// What disks are a multiple of.
const SECTOR_BYTES: u64 = 512;

/// Makes the target share the source's data; `None` if it cannot, or was there before: then nothing was done.
pub async fn share(
    source: &Image,
    target: &str,
    job: &Job,
) -> Result<Option<Converted>, CommandError> {
    let Place::Host(name) = Place::named(target)? else {
        return Ok(None);
    };
    let layer = &source.layers()[0];
    // What has no identity is no file of this system, such as an export of a server.
    if layer.id.is_none() || std::path::Path::new(&name).exists() {
        return Ok(None);
    }
    // The image holds the claim; this handle only names the file to the system.
    let file = open_host_file(layer.name.as_ref(), &HostOptions::default())?;
    let len = file.len().await;
    let len = len.map_err(|error| Error::io(format!("'{}'", layer.name), error))?;
    let sectors = |bytes: u64| bytes.div_ceil(SECTOR_BYTES);
    // A part of a file is shorter than that.
    if file.id() != layer.id || sectors(len) != sectors(source.size()) {
        return Ok(None);
    }
    let (new, target): (NewFile, Arc<dyn BlockFile>) =
        NewFile::open(&name, &[], Claim::CREATE_RAW)?;
    if reflink(file.as_ref(), target.as_ref()).is_err() {
        return Ok(None);
    }
    let size = source.size().next_multiple_of(SECTOR_BYTES);
    let cut = target.set_len(size).await;
    cut.map_err(|error| Error::io(format!("Could not resize '{name}'"), error))?;
    job.expect(size);
    job.done(size);
    new.finished();
    Ok(Some(Converted {
        size,
        offloaded_bytes: size,
        ..Converted::default()
    }))
}
