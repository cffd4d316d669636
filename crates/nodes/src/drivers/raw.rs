//! `raw`: bytes as they are, and a part of them by `offset` and `size`.

use std::sync::Arc;

use cowslip::file::BlockFile;
use cowslip::image::Format;
use cowslip_block::error::system_words;
use cowslip_block::options::Kind::Size;
use cowslip_block::options::{OptionEntry, Options, option};
use cowslip_block::{Error, Result};
use cowslip_filters::PartFile;

use crate::driver::{FileSettings, Filter, FilterNode, ImageFormat, Opening};
use crate::options::ImageOptions;

const OPTIONS: &[OptionEntry] = &[
    option("offset", Size, "0", "First byte"),
    option("size", Size, "", "Length; to the end where none is given"),
];

/// The filter `raw`, a part of a file, and the format of that name.
pub struct Raw;

impl Filter for Raw {
    fn name(&self) -> &'static str {
        "raw"
    }

    fn options(&self) -> &'static [OptionEntry] {
        OPTIONS
    }

    fn child(&self) -> &'static str {
        "file"
    }

    fn passes_options_on(&self) -> bool {
        true
    }

    fn read(&self, options: &mut Options) -> Result<Option<Arc<dyn FilterNode>>> {
        let start = options.take_size("offset")?;
        let size = options.take_size("size")?;
        let is_whole = start.is_none() && size.is_none();
        let part = Part(start.unwrap_or(0), size);
        Ok((!is_whole).then(|| Arc::new(part) as Arc<dyn FilterNode>))
    }
}

#[derive(Debug)]
struct Part(u64, Option<u64>);

impl FilterNode for Part {
    fn open<'a>(&'a self, below: Arc<dyn BlockFile>, _: FileSettings<'a>) -> Opening<'a> {
        Box::pin(async move {
            let len = below.len().await;
            let len = len.map_err(|error| Error::invalid(system_words(&error)))?;
            let Part(start, size) = *self;
            Ok(Arc::new(PartFile::new(below, len, (start, size))?) as Arc<dyn BlockFile>)
        })
    }
}

impl ImageFormat for Raw {
    fn format(&self) -> Format {
        Format::Raw
    }

    fn options(&self) -> &'static [OptionEntry] {
        OPTIONS
    }

    fn take(&self, _: &mut ImageOptions, name: &str, _: &str) -> Result<bool> {
        // Where the driver is named, the filter has taken them; where it is guessed, they have no
        // effect.
        Ok(["offset", "size"].contains(&name))
    }
}
