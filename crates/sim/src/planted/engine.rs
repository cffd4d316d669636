//! The mistakes that the engine of this build can make: none. `cargo xtask mistakes` plants them in
//! a copy of the sources, where this file has those of that engine.

/// What each is called, what the engine does wrong, and whether few seeds notice it.
pub const KNOWN: &[(&str, &str, bool)] = &[];

/// Plants the mistake of this name, or none, for the images that this thread drives.
pub fn plant(_: Option<&str>) {}
