//! `copy-on-read`: reads keep what the layers below hold.

use cowslip_block::Result;
use cowslip_block::options::Kind::Text;
use cowslip_block::options::{OptionEntry, Options, option};

use crate::driver::ImageFilter;
use crate::options::{Above, Copies};

const OPTIONS: &[OptionEntry] = &[option(
    "bottom",
    Text,
    "",
    "Name of the lowest node whose data is kept",
)];

/// The driver `copy-on-read`.
pub struct CopyOnRead;

impl ImageFilter for CopyOnRead {
    fn name(&self) -> &'static str {
        "copy-on-read"
    }

    fn options(&self) -> &'static [OptionEntry] {
        OPTIONS
    }

    fn read(&self, options: &mut Options, above: &mut Above) -> Result<()> {
        above.copy_on_read = Some(match options.take("bottom") {
            Some(node) => Copies::DownTo(node),
            None => Copies::All,
        });
        Ok(())
    }
}
