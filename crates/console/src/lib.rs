//! Shared parts of the project's command-line programs: errors with their exit codes, standard
//! output and its failures, progress bars, signals that end a process, sizes and dates, lists of
//! options, and a queue on which a verb runs.
//!
//! Used by the command, its benchmarks and its viewers. Of the engine it knows only the errors, the
//! jobs and the names of the I/O drivers; may not know: images, formats, NBD, any verb or its
//! options.

pub mod error;
pub mod interrupt;
pub mod options;
pub mod output;
mod program;
pub mod progress;
pub mod queue;
mod standard;
pub mod time;

pub use cowslip_block::size;
