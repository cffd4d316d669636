//! Writing what an image holds into a file below it, and emptying the image.
//!
//! ```
//! # use std::fs;
//! # use cowslip::file::host::{CreateMode, HostGate, HostOptions, open_host_file};
//! # use cowslip::image::{Durability, OpenOptions};
//! # use cowslip::qcow2::create::{CreateOptions, create};
//! # use cowslip::{Buf, Image, Job};
//! # fn main() -> cowslip::Result<()> {
//! # cowslip::blocking::wait(async {
//! use cowslip::commit::{Afterwards, Commit};
//!
//! # let dir = tempfile::tempdir().expect("a scratch directory");
//! # let (base, top) = (dir.path().join("base.qcow2"), dir.path().join("top.qcow2"));
//! # let create_new = CreateMode::CreateNew;
//! # let new = HostOptions { writable: true, create: create_new, ..HostOptions::default() };
//! # create(open_host_file(&base, &new)?, None, &CreateOptions::new(1 << 20)).await?;
//! # let overlay = CreateOptions {
//! #     backing_file: Some("base.qcow2".to_string()),
//! #     backing_format: Some("qcow2".to_string()),
//! #     ..CreateOptions::new(1 << 20)
//! # };
//! # create(open_host_file(&top, &new)?, None, &overlay).await?;
//! # let host = HostOptions { create: CreateMode::OpenExisting, ..new };
//! # let gate = HostGate { options: host, ..HostGate::default() };
//! # let writable = || OpenOptions { writable: true, ..OpenOptions::default() };
//! # let image = Image::open(open_host_file(&top, &host)?, writable(), &gate).await?;
//! image.write(0, Buf::copy_of(b"a guest's bytes"), Durability::Cached).await?;
//! let commit = Commit {
//!     depth: 1, // into the backing file
//!     afterwards: Afterwards::Empty,
//!     base: OpenOptions::default(),
//! };
//! image.commit(&commit, &gate, &Job::default()).await?;
//! image.close().await?;
//! # Ok(())
//! # })
//! # }
//! ```
//!
//! | step | the power fails, or the job is cancelled, after it |
//! | --- | --- |
//! | the base is opened for writing, and made longer if it is shorter than the disk | the disk is as it was: the image holds all that it held |
//! | what the image, and those between, decide is written into the base | as before: where the base has changed, something above decides |
//! | the base is flushed | as before |
//! | the image becomes empty by one change of its header (`control/empty.rs` of `cowslip-qcow2`) | the image is full or empty, and shows the same disk |
//!
//! With images between, these stay as they are, and the image too: they are what it shows in any
//! case.

use cowslip_boxed::boxed;
use std::collections::VecDeque;
use std::ops::Range;

use cowslip_queue::BufMut;

use crate::chain::{self, Below, Layer};
use crate::extents::extents;
use crate::file::{Claim, Gate, ReadAs};
use crate::image::{BackingChoice, Durability, Extent, Image, OpenOptions, Space, ZeroOptions};
use crate::job::{Cost, Job, PIECE_BYTES, Pieces, Stage};
use crate::{Error, Result};

/// Extents asked for at once.
const EXTENTS_AT_ONCE: usize = 1024;
/// Bytes of zeroes that are written at a time, which moves none.
const ZEROES_BYTES: u64 = 256 << 20;

/// The state of the image after the commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Afterwards {
    /// It holds nothing any more.
    Empty,
    /// It keeps its data.
    Kept,
}

/// A commit that is asked for.
#[derive(Clone, Debug)]
pub struct Commit {
    /// The layer that receives: 1 is the backing file, and so on down.
    pub depth: usize,
    /// The state of the image after the commit. [`Afterwards::Empty`] only with depth 1: images
    /// between would show through.
    pub afterwards: Afterwards,
    /// How the base is opened; its format, and what is below it, are as they are.
    pub base: OpenOptions,
}

impl Image {
    /// Writes what the image and those above the base decide into the base, durably, and empties
    /// the image. The base is opened for writing through `gate`, and claimed; no other process can
    /// claim it in between. The session ends with it, well or not: only [`Image::close`] may
    /// follow.
    ///
    /// # Errors
    /// `Invalid` without such a layer, the base cannot be written or is in use, I/O, no space,
    /// [`Error::Cancelled`]. After each of them, as after a crash, the image shows its disk.
    pub async fn commit(&self, commit: &Commit, gate: &dyn Gate, job: &Job) -> Result<()> {
        if !self.is_writable() {
            return Err(Error::ReadOnly(self.name().to_string()));
        }
        let layers = self.below.layers();
        let Some(below) = layers.get(commit.depth.wrapping_sub(1)) else {
            let text = "Image does not have a backing file";
            return Err(Error::Invalid(text.to_string()));
        };
        if commit.afterwards == Afterwards::Empty && commit.depth > 1 {
            let text = "only an image that is committed into its own backing file can be emptied";
            return Err(Error::Invalid(text.to_string()));
        }
        let naming = self.namings.get(commit.depth - 1);
        let naming = naming.expect("each layer was named");
        let mut options = OpenOptions {
            format: Some(below.format()),
            guessed: below.is_guessed(),
            writable: true,
            backing: BackingChoice::AsNamed,
            ..commit.base.clone()
        };
        let file = gate.open_async(&naming.request(true)).await?.file;
        let between = &layers[..commit.depth - 1];
        let between = || between.iter().flat_map(|layer| layer.files());
        for file in between() {
            // Unprotected it is like every other file, of which the opening has warned.
            drop(file.claim(Claim::BETWEEN)?);
        }
        for file in self.top.files().chain(between()) {
            options.read_besides.add(file.as_ref(), ReadAs::Image);
        }
        let predecessors = self.files().cloned().collect();
        let base = Image::open_after(file, options, gate, predecessors).await?;
        // From here on the base claims its files, and is not read through this chain: it changes.
        for file in layers[commit.depth - 1..]
            .iter()
            .flat_map(|layer| layer.files())
        {
            drop(file.claim(Claim::NONE));
        }
        let committed = self.commit_into(&base, commit, job).await;
        let closed = base.close().await;
        committed.and(closed)
    }

    async fn commit_into(&self, base: &Image, commit: &Commit, job: &Job) -> Result<()> {
        job.enter(Stage::Copy);
        if base.size() < self.size() {
            base.resize(self.size()).await?;
        }
        let above = Above {
            top: &self.top,
            below: self.below.uppermost(commit.depth - 1),
            base,
        };
        job.expect(self.size());
        above.copy(job).await?;
        job.check()?;
        job.enter(Stage::Flush);
        base.flush().await?;
        match (self.top.qcow2(), commit.afterwards) {
            (Some(image), Afterwards::Empty) => image.make_empty().await,
            (Some(_), Afterwards::Kept) | (None, _) => Ok(()),
        }
    }
}

/// The image and those above the base, which decide what is written into it.
struct Above<'a> {
    top: &'a Layer,
    below: Below,
    base: &'a Image,
}

impl Above<'_> {
    async fn copy(&self, job: &Job) -> Result<()> {
        let size = self.top.size();
        let mut decided = DecidedAbove {
            above: self,
            rest: 0..size,
            ahead: VecDeque::new(),
            job,
        };
        job.run_each(&mut decided, |(range, is_zero)| {
            self.copy_piece(range, is_zero)
        })
        .await
    }

    #[boxed]
    async fn copy_piece(&self, range: Range<u64>, is_zero: bool) -> Result<()> {
        let (start, len) = (range.start, range.end - range.start);
        if is_zero {
            let options = ZeroOptions {
                space: Space::Release,
                ..ZeroOptions::default()
            };
            return self.base.write_zeroes(start, len, options).await;
        }
        let buf = BufMut::for_overwrite(len as usize);
        let data = chain::read(self.top, &self.below, start, buf.into()).await?;
        let durability = Durability::Cached;
        self.base.write(start, data.freeze(), durability).await
    }

    /// Returns whether something above the base decides an extent. A range that none holds is
    /// decided by the base, unless an image between ends before: behind its end the disk reads as
    /// zeroes, whatever is below.
    fn decides(&self, extent: &Extent) -> bool {
        extent.present || (extent.depth as usize) < self.below.layers().len()
    }
}

/// The ranges that layers above the base decide, in pieces of zeroes or of other data.
struct DecidedAbove<'a> {
    above: &'a Above<'a>,
    rest: Range<u64>,
    ahead: VecDeque<Extent>,
    job: &'a Job,
}

impl Pieces for DecidedAbove<'_> {
    type Piece = (Range<u64>, bool);

    async fn next(&mut self) -> Result<Option<((Range<u64>, bool), Cost)>> {
        let extent = loop {
            match self.ahead.pop_front() {
                Some(extent) if self.above.decides(&extent) => break extent,
                Some(extent) => self.job.done(extent.len),
                None if self.rest.start >= self.rest.end => return Ok(None),
                None => {
                    self.job.check()?;
                    let asked = (self.rest.clone(), EXTENTS_AT_ONCE);
                    let found = extents(self.above.top, &self.above.below, asked).await?;
                    let last = found.last().expect("a range has extents");
                    self.rest.start = last.start + last.len;
                    self.ahead = found.into();
                }
            }
        };
        let most = match extent.zero {
            true => ZEROES_BYTES,
            false => PIECE_BYTES,
        };
        let len = extent.len.min(most);
        if len < extent.len {
            self.ahead.push_front(Extent {
                start: extent.start + len,
                len: extent.len - len,
                ..extent
            });
        }
        let cost = Cost {
            moved_bytes: if extent.zero { 0 } else { len },
            done_bytes: len,
        };
        let range = extent.start..extent.start + len;
        Ok(Some(((range, extent.zero), cost)))
    }
}
