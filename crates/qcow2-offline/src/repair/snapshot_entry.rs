//! An entry of the snapshot table as a repair reads it.

use crate::entry::snapshot::{Extra, Fixed};
use crate::geometry::Geometry;

/// An entry of the snapshot table.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub index: u32,
    pub at: u64,
    pub(super) fixed: Fixed,
    pub(super) extra: Vec<u8>,
    pub(super) id: Vec<u8>,
    pub(super) name: Vec<u8>,
}

impl Snapshot {
    pub(super) fn vm_state_bytes(&self) -> u64 {
        let large = Extra::decode(&self.extra).vm_state_bytes;
        large.unwrap_or_else(|| self.fixed.vm_state_bytes.into())
    }

    /// Returns the L1 entries that the snapshot's disk and VM state need, as far as the entry
    /// states them.
    pub(super) fn l1_entries(&self, disk_bytes: u64, geometry: Geometry) -> u64 {
        let size = Extra::decode(&self.extra).disk_bytes;
        let size = size.unwrap_or(disk_bytes);
        let bytes = size.saturating_add(self.vm_state_bytes());
        geometry.l1_entries_for(bytes.min(u64::MAX - geometry.cluster_bytes()))
    }

    /// Encodes the entry, padded to eight bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let extra_bytes = self.extra.len() as u32;
        let fixed = Fixed {
            extra_bytes,
            ..self.fixed
        };
        let mut out = fixed.encode().to_vec();
        out.extend_from_slice(&self.extra);
        out.extend_from_slice(&self.id);
        out.extend_from_slice(&self.name);
        out.resize(out.len().next_multiple_of(8), 0);
        out
    }
}
