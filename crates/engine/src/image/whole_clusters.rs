//! Writes that store whole clusters, compressed (`OpenOptions::compress`).
//!
//! A cluster of which a write covers a part is read, changed and stored again. Meanwhile no other
//! write touches it: all of them hold the clusters that they touch, in order of arrival, by the
//! same leases that guard the mapping of an image, in a set of their own.

use std::ops::Range;

use cowslip_queue::{Buf, BufMut};

use super::{Image, ZeroOptions};
use crate::file::Durability;
use crate::qcow2::Qcow2;
use crate::sync::{Mutex, lock};
use crate::units::{pieces, round_down, round_up};
use crate::{Error, Result, chain};
use cowslip_qcow2::inflight::{LeaseKind, LeaseRequest, Leases, Ticket};

/// All leases here are in one set, whatever tables map their clusters.
const SET: u64 = 0;

/// The clusters that requests write as a whole.
#[derive(Debug, Default)]
pub(super) struct WholeClusters {
    leases: Mutex<Leases>,
}

/// Exclusive access to clusters, or the place in the queue for it.
struct Alone<'a> {
    clusters: &'a WholeClusters,
    ticket: Option<Ticket>,
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            lock(&self.clusters.leases).release(ticket);
        }
    }
}

impl WholeClusters {
    async fn alone(&self, range: Range<u64>) -> Alone<'_> {
        let mut alone = Alone {
            clusters: self,
            ticket: None,
        };
        let want = LeaseRequest {
            range,
            kind: LeaseKind::Exclusive,
        };
        loop {
            let waiting = {
                let mut leases = lock(&self.leases);
                let place = alone.ticket;
                let wants = std::slice::from_ref(&want);
                if leases.obstacle(SET, wants, place).is_none() {
                    alone.ticket = Some(leases.grant(SET, want));
                    if let Some(place) = place {
                        leases.release(place);
                    }
                    drop(leases);
                    return alone;
                }
                let (ticket, waiting) = leases.wait(SET, want.clone(), place);
                alone.ticket = Some(ticket);
                waiting
            };
            waiting.await;
        }
    }
}

/// The content of a write.
pub(super) enum WriteContent {
    Bytes(Buf),
    Zeroes(ZeroOptions),
}

/// Neighbouring clusters that a request covers wholly, or a part of one.
#[derive(Debug, PartialEq, Eq)]
struct Stretch {
    range: Range<u64>,
    whole: bool,
}

/// Cuts a request at the clusters that it covers partly. The disk's last one is whole as far as the
/// disk goes.
fn stretches(range: Range<u64>, cluster_bytes: u64, size: u64) -> Vec<Stretch> {
    let mut out: Vec<Stretch> = Vec::new();
    for range in pieces(range.start, range.end - range.start, cluster_bytes) {
        let starts = range.start.is_multiple_of(cluster_bytes);
        let whole = starts && (range.end.is_multiple_of(cluster_bytes) || range.end == size);
        match out.last_mut() {
            Some(last) if last.whole && whole => last.range.end = range.end,
            _ => out.push(Stretch { range, whole }),
        }
    }
    out
}

impl Image {
    /// Stores a range as whole clusters.
    pub(super) async fn write_whole(
        &self,
        (image, clusters): (&Qcow2, &WholeClusters),
        range: Range<u64>,
        content: WriteContent,
    ) -> Result<()> {
        let (unit, size) = (image.cluster_bytes(), self.size());
        let stretches = stretches(range.clone(), unit, size);
        if let WriteContent::Zeroes(options) = &content
            && options.fast_only
            && stretches.iter().any(|stretch| !stretch.whole)
        {
            return Err(Error::Unsupported {
                file: self.name().to_string(),
                feature: "zeroing parts of compressed clusters without storing them again".into(),
            });
        }
        let _alone = clusters.alone(self.clusters_of(image, &range)).await;
        for Stretch { range: part, whole } in stretches {
            let outcome = match (&content, whole) {
                (WriteContent::Zeroes(options), true) => {
                    image.write_zeroes(part, &self.below, *options).await
                }
                (WriteContent::Zeroes(_), false) => {
                    let zeroes = Buf::zeroed((part.end - part.start) as usize);
                    self.store_part(image, part.start, &zeroes).await
                }
                (WriteContent::Bytes(data), whole) => {
                    let (at, len) = (part.start - range.start, part.end - part.start);
                    let data = data.slice(at as usize, len as usize);
                    match whole {
                        true => image.write_compressed(part.start, data, &self.below).await,
                        false => self.store_part(image, part.start, &data).await,
                    }
                }
            };
            image.mark_corrupt_on_error(outcome).await?;
        }
        Ok(())
    }

    /// Makes the stored clusters durable, if requested.
    pub(super) async fn settle_whole(&self, asked: Durability) -> Result<()> {
        match self.durability(asked) {
            Durability::Durable => self.flush().await,
            Durability::Cached => Ok(()),
        }
    }

    /// Runs an operation of the caller that compresses or discards clusters, while no other request
    /// writes them.
    pub(super) async fn with_clusters<T>(
        &self,
        image: &Qcow2,
        range: Range<u64>,
        work: impl Future<Output = T>,
    ) -> T {
        let _alone = match &self.whole_clusters {
            Some(clusters) => Some(clusters.alone(self.clusters_of(image, &range)).await),
            None => None,
        };
        work.await
    }

    fn clusters_of(&self, image: &Qcow2, range: &Range<u64>) -> Range<u64> {
        let unit = image.cluster_bytes();
        round_down(range.start, unit)..round_up(range.end, unit)
    }

    /// Stores a cluster that is changed from `offset` on.
    async fn store_part(&self, image: &Qcow2, offset: u64, data: &[u8]) -> Result<()> {
        let unit = image.cluster_bytes();
        let start = round_down(offset, unit);
        let end = (start + unit).min(self.size());
        let buf = BufMut::for_overwrite((end - start) as usize);
        let mut whole = {
            let _visit = image.enter().await;
            BufMut::from(chain::read(&self.top, &self.below, start, buf.into()).await?)
        };
        let at = (offset - start) as usize;
        whole[at..at + data.len()].copy_from_slice(data);
        let whole = whole.freeze();
        image.write_compressed(start, whole, &self.below).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_cut_at_the_clusters_that_it_covers_partly() {
        let cut = |range, size| {
            let parts = stretches(range, 8, size);
            let parts = parts.into_iter().map(|part| (part.range, part.whole));
            parts.collect::<Vec<_>>()
        };
        assert_eq!(cut(0..24, 100), [(0..24, true)]);
        assert_eq!(cut(3..5, 100), [(3..5, false)]);
        let all = [(3..8, false), (8..24, true), (24..25, false)];
        assert_eq!(cut(3..25, 100), all);
        assert_eq!(cut(8..20, 20), [(8..20, true)]);
        assert_eq!(cut(9..20, 20), [(9..16, false), (16..20, true)]);
        assert_eq!(cut(16..20, 21), [(16..20, false)]);
    }
}
