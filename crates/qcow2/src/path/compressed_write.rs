//! Writing compressed clusters: packed one after the other, byte by byte, as QEMU's are.
//!
//! Compressing is work for processors and is done by the workers, in any order; storing is done in
//! the order of the calls, several clusters at a time. The writer has the write-back turn, so there
//! is one at a time. A host cluster has one reference for each compressed cluster that has bytes in
//! it; at the count's maximum a new one is begun. The space after the last one, up to the end of
//! its host cluster, is the *tail*: ours alone, since its cluster's count is not 0 while anything
//! in it is referenced. Data that does not fit there continues in the next cluster of the host if
//! that is free, as QEMU's does.

use cowslip_boxed::boxed;
use std::ops::Range;

use cowslip_block::joins::join_all;
use cowslip_queue::Buf;

use super::admit::LeaseGuard;
use super::compressed_tail::Tail;
use crate::backing::Backing;
use crate::compress::{Compressor, missing_codec};
use crate::entry::{Compressed, L2Entry, SECTOR_BYTES};
use crate::file::{Durability, Event};
use crate::geometry::{GuestCluster, GuestOffset, HostCluster, HostOffset};
use crate::mapping::inflight::{LeaseKind, LeaseRequest};
use crate::plan::{Freed, WriteOrdering};
use crate::units::{pieces, round_up};
use crate::workers::GROUP_BYTES;
use crate::{Counts, Qcow2, State};
use crate::{Error, Result};

/// Buffers that go down in one write; the system takes 1024.
const BUFFERS_PER_WRITE: usize = 512;

/// A cluster on its way into the image.
#[derive(Debug)]
pub struct Packed {
    offset: u64,
    data: Form,
}

#[derive(Debug)]
enum Form {
    Compressed(Vec<u8>),
    /// It would not become smaller.
    Plain(Buf),
}

impl Packed {
    /// Returns where it is on the disk.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes that it takes on the host, as far as its own go.
    pub fn host_bytes(&self) -> u64 {
        match &self.data {
            Form::Compressed(bytes) => bytes.len() as u64,
            Form::Plain(data) => data.len() as u64,
        }
    }
}

/// Clusters that are stored together: neighbours in one slice, in order.
type Batch = Vec<(GuestCluster, Vec<u8>)>;

impl Qcow2 {
    /// Compresses clusters and stores them so; as plain data where that is not smaller.
    #[boxed]
    pub async fn write_compressed(
        &self,
        offset: u64,
        data: Buf,
        below: &dyn Backing,
    ) -> Result<()> {
        let packed = self.pack(offset, data).await?;
        self.write_packed(packed, below).await
    }

    /// Compresses clusters. Changes nothing.
    pub async fn pack(&self, offset: u64, data: Buf) -> Result<Vec<Packed>> {
        if self.format.data_file {
            return Err(Error::Unsupported {
                file: self.name().to_string(),
                feature: "compression in an image with an external data file".into(),
            });
        }
        // They would stand in the file for everybody to read: the format encrypts no compressed
        // clusters.
        if self.data.is_encrypted() {
            return Err(Error::Unsupported {
                file: self.name().to_string(),
                feature: "compression and encryption at the same time".into(),
            });
        }
        if let Some(codec) = missing_codec(self.compression) {
            return Err(Error::Unsupported {
                file: self.name().to_string(),
                feature: codec.into(),
            });
        }
        let cluster_bytes = self.geometry().cluster_bytes();
        let len = data.len() as u64;
        let at_end = offset + len == self.size();
        let whole = len > 0 && (len.is_multiple_of(cluster_bytes) || at_end);
        if !self.geometry().is_cluster_aligned(offset) || !whole {
            return Err(Error::Invalid(
                "a compressed write covers whole clusters".to_string(),
            ));
        }
        let groups = pieces(offset, len, GROUP_BYTES.max(cluster_bytes)).map(|group| {
            let kind = self.compression;
            let part = data.slice(
                (group.start - offset) as usize,
                (group.end - group.start) as usize,
            );
            self.workers.run(move || {
                let mut compressor = Compressor::new(kind);
                let clusters = pieces(group.start, part.len() as u64, cluster_bytes);
                let pack = |cluster: Range<u64>| {
                    let at = (cluster.start - group.start) as usize;
                    let data = part.slice(at, (cluster.end - cluster.start) as usize);
                    pack_cluster(&mut compressor, (cluster.start, data), cluster_bytes)
                };
                clusters.map(pack).collect::<Vec<_>>()
            })
        });
        Ok(join_all(groups).await.into_iter().flatten().collect())
    }

    /// Stores clusters, one after the other. Those of one call lie side by side, unless the free
    /// space does not.
    pub async fn write_packed(&self, packed: Vec<Packed>, below: &dyn Backing) -> Result<()> {
        self.ready_for_writes().await?;
        let mut together = Batch::new();
        for Packed { offset, data } in packed {
            let cluster = self.geometry().guest_cluster(GuestOffset(offset));
            let slice = |cluster| self.geometry().slice_of(cluster);
            let ends = match (together.last(), &data) {
                (None, _) => false,
                (Some(_), Form::Plain(_)) => true,
                (Some((last, _)), Form::Compressed(_)) => {
                    cluster <= *last || slice(cluster) != slice(*last)
                }
            };
            if ends {
                self.store(std::mem::take(&mut together), below).await?;
            }
            match data {
                Form::Compressed(bytes) => together.push((cluster, bytes)),
                Form::Plain(data) => self.write(offset, data, below).await?,
            }
        }
        if !together.is_empty() {
            self.store(together, below).await?;
        }
        self.settle_by_policy().await
    }

    /// Places, writes and publishes compressed clusters.
    #[boxed]
    async fn store(&self, together: Batch, below: &dyn Backing) -> Result<()> {
        let bytes: u64 = together.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        // Space for them, before anything is taken: side by side, or each in a cluster of its own,
        // which is less where they are few.
        let side_by_side = self.geometry().clusters_for(bytes) + 1;
        self.make_room(side_by_side.min(together.len() as u64))
            .await?;
        // The lease keeps others away from the guest clusters; it is waited for without the turn.
        let clusters: Vec<GuestCluster> = together.iter().map(|(cluster, _)| *cluster).collect();
        let lease = self.lease_clusters(&clusters, below).await?;
        let mut turn = self.turn.take().await;
        let lens: Vec<u64> = together
            .iter()
            .map(|(_, bytes)| bytes.len() as u64)
            .collect();
        let (places, outcome) = self
            .latch_if_cancelled(self.place_all(&mut turn, &lens))
            .await;
        let stored = match outcome {
            Ok(()) => self.write_places(&places, together).await,
            failed => failed,
        };
        drop(turn);
        let mut state = self.lock();
        let state = &mut *state;
        let published = stored.and_then(|()| self.publish_packed(state, &clusters, &places));
        if published.is_err() {
            for place in places {
                // Its reference was raised, and no entry will ever be its own.
                state.give_up(self.geometry(), Freed::Compressed(place));
            }
        }
        lease.end(state);
        published
    }

    /// Makes the entries refer to compressed clusters that are written: all of them or none.
    fn publish_packed(
        &self,
        state: &mut State,
        clusters: &[GuestCluster],
        places: &[Compressed],
    ) -> Result<()> {
        self.file.pass(Event::L2UpdateCompressed);
        let before = clusters.iter().map(|&cluster| {
            let entry = state.mapping.tables.entry(cluster);
            entry.map_err(|error| self.corrupt_entry(state, cluster, error))
        });
        let before = before.collect::<Result<Vec<L2Entry>>>()?;
        for ((cluster, place), before) in clusters.iter().zip(places).zip(before) {
            let freed = match before {
                L2Entry::Compressed(old) => Some(Freed::Compressed(old)),
                L2Entry::Standard(old) => old.host.map(Freed::Cluster),
            };
            let entry = L2Entry::Compressed(*place);
            state
                .mapping
                .tables
                .set_entry(*cluster, &entry, WriteOrdering::Bytes);
            if let Some(freed) = freed {
                freed
                    .clusters(self.geometry())
                    .for_each(|host| state.space.fresh.set(host, 0));
                state.give_up(self.geometry(), freed);
            }
        }
        Ok(())
    }

    /// Bytes for compressed clusters, and why they ended before all had theirs.
    async fn place_all(&self, counts: &mut Counts, lens: &[u64]) -> (Vec<Compressed>, Result<()>) {
        let mut places = Vec::with_capacity(lens.len());
        for &len in lens {
            match self.place(counts, len).await {
                Ok(place) => places.push(place),
                Err(error) => return (places, Err(error)),
            }
        }
        (places, Ok(()))
    }

    /// Bytes for a compressed cluster, with a reference raised for each host cluster they lie in.
    async fn place(&self, counts: &mut Counts, len: u64) -> Result<Compressed> {
        self.file.reach(Event::ClusterAllocBytes).await;
        let cluster_bytes = self.geometry().cluster_bytes();
        let max = self.geometry().refcount_max();
        let tail = counts.compressed_tail.filter(|tail| tail.references < max);
        let room = |tail: &Tail| round_up(tail.next, cluster_bytes) - tail.next;
        let (start, references) = match tail {
            Some(tail) if room(&tail) >= len => (tail.next, tail.references),
            tail => {
                // Others may have taken what there was: with the turn in hand, more is found here.
                while self.lock().space.free.clusters() == 0 {
                    self.find_room(counts, 1).await?;
                }
                let mut state = self.lock();
                let (cluster, _) = self.take_clusters(&mut state, 1)[0];
                let taken = self.geometry().host_offset(cluster).0;
                match tail {
                    Some(tail) if tail.next + room(&tail) == taken => (tail.next, tail.references),
                    _ => (taken, 0),
                }
            }
        };
        if start + len > self.format.compressed_offset_end() {
            return Err(Error::Unsupported {
                file: self.name().to_string(),
                feature: "a compressed cluster at so high an offset".into(),
            });
        }
        let host = |at: u64| self.geometry().host_cluster(HostOffset(at));
        let (first, last, next) = (host(start), host(start + len - 1), start + len);
        {
            let mut state = self.lock();
            (first.0..=last.0).for_each(|cluster| state.space.raise(HostCluster(cluster)));
        }
        let references = if first == last { references + 1 } else { 1 };
        counts.compressed_tail = (host(next) == last).then_some(Tail { next, references });
        let sectors = round_up(start % SECTOR_BYTES + len, SECTOR_BYTES) - start % SECTOR_BYTES;
        Ok(Compressed {
            start,
            len: sectors,
        })
    }

    /// Writes packed clusters to their places; neighbours together.
    async fn write_places(&self, places: &[Compressed], together: Batch) -> Result<()> {
        let mut writes: Vec<(u64, u64, Vec<Buf>)> = Vec::new();
        for (place, (_, bytes)) in places.iter().zip(together) {
            let end = place.start + bytes.len() as u64;
            match writes.last_mut() {
                Some((_, last, data)) if *last == place.start && data.len() < BUFFERS_PER_WRITE => {
                    *last = end;
                    data.push(Buf::from(bytes));
                }
                _ => writes.push((place.start, end, vec![Buf::from(bytes)])),
            }
        }
        self.file.reach(Event::WriteCompressed).await;
        let writes = writes
            .into_iter()
            .map(|(start, _, data)| self.file.write(start, data, Durability::Cached));
        join_all(writes).await.into_iter().collect()
    }

    /// An exclusive lease on guest clusters of one slice, and on what lies between them; the slice
    /// is in memory.
    async fn lease_clusters(
        &self,
        clusters: &[GuestCluster],
        below: &dyn Backing,
    ) -> Result<LeaseGuard<'_>> {
        let (first, last) = (clusters[0], clusters[clusters.len() - 1]);
        let slice = self.geometry().slice_of(first);
        debug_assert_eq!(slice, self.geometry().slice_of(last), "of one slice");
        let start = self.geometry().guest_offset(first).0;
        let end = self.geometry().guest_offset(last).0 + self.geometry().cluster_bytes();
        let want = LeaseRequest {
            range: start..end,
            kind: LeaseKind::Exclusive,
        };
        self.when_clear(|state, place| {
            self.own_slice(state, slice)?;
            for cluster in clusters {
                self.view(state, *cluster, below)?;
            }
            state.expect_no_obstacle(slice, std::slice::from_ref(&want), *place)?;
            for cluster in clusters {
                let start = self.geometry().guest_offset(*cluster).0;
                let end = start + self.geometry().cluster_bytes();
                state.bitmaps.mark(&(start..end));
            }
            Ok(LeaseGuard::new(self, state, (slice, want.clone())))
        })
        .await
    }
}

/// Compresses one cluster; the disk's last one is padded.
fn pack_cluster(
    compressor: &mut Compressor,
    (offset, data): (u64, Buf),
    cluster_bytes: u64,
) -> Packed {
    let packed = if data.len() as u64 == cluster_bytes {
        compressor.compress(&data)
    } else {
        let mut padded = vec![0; cluster_bytes as usize];
        padded[..data.len()].copy_from_slice(&data);
        compressor.compress(&padded)
    };
    let data = match packed {
        Some(bytes) => Form::Compressed(bytes),
        None => Form::Plain(data),
    };
    Packed { offset, data }
}
