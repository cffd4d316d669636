//! The direct map: where clusters are all of whose data is in the image, for requests that take no
//! lock. Each has one word, so it is read and changed as a whole.
//!
//! | bits of a word | meaning |
//! | --- | --- |
//! | 0-9 | writes in place that are under way in the cluster |
//! | 10 | it may be written in place: its count is 1, and no request has or wants it for itself |
//! | 11 | 0 |
//! | 12-31 | the upper bits of the cluster's number; the lower ones are the word's place |
//! | 32-63 | the host cluster's number and 1; 0: unknown |
//!
//! Holders of the metadata lock fill words in and take back what has changed; other requests only
//! count themselves in and out. A cluster that shares its place with another one waits until no
//! write is under way there, so a count is lost to nobody. What the map does not know is asked of
//! the tables; it forgets freely.
//!
//! *Reads.* A word is cleared before the entry that it stands for changes, and a read looks after
//! it has entered (`visits.rs`), so what it finds is not used for something else until it has left.
//!
//! *Writes in place* hold, as a count, what else is a shared lease (`inflight.rs`), of the whole
//! cluster. A request that wants an exclusive one closes the word (bit 10) and waits until the
//! count is 0; the last write to leave a closed word wakes it.

use std::ops::Range;
use std::sync::OnceLock;

use crate::geometry::{GuestCluster, HostCluster};
use crate::sync::{AtomicU64, Ordering};

const WRITES: u64 = (1 << 10) - 1;
const WRITABLE: u64 = 1 << 10;
const TAG_SHIFT: u32 = 12;
const TAG_BITS: u32 = 20;
const TAG: u64 = ((1 << TAG_BITS) - 1) << TAG_SHIFT;
const HOST_SHIFT: u32 = 32;

/// Whether requests may write a cluster in place without asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// They may read it.
    Read,
    /// They may write it, too.
    ReadWrite,
}

/// The direct map of an image.
#[derive(Debug)]
pub struct DirectMap {
    cluster_bits: u32,
    /// A power of two of words, made when the first is filled in.
    words: OnceLock<Box<[AtomicU64]>>,
}

impl DirectMap {
    /// A map that knows nothing.
    pub fn new(cluster_bits: u32) -> DirectMap {
        DirectMap {
            cluster_bits,
            words: OnceLock::new(),
        }
    }

    /// The word for a cluster, and the tag that it has if it is the cluster's.
    #[inline]
    fn word(&self, cluster: GuestCluster) -> Option<(&AtomicU64, u64)> {
        let words = self.words.get()?;
        let bits = words.len().trailing_zeros();
        let tag = cluster.0 >> bits;
        let at = cluster.0 as usize & (words.len() - 1);
        (tag >> TAG_BITS == 0).then(|| (&words[at], tag << TAG_SHIFT))
    }

    /// Returns where a cluster is, if the map knows.
    #[inline]
    pub fn find(&self, cluster: GuestCluster) -> Option<HostCluster> {
        let (word, tag) = self.word(cluster)?;
        host_of(word.load(Ordering::Acquire), tag)
    }

    /// Begins a write in place. Returns where the cluster is, if it may be written.
    #[inline]
    pub fn begin_write(&self, cluster: GuestCluster) -> Option<HostCluster> {
        let (word, tag) = self.word(cluster)?;
        let mut seen = word.load(Ordering::Relaxed);
        loop {
            let host = host_of(seen, tag)?;
            if seen & WRITABLE == 0 || seen & WRITES == WRITES {
                return None;
            }
            let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
            match word.compare_exchange_weak(seen, seen + 1, success, failure) {
                Ok(_) => return Some(host),
                Err(other) => seen = other,
            }
        }
    }

    /// Ends a write in place. Returns whether it was the last in a cluster that a request may be
    /// waiting for: then [`Leases::wake`](super::inflight::Leases::wake) has to follow.
    #[must_use]
    #[inline]
    pub fn end_write(&self, cluster: GuestCluster) -> bool {
        let (word, _) = self
            .word(cluster)
            .expect("a word that counts a write stays");
        let before = word.fetch_sub(1, Ordering::AcqRel);
        before & (WRITES | WRITABLE) == 1
    }

    /// Fills in a word, if no write of another cluster is under way there. `words` is the size of a
    /// map that has none. Returns whether it did. Under the metadata lock, as all below.
    pub fn fill_in(
        &self,
        (cluster, host): (GuestCluster, HostCluster),
        access: Access,
        words: usize,
    ) -> bool {
        self.words.get_or_init(|| {
            let words = 0..words.next_power_of_two();
            words.map(|_| AtomicU64::new(0)).collect()
        });
        let (Some((word, tag)), Some(host)) = (self.word(cluster), host.0.checked_add(1)) else {
            return false;
        };
        if host >> (64 - HOST_SHIFT) != 0 {
            return false;
        }
        let writable = match access {
            Access::Read => 0,
            Access::ReadWrite => WRITABLE,
        };
        let mut seen = word.load(Ordering::Relaxed);
        loop {
            if seen & WRITES != 0 && seen & TAG != tag {
                return false;
            }
            let filled = host << HOST_SHIFT | tag | writable | seen & WRITES;
            let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
            match word.compare_exchange_weak(seen, filled, success, failure) {
                Ok(_) => return true,
                Err(other) => seen = other,
            }
        }
    }

    /// Returns whether the map has a cluster at this place, for this access.
    pub fn has(&self, (cluster, host): (GuestCluster, HostCluster), access: Access) -> bool {
        self.word(cluster).is_some_and(|(word, tag)| {
            let seen = word.load(Ordering::Relaxed);
            let suits = access == Access::Read || seen & WRITABLE != 0;
            suits && host_of(seen, tag) == Some(host)
        })
    }

    /// The entry of a cluster is about to change.
    pub fn forget(&self, cluster: GuestCluster) {
        if let Some((word, tag)) = self.word(cluster)
            && word.load(Ordering::Relaxed) & TAG == tag
        {
            // The tag stays as long as writes are under way.
            word.fetch_and(TAG | WRITES, Ordering::AcqRel);
        }
    }

    /// Nothing is known any more.
    pub fn forget_all(&self) {
        for word in self.words.get().into_iter().flatten() {
            if word.load(Ordering::Relaxed) != 0 {
                word.fetch_and(TAG | WRITES, Ordering::AcqRel);
            }
        }
    }

    /// Lets no further write begin in the clusters of a range of guest bytes. Returns whether none
    /// is under way.
    pub fn close(&self, range: &Range<u64>) -> bool {
        let first = range.start >> self.cluster_bits;
        let last = range.end.saturating_sub(1) >> self.cluster_bits;
        let mut is_quiet = true;
        if self.words.get().is_none() {
            return is_quiet;
        }
        for cluster in first..=last {
            let Some((word, tag)) = self.word(GuestCluster(cluster)) else {
                continue;
            };
            // Writes begin only where the map lets them, so this load misses none.
            let seen = word.load(Ordering::Acquire);
            if seen & TAG == tag && seen & (WRITABLE | WRITES) != 0 {
                is_quiet &= word.fetch_and(!WRITABLE, Ordering::AcqRel) & WRITES == 0;
            }
        }
        is_quiet
    }

    /// The guest bytes of a cluster.
    pub fn range(&self, cluster: GuestCluster) -> Range<u64> {
        let start = cluster.0 << self.cluster_bits;
        start..start + (1 << self.cluster_bits)
    }
}

/// The host cluster that a word has for the cluster with this tag.
#[inline]
fn host_of(word: u64, tag: u64) -> Option<HostCluster> {
    let host = (word >> HOST_SHIFT).checked_sub(1)?;
    (word & TAG == tag).then_some(HostCluster(host))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: usize = 4;

    fn filled(cluster: u64, host: u64, access: Access) -> DirectMap {
        let map = DirectMap::new(16);
        let place = (GuestCluster(cluster), HostCluster(host));
        assert!(map.find(place.0).is_none() && map.close(&(0..1 << 24)));
        assert!(map.fill_in(place, access, WORDS) && map.has(place, access));
        map
    }

    #[test]
    fn a_cluster_is_found_and_its_neighbours_are_not() {
        let map = filled(6, 0, Access::Read);
        assert_eq!(map.find(GuestCluster(6)), Some(HostCluster(0)));
        // The same word, another word, and one without a word.
        for other in [2, 10, 5, 1 << 40] {
            assert!(map.find(GuestCluster(other)).is_none());
        }
        assert!(
            map.begin_write(GuestCluster(6)).is_none(),
            "it may be read only"
        );
        map.forget(GuestCluster(2));
        assert!(map.find(GuestCluster(6)).is_some());
        map.forget(GuestCluster(6));
        assert!(map.find(GuestCluster(6)).is_none());
    }

    #[test]
    fn what_does_not_fit_is_not_known() {
        let map = filled(0, 1, Access::Read);
        let beyond = GuestCluster((WORDS as u64) << TAG_BITS);
        assert!(!map.fill_in((beyond, HostCluster(1)), Access::Read, WORDS));
        let far = HostCluster(u64::from(u32::MAX));
        assert!(!map.fill_in((GuestCluster(1), far), Access::Read, WORDS));
        assert!(!map.fill_in(
            (GuestCluster(1), HostCluster(u64::MAX)),
            Access::Read,
            WORDS
        ));
        let last = HostCluster(u64::from(u32::MAX) - 1);
        assert!(map.fill_in((GuestCluster(1), last), Access::Read, WORDS));
        assert_eq!(map.find(GuestCluster(1)), Some(last));
    }

    #[test]
    fn a_closed_cluster_waits_for_its_writes_and_the_last_one_wakes() {
        let cluster = GuestCluster(6);
        let map = filled(6, 9, Access::ReadWrite);
        assert_eq!(map.begin_write(cluster), Some(HostCluster(9)));
        assert_eq!(map.begin_write(cluster), Some(HostCluster(9)));
        assert!(map.close(&(0..6 << 16)) && map.close(&(7 << 16..9 << 16)));
        assert!(!map.end_write(cluster), "it is open");
        assert!(!map.close(&((6 << 16) + 5..(6 << 16) + 6)));
        assert!(map.begin_write(cluster).is_none(), "it is closed");
        // Neither what changes nor another cluster takes the count away.
        map.forget(cluster);
        map.forget_all();
        let other = (GuestCluster(2), HostCluster(3));
        assert!(!map.fill_in(other, Access::ReadWrite, WORDS));
        assert!(!map.close(&(6 << 16..7 << 16)));
        assert!(map.end_write(cluster) && map.close(&(6 << 16..7 << 16)));
        assert!(map.fill_in(other, Access::ReadWrite, WORDS));
        assert!(map.find(cluster).is_none());
    }

    #[test]
    fn no_more_writes_begin_than_are_counted() {
        let map = filled(0, 9, Access::ReadWrite);
        for _ in 0..WRITES {
            assert!(map.begin_write(GuestCluster(0)).is_some());
        }
        assert!(map.begin_write(GuestCluster(0)).is_none());
        assert!(!map.end_write(GuestCluster(0)));
        assert!(map.begin_write(GuestCluster(0)).is_some());
    }
}
