//! [`Formats`]: the formats of images, each with the way to recognise and to open its images.
//!
//! A format is one module and one line here, or one line of the caller's: [`Formats::with`]. The
//! engine's own formats keep their types, so that requests to them are direct calls; another one
//! answers through a [`FormatImage`], which says where the bytes of its disk are, so that the
//! engine reads them; and writes, if it says that it does. An image that names a backing file is
//! read-only: what it lacks of a block that is written in part would have to come from there.
//! Chains, conversion, comparison and servers take such images like any other.

use std::sync::Arc;

use cowslip_block::disk::DiskFuture;

use crate::chain::Layer;
use crate::file::{AlignedFile, Gate};
use crate::files::Files;
use crate::foreign::{self, Signature};
use crate::image::OpenOptions;
use crate::policy::Format;
use crate::{Error, Result};

mod added;
mod built_in;
mod driver;

pub(crate) use added::Added;
pub use driver::FormatImage;

/// A backing file's name and format, as an image has them.
pub(crate) type BackingName = Option<(String, Option<String>)>;

/// An image that has been opened, alone: the chain opens the backing file.
#[derive(Debug)]
pub struct Opened {
    pub(crate) layer: Layer,
    pub(crate) backing: BackingName,
}

impl Opened {
    /// An image of a built-in format, and the backing file that it names.
    pub(crate) fn new(layer: Layer, backing: BackingName) -> Opened {
        Opened { layer, backing }
    }

    /// An image of a format of the caller's.
    pub fn by(driver: Box<dyn FormatImage>, format: &'static FormatDriver) -> Opened {
        Opened {
            layer: Layer::Other(Box::new(Added::new(format.format, driver))),
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
pub struct OpenRequest<'a> {
    /// The file that holds the image.
    pub file: AlignedFile,
    /// The length of the file in bytes.
    pub file_len: u64,
    /// Options of the chain's user; those of a layer below differ in access. An image that is
    /// opened with `writable` has to accept writes ([`FormatImage::features`]).
    pub options: &'a OpenOptions,
    /// The way to its data file.
    pub(crate) gate: &'a dyn Gate,
    /// The claims of the chain, where its data file is claimed.
    pub(crate) files: &'a Files,
    /// It is no backing file.
    pub(crate) is_top: bool,
}

/// The way to open an image of a format.
#[doc(hidden)]
pub type Open = for<'a> fn(OpenRequest<'a>) -> DiskFuture<'a, Opened>;

/// An added format: its name, how its images begin, and how they are opened.
#[derive(Clone, Copy, Debug)]
pub struct FormatDriver {
    /// [`Format::Other`], with the name of the format.
    pub format: Format,
    /// Whether the first sector of a file is that of an image of the format.
    pub matches: fn(&[u8]) -> bool,
    /// The function that opens an image of the format.
    pub open: Open,
}

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

    /// The way to open an image of a format.
    ///
    /// # Errors
    /// `Invalid`, in QEMU's words, if it was not added.
    pub(crate) fn way_to_open(&self, format: Format) -> Result<Open> {
        let added = || self.added.iter().find(|driver| driver.format == format);
        built_in::way_to_open(format)
            .or_else(|| added().map(|driver| driver.open))
            .ok_or_else(|| Error::Invalid(format!("Unknown driver '{}'", format.name())))
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
