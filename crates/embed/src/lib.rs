//! Images for programs in other languages: what the bindings for C and Python have in common, in
//! safe code.
//!
//! Calls block ([`block_on`]): each thread that makes them has an I/O queue of its own, so calls
//! of several threads run side by side, on one image too. Programs with an event loop submit
//! requests to a [`Submitter`] and take completions when its event says so. Long operations take a
//! [`cowslip::Job`].
//!
//! May not know: C, Python, memory that is not ours.

mod blocking;
mod create;
mod open;
mod serve;
mod submitter;
mod whole;

pub use blocking::block_on;
pub use cowslip_nodes::CacheMode;
pub use create::{NewImage, create};
pub use open::{Naming, OpenRequest, Opener, open, open_file};
pub use serve::Serving;
pub use submitter::Submitter;
pub use whole::{ConvertOptions, check, close, commit, convert, new_snapshot};

#[cfg(test)]
mod tests;
