//! [`FormatImage`]: an image of a format that is not built in.

use std::fmt;
use std::ops::Range;

use cowslip_block::disk::DiskFuture;

use crate::file::AlignedFile;
use crate::run::{Run, Source};
use crate::{Error, Result};

/// An image of a format that is not built in, open for reading.
pub trait FormatImage: Send + Sync + fmt::Debug {
    /// Bytes of the disk.
    fn size(&self) -> u64;

    /// The sources of a range within the size: runs in order, without gaps. Their data is read
    /// from the file at the offsets that they name; compressed runs are qcow2's.
    ///
    /// # Errors
    /// I/O, or damage of the image.
    fn map(&self, range: Range<u64>) -> DiskFuture<'_, Vec<Run>>;

    /// The file that the runs are in.
    fn file(&self) -> &AlignedFile;
}

/// Returns the runs of a driver, checked: a gap would leave memory of the reader as it was.
///
/// # Errors
/// As for [`FormatImage::map`]; `Corrupt` for runs with gaps, or of sources that a driver has not.
pub(crate) async fn map(driver: &dyn FormatImage, range: Range<u64>) -> Result<Vec<Run>> {
    let runs = driver.map(range.clone()).await?;
    let mut at = range.start;
    for run in &runs {
        let is_next = run.range.start == at && run.range.end > at && run.range.end <= range.end;
        if !is_next || matches!(run.source, Source::Compressed(..)) {
            break;
        }
        at = run.range.end;
    }
    if at == range.end {
        return Ok(runs);
    }
    Err(Error::Corrupt {
        file: driver.file().name().to_string(),
        structure: "mapping",
        offset: at,
        detail: "the driver of its format names no source for this byte of the disk".to_string(),
    })
}
