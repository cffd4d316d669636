//! Clusters of the disk that need no space: those that read as zeroes, or as the layers below do.
//!
//! A group of clusters at a time is leased and read, so that no guest changes it meanwhile; what is
//! redundant loses its entry's reference, as after a discard, and its space goes to the quarantine.
//! The guest sees no change, so persistent bitmaps do not follow. The layers below are durable
//! before an entry relies on them (`Image::compact`), and do not change while the image is open.
//!
//! | the cluster | is |
//! | --- | --- |
//! | with a count of 1, or compressed | looked at, subcluster by subcluster |
//! | shared with a snapshot, or in a table that is | left: it would give no space back |
//! | beyond the end of the disk | left |

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use cowslip_boxed::boxed;
use cowslip_queue::BufMut;

use super::CompactOptions;
use super::without::{Redundant, Ways, Zeroes, without};
use crate::backing::Backing;
use crate::entry::L2Entry;
use crate::file::Event;
use crate::geometry::{Geometry, GuestCluster};
use crate::job::{Cost, Job, Pieces, Stage};
use crate::map::{Run, map_cluster};
use crate::mapping::inflight::{LeaseKind, LeaseRequest, Ticket};
use crate::path::admit::LeaseGuard;
use crate::path::obstacle::Look;
use crate::plan::{Freed, WriteOrdering};
use crate::space::punch;
use crate::sync::{Mutex, lock};
use crate::zero::is_zero;
use crate::{Error, Result};
use crate::{Qcow2, State};

/// Bytes of the disk that are looked at together, at most: a guest's write there waits for that.
const GROUP_BYTES: u64 = 1 << 20;
/// Clusters that lose their space before a cycle makes that durable.
const DROPPED_CLUSTERS_MAX: u64 = 1 << 14;

/// Clusters of one slice that follow on each other.
#[derive(Clone, Copy, Debug)]
struct Group {
    first: GuestCluster,
    clusters: u64,
}

/// The clusters of a group that may be redundant, and a lease on all of it.
type Held<'a> = (Vec<(GuestCluster, L2Entry)>, LeaseGuard<'a>);

/// Space that is not needed.
#[derive(Debug, Default)]
pub(super) struct Unneeded {
    /// Bytes of the disk.
    pub(super) bytes: u64,
    /// Plain clusters of the file that hold nothing else: a bit each.
    clusters: Vec<u64>,
}

impl Unneeded {
    fn add(&mut self, geometry: &Geometry, freed: Freed) {
        self.bytes += freed_bytes(geometry, freed);
        if let Freed::Cluster(host) = freed {
            let cluster = geometry.host_cluster(host).0;
            let word = (cluster / 64) as usize;
            if self.clusters.len() <= word {
                self.clusters.resize(word + 1, 0);
            }
            self.clusters[word] |= 1 << (cluster % 64);
        }
    }

    /// Returns whether a cluster of the file holds nothing else.
    pub(super) fn has(&self, cluster: u64) -> bool {
        let word = self.clusters.get((cluster / 64) as usize);
        word.is_some_and(|word| word >> (cluster % 64) & 1 != 0)
    }
}

/// Bytes of the disk that space was for.
fn freed_bytes(geometry: &Geometry, freed: Freed) -> u64 {
    match freed {
        Freed::Subclusters(_, parts) => u64::from(parts.count_ones()) << geometry.subcluster_bits(),
        Freed::Cluster(_) | Freed::Compressed(_) => geometry.cluster_bytes(),
    }
}

/// Finds the groups of a disk.
struct Groups<'a> {
    image: &'a Qcow2,
    ways: Ways,
    at: GuestCluster,
    /// Bytes that were passed over since the last group.
    passed: u64,
    dropped: &'a AtomicU64,
    /// Clusters that had been dropped at the last cycle.
    written: u64,
}

impl Pieces for Groups<'_> {
    type Piece = Group;

    async fn next(&mut self) -> Result<Option<(Group, Cost)>> {
        let geometry = self.image.geometry();
        self.write_back().await?;
        loop {
            let end = geometry.clusters_for(self.image.size());
            if self.at.0 >= end {
                return Ok(None);
            }
            let slice = geometry.slice_of(self.at);
            let pin = match self.image.has_own_table(self.at) {
                true => Some(self.image.load(slice).await?),
                false => None,
            };
            let behind = ((slice + 1) * geometry.slice_entries()).min(end);
            let found = match &pin {
                Some(pin) if pin.slice.is_some() => self.image.group(self.at, behind, self.ways)?,
                Some(_) | None => None,
            };
            let next = found.map_or(behind, |group| group.first.0 + group.clusters);
            self.passed += (next - self.at.0) << geometry.cluster_bits();
            self.at = GuestCluster(next);
            if let Some(group) = found {
                let cost = Cost {
                    moved_bytes: group.clusters << geometry.cluster_bits(),
                    done_bytes: std::mem::take(&mut self.passed),
                };
                return Ok(Some((group, cost)));
            }
        }
    }
}

impl Groups<'_> {
    /// A cycle, if many clusters wait for one.
    async fn write_back(&mut self) -> Result<()> {
        let dropped = self.dropped.load(Ordering::Relaxed);
        let is_due = dropped - self.written >= DROPPED_CLUSTERS_MAX
            || self.image.lock().mapping.tables.wants_writeback();
        match is_due {
            true => {
                self.written = dropped;
                self.image.write_back().await
            }
            false => Ok(()),
        }
    }
}

impl Qcow2 {
    /// Refuses an image in which no cluster can lose its space.
    pub(super) fn refuse_redundant(
        &self,
        below: &dyn Backing,
        options: &CompactOptions,
    ) -> Result<()> {
        if !(options.zeroes || options.dedupe_backing) {
            return Ok(());
        }
        if self.format.data_file {
            return Err(Error::Unsupported {
                file: self.name().to_string(),
                feature: "dropping clusters whose data is in a data file".into(),
            });
        }
        if options.dedupe_backing && !below.is_there() {
            let name = self.name();
            return Err(Error::Invalid(format!("{name}: there is no backing file")));
        }
        Ok(())
    }

    /// Has all redundant clusters lose their space. The image was checked. Returns the bytes of the
    /// disk that needed it.
    #[boxed]
    pub(super) async fn drop_redundant(
        &self,
        below: &dyn Backing,
        options: &CompactOptions,
        job: &Job,
    ) -> Result<u64> {
        if !(options.zeroes || options.dedupe_backing) {
            return Ok(0);
        }
        job.enter(Stage::Copy);
        job.expect(self.size());
        let (bytes, clusters) = (AtomicU64::new(0), AtomicU64::new(0));
        let mut groups = Groups {
            image: self,
            ways: self.ways(below, options),
            at: GuestCluster(0),
            passed: 0,
            dropped: &clusters,
            written: 0,
        };
        let (ways, dropped) = (groups.ways, (&bytes, &clusters));
        let outcome = job.run_each(&mut groups, |group| async move {
            let (bytes, clusters) = self.drop_group(group, (below, ways)).await?;
            dropped.0.fetch_add(bytes, Ordering::Relaxed);
            dropped.1.fetch_add(clusters, Ordering::Relaxed);
            Ok(())
        });
        outcome.await?;
        job.done(groups.passed);
        Ok(bytes.load(Ordering::Relaxed))
    }

    fn ways(&self, below: &dyn Backing, options: &CompactOptions) -> Ways {
        // It may have been opened without the layers below.
        let names_below = self.lock().committed.header.backing_file.is_some();
        Ways {
            zeroes: match (options.zeroes, below.is_there() || names_below) {
                (false, _) => Zeroes::Stay,
                (true, false) => Zeroes::Unmapped,
                (true, true) if self.format.version >= 3 => Zeroes::Flagged,
                (true, true) => Zeroes::Stay,
            },
            like_below: options.dedupe_backing,
            in_parts: self.file.capabilities().punches_holes,
        }
    }

    /// Returns whether the table that maps a cluster is there, sound, and no snapshot's.
    pub(super) fn has_own_table(&self, cluster: GuestCluster) -> bool {
        let l1_index = self.geometry().l1_index(cluster);
        let state = self.lock();
        let table = state.mapping.tables.table(l1_index);
        let is_own = matches!(table, Ok(Some(table)) if table.copied);
        is_own && !state.mapping.is_bad_table(l1_index)
    }

    /// The entry of a cluster whose slice is in memory, if it may be redundant.
    fn candidate(
        &self,
        state: &mut State,
        cluster: GuestCluster,
        ways: Ways,
    ) -> Result<Option<L2Entry>> {
        let entry = state.mapping.tables.entry(cluster);
        let entry = entry.map_err(|error| self.corrupt_entry(state, cluster, error))?;
        let may_be = match &entry {
            L2Entry::Standard(entry) if entry.allocated == 0 => {
                entry.host.is_some() && entry.copied && ways.zeroes != Zeroes::Stay
            }
            L2Entry::Standard(entry) => entry.copied,
            L2Entry::Compressed(_) => true,
        };
        // Where an image that is only read ends, and where its metadata is, is not kept: its check
        // has looked at that, and nothing is given up.
        if may_be && self.writable {
            self.refuse_misplaced(state, &entry)?;
        }
        Ok(may_be.then_some(entry))
    }

    /// The first group from a cluster on, before `end`. The slice is in memory.
    fn group(&self, from: GuestCluster, end: u64, ways: Ways) -> Result<Option<Group>> {
        let most = (GROUP_BYTES >> self.geometry().cluster_bits()).max(1);
        let mut state = self.lock();
        let mut found: Option<Group> = None;
        for cluster in (from.0..end).map(GuestCluster) {
            match (self.candidate(&mut state, cluster, ways)?, &mut found) {
                (None, None) => {}
                (Some(_), None) => {
                    found = Some(Group {
                        first: cluster,
                        clusters: 1,
                    });
                }
                (Some(_), Some(group)) if group.clusters < most => group.clusters += 1,
                (_, Some(_)) => break,
            }
        }
        Ok(found)
    }

    /// Finds what is redundant on the disk, and changes nothing.
    #[boxed]
    pub(super) async fn count_redundant(
        &self,
        below: &dyn Backing,
        options: &CompactOptions,
        job: &Job,
    ) -> Result<Unneeded> {
        if !(options.zeroes || options.dedupe_backing) {
            return Ok(Unneeded::default());
        }
        job.enter(Stage::Copy);
        job.expect(self.size());
        let found = Mutex::new(Unneeded::default());
        let mut groups = Groups {
            image: self,
            ways: self.ways(below, options),
            at: GuestCluster(0),
            passed: 0,
            dropped: &AtomicU64::new(0),
            written: 0,
        };
        let (ways, tally) = (groups.ways, &found);
        let outcome = job.run_each(&mut groups, |group| async move {
            self.each_redundant(group, (below, ways), |_, _, (_, freed)| {
                lock(tally).add(self.geometry(), freed);
            })
            .await
        });
        outcome.await?;
        job.done(groups.passed);
        Ok(std::mem::take(&mut *lock(&found)))
    }

    /// Has what is redundant of a group lose its space: bytes of the disk, and clusters.
    async fn drop_group(
        &self,
        group: Group,
        (below, ways): (&dyn Backing, Ways),
    ) -> Result<(u64, u64)> {
        let (mut bytes, mut clusters) = (0, 0);
        let dropped = self.each_redundant(group, (below, ways), |state, cluster, (new, freed)| {
            clusters += u64::from(!matches!(freed, Freed::Subclusters(..)));
            bytes += freed_bytes(self.geometry(), freed);
            self.let_go(state, cluster, (new, freed));
        });
        dropped.await?;
        Ok((bytes, clusters))
    }

    /// Leases a group and compares it; of each cluster that is redundant, or has parts that are,
    /// `found` gets the entry without that, and the space that it frees.
    async fn each_redundant(
        &self,
        group: Group,
        (below, ways): (&dyn Backing, Ways),
        mut found: impl FnMut(&mut State, GuestCluster, (L2Entry, Freed)),
    ) -> Result<()> {
        let held = self.when_clear(|state, place| self.look_at(state, group, ways, *place));
        let Some((entries, stay)) = held.await? else {
            return Ok(());
        };
        let compared = self.compare(&entries, (below, ways)).await;
        let mut state = self.lock();
        let state = &mut *state;
        for ((cluster, entry), redundant) in entries.iter().zip(compared.iter().flatten()) {
            if let Some(without) = without(&self.format, entry, *redundant, ways) {
                found(state, *cluster, without);
            }
        }
        stay.end(state);
        for (cluster, _) in &entries {
            // Its slice was pinned until now.
            if let Ok(entry) = state.mapping.tables.entry(*cluster) {
                self.show_directly(state, *cluster, &entry);
            }
        }
        state.wake_maintenance_if_dirty();
        compared.map(drop)
    }

    /// Takes hold of a group; `None` if nothing of it may be redundant.
    fn look_at(
        &self,
        state: &mut State,
        group: Group,
        ways: Ways,
        place: Option<Ticket>,
    ) -> Look<Option<Held<'_>>> {
        let geometry = self.geometry();
        if !self.has_own_slice(state, group.first)? {
            return Ok(None);
        }
        let slice = geometry.slice_of(group.first);
        let start = geometry.guest_offset(group.first).0;
        let want = LeaseRequest {
            range: start..start + (group.clusters << geometry.cluster_bits()),
            kind: LeaseKind::Exclusive,
        };
        state.expect_no_obstacle(slice, std::slice::from_ref(&want), place)?;
        // The disk may have become smaller.
        let end = geometry.clusters_for(self.size());
        let mut entries = Vec::new();
        for cluster in group.first.0..(group.first.0 + group.clusters).min(end) {
            let cluster = GuestCluster(cluster);
            if let Some(entry) = self.candidate(state, cluster, ways)? {
                entries.push((cluster, entry));
            }
        }
        match entries.is_empty() {
            true => Ok(None),
            false => Ok(Some((entries, LeaseGuard::new(self, state, (slice, want))))),
        }
    }

    /// Compares the data of clusters with zeroes and with the layers below. Reads by the entries,
    /// without waiting for an epoch: the lease has one, which a standstill would wait for.
    async fn compare(
        &self,
        entries: &[(GuestCluster, L2Entry)],
        (below, ways): (&dyn Backing, Ways),
    ) -> Result<Vec<Redundant>> {
        self.file.reach(Event::CowRead).await;
        let mut found = vec![Redundant::default(); entries.len()];
        for (part, runs) in self.data_of(entries) {
            let len = (part.end - part.start) as usize;
            let buf = BufMut::for_overwrite(len);
            let own = self
                .read_runs(&runs, (part.start, buf.into()), below)
                .await?;
            let own = BufMut::from(own);
            let lower = match ways.like_below {
                true => Some(self.read_below(part.clone(), below).await?),
                false => None,
            };
            for ((cluster, _), found) in entries.iter().zip(&mut found) {
                for (subcluster, range) in self.subclusters_in(*cluster, &part) {
                    let range =
                        (range.start - part.start) as usize..(range.end - part.start) as usize;
                    let bytes = &own[range.clone()];
                    if ways.zeroes != Zeroes::Stay && is_zero(bytes) {
                        found.zero |= 1 << subcluster;
                    }
                    if lower.as_ref().is_some_and(|lower| lower[range] == *bytes) {
                        found.like_below |= 1 << subcluster;
                    }
                }
            }
        }
        Ok(found)
    }

    /// The visible data of clusters: parts of the disk in order, neighbours joined, and their runs.
    fn data_of(&self, entries: &[(GuestCluster, L2Entry)]) -> Vec<(Range<u64>, Vec<Run>)> {
        let geometry = self.geometry();
        let mut parts: Vec<(Range<u64>, Vec<Run>)> = Vec::new();
        for (cluster, entry) in entries {
            let start = geometry.guest_offset(*cluster).0;
            let visible = 0..geometry
                .cluster_bytes()
                .min(self.size().saturating_sub(start));
            let data = match entry {
                L2Entry::Standard(entry) => entry.allocated,
                L2Entry::Compressed(_) => geometry.all_subclusters(),
            };
            for part in geometry.parts_in(&visible, data) {
                let part = start + part.start..start + part.end;
                match parts.last() {
                    Some((last, _)) if last.end == part.start => {}
                    _ => parts.push((part.start..part.start, Vec::new())),
                }
                if let Some((range, runs)) = parts.last_mut() {
                    range.end = part.end;
                    map_cluster(&self.format, entry, start, part, runs);
                }
            }
        }
        parts
    }

    /// The subclusters of a cluster that begin in a part of the disk, and their bytes there.
    fn subclusters_in(
        &self,
        cluster: GuestCluster,
        part: &Range<u64>,
    ) -> impl Iterator<Item = (u32, Range<u64>)> {
        let (unit, count) = (
            self.geometry().subcluster_bytes(),
            self.geometry().subclusters(),
        );
        let (start, part) = (self.geometry().guest_offset(cluster).0, part.clone());
        let subclusters = (0..count).map(move |index| {
            let at = start + u64::from(index) * unit;
            (index, at.max(part.start)..(at + unit).min(part.end))
        });
        subclusters.filter(|(_, range)| range.start < range.end)
    }

    /// Changes an entry, and gives up what it refers to no longer, as a discard does.
    fn let_go(&self, state: &mut State, cluster: GuestCluster, (new, freed): (L2Entry, Freed)) {
        let geometry = self.geometry();
        state
            .mapping
            .tables
            .set_entry(cluster, &new, WriteOrdering::Nothing);
        let mut unused = 0;
        if let L2Entry::Standard(new) = new {
            // Data written there under an earlier mapping must not become visible again.
            state.mapping.joint.no_longer_fresh(cluster, !new.allocated);
            unused = !(new.allocated | state.mapping.joint.attempted(cluster));
        }
        let freed = match freed {
            Freed::Subclusters(host, parts) => {
                Freed::Subclusters(host, punch::with_neighbours(geometry, parts, unused))
            }
            freed => {
                freed
                    .clusters(geometry)
                    .for_each(|host| state.space.fresh.set(host, 0));
                freed
            }
        };
        state.give_up(geometry, freed);
    }
}
