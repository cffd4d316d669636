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

/// Whether a store has no published disk, nor anything that is left of one.
///
/// # Errors
/// The store's.
pub async fn is_empty(store: &Store) -> Result<bool> {
    for kind in [
        Kind::Versions,
        Kind::Leases,
        Kind::Indexes,
        Kind::Packs,
        Kind::Prunings,
    ] {
        if !store.list(&kind.folder()).await?.is_empty() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The numbers of the versions of a name that there are now, in order.
///
/// # Errors
/// As [`versions`].
pub async fn versions_of(store: &Store, name: &str) -> Result<Vec<u32>> {
    let folder = format!("{}/{name}", Kind::Versions.folder());
    let mut versions = versions_below(store, &folder).await?;
    Ok(versions.remove(name).unwrap_or_default())
}

/// The newest version of a name that there is now.
///
/// # Errors
/// As [`versions`].
pub async fn newest(store: &Store, name: &str) -> Result<Option<u32>> {
    Ok(versions_of(store, name).await?.last().copied())
}

/// The record of the version that a location means; pinned ones need none.
///
/// # Errors
/// There is no such name or version.
pub async fn find(store: &Store, location: &Location) -> Result<VersionRecord> {
    let number = match location.version {
        Version::Number(number) => Some(number),
        Version::Newest => newest(store, &location.name).await?,
        Version::Pinned(digest) => {
            let same = of_digest(store, &location.name, &digest.to_string()).await?;
            same.last().copied()
        }
    };
    let found = match number {
        Some(number) => store.version(&location.name, number).await?,
        None => None,
    };
    match found {
        Some(found) => Ok(found),
        None => Err(missing(store, location).await),
    }
}

/// The versions of a name whose index has this digest, in order.
///
/// # Errors
/// As [`versions`].
pub async fn of_digest(store: &Store, name: &str, digest: &str) -> Result<Vec<u32>> {
    let mut same = Vec::new();
    for number in versions_of(store, name).await? {
        let record = store.version(name, number).await?;
        same.extend(
            record
                .filter(|record| record.index == digest)
                .map(|_| number),
        );
    }
    Ok(same)
}

/// The error of a location that stands for nothing, with what the store has instead.
async fn missing(store: &Store, location: &Location) -> Error {
    let instead = match versions(store).await {
        Ok(versions) => instead(&versions, location),
        // What is there is help only.
        Err(_) => String::new(),
    };
    Error::invalid(format!("There is no published disk '{location}'{instead}"))
}

/// Names or versions that a store has instead of a location, in words.
fn instead(versions: &Versions, location: &Location) -> String {
    /// Names and versions that are listed.
    const LISTED: usize = 8;
    let listed = |shown: Vec<String>, all: usize| match all > shown.len() {
        true => format!("{}, … ({all} in all)", shown.join(", ")),
        false => shown.join(", "),
    };
    if versions.is_empty() {
        let root = &location.root;
        return format!(": '{root}' holds none at all; is the name of the store right?");
    }
    if let Some(numbers) = versions.get(&location.name) {
        let newest = numbers.iter().rev().take(LISTED);
        let shown = newest.map(|number| format!("@{number}")).collect();
        return format!(": its versions are {}", listed(shown, numbers.len()));
    }
    let names = versions.keys().take(LISTED);
    let shown = names.map(|name| format!("'{name}'")).collect();
    format!(": the names there are {}", listed(shown, versions.len()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_stands_for_nothing_is_answered_by_what_there_is() {
        let location = |text: &str| Location::parse(text).unwrap();
        let mut versions = Versions::new();
        let said = instead(&versions, &location("/srv/imges/golden"));
        assert_eq!(
            said,
            ": '/srv/imges' holds none at all; is the name of the store right?"
        );
        versions.insert("golden".to_string(), (1..=20).collect());
        versions.insert("other".to_string(), vec![1]);
        let said = instead(&versions, &location("/srv/golden@21"));
        assert_eq!(
            said,
            ": its versions are @20, @19, @18, @17, @16, @15, @14, @13, … (20 in all)"
        );
        let said = instead(&versions, &location("/srv/gloden"));
        assert_eq!(said, ": the names there are 'golden', 'other'");
    }
}
