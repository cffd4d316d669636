//! How far files lie between each other on one device. Pure.
//!
//! All runs of all files are sorted by their place on the device. A file of n runs there has n - 1
//! gaps between one and the next; its *interleaving* is the share of these gaps in which something
//! of another of the files lies. Space that files share lies between nothing of theirs.

use cowslip_queue::fiemap::{Flags, Record};

/// A run of a file on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    start: u64,
    end: u64,
    file: u32,
}

/// Runs of several files on one device.
#[derive(Clone, Debug, Default)]
pub struct Neighbours {
    /// Runs by start.
    runs: Vec<Run>,
    /// How far the runs up to each reach.
    reach: Vec<u64>,
}

/// How one file lies between others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Interleaving {
    /// Gaps between its runs.
    pub gaps: u64,
    /// Gaps with extents of another file.
    pub shared_gaps: u64,
}

impl Interleaving {
    /// The share; 0 without gaps.
    pub fn share(&self) -> f64 {
        match self.gaps {
            0 => 0.0,
            gaps => self.shared_gaps as f64 / gaps as f64,
        }
    }
}

/// Whether a record has a place of its own.
pub fn is_placed(record: &Record) -> bool {
    let nowhere = Flags::UNKNOWN.with(Flags::DELAYED).with(Flags::INLINE);
    !record.flags.has(nowhere)
}

impl Neighbours {
    /// Returns the neighbours of files by their numbers, each with its records.
    pub fn of<'a>(files: impl IntoIterator<Item = (usize, &'a [Record])>) -> Neighbours {
        let mut runs: Vec<Run> = Vec::new();
        for (file, records) in files {
            let first = runs.len();
            let placed = records.iter().filter(|record| is_placed(record));
            runs.extend(placed.map(|record| Run {
                start: record.physical,
                end: record.physical.saturating_add(record.len),
                file: file as u32,
            }));
            let mut own = runs.split_off(first);
            own.sort_unstable_by_key(|run| (run.start, run.end));
            own.dedup_by(|next, last| {
                let joins = next.start <= last.end;
                if joins {
                    last.end = last.end.max(next.end);
                }
                joins
            });
            runs.append(&mut own);
        }
        runs.sort_unstable_by_key(|run| (run.start, run.file));
        let mut furthest = 0;
        let reach = runs.iter().map(|run| {
            furthest = furthest.max(run.end);
            furthest
        });
        let reach = reach.collect();
        Neighbours { runs, reach }
    }

    /// The interleaving of a file.
    pub fn of_file(&self, file: usize) -> Interleaving {
        let mut found = Interleaving::default();
        let mut last_end = None;
        for run in self.runs.iter().filter(|run| run.file as usize == file) {
            if let Some(end) = last_end {
                found.gaps += 1;
                found.shared_gaps += u64::from(self.is_used(end, run.start));
            }
            last_end = Some(run.end);
        }
        found
    }

    /// Whether something lies in this range.
    fn is_used(&self, start: u64, end: u64) -> bool {
        let before = self.runs.partition_point(|run| run.start < end);
        before > 0 && self.reach[before - 1] > start
    }

    /// Whether something of another file than this lies in this range.
    pub fn has_other(&self, (start, end): (u64, u64), file: usize) -> bool {
        let first = self.runs.partition_point(|run| run.start <= start);
        let within = self.runs[first..].iter().take_while(|run| run.start < end);
        let is_other = |run: &&Run| run.file as usize != file;
        self.other_at(start, file).is_some() || within.into_iter().any(|run| is_other(&run))
    }

    /// The file, but for `file`, that has the byte at `at`.
    pub fn other_at(&self, at: u64, file: usize) -> Option<usize> {
        let before = self.runs.partition_point(|run| run.start <= at);
        let run = self.runs[..before].last()?;
        (run.end > at && run.file as usize != file).then_some(run.file as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(runs: &[(u64, u64)]) -> Vec<Record> {
        let mut logical = 0;
        let mut records = Vec::new();
        for &(physical, len) in runs {
            records.push(Record {
                logical,
                physical,
                len,
                flags: Flags::default(),
            });
            logical += len;
        }
        records
    }

    fn shares(files: &[&[(u64, u64)]]) -> Vec<(u64, u64)> {
        let lists: Vec<Vec<Record>> = files.iter().map(|runs| records(runs)).collect();
        let neighbours = Neighbours::of(lists.iter().map(Vec::as_slice).enumerate());
        let found = (0..files.len()).map(|file| neighbours.of_file(file));
        found.map(|found| (found.shared_gaps, found.gaps)).collect()
    }

    #[test]
    fn files_one_behind_the_other_do_not_interleave() {
        let one: &[(u64, u64)] = &[(0, 10), (20, 10), (40, 10)];
        let other: &[(u64, u64)] = &[(100, 10), (50, 10)];
        assert_eq!(shares(&[one, other]), [(0, 2), (0, 1)]);
    }

    #[test]
    fn files_in_turns_interleave_in_all_gaps() {
        let even: Vec<(u64, u64)> = (0..50).map(|i| (i * 20, 10)).collect();
        let odd: Vec<(u64, u64)> = (0..50).rev().map(|i| (i * 20 + 10, 10)).collect();
        assert_eq!(shares(&[&even, &odd]), [(49, 49), (49, 49)]);
        let neighbours = Neighbours::of([(0, &records(&even)[..]), (1, &records(&odd)[..])]);
        assert_eq!(neighbours.other_at(10, 0), Some(1));
        assert_eq!(neighbours.other_at(10, 1), None);
        assert_eq!(neighbours.other_at(10_000, 0), None);
        for (range, other) in [
            ((10, 20), true),
            ((5, 8), false),
            ((0, 11), true),
            ((20, 30), false),
        ] {
            assert_eq!(neighbours.has_other(range, 0), other, "{range:?}");
        }
    }

    #[test]
    fn shared_space_lies_between_nothing() {
        let one: &[(u64, u64)] = &[(0, 10), (20, 10), (40, 10)];
        assert_eq!(shares(&[one, one]), [(0, 2), (0, 2)]);
        let more: &[(u64, u64)] = &[(0, 10), (20, 15), (40, 10)];
        assert_eq!(shares(&[one, more]), [(1, 2), (0, 2)]);
    }

    #[test]
    fn what_touches_is_one_run_and_what_has_no_place_is_none() {
        assert_eq!(
            shares(&[&[(0, 10), (10, 10), (30, 5)], &[(25, 1)]]),
            [(1, 1), (0, 0)]
        );
        let mut delayed = records(&[(0, 10)]);
        delayed[0].flags = Flags::DELAYED;
        assert!(!Neighbours::of([(0, &delayed[..])]).is_used(0, 10));
    }

    /// Comparison with a look at every byte of a small device.
    #[test]
    fn shares_agree_with_a_look_at_every_byte() {
        let mut state = 3_u64;
        let mut next = |bound: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % bound
        };
        for _ in 0..200 {
            let mut files: Vec<Vec<(u64, u64)>> = vec![Vec::new(); 3];
            for file in &mut files {
                for _ in 0..next(8) {
                    file.push((next(60), next(5) + 1));
                }
            }
            let has = |file: &[(u64, u64)], at| file.iter().any(|&(s, l)| at >= s && at < s + l);
            let slices: Vec<&[(u64, u64)]> = files.iter().map(Vec::as_slice).collect();
            for (index, found) in shares(&slices).into_iter().enumerate() {
                let (mut gaps, mut shared) = (0, 0);
                let (mut seen, mut in_gap, mut other) = (false, false, false);
                for at in 0..70 {
                    if has(&files[index], at) {
                        gaps += u64::from(in_gap);
                        shared += u64::from(in_gap && other);
                        (seen, in_gap, other) = (true, false, false);
                    } else if seen {
                        in_gap = true;
                        other |= files.iter().any(|file| has(file, at));
                    }
                }
                assert_eq!(found, (shared, gaps), "{files:?}");
            }
        }
    }
}
