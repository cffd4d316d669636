//! Pruning: what no name refers to is removed, beside publications that are going on.
//!
//! 1. A mark says that a pruning is going on. Publications that begin after it do not continue
//!    sessions of before.
//! 2. Packs and indexes are listed: what is stored later is not looked at.
//! 3. Names are listed, and after them leases. A publication whose lease is not seen began after
//!    that, and looks whether what it builds upon has its name after it has written its lease. One
//!    that has given its index a name since the names were listed has a lease that is seen: leases
//!    outlive their publications.
//! 4. Kept are: indexes that names and leases refer to, with their packs; packs of the sessions of
//!    leases; what is younger than the grace time; and all indexes while a publication may be going
//!    on. A lease counts until it was not renewed for the grace time.
//! 5. Expired leases are removed first, if they are still expired, so that a publication that stood
//!    still notices; then indexes; then packs.
//!
//! Ages are differences between times of the store's clock. Whatever fails before step 5, nothing
//! was removed; whatever fails in it, what was removed was garbage.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use cowslip_block::job::Stage;
use cowslip_block::{Error, Job, Result};

use crate::catalog;
use crate::digest::{Digest, bytes_of_hex, hex};
use crate::index::Session;
use crate::objects::ObjectInfo;
use crate::publish::PRUNING_MS_MAX;
use crate::record::{self, FORMAT, PruneMark};
use crate::store::{Kind, Store, pack_key, session_folder};

/// A pruning that takes longer gives up: publications take it for dead after a day.
const PRUNING_MAX: Duration = Duration::from_secs(12 * 60 * 60);

/// Options of a pruning.
#[derive(Clone, Copy, Debug)]
pub struct PruneOptions {
    /// Objects and leases that are younger stay.
    pub grace: Duration,
    /// Nothing is removed.
    pub dry_run: bool,
    /// A random number, by which this pruning is known.
    pub random: Session,
}

/// Objects that were removed, or would be, and those that stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Packs and indexes that were removed.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Leases and marks that were removed.
    pub leases: u64,
    /// Packs and indexes that stay.
    pub kept_objects: u64,
    /// Their bytes.
    pub kept_bytes: u64,
    /// Of them, those that no name refers to: the grace time or a publication keeps them.
    pub spared_objects: u64,
}

/// Objects that may not be removed.
#[derive(Default)]
struct Live {
    /// Keys of packs and indexes that something refers to.
    keys: HashSet<String>,
    /// Of these, the ones that a name refers to.
    named: HashSet<String>,
    /// Folders of packs of sessions that may be going on.
    sessions: HashSet<String>,
    /// Leases that have expired, and the folder of their packs.
    expired: Vec<(ObjectInfo, Option<String>)>,
}

/// Removes what nothing refers to.
///
/// # Errors
/// The store's; a name or a fresh lease whose index cannot be read, since what it refers to is not
/// known; [`Error::Cancelled`].
pub async fn prune(store: &Store, options: &PruneOptions, job: &Job) -> Result<Pruned> {
    let mark = format!("{}/{}", Kind::Prunings.folder(), hex(&options.random));
    let mark_record = PruneMark {
        cowslip_prune: FORMAT,
    };
    store.put(&mark, record::encode(&mark_record)).await?;
    let pruned = pruned(store, options, &mark, job).await;
    // A mark that stays only keeps sessions from being continued for a day.
    let removed = store.delete(&mark).await;
    let pruned = pruned?;
    removed.map(|()| pruned)
}

async fn pruned(store: &Store, options: &PruneOptions, mark: &str, job: &Job) -> Result<Pruned> {
    let begun = Instant::now();
    job.enter(Stage::Begin);
    let Some(written) = store.info(mark).await? else {
        return Err(Error::invalid("the mark of the pruning is gone"));
    };
    let grace_ms = i64::try_from(options.grace.as_millis()).unwrap_or(i64::MAX);
    let is_old = |found: &ObjectInfo| {
        let age = written.written_ms.saturating_sub(found.written_ms);
        age >= grace_ms
    };
    let indexes = store.list(&Kind::Indexes.folder()).await?;
    let packs = store.list(&Kind::Packs.folder()).await?;
    let live = live(store, &is_old, job).await?;
    let mut pruned = Pruned::default();
    let mut garbage = Vec::new();
    let is_going_on = !live.sessions.is_empty();
    for (found, is_index) in indexes
        .iter()
        .map(|found| (found, true))
        .chain(packs.iter().map(|found| (found, false)))
    {
        let is_live = live.keys.contains(&found.key);
        let folder = found.key.rsplit_once('/').map_or("", |(folder, _)| folder);
        let is_kept = match is_index {
            true => is_going_on,
            false => live.sessions.contains(folder),
        };
        if !is_live && !is_kept && is_old(found) {
            garbage.push(found);
            continue;
        }
        pruned.kept_objects += 1;
        pruned.kept_bytes += found.bytes;
        pruned.spared_objects += u64::from(!live.named.contains(&found.key));
    }
    job.expect(garbage.iter().map(|found| found.bytes).sum());
    job.enter(Stage::Flush);
    let renewed = remove_leases(store, options, &live, &mut pruned).await?;
    remove_marks(store, options, &written, &mut pruned).await?;
    for found in garbage {
        job.check()?;
        if begun.elapsed() > PRUNING_MAX {
            return Err(Error::invalid(
                "the pruning took longer than twelve hours; run it again",
            ));
        }
        let folder = found.key.rsplit_once('/').map_or("", |(folder, _)| folder);
        if renewed.contains(folder) || (!renewed.is_empty() && is_index_key(&found.key)) {
            pruned.kept_objects += 1;
            pruned.kept_bytes += found.bytes;
            pruned.spared_objects += 1;
            continue;
        }
        if !options.dry_run {
            store.delete(&found.key).await?;
        }
        pruned.objects += 1;
        pruned.bytes += found.bytes;
        job.done(found.bytes);
    }
    Ok(pruned)
}

fn is_index_key(key: &str) -> bool {
    key.starts_with(&Kind::Indexes.folder())
}

/// Finds what names and leases refer to.
async fn live(store: &Store, is_old: &impl Fn(&ObjectInfo) -> bool, job: &Job) -> Result<Live> {
    let mut live = Live::default();
    let mut needed = HashSet::new();
    for (name, numbers) in catalog::versions(store).await? {
        for number in numbers {
            job.check()?;
            // One that was withdrawn meanwhile may still be a parent: a lease says so.
            if let Some(record) = store.version(&name, number).await? {
                let digest = catalog::index_of(store, &record)?;
                needed.insert((digest, true));
            }
        }
    }
    for found in store.list(&Kind::Leases.folder()).await? {
        if is_old(&found) {
            let lease = store.lease(&found.key).await.ok().flatten();
            let session = lease.and_then(|lease| session_of(&lease.session));
            live.expired.push((found, session));
            continue;
        }
        let Some(lease) = store.lease(&found.key).await? else {
            continue;
        };
        live.sessions.extend(session_of(&lease.session));
        let named = lease.parents.iter().chain(&lease.index);
        needed.extend(named.filter_map(|digest| Some((Digest::from_hex(digest)?, false))));
    }
    for (digest, has_name) in &needed {
        job.check()?;
        let index = store.index(*digest).await?;
        let packs = index.iter().flat_map(|index| &index.packs).map(pack_key);
        let keys = packs.chain([crate::store::index_key(*digest)]);
        match has_name {
            true => live.named.extend(keys),
            false => live.keys.extend(keys),
        }
        match index {
            Some(_) => {}
            None if *has_name => {
                return Err(Error::Corrupt {
                    file: store.name_of(&crate::store::index_key(*digest)),
                    structure: "index",
                    offset: 0,
                    detail: "a name refers to it, and it is not there; nothing is removed before that name is withdrawn"
                        .to_string(),
                });
            }
            // Of a lease: an index that is about to be stored, or was withdrawn and removed.
            None => {}
        }
    }
    live.keys.extend(live.named.iter().cloned());
    Ok(live)
}

fn session_of(text: &str) -> Option<String> {
    bytes_of_hex(text).map(session_folder)
}

/// Removes expired leases. Returns the folders of sessions that were renewed since they were
/// listed.
async fn remove_leases(
    store: &Store,
    options: &PruneOptions,
    live: &Live,
    pruned: &mut Pruned,
) -> Result<HashSet<String>> {
    let mut renewed = HashSet::new();
    for (found, session) in &live.expired {
        match store.info(&found.key).await? {
            None => {}
            Some(now) if now.written_ms != found.written_ms => renewed.extend(session.clone()),
            Some(_) => {
                if !options.dry_run {
                    store.delete(&found.key).await?;
                }
                pruned.leases += 1;
            }
        }
    }
    Ok(renewed)
}

/// Removes the marks of prunings that were killed.
async fn remove_marks(
    store: &Store,
    options: &PruneOptions,
    own: &ObjectInfo,
    pruned: &mut Pruned,
) -> Result<()> {
    for found in store.list(&Kind::Prunings.folder()).await? {
        let age = own.written_ms.saturating_sub(found.written_ms);
        if found.key != own.key && age >= PRUNING_MS_MAX && !options.dry_run {
            store.delete(&found.key).await?;
            pruned.leases += 1;
        }
    }
    Ok(())
}
