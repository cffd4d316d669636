//! From the command line's words for an image to an open one: the one place where the commands open
//! images, with their cache modes and I/O engines.

use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use cowslip::file::host::{
    Aio, BackingPolicy, CreateMode, Driver, FlushPolicy, HostGate, HostOptions, Locking, PageCache,
    open_host_file,
};
use cowslip::file::{BlockFile, Claim, Protection, ReadSet, Sharing};
use cowslip::image::{
    AllocPolicy, BackingChoice, CopyOnRead, DetectZeroes, DiscardPolicy, Format, OpenOptions,
    WritePolicy,
};
use cowslip::luks::Passphrase;
use cowslip::qcow2::snapshot::SnapshotChoice;
use cowslip::{Image, Workers};

use crate::error::CommandError;
use crate::output;
use crate::repair_text::repaired_when_opened;
use cowslip_filters::{Breakpoints, DebugFile, NullFile, PartFile};
use cowslip_nbd::remote::{self, ExportName};
use cowslip_nodes::ImageFile;

mod above;
mod cache_sizes;
mod doubts;
pub mod foreign;
mod gate;
mod graph;
mod json;
mod loaded;
pub mod object;
mod one;
pub mod psk;
mod refusal;
mod spec;
mod temporary;
pub mod tls;

pub use cowslip_console::queue::{block_on, parse_aio};
pub use gate::{NodeGate, is_description};
use graph::Filter;
pub use loaded::{chosen_snapshot, parse_choice};
pub use one::OneImage;
pub use refusal::{opening_failed, opening_reason};
pub use spec::{ImageSpec, Source, alloc_policy, detect_zeroes, local_name, parse_format};

/// `--cache`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CacheMode {
    /// The page cache; durable at a flush.
    #[default]
    Writeback,
    /// O_DIRECT; durable at a flush.
    None,
    /// The page cache; durable at completion.
    Writethrough,
    /// O_DIRECT; durable at completion.
    DirectSync,
    /// The page cache; flushes are ignored.
    Unsafe,
}

impl CacheMode {
    /// The mode of this name.
    pub fn parse(name: &str) -> Option<CacheMode> {
        Some(match name {
            "writeback" => CacheMode::Writeback,
            "none" | "off" => CacheMode::None,
            "writethrough" => CacheMode::Writethrough,
            "directsync" => CacheMode::DirectSync,
            "unsafe" => CacheMode::Unsafe,
            _ => return None,
        })
    }

    /// Whether the page cache is used.
    pub fn page_cache(self) -> PageCache {
        match self {
            CacheMode::None | CacheMode::DirectSync => PageCache::Bypass,
            _ => PageCache::Use,
        }
    }

    /// When writes are durable.
    pub fn write_policy(self) -> WritePolicy {
        match self {
            CacheMode::Writethrough | CacheMode::DirectSync => WritePolicy::Writethrough,
            _ => WritePolicy::Writeback,
        }
    }

    /// Whether flushes count.
    pub fn flush_policy(self) -> FlushPolicy {
        match self {
            CacheMode::Unsafe => FlushPolicy::Ignore,
            _ => FlushPolicy::Honour,
        }
    }
}

/// Whether an image is opened for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Access {
    /// Only for reading.
    #[default]
    Read,
    /// Also for writing.
    Write,
}

/// How to open an image.
#[derive(Clone, Debug, Default)]
pub struct OpenHow {
    /// For writing or not.
    pub access: Access,
    /// `--cache`.
    pub cache: CacheMode,
    /// `--aio`.
    pub aio: Aio,
    /// It was named `native`, which QEMU has without the page cache only. Said under its programs'
    /// names alone.
    pub aio_is_native: bool,
    /// What discards do.
    pub discard: DiscardPolicy,
    /// What writes of zeroes do, unless the specification says otherwise.
    pub detect_zeroes: DetectZeroes,
    /// How space is allocated, unless the specification says otherwise.
    pub alloc_policy: AllocPolicy,
    /// Bytes of L2 tables kept in memory, unless the specification says otherwise; 0 is the
    /// default.
    pub cache_bytes: u64,
    /// Where unallocated data comes from, unless the specification says otherwise.
    pub backing: BackingChoice,
    /// See [`OpenOptions::metadata_only`].
    pub metadata_only: bool,
    /// What other processes may do meanwhile.
    pub sharing: Sharing,
    /// `--backing-policy`.
    pub policy: BackingPolicy,
    /// Who packs and unpacks compressed clusters.
    pub workers: Workers,
    /// The internal snapshot to read, as `-l` names it.
    pub snapshot: Option<SnapshotChoice>,
    /// The ID of the secret that opens the image, unless the specification says otherwise.
    pub key_secret: Option<String>,
    /// Where requests stop, if a filter of the image can stop them.
    pub breakpoints: Breakpoints,
    /// What is written goes into a temporary image above the one that is named.
    pub temporary: bool,
    /// What is read from the layers below the image is kept in it (`-C`).
    pub copy_on_read: bool,
    /// Images for which this one is opened, as their file.
    pub images_above: usize,
    /// Files that the command reads besides, which opening for writing must not reach.
    pub read_besides: ReadSet,
}

impl OpenHow {
    /// How an image below this one is opened: without what is said of this one alone.
    fn of_another(&self) -> OpenHow {
        OpenHow {
            snapshot: None,
            key_secret: None,
            backing: BackingChoice::AsNamed,
            metadata_only: false,
            temporary: false,
            copy_on_read: false,
            ..self.clone()
        }
    }
}

/// The queue's threads for blocking calls, which pack and unpack clusters too: for verbs that move
/// much data.
pub fn workers() -> Workers {
    Workers::new(|work| drop(cowslip_queue::blocking(work)))
}

/// Options of every verb that opens images.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct Trust {
    /// Which backing files and data files images may name: any, same-directory or none
    #[arg(
        long,
        value_name = "POLICY",
        default_value = "any",
        value_parser = parse_policy
    )]
    pub backing_policy: BackingPolicy,
}

/// `--backing-policy`.
///
/// # Errors
/// The policies that there are.
pub fn parse_policy(name: &str) -> Result<BackingPolicy, String> {
    BackingPolicy::from_name(name).ok_or_else(|| {
        format!("--backing-policy expects 'any', 'same-directory' or 'none' not '{name}'")
    })
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
    pub fn refused(&self, error: &cowslip::Error) -> CommandError {
        let why = opening_reason(&self.filename, error);
        CommandError::new(format!("Could not open '{}': {why}", self.given))
    }

    /// How the host's file is opened.
    pub fn host_options(&self, how: &OpenHow) -> HostOptions {
        let direct = self.direct.map(|direct| match direct {
            true => PageCache::Bypass,
            false => PageCache::Use,
        });
        let flush = self.no_flush.map(|no_flush| match no_flush {
            true => FlushPolicy::Ignore,
            false => FlushPolicy::Honour,
        });
        HostOptions {
            writable: how.access == Access::Write && !self.read_only,
            create: CreateMode::OpenExisting,
            page_cache: direct.unwrap_or(how.cache.page_cache()),
            flush: flush.unwrap_or(how.cache.flush_policy()),
            aio: self.aio.map_or(how.aio, |(aio, _)| aio),
            locking: self.locking,
            driver: self.driver,
        }
    }

    /// What is wrong with what was said of the file, once it is open.
    fn judged_by_file(&self, how: &OpenHow) -> Result<(), String> {
        let is_native = self
            .aio
            .map_or(how.aio_is_native, |(_, is_native)| is_native);
        if is_native && self.host_options(how).page_cache == PageCache::Use {
            let text = "aio=native was specified, but it requires cache.direct=on, which was not specified.";
            return Err(text.to_string());
        }
        self.doubts.of_file()?;
        let is_named = matches!(
            self.backing,
            Some(BackingChoice::Override { .. } | BackingChoice::InFormat(_))
        );
        match self.format {
            Some(Format::Raw | Format::Luks) if is_named => {
                Err("Driver doesn't support backing files".to_string())
            }
            _ => Ok(()),
        }
    }

    /// What other processes may do meanwhile.
    pub fn sharing(&self, how: &OpenHow) -> Sharing {
        sharing(self.force_share, how.sharing)
    }

    /// The ID of the secret that opens the image.
    fn secret<'a>(&'a self, how: &'a OpenHow) -> Option<&'a String> {
        self.key_secret.as_ref().or(how.key_secret.as_ref())
    }

    /// The secret of this ID, if one is named.
    ///
    /// # Errors
    /// `Could not open 'x': No secret with id 'y'`.
    pub fn opened_by(&self, id: Option<&String>) -> Result<Option<Passphrase>, CommandError> {
        let found = id.map(|id| object::passphrase(id)).transpose();
        found.map_err(|why| self.refused(&cowslip::Error::Key(why.to_string())))
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

/// Opens the image, and its chain, as `qemu-img` and its kin do.
///
/// # Errors
/// `Could not open 'x': why`; `Failed to load snapshot: why`.
pub async fn open_image(spec: &ImageSpec, how: &OpenHow) -> Result<Image, CommandError> {
    let source = spec.resolve()?;
    if how.temporary && how.access == Access::Write {
        return Box::pin(temporary::open_above(spec, (&source, how))).await;
    }
    open_source(&source, how).await
}

async fn open_source(source: &Source, how: &OpenHow) -> Result<Image, CommandError> {
    if source.backing_is_empty {
        output::warn("Use of \"backing\": \"\" is deprecated; use \"backing\": null instead");
    }
    let (file, options, gate) = prepare(source, how).await?;
    match (Image::open(file, options, &gate).await, &how.snapshot) {
        (Err(why), Some(_)) => Err(not_loaded(source, how, &why).await),
        (opened, _) => finish((source, how), opened),
    }
}

/// Whether it is the image or its snapshot that cannot be opened: what scripts look for differs.
async fn not_loaded(source: &Source, how: &OpenHow, why: &cowslip::Error) -> CommandError {
    let without = OpenHow {
        snapshot: None,
        ..how.clone()
    };
    let disk = async {
        let (file, options, gate) = prepare(source, &without).await?;
        finish((source, how), Image::open(file, options, &gate).await)
    };
    let format = match disk.await {
        Err(error) => return error,
        Ok(disk) => disk.layers()[0].format,
    };
    let why = match (output::is_called_as_qemu(), format, why) {
        (true, Format::Raw, _) => "Block format 'raw' used by device '' does not support \
                                   temporarily loading internal snapshots"
            .to_string(),
        (true, _, cowslip::Error::Io { .. }) => "Can't find snapshot".to_string(),
        (_, _, why) => why.to_string(),
    };
    CommandError::new(format!("Failed to load snapshot: {why}"))
}

/// Closes an image and opens it in another way; nobody else gets hold of it in between. After a
/// failure the image is closed, but not let go of before it is dropped.
///
/// # Errors
/// `Could not open 'x': why`.
pub async fn reopen_image(
    image: &Image,
    spec: &ImageSpec,
    how: &OpenHow,
) -> Result<Image, CommandError> {
    let source = spec.resolve()?;
    if source.filters.image.is_some() {
        let text = "what stands over the disk of another image cannot be opened anew";
        return Err(source.refused(&cowslip::Error::Invalid(text.to_string())));
    }
    let (file, options, gate) = prepare(&source, how).await?;
    finish((&source, how), image.reopen(file, options, &gate).await)
}

async fn prepare(
    source: &Source,
    how: &OpenHow,
) -> Result<(Arc<dyn BlockFile>, OpenOptions, NodeGate), CommandError> {
    let gate = source.gate(how);
    let mut options = engine_options(source, how)?;
    if source.copy_on_read.is_some() && !options.writable {
        let text = "Block node is read-only";
        return Err(source.refused(&cowslip::Error::Invalid(text.to_string())));
    }
    if how.access == Access::Write && source.sharing(how) == Sharing::Forced {
        let text = "force-share=on can only be used with read-only images";
        return Err(source.refused(&cowslip::Error::Invalid(text.to_string())));
    }
    if let Some(data_file) = &source.data_file {
        options.data_file = Some(open_node(data_file, how).await?);
    }
    let file = open_file(source, how).await?;
    if how.copy_on_read && !options.writable && how.images_above == 0 {
        let text = "Can't use copy-on-read on read-only device";
        return Err(source.refused(&cowslip::Error::Invalid(text.to_string())));
    }
    Ok((file, options, gate))
}

/// What a node below another one has, as a file: the file itself, or the disk of an image in it.
fn open_node<'a>(source: &'a Source, how: &'a OpenHow) -> Opening<'a> {
    let is_file = source.format == Some(Format::Raw) && source.copy_on_read.is_none();
    // What debugs is told by an image above it what is done there.
    let is_told = |filter: &Filter| matches!(filter, Filter::Debug(_));
    let is_told = source.filters.list.iter().any(is_told);
    if is_file && !is_told && !source.compress {
        return Box::pin(open_file(source, how));
    }
    Box::pin(async move {
        if how.images_above >= IMAGES_IN_LINE_MAX {
            let text = format!(
                "more than {IMAGES_IN_LINE_MAX} images that are files of one another are not supported"
            );
            return Err(source.refused(&cowslip::Error::Invalid(text)));
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

/// A file that is being opened.
type Opening<'a> =
    Pin<Box<dyn Future<Output = Result<Arc<dyn BlockFile>, CommandError>> + Send + 'a>>;

/// Images at most of which each is the file of the one before, backing files that are described so
/// included: an image may name itself in that way.
const IMAGES_IN_LINE_MAX: usize = 16;

/// What reads of an image keep. `-C` above what has no layers is said of the image whose disk it
/// is.
fn copy_on_read(source: &Source, how: &OpenHow) -> CopyOnRead {
    let is_passed_on = source.format == Some(Format::Raw) && source.filters.image.is_some();
    match (source.copy_on_read, how.copy_on_read) {
        (Some(kept), _) => kept,
        (None, true) if !is_passed_on => CopyOnRead::All,
        (None, _) => CopyOnRead::Off,
    }
}

/// How the engine opens the image.
fn engine_options(source: &Source, how: &OpenHow) -> Result<OpenOptions, CommandError> {
    Ok(OpenOptions {
        dirty: repaired_when_opened(),
        format: source.format,
        guessed: false,
        writable: source.host_options(how).writable,
        write_policy: how.cache.write_policy(),
        discard: source.discard.unwrap_or(how.discard),
        discard_no_unref: source.discard_no_unref,
        detect_zeroes: source.detect_zeroes.unwrap_or(how.detect_zeroes),
        zero_method: source.zero_method,
        alloc_policy: source.alloc_policy.unwrap_or(how.alloc_policy),
        copy_on_read: copy_on_read(source, how),
        compress: source.compress,
        limits: source.filters.limits,
        data_file: None,
        backing: source.backing.clone().unwrap_or(how.backing.clone()),
        metadata_only: how.metadata_only,
        bitmap_piece_bytes: 0,
        cache_bytes: source.cache.budget().unwrap_or(how.cache_bytes),
        sharing: source.sharing(how),
        read_besides: how.read_besides.clone(),
        workers: how.workers.clone(),
        snapshot: how.snapshot.clone().or(source.snapshot.clone()),
        encrypt_format: source.encrypt_format.clone(),
        // One that is missing is told of if the image needs it.
        passphrase: source.opened_by(source.secret(how)).unwrap_or_default(),
        backing_passphrase: source.opened_by(source.backing_key_secret.as_ref())?,
    })
}

fn finish(
    (source, how): (&Source, &OpenHow),
    opened: cowslip::Result<Image>,
) -> Result<Image, CommandError> {
    if let Err(cowslip::Error::Key(_)) = &opened {
        source.opened_by(source.secret(how))?;
    }
    let image = opened.map_err(|error| source.refused(&error))?;
    let format = image.layers()[0].format;
    let doubts = source.doubts.of_image(format);
    doubts.map_err(|why| source.refused(&cowslip::Error::Invalid(why)))?;
    if let Some(header) = image
        .layers()
        .first()
        .and_then(|layer| layer.header.clone())
    {
        let refused =
            |why: &str| CommandError::new(format!("Could not open '{}': {why}", source.given));
        if source.discard_no_unref && header.version < 3 {
            return Err(refused(
                "discard-no-unref is only supported since qcow2 version 3",
            ));
        }
        let checked = source.cache.check(1 << header.cluster_bits);
        checked.map_err(|why| refused(&why))?;
    }
    for file in image.unprotected() {
        warn_unprotected(file);
    }
    Ok(image)
}

/// Opens the image's file alone, through its filters; claims nothing.
///
/// # Errors
/// `Could not open 'x': why`.
pub async fn open_file(source: &Source, how: &OpenHow) -> Result<Arc<dyn BlockFile>, CommandError> {
    let file = open_below(source, how).await?;
    filtered(source, file, &how.breakpoints).await
}

/// The file through the filters that the specification puts over it.
///
/// # Errors
/// `Could not open 'x': why`.
pub async fn filtered(
    source: &Source,
    mut file: Arc<dyn BlockFile>,
    breakpoints: &Breakpoints,
) -> Result<Arc<dyn BlockFile>, CommandError> {
    let refused = |why: &dyn std::fmt::Display| {
        CommandError::new(format!("Could not open '{}': {why}", source.given))
    };
    for filter in source.filters.list.iter().rev() {
        file = match filter {
            Filter::Debug(spec) => {
                let debugged = DebugFile::new(file, spec, breakpoints.clone());
                Arc::new(debugged.map_err(|error| refused(&error))?)
            }
            Filter::Part(start, size) => {
                let len = file.len().await;
                let len = len.map_err(|error| refused(&cowslip::error::system_words(&error)))?;
                let part = PartFile::new(file, len, (*start, *size));
                Arc::new(part.map_err(|error| refused(&error))?)
            }
        };
    }
    Ok(file)
}

async fn open_below(source: &Source, how: &OpenHow) -> Result<Arc<dyn BlockFile>, CommandError> {
    if let Some(null) = &source.filters.null {
        return Ok(Arc::new(NullFile::new(&source.filename, null.clone())));
    }
    if let Some(image) = &source.filters.image {
        let passes_on = source.format == Some(Format::Raw);
        let how = OpenHow {
            copy_on_read: how.copy_on_read && passes_on,
            ..how.clone()
        };
        return open_node(image, &how).await;
    }
    if let Some(export) = &source.remote {
        let writable = source.host_options(how).writable;
        let opened = open_export(export, &source.filename, writable).await;
        return opened
            .map_err(|why| CommandError::new(format!("Could not open '{}': {why}", source.given)));
    }
    let file = open_host_file(Path::new(&source.filename), &source.host_options(how));
    let file = file.map_err(|error| source.refused(&error))?;
    source
        .judged_by_file(how)
        .map_err(|why| source.refused(&cowslip::Error::Invalid(why)))?;
    Ok(file)
}

/// Opens an export; `name` is what users know it by.
///
/// # Errors
/// As [`remote::open`]; the credentials for it cannot be used.
pub async fn open_export(
    export: &ExportName,
    name: &str,
    writable: bool,
) -> Result<Arc<dyn BlockFile>, CommandError> {
    // Before anything is sent: who has no credentials meets no server.
    let tls = object::tls_to(&export.server, export.tls.as_ref())?;
    Ok(remote::open(export, tls, name, writable).await?)
}

/// Opens the image's file alone, to be examined: finds out its format and claims it.
///
/// # Errors
/// `Could not open 'x': why`.
pub async fn open_alone(
    source: &Source,
    how: &OpenHow,
) -> Result<(Arc<dyn BlockFile>, Format), CommandError> {
    let writable = how.access == Access::Write;
    if writable && source.sharing(how) == Sharing::Forced {
        let text = "force-share=on can only be used with read-only images";
        return Err(source.refused(&cowslip::Error::Invalid(text.to_string())));
    }
    let file = open_file(source, how).await?;
    let format = match source.format {
        Some(format) => format,
        None => {
            let start = cowslip::qcow2::inspect::read_start(file.as_ref()).await;
            let start = start.map_err(|error| source.refused(&error))?;
            let probed = cowslip::foreign::probe(&start, &source.filename);
            probed.map_err(|error| source.refused(&error))?
        }
    };
    let claim = match (source.sharing(how), format) {
        (Sharing::Forced, _) => Claim::FORCED,
        (_, Format::Qcow2 | Format::Luks) => Claim::qcow2(writable),
        (sharing, Format::Raw) => Claim::raw(writable, sharing),
    };
    claim_file(&file, claim).map_err(|error| source.refused(&error))?;
    Ok((file, format))
}

/// Claims a file, and warns if nothing protects it.
///
/// # Errors
/// Another process uses it.
pub fn claim_file(file: &Arc<dyn BlockFile>, claim: Claim) -> cowslip::Result<()> {
    if let Protection::Unprotected(why) = file.claim(claim)? {
        warn_unprotected(&format!("'{}' ({why})", file.name()));
    }
    Ok(())
}

/// What is said where a raw image's format was guessed, and it will be written.
pub fn guessed_raw(filename: &str) -> String {
    format!(
        "WARNING: Image format was not specified for '{filename}' and probing guessed raw.
         Automatically detecting the format is dangerous for raw images, write operations on block 0 will be restricted.
         Specify the 'raw' format explicitly to remove the restrictions.
"
    )
}

/// Says so, if it is so.
///
/// # Errors
/// The specification's.
pub fn warn_of_guessed_raw(image: &Image, spec: &ImageSpec) -> Result<(), CommandError> {
    let source = spec.resolve()?;
    let is_raw = image.layers().first().map(|layer| layer.format) == Some(Format::Raw);
    if is_raw && source.format.is_none() {
        output::print_error(&guessed_raw(&source.filename));
    }
    Ok(())
}

fn warn_unprotected(file: &str) {
    output::warn(&format!(
        "the file system has no locks: nothing keeps other processes from {file}"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_image_opens_in_every_cache_mode_and_can_be_written() {
        // Beside the test's binary is a disk, where direct I/O works; /tmp may be memory.
        let test = std::env::current_exe().unwrap();
        let dir = tempfile::tempdir_in(test.parent().unwrap()).unwrap();
        let path = dir.path().join("a.qcow2");
        let name = path.to_str().unwrap();
        let options = HostOptions {
            writable: true,
            create: CreateMode::Truncate,
            ..HostOptions::default()
        };
        for mode in ["writeback", "none", "writethrough", "directsync", "unsafe"] {
            let how = OpenHow {
                access: Access::Write,
                cache: CacheMode::parse(mode).unwrap(),
                ..OpenHow::default()
            };
            let work = async {
                let file = open_host_file(&path, &options)?;
                let fresh = cowslip::qcow2::create::CreateOptions::new(1 << 20);
                cowslip::qcow2::create::create(file, None, &fresh).await?;
                let image = open_image(&ImageSpec::named(name, Some("qcow2")), &how).await?;
                let data = cowslip::Buf::copy_of(&[7; 512]);
                image.write(512, data, Default::default()).await?;
                image.close().await?;
                let image = open_image(&ImageSpec::named(name, None), &OpenHow::default()).await?;
                let read = image.read(0, cowslip::BufMut::zeroed(1536)).await?;
                Ok((image.size(), read.to_vec()))
            };
            let (size, read) = block_on(Aio::Auto, work).unwrap();
            assert_eq!(size, 1 << 20, "{mode}");
            assert_eq!(read, [[0; 512], [7; 512], [0; 512]].concat(), "{mode}");
        }
    }
}
