//! [`Adapter`]: a store of the crate `object_store` as [`Objects`].

use std::cmp::Ordering;
use std::ops::Range;
use std::sync::Arc;

use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
};

use super::runtime::run;
use super::{Existing, ObjectError, ObjectFuture, ObjectInfo, Objects};

/// A store of the crate `object_store`, or a part of one.
#[derive(Debug)]
pub struct Adapter {
    store: Arc<dyn ObjectStore>,
    /// The path in the store before all keys; empty for the whole store.
    prefix: String,
}

impl Adapter {
    /// The part of a store below a path.
    pub fn new(store: Arc<dyn ObjectStore>, prefix: &str) -> Adapter {
        Adapter {
            store,
            prefix: prefix.trim_matches('/').to_string(),
        }
    }

    fn path(&self, key: &str) -> Path {
        match self.prefix.is_empty() {
            true => Path::from(key),
            false => Path::from(format!("{}/{key}", self.prefix)),
        }
    }

    /// An object of the store as one of this part of it.
    fn info_of(prefix: &str, found: &ObjectMeta) -> ObjectInfo {
        let key = found.location.as_ref();
        let key = key.strip_prefix(prefix).unwrap_or(key);
        ObjectInfo {
            key: key.trim_start_matches('/').to_string(),
            bytes: found.size,
            written_ms: found.last_modified.timestamp_millis(),
        }
    }
}

/// The innermost reason: the outer ones repeat it.
fn words(error: &object_store::Error) -> String {
    let mut reason: &dyn std::error::Error = error;
    while let Some(source) = reason.source() {
        reason = source;
    }
    let text = reason.to_string();
    match text.find(" (os error ") {
        Some(end) => text[..end].to_string(),
        None => text,
    }
}

fn failed(error: object_store::Error) -> ObjectError {
    match error {
        object_store::Error::NotFound { .. } => ObjectError::Missing,
        object_store::Error::AlreadyExists { .. } => ObjectError::Exists,
        error => ObjectError::Failed(words(&error)),
    }
}

impl Objects for Adapter {
    fn put(&self, key: &str, bytes: Vec<u8>, existing: Existing) -> ObjectFuture<'_, ()> {
        let (store, path) = (Arc::clone(&self.store), self.path(key));
        let mode = match existing {
            Existing::Replace => PutMode::Overwrite,
            Existing::Keep => PutMode::Create,
        };
        let payload = PutPayload::from(bytes);
        let put = run(async move { store.put_opts(&path, payload, PutOptions::from(mode)).await });
        Box::pin(async move { put.await.map(drop).map_err(failed) })
    }

    fn get(&self, key: &str, range: Range<u64>) -> ObjectFuture<'_, Vec<u8>> {
        let (store, path) = (Arc::clone(&self.store), self.path(key));
        let wanted = range.end - range.start;
        let got = run(async move {
            let range = Some(GetRange::Bounded(range));
            let options = GetOptions {
                range,
                ..GetOptions::default()
            };
            let mut stream = store.get_opts(&path, options).await?.into_stream();
            let mut bytes = Vec::new();
            // A body may be longer than its range, or without end.
            while bytes.len() as u64 <= wanted
                && let Some(piece) = stream.try_next().await?
            {
                bytes.extend_from_slice(&piece);
            }
            Ok::<_, object_store::Error>(bytes)
        });
        Box::pin(async move {
            let bytes = got.await.map_err(failed)?;
            match (bytes.len() as u64).cmp(&wanted) {
                Ordering::Equal => Ok(bytes),
                Ordering::Less => Err(ObjectError::Failed(format!(
                    "{} bytes came of {wanted}",
                    bytes.len()
                ))),
                Ordering::Greater => Err(ObjectError::Failed(format!(
                    "more than {wanted} bytes came, which were asked for"
                ))),
            }
        })
    }

    fn info(&self, key: &str) -> ObjectFuture<'_, ObjectInfo> {
        let (store, path) = (Arc::clone(&self.store), self.path(key));
        let found = run(async move { store.head(&path).await });
        Box::pin(async move {
            let found = found.await.map_err(failed)?;
            Ok(Adapter::info_of(&self.prefix, &found))
        })
    }

    fn list(&self, prefix: &str) -> ObjectFuture<'_, Vec<ObjectInfo>> {
        let (store, path) = (Arc::clone(&self.store), self.path(prefix));
        let found = run(async move {
            let found = store.list(Some(&path));
            found.try_collect::<Vec<ObjectMeta>>().await
        });
        Box::pin(async move {
            let found = found.await.map_err(failed)?;
            let infos = found
                .iter()
                .map(|found| Adapter::info_of(&self.prefix, found));
            Ok(infos.collect())
        })
    }

    fn delete(&self, key: &str) -> ObjectFuture<'_, ()> {
        let (store, path) = (Arc::clone(&self.store), self.path(key));
        let deleted = run(async move { store.delete(&path).await });
        Box::pin(async move {
            match deleted.await.map_err(failed) {
                Ok(()) | Err(ObjectError::Missing) => Ok(()),
                Err(error) => Err(error),
            }
        })
    }
}
