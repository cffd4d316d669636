//! A copy of a raw file that shares its data, where the file system can.

use std::sync::Arc;

use cowslip::convert::Converted;
use cowslip::file::host::{HostOptions, open_host_file, reflink};
use cowslip::file::{BlockFile, Claim, ReadSet};
use cowslip::{Error, Image, Job};

use crate::error::CommandError;
use crate::new_file::NewFile;
use crate::open::{Destination, destination};

/// The unit of a disk's size.
const SECTOR_BYTES: u64 = 512;

/// Makes the target share the source's data; `None` if it cannot, or was there before: then nothing
/// was done.
pub async fn share(
    source: &Image,
    target: &str,
    job: &Job,
) -> Result<Option<Converted>, CommandError> {
    let Destination::Host(name) = destination(target)? else {
        return Ok(None);
    };
    let layer = &source.layers()[0];
    if layer.content.is_none() || std::path::Path::new(&name).exists() {
        return Ok(None);
    }
    // The image holds the claim; this handle only names the file to the system.
    let file = open_host_file(layer.name.as_ref(), &HostOptions::default())?;
    let len = file.len().await;
    let len = len.map_err(|error| Error::io(format!("'{}'", layer.name), error))?;
    let size = source.size().next_multiple_of(SECTOR_BYTES);
    // The disk has to be all of the file, and the file as it is: neither a part of it nor what a
    // filter makes of it.
    if file.content_id() != layer.content || len.next_multiple_of(SECTOR_BYTES) != size {
        return Ok(None);
    }
    let (new, target): (NewFile, Arc<dyn BlockFile>) =
        NewFile::open(&name, &ReadSet::default(), Claim::CREATE_RAW)?;
    if reflink(file.as_ref(), target.as_ref()).is_err() {
        return Ok(None);
    }
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
