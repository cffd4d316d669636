//! The header of a LUKS volume, version 1: bytes to a value and back. Pure.
//!
//! | at | what | | at | what |
//! | --- | --- | --- | --- | --- |
//! | 0 | `LUKS`, 0xba, 0xbe; version | | 112 | digest of the master key (20 bytes) |
//! | 8 | cipher: `aes` | | 132 | its salt (32), its iterations |
//! | 40 | mode: `xts-plain64` | | 168 | UUID as text (40) |
//! | 72 | hash: `sha256` | | 208 | 8 key slots of 48 bytes: state, |
//! | 104 | sectors before the data | | | iterations, salt, first sector, |
//! | 108 | bytes of the master key | | | stripes |
//!
//! Numbers are big-endian, texts end with a zero byte, sectors have 512 bytes. Headers that QEMU
//! refuses are refused here, and so are more iterations than [`ITERATIONS_MAX`], which would keep a
//! program that opens a stranger's image busy for hours.

use std::ops::Range;

use super::cipher::{CipherMode, IvGenerator, KeySize, SECTOR_BYTES, Spec};
use super::hash::Hash;
use crate::{Error, Result};

/// How a volume begins.
pub use cowslip_block::foreign::LUKS_MAGIC as MAGIC;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 592;
const VERSION: u16 = 1;
/// Key slots of a volume.
pub(super) const SLOTS: usize = 8;
/// Stripes of a split key; other counts are in no volume, and QEMU refuses them.
pub(super) const STRIPES: u32 = 4000;
pub(super) const SALT_BYTES: usize = 32;
pub(super) const DIGEST_BYTES: usize = 20;
/// Where the first slot's stripes are in volumes made here, as in QEMU's and cryptsetup's; slots
/// are whole pages.
pub(super) const KEY_OFFSET: u64 = 4096;
/// Iterations of PBKDF2 at most: about a minute on a processor of today, thirty times what programs
/// choose.
const ITERATIONS_MAX: u32 = 1 << 27;
const SECTOR: u64 = SECTOR_BYTES as u64;
const ACTIVE: u32 = 0x00ac_71f3;
const INACTIVE: u32 = 0x0000_dead;

/// Offsets of fields.
mod at {
    pub const VERSION: usize = 6;
    pub const CIPHER: usize = 8;
    pub const MODE: usize = 40;
    pub const HASH: usize = 72;
    pub const PAYLOAD: usize = 104;
    pub const KEY_BYTES: usize = 108;
    pub const DIGEST: usize = 112;
    pub const DIGEST_SALT: usize = 132;
    pub const DIGEST_ITERATIONS: usize = 164;
    pub const UUID: usize = 168;
    pub const SLOTS: usize = 208;
    /// Offset in a slot.
    pub const ITERATIONS: usize = 4;
    pub const SALT: usize = 8;
    pub const KEY_OFFSET: usize = 40;
    pub const STRIPES: usize = 44;
}
const TEXT_BYTES: usize = 32;
const UUID_BYTES: usize = 40;
const SLOT_BYTES: usize = 48;

/// A slot for the master key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySlot {
    /// Whether it holds the master key.
    pub active: bool,
    /// Iterations of PBKDF2; without meaning if it is not active.
    pub iterations: u32,
    /// Salt of PBKDF2.
    pub salt: [u8; SALT_BYTES],
    /// Where its stripes are, in bytes from the volume's start.
    pub key_offset: u64,
}

impl KeySlot {
    /// Stripes of the key.
    pub const STRIPES: u32 = STRIPES;

    /// The first word of its entry, which says whether it is active.
    pub(super) fn state(&self) -> [u8; 4] {
        let state = if self.active { ACTIVE } else { INACTIVE };
        state.to_be_bytes()
    }

    /// Its entry in the header.
    pub(super) fn encode(&self) -> [u8; SLOT_BYTES] {
        let mut out = [0; SLOT_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.state());
        put(at::ITERATIONS, &self.iterations.to_be_bytes());
        put(at::SALT, &self.salt);
        put(at::KEY_OFFSET, &sectors(self.key_offset));
        put(at::STRIPES, &STRIPES.to_be_bytes());
        out
    }
}

/// A header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// How sectors are encrypted.
    pub spec: Spec,
    /// The hash of all that is derived and split.
    pub hash: Hash,
    /// Where the data begins, in bytes from the volume's start.
    pub payload_offset: u64,
    /// Digest that recognises the master key.
    pub digest: [u8; DIGEST_BYTES],
    /// Its salt.
    pub digest_salt: [u8; SALT_BYTES],
    /// Its iterations.
    pub digest_iterations: u32,
    /// The volume's UUID.
    pub uuid: String,
    /// The key slots.
    pub slots: [KeySlot; SLOTS],
}

impl Header {
    /// Bytes of the split master key.
    pub(super) fn split_bytes(&self) -> usize {
        self.spec.key_bytes() * STRIPES as usize
    }

    /// The same in whole sectors.
    pub(super) fn material_bytes(&self) -> u64 {
        (self.split_bytes() as u64).next_multiple_of(SECTOR)
    }

    /// Bytes from one slot's stripes to the next one's, in volumes made here.
    pub(super) fn slot_bytes(key_bytes: usize) -> u64 {
        (key_bytes as u64 * u64::from(STRIPES)).next_multiple_of(KEY_OFFSET)
    }

    /// The header at the start of the volume that is in these bytes of a file.
    ///
    /// # Errors
    /// `Corrupt` with the offset in the file; `Unsupported` by name.
    pub fn parse(bytes: &[u8], place: &Range<u64>, file: &str) -> Result<Header> {
        let parser = Parser { bytes, place, file };
        if bytes.len() < HEADER_BYTES {
            return Err(parser.corrupt(0, "it is shorter than a header".to_string()));
        }
        if bytes[..MAGIC.len()] != MAGIC {
            return Err(parser.corrupt(0, "Volume is not in LUKS format".to_string()));
        }
        let version = u16::from_be_bytes([bytes[at::VERSION], bytes[at::VERSION + 1]]);
        if version != VERSION {
            return Err(parser.unsupported(format!("LUKS version {version}")));
        }
        let spec = parser.spec()?;
        let hash = parser.hash(at::HASH, parser.text(at::HASH, TEXT_BYTES)?)?;
        let header = Header {
            spec,
            hash,
            payload_offset: u64::from(parser.u32(at::PAYLOAD)) * SECTOR,
            digest: parser.array(at::DIGEST),
            digest_salt: parser.array(at::DIGEST_SALT),
            digest_iterations: parser.iterations(at::DIGEST_ITERATIONS)?,
            uuid: parser.text(at::UUID, UUID_BYTES)?.to_string(),
            slots: parser.slots()?,
        };
        parser.places(&header)?;
        Ok(header)
    }

    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; HEADER_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(at::VERSION, &VERSION.to_be_bytes());
        put(at::CIPHER, b"aes");
        put(at::MODE, mode_text(&self.spec).as_bytes());
        put(at::HASH, self.hash.name().as_bytes());
        put(at::PAYLOAD, &sectors(self.payload_offset));
        put(at::KEY_BYTES, &(self.spec.key_bytes() as u32).to_be_bytes());
        put(at::DIGEST, &self.digest);
        put(at::DIGEST_SALT, &self.digest_salt);
        put(at::DIGEST_ITERATIONS, &self.digest_iterations.to_be_bytes());
        put(at::UUID, self.uuid.as_bytes());
        for (index, slot) in self.slots.iter().enumerate() {
            put(Header::slot_at(index), &slot.encode());
        }
        out
    }

    /// Where a slot's entry is in the header.
    pub(super) fn slot_at(index: usize) -> usize {
        at::SLOTS + index * SLOT_BYTES
    }
}

/// An offset as headers have it.
fn sectors(bytes: u64) -> [u8; 4] {
    let sectors = u32::try_from(bytes / SECTOR).expect("offsets of headers are small");
    sectors.to_be_bytes()
}

fn mode_text(spec: &Spec) -> String {
    let mode = match spec.mode {
        CipherMode::Xts => "xts",
        CipherMode::Cbc => "cbc",
    };
    match spec.iv {
        IvGenerator::Plain => format!("{mode}-plain"),
        IvGenerator::Plain64 => format!("{mode}-plain64"),
        IvGenerator::Essiv(hash) => format!("{mode}-essiv:{}", hash.name()),
    }
}

struct Parser<'a> {
    bytes: &'a [u8],
    place: &'a Range<u64>,
    file: &'a str,
}

impl<'a> Parser<'a> {
    fn corrupt(&self, at: usize, detail: String) -> Error {
        Error::Corrupt {
            file: self.file.to_string(),
            structure: "LUKS header",
            offset: self.place.start + at as u64,
            detail,
        }
    }

    fn unsupported(&self, feature: String) -> Error {
        Error::Unsupported {
            file: self.file.to_string(),
            feature: feature.into(),
        }
    }

    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        std::array::from_fn(|index| self.bytes[at + index])
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.array(at))
    }

    fn text(&self, at: usize, len: usize) -> Result<&'a str> {
        let field = &self.bytes[at..at + len];
        let ended = field.iter().position(|&byte| byte == 0);
        let text = ended
            .map(|end| &field[..end])
            .filter(|text| text.iter().all(|byte| byte.is_ascii_graphic()));
        let text = text.and_then(|text| std::str::from_utf8(text).ok());
        text.ok_or_else(|| {
            self.corrupt(at, "a text is not terminated, or not printable".to_string())
        })
    }

    fn hash(&self, at: usize, name: &str) -> Result<Hash> {
        match Hash::from_name(name) {
            Some(hash) => Ok(hash),
            None if name.is_empty() => Err(self.corrupt(at, "a hash without a name".to_string())),
            None => Err(self.unsupported(format!("LUKS with the hash '{name}'"))),
        }
    }

    fn spec(&self) -> Result<Spec> {
        let cipher = self.text(at::CIPHER, TEXT_BYTES)?;
        let text = self.text(at::MODE, TEXT_BYTES)?;
        let refused = || self.unsupported(format!("LUKS with the cipher '{cipher}-{text}'"));
        if cipher != "aes" {
            return Err(refused());
        }
        let (mode, iv) = text.split_once('-').ok_or_else(refused)?;
        let mode = match mode {
            "xts" => CipherMode::Xts,
            "cbc" => CipherMode::Cbc,
            _ => return Err(refused()),
        };
        let iv = match (mode, iv.split_once(':')) {
            (_, None) if iv == "plain" => IvGenerator::Plain,
            (_, None) if iv == "plain64" => IvGenerator::Plain64,
            (CipherMode::Cbc, Some(("essiv", hash))) => {
                IvGenerator::Essiv(self.hash(at::MODE, hash)?)
            }
            _ => return Err(refused()),
        };
        let key_bytes = self.u32(at::KEY_BYTES);
        let specs = KeySize::ALL.map(|(_, key_size)| Spec { key_size, mode, iv });
        let spec = specs
            .into_iter()
            .find(|spec| spec.key_bytes() as u32 == key_bytes);
        let spec = spec.ok_or_else(|| {
            let detail = format!("a key of {key_bytes} bytes for aes-{text}");
            self.corrupt(at::KEY_BYTES, detail)
        })?;
        match spec.is_possible() {
            true => Ok(spec),
            false => Err(refused()),
        }
    }

    fn iterations(&self, at: usize) -> Result<u32> {
        match self.u32(at) {
            0 => Err(self.corrupt(at, "the iteration count is zero".to_string())),
            count if count > ITERATIONS_MAX => {
                let text = format!("LUKS with {count} iterations (more than {ITERATIONS_MAX})");
                Err(self.unsupported(text))
            }
            count => Ok(count),
        }
    }

    fn slots(&self) -> Result<[KeySlot; SLOTS]> {
        let mut slots = std::array::from_fn(|_| KeySlot {
            active: false,
            iterations: 0,
            salt: [0; SALT_BYTES],
            key_offset: 0,
        });
        for (index, slot) in slots.iter_mut().enumerate() {
            *slot = self.slot(index)?;
        }
        Ok(slots)
    }

    fn slot(&self, index: usize) -> Result<KeySlot> {
        let start = Header::slot_at(index);
        let active = match self.u32(start) {
            ACTIVE => true,
            INACTIVE => false,
            _ => {
                let detail = format!("key slot {index} is neither active nor inactive");
                return Err(self.corrupt(start, detail));
            }
        };
        let stripes = self.u32(start + at::STRIPES);
        if stripes != STRIPES {
            let detail = format!("key slot {index} has {stripes} stripes, not {STRIPES}");
            return Err(self.corrupt(start + at::STRIPES, detail));
        }
        Ok(KeySlot {
            active,
            iterations: match active {
                true => self.iterations(start + at::ITERATIONS)?,
                false => self.u32(start + at::ITERATIONS),
            },
            salt: self.array(start + at::SALT),
            key_offset: u64::from(self.u32(start + at::KEY_OFFSET)) * SECTOR,
        })
    }

    /// The slots lie behind the header, before the data, in the file, and not in each other.
    fn places(&self, header: &Header) -> Result<()> {
        if header.payload_offset == 0 {
            return Err(self.unsupported("a detached LUKS header".to_string()));
        }
        let len = self.place.end - self.place.start;
        let end = header.payload_offset.min(len);
        let mut ends_before = (HEADER_BYTES as u64).next_multiple_of(SECTOR);
        let mut order: Vec<usize> = (0..SLOTS).collect();
        order.sort_by_key(|&index| header.slots[index].key_offset);
        for index in order {
            let slot = &header.slots[index];
            let slot_end = slot.key_offset + header.material_bytes();
            if slot.key_offset < ends_before || slot_end > end {
                let field = Header::slot_at(index) + at::KEY_OFFSET;
                let detail = format!(
                    "key slot {index} ({:#x} to {slot_end:#x}) overlaps the header, another slot or the data, or lies \
                     beyond the end",
                    slot.key_offset
                );
                return Err(self.corrupt(field, detail));
            }
            ends_before = slot_end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
