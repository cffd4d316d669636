//! An image of an added format as a layer: what its driver answers is checked, and what it makes
//! durable is held to what flushes of other images promise (invariant D4).

use std::ops::Range;

use cowslip_block::disk::ZeroOptions;
use cowslip_boxed::boxed;
use cowslip_queue::IoVec;

use super::FormatImage;
use crate::durable::Flushes;
use crate::file::{AlignedFile, Durability};
use crate::policy::{Format, Preallocation};
use crate::run::{Run, Source};
use crate::{Error, Result};

/// An image whose format a caller has added.
#[derive(Debug)]
pub struct Added {
    format: Format,
    driver: Box<dyn FormatImage>,
    flushes: Flushes,
}

impl Added {
    /// The image that a driver of this format has opened.
    pub fn new(format: Format, driver: Box<dyn FormatImage>) -> Added {
        Added {
            format,
            driver,
            flushes: Flushes::default(),
        }
    }

    /// The format, by its name.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.driver.size()
    }

    /// The file that its runs are in.
    pub fn file(&self) -> &AlignedFile {
        self.driver.file()
    }

    /// Whether its driver takes what changes the disk.
    pub fn is_writable(&self) -> bool {
        self.driver.features().writable
    }

    /// The unit of allocation in bytes.
    pub fn preferred_block_bytes(&self) -> u64 {
        self.driver.features().preferred_block_bytes
    }

    /// The runs of a range within the size. They are checked: a gap would leave memory of the
    /// reader as it was.
    ///
    /// # Errors
    /// As for [`FormatImage::map`]; `Corrupt` for runs with gaps, or of sources that a driver has
    /// not.
    pub async fn map(&self, range: Range<u64>) -> Result<Vec<Run>> {
        let runs = self.driver.map(range.clone()).await?;
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
            file: self.file().name().to_string(),
            structure: "mapping",
            offset: at,
            detail: "the driver of its format names no source for this byte of the disk"
                .to_string(),
        })
    }

    /// Writes to the disk.
    pub async fn write(&self, offset: u64, data: IoVec, durability: Durability) -> Result<()> {
        self.flushes.will_change();
        self.driver.write(offset, data).await?;
        self.flush_if_durable(durability).await
    }

    /// Makes a range read as zeroes.
    pub async fn write_zeroes(&self, offset: u64, len: u64, options: ZeroOptions) -> Result<()> {
        self.flushes.will_change();
        self.driver.zero(offset, len, options).await?;
        self.flush_if_durable(options.durability).await
    }

    /// Discards a range.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.flushes.will_change();
        self.driver.discard(offset, len).await
    }

    /// Changes the size of the disk.
    #[boxed]
    pub async fn resize(&self, size: u64, preallocation: Preallocation) -> Result<()> {
        if preallocation != Preallocation::Off {
            return Err(Error::Unsupported {
                file: self.file().name().to_string(),
                feature: format!("preallocation of a {} image", self.format.name()).into(),
            });
        }
        self.flushes.will_change();
        self.driver.resize(size).await
    }

    /// Makes durable all that had completed, metadata included. After a failure it fails until the
    /// image is opened again.
    #[boxed]
    pub async fn flush(&self) -> Result<()> {
        let flushing = self.driver.flush();
        self.flushes.flush(self.file().name(), flushing).await
    }

    async fn flush_if_durable(&self, durability: Durability) -> Result<()> {
        match durability {
            Durability::Durable => self.flush().await,
            Durability::Cached => Ok(()),
        }
    }

    /// Flushes, if anything was changed.
    #[boxed]
    pub async fn close(&self) -> Result<()> {
        match self.flushes.any_change() {
            true => self.flush().await,
            false => Ok(()),
        }
    }
}
