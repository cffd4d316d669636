//! The structures that the header points to, except the refcounts: L1 table, snapshot table,
//! bitmaps.

use super::plan::Plan;
use super::snapshot_entry::Snapshot;
use super::step::{SnapshotFate, Step};
use super::survey::{L1, Owner};
use crate::Result;
use crate::check::counts::Copied;
use crate::check::{SnapshotL1Flaw, Structure};
use crate::entry::big_endian;
use crate::entry::bitmap::{self, TableEntry};
use crate::entry::snapshot::{
    EXTRA_BYTES_KNOWN, EXTRA_BYTES_MAX, EXTRA_BYTES_V3, FIXED_BYTES, Fixed, TABLE_BYTES_MAX,
    completed_extra,
};
use crate::header::{BitmapsExtension, L1_BYTES_MAX, autoclear};
use crate::units::pieces;

impl Plan<'_> {
    pub(super) async fn survey_roots(&mut self) -> Result<()> {
        let cluster_bytes = self.survey.geometry.cluster_bytes();
        self.survey.structure(0, cluster_bytes, Structure::Header)?;
        self.survey_active_l1()?;
        self.survey_snapshots().await?;
        if let Some(crypto) = self.header.extensions.crypto_header {
            let (offset, len) = (crypto.offset, crypto.length);
            if offset.saturating_add(len) <= self.survey.file_bytes {
                self.survey
                    .structure(offset, len, Structure::CryptoHeader)?;
            }
        }
        self.survey_bitmaps().await
    }

    fn survey_active_l1(&mut self) -> Result<()> {
        let offset = self.header.l1_table_offset;
        let l1 = L1 {
            offset,
            entries: u64::from(self.header.l1_size),
            owner: Owner::Active,
            shared: self.survey.is_owned(offset, self.header.l1_bytes()),
            moves: None,
            changes: Vec::new(),
        };
        let bytes = l1.bytes();
        let cut = bytes > 0 && offset.saturating_add(bytes) > self.survey.file_bytes;
        if cut || l1.shared {
            self.step(&Step::L1Table {
                from: offset,
                bytes,
                cut,
            });
        }
        self.add_l1(l1, cut, Structure::ActiveL1)
    }

    /// Notes an L1 table; one that is cut, or whose place is another's, will move.
    fn add_l1(&mut self, mut l1: L1, cut: bool, structure: Structure) -> Result<()> {
        self.survey.spend_on_l1(l1.bytes())?;
        if cut || l1.shared {
            l1.moves = Some(0);
        } else {
            self.survey.structure(l1.offset, l1.bytes(), structure)?;
        }
        self.charge(2 * std::mem::size_of::<L1>() as u64)?;
        self.survey.l1s.push(l1);
        Ok(())
    }

    async fn survey_snapshots(&mut self) -> Result<()> {
        let start = self.header.snapshots_offset;
        let count = self.header.nb_snapshots;
        if count == 0 {
            return Ok(());
        }
        let mut at = start;
        let mut steps = Vec::new();
        let mut read = Vec::new();
        for index in 0..count {
            let Some(snapshot) = self.read_snapshot(index, &mut at, start).await? else {
                // The offset of the next one is unknown.
                let lost = (index..count).map(|index| Step::Snapshot {
                    index,
                    id: String::new(),
                    name: String::new(),
                    fate: SnapshotFate::Removed,
                    at,
                });
                steps.extend(lost);
                break;
            };
            read.push(snapshot);
        }
        let bytes = at.min(self.survey.file_bytes) - start.min(self.survey.file_bytes);
        // QEMU leaves out the padding of the last entry where the table is the end of the file.
        let misplaced =
            at > self.survey.file_bytes.next_multiple_of(8) || self.survey.is_owned(start, bytes);
        if !misplaced {
            self.survey.own(start, bytes, Structure::SnapshotTable)?;
        }
        for mut snapshot in read {
            if let Some(fate) = self.complete(&mut snapshot) {
                steps.push(snapshot_step(&snapshot, fate));
            }
            match self.place_snapshot_l1(&mut snapshot).await? {
                Some(SnapshotFate::Removed) => {
                    steps.push(snapshot_step(&snapshot, SnapshotFate::Removed));
                    continue;
                }
                Some(fate) => steps.push(snapshot_step(&snapshot, fate)),
                None => {}
            }
            self.survey.snapshots.push(snapshot);
        }
        for step in &steps {
            self.step(step);
        }
        self.survey.snapshots_bytes = bytes;
        if misplaced || !steps.is_empty() {
            self.step(&Step::SnapshotTable { from: start });
            self.survey.moves_snapshots = Some(0);
            return Ok(());
        }
        self.survey.count(start, bytes, 1, Copied::Ignored)
    }

    /// Reads an entry, and moves on to the next; `None` where there can be none.
    async fn read_snapshot(
        &mut self,
        index: u32,
        at: &mut u64,
        start: u64,
    ) -> Result<Option<Snapshot>> {
        let entry_at = *at;
        if entry_at.saturating_add(FIXED_BYTES as u64) > self.survey.file_bytes {
            return Ok(None);
        }
        let fixed = self.file.read_new(entry_at, FIXED_BYTES as u64).await?;
        let fixed = Fixed::decode(&fixed);
        let end = entry_at + fixed.entry_bytes();
        if end - start > TABLE_BYTES_MAX {
            return Ok(None);
        }
        let extra_bytes = if fixed.extra_bytes > EXTRA_BYTES_MAX {
            EXTRA_BYTES_KNOWN
        } else {
            fixed.extra_bytes
        };
        let extra_bytes = u64::from(extra_bytes);
        self.charge(2 * (FIXED_BYTES as u64 + extra_bytes + fixed.names_bytes()))?;
        let extra_at = entry_at + FIXED_BYTES as u64;
        let extra = self.file.read_new(extra_at, extra_bytes).await?;
        let names_at = entry_at + fixed.names_start();
        let names = self.file.read_new(names_at, fixed.names_bytes()).await?;
        let (id, name) = names.split_at(usize::from(fixed.id_bytes));
        *at = end;
        Ok(Some(Snapshot {
            index,
            at: entry_at,
            fixed,
            extra: extra.to_vec(),
            id: id.to_vec(),
            name: name.to_vec(),
        }))
    }

    /// Adds the extra data that version 3 requires, and returns the correction, if it makes one.
    fn complete(&self, snapshot: &mut Snapshot) -> Option<SnapshotFate> {
        let extra_bytes = snapshot.fixed.extra_bytes;
        if extra_bytes > EXTRA_BYTES_MAX {
            return Some(SnapshotFate::Cut { extra_bytes });
        }
        if self.header.version < 3 || snapshot.extra.len() >= EXTRA_BYTES_V3 as usize {
            return None;
        }
        let vm_state_bytes = snapshot.fixed.vm_state_bytes;
        snapshot.extra = completed_extra(&snapshot.extra, vm_state_bytes, self.header.size);
        Some(SnapshotFate::Completed)
    }

    /// Finds a snapshot's L1 table, and what must become of it.
    async fn place_snapshot_l1(&mut self, snapshot: &mut Snapshot) -> Result<Option<SnapshotFate>> {
        let flaw = snapshot.fixed.l1_flaw(&self.survey.geometry);
        let mut fate = None;
        if let Some(flaw) = flaw {
            let offset = snapshot.fixed.l1_offset & !(self.survey.geometry.cluster_bytes() - 1);
            let entries = match flaw {
                SnapshotL1Flaw::Unaligned { .. } => u64::from(snapshot.fixed.l1_size),
                SnapshotL1Flaw::TooLarge { .. } => {
                    snapshot.l1_entries(self.header.size, self.survey.geometry)
                }
            };
            if !self.is_lost_l1(offset, entries).await? {
                return Ok(Some(SnapshotFate::Removed));
            }
            snapshot.fixed.l1_offset = offset;
            snapshot.fixed.l1_size = entries as u32;
            fate = Some(SnapshotFate::Corrected { flaw });
        }
        let (offset, bytes) = (
            snapshot.fixed.l1_offset,
            u64::from(snapshot.fixed.l1_size) * 8,
        );
        if bytes > 0 && offset >= self.survey.file_bytes {
            return Ok(Some(SnapshotFate::Removed));
        }
        let cut = bytes > 0 && offset.saturating_add(bytes) > self.survey.file_bytes;
        let l1 = L1 {
            offset,
            entries: u64::from(snapshot.fixed.l1_size),
            owner: Owner::Snapshot(self.survey.snapshots.len()),
            shared: self.survey.is_owned(offset, bytes),
            moves: None,
            changes: Vec::new(),
        };
        let moves = cut || l1.shared;
        self.add_l1(l1, cut, Structure::SnapshotL1)?;
        Ok(fate.or(moves.then_some(SnapshotFate::Moved)))
    }

    /// Returns whether an L1 table of that length may be there: nothing else is, and all entries
    /// are sound.
    async fn is_lost_l1(&mut self, offset: u64, entries: u64) -> Result<bool> {
        let bytes = entries.saturating_mul(8);
        let fits = bytes <= L1_BYTES_MAX
            && offset != 0
            && offset.saturating_add(bytes) <= self.survey.file_bytes
            && !self.survey.is_owned(offset, bytes);
        if !fits {
            return Ok(false);
        }
        self.survey.spend_on_l1(bytes)?;
        let mut mapped = 0;
        for piece in pieces(offset, bytes, 64 << 10) {
            let table = self
                .file
                .read_new(piece.start, piece.end - piece.start)
                .await?;
            for entry in table
                .chunks_exact(8)
                .map(big_endian)
                .filter(|&entry| entry != 0)
            {
                let format = self.survey.format;
                if format.mend_l1(entry, self.survey.file_bytes).is_some() {
                    return Ok(false);
                }
                mapped += 1;
            }
        }
        Ok(mapped > 0)
    }

    /// The snapshot table as it will be.
    pub(super) fn snapshot_table(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (position, snapshot) in self.survey.snapshots.iter().enumerate() {
            let owner = Owner::Snapshot(position);
            let l1 = self.survey.l1s.iter().find(|l1| l1.owner == owner);
            let mut snapshot = snapshot.clone();
            if let Some(to) = l1.and_then(|l1| l1.moves) {
                snapshot.fixed.l1_offset = to;
            }
            out.extend(snapshot.encode());
        }
        out
    }

    /// Moves the L1 table that has a cluster which guest data has, too.
    pub(super) fn move_l1_from(&mut self, cluster: u64) {
        let has = |l1: &L1| {
            l1.moves.is_none()
                && self
                    .survey
                    .clusters_of(l1.offset, l1.bytes())
                    .contains(&cluster)
        };
        let Some(position) = self.survey.l1s.iter().position(has) else {
            return;
        };
        let l1 = &mut self.survey.l1s[position];
        l1.shared = true;
        l1.moves = Some(0);
        let (from, bytes, owner) = (l1.offset, l1.bytes(), l1.owner);
        let changes = self.survey.take_changes(from, bytes);
        self.survey.l1s[position].changes = changes;
        self.survey.give_up(from, bytes, 1);
        match owner {
            Owner::Active => self.step(&Step::L1Table {
                from,
                bytes,
                cut: false,
            }),
            Owner::Snapshot(position) => {
                let step = snapshot_step(&self.survey.snapshots[position], SnapshotFate::Moved);
                self.step(&step);
                if self.survey.moves_snapshots.is_none() {
                    self.move_snapshot_table();
                }
            }
        }
    }

    /// Moves the snapshot table, which is counted where it is.
    pub(super) fn move_snapshot_table(&mut self) {
        let from = self.header.snapshots_offset;
        self.survey.moves_snapshots = Some(0);
        self.survey.give_up(from, self.survey.snapshots_bytes, 1);
        self.step(&Step::SnapshotTable { from });
    }

    async fn survey_bitmaps(&mut self) -> Result<()> {
        let Some(&extension) = self.header.consistent_bitmaps() else {
            return Ok(());
        };
        match self.read_bitmaps(&extension).await? {
            Ok(bitmaps) => {
                let directory = extension.bitmap_directory_offset;
                let bytes = extension.bitmap_directory_size;
                self.survey
                    .structure(directory, bytes, Structure::Bitmaps)?;
                for ((offset, bytes), clusters) in bitmaps {
                    if self.survey.is_owned(offset, bytes) {
                        let what = format!("the table at {offset:#x} shares its place");
                        self.drop_bitmaps(&extension, &what);
                        return Ok(());
                    }
                    self.survey.structure(offset, bytes, Structure::Bitmaps)?;
                    self.survey.bitmap_data.extend(clusters);
                }
            }
            Err(what) => self.drop_bitmaps(&extension, &what),
        }
        Ok(())
    }

    /// Counts the data of bitmaps, once all metadata is known: bitmaps whose data shares its place
    /// with metadata do not say what has changed.
    pub(super) fn survey_bitmap_data(&mut self) -> Result<()> {
        let Some(&extension) = self.header.consistent_bitmaps() else {
            return Ok(());
        };
        let cluster_bytes = self.survey.geometry.cluster_bytes();
        let is_owned = |offset: &&u64| self.survey.is_owned(**offset, cluster_bytes);
        if let Some(offset) = self.survey.bitmap_data.iter().find(is_owned) {
            let what = format!("the data at {offset:#x} shares its place with other metadata");
            self.drop_bitmaps(&extension, &what);
        }
        for offset in std::mem::take(&mut self.survey.bitmap_data) {
            self.survey
                .count(offset, cluster_bytes, 1, Copied::Ignored)?;
        }
        Ok(())
    }

    /// Declares the bitmaps inconsistent: nothing counts for them any more.
    fn drop_bitmaps(&mut self, extension: &BitmapsExtension, what: &str) {
        self.step(&Step::Bitmaps {
            at: extension.bitmap_directory_offset,
            what: format!("bitmaps: {what}"),
        });
        self.new_header.autoclear_features &= !autoclear::BITMAPS;
        self.survey.disown_bitmaps();
    }

    /// Returns the table, offset and length, and the clusters of each bitmap; or the flaw.
    #[allow(clippy::type_complexity)] // Two lists, one in the other.
    async fn read_bitmaps(
        &mut self,
        extension: &BitmapsExtension,
    ) -> Result<std::result::Result<Vec<((u64, u64), Vec<u64>)>, String>> {
        let directory = extension.bitmap_directory_offset;
        let bytes = extension.bitmap_directory_size;
        let end = directory.saturating_add(bytes);
        let misplaced = !self.survey.geometry.is_cluster_aligned(directory)
            || end > self.survey.file_bytes
            || self.survey.is_owned(directory, bytes);
        if misplaced {
            return Ok(Err("the directory cannot be where it is".into()));
        }
        self.charge(2 * bytes)?;
        let table = self.file.read_new(directory, bytes).await?;
        let mut rest = &table[..];
        let mut bitmaps = Vec::new();
        let geometry = self.survey.geometry;
        for index in 0..extension.nb_bitmaps {
            let entry = match split_bitmap(&mut rest) {
                Some(entry) if entry.table_flaw(&geometry, self.header.size).is_none() => entry,
                _ => return Ok(Err(format!("directory entry {index} is not valid"))),
            };
            let table_bytes = entry.table_bytes();
            if entry.table_offset.saturating_add(table_bytes) > self.survey.file_bytes
                || self.survey.is_owned(entry.table_offset, table_bytes)
            {
                return Ok(Err(format!(
                    "the table of bitmap {index} cannot be where it is"
                )));
            }
            self.charge(2 * table_bytes)?;
            let table = self.file.read_new(entry.table_offset, table_bytes).await?;
            let mut clusters = Vec::new();
            for raw in table.chunks_exact(8).map(big_endian) {
                match TableEntry::decode(raw, &self.survey.geometry) {
                    TableEntry::Clean | TableEntry::Dirty => {}
                    TableEntry::At(offset) if offset < self.survey.file_bytes => {
                        clusters.push(offset);
                    }
                    TableEntry::At(_) | TableEntry::Invalid => {
                        return Ok(Err(format!("bitmap table entry {raw:#x} is invalid")));
                    }
                }
            }
            bitmaps.push(((entry.table_offset, table_bytes), clusters));
        }
        if !rest.is_empty() {
            return Ok(Err("the directory is longer than its entries".into()));
        }
        Ok(Ok(bitmaps))
    }
}

fn snapshot_step(snapshot: &Snapshot, fate: SnapshotFate) -> Step {
    Step::Snapshot {
        index: snapshot.index,
        id: String::from_utf8_lossy(&snapshot.id).into_owned(),
        name: String::from_utf8_lossy(&snapshot.name).into_owned(),
        fate,
        at: snapshot.at,
    }
}

/// Takes an entry off the directory.
fn split_bitmap(directory: &mut &[u8]) -> Option<bitmap::Fixed> {
    let entry = bitmap::Fixed::decode(directory.get(..bitmap::FIXED_BYTES)?);
    let len = usize::try_from(entry.entry_bytes()).ok()?;
    *directory = directory.get(len..)?;
    Some(entry)
}
