//! Jobs over the disks of a [`Host`]: stream, commit and mirror, from the first copy to the last
//! step. What a crash leaves of each is in `steps.rs`; a backup is in `backup.rs`.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use cowslip_block::Result;
use cowslip_block::disk::{Disk, Extent};
use cowslip_block::job::{Cost, Job, PIECE_BYTES, Pieces, Side, Stage, Verdict};

use crate::host::{Attended, Held, Host, NodeOf};
use crate::mirror::{CopyMode, Mirror};
use crate::steps::{give_to_base, shorten};

/// Extents that are looked at at a time.
const EXTENTS_AT_ONCE: usize = 256;
/// Bytes that are copied as a whole, if nothing else is asked for.
pub const CHUNK_BYTES: u64 = 64 << 10;

/// The part of a chain that a commit is about.
#[derive(Clone, Debug)]
pub struct Committed<N> {
    /// The uppermost image that is copied from.
    pub top: N,
    /// The image right above it; `None` for the active image.
    pub above: Option<N>,
    /// The image that is copied into.
    pub base: N,
    /// Number of images from the uppermost one to the one above the base.
    pub layers: u32,
    /// Bytes that are copied as a whole.
    pub chunk_bytes: u64,
}

/// The way in which a mirror copies.
#[derive(Clone, Copy, Debug)]
pub struct Mirroring {
    /// Number of layers that are copied from, the image's own first; `u32::MAX` is all.
    pub layers: u32,
    /// Bytes that are copied as a whole.
    pub chunk_bytes: u64,
    /// When changes reach the copy.
    pub mode: CopyMode,
}

/// Copies into an image what `layers` images below it have, and takes those out of its chain: the
/// disk lies over `base` then, or over none. With `renames` the header is changed even if no layer
/// leaves the chain. The job decides on errors; after one that it ignores all else is copied, and
/// the chain stays.
///
/// # Errors
/// Of the disks; the job was cancelled. The disk is as before in any case.
pub async fn stream<H: Host>(
    host: &H,
    (job, attended): (&Job, &impl Attended<H>),
    (node, base): (&NodeOf<H>, Option<&NodeOf<H>>),
    (layers, renames): (u32, bool),
) -> std::result::Result<(), H::Error> {
    if layers > 0 {
        let disk = host.live(node).behind();
        job.enter(Stage::Copy);
        job.expect(disk.size());
        let ignored = RefCell::new(None);
        let ignore = &ignored;
        let mut left = Left {
            disk: Arc::clone(&disk),
            at: 0,
            layers,
        };
        let pieces = job.run_each(&mut left, |range| async move {
            while let Err(error) = job.aside(host.populate(node, range.clone(), layers)).await {
                match job.verdict(Side::Source, &error) {
                    Verdict::Report => return Err(error),
                    Verdict::Ignore => {
                        ignore.borrow_mut().get_or_insert(error);
                        break;
                    }
                    Verdict::Stop => job.begin(0).await?,
                }
            }
            Ok(())
        });
        pieces.await.map_err(H::failed)?;
        disk.flush().await.map_err(H::failed)?;
        if let Some(error) = ignored.into_inner() {
            return Err(H::failed(error));
        }
    }
    let _turn = attended.finalize().await?;
    match layers > 0 || renames {
        true => shorten(host, node, base).await,
        false => Ok(()),
    }
}

/// The pieces of a stream. Those that the image has already, from a stream that was broken off
/// perhaps, cost nothing, and so the job's pace does not hold them back.
struct Left {
    disk: Arc<dyn Disk>,
    at: u64,
    layers: u32,
}

impl Left {
    /// Bytes of a range that are to be copied.
    async fn moved_bytes(&self, range: &Range<u64>) -> Result<u64> {
        let (mut at, mut moved) = (range.start, 0);
        while at < range.end {
            let extents = self
                .disk
                .extents(at, range.end - at, EXTENTS_AT_ONCE)
                .await?;
            for extent in extents {
                let end = (extent.start + extent.len).min(range.end);
                if (1..=self.layers).contains(&extent.depth) && extent.present && !extent.zero {
                    moved += end - at;
                }
                at = end;
            }
        }
        Ok(moved)
    }
}

impl Pieces for Left {
    type Piece = Range<u64>;

    async fn next(&mut self) -> Result<Option<(Range<u64>, Cost)>> {
        let end = self.disk.size().min(self.at + PIECE_BYTES);
        let range = self.at..end;
        if range.is_empty() {
            return Ok(None);
        }
        let done_bytes = end - self.at;
        // An error is met again by the copy, whose job decides about it.
        let moved_bytes = self.moved_bytes(&range).await.unwrap_or(done_bytes);
        self.at = end;
        let cost = Cost {
            moved_bytes,
            done_bytes,
        };
        Ok(Some((range, cost)))
    }
}

/// Copies into the base what the images above it hold, and takes these out of the chain: those
/// above lie over the base then, or the clients of the active image use the base.
///
/// # Errors
/// Of the disks; the job was cancelled. The disk is as before in any case.
pub async fn commit<H: Host>(
    host: &H,
    (job, attended): (&Job, &impl Attended<H>),
    part: &Committed<NodeOf<H>>,
) -> std::result::Result<(), H::Error> {
    let mirror = begin_commit(host, (job, attended), part).await?;
    match &part.above {
        Some(above) => {
            // Nothing changes what is copied from.
            mirror.complete();
            mirror.follow(job, || ()).await.map_err(H::failed)?;
            let flushed = host.live(&part.base).behind().flush().await;
            flushed.map_err(H::failed)?;
            let _turn = attended.finalize().await?;
            shorten(host, above, Some(&part.base)).await
        }
        None => {
            let followed = mirror.follow(job, || attended.is_ready()).await;
            followed.map_err(H::failed)?;
            let _turn = attended.finalize().await?;
            // A reader of the image alone writes nothing, and it has to be emptied.
            host.enter(&part.top).await?;
            let switched = switch(host, (job, &mirror), part).await;
            let left = host.leave(&part.top).await;
            switched.and(left)
        }
    }
}

/// Begins to copy into the base what the images above it decide.
async fn begin_commit<H: Host>(
    host: &H,
    (job, attended): (&Job, &impl Attended<H>),
    part: &Committed<NodeOf<H>>,
) -> std::result::Result<Arc<Mirror>, H::Error> {
    let (top, base) = (host.live(&part.top), host.live(&part.base));
    if base.size() < top.size() {
        let resized = host.resize(&part.base, top.size()).await;
        resized.map_err(H::failed)?;
        base.announce_size();
    }
    let modes = (part.chunk_bytes, CopyMode::Background);
    let mirror = Arc::new(Mirror::begin(top, base, modes).await);
    attended.follows(&mirror);
    // A layer that ends before decides, too: behind its end the disk reads as zeroes.
    let is_decided_above = |extent: &Extent| extent.depth < part.layers;
    let marked = mirror.mark(job, is_decided_above).await;
    marked.map_err(H::failed)?;
    Ok(mirror)
}

async fn switch<H: Host>(
    host: &H,
    (job, mirror): (&Job, &Mirror),
    part: &Committed<NodeOf<H>>,
) -> std::result::Result<(), H::Error> {
    let clients = host.hold_clients(&part.top).await;
    // Disks may have come to lie above the top since the job began: their chains change, too.
    let mut disks = host.hold_above(&part.top).await;
    disks.push(mirror.finish(job).await.map_err(H::failed)?);
    let held = Held { clients, disks };
    give_to_base(host, (&part.top, &part.base), part.layers, held).await
}

/// Copies a disk to another one, which follows it; in the end the two are equal, and the clients
/// use the copy, unless they are to stay.
///
/// # Errors
/// Of the disks; the job was cancelled. Clients use the disk as before, and the copy is of no use.
pub async fn mirror<H: Host>(
    host: &H,
    (job, attended): (&Job, &impl Attended<H>),
    (node, target): (&NodeOf<H>, &NodeOf<H>),
    how: Mirroring,
) -> std::result::Result<(), H::Error> {
    let modes = (how.chunk_bytes, how.mode);
    let mirror = Mirror::begin(host.live(node), host.live(target), modes).await;
    let mirror = Arc::new(mirror);
    attended.follows(&mirror);
    if how.layers > 0 {
        let is_wanted = |extent: &Extent| how.layers == u32::MAX || extent.depth < how.layers;
        mirror.mark(job, is_wanted).await.map_err(H::failed)?;
    }
    let followed = mirror.follow(job, || attended.is_ready()).await;
    followed.map_err(H::failed)?;
    let _turn = attended.finalize().await?;
    let clients = host.hold_clients(node).await;
    let drained = mirror.finish(job).await.map_err(H::failed)?;
    let held = Held {
        clients,
        disks: vec![drained],
    };
    match attended.stays() {
        true => Ok(()),
        false => host.move_clients(node, target, held).await,
    }
}

#[cfg(test)]
mod tests {
    use cowslip_block::disk::MemoryDisk;
    use futures_util::FutureExt;

    use super::*;
    use crate::live::LiveDisk;

    /// A disk of which each MiB lies in the layer of a list; `None` is zeroes.
    #[derive(Debug)]
    struct Layered(MemoryDisk, Vec<Option<u32>>);

    const MIB: u64 = 1 << 20;

    impl Disk for Layered {
        cowslip_block::forward_to_disk!(0: name, features, read);

        fn size(&self) -> u64 {
            self.1.len() as u64 * MIB - 5
        }
        fn extents(
            &self,
            offset: u64,
            len: u64,
            max: usize,
        ) -> cowslip_block::disk::DiskFuture<'_, Vec<Extent>> {
            let mut found = Vec::new();
            let mut at = offset;
            while at < offset + len && found.len() < max.min(2) {
                let end = ((at / MIB + 1) * MIB).min(self.size());
                let layer = self.1[(at / MIB) as usize];
                found.push(Extent {
                    start: at,
                    len: end - at,
                    depth: layer.unwrap_or(3),
                    present: layer.is_some(),
                    zero: layer.is_none(),
                    data: layer.is_some(),
                    compressed: false,
                    host_offset: None,
                });
                at = end;
            }
            Box::pin(std::future::ready(Ok(found)))
        }
    }
    #[test]
    fn a_stream_pays_for_what_it_copies_alone() {
        let (own, first, second, below) = (Some(0), Some(1), Some(2), Some(3));
        let layers = vec![own, own, first, own, None, second, below, first, own];
        let size = layers.len() as u64 * MIB - 5;
        let disk = Layered(MemoryDisk::new("disk", size), layers);
        let mut left = Left {
            disk: LiveDisk::new("live", Arc::new(disk)),
            at: 0,
            layers: 2,
        };
        let mut costs = Vec::new();
        while let Some((range, cost)) = left.next().now_or_never().unwrap().unwrap() {
            assert_eq!(cost.done_bytes, range.end - range.start);
            costs.push((range.start / MIB, cost.moved_bytes / MIB));
        }
        assert_eq!(costs, [(0, 0), (2, 1), (4, 1), (6, 1), (8, 0)]);
    }
}
