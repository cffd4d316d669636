//! [`OpenSettings`]: settings that the program makes for all images that it opens, whatever the
//! options of an image say of that one.

use std::sync::Arc;

use cowslip::Workers;
use cowslip::file::host::{Aio, BackingPolicy, FlushPolicy, PageCache};
use cowslip::file::{Claim, FileId, ReadSet, Sharing};
use cowslip::image::{
    AllocPolicy, BackingChoice, DetectZeroes, DirtyImage, DiscardPolicy, WritePolicy,
};
use cowslip::qcow2::snapshot::SnapshotChoice;
use cowslip_block::Error;
use cowslip_filters::Breakpoints;

use crate::driver::{NoObjects, Objects, PassedFiles};
use crate::drivers;
use crate::kept::KeptFiles;
use crate::registry::Registry;

/// Use of the page cache, and when writes are durable (`--cache`).
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

    /// Whether flushes reach the disk, or are ignored.
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
    /// Reads only.
    #[default]
    Read,
    /// Reads and writes.
    Write,
}

/// Services of the program that opens images: drivers, objects, texts for its users.
#[derive(Clone, Debug)]
pub struct Environment {
    /// Drivers of formats, protocols and filters.
    pub registry: Arc<Registry>,
    /// Secrets and credentials, which options name by IDs.
    pub objects: Arc<dyn Objects>,
    /// Files that are open already, which options name; images may not.
    pub passed: Option<Arc<dyn PassedFiles>>,
    /// Shows a warning.
    pub warn: fn(&str),
    /// Text of the error that opening the file of this name met.
    pub reason: fn(&str, &Error) -> String,
    /// Treatment of images that were not closed cleanly and are opened for writing.
    pub dirty: fn() -> DirtyImage,
}

impl Default for Environment {
    fn default() -> Environment {
        Environment {
            registry: drivers::standard(),
            objects: Arc::new(NoObjects),
            passed: None,
            warn: |_| {},
            reason: |_, why| why.to_string(),
            dirty: DirtyImage::default,
        }
    }
}

/// Settings with which a program opens images. Options in the specification of an image count for
/// more.
#[derive(Clone, Debug)]
pub struct OpenSettings {
    /// For writing or not.
    pub access: Access,
    /// Cache mode, unless the specification says otherwise (`--cache`).
    pub cache: CacheMode,
    /// Engine for requests to the system, unless the specification says otherwise (`--aio`).
    pub aio: Aio,
    /// The engine was named `native`, which QEMU refuses with the page cache. Set under the names
    /// of QEMU's programs only.
    pub aio_is_native: bool,
    /// Effect of discards, unless the specification says otherwise.
    pub discard: DiscardPolicy,
    /// Effect of writes of zeroes, unless the specification says otherwise.
    pub detect_zeroes: DetectZeroes,
    /// Allocation policy, unless the specification says otherwise.
    pub alloc_policy: AllocPolicy,
    /// Bytes of L2 tables kept in memory, unless the specification says otherwise; 0 is the
    /// default.
    pub cache_bytes: u64,
    /// Source of unallocated data, unless the specification says otherwise.
    pub backing: BackingChoice,
    /// See [`cowslip::image::OpenOptions::metadata_only`].
    pub metadata_only: bool,
    /// Access that other processes keep meanwhile.
    pub sharing: Sharing,
    /// Files that images may name (`--backing-policy`).
    pub policy: BackingPolicy,
    /// Threads that compress and decompress clusters.
    pub workers: Workers,
    /// The internal snapshot to read, as `-l` names it.
    pub snapshot: Option<SnapshotChoice>,
    /// The ID of the secret that opens the image, unless the specification says otherwise.
    pub key_secret: Option<String>,
    /// Breakpoints, if a filter of the image has them.
    pub breakpoints: Breakpoints,
    /// Writes go to a temporary image above the one that is named.
    pub temporary: bool,
    /// Reads store data of the layers below in the image (`-C`).
    pub copy_on_read: bool,
    /// Number of images whose file this one is, directly or not.
    pub images_above: usize,
    /// See [`cowslip::image::OpenOptions::handed_over`].
    pub handed_over: Vec<(FileId, Claim)>,
    /// Files that are open from before, and those that will be when it is opened again. `None`
    /// opens all of them here and now.
    pub kept: Option<KeptFiles>,
    /// Files that the program reads as well, which must not be opened for writing.
    pub read_besides: ReadSet,
    /// The program that opens it.
    pub environment: Environment,
}

impl OpenSettings {
    /// Settings for reading, with the default for everything else.
    pub fn new(environment: Environment) -> OpenSettings {
        OpenSettings {
            access: Access::default(),
            cache: CacheMode::default(),
            aio: Aio::default(),
            aio_is_native: false,
            discard: DiscardPolicy::default(),
            detect_zeroes: DetectZeroes::default(),
            alloc_policy: AllocPolicy::default(),
            cache_bytes: 0,
            backing: BackingChoice::default(),
            metadata_only: false,
            sharing: Sharing::default(),
            policy: BackingPolicy::default(),
            workers: Workers::default(),
            snapshot: None,
            key_secret: None,
            breakpoints: Breakpoints::default(),
            temporary: false,
            copy_on_read: false,
            images_above: 0,
            handed_over: Vec::new(),
            kept: None,
            read_besides: ReadSet::default(),
            environment,
        }
    }

    /// Settings for an image below this one: without those of this one alone.
    pub(crate) fn of_another(&self) -> OpenSettings {
        OpenSettings {
            snapshot: None,
            key_secret: None,
            backing: BackingChoice::AsNamed,
            metadata_only: false,
            temporary: false,
            copy_on_read: false,
            kept: None,
            ..self.clone()
        }
    }
}
