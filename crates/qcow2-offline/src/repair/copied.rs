//! COPIED: set exactly where a count is 1. Only in the active tables, where it has a meaning.

use super::plan::Plan;
use super::step::{Change, Step};
use super::survey::{Owner, put};
use super::tables::read_each;
use crate::Result;
use crate::entry::big_endian;
use crate::entry::inspect::{self, ClaimedSpace};
use crate::units::pieces;

/// Long tables are read in pieces of this size.
const PIECE_BYTES: u64 = 256 << 10;

/// Which flags a walk through the tables is after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Walk {
    /// All that are wrong, in tables as they will be: to report them.
    Compare,
    /// Those that are set where they must not be.
    Clear,
    /// Those that are clear where they may be set.
    Set,
}

impl Plan<'_> {
    /// Reports the flags that will be wrong when all else is done.
    pub(super) async fn compare_copied(&mut self) -> Result<()> {
        self.copied_wrong |= self.survey.copied_missing;
        self.walk_copied(Walk::Compare).await
    }

    /// Looks through the active tables, and does with wrong flags what the walk is for.
    pub(super) async fn walk_copied(&mut self, walk: Walk) -> Result<()> {
        if !self.copied_wrong {
            return Ok(());
        }
        let is_active = |position: &usize| self.survey.l1s[*position].owner == Owner::Active;
        let active: Vec<usize> = (0..self.survey.l1s.len()).filter(is_active).collect();
        for position in active {
            self.walk_l1(position, walk).await?;
        }
        let cluster_bytes = self.survey.geometry.cluster_bytes();
        let file = self.file.clone();
        let tables = self.survey.tables.iter().filter(|table| table.active > 0);
        let moved = |offset| self.survey.moved_tables.get(&offset).copied();
        let place = |offset| match walk {
            Walk::Compare => offset,
            Walk::Clear | Walk::Set => moved(offset).unwrap_or(offset),
        };
        let offsets = tables.map(|table| place(table.offset)).collect();
        let mut reads = read_each(&file, offsets, cluster_bytes);
        while let Some(read) = reads.next().await {
            let (offset, mut bytes) = read?;
            if walk == Walk::Compare {
                self.survey.mended(offset, &mut bytes);
            }
            let steps = self.steps_of_l2(offset, &bytes);
            self.take(walk, steps, (offset, &bytes)).await?;
        }
        Ok(())
    }

    async fn walk_l1(&mut self, position: usize, walk: Walk) -> Result<()> {
        let l1 = self.survey.l1s[position].clone();
        let offset = match (walk, l1.moves) {
            (Walk::Clear | Walk::Set, Some(moved)) => moved,
            _ => l1.offset,
        };
        if l1.bytes() == 0 {
            return Ok(());
        }
        for piece in pieces(0, l1.bytes(), PIECE_BYTES) {
            let start = offset + piece.start;
            let len = piece.end - piece.start;
            let mut bytes = self.file.read_new(start, len).await?;
            if walk == Walk::Compare {
                if l1.moves.is_none() {
                    self.survey.mended(start, &mut bytes);
                }
                apply(&l1.changes, start, &mut bytes);
            }
            let mut steps = Vec::new();
            for (l1_index, entry) in (piece.start / 8..).zip(bytes.chunks_exact(8).map(big_endian))
            {
                let table = inspect::inspect_l1(entry);
                if table.offset == 0 {
                    continue;
                }
                let cluster = table.offset >> self.survey.geometry.cluster_bits();
                let refcount = self.survey.references(cluster);
                if (refcount == 1) != table.copied {
                    let to = self.survey.format.with_copied(entry, refcount == 1);
                    let at = offset + l1_index * 8;
                    let change = Change {
                        at,
                        from: entry,
                        to,
                    };
                    steps.push(Step::CopiedL2 {
                        change,
                        l1_index,
                        refcount,
                    });
                }
            }
            self.take(walk, steps, (start, &bytes)).await?;
        }
        Ok(())
    }

    fn steps_of_l2(&self, offset: u64, bytes: &[u8]) -> Vec<Step> {
        let format = self.survey.format;
        let entry_bytes = self.survey.geometry.l2_entry_bytes();
        let mut steps = Vec::new();
        for (l2_index, entry, _) in self.entries(bytes) {
            let ClaimedSpace::Cluster {
                offset: host,
                copied,
            } = format.inspect_l2(entry, 0).claim
            else {
                continue;
            };
            let cluster = host >> self.survey.geometry.cluster_bits();
            let refcount = match format.data_file {
                true => 1,
                false => self.survey.references(cluster),
            };
            if (refcount == 1) != copied {
                let change = Change {
                    at: offset + l2_index * entry_bytes,
                    from: entry,
                    to: format.with_copied(entry, refcount == 1),
                };
                steps.push(Step::CopiedData { change, refcount });
            }
        }
        steps
    }

    /// Reports the steps, or writes those that the walk is for.
    async fn take(&mut self, walk: Walk, steps: Vec<Step>, table: (u64, &[u8])) -> Result<()> {
        let (offset, bytes) = table;
        let mut wanted = Vec::new();
        for step in steps {
            let (Step::CopiedL2 { change, .. } | Step::CopiedData { change, .. }) = step else {
                continue;
            };
            let sets = change.to > change.from;
            match walk {
                Walk::Compare => self.step(&step),
                Walk::Clear if !sets => wanted.push((change, step)),
                Walk::Set if sets => wanted.push((change, step)),
                Walk::Clear | Walk::Set => {}
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let mut new = bytes.to_vec();
        let changes: Vec<Change> = wanted.iter().map(|(change, _)| *change).collect();
        apply(&changes, offset, &mut new);
        self.write_changed(offset, bytes, &new).await?;
        for (_, step) in &wanted {
            self.done(step);
        }
        Ok(())
    }
}

/// Applies changes to the part of a table that is at `offset`.
pub(super) fn apply(changes: &[Change], offset: u64, bytes: &mut [u8]) {
    let end = offset + bytes.len() as u64;
    for change in changes {
        if (offset..end).contains(&change.at) {
            put(bytes, change.at - offset, change.to);
        }
    }
}
