//! Parsing a header: every rule of the specification and every limit, one flat refusal each.
//!
//! Texts follow QEMU's where it has one, since scripts compare them.

use super::super::geometry::{CLUSTER_BITS_MAX, CLUSTER_BITS_MIN, CLUSTER_BITS_MIN_EXTENDED};
use super::extensions::{
    Extensions, FeatureNames, UNFINISHED_NAME, area_end, be32, be64, compression_type,
    have_room_for_names, text,
};
use super::{
    BACKING_NAME_BYTES_MAX, CompressionType, CryptMethod, HEADER_BYTES_V2, HEADER_BYTES_V3_MIN,
    Header, L1_BYTES_MAX, MAGIC, REFCOUNT_TABLE_BYTES_MAX, SNAPSHOTS_MAX, autoclear, incompatible,
};
use crate::error::Feature;
use crate::{Error, Result};

const SNAPSHOT_ENTRY_BYTES_MIN: u64 = 40;
const HOST_FILE_END: u64 = i64::MAX as u64;

/// Offsets of fields, for messages.
mod at {
    pub const MAGIC: u64 = 0;
    pub const VERSION: u64 = 4;
    pub const BACKING_OFFSET: u64 = 8;
    pub const BACKING_LEN: u64 = 16;
    pub const CLUSTER_BITS: u64 = 20;
    pub const SIZE: u64 = 24;
    pub const CRYPT_METHOD: u64 = 32;
    pub const L1_SIZE: u64 = 36;
    pub const L1_OFFSET: u64 = 40;
    pub const REFCOUNT_TABLE_OFFSET: u64 = 48;
    pub const REFCOUNT_TABLE_CLUSTERS: u64 = 56;
    pub const NB_SNAPSHOTS: u64 = 60;
    pub const SNAPSHOTS_OFFSET: u64 = 64;
    pub const INCOMPATIBLE: u64 = 72;
    pub const AUTOCLEAR: u64 = 88;
    pub const REFCOUNT_ORDER: u64 = 96;
    pub const HEADER_LENGTH: u64 = 100;
    pub const COMPRESSION_TYPE: u64 = 104;
}

/// Returns where what is read of the first cluster ends; `None` if `prefix`, the beginning of the
/// file, does not show it. What it shows need not be valid.
pub(super) fn shown_end(prefix: &[u8]) -> Option<u64> {
    let fields_end = match be32(prefix, at::VERSION as usize) {
        2 => HEADER_BYTES_V2,
        _ => be32(prefix, at::HEADER_LENGTH as usize).max(HEADER_BYTES_V3_MIN),
    };
    if fields_end as usize > prefix.len() {
        return None;
    }
    let (name_at, name_len) = (
        be64(prefix, at::BACKING_OFFSET as usize),
        u64::from(be32(prefix, at::BACKING_LEN as usize)),
    );
    let area_limit = if name_at == 0 { u64::MAX } else { name_at };
    let extensions_end = area_end(prefix, u64::from(fields_end), area_limit)?;
    let name_end = match name_at {
        0 => 0,
        at => at.saturating_add(name_len),
    };
    Some(u64::from(fields_end).max(extensions_end).max(name_end))
}

pub(super) struct Parser<'a> {
    bytes: &'a [u8],
    file_len: u64,
    file_name: &'a str,
    refcounts: Refcounts,
}

/// The requirement on the refcount table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refcounts {
    /// One that can be used.
    Usable,
    /// Anything: a repair builds another.
    Any,
}

/// A table that the header points to.
struct Table {
    name: &'static str,
    offset: u64,
    bytes: u64,
    bytes_max: u64,
    offset_at: u64,
    size_at: u64,
}

impl<'a> Parser<'a> {
    pub fn new(bytes: &'a [u8], file_len: u64, file_name: &'a str) -> Parser<'a> {
        Parser {
            bytes,
            file_len,
            file_name,
            refcounts: Refcounts::Usable,
        }
    }

    /// A parser for a file whose tables may lie beyond its end and whose refcount table may be
    /// anything: both are findings of a check, and repaired.
    pub fn lenient(bytes: &'a [u8], file_name: &'a str) -> Parser<'a> {
        Parser {
            refcounts: Refcounts::Any,
            ..Parser::new(bytes, u64::MAX, file_name)
        }
    }

    fn corrupt(&self, structure: &'static str, offset: u64, detail: impl Into<String>) -> Error {
        Error::Corrupt {
            file: self.file_name.to_string(),
            structure,
            offset,
            detail: detail.into(),
        }
    }

    fn header(&self, offset: u64, detail: impl Into<String>) -> Error {
        self.corrupt("header", offset, detail)
    }

    fn unsupported(&self, feature: impl Into<Feature>) -> Error {
        Error::Unsupported {
            file: self.file_name.to_string(),
            feature: feature.into(),
        }
    }

    fn u32(&self, at: u64) -> u32 {
        be32(self.bytes, at as usize)
    }

    fn u64(&self, at: u64) -> u64 {
        be64(self.bytes, at as usize)
    }

    /// Parses the fields, and validates each on its own.
    pub fn fields(&self) -> Result<Header> {
        if self.bytes.get(..4) != Some(&MAGIC[..]) {
            return Err(self.header(at::MAGIC, "Image is not in qcow2 format"));
        }
        let version = self.u32(at::VERSION);
        if !(2..=3).contains(&version) {
            return Err(self.unsupported(format!("qcow2 version {version}")));
        }
        let least = if version == 2 {
            HEADER_BYTES_V2
        } else {
            HEADER_BYTES_V3_MIN
        };
        if (self.bytes.len() as u64) < u64::from(least) {
            return Err(self.header(0, format!("the file ends within the {least}-byte header")));
        }
        let cluster_bits = self.u32(at::CLUSTER_BITS);
        if !(CLUSTER_BITS_MIN..=CLUSTER_BITS_MAX).contains(&cluster_bits) {
            let detail = format!("Unsupported cluster size: 2^{cluster_bits}");
            return Err(self.header(at::CLUSTER_BITS, detail));
        }
        let crypt_method = match self.u32(at::CRYPT_METHOD) {
            0 => CryptMethod::None,
            1 => CryptMethod::Aes,
            2 => CryptMethod::Luks,
            method => return Err(self.unsupported(format!("encryption method {method}"))),
        };
        let mut header = Header {
            version,
            backing_file_offset: self.u64(at::BACKING_OFFSET),
            backing_file: None,
            cluster_bits,
            size: self.u64(at::SIZE),
            crypt_method,
            l1_size: self.u32(at::L1_SIZE),
            l1_table_offset: self.u64(at::L1_OFFSET),
            refcount_table_offset: self.u64(at::REFCOUNT_TABLE_OFFSET),
            refcount_table_clusters: self.u32(at::REFCOUNT_TABLE_CLUSTERS),
            nb_snapshots: self.u32(at::NB_SNAPSHOTS),
            snapshots_offset: self.u64(at::SNAPSHOTS_OFFSET),
            incompatible_features: 0,
            compatible_features: 0,
            autoclear_features: 0,
            refcount_order: 4,
            header_length: HEADER_BYTES_V2,
            compression_type: CompressionType::Deflate,
            unknown_fields: Vec::new(),
            extensions: Extensions::default(),
        };
        if version == 3 {
            self.fields_of_version_3(&mut header)?;
        }
        Ok(header)
    }

    fn fields_of_version_3(&self, header: &mut Header) -> Result<()> {
        header.incompatible_features = self.u64(at::INCOMPATIBLE);
        header.compatible_features = self.u64(at::INCOMPATIBLE + 8);
        header.autoclear_features = self.u64(at::AUTOCLEAR);
        header.refcount_order = self.u32(at::REFCOUNT_ORDER);
        header.header_length = self.u32(at::HEADER_LENGTH);
        let length = header.header_length;
        if length < HEADER_BYTES_V3_MIN {
            return Err(self.header(at::HEADER_LENGTH, "qcow2 header too short"));
        }
        if u64::from(length) > 1 << header.cluster_bits {
            return Err(self.header(at::HEADER_LENGTH, "qcow2 header exceeds cluster size"));
        }
        if !length.is_multiple_of(8) {
            let detail = format!("header length {length} is not a multiple of 8");
            return Err(self.header(at::HEADER_LENGTH, detail));
        }
        if length as usize > self.bytes.len() {
            let detail = format!("the file ends within the {length}-byte header");
            return Err(self.header(at::HEADER_LENGTH, detail));
        }
        if length > HEADER_BYTES_V3_MIN {
            header.unknown_fields = self.bytes[105..length as usize].to_vec();
        }
        Ok(())
    }

    /// Parses the rest of the first cluster, after the fields: extensions and backing name. Refuses
    /// unknown incompatible features, with their names from the feature name table.
    pub fn first_cluster(&self, header: &mut Header) -> Result<()> {
        let cluster_bytes = 1u64 << header.cluster_bits;
        let start = u64::from(header.header_length);
        let name_at = header.backing_file_offset;
        if name_at > cluster_bytes || (name_at != 0 && name_at < start) {
            return Err(self.header(at::BACKING_OFFSET, "Invalid backing file offset"));
        }
        let end = if name_at == 0 { cluster_bytes } else { name_at };
        let unknown = header.incompatible_features & !incompatible::KNOWN;
        if unknown != 0 {
            let names = FeatureNames::find(self.bytes, start as usize, end as usize);
            let named = names.map(|names| names.incompatible(unknown));
            let (mut named, mut unnamed) = named.unwrap_or((Vec::new(), unknown));
            // There the mark had no room for its name.
            let is_mark = unnamed & incompatible::UNFINISHED != 0;
            if is_mark && !have_room_for_names(cluster_bytes) {
                named.push(UNFINISHED_NAME.to_string());
                unnamed &= !incompatible::UNFINISHED;
            }
            if unnamed != 0 {
                named.push(format!("Unknown incompatible feature: {unnamed:x}"));
            }
            return Err(self.unsupported(Feature::Qcow2(named)));
        }
        let decoded = Extensions::decode(self.bytes, start as usize, end as usize);
        header.extensions =
            decoded.map_err(|e| self.corrupt("header extension", e.offset, e.detail))?;
        self.backing_name(header)
    }

    fn backing_name(&self, header: &mut Header) -> Result<()> {
        let offset = header.backing_file_offset;
        if offset == 0 {
            return Ok(());
        }
        let len = self.u32(at::BACKING_LEN);
        let room = (1u64 << header.cluster_bits) - offset;
        if u64::from(len) > room.min(u64::from(BACKING_NAME_BYTES_MAX)) {
            return Err(self.header(at::BACKING_LEN, "Backing file name too long"));
        }
        let end = offset as usize + len as usize;
        let Some(name) = self.bytes.get(offset as usize..end) else {
            return Err(self.header(at::BACKING_OFFSET, "the file ends within the backing name"));
        };
        let name = text(name, "backing file name").map_err(|e| self.header(offset, e))?;
        header.backing_file = Some(name).filter(|name| !name.is_empty());
        Ok(())
    }

    /// Checks that the features are compatible with each other.
    pub fn features(&self, header: &Header) -> Result<()> {
        if header.refcount_order > 6 {
            let detail = "Reference count entry width too large; may not exceed 64 bits";
            return Err(self.header(at::REFCOUNT_ORDER, detail));
        }
        if header.is_extended_l2() && header.cluster_bits < CLUSTER_BITS_MIN_EXTENDED {
            let detail = "Extended L2 entries are only supported with cluster sizes of at least \
                          16384 bytes";
            return Err(self.header(at::CLUSTER_BITS, detail));
        }
        let has_crypto_header = header.extensions.crypto_header.is_some();
        match (header.crypt_method, has_crypto_header) {
            (CryptMethod::Luks, false) => {
                let detail = "Missing CRYPTO header for crypt method 2";
                return Err(self.header(at::CRYPT_METHOD, detail));
            }
            (CryptMethod::None | CryptMethod::Aes, true) => {
                let detail = "an encryption header without LUKS encryption";
                return Err(self.header(at::CRYPT_METHOD, detail));
            }
            _ => {}
        }
        if header.is_data_file_raw() && !header.has_data_file() {
            return Err(self.header(at::AUTOCLEAR, "data-file-raw requires a data file"));
        }
        if header.is_data_file_raw() && header.backing_file.is_some() {
            let detail = "a raw external data file and a backing file exclude each other";
            return Err(self.header(at::AUTOCLEAR, detail));
        }
        if header.has_data_file() && header.nb_snapshots != 0 {
            let detail = "an external data file and internal snapshots exclude each other";
            return Err(self.header(at::NB_SNAPSHOTS, detail));
        }
        let consistent = header.autoclear_features & autoclear::BITMAPS != 0;
        if consistent && header.extensions.bitmaps.is_none() {
            let detail = "the bitmaps bit is set without a bitmaps extension";
            return Err(self.header(at::AUTOCLEAR, detail));
        }
        self.compression(header)
    }

    fn compression(&self, header: &Header) -> Result<()> {
        let flagged = header.incompatible_features & incompatible::COMPRESSION_TYPE != 0;
        let detail = match (flagged, header.compression_type) {
            (true, CompressionType::Deflate) => {
                "Compression type incompatible feature bit must not be set"
            }
            (false, CompressionType::Zstd) => {
                "Compression type incompatible feature bit must be set"
            }
            _ => return Ok(()),
        };
        Err(self.header(at::COMPRESSION_TYPE, detail))
    }

    /// The tables that the header points to: aligned, within limits and within the file.
    pub fn tables(&self, header: &Header) -> Result<()> {
        if header.size > HOST_FILE_END {
            return Err(self.header(at::SIZE, "Image is too big"));
        }
        self.refcount_table(header)?;
        let snapshots = Table {
            name: "Snapshot table",
            offset: header.snapshots_offset,
            bytes: u64::from(header.nb_snapshots) * SNAPSHOT_ENTRY_BYTES_MIN,
            bytes_max: u64::from(SNAPSHOTS_MAX) * SNAPSHOT_ENTRY_BYTES_MIN,
            offset_at: at::SNAPSHOTS_OFFSET,
            size_at: at::NB_SNAPSHOTS,
        };
        self.table(&snapshots, header.cluster_bits)?;
        let l1 = Table {
            name: "Active L1 table",
            offset: header.l1_table_offset,
            bytes: header.l1_bytes(),
            bytes_max: L1_BYTES_MAX,
            offset_at: at::L1_OFFSET,
            size_at: at::L1_SIZE,
        };
        self.table(&l1, header.cluster_bits)?;
        let l1_entries = header.geometry().l1_entries_for(header.size);
        if l1_entries > i32::MAX as u64 {
            return Err(self.header(at::SIZE, "Image is too big"));
        }
        if u64::from(header.l1_size) < l1_entries {
            return Err(self.header(at::L1_SIZE, "L1 table is too small"));
        }
        Ok(())
    }

    fn refcount_table(&self, header: &Header) -> Result<()> {
        let lenient = self.refcounts == Refcounts::Any;
        if header.refcount_table_clusters == 0 && !lenient {
            let detail = "Image does not contain a reference count table";
            return Err(self.header(at::REFCOUNT_TABLE_CLUSTERS, detail));
        }
        let refcount_table = Table {
            name: "Reference count table",
            offset: header.refcount_table_offset,
            bytes: header.refcount_table_bytes(),
            bytes_max: REFCOUNT_TABLE_BYTES_MAX,
            offset_at: at::REFCOUNT_TABLE_OFFSET,
            size_at: at::REFCOUNT_TABLE_CLUSTERS,
        };
        if lenient && refcount_table.bytes <= refcount_table.bytes_max {
            return Ok(());
        }
        self.table(&refcount_table, header.cluster_bits)
    }

    fn table(&self, table: &Table, cluster_bits: u32) -> Result<()> {
        if table.bytes > table.bytes_max {
            return Err(self.header(table.size_at, format!("{} too large", table.name)));
        }
        let aligned = table.offset & ((1 << cluster_bits) - 1) == 0;
        let end = table.offset.checked_add(table.bytes);
        if !aligned || end.is_none_or(|end| end > HOST_FILE_END) {
            let detail = format!("{} offset invalid", table.name);
            return Err(self.header(table.offset_at, detail));
        }
        if table.bytes == 0 {
            return Ok(());
        }
        if table.offset == 0 {
            let detail = format!("{} offset invalid: it is the header's", table.name);
            return Err(self.header(table.offset_at, detail));
        }
        if end.is_some_and(|end| end > self.file_len) {
            let detail = format!(
                "{} ({} bytes at {:#x}) reaches beyond the end of the file",
                table.name, table.bytes, table.offset
            );
            return Err(self.header(table.offset_at, detail));
        }
        Ok(())
    }

    /// The compression type, which version 3 headers may lack.
    pub fn compression_type(&self, header_length: u32) -> Result<CompressionType> {
        if header_length <= HEADER_BYTES_V3_MIN {
            return Ok(CompressionType::Deflate);
        }
        let byte = self.bytes[at::COMPRESSION_TYPE as usize];
        compression_type(byte).ok_or_else(|| self.unsupported(format!("compression type {byte}")))
    }
}
