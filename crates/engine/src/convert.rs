//! Converting: the disk of an image, or of several one after the other, copied into another image,
//! as a [`Job`].
//!
//! ```
//! # use std::sync::Arc;
//! # use cowslip::file::{host::NoFiles, memory::MemoryFile};
//! # use cowslip::image::{Durability, OpenOptions};
//! # use cowslip::qcow2::create::{CreateOptions, create};
//! # use cowslip::{Buf, BufMut, Image, Job};
//! # async fn image(bytes: u64) -> cowslip::Result<Image> {
//! #     let file = Arc::new(MemoryFile::new("disk", Vec::new(), 1));
//! #     create(file.clone(), None, &CreateOptions::new(bytes)).await?;
//! #     let options = OpenOptions { writable: true, ..OpenOptions::default() };
//! #     Image::open(file, options, &NoFiles).await
//! # }
//! # fn main() -> cowslip::Result<()> {
//! # cowslip::blocking::wait(async {
//! use cowslip::convert::{Form, Options, Plan, Sources};
//!
//! # let (source, target) = (image(1 << 20).await?, image(1 << 20).await?);
//! # source.write(0, Buf::copy_of(&[7; 4096]), Durability::Cached).await?;
//! let options = Options { form: Form::Compressed, ..Options::default() };
//! let (sources, job) = ([source], Job::default());
//! let sources = Sources::new(&sources);
//! let plan = Plan::new(&sources, options, &job, &|_| {}).await;
//! let plan = plan.map_err(|failure| failure.into_error())?;
//! let converted = plan.run(&target, &job).await.map_err(|failure| failure.into_error())?;
//! assert_eq!(converted.written_bytes, 64 << 10); // in whole clusters
//! target.flush().await?;
//! # Ok(())
//! # })
//! # }
//! ```
//!
//! The extents of the sources are listed ahead (`survey`), the work is planned from them alone
//! (`pieces`, pure), and it is done in guest order (`run`): a bounded number of pieces is read at
//! once, and they are written in their order. Holes and ranges that the tables call zero are never
//! read; data that turns out to be zero is not written (`zeroes`, pure). The copy flattens a
//! chain, since a read of the image on top goes through all layers.
//!
//! Promises: the target's disk reads as the sources' do; a failure comes with its offset.
//! Memory is [`Options::in_flight`] pieces of 2 MiB, the buffers that compress them, and
//! the list of extents within `survey::SPANS_MAX`.
//!
//! Leaves out: creating, truncating and removing the target; what to do with an incomplete one is
//! up to the caller.

use std::fmt;
use std::ops::Range;

use crate::image::{Durability, Image, Space, ZeroOptions};
use crate::job::{Job, Stage};
use crate::units::{SECTOR_BYTES, round_up};
use crate::{Error, Result};

mod line;
mod pieces;
mod run;
mod survey;
mod zeroes;

#[doc(hidden)]
pub use survey::{Totals, touched_bytes};

/// Bytes of the disk that are read and written together: a cluster of the largest size, and enough
/// for a device to be busy with.
#[doc(hidden)]
pub const PIECE_BYTES: u64 = 2 << 20;
/// Pieces that are under way together, by default: as many as qemu-img's coroutines.
#[doc(hidden)]
pub const IN_FLIGHT: usize = 8;
/// The same where one end is behind a network: with 20 ms to a server 512 MiB take half as long as
/// with 8.
#[doc(hidden)]
pub const IN_FLIGHT_FAR: usize = 16;

/// In what order the target is written.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Order {
    /// In that of the guest, so that the target's clusters lie in it.
    #[default]
    Guest,
    /// As the data comes.
    Any,
}

/// How clusters are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Form {
    /// As they are.
    #[default]
    Plain,
    /// Data is stored compressed.
    Compressed,
}

/// The target's content where nothing is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum TargetContent {
    /// Zeroes: it is new.
    #[default]
    Zeroes,
    /// The target may hold any bytes.
    Unknown,
    /// The content of the source's backing file; the target's backing file is of this length in
    /// bytes. Only data in the source's own image is copied.
    Backing(u64),
}

/// The reaction to a range of the source that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OnReadError {
    /// The conversion fails at the first sector that cannot be read.
    #[default]
    Fails,
    /// Those sectors become zeroes, and are reported to the watch of [`Plan::new`].
    BecomesZero,
}

/// How the target ends where the sources end within a sector.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LastSector {
    /// All of the sector: zeroes follow the data.
    #[default]
    Whole,
    /// The data alone. The rest of the sector stays unchanged.
    DataAlone,
}

/// By what means data moves.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CopyMethod {
    /// It is read, looked at and written.
    #[default]
    Copy,
    /// The system copies it from file to file, and shares it where the file system can; where that
    /// does not work it is copied. It is not examined for zeroes.
    Offload,
}

/// How a conversion is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Pieces that are under way together.
    pub in_flight: usize,
    /// In what order the target is written.
    #[doc(hidden)]
    pub order: Order,
    /// How clusters are stored.
    pub form: Form,
    /// Shortest run of zeroes, in bytes, that is not written as data. With 0 everything is written
    /// as data, zeroes too.
    pub sparse_bytes: u64,
    /// The target's content where nothing is written.
    pub unwritten: TargetContent,
    /// The reaction to a range of the source that cannot be read.
    pub unreadable: OnReadError,
    /// How data is copied.
    #[doc(hidden)]
    pub means: CopyMethod,
    /// How the target ends where the sources end within a sector.
    #[doc(hidden)]
    pub last_sector: LastSector,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            in_flight: IN_FLIGHT,
            order: Order::Guest,
            form: Form::Plain,
            sparse_bytes: 4096,
            unwritten: TargetContent::Zeroes,
            unreadable: OnReadError::Fails,
            means: CopyMethod::Copy,
            last_sector: LastSector::Whole,
        }
    }
}

/// Where a conversion failed.
#[derive(Debug)]
pub enum Failure {
    /// The extents at this offset of the source could not be listed.
    Extents(u64, Error),
    /// The source could not be read at this offset.
    Reading(u64, Error),
    /// The target could not be written at this offset.
    Writing(u64, Error),
    /// The job was cancelled.
    Cancelled,
}

impl Failure {
    /// Returns the error without its place.
    pub fn into_error(self) -> Error {
        match self {
            Failure::Extents(_, error)
            | Failure::Reading(_, error)
            | Failure::Writing(_, error) => error,
            Failure::Cancelled => Error::Cancelled,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Extents(at, error) => {
                write!(
                    f,
                    "error while reading block status at offset {at}: {error}"
                )
            }
            Failure::Reading(at, error) => write!(f, "error while reading at byte {at}: {error}"),
            Failure::Writing(at, error) => write!(f, "error while writing at byte {at}: {error}"),
            Failure::Cancelled => Error::Cancelled.fmt(f),
        }
    }
}

/// Called with what could not be read and became zeroes.
#[doc(hidden)]
pub type Watch<'a> = dyn Fn(&Failure) + Send + Sync + 'a;

/// The result of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Converted {
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes of data that were written, before compression.
    pub written_bytes: u64,
    /// Bytes that clusters took which were compressed.
    pub compressed_bytes: u64,
    /// Bytes that were written as zeroes.
    pub zeroed_bytes: u64,
    /// Bytes that the system copied.
    pub offloaded_bytes: u64,
    /// Bytes that could not be read and became zeroes.
    pub lost_bytes: u64,
}

/// The sources of a conversion: disks of images, or parts of them, one after the other, each in
/// whole sectors.
#[derive(Clone, Debug, Default)]
pub struct Sources<'a>(Vec<Part<'a>>);

/// A part of a source's disk.
#[derive(Clone, Debug)]
struct Part<'a> {
    image: &'a Image,
    /// Which part of its disk.
    range: Range<u64>,
    /// Where that is among all.
    start: u64,
}

impl Part<'_> {
    /// Bytes that it takes: whole sectors.
    fn len(&self) -> u64 {
        round_up(self.range.end - self.range.start, SECTOR_BYTES)
    }
}

impl<'a> Sources<'a> {
    /// The whole disks of these images.
    pub fn new(images: &'a [Image]) -> Sources<'a> {
        let mut sources = Sources::default();
        for image in images {
            sources.add(image, 0..image.size());
        }
        sources
    }

    /// One more, at the end.
    ///
    /// # Panics
    /// If the range is not within the disk.
    pub fn add(&mut self, image: &'a Image, range: Range<u64>) {
        assert!(
            range.start <= range.end && range.end <= image.size(),
            "a part of the disk"
        );
        let start = self.size();
        self.0.push(Part {
            image,
            range,
            start,
        });
    }

    /// Bytes of all, in whole sectors.
    pub fn size(&self) -> u64 {
        self.0.last().map_or(0, |part| part.start + part.len())
    }

    /// The first byte that is not written.
    fn written_end(&self, last_sector: LastSector) -> u64 {
        let data_end = |part: &Part<'_>| part.start + (part.range.end - part.range.start);
        match last_sector {
            LastSector::Whole => self.size(),
            LastSector::DataAlone => self.0.last().map_or(0, data_end),
        }
    }
}

/// A conversion that is known, and not begun.
pub struct Plan<'a> {
    sources: &'a Sources<'a>,
    options: Options,
    found: Totals,
    feed: survey::Feed<'a>,
    watch: &'a Watch<'a>,
}

impl<'a> Plan<'a> {
    /// Surveys the sources, and announces the work to the job. `watch` is called with each range
    /// that could not be read and becomes zeroes ([`OnReadError::BecomesZero`]).
    ///
    /// # Errors
    /// The tables of a source cannot be read; cancelled.
    pub async fn new(
        sources: &'a Sources<'a>,
        options: Options,
        job: &Job,
        watch: &'a Watch<'a>,
    ) -> Outcome<Plan<'a>> {
        assert!(options.in_flight > 0, "nothing would be done");
        let (found, feed) = survey::survey(sources, options, (job, watch)).await?;
        job.expect(found.data_bytes + found.zero_bytes);
        job.done(0);
        Ok(Plan {
            sources,
            options,
            found,
            feed,
            watch,
        })
    }

    /// Returns how much there is.
    #[doc(hidden)]
    pub fn found(&self) -> Totals {
        self.found
    }

    /// Copies the sources to the disk of `target`, which is at least as long. Does not flush.
    ///
    /// # Errors
    /// The first failure, when all I/O has ended; part of the target is written then.
    pub async fn run(self, target: &Image, job: &Job) -> Outcome<Converted> {
        let Plan {
            sources,
            mut options,
            found,
            mut feed,
            watch,
        } = self;
        let size = sources.size();
        assert!(
            size <= target.size(),
            "the caller has checked that the target is long enough"
        );
        if options.unwritten == TargetContent::Unknown && options.sparse_bytes > 0 {
            options.unwritten = clear(target, size).await?;
            if options.unwritten == TargetContent::Zeroes {
                feed.forget_zeroes();
                job.done(found.zero_bytes);
            }
        }
        job.enter(Stage::Copy);
        let run = run::Run::new((sources, target), options, (job, watch));
        run.run(feed).await
    }
}

/// Makes a target zero in one go, if it can without writing zeroes.
async fn clear(target: &Image, len: u64) -> Outcome<TargetContent> {
    let zeroes = ZeroOptions {
        space: Space::Release,
        durability: Durability::Cached,
        fast_only: true,
    };
    match target.write_zeroes(0, len, zeroes).await {
        Ok(()) => Ok(TargetContent::Zeroes),
        Err(error) if is_refusal(&error) => Ok(TargetContent::Unknown),
        Err(error) => Err(Failure::Writing(0, error)),
    }
}

fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Unsupported { .. }) || crate::space::is_unsupported(error)
}

/// The outcome of a conversion, or of a part of one.
#[doc(hidden)]
pub type Outcome<T> = std::result::Result<T, Failure>;

/// Returns whether a job goes on.
fn go_on(outcome: Result<()>) -> Outcome<()> {
    // A job has no other error.
    outcome.map_err(|_| Failure::Cancelled)
}
