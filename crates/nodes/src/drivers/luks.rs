//! `luks`: an encrypted volume.

use cowslip::image::Format;
use cowslip_block::Result;
use cowslip_block::options::Kind::Text;
use cowslip_block::options::{OptionEntry, option};

use crate::driver::ImageFormat;
use crate::options::ImageOptions;

const OPTIONS: &[OptionEntry] = &[option(
    "key-secret",
    Text,
    "",
    "ID of the secret that opens it",
)];

/// The format `luks`.
pub struct Luks;

impl ImageFormat for Luks {
    fn format(&self) -> Format {
        Format::Luks
    }

    fn options(&self) -> &'static [OptionEntry] {
        OPTIONS
    }

    fn take(&self, image: &mut ImageOptions, name: &str, value: &str) -> Result<bool> {
        let is_taken = name == "key-secret";
        if is_taken {
            image.key_secret = Some(value.to_string());
        }
        Ok(is_taken)
    }
}
