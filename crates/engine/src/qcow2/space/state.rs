//! The clusters of the image file that an open image knows of.

use std::collections::{BTreeMap, BTreeSet};

use super::alloc::{FreeSet, Fresh, Protected};
use super::punches::Punches;
use crate::qcow2::geometry::HostCluster;
use crate::qcow2::plan::Freed;

/// Clusters of the image file: which are free, which may become so, and which hold metadata.
#[derive(Debug)]
pub(in crate::qcow2) struct HostSpace {
    pub(in crate::qcow2) free: FreeSet,
    pub(in crate::qcow2) fresh: Fresh,
    pub(in crate::qcow2) protected: Protected,
    /// Free clusters that have their space on the host, for new tables.
    pub(in crate::qcow2) table_space: FreeSet,
    /// The first cluster beyond the end of the file that L1 refers to: the file does not grow
    /// there.
    pub(in crate::qcow2) table_beyond: Option<HostCluster>,
    /// References added since the last cut.
    pub(in crate::qcow2) raised: BTreeMap<HostCluster, u64>,
    /// Free clusters whose count is 1 already, or will be with the next barrier.
    pub(in crate::qcow2) counted_ahead: BTreeSet<HostCluster>,
    /// References dropped since the last cut, with the epoch in which they were.
    pub(in crate::qcow2) quarantine: Vec<(Freed, u64)>,
    /// References whose clearing is durable, waiting for their epoch to leave.
    pub(in crate::qcow2) cleared: Vec<(Freed, u64)>,
    /// Subclusters whose space is wanted back.
    pub(in crate::qcow2) punches: Punches,
    /// Clusters of the file below which space is claimed: the file is that long.
    pub(in crate::qcow2) claimed: u64,
    /// Clusters of the file when it was opened: only clusters above were grown by this session.
    pub(in crate::qcow2) claimed_at_open: u64,
    /// Free clusters below which the file is grown ahead of need.
    pub(in crate::qcow2) low_water: u64,
}

impl HostSpace {
    /// The space of an image whose file has not been looked at yet.
    pub fn new(fresh: Fresh) -> HostSpace {
        HostSpace {
            free: FreeSet::default(),
            fresh,
            protected: Protected::default(),
            table_space: FreeSet::default(),
            table_beyond: None,
            raised: BTreeMap::new(),
            counted_ahead: BTreeSet::new(),
            quarantine: Vec::new(),
            cleared: Vec::new(),
            punches: Punches::default(),
            claimed: 0,
            claimed_at_open: 0,
            low_water: 0,
        }
    }
}
