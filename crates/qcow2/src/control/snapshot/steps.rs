//! The steps of [`super`]: what each writes, and how it is taken back.

use std::ops::Range;

use super::list::{Entry, SnapshotChoice, SnapshotList};
use super::not_found;
use super::tree::{Balance, Tree};
use crate::check::reader::Reader;
use crate::commit::probe::Stage as ProbeStage;
use crate::commit::writeback::is_no_space;
use crate::file::{AlignedFile, Durability};
use crate::geometry::HostCluster;
use crate::header::{Header, L1_BYTES_MAX, incompatible};
use crate::inspect::snapshot_table_bytes;
use crate::job::{Job, Stage};
use crate::space::alloc::SpaceContent;
use crate::space::refcount::Refcounts;
use crate::units::round_up;
use crate::{Buf, Error, Result};
use crate::{Counts, Qcow2};

/// Changed slices of counts that are kept before they are written.
const CHANGED_COUNTS_MAX: usize = 256;
/// Long tables are read in pieces of this size.
const PIECE_BYTES: u64 = 256 << 10;

/// A structure in space of its own, which nothing refers to yet.
#[derive(Debug)]
struct Structure {
    clusters: Range<u64>,
    bytes: Vec<u8>,
}

/// The preparations for a new state, and how far they are: all of this can be undone.
#[derive(Debug)]
pub struct Preparation {
    balance: Balance,
    /// L2 tables that lose their COPIED bits.
    shared: Vec<u64>,
    /// They are the disk's, and its L1 table loses them too: under the dirty bit.
    pub changes_active: bool,
    structures: Vec<Structure>,
    /// Counts below this cluster are raised.
    raised_to: u64,
    /// Number of clusters of the structures whose refcounts are raised.
    counted: u64,
}

impl Preparation {
    /// Nothing is done yet.
    pub fn new(balance: Balance, shared: Vec<u64>) -> Preparation {
        Preparation {
            balance,
            shared,
            changes_active: false,
            structures: Vec::new(),
            raised_to: 0,
            counted: 0,
        }
    }

    fn clusters(&self) -> impl Iterator<Item = u64> + '_ {
        self.structures.iter().flat_map(|s| s.clusters.clone())
    }
}

/// The bytes of an L1 table.
pub fn l1_bytes(l1: &[u64]) -> Vec<u8> {
    l1.iter().flat_map(|entry| entry.to_be_bytes()).collect()
}

/// Direction in which counts change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    /// Those that rise do.
    Raise,
    /// Those that rose fall again.
    TakeBack,
    /// Those that fall do.
    Lower,
}

impl Direction {
    /// Returns the part in this direction of a count's total change, `balance`.
    fn of(self, balance: i64) -> i64 {
        match self {
            Direction::Raise => balance.max(0),
            Direction::TakeBack => -balance.max(0),
            Direction::Lower => balance.min(0),
        }
    }
}

/// The snapshots of an image; all lies within the file.
pub(crate) async fn read_list(file: &AlignedFile, header: &Header) -> Result<SnapshotList> {
    if header.nb_snapshots == 0 {
        return Ok(SnapshotList::default());
    }
    let offset = header.snapshots_offset;
    let len = file.len().await?;
    let bytes = snapshot_table_bytes(file.block_file().as_ref(), header, len).await?;
    let table = file.read_new(offset, bytes).await?;
    SnapshotList::decode(&table, header.nb_snapshots).ok_or_else(|| Error::Corrupt {
        file: file.name().to_string(),
        structure: "snapshot table",
        offset,
        detail: "an entry reaches beyond its end".to_string(),
    })
}

/// Returns the size of the disk in a snapshot; if its entry does not state one, the present size.
fn disk_bytes(file: &AlignedFile, header: &Header, entry: &Entry) -> Result<u64> {
    let bytes = entry.disk_bytes().unwrap_or(header.size);
    let corrupt = |detail: String| Error::Corrupt {
        file: file.name().to_string(),
        structure: "snapshot table",
        offset: header.snapshots_offset,
        detail,
    };
    let geometry = header.geometry();
    if let Some(flaw) = entry.fixed.l1_flaw(&geometry) {
        return Err(corrupt(format!("the L1 table of a snapshot: {flaw:?}")));
    }
    let entries = geometry.l1_entries_for(bytes);
    if bytes > i64::MAX as u64 || entries > L1_BYTES_MAX / 8 || !bytes.is_multiple_of(512) {
        return Err(corrupt(format!("a snapshot of a disk of {bytes} bytes")));
    }
    Ok(bytes)
}

/// The header of an image as it was when a snapshot was taken, for reading it: size and L1 table.
///
/// # Errors
/// If there is no such snapshot, or it cannot be read.
pub async fn root_of(
    file: &AlignedFile,
    header: &Header,
    choice: &SnapshotChoice,
) -> Result<Header> {
    let list = read_list(file, header).await?;
    let found = list.find(choice);
    let entry = list.entry(found.ok_or_else(|| not_found(file.name(), choice))?);
    let mut then = header.clone();
    then.size = disk_bytes(file, header, entry)?;
    then.l1_table_offset = entry.fixed.l1_offset;
    then.l1_size = entry.fixed.l1_size;
    let end = then.l1_table_offset.checked_add(then.l1_bytes());
    let file_end = round_up(file.len().await?, then.geometry().cluster_bytes());
    if end.is_none_or(|end| end > file_end)
        || u64::from(then.l1_size) < then.geometry().l1_entries_for(then.size)
    {
        return Err(Error::Corrupt {
            file: file.name().to_string(),
            structure: "snapshot table",
            offset: header.snapshots_offset,
            detail: "the L1 table of a snapshot is too small, or beyond the end of the file"
                .to_string(),
        });
    }
    Ok(then)
}

impl Qcow2 {
    /// A snapshot would not contain the data in a data file.
    pub(super) fn refuse_data_file(&self) -> Result<()> {
        if !self.format.data_file {
            return Ok(());
        }
        Err(Error::Unsupported {
            file: self.name().to_string(),
            feature: "a snapshot of an image with an external data file".into(),
        })
    }

    /// Before anything is prepared for writes, too.
    pub(super) async fn refuse_unknown(&self, choice: &SnapshotChoice) -> Result<()> {
        self.refuse_data_file()?;
        let list = read_list(&self.file, &self.header()).await?;
        self.find(&list, choice).map(|_| ())
    }

    pub(super) fn find(&self, list: &SnapshotList, choice: &SnapshotChoice) -> Result<usize> {
        let found = list.find(choice);
        found.ok_or_else(|| not_found(self.name(), choice))
    }

    /// Everything is written, nothing is in the quarantine, and the image is sound. Its snapshots.
    pub(super) async fn begin_snapshots(
        &self,
        counts: &mut Counts,
        job: &Job,
    ) -> Result<SnapshotList> {
        job.enter(Stage::Begin);
        self.cycle(counts).await?;
        self.release_counted_ahead(counts).await?;
        // The host cluster of compressed data may get further references, of which this knows
        // nothing.
        counts.compressed_tail = None;
        // Clusters that the first cycle cleared have no readers left: the second lowers their
        // counts.
        self.cycle(counts).await?;
        self.unlatched(&self.lock())?;
        self.refuse_unsound("no snapshot was touched", job).await?;
        read_list(&self.file, &self.header()).await
    }

    /// The size of the disk in a snapshot that is to be applied.
    pub(super) fn disk_bytes_of(&self, entry: &Entry, header: &Header) -> Result<u64> {
        let bytes = disk_bytes(&self.file, header, entry)?;
        if bytes != header.size && header.version < 3 {
            let text = "Can't resize a v2 image which has snapshots";
            return Err(Error::Invalid(text.to_string()));
        }
        Ok(bytes)
    }

    /// Reads the tables and clusters that a snapshot refers to.
    pub(super) async fn snapshot_tree(&self, entry: &Entry, job: &Job) -> Result<Tree> {
        let l1 = self.snapshot_l1(entry).await?;
        self.read_tree(l1, job).await
    }

    /// The L1 table of a snapshot.
    pub(in crate::control) async fn snapshot_l1(&self, entry: &Entry) -> Result<Vec<u64>> {
        let bytes = u64::from(entry.fixed.l1_size) * 8;
        let mut l1 = Vec::with_capacity(entry.fixed.l1_size as usize);
        let reader = Reader::new(self.file.block_file()).await?;
        let mut pieces = reader.pieces(entry.fixed.l1_offset, bytes, PIECE_BYTES);
        while let Some(piece) = pieces.next().await {
            l1.extend(piece?.words());
        }
        Ok(l1)
    }

    /// An L1 table all of whose L2 tables are shared.
    pub(super) fn without_copied(&self, l1: &[u64]) -> Vec<u64> {
        let clear = |&entry: &u64| self.format.with_copied(entry, false);
        l1.iter().map(clear).collect()
    }

    /// Takes space for a structure; returns its offset, 0 for one without bytes.
    pub(super) async fn place_structure(
        &self,
        counts: &mut Counts,
        preparation: &mut Preparation,
        bytes: Vec<u8>,
    ) -> Result<u64> {
        let clusters = self.geometry().clusters_for(bytes.len() as u64);
        if clusters == 0 {
            return Ok(0);
        }
        let first = self.take_run(counts, clusters).await?;
        preparation.structures.push(Structure {
            clusters: first..first + clusters,
            bytes,
        });
        Ok(first << self.geometry().cluster_bits())
    }

    /// Makes what the new state needs, durably. Nothing refers to it, and the old state loses
    /// nothing.
    pub(super) async fn prepare(
        &self,
        counts: &mut Counts,
        preparation: &mut Preparation,
        job: &Job,
    ) -> Result<()> {
        self.refuse_counts(counts, &preparation.balance, job)
            .await?;
        if preparation.changes_active {
            self.mark_dirty(true).await?;
        }
        let stage = self.probe.stage(ProbeStage::Raise);
        job.enter(Stage::Counts);
        let Preparation {
            balance, raised_to, ..
        } = preparation;
        self.move_counts(counts, (balance, Direction::Raise), raised_to, job)
            .await?;
        for cluster in preparation
            .structures
            .iter()
            .flat_map(|s| s.clusters.clone())
        {
            counts.refcounts.add(HostCluster(cluster), 1).await?;
            preparation.counted += 1;
        }
        counts.refcounts.write_dirty().await?;
        job.enter(Stage::Tables);
        for structure in &mut preparation.structures {
            let clusters = structure.clusters.end - structure.clusters.start;
            let mut bytes = std::mem::take(&mut structure.bytes);
            bytes.resize((clusters << self.geometry().cluster_bits()) as usize, 0);
            let offset = structure.clusters.start << self.geometry().cluster_bits();
            let data = vec![Buf::from(bytes)];
            self.file.write(offset, data, Durability::Cached).await?;
        }
        drop(stage);
        let _stage = self.probe.stage(ProbeStage::Slices);
        self.clear_flags(&preparation.shared, job).await?;
        if preparation.changes_active {
            self.clear_l1_flags().await?;
        }
        job.enter(Stage::Flush);
        self.barrier().await
    }

    /// Refuses what would take a count out of its range, before anything changes.
    async fn refuse_counts(&self, counts: &mut Counts, balance: &Balance, job: &Job) -> Result<()> {
        let max = self.geometry().refcount_max();
        let claimed = self.lock().space.claimed();
        for piece in balance.pieces(0..claimed) {
            job.check()?;
            for cluster in piece {
                let change = balance.of(cluster);
                if change == 0 {
                    continue;
                }
                let count = counts.refcounts.get(HostCluster(cluster)).await?;
                let new = count.checked_add_signed(change);
                if count > 0 && new.is_some_and(|new| new <= max) {
                    continue;
                }
                return Err(self.out_of_range(cluster, count, change));
            }
        }
        Ok(())
    }

    fn out_of_range(&self, cluster: u64, count: u64, change: i64) -> Error {
        let offset = cluster << self.geometry().cluster_bits();
        if count == 0 || change < 0 {
            return Error::Corrupt {
                file: self.name().to_string(),
                structure: "reference count of the cluster",
                offset,
                detail: format!("it is {count} and would have to change by {change}"),
            };
        }
        let (bits, max) = (
            self.geometry().refcount_bits(),
            self.geometry().refcount_max(),
        );
        Error::Invalid(format!(
            "the cluster at offset {offset:#x} has {count} references already, and refcounts of {bits} bits count \
             to {max}"
        ))
    }

    /// Changes counts in the order of the file, up to or from where `at` says that it has come.
    async fn move_counts(
        &self,
        counts: &mut Counts,
        (balance, direction): (&Balance, Direction),
        at: &mut u64,
        job: &Job,
    ) -> Result<()> {
        let end = match direction {
            Direction::TakeBack => *at,
            Direction::Raise | Direction::Lower => self.lock().space.claimed(),
        };
        let pieces = balance.pieces(0..end);
        let order = self.geometry().refcount_order();
        let bytes_of = |piece: &Range<u64>| ((piece.end - piece.start) << order).div_ceil(8);
        job.expect(pieces.iter().map(bytes_of).sum());
        for piece in pieces {
            if direction == Direction::Raise {
                job.begin(bytes_of(&piece)).await?;
            }
            job.done(bytes_of(&piece));
            let mut freed = Vec::new();
            for cluster in piece {
                let change = direction.of(balance.of(cluster));
                if change != 0 {
                    let new = counts.refcounts.add(HostCluster(cluster), change).await?;
                    if new == 0 {
                        freed.push(HostCluster(cluster));
                    }
                }
                if direction == Direction::Raise {
                    *at = cluster + 1;
                }
            }
            self.free_clusters(counts, freed).await;
            self.write_some_counts(&mut counts.refcounts).await?;
        }
        Ok(())
    }

    async fn write_some_counts(&self, refcounts: &mut Refcounts) -> Result<()> {
        match refcounts.dirty_slices() >= CHANGED_COUNTS_MAX {
            true => refcounts.write_dirty().await,
            false => Ok(()),
        }
    }

    /// Frees clusters that nothing refers to, durably, and that no request reads, and releases
    /// their space.
    pub(in crate::control) async fn free_clusters(&self, counts: &Counts, freed: Vec<HostCluster>) {
        let _stage = (!freed.is_empty()).then(|| self.probe.stage(ProbeStage::Release));
        let content = self.punch_clusters(&freed).await;
        let mut state = self.lock();
        for (cluster, content) in freed.into_iter().zip(content) {
            state.space.set_free(counts.scanned, (cluster, content));
        }
    }

    /// After a preparation: what came of it, with the balance for later; or all is taken back.
    pub(super) async fn or_undo<T>(
        &self,
        counts: &mut Counts,
        preparation: Preparation,
        prepared: Result<T>,
        job: &Job,
    ) -> Result<(T, Balance)> {
        let error = match prepared {
            Ok(value) => return Ok((value, preparation.balance)),
            Err(error) => error,
        };
        let begun = preparation.raised_to > 0
            || preparation.counted > 0
            || (preparation.changes_active && self.header().is_dirty());
        if !begun {
            let mut state = self.lock();
            for structure in preparation.structures {
                let len = structure.clusters.end - structure.clusters.start;
                let start = HostCluster(structure.clusters.start);
                state.space.free.add(start, len, SpaceContent::Unknown);
            }
            return Err(error);
        }
        // Nothing may depend on a write that may have failed halfway: a reopen finds its state.
        // When space has run out, or the job was cancelled, all that was written is known.
        let is_known = matches!(error, Error::Cancelled) || is_no_space(&error);
        if is_known && self.unlatched(&self.lock()).is_ok() {
            job.enter(Stage::Undo);
            if let Err(failed) = self.undo(counts, preparation).await {
                self.lock().health.latch(failed);
            }
        } else {
            self.lock().health.latch(error.duplicate());
        }
        Err(error)
    }

    /// Sets counts and flags back, in the order of [`Qcow2::give_up_old`].
    async fn undo(&self, counts: &mut Counts, preparation: Preparation) -> Result<()> {
        let nobody = Job::default();
        let mut at = preparation.raised_to;
        let back = (&preparation.balance, Direction::TakeBack);
        self.move_counts(counts, back, &mut at, &nobody).await?;
        let counted = preparation.counted as usize;
        for cluster in preparation.clusters().take(counted) {
            counts.refcounts.add(HostCluster(cluster), -1).await?;
        }
        {
            let mut state = self.lock();
            for cluster in preparation.clusters() {
                state
                    .space
                    .free
                    .add(HostCluster(cluster), 1, SpaceContent::Unknown);
            }
        }
        counts.refcounts.write_dirty().await?;
        self.barrier().await?;
        if preparation.changes_active {
            self.right_flags(counts, &nobody).await?;
            self.mark_dirty(false).await?;
        }
        Ok(())
    }

    /// The change itself (invariant D6), and what memory knows of tables and metadata. The header
    /// may have changed while space was taken, so it is `change` that says what becomes of it.
    pub(super) async fn switch(
        &self,
        counts: &Counts,
        l1: Vec<u64>,
        change: impl FnOnce(&mut Header),
    ) -> Result<()> {
        let mut header = self.header();
        change(&mut header);
        self.write_header(&header).await?;
        self.lock().forget_tables(l1);
        let protected = self.protect_again(&counts.refcounts).await;
        self.or_latched(protected)
    }

    /// Frees the clusters that only the old state needed, now that nothing refers to them, durably.
    pub(super) async fn give_up_old(
        &self,
        counts: &mut Counts,
        balance: &Balance,
        structures: &[Range<u64>],
        job: &Job,
    ) -> Result<()> {
        let _stage = self.probe.stage(ProbeStage::Lower);
        job.enter(Stage::Counts);
        let done = async {
            let lower = (balance, Direction::Lower);
            self.move_counts(counts, lower, &mut 0, job).await?;
            for clusters in structures {
                self.free_metadata(counts, clusters.clone()).await?;
            }
            counts.refcounts.write_dirty().await?;
            job.enter(Stage::Flush);
            self.barrier().await
        };
        self.or_latched(done.await)
    }

    /// Sets COPIED in the disk's tables exactly where the count is 1, which is durable.
    pub(in crate::control) async fn right_flags(
        &self,
        counts: &mut Counts,
        job: &Job,
    ) -> Result<()> {
        let _stage = self.probe.stage(ProbeStage::Slices);
        job.enter(Stage::Tables);
        let done = async {
            let l1 = self.set_flags(counts, job).await?;
            self.barrier().await?;
            self.lock().forget_tables(l1);
            Ok(())
        };
        self.or_latched(done.await)
    }

    /// The new state is whole.
    pub(super) async fn end_snapshots(&self, counts: &mut Counts) -> Result<()> {
        if self.header().is_dirty() {
            self.mark_dirty(false).await?;
        }
        counts.refcounts.settle();
        Ok(())
    }

    /// The mark for the next opening that flags may be behind the counts; version 2 has none.
    pub(in crate::control) async fn mark_dirty(&self, is_dirty: bool) -> Result<()> {
        let mut header = self.header();
        if header.version < 3 || header.is_dirty() == is_dirty {
            return Ok(());
        }
        header.incompatible_features ^= incompatible::DIRTY;
        self.write_header(&header).await
    }
}
