//! Images and files by name or by options: where formats, protocols and filters meet.
//!
//! An [`ImageSpec`] is what a user says: a file name, a list of options, or JSON. It is read as a
//! tree of nodes ([`spec::NodeSpec`]) by the tables of the drivers ([`driver`]), which a
//! [`Registry`] finds by their names, and becomes a [`Source`]: one image, and the chain of nodes
//! that its bytes come through. [`open_image`] opens it. New images are made in a [`Destination`].
//!
//! A new protocol, filter over files or format for reading is a file in `drivers/` and two lines in
//! `drivers.rs`.
//!
//! May not know: options of a command line, printing.

mod cache_sizes;
mod destination;
pub mod driver;
pub mod drivers;
pub mod foreign;
mod gate;
mod image_file;
mod image_spec;
pub mod json;
mod kept;
mod open;
pub mod options;
mod registry;
mod settings;
mod source;
pub mod spec;
#[cfg(feature = "remote")]
pub mod stores;
#[cfg(test)]
mod tests;

pub use destination::{Destination, NodeDestination};
pub use driver::PassedFiles;
pub use foreign::local_name;
pub use gate::NodeGate;
pub use image_file::ImageFile;
pub use image_spec::ImageSpec;
pub use kept::KeptFiles;
pub use open::{
    OpenError, disk_bytes, engine_options, open_alone, open_file, open_image, open_source,
    open_source_beside, reopen_image, reopen_source, sharing,
};
pub use registry::Registry;
pub use settings::{Access, CacheMode, Environment, OpenSettings};
pub use source::{Bottom, Source};
