//! Names of files in images: what they are relative to, and which of them name no file of the host.
//!
//! The rules are QEMU's, since images carry the names from one to the other: a relative name is
//! relative to the directory of the image that holds it, not to the current one; what has a colon
//! before its first slash is a protocol, of which only `file:` is known here, and where a name of a
//! published disk has a directory.

use crate::{Error, Result};

/// The part before the colon, if the name starts with a protocol.
fn protocol(name: &str) -> Option<&str> {
    let end = name.find(['/', ':'])?;
    name[end..].starts_with(':').then_some(&name[..end])
}

fn without_file_protocol(name: &str) -> &str {
    name.strip_prefix("file:").unwrap_or(name)
}

/// How names of published disks begin: a store follows, a directory or a URL, and a name in it.
const PUBLISHED: &str = "published:";

/// The name of a file that an image names, as the user would have to write it: relative names are
/// relative to the image's directory, those of stores too. Another name with a protocol stays as it
/// is; no gate opens it.
#[doc(hidden)]
pub fn resolve_name(named_by: &str, name: &str) -> String {
    if let Some(store) = name.strip_prefix(PUBLISHED) {
        let is_of_a_file = protocol(named_by).is_none_or(|protocol| protocol == "file");
        return match is_of_a_file && !store.contains("://") {
            true => format!("{PUBLISHED}{}", beside(named_by, store)),
            false => name.to_string(),
        };
    }
    if protocol(name).is_some_and(|protocol| protocol != "file") {
        return name.to_string();
    }
    beside(named_by, without_file_protocol(name))
}

/// A name that is relative to the directory of a file, unless it is absolute.
fn beside(named_by: &str, name: &str) -> String {
    let base = without_file_protocol(named_by);
    match base.rfind('/') {
        Some(slash) if !name.starts_with('/') => format!("{}{name}", &base[..=slash]),
        _ => name.to_string(),
    }
}

/// The resolved name, if it names a file of the host.
pub(super) fn local_path(named_by: &str, name: &str) -> Result<String> {
    match protocol(name) {
        None | Some("file") => Ok(resolve_name(named_by, name)),
        Some("json") => Err(Error::Unsupported {
            file: named_by.to_string(),
            feature: format!("a file that is named by a JSON description ('{name}')").into(),
        }),
        Some(protocol) => Err(Error::Unsupported {
            file: named_by.to_string(),
            feature: format!("a file behind the protocol '{protocol}' ('{name}')").into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_names_are_relative_to_the_image() {
        let cases = [
            ("a.qcow2", "b.raw", "b.raw"),
            ("dir/a.qcow2", "b.raw", "dir/b.raw"),
            ("/x/y/a.qcow2", "../b.raw", "/x/y/../b.raw"),
            ("/x/y/a.qcow2", "/b.raw", "/b.raw"),
            ("dir/a.qcow2", "file:b.raw", "dir/b.raw"),
            ("file:dir/a.qcow2", "b.raw", "dir/b.raw"),
            ("dir/a.qcow2", "./odd:name", "dir/./odd:name"),
            ("dir/a.qcow2", "nbd://host/x", "nbd://host/x"),
            ("dir/a.qcow2", "published:s/g@1", "published:dir/s/g@1"),
            ("/d/a.qcow2", "published:../s/g@1", "published:/d/../s/g@1"),
            ("a.qcow2", "published:s/g@1", "published:s/g@1"),
            ("dir/a.qcow2", "published:/s/g@1", "published:/s/g@1"),
            (
                "dir/a.qcow2",
                "published:s3://s/g@1",
                "published:s3://s/g@1",
            ),
            ("https://h/a.qcow2", "published:s/g@1", "published:s/g@1"),
        ];
        for (image, name, expected) in cases {
            assert_eq!(resolve_name(image, name), expected, "{name} in {image}");
        }
    }

    #[test]
    fn protocols_are_refused_by_name() {
        let error = local_path("a.qcow2", "json:{}").unwrap_err().to_string();
        assert_eq!(
            error,
            "'a.qcow2': a file that is named by a JSON description ('json:{}') is not supported"
        );
        let error = local_path("a.qcow2", "nbd://host/x")
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "'a.qcow2': a file behind the protocol 'nbd' ('nbd://host/x') is not supported"
        );
        assert_eq!(local_path("d/a", "./nbd:x").unwrap(), "d/./nbd:x");
    }
}
