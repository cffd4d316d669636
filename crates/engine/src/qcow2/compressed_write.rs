//! Writing compressed clusters: packed one after the other, byte by byte, as QEMU's are.
//!
//! The writer has the write-back turn, so there is one at a time. A host cluster has one reference
//! for each compressed cluster that has bytes in it; at the count's maximum a new one is begun. The
//! space after the last one, up to the end of its host cluster, is the *tail*: ours alone, since its
//! cluster's count is not 0 while anything in it is referenced.

use cowslip_queue::Buf;

use super::admit::Stay;
use super::compress::compress;
use super::entry::{Compressed, L2Entry, SECTOR_BYTES};
use super::geometry::{Geometry, GuestOffset, HostCluster, HostOffset, round_up};
use super::inflight::{Kind, Want};
use super::plan::{Freed, Promise};
use super::{Counts, Fua, Qcow2};
use crate::chain::Below;
use crate::file::Durability;
use crate::planted::{self, Mistake};
use crate::{Error, Result};

/// Where the next compressed cluster begins.
#[derive(Clone, Copy, Debug)]
pub struct Tail {
    next: u64,
    /// References to the cluster that `next` lies in.
    references: u64,
}

impl Tail {
    /// The host cluster that it is in.
    pub fn cluster(&self, geometry: &Geometry) -> HostCluster {
        geometry.host_cluster(HostOffset(self.next))
    }
}

impl Qcow2 {
    /// Compresses a cluster and stores it so; as plain data if that is not smaller.
    pub(crate) async fn write_compressed(
        &self,
        offset: u64,
        data: Buf,
        below: &Below,
    ) -> Result<()> {
        if self.format.data_file {
            return Err(Error::Unsupported {
                file: self.name().to_string(),
                feature: "compression in an image with an external data file".to_string(),
            });
        }
        let cluster_bytes = self.geometry().cluster_bytes();
        let len = data.len() as u64;
        let at_end = offset + len == self.size();
        let whole = len == cluster_bytes || (at_end && len < cluster_bytes);
        if !self.geometry().is_cluster_aligned(offset) || !whole {
            return Err(Error::Invalid(
                "a compressed write covers exactly a cluster".to_string(),
            ));
        }
        self.ready_for_writes().await?;
        let mut padded = vec![0; cluster_bytes as usize];
        padded[..data.len()].copy_from_slice(&data);
        let Some(packed) = compress(self.compression, &padded) else {
            return self.write(offset, data, below, Fua::No).await;
        };
        self.store(offset, packed, below).await?;
        self.settle(self.effective(Fua::No), true).await
    }

    /// Places, writes and publishes one compressed cluster.
    async fn store(&self, offset: u64, packed: Vec<u8>, below: &Below) -> Result<()> {
        // Space for it wherever it goes, before anything is taken.
        self.make_room(2).await?;
        // The lease keeps others away from the guest cluster; it is waited for without the turn.
        let cluster = self.geometry().guest_cluster(GuestOffset(offset));
        let lease = self.lease_cluster(cluster, below).await?;
        let mut turn = self.turn.take().await;
        let placed = self
            .to_the_end(self.place(&mut turn, packed.len() as u64))
            .await;
        let stored = match &placed {
            Ok(place) => self.write_packed(*place, packed).await.map(|()| *place),
            Err(error) => Err(error.duplicate()),
        };
        drop(turn);
        let mut state = self.lock();
        let state = &mut *state;
        if let (Ok(place), Err(_)) = (placed, &stored)
            && !planted::is(Mistake::FailedCompressedLost)
        {
            // Its reference was raised, and no entry will ever be its own.
            self.give_up(state, Freed::Compressed(place));
        }
        let published = stored.and_then(|place| {
            let before = state.tables.entry(cluster);
            let before =
                before.map_err(|error| self.corrupt_entry(&state.tables, cluster, error))?;
            let freed = match before {
                L2Entry::Compressed(old) => Some(Freed::Compressed(old)),
                L2Entry::Standard(old) => old.host.map(Freed::Cluster),
            };
            let entry = L2Entry::Compressed(place);
            state.tables.set_entry(cluster, &entry, Promise::Bytes);
            if let Some(freed) = freed {
                self.clusters_of(&freed)
                    .for_each(|host| state.fresh.set(host, 0));
                self.give_up(state, freed);
            }
            Ok(())
        });
        lease.end(state);
        published
    }

    /// Bytes for a compressed cluster, with a reference raised for each host cluster they lie in.
    async fn place(&self, counts: &mut Counts, len: u64) -> Result<Compressed> {
        let cluster_bytes = self.geometry().cluster_bytes();
        let max = self.geometry().refcount_max();
        let tail = counts.compressed_tail.filter(|tail| {
            let room = round_up(tail.next, cluster_bytes) - tail.next;
            (tail.references < max || planted::is(Mistake::RefcountWraps)) && room >= len
        });
        let (start, references) = match tail {
            Some(tail) => (tail.next, tail.references),
            None => {
                // Others may have taken what there was: with the turn in hand, more is found here.
                while self.lock().free.clusters() == 0 {
                    self.find_room(counts, 1).await?;
                }
                let mut state = self.lock();
                let (cluster, _) = self.take_clusters(&mut state, 1)[0];
                (self.geometry().host_offset(cluster).0, 0)
            }
        };
        if start + len > self.format.compressed_offset_end() {
            return Err(Error::Unsupported {
                file: self.name().to_string(),
                feature: "a compressed cluster at so high an offset".to_string(),
            });
        }
        let host = self.geometry().host_cluster(HostOffset(start));
        self.lock().raise(host);
        let next = start + len;
        let same_cluster = self.geometry().host_cluster(HostOffset(next)) == host;
        counts.compressed_tail = same_cluster.then_some(Tail {
            next,
            references: references + 1,
        });
        let sectors = round_up(start % SECTOR_BYTES + len, SECTOR_BYTES) - start % SECTOR_BYTES;
        let sectors = match () {
            () if planted::is(Mistake::CompressedSectorTooMany) => sectors + SECTOR_BYTES,
            () if planted::is(Mistake::CompressedSectorTooFew) => {
                (sectors - SECTOR_BYTES).max(SECTOR_BYTES)
            }
            () => sectors,
        };
        Ok(Compressed {
            start,
            len: sectors,
        })
    }

    async fn write_packed(&self, place: Compressed, packed: Vec<u8>) -> Result<()> {
        self.file
            .write(place.start, vec![Buf::from(packed)], Durability::Cached)
            .await
    }

    /// An exclusive lease on a whole guest cluster whose slice is in memory.
    async fn lease_cluster(
        &self,
        cluster: super::geometry::GuestCluster,
        below: &Below,
    ) -> Result<Stay<'_>> {
        let slice = self.geometry().slice_of(cluster);
        let start = self.geometry().guest_offset(cluster).0;
        let want = Want {
            range: start..start + self.geometry().cluster_bytes(),
            kind: Kind::Exclusive,
        };
        let mut place = super::admit::Place {
            image: self,
            ticket: None,
        };
        let mut pinned = None;
        loop {
            let need = {
                let mut state = self.lock();
                self.unlatched(&state)?;
                match self.own_slice_now(&mut state, slice)? {
                    Err(need) => need,
                    Ok(()) => {
                        self.view(&mut state, cluster, below)?;
                        let wants = std::slice::from_ref(&want);
                        if state.leases.obstacle(slice, wants, place.ticket).is_none() {
                            let stay = Stay::new(self, &mut state, (slice, want));
                            drop(state);
                            drop(pinned);
                            return Ok(stay);
                        }
                        let (ticket, waiting) =
                            state.leases.wait(slice, want.clone(), place.ticket);
                        super::admit::Need::Lease(ticket, waiting)
                    }
                }
            };
            drop(pinned.take());
            pinned = self.satisfy(need, &mut place).await?;
        }
    }
}
