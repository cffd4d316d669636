//! [`Notice`]: what a user should see of the work on a remote file while it goes on.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::url::ObjectUrl;
use crate::version::Version;

/// An event that no request reports.
#[derive(Debug)]
pub enum Notice<'a> {
    /// A request has been failing for some time, and is repeated.
    Waiting {
        /// The last failure.
        why: &'a str,
        /// The time since the first.
        waited: Duration,
    },
    /// A request that was reported as waiting goes on.
    Recovered {
        /// How long it waited.
        waited: Duration,
    },
    /// The cache is not filled any more; the file is read without.
    CacheUnused {
        /// The reason.
        why: &'a str,
    },
    /// A block of the cache was not what had been stored. It is fetched again.
    CacheDamaged {
        /// Offset of the block in the object, in bytes.
        offset: u64,
    },
    /// The object has another version than the one that was opened; nothing of it is read any more.
    Changed {
        /// The version that was opened.
        then: &'a Version,
        /// The version that there is, or why that is not known.
        now: &'a str,
    },
}

impl fmt::Display for Notice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::Waiting { why, waited } => {
                write!(
                    f,
                    "waiting for the server, for {} s: {why}",
                    waited.as_secs()
                )
            }
            Notice::Recovered { waited } => {
                write!(f, "the server answers again, after {} s", waited.as_secs())
            }
            Notice::CacheUnused { why } => write!(f, "the cache is not filled any more: {why}"),
            Notice::CacheDamaged { offset } => {
                write!(
                    f,
                    "the cache is damaged at offset {offset:#x}; the block is fetched again"
                )
            }
            Notice::Changed { then, now } => write!(
                f,
                "it has changed since it was opened, and reads of it fail from now on: then \
                 {then}; now {now}"
            ),
        }
    }
}

/// A function that takes notices about an object.
type Receiver = dyn Fn(&ObjectUrl, &Notice<'_>) + Send + Sync;

/// The receiver of notices.
#[derive(Clone)]
pub struct Notify(pub Arc<Receiver>);

impl Default for Notify {
    fn default() -> Notify {
        Notify(Arc::new(|_, _| ()))
    }
}

cowslip_block::debug_by_name!(Notify);
