//! The mistakes that the engine of this build can make: none. `cargo xtask mistakes` plants them in
//! a copy of the sources, where this file has those of that engine.

/// Each mistake's name, the error that the engine makes, and whether few seeds notice it.
pub const KNOWN: &[(&str, &str, bool)] = &[];

/// Plants the mistake of this name, or none, for the images that this thread drives.
pub fn plant(_: Option<&str>) {}
