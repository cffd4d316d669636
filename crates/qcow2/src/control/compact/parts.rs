//! Moves in parts: as many clusters at a time as there is space for.

use std::ops::Range;

use cowslip_boxed::boxed;

use super::Compaction;
use super::data::Destination;
use super::plan::Move;
use super::units::{Unit, moves_in_turn};
use crate::Qcow2;
use crate::Result;
use crate::commit::writeback::is_no_space;
use crate::geometry::HostCluster;
use crate::job::Job;

/// Runs that move at a time, at most: each may change a part of a table of its own, and the cycle
/// that makes them durable copies all of these in one step, for which requests wait.
const RUNS_AT_ONCE: usize = 1 << 10;

/// Some of a batch move at a time, all of it as long as there is space. They do not depend on
/// another survey: what has moved is passed when it is met again.
#[derive(Debug)]
struct Parts {
    at: u64,
    /// How many move next.
    size: u64,
    whole: u64,
}

impl Parts {
    fn of(whole: u64) -> Parts {
        Parts {
            at: 0,
            size: whole,
            whole,
        }
    }

    /// The part that moves next.
    fn next(&self) -> Option<Range<u64>> {
        let part = self.at..self.whole.min(self.at.saturating_add(self.size));
        (!part.is_empty()).then_some(part)
    }

    /// A part has moved, and what it has left is there for a larger one.
    fn passed(&mut self, part: &Range<u64>) {
        self.at = part.end;
        self.size = self.size.saturating_mul(2);
    }

    /// There was no space for a part. Returns whether a smaller one may find it.
    fn failed(&mut self, part: &Range<u64>) -> bool {
        self.size = (part.end - part.start) / 2;
        self.size > 0
    }
}

/// The moves of a part of a batch, whose clusters are numbered through, or of its beginning: of as
/// many runs as may move at a time. Returns which part it is.
fn moves_of(batch: &[Move], part: Range<u64>) -> (Vec<Move>, Range<u64>) {
    let (mut number, mut end) = (0, part.start);
    let mut moves = Vec::new();
    for run in batch {
        let from = part.start.saturating_sub(number).min(run.clusters);
        let to = part.end.saturating_sub(number).min(run.clusters);
        number += run.clusters;
        if from == to {
            continue;
        }
        moves.push(Move {
            guest: run.guest.plus(from),
            from: run.from.plus(from),
            to: run.to.plus(from),
            clusters: to - from,
        });
        end += to - from;
        if moves.len() == RUNS_AT_ONCE {
            break;
        }
    }
    (moves, part.start..end)
}

impl Qcow2 {
    /// Moves runs, and gives their places up before the budget is spent again. Where there is no
    /// space for all, they move in parts, at last one cluster at a time. Returns the places that
    /// are left; what has moved is counted, also if some has not.
    ///
    /// # Errors
    /// No space for one cluster; others.
    #[boxed]
    pub(super) async fn move_runs(
        &self,
        batch: &[Move],
        destination: Destination,
        (job, done): (&Job, &mut Compaction),
    ) -> Result<Vec<HostCluster>> {
        let mut parts = Parts::of(batch.iter().map(|run| run.clusters).sum());
        let mut left = Vec::new();
        while let Some(part) = parts.next() {
            let before = left.len();
            let (moves, part) = moves_of(batch, part);
            let moved = self.move_batch(&moves, destination, (job, &mut left)).await;
            let moved_bytes = self.bytes_of(&left[before..]);
            done.moved_bytes += moved_bytes;
            let released = self.release_moved(job).await;
            match moved {
                Ok(()) => {
                    released?;
                    parts.passed(&part);
                }
                Err(error) if self.finds_no_space(&error) && released.is_ok() => {
                    if !parts.failed(&part) {
                        return Err(error);
                    }
                    // These are met again.
                    job.expect(moved_bytes);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(left)
    }

    /// Moves clusters of one kind that are not the disk's alone, in parts likewise. Returns the
    /// places that are left.
    ///
    /// # Errors
    /// No space for one cluster; others.
    #[boxed]
    pub(super) async fn move_units(
        &self,
        batch: &[Unit],
        end: u64,
        (job, done): (&Job, &mut Compaction),
    ) -> Result<Vec<HostCluster>> {
        if moves_in_turn(batch) {
            let left = self.move_roots(batch, end, job).await?;
            done.moved_bytes += self.bytes_of(&left);
            return Ok(left);
        }
        let mut parts = Parts::of(batch.len() as u64);
        let mut left = Vec::new();
        while let Some(part) = parts.next() {
            let units = &batch[part.start as usize..part.end as usize];
            match self.move_still(units, end, job).await {
                Ok(places) => {
                    done.moved_bytes += self.bytes_of(&places);
                    left.extend(places);
                    parts.passed(&part);
                }
                Err(error) if self.finds_no_space(&error) && parts.failed(&part) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(left)
    }

    fn bytes_of(&self, clusters: &[HostCluster]) -> u64 {
        (clusters.len() as u64) << self.geometry().cluster_bits()
    }

    fn finds_no_space(&self, error: &crate::Error) -> bool {
        is_no_space(error) && !self.is_latched()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{GuestCluster, HostCluster};

    #[test]
    fn a_part_halves_until_it_finds_space_and_doubles_then() {
        // Space for three at a time, of eleven.
        let mut parts = Parts::of(11);
        let mut tried = Vec::new();
        while let Some(part) = parts.next() {
            tried.push((part.start, part.end));
            match part.end - part.start {
                0..=3 => parts.passed(&part),
                _ => assert!(parts.failed(&part)),
            }
        }
        let expected = [
            (0, 11),
            (0, 5),
            (0, 2),
            (2, 6),
            (2, 4),
            (4, 8),
            (4, 6),
            (6, 10),
            (6, 8),
            (8, 11),
        ];
        assert_eq!(tried, expected);
        let mut parts = Parts::of(11);
        let mut attempts = 1;
        while parts.failed(&parts.next().unwrap()) {
            attempts += 1;
        }
        assert_eq!(attempts, 4, "eleven, five, two, one");
        assert!(Parts::of(0).next().is_none());
    }

    #[test]
    fn the_moves_of_a_part_are_those_of_its_clusters() {
        let run = |guest, from, to, clusters| Move {
            guest: GuestCluster(guest),
            from: HostCluster(from),
            to: HostCluster(to),
            clusters,
        };
        let batch = [run(10, 100, 1, 4), run(20, 90, 7, 1), run(30, 80, 9, 3)];
        assert_eq!(moves_of(&batch, 0..8), (batch.to_vec(), 0..8));
        let some = vec![run(13, 103, 4, 1), run(20, 90, 7, 1), run(30, 80, 9, 1)];
        assert_eq!(moves_of(&batch, 3..6), (some, 3..6));
        assert_eq!(moves_of(&batch, 6..7), (vec![run(31, 81, 10, 1)], 6..7));
        let many: Vec<Move> = (0..3 * RUNS_AT_ONCE as u64)
            .map(|number| run(2 * number, 2 * number, 2 * number + 1, 1))
            .collect();
        let (some, part) = moves_of(&many, 5..2000);
        assert_eq!(
            (some.len(), part),
            (RUNS_AT_ONCE, 5..5 + RUNS_AT_ONCE as u64)
        );
        assert_eq!(some[..], many[5..5 + RUNS_AT_ONCE]);
    }
}
