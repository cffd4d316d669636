//! [`Event`]s of the work on an image, reported to a file's [`Observer`].
//!
//! They are QEMU's `blkdebug` events; scripts use their names to inject faults and to stop
//! requests. The engine reports an event right before the action that it names, and makes no
//! decision by it. A file without an observer costs one test of an empty field.

use cowslip_queue::Pending;

macro_rules! events {
    ($($(#[$doc:meta])* $event:ident = $name:literal,)*) => {
        /// An action that is about to start. Events that the engine never reports are marked as
        /// such.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Event {
            $($(#[$doc])* $event,)*
        }

        impl Event {
            /// All of them, in QEMU's order.
            pub const ALL: &'static [Event] = &[$(Event::$event),*];

            /// The name of the event in QEMU.
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
    /// Clusters are allocated for a longer L1 table.
    L1GrowAllocTable = "l1_grow_alloc_table",
    /// The longer L1 table is written.
    L1GrowWriteTable = "l1_grow_write_table",
    /// The header is pointed to the longer L1 table.
    L1GrowActivateTable = "l1_grow_activate_table",
    /// A slice of an L2 table is read.
    L2Load = "l2_load",
    /// Slices of L2 tables are written.
    L2Update = "l2_update",
    /// An L2 entry is pointed to a compressed cluster; the work cannot wait here.
    L2UpdateCompressed = "l2_update_compressed",
    /// A shared L2 table is read to be copied; never reported, the read counts as `L2Load`.
    L2AllocCowRead = "l2_alloc_cow_read",
    /// A new L2 table is written.
    L2AllocWrite = "l2_alloc_write",
    /// Guest data is read.
    ReadAio = "read_aio",
    /// Guest data is read from the backing file.
    ReadBackingAio = "read_backing_aio",
    /// A compressed cluster is read.
    ReadCompressed = "read_compressed",
    /// Guest data is written.
    WriteAio = "write_aio",
    /// A compressed cluster is written.
    WriteCompressed = "write_compressed",
    /// A VM state is read.
    VmstateLoad = "vmstate_load",
    /// A VM state is written.
    VmstateSave = "vmstate_save",
    /// The data around guest data in a new cluster is read for copy-on-write.
    CowRead = "cow_read",
    /// That data is written by itself; never reported, since it is written together with guest
    /// data.
    CowWrite = "cow_write",
    /// The refcount table is read.
    ReftableLoad = "reftable_load",
    /// A longer refcount table is created.
    ReftableGrow = "reftable_grow",
    /// Never reported, as in QEMU.
    ReftableUpdate = "reftable_update",
    /// A slice of a refcount block is read.
    RefblockLoad = "refblock_load",
    /// Never reported, as in QEMU.
    RefblockUpdate = "refblock_update",
    /// Slices of refcount blocks are written.
    RefblockUpdatePart = "refblock_update_part",
    /// The refcount blocks of allocated clusters are looked up.
    RefblockAlloc = "refblock_alloc",
    /// The refcount table is pointed to a new refcount block.
    RefblockAllocHookup = "refblock_alloc_hookup",
    /// A new refcount block is written.
    RefblockAllocWrite = "refblock_alloc_write",
    /// New refcount blocks are written together with a longer table.
    RefblockAllocWriteBlocks = "refblock_alloc_write_blocks",
    /// The longer refcount table is written.
    RefblockAllocWriteTable = "refblock_alloc_write_table",
    /// The header is pointed to the longer refcount table.
    RefblockAllocSwitchTable = "refblock_alloc_switch_table",
    /// Clusters are allocated; the work cannot wait here.
    ClusterAlloc = "cluster_alloc",
    /// Space for a compressed cluster is allocated.
    ClusterAllocBytes = "cluster_alloc_bytes",
    /// Refcounts of clusters are decreased.
    ClusterFree = "cluster_free",
    /// A flush begins: written data is passed to the system.
    FlushToOs = "flush_to_os",
    /// Written data is made durable.
    FlushToDisk = "flush_to_disk",
    /// The block at the beginning of an unaligned write is read.
    PwritevRmwHead = "pwritev_rmw_head",
    /// The block at the beginning has been read.
    PwritevRmwAfterHead = "pwritev_rmw_after_head",
    /// The block at the end of an unaligned write is read.
    PwritevRmwTail = "pwritev_rmw_tail",
    /// The block at the end has been read.
    PwritevRmwAfterTail = "pwritev_rmw_after_tail",
    /// The file is written.
    Pwritev = "pwritev",
    /// A range of the file is zeroed.
    PwritevZero = "pwritev_zero",
    /// A write to the file has ended.
    PwritevDone = "pwritev_done",
    /// An image is emptied.
    EmptyImagePrepare = "empty_image_prepare",
    /// The unused end of an L1 table is cleared; never reported, since it is not cleared.
    L1ShrinkWriteTable = "l1_shrink_write_table",
    /// The L2 tables of that end are freed; never reported.
    L1ShrinkFreeL2Clusters = "l1_shrink_free_l2_clusters",
    /// Data from the backing chain is stored by copy-on-read.
    CorWrite = "cor_write",
    /// The space of new clusters is zeroed by one call.
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

/// An observer of the work of an image on a file.
pub trait Observer: Send + Sync + std::fmt::Debug {
    /// The work has reached `event`. It waits for the returned future, if any, before it goes on.
    fn reached(&self, event: Event) -> Option<Pending<()>>;

    /// The work has reached `event` at a point where it cannot wait.
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
