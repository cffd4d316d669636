//! Space for what a view keeps of its disk: a file that has no name any more, so that nothing is
//! left of it when the daemon ends, however that happens.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cowslip::file::host::{HostGate, HostOptions, open_host_file};
use cowslip::image::{Format, OpenOptions as ImageOptions};
use cowslip::{Disk, Image};
use cowslip_qmp::QmpError;

use super::nodes::Node;
use super::words::failed;

/// A disk of the size of a node, all holes, in a directory, or in that of the node's image.
///
/// # Errors
/// The file cannot be made.
pub async fn scratch_for(
    node: &Rc<Node>,
    directory: Option<&str>,
) -> Result<Arc<dyn Disk>, QmpError> {
    static MADE: AtomicU64 = AtomicU64::new(0);
    let directory = match directory {
        Some(directory) => PathBuf::from(directory),
        None => match Path::new(&node.filename()).parent() {
            Some(parent) if parent != Path::new("") => parent.to_path_buf(),
            _ => PathBuf::from("."),
        },
    };
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let name = format!(".cowslip-view-{}-{number}", std::process::id());
    let path = directory.join(name);
    let why = |error: &dyn std::fmt::Display| {
        let place = directory.display();
        failed(format_args!(
            "no space for what changes in '{place}': {error}"
        ))
    };
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(|error| why(&cowslip::error::system_words(&error)))?;
    let opened = match file.set_len(node.live_size()) {
        Ok(()) => open(&path).await,
        Err(error) => Err(why(&cowslip::error::system_words(&error))),
    };
    // It stays as long as it is open.
    drop(std::fs::remove_file(&path));
    Ok(Arc::new(opened?))
}

async fn open(path: &Path) -> Result<Image, QmpError> {
    let host = HostOptions {
        writable: true,
        ..HostOptions::default()
    };
    let file = open_host_file(path, &host).map_err(failed)?;
    let options = ImageOptions {
        format: Some(Format::Raw),
        writable: true,
        ..ImageOptions::default()
    };
    let gate = HostGate {
        options: host,
        ..HostGate::default()
    };
    Image::open(file, options, &gate).await.map_err(failed)
}
