//! Giving an image another backing file, so that its disk stays what it is.
//!
//! ```
//! # use std::fs;
//! # use cowslip::file::host::{CreateMode, HostGate, HostOptions, open_host_file};
//! # use cowslip::image::{Durability, OpenOptions};
//! # use cowslip::qcow2::create::{CreateOptions, create};
//! # use cowslip::{Buf, Image, Job};
//! # fn main() -> cowslip::Result<()> {
//! # cowslip::blocking::wait(async {
//! use cowslip::convert::Form;
//! use cowslip::qcow2::amend::BackingFile;
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
//! // The image shall stand alone: what the backing file holds is written into it.
//! image.rebase(None, BackingFile::None, Form::Plain, &Job::default()).await?;
//! image.close().await?;
//! # Ok(())
//! # })
//! # }
//! ```
//!
//! Where the image holds nothing of its own, what the disk shows comes from below. What the new
//! backing file shows differently there is written into the image first, subcluster by subcluster,
//! zeroes as zeroes; then one crash-safe change of the header makes the new file the backing file
//! (`control/amend.rs` of `cowslip-qcow2`).
//!
//! | the power fails, or the job is cancelled | what the image shows |
//! | --- | --- |
//! | while data is written | the disk: each subcluster that has become the image's own is what the old chain shows there |
//! | while the header changes | the disk, with the old header or the new one: data and mapping are durable before it |
//!
//! So nothing has to be taken back; what was written stays, and makes the image larger.

use cowslip_boxed::boxed;
use std::ops::Range;
use std::pin::pin;

use cowslip_block::joins::{try_join, try_join_all};
use cowslip_queue::{Buf, BufMut};

use crate::convert::Form;
use crate::image::{Image, Space, ZeroOptions};
use crate::job::{Cost, Job, PIECE_BYTES, Pieces, Stage};
use crate::pairs::{Known, Spans};
use crate::qcow2::Qcow2;
use crate::qcow2::amend::{Amendment, BackingFile};
use crate::units::{round_down, round_up};
use crate::zero::is_zero;
use crate::{Error, Result};

/// The action for a unit of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    /// Both chains show the same.
    Nothing,
    /// The unit becomes zeroes.
    Zero,
    /// The unit is written as data.
    Write,
}

impl Image {
    /// Makes `new` the image's backing file, as `backing` says in the header; `None` is none. The
    /// disk reads as it did; what differs between the chains is written into the image first, as
    /// `storage` says. The session ends with it, well or not: only [`Image::close`] may
    /// follow.
    ///
    /// # Errors
    /// `Unsupported` for a raw image, `Invalid` for a header that cannot be, I/O,
    /// [`Error::Cancelled`]. After each of them, as after a crash, the image shows its disk with
    /// the old header or the new one.
    pub async fn rebase(
        &self,
        new: Option<&Image>,
        backing: BackingFile,
        storage: Form,
        job: &Job,
    ) -> Result<()> {
        let amendment = Amendment::of_backing(backing);
        let image = self.rebased_layer()?;
        image.may_amend(&amendment, image.size()).await?;
        if storage == Form::Compressed && image.header().has_data_file() {
            return Err(Error::Unsupported {
                file: image.name().to_string(),
                feature: "compression in an image with an external data file".into(),
            });
        }
        job.expect(self.size());
        job.enter(Stage::Copy);
        let rebase = Rebase {
            image: self,
            layer: image,
            new,
            storage,
        };
        rebase.copy(job).await?;
        job.check()?;
        job.enter(Stage::Flush);
        self.amend(&amendment, job).await
    }

    fn rebased_layer(&self) -> Result<&Qcow2> {
        match self.is_writable() {
            true => self.qcow2_for("a backing file of"),
            false => Err(Error::ReadOnly(self.name().to_string())),
        }
    }
}

struct Rebase<'a> {
    image: &'a Image,
    layer: &'a Qcow2,
    new: Option<&'a Image>,
    storage: Form,
}

impl Rebase<'_> {
    /// Returns the bytes that are copied into the image as a whole or not at all.
    fn unit_bytes(&self) -> u64 {
        match self.storage {
            Form::Plain => self.layer.subcluster_bytes(),
            Form::Compressed => 1 << self.layer.header().cluster_bits,
        }
    }

    /// Writes what differs. Ranges that both chains have from one file, or as zeroes, are passed
    /// over unread.
    async fn copy(&self, job: &Job) -> Result<()> {
        let size = self.image.size();
        let matters = |known: Known| Known {
            same: known.same || known.held_by_first,
            stored_alike: true,
            zero: [false; 2],
            held_by_first: false,
        };
        let mut suspects = Suspects {
            spans: Spans::new([Some(self.image), self.new], 0..size, matters),
            unit: self.unit_bytes(),
            size,
            rest: 0..0,
            job,
        };
        job.run_each(&mut suspects, |piece| self.copy_piece(piece))
            .await?;
        job.done(size - suspects.rest.end);
        Ok(())
    }

    /// A piece of whole units.
    #[boxed]
    async fn copy_piece(&self, piece: Range<u64>) -> Result<()> {
        debug_assert!(self.unit_bytes() <= PIECE_BYTES, "a piece has whole units");
        let len = (piece.end - piece.start) as usize;
        let old = self.image.read(piece.start, BufMut::for_overwrite(len));
        let new = self.read_new(piece.clone());
        let (old, new) = try_join(pin!(old), pin!(new)).await?;
        let old = old.freeze();
        let version = self.layer.header().version;
        let deed = |(old, new): (&[u8], &[u8])| match old == new {
            true => Deed::Nothing,
            false if version >= 3 && is_zero(old) => Deed::Zero,
            false => Deed::Write,
        };
        let unit = self.unit_bytes() as usize;
        let deeds = old.chunks(unit).zip(new.chunks(unit)).map(deed);
        let runs = runs(deeds, (unit, len), self.storage);
        let work = runs
            .into_iter()
            .map(|(deed, run)| self.do_run(deed, (piece.start, &old), run));
        try_join_all(work).await.map(drop)
    }

    /// Reads a piece through the new chain; beyond its end there is nothing.
    async fn read_new(&self, piece: Range<u64>) -> Result<BufMut> {
        let len = (piece.end - piece.start) as usize;
        let size = self.new.map_or(0, Image::size);
        let Some(new) = self.new.filter(|_| piece.start < size) else {
            return Ok(BufMut::zeroed(len));
        };
        let there = (size - piece.start).min(len as u64) as usize;
        let mut buf = BufMut::for_overwrite(len);
        let mut beyond = buf.split_off(there);
        beyond.fill(0);
        let mut read = new.read(piece.start, buf).await?;
        read.unsplit(beyond);
        Ok(read)
    }

    async fn do_run(&self, deed: Deed, (start, old): (u64, &Buf), run: Range<usize>) -> Result<()> {
        let (at, len) = (start + run.start as u64, run.end - run.start);
        match deed {
            Deed::Nothing => Ok(()),
            Deed::Zero => {
                let options = ZeroOptions {
                    space: Space::Release,
                    ..ZeroOptions::default()
                };
                self.image.write_zeroes(at, len as u64, options).await
            }
            Deed::Write => {
                let data = old.slice(run.start, len);
                match self.storage {
                    // Zeroes too, where version 2 has no other way to say them.
                    Form::Plain => {
                        let written = self.layer.write(at, data, &self.image.below);
                        self.layer.mark_corrupt_on_error(written.await).await
                    }
                    Form::Compressed => self.image.write_compressed(at, data).await,
                }
            }
        }
    }
}

/// The ranges that may differ, in pieces of whole units, each unit once.
struct Suspects<'a> {
    spans: Spans<'a>,
    unit: u64,
    size: u64,
    /// The rest of the last span.
    rest: Range<u64>,
    job: &'a Job,
}

impl Pieces for Suspects<'_> {
    type Piece = Range<u64>;

    async fn next(&mut self) -> Result<Option<(Range<u64>, Cost)>> {
        while self.rest.start >= self.rest.end {
            let span = self.spans.next(PIECE_BYTES).await;
            let Some(span) = span.map_err(|(_, error)| error)? else {
                return Ok(None);
            };
            self.job.check()?;
            if span.known.same {
                continue;
            }
            let done_to = self.rest.end;
            let start = round_down(span.range.start, self.unit).max(done_to);
            let end = round_up(span.range.end, self.unit).min(self.size);
            if start < end {
                self.job.done(start - done_to);
                self.rest = start..end;
            }
        }
        let end = self.rest.end.min(self.rest.start + PIECE_BYTES);
        let piece = self.rest.start..end;
        self.rest.start = end;
        let cost = Cost::moving(piece.end - piece.start);
        Ok(Some((piece, cost)))
    }
}

/// Units with one deed as runs of bytes; compressed clusters stay single.
fn runs(
    deeds: impl Iterator<Item = Deed>,
    (unit, len): (usize, usize),
    storage: Form,
) -> Vec<(Deed, Range<usize>)> {
    let mut runs: Vec<(Deed, Range<usize>)> = Vec::new();
    for (index, deed) in deeds.enumerate() {
        let part = index * unit..len.min((index + 1) * unit);
        let single = storage == Form::Compressed && deed == Deed::Write;
        match runs.last_mut() {
            Some((last, run)) if *last == deed && !single => run.end = part.end,
            _ => runs.push((deed, part)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_one_deed_are_written_together() {
        use Deed::{Nothing, Write, Zero};
        let deeds = [Write, Write, Zero, Nothing, Nothing, Write];
        let of = |storage| runs(deeds.into_iter(), (10, 55), storage);
        let plain = [
            (Write, 0..20),
            (Zero, 20..30),
            (Nothing, 30..50),
            (Write, 50..55),
        ];
        assert_eq!(of(Form::Plain), plain);
        assert_eq!(of(Form::Compressed).len(), plain.len() + 1);
    }
}
