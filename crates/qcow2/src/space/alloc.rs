//! Choice of host clusters: free runs, those known to read as zeroes, those that must not be
//! written.
//!
//! The life of a cluster: *free* (count 0 on disk, claimed: within the file), *taken* by a request
//! (its count is raised at the next cut), referenced, *freed* to the quarantine, and free again
//! when the clearing of its last reference is durable and its epoch has left. Lowest first, so that
//! small images look as QEMU's do and neighbours in time are neighbours on the host.

use std::collections::BTreeMap;
use std::ops::Range;

use foldhash::HashMap;

use crate::file::FileExtent;
use crate::geometry::{HostCluster, SubclusterMask};

/// Runs of free clusters that are kept; more are forgotten until the image is reopened.
const RUNS_MAX: usize = 1 << 17;
/// Clusters whose fresh subclusters are remembered.
const FRESH_MAX: usize = 1 << 16;

/// The known content of free space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpaceContent {
    /// They read as zeroes, and may be a hole.
    Zeroes,
    /// They read as zeroes, and have their space.
    Reserved,
    /// The space may hold any bytes.
    Unknown,
}

impl SpaceContent {
    /// They read as zeroes.
    pub fn is_zero(self) -> bool {
        matches!(self, SpaceContent::Zeroes | SpaceContent::Reserved)
    }

    /// The host may have no space for them yet.
    pub fn may_be_hole(self) -> bool {
        self != SpaceContent::Reserved
    }
}

/// Clusters that may be taken.
#[derive(Debug, Default)]
pub struct FreeSet {
    runs: BTreeMap<u64, (u64, SpaceContent)>,
    clusters: u64,
}

impl FreeSet {
    /// Free clusters, in all.
    pub fn clusters(&self) -> u64 {
        self.clusters
    }

    /// Returns whether a run of `count` clusters is free.
    pub fn has_run(&self, count: u64) -> bool {
        self.clusters >= count && self.runs.values().any(|(len, _)| *len >= count)
    }

    /// Takes up to `count` neighbouring clusters with one content: the lowest run that has them
    /// all, or else the beginning of the lowest one.
    pub fn take(&mut self, count: u64) -> Option<(HostCluster, u64, SpaceContent)> {
        let fitting = self.runs.iter().find(|(_, (len, _))| *len >= count);
        let (&start, &(len, content)) = fitting.or_else(|| self.runs.iter().next())?;
        let taken = len.min(count);
        self.runs.remove(&start);
        if taken < len {
            self.runs.insert(start + taken, (len - taken, content));
        }
        self.clusters -= taken;
        Some((HostCluster(start), taken, content))
    }

    /// Takes these clusters, if all of them are free; whether it has.
    pub fn take_at(&mut self, start: HostCluster, count: u64) -> bool {
        let end = start.0 + count;
        let mut at = start.0;
        while at < end {
            let run = self.runs.range(..=at).next_back();
            match run.map(|(&first, &(len, _))| first + len) {
                Some(next) if next > at => at = next,
                Some(_) | None => return false,
            }
        }
        self.remove(start.0..end);
        true
    }

    /// Takes up to `count` neighbouring clusters before `end`: the lowest ones.
    pub fn take_before(&mut self, end: u64, count: u64) -> Option<(HostCluster, u64)> {
        let (&start, &(len, _)) = self.runs.iter().next()?;
        let taken = len.min(count).min(end.checked_sub(start)?);
        (taken > 0).then(|| {
            self.remove(start..start + taken);
            (HostCluster(start), taken)
        })
    }

    /// Free clusters from `start` on.
    pub fn clusters_from(&self, start: u64) -> u64 {
        let behind = |(at, len, _): (u64, u64, _)| (at + len).saturating_sub(at.max(start));
        self.runs().map(behind).sum()
    }

    /// Free clusters before `end`.
    pub fn clusters_to(&self, end: u64) -> u64 {
        let before = self.runs.range(..end);
        before
            .map(|(&at, &(len, _))| (at + len).min(end) - at)
            .sum()
    }

    /// The runs of free clusters, in order: the first one, how many there are, and what they hold.
    pub fn runs(&self) -> impl Iterator<Item = (u64, u64, SpaceContent)> + '_ {
        let runs = self.runs.iter();
        runs.map(|(&start, &(len, content))| (start, len, content))
    }

    /// The first run of free clusters that are not before `from`.
    pub fn run_from(&self, from: u64) -> Option<(u64, u64, SpaceContent)> {
        let before = self.runs.range(..from).next_back();
        let around = before.filter(|&(&at, &(len, _))| at + len > from);
        match around {
            Some((&at, &(len, content))) => Some((from, at + len - from, content)),
            None => {
                let next = self.runs.range(from..).next();
                next.map(|(&at, &(len, content))| (at, len, content))
            }
        }
    }

    /// Adds free clusters.
    ///
    /// # Panics
    /// If one of them is free already: it was freed twice.
    pub fn add(&mut self, start: HostCluster, count: u64, content: SpaceContent) {
        if count == 0 {
            return;
        }
        let (mut start, mut len) = (start.0, count);
        let next = self.runs.range(start..).next().map(|(&at, &run)| (at, run));
        let previous = self
            .runs
            .range(..start)
            .next_back()
            .map(|(&at, &run)| (at, run));
        assert!(
            next.is_none_or(|(at, _)| start + len <= at),
            "cluster {start} is freed twice"
        );
        assert!(
            previous.is_none_or(|(at, (n, _))| at + n <= start),
            "cluster {start} is freed twice"
        );
        self.clusters += len;
        if let Some((at, (n, c))) = next
            && start + len == at
            && c == content
        {
            self.runs.remove(&at);
            len += n;
        }
        if let Some((at, (n, c))) = previous
            && at + n == start
            && c == content
        {
            start = at;
            len += n;
        }
        self.runs.insert(start, (len, content));
        if self.runs.len() > RUNS_MAX {
            self.forget_one();
        }
    }

    /// Forgets the highest run: leaked until the image is reopened.
    fn forget_one(&mut self) {
        if let Some((_, (len, _))) = self.runs.pop_last() {
            self.clusters -= len;
        }
    }

    /// The first cluster of the free run that ends at `end`, for cutting the file there.
    pub fn run_ending_at(&self, end: u64) -> Option<u64> {
        let mut first = end;
        for (&at, &(len, _)) in self.runs.range(..end).rev() {
            if at + len != first {
                break;
            }
            first = at;
        }
        (first < end).then_some(first)
    }

    /// Removes those of a range.
    pub fn remove(&mut self, range: Range<u64>) {
        let before = self.runs.range(..range.start).next_back();
        let first = before.map_or(range.start, |(&at, _)| at);
        let near: Vec<_> = self
            .runs
            .range(first..range.end.max(first))
            .map(|(&at, &run)| (at, run))
            .collect();
        for (at, (len, content)) in near {
            let end = at + len;
            if end <= range.start {
                continue;
            }
            self.runs.remove(&at);
            self.clusters -= end.min(range.end) - at.max(range.start);
            if at < range.start {
                self.runs.insert(at, (range.start - at, content));
            }
            if end > range.end {
                self.runs.insert(range.end, (end - range.end, content));
            }
        }
        while self.runs.len() > RUNS_MAX {
            self.forget_one();
        }
    }

    /// Removes all free clusters from `start` on.
    pub fn cut_at(&mut self, start: u64) {
        let above = self.runs.split_off(&start);
        self.clusters -= above.values().map(|(len, _)| len).sum::<u64>();
        if let Some((&at, &(len, content))) = self.runs.iter().next_back()
            && at + len > start
        {
            self.clusters -= at + len - start;
            self.runs.insert(at, (start - at, content));
        }
    }
}

/// Appends to `found` the content of a run of free clusters, by the host's extents: clusters that
/// lie completely in a hole read as zeroes. Merges adjacent runs that it appends.
pub fn in_holes(
    free: &Range<u64>,
    extents: &[FileExtent],
    cluster_bits: u32,
    found: &mut Vec<(Range<u64>, SpaceContent)>,
) {
    let mut push = |run: Range<u64>, content: SpaceContent| match found.last_mut() {
        _ if run.is_empty() => {}
        Some((last, of)) if last.end == run.start && *of == content => last.end = run.end,
        _ => found.push((run, content)),
    };
    let mut at = free.start;
    for hole in extents.iter().filter(|extent| extent.hole) {
        let first = (hole.start.div_ceil(1 << cluster_bits)).max(at);
        let end = ((hole.start + hole.len) >> cluster_bits).min(free.end);
        if first < end {
            push(at..first, SpaceContent::Unknown);
            push(first..end, SpaceContent::Zeroes);
            at = end;
        }
    }
    push(at..free.end, SpaceContent::Unknown);
}

/// Subclusters of mapped clusters that are known to read as zeroes on the host, for this session.
#[derive(Debug, Default)]
pub struct Fresh {
    known: BTreeMap<u64, SubclusterMask>,
    forgets: bool,
}

impl Fresh {
    /// Nothing is known yet; nothing ever will be unless it `counts`.
    pub fn knowing(counts: bool) -> Fresh {
        Fresh {
            known: BTreeMap::new(),
            forgets: !counts,
        }
    }

    /// Nothing is known any more.
    pub fn forget(&mut self) {
        self.known.clear();
    }

    /// Returns the subclusters of a cluster that are known to be fresh.
    pub fn of(&self, cluster: HostCluster) -> SubclusterMask {
        self.known.get(&cluster.0).copied().unwrap_or(0)
    }

    /// Sets the fresh subclusters of a cluster; forgets another cluster where there is no room.
    pub fn set(&mut self, cluster: HostCluster, mask: SubclusterMask) {
        if mask == 0 || self.forgets {
            self.known.remove(&cluster.0);
            return;
        }
        if self.known.len() >= FRESH_MAX && !self.known.contains_key(&cluster.0) {
            // The lowest is the oldest as a rule, since space is taken upwards.
            self.known.pop_first();
        }
        self.known.insert(cluster.0, mask);
    }
}

/// Clusters that hold metadata: no guest data and no allocation may land there, whatever the
/// image's counts and entries claim (invariant S3).
#[derive(Debug, Default)]
pub struct Protected {
    pages: HashMap<u64, Box<[u64; 64]>>,
}

impl Protected {
    /// Protects a cluster; `false` if it was protected already.
    pub fn insert(&mut self, cluster: HostCluster) -> bool {
        let page = self
            .pages
            .entry(cluster.0 >> 12)
            .or_insert_with(|| Box::new([0; 64]));
        let (word, bit) = ((cluster.0 >> 6 & 63) as usize, 1 << (cluster.0 & 63));
        let new = page[word] & bit == 0;
        page[word] |= bit;
        new
    }

    /// Ends the protection of a cluster.
    pub fn remove(&mut self, cluster: HostCluster) {
        if let Some(page) = self.pages.get_mut(&(cluster.0 >> 12)) {
            page[(cluster.0 >> 6 & 63) as usize] &= !(1 << (cluster.0 & 63));
        }
    }

    /// The end of the last cluster that is protected; 0 without one.
    pub fn end(&self) -> u64 {
        self.pages
            .iter()
            .filter_map(|(number, page)| {
                let word = page.iter().rposition(|&word| word != 0)?;
                let bit = 63 - u64::from(page[word].leading_zeros());
                Some((number << 12) + ((word as u64) << 6) + bit + 1)
            })
            .max()
            .unwrap_or(0)
    }

    /// Returns whether a cluster of a range holds metadata, other than this one.
    pub fn has_other(&self, range: Range<u64>, than: HostCluster) -> bool {
        let pages = range.start >> 12..range.end.div_ceil(1 << 12);
        // Most pages of a long range do not exist.
        let mut pages = pages.filter(|page| self.pages.contains_key(page));
        pages.any(|page| {
            let clusters = range.start.max(page << 12)..range.end.min((page + 1) << 12);
            let mut others = clusters.map(HostCluster).filter(|other| *other != than);
            others.any(|other| self.contains(other))
        })
    }

    /// Returns whether the cluster holds metadata.
    pub fn contains(&self, cluster: HostCluster) -> bool {
        self.pages
            .get(&(cluster.0 >> 12))
            .is_some_and(|page| page[(cluster.0 >> 6 & 63) as usize] >> (cluster.0 & 63) & 1 != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// A generator of test values: Knuth's MMIX constants.
    fn next(state: &mut u64) -> u64 {
        *state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        *state >> 33
    }

    /// The longest run of neighbours with one content.
    fn longest_run(model: &BTreeMap<u64, SpaceContent>) -> u64 {
        let (mut longest, mut len, mut previous) = (0, 0, None);
        for (&cluster, &content) in model {
            let goes_on = previous == Some((cluster.wrapping_sub(1), content));
            len = if goes_on { len + 1 } else { 1 };
            longest = longest.max(len);
            previous = Some((cluster, content));
        }
        longest
    }

    #[test]
    fn runs_are_found_from_any_cluster_on() {
        let mut free = FreeSet::default();
        free.add(HostCluster(3), 4, SpaceContent::Unknown);
        free.add(HostCluster(10), 2, SpaceContent::Zeroes);
        let starts = [0, 3, 5, 6, 7, 10, 11, 12];
        let found = starts.map(|from| free.run_from(from).map(|(at, len, _)| (at, len)));
        let expected = [(3, 4), (3, 4), (5, 2), (6, 1), (10, 2), (10, 2), (11, 1)];
        assert_eq!(found[..7], expected.map(Some));
        assert_eq!(found[7], None);
    }

    #[test]
    fn the_free_set_agrees_with_a_set_of_clusters() {
        for seed in 0..50 {
            let mut state = seed;
            let mut free = FreeSet::default();
            let mut model: BTreeMap<u64, SpaceContent> = BTreeMap::new();
            let mut taken: BTreeSet<u64> = (0..200).collect();
            for _ in 0..400 {
                if next(&mut state).is_multiple_of(2) && !taken.is_empty() {
                    let nth = next(&mut state) as usize % taken.len();
                    let cluster = *taken.iter().nth(nth).unwrap();
                    let content = if next(&mut state).is_multiple_of(3) {
                        SpaceContent::Unknown
                    } else {
                        SpaceContent::Zeroes
                    };
                    taken.remove(&cluster);
                    model.insert(cluster, content);
                    free.add(HostCluster(cluster), 1, content);
                } else {
                    let count = 1 + next(&mut state) % 5;
                    let has_run = longest_run(&model) >= count;
                    assert_eq!(free.has_run(count), has_run);
                    let Some((start, len, content)) = free.take(count) else {
                        assert!(model.is_empty());
                        continue;
                    };
                    assert!(len == count || !has_run);
                    for cluster in start.0..start.0 + len {
                        assert_eq!(model.remove(&cluster), Some(content));
                        assert!(taken.insert(cluster));
                    }
                    if count == 1 {
                        assert!(model.keys().all(|&other| other > start.0), "lowest first");
                    }
                }
                assert_eq!(free.clusters(), model.len() as u64);
                let end = 200;
                let tail = (0..end).rev().take_while(|c| model.contains_key(c)).last();
                assert_eq!(free.run_ending_at(end), tail);
            }
            free.cut_at(100);
            assert_eq!(
                free.clusters(),
                model.keys().filter(|&&c| c < 100).count() as u64
            );
        }
    }

    /// Extents by their ends: data and holes in turn, data first.
    fn extents(ends: &[u64]) -> Vec<FileExtent> {
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let extents = starts.zip(ends).enumerate();
        let extent = |(i, (start, end)): (usize, (u64, &u64))| FileExtent {
            start,
            len: end - start,
            hole: i % 2 == 1,
        };
        extents
            .map(extent)
            .filter(|extent| extent.len > 0)
            .collect()
    }

    #[test]
    fn clusters_within_a_hole_read_as_zeroes() {
        let found = |free: Range<u64>, ends: &[u64]| {
            let mut found = Vec::new();
            in_holes(&free, &extents(ends), 4, &mut found);
            let zeroes =
                |(_, content): &&(Range<u64>, SpaceContent)| *content == SpaceContent::Zeroes;
            let covered: Vec<u64> = found.iter().flat_map(|(run, _)| run.clone()).collect();
            assert_eq!(covered, free.collect::<Vec<_>>());
            found
                .iter()
                .filter(zeroes)
                .map(|(run, _)| (run.start, run.end))
                .collect::<Vec<_>>()
        };
        assert_eq!(found(0..8, &[128]), []);
        assert_eq!(found(0..8, &[0, 128]), [(0, 8)]);
        assert_eq!(found(2..6, &[0, 128]), [(2, 6)]);
        // A cluster that is a hole but for its first or its last byte is none.
        assert_eq!(found(0..8, &[17, 64]), [(2, 4)]);
        assert_eq!(found(0..8, &[16, 63]), [(1, 3)]);
        assert_eq!(found(0..8, &[16, 20]), []);
        // Two holes that meet in a cluster, with data between them.
        assert_eq!(found(0..8, &[0, 40, 41, 128]), [(0, 2), (3, 8)]);
        assert_eq!(found(3..5, &[0, 40, 41, 128]), [(3, 5)]);
    }

    #[test]
    fn a_cut_takes_all_above_it_and_nothing_below() {
        for cut in 0..40 {
            let mut free = FreeSet::default();
            for (start, count) in [(3, 5), (10, 20), (33, 4)] {
                free.add(HostCluster(start), count, SpaceContent::Zeroes);
            }
            free.cut_at(cut);
            let stays = |cluster: &u64| {
                *cluster < cut && [3..8, 10..30, 33..37].iter().any(|r| r.contains(cluster))
            };
            let expected: Vec<u64> = (0..40).filter(stays).collect();
            assert_eq!(free.clusters(), expected.len() as u64, "cut at {cut}");
            let mut left = Vec::new();
            while let Some((start, count, content)) = free.take(1) {
                assert_eq!((count, content), (1, SpaceContent::Zeroes));
                left.push(start.0);
            }
            assert_eq!(left, expected, "cut at {cut}");
        }
    }

    #[test]
    fn a_range_that_is_removed_leaves_what_is_around_it() {
        let runs = [(3, 5), (10, 20), (33, 4)];
        for (start, end) in (0..40).flat_map(|start| (start..40).map(move |end| (start, end))) {
            let mut free = FreeSet::default();
            for (start, count) in runs {
                free.add(HostCluster(start), count, SpaceContent::Zeroes);
            }
            free.remove(start..end);
            let is_free = |cluster: &u64| runs.iter().any(|(s, n)| (*s..s + n).contains(cluster));
            let stays = |cluster: &u64| is_free(cluster) && !(start..end).contains(cluster);
            let expected: Vec<u64> = (0..40).filter(stays).collect();
            assert_eq!(free.clusters(), expected.len() as u64, "{start}..{end}");
            let mut left = Vec::new();
            while let Some((cluster, _, content)) = free.take(1) {
                assert_eq!(content, SpaceContent::Zeroes);
                left.push(cluster.0);
            }
            assert_eq!(left, expected, "{start}..{end}");
        }
    }

    #[test]
    fn the_runs_that_are_kept_are_bounded() {
        let mut free = FreeSet::default();
        for run in 0..RUNS_MAX as u64 + 100 {
            free.add(HostCluster(2 * run), 1, SpaceContent::Unknown);
        }
        // Runs that are forgotten are not counted either.
        assert_eq!(free.runs.len(), RUNS_MAX);
        assert_eq!(free.clusters(), RUNS_MAX as u64);
        assert_eq!(free.take(1).map(|(start, ..)| start), Some(HostCluster(0)));
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_double_free_is_our_mistake() {
        let mut free = FreeSet::default();
        free.add(HostCluster(4), 4, SpaceContent::Unknown);
        free.add(HostCluster(6), 1, SpaceContent::Unknown);
    }

    #[test]
    fn fresh_knowledge_is_bounded() {
        let mut fresh = Fresh::default();
        for cluster in 0..2 * FRESH_MAX as u64 {
            fresh.set(HostCluster(cluster), 1);
        }
        assert_eq!(fresh.known.len(), FRESH_MAX);
        assert_eq!(fresh.of(HostCluster(2 * FRESH_MAX as u64 - 1)), 1);
        let mut nothing = Fresh::knowing(false);
        nothing.set(HostCluster(1), 1);
        assert_eq!(nothing.of(HostCluster(1)), 0);
    }

    #[test]
    fn protection_is_by_cluster() {
        let mut protected = Protected::default();
        assert_eq!(protected.end(), 0);
        for cluster in [0, 63, 64, 4095, 4096, 100_000] {
            protected.insert(HostCluster(cluster));
            assert_eq!(protected.end(), cluster + 1);
        }
        protected.remove(HostCluster(100_000));
        assert_eq!(protected.end(), 4097);
        let mut protected = Protected::default();
        assert!(protected.insert(HostCluster(4097)) && !protected.insert(HostCluster(4097)));
        assert!(protected.contains(HostCluster(4097)) && !protected.contains(HostCluster(4096)));
        let other = |range, than| protected.has_other(range, HostCluster(than));
        assert!(other(0..4098, 0) && other(4097..9000, 4096) && other(4097..4098, 0));
        assert!(!other(0..4097, 0) && !other(4098..9000, 0) && !other(0..9000, 4097));
        assert!(!other(4097..4097, 0) && !other(9000..9000, 0));
        protected.remove(HostCluster(4097));
        assert!(!protected.contains(HostCluster(4097)));
        // Clusters whose numbers differ in one bit are distinguished.
        let held = HostCluster(0x1357);
        assert!(protected.insert(held));
        for other in (0..20).map(|bit| HostCluster(held.0 ^ 1 << bit)) {
            assert!(!protected.contains(other), "{other:?}");
            assert!(protected.insert(other));
            protected.remove(other);
            assert!(!protected.contains(other) && protected.contains(held));
        }
    }
}
