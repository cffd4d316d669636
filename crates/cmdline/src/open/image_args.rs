//! Arguments of verbs that take one image.

use cowslip_console::error::CommandError;
use cowslip_console::output::{Program, usage_error};

use super::ImageSpec;

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
    /// Returns the image.
    ///
    /// # Errors
    /// As [`only`].
    pub fn spec(&self, verb: &str, program: &Program) -> Result<ImageSpec, CommandError> {
        let format = self.format.as_deref();
        only(&self.filenames, format, self.image_opts, (verb, program))
    }
}

/// Returns the only image that a verb of `qemu-img` takes.
///
/// # Errors
/// Not one name, or a format beside a list of options.
pub fn only(
    filenames: &[String],
    format: Option<&str>,
    image_opts: bool,
    (verb, program): (&str, &Program),
) -> Result<ImageSpec, CommandError> {
    let [filename] = filenames else {
        let text = "Expecting one image file name";
        return Err(usage_error(text, verb, program));
    };
    if image_opts && format.is_some() {
        let text = "--image-opts and --format are mutually exclusive";
        return Err(CommandError::new(text));
    }
    Ok(ImageSpec {
        image_opts,
        ..ImageSpec::named(filename, format)
    })
}
