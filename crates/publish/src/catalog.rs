//! Names and versions of a store: what there is, which version is meant, and its withdrawal.

use std::collections::BTreeMap;

use cowslip_block::{Error, Result};

use crate::digest::Digest;
use crate::location::{Location, Version, check_name};
use crate::record::VersionRecord;
use crate::store::{Kind, Store, version_key};

/// Numbers of the versions of each name, in order.
pub type Versions = BTreeMap<String, Vec<u32>>;

/// The versions that a store has now.
///
/// # Errors
/// The store's; an object that is no version.
pub async fn versions(store: &Store) -> Result<Versions> {
    versions_below(store, &Kind::Versions.folder()).await
}

async fn versions_below(store: &Store, folder: &str) -> Result<Versions> {
    let mut versions = Versions::new();
    for found in store.list(folder).await? {
        let key = found.key.strip_prefix(&Kind::Versions.folder());
        let parts = key.and_then(|key| key.trim_start_matches('/').split_once('/'));
        let parsed = parts.and_then(|(name, number)| {
            let number = number.parse().ok().filter(|number| *number > 0)?;
            check_name(name, name).ok().map(|()| (name, number))
        });
        let Some((name, number)) = parsed else {
            return Err(Error::Corrupt {
                file: store.name_of(&found.key),
                structure: "name",
                offset: 0,
                detail: "it is no version of a name".to_string(),
            });
        };
        versions.entry(name.to_string()).or_default().push(number);
    }
    Ok(versions)
}

/// The newest version of a name that there is now.
///
/// # Errors
/// As [`versions`].
pub async fn newest(store: &Store, name: &str) -> Result<Option<u32>> {
    let folder = format!("{}/{name}", Kind::Versions.folder());
    let versions = versions_below(store, &folder).await?;
    Ok(versions
        .get(name)
        .and_then(|numbers| numbers.last().copied()))
}

/// The record of the version that a location means; pinned ones need none.
///
/// # Errors
/// There is no such name or version.
pub async fn find(store: &Store, location: &Location) -> Result<VersionRecord> {
    let missing = || Error::invalid(format!("There is no published disk '{location}'"));
    let number = match location.version {
        Version::Number(number) => number,
        Version::Newest => newest(store, &location.name).await?.ok_or_else(missing)?,
        Version::Pinned(digest) => return pinned(store, location, digest).await,
    };
    let found = store.version(&location.name, number).await?;
    found.ok_or_else(missing)
}

async fn pinned(store: &Store, location: &Location, digest: Digest) -> Result<VersionRecord> {
    let folder = format!("{}/{}", Kind::Versions.folder(), location.name);
    let versions = versions_below(store, &folder).await?;
    for number in versions.get(&location.name).into_iter().flatten().rev() {
        if let Some(record) = store.version(&location.name, *number).await?
            && record.index == digest.to_string()
        {
            return Ok(record);
        }
    }
    Err(Error::invalid(format!(
        "There is no published disk '{location}'"
    )))
}

/// The digest of the index of a version.
///
/// # Errors
/// The record has none.
pub fn index_of(store: &Store, record: &VersionRecord) -> Result<Digest> {
    Digest::from_hex(&record.index).ok_or_else(|| Error::Corrupt {
        file: store.name_of(&version_key(&record.name, record.version)),
        structure: "record",
        offset: 0,
        detail: "the digest of its index is none".to_string(),
    })
}

/// The digest of the index that a location means.
///
/// # Errors
/// There is no such name or version.
pub async fn index_digest(store: &Store, location: &Location) -> Result<Digest> {
    match location.version {
        // It says itself what it is, whether it still has a name or not.
        Version::Pinned(digest) => Ok(digest),
        _ => index_of(store, &find(store, location).await?),
    }
}

/// Withdraws a version: its name is gone. A pruning removes the rest.
///
/// # Errors
/// There is no such version; the store's.
pub async fn withdraw(store: &Store, location: &Location) -> Result<VersionRecord> {
    let record = find(store, location).await?;
    let key = version_key(&record.name, record.version);
    store.delete(&key).await?;
    Ok(record)
}
