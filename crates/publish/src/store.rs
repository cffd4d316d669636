//! [`Store`]: the objects of published disks below one root, by their kinds.
//!
//! All are below [`FOLDER`], so nothing that belongs to others is ever listed or removed.

use std::sync::Arc;

use cowslip_block::{Error, Result};

use crate::digest::{Digest, hex};
use crate::index::{INDEX_BYTES_MAX, Index, Pack, Session};
use crate::objects::{Existing, ObjectError, ObjectInfo, Objects};
use crate::record::{self, FORMAT, Lease, RECORD_BYTES_MAX, VersionRecord};

/// The folder of everything, with the version of the layout.
pub const FOLDER: &str = "cowslip-published-1";

/// A kind of object, and the folder of its objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Versions of names.
    Versions,
    /// Indexes.
    Indexes,
    /// Packs.
    Packs,
    /// Leases of publications.
    Leases,
    /// Marks of prunings.
    Prunings,
}

impl Kind {
    /// The key of the folder.
    pub fn folder(self) -> String {
        let name = match self {
            Kind::Versions => "names",
            Kind::Indexes => "indexes",
            Kind::Packs => "packs",
            Kind::Leases => "leases",
            Kind::Prunings => "prunings",
        };
        format!("{FOLDER}/{name}")
    }
}

/// The key of a version.
pub fn version_key(name: &str, version: u32) -> String {
    format!("{}/{name}/{version:010}", Kind::Versions.folder())
}

/// The key of an index.
pub fn index_key(digest: Digest) -> String {
    format!("{}/{digest}", Kind::Indexes.folder())
}

/// The key of a pack.
pub fn pack_key(pack: &Pack) -> String {
    format!("{}/{}", session_folder(pack.session), pack.digest)
}

/// The key of the folder of a session's packs.
pub fn session_folder(session: Session) -> String {
    format!("{}/{}", Kind::Packs.folder(), hex(&session))
}

/// The key of a lease.
pub fn lease_key(name: &str, session: Session) -> String {
    format!("{}/{name}/{}", Kind::Leases.folder(), hex(&session))
}

/// A store of published disks.
#[derive(Clone, Debug)]
pub struct Store {
    objects: Arc<dyn Objects>,
    root: String,
}

impl Store {
    /// The published disks among some objects; `root` is their name for messages.
    pub fn new(objects: Arc<dyn Objects>, root: &str) -> Store {
        Store {
            objects,
            root: root.trim_end_matches('/').to_string(),
        }
    }

    /// The name of an object, for messages.
    pub fn name_of(&self, key: &str) -> String {
        format!("{}/{key}", self.root)
    }

    fn failed(&self, verb: &str, key: &str, error: ObjectError) -> Error {
        let kind = match error {
            ObjectError::Missing => std::io::ErrorKind::NotFound,
            ObjectError::Exists => std::io::ErrorKind::AlreadyExists,
            ObjectError::Failed(_) => std::io::ErrorKind::Other,
        };
        let context = format!("Could not {verb} '{}'", self.name_of(key));
        Error::io(context, std::io::Error::new(kind, error.to_string()))
    }

    /// Writes an object, over one that exists.
    ///
    /// # Errors
    /// The store's.
    pub async fn put(&self, key: &str, bytes: Vec<u8>) -> Result<()> {
        let put = self.objects.put(key, bytes, Existing::Replace).await;
        put.map_err(|error| self.failed("write", key, error))
    }

    /// Writes an object that is new. `false`: there is another one already.
    ///
    /// # Errors
    /// The store's.
    pub async fn put_new(&self, key: &str, bytes: Vec<u8>) -> Result<bool> {
        let put = self.objects.put(key, bytes.clone(), Existing::Keep).await;
        let Err(error) = put else { return Ok(true) };
        // The request may have been done, its answer lost, and this be that to its repetition.
        match (error, self.has(key, &bytes).await) {
            (_, Ok(true)) => Ok(true),
            (ObjectError::Exists, has) => has,
            (error, _) => Err(self.failed("write", key, error)),
        }
    }

    /// Whether an object is there with these bytes.
    async fn has(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        let len = bytes.len() as u64;
        match self.info(key).await? {
            Some(found) if found.bytes == len => {}
            Some(_) | None => return Ok(false),
        }
        let there = self.get_whole(key, len).await?;
        Ok(there.is_some_and(|there| there == bytes))
    }

    /// Reads a part of an object.
    ///
    /// # Errors
    /// The store's.
    pub async fn get(&self, key: &str, range: std::ops::Range<u64>) -> Result<Vec<u8>> {
        let got = self.objects.get(key, range).await;
        got.map_err(|error| self.failed("read", key, error))
    }

    /// Reads a whole object, `None` if there is none.
    ///
    /// # Errors
    /// The store's; the object is longer than `max` bytes.
    pub async fn get_whole(&self, key: &str, max: u64) -> Result<Option<Vec<u8>>> {
        let Some(found) = self.info(key).await? else {
            return Ok(None);
        };
        if found.bytes > max {
            return Err(Error::Corrupt {
                file: self.name_of(key),
                structure: "object",
                offset: 0,
                detail: format!("its length is {}, and {max} at most", found.bytes),
            });
        }
        if found.bytes == 0 {
            return Ok(Some(Vec::new()));
        }
        match self.objects.get(key, 0..found.bytes).await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(ObjectError::Missing) => Ok(None),
            Err(error) => Err(self.failed("read", key, error)),
        }
    }

    /// Length and age of an object, `None` if there is none.
    ///
    /// # Errors
    /// The store's.
    pub async fn info(&self, key: &str) -> Result<Option<ObjectInfo>> {
        match self.objects.info(key).await {
            Ok(info) => Ok(Some(info)),
            Err(ObjectError::Missing) => Ok(None),
            Err(error) => Err(self.failed("look at", key, error)),
        }
    }

    /// All objects below a folder, in the order of their keys.
    ///
    /// # Errors
    /// The store's.
    pub async fn list(&self, folder: &str) -> Result<Vec<ObjectInfo>> {
        let found = self.objects.list(folder).await;
        let mut found = found.map_err(|error| self.failed("list", folder, error))?;
        found.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(found)
    }

    /// Removes an object, if it is there.
    ///
    /// # Errors
    /// The store's.
    pub async fn delete(&self, key: &str) -> Result<()> {
        let deleted = self.objects.delete(key).await;
        deleted.map_err(|error| self.failed("remove", key, error))
    }

    /// Makes all that was written durable.
    ///
    /// # Errors
    /// The store's.
    pub async fn settle(&self) -> Result<()> {
        let settled = self.objects.settle().await;
        settled.map_err(|error| self.failed("flush", "", error))
    }

    /// The index of a digest, which is checked, `None` if there is none.
    ///
    /// # Errors
    /// The store's; the object has another digest, or is no index.
    pub async fn index(&self, digest: Digest) -> Result<Option<Index>> {
        let key = index_key(digest);
        let Some(bytes) = self.get_whole(&key, INDEX_BYTES_MAX).await? else {
            return Ok(None);
        };
        if Digest::of(&bytes) != digest {
            return Err(Error::Corrupt {
                file: self.name_of(&key),
                structure: "index",
                offset: 0,
                detail: "its digest is not its name".to_string(),
            });
        }
        Index::decode(&bytes, &self.name_of(&key)).map(Some)
    }

    /// A version of a name, `None` if there is none.
    ///
    /// # Errors
    /// The store's; the record is damaged, or of another format.
    pub async fn version(&self, name: &str, version: u32) -> Result<Option<VersionRecord>> {
        let key = version_key(name, version);
        let Some(bytes) = self.get_whole(&key, RECORD_BYTES_MAX).await? else {
            return Ok(None);
        };
        let record: VersionRecord = record::decode(&bytes, &self.name_of(&key))?;
        self.check_format(&key, record.cowslip_published)?;
        Ok(Some(record))
    }

    /// The lease under a key, `None` if there is none.
    ///
    /// # Errors
    /// As [`Store::version`].
    pub async fn lease(&self, key: &str) -> Result<Option<Lease>> {
        let Some(bytes) = self.get_whole(key, RECORD_BYTES_MAX).await? else {
            return Ok(None);
        };
        let lease: Lease = record::decode(&bytes, &self.name_of(key))?;
        self.check_format(key, lease.cowslip_lease)?;
        Ok(Some(lease))
    }

    fn check_format(&self, key: &str, format: u32) -> Result<()> {
        match format {
            FORMAT => Ok(()),
            other => Err(Error::Unsupported {
                file: self.name_of(key),
                feature: format!("version {other} of records").into(),
            }),
        }
    }
}
