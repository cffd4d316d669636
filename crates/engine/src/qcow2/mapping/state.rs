//! The mapping of an open image, as far as it is in memory.

use std::collections::{BTreeMap, BTreeSet};

use super::inflight::{Epochs, Leases, PendingClusters};
use super::tables::Tables;
use crate::sync::Waiters;

/// Where the guest's data is, and what requests hold of that.
#[derive(Debug)]
pub(in crate::qcow2) struct Mapping {
    pub(in crate::qcow2) tables: Tables,
    pub(in crate::qcow2) leases: Leases,
    pub(in crate::qcow2) joint: PendingClusters,
    pub(in crate::qcow2) epochs: Epochs,
    /// L1 entries whose tables overlap other metadata or are beyond the end: never written through.
    pub(in crate::qcow2) bad_tables: BTreeSet<u64>,
    /// Tables that are being copied because a snapshot shares them.
    pub(in crate::qcow2) copying: BTreeMap<u64, Waiters>,
}

impl Mapping {
    /// The mapping of an image that no request uses yet.
    pub fn new(tables: Tables) -> Mapping {
        Mapping {
            tables,
            leases: Leases::default(),
            joint: PendingClusters::default(),
            epochs: Epochs::default(),
            bad_tables: BTreeSet::new(),
            copying: BTreeMap::new(),
        }
    }
}
