//! Creation of images: qcow2 with its options and their rules, raw disks, LUKS volumes.
//!
//! The layout is QEMU's to the byte (`create/placement.rs`). The header is written last, behind a
//! flush: a file whose creation was cut short is no valid image. Texts of refusals are QEMU's.
//!
//! The new file is claimed like an image that is written, before anything in it is touched.
//!
//! Left out: opening or removing files, and backing files (only their names are stored).

use std::sync::Arc;

use crate::file::{BlockFile, Claim};
use crate::geometry::{CLUSTER_BITS_MAX, CLUSTER_BITS_MIN, CLUSTER_BITS_MIN_EXTENDED, Geometry};
use crate::header::{
    AllocationHint, CompressionType, CryptMethod, Extensions, HEADER_BYTES, HEADER_BYTES_V2,
    Header, L1_BYTES_MAX, autoclear, compatible, incompatible,
};
use crate::job::{Job, Stage};
use crate::luks::NewVolume;
use crate::policy::AllocPolicy;
use crate::units::round_up;
use crate::{Error, Result};
use cowslip_hostfile::space::{self, Fill};

#[doc(inline)]
pub use crate::policy::Preallocation;

mod layout;
mod placement;
mod write;

use layout::Layout;

/// The unit of a disk's size.
#[doc(hidden)]
pub const SIZE_UNIT: u64 = 512;

/// The refusal of a disk that an L1 table of the greatest length cannot map.
#[doc(hidden)]
pub const TOO_LARGE: &str =
    "The image size is too large for file format 'qcow2' (try using a larger cluster size)";

/// Version of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Version {
    /// 2: QEMU before 1.1.
    V2,
    /// Version 3, `compat=1.1`.
    #[default]
    V3,
}

/// How a new image is encrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encryption {
    /// QEMU's old way: the password is the key, and nothing of it is in the image.
    Aes,
    /// With a key that this volume holds.
    Luks(Box<NewVolume>),
}

/// Options of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateOptions {
    /// Size of the disk; rounded up to [`SIZE_UNIT`].
    pub size: u64,
    /// Version of the format.
    pub version: Version,
    /// Bytes in a cluster.
    pub cluster_size: u64,
    /// Entries have subclusters (`extended_l2`).
    pub extended_l2: bool,
    /// Width of a refcount.
    pub refcount_bits: u64,
    /// Refcount updates may be postponed.
    pub lazy_refcounts: bool,
    /// Compression of compressed clusters.
    pub compression_type: CompressionType,
    /// Name of the backing file, as it shall stand in the image.
    pub backing_file: Option<String>,
    /// Format of the backing file.
    pub backing_format: Option<String>,
    /// Name of the external data file, as it shall stand in the image.
    pub data_file: Option<String>,
    /// The data file alone shall always be a valid raw image.
    pub data_file_raw: bool,
    /// How the guest's data shall be encrypted, if it shall be.
    pub encryption: Option<Encryption>,
    /// Space that is allocated now.
    pub preallocation: Preallocation,
    /// How space is to be allocated later, to be remembered in the image where it has room.
    pub alloc_policy: AllocPolicy,
}

impl CreateOptions {
    /// The defaults, QEMU's, for a disk of `size` bytes.
    pub fn new(size: u64) -> CreateOptions {
        CreateOptions {
            size,
            version: Version::V3,
            cluster_size: 65536,
            extended_l2: false,
            refcount_bits: 16,
            lazy_refcounts: false,
            compression_type: CompressionType::Deflate,
            backing_file: None,
            backing_format: None,
            data_file: None,
            data_file_raw: false,
            encryption: None,
            preallocation: Preallocation::Off,
            alloc_policy: AllocPolicy::Auto,
        }
    }

    /// The image's sizes, if all options go together. Touches nothing.
    ///
    /// # Errors
    /// `Invalid`, in QEMU's words.
    pub fn validate(&self) -> Result<Geometry> {
        let refuse = |text: &str| Err(Error::Invalid(text.to_string()));
        let cluster_sizes = 1u64 << CLUSTER_BITS_MIN..=1u64 << CLUSTER_BITS_MAX;
        if !self.cluster_size.is_power_of_two() || !cluster_sizes.contains(&self.cluster_size) {
            return refuse("Cluster size must be a power of two between 512 and 2048k");
        }
        if self.extended_l2 && self.cluster_size < 1 << CLUSTER_BITS_MIN_EXTENDED {
            return refuse(
                "Extended L2 entries are only supported with cluster sizes of at least 16384 bytes",
            );
        }
        let preallocates = self.preallocation != Preallocation::Off;
        if self.backing_file.is_some() && preallocates && !self.extended_l2 {
            return refuse(
                "Backing file and preallocation can only be used at the same time if extended_l2 \
                 is on",
            );
        }
        if self.backing_format.is_some() && self.backing_file.is_none() {
            return refuse("Backing format cannot be used without backing file");
        }
        if self.refcount_bits > 64 || !self.refcount_bits.is_power_of_two() {
            return refuse("Refcount width must be a power of two and may not exceed 64 bits");
        }
        if self.data_file_raw && self.data_file.is_none() {
            return refuse("data-file-raw requires data-file");
        }
        if self.data_file_raw && self.backing_file.is_some() {
            return refuse("Backing file and data-file-raw cannot be used at the same time");
        }
        self.validate_version()?;
        self.validate_size()
    }

    fn validate_version(&self) -> Result<()> {
        if self.version == Version::V3 {
            return Ok(());
        }
        if self.encryption.is_some() && self.preallocation != Preallocation::Off {
            // Its entries cannot say that space reads as zeroes, whatever is in it.
            let text = "Preallocation of an encrypted image requires compatibility level 1.1 or above \
                        (use version=v3 or greater)";
            return Err(Error::Invalid(text.to_string()));
        }
        let needs_version_3 = [
            (self.lazy_refcounts, "Lazy refcounts only supported with"),
            (
                self.refcount_bits != 16,
                "Different refcount widths than 16 bits require",
            ),
            (
                self.data_file.is_some(),
                "External data files are only supported with",
            ),
            (
                self.extended_l2,
                "Extended L2 entries are only supported with",
            ),
            (
                self.compression_type != CompressionType::Deflate,
                "Non-zlib compression type is only supported with",
            ),
        ];
        match needs_version_3.iter().find(|(wanted, _)| *wanted) {
            Some((_, what)) => {
                let or = if what.ends_with("require") {
                    "or"
                } else {
                    "and"
                };
                Err(Error::Invalid(format!(
                    "{what} compatibility level 1.1 {or} above (use version=v3 or greater)"
                )))
            }
            None => Ok(()),
        }
    }

    fn validate_size(&self) -> Result<Geometry> {
        let geometry = Geometry::new(
            self.cluster_size.ilog2(),
            self.refcount_bits.ilog2(),
            self.extended_l2,
        )
        .expect("the sizes were checked one by one");
        if self.size > i64::MAX as u64 - (SIZE_UNIT - 1) {
            return Err(Error::Invalid("Image size cannot be negative".to_string()));
        }
        let size = round_up(self.size, SIZE_UNIT);
        if geometry.l1_entries_for(size) * 8 > L1_BYTES_MAX {
            return Err(Error::Invalid(TOO_LARGE.to_string()));
        }
        Ok(geometry)
    }

    /// The header that these options ask for; its tables' places are still open.
    pub(super) fn header(&self, geometry: &Geometry) -> Header {
        let version = match self.version {
            Version::V2 => 2,
            Version::V3 => 3,
        };
        let bit = |wanted: bool, bit: u64| if wanted { bit } else { 0 };
        let zstd = self.compression_type == CompressionType::Zstd;
        let mut extensions = Extensions::for_new_image(version, geometry.cluster_bytes());
        extensions.backing_format.clone_from(&self.backing_format);
        extensions.data_file.clone_from(&self.data_file);
        let wanted = self.version == Version::V3 && self.alloc_policy != AllocPolicy::Auto;
        extensions.allocation = wanted.then(|| AllocationHint::new(self.alloc_policy));
        Header {
            version,
            backing_file_offset: 0,
            backing_file: self.backing_file.clone(),
            cluster_bits: geometry.cluster_bits(),
            size: round_up(self.size, SIZE_UNIT),
            crypt_method: match self.encryption {
                None => CryptMethod::None,
                Some(Encryption::Aes) => CryptMethod::Aes,
                Some(Encryption::Luks(_)) => CryptMethod::Luks,
            },
            l1_size: 0,
            l1_table_offset: 0,
            refcount_table_offset: 0,
            refcount_table_clusters: 0,
            nb_snapshots: 0,
            snapshots_offset: 0,
            incompatible_features: bit(self.data_file.is_some(), incompatible::DATA_FILE)
                | bit(zstd, incompatible::COMPRESSION_TYPE)
                | bit(self.extended_l2, incompatible::EXTENDED_L2),
            compatible_features: bit(self.lazy_refcounts, compatible::LAZY_REFCOUNTS),
            autoclear_features: bit(self.data_file_raw, autoclear::DATA_FILE_RAW),
            refcount_order: geometry.refcount_order(),
            header_length: match self.version {
                Version::V2 => HEADER_BYTES_V2,
                Version::V3 => HEADER_BYTES,
            },
            compression_type: self.compression_type,
            unknown_fields: match self.version {
                Version::V2 => Vec::new(),
                Version::V3 => vec![0; 7],
            },
            extensions,
        }
    }
}

/// Writes a fresh image to `file`, and gives `data_file`, if the options name one, its length. What
/// they held is lost. Both are durable afterwards, and claimed no longer.
///
/// # Errors
/// `Invalid` options, another process that uses one of the files, or no space for what is to be
/// preallocated (then nothing was written); I/O (then `file` is no valid image).
pub async fn create(
    file: Arc<dyn BlockFile>,
    data_file: Option<Arc<dyn BlockFile>>,
    options: &CreateOptions,
) -> Result<()> {
    create_as_job(file, data_file, options, &Job::default()).await
}

/// The same as a job.
///
/// # Errors
/// As [`create`]; [`Error::Cancelled`] (then `file` is no valid image). While the job's stage is
/// [`Stage::Begin`] nothing was written.
pub async fn create_as_job(
    file: Arc<dyn BlockFile>,
    data_file: Option<Arc<dyn BlockFile>>,
    options: &CreateOptions,
    job: &Job,
) -> Result<()> {
    let geometry = options.validate()?;
    assert_eq!(
        data_file.is_some(),
        options.data_file.is_some(),
        "a data file is given exactly when the image names one"
    );
    let mut header = options.header(&geometry);
    let layout = Layout::plan(geometry, options)?;
    layout.enter(&mut header);
    let header = encode_header(&mut header)?;
    claim_new(file.as_ref(), Claim::qcow2(true))?;
    if let Some(data_file) = &data_file {
        claim_new(data_file.as_ref(), Claim::data_file(true))?;
    }
    let size = round_up(options.size, SIZE_UNIT);
    let (data_len, tables_len) = (layout.data_len(), layout.tables_len());
    if Fill::of(options.preallocation).is_some() {
        if let Some(data_file) = &data_file {
            check_room(data_file.as_ref(), size).await?;
            job.expect(size);
        }
        check_room(file.as_ref(), data_len + tables_len).await?;
        job.expect(data_len);
    }
    job.expect(tables_len);
    let writer = write::Writer::new(&file, job);
    let fits = write::refuse_growth(file.as_ref(), layout.file_len).await;
    fits.map_err(|error| Error::Invalid(format!("Could not resize image: {error}")))?;
    if let Some(data_file) = &data_file {
        write::refuse_growth(data_file.as_ref(), size).await?;
    }
    job.enter(Stage::Allocate);
    write::set_len(file.as_ref(), 0).await?;
    if let Some(data_file) = &data_file {
        write::set_len(data_file.as_ref(), 0).await?;
        write::plain_file(data_file, size, options.preallocation, job).await?;
    }
    writer.preallocate(&layout, options.preallocation).await?;
    if let (Some(Encryption::Luks(volume)), Some((offset, _))) = (&options.encryption, layout.keys)
    {
        writer.keys(volume, offset).await?;
    }
    writer.tables(&layout).await?;
    writer.header(&header, &layout).await?;
    for made in std::iter::once(&file).chain(&data_file) {
        claim_new(made.as_ref(), Claim::NONE)?;
    }
    Ok(())
}

/// The header's bytes. The hint on allocation is left out where a small cluster has no room for it.
pub(super) fn encode_header(header: &mut Header) -> Result<Vec<u8>> {
    header.encode().or_else(|error| {
        if header.extensions.allocation.take().is_none() {
            return Err(error);
        }
        header.encode()
    })
}

/// Checks that there is room. The space that the file occupies now will be released first.
async fn check_room(file: &dyn BlockFile, needed_bytes: u64) -> Result<()> {
    let now = file.allocated_bytes().unwrap_or(0);
    match file.capabilities().extends_with_zeroes {
        true => space::check_room(file, needed_bytes.saturating_sub(now)).await,
        false => Ok(()),
    }
}

/// Claims a new file. The caller has to check before that nothing protects it.
fn claim_new(file: &dyn BlockFile, claim: Claim) -> Result<()> {
    file.claim(claim).map(drop)
}

/// Gives `file` the length of a raw disk of `size` bytes (rounded up to [`SIZE_UNIT`]), allocated
/// as `preallocation` says. Its old content is lost.
///
/// # Errors
/// I/O; no space (then nothing was written); another process that uses the file; `Invalid` for
/// metadata, of which a raw image has none; [`Error::Cancelled`]. While the job's stage is
/// [`Stage::Begin`] nothing was written.
pub async fn create_raw(
    file: Arc<dyn BlockFile>,
    size: u64,
    preallocation: Preallocation,
    job: &Job,
) -> Result<()> {
    if preallocation == Preallocation::Metadata {
        let text = "Unsupported preallocation mode: metadata";
        return Err(Error::Invalid(text.to_string()));
    }
    let size = round_up(size, SIZE_UNIT);
    if Fill::of(preallocation).is_some() {
        check_room(file.as_ref(), size).await?;
        job.expect(size);
    }
    claim_new(file.as_ref(), Claim::CREATE_RAW)?;
    write::refuse_growth(file.as_ref(), size).await?;
    job.enter(Stage::Allocate);
    write::set_len(file.as_ref(), 0).await?;
    write::plain_file(&file, size, preallocation, job).await?;
    claim_new(file.as_ref(), Claim::NONE)
}

/// Makes `file` a LUKS volume with a disk of `size` bytes (rounded up to [`SIZE_UNIT`]), whose
/// space is allocated as `preallocation` says; what the disk holds is anything. What the file held
/// is lost.
///
/// # Errors
/// As [`create_raw`].
#[doc(hidden)]
pub async fn create_luks(
    file: Arc<dyn BlockFile>,
    size: u64,
    volume: &NewVolume,
    preallocation: Preallocation,
    job: &Job,
) -> Result<()> {
    let start = volume.header().payload_offset;
    create_raw(
        Arc::clone(&file),
        start + round_up(size, SIZE_UNIT),
        preallocation,
        job,
    )
    .await?;
    claim_new(file.as_ref(), Claim::qcow2(true))?;
    let writer = write::Writer::new(&file, job);
    writer.volume(volume).await?;
    claim_new(file.as_ref(), Claim::NONE)
}

#[cfg(test)]
mod tests;
