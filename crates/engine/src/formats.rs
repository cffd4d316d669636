//! [`Formats`]: the formats of images, each with the way to recognise and to open its images.
//!
//! A format is one module and one line here, or one line of the caller's: [`Formats::with`]. The
//! engine's own formats keep their types, so that requests to them are direct calls; another one
//! answers through a [`Driver`], which says where the bytes of its disk are and does no I/O for
//! guest data. Disks of such formats are read-only. Chains, conversion, comparison and servers take
//! them like any other.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::run::{Run, Source};
use cowslip_block::disk::DiskFuture;

use crate::chain::{Files, Layer};
use crate::file::{AlignedFile, Gate};
use crate::foreign::{self, Signature};
use crate::image::OpenOptions;
use crate::policy::Format;
use crate::{Error, Result};

mod built_in;

/// An image of a format that is not built in, open for reading.
pub trait Driver: Send + Sync + fmt::Debug {
    /// Bytes of the disk.
    fn size(&self) -> u64;

    /// The sources of a range within the size: runs in order, without gaps. What is read of them
    /// comes from the file at the offsets that they name; compressed runs are qcow2's.
    ///
    /// # Errors
    /// I/O, or damage of the image.
    fn map(&self, range: Range<u64>) -> DiskFuture<'_, Vec<Run>>;

    /// The file that the runs are in.
    fn file(&self) -> &AlignedFile;
}

/// The runs of a driver, checked: what they do not cover would be memory of somebody else.
///
/// # Errors
/// As for [`Driver::map`]; `Corrupt` for runs with gaps, or of sources that a driver has not.
pub(crate) async fn map(driver: &dyn Driver, range: Range<u64>) -> Result<Vec<Run>> {
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

/// A backing file's name and format, as an image has them.
pub(crate) type Backing = Option<(String, Option<String>)>;

/// An image that has been opened, alone: the chain opens the backing file.
#[derive(Debug)]
pub struct Opened {
    pub(crate) layer: Layer,
    pub(crate) backing: Backing,
}

impl Opened {
    /// An image of a built-in format, and the backing file that it names.
    pub(crate) fn new(layer: Layer, backing: Backing) -> Opened {
        Opened { layer, backing }
    }

    /// An image of a format of the caller's.
    pub fn by(driver: Box<dyn Driver>, format: &'static FormatDriver) -> Opened {
        Opened {
            layer: Layer::Other(format.format, driver),
            backing: None,
        }
    }

    /// The backing file that the image names, and its format if the image names that too.
    #[must_use]
    pub fn over(self, name: String, format: Option<String>) -> Opened {
        Opened {
            backing: Some((name, format)),
            ..self
        }
    }
}

/// An image that is about to be opened.
pub struct Opening<'a> {
    /// Its file.
    pub file: AlignedFile,
    /// The length of the file in bytes.
    pub file_len: u64,
    /// The caller's options.
    pub options: &'a OpenOptions,
    /// The way to its data file.
    pub(crate) gate: &'a dyn Gate,
    /// The claims of the chain, where its data file is claimed.
    pub(crate) files: &'a Files,
    /// It is no backing file.
    pub(crate) is_top: bool,
}

/// The way to open an image of a format.
pub type Open = for<'a> fn(Opening<'a>) -> DiskFuture<'a, Opened>;

/// A format: its name, how its images begin, and how they are opened.
#[derive(Clone, Copy, Debug)]
pub struct FormatDriver {
    /// The format; of an added one [`Format::Other`], with its name.
    pub format: Format,
    /// Whether the first sector of a file is that of an image of the format.
    pub matches: fn(&[u8]) -> bool,
    /// Opens an image.
    pub open: Open,
}

/// The formats that are built in, in the order in which they are looked for.
static BUILT_IN: [FormatDriver; 3] = [built_in::QCOW2, built_in::LUKS, built_in::RAW];

/// The formats that images may have: the built-in ones, and those that a caller has added.
#[derive(Clone, Debug, Default)]
pub struct Formats {
    added: Vec<&'static FormatDriver>,
}

impl Formats {
    /// These formats and another one. It is looked for behind the others when a file is probed.
    ///
    /// # Panics
    /// If there is one of its name, or it does not say its name by [`Format::Other`].
    #[must_use]
    pub fn with(mut self, driver: &'static FormatDriver) -> Formats {
        let Format::Other(name) = driver.format else {
            panic!("an added format has a name of its own");
        };
        assert!(self.named(name).is_none(), "'{name}' is there already");
        self.added.push(driver);
        self
    }

    /// The format of a name, as `-f` and headers have it.
    pub fn named(&self, name: &str) -> Option<Format> {
        let of_name = |driver: &&&FormatDriver| driver.format.name() == name;
        let added = self.added.iter().find(of_name).map(|driver| driver.format);
        Format::from_name(name).or(added)
    }

    /// The driver of a format.
    ///
    /// # Errors
    /// `Invalid`, in QEMU's words, if it was not added.
    pub(crate) fn driver(&self, format: Format) -> Result<&'static FormatDriver> {
        let mut all = BUILT_IN.iter().chain(self.added.iter().copied());
        let unknown = || Error::Invalid(format!("Unknown driver '{}'", format.name()));
        all.find(|driver| driver.format == format)
            .ok_or_else(unknown)
    }

    /// How images of the added formats begin.
    pub fn signatures(&self) -> Arc<[Signature]> {
        let signature = |driver: &&FormatDriver| Signature {
            name: driver.format.name(),
            matches: driver.matches,
        };
        self.added.iter().map(signature).collect()
    }

    /// The format of a file by how it begins.
    ///
    /// # Errors
    /// I/O; `Unsupported` names a format that is recognised only.
    pub(crate) async fn probe(&self, file: &AlignedFile) -> Result<Format> {
        let there = foreign::PROBED_BYTES.min(file.len().await?);
        let start = file.read_new(0, there).await?;
        foreign::probe(&start, file.name(), &self.signatures())
    }
}
