//! Files that wrap another file, or none: injected errors and breakpoints (`blkdebug`), a file that
//! stores nothing (`null-co`), a range of another file (`raw` with `offset` and `size`).
//!
//! Each implements [`cowslip_block::file::BlockFile`], so the engine needs no code for them.
//!
//! May not know: images, formats, networks.

mod breakpoints;
mod debug;
mod null;
mod part;
mod rules;

pub use breakpoints::{Breakpoints, NoSuch};
pub use debug::{DebugFile, DebugSpec};
pub use null::{NullFile, NullSpec};
pub use part::PartFile;
pub use rules::{Rule, RuleText};
