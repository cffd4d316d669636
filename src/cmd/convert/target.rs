//! The image that is converted into: made or opened, and what becomes of it in the end.

use std::path::Path;

use cowslip::convert::{Converted, Found, Unwritten};
use cowslip::file::FileId;
use cowslip::file::host::{Aio, FlushPolicy, HostOptions, open_host_file};
use cowslip::image::{DiscardPolicy, Format};
use cowslip::{Image, Job};

use super::super::create::{self, NewFile, Place, format_name};
use super::{Form, Request, too_small};
use crate::error::CommandError;
use crate::open::{Access, ImageSpec, OpenHow, open_image, workers};
use crate::options;
use crate::output::is_called_as_qemu;

/// The target, open for writing.
pub struct Target {
    image: Image,
    files: Vec<NewFile>,
    /// An image file that was there before, and is worth nothing until it is whole.
    overwritten: Option<String>,
}

impl Target {
    /// Opens the target of `-n`.
    pub async fn open(request: &Request<'_>, size: u64) -> Result<Target, CommandError> {
        let image = open_for_writing(request).await?;
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
            overwritten: None,
        })
    }

    /// Makes a target that has room for `size` bytes.
    pub async fn make(
        request: &Request<'_>,
        (sources, size): (&[Image], u64),
        (found, job): (Found, &Job),
    ) -> Result<Target, CommandError> {
        let format = request.format.unwrap_or(Format::Raw);
        let place = Place::named(request.target)?;
        let wanted = create::Request {
            place: place.clone(),
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
        refuse_source(&place, sources).map_err(prefixed)?;
        if let Some(path) = place.path() {
            check_room(request, path, found)?;
        }
        let was_there = place.path().is_some_and(Path::is_file);
        // What is allocated ahead takes its time; a few tables do not, and would be told as so many per cent.
        let allocates = options_value(request, "preallocation");
        let of_creation = match allocates {
            "falloc" | "full" => job.clone(),
            _ => Job::default(),
        };
        let files = create::make_files(&wanted, Vec::new(), &of_creation).await;
        let files = files.map_err(prefixed)?;
        let image = open_for_writing(request).await?;
        if image.size() < size {
            return Err(too_small());
        }
        Ok(Target {
            image,
            files,
            overwritten: was_there.then(|| place.name().to_string()),
        })
    }

    /// The image.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// What an existing target reads as.
    pub fn unwritten(&self, request: &Request<'_>) -> Unwritten {
        if request.args.backing.is_some() {
            // Without a backing file of its own, what is not copied stays as it is, as with qemu-img.
            let below = self.image.layers().get(1).map(|layer| layer.size);
            return Unwritten::Backing(below.unwrap_or(u64::MAX));
        }
        match request.args.target_is_zero {
            true => Unwritten::Zeroes,
            false => Unwritten::Unknown,
        }
    }

    /// Closes the target; what is no copy does not stay to be taken for one.
    pub async fn end(
        self,
        done: Result<Converted, CommandError>,
    ) -> Result<Converted, CommandError> {
        let closed = self.image.close().await;
        let outcome = done.and_then(|done| {
            closed?;
            Ok(done)
        });
        match &outcome {
            Ok(_) => self.files.into_iter().for_each(NewFile::finished),
            Err(_) => {
                if let Some(name) = &self.overwritten {
                    // The failure that led here is the one to tell of.
                    drop(
                        std::fs::OpenOptions::new()
                            .write(true)
                            .open(name)
                            .and_then(|file| file.set_len(0)),
                    );
                }
            }
        }
        outcome
    }
}

/// What a target that is made reads as where nothing is written.
pub async fn unwritten_when_made(request: &Request<'_>) -> Result<Unwritten, CommandError> {
    if request.has_backing() {
        let name = options_value(request, "backing_file");
        let format = options_value(request, "backing_fmt");
        return Ok(Unwritten::Backing(
            backing_bytes(request, name, format).await?,
        ));
    }
    if request.format == Some(Format::Luks) {
        // What was never written decrypts to anything.
        return Ok(Unwritten::Unknown);
    }
    Ok(match Place::named(request.target)?.is_fixed() {
        false => Unwritten::Zeroes,
        true => Unwritten::Unknown,
    })
}

fn options_value<'a>(request: &'a Request<'_>, name: &str) -> &'a str {
    options::value(&request.created, name).unwrap_or_default()
}

/// Bytes that the backing file of a new target has.
async fn backing_bytes(
    request: &Request<'_>,
    name: &str,
    format: &str,
) -> Result<u64, CommandError> {
    let resolved = cowslip::file::host::resolve_name(Place::named(request.target)?.name(), name);
    let how = OpenHow {
        policy: request.args.trust.backing_policy,
        sharing: cowslip::file::Sharing::Forced,
        ..OpenHow::default()
    };
    let opened = open_image(&ImageSpec::named(&resolved, Some(format)), &how).await;
    let opened = opened.map_err(|why| {
        let target = request.target;
        CommandError::new(format!(
            "Could not open '{target}': Could not open backing file: {}",
            unwrapped(&why)
        ))
    })?;
    Ok(opened.size())
}

/// Of "Could not open 'x': Could not open 'x': why" the second half.
fn unwrapped(why: &CommandError) -> String {
    let text = why.to_string();
    match text.split_once("': Could not open '") {
        Some((_, rest)) => format!("Could not open '{rest}"),
        None => text,
    }
}

async fn open_for_writing(request: &Request<'_>) -> Result<Image, CommandError> {
    let key = match request.format {
        Some(Format::Luks) => options::value(&request.created, "key-secret"),
        _ => options::value(&request.created, "encrypt.key-secret"),
    };
    let how = OpenHow {
        access: Access::Write,
        cache: request.target_cache,
        aio: Aio::Threads,
        discard: DiscardPolicy::Unmap,
        policy: request.args.trust.backing_policy,
        workers: workers(),
        key_secret: key.map(str::to_string),
        ..OpenHow::default()
    };
    let spec = ImageSpec {
        image_opts: request.args.target_image_opts,
        ..ImageSpec::named(request.target, request.format.map(format_name))
    };
    open_image(&spec, &how).await
}

/// Refuses to make the target of a file that the sources need. Locks would too, but not under `-U`, nor on all file
/// systems.
///
/// # Errors
/// The file is one of theirs, in the words of one whose lock says so.
pub fn refuse_source(place: &Place, sources: &[Image]) -> Result<(), CommandError> {
    let id = |name: &str| {
        use std::os::unix::fs::MetadataExt;
        let found = std::fs::metadata(name).ok()?;
        Some(FileId(found.dev(), found.ino()))
    };
    let name = place.name();
    let target = id(name);
    let layers = sources.iter().flat_map(Image::layers);
    let mut files = layers.flat_map(|layer| [layer.name, layer.data_name]);
    let is_same = |file: &str| match place {
        Place::Host(_) => target.is_some() && id(file) == target,
        Place::Export(..) => file == name,
    };
    match files.any(|file| is_same(&file)) {
        true => Err(CommandError::new(format!(
            "Failed to get \"write\" lock\nIs another process using the image [{name}]?"
        ))),
        false => Ok(()),
    }
}

/// Refuses, under our own name, what may not fit; qemu-img begins, and ends on a full disk.
fn check_room(request: &Request<'_>, path: &Path, found: Found) -> Result<(), CommandError> {
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
    let Ok(told) = rustix::fs::statvfs(directory) else {
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
    let free = told
        .f_bavail
        .saturating_mul(told.f_frsize)
        .saturating_add(given_back);
    match found.data_bytes > free {
        true => Err(CommandError::new(format!(
            "Not begun: the source has {} bytes of data, and the file system of '{}' has {free} left. If enough of \
             them are zeroes it fits all the same: --no-space-check tries",
            found.data_bytes, request.target
        ))),
        false => Ok(()),
    }
}
