//! Publishing a disk: chunks, then the index, then the name.
//!
//! 1. A lease says which session this is and which indexes it builds upon, so that no pruning
//!    removes their chunks or ours. Then it is made sure that they still have their names: a
//!    pruning that did not see the lease began before, and saw the names.
//! 2. The disk is read, cut and compared with the chunks of those indexes; new chunks are
//!    compressed and packed, in the order of the disk. Packs are named by their contents, so a
//!    publication that was interrupted finds those that it has stored, and stores the rest.
//!    Where it is known what has changed, the rest is taken from an index, after a part of it was
//!    compared (`proof.rs`).
//! 3. All packs are there, and were read back. The index is stored.
//! 4. The name is stored, if nobody has taken its number; else the next number.
//! 5. The lease is still there. If not, this program stood still for so long that a pruning took it
//!    for dead: the name is withdrawn.
//!
//! A lease that is gone is not written again, as what it kept may be gone, too: each renewal looks
//! for it first, and has to be over within half of the time after which it would be taken for dead.
//!
//! Leases are removed by prunings alone: one that was removed at the end could be gone before a
//! pruning has looked for it, and the name come after the pruning has looked for names.

use std::ops::Range;
use std::time::{Duration, Instant, SystemTime};

use cowslip_block::disk::Disk;
use cowslip_block::job::Stage;
use cowslip_block::random::Random;
use cowslip_block::{Error, Job, Result, Workers};

use crate::catalog;
use crate::cut::ChunkSizes;
use crate::digest::{Digest, hex};
use crate::index::{Index, Session};
use crate::record::{self, FORMAT, Lease, VersionRecord};
use crate::store::{Store, index_key, session_folder, version_key};

mod assembly;
mod begin;
mod proof;
mod reads;
mod scan;
mod steps;

use assembly::Assembly;
pub use begin::PRUNING_MS_MAX;
use begin::{Begun, begin};
use proof::prove;
use steps::Changes;

/// A publication that has not renewed its lease for this long gives up: a pruning may have removed
/// what it builds upon. Half of the shortest grace time that the command accepts.
pub const STANDSTILL_MAX: Duration = Duration::from_secs(30 * 60);

/// A version of a name in the same store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The name.
    pub name: String,
    /// The number of its version.
    pub version: u32,
    /// The digest of its index.
    pub index: Digest,
}

/// A publication that is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The name.
    pub name: String,
    /// Versions whose chunks are used, besides those of the newest version of the name.
    pub parents: Vec<Parent>,
    /// Changes since a parent was published; of the rest only a drawn part is read, and compared.
    pub changed: Option<Changed>,
    /// The name of a bitmap of the image that has had all changes since before this publication
    /// began; the version's record gets it.
    pub tracked_by: Option<String>,
    /// Lengths of chunks; `None`: those of the first parent, or the usual ones.
    pub sizes: Option<ChunkSizes>,
    /// Level of zstd.
    pub level: i32,
    /// Length after which a pack takes no more chunks, in bytes.
    pub pack_bytes: usize,
    /// Packs are read back after they were stored.
    pub reads_back: bool,
    /// A random number, by which this publication is known.
    pub random: Session,
    /// The time at which the lease is renewed again.
    pub renewed_after: Duration,
}

/// Parts of a disk that may differ from a parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The digest of the parent's index.
    pub since: Digest,
    /// Ranges in bytes, in their order, without overlaps.
    pub ranges: Vec<Range<u64>>,
}

/// Work that a publication did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// The version.
    pub record: VersionRecord,
    /// Bytes of packs that an earlier, interrupted publication had stored.
    pub kept_bytes: u64,
    /// Objects that were written, leases left out.
    pub objects: u64,
}

/// A moment by two clocks: one can be set back, the other stands still while its host sleeps.
#[derive(Clone, Copy, Debug)]
struct Moment(SystemTime, Instant);

impl Moment {
    fn now() -> Moment {
        Moment(SystemTime::now(), Instant::now())
    }

    fn age(self) -> Duration {
        let by_date = self.0.elapsed().unwrap_or_default();
        by_date.max(self.1.elapsed())
    }
}

/// A lease, and when it was last renewed.
#[derive(Debug)]
struct Held {
    key: String,
    lease: Lease,
    renewed: Moment,
    renewed_after: Duration,
}

impl Held {
    /// Writes a new lease.
    async fn begin(
        store: &Store,
        (key, lease): (String, Lease),
        renewed_after: Duration,
    ) -> Result<Held> {
        let mut held = Held {
            key,
            lease,
            renewed: Moment::now(),
            renewed_after,
        };
        held.write(store).await?;
        Ok(held)
    }

    fn check(&self) -> Result<()> {
        match self.renewed.age() <= STANDSTILL_MAX {
            true => Ok(()),
            false => Err(Error::invalid(
                "the publication stood still for more than half an hour, and a pruning may have removed what it needs; run it again",
            )),
        }
    }

    async fn renew(&mut self, store: &Store) -> Result<()> {
        self.check()?;
        // One that a pruning has removed must not come back: what it kept is gone.
        if store.info(&self.key).await?.is_none() {
            return Err(taken_for_dead());
        }
        self.write(store).await
    }

    async fn write(&mut self, store: &Store) -> Result<()> {
        let now = Moment::now();
        store.put(&self.key, record::encode(&self.lease)).await?;
        // A request that took long may have found the lease removed; within this time it counted.
        self.check()?;
        self.renewed = now;
        Ok(())
    }

    async fn renew_if_due(&mut self, store: &Store) -> Result<()> {
        match self.renewed.age() >= self.renewed_after {
            true => self.renew(store).await,
            false => self.check(),
        }
    }
}

/// Publishes a disk, which must not change meanwhile.
///
/// # Errors
/// The disk's, the store's; a parent that is gone; a disk that differs from it where nothing is
/// said to have changed, if that is noticed; [`Error::Cancelled`]. No name stands for what was
/// stored then, and the next publication of the name continues it.
pub async fn publish(
    source: &dyn Disk,
    store: &Store,
    request: &Request,
    workers: &Workers,
    job: &Job,
) -> Result<Published> {
    job.enter(Stage::Copy);
    let Begun {
        mut held,
        session,
        parents,
        since,
        present,
    } = begin(store, request).await?;
    let sizes = request.sizes.or(parents.first().map(|index| index.sizes));
    let sizes = sizes.unwrap_or_default();
    let mut assembly = Assembly::new(store, (session, sizes), request, (parents, present));
    let changed = request.changed.as_ref();
    let changed = since.zip(changed.map(|changed| &changed.ranges[..]));
    if let Some((number, ranges)) = changed {
        let known = assembly.known();
        let base = known.parent(number);
        let of = (&*base_name(request), &mut random_of(request));
        prove(source, Changes { base, ranges }, of, (workers, job)).await?;
        held.renew_if_due(store).await?;
    }
    let way = (job, &mut held);
    let scanned = scan::scan((source, sizes), changed, &mut assembly, workers, way).await;
    // Uploads that have begun end before anything else is decided.
    let settled = assembly.settle().await;
    scanned.and(settled)?;
    job.check()?;
    let (index, totals) = assembly.finish(source.size());
    check_packs(store, &index).await?;
    let bytes = index.encode()?;
    let digest = Digest::of(&bytes);
    let index_bytes = bytes.len() as u64;
    held.lease.index = Some(digest.to_string());
    held.renew(store).await?;
    store.put(&index_key(digest), bytes).await?;
    if store.index(digest).await?.as_ref() != Some(&index) {
        let text = format!("the index {digest} is not there after it was written");
        return Err(Error::invalid(text));
    }
    store.settle().await?;
    job.check()?;
    let mut record = VersionRecord {
        cowslip_published: FORMAT,
        name: request.name.clone(),
        version: 0,
        index: digest.to_string(),
        index_bytes,
        disk_bytes: index.disk_bytes,
        data_bytes: totals.data_bytes,
        stored_bytes: index.chunks.iter().map(|c| u64::from(c.stored_bytes)).sum(),
        new_bytes: totals.stored_bytes + index_bytes,
        chunks: index.chunks.len() as u64,
        published: seconds_now(),
        parents: held.lease.parents.clone(),
        bitmap: request.tracked_by.clone(),
    };
    name_it(store, &mut record, &mut held).await?;
    Ok(Published {
        record,
        kept_bytes: totals.kept_bytes,
        objects: totals.packs + 2,
    })
}

/// The version since which changes are known, in words.
fn base_name(request: &Request) -> String {
    let since = request.changed.as_ref().map(|changed| changed.since);
    let base = request.parents.iter().find(|it| Some(it.index) == since);
    base.map_or_else(
        || "the version before".to_string(),
        |base| format!("'{}@{}'", base.name, base.version),
    )
}

/// Random numbers that are others in each publication.
fn random_of(request: &Request) -> Random {
    let seed = request.random[..8]
        .iter()
        .fold(0, |seed, byte| seed << 8 | u64::from(*byte));
    // 0 has no next number.
    Random(seed | 1)
}

fn seconds_now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

/// Checks that every pack of an index is there, at its full length.
async fn check_packs(store: &Store, index: &Index) -> Result<()> {
    let mut sessions: Vec<Session> = index.packs.iter().map(|pack| pack.session).collect();
    sessions.sort_unstable();
    sessions.dedup();
    let mut there = std::collections::HashMap::new();
    for session in sessions {
        for found in store.list(&session_folder(session)).await? {
            there.insert(found.key, found.bytes);
        }
    }
    for pack in &index.packs {
        let key = crate::store::pack_key(pack);
        if there.get(&key) != Some(&pack.bytes) {
            return Err(Error::Corrupt {
                file: store.name_of(&key),
                structure: "pack",
                offset: 0,
                detail: format!("it is not there with its {} bytes", pack.bytes),
            });
        }
    }
    Ok(())
}

/// Gives the index its name, and the next number that is free.
async fn name_it(store: &Store, record: &mut VersionRecord, held: &mut Held) -> Result<()> {
    let newest = catalog::newest(store, &record.name).await?;
    record.version = newest.unwrap_or(0);
    loop {
        record.version = record
            .version
            .checked_add(1)
            .ok_or_else(|| Error::invalid("the name has no number left"))?;
        held.check()?;
        let key = version_key(&record.name, record.version);
        if store.put_new(&key, record::encode(record)).await? {
            break;
        }
    }
    store.settle().await?;
    if held.check().is_err() || store.info(&held.key).await?.is_none() {
        let key = version_key(&record.name, record.version);
        store.delete(&key).await?;
        return Err(taken_for_dead());
    }
    Ok(())
}

fn taken_for_dead() -> Error {
    Error::invalid("a pruning has taken this publication for dead; run it again")
}

/// The text of a session in records.
fn session_text(session: Session) -> String {
    hex(&session)
}

#[cfg(test)]
mod tests;
