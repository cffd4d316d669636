//! Where measurements are made, and what is made of their figures: file systems of a known kind on
//! fully written files, images with their metadata laid out as wanted, what machine and what
//! devices these are, medians with their spread, and tables of text. A web server with faults, an
//! S3 server of others, and Ceph's libraries over plain files.
//!
//! May not know: the engine, any program that is measured. It writes qcow2 by the format's
//! description, so that what is measured is not what wrote it.

pub mod ceph;
mod columns;
pub mod image;
pub mod machine;
pub mod moto;
mod place;
mod random;
mod spread;
pub mod stack;
mod tools;
pub mod web;

pub use columns::{Side, TextColumns};
pub use place::{
    Place, Recipe, enter_namespace, populate, populate_compressible, supports_direct_io,
};
pub use random::Random;
pub use spread::Spread;
pub use tools::output_of;
