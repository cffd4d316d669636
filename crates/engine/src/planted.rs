//! Mistakes that can be planted in the engine, one at a time, to prove that the simulator finds them.
//!
//! Without the feature `planted` nothing can be planted: [`is`] is `false` for the compiler, and no
//! trace of a hook is left. The hooks are one condition each, where the real mistake would be made.

macro_rules! mistakes {
    ($($(#[doc = $what:literal])+ $name:ident,)+) => {
        /// A classic mistake.
        // Without the feature, hooks name what nothing constructs or lists.
        #[cfg_attr(not(feature = "planted"), allow(dead_code))]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Mistake {
            $($(#[doc = $what])+ $name,)+
        }

        #[cfg(feature = "planted")]
        impl Mistake {
            /// All of them.
            pub const ALL: &[Mistake] = &[$(Mistake::$name,)+];

            /// What it does wrong.
            pub fn describe(self) -> &'static str {
                match self {
                    $(Mistake::$name => concat!($($what),+).trim_ascii(),)+
                }
            }
        }
    };
}

mistakes! {
    /// A write publishes its mapping when it is admitted, before its data is written.
    MappingBeforeData,
    /// Counts and new tables are not flushed before the entries that need them are written.
    NoBarrierBeforeEntries,
    /// The entries that clear references are not flushed before counts go down and space is reused.
    ReuseBeforeClearingDurable,
    /// References dropped after the cut are given up with those that the cut cleared.
    QuarantineOfNextCut,
    /// What the cut clears loses its count before the clearing is written.
    QuarantineOpenedAtCut,
    /// Space is reused while requests that saw the old mapping are under way.
    EpochIgnored,
    /// Reads enter no epoch.
    ReadWithoutEpoch,
    /// Clusters are free before the hole in them is punched.
    PunchAfterReuse,
    /// A freed cluster counts as zeroes though no hole was punched.
    FreedCountsAsZeroes,
    /// Free clusters that are found in the file count as holes, whatever the host has there.
    FoundCountsAsZeroes,
    /// Head and tail are both filled with what belongs into the head.
    CowReadsWrongHalf,
    /// What lies before the guest's bytes in a subcluster is not filled.
    HeadNotFilled,
    /// What lies behind the guest's bytes in a subcluster is not filled.
    TailNotFilled,
    /// A cluster that moves takes only the touched subclusters along.
    SharedClusterMovesTouchedOnly,
    /// A cluster without COPIED is written in place.
    SharedClusterInPlace,
    /// A table that a snapshot shares is changed in place.
    SharedTableInPlace,
    /// A lease that ends wakes nobody.
    LostWakeupOfLease,
    /// A slot that becomes free wakes nobody.
    LostWakeupOfSlot,
    /// A count at its maximum wraps to 0, and compressed clusters do not look at the maximum.
    RefcountWraps,
    /// A slice is evicted while it is being written, and read again as it was.
    EvictedWhileWritten,
    /// A dirty slice is evicted.
    EvictedWhileDirty,
    /// A subcluster that is written keeps its zero bit.
    ZeroBitLeftSet,
    /// Autoclear bits of what is not maintained stay set.
    AutoclearLeftSet,
    /// A barrier flushes the image file only.
    DataFileNotFlushed,
    /// A lease ends before the data is written.
    LeaseReleasedEarly,
    /// Shrinking gives the space back before the size changes.
    ShrinkFreesFirst,
    /// The cluster of a new L2 table stays free.
    LiveTableHandedOut,
    /// The first member of joint space that completes publishes what others have yet to write.
    JoinerPublishesOthers,
    /// A write that failed publishes its mapping.
    FailedWritePublishes,
    /// L1 refers to a new table before the table is durable.
    L1BeforeTable,
    /// A new L2 table on used space is not zeroed.
    NewTableNotZeroed,
    /// The header refers to a new refcount table before the table is durable.
    RefcountTableBeforeDurable,
    /// The refcount table refers to new blocks before they are durable.
    RefcountBlockBeforeDurable,
    /// A flush that failed leaves no latch.
    NoLatchAfterFailedFlush,
    /// A failed write leaves freshness as it was.
    FreshAfterFailedWrite,
    /// A failed write, and zeroes, leave the freshness of joint space as it was.
    FreshAfterZeroes,
    /// What was written in joint space is still fresh when its members have left.
    FreshAfterAttempt,
    /// A host cluster of compressed clusters is free while one of them is left.
    CompressedFreedEarly,
    /// A durable write in place does not look at whether its mapping is durable.
    FuaBeforeMapping,
    /// A flush is satisfied by a cycle that was cut before it arrived.
    FlushJoinsEarlierCut,
    /// A cluster that nobody published is not given back.
    ForfeitedLost,
    /// Growing the disk shows what the last cluster held beyond the old end.
    GrowShowsStale,
    /// The first write of a session builds on what a dead process left unflushed.
    NoFlushBeforeFirstWrite,
    /// An error of writes that went down as one is blamed on the first of them.
    JoinedErrorOnFirstStep,
    /// Slices of a cut that failed count as written.
    FailedCutStaysClean,
    /// The first flush of a session does not cover what a dead process left unflushed.
    FirstFlushSkipped,
    /// The old L1 table loses its counts before the header refers to the new one.
    OldL1FreedEarly,
    /// Shrinking keeps what is mapped beyond the new end.
    ShrinkKeepsEntries,
    /// Counts that could not be written count as written.
    CountsForgottenAfterFailure,
    /// L1 is written as it is in memory, with entries of tables that no barrier covers.
    L1FromMemory,
    /// A cycle that failed satisfies the flushes that waited for it.
    FailedCycleIsDurable,
    /// A write publishes the subcluster behind those that it filled, too.
    NeighbourPublished,
    /// A subcluster that becomes zeroes stays allocated.
    AllocatedAndZero,
    /// A shared cluster of which a part becomes zeroes counts as our own.
    ZeroedSharedBecomesOwn,
    /// A fill leases the guest's bytes only.
    LeaseWithoutFills,
    /// Entries go into the old refcount table after it has moved.
    OldRefcountTableUsed,
    /// Discards and zeroes do not wait for writes under way.
    DiscardIgnoresLeases,
    /// A durable write that changes the mapping does not wait for it.
    FuaWithoutCycle,
    /// The last cluster of a shorter backing file counts as zeroes.
    BackingTailForgotten,
    /// A compressed cluster claims a sector more than it has.
    CompressedSectorTooMany,
    /// A compressed cluster claims a sector less than it has.
    CompressedSectorTooFew,
    /// The header has the new size before L1 reaches so far.
    SizeBeforeL1,
    /// Growing shows what a shrinking that was cut short left mapped.
    GrowShowsOldEntries,
    /// The cluster of a copied L2 table stays free.
    CopiedTableHandedOut,
    /// A shared table loses its reference before L1 refers to the copy.
    SharedTableFreedEarly,
    /// A write of several clusters leases the first only.
    SecondLeaseLost,
    /// Zeroing a part of a cluster does not look at the layers below.
    ZeroesForgetBelow,
    /// A discard takes the rest of its last cluster along.
    DiscardRoundsUp,
    /// Zeroing takes the rest of its last subcluster along.
    ZeroesRoundUp,
    /// A cluster that loses one of two references loses both.
    LoweredTwice,
    /// Closing cuts one cluster too many off the file.
    TrimCutsUsed,
    /// A write does not say that there is something to be flushed.
    WriteNotToBeFlushed,
    /// What a failed cut would have freed is forgotten.
    FreedForgottenAfterFailure,
    /// Zeroes and discards do not reach a raw data file.
    RawDataNotZeroed,
    /// New refcount structures do not count themselves.
    BlocksNotCounted,
    /// A durable write that failed leaves no latch.
    NoLatchAfterDurableWrite,
    /// A write of a root that failed leaves no latch.
    NoLatchAfterFailedRoot,
    /// A flush that fails for want of space is taken for one that may be retried.
    FlushWithoutSpaceRetried,
    /// A flush does not ask the durable writes beside it what they have heard.
    DurableWritesUnheard,
    /// A durable write does not ask those beside it what they have heard.
    DurableWriteHearsNobody,
    /// Writes that share a block of the host do not wait for each other.
    BlocksNotSerialised,
    /// A compressed cluster that could not be written keeps its reference.
    FailedCompressedLost,
    /// Changed counts are dropped from their cache.
    DirtyCountEvicted,
    /// Compressed clusters go on into a cluster that was freed.
    CompressedTailKept,
    /// A flush does not wait until the entries are durable.
    NoBarrierAfterEntries,
    /// A repair clears the dirty bit first.
    DirtyClearedEarly,
    /// A repair clears the dirty bit before its last changes are durable.
    RepairEndsUnflushed,
    /// What a failed write has left in a subcluster that others fill is not erased.
    FailedNotErased,
    /// A write into a subcluster leaves the hole that is wanted there.
    StaleHole,
    /// A write does not wait for the hole that is being punched where it goes.
    HoleNotAwaited,
    /// An entry whose bytes were copied goes down beside them.
    CopiedBytesNotPromised,
    /// Space that reads as zeroes counts as if it did so durably.
    UnsettledSpaceIsFresh,
    /// A count that was raised ahead is raised again.
    CountedAheadTwice,
    /// Counts that were raised ahead stay so when the image is closed.
    CountedAheadLeft,
    /// Tables that L1 may refer to after a failed cycle are still taken for new.
    ReachedTablesStayNew,
    /// A discard of a part of a subcluster leaves a hole in a cluster that others refer to.
    HoleInSharedCluster,
    /// The hole of a discard begins with the block that the discard begins in.
    HoleRoundsUp,
    /// A hole in a subcluster that stays mapped is punched without a lease and an epoch.
    HoleHoldsNothing,
    /// A rebase changes the header before what it has written is durable.
    HeaderBeforeMapping,
    /// A commit empties the image before the base is flushed.
    CommitNotFlushed,
    /// An image that becomes empty gives its space back before the header refers to its empty table.
    EmptiedBeforeHeader,
    /// The header refers to a snapshot before its counts and tables are durable.
    SnapshotUnprepared,
    /// Slices in memory keep their COPIED bits when a snapshot is made.
    SnapshotKeepsSlices,
    /// A snapshot is made or deleted without the dirty bit.
    SnapshotNotMarked,
    /// What a snapshot replaces is given up before the header refers to the snapshot's tables.
    AppliedFreesFirst,
    /// The counts of what is only compressed are not raised for a snapshot.
    SnapshotForgetsCompressed,
    /// Zero clusters become unallocated ones for version 2 although a layer below has data there.
    UnflaggedShowsBelow,
    /// The area of the VM state begins where the last table of the disk does.
    VmStateInTheDisk,
    /// The VM state stays when a change of the size moves where it begins.
    VmStateMoves,
    /// The bitmaps that writes will change are not marked on disk.
    BitmapNotMarked,
    /// The marks of bitmaps are not flushed before the first write.
    BitmapMarkUnflushed,
    /// A resize marks only the bitmaps that follow writes.
    ResizedBitmapUnmarked,
    /// Zeroes and discards set no bits.
    DiscardNotDirty,
    /// What is copied from below goes over what the guest has written since it was read.
    CopyDoesNotLookAgain,
    /// Compressed writes set no bits.
    CompressedNotDirty,
    /// A write sets its bits when it has succeeded.
    FailedWriteNotDirty,
    /// What a disk gains counts as unchanged.
    GrownNotDirty,
    /// The header refers to bitmaps before they are durable.
    BitmapUnprepared,
    /// The old bits lose their counts before the header refers to the new ones.
    BitmapSpaceFreedEarly,
}

/// Whether this mistake is planted: never.
#[cfg(not(feature = "planted"))]
pub(crate) const fn is(_: Mistake) -> bool {
    false
}

#[cfg(feature = "planted")]
pub use on::{is, plant};

#[cfg(feature = "planted")]
mod on {
    use std::cell::Cell;

    use super::Mistake;

    thread_local! {
        static PLANTED: Cell<Option<Mistake>> = const { Cell::new(None) };
    }

    /// Plants a mistake, or none, for the images that this thread drives.
    pub fn plant(mistake: Option<Mistake>) {
        PLANTED.set(mistake);
    }

    /// Whether this mistake is planted.
    pub fn is(mistake: Mistake) -> bool {
        PLANTED.get() == Some(mistake)
    }
}
