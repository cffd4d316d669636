//! [`Version`]: the state of an object that is read, fixed when it is opened.

use std::fmt;

use object_store::{GetOptions, GetRange, ObjectMeta};

/// The version of an object: its ETag or the time of its last change, and its length.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Version {
    /// The ETag, as the server writes it.
    pub e_tag: Option<String>,
    /// The time of the last change, in seconds since 1970, if the server says it.
    pub last_modified: Option<i64>,
    /// Length in bytes.
    pub bytes: u64,
}

impl Version {
    pub(crate) fn of(meta: &ObjectMeta) -> Version {
        // A server that does not say it is read as 1970.
        let seconds = meta.last_modified.timestamp();
        Version {
            e_tag: meta.e_tag.clone(),
            last_modified: Some(seconds).filter(|seconds| *seconds != 0),
            bytes: meta.size,
        }
    }

    /// Whether contents of this version can be distinguished from others. By the length alone they
    /// cannot.
    pub fn is_certain(&self) -> bool {
        self.e_tag.is_some() || self.last_modified.is_some()
    }

    /// Whether an answer is about this version. With an ETag the time does not count: servers
    /// behind one name may differ in it.
    pub(crate) fn is_of(&self, meta: &ObjectMeta) -> bool {
        let other = Version::of(meta);
        let same = match (&self.e_tag, &other.e_tag) {
            (Some(ours), Some(theirs)) => ours == theirs,
            (None, None) => self.last_modified == other.last_modified,
            _ => false,
        };
        same && self.bytes == other.bytes
    }

    /// The request for a range of this version.
    pub(crate) fn request(&self, range: std::ops::Range<u64>) -> GetOptions {
        // A weak tag cannot be asked for (RFC 9110, section 13.1.1); answers are compared anyway.
        let strong = self.e_tag.as_ref().filter(|tag| !tag.starts_with("W/"));
        let since = self.last_modified.filter(|_| strong.is_none());
        let since = since.and_then(|seconds| chrono::DateTime::from_timestamp(seconds, 0));
        GetOptions {
            if_match: strong.cloned(),
            if_unmodified_since: since,
            range: Some(GetRange::Bounded(range)),
            ..GetOptions::default()
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.e_tag, self.last_modified) {
            // The server's text, which may hold anything but line breaks.
            (Some(tag), _) => write!(f, "ETag {}", tag.escape_default())?,
            (None, Some(seconds)) => write!(f, "changed {seconds} s after 1970")?,
            (None, None) => f.write_str("of no version")?,
        }
        write!(f, ", {} bytes", self.bytes)
    }
}
