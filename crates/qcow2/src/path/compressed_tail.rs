//! The place that the next compressed cluster is packed into.

use crate::geometry::{Geometry, HostCluster, HostOffset};

/// Where the next compressed cluster begins.
#[derive(Clone, Copy, Debug)]
pub struct Tail {
    /// The byte of the file.
    pub next: u64,
    /// References to the cluster that `next` lies in.
    pub references: u64,
}

impl Tail {
    /// The host cluster that it is in.
    pub fn cluster(&self, geometry: &Geometry) -> HostCluster {
        geometry.host_cluster(HostOffset(self.next))
    }
}
