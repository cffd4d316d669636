//! `compress`: writes store whole clusters, compressed.

use cowslip_block::Result;
use cowslip_block::options::{OptionEntry, Options};

use crate::driver::ImageFilter;
use crate::options::Above;

/// The driver `compress`.
pub struct Compress;

impl ImageFilter for Compress {
    fn name(&self) -> &'static str {
        "compress"
    }

    fn options(&self) -> &'static [OptionEntry] {
        &[]
    }

    fn read(&self, _: &mut Options, above: &mut Above) -> Result<()> {
        above.compress = true;
        Ok(())
    }
}
