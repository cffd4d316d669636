//! The adversary: a simulated disk, concurrent workloads from one seed, crashes and faults, and a
//! model of what a guest may read.
//!
//! Uses the engine's public API only. Everything that happens in a run follows from its seed.

mod anatomy;
pub mod barriers;
pub mod bitmaps;
pub mod chains;
pub mod cipher;
mod compactions;
pub mod config;
pub mod coverage;
pub mod directed;
pub mod disk;
mod drive;
pub mod executor;
pub mod goals;
pub mod graph;
pub mod inspect;
mod lists;
mod look;
pub mod matrix;
pub mod mixture;
pub mod model;
mod names;
pub mod panics;
pub mod perform;
mod places;
pub mod planted;
mod possible;
mod prepare;
pub mod profile;
pub mod raw;
mod recovery;
pub mod remembered;
pub mod rng;
pub mod run;
pub mod second_reader;
pub mod seeds;
mod session;
mod shapes;
pub mod shrink;
pub mod snapshots;
pub mod soak;
pub mod stories;
pub mod subject;
pub mod summary;
pub mod totals;
pub mod trace;
pub mod workload;
