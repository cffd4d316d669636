//! A qcow2 image as one of the files: opened for reading, its tables walked, joined with host extents.

use std::sync::Arc;

use cowslip::file::host::{HostGate, HostOptions, open_host_file, resolve_name};
use cowslip::file::{BlockFile, ChosenBy, Claim, FileRequest, Gate, Role, Sharing};
use cowslip::foreign::probe;
use cowslip::image::Format;
use cowslip::qcow2::header::Header;
use cowslip::qcow2::inspect::{inspect, read_start};
use cowslip::qcow2::layout::{Area, Layout, Observer, Part};

use super::join::{Around, HostMap, Join, Joined};
use crate::error::CommandError;
use crate::open::{OpenHow, Source, claim_file};

/// A qcow2 image.
#[derive(Debug)]
pub struct ImageFile {
    file: Arc<dyn BlockFile>,
    /// Its header.
    pub header: Header,
    /// The name of its data file, to be opened by.
    pub data_file: Option<String>,
}

/// Opens a file if it is a qcow2 image, and claims it as a reader; `None` for any other.
///
/// # Errors
/// `Could not open 'x': why`.
pub async fn open(source: &Source, how: &OpenHow) -> Result<Option<ImageFile>, CommandError> {
    if matches!(source.format, Some(Format::Raw | Format::Luks)) {
        return Ok(None);
    }
    let opened = opened(source, how).await;
    opened.map_err(|error| source.refused(&error))
}

async fn opened(source: &Source, how: &OpenHow) -> cowslip::Result<Option<ImageFile>> {
    let options = source.host_options(how);
    let file = open_host_file(source.filename.as_ref(), &options)?;
    let format = match source.format {
        Some(format) => format,
        None => probe(&read_start(file.as_ref()).await?, &source.filename)?,
    };
    if format != Format::Qcow2 {
        return Ok(None);
    }
    if source.sharing(how) != Sharing::Forced {
        claim_file(&file, Claim::qcow2(false))?;
    }
    let header = inspect(&file).await?.header;
    let data_file = match header.has_data_file() {
        true => Some(data_file(source, &header, how)?),
        false => None,
    };
    Ok(Some(ImageFile {
        file,
        header,
        data_file,
    }))
}

/// The name of the data file, if the policy lets the image name it.
fn data_file(source: &Source, header: &Header, how: &OpenHow) -> cowslip::Result<String> {
    let Some(name) = header.data_file_name() else {
        return Err(cowslip::Error::Invalid(
            "the image does not say which its data file is".to_string(),
        ));
    };
    let gate = HostGate {
        options: HostOptions::default(),
        policy: how.policy,
    };
    gate.open(&FileRequest {
        named_by: &source.filename,
        name,
        role: Role::Data,
        writable: false,
        chosen_by: ChosenBy::Image,
    })?;
    Ok(resolve_name(&source.filename, name))
}

/// What is told of each piece.
pub trait Told: Send {
    /// The next piece.
    ///
    /// # Errors
    /// Ends the walk.
    fn piece(&mut self, piece: &Joined);
}

/// Joins the parts as they are read.
struct Joining<'a, 'b> {
    join: Join<'a>,
    told: &'b mut dyn Told,
}

impl Observer for Joining<'_, '_> {
    fn part(&mut self, part: Part) -> cowslip::Result<()> {
        let told = &mut *self.told;
        self.join.push(&part, |piece| told.piece(piece));
        Ok(())
    }
}

impl ImageFile {
    /// Where the image's metadata is.
    ///
    /// # Errors
    /// I/O, or tables that cannot be right.
    pub async fn areas(&self) -> Result<Vec<Area>, CommandError> {
        let layout = Layout::read(&self.file, &self.header).await?;
        Ok(layout.areas().await?)
    }

    /// Goes through the disk in the guest's order, then through the metadata, whose file has `host` as its
    /// records.
    ///
    /// # Errors
    /// I/O, or tables that cannot be right.
    pub async fn join<'a>(
        &self,
        around: Around<'a>,
        (areas, host): (&[Area], HostMap<'_>),
        told: &mut dyn Told,
    ) -> Result<Join<'a>, CommandError> {
        let layout = Layout::read(&self.file, &self.header).await?;
        let mut joining = Joining {
            join: Join::new(around),
            told,
        };
        layout.parts(&mut joining).await?;
        Join::metadata(areas, host, |piece| joining.told.piece(piece));
        Ok(joining.join)
    }
}
