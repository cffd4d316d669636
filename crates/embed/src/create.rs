//! New images.

use std::path::Path;
use std::sync::Arc;

use cowslip::file::BlockFile;
use cowslip::file::host::{CreateMode, FlushPolicy, HostOptions, open_host_file, resolve_name};
use cowslip::image::Format;
use cowslip::qcow2::create::{CreateOptions, create_as_job, create_raw};
use cowslip::{Error, Job, Result};
use cowslip_nodes::{Destination, OpenSettings, drivers};

use crate::open::OpenRequest;

/// Description of a new image.
#[derive(Clone, Debug)]
pub struct NewImage {
    /// Format: `qcow2` or `raw`.
    pub format: String,
    /// Size of the disk in bytes; 0 with a backing file is the size of that one's disk.
    pub size: u64,
    /// Options of the format. Its size does not count, and for raw images the preallocation
    /// alone does.
    pub options: CreateOptions,
    /// An existing file is an error.
    pub exclusive: bool,
}

impl NewImage {
    /// A qcow2 image with the defaults of the command.
    pub fn qcow2(size: u64) -> NewImage {
        NewImage {
            format: "qcow2".to_string(),
            size,
            options: CreateOptions::new(size),
            exclusive: true,
        }
    }
}

/// Makes an image: a file of the host, or a node of a protocol that takes new images. What was
/// there is lost, unless the image is to be exclusive.
///
/// # Errors
/// Options that do not go together, a backing file that cannot be opened, an existing file, I/O.
/// After a failure or a cancellation a new file of the host is removed.
pub async fn create(name: &str, image: &NewImage, job: &Job) -> Result<()> {
    let registry = drivers::standard();
    let format = registry.format(&image.format)?;
    let mut options = image.options.clone();
    options.size = match (image.size, &options.backing_file) {
        (0, Some(backing)) => {
            let format = options.backing_format.as_deref();
            backing_bytes(&resolve_name(name, backing), format).await?
        }
        (size, _) => size,
    };
    options.validate()?;
    let destination = Destination::named(name, &registry)?;
    let existed = destination.path().is_some_and(Path::exists);
    let file = target(&destination, image.exclusive).await?;
    let made = match format {
        Format::Qcow2 => create_as_job(file, None, &options, job).await,
        Format::Raw => create_raw(file, options.size, options.preallocation, job).await,
        other => Err(Error::Invalid(format!(
            "Format driver '{}' does not support image creation",
            other.name()
        ))),
    };
    if let (Err(_), Some(path), false) = (&made, destination.path(), existed) {
        // Half an image; that it could not be removed changes nothing about the failure.
        drop(std::fs::remove_file(path));
    }
    made
}

async fn target(destination: &Destination, exclusive: bool) -> Result<Arc<dyn BlockFile>> {
    let path = match destination {
        Destination::Host(path) => Path::new(path),
        Destination::Node(node) => {
            let settings = OpenSettings::new(cowslip_nodes::Environment::default());
            return node.create(FlushPolicy::Honour, &settings).await;
        }
    };
    let host = HostOptions {
        writable: true,
        create: match (destination.is_fixed(), exclusive) {
            (true, _) => CreateMode::OpenExisting,
            (false, true) => CreateMode::CreateNew,
            (false, false) => CreateMode::Truncate,
        },
        ..HostOptions::default()
    };
    open_host_file(path, &host)
}

/// The size of the disk of a backing file.
async fn backing_bytes(name: &str, format: Option<&str>) -> Result<u64> {
    let request = OpenRequest {
        format: format.map(str::to_string),
        ..OpenRequest::default()
    };
    let image = crate::open::open(name, &request).await?;
    let size = image.size();
    image.close().await?;
    Ok(size)
}
