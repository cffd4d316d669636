//! Names of files in images: what they are relative to, and which of them name no file of the host.
//!
//! The rules are QEMU's, since images carry the names from one to the other, and the same image has
//! to mean the same disk: a relative name is relative to the directory of the image that holds it;
//! what has a colon before its first slash is a protocol, and relative to nothing but the current
//! directory. Of protocols only `file:` is known here; what follows it is a path, whatever it looks
//! like. QEMU does not know published disks: a store that is a relative directory is relative to
//! the image's.

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

/// A path of the host, as a name that is read as nothing else.
fn name_of_path(path: String) -> String {
    match protocol(&path) {
        Some(_) => format!("./{path}"),
        None => path,
    }
}

/// The name of a file that an image names, as the user would have to write it: relative names are
/// relative to the image's directory, those of stores too. Another name with a protocol, `file:`
/// too, stays as it is.
#[doc(hidden)]
pub fn resolve_name(named_by: &str, name: &str) -> String {
    if let Some(store) = name.strip_prefix(PUBLISHED) {
        let is_of_a_file = protocol(named_by).is_none_or(|protocol| protocol == "file");
        return match is_of_a_file && !store.contains("://") {
            true => format!("{PUBLISHED}{}", beside(named_by, store)),
            false => name.to_string(),
        };
    }
    match protocol(name) {
        Some(_) => name.to_string(),
        None => beside(named_by, name),
    }
}

/// A name that is relative to the directory of a file, unless it is absolute.
fn beside(named_by: &str, name: &str) -> String {
    if name.starts_with('/') {
        return name.to_string();
    }
    let base = without_file_protocol(named_by);
    let Some(slash) = base.rfind('/') else {
        return name.to_string();
    };
    let resolved = format!("{}{name}", &base[..=slash]);
    match base == named_by {
        true => resolved,
        false => name_of_path(resolved),
    }
}

/// The resolved name, if it names a file of the host.
pub(super) fn local_path(named_by: &str, name: &str) -> Result<String> {
    match protocol(name) {
        None => Ok(resolve_name(named_by, name)),
        Some("file") => Ok(name_of_path(without_file_protocol(name).to_string())),
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
            ("dir/a.qcow2", "file:b.raw", "file:b.raw"),
            ("dir/a.qcow2", "file:json:{}", "file:json:{}"),
            ("file:dir/a.qcow2", "b.raw", "dir/b.raw"),
            ("file:c:d/a.qcow2", "b.raw", "./c:d/b.raw"),
            ("dir/a.qcow2", "./odd:name", "dir/./odd:name"),
            ("dir/a.qcow2", "nbd://host/x", "nbd://host/x"),
            ("dir/a.qcow2", "published:s/g@1", "published:dir/s/g@1"),
            ("/d/a.qcow2", "published:../s/g@1", "published:/d/../s/g@1"),
            ("a.qcow2", "published:s/g@1", "published:s/g@1"),
            ("dir/a.qcow2", "published:/s/g@1", "published:/s/g@1"),
            ("dir/a.qcow2", "published:gs://s@1", "published:gs://s@1"),
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

    #[test]
    fn what_follows_the_protocol_of_files_is_a_path_from_the_current_directory() {
        let cases = [
            ("file:b.raw", "b.raw"),
            ("file:/b.raw", "/b.raw"),
            ("file:a:b.raw", "./a:b.raw"),
            ("file:json:{}", "./json:{}"),
            ("file:file:b.raw", "./file:b.raw"),
        ];
        for (name, expected) in cases {
            assert_eq!(local_path("dir/a.qcow2", name).unwrap(), expected, "{name}");
        }
    }
}
