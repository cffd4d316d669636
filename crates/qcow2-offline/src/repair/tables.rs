//! L1 and L2 tables: every entry is looked at once, and decided.

use cowslip_block::joins::Ahead;

use super::plan::{Event, Plan};
use super::step::{Change, Step};
use super::survey::{Copy, L2Table, LostCluster, LostTable, Owner};
use crate::check::Structure;
use crate::check::counts::Copied;
use crate::entry::big_endian;
use crate::entry::inspect::{self, ClaimedSpace};
use crate::entry::mend::{Mend, Surroundings, Wrong};
use crate::file::AlignedFile;
use crate::units::pieces;
use crate::{BufMut, Result};

/// Long tables are read in pieces of this size.
const PIECE_BYTES: u64 = 256 << 10;
/// L2 tables that are read at once, within these bytes.
const READ_AHEAD_BYTES: u64 = 4 << 20;
const READ_AHEAD: u64 = 32;

/// Reads tables of `len` bytes, in order, several at a time.
pub(super) fn read_each(
    file: &AlignedFile,
    offsets: Vec<u64>,
    len: u64,
) -> Ahead<impl Iterator<Item: Future<Output = Result<(u64, BufMut)>> + Send>> {
    let ahead = (READ_AHEAD_BYTES / len).clamp(2, READ_AHEAD) as usize;
    let read = move |offset| async move {
        let bytes = file.read_new(offset, len).await?;
        Ok((offset, bytes))
    };
    Ahead::new(offsets.into_iter().map(read), ahead)
}

impl Plan<'_> {
    /// Looks through the L1 tables and notes the L2 tables; what may be lost is left for later.
    pub(super) async fn survey_l1_tables(&mut self) -> Result<()> {
        for position in 0..self.survey.l1s.len() {
            let (offset, bytes) = {
                let l1 = &self.survey.l1s[position];
                (l1.offset, l1.bytes())
            };
            if bytes == 0 {
                continue;
            }
            for piece in pieces(0, bytes, PIECE_BYTES) {
                if offset + piece.start >= self.survey.file_bytes {
                    break;
                }
                let len = piece.end - piece.start;
                let table = self.file.read_new(offset + piece.start, len).await?;
                for (index, entry) in (piece.start / 8..).zip(table.chunks_exact(8).map(big_endian))
                {
                    if entry != 0 {
                        self.l1_entry(position, index, entry)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn l1_entry(&mut self, l1: usize, index: u64, mut entry: u64) -> Result<()> {
        let format = self.survey.format;
        while let Some(mend) = format.mend_l1(entry, self.survey.file_bytes) {
            if mend.candidate.is_some() {
                self.charge(2 * std::mem::size_of::<LostTable>() as u64)?;
                self.survey.lost_tables.push(LostTable {
                    l1,
                    index,
                    entry,
                    mend,
                });
                return Ok(());
            }
            self.change_l1_entry(l1, index, entry, &mend)?;
            entry = mend.entry;
        }
        let table = inspect::inspect_l1(entry);
        if table.offset == 0 {
            return Ok(());
        }
        let cluster = table.offset >> self.survey.geometry.cluster_bits();
        let is_table = |structure| structure == Structure::L2;
        let wrong = if !self.survey.owner(cluster).is_none_or(is_table) {
            Some(Wrong::NoTable)
        } else if self.survey.is_of_another_entry(table.offset, index) {
            Some(Wrong::OthersTable)
        } else {
            None
        };
        if let Some(wrong) = wrong {
            let mend = Mend {
                entry: 0,
                bitmap: 0,
                wrong,
                loses: true,
                candidate: None,
            };
            return self.change_l1_entry(l1, index, entry, &mend);
        }
        let owner = self.survey.l1s[l1].owner;
        self.survey
            .note_table(table.offset, table.copied, owner, index)
    }

    fn change_l1_entry(&mut self, l1: usize, index: u64, entry: u64, mend: &Mend) -> Result<()> {
        let table = &self.survey.l1s[l1];
        let change = Change {
            at: table.offset + index * 8,
            from: entry,
            to: mend.entry,
        };
        let moves = table.moves.is_some();
        self.step(&Step::L1Entry {
            change,
            wrong: mend.wrong,
            loses: mend.loses,
        });
        if moves {
            self.charge(2 * std::mem::size_of::<Change>() as u64)?;
            self.survey.l1s[l1].changes.push(change);
            return Ok(());
        }
        self.survey.change(change)
    }

    /// Looks where entries that start no cluster may have pointed: to a table, if the cluster holds
    /// one, is counted, and nothing else uses it.
    pub(super) async fn find_lost_tables(&mut self) -> Result<()> {
        for lost in std::mem::take(&mut self.survey.lost_tables) {
            let mut mend = lost.mend;
            if let Some(candidate) = mend.candidate
                && self.is_lost_table(candidate).await?
            {
                mend.entry = self.survey.format.aligned(lost.entry, candidate);
                mend.loses = false;
                let owner = self.survey.l1s[lost.l1].owner;
                let copied = inspect::inspect_l1(mend.entry).copied;
                self.survey
                    .note_table(candidate, copied, owner, lost.index)?;
            }
            self.change_l1_entry(lost.l1, lost.index, lost.entry, &mend)?;
        }
        Ok(())
    }

    async fn is_lost_table(&mut self, candidate: u64) -> Result<bool> {
        let cluster_bytes = self.survey.geometry.cluster_bytes();
        if candidate >= self.survey.file_bytes
            || self.survey.is_owned(candidate, cluster_bytes)
            || !self.may_be_in_use(candidate).await?
        {
            return Ok(false);
        }
        let bytes = self.file.read_new(candidate, cluster_bytes).await?;
        let mut mapped = 0;
        for (_, entry, bitmap) in self.entries(&bytes) {
            // Where the guest has it matters for a data file only, where the check is the same.
            let around = Surroundings {
                file_bytes: self.survey.file_bytes,
                guest_offset: 0,
            };
            match self.survey.format.mend_l2(entry, bitmap, &around) {
                Some(Mend {
                    wrong: Wrong::DataFileOffset,
                    ..
                })
                | None => mapped += 1,
                Some(_) => return Ok(false),
            }
        }
        Ok(mapped > 0)
    }

    /// The entries of an L2 table that say anything: index, entry, bitmap.
    pub(super) fn entries<'b>(
        &self,
        bytes: &'b [u8],
    ) -> impl Iterator<Item = (u64, u64, u64)> + use<'b> {
        let extended = self.survey.geometry.extended_l2();
        let len = self.survey.geometry.l2_entry_bytes() as usize;
        let words = (0..).zip(bytes.chunks_exact(len));
        words
            .map(move |(index, words)| {
                let bitmap = if extended { big_endian(&words[8..]) } else { 0 };
                (index, big_endian(&words[..8]), bitmap)
            })
            .filter(|&(_, entry, bitmap)| entry != 0 || bitmap != 0)
    }

    /// Looks through the L2 tables.
    pub(super) async fn survey_l2_tables(&mut self) -> Result<()> {
        self.survey.tables.sort_by_key(|table| table.offset);
        let cluster_bytes = self.survey.geometry.cluster_bytes();
        let file = self.file.clone();
        let offsets: Vec<u64> = self.survey.tables.iter().map(|t| t.offset).collect();
        let total_bytes = offsets.len() as u64 * cluster_bytes;
        let mut reads = std::pin::pin!(read_each(&file, offsets, cluster_bytes));
        for position in 0..self.survey.tables.len() {
            let Some(read) = reads.next().await else {
                break;
            };
            let (_, bytes) = read?;
            let table = self.survey.tables[position];
            for (index, entry, bitmap) in self.entries(&bytes) {
                self.l2_entry(&table, index, (entry, bitmap))?;
            }
            self.observer.event(Event::Progress {
                done_bytes: (position as u64 + 1) * cluster_bytes,
                total_bytes,
            });
        }
        Ok(())
    }

    fn around(&self, table: &L2Table, l2_index: u64) -> Surroundings {
        let cluster = table.l1_index * self.survey.geometry.l2_entries() + l2_index;
        Surroundings {
            file_bytes: self.survey.file_bytes,
            guest_offset: cluster << self.survey.geometry.cluster_bits(),
        }
    }

    fn l2_entry(&mut self, table: &L2Table, index: u64, words: (u64, u64)) -> Result<()> {
        let around = self.around(table, index);
        let (mut entry, mut bitmap) = words;
        while let Some(mend) = self.survey.format.mend_l2(entry, bitmap, &around) {
            if mend.candidate.is_some() {
                self.charge(2 * std::mem::size_of::<LostCluster>() as u64)?;
                self.survey.lost_clusters.push(LostCluster {
                    table: *table,
                    l2_index: index,
                    entry,
                    bitmap,
                    mend,
                });
                return Ok(());
            }
            self.change_l2_entry(table, index, (entry, bitmap), &mend)?;
            (entry, bitmap) = (mend.entry, mend.bitmap);
        }
        self.claim(table, index, (entry, bitmap))
    }

    fn change_l2_entry(
        &mut self,
        table: &L2Table,
        l2_index: u64,
        (entry, bitmap): (u64, u64),
        mend: &Mend,
    ) -> Result<()> {
        let at = table.offset + l2_index * self.survey.geometry.l2_entry_bytes();
        let change = Change {
            at,
            from: entry,
            to: mend.entry,
        };
        self.step(&Step::L2Entry {
            change,
            bitmap: (bitmap, mend.bitmap),
            l2_index,
            wrong: mend.wrong,
            loses: mend.loses,
        });
        self.survey.change(change)?;
        self.survey.change(Change {
            at: at + 8,
            from: bitmap,
            to: mend.bitmap,
        })
    }

    /// Counts what a sound L2 entry refers to; what it shares with metadata, or with more others
    /// than can be counted, will be copied.
    fn claim(&mut self, table: &L2Table, index: u64, (entry, bitmap): (u64, u64)) -> Result<()> {
        let (from, bytes, copied) = match self.survey.format.inspect_l2(entry, bitmap).claim {
            ClaimedSpace::Nothing => return Ok(()),
            ClaimedSpace::Cluster { copied, .. } if self.survey.format.data_file => {
                self.survey.copied_missing |= table.active > 0 && !copied;
                return Ok(());
            }
            ClaimedSpace::Cluster { offset, copied } => {
                let seen = match (table.active > 0, copied) {
                    (false, _) => Copied::Ignored,
                    (true, true) => Copied::Set,
                    (true, false) => Copied::Clear,
                };
                (offset, self.survey.geometry.cluster_bytes(), seen)
            }
            ClaimedSpace::Compressed { start, len } => (start, len, Copied::Ignored),
        };
        let times = table.times();
        let mut structure = None;
        for cluster in self.survey.clusters_of(from, bytes) {
            if let Some(owner) = self.survey.owner(cluster) {
                structure = structure.or(self.make_way(cluster, owner)?);
            }
        }
        let fits = self.survey.can_count(from, bytes, times);
        let copies = !self.survey.encrypted && times <= self.survey.geometry.refcount_max();
        if (structure.is_none() && fits) || !copies {
            return self.survey.count(from, bytes, times, copied);
        }
        self.charge(2 * std::mem::size_of::<Copy>() as u64)?;
        self.survey.copies.push(Copy {
            at: table.offset + index * self.survey.geometry.l2_entry_bytes(),
            entry,
            from,
            bytes,
            times,
            active: table.active > 0,
            structure,
            new_entry: entry,
            to: 0,
        });
        Ok(())
    }

    /// Metadata that shares its space with guest data moves: a write to it in place would destroy
    /// the data. Structures that are not written here, and cannot move, keep their place.
    fn make_way(&mut self, cluster: u64, owner: Structure) -> Result<Option<Structure>> {
        let offset = cluster << self.survey.geometry.cluster_bits();
        match owner {
            Structure::Header | Structure::Bitmaps | Structure::CryptoHeader => {
                return Ok(Some(owner));
            }
            Structure::RefcountTable | Structure::RefcountBlock => {
                self.move_refcounts(offset);
            }
            Structure::L2 => {
                let Some(table) = self.survey.table_at(offset) else {
                    return Ok(Some(owner));
                };
                self.charge(256)?;
                let bytes = self.survey.geometry.cluster_bytes();
                self.survey.give_up(offset, bytes, table.times());
                self.survey.moved_tables.insert(offset, 0);
                let from = offset;
                self.step(&Step::L2Table { from, bytes });
            }
            Structure::ActiveL1 | Structure::SnapshotL1 => self.move_l1_from(cluster),
            Structure::SnapshotTable => self.move_snapshot_table(),
        }
        Ok(None)
    }

    /// Gives data entries that start no cluster the cluster that they start in, if it is counted
    /// and nothing else uses it.
    pub(super) async fn find_lost_clusters(&mut self) -> Result<()> {
        let cluster_bytes = self.survey.geometry.cluster_bytes();
        for lost in std::mem::take(&mut self.survey.lost_clusters) {
            let mut mend = lost.mend;
            if let Some(candidate) = mend.candidate {
                let cluster = candidate >> self.survey.geometry.cluster_bits();
                let free = candidate < self.survey.file_bytes
                    && !self.survey.is_owned(candidate, cluster_bytes)
                    && self.survey.references(cluster) == 0;
                if free && self.may_be_in_use(candidate).await? {
                    mend.entry = self.survey.format.aligned(lost.entry, candidate);
                    mend.bitmap = lost.bitmap;
                    mend.loses = false;
                }
            }
            let words = (lost.entry, lost.bitmap);
            self.change_l2_entry(&lost.table, lost.l2_index, words, &mend)?;
            self.claim(&lost.table, lost.l2_index, (mend.entry, mend.bitmap))?;
        }
        Ok(())
    }

    /// Returns whether a table's entries belong to the disk rather than to a snapshot alone.
    pub(super) fn is_active(owner: Owner) -> bool {
        owner == Owner::Active
    }
}
