//! Jobs over the disks of a [`Host`]: stream, commit and mirror, from the first copy to the last
//! step. What a crash leaves of each is in `steps.rs`; a backup is in `backup.rs`.

use std::cell::RefCell;
use std::sync::Arc;

use cowslip_block::disk::{Disk, Extent};
use cowslip_block::job::{Job, Side, Stage, Verdict};

use crate::host::{Attended, Held, Host, NodeOf};
use crate::mirror::{CopyMode, Mirror};
use crate::steps::{give_to_base, shorten};

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
) -> Result<(), H::Error> {
    if layers > 0 {
        let disk = host.live(node).behind();
        job.enter(Stage::Copy);
        job.expect(disk.size());
        let ignored = RefCell::new(None);
        let ignore = &ignored;
        let pieces = job.run_pieces(0..disk.size(), |at, len| async move {
            while let Err(error) = host.populate(node, at..at + len, layers).await {
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

/// Copies into the base what the images above it hold, and takes these out of the chain: those
/// above lie over the base then, or the clients of the active image use the base.
///
/// # Errors
/// Of the disks; the job was cancelled. The disk is as before in any case.
pub async fn commit<H: Host>(
    host: &H,
    (job, attended): (&Job, &impl Attended<H>),
    part: &Committed<NodeOf<H>>,
) -> Result<(), H::Error> {
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
) -> Result<Arc<Mirror>, H::Error> {
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
) -> Result<(), H::Error> {
    let clients = host.hold_clients(&part.top).await;
    let drained = mirror.finish(job).await.map_err(H::failed)?;
    let held = Held {
        clients,
        disks: vec![drained],
    };
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
) -> Result<(), H::Error> {
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
