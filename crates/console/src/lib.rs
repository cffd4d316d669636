//! What the programs of this project have in common on a terminal: failures in words and their exit
//! codes, standard output and its failures, progress, signals that end a process, sizes and dates,
//! lists of options, a queue for the work of a verb.
//!
//! A leaf of the command, its benches and its viewers. Knows the engine by its errors, its jobs and
//! the names of its drivers alone; may not know: images, formats, NBD, any verb or its options.

pub mod error;
pub mod interrupt;
pub mod options;
pub mod output;
mod program;
pub mod progress;
pub mod queue;
pub mod time;

pub use cowslip_block::size;
