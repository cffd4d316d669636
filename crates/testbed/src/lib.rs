//! Where measurements are made, and what is made of their figures: file systems of a known kind on
//! fully written files, and medians with their spread.
//!
//! May not know: the engine, images, any program that is measured.

mod place;
mod spread;

pub use place::{Place, enter_namespace, populate, populate_compressible, supports_direct_io};
pub use spread::Spread;
