//! Clusters that move while nothing else is under way, and the words that refer to them. Pure.

use std::collections::BTreeMap;

use smallvec::SmallVec;

use super::survey::{Kind, Reference, Survey};
use crate::geometry::{Geometry, HostCluster};

/// Words of one batch, and of one cluster: each may be in a part of the file of its own, which is
/// kept in memory. A cluster with more of them stays.
pub(super) const WORDS_MAX: usize = 4096;
/// Bytes that move while requests wait.
const STILL_BYTES_MAX: u64 = 1 << 20;

/// Kinds that move after the data of the disk, in their order: what a word lies in moves after what
/// the word refers to, so no word is looked for where it was.
const ORDER: [Kind; 11] = [
    Kind::Shared,
    Kind::Compressed,
    Kind::Bits,
    Kind::Table,
    Kind::SnapshotL1,
    Kind::BitmapTable,
    Kind::Directory,
    Kind::ActiveL1,
    Kind::Snapshots,
    Kind::Block,
    Kind::Counts,
];

/// Returns whether clusters of a kind move after the data of the disk.
pub(super) fn moves_later(kind: Kind) -> bool {
    ORDER.contains(&kind)
}

/// Returns whether a batch moves in the turn alone, while requests go on.
pub(super) fn moves_in_turn(batch: &[Unit]) -> bool {
    use Kind::{ActiveL1, BitmapTable, Block, Counts, Directory, Snapshots};
    let kind = batch.first().map(|unit| unit.kind);
    matches!(
        kind,
        Some(BitmapTable | Directory | ActiveL1 | Snapshots | Block | Counts)
    )
}

/// A cluster that moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Its content.
    pub kind: Kind,
    /// Where it is.
    pub from: HostCluster,
    /// Where the words are that refer to it, but for L1 and L2 tables, refcount blocks, and what
    /// the header names.
    pub words: SmallVec<[u64; 2]>,
    /// Where it goes; `None` for the lowest free place.
    pub to: Option<HostCluster>,
}

/// Returns whether the cluster at a place is one of those that move.
type IsWanted<'a> = Box<dyn Fn(u64) -> bool + Send + 'a>;

/// The clusters that move, as they are found.
pub struct Units<'a> {
    is_wanted: IsWanted<'a>,
    most: usize,
    found: BTreeMap<u64, Unit>,
    words: usize,
}

impl<'a> Units<'a> {
    /// Those at places of which `is_wanted` is true; `most` clusters and words, but for further
    /// words of clusters that are among them.
    pub fn at(is_wanted: impl Fn(u64) -> bool + Send + 'a, most: usize) -> Units<'a> {
        Units {
            is_wanted: Box::new(is_wanted),
            most,
            found: BTreeMap::new(),
            words: 0,
        }
    }

    /// Notes a reference if what it refers to moves.
    pub fn note(&mut self, survey: &Survey, reference: &Reference) {
        for cluster in reference.clusters.clone() {
            let kind = survey.kinds.get(cluster as usize).copied();
            let Some(kind) = kind.filter(|&kind| moves_later(kind) && (self.is_wanted)(cluster))
            else {
                continue;
            };
            if self.is_full() && !self.found.contains_key(&cluster) {
                continue;
            }
            let unit = self.found.entry(cluster).or_insert_with(|| Unit {
                kind,
                from: HostCluster(cluster),
                words: SmallVec::new(),
                to: None,
            });
            let is_sought = matches!(kind, Kind::Table | Kind::SnapshotL1);
            let is_wanted = !is_sought && reference.at != 0;
            if is_wanted && unit.words.len() <= WORDS_MAX {
                unit.words.push(reference.at);
                self.words += 1;
            }
        }
    }

    /// Notes the refcount blocks that count something before `end` clusters.
    pub fn note_blocks(&mut self, survey: &Survey, end: u64) {
        for &(index, cluster) in &survey.blocks {
            let is_block = survey.kinds.get(cluster as usize) == Some(&Kind::Block);
            let is_needed = survey.geometry.first_counted(index).0 < end;
            if (self.is_wanted)(cluster) && is_block && is_needed {
                let unit = Unit {
                    kind: Kind::Block,
                    from: HostCluster(cluster),
                    words: SmallVec::new(),
                    to: None,
                };
                self.found.insert(cluster, unit);
            }
        }
    }

    /// Returns whether there may be more of them than were noted.
    pub fn is_full(&self) -> bool {
        self.found.len() + self.words >= self.most
    }

    /// The words that refer to each, by their places.
    pub fn into_words(self) -> BTreeMap<u64, SmallVec<[u64; 2]>> {
        let found = self.found.into_iter();
        let found = found.filter(|(_, unit)| unit.words.len() <= WORDS_MAX);
        found.map(|(at, unit)| (at, unit.words)).collect()
    }

    /// Splits them into batches of one kind, and of at most `budget` clusters; the highest clusters
    /// of a kind first.
    pub fn batches(self, geometry: &Geometry, budget: u64) -> Vec<Vec<Unit>> {
        let place = |unit: &Unit| ORDER.iter().position(|&kind| kind == unit.kind);
        let mut units: Vec<Unit> = self.found.into_values().collect();
        units.retain(|unit| unit.words.len() <= WORDS_MAX);
        units.sort_by_key(|unit| (place(unit), std::cmp::Reverse(unit.from)));
        in_batches(units, geometry, budget)
    }
}

/// Splits clusters that move, none of which has too many words, into batches of one kind, and of at
/// most `budget` clusters, in their order.
pub(super) fn in_batches(units: Vec<Unit>, geometry: &Geometry, budget: u64) -> Vec<Vec<Unit>> {
    let most = (STILL_BYTES_MAX >> geometry.cluster_bits())
        .min(budget)
        .max(1);
    let mut batches: Vec<Vec<Unit>> = Vec::new();
    let mut words = 0;
    for unit in units {
        match batches.last_mut() {
            Some(batch)
                if batch[0].kind == unit.kind
                    && (batch.len() as u64) < most
                    && words + unit.words.len() <= WORDS_MAX =>
            {
                words += unit.words.len();
                batch.push(unit);
            }
            _ => {
                words = unit.words.len();
                batches.push(vec![unit]);
            }
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::compact::survey::Runs;

    fn survey(kinds: &[Kind]) -> Survey {
        Survey {
            geometry: Geometry::new(16, 4, false).unwrap(),
            kinds: kinds.to_vec(),
            blocks: vec![(0, 1), (3, 5), (0, 6)],
            runs: Runs::default(),
            data_clusters: 0,
            reach: Vec::new(),
        }
    }

    fn reference(kind: Kind, cluster: u64, at: u64) -> Reference {
        Reference {
            kind,
            clusters: cluster..cluster + 1,
            at,
            times: 1,
            guest: None,
        }
    }

    #[test]
    fn what_a_word_lies_in_moves_after_what_it_refers_to() {
        let kinds = [
            Kind::Fixed,
            Kind::Block,
            Kind::Shared,
            Kind::Data,
            Kind::Table,
            Kind::Block,
            Kind::Block,
            Kind::Shared,
            Kind::Shared,
        ];
        let survey = survey(&kinds);
        let mut units = Units::at(|at| at >= 3, 100);
        units.note_blocks(&survey, 3);
        for (cluster, at) in [(4, 8), (2, 16), (7, 24), (3, 32), (8, 40), (7, 48)] {
            let kind = kinds[cluster as usize];
            units.note(&survey, &reference(kind, cluster, at));
        }
        let batches = units.batches(&survey.geometry, 100);
        let found: Vec<Vec<(Kind, u64, &[u64])>> = batches
            .iter()
            .map(|batch| {
                let units = batch.iter();
                units
                    .map(|unit| (unit.kind, unit.from.0, &unit.words[..]))
                    .collect()
            })
            .collect();
        let expected: [Vec<(Kind, u64, &[u64])>; 3] = [
            vec![(Kind::Shared, 8, &[40]), (Kind::Shared, 7, &[24, 48])],
            vec![(Kind::Table, 4, &[])],
            // The block of what lies behind the end goes with that.
            vec![(Kind::Block, 6, &[])],
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn batches_keep_within_the_budget_and_a_bound_of_words() {
        let kinds = vec![Kind::Shared; 3000];
        let survey = survey(&kinds);
        let mut units = Units::at(|_| true, usize::MAX);
        for cluster in 0..3000 {
            for word in 0..3 {
                units.note(&survey, &reference(Kind::Shared, cluster, 8 * (word + 1)));
            }
        }
        for word in 0..=WORDS_MAX as u64 {
            units.note(&survey, &reference(Kind::Shared, 7, 8 * (word + 4)));
        }
        let small = Geometry::new(9, 4, false).unwrap();
        let batches = units.batches(&small, 2000);
        let lens: Vec<usize> = batches.iter().map(Vec::len).collect();
        assert_eq!(lens.iter().sum::<usize>(), 2999, "one has too many words");
        assert_eq!(lens, [1365, 1365, 269]);
        let full = Units::at(|_| true, 0);
        assert!(full.is_full());
    }
}
