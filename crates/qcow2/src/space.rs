//! Clusters of the host: which are free, how the file grows, and how space is released.

pub(super) mod ahead;
pub(super) mod alloc;
pub(super) mod growth;
pub(super) mod punch;
pub(super) mod punches;
pub(super) mod quarantine;
pub(super) mod raised;
pub(super) mod refcount;
pub(super) mod room;
pub(super) mod sparse;
pub(super) mod state;
