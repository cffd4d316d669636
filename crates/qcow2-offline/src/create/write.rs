//! Writing a planned image, header last.

use std::io;
use std::sync::Arc;

use cowslip_block::joins::Set;
use cowslip_queue::BufMut;

use super::layout::Layout;
use super::{Preallocation, SIZE_UNIT};
use crate::error::system_words;
use crate::file::{AlignedFile, BlockFile, Durability};
use crate::job::{Job, Stage};
use crate::luks::NewVolume;
use crate::units::{round_down, round_up};
use crate::{Error, Result};
use cowslip_hostfile::space::{self, Fill};

/// Bytes of neighbouring tables that are written at once.
const TABLES_BYTES: usize = 2 << 20;
/// Size in bytes of the first write to a raw file: the largest block that direct I/O requires.
const FIRST_BLOCK_BYTES: u64 = 4096;
/// Writes of tables that are in flight together.
const IN_FLIGHT: usize = 4;

/// Writes the pieces of a layout to an empty file.
pub(super) struct Writer<'a> {
    file: &'a dyn BlockFile,
    host: AlignedFile,
    job: &'a Job,
}

impl<'a> Writer<'a> {
    pub fn new(file: &'a Arc<dyn BlockFile>, job: &'a Job) -> Writer<'a> {
        Writer {
            file: file.as_ref(),
            host: AlignedFile::new(Arc::clone(file)),
            job,
        }
    }

    fn failed(&self, what: &str) -> impl Fn(io::Error) -> Error {
        let context = format!("Could not {what} '{}'", self.file.name());
        move |error| Error::io(context.clone(), error)
    }

    /// Writes `bytes`; where the file's blocks are larger than that, with the rest of its blocks as
    /// they are; nothing else writes to those meanwhile.
    async fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let alignment = u64::from(self.file.capabilities().alignment_bytes);
        let start = round_down(offset, alignment);
        let end = round_up(offset + bytes.len() as u64, alignment);
        let mut buf = BufMut::zeroed((end - start) as usize);
        if buf.len() != bytes.len() {
            let (read, filled) = self.file.read(start, buf.into()).await;
            read.map_err(self.failed("read"))?;
            buf = filled.into();
        }
        let at = (offset - start) as usize;
        buf[at..at + bytes.len()].copy_from_slice(bytes);
        let data = buf.freeze().into();
        let written = self.file.write(start, data, Durability::Cached).await;
        written.map_err(self.failed("write to"))
    }

    /// Allocates the guest's clusters.
    pub async fn preallocate(&self, layout: &Layout, how: Preallocation) -> Result<()> {
        match (layout.data_bytes, Fill::of(how)) {
            (Some((offset, len)), Some(fill)) => {
                space::fill(&self.host, offset..offset + len, fill, self.job).await
            }
            _ => Ok(()),
        }
    }

    /// Writes the LUKS volume that holds the keys, at an offset: its slot first.
    pub async fn keys(&self, volume: &NewVolume, offset: u64) -> Result<()> {
        for (at, bytes) in volume.pieces().iter().rev() {
            self.put(offset + at, bytes).await?;
        }
        Ok(())
    }

    /// Writes the LUKS volume that the file is, which makes it one, and makes it durable.
    pub async fn volume(&self, volume: &NewVolume) -> Result<()> {
        self.keys(volume, 0).await?;
        self.flush().await
    }

    /// Makes all of it durable.
    async fn flush(&self) -> Result<()> {
        self.file.flush().await.map_err(self.failed("flush"))
    }

    /// Writes all tables and makes them durable. Only writes in flight are in memory, whatever the
    /// size of the disk.
    pub async fn tables(&self, layout: &Layout) -> Result<()> {
        self.job.enter(Stage::Tables);
        let blocks = layout
            .refcount_blocks()
            .map(|(index, offset)| (offset, layout.refcount_block(index)));
        let roots = [layout.refcount_table(), layout.l1_table()];
        let l2_tables = (0..layout.l2_tables.len() as u64).map(|index| layout.l2_table(index));
        self.put_all(blocks.chain(roots).chain(l2_tables)).await?;
        self.flush().await
    }

    /// Writes tables, neighbours at once and several writes in flight.
    async fn put_all(&self, tables: impl Iterator<Item = (u64, Vec<u8>)>) -> Result<()> {
        let alignment = u64::from(self.file.capabilities().alignment_bytes);
        let mut tables = tables.filter(|(_, bytes)| !bytes.is_empty()).peekable();
        let mut in_flight = Set::default();
        let mut outcome = Ok(());
        while let Some((offset, mut bytes)) = tables.next().filter(|_| outcome.is_ok()) {
            while bytes.len() < TABLES_BYTES
                && let Some((_, more)) =
                    tables.next_if(|(next, _)| *next == offset + bytes.len() as u64)
            {
                bytes.extend(more);
            }
            let len = bytes.len() as u64;
            // A block of the file that tables share has one write at a time.
            let shares = !offset.is_multiple_of(alignment) || !len.is_multiple_of(alignment);
            let most = if shares { 0 } else { IN_FLIGHT - 1 };
            while outcome.is_ok() && in_flight.len() > most {
                outcome = in_flight.next().await.unwrap_or(Ok(()));
            }
            if outcome.is_ok() {
                outcome = self.job.begin(len).await;
            }
            let write = async move {
                self.put(offset, &bytes).await?;
                self.job.done(len);
                Ok(())
            };
            match outcome.is_ok() {
                true if shares => outcome = write.await,
                true => in_flight.push(write),
                false => {}
            }
        }
        while let Some(written) = in_flight.next().await {
            outcome = outcome.and(written);
        }
        outcome
    }

    /// Writes the header, which makes the file an image, and makes it durable.
    pub async fn header(&self, header: &[u8], layout: &Layout) -> Result<()> {
        self.put(0, header).await?;
        set_len(self.file, layout.file_len).await?;
        self.flush().await
    }
}

/// Gives the file its length. A device has its own, which has to do.
pub(super) async fn set_len(file: &dyn BlockFile, len: u64) -> Result<()> {
    let context = |what: &str| format!("Could not {what} '{}'", file.name());
    let now = file.len().await;
    let now = now.map_err(|error| Error::io(context("tell the length of"), error))?;
    if now == len || (now > len && !file.capabilities().extends_with_zeroes) {
        return Ok(());
    }
    let cut = file.set_len(len).await;
    cut.map_err(|error| Error::io(context("resize"), error))
}

/// Refuses to make more of a device than it is, before anything is written.
pub(super) async fn refuse_growth(file: &dyn BlockFile, len: u64) -> Result<()> {
    if file.capabilities().extends_with_zeroes {
        return Ok(());
    }
    let failed = |error: io::Error| Error::Invalid(system_words(&error));
    match file.len().await {
        Ok(now) if now >= len => Ok(()),
        Ok(_) => file.set_len(len).await.map_err(failed),
        Err(error) => Err(failed(error)),
    }
}

/// Has a raw file begin with data, as QEMU does: from a first block without space direct I/O would
/// learn nothing about the alignment that it needs (QEMU's `file-posix.c`, where it allocates the
/// first block). If the file keeps its old content, its first sector is cleared, so that it is
/// not taken for an image of its old format.
async fn begin(file: &Arc<dyn BlockFile>, len: u64, job: &Job) -> Result<()> {
    let is_regular = file.capabilities().extends_with_zeroes;
    let bytes = match is_regular && len >= FIRST_BLOCK_BYTES {
        true => FIRST_BLOCK_BYTES,
        false => SIZE_UNIT.min(len),
    };
    if bytes > 0 {
        let zeroes = vec![0; bytes as usize];
        Writer::new(file, job).put(0, &zeroes).await?;
    }
    Ok(())
}

/// Gives an empty file `len` bytes, allocated as the options say.
pub(super) async fn plain_file(
    file: &Arc<dyn BlockFile>,
    len: u64,
    preallocation: Preallocation,
    job: &Job,
) -> Result<()> {
    if let Some(how) = Fill::of(preallocation) {
        space::fill(&AlignedFile::new(Arc::clone(file)), 0..len, how, job).await?;
    }
    set_len(file.as_ref(), len).await?;
    begin(file, len, job).await?;
    let flushed = file.flush().await;
    flushed.map_err(|error| Error::io(format!("Could not flush '{}'", file.name()), error))
}
