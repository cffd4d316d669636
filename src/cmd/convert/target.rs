//! The image that is converted into: made or opened, and what becomes of it in the end.

use std::path::{Path, PathBuf};

use cowslip::convert::{Converted, TargetContent, Totals};
use cowslip::file::host::{Aio, FlushPolicy, HostOptions, open_host_file, resolve_name};
use cowslip::file::{ReadSet, Sharing};
use cowslip::image::{DiscardPolicy, Format};
use cowslip::{Image, Job};

use super::super::create::{self, format_name};
use super::{Form, Request, too_small};
use crate::error::CommandError;
use crate::new_file::NewFile;
use crate::open::{self, Access, Destination, ImageSpec, OpenSettings, open_image, workers};
use crate::options;
use crate::output::is_called_as_qemu;

/// The target, open for writing.
pub struct Target {
    image: Image,
    files: Vec<NewFile>,
}

impl Target {
    /// Opens the target of `-n`, of which the image's own files must store nothing of `read`.
    pub async fn open(
        request: &Request<'_>,
        read: &ReadSet,
        size: u64,
    ) -> Result<Target, CommandError> {
        // Bytes that others write meanwhile would be neither theirs nor a copy.
        let image = open_for_writing(request, read, Sharing::Frozen).await?;
        if image.size() < size {
            return Err(too_small());
        }
        if request.args.compress && image.layers()[0].format != Format::Qcow2 {
            let text = "Compression not supported for this file format";
            return Err(CommandError::new(text));
        }
        Ok(Target {
            image,
            files: Vec::new(),
        })
    }

    /// Makes a target that has room for `size` bytes, in files that store nothing of `read`.
    pub async fn make(
        request: &Request<'_>,
        (read, size): (&ReadSet, u64),
        (found, job): (Totals, &Job),
    ) -> Result<Target, CommandError> {
        let format = request.format.unwrap_or(Format::Raw);
        let destination = open::destination(request.target)?;
        let wanted = create::Request {
            destination: destination.clone(),
            format,
            options: request.created.clone(),
            size: Some(size),
            flush: request.target_cache.flush_policy(),
        };
        let prefixed = |error: CommandError| {
            let format = request.format_name;
            CommandError::new(format!(
                "{}: error while converting {format}: {error}",
                request.target
            ))
        };
        if let Some(path) = path_of_data(request, &destination)? {
            check_room(request, &path, found)?;
        }
        // Preallocation takes long enough for progress of its own; the creation of a few tables
        // does not, and would show up as several per cent.
        let allocates = options_value(request, "preallocation");
        let of_creation = match allocates {
            "falloc" | "full" => job.clone(),
            _ => Job::default(),
        };
        let files = create::make_files(&wanted, read.clone(), &of_creation).await;
        let mut files = files.map_err(prefixed)?;
        // As a whole, as in `open`: another process may have opened it, or made it over, meanwhile.
        let image = match open_for_writing(request, read, Sharing::Frozen).await {
            Ok(image) => image,
            Err(error) => {
                files.iter_mut().for_each(NewFile::leave_if_claimed);
                return Err(error);
            }
        };
        if image.size() < size {
            // While the image is open nobody else's file can be there.
            drop(files);
            return Err(too_small());
        }
        image.mark_unfinished().await?;
        Ok(Target { image, files })
    }

    /// The image that is written.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Returns the content of an existing target.
    pub fn unwritten(&self, request: &Request<'_>) -> TargetContent {
        if request.args.backing.is_some() {
            // Without a backing file of its own, what is not copied stays as it is, as with
            // qemu-img.
            let below = self.image.layers().get(1).map(|layer| layer.size);
            return TargetContent::Backing(below.unwrap_or(u64::MAX));
        }
        match request.args.target_is_zero {
            true => TargetContent::Zeroes,
            false => TargetContent::Unknown,
        }
    }

    /// Whether it reads as zeroes where nothing is written: it was said to, or is new and does.
    pub fn is_zero(&self, request: &Request<'_>) -> bool {
        request.args.target_is_zero || self.image.is_zero_when_new()
    }

    /// Closes the target; what is no copy does not stay to be taken for one ([`NewFile`]), nor does
    /// it if this process is killed.
    pub async fn end(
        self,
        done: Result<Converted, CommandError>,
    ) -> Result<Converted, CommandError> {
        let marked = match &done {
            Ok(_) => self.image.mark_finished().await,
            Err(_) => Ok(()),
        };
        let closed = self.image.close().await;
        let done = done?;
        marked?;
        closed?;
        self.files.into_iter().for_each(NewFile::finished);
        Ok(done)
    }
}

/// Returns the content expected of a new target where nothing is written;
/// [`Image::is_zero_when_new`] says of the target itself, once it is there, whether it has it.
/// `backing_bytes` is the size of its backing file.
pub fn unwritten_when_made(
    request: &Request<'_>,
    backing_bytes: Option<u64>,
) -> Result<TargetContent, CommandError> {
    if let Some(bytes) = backing_bytes {
        return Ok(TargetContent::Backing(bytes));
    }
    let is_fixed = open::destination(request.target)?.is_fixed();
    Ok(match request.format {
        // Clusters that were never written decrypt to anything.
        Some(Format::Luks) => TargetContent::Unknown,
        Some(Format::Raw) if is_fixed => TargetContent::Unknown,
        _ => TargetContent::Zeroes,
    })
}

fn options_value<'a>(request: &'a Request<'_>, name: &str) -> &'a str {
    options::value(&request.created, name).unwrap_or_default()
}

/// The backing chain that a target is said to have, open; `None` if none is. The files of one that
/// exists already are those of its own chain as well, so that this one need not be there.
pub async fn named_backing(request: &Request<'_>) -> Result<Option<Image>, CommandError> {
    if !request.has_backing() {
        return Ok(None);
    }
    let name = options_value(request, "backing_file");
    let format = options::value(&request.created, "backing_fmt");
    match open_backing(request, name, format).await {
        Ok(image) => Ok(Some(image)),
        Err(_) if request.args.no_create => Ok(None),
        Err(error) => Err(error),
    }
}

async fn open_backing(
    request: &Request<'_>,
    name: &str,
    format: Option<&str>,
) -> Result<Image, CommandError> {
    let resolved = resolve_name(open::destination(request.target)?.name(), name);
    let settings = OpenSettings {
        policy: request.args.trust.backing_policy,
        sharing: cowslip::file::Sharing::Forced,
        ..open::settings()
    };
    let opened = open_image(&ImageSpec::named(&resolved, format), &settings).await;
    opened.map_err(|why| {
        let target = request.target;
        CommandError::new(format!(
            "Could not open '{target}': Could not open backing file: {}",
            why.reason_not_to_open()
        ))
    })
}

async fn open_for_writing(
    request: &Request<'_>,
    read: &ReadSet,
    sharing: Sharing,
) -> Result<Image, CommandError> {
    let key = match request.format {
        Some(Format::Luks) => options::value(&request.created, "key-secret"),
        _ => options::value(&request.created, "encrypt.key-secret"),
    };
    let settings = OpenSettings {
        access: Access::Write,
        cache: request.target_cache,
        aio: Aio::Threads,
        discard: DiscardPolicy::Unmap,
        policy: request.args.trust.backing_policy,
        workers: workers(),
        key_secret: key.map(str::to_string),
        sharing,
        read_besides: read.clone(),
        ..open::settings()
    };
    let spec = ImageSpec {
        image_opts: request.args.target_image_opts,
        ..ImageSpec::named(request.target, request.format.map(format_name))
    };
    open_image(&spec, &settings).await
}

/// The file of the host that the guest's data goes into, if it is one.
fn path_of_data(
    request: &Request<'_>,
    destination: &Destination,
) -> Result<Option<PathBuf>, CommandError> {
    Ok(match options::value(&request.created, "data_file") {
        Some(name) if open::is_node(name) => None,
        Some(name) => Some(open::local_name(&resolve_name(destination.name(), name))?.into()),
        None => destination.path().map(Path::to_path_buf),
    })
}

/// Refuses, under our own name, what may not fit; qemu-img begins, and ends on a full disk.
fn check_room(request: &Request<'_>, path: &Path, found: Totals) -> Result<(), CommandError> {
    if is_called_as_qemu()
        || request.args.no_space_check
        || request.options.form == Form::Compressed
    {
        return Ok(());
    }
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let Ok(stats) = rustix::fs::statvfs(directory) else {
        return Ok(());
    };
    let options = HostOptions {
        flush: FlushPolicy::Ignore,
        ..HostOptions::default()
    };
    let was_there = open_host_file(path, &options).ok();
    if was_there
        .as_ref()
        .is_some_and(|file| !file.capabilities().extends_with_zeroes)
    {
        return Ok(());
    }
    let given_back = was_there
        .and_then(|file| file.allocated_bytes())
        .unwrap_or(0);
    let free = stats
        .f_bavail
        .saturating_mul(stats.f_frsize)
        .saturating_add(given_back);
    match found.data_bytes > free {
        true => Err(CommandError::new(format!(
            "Not started: the source has {} bytes of data, and the file system of '{}' has {free} free. The copy \
             may still fit if enough of the data is zeroes: use --no-space-check to try",
            found.data_bytes,
            path.display()
        ))),
        false => Ok(()),
    }
}
