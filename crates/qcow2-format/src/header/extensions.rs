//! Header extensions: known ones as values, unknown ones as they are.
//!
//! Written in QEMU's order: backing format, data file, encryption header, feature names, bitmaps,
//! ours, then the unknown ones in the order in which they were found.

use super::{CompressionType, incompatible};
use crate::policy::AllocPolicy;

const END: u32 = 0;
pub(super) const BACKING_FORMAT: u32 = 0xe279_2aca;
const DATA_FILE: u32 = 0x4441_5441;
const CRYPTO_HEADER: u32 = 0x0537_be77;
const FEATURE_NAMES: u32 = 0x6803_f857;
const BITMAPS: u32 = 0x2385_2875;
/// Type of the allocation hint's extension, which only Cowslip writes: "COWS".
const ALLOCATION: u32 = 0x434f_5753;
/// Ours: "COWP". Nothing, up to its end; in a header that was being changed when its writer died.
pub const PADDING: u32 = 0x434f_5750;

/// Bytes of an extension before its data: type and length.
pub const PREFIX_BYTES: usize = 8;
const FEATURE_NAME_BYTES: usize = 48;
/// Words for [`incompatible::UNFINISHED`], which refusals of other programs end with.
pub(super) const UNFINISHED_NAME: &str = "unfinished copy, to be made again";
/// New images with clusters of this size or less have no feature name table.
const FEATURE_NAMES_CLUSTER_BYTES: u64 = 4096;
/// The longest format name that QEMU reads.
const BACKING_FORMAT_BYTES_MAX: usize = 15;
const BITMAPS_EXTENSION_BYTES: usize = 24;
const CRYPTO_HEADER_BYTES: usize = 16;
const ALLOCATION_BYTES: usize = 8;
const ALLOCATION_VERSION: u8 = 1;

/// All extensions of a header.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Extensions {
    /// The backing file's format.
    pub backing_format: Option<String>,
    /// The external data file's name.
    pub data_file: Option<String>,
    /// Where the encryption method keeps its metadata.
    pub crypto_header: Option<CryptoHeader>,
    /// Names of feature bits.
    pub feature_names: Option<FeatureNames>,
    /// Where the bitmap directory is.
    pub bitmaps: Option<BitmapsExtension>,
    /// How space is to be allocated.
    pub allocation: Option<AllocationHint>,
    /// Unknown extensions, which are kept.
    pub unknown: Vec<UnknownExtension>,
}

/// Where persistent bitmaps are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapsExtension {
    /// Bitmaps in the image.
    pub nb_bitmaps: u32,
    /// Must be zero; checked where bitmaps are used.
    pub reserved: u32,
    /// Bytes of the bitmap directory.
    pub bitmap_directory_size: u64,
    /// Offset of the bitmap directory.
    pub bitmap_directory_offset: u64,
}

/// Where the encryption header is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CryptoHeader {
    /// Offset in the image file.
    pub offset: u64,
    /// Length of the encryption header in bytes.
    pub length: u64,
}

/// How space is to be allocated: an extension of our own, a hint. Others keep it and do not
/// maintain it, so nothing depends on its being right (docs/format.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocationHint {
    /// The policy, unless the choice is left to the program that opens the image.
    pub policy: AllocPolicy,
    /// How often in a row the image was closed with space allocated ahead of need.
    pub closes_ahead: u8,
    /// Where its data is in the file; 0 if it is not written yet.
    pub data_offset: u64,
}

impl AllocationHint {
    /// The hint of a new image.
    pub fn new(policy: AllocPolicy) -> AllocationHint {
        AllocationHint {
            policy,
            closes_ahead: 0,
            data_offset: 0,
        }
    }

    /// With another count of closes.
    pub fn with_closes(self, closes_ahead: u8) -> AllocationHint {
        AllocationHint {
            closes_ahead,
            ..self
        }
    }

    /// `None` if another version wrote it.
    fn decode(data: &[u8], data_offset: u64) -> Option<AllocationHint> {
        let &[ALLOCATION_VERSION, policy, closes_ahead, _, _, _, _, _] = data else {
            return None;
        };
        let policy = match policy {
            0 => AllocPolicy::Auto,
            1 => AllocPolicy::Contiguous,
            2 => AllocPolicy::Sparse,
            _ => return None,
        };
        Some(AllocationHint {
            policy,
            closes_ahead,
            data_offset,
        })
    }

    /// Encodes the extension's data, without type and length.
    pub fn encode(&self) -> [u8; ALLOCATION_BYTES] {
        let policy = match self.policy {
            AllocPolicy::Auto => 0,
            AllocPolicy::Contiguous => 1,
            AllocPolicy::Sparse => 2,
        };
        [ALLOCATION_VERSION, policy, self.closes_ahead, 0, 0, 0, 0, 0]
    }
}

/// An extension of a type that is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownExtension {
    /// Type of the extension.
    pub kind: u32,
    /// Its data without padding.
    pub data: Vec<u8>,
}

/// The feature bitmap that a bit belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureKind {
    /// A program that does not know the feature must not open the image.
    Incompatible = 0,
    /// A program that does not know the feature may ignore it.
    Compatible = 1,
    /// A program that does not know the feature clears its bit before it writes.
    Autoclear = 2,
}

/// The last name of the standard table.
const LAST_NAME: (FeatureKind, u8, &str) = (FeatureKind::Autoclear, 1, "raw external data");

fn name_entry((kind, bit, name): (FeatureKind, u8, &str)) -> [u8; FEATURE_NAME_BYTES] {
    let mut entry = [0; FEATURE_NAME_BYTES];
    entry[..2].copy_from_slice(&[kind as u8, bit]);
    entry[2..][..name.len()].copy_from_slice(name.as_bytes());
    entry
}

/// The feature name table, as it stands in the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureNames(Vec<u8>);

impl FeatureNames {
    /// The table that QEMU 10 writes.
    pub fn standard() -> FeatureNames {
        use FeatureKind::{Autoclear, Compatible, Incompatible};
        let names: [(FeatureKind, u8, &str); 8] = [
            (Incompatible, 0, "dirty bit"),
            (Incompatible, 1, "corrupt bit"),
            (Incompatible, 2, "external data file"),
            (Incompatible, 3, "compression type"),
            (Incompatible, 4, "extended L2 entries"),
            (Compatible, 0, "lazy refcounts"),
            (Autoclear, 0, "bitmaps"),
            LAST_NAME,
        ];
        FeatureNames(names.into_iter().flat_map(name_entry).collect())
    }

    /// Bytes of the last name of the standard table, and of what stands there while an image is
    /// being filled: a table with one name more would be longer than QEMU's.
    pub fn last_and_unfinished() -> [[u8; FEATURE_NAME_BYTES]; 2] {
        let unfinished = (
            FeatureKind::Incompatible,
            incompatible::UNFINISHED_BIT,
            UNFINISHED_NAME,
        );
        [LAST_NAME, unfinished].map(name_entry)
    }

    /// The offset of a name within the header's cluster, whose extensions begin at `start`.
    pub fn offset_of(name: &[u8; FEATURE_NAME_BYTES], cluster: &[u8], start: usize) -> Option<u64> {
        let mut at = start;
        while at + PREFIX_BYTES <= cluster.len() && be32(cluster, at) != END {
            let len = be32(cluster, at + 4) as usize;
            let data = at + PREFIX_BYTES;
            if be32(cluster, at) == FEATURE_NAMES {
                let names = padded(cluster, data, len.min(cluster.len()));
                let index = names
                    .chunks(FEATURE_NAME_BYTES)
                    .position(|found| found == name)?;
                return Some((data + index * FEATURE_NAME_BYTES) as u64);
            }
            at = data.saturating_add(len.next_multiple_of(8));
        }
        None
    }

    /// A table of these bytes: 48 for each name, as the specification has them.
    pub fn from_bytes(table: Vec<u8>) -> FeatureNames {
        FeatureNames(table)
    }

    /// The table of an extension area, also of one that is not sound behind it; the last of
    /// several.
    pub(super) fn find(cluster: &[u8], start: usize, end: usize) -> Option<FeatureNames> {
        let mut found = None;
        let mut at = start;
        while end.saturating_sub(at) >= PREFIX_BYTES && be32(cluster, at) != END {
            let len = be32(cluster, at + 4) as usize;
            if len > end - at - PREFIX_BYTES {
                break;
            }
            if be32(cluster, at) == FEATURE_NAMES {
                found = Some(FeatureNames(padded(cluster, at + PREFIX_BYTES, len)));
            }
            at += PREFIX_BYTES + len.next_multiple_of(8);
        }
        found
    }

    /// The names of these incompatible bits in the order of the table, and the bits that it has no
    /// name for. An entry without a name ends the table, as for QEMU.
    pub fn incompatible(&self, mut bits: u64) -> (Vec<String>, u64) {
        let mut names = Vec::new();
        let entries = self.0.chunks(FEATURE_NAME_BYTES);
        for entry in entries.take_while(|entry| entry.len() > 2 && entry[2] != 0) {
            let bit = 1u64.checked_shl(u32::from(entry[1])).unwrap_or(0);
            if entry[0] == FeatureKind::Incompatible as u8 && bits & bit != 0 {
                let name = printable(&entry[2..]);
                bits &= if name.is_empty() { u64::MAX } else { !bit };
                names.extend(Some(name).filter(|name| !name.is_empty()));
            }
        }
        (names, bits)
    }
}

/// Text from an untrusted image for a message: up to the first zero byte, no control characters.
fn printable(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end])
        .chars()
        .filter(|c| !c.is_control())
        .collect()
}

/// The flaw of the extension area, and its offset in the header's cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExtensionError {
    pub offset: u64,
    pub detail: String,
}

/// Returns where the extension area between `start` and `limit` ends; bytes behind it are not read.
/// `None` if `prefix`, the beginning of the file, does not show it.
pub fn area_end(prefix: &[u8], start: u64, limit: u64) -> Option<u64> {
    let mut at = start;
    while limit.saturating_sub(at) >= PREFIX_BYTES as u64 {
        let data_at = at + PREFIX_BYTES as u64;
        let shown = prefix.get(at as usize..data_at as usize)?;
        if be32(shown, 0) == END {
            return Some(data_at);
        }
        at = data_at + u64::from(be32(shown, 4)).next_multiple_of(8);
        if at > prefix.len() as u64 {
            return None;
        }
    }
    Some(at.min(limit))
}

/// Whether the feature name table is in new images with clusters of this size.
pub(super) fn have_room_for_names(cluster_bytes: u64) -> bool {
    cluster_bytes > FEATURE_NAMES_CLUSTER_BYTES
}

impl Extensions {
    /// The extensions of a new image: like QEMU, small clusters keep their room for other things
    /// than the feature name table.
    pub fn for_new_image(version: u32, cluster_bytes: u64) -> Extensions {
        let has_names = version >= 3 && have_room_for_names(cluster_bytes);
        Extensions {
            feature_names: has_names.then(FeatureNames::standard),
            ..Extensions::default()
        }
    }

    /// Reads the area `start..end` of the header's cluster. What `cluster` lacks counts as zeroes.
    /// Of two extensions of a kind that is known the last counts, as for QEMU.
    pub(super) fn decode(
        cluster: &[u8],
        start: usize,
        end: usize,
    ) -> Result<Extensions, ExtensionError> {
        let mut extensions = Extensions::default();
        let mut at = start;
        while end.saturating_sub(at) >= PREFIX_BYTES {
            let kind = be32(cluster, at);
            if kind == END {
                break;
            }
            let error = |detail: String| ExtensionError {
                offset: at as u64,
                detail,
            };
            let len = be32(cluster, at + 4) as usize;
            if len > end - at - PREFIX_BYTES {
                return Err(error(format!(
                    "extension {kind:#010x} of {len} bytes does not fit"
                )));
            }
            let data = padded(cluster, at + PREFIX_BYTES, len);
            let data_offset = (at + PREFIX_BYTES) as u64;
            extensions.take(kind, data, data_offset).map_err(error)?;
            at += PREFIX_BYTES + len.next_multiple_of(8);
        }
        Ok(extensions)
    }

    fn take(&mut self, kind: u32, data: Vec<u8>, data_offset: u64) -> Result<(), String> {
        match kind {
            BACKING_FORMAT => {
                if data.len() > BACKING_FORMAT_BYTES_MAX {
                    return Err(format!(
                        "backing file format name of {} bytes is too long",
                        data.len()
                    ));
                }
                self.backing_format = Some(text(&data, "backing file format name")?);
            }
            DATA_FILE => self.data_file = Some(text(&data, "external data file name")?),
            CRYPTO_HEADER => {
                let data = sized::<CRYPTO_HEADER_BYTES>(&data, "encryption header pointer")?;
                self.crypto_header = Some(CryptoHeader {
                    offset: be64(&data, 0),
                    length: be64(&data, 8),
                });
            }
            FEATURE_NAMES => self.feature_names = Some(FeatureNames(data)),
            BITMAPS => {
                let data = sized::<BITMAPS_EXTENSION_BYTES>(&data, "bitmaps extension")?;
                self.bitmaps = Some(BitmapsExtension {
                    nb_bitmaps: be32(&data, 0),
                    reserved: be32(&data, 4),
                    bitmap_directory_size: be64(&data, 8),
                    bitmap_directory_offset: be64(&data, 16),
                });
            }
            ALLOCATION => match AllocationHint::decode(&data, data_offset) {
                Some(hint) => self.allocation = Some(hint),
                None => self.unknown.push(UnknownExtension { kind, data }),
            },
            PADDING => {}
            _ => self.unknown.push(UnknownExtension { kind, data }),
        }
        Ok(())
    }

    /// The extension area with its end marker, which begins at `start`. Notes where the hint on
    /// allocation is.
    pub(super) fn encode(&mut self, start: u64) -> Vec<u8> {
        let mut out = Vec::new();
        if let Some(format) = &self.backing_format {
            put(&mut out, BACKING_FORMAT, format.as_bytes());
        }
        if let Some(name) = &self.data_file {
            put(&mut out, DATA_FILE, name.as_bytes());
        }
        if let Some(crypto) = &self.crypto_header {
            let data = [crypto.offset.to_be_bytes(), crypto.length.to_be_bytes()].concat();
            put(&mut out, CRYPTO_HEADER, &data);
        }
        if let Some(FeatureNames(table)) = &self.feature_names {
            put(&mut out, FEATURE_NAMES, table);
        }
        if let Some(bitmaps) = &self.bitmaps {
            let mut data = Vec::with_capacity(BITMAPS_EXTENSION_BYTES);
            data.extend_from_slice(&bitmaps.nb_bitmaps.to_be_bytes());
            data.extend_from_slice(&bitmaps.reserved.to_be_bytes());
            data.extend_from_slice(&bitmaps.bitmap_directory_size.to_be_bytes());
            data.extend_from_slice(&bitmaps.bitmap_directory_offset.to_be_bytes());
            put(&mut out, BITMAPS, &data);
        }
        if let Some(hint) = &mut self.allocation {
            hint.data_offset = start + (out.len() + PREFIX_BYTES) as u64;
            put(&mut out, ALLOCATION, &hint.encode());
        }
        for extension in &self.unknown {
            put(&mut out, extension.kind, &extension.data);
        }
        put(&mut out, END, &[]);
        out
    }
}

fn put(out: &mut Vec<u8>, kind: u32, data: &[u8]) {
    let len = u32::try_from(data.len()).expect("an extension is smaller than a cluster");
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&len.to_be_bytes());
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(8), 0);
}

/// A string of the header: UTF-8, up to the first zero byte.
pub(super) fn text(data: &[u8], what: &str) -> Result<String, String> {
    let end = data.iter().position(|&b| b == 0).unwrap_or(data.len());
    match std::str::from_utf8(&data[..end]) {
        Ok(text) => Ok(text.to_string()),
        Err(_) => Err(format!("the {what} is not UTF-8")),
    }
}

fn sized<const N: usize>(data: &[u8], what: &str) -> Result<[u8; N], String> {
    data.try_into()
        .map_err(|_| format!("{what} of {} bytes, {N} expected", data.len()))
}

/// Returns `len` bytes at `at`; bytes beyond the end are zero.
pub(super) fn padded(bytes: &[u8], at: usize, len: usize) -> Vec<u8> {
    let start = at.min(bytes.len());
    let end = (at + len).min(bytes.len());
    let mut out = bytes[start..end].to_vec();
    out.resize(len, 0);
    out
}

/// A big-endian number; bytes beyond the end are zero.
pub(super) fn be32(bytes: &[u8], at: usize) -> u32 {
    (at..at + 4).fold(0, |n, i| {
        n << 8 | u32::from(bytes.get(i).copied().unwrap_or(0))
    })
}

/// A big-endian number; bytes beyond the end are zero.
pub(super) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}

/// The compression type of the header's byte.
pub(super) fn compression_type(byte: u8) -> Option<CompressionType> {
    match byte {
        0 => Some(CompressionType::Deflate),
        1 => Some(CompressionType::Zstd),
        _ => None,
    }
}
