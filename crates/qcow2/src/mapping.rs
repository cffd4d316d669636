//! Where the guest's data is: L2 tables in memory, and what requests hold of them.

pub(super) mod direct;
pub mod inflight;
pub(super) mod lookup;
pub(super) mod state;
pub(super) mod tables;
pub(super) mod visits;
