//! From a [`Source`] to an open image, or to its file alone: the one place where images are opened,
//! with their cache modes and I/O engines.

use std::path::Path;
use std::sync::Arc;

use cowslip::Image;
use cowslip::file::host::{
    CreateMode, Driver, FlushPolicy, HostGate, HostOptions, Locking, PageCache, host_file_of,
    open_host_file,
};
use cowslip::file::{BlockFile, Claim, Protection, Sharing};
use cowslip::image::{BackingChoice, CopyOnRead, Format, OpenOptions};
use cowslip::luks::Passphrase;
use cowslip_block::{Error, Result};
use cowslip_filters::Breakpoints;

use crate::driver::{FileSettings, Opening};
use crate::gate::NodeGate;
use crate::image_file::ImageFile;
use crate::image_spec::ImageSpec;
use crate::kept::{self, Place};
use crate::settings::{Access, OpenSettings};
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
    fn refused(&self, settings: &OpenSettings, error: &Error) -> Error {
        let why = (settings.environment.reason)(&self.filename, error);
        match self.refused_because(&why) {
            Error::Opening { what, why, .. } => Error::Opening {
                what,
                why,
                cause: Some(Box::new(error.duplicate())),
            },
            other => other,
        }
    }

    fn refused_because(&self, why: &str) -> Error {
        Error::opening(&self.given, why)
    }

    /// Options of opening the host's file.
    pub fn host_options(&self, settings: &OpenSettings) -> HostOptions {
        let direct = self.common.direct.map(|direct| match direct {
            true => PageCache::Bypass,
            false => PageCache::Use,
        });
        let flush = self.common.no_flush.map(|no_flush| match no_flush {
            true => FlushPolicy::Ignore,
            false => FlushPolicy::Honour,
        });
        HostOptions {
            writable: settings.access == Access::Write && !self.common.read_only,
            create: CreateMode::OpenExisting,
            page_cache: direct.unwrap_or(settings.cache.page_cache()),
            flush: flush.unwrap_or(settings.cache.flush_policy()),
            aio: self.host.aio.map_or(settings.aio, |(aio, _)| aio),
            locking: self.host.locking,
            driver: self.host.driver,
        }
    }

    /// Checks the options of the host's file, which is open.
    fn check_host_file(&self, settings: &OpenSettings) -> Result<()> {
        let native = self
            .host
            .aio
            .map_or(settings.aio_is_native, |(_, native)| native);
        if native && self.host_options(settings).page_cache == PageCache::Use {
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
    pub fn sharing(&self, settings: &OpenSettings) -> Sharing {
        sharing(self.common.force_share, settings.sharing)
    }

    /// The ID of the secret that opens the image.
    fn secret<'a>(&'a self, settings: &'a OpenSettings) -> Option<&'a String> {
        self.image
            .key_secret
            .as_ref()
            .or(settings.key_secret.as_ref())
    }

    /// The secret of this ID, if one is named.
    ///
    /// # Errors
    /// `Could not open 'x': No secret with id 'y'`.
    pub fn opened_by(
        &self,
        id: Option<&String>,
        settings: &OpenSettings,
    ) -> Result<Option<Passphrase>> {
        let found = id
            .map(|id| settings.environment.objects.passphrase(id))
            .transpose();
        found.map_err(|why| self.refused(settings, &Error::Key(why.to_string())))
    }

    /// The way to the files that the image names.
    pub fn gate(&self, settings: &OpenSettings) -> NodeGate {
        let host = HostGate {
            options: HostOptions {
                // `file.locking` and `file.driver` are said of the image's file alone.
                locking: Locking::Auto,
                driver: Driver::Unsaid,
                ..self.host_options(settings)
            },
            policy: settings.policy,
        };
        NodeGate {
            host,
            settings: OpenSettings {
                breakpoints: Breakpoints::default(),
                kept: settings.kept.clone().filter(|_| settings.images_above == 0),
                ..settings.of_another()
            },
        }
    }
}

/// Opens the image that is named, and its chain.
///
/// # Errors
/// `Could not open 'x': why`.
pub async fn open_image(spec: &ImageSpec, settings: &OpenSettings) -> Result<Image> {
    let source = spec.resolve_by(&settings.environment.registry)?;
    Ok(open_source(&source, settings).await?)
}

/// Opens an image, and its chain.
///
/// # Errors
/// `Could not open 'x': why`; the snapshot that was asked for cannot be read.
pub async fn open_source(
    source: &Source,
    settings: &OpenSettings,
) -> std::result::Result<Image, OpenError> {
    if source.image.backing_is_empty {
        (settings.environment.warn)(
            "Use of \"backing\": \"\" is deprecated; use \"backing\": null instead",
        );
    }
    let (file, options, gate) = prepare(source, settings).await?;
    match (Image::open(file, options, &gate).await, &settings.snapshot) {
        (Err(why), Some(_)) => Err(OpenError::Snapshot(why)),
        (opened, _) => Ok(finish((source, settings), opened)?),
    }
}

/// Closes an image and opens it with other options; its locks are held in between. After a failure
/// the image is closed, and its locks are held until it is dropped.
///
/// # Errors
/// `Could not open 'x': why`.
pub async fn reopen_image(
    image: &Image,
    spec: &ImageSpec,
    settings: &OpenSettings,
) -> Result<Image> {
    let source = spec.resolve_by(&settings.environment.registry)?;
    reopen_source(image, &source, settings).await
}

/// The same of a source that is resolved.
///
/// # Errors
/// As [`reopen_image`].
pub async fn reopen_source(
    image: &Image,
    source: &Source,
    settings: &OpenSettings,
) -> Result<Image> {
    if source.image_below().is_some() {
        let text = "a node over the disk of another image cannot be reopened";
        return Err(source.refused_because(text));
    }
    let (file, options, gate) = prepare(source, settings).await?;
    finish((source, settings), image.reopen(file, options, &gate).await)
}

/// Opens the image of a source beside one that is only read, to take its place: that one is not
/// closed, and [`Image::give_way`] ends it.
///
/// # Errors
/// As [`reopen_image`].
pub async fn open_source_beside(
    image: &Image,
    source: &Source,
    settings: &OpenSettings,
) -> Result<Image> {
    let (file, options, gate) = prepare(source, settings).await?;
    let opened = image.open_beside(file, options, &gate).await;
    finish((source, settings), opened)
}

async fn prepare(
    source: &Source,
    settings: &OpenSettings,
) -> Result<(Arc<dyn BlockFile>, OpenOptions, NodeGate)> {
    let gate = source.gate(settings);
    let mut options = engine_options(source, settings)?;
    if source.image.copy_on_read.is_some() && !options.writable {
        return Err(source.refused_because("Block node is read-only"));
    }
    if settings.access == Access::Write && source.sharing(settings) == Sharing::Forced {
        return Err(source.refused_because(FORCED_FOR_WRITING));
    }
    let kept = settings
        .kept
        .as_ref()
        .filter(|_| settings.images_above == 0);
    if let Some(data_file) = &source.data_file {
        let opening = open_node(data_file, settings);
        options.data_file = Some(kept::or_open(kept, Place::DataFile, opening).await?);
    }
    let file = kept::or_open(kept, Place::Top, open_file(source, settings)).await?;
    if settings.copy_on_read && !options.writable && settings.images_above == 0 {
        let text = "Can't use copy-on-read on read-only device";
        return Err(source.refused_because(text));
    }
    Ok((file, options, gate))
}

const FORCED_FOR_WRITING: &str = "force-share=on can only be used with read-only images";

/// A node below another one, as a file: the file itself, or the disk of an image in it.
fn open_node<'a>(source: &'a Source, settings: &'a OpenSettings) -> Opening<'a> {
    let is_file = source.format == Some(Format::Raw) && source.image.copy_on_read.is_none();
    // Events reach a filter from the image right above it.
    let observes = source.filters.iter().any(|filter| filter.observes_image());
    if is_file && !observes && !source.image.compress {
        return Box::pin(open_file(source, settings));
    }
    Box::pin(async move {
        if settings.images_above >= IMAGES_IN_CHAIN_MAX {
            return Err(source.refused_because(&format!(
                "more than {IMAGES_IN_CHAIN_MAX} images that are files of one another are not supported"
            )));
        }
        let settings = OpenSettings {
            copy_on_read: settings.copy_on_read,
            images_above: settings.images_above + 1,
            ..settings.of_another()
        };
        let image = open_source(source, &settings).await?;
        Ok(Arc::new(ImageFile::new(image)) as Arc<dyn BlockFile>)
    })
}

/// Data that reads store in an image. `-C` over a disk without layers applies to the image that has
/// the disk.
fn copy_on_read(source: &Source, settings: &OpenSettings) -> CopyOnRead {
    let is_passed_on = source.format == Some(Format::Raw) && source.image_below().is_some();
    match (source.image.copy_on_read, settings.copy_on_read) {
        (Some(kept), _) => kept,
        (None, true) if !is_passed_on => CopyOnRead::All,
        (None, _) => CopyOnRead::Off,
    }
}

/// The engine's options of opening the image.
///
/// # Errors
/// The secret of an image below cannot be used.
pub fn engine_options(source: &Source, settings: &OpenSettings) -> Result<OpenOptions> {
    let (common, image) = (&source.common, &source.image);
    Ok(OpenOptions {
        dirty: (settings.environment.dirty)(),
        format: source.format,
        formats: settings.environment.registry.engine_formats(),
        guessed: false,
        writable: source.host_options(settings).writable,
        write_policy: settings.cache.write_policy(),
        discard: common.discard.unwrap_or(settings.discard),
        discard_no_unref: image.discard_no_unref,
        detect_zeroes: common.detect_zeroes.unwrap_or(settings.detect_zeroes),
        zero_method: image.zero_method,
        alloc_policy: image.alloc_policy.unwrap_or(settings.alloc_policy),
        copy_on_read: copy_on_read(source, settings),
        compress: image.compress,
        limits: image.limits,
        data_file: None,
        backing: image.backing.clone().unwrap_or(settings.backing.clone()),
        metadata_only: settings.metadata_only,
        bitmap_piece_bytes: 0,
        cache_bytes: image.cache.budget().unwrap_or(settings.cache_bytes),
        sharing: source.sharing(settings),
        handed_over: settings.handed_over.clone(),
        read_besides: settings.read_besides.clone(),
        workers: settings.workers.clone(),
        snapshot: settings.snapshot.clone().or(image.snapshot.clone()),
        encrypt_format: image.encrypt_format.clone(),
        // A missing one is an error only if the image needs it.
        passphrase: source
            .opened_by(source.secret(settings), settings)
            .unwrap_or_default(),
        backing_passphrase: source.opened_by(image.backing_key_secret.as_ref(), settings)?,
    })
}

fn finish((source, settings): (&Source, &OpenSettings), opened: Result<Image>) -> Result<Image> {
    if let Err(Error::Key(_)) = &opened {
        source.opened_by(source.secret(settings), settings)?;
    }
    let image = opened.map_err(|error| source.refused(settings, &error))?;
    let format = image.layers()[0].format;
    let checked = source.check_image_options(format);
    checked.map_err(|why| source.refused(settings, &why))?;
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
        warn_unprotected(file, settings);
    }
    Ok(image)
}

/// Opens the image's file alone, through its filters; claims nothing.
///
/// # Errors
/// `Could not open 'x': why`.
pub async fn open_file(source: &Source, settings: &OpenSettings) -> Result<Arc<dyn BlockFile>> {
    let host = source.host_options(settings);
    let file_settings = FileSettings {
        name: &source.filename,
        host: &host,
        objects: &*settings.environment.objects,
        breakpoints: &settings.breakpoints,
    };
    let refused = |why: Error| source.refused_because(&why.to_string());
    let mut file = open_bottom(source, settings, file_settings).await?;
    for filter in source.filters.iter().rev() {
        file = filter.open(file, file_settings).await.map_err(refused)?;
    }
    Ok(file)
}

fn open_bottom<'a>(
    source: &'a Source,
    settings: &'a OpenSettings,
    file_settings: FileSettings<'a>,
) -> Opening<'a> {
    match &source.bottom {
        Bottom::Host => Box::pin(std::future::ready(open_host(
            source,
            settings,
            file_settings,
        ))),
        Bottom::Protocol { node, .. } => {
            let opening = node.open(file_settings);
            Box::pin(async move {
                let opened = opening.await;
                opened.map_err(|why| source.refused_because(&why.to_string()))
            })
        }
        Bottom::Image(image) => {
            let passes_on = source.format == Some(Format::Raw);
            let settings = OpenSettings {
                copy_on_read: settings.copy_on_read && passes_on,
                ..settings.clone()
            };
            Box::pin(async move { open_node(image, &settings).await })
        }
    }
}

fn open_host(
    source: &Source,
    settings: &OpenSettings,
    file_settings: FileSettings<'_>,
) -> Result<Arc<dyn BlockFile>> {
    let (name, options) = (file_settings.name, file_settings.host);
    let passed = settings.environment.passed.as_ref();
    let passed = passed.and_then(|passed| passed.open(name, options.writable));
    let file = match passed {
        Some(opened) => {
            let fd = opened.map_err(|why| source.refused_because(&why))?;
            host_file_of(fd, name, options)
        }
        None => open_host_file(Path::new(name), options),
    };
    let file = file.map_err(|error| source.refused(settings, &error))?;
    let checked = source.check_host_file(settings);
    checked.map_err(|why| source.refused(settings, &why))?;
    Ok(file)
}

/// Opens the image's file alone, to be examined: finds out its format and claims it.
///
/// # Errors
/// `Could not open 'x': why`.
pub async fn open_alone(
    source: &Source,
    settings: &OpenSettings,
) -> Result<(Arc<dyn BlockFile>, Format)> {
    let writable = settings.access == Access::Write;
    if writable && source.sharing(settings) == Sharing::Forced {
        return Err(source.refused_because(FORCED_FOR_WRITING));
    }
    let refused = |error: Error| source.refused(settings, &error);
    let file = open_file(source, settings).await?;
    let format = match source.format {
        Some(format) => format,
        None => {
            let start = cowslip::qcow2::inspect::read_start(file.as_ref()).await;
            let start = start.map_err(refused)?;
            let probed = source.registry.probe(&start, &source.filename);
            probed.map_err(refused)?
        }
    };
    let claim = match (source.sharing(settings), format) {
        (Sharing::Forced, _) => Claim::FORCED,
        (_, Format::Qcow2 | Format::Luks | Format::Other(_)) => Claim::qcow2(writable),
        (sharing, Format::Raw) => Claim::raw(writable, sharing),
    };
    if let Protection::Unprotected(why) = file.claim(claim).map_err(refused)? {
        warn_unprotected(&format!("'{}' ({why})", file.name()), settings);
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
        formats: gate.settings.environment.registry.engine_formats(),
        backing: BackingChoice::None,
        metadata_only: true,
        sharing: gate.settings.sharing,
        ..OpenOptions::default()
    };
    let image = Image::open(Arc::clone(file), options, gate).await?;
    let size = image.size();
    image.close().await?;
    Ok(size)
}

fn warn_unprotected(file: &str, settings: &OpenSettings) {
    (settings.environment.warn)(&format!(
        "the file system has no locks: {file} is not protected against other processes"
    ));
}
