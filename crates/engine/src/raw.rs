//! The raw format: the disk is the file. The reference for what the verbs mean. Also a LUKS volume,
//! whose disk is the file behind a header, under a cipher: zeroes there are written, and discards
//! do nothing, since no hole reads as zeroes.

use cowslip_boxed::boxed;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::run::{HostOffset, Run, Source};
use cowslip_queue::{Buf, IoVec, IoVecMut};

use crate::durable::Flushes;
use crate::file::{AlignedFile, Claim, Durability, Event, Numbering, Permission, Space};
use crate::job::Job;
use crate::luks::{self, SectorCipher};
use crate::policy::{Format, Preallocation};
use crate::space::{self, Fill};
use crate::units::{SECTOR_BYTES, round_down};
use crate::{Error, Result};

/// A raw image: the file's bytes are the disk's.
#[derive(Debug)]
pub struct Raw {
    file: AlignedFile,
    /// Where the disk begins in the file: 0, or behind a LUKS header.
    start: u64,
    size: AtomicU64,
    flushes: Flushes,
    /// Key slots are being written, or that has failed.
    keys_unknown: AtomicBool,
}

impl Raw {
    /// The image in `file`, of this size. Where its format was guessed, the file is
    /// [`AlignedFile::guarded`]: a guest must not write another format's header into the first
    /// sector and so have the next opener read files of its choice.
    pub fn new(file: AlignedFile, size: u64) -> Raw {
        Raw {
            file,
            start: 0,
            size: AtomicU64::new(size),
            flushes: Flushes::default(),
            keys_unknown: AtomicBool::new(false),
        }
    }

    /// The LUKS volume in a file of this length.
    ///
    /// # Errors
    /// `Corrupt` if it ends before its data begins.
    pub fn encrypted(
        file: &AlignedFile,
        file_len: u64,
        (cipher, start): (SectorCipher, u64),
    ) -> Result<Raw> {
        let size = file_len.checked_sub(start).ok_or_else(|| Error::Corrupt {
            file: file.name().to_string(),
            structure: "LUKS header",
            offset: 0,
            detail: format!("the data begins at {start:#x}, beyond the end of the file"),
        })?;
        Ok(Raw {
            start,
            ..Raw::new(
                file.encrypted(Arc::new(cipher), Numbering::Place(start)),
                round_down(size, SECTOR_BYTES),
            )
        })
    }

    /// Returns which of the two formats it is.
    pub fn format(&self) -> Format {
        match self.file.is_encrypted() {
            true => Format::Luks,
            false => Format::Raw,
        }
    }

    /// The size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// The file that holds the disk.
    pub fn file(&self) -> &AlignedFile {
        &self.file
    }

    /// Returns the file to a caller that changes it directly, not through this image.
    pub(crate) fn file_to_change(&self) -> &AlignedFile {
        self.flushes.will_change();
        &self.file
    }

    /// Makes durable all that had completed. After a failure it fails until the image is reopened.
    #[boxed]
    pub async fn flush(&self) -> Result<()> {
        let flushing = self.file.flush();
        self.flushes.flush(self.file.name(), flushing).await
    }

    /// Flushes, if anything was changed, and cuts off what direct I/O has written beyond an end
    /// that is no multiple of its block: the disk is the file, and it keeps its size.
    #[boxed]
    pub async fn close(&self) -> Result<()> {
        self.file.cut_padding(self.start + self.size()).await?;
        match self.flushes.any_change() {
            true => self.flush().await,
            false => Ok(()),
        }
    }

    /// All of it is data.
    pub fn map(&self, range: Range<u64>) -> Vec<Run> {
        let source = Source::Data(HostOffset(self.start + range.start));
        vec![Run { range, source }]
    }

    /// Reads from the disk.
    pub async fn read(&self, offset: u64, buf: IoVecMut) -> Result<IoVecMut> {
        self.file.read(self.start + offset, buf).await
    }

    /// Writes to the disk.
    pub async fn write(&self, offset: u64, data: IoVec, durability: Durability) -> Result<()> {
        self.flushes.will_change();
        self.file.reach(Event::WriteAio).await;
        let at = self.start + offset;
        if durability == Durability::Cached {
            return self.file.write(at, data, durability).await;
        }
        let end = at + data.len() as u64;
        // A write that is refused, or fails before it begins, has lost nothing.
        let prepared = self.file.prepare_write(at, data).await?;
        if !self.file.has_space(at..end).await {
            // Nor one that finds no space for itself, which a durable one could not tell.
            self.file
                .write_prepared(prepared, Durability::Cached)
                .await?;
            return self.flush().await;
        }
        let writing = self.file.write_prepared(prepared, durability);
        self.flushes.write(self.file.name(), writing).await
    }

    /// Makes a range read as zeroes.
    #[boxed]
    pub async fn write_zeroes(&self, offset: u64, len: u64, space: Space) -> Result<()> {
        self.flushes.will_change();
        self.file.zero(self.start + offset, len, space).await
    }

    /// Allocates the holes of a range; its bytes stay.
    #[boxed]
    pub async fn allocate(&self, offset: u64, len: u64) -> Result<()> {
        self.flushes.will_change();
        self.file
            .allocate_keeping_end(self.start + offset, len)
            .await
    }

    /// Punches a hole, so that the file system frees the space.
    #[boxed]
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        if self.file.is_encrypted() {
            return Ok(());
        }
        self.flushes.will_change();
        match self.file.discard(self.start + offset, len).await {
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::Unsupported => {
                Ok(())
            }
            other => other.map(|_| ()),
        }
    }

    /// The file and the place of the LUKS volume that it is.
    pub(crate) async fn keys(&self) -> Result<Option<(AlignedFile, Range<u64>)>> {
        if !self.file.is_encrypted() {
            return Ok(None);
        }
        let file = self.file.in_the_clear();
        let len = file.len().await?;
        Ok(Some((file, 0..len)))
    }

    /// Writes what lies before the disk, with a barrier after each stage. Once that has failed, or
    /// was dropped half way, keys cannot be changed until the volume is opened again: a failed
    /// write may have been done, so slots may not be what they were read as.
    pub(crate) async fn write_keys(&self, stages: luks::Stages) -> Result<()> {
        self.flushes.will_change();
        // The data that was read may have been left unflushed by a process that died.
        self.flush().await?;
        if self.keys_unknown.swap(true, Ordering::AcqRel) {
            return Err(Error::Latched(self.file.name().to_string()));
        }
        self.write_key_stages(stages).await?;
        self.keys_unknown.store(false, Ordering::Release);
        Ok(())
    }

    async fn write_key_stages(&self, stages: luks::Stages) -> Result<()> {
        let file = self.file.in_the_clear();
        for stage in stages {
            for (at, bytes) in stage {
                let data = vec![Buf::from(bytes)];
                file.write(at, data, Durability::Cached).await?;
            }
            self.flush().await?;
        }
        Ok(())
    }

    /// Changes the size. What is added gets its space first; if that fails the file is cut to what
    /// it was.
    #[boxed]
    pub async fn resize(&self, size: u64, preallocation: Preallocation, job: &Job) -> Result<()> {
        if preallocation == Preallocation::Metadata {
            let text = "Unsupported preallocation mode: metadata";
            return Err(Error::Invalid(text.to_string()));
        }
        self.flushes.will_change();
        let file = self.file.block_file();
        let claim = file.claimed();
        let held = claim.held.with(Permission::Resize);
        drop(file.claim(Claim { held, ..claim })?);
        let old = self.size();
        let old_len = self.file.len().await?;
        if let Some(how) = Fill::of(preallocation).filter(|_| size > old) {
            space::check_room(file.as_ref(), size - old).await?;
            job.expect(size - old);
            let added = self.start + old..self.start + size;
            if let Err(error) = space::fill(&self.file, added, how, job).await {
                // The failure that led here is the one to report.
                drop(self.file.set_len(old_len).await);
                return Err(error);
            }
        }
        self.file.set_len(self.start + size).await?;
        self.size.store(size, Ordering::Release);
        Ok(())
    }
}
