//! [`Adapter`]: a store of the crate `object_store` as [`Objects`].

use std::cmp::Ordering;
use std::ops::Range;
use std::sync::Arc;

use cowslip_block::error::system_words;
use cowslip_publish::objects::{
    Existing, LIST_BYTES_MAX, Listing, ObjectError, ObjectFuture, ObjectInfo, Objects,
};
use cowslip_remote::object_store::path::Path;
use cowslip_remote::object_store::{
    self, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    PutPayload,
};
use cowslip_remote::{Reach, Registered};
use futures_util::TryStreamExt;

/// A store of the crate `object_store`, or a part of one.
#[derive(Debug)]
pub struct Adapter {
    store: Arc<dyn ObjectStore>,
    /// The path in the store before all keys; empty for the whole store.
    prefix: String,
    /// Memory for a list.
    list_bytes_max: usize,
    /// Needs of the system, for a process that confines itself while it is open.
    _reach: Option<Registered>,
}

impl Adapter {
    /// The part of a store below a path.
    pub fn new(store: Arc<dyn ObjectStore>, prefix: &str) -> Adapter {
        Adapter {
            store,
            prefix: prefix.trim_matches('/').to_string(),
            list_bytes_max: LIST_BYTES_MAX,
            _reach: None,
        }
    }

    /// The same, whose needs are kept within the reach of the process.
    #[must_use]
    pub fn within(self, reach: Reach) -> Adapter {
        Adapter {
            _reach: Some(Registered::new(reach)),
            ..self
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

fn failed(error: object_store::Error) -> ObjectError {
    match error {
        object_store::Error::NotFound { .. } => ObjectError::Missing,
        object_store::Error::AlreadyExists { .. } => ObjectError::Exists,
        error => ObjectError::Failed(cowslip_remote::reason(&error)),
    }
}

/// Runs requests on the thread for them. They run to their end even if nobody waits, unless the
/// process is asked to end.
fn run<'a, T: Send + 'static>(
    requests: impl Future<Output = Result<T, ObjectError>> + Send + 'static,
) -> ObjectFuture<'a, T> {
    let begun = cowslip_remote::run_until_the_end(requests);
    Box::pin(async move {
        match begun {
            Ok(outcome) => match outcome.await {
                Ok(outcome) => outcome,
                Err(why) => Err(ObjectError::Failed(why.to_string())),
            },
            Err(error) => Err(ObjectError::Failed(system_words(&error).to_string())),
        }
    })
}

impl Objects for Adapter {
    fn put(&self, key: &str, bytes: Vec<u8>, existing: Existing) -> ObjectFuture<'_, ()> {
        let (store, path) = (Arc::clone(&self.store), self.path(key));
        let mode = match existing {
            Existing::Replace => PutMode::Overwrite,
            Existing::Keep => PutMode::Create,
        };
        let payload = PutPayload::from(bytes);
        run(async move {
            let put = store.put_opts(&path, payload, PutOptions::from(mode)).await;
            put.map(drop).map_err(failed)
        })
    }

    fn get(&self, key: &str, range: Range<u64>) -> ObjectFuture<'_, Vec<u8>> {
        let (store, path) = (Arc::clone(&self.store), self.path(key));
        let wanted = range.end - range.start;
        run(async move {
            let range = Some(GetRange::Bounded(range));
            let options = GetOptions {
                range,
                ..GetOptions::default()
            };
            let answer = store.get_opts(&path, options).await.map_err(failed)?;
            let mut stream = answer.into_stream();
            let mut bytes = Vec::new();
            // A body may be longer than its range, or without end.
            while bytes.len() as u64 <= wanted
                && let Some(piece) = stream.try_next().await.map_err(failed)?
            {
                bytes.extend_from_slice(&piece);
            }
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
        let prefix = self.prefix.clone();
        run(async move {
            let found = store.head(&path).await.map_err(failed)?;
            Ok(Adapter::info_of(&prefix, &found))
        })
    }

    fn list(&self, prefix: &str) -> ObjectFuture<'_, Vec<ObjectInfo>> {
        let (store, path) = (Arc::clone(&self.store), self.path(prefix));
        let (prefix, bytes_max) = (self.prefix.clone(), self.list_bytes_max);
        run(async move {
            let mut listing = Listing::new(bytes_max);
            let mut stream = store.list(Some(&path));
            while let Some(found) = stream.try_next().await.map_err(failed)? {
                listing.push(Adapter::info_of(&prefix, &found))?;
            }
            Ok(listing.into_vec())
        })
    }

    fn delete(&self, key: &str) -> ObjectFuture<'_, ()> {
        let (store, path) = (Arc::clone(&self.store), self.path(key));
        run(async move {
            match store.delete(&path).await.map_err(failed) {
                Ok(()) | Err(ObjectError::Missing) => Ok(()),
                Err(error) => Err(error),
            }
        })
    }
}

#[cfg(test)]
mod tests;
