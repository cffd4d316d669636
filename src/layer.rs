//! One file of a chain, looked at from outside: format, sizes, header. For reports and for the
//! checks before an image is created; nothing of the guest's data is read.

use std::sync::Arc;

use cowslip::file::host::{HostOptions, open_host_file, resolve_name};
use cowslip::file::{BlockFile, FileId};
use cowslip::image::Format;
use cowslip::qcow2::header::{Header, probe};
use cowslip::qcow2::inspect::{Inspection, inspect, read_start};

use crate::error::{CommandError, opening_reason};
use crate::open::{local_name, parse_format};

const SECTOR_BYTES: u64 = 512;

/// A file and what it says of itself.
#[derive(Clone, Debug)]
pub struct Layer {
    /// The name that it was opened by.
    pub filename: String,
    /// Its format, given or probed.
    pub format: Format,
    /// Length of the file, in whole sectors.
    pub file_len: u64,
    /// Bytes that it occupies on the host.
    pub disk_size: Option<u64>,
    /// Which file it is.
    pub id: Option<FileId>,
    /// What a qcow2 image says of itself.
    pub inspection: Option<Inspection>,
}

impl Layer {
    /// Looks at a file; its format is probed if it is not given.
    ///
    /// # Errors
    /// Why it could not be opened, without the leading "Could not open".
    pub async fn look(filename: &str, format: Option<Format>) -> Result<Layer, CommandError> {
        let refused = |error: &cowslip::Error| CommandError::new(opening_reason(filename, error));
        let name = local_name(filename)?;
        let file = open_host_file(name.as_ref(), &HostOptions::default());
        let file = file.map_err(|error| refused(&error))?;
        let layer = Layer::of_file(&file, name, format).await;
        layer.map_err(|error| refused(&error))
    }

    async fn of_file(
        file: &Arc<dyn BlockFile>,
        name: &str,
        format: Option<Format>,
    ) -> cowslip::Result<Layer> {
        let format = match format {
            Some(format) => format,
            None => probe(&read_start(file.as_ref()).await?),
        };
        let inspection = match format {
            Format::Raw => None,
            Format::Qcow2 => Some(inspect(file).await?),
        };
        let len = file.len().await;
        let len = len.map_err(|error| {
            cowslip::Error::io(format!("Could not tell the length of '{name}'"), error)
        })?;
        Ok(Layer {
            filename: name.to_string(),
            format,
            file_len: len.next_multiple_of(SECTOR_BYTES),
            disk_size: file.allocated_bytes(),
            id: file.id(),
            inspection,
        })
    }

    /// The header of a qcow2 image.
    pub fn header(&self) -> Option<&Header> {
        self.inspection
            .as_ref()
            .map(|inspection| &inspection.header)
    }

    /// The size of its disk.
    pub fn virtual_size(&self) -> u64 {
        self.header().map_or(self.file_len, |header| header.size)
    }

    /// Its backing file: the name resolved, and the format if the image tells.
    ///
    /// # Errors
    /// The format is not known.
    pub fn backing(&self) -> Result<Option<(String, Option<Format>)>, CommandError> {
        let Some(header) = self.header() else {
            return Ok(None);
        };
        let Some(name) = &header.backing_file else {
            return Ok(None);
        };
        let format = header.backing_format().map(parse_format).transpose()?;
        Ok(Some((resolve_name(&self.filename, name), format)))
    }
}

/// A file and all its backing files.
///
/// # Errors
/// `Could not open 'x': why`, or a chain that returns to one of its files.
pub async fn chain(filename: &str, format: Option<Format>) -> Result<Vec<Layer>, CommandError> {
    let mut layers: Vec<Layer> = Vec::new();
    let mut next = Some((filename.to_string(), format));
    while let Some((name, format)) = next {
        let layer = Layer::look(&name, format)
            .await
            .map_err(|why| CommandError::new(format!("Could not open '{name}': {why}")))?;
        let known = |other: &Layer| other.id.is_some() && other.id == layer.id;
        if layers.iter().any(known) {
            let text = format!("Backing file '{name}' creates an infinite loop.");
            return Err(CommandError::new(text));
        }
        next = layer
            .backing()
            .map_err(|why| CommandError::new(format!("Could not open '{name}': {why}")))?;
        layers.push(layer);
    }
    Ok(layers)
}
