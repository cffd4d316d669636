//! From a [`Source`] to an open image, or to its file alone: the one place where images are opened,
//! with their cache modes and I/O engines.

use std::path::Path;
use std::sync::Arc;

use cowslip::Image;
use cowslip::file::host::{
    CreateMode, Driver, FlushPolicy, HostGate, HostOptions, Locking, PageCache, open_host_file,
};
use cowslip::file::{BlockFile, Claim, Protection, Sharing};
use cowslip::image::{BackingChoice, CopyOnRead, Format, OpenOptions};
use cowslip::luks::Passphrase;
use cowslip_block::{Error, Result};
use cowslip_filters::Breakpoints;

use crate::driver::{FileHow, Opening};
use crate::gate::NodeGate;
use crate::how::{Access, OpenHow};
use crate::image_file::ImageFile;
use crate::image_spec::ImageSpec;
use crate::source::{Bottom, Source};

/// Images at most of which each is the file of the one before, backing files that are described so
/// included: an image may name itself in that way.
const IMAGES_IN_CHAIN_MAX: usize = 16;

/// A failure to open an image.
#[derive(Debug)]
pub enum OpenError {
    /// `Could not open 'x': why`.
    Refused(Error),
    /// The image, or the internal snapshot of it that was asked for, cannot be read. Which of them
    /// is not known.
    Snapshot(Error),
}

impl From<Error> for OpenError {
    fn from(error: Error) -> OpenError {
        OpenError::Refused(error)
    }
}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Error {
        match error {
            OpenError::Refused(why) | OpenError::Snapshot(why) => why,
        }
    }
}

/// `-U`: the other extreme of `usual`.
pub fn sharing(force_share: bool, usual: Sharing) -> Sharing {
    match force_share {
        true => Sharing::Forced,
        false => usual,
    }
}

impl Source {
    /// `Could not open 'x': why`.
    fn refused(&self, how: &OpenHow, error: &Error) -> Error {
        let why = (how.environment.reason)(&self.filename, error);
        self.refused_because(&why)
    }

    fn refused_because(&self, why: &str) -> Error {
        Error::opening(&self.given, why)
    }

    /// Options of opening the host's file.
    pub fn host_options(&self, how: &OpenHow) -> HostOptions {
        let direct = self.common.direct.map(|direct| match direct {
            true => PageCache::Bypass,
            false => PageCache::Use,
        });
        let flush = self.common.no_flush.map(|no_flush| match no_flush {
            true => FlushPolicy::Ignore,
            false => FlushPolicy::Honour,
        });
        HostOptions {
            writable: how.access == Access::Write && !self.common.read_only,
            create: CreateMode::OpenExisting,
            page_cache: direct.unwrap_or(how.cache.page_cache()),
            flush: flush.unwrap_or(how.cache.flush_policy()),
            aio: self.host.aio.map_or(how.aio, |(aio, _)| aio),
            locking: self.host.locking,
            driver: self.host.driver,
        }
    }

    /// Checks the options of the host's file, which is open.
    fn check_host_file(&self, how: &OpenHow) -> Result<()> {
        let native = self
            .host
            .aio
            .map_or(how.aio_is_native, |(_, native)| native);
        if native && self.host_options(how).page_cache == PageCache::Use {
            return Err(Error::invalid(
                "aio=native was specified, but it requires cache.direct=on, which was not specified.",
            ));
        }
        self.check_file_options()?;
        let is_named = matches!(
            self.image.backing,
            Some(BackingChoice::Override { .. } | BackingChoice::InFormat(_))
        );
        match self.format {
            Some(Format::Raw | Format::Luks) if is_named => {
                Err(Error::invalid("Driver doesn't support backing files"))
            }
            _ => Ok(()),
        }
    }

    /// Access that other processes keep meanwhile.
    pub fn sharing(&self, how: &OpenHow) -> Sharing {
        sharing(self.common.force_share, how.sharing)
    }

    /// The ID of the secret that opens the image.
    fn secret<'a>(&'a self, how: &'a OpenHow) -> Option<&'a String> {
        self.image.key_secret.as_ref().or(how.key_secret.as_ref())
    }

    /// The secret of this ID, if one is named.
    ///
    /// # Errors
    /// `Could not open 'x': No secret with id 'y'`.
    pub fn opened_by(&self, id: Option<&String>, how: &OpenHow) -> Result<Option<Passphrase>> {
        let found = id
            .map(|id| how.environment.objects.passphrase(id))
            .transpose();
        found.map_err(|why| self.refused(how, &Error::Key(why.to_string())))
    }

    /// The way to the files that the image names.
    pub fn gate(&self, how: &OpenHow) -> NodeGate {
        let host = HostGate {
            options: HostOptions {
                // `file.locking` and `file.driver` are said of the image's file alone.
                locking: Locking::Auto,
                driver: Driver::Unsaid,
                ..self.host_options(how)
            },
            policy: how.policy,
        };
        NodeGate {
            host,
            how: OpenHow {
                breakpoints: Breakpoints::default(),
                ..how.of_another()
            },
        }
    }
}

/// Opens the image that is named, and its chain.
///
/// # Errors
/// `Could not open 'x': why`.
pub async fn open_image(spec: &ImageSpec, how: &OpenHow) -> Result<Image> {
    let source = spec.resolve_by(&how.environment.registry)?;
    Ok(open_source(&source, how).await?)
}

/// Opens an image, and its chain.
///
/// # Errors
/// `Could not open 'x': why`; the snapshot that was asked for cannot be read.
pub async fn open_source(source: &Source, how: &OpenHow) -> std::result::Result<Image, OpenError> {
    if source.image.backing_is_empty {
        (how.environment.warn)(
            "Use of \"backing\": \"\" is deprecated; use \"backing\": null instead",
        );
    }
    let (file, options, gate) = prepare(source, how).await?;
    match (Image::open(file, options, &gate).await, &how.snapshot) {
        (Err(why), Some(_)) => Err(OpenError::Snapshot(why)),
        (opened, _) => Ok(finish((source, how), opened)?),
    }
}

/// Closes an image and opens it with other options; its locks are held in between. After a failure
/// the image is closed, and its locks are held until it is dropped.
///
/// # Errors
/// `Could not open 'x': why`.
pub async fn reopen_image(image: &Image, spec: &ImageSpec, how: &OpenHow) -> Result<Image> {
    let source = spec.resolve_by(&how.environment.registry)?;
    if source.image_below().is_some() {
        let text = "a node over the disk of another image cannot be reopened";
        return Err(source.refused_because(text));
    }
    let (file, options, gate) = prepare(&source, how).await?;
    finish((&source, how), image.reopen(file, options, &gate).await)
}

async fn prepare(
    source: &Source,
    how: &OpenHow,
) -> Result<(Arc<dyn BlockFile>, OpenOptions, NodeGate)> {
    let gate = source.gate(how);
    let mut options = engine_options(source, how)?;
    if source.image.copy_on_read.is_some() && !options.writable {
        return Err(source.refused_because("Block node is read-only"));
    }
    if how.access == Access::Write && source.sharing(how) == Sharing::Forced {
        return Err(source.refused_because(FORCED_FOR_WRITING));
    }
    if let Some(data_file) = &source.data_file {
        options.data_file = Some(open_node(data_file, how).await?);
    }
    let file = open_file(source, how).await?;
    if how.copy_on_read && !options.writable && how.images_above == 0 {
        let text = "Can't use copy-on-read on read-only device";
        return Err(source.refused_because(text));
    }
    Ok((file, options, gate))
}

const FORCED_FOR_WRITING: &str = "force-share=on can only be used with read-only images";

/// A node below another one, as a file: the file itself, or the disk of an image in it.
fn open_node<'a>(source: &'a Source, how: &'a OpenHow) -> Opening<'a> {
    let is_file = source.format == Some(Format::Raw) && source.image.copy_on_read.is_none();
    // Events reach a filter from the image right above it.
    let observes = source.filters.iter().any(|filter| filter.observes_image());
    if is_file && !observes && !source.image.compress {
        return Box::pin(open_file(source, how));
    }
    Box::pin(async move {
        if how.images_above >= IMAGES_IN_CHAIN_MAX {
            return Err(source.refused_because(&format!(
                "more than {IMAGES_IN_CHAIN_MAX} images that are files of one another are not supported"
            )));
        }
        let how = OpenHow {
            copy_on_read: how.copy_on_read,
            images_above: how.images_above + 1,
            ..how.of_another()
        };
        let image = open_source(source, &how).await?;
        Ok(Arc::new(ImageFile::new(image)) as Arc<dyn BlockFile>)
    })
}

/// Data that reads store in an image. `-C` over a disk without layers applies to the image that has
/// the disk.
fn copy_on_read(source: &Source, how: &OpenHow) -> CopyOnRead {
    let is_passed_on = source.format == Some(Format::Raw) && source.image_below().is_some();
    match (source.image.copy_on_read, how.copy_on_read) {
        (Some(kept), _) => kept,
        (None, true) if !is_passed_on => CopyOnRead::All,
        (None, _) => CopyOnRead::Off,
    }
}

/// The engine's options of opening the image.
///
/// # Errors
/// The secret of an image below cannot be used.
pub fn engine_options(source: &Source, how: &OpenHow) -> Result<OpenOptions> {
    let (common, image) = (&source.common, &source.image);
    Ok(OpenOptions {
        dirty: (how.environment.dirty)(),
        format: source.format,
        formats: how.environment.registry.engine_formats(),
        guessed: false,
        writable: source.host_options(how).writable,
        write_policy: how.cache.write_policy(),
        discard: common.discard.unwrap_or(how.discard),
        discard_no_unref: image.discard_no_unref,
        detect_zeroes: common.detect_zeroes.unwrap_or(how.detect_zeroes),
        zero_method: image.zero_method,
        alloc_policy: image.alloc_policy.unwrap_or(how.alloc_policy),
        copy_on_read: copy_on_read(source, how),
        compress: image.compress,
        limits: image.limits,
        data_file: None,
        backing: image.backing.clone().unwrap_or(how.backing.clone()),
        metadata_only: how.metadata_only,
        bitmap_piece_bytes: 0,
        cache_bytes: image.cache.budget().unwrap_or(how.cache_bytes),
        sharing: source.sharing(how),
        read_besides: how.read_besides.clone(),
        workers: how.workers.clone(),
        snapshot: how.snapshot.clone().or(image.snapshot.clone()),
        encrypt_format: image.encrypt_format.clone(),
        // A missing one is an error only if the image needs it.
        passphrase: source
            .opened_by(source.secret(how), how)
            .unwrap_or_default(),
        backing_passphrase: source.opened_by(image.backing_key_secret.as_ref(), how)?,
    })
}

fn finish((source, how): (&Source, &OpenHow), opened: Result<Image>) -> Result<Image> {
    if let Err(Error::Key(_)) = &opened {
        source.opened_by(source.secret(how), how)?;
    }
    let image = opened.map_err(|error| source.refused(how, &error))?;
    let format = image.layers()[0].format;
    let checked = source.check_image_options(format);
    checked.map_err(|why| source.refused(how, &why))?;
    if let Some(header) = image
        .layers()
        .first()
        .and_then(|layer| layer.header.clone())
    {
        if source.image.discard_no_unref && header.version < 3 {
            return Err(
                source.refused_because("discard-no-unref is only supported since qcow2 version 3")
            );
        }
        let checked = source.image.cache.check(1 << header.cluster_bits);
        checked.map_err(|why| source.refused_because(&why))?;
    }
    for file in image.unprotected() {
        warn_unprotected(file, how);
    }
    Ok(image)
}

/// Opens the image's file alone, through its filters; claims nothing.
///
/// # Errors
/// `Could not open 'x': why`.
pub async fn open_file(source: &Source, how: &OpenHow) -> Result<Arc<dyn BlockFile>> {
    let host = source.host_options(how);
    let file_how = FileHow {
        name: &source.filename,
        host: &host,
        objects: &*how.environment.objects,
        breakpoints: &how.breakpoints,
    };
    let refused = |why: Error| source.refused_because(&why.to_string());
    let mut file = open_bottom(source, how, file_how).await?;
    for filter in source.filters.iter().rev() {
        file = filter.open(file, file_how).await.map_err(refused)?;
    }
    Ok(file)
}

fn open_bottom<'a>(source: &'a Source, how: &'a OpenHow, file_how: FileHow<'a>) -> Opening<'a> {
    match &source.bottom {
        Bottom::Host => Box::pin(std::future::ready(open_host(source, how, file_how))),
        Bottom::Protocol { node, .. } => {
            let opening = node.open(file_how);
            Box::pin(async move {
                let opened = opening.await;
                opened.map_err(|why| source.refused_because(&why.to_string()))
            })
        }
        Bottom::Image(image) => {
            let passes_on = source.format == Some(Format::Raw);
            let how = OpenHow {
                copy_on_read: how.copy_on_read && passes_on,
                ..how.clone()
            };
            Box::pin(async move { open_node(image, &how).await })
        }
    }
}

fn open_host(source: &Source, how: &OpenHow, file_how: FileHow<'_>) -> Result<Arc<dyn BlockFile>> {
    let file = open_host_file(Path::new(file_how.name), file_how.host);
    let file = file.map_err(|error| source.refused(how, &error))?;
    let checked = source.check_host_file(how);
    checked.map_err(|why| source.refused(how, &why))?;
    Ok(file)
}

/// Opens the image's file alone, to be examined: finds out its format and claims it.
///
/// # Errors
/// `Could not open 'x': why`.
pub async fn open_alone(source: &Source, how: &OpenHow) -> Result<(Arc<dyn BlockFile>, Format)> {
    let writable = how.access == Access::Write;
    if writable && source.sharing(how) == Sharing::Forced {
        return Err(source.refused_because(FORCED_FOR_WRITING));
    }
    let refused = |error: Error| source.refused(how, &error);
    let file = open_file(source, how).await?;
    let format = match source.format {
        Some(format) => format,
        None => {
            let start = cowslip::qcow2::inspect::read_start(file.as_ref()).await;
            let start = start.map_err(refused)?;
            let probed = source.registry.probe(&start, &source.filename);
            probed.map_err(refused)?
        }
    };
    let claim = match (source.sharing(how), format) {
        (Sharing::Forced, _) => Claim::FORCED,
        (_, Format::Qcow2 | Format::Luks | Format::Other(_)) => Claim::qcow2(writable),
        (sharing, Format::Raw) => Claim::raw(writable, sharing),
    };
    if let Protection::Unprotected(why) = file.claim(claim).map_err(refused)? {
        warn_unprotected(&format!("'{}' ({why})", file.name()), how);
    }
    Ok((file, format))
}

/// The size of the disk of an image that is alone in an open file, in bytes.
///
/// # Errors
/// The engine's of opening it.
pub async fn disk_bytes(file: &Arc<dyn BlockFile>, format: Format, gate: &NodeGate) -> Result<u64> {
    let options = OpenOptions {
        format: Some(format),
        formats: gate.how.environment.registry.engine_formats(),
        backing: BackingChoice::None,
        metadata_only: true,
        sharing: gate.how.sharing,
        ..OpenOptions::default()
    };
    let image = Image::open(Arc::clone(file), options, gate).await?;
    let size = image.size();
    image.close().await?;
    Ok(size)
}

fn warn_unprotected(file: &str, how: &OpenHow) {
    (how.environment.warn)(&format!(
        "the file system has no locks: nothing keeps other processes from {file}"
    ));
}
