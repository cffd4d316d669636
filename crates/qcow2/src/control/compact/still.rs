//! Moves of what several words refer to, and of tables, while nothing else is under way.
//!
//! Every reference is one word: of an L2 table, of an L1 table, of the table of snapshots, or of
//! that of a bitmap. So all of these move in one way, some clusters at a time, and requests go on
//! between.
//!
//! | step, with a barrier after each | a crash in it leaves |
//! | --- | --- |
//! | all that has changed is written; each word is looked at once more | the old state |
//! | the new place gets the count of the old one, as a whole, and its bytes | leaks |
//! | each word refers to the new place | words of either place: both have the bytes, and a count that is no lower than their words |
//! | the count of the old place becomes 0; then its space is free | leaks |
//!
//! A cluster moves only if the words that are known are all there are: if they count as often as
//! the cluster is counted. What a guest, or a change of snapshots, has done since the words were
//! found leaves it where it is.
//!
//! A cluster with one reference has one word, which is old or new. One with several has COPIED
//! clear in all of them, and both places keep a count above 1 until the last step: no flag
//! contradicts a count at any moment.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;

use cowslip_block::joins::{Ahead, Set};
use cowslip_boxed::boxed;
use smallvec::SmallVec;

use super::survey::Kind;
use super::units::Unit;
use crate::check::reader::Reader;
use crate::commit::probe::Stage as ProbeStage;
use crate::commit::writeback::is_no_space;
use crate::control::snapshot::read_list;
use crate::entry::big_endian;
use crate::entry::inspect::inspect_l1;
use crate::entry::moved::moved_table;
use crate::file::{AlignedFile, Durability, Event, Space};
use crate::geometry::HostCluster;
use crate::job::Job;
use crate::space::alloc::SpaceContent;
use crate::{Counts, Qcow2};
use crate::{Error, Result};

/// Bytes around a word that are read and changed at a time, if a cluster has as many.
const PIECE_BYTES: u64 = 4096;
/// L1 tables are read in pieces of this size.
const L1_PIECE_BYTES: u64 = 256 << 10;
/// Reads, copies or changes at once.
const AT_ONCE: usize = 16;

/// A cluster whose words are known, and are all there are.
#[derive(Debug)]
struct Sure {
    kind: Kind,
    from: HostCluster,
    /// Where it goes.
    to: HostCluster,
    /// The place that is planned for it, if it is one alone.
    planned: Option<HostCluster>,
    /// Its references.
    count: u64,
    words: SmallVec<[u64; 2]>,
}

/// Where the words are that refer to tables, by the offsets of the tables.
type Words = BTreeMap<u64, SmallVec<[u64; 2]>>;

/// Clusters that move, and the parts of the file that have their words, by offset.
#[derive(Debug, Default)]
struct Moving {
    sure: Vec<Sure>,
    pieces: BTreeMap<u64, Vec<u8>>,
    /// How many of them have the count at their new place.
    raised: usize,
}

/// Ends all of these, and returns the first failure: none is under way afterwards.
async fn all(works: Vec<impl Future<Output = Result<()>>>) -> Result<()> {
    let mut works = works.into_iter();
    let mut under_way: Set<_> = works.by_ref().take(AT_ONCE).map(Box::pin).collect();
    let mut outcome = Ok(());
    while let Some(one) = under_way.next().await {
        outcome = outcome.and(one);
        works.next().into_iter().for_each(|work| {
            under_way.push(work);
        });
    }
    outcome
}

impl Qcow2 {
    /// Moves clusters of one kind to the places that are planned, or to free ones before `end`
    /// clusters, those of which all references are known. Requests wait meanwhile. Returns the
    /// places that are left.
    #[boxed]
    pub(super) async fn move_still(
        &self,
        batch: &[Unit],
        end: u64,
        job: &Job,
    ) -> Result<Vec<HostCluster>> {
        let bytes = (batch.len() as u64) << self.geometry().cluster_bits();
        job.begin(bytes).await?;
        // So that requests wait for less.
        self.write_back().await?;
        let moved = match self.stand_still().await {
            Ok(_still) => {
                let mut counts = self.turn.take().await;
                let moved = self.move_in_turn(&mut counts, batch, end);
                self.latch_if_cancelled(moved).await?
            }
            // What a request may reach that was dropped stays where it is.
            Err(_) => Vec::new(),
        };
        job.done(bytes);
        Ok(moved)
    }

    #[boxed]
    async fn move_in_turn(
        &self,
        counts: &mut Counts,
        batch: &[Unit],
        end: u64,
    ) -> Result<Vec<HostCluster>> {
        self.settle_space(counts).await?;
        {
            let state = self.lock();
            self.unlatched(&state)?;
            if !state.space.quarantine.is_empty() {
                return Ok(Vec::new());
            }
        }
        let mut moving = self.sure(counts, batch).await?;
        self.take_planned(&mut moving.sure, end);
        if moving.sure.is_empty() {
            return Ok(Vec::new());
        }
        if let Err(error) = self.fill_places(counts, &mut moving).await {
            self.give_places_back(counts, &moving, &error).await;
            return Err(error);
        }
        if let Err(error) = self.switch_words(&moving).await {
            match is_no_space(&error) && !self.is_latched() {
                true => self.switch_back(counts, &moving, &error).await,
                false => self.latch(&error),
            }
            return Err(error);
        }
        let settled = self.settle_moved(counts, &moving.sure).await;
        self.or_latched(settled)?;
        Ok(moving.sure.iter().map(|sure| sure.from).collect())
    }

    /// Finds those clusters whose words are all known.
    async fn sure(&self, counts: &mut Counts, batch: &[Unit]) -> Result<Moving> {
        let mask = !(self.geometry().cluster_bytes() - 1);
        let bits = self.geometry().cluster_bits();
        let kind = batch.first().map_or(Kind::Fixed, |unit| unit.kind);
        let tables: BTreeSet<u64> = match kind {
            Kind::Table => batch.iter().map(|unit| unit.from.0 << bits).collect(),
            _ => {
                let words = batch.iter().flat_map(|unit| &unit.words);
                words.map(|at| at & mask).collect()
            }
        };
        let references = match kind {
            Kind::SnapshotL1 => self.snapshot_words().await?,
            Kind::Bits => Words::new(),
            _ => self.l1_words(&tables).await?,
        };
        let times = |table: u64| references.get(&table).map_or(0, |words| words.len() as u64);
        let mut moving = Moving::default();
        for unit in batch {
            let words = match kind {
                Kind::Table | Kind::SnapshotL1 => references.get(&(unit.from.0 << bits)).cloned(),
                Kind::Bits => self.is_in_bitmaps(&unit.words).then(|| unit.words.clone()),
                _ => Some(unit.words.clone()),
            };
            let words = words.unwrap_or_default();
            let counted = match kind {
                Kind::Table | Kind::SnapshotL1 | Kind::Bits => words.len() as u64,
                // Where a table was that has gone, no word counts.
                _ => words.iter().map(|at| times(at & mask)).sum(),
            };
            let count = counts.refcounts.get(unit.from).await?;
            if count > 0 && count == counted {
                moving.sure.push(Sure {
                    kind: unit.kind,
                    from: unit.from,
                    to: unit.from,
                    planned: unit.to,
                    count,
                    words,
                });
            }
        }
        moving.pieces = self.pieces_with(&moving.sure).await?;
        let Moving { sure, pieces, .. } = &mut moving;
        sure.retain(|sure| {
            let mut words = sure.words.iter();
            words.all(|&at| self.moved_word(pieces, sure, at).is_some())
        });
        Ok(moving)
    }

    /// Where the words are of the L1 tables of all snapshots.
    async fn snapshot_words(&self) -> Result<Words> {
        let header = self.header();
        let list = read_list(&self.file, &header).await?;
        let mut found = Words::new();
        let mut at = header.snapshots_offset;
        for position in 0..list.len() as usize {
            let entry = &list.entry(position).fixed;
            found.entry(entry.l1_offset).or_default().push(at);
            at += entry.entry_bytes();
        }
        Ok(found)
    }

    /// Returns whether all of these words are in tables of bitmaps.
    fn is_in_bitmaps(&self, words: &[u64]) -> bool {
        let state = self.lock();
        let directory = state.bitmaps.directory();
        words.iter().all(|&at| {
            let mut tables = directory.iter().map(|entry| &entry.fixed);
            tables.any(|table| {
                let within = at.checked_sub(table.table_offset);
                within.is_some_and(|within| within < table.table_bytes())
            })
        })
    }

    /// Where the words are of these L2 tables in the L1 tables of the disk and of all snapshots.
    async fn l1_words(&self, tables: &BTreeSet<u64>) -> Result<Words> {
        let header = self.header();
        let mut found = Words::new();
        if tables.is_empty() {
            return Ok(found);
        }
        let list = read_list(&self.file, &header).await?;
        let mut l1_tables = vec![(header.l1_table_offset, header.l1_bytes())];
        for position in 0..list.len() as usize {
            let entry = &list.entry(position).fixed;
            l1_tables.push((entry.l1_offset, u64::from(entry.l1_size) * 8));
        }
        let reader = Reader::new(self.file.block_file()).await?;
        for (offset, bytes) in l1_tables {
            let mut at = offset;
            let mut pieces = pin!(reader.pieces(offset, bytes, L1_PIECE_BYTES));
            while let Some(piece) = pieces.next().await {
                for entry in piece?.words() {
                    let table = inspect_l1(entry).offset;
                    if tables.contains(&table) {
                        found.entry(table).or_default().push(at);
                    }
                    at += 8;
                }
            }
        }
        Ok(found)
    }

    fn piece_bytes(&self) -> u64 {
        PIECE_BYTES.min(self.geometry().cluster_bytes())
    }

    /// Reads the parts of the file that have the words.
    async fn pieces_with(&self, sure: &[Sure]) -> Result<BTreeMap<u64, Vec<u8>>> {
        let len = self.piece_bytes();
        let words = sure.iter().flat_map(|sure| &sure.words);
        let starts: BTreeSet<u64> = words.map(|at| at & !(len - 1)).collect();
        let reads: Vec<_> = starts
            .iter()
            .map(|&at| self.file.read_new(at, len))
            .collect();
        let mut reads = Ahead::new(reads, AT_ONCE);
        let mut pieces = BTreeMap::new();
        for start in starts {
            if let Some(read) = reads.next().await {
                pieces.insert(start, read?.to_vec());
            }
        }
        Ok(pieces)
    }

    /// A word that refers to the new place. `None` if the one that is there refers elsewhere.
    fn moved_word(&self, pieces: &BTreeMap<u64, Vec<u8>>, sure: &Sure, at: u64) -> Option<u64> {
        let len = self.piece_bytes();
        let piece = pieces.get(&(at & !(len - 1)))?;
        let word = big_endian(piece.get((at & (len - 1)) as usize..)?.get(..8)?);
        let from = self.geometry().host_offset(sure.from).0;
        let to = self.geometry().host_offset(sure.to).0;
        match sure.kind {
            Kind::Table | Kind::Bits => moved_table(word, from, to),
            Kind::SnapshotL1 => (word == from).then_some(to),
            _ => self.format.moved_l2(word, from, to),
        }
    }

    /// Takes the planned places, or the lowest free ones; what finds none stays.
    fn take_planned(&self, sure: &mut Vec<Sure>, end: u64) {
        let mut state = self.lock();
        sure.retain_mut(|sure| {
            let free = &mut state.space.free;
            let most = end.min(sure.from.0);
            let taken = match sure.planned {
                Some(to) => free.take_at(to, 1).then_some(to),
                None => free.take_before(most, 1).map(|(to, _)| to),
            };
            let Some(to) = taken else {
                return false;
            };
            debug_assert!(!state.space.protected.contains(to), "metadata is not free");
            sure.to = to;
            true
        });
    }

    /// Counts the new places, and copies the bytes, durably. Nothing refers to them yet.
    async fn fill_places(&self, counts: &mut Counts, moving: &mut Moving) -> Result<()> {
        let _stage = self.probe.stage(ProbeStage::Raise);
        for sure in &moving.sure {
            counts.refcounts.add(sure.to, sure.count as i64).await?;
            moving.raised += 1;
        }
        counts.refcounts.write_dirty().await?;
        self.file.reach(Event::CowRead).await;
        let copies = moving.sure.iter().map(|sure| self.copy_cluster(sure));
        all(copies.collect()).await?;
        self.barrier().await
    }

    async fn copy_cluster(&self, sure: &Sure) -> Result<()> {
        let len = self.geometry().cluster_bytes();
        let from = self.geometry().host_offset(sure.from).0;
        let to = self.geometry().host_offset(sure.to).0;
        let file: &AlignedFile = match sure.kind {
            // A cipher that numbers sectors by their place has other bytes for them there. One that
            // numbers them by the disk's has the same.
            Kind::Shared if !self.data.is_keyed_by_guest() => &self.data,
            _ => &self.file,
        };
        let bytes = file.read_new(from, len).await?;
        if sure.kind == Kind::Shared && self.is_hole((from, len), &bytes).await {
            return file.zero(to, len, Space::Release).await;
        }
        let data = vec![bytes.freeze()];
        file.write(to, data, Durability::Cached).await
    }

    /// Has all words refer to the new places, durably.
    async fn switch_words(&self, moving: &Moving) -> Result<()> {
        let _stage = self.probe.stage(ProbeStage::Slices);
        self.file.reach(Event::L2Update).await;
        self.write_pieces(&moving.pieces, &self.new_pieces(moving))
            .await?;
        self.barrier().await
    }

    /// Writes the sectors in which parts of the file differ from others of the same places.
    async fn write_pieces(
        &self,
        old: &BTreeMap<u64, Vec<u8>>,
        new: &BTreeMap<u64, Vec<u8>>,
    ) -> Result<()> {
        let pieces = old.iter().zip(new.values());
        let writes = pieces.map(|((&start, old), new)| self.write_changes(start, old, new));
        all(writes.collect()).await
    }

    /// The parts of the file with words that refer to the new places.
    fn new_pieces(&self, moving: &Moving) -> BTreeMap<u64, Vec<u8>> {
        let len = self.piece_bytes();
        let mut new = moving.pieces.clone();
        for sure in &moving.sure {
            for &at in &sure.words {
                let word = self.moved_word(&moving.pieces, sure, at);
                let piece = new.get_mut(&(at & !(len - 1)));
                if let (Some(word), Some(piece)) = (word, piece) {
                    let within = (at & (len - 1)) as usize;
                    piece[within..within + 8].copy_from_slice(&word.to_be_bytes());
                }
            }
        }
        new
    }

    /// Without space for some of the words: all of them refer to the old places again, whatever has
    /// become of the writes.
    async fn switch_back(&self, counts: &mut Counts, moving: &Moving, error: &Error) {
        let new = self.new_pieces(moving);
        let back = async {
            self.write_pieces(&new, &moving.pieces).await?;
            self.barrier().await
        };
        match back.await {
            Ok(()) => self.give_places_back(counts, moving, error).await,
            Err(failed) => self.latch(&failed),
        }
    }

    /// After a failure nothing refers to the new places, durably: they are free again.
    async fn give_places_back(&self, counts: &mut Counts, moving: &Moving, error: &Error) {
        // Nothing may depend on a write that may have failed halfway, unless all is known.
        if !is_no_space(error) || self.is_latched() {
            self.latch(error);
            return;
        }
        let lowered = async {
            for sure in &moving.sure[..moving.raised] {
                counts.refcounts.add(sure.to, -(sure.count as i64)).await?;
            }
            counts.refcounts.write_dirty().await
        };
        match lowered.await {
            // The counts are written with those of the next cycle.
            Err(failed) if !is_no_space(&failed) => self.latch(&failed),
            Ok(()) | Err(_) => {
                let mut state = self.lock();
                for sure in &moving.sure {
                    state.space.free.add(sure.to, 1, SpaceContent::Unknown);
                }
            }
        }
    }

    /// Memory knows the new places, and the old ones are free.
    async fn settle_moved(&self, counts: &mut Counts, moved: &[Sure]) -> Result<()> {
        let bits = self.geometry().cluster_bits();
        let tables = moved.iter().filter(|sure| sure.kind == Kind::Table);
        let tables: BTreeMap<u64, u64> = tables
            .map(|sure| (sure.from.0 << bits, sure.to.0 << bits))
            .collect();
        {
            let mut state = self.lock();
            let mut l1 = state.mapping.tables.l1().to_vec();
            for entry in &mut l1 {
                let from = inspect_l1(*entry).offset;
                if let Some(&to) = tables.get(&from) {
                    *entry = moved_table(*entry, from, to).unwrap_or(*entry);
                }
            }
            state.forget_tables(l1);
        }
        self.protect_again(&counts.refcounts).await?;
        let stage = self.probe.stage(ProbeStage::Lower);
        self.file.reach(Event::ClusterFree).await;
        let mut freed = Vec::new();
        for sure in moved {
            if counts
                .refcounts
                .add(sure.from, -(sure.count as i64))
                .await?
                == 0
            {
                freed.push(sure.from);
            }
        }
        counts.refcounts.write_dirty().await?;
        self.barrier().await?;
        counts.refcounts.settle();
        drop(stage);
        self.free_clusters(counts, freed).await;
        Ok(())
    }
}
