//! [`Backing`]: the disk behind an image, as its format sees it.
//!
//! A format knows that there may be a disk behind its image, and no more: which layers that has,
//! and of which formats, is the chain's.

use std::fmt;
use std::future::ready;
use std::ops::Range;
use std::pin::Pin;

use cowslip_queue::IoVecMut;

use crate::Result;
use crate::run::Run;

/// An answer under way.
pub type BackingFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A part of a read: its offset on the disk, and the memory that is filled.
pub type Part = (u64, IoVecMut);

/// A run of a disk, and the layer that decides it.
#[derive(Clone, Debug)]
pub struct Decided {
    /// The run, in the terms of that layer.
    pub run: Run,
    /// The layer; 0 is the uppermost.
    pub depth: usize,
}

/// The disk behind an image. It does not change while the image is open.
pub trait Backing: Send + Sync + fmt::Debug {
    /// Bytes of the disk; beyond, all reads as zeroes. 0 if there is none.
    fn size(&self) -> u64;

    /// Returns whether there is a disk at all.
    fn is_there(&self) -> bool;

    /// Fills parts of reads. They come back in any order, split where that helped.
    fn fill(&self, parts: Vec<Part>) -> BackingFuture<'_, Vec<Result<Part>>>;

    /// Returns whether its tables say that a range reads as zeroes; no data is read.
    ///
    /// # Errors
    /// I/O, or damage of its images.
    fn is_zero(&self, range: Range<u64>) -> BackingFuture<'_, Result<bool>>;

    /// The layers that decide a range: in order, covering it.
    ///
    /// # Errors
    /// As for [`Backing::is_zero`].
    fn decide(&self, range: Range<u64>) -> BackingFuture<'_, Result<Vec<Decided>>>;
}

/// No disk: what the image lacks reads as zeroes.
#[derive(Clone, Copy, Debug)]
pub struct NoBacking;

impl Backing for NoBacking {
    fn size(&self) -> u64 {
        0
    }

    fn is_there(&self) -> bool {
        false
    }

    fn fill(&self, mut parts: Vec<Part>) -> BackingFuture<'_, Vec<Result<Part>>> {
        parts.iter_mut().for_each(|(_, part)| part.fill(0));
        Box::pin(ready(parts.into_iter().map(Ok).collect()))
    }

    fn is_zero(&self, _range: Range<u64>) -> BackingFuture<'_, Result<bool>> {
        Box::pin(ready(Ok(true)))
    }

    fn decide(&self, _range: Range<u64>) -> BackingFuture<'_, Result<Vec<Decided>>> {
        Box::pin(ready(Ok(Vec::new())))
    }
}
