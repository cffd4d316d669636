//! The beginning of a publication: its lease, its session, the indexes that it builds upon.

use std::collections::HashMap;

use cowslip_block::{Error, Result};

use crate::catalog;
use crate::digest::{Digest, bytes_of_hex};
use crate::index::{Index, Session};
use crate::record::{FORMAT, Lease};
use crate::store::{Kind, Store, lease_key, session_folder};

use super::{Held, Parent, Request, session_text};

/// A mark of a pruning that is older is that of one that was killed: prunings end before.
pub const PRUNING_MS_MAX: i64 = 24 * 60 * 60 * 1000;

/// A publication that has begun.
pub struct Begun {
    pub held: Held,
    pub session: Session,
    /// The indexes whose chunks are used.
    pub parents: Vec<Index>,
    /// The number of that since which changes are known.
    pub since: Option<usize>,
    /// Packs of the session that are there, and their lengths.
    pub present: HashMap<Digest, u64>,
}

/// Begins a publication, or continues one of the same name.
pub async fn begin(store: &Store, request: &Request) -> Result<Begun> {
    let mut parents = request.parents.clone();
    let newest = newest(store, &request.name).await?;
    if let Some(newest) = &newest {
        parents.retain(|parent| parent.index != newest.index);
        parents.push(newest.clone());
    }
    let (mut session, is_continued) = match earlier_session(store, &request.name).await? {
        Some(session) => (session, true),
        None => (request.random, false),
    };
    let lease = Lease {
        cowslip_lease: FORMAT,
        name: request.name.clone(),
        session: session_text(session),
        parents: parents.iter().map(|p| p.index.to_string()).collect(),
        index: None,
    };
    let key = lease_key(&request.name, request.random);
    let mut held = Held::begin(store, (key, lease), request.renewed_after).await?;
    // A pruning may have found the session's earlier leases expired, and is removing its packs.
    if is_continued && a_pruning_is_going_on(store, &held.key).await? {
        session = request.random;
        held.lease.session = session_text(session);
        held.renew(store).await?;
    }
    let wanted = request.changed.as_ref().map(|changed| changed.since);
    let mut since = None;
    let mut indexes = Vec::new();
    for parent in &parents {
        let is_asked_for = newest.as_ref() != Some(parent);
        match index_with_name(store, parent).await? {
            Some(index) => {
                if wanted == Some(parent.index) {
                    since = Some(indexes.len());
                }
                indexes.push(index);
            }
            None if is_asked_for => {
                return Err(Error::invalid(format!(
                    "There is no published disk '{}@{}' any more",
                    parent.name, parent.version
                )));
            }
            None => {}
        }
    }
    if wanted.is_some() && since.is_none() {
        let text = "the version since which changes are known is not there any more";
        return Err(Error::invalid(text));
    }
    let mut present = HashMap::new();
    let folder = session_folder(session);
    for found in store.list(&folder).await? {
        let name = found.key.rsplit('/').next().and_then(Digest::from_hex);
        if let Some(digest) = name {
            present.insert(digest, found.bytes);
        }
    }
    Ok(Begun {
        held,
        session,
        parents: indexes,
        since,
        present,
    })
}

/// The newest version of a name.
async fn newest(store: &Store, name: &str) -> Result<Option<Parent>> {
    let Some(number) = catalog::newest(store, name).await? else {
        return Ok(None);
    };
    let Some(record) = store.version(name, number).await? else {
        return Ok(None);
    };
    Ok(Some(Parent {
        name: name.to_string(),
        version: number,
        index: catalog::index_of(store, &record)?,
    }))
}

/// The index of a version, if it still has its name.
async fn index_with_name(store: &Store, parent: &Parent) -> Result<Option<Index>> {
    let record = store.version(&parent.name, parent.version).await?;
    match record {
        Some(record) if record.index == parent.index.to_string() => {
            let index = store.index(parent.index).await?;
            let missing = || Error::Corrupt {
                file: store.name_of(&crate::store::index_key(parent.index)),
                structure: "index",
                offset: 0,
                detail: format!("'{}@{}' needs it", parent.name, parent.version),
            };
            index.map(Some).ok_or_else(missing)
        }
        _ => Ok(None),
    }
}

/// The session of the last lease of a name.
async fn earlier_session(store: &Store, name: &str) -> Result<Option<Session>> {
    let folder = format!("{}/{name}", Kind::Leases.folder());
    let leases = store.list(&folder).await?;
    let Some(last) = leases.iter().max_by_key(|found| found.written_ms) else {
        return Ok(None);
    };
    // A lease that cannot be read protects nothing, and continues nothing.
    let Ok(Some(lease)) = store.lease(&last.key).await else {
        return Ok(None);
    };
    Ok(bytes_of_hex(&lease.session))
}

async fn a_pruning_is_going_on(store: &Store, lease: &str) -> Result<bool> {
    let marks = store.list(&Kind::Prunings.folder()).await?;
    if marks.is_empty() {
        return Ok(false);
    }
    let now = store.info(lease).await?.map_or(i64::MIN, |l| l.written_ms);
    let is_going_on = |written_ms: i64| now.saturating_sub(written_ms) < PRUNING_MS_MAX;
    Ok(marks.iter().any(|mark| is_going_on(mark.written_ms)))
}
