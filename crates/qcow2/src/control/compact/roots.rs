//! Moves of structures of one cluster to which one word refers that is a root: the disk's L1 table,
//! the table of snapshots, the refcount table and its blocks, the directory of bitmaps and their
//! tables.
//!
//! Only the holder of the turn reads and writes them, so requests go on. A root changes as ever
//! (invariant D6):
//!
//! | step, with a barrier after each | a crash in it leaves |
//! | --- | --- |
//! | all that has changed is written; the new place has a count | a leak |
//! | it gets the bytes | the same |
//! | the root names the new place | the old structure or the new one, which are equal |
//! | the count of the old place becomes 0; then its space is free | a leak |

use cowslip_boxed::boxed;

use super::survey::Kind;
use super::units::Unit;
use crate::commit::roots::Flush;
use crate::commit::writeback::{entry_writes, is_no_space};
use crate::entry::big_endian;
use crate::file::Durability;
use crate::geometry::HostCluster;
use crate::header::Header;
use crate::job::Job;
use crate::space::alloc::SpaceContent;
use crate::{Buf, Error, Result};
use crate::{Counts, Qcow2};

/// The word that refers to a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Root {
    /// A field of the header.
    Header(Kind),
    /// The entry of the refcount table at this index.
    Block(u64),
    /// The field of an entry of the directory of bitmaps, at this offset.
    Directory(u64),
}

/// Returns the field of the header that names a structure.
fn field(header: &mut Header, kind: Kind) -> Option<&mut u64> {
    match kind {
        Kind::ActiveL1 => Some(&mut header.l1_table_offset),
        Kind::Snapshots => Some(&mut header.snapshots_offset),
        Kind::Counts => Some(&mut header.refcount_table_offset),
        Kind::Directory => {
            let directory = header.extensions.bitmaps.as_mut();
            directory.map(|directory| &mut directory.bitmap_directory_offset)
        }
        _ => None,
    }
}

impl Qcow2 {
    /// Moves structures to free places before `end` clusters, those that are where they were.
    /// Returns the places that are left.
    #[boxed]
    pub(super) async fn move_roots(
        &self,
        batch: &[Unit],
        end: u64,
        job: &Job,
    ) -> Result<Vec<HostCluster>> {
        let bytes = self.geometry().cluster_bytes();
        let mut left = Vec::new();
        for unit in batch {
            job.begin(bytes).await?;
            {
                let mut counts = self.turn.take().await;
                let moving = self.move_root(&mut counts, unit, end);
                if self.latch_if_cancelled(moving).await? {
                    left.push(unit.from);
                }
            }
            job.done(bytes);
        }
        Ok(left)
    }

    #[boxed]
    async fn move_root(&self, counts: &mut Counts, unit: &Unit, end: u64) -> Result<bool> {
        self.cycle(counts).await?;
        // What is counted ahead is free, too.
        self.release_counted_ahead(counts).await?;
        let from = unit.from;
        let Some(root) = self.root_of_structure(counts, unit).await? else {
            return Ok(false);
        };
        let to = {
            let mut state = self.lock();
            self.unlatched(&state)?;
            let Some((to, _)) = state.space.free.take_before(end.min(from.0), 1) else {
                return Ok(false);
            };
            to
        };
        if let Err(error) = self.copy_structure(counts, (from, to)).await {
            self.forget_copy(counts, to, &error).await;
            return Err(error);
        }
        // As in a session that opens the image, tables of bitmaps are not.
        if !matches!(root, Root::Directory(_)) {
            self.lock().protect_cluster(to);
        }
        self.name_place(counts, root, (from, to)).await?;
        let freed = async {
            self.free_metadata(counts, from.0..from.0 + 1).await?;
            counts.refcounts.write_dirty().await?;
            self.barrier().await
        };
        match freed.await {
            // The next cycle writes the counts.
            Err(error) if !is_no_space(&error) => self.or_latched(Err(error)),
            ended => ended.map(|()| true),
        }
    }

    /// The word that refers to a structure, if it does and nothing else can.
    async fn root_of_structure(&self, counts: &mut Counts, unit: &Unit) -> Result<Option<Root>> {
        let from = self.geometry().host_offset(unit.from).0;
        if counts.refcounts.get(unit.from).await? != 1 {
            return Ok(None);
        }
        let root = match unit.kind {
            Kind::Block => {
                let blocks = counts.refcounts.table().iter();
                let index = blocks.clone().position(|&block| block == from);
                index.map(|index| Root::Block(index as u64))
            }
            Kind::BitmapTable => {
                let Some(&at) = unit.words.first() else {
                    return Ok(None);
                };
                let word = self.file.read_new(at, 8).await?;
                let state = self.lock();
                let place = state.committed.header.consistent_bitmaps();
                let within = place.and_then(|directory| {
                    let within = at.checked_sub(directory.bitmap_directory_offset);
                    within.filter(|&within| within < directory.bitmap_directory_size)
                });
                let mut directory = state.bitmaps.directory().iter();
                let is_there = directory.any(|entry| entry.fixed.table_offset == from);
                let is_named = within.is_some() && is_there && big_endian(&word) == from;
                is_named.then_some(Root::Directory(at))
            }
            kind => {
                let mut header = self.header();
                let named = field(&mut header, kind).map(|at| *at);
                (named == Some(from)).then_some(Root::Header(kind))
            }
        };
        Ok(root)
    }

    /// Counts a new place, and copies a structure there, durably.
    async fn copy_structure(
        &self,
        counts: &mut Counts,
        (from, to): (HostCluster, HostCluster),
    ) -> Result<()> {
        let geometry = *self.geometry();
        counts.refcounts.add(to, 1).await?;
        // A block that moves may count its own new place.
        counts.refcounts.write_dirty().await?;
        let (from, to) = (geometry.host_offset(from).0, geometry.host_offset(to).0);
        let bytes = self.file.read_new(from, geometry.cluster_bytes()).await?;
        let data = vec![bytes.freeze()];
        self.file.write(to, data, Durability::Cached).await?;
        self.barrier().await
    }

    /// After a failure nothing refers to the new place.
    async fn forget_copy(&self, counts: &mut Counts, to: HostCluster, error: &Error) {
        let is_known = is_no_space(error) && !self.is_latched();
        let lowered = match is_known {
            true => self.free_copy(counts, to).await,
            false => Err(error.duplicate()),
        };
        if let Err(failed) = lowered
            && (!is_known || !is_no_space(&failed))
        {
            self.latch(&failed);
        }
    }

    async fn free_copy(&self, counts: &mut Counts, to: HostCluster) -> Result<()> {
        if counts.refcounts.get(to).await? > 0 {
            counts.refcounts.add(to, -1).await?;
        }
        self.lock().space.free.add(to, 1, SpaceContent::Unknown);
        // If there is no space for it, the next cycle writes it.
        counts.refcounts.write_dirty().await
    }

    /// Has the root name the new place, durably.
    async fn name_place(
        &self,
        counts: &mut Counts,
        root: Root,
        (from, to): (HostCluster, HostCluster),
    ) -> Result<()> {
        let from = self.geometry().host_offset(from);
        let to = self.geometry().host_offset(to);
        match root {
            Root::Header(kind) => {
                let old = self.header();
                let mut header = old.clone();
                if let Some(named) = field(&mut header, kind) {
                    *named = to.0;
                }
                match kind {
                    // Its field lies behind those of fixed length.
                    Kind::Directory => self.change_header(&old, header).await?,
                    _ => self.write_header(&header).await?,
                }
                if kind == Kind::Counts {
                    let table = counts.refcounts.table().to_vec();
                    counts.refcounts.set_table(table, to);
                }
            }
            Root::Block(index) => {
                let at = counts.refcounts.table_offset();
                let writes = entry_writes(at.0, &[(index, to.0)]);
                self.write_root(writes, Flush::File).await?;
                let mut table = counts.refcounts.table().to_vec();
                table[index as usize] = to.0;
                counts.refcounts.set_table(table, at);
            }
            Root::Directory(at) => {
                let word = vec![Buf::copy_of(&to.0.to_be_bytes())];
                self.write_root(vec![(at, word)], Flush::File).await?;
                self.lock().bitmaps.table_moved(from.0, to.0);
            }
        }
        Ok(())
    }
}
