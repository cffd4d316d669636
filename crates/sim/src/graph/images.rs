//! Images of a graph's files: how they are made and opened.

use std::future::Future;
use std::sync::Arc;

use cowslip::file::{BlockFile, Capabilities};
use cowslip::image::{BackingChoice, DiscardPolicy, Format, OpenOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{BufMut, Error, Image, Result};

use crate::disk::SimDisk;
use crate::disk::content::Content;
use crate::rng::Rng;
use crate::subject::SimGate;

/// How a new image is laid out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    cluster_bits: u32,
    extended_l2: bool,
}

impl Style {
    pub fn draw(rng: &mut Rng) -> Style {
        let extended_l2 = rng.chance(25);
        Style {
            cluster_bits: match extended_l2 {
                true => rng.pick(&[14, 15]),
                false => rng.pick(&[9, 10, 12, 12, 13, 16]),
            },
            extended_l2,
        }
    }
}

/// The files of a run.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    pub disk: SimDisk,
}

impl Files {
    pub fn new(disk: SimDisk) -> Files {
        Files { disk }
    }

    /// A name that no file has.
    pub fn new_name(&self, kind: &str) -> String {
        format!("{kind}{}.img", self.disk.names().len())
    }

    /// Makes an image.
    pub fn make(
        &self,
        (name, format): (&str, Format),
        (size, style): (u64, Style),
        backing: Option<(&str, Format)>,
    ) -> impl Future<Output = Result<()>> + use<> {
        let mut content = Content::default();
        if format == Format::Raw {
            content.set_len(size);
        }
        self.disk
            .add_file(name, Capabilities::of_regular_file(1), content);
        let options = CreateOptions {
            cluster_size: 1 << style.cluster_bits,
            extended_l2: style.extended_l2,
            backing_file: backing.map(|(name, _)| name.to_string()),
            backing_format: backing.map(|(_, format)| format.name().to_string()),
            ..CreateOptions::new(size)
        };
        let handle = self.disk.open(name, true).expect("it was added");
        async move {
            match format {
                Format::Raw => Ok(()),
                _ => create(handle, None, &options).await,
            }
        }
    }

    fn options(format: Format, is_written: bool, backing: BackingChoice) -> OpenOptions {
        OpenOptions {
            format: Some(format),
            writable: is_written,
            discard: DiscardPolicy::Unmap,
            backing,
            cache_bytes: 1 << 20,
            ..OpenOptions::default()
        }
    }

    fn handle(&self, name: &str, is_written: bool) -> Result<Arc<dyn BlockFile>> {
        match self.disk.open(name, is_written) {
            Some(file) => Ok(file),
            None => Err(Error::Invalid(format!("there is no '{name}'"))),
        }
    }

    /// Opens an image, alone or with the chain that its header names.
    pub async fn open(
        &self,
        (name, format): (&str, Format),
        is_written: bool,
        backing: BackingChoice,
    ) -> Result<Image> {
        let options = Files::options(format, is_written, backing);
        let file = self.handle(name, is_written)?;
        Image::open(file, options, &SimGate(self.disk.clone())).await
    }

    /// Opens an image's own layer again.
    pub async fn reopen(
        &self,
        alone: &Image,
        (name, format): (&str, Format),
        is_written: bool,
    ) -> Result<Image> {
        let options = Files::options(format, is_written, BackingChoice::None);
        let file = self.handle(name, is_written)?;
        alone
            .reopen(file, options, &SimGate(self.disk.clone()))
            .await
    }
}

/// All bytes of an image's disk.
///
/// # Errors
/// Of the image.
pub(super) async fn read_all(image: &Image) -> Result<Vec<u8>> {
    let buf = BufMut::zeroed(image.size() as usize);
    Ok(image.read(0, buf).await?.to_vec())
}
