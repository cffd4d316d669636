//! The mapping of an open image, as far as it is in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cowslip_queue::Pending;

use super::inflight::{Epochs, JointClusters, LeaseKind, LeaseRequest, Leases, Ticket};
use super::tables::Tables;
use super::visits::Visits;
use crate::geometry::HostOffset;
use crate::sync::Waiters;

/// Where the guest's data is, and what requests hold of that.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) tables: Tables,
    pub(crate) leases: Leases,
    pub(crate) joint: JointClusters,
    pub(crate) epochs: Epochs,
    /// L1 entries whose tables overlap other metadata or are beyond the end: never written through.
    bad_tables: BTreeSet<u64>,
    /// Tables that are being copied because a snapshot shares them.
    copying: BTreeMap<u64, Waiters>,
}

impl Mapping {
    /// The mapping of an image that no request uses yet.
    pub fn new(tables: Tables, visits: Arc<Visits>) -> Mapping {
        Mapping {
            tables,
            leases: Leases::default(),
            joint: JointClusters::default(),
            epochs: Epochs::beside(visits),
            bad_tables: BTreeSet::new(),
            copying: BTreeMap::new(),
        }
    }

    /// The first of `wants` that another request is in the way of, by a lease, a place in line
    /// before `place`, or a write in place that takes no lock. No such write begins any more in
    /// what is wanted exclusively.
    pub fn obstacle<'a>(
        &self,
        slice: u64,
        wants: &'a [LeaseRequest],
        place: Option<Ticket>,
    ) -> Option<&'a LeaseRequest> {
        let obstacle = self.leases.obstacle(slice, wants, place);
        obstacle.or_else(|| {
            let mut alone = wants
                .iter()
                .filter(|want| want.kind == LeaseKind::Exclusive);
            alone.find(|want| !self.tables.direct().close(&want.range))
        })
    }

    /// The table at this L1 index is bad: it is never written through.
    pub fn refuse_table(&mut self, l1_index: u64) {
        self.tables.direct().forget_all();
        self.bad_tables.insert(l1_index);
    }

    /// Returns whether the table at this L1 index is bad.
    pub fn is_bad_table(&self, l1_index: u64) -> bool {
        self.bad_tables.contains(&l1_index)
    }

    /// Returns whether there are bad tables.
    pub fn has_bad_tables(&self) -> bool {
        !self.bad_tables.is_empty()
    }

    /// No table is known to be bad any more.
    pub fn forget_bad_tables(&mut self) {
        self.bad_tables.clear();
    }

    /// Returns where the L2 tables are that may be read: those that are not bad.
    pub fn sound_tables(&self) -> Vec<HostOffset> {
        let indexes = 0..self.tables.l1().len() as u64;
        let sound = indexes.filter(|index| !self.is_bad_table(*index));
        let tables = sound.filter_map(|index| self.tables.table(index).ok().flatten());
        tables.map(|table| table.offset).collect()
    }

    /// Returns where the table at an L1 index is, if a snapshot shares it and it is not bad.
    pub fn shared_table(&self, l1_index: u64) -> Option<HostOffset> {
        let table = self.tables.table(l1_index).ok().flatten()?;
        let is_shared = !table.copied && !self.is_bad_table(l1_index);
        is_shared.then_some(table.offset)
    }

    /// Returns where the table at an L1 index is that a request has to copy before it changes it:
    /// a snapshot shares it, and no other request copies it.
    pub fn table_to_copy(&self, l1_index: u64) -> Option<HostOffset> {
        let table = self.tables.table(l1_index).ok().flatten()?;
        let is_left = !table.copied && !self.copying.contains_key(&l1_index);
        is_left.then_some(table.offset)
    }

    /// A request begins to copy a table.
    pub fn begin_copy(&mut self, l1_index: u64) {
        let others = self.copying.insert(l1_index, Waiters::default());
        debug_assert!(others.is_none(), "a table is copied once");
    }

    /// Returns the wait for the copy of a table, if it is being copied.
    pub fn copy_under_way(&mut self, l1_index: u64) -> Option<Pending<()>> {
        self.copying.get_mut(&l1_index).map(Waiters::wait)
    }

    /// A copy has ended, well or not: requests that wait for it go on.
    pub fn end_copy(&mut self, l1_index: u64) {
        // Dropping the waiters wakes them.
        self.copying.remove(&l1_index);
    }
}
