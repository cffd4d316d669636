//! [`Registry`]: formats, protocols and filters by their names.

use std::fmt;
use std::sync::Arc;

use cowslip::file::host::Driver;
use cowslip::foreign::probe;
use cowslip::formats::Formats;
use cowslip::image::Format;
use cowslip_block::options::{Options, Pairs};
use cowslip_block::{Error, Result};

use crate::driver::{Filter, ImageFilter, ImageFormat, Protocol, ProtocolNode};
use crate::drivers::file;
use crate::foreign;

/// Drivers by their names. Of several of one name the first is found.
#[derive(Clone, Default)]
pub struct Registry {
    /// Drivers that store bytes.
    pub protocols: Vec<&'static dyn Protocol>,
    /// Drivers that change the view of another file.
    pub filters: Vec<&'static dyn Filter>,
    /// Filters over the disk of an image.
    pub image_filters: Vec<&'static dyn ImageFilter>,
    /// Formats of images, the built-in ones of the engine too.
    pub formats: Vec<&'static dyn ImageFormat>,
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocols = self.protocols.iter().flat_map(|driver| driver.names());
        let filters = self.filters.iter().map(|driver| driver.name());
        f.debug_struct("Registry")
            .field("protocols", &protocols.collect::<Vec<_>>())
            .field("filters", &filters.collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

impl Registry {
    /// The names of all drivers, those of files of the host too, in the order of the alphabet.
    pub fn driver_names(&self) -> Vec<&'static str> {
        let protocols = self.protocols.iter().flat_map(|driver| driver.names());
        let mut names: Vec<&'static str> = file::NAMES.iter().chain(protocols).copied().collect();
        names.extend(self.filters.iter().map(|driver| driver.name()));
        names.extend(self.image_filters.iter().map(|driver| driver.name()));
        names.extend(self.formats.iter().map(|driver| driver.format().name()));
        names.sort_unstable();
        names.dedup();
        names
    }

    /// The protocol of this name.
    pub fn protocol(&self, name: &str) -> Option<&'static dyn Protocol> {
        let mut protocols = self.protocols.iter();
        protocols
            .find(|driver| driver.names().contains(&name))
            .copied()
    }

    /// The filter of this name.
    pub fn filter(&self, name: &str) -> Option<&'static dyn Filter> {
        let mut filters = self.filters.iter();
        filters.find(|driver| driver.name() == name).copied()
    }

    /// The filter over images of this name.
    pub fn image_filter(&self, name: &str) -> Option<&'static dyn ImageFilter> {
        let mut filters = self.image_filters.iter();
        filters.find(|driver| driver.name() == name).copied()
    }

    /// Whether a driver has a file below it and is a format of images.
    pub fn is_format(&self, name: &str) -> bool {
        let mut formats = self.formats.iter();
        formats.any(|driver| driver.format().name() == name)
    }

    /// The formats for the engine: those that it has built in, and those that drivers bring.
    pub fn engine_formats(&self) -> Formats {
        let drivers = self.formats.iter().filter_map(|format| format.driver());
        drivers.fold(Formats::default(), Formats::with)
    }

    /// The format of images of this name.
    ///
    /// # Errors
    /// `Unknown driver 'x'`.
    pub fn format(&self, name: &str) -> Result<Format> {
        // A disk in a file of the host, as QEMU has it.
        if Driver::from_name(name).is_some() {
            return Ok(Format::Raw);
        }
        let mut formats = self.formats.iter().map(|format| format.format());
        let found = formats.find(|format| format.name() == name);
        found.ok_or_else(|| Error::invalid(foreign::driver_refused(name)))
    }

    /// The format of a file that begins with these bytes.
    ///
    /// # Errors
    /// `Unsupported` names a format that is only recognised.
    pub fn probe(&self, start: &[u8], file: &str) -> Result<Format> {
        probe(start, file, &self.engine_formats().signatures())
    }

    /// Whether some format has an option of this name.
    pub fn is_of_a_format(&self, name: &str) -> bool {
        let mut formats = self.formats.iter();
        formats.any(|driver| driver.options().iter().any(|option| option.is(name)))
    }

    /// Whether a format has an option of this name.
    pub fn is_of_format(&self, format: Format, name: &str) -> bool {
        let mut formats = self.formats.iter();
        let known = formats.find(|driver| driver.format() == format);
        known.is_some_and(|driver| driver.options().iter().any(|option| option.is(name)))
    }

    /// The options that a file name stands for.
    ///
    /// # Errors
    /// It is a driver's, and not whole.
    pub fn options_of_name(&self, name: &str) -> Result<Option<Pairs>> {
        for driver in &self.protocols {
            if let Some(pairs) = driver.options_of_name(name)? {
                return Ok(Some(pairs));
            }
        }
        for driver in &self.filters {
            if let Some(pairs) = driver.options_of_name(name)? {
                return Ok(Some(pairs));
            }
        }
        Ok(None)
    }

    /// The node that a file name describes in full.
    ///
    /// # Errors
    /// It is a driver's, and not whole.
    pub fn node_of_name(&self, name: &str) -> Result<Option<Arc<dyn ProtocolNode>>> {
        for driver in &self.protocols {
            if let Some(node) = driver.node_of_name(name)? {
                return Ok(Some(node));
            }
        }
        Ok(None)
    }

    /// The node of a protocol that a file name stands for, as a URI or by its driver's options.
    ///
    /// # Errors
    /// It is a driver's, and not whole.
    pub fn protocol_node(&self, name: &str) -> Result<Option<Arc<dyn ProtocolNode>>> {
        if let Some(node) = self.node_of_name(name)? {
            return Ok(Some(node));
        }
        for driver in &self.protocols {
            let Some(pairs) = driver.options_of_name(name)? else {
                continue;
            };
            let (named, pairs): (Pairs, Pairs) = pairs
                .into_iter()
                .partition(|(option, _)| option == "driver");
            let named = named.first().map(|(_, name)| name.as_str());
            let named = named.unwrap_or(driver.names()[0]);
            let mut options = Options::new(pairs);
            let node = options.read(driver.options(), |own| driver.read(named, own))?;
            return Ok(Some(node));
        }
        Ok(None)
    }

    /// Whether a name, as images have it, is not that of a file of the host.
    pub fn is_description(&self, name: &str) -> bool {
        name.starts_with("json:")
            || !matches!(self.node_of_name(name), Ok(None))
            || !matches!(self.options_of_name(name), Ok(None))
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_are_those_by_which_drivers_are_found() {
        let registry = crate::drivers::standard();
        let names = registry.driver_names();
        assert!(names.is_sorted_by(|a, b| a < b), "{names:?}");
        for of_each_kind in ["blkdebug", "compress", "file", "nbd", "qcow2"] {
            assert!(names.contains(&of_each_kind), "{of_each_kind}");
        }
        for name in names {
            let is_found = registry.protocol(name).is_some()
                || registry.filter(name).is_some()
                || registry.image_filter(name).is_some()
                || registry.format(name).is_ok();
            assert!(is_found, "{name}");
        }
    }
}
