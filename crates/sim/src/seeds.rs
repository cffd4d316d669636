//! Ranges of seeds, by what the runs of each are about; each ends where the next begins. Those
//! before the first are drawn.

/// First seed of directed runs.
pub const DIRECTED: u64 = 1 << 40;
/// First seed of stories.
pub const STORIES: u64 = 1 << 41;
/// First seed of the stories that came later: the seeds before stay what they are.
pub const LATER_STORIES: u64 = 3 << 40;
/// First seed of runs about chains.
pub const CHAINS: u64 = 1 << 42;
/// First seed of runs about disks that are no images of qcow2.
pub const RAW: u64 = 5 << 40;
/// First seed of runs about graphs.
pub const GRAPHS: u64 = 6 << 40;
/// First seed of runs about compactions.
pub const COMPACTIONS: u64 = 7 << 40;
