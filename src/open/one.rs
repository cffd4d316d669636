//! The words for the one image of a verb.

use super::ImageSpec;
use crate::error::CommandError;
use crate::output::Program;

/// Options of a verb that is about one image.
#[derive(clap::Args, Clone, Debug)]
pub struct OneImage {
    /// The image's format
    #[arg(short, long, value_name = "FMT")]
    pub format: Option<String>,
    /// FILENAME is a complete image specification
    #[arg(long)]
    pub image_opts: bool,
    /// The image file
    #[arg(value_name = "FILENAME")]
    pub filenames: Vec<String>,
}

impl OneImage {
    /// The image.
    ///
    /// # Errors
    /// As [`ImageSpec::only`].
    pub fn spec(&self, verb: &str, program: &Program) -> Result<ImageSpec, CommandError> {
        let format = self.format.as_deref();
        ImageSpec::only(&self.filenames, format, self.image_opts, (verb, program))
    }
}
