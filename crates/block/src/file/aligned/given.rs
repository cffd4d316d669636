//! Which parts of a file of this host have their space, so that a write to them cannot fail for
//! want of it: a durable write may then.
//!
//! A durable write that finds no space may have found that in its flush, for the bytes of others.
//! One to a hole finds none by itself, and nothing is lost. The two look the same; so before it
//! writes durably, an image asks whether there is a hole, and writes and flushes apart then.

use std::collections::BTreeMap;
use std::ops::Range;

use super::AlignedFile;
use crate::sync::{Mutex, lock};
use crate::units::{round_down, round_up};

/// How much of the file is asked about at once.
const WINDOW_BYTES: u64 = 1 << 20;

/// Runs that are remembered; with more, all are forgotten.
const RUNS_MAX: usize = 4096;

/// Knowledge of a file's space. Other programs do not punch holes into an image in use; where one
/// makes a copy that shares its extents, what is known is wrong until the image is closed.
#[derive(Debug, Default)]
pub(super) struct Given(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Runs that have space, by their first bytes; they neither touch nor overlap.
    runs: BTreeMap<u64, u64>,
    /// Operations under way that may take space away, and how many have ended.
    losing: usize,
    lost: u64,
}

/// An operation that may take space away. Dropped before it has ended, it may go on for ever: then
/// nothing is remembered any more.
#[must_use]
pub(super) struct Losing<'a>(&'a Given);

impl Losing<'_> {
    /// The operation has ended.
    pub fn ended(self) {
        let mut known = lock(&self.0.0);
        known.losing -= 1;
        known.lost += 1;
    }
}

impl Known {
    fn covers(&self, range: &Range<u64>) -> bool {
        let before = self.runs.range(..=range.start).next_back();
        before.is_some_and(|(_, &end)| range.end <= end)
    }

    fn add(&mut self, mut run: Range<u64>) {
        while let Some((&start, &end)) = self.runs.range(..=run.end).next_back()
            && end >= run.start
        {
            self.runs.remove(&start);
            run = run.start.min(start)..run.end.max(end);
        }
        if self.runs.len() >= RUNS_MAX {
            self.runs.clear();
        }
        self.runs.insert(run.start, run.end);
    }

    fn remove(&mut self, range: &Range<u64>) {
        while let Some((&start, &end)) = self.runs.range(..range.end).next_back()
            && end > range.start
        {
            self.runs.remove(&start);
            let rest = [start..range.start, range.end..end];
            for rest in rest.into_iter().filter(|rest| rest.start < rest.end) {
                self.runs.insert(rest.start, rest.end);
            }
        }
    }

    /// The state by which it is noticed that space was taken away meanwhile; `None` while that may
    /// happen.
    fn quiet(&self) -> Option<u64> {
        (self.losing == 0).then_some(self.lost)
    }
}

impl Given {
    /// An operation begins that may take the space of a range away.
    pub fn losing(&self, range: &Range<u64>) -> Losing<'_> {
        let mut known = lock(&self.0);
        known.losing += 1;
        known.remove(range);
        Losing(self)
    }
}

impl AlignedFile {
    /// Whether all of a range has its space, according to the host. A caller keeps discards of the
    /// range away until it has made use of the answer. Where nothing is known of holes, there are
    /// none.
    pub async fn has_space(&self, range: Range<u64>) -> bool {
        // Of a file elsewhere, an answer takes as long as a flush there.
        if self.file.id().is_none() || !self.file.capabilities().punches_holes {
            return true;
        }
        let begun = {
            let known = lock(&self.given.0);
            if known.covers(&range) {
                return true;
            }
            known.quiet()
        };
        let start = round_down(range.start, WINDOW_BYTES);
        let len = round_up(range.end, WINDOW_BYTES) - start;
        let Ok(extents) = self.file.own_space(start, len).await else {
            return false;
        };
        let mut asked = Known::default();
        for extent in extents.iter().filter(|extent| !extent.hole) {
            asked.add(extent.start..extent.start + extent.len);
        }
        let mut known = lock(&self.given.0);
        if begun.is_some() && known.quiet() == begun {
            for (&start, &end) in &asked.runs {
                known.add(start..end);
            }
        }
        asked.covers(&range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_join_and_are_cut() {
        let mut known = Known::default();
        known.add(10..20);
        known.add(30..40);
        assert!(known.covers(&(12..20)) && !known.covers(&(12..31)));
        known.add(20..30);
        assert_eq!(known.runs, BTreeMap::from([(10, 40)]));
        known.remove(&(15..18));
        assert_eq!(known.runs, BTreeMap::from([(10, 15), (18, 40)]));
        known.add(14..50);
        known.add(60..61);
        known.remove(&(0..12));
        assert_eq!(known.runs, BTreeMap::from([(12, 50), (60, 61)]));
        known.remove(&(0..100));
        assert!(known.runs.is_empty());
    }

    #[test]
    fn random_runs_are_those_of_a_naive_set() {
        let mut known = Known::default();
        let mut naive = [false; 64];
        let mut number = 1u64;
        for _ in 0..5000 {
            number = number.wrapping_mul(6364136223846793005).wrapping_add(1);
            let (start, len) = (number >> 58, 1 + (number >> 40) % 20);
            let range = start..(start + len).min(64);
            let has = number >> 33 & 1 == 0;
            match has {
                true => known.add(range.clone()),
                false => known.remove(&range),
            }
            naive[range.start as usize..range.end as usize].fill(has);
            let mut runs = BTreeMap::new();
            for at in (0..64).filter(|&at| naive[at] && (at == 0 || !naive[at - 1])) {
                let end = (at..64).find(|&end| !naive[end]).unwrap_or(64);
                runs.insert(at as u64, end as u64);
            }
            assert_eq!(known.runs, runs);
        }
    }

    #[test]
    fn nothing_is_remembered_while_space_may_go() {
        let given = Given::default();
        let begun = lock(&given.0).quiet();
        let losing = given.losing(&(0..10));
        assert_eq!(lock(&given.0).quiet(), None);
        losing.ended();
        assert_ne!(lock(&given.0).quiet(), begun);
        drop(given.losing(&(0..10)));
        assert_eq!(lock(&given.0).quiet(), None, "it may still be under way");
    }
}
