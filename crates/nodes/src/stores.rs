//! Stores of published disks by the names that people give them: directories, `file://` URLs, and
//! object stores by their URLs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cowslip_block::{Error, Result};
use cowslip_publish::objects::{Directory, Objects};
use cowslip_publish::store::Store;
use cowslip_remote::{Environment, Location, ObjectUrl, Reach, StoreOptions, locate};

mod adapter;

pub use adapter::Adapter;

/// The store of a name, and the path in it. Nothing is sent.
///
/// # Errors
/// The name has another scheme, or the URL or an option cannot be.
pub fn open_store(root: &str, options: &StoreOptions) -> Result<Store> {
    let objects: Arc<dyn Objects> = match ObjectUrl::of_name(root) {
        Some(url) => {
            let url = url?;
            if !url.scheme().takes_objects() {
                return Err(Error::invalid(format!(
                    "'{root}' is on a web server or in a registry, which does not list its objects: published disks are in directories, s3://, gs:// and az://"
                )));
            }
            let environment = Environment::of_process();
            let located = locate(&url, options, &environment)?;
            let adapter = Adapter::new(located.store, located.path.as_ref());
            Arc::new(adapter.within(Reach::of(&url, options, &environment, None)))
        }
        None => {
            let directory = directory(root)?;
            let opened = Directory::new(&directory);
            Arc::new(opened.map_err(|error| Error::io(format!("Could not open '{root}'"), error))?)
        }
    };
    Ok(Store::new(objects, root))
}

/// The place of an object that stands for itself.
#[derive(Debug)]
pub enum Place {
    /// In a store.
    Object(Location),
    /// A file of the host.
    File(PathBuf),
}

/// The place of an object of this name. Nothing is sent.
///
/// # Errors
/// The name has another scheme, or the URL or an option cannot be.
pub fn place_of_object(name: &str, options: &StoreOptions) -> Result<Place> {
    match ObjectUrl::of_name(name) {
        Some(url) => {
            let located = locate(&url?, options, &Environment::of_process());
            located.map(Place::Object)
        }
        None => directory(name).map(Place::File),
    }
}

/// The directory that the name of a store stands for, if it is one.
pub fn directory_of(root: &str) -> Option<PathBuf> {
    match ObjectUrl::of_name(root) {
        Some(_) => None,
        None => directory(root).ok(),
    }
}

/// The directory that a name stands for.
fn directory(root: &str) -> Result<PathBuf> {
    let path = match root.split_once("://") {
        None => return Ok(Path::new(root).to_path_buf()),
        Some(("file", path)) => path,
        Some((scheme, _)) => {
            return Err(Error::invalid(format!(
                "'{root}': no store of published disks has the scheme '{scheme}'"
            )));
        }
    };
    match path.starts_with('/') {
        true => Ok(Path::new(path).to_path_buf()),
        false => Err(Error::invalid(format!(
            "'{root}': a URL of a directory has three slashes: file:///srv/images"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_have_paths_or_urls() {
        for (root, path) in [("/srv/x", "/srv/x"), ("x", "x"), ("file:///srv", "/srv")] {
            assert_eq!(directory(root).ok(), Some(PathBuf::from(path)));
        }
        for (root, said) in [
            ("file://host/x", "three slashes"),
            ("ftp://host/x", "the scheme 'ftp'"),
            ("https://host/x", "web server"),
            ("s3://user:password@bucket/x", "environment"),
        ] {
            let refused = open_store(root, &StoreOptions::default()).map(drop);
            let refused = refused.map_err(|error| error.to_string());
            assert!(
                refused.as_ref().is_err_and(|why| why.contains(said)),
                "{refused:?}"
            );
        }
    }
}
