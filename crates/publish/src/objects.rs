//! [`Objects`]: a store of objects under keys, as much of one as published disks need.
//!
//! Objects are written whole, at once, and read back by ranges; a list shows all that was there
//! when it began. That is what S3, Google's and Azure's stores and directories promise. Nothing
//! else is: no locks, no appending, no exchange of an object on condition.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;

mod directory;

pub use directory::{Directory, open_directories};

/// A request to a store.
pub type ObjectFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, ObjectError>> + Send + 'a>>;

/// A failure of a store.
#[derive(Debug)]
pub enum ObjectError {
    /// There is no object of this key.
    Missing,
    /// There is one already.
    Exists,
    /// Anything else, in words.
    Failed(String),
}

impl fmt::Display for ObjectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ObjectError::Missing => f.write_str("No such object"),
            ObjectError::Exists => f.write_str("The object exists already"),
            ObjectError::Failed(why) => f.write_str(why),
        }
    }
}

/// Treatment of an object that exists under the key of a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It is replaced.
    Replace,
    /// [`ObjectError::Exists`], and it stays.
    Keep,
}

/// An object without its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Its key.
    pub key: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// When it was written, by the store's clock, in milliseconds since 1970.
    pub written_ms: i64,
}

/// Memory that a list of objects takes at most: two and a half million packs, which are 40 TB.
pub const LIST_BYTES_MAX: usize = 512 << 20;
/// Memory that an object of a list takes beside its key.
const INFO_BYTES: usize = 64;

/// A list that is being read. A store may list more than memory holds, by mistake or malice.
#[derive(Debug)]
pub struct Listing {
    found: Vec<ObjectInfo>,
    bytes: usize,
    bytes_max: usize,
}

impl Listing {
    /// An empty list, for so much memory: [`LIST_BYTES_MAX`], unless in tests.
    pub fn new(bytes_max: usize) -> Listing {
        Listing {
            found: Vec::new(),
            bytes: 0,
            bytes_max,
        }
    }

    /// Adds an object.
    ///
    /// # Errors
    /// The list is too long.
    pub fn push(&mut self, found: ObjectInfo) -> Result<(), ObjectError> {
        self.bytes += found.key.len() + INFO_BYTES;
        if self.bytes > self.bytes_max {
            return Err(ObjectError::Failed(format!(
                "The list is too long: after {} objects it would take more than {} bytes",
                self.found.len(),
                self.bytes_max
            )));
        }
        self.found.push(found);
        Ok(())
    }

    /// All objects.
    pub fn into_vec(self) -> Vec<ObjectInfo> {
        self.found
    }
}

/// A store of objects. Requests may be dropped at any moment; whether they take effect is unknown
/// then.
pub trait Objects: Send + Sync + fmt::Debug {
    /// Writes a whole object. Readers see it complete, or not at all.
    fn put(&self, key: &str, bytes: Vec<u8>, existing: Existing) -> ObjectFuture<'_, ()>;

    /// Reads a part of an object.
    fn get(&self, key: &str, range: Range<u64>) -> ObjectFuture<'_, Vec<u8>>;

    /// Length and age of an object.
    fn info(&self, key: &str) -> ObjectFuture<'_, ObjectInfo>;

    /// All objects whose keys begin with `prefix` and a `/`; a failure where they are too many for
    /// a [`Listing`].
    fn list(&self, prefix: &str) -> ObjectFuture<'_, Vec<ObjectInfo>>;

    /// Removes an object; one that is not there is removed already.
    fn delete(&self, key: &str) -> ObjectFuture<'_, ()>;

    /// Makes durable what was written, where the store has not done so itself. By default it has.
    fn settle(&self) -> ObjectFuture<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
}
