//! Options as the package passes them: dictionaries with all members.

use cowslip::file::host::BackingPolicy;
use cowslip::image::DiscardPolicy;
use cowslip::luks::Passphrase;
use cowslip::qcow2::CompressionType;
use cowslip::qcow2::create::Preallocation;
use cowslip::{Error, Result};
use cowslip_embed::{CacheMode, NewImage, OpenRequest};
use pyo3::prelude::*;

/// How an image is opened.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Opening {
    format: Option<String>,
    writable: bool,
    cache: String,
    discard: bool,
    force_share: bool,
    backing: String,
    passphrase: Option<String>,
}

impl Opening {
    /// The request that this is.
    ///
    /// # Errors
    /// `Invalid`: a name that there is not.
    pub fn request(self) -> Result<OpenRequest> {
        let unknown = |what, name: &str| Error::Invalid(format!("there is no {what} '{name}'"));
        let cache = CacheMode::parse(&self.cache);
        let policy = BackingPolicy::from_name(&self.backing);
        Ok(OpenRequest {
            format: self.format,
            writable: self.writable,
            cache: cache.ok_or_else(|| unknown("cache mode", &self.cache))?,
            discard: match self.discard {
                true => DiscardPolicy::Unmap,
                false => DiscardPolicy::Ignore,
            },
            force_share: self.force_share,
            policy: policy.ok_or_else(|| unknown("policy for backing files", &self.backing))?,
            passphrase: self.passphrase.map(|text| Passphrase::new(text.into())),
            opener: None,
        })
    }
}

/// A new image.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Making {
    size: u64,
    format: String,
    backing_file: Option<String>,
    backing_format: Option<String>,
    cluster_size: Option<u64>,
    extended_l2: bool,
    compression: String,
    preallocation: String,
    replace: bool,
}

/// The preallocation of this name.
///
/// # Errors
/// `Invalid`: there is none.
pub fn preallocation(name: &str) -> Result<Preallocation> {
    Preallocation::from_name(name)
        .ok_or_else(|| Error::Invalid(format!("there is no preallocation '{name}'")))
}

impl Making {
    /// The image that this describes.
    ///
    /// # Errors
    /// `Invalid`: a name that there is not.
    pub fn image(self) -> Result<NewImage> {
        let mut image = NewImage::qcow2(self.size);
        image.format = self.format;
        image.exclusive = !self.replace;
        let options = &mut image.options;
        options.backing_file = self.backing_file;
        options.backing_format = self.backing_format;
        options.cluster_size = self.cluster_size.unwrap_or(options.cluster_size);
        options.extended_l2 = self.extended_l2;
        options.preallocation = preallocation(&self.preallocation)?;
        let types = [CompressionType::Deflate, CompressionType::Zstd];
        let compression = types.into_iter().find(|one| one.name() == self.compression);
        options.compression_type = compression.ok_or_else(|| {
            Error::Invalid(format!("there is no compression '{}'", self.compression))
        })?;
        Ok(image)
    }
}
