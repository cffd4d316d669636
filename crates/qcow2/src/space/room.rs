//! Space on the host beside the path of a write: for new tables before, and what is left of growth
//! after.
//!
//! A flush writes tables, and finds no way out where the host is full by then; so the space of a
//! new table is allocated when the table is (invariant D4), where it may be a hole: in a sparse
//! image, in what the first steps of growth have added, in what was punched. One call for a table
//! at first, so that a small file has the layout of QEMU's; then for several, as an allocation is a
//! barrier for the I/O of the file on XFS.

use cowslip_boxed::boxed;
use std::io::ErrorKind;

use super::alloc::SpaceContent;
use crate::commit::writeback::is_no_space;
use crate::geometry::HostCluster;
use crate::growth::{self, AtClose};
use crate::{Counts, Qcow2, State};
use crate::{Error, Result};

/// The most space for tables that is allocated at once.
const TABLES_BYTES_MAX: u64 = 1 << 20;

impl Qcow2 {
    /// Takes the cluster of a new table; `None` if the space of the next one may be a hole.
    pub(crate) fn take_table(&self, state: &mut State) -> Option<(HostCluster, SpaceContent)> {
        if let Some((cluster, _, content)) = state.space.table_space.take(1) {
            return Some((cluster, content));
        }
        let taken = self.take_clusters(state, 1)[0];
        if taken.1.may_be_hole() && self.file.capabilities().extends_with_zeroes {
            state.space.free.add(taken.0, 1, taken.1);
            return None;
        }
        Some(taken)
    }

    /// Allocates the space of some free clusters, for tables. Errors with no space before anything
    /// is taken.
    pub(crate) async fn make_table_space(&self) -> Result<()> {
        let mut counts = self.turn.take().await;
        self.latch_if_cancelled(self.make_table_space_in_turn(&mut counts))
            .await
    }

    #[boxed]
    async fn make_table_space_in_turn(&self, counts: &mut Counts) -> Result<()> {
        let mut cycled = false;
        loop {
            match self.allocate_tables(counts).await {
                // For one there may be.
                Err(error) if is_no_space(&error) && counts.tables_allocated > 1 => {
                    counts.tables_allocated = 0;
                }
                Err(error) if is_no_space(&error) && !cycled && !self.is_latched() => {
                    // Clusters that are freed, but not durably yet, may suffice.
                    cycled = true;
                    self.cycle(counts).await?;
                }
                other => return other,
            }
        }
    }

    async fn allocate_tables(&self, counts: &mut Counts) -> Result<()> {
        let bits = self.geometry().cluster_bits();
        let most = (TABLES_BYTES_MAX >> bits).max(1);
        let (start, len, content) = {
            let mut state = self.lock();
            self.unlatched(&state)?;
            if state.space.table_space.clusters() > 0 {
                return Ok(());
            }
            match state
                .space
                .free
                .take(counts.tables_allocated.clamp(1, most))
            {
                Some(run) => run,
                // The request finds that out, and asks for room first.
                None => return Ok(()),
            }
        };
        let allocated = match counts.cannot_allocate {
            true => Ok(()),
            false => self.file.allocate(start.0 << bits, len << bits).await,
        };
        let mut state = self.lock();
        match allocated {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::Unsupported => {
                counts.cannot_allocate = true;
            }
            Err(error) => {
                state.space.free.add(start, len, content);
                return Err(error);
            }
            Ok(()) => {}
        }
        counts.tables_allocated += len;
        state.space.table_space.add(start, len, content);
        Ok(())
    }

    /// Releases the space that this session has grown and not used. After the last cycle.
    pub(crate) async fn trim(&self) -> Result<()> {
        let _turn = self.turn.take().await;
        let (start, hint) = {
            let mut state = self.lock();
            state.space.release_table_space();
            let hint = state.committed.header.extensions.allocation;
            let start = state.space.unused_from();
            let stays = state.health.is_latched() || state.mapping.epochs.any_abandoned();
            if stays {
                return Ok(());
            }
            if start >= state.space.claimed() {
                // Nothing is ahead of need: the row of closes with growth is broken.
                (None, hint.map(|hint| hint.with_closes(0)))
            } else {
                match growth::at_close(hint.map(|hint| hint.closes_ahead)) {
                    AtClose::Keep => return Ok(()),
                    AtClose::Trim(closes) => {
                        state.space.cut_to(start);
                        (Some(start), hint.map(|hint| hint.with_closes(closes)))
                    }
                }
            }
        };
        self.latch_if_cancelled(async {
            if let Some(hint) = hint {
                self.write_allocation_hint(hint).await?;
            }
            match start {
                Some(start) => {
                    self.file
                        .set_len(start << self.geometry().cluster_bits())
                        .await
                }
                None => Ok(()),
            }
        })
        .await
    }
}
