//! Files of a command's own making, under an image's format: faults that scripts ask for
//! (`blkdebug`), a disk that keeps nothing (`null-co`), a part of another file (`raw` with `offset`
//! and `size`), the disk of an image.
//!
//! Each is a [`cowslip::file::BlockFile`], so the engine knows nothing of it. What they are asked
//! for is read in `open/graph.rs`.

mod breakpoints;
mod debug;
mod image;
mod null;
mod part;
mod rules;

pub use breakpoints::Breakpoints;
pub use debug::{DebugFile, DebugSpec};
pub use image::ImageFile;
pub use null::{NullFile, NullSpec};
pub use part::PartFile;
pub use rules::RuleText;
