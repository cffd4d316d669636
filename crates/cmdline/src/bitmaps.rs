//! Names of persistent bitmaps that have a meaning.

/// The beginning of the names of bitmaps that are checkpoints.
pub const CHECKPOINT: &str = "checkpoint-";

/// The beginning of the names of bitmaps that have what has changed since a published version.
pub const PUBLISHED: &str = "published-";
