//! Options after reading: those of all nodes, of files of the host, of images, and of filters over
//! images.

use cowslip::file::host::{Aio, Driver, Locking};
use cowslip::image::{
    AllocPolicy, BackingChoice, CopyOnRead, DetectZeroes, DiscardPolicy, Format, ZeroMethod,
};
use cowslip::limits::Limits;
use cowslip::qcow2::snapshot::SnapshotChoice;
use cowslip_block::options::Kind::{Switch, Text};
use cowslip_block::options::{self, OptionEntry, option};
use cowslip_block::{Error, Result};

use crate::cache_sizes::CacheSizes;
use crate::registry::Registry;

/// Options of every node. Those of a filter apply to the image, unless the image has its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommonOptions {
    /// The node refuses writes (`read-only=on`).
    pub read_only: bool,
    /// The node is said to take writes (`read-only=off`).
    pub read_write: bool,
    /// Other processes may write to it meanwhile (`force-share=on`).
    pub force_share: bool,
    /// Whether the page cache is bypassed (`cache.direct=`).
    pub direct: Option<bool>,
    /// Whether flushes are ignored (`cache.no-flush=`).
    pub no_flush: Option<bool>,
    /// Effect of discards (`discard=`).
    pub discard: Option<DiscardPolicy>,
    /// Treatment of writes whose bytes are all zero (`detect-zeroes=`).
    pub detect_zeroes: Option<DetectZeroes>,
}

impl CommonOptions {
    /// The table of these options.
    #[rustfmt::skip] // An option a line.
    pub const OPTIONS: &[OptionEntry] = &[
        option("read-only", Switch, "off", "Never write"),
        option("force-share", Switch, "off", "Let others write it"),
        option("cache.direct", Switch, "off", "Bypass the page cache"),
        option("cache.no-flush", Switch, "off", "Ignore flushes"),
        option("discard", Text, "ignore", "Discards: ignore or unmap"),
        option("detect-zeroes", Text, "off", "Writes of zeroes: off, on or unmap"),
    ];

    /// Reads one of them; `false` if it is none of these.
    ///
    /// # Errors
    /// A value that cannot be.
    pub fn take(&mut self, name: &str, value: &str) -> Result<bool> {
        match name {
            "read-only" => {
                self.read_only = options::switch(name, value)?;
                self.read_write = !self.read_only;
            }
            "force-share" => self.force_share = options::switch(name, value)?,
            "cache.direct" => self.direct = Some(options::switch(name, value)?),
            "cache.no-flush" => self.no_flush = Some(options::switch(name, value)?),
            "discard" => self.discard = Some(discard_policy(value)?),
            "detect-zeroes" => self.detect_zeroes = Some(detect_zeroes(value)?),
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// Options of a file of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileOptions {
    /// Locks against other processes (`locking=`).
    pub locking: Locking,
    /// The kind of file that is accepted.
    pub driver: Driver,
    /// `aio=`, and whether it is QEMU's `native`.
    pub aio: Option<(Aio, bool)>,
}

impl Default for FileOptions {
    fn default() -> FileOptions {
        FileOptions {
            locking: Locking::Auto,
            driver: Driver::Unsaid,
            aio: None,
        }
    }
}

/// Options of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageOptions {
    /// The backing file to use instead of the one that the image names (`backing=`,
    /// `backing.file.filename=`).
    pub backing: Option<BackingChoice>,
    /// `backing=` with an empty name, which QEMU deprecates.
    pub backing_is_empty: bool,
    /// Discarded clusters stay allocated (`discard-no-unref=on`).
    pub discard_no_unref: bool,
    /// The system's call by which ranges of the file are zeroed (`zero-method=`).
    pub zero_method: ZeroMethod,
    /// Allocation of space (`alloc-policy=`); `None` is the program's choice.
    pub alloc_policy: Option<AllocPolicy>,
    /// `cache-size=` and its parts.
    pub cache: CacheSizes,
    /// `snapshot.id=`, `snapshot.name=`: the internal snapshot to read.
    pub snapshot: Option<SnapshotChoice>,
    /// `encrypt.format=`: the method that the image is encrypted with.
    pub encrypt_format: Option<String>,
    /// `encrypt.key-secret=`, or `key-secret=` of a LUKS volume: the ID of what opens the image.
    pub key_secret: Option<String>,
    /// `backing.encrypt.key-secret=`: the ID of the secret that opens the encrypted images below
    /// it.
    pub backing_key_secret: Option<String>,
    /// Data that reads store in the image, if a filter above it asks for that.
    pub copy_on_read: Option<CopyOnRead>,
    /// Writes store whole clusters, compressed.
    pub compress: bool,
    /// Limits of requests to the image's disk.
    pub limits: Limits,
    /// A value that is refused when the image is open.
    pub wrong: Option<String>,
}

impl Default for ImageOptions {
    fn default() -> ImageOptions {
        ImageOptions {
            backing: None,
            backing_is_empty: false,
            discard_no_unref: false,
            zero_method: ZeroMethod::Auto,
            alloc_policy: None,
            cache: CacheSizes::default(),
            snapshot: None,
            encrypt_format: None,
            key_secret: None,
            backing_key_secret: None,
            copy_on_read: None,
            compress: false,
            limits: Limits::default(),
            wrong: None,
        }
    }
}

impl ImageOptions {
    /// The options of all images.
    pub const OPTIONS: &[OptionEntry] = &[
        option("backing", Text, "", "Backing file; empty for none"),
        option("zero-method", Text, "auto", "How space is zeroed"),
        option("alloc-policy", Text, "auto", "How space is allocated"),
        option("snapshot.id", Text, "", "Snapshot to read, by its ID"),
        option("snapshot.name", Text, "", "The same by its name"),
    ];

    /// Reads one of them; `false` if it is none of these.
    ///
    /// # Errors
    /// A value that cannot be.
    pub fn take(&mut self, name: &str, value: &str) -> Result<bool> {
        match name {
            "backing" => {
                self.backing = Some(backing_choice(value));
                self.backing_is_empty = value.is_empty();
            }
            "zero-method" => {
                self.zero_method = ZeroMethod::from_name(value).ok_or_else(|| {
                    Error::invalid(format!(
                        "Parameter '{name}' does not accept value '{value}' (auto, fresh, zero-range or write)"
                    ))
                })?;
            }
            "alloc-policy" => self.alloc_policy = Some(alloc_policy(name, value)?),
            "snapshot.id" => self.snapshot = Some(with_id(self.snapshot.take(), value)),
            "snapshot.name" => self.snapshot = Some(with_name(self.snapshot.take(), value)),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Reads an option of the backing file; `false` if there is none of that name.
    ///
    /// # Errors
    /// A value that cannot be.
    pub fn take_of_backing(
        &mut self,
        (name, value): (&str, &str),
        registry: &Registry,
    ) -> Result<bool> {
        match name {
            "file.filename" | "filename" => {
                let format = self.backing.as_ref().and_then(override_format);
                let name = value.to_string();
                self.backing = Some(BackingChoice::Override { name, format });
            }
            "driver" => self.backing = Some(self.backing_in(registry.format(value)?)),
            "encrypt.format" if ["aes", "luks"].contains(&value) => {}
            "encrypt.key-secret" | "key-secret" => {
                self.backing_key_secret = Some(value.to_string());
            }
            _ => return Ok(has_no_effect_below(name)),
        }
        Ok(true)
    }

    /// The choice of a backing file so far, in this format.
    fn backing_in(&self, format: Format) -> BackingChoice {
        match &self.backing {
            Some(BackingChoice::Override { name, .. }) => BackingChoice::Override {
                name: name.clone(),
                format: Some(format),
            },
            _ => BackingChoice::InFormat(format),
        }
    }

    /// Keeps a refusal for when the image is open, unless there is one already.
    pub fn refuse_later(&mut self, wrong: Option<String>) {
        self.wrong = self.wrong.take().or(wrong);
    }
}

/// Options that tune caches and checks, which work otherwise here, or that name nodes.
fn has_no_effect_below(name: &str) -> bool {
    let own = name.strip_prefix("file.").unwrap_or(name);
    let switches = [
        "auto-read-only",
        "lazy-refcounts",
        "pass-discard-request",
        "pass-discard-snapshot",
        "pass-discard-other",
    ];
    switches.contains(&own)
        || matches!(own, "node-name" | "driver" | "cache-clean-interval")
        || own.starts_with("overlap-check")
        || own.ends_with("cache-size")
}

/// Work that filters over an image ask of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Above {
    /// Reads store data of the layers below.
    pub copy_on_read: Option<Copies>,
    /// Writes store whole clusters, compressed.
    pub compress: bool,
}

/// Layers whose data is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Copies {
    /// All layers.
    All,
    /// Those down to the node of this name (`bottom=`).
    DownTo(String),
}

fn backing_choice(value: &str) -> BackingChoice {
    match value {
        "" | "null" => BackingChoice::None,
        name => BackingChoice::Override {
            name: name.to_string(),
            format: None,
        },
    }
}

fn override_format(choice: &BackingChoice) -> Option<Format> {
    match choice {
        BackingChoice::Override { format, .. } => *format,
        BackingChoice::InFormat(format) => Some(*format),
        BackingChoice::AsNamed | BackingChoice::None => None,
    }
}

fn discard_policy(value: &str) -> Result<DiscardPolicy> {
    match value {
        "unmap" | "on" => Ok(DiscardPolicy::Unmap),
        "ignore" | "off" => Ok(DiscardPolicy::Ignore),
        _ => Err(Error::invalid("Invalid discard option")),
    }
}

/// Reads a value of `detect-zeroes`.
///
/// # Errors
/// No such mode.
pub fn detect_zeroes(value: &str) -> Result<DetectZeroes> {
    DetectZeroes::from_name(value)
        .ok_or_else(|| Error::invalid(format!("invalid parameter value: {value}")))
}

/// Reads an allocation policy, the value of option `name`.
///
/// # Errors
/// No such policy.
pub fn alloc_policy(name: &str, value: &str) -> Result<AllocPolicy> {
    match value {
        "auto" => Ok(AllocPolicy::Auto),
        "contiguous" => Ok(AllocPolicy::Contiguous),
        "sparse" => Ok(AllocPolicy::Sparse),
        _ => Err(Error::invalid(format!(
            "Parameter '{name}' does not accept value '{value}' (auto, contiguous or sparse)"
        ))),
    }
}

/// The I/O engine of this name. QEMU's `native` is the ring here.
pub fn parse_aio(name: &str) -> Option<Aio> {
    Some(match name {
        "threads" => Aio::Threads,
        "native" | "io_uring" => Aio::Uring,
        _ => return None,
    })
}

/// A choice of a snapshot, with its ID.
pub fn with_id(choice: Option<SnapshotChoice>, id: &str) -> SnapshotChoice {
    let id = id.to_string();
    match choice {
        Some(SnapshotChoice::Name(name) | SnapshotChoice::IdAndName { name, .. }) => {
            SnapshotChoice::IdAndName { id, name }
        }
        _ => SnapshotChoice::Id(id),
    }
}

/// A choice of a snapshot, with its name.
pub fn with_name(choice: Option<SnapshotChoice>, name: &str) -> SnapshotChoice {
    let name = name.to_string();
    match choice {
        Some(SnapshotChoice::Id(id) | SnapshotChoice::IdAndName { id, .. }) => {
            SnapshotChoice::IdAndName { id, name }
        }
        _ => SnapshotChoice::Name(name),
    }
}
