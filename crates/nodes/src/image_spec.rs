//! [`ImageSpec`]: an image as a user names it, by a file name, by options or by JSON.

use std::sync::Arc;

use cowslip_block::{Error, Result};

use crate::drivers;
use crate::json;
use crate::registry::Registry;
use crate::source::{Bottom, Source};
use crate::spec::pairs_of_list;

/// An image as a user names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSpec {
    /// File name, `json:{...}`, or options if `image_opts`.
    pub filename: String,
    /// The name of the format (`-f`); `None` if it is guessed.
    pub format: Option<String>,
    /// `--image-opts`: the file name is a list of options.
    pub image_opts: bool,
}

impl ImageSpec {
    /// A file name and the `-f` that goes with it.
    pub fn named(filename: &str, format: Option<&str>) -> ImageSpec {
        ImageSpec {
            filename: filename.to_string(),
            format: format.map(str::to_string),
            image_opts: false,
        }
    }

    /// Resolves it by the drivers that there are; opens nothing.
    ///
    /// # Errors
    /// `Could not open 'x': …` for what is not understood.
    pub fn resolve(&self) -> Result<Source> {
        self.resolve_by(&drivers::standard())
    }

    /// Resolves it by these drivers; opens nothing.
    ///
    /// # Errors
    /// As [`ImageSpec::resolve`].
    pub fn resolve_by(&self, registry: &Arc<Registry>) -> Result<Source> {
        let resolved = self.resolve_inner(registry);
        resolved.map_err(|why| Error::opening(&self.filename, why.to_string()))
    }

    fn resolve_inner(&self, registry: &Arc<Registry>) -> Result<Source> {
        let driver = |format: &String| ("driver".to_string(), format.clone());
        let pairs = if self.image_opts {
            pairs_of_list(&self.filename)?
        } else if let Some(json) = self.filename.strip_prefix("json:") {
            let mut pairs = json::pairs(json)?;
            if let Some(format) = &self.format {
                pairs.retain(|(name, _)| name != "driver");
                pairs.push(driver(format));
            }
            pairs
        } else if registry.options_of_name(&self.filename)?.is_some() {
            let name = ("file.filename".to_string(), self.filename.clone());
            let driver = self.format.as_ref().map(driver);
            driver.into_iter().chain([name]).collect()
        } else {
            return Source::of_name(&self.filename, self.format.as_deref(), registry);
        };
        let mut source = Source::of_pairs(pairs, 0, registry)?;
        if source.filename.is_empty() && matches!(source.bottom, Bottom::Protocol { .. }) {
            source.filename.clone_from(&self.filename);
        }
        source.say_given(&self.filename);
        // In JSON it may be null, which is how it should be said.
        source.image.backing_is_empty &= self.image_opts;
        Ok(source)
    }
}
