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
