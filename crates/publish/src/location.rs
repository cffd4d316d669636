//! [`Location`]: a store, a name in it and a version, as people write them:
//! `s3://bucket/images/golden@3`.

use std::fmt;

use cowslip_block::{Error, Result};

use crate::digest::Digest;

/// Longest name of a published disk.
const NAME_CHARS_MAX: usize = 128;

/// A version of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// The newest.
    Newest,
    /// This one.
    Number(u32),
    /// That with an index of this digest, which never stands for another disk.
    Pinned(Digest),
}

/// A name in a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// The store, and the path in it below which everything is: a URL or a directory.
    pub root: String,
    /// The name of the disk.
    pub name: String,
    /// The version.
    pub version: Version,
}

impl Location {
    /// The location that a text stands for.
    ///
    /// # Errors
    /// It names no disk, or the name or version has characters that none has.
    pub fn parse(text: &str) -> Result<Location> {
        let Some((root, last)) = text.rsplit_once('/') else {
            return Err(Error::invalid(format!(
                "'{text}' names no published disk: that is a store, '/' and a name, as in 's3://bucket/images/golden' or '/srv/images/golden'"
            )));
        };
        let (name, version) = match last.split_once('@') {
            None => (last, Version::Newest),
            Some((name, version)) => (name, parse_version(version, text)?),
        };
        check_name(name, text)?;
        // The root directory, and `scheme://bucket` without a path, are roots too.
        let root = if root.is_empty() { "/" } else { root };
        if root.ends_with(":/") {
            return Err(Error::invalid(format!(
                "'{text}' names a store and no published disk in it"
            )));
        }
        Ok(Location {
            root: root.to_string(),
            name: name.to_string(),
            version,
        })
    }

    /// This name with its version.
    #[must_use]
    pub fn at(&self, version: Version) -> Location {
        Location {
            version,
            ..self.clone()
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Location {
            root,
            name,
            version,
        } = self;
        let between = if root == "/" { "" } else { "/" };
        write!(f, "{root}{between}{name}")?;
        match version {
            Version::Newest => Ok(()),
            Version::Number(number) => write!(f, "@{number}"),
            Version::Pinned(digest) => write!(f, "@{digest}"),
        }
    }
}

fn parse_version(text: &str, whole: &str) -> Result<Version> {
    if let Some(digest) = Digest::from_hex(text) {
        return Ok(Version::Pinned(digest));
    }
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(number) if is_number && number > 0 => Ok(Version::Number(number)),
        _ => Err(Error::invalid(format!(
            "'{text}' in '{whole}' is no version: that is a number, or a digest of 64 hexadecimal digits"
        ))),
    }
}

/// Checks a name, `whole` of which is what was given.
///
/// # Errors
/// It is empty, too long, begins with a dot, or has other characters than letters, digits, `.`,
/// `-` and `_`.
pub fn check_name(name: &str, whole: &str) -> Result<()> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let is_name = (1..=NAME_CHARS_MAX).contains(&name.len())
        && !name.starts_with('.')
        && name.bytes().all(is_allowed);
    match is_name {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "'{name}' in '{whole}' is no name of a published disk: those have up to {NAME_CHARS_MAX} letters, digits, '.', '-' and '_', and begin with no dot"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_location_stand_for_each_other() {
        let pinned = format!("file:///srv/x/a@{}", Digest::of(b"a"));
        for text in [
            "s3://bucket/images/golden",
            "s3://bucket/golden-2.qcow2@7",
            "/golden",
            "images/golden@1",
            &pinned,
        ] {
            let location = Location::parse(text).unwrap();
            assert_eq!(location.to_string(), text);
        }
        let location = Location::parse("s3://bucket/images/golden@3").unwrap();
        assert_eq!(location.root, "s3://bucket/images");
        assert_eq!(location.name, "golden");
        assert_eq!(location.version, Version::Number(3));
    }

    #[test]
    fn what_names_no_disk_is_refused() {
        for text in [
            "golden",
            "a/",
            "s3://bucket",
            "a/.b",
            "a/b c",
            "a/b@",
            "a/b@0",
            "a/b@x",
            "a/b@-1",
            "a/@1",
            "a/b@+1",
        ] {
            let refused = Location::parse(text).unwrap_err().to_string();
            assert!(refused.contains(text), "{refused}");
        }
    }
}
