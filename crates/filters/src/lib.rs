//! Files over other files, or over nothing, whatever format stands over them: injected errors and
//! breakpoints (`blkdebug`), a file that keeps nothing (`null-co`), a part of another file (`raw`
//! with `offset` and `size`).
//!
//! Each is a [`cowslip_block::file::BlockFile`], so the engine does not know that it is there.
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
