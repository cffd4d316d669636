//! Small objects of a store: versions of names, leases of publications, marks of prunings. Each is
//! a line of JSON and a line with its digest, so that people can read it and a damaged one is
//! noticed.

use cowslip_block::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// Longest record in bytes.
pub const RECORD_BYTES_MAX: u64 = 64 << 10;

/// The version of the format of records.
pub const FORMAT: u32 = 1;

/// A version of a name: what gives an index its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct VersionRecord {
    /// [`FORMAT`].
    pub cowslip_published: u32,
    /// The name.
    pub name: String,
    /// The number of the version.
    pub version: u32,
    /// The digest of the index.
    pub index: String,
    /// Length of the index in bytes.
    pub index_bytes: u64,
    /// Length of the disk in bytes.
    pub disk_bytes: u64,
    /// Bytes of the disk's data, zeroes left out.
    pub data_bytes: u64,
    /// Bytes of different chunks as they are stored.
    pub stored_bytes: u64,
    /// Bytes that this publication added, the index among them.
    pub new_bytes: u64,
    /// Different chunks.
    pub chunks: u64,
    /// When it was published, by the clock of the publisher, in seconds since 1970.
    pub published: u64,
    /// The digests of the indexes that it was compared with.
    pub parents: Vec<String>,
    /// The name of a bitmap of the image that has all changes since, where one was begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<String>,
}

/// The mark of a publication that is going on, or has ended: what it may refer to is not pruned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Lease {
    /// [`FORMAT`].
    pub cowslip_lease: u32,
    /// The name that is published.
    pub name: String,
    /// The session, below which its packs are.
    pub session: String,
    /// The digests of the indexes whose chunks it uses.
    pub parents: Vec<String>,
    /// The index that it has written, once it has.
    pub index: Option<String>,
}

/// The mark of a pruning that is going on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PruneMark {
    /// [`FORMAT`].
    pub cowslip_prune: u32,
}

/// The bytes of a record.
///
/// # Panics
/// Never: records have only texts and numbers.
pub fn encode(record: &impl Serialize) -> Vec<u8> {
    let mut text = serde_json::to_string(record).expect("texts and numbers are JSON");
    text.push('\n');
    let digest = Digest::of(text.as_bytes());
    format!("{text}sha256 {digest}\n").into_bytes()
}

/// Reads a record; `name` is for messages.
///
/// # Errors
/// `Corrupt`: the digest is another, or it is no such record.
pub fn decode<T: DeserializeOwned>(bytes: &[u8], name: &str) -> Result<T> {
    let corrupt = |offset: usize, detail: String| Error::Corrupt {
        file: name.to_string(),
        structure: "record",
        offset: offset as u64,
        detail,
    };
    let end = bytes.iter().position(|byte| *byte == b'\n');
    let end = end.map_or(bytes.len(), |end| end + 1);
    let (line, checksum) = bytes.split_at(end);
    if checksum != format!("sha256 {}\n", Digest::of(line)).as_bytes() {
        return Err(corrupt(end, "its checksum is another".to_string()));
    }
    serde_json::from_slice(line).map_err(|why| corrupt(0, why.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_what_was_encoded_and_nothing_else() {
        let mark = PruneMark {
            cowslip_prune: FORMAT,
        };
        let bytes = encode(&mark);
        assert_eq!(decode::<PruneMark>(&bytes, "m").unwrap(), mark);
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 1;
            assert!(decode::<PruneMark>(&wrong, "m").is_err(), "{at}");
            assert!(decode::<PruneMark>(&bytes[..at], "m").is_err(), "{at}");
        }
        let refused = decode::<Lease>(&bytes, "m").unwrap_err().to_string();
        assert!(
            refused.starts_with("'m' is corrupt: record at offset 0x0"),
            "{refused}"
        );
    }
}
