//! The leases, joint clusters and epochs of the qcow2 engine, and requests beside its lock, with
//! the types of their parameters.

#[path = "../../qcow2/src/mapping/direct.rs"]
pub mod direct;
#[path = "../../qcow2-format/src/geometry.rs"]
pub mod geometry;
#[path = "../../qcow2/src/mapping/inflight.rs"]
pub mod inflight;
#[path = "../../qcow2/src/mapping/visits.rs"]
pub mod visits;

/// The part of a plan that leases use.
pub mod plan {
    use super::geometry::{HostOffset, SubclusterMask};

    /// As in `plan.rs` of the engine.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Space {
        /// Where the cluster is.
        pub host: HostOffset,
        /// Its subclusters that read as zeroes.
        pub fresh: SubclusterMask,
    }
}
