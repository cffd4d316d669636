//! Writing a planned image, header last.

use std::io;

use cowslip_queue::{Buf, BufMut};

use super::super::geometry::{pieces, round_down, round_up};
use super::Preallocation;
use super::layout::Layout;
use crate::file::{BlockFile, Durability};
use crate::{Error, Result};

/// Bytes of zeroes that one write has.
const ZEROES_BYTES: u64 = 1 << 20;

/// Writes the pieces of a layout to an empty file.
pub(super) struct Writer<'a> {
    file: &'a dyn BlockFile,
}

impl<'a> Writer<'a> {
    pub fn new(file: &'a dyn BlockFile) -> Writer<'a> {
        Writer { file }
    }

    fn failed(&self, what: &str) -> impl Fn(io::Error) -> Error {
        let context = format!("Could not {what} '{}'", self.file.name());
        move |error| Error::io(context.clone(), error)
    }

    /// Writes `bytes`; where the file's blocks are larger than that, with the rest of its blocks as
    /// they are. One write at a time, so nothing changes in between.
    async fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let alignment = u64::from(self.file.capabilities().alignment_bytes);
        let start = round_down(offset, alignment);
        let end = round_up(offset + bytes.len() as u64, alignment);
        let mut buf = BufMut::zeroed((end - start) as usize);
        if buf.len() != bytes.len() {
            let (read, filled) = self.file.read(start, buf).await;
            read.map_err(self.failed("read"))?;
            buf = filled;
        }
        let at = (offset - start) as usize;
        buf[at..at + bytes.len()].copy_from_slice(bytes);
        let data = vec![buf.freeze()];
        let written = self.file.write(start, data, Durability::Cached).await;
        written.map_err(self.failed("write to"))
    }

    /// Allocates the guest's clusters.
    pub async fn preallocate(&self, layout: &Layout, how: Preallocation) -> Result<()> {
        match layout.data_bytes {
            Some((offset, len)) => preallocate(self.file, offset, len, how).await,
            None => Ok(()),
        }
    }

    /// Writes all tables and makes them durable.
    pub async fn tables(&self, layout: &Layout) -> Result<()> {
        for (index, offset) in layout.refcount_blocks() {
            self.put(offset, &layout.refcount_block(index)).await?;
        }
        let (offset, bytes) = layout.refcount_table();
        self.put(offset, &bytes).await?;
        let (offset, bytes) = layout.l1_table();
        self.put(offset, &bytes).await?;
        for index in 0..layout.l2_tables.len() as u64 {
            let (offset, bytes) = layout.l2_table(index);
            self.put(offset, &bytes).await?;
        }
        self.file.flush().await.map_err(self.failed("flush"))
    }

    /// Writes the header, which makes the file an image, and makes it durable.
    pub async fn header(&self, header: &[u8], layout: &Layout) -> Result<()> {
        self.put(0, header).await?;
        set_len(self.file, layout.file_len).await?;
        self.file.flush().await.map_err(self.failed("flush"))
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

/// Allocates a range of a file, and with `Full` writes zeroes to it.
pub(super) async fn preallocate(
    file: &dyn BlockFile,
    offset: u64,
    len: u64,
    how: Preallocation,
) -> Result<()> {
    let failed = |error| Error::io(format!("Could not preallocate '{}'", file.name()), error);
    match how {
        Preallocation::Off | Preallocation::Metadata => Ok(()),
        Preallocation::Falloc if len == 0 => Ok(()),
        Preallocation::Falloc => file.allocate(offset, len).await.map_err(failed),
        Preallocation::Full => {
            let alignment = u64::from(file.capabilities().alignment_bytes);
            let zeroes = Buf::zeroed(ZEROES_BYTES as usize);
            // Nothing is in the file yet, so whole blocks of zeroes hurt nobody.
            let start = round_down(offset, alignment);
            let end = round_up(offset + len, alignment);
            for piece in pieces(start, end - start, ZEROES_BYTES) {
                let part = zeroes.slice(0, (piece.end - piece.start) as usize);
                let written = file
                    .write(piece.start, vec![part], Durability::Cached)
                    .await;
                written.map_err(failed)?;
            }
            Ok(())
        }
    }
}

/// Gives an empty file `len` bytes, allocated as the options say.
pub(super) async fn plain_file(
    file: &dyn BlockFile,
    len: u64,
    preallocation: Preallocation,
) -> Result<()> {
    preallocate(file, 0, len, preallocation).await?;
    set_len(file, len).await?;
    let flushed = file.flush().await;
    flushed.map_err(|error| Error::io(format!("Could not flush '{}'", file.name()), error))
}
