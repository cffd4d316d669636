//! The header of a qcow2 image: bytes on one side, [`Header`] on the other.
//!
//! Everything here is pure. [`Header::parse`] refuses what the specification forbids and what is
//! not understood, by name; what may be ignored (compatible bits, further fields, header
//! extensions) is kept and written back as it was by [`Header::encode`]. Bits and offsets of header
//! fields are nowhere else in the engine.
//!
//! | bytes | field | | bytes | field (version 3) |
//! | --- | --- | --- | --- | --- |
//! | 0 | magic, version | | 72 | incompatible features |
//! | 8 | backing name: offset, length | | 80 | compatible features |
//! | 20 | cluster bits | | 88 | autoclear features |
//! | 24 | size | | 96 | refcount order |
//! | 32 | crypt method | | 100 | header length |
//! | 36 | L1 entries, offset | | 104 | compression type |
//! | 48 | refcount table: offset, clusters | | 105 | further fields, kept |
//! | 60 | snapshots: count, offset | | .. | extensions, then the backing name |
//!
//! Left out: the tables that the header points to, and reading or writing any file.

use super::entry::EntryFormat;
use super::geometry::{CLUSTER_BITS_MAX, CLUSTER_BITS_MIN, Geometry};
use crate::{Error, Result};

pub mod extensions;
#[cfg(test)]
mod tests;
mod validate;

pub use extensions::{
    AllocationHint, BitmapsExtension, CryptoHeader, Extensions, FeatureKind, FeatureNames,
    UnknownExtension,
};

/// The first four bytes of every qcow2 image.
pub use crate::foreign::QCOW2_MAGIC as MAGIC;
/// Length of a version 2 header.
pub const HEADER_BYTES_V2: u32 = 72;
/// The least length of a version 3 header.
pub const HEADER_BYTES_V3_MIN: u32 = 104;
/// Length of the headers that are created: through the compression type, padded.
pub const HEADER_BYTES: u32 = 112;
/// The longest name of a backing file.
pub const BACKING_NAME_BYTES_MAX: u32 = 1023;
/// The largest L1 table, as in QEMU.
pub const L1_BYTES_MAX: u64 = 32 << 20;
/// The largest refcount table, as in QEMU.
pub const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;
/// The most internal snapshots, as in QEMU.
pub const SNAPSHOTS_MAX: u32 = 65536;

/// Bits of the incompatible features.
pub mod incompatible {
    /// Refcounts may be behind; they are rebuilt before the image is written.
    pub const DIRTY: u64 = 1 << 0;
    /// Structures may be corrupt; the image is not written.
    pub const CORRUPT: u64 = 1 << 1;
    /// Guest data is in an external data file.
    pub const DATA_FILE: u64 = 1 << 2;
    /// Compressed clusters are not deflate.
    pub const COMPRESSION_TYPE: u64 = 1 << 3;
    /// L2 entries are extended: subclusters.
    pub const EXTENDED_L2: u64 = 1 << 4;
    /// The image is being filled, or the program that filled it was killed
    /// (`Image::mark_unfinished`). The specification does not
    /// assign this bit, so every program refuses the image; ours does, too.
    pub const UNFINISHED: u64 = 1 << UNFINISHED_BIT;
    /// The number of [`UNFINISHED`].
    pub const UNFINISHED_BIT: u8 = 63;
    /// All that is understood.
    pub const KNOWN: u64 = DIRTY | CORRUPT | DATA_FILE | COMPRESSION_TYPE | EXTENDED_L2;
}

/// Bits of the compatible features.
pub mod compatible {
    /// Refcount updates may be postponed under the dirty bit.
    pub const LAZY_REFCOUNTS: u64 = 1 << 0;
}

/// Bits of the autoclear features.
pub mod autoclear {
    /// The bitmaps extension is consistent.
    pub const BITMAPS: u64 = 1 << 0;
    /// The external data file alone is a valid raw image.
    pub const DATA_FILE_RAW: u64 = 1 << 1;
    /// All that is understood.
    pub const KNOWN: u64 = BITMAPS | DATA_FILE_RAW;
}

/// How guest data is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CryptMethod {
    /// The disk is not encrypted.
    #[default]
    None,
    /// QEMU's old way: AES-128 in CBC mode, the password being the key, a sector's vector its
    /// number on the disk.
    Aes,
    /// Encryption by LUKS (`crypt_method` 2).
    Luks,
}

impl CryptMethod {
    /// The name that QEMU's options and reports use, if there is a method.
    pub fn name(self) -> Option<&'static str> {
        match self {
            CryptMethod::None => None,
            CryptMethod::Aes => Some("aes"),
            CryptMethod::Luks => Some("luks"),
        }
    }
}

/// How compressed clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CompressionType {
    /// Deflate, without a zlib header ("zlib" in QEMU).
    #[default]
    Deflate,
    /// Zstandard (`compression_type` 1).
    Zstd,
}

impl CompressionType {
    /// The name that QEMU's options and reports use.
    pub fn name(self) -> &'static str {
        match self {
            CompressionType::Deflate => "zlib",
            CompressionType::Zstd => "zstd",
        }
    }
}

/// A validated header with its extensions and the backing file's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Version of the format: 2 or 3.
    pub version: u32,
    /// Where the backing file's name is; [`Header::encode`] puts it behind the extensions.
    #[doc(hidden)]
    pub backing_file_offset: u64,
    /// The backing file's name, as it stands in the image.
    pub backing_file: Option<String>,
    /// log2 of the cluster size.
    pub cluster_bits: u32,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Encryption of guest data.
    #[doc(hidden)]
    pub crypt_method: CryptMethod,
    /// Entries of the active L1 table.
    #[doc(hidden)]
    pub l1_size: u32,
    /// Offset of the active L1 table.
    #[doc(hidden)]
    pub l1_table_offset: u64,
    /// Offset of the refcount table.
    #[doc(hidden)]
    pub refcount_table_offset: u64,
    /// Clusters of the refcount table.
    #[doc(hidden)]
    pub refcount_table_clusters: u32,
    /// Number of internal snapshots.
    pub nb_snapshots: u32,
    /// Offset of the snapshot table.
    #[doc(hidden)]
    pub snapshots_offset: u64,
    /// See [`incompatible`]; only known bits.
    #[doc(hidden)]
    pub incompatible_features: u64,
    /// See [`compatible`]; unknown bits are kept.
    #[doc(hidden)]
    pub compatible_features: u64,
    /// See [`autoclear`]; unknown bits are kept until the first write to the image.
    #[doc(hidden)]
    pub autoclear_features: u64,
    /// log2 of the width of a refcount in bits.
    pub refcount_order: u32,
    /// Length of the fields on disk: 72 in version 2, 104 or more in version 3.
    #[doc(hidden)]
    pub header_length: u32,
    /// Compression of compressed clusters.
    pub compression_type: CompressionType,
    /// Bytes 105 to `header_length`: padding today, and fields that are not known yet.
    #[doc(hidden)]
    pub unknown_fields: Vec<u8>,
    /// Header extensions, unknown ones included.
    #[doc(hidden)]
    pub extensions: Extensions,
}

/// Bytes of a file in which what [`Header::parse`] wants nearly always lies as a whole.
pub const FIRST_READ_BYTES: u64 = 4096;

impl Header {
    /// Bytes that [`Header::parse`] wants to see of a file that begins with `prefix` (24 bytes or
    /// more) and has `file_len` bytes: up to the end of the extensions and of the backing file's
    /// name, if `prefix` shows where that is ([`FIRST_READ_BYTES`] nearly always do), else the
    /// first cluster; or what there is of it.
    #[doc(hidden)]
    pub fn wanted_bytes(prefix: &[u8], file_len: u64) -> u64 {
        let cluster_bits = match prefix.get(20..24) {
            Some(field) => u32::from_be_bytes([field[0], field[1], field[2], field[3]]),
            None => CLUSTER_BITS_MIN,
        };
        let cluster_bits = cluster_bits.clamp(CLUSTER_BITS_MIN, CLUSTER_BITS_MAX);
        let wanted = match validate::shown_end(prefix) {
            Some(end) => end.min(1 << cluster_bits),
            None => 1 << cluster_bits,
        };
        file_len.min(wanted)
    }

    /// The header of an image that can be used. `bytes` is the beginning of the file,
    /// [`Header::wanted_bytes`] of it; bytes beyond count as zeroes.
    ///
    /// # Errors
    /// `Corrupt` where the specification is broken, `Unsupported` for unknown incompatible features
    /// and ways to encrypt.
    #[doc(hidden)]
    pub fn parse(bytes: &[u8], file_len: u64, file_name: &str) -> Result<Header> {
        Header::parsed(&validate::Parser::new(bytes, file_len, file_name))
    }

    /// As [`Header::parse`], for a check and its repair: the tables may lie beyond the
    /// end of the file, and the refcount table may be missing or misplaced.
    ///
    /// # Errors
    /// As `parse`, if the meaning of the header cannot be determined.
    #[doc(hidden)]
    pub fn parse_damaged(bytes: &[u8], file_name: &str) -> Result<Header> {
        Header::parsed(&validate::Parser::lenient(bytes, file_name))
    }

    fn parsed(parser: &validate::Parser<'_>) -> Result<Header> {
        let mut header = parser.fields()?;
        parser.first_cluster(&mut header)?;
        header.compression_type = parser.compression_type(header.header_length)?;
        parser.features(&header)?;
        parser.tables(&header)?;
        Ok(header)
    }

    /// The bytes from the start of the file to the end of the backing file's name. Moves the name
    /// directly behind the extensions, and notes where the hint on allocation is.
    ///
    /// # Errors
    /// `Invalid` if they do not fit in a cluster.
    #[doc(hidden)]
    pub fn encode(&mut self) -> Result<Vec<u8>> {
        let extensions = self.extensions.encode(u64::from(self.header_length));
        let name_at = self.header_length as usize + extensions.len();
        let name = self.backing_file.clone().unwrap_or_default();
        let end = name_at + name.len();
        if end as u64 > 1 << self.cluster_bits || name.len() > BACKING_NAME_BYTES_MAX as usize {
            return Err(Error::Invalid(format!(
                "the header, its extensions and the backing file name ({end} bytes) do not fit in \
                 a cluster of {} bytes",
                1u64 << self.cluster_bits
            )));
        }
        self.backing_file_offset = if name.is_empty() { 0 } else { name_at as u64 };
        let mut bytes = self.fixed_part();
        bytes.extend_from_slice(&extensions);
        bytes.extend_from_slice(name.as_bytes());
        Ok(bytes)
    }

    /// The fields alone, `header_length` bytes, for updates in place: extensions and backing name
    /// stay where they are on disk.
    #[doc(hidden)]
    pub fn fixed_part(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.header_length as usize);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&self.version.to_be_bytes());
        out.extend_from_slice(&self.backing_file_offset.to_be_bytes());
        let name_len = self.backing_file.as_ref().map_or(0, String::len);
        let name_len = u32::try_from(name_len).expect("a backing name has 1023 bytes at most");
        out.extend_from_slice(&name_len.to_be_bytes());
        out.extend_from_slice(&self.cluster_bits.to_be_bytes());
        out.extend_from_slice(&self.size.to_be_bytes());
        out.extend_from_slice(&(self.crypt_method as u32).to_be_bytes());
        out.extend_from_slice(&self.l1_size.to_be_bytes());
        out.extend_from_slice(&self.l1_table_offset.to_be_bytes());
        out.extend_from_slice(&self.refcount_table_offset.to_be_bytes());
        out.extend_from_slice(&self.refcount_table_clusters.to_be_bytes());
        out.extend_from_slice(&self.nb_snapshots.to_be_bytes());
        out.extend_from_slice(&self.snapshots_offset.to_be_bytes());
        if self.version >= 3 {
            out.extend_from_slice(&self.incompatible_features.to_be_bytes());
            out.extend_from_slice(&self.compatible_features.to_be_bytes());
            out.extend_from_slice(&self.autoclear_features.to_be_bytes());
            out.extend_from_slice(&self.refcount_order.to_be_bytes());
            out.extend_from_slice(&self.header_length.to_be_bytes());
            if self.header_length > HEADER_BYTES_V3_MIN {
                out.push(self.compression_type as u8);
                out.extend_from_slice(&self.unknown_fields);
            }
        }
        assert_eq!(out.len(), self.header_length as usize, "header length");
        out
    }

    /// Sizes of the image's structures, computed from the header.
    #[doc(hidden)]
    pub fn geometry(&self) -> Geometry {
        Geometry::new(
            self.cluster_bits,
            self.refcount_order,
            self.is_extended_l2(),
        )
        .expect("parsing and creating admit valid geometries only")
    }

    /// Returns the properties that decoding of table entries depends on.
    #[doc(hidden)]
    pub fn entry_format(&self) -> EntryFormat {
        EntryFormat {
            geometry: self.geometry(),
            version: self.version,
            data_file: self.has_data_file(),
        }
    }

    /// Returns the backing file's format, if the image names it.
    pub fn backing_format(&self) -> Option<&str> {
        self.extensions.backing_format.as_deref()
    }

    /// Returns the external data file's name, if the image stores it.
    pub fn data_file_name(&self) -> Option<&str> {
        self.extensions.data_file.as_deref()
    }

    /// L2 entries have subclusters.
    pub fn is_extended_l2(&self) -> bool {
        self.incompatible_features & incompatible::EXTENDED_L2 != 0
    }

    /// Guest data is in an external data file.
    pub fn has_data_file(&self) -> bool {
        self.incompatible_features & incompatible::DATA_FILE != 0
    }

    /// The external data file alone is a valid raw image.
    pub fn is_data_file_raw(&self) -> bool {
        self.autoclear_features & autoclear::DATA_FILE_RAW != 0
    }

    /// Refcounts may be behind.
    pub fn is_dirty(&self) -> bool {
        self.incompatible_features & incompatible::DIRTY != 0
    }

    /// Returns whether the image is marked corrupt: it must not be written.
    pub fn is_corrupt(&self) -> bool {
        self.incompatible_features & incompatible::CORRUPT != 0
    }

    /// Returns whether the image is being filled by this process.
    pub fn is_unfinished(&self) -> bool {
        self.incompatible_features & incompatible::UNFINISHED != 0
    }

    /// Refcount updates may be postponed.
    pub fn has_lazy_refcounts(&self) -> bool {
        self.compatible_features & compatible::LAZY_REFCOUNTS != 0
    }

    /// The bitmaps, if there are any and they are consistent.
    #[doc(hidden)]
    pub fn consistent_bitmaps(&self) -> Option<&BitmapsExtension> {
        let consistent = self.autoclear_features & autoclear::BITMAPS != 0;
        self.extensions.bitmaps.as_ref().filter(|_| consistent)
    }

    /// Bytes of the active L1 table.
    #[doc(hidden)]
    pub fn l1_bytes(&self) -> u64 {
        u64::from(self.l1_size) * 8
    }

    /// Bytes of the refcount table.
    #[doc(hidden)]
    pub fn refcount_table_bytes(&self) -> u64 {
        u64::from(self.refcount_table_clusters) << self.cluster_bits
    }
}
