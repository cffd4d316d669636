//! Points in the work on an image, told to a file that wants to know: [`Observer`].
//!
//! They are QEMU's `blkdebug` events, by whose names scripts inject faults and stop requests. The
//! engine tells them where it is about to do what they name, and decides nothing by them. A file
//! without an observer costs a look at a field that is empty.

use cowslip_queue::Pending;

macro_rules! events {
    ($($(#[$doc:meta])* $event:ident = $name:literal,)*) => {
        /// What is about to be done; a point that the engine has not says so.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Event {
            $($(#[$doc])* $event,)*
        }

        impl Event {
            /// All of them, in QEMU's order.
            pub const ALL: &'static [Event] = &[$(Event::$event),*];

            /// Its name in QEMU.
            pub fn name(self) -> &'static str {
                match self {
                    $(Event::$event => $name,)*
                }
            }
        }
    };
}

events! {
    /// Entries of the L1 table are written.
    L1Update = "l1_update",
    /// A longer L1 table gets its clusters.
    L1GrowAllocTable = "l1_grow_alloc_table",
    /// It is written.
    L1GrowWriteTable = "l1_grow_write_table",
    /// The header refers to it.
    L1GrowActivateTable = "l1_grow_activate_table",
    /// A slice of an L2 table is read.
    L2Load = "l2_load",
    /// Slices of L2 tables are written.
    L2Update = "l2_update",
    /// An entry becomes that of a compressed cluster; nothing can wait there.
    L2UpdateCompressed = "l2_update_compressed",
    /// An L2 table that is shared is read to be copied: not told, it is read as others are.
    L2AllocCowRead = "l2_alloc_cow_read",
    /// A new L2 table is written.
    L2AllocWrite = "l2_alloc_write",
    /// Guest data is read.
    ReadAio = "read_aio",
    /// It is read from the backing file.
    ReadBackingAio = "read_backing_aio",
    /// A compressed cluster is read.
    ReadCompressed = "read_compressed",
    /// Guest data is written.
    WriteAio = "write_aio",
    /// A compressed cluster is written.
    WriteCompressed = "write_compressed",
    /// A machine's state is read.
    VmstateLoad = "vmstate_load",
    /// It is written.
    VmstateSave = "vmstate_save",
    /// What surrounds guest data in a new cluster is read.
    CowRead = "cow_read",
    /// It is written by itself: not told, since it goes down with the data.
    CowWrite = "cow_write",
    /// The refcount table is read.
    ReftableLoad = "reftable_load",
    /// A longer refcount table is made.
    ReftableGrow = "reftable_grow",
    /// Not told, as by QEMU.
    ReftableUpdate = "reftable_update",
    /// A slice of a refcount block is read.
    RefblockLoad = "refblock_load",
    /// Not told, as by QEMU.
    RefblockUpdate = "refblock_update",
    /// Slices of refcount blocks are written.
    RefblockUpdatePart = "refblock_update_part",
    /// The refcount blocks of clusters that were taken are looked for.
    RefblockAlloc = "refblock_alloc",
    /// The refcount table refers to it.
    RefblockAllocHookup = "refblock_alloc_hookup",
    /// A new refcount block is written.
    RefblockAllocWrite = "refblock_alloc_write",
    /// New refcount blocks are written beside a longer table.
    RefblockAllocWriteBlocks = "refblock_alloc_write_blocks",
    /// The longer table is written.
    RefblockAllocWriteTable = "refblock_alloc_write_table",
    /// The header refers to it.
    RefblockAllocSwitchTable = "refblock_alloc_switch_table",
    /// Clusters are taken; nothing can wait there.
    ClusterAlloc = "cluster_alloc",
    /// Space for a compressed cluster is taken.
    ClusterAllocBytes = "cluster_alloc_bytes",
    /// Clusters lose their counts.
    ClusterFree = "cluster_free",
    /// What was written is handed to the system: a flush begins.
    FlushToOs = "flush_to_os",
    /// It is made durable.
    FlushToDisk = "flush_to_disk",
    /// The block at the beginning of a finer write is read.
    PwritevRmwHead = "pwritev_rmw_head",
    /// It was read.
    PwritevRmwAfterHead = "pwritev_rmw_after_head",
    /// The block at its end is read.
    PwritevRmwTail = "pwritev_rmw_tail",
    /// It was read.
    PwritevRmwAfterTail = "pwritev_rmw_after_tail",
    /// A write goes to the file.
    Pwritev = "pwritev",
    /// A write of zeroes goes to the file.
    PwritevZero = "pwritev_zero",
    /// It has ended.
    PwritevDone = "pwritev_done",
    /// An image gives up all that it holds.
    EmptyImagePrepare = "empty_image_prepare",
    /// The unused end of an L1 table is cleared; not told, since nothing is cleared there.
    L1ShrinkWriteTable = "l1_shrink_write_table",
    /// The L2 tables that it referred to are freed; not told.
    L1ShrinkFreeL2Clusters = "l1_shrink_free_l2_clusters",
    /// What was read from below is written, so that it is there from now on; not told.
    CorWrite = "cor_write",
    /// The space of new clusters is made zero by one call.
    ClusterAllocSpace = "cluster_alloc_space",
    /// A file was opened.
    None = "none",
}

impl Event {
    /// The event of this name.
    pub fn from_name(name: &str) -> Option<Event> {
        let named = Event::ALL.iter().find(|event| event.name() == name);
        named.copied()
    }
}

/// Somebody who wants to know what an image's work on a file has reached.
pub trait Observer: Send + Sync + std::fmt::Debug {
    /// The work has reached `event`. If there is something to wait for, it goes on afterwards.
    fn reached(&self, event: Event) -> Option<Pending<()>>;

    /// The work passes `event` at a point where it cannot wait.
    fn passed(&self, event: Event);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_lead_back() {
        for &event in Event::ALL {
            assert_eq!(Event::from_name(event.name()), Some(event));
        }
        assert_eq!(Event::from_name("x"), None);
    }
}
