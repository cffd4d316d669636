//! The adversary: a simulated disk, concurrent workloads from one seed, crashes and faults, and a
//! model of what a guest may read.
//!
//! Uses the engine's public API only. Everything that happens in a run follows from its seed.

mod anatomy;
pub mod config;
pub mod coverage;
pub mod disk;
mod drive;
pub mod executor;
pub mod inspect;
pub mod model;
pub mod panics;
mod prepare;
mod recovery;
pub mod rng;
pub mod run;
mod session;
pub mod shrink;
pub mod subject;
pub mod summary;
pub mod trace;
pub mod workload;
