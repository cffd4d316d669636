//! Figures of runs about graphs.

/// Figures of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Requests that were answered.
    pub requests: u64,
    /// Operations of the disk.
    pub operations: u64,
    /// Power failures, dead processes, and looks.
    pub crashes: u64,
    /// Sessions that were closed in order.
    pub closes: u64,
    /// Operations that failed as asked.
    pub faults: u64,
    /// Changes of the graph that were made.
    pub changes: u64,
}
