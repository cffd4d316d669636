//! [`FormatImage`]: an image of a format that is not built in.

use std::fmt;
use std::ops::Range;

use cowslip_block::disk::{DiskFuture, Features, ZeroOptions};
use cowslip_queue::{Buf, IoVec};

use crate::Error;
use crate::file::AlignedFile;
use crate::run::Run;
use crate::units::pieces;

/// Bytes of a block where the driver does not say: whatever its unit is, pages fit.
const BLOCK_BYTES: u64 = 4096;
/// Bytes of zeroes that are written at once.
const ZEROES_BYTES: u64 = 64 << 10;

/// An image of a format that is not built in.
///
/// Reads ask where the bytes are ([`FormatImage::map`]), and are done by the engine. If
/// [`FormatImage::features`] says that the disk accepts writes, the others change it. The engine
/// has validated them, has cut them by limits, and gives them to an image that was opened for
/// writing alone; many are under way at a time, as with [`cowslip_block::disk::Disk`]. Each is of
/// no more than the size, and of at least a byte.
pub trait FormatImage: Send + Sync + fmt::Debug {
    /// Bytes of the disk.
    fn size(&self) -> u64;

    /// The sources of a range within the size: runs in order, without gaps. Their data is read
    /// from the file at the offsets that they name; compressed runs are qcow2's. A place that was
    /// named keeps its bytes while the image is open, but for writes to the same bytes of the disk:
    /// a read may come to it at any time.
    ///
    /// # Errors
    /// I/O, or damage of the image.
    fn map(&self, range: Range<u64>) -> DiskFuture<'_, Vec<Run>>;

    /// The file that the runs are in.
    fn file(&self) -> &AlignedFile;

    /// Whether the disk accepts writes, and its unit of allocation. By default it does not.
    fn features(&self) -> Features {
        Features {
            writable: false,
            preferred_block_bytes: BLOCK_BYTES,
        }
    }

    /// Writes all of `data` at `offset`, or fails. It need not be durable before a flush.
    ///
    /// # Errors
    /// I/O, damage, no space; [`Error::ReadOnly`], as by default.
    fn write(&self, offset: u64, data: IoVec) -> DiskFuture<'_, ()> {
        drop((offset, data));
        let refused = Error::ReadOnly(self.file().name().to_string());
        Box::pin(std::future::ready(Err(refused)))
    }

    /// Makes a range read as zeroes; the engine sees to their durability. By default they are
    /// written.
    ///
    /// # Errors
    /// As for [`FormatImage::write`]; [`Error::Unsupported`] if `fast_only` is set and zeroes would
    /// have to be written out.
    fn zero(&self, offset: u64, len: u64, options: ZeroOptions) -> DiskFuture<'_, ()> {
        Box::pin(async move {
            if options.fast_only {
                return Err(Error::Unsupported {
                    file: self.file().name().to_string(),
                    feature: "zeroing without writing zeroes".into(),
                });
            }
            let zeroes = Buf::zeroed(len.min(ZEROES_BYTES) as usize);
            for piece in pieces(offset, len, ZEROES_BYTES) {
                let part = zeroes.slice(0, (piece.end - piece.start) as usize);
                self.write(piece.start, part.into()).await?;
            }
            Ok(())
        })
    }

    /// Discards a range: what is read there afterwards is unspecified, but never other data of the
    /// host. By default nothing is done.
    ///
    /// # Errors
    /// As for [`FormatImage::write`].
    fn discard(&self, offset: u64, len: u64) -> DiskFuture<'_, ()> {
        let _unused = (offset, len);
        Box::pin(std::future::ready(Ok(())))
    }

    /// Makes durable what had completed when it was called, in an order that leaves a sound image
    /// whenever power fails. By default the file is flushed. Called one at a time; after a failure
    /// not any more.
    ///
    /// # Errors
    /// I/O.
    fn flush(&self) -> DiskFuture<'_, ()> {
        Box::pin(self.file().flush())
    }

    /// Changes the size of the disk; an added range reads as zeroes.
    ///
    /// # Errors
    /// As for [`FormatImage::write`]; [`Error::Unsupported`], as by default.
    fn resize(&self, size: u64) -> DiskFuture<'_, ()> {
        let _unused = size;
        let refused = Error::Unsupported {
            file: self.file().name().to_string(),
            feature: "another size of its disk".into(),
        };
        Box::pin(std::future::ready(Err(refused)))
    }
}
