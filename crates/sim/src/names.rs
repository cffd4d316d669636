//! Names of the files of a run.

/// The image under test.
pub const TOP: &str = "top.img";
/// Its data file.
pub const DATA: &str = "top.data";
/// The lowest image of the chain below.
pub const BOTTOM: &str = "below0.img";
