//! A second opinion on encrypted disks: what a passphrase makes of the bytes of a file, by the
//! formats' own rules and without the engine's code.
//!
//! Knows what runs make: AES-128 in CBC or XTS, vectors that are the sector's number in 64 bits,
//! SHA-1, key slots of one iteration. The number of a sector is its place in the file for LUKS in a
//! qcow2 image, and its place on the disk in QEMU's old way.

use aes::Aes128;
use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit, consts::U16};
use hmac::{Hmac, Mac};
use sha1::{Digest, Sha1};

use crate::disk::content::Content;

type Block = Array<u8, U16>;

/// The passphrase of the images of all runs.
pub const PASSPHRASE: &[u8] = b"open, sesame";
const SECTOR: usize = 512;
const BLOCKS: usize = SECTOR / 16;
const STRIPES: usize = 4000;
const DIGEST: usize = 20;

/// The origin that a sector's number counts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbering {
    /// The start of the file that holds it.
    File,
    /// The start of the guest's disk.
    Disk,
}

/// The cipher of an image's guest data.
#[derive(Clone)]
pub struct Cipher {
    data: Aes128,
    /// The second key, for XTS.
    tweak: Option<Aes128>,
    numbering: Numbering,
}

impl std::fmt::Debug for Cipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cipher({:?})", self.numbering)
    }
}

fn aes(key: &[u8]) -> Aes128 {
    Aes128::new_from_slice(key).expect("keys have 16 bytes")
}

/// PBKDF2 of one iteration: HMAC of the salt and the number of the part, part after part.
fn derive(secret: &[u8], salt: &[u8], key: &mut [u8]) {
    for (number, part) in (1u32..).zip(key.chunks_mut(DIGEST)) {
        let mut hmac = <Hmac<Sha1> as hmac::KeyInit>::new_from_slice(secret).expect("any length");
        hmac.update(salt);
        hmac.update(&number.to_be_bytes());
        part.copy_from_slice(&hmac.finalize().into_bytes()[..part.len()]);
    }
}

/// The key that the stripes were made of.
fn merge(stripes: &[u8], key_bytes: usize) -> Vec<u8> {
    let mut key = vec![0; key_bytes];
    for (index, stripe) in stripes.chunks_exact(key_bytes).take(STRIPES).enumerate() {
        key.iter_mut().zip(stripe).for_each(|(k, s)| *k ^= s);
        if index + 1 == STRIPES {
            break;
        }
        for (number, part) in (0u32..).zip(key.chunks_mut(DIGEST)) {
            let digest = Sha1::new()
                .chain_update(number.to_be_bytes())
                .chain_update(&part)
                .finalize();
            part.copy_from_slice(&digest[..part.len()]);
        }
    }
    key
}

impl Cipher {
    /// Returns the cipher of QEMU's old encryption: the passphrase is the key, cut or filled with
    /// zeroes.
    fn of_passphrase() -> Cipher {
        let mut key = [0; 16];
        key[..PASSPHRASE.len()].copy_from_slice(PASSPHRASE);
        Cipher {
            data: aes(&key),
            tweak: None,
            numbering: Numbering::Disk,
        }
    }

    fn of_key(key: &[u8], numbering: Numbering) -> Cipher {
        Cipher {
            data: aes(&key[..16]),
            tweak: (key.len() == 32).then(|| aes(&key[16..])),
            numbering,
        }
    }

    /// The cipher of a qcow2 image, if it is encrypted.
    ///
    /// # Errors
    /// What is wrong with its keys.
    pub fn of_image(content: &Content) -> Result<Option<Cipher>, String> {
        match content.number(32, 4) {
            0 => Ok(None),
            1 => Ok(Some(Cipher::of_passphrase())),
            _ => {
                let (at, _) = crate::inspect::crypto_header(content).ok_or("there are no keys")?;
                Cipher::unlock(content, at).map(Some)
            }
        }
    }

    /// The cipher of a LUKS volume of its own, and where its data begins. `None` if it is none.
    ///
    /// # Errors
    /// What is wrong with its keys.
    pub fn of_volume(content: &Content) -> Result<Option<(Cipher, u64)>, String> {
        if content.bytes(0, 6) != *b"LUKS\xba\xbe" {
            return Ok(None);
        }
        let cipher = Cipher::unlock(content, 0)?;
        let start = content.number(104, 4) * SECTOR as u64;
        // Its sectors count from there, as those of the disk do.
        let numbering = Numbering::Disk;
        Ok(Some((
            Cipher {
                numbering,
                ..cipher
            },
            start,
        )))
    }

    /// Opens key slot 0 of the LUKS volume at `at`.
    fn unlock(content: &Content, at: u64) -> Result<Cipher, String> {
        let field = |offset, bytes| content.number(at + offset, bytes);
        let mode = content.bytes(at + 40, 32);
        let key_bytes = field(108, 4) as usize;
        let is_known = content.bytes(at, 6) == *b"LUKS\xba\xbe"
            && (mode.starts_with(b"cbc-plain64\0") && key_bytes == 16
                || mode.starts_with(b"xts-plain64\0") && key_bytes == 32);
        if !is_known || field(164, 4) != 1 || field(208 + 4, 4) != 1 {
            return Err("another LUKS volume than runs make".to_string());
        }
        let mut slot_key = vec![0; key_bytes];
        derive(PASSPHRASE, &content.bytes(at + 208 + 8, 32), &mut slot_key);
        let len = (key_bytes * STRIPES).next_multiple_of(SECTOR);
        let mut stripes = content.bytes(at + field(208 + 40, 4) * SECTOR as u64, len);
        // Key slots count their sectors by themselves.
        Cipher::of_key(&slot_key, Numbering::File).decrypt(0, &mut stripes);
        let key = merge(&stripes[..key_bytes * STRIPES], key_bytes);
        let mut digest = [0; DIGEST];
        derive(&key, &content.bytes(at + 132, 32), &mut digest);
        match content.bytes(at + 112, DIGEST) == digest {
            true => Ok(Cipher::of_key(&key, Numbering::File)),
            false => Err("the passphrase does not open the keys".to_string()),
        }
    }

    /// Decrypts bytes that are at `host` in their file and at `guest` for the guest, whole sectors.
    pub fn read(&self, (host, guest): (u64, u64), bytes: &mut [u8]) {
        let at = match self.numbering {
            Numbering::File => host,
            Numbering::Disk => guest,
        };
        self.decrypt(at / SECTOR as u64, bytes);
    }

    fn decrypt(&self, first: u64, bytes: &mut [u8]) {
        for (number, sector) in (first..).zip(bytes.chunks_exact_mut(SECTOR)) {
            let mut vector = Block::from(u128::from(number).to_le_bytes());
            match &self.tweak {
                None => self.unchain(vector, sector),
                Some(tweak) => {
                    tweak.encrypt_block(&mut vector);
                    self.unmix(vector, sector);
                }
            }
        }
    }

    /// CBC.
    fn unchain(&self, vector: Block, sector: &mut [u8]) {
        let (blocks, _) = Block::slice_as_chunks_mut(sector);
        let crypted: [Block; BLOCKS] = std::array::from_fn(|index| blocks[index]);
        self.data.decrypt_blocks(blocks);
        let before = std::iter::once(&vector).chain(&crypted);
        for (block, before) in blocks.iter_mut().zip(before) {
            block.iter_mut().zip(before).for_each(|(a, b)| *a ^= b);
        }
    }

    /// XTS.
    fn unmix(&self, vector: Block, sector: &mut [u8]) {
        let mut tweak = u128::from_le_bytes(vector.into());
        let tweaks: [Block; BLOCKS] = std::array::from_fn(|_| {
            let this = Block::from(tweak.to_le_bytes());
            tweak = tweak << 1 ^ if tweak >> 127 == 1 { 0x87 } else { 0 };
            this
        });
        let (blocks, _) = Block::slice_as_chunks_mut(sector);
        let mix = |blocks: &mut [Block]| {
            for (block, tweak) in blocks.iter_mut().zip(&tweaks) {
                block.iter_mut().zip(tweak).for_each(|(a, b)| *a ^= b);
            }
        };
        mix(blocks);
        self.data.decrypt_blocks(blocks);
        mix(blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// IEEE 1619, vector 1: all of it zeroes.
    #[test]
    fn a_known_sector_is_decrypted() {
        let cipher = Cipher::of_key(&[0; 32], Numbering::File);
        let mut sector = [0; SECTOR];
        let known = [
            0x91, 0x7c, 0xf6, 0x9e, 0xbd, 0x68, 0xb2, 0xec, 0x9b, 0x9f, 0xe9, 0xa3, 0xea, 0xdd,
            0xa6, 0x92, 0xcd, 0x43, 0xd2, 0xf5, 0x95, 0x98, 0xed, 0x85, 0x8c, 0x02, 0xc2, 0x65,
            0x2f, 0xbf, 0x92, 0x2e,
        ];
        sector[..32].copy_from_slice(&known);
        cipher.read((0, 512), &mut sector);
        assert_eq!(sector[..32], [0; 32]);
    }
}
