//! A qcow2 image as one of the files: its tables walked, joined with host extents.

use std::sync::Arc;

use cowslip::file::BlockFile;
use cowslip::qcow2::header::Header;
use cowslip::qcow2::layout::{Area, Layout, Observer, Part};
use cowslip_console::error::CommandError;

use crate::join::{Around, HostMap, Join, Joined};

/// A qcow2 image.
#[derive(Debug)]
pub struct ImageFile {
    /// The file, open for reading.
    pub file: Arc<dyn BlockFile>,
    /// Its header.
    pub header: Header,
    /// The name of its data file, to be opened by.
    pub data_file: Option<String>,
}

/// Receives the pieces of a layout.
pub trait PieceSink: Send {
    /// The next piece.
    ///
    /// # Errors
    /// Ends the walk.
    fn piece(&mut self, piece: &Joined);
}

/// Joins the parts as they are read.
struct Joining<'a, 'b> {
    join: Join<'a>,
    sink: &'b mut dyn PieceSink,
}

impl Observer for Joining<'_, '_> {
    fn part(&mut self, part: Part) -> cowslip::Result<()> {
        let sink = &mut *self.sink;
        self.join.push(&part, |piece| sink.piece(piece));
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

    /// Walks the disk in the guest's order, then the metadata, whose file has `host` as its
    /// records.
    ///
    /// # Errors
    /// I/O, or tables that cannot be right.
    pub async fn join<'a>(
        &self,
        around: Around<'a>,
        (areas, host): (&[Area], HostMap<'_>),
        sink: &mut dyn PieceSink,
    ) -> Result<Join<'a>, CommandError> {
        let layout = Layout::read(&self.file, &self.header).await?;
        let mut joining = Joining {
            join: Join::new(around),
            sink,
        };
        layout.parts(&mut joining).await?;
        Join::metadata(areas, host, |piece| joining.sink.piece(piece));
        Ok(joining.join)
    }
}
