//! The stages of a repair, each durable before the next: see [`super`] for the table.

use super::copied::{Walk, apply};
use super::plan::{Event, Observer, Outcome, Plan, RepairOptions, Scope, Summary, read_header};
use super::step::{Change, Step};
use crate::changed::changed_sectors;
use crate::check::{self, CheckOptions, CheckResult, Finding};
use crate::entry::{refcount_at, set_refcount};
use crate::file::{AlignedFile, Durability};
use crate::geometry::HostCluster;
use crate::header::{Header, autoclear, incompatible};
use crate::units::pieces;
use crate::{Buf, Result};
use cowslip_boxed::boxed;

/// Data is copied in pieces of this size.
const COPY_BYTES: u64 = 1 << 20;
/// Runs of freed clusters that are collected before their space is released: 1 MiB of memory.
const FREED_RUNS_MAX: usize = 65536;

/// Which counts a walk through the refcount blocks changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counts {
    Raise,
    Lower,
}

/// Runs a plan, and checks the image afterwards.
pub(super) async fn run(mut plan: Plan<'_>) -> Result<Outcome> {
    plan.restrict()?;
    let mut done = Summary::default();
    if plan.summary.is_empty() {
        plan.clear_unknown_features().await?;
        let (_, check) = verify(&plan.file, &plan.options, plan.observer).await?;
        return Ok(Outcome { done, check });
    }
    // The image may have been left unflushed by a process that died: nothing may depend on it
    // before it is durable.
    plan.file.flush().await?;
    match plan.options.scope {
        Scope::All => {
            let found = plan.summary.leaks + plan.summary.corruptions;
            if plan.structural > 0 || found > 0 || !plan.refcounts.high.is_empty() {
                plan.everything().await?;
            }
            done = plan.summary;
        }
        Scope::Leaks => {
            plan.clear_unknown_features().await?;
            if plan.structural == 0 {
                plan.leaks().await?;
                done = plan.finished;
            }
        }
    }
    let (header, check) = verify(&plan.file, &plan.options, plan.observer).await?;
    let sound = check.corruptions == 0 && check.check_errors == 0;
    plan.clear_marks(header, sound).await?;
    Ok(Outcome { done, check })
}

impl Plan<'_> {
    #[boxed]
    async fn everything(&mut self) -> Result<()> {
        // Stage 0.
        let mut header = self.header.clone();
        header.autoclear_features = self.new_header.autoclear_features;
        if header.version >= 3 {
            header.incompatible_features |= incompatible::DIRTY;
        }
        if header != self.header {
            self.write_header(&header).await?;
        }
        // Stage A.
        self.write_entries().await?;
        // Stage B.
        self.grow_file().await?;
        if self.refcounts.rebuild {
            self.rebuild_refcounts(&mut header).await?;
        } else {
            self.write_counts(Counts::Raise).await?;
        }
        // Stage C.
        let late = self.survey.changes.iter().filter(|c| self.is_late(c));
        self.write_words(late).await?;
        self.move_and_copy(&mut header).await?;
        self.tell_structural();
        // Stages D, E and F.
        self.walk_copied(Walk::Clear).await?;
        self.file.flush().await?;
        self.lower_counts().await?;
        self.walk_copied(Walk::Set).await?;
        self.file.flush().await
    }

    /// Leaks alone; nothing but counts and flags is wrong.
    async fn leaks(&mut self) -> Result<()> {
        self.write_counts(Counts::Lower).await?;
        if self.refcounts.low.is_empty() {
            self.walk_copied(Walk::Clear).await?;
            self.file.flush().await?;
            self.walk_copied(Walk::Set).await?;
            self.file.flush().await?;
        }
        Ok(())
    }

    async fn write(&self, offset: u64, bytes: Vec<u8>) -> Result<()> {
        let data = vec![Buf::from(bytes)];
        self.file.write(offset, data, Durability::Cached).await
    }

    /// Writes the sectors of a table that differ.
    pub(super) async fn write_changed(&self, offset: u64, old: &[u8], new: &[u8]) -> Result<()> {
        for run in changed_sectors(old, new) {
            self.write(offset + run.start as u64, new[run].to_vec())
                .await?;
        }
        Ok(())
    }

    /// Writes within sector 0 once, followed by a barrier (invariant D6). The structures it refers
    /// to are durable.
    async fn write_header(&self, header: &Header) -> Result<()> {
        self.write(0, header.fixed_part()).await?;
        self.file.flush().await
    }

    async fn write_entries(&self) -> Result<()> {
        let changes = self.survey.changes.iter().filter(|c| self.is_early(c));
        self.write_words(changes).await
    }

    /// A table that moves is changed in its copy only: guest data is in its place. One that is
    /// where the refcounts are is changed when those have moved.
    fn is_early(&self, change: &Change) -> bool {
        let bits = self.survey.geometry.cluster_bits();
        let cluster = change.at >> bits;
        !self.survey.moved_tables.contains_key(&(cluster << bits))
            && !self.refcounts.is_replaced(cluster)
    }

    fn is_late(&self, change: &Change) -> bool {
        let bits = self.survey.geometry.cluster_bits();
        let cluster = change.at >> bits;
        !self.survey.moved_tables.contains_key(&(cluster << bits))
            && self.refcounts.is_replaced(cluster)
    }

    /// Writes words in the order of the file, neighbours at once, and a barrier.
    async fn write_words(&self, changes: impl Iterator<Item = &Change>) -> Result<()> {
        let mut run: Option<(u64, Vec<u8>)> = None;
        for change in changes {
            match &mut run {
                Some((start, bytes)) if *start + bytes.len() as u64 == change.at => {
                    bytes.extend(change.to.to_be_bytes());
                }
                _ => {
                    if let Some((start, bytes)) = run.take() {
                        self.write(start, bytes).await?;
                    }
                    run = Some((change.at, change.to.to_be_bytes().to_vec()));
                }
            }
        }
        if let Some((start, bytes)) = run {
            self.write(start, bytes).await?;
            self.file.flush().await?;
        }
        Ok(())
    }

    /// Makes the file as long as its clusters. Nothing refers beyond its end any more.
    async fn grow_file(&mut self) -> Result<()> {
        let len = self.refcounts.end << self.survey.geometry.cluster_bits();
        if self.file.len().await? < len {
            self.file.set_len(len).await?;
        }
        Ok(())
    }

    async fn rebuild_refcounts(&mut self, header: &mut Header) -> Result<()> {
        let table_bytes = self.refcounts.new_table_clusters << self.survey.geometry.cluster_bits();
        let mut table = vec![0; table_bytes as usize];
        for block in self.refcounts.new_blocks.clone() {
            let bytes = self.counts_of_block(block.index, true);
            self.write(block.offset, bytes).await?;
            super::survey::put(&mut table, block.index * 8, block.offset);
        }
        self.write(self.refcounts.new_table, table).await?;
        self.file.flush().await?;
        header.refcount_table_offset = self.refcounts.new_table;
        header.refcount_table_clusters = self.refcounts.new_table_clusters as u32;
        self.write_header(header).await
    }

    async fn write_counts(&mut self, which: Counts) -> Result<()> {
        let blocks = match which {
            Counts::Raise => self.refcounts.low.clone(),
            Counts::Lower => self.refcounts.high.clone(),
        };
        for &index in &blocks {
            self.write_block(index, which).await?;
            if self.freed.len() >= FREED_RUNS_MAX {
                self.give_back().await?;
            }
        }
        if !blocks.is_empty() {
            self.give_back().await?;
        }
        Ok(())
    }

    /// Makes the counts durable, then releases the freed space to the host. If entries were broken
    /// none is released: it may be the data that one of them meant, which a user may still want to
    /// recover.
    async fn give_back(&mut self) -> Result<()> {
        self.file.flush().await?;
        let freed = std::mem::take(&mut self.freed);
        if freed.is_empty() || self.structural > 0 {
            return Ok(());
        }
        let bits = self.survey.geometry.cluster_bits();
        for run in freed {
            let start = run.start << bits;
            let end = (run.end << bits).min(self.survey.file_bytes);
            if start < end && self.file.discard(start, end - start).await.is_err() {
                // It is free in the image all the same, and another system may do better.
                break;
            }
        }
        // The next to use the space finds no hole that comes late.
        self.file.flush().await
    }

    fn note_freed(&mut self, cluster: u64) {
        match self.freed.last_mut() {
            Some(run) if run.end == cluster => run.end += 1,
            _ => self.freed.push(cluster..cluster + 1),
        }
    }

    async fn write_block(&mut self, index: u64, which: Counts) -> Result<()> {
        let geometry = self.survey.geometry;
        let Some(offset) = self.block_offset(index) else {
            return Ok(());
        };
        let order = geometry.refcount_order();
        let old = self.file.read_new(offset, geometry.cluster_bytes()).await?;
        let wanted = self.counts_of_block(index, which == Counts::Raise);
        let mut new = old.to_vec();
        let first = geometry.first_counted(index).0;
        let end = geometry
            .first_counted(index + 1)
            .0
            .min(self.survey.clusters);
        let mut steps = Vec::new();
        for cluster in first..end {
            let at = (cluster - first) as usize;
            let (refcount, references) = (
                refcount_at(&old, at, order),
                refcount_at(&wanted, at, order),
            );
            let changes = match which {
                Counts::Raise => refcount < references,
                Counts::Lower => refcount > references,
            };
            if !changes {
                continue;
            }
            set_refcount(&mut new, at, order, references);
            if references == 0 {
                self.note_freed(cluster);
            }
            let is_new = self.refcounts.end > 0 && cluster >= self.refcounts.first_new;
            let counts = refcount > references || !is_new;
            if counts && !self.refcounts.held.contains_key(&cluster) {
                steps.push(Step::Refcount {
                    cluster,
                    refcount,
                    references,
                    at: Some(offset + (((at as u64) << order) / 8)),
                    bytes: geometry.refcount_bytes(),
                });
            }
        }
        if which == Counts::Lower {
            steps.extend(self.clear_beyond(index, offset, &mut new));
        }
        self.write_changed(offset, &old, &new).await?;
        for step in &steps {
            self.done(step);
        }
        Ok(())
    }

    /// Writes copies and moved tables, then the entries and the header that refer to them.
    async fn move_and_copy(&mut self, header: &mut Header) -> Result<()> {
        let before = header.clone();
        for position in 0..self.survey.l1s.len() {
            self.move_l1(position, header).await?;
        }
        if let Some(to) = self.survey.moves_snapshots {
            let table = self.snapshot_table();
            header.nb_snapshots = self.survey.snapshots.len() as u32;
            header.snapshots_offset = if table.is_empty() { 0 } else { to };
            self.write(to, table).await?;
        }
        for (&from, &to) in &self.survey.moved_tables {
            let bytes = self.survey.geometry.cluster_bytes();
            let mut table = self.file.read_new(from, bytes).await?;
            self.survey.mended(from, &mut table);
            self.write(to, table.to_vec()).await?;
        }
        let copies = std::mem::take(&mut self.survey.copies);
        for copy in &copies {
            for piece in pieces(0, copy.bytes, COPY_BYTES) {
                let len = piece.end - piece.start;
                let bytes = self.file.read_new(copy.from + piece.start, len).await?;
                self.write(copy.to + piece.start, bytes.to_vec()).await?;
            }
        }
        let relinks = std::mem::take(&mut self.survey.relinks);
        if *header == before && copies.is_empty() && relinks.is_empty() {
            return Ok(());
        }
        self.file.flush().await?;
        let bits = self.survey.geometry.cluster_bits();
        for copy in &copies {
            let table = copy.at >> bits << bits;
            if !self.survey.moved_tables.contains_key(&table) {
                self.write(copy.at, copy.new_entry.to_be_bytes().to_vec())
                    .await?;
            }
        }
        for change in &relinks {
            self.write(change.at, change.to.to_be_bytes().to_vec())
                .await?;
        }
        if *header == before {
            self.file.flush().await
        } else {
            self.write_header(header).await
        }
    }

    async fn move_l1(&mut self, position: usize, header: &mut Header) -> Result<()> {
        let l1 = &self.survey.l1s[position];
        let (Some(to), from, bytes) = (l1.moves, l1.offset, l1.bytes()) else {
            return Ok(());
        };
        for piece in pieces(0, bytes, COPY_BYTES) {
            // Beyond the end of the file as it was there is new space by now, with anything in it.
            let present = self.survey.file_bytes.saturating_sub(from + piece.start);
            let len = piece.end - piece.start;
            let present = self
                .file
                .read_new(from + piece.start, len.min(present))
                .await?;
            let mut table = present.to_vec();
            table.resize(len as usize, 0);
            // Over the header, which is changed by now, it was planned by what the header was.
            if let Some(header) = self
                .header
                .fixed_part()
                .get((from + piece.start) as usize..)
            {
                let len = header.len().min(table.len());
                table[..len].copy_from_slice(&header[..len]);
            }
            self.survey.unmended(from + piece.start, &mut table);
            let changes = &self.survey.l1s[position].changes;
            apply(changes, from + piece.start, &mut table);
            self.write(to + piece.start, table).await?;
        }
        if Self::is_active(self.survey.l1s[position].owner) {
            header.l1_table_offset = to;
        }
        Ok(())
    }

    async fn lower_counts(&mut self) -> Result<()> {
        // The clusters that were held until now have counts too.
        let geometry = self.survey.geometry;
        let held = self.refcounts.held.keys();
        let indexes = held.map(|&cluster| geometry.refcount_block_index(HostCluster(cluster)));
        self.refcounts.high.extend(indexes);
        self.write_counts(Counts::Lower).await
    }

    fn tell_structural(&mut self) {
        for step in std::mem::take(&mut self.steps) {
            self.done(&step);
        }
    }

    /// Clears unknown autoclear bits in the header, as a program that opens an image for writing
    /// must (specification, "autoclear_features").
    async fn clear_unknown_features(&mut self) -> Result<()> {
        let mut header = self.header.clone();
        header.autoclear_features &= autoclear::KNOWN;
        match header == self.header {
            true => Ok(()),
            false => self.write_header(&header).await,
        }
    }

    async fn clear_marks(&mut self, mut header: Header, sound: bool) -> Result<()> {
        let marks = if sound {
            incompatible::DIRTY | incompatible::CORRUPT
        } else if self.header.is_dirty() {
            0
        } else {
            incompatible::DIRTY
        };
        let before = header.incompatible_features;
        header.incompatible_features &= !marks;
        if header.incompatible_features == before {
            return Ok(());
        }
        self.write_header(&header).await?;
        let (dirty, corrupt) = (self.header.is_dirty(), self.header.is_corrupt());
        if sound && (dirty || corrupt) {
            self.done(&Step::Marks { dirty, corrupt });
        }
        Ok(())
    }
}

/// Checks the present content of the file.
async fn verify(
    file: &AlignedFile,
    options: &RepairOptions,
    observer: &mut dyn Observer,
) -> Result<(Header, CheckResult)> {
    struct Forward<'a>(&'a mut dyn Observer);
    impl check::Observer for Forward<'_> {
        fn finding(&mut self, finding: &Finding) {
            self.0.event(Event::Remains(finding));
        }
        fn progress(&mut self, done_bytes: u64, total_bytes: u64) {
            self.0.event(Event::Progress {
                done_bytes,
                total_bytes,
            });
        }
    }
    let header = read_header(file).await?;
    let check_options = CheckOptions {
        memory_bytes_max: options.memory_bytes_max,
    };
    let mut observer = Forward(observer);
    let result =
        check::check_with_header(file.block_file(), &header, &check_options, &mut observer).await?;
    Ok((header, result))
}
