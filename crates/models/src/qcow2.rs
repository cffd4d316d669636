//! The leases, joint space and epochs of the qcow2 engine, with what they are told in.

#[path = "../../engine/src/qcow2/geometry.rs"]
pub mod geometry;
#[path = "../../engine/src/qcow2/mapping/inflight.rs"]
pub mod inflight;

/// What leases know of a plan.
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
