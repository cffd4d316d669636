//! Sectors of 512 bytes under AES: XTS, and CBC for older volumes. Pure.
//!
//! A sector's *initialisation vector* comes from its number, so that equal sectors in two places
//! differ. XTS encrypts the vector under a second key, multiplies it by x for each further block of
//! the sector, and adds it before and after the cipher (IEEE 1619). CBC adds to each block the one
//! before, encrypted.
//!
//! XTS works on all 32 blocks of a sector at once, which is what the processor's AES units want.

use std::fmt;

use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit, consts::U16};
use aes::{Aes128, Aes192, Aes256};
use zeroize::Zeroizing;

use cowslip_block::file::Cipher;

use super::hash::Hash;
use super::passphrase::Passphrase;

/// Bytes that have one vector.
pub const SECTOR_BYTES: usize = 512;
/// Bits of a sector's number. A block of a device that reaches beyond what is encrypted may begin
/// before sector 0; its numbers count up to there, modulo as many sectors as 2^64 bytes have.
const NUMBER_BITS: u32 = u64::BITS - SECTOR_BYTES.ilog2();
const BLOCK_BYTES: usize = 16;
const BLOCKS: usize = SECTOR_BYTES / BLOCK_BYTES;

type Block = Array<u8, U16>;

/// Key size of AES.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeySize {
    /// Keys of 128 bits.
    Aes128,
    /// Keys of 192 bits.
    Aes192,
    /// Keys of 256 bits.
    Aes256,
}

impl KeySize {
    /// All, by the names that QEMU has for them.
    pub const ALL: [(&'static str, KeySize); 3] = [
        ("aes-128", KeySize::Aes128),
        ("aes-192", KeySize::Aes192),
        ("aes-256", KeySize::Aes256),
    ];

    /// Bytes of a key.
    pub fn bytes(self) -> usize {
        match self {
            KeySize::Aes128 => 16,
            KeySize::Aes192 => 24,
            KeySize::Aes256 => 32,
        }
    }
}

/// How the blocks of a sector hang together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CipherMode {
    /// Two keys.
    Xts,
    /// CBC, with one key.
    Cbc,
}

/// Source of a sector's initialization vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IvGenerator {
    /// The low 32 bits of its number: repeats after 2 TiB.
    Plain,
    /// Its number.
    Plain64,
    /// Its number, encrypted under this hash of the key.
    Essiv(Hash),
}

/// How sectors are encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Key size of AES.
    pub key_size: KeySize,
    /// How blocks hang together.
    pub mode: CipherMode,
    /// Source of the initialization vectors.
    pub iv: IvGenerator,
}

impl Spec {
    /// Bytes of the master key.
    pub fn key_bytes(&self) -> usize {
        match self.mode {
            CipherMode::Xts => 2 * self.key_size.bytes(),
            CipherMode::Cbc => self.key_size.bytes(),
        }
    }

    /// Whether these go together: a hash makes vectors only of CBC, and if it is as long as a key
    /// of AES.
    pub fn is_possible(&self) -> bool {
        match (self.mode, self.iv) {
            (_, IvGenerator::Plain | IvGenerator::Plain64) => true,
            (CipherMode::Cbc, IvGenerator::Essiv(hash)) => Aes::fits(hash.bytes()),
            (CipherMode::Xts, IvGenerator::Essiv(_)) => false,
        }
    }
}

/// AES under one key.
enum Aes {
    Of128(Aes128),
    Of192(Aes192),
    Of256(Aes256),
}

impl Aes {
    fn fits(bytes: usize) -> bool {
        KeySize::ALL.iter().any(|(_, size)| size.bytes() == bytes)
    }

    fn new(key: &[u8]) -> Aes {
        let fits = "the key's length was checked";
        match key.len() {
            16 => Aes::Of128(Aes128::new_from_slice(key).expect(fits)),
            24 => Aes::Of192(Aes192::new_from_slice(key).expect(fits)),
            _ => Aes::Of256(Aes256::new_from_slice(key).expect(fits)),
        }
    }

    fn encrypt(&self, blocks: &mut [Block]) {
        match self {
            Aes::Of128(aes) => aes.encrypt_blocks(blocks),
            Aes::Of192(aes) => aes.encrypt_blocks(blocks),
            Aes::Of256(aes) => aes.encrypt_blocks(blocks),
        }
    }

    fn decrypt(&self, blocks: &mut [Block]) {
        match self {
            Aes::Of128(aes) => aes.decrypt_blocks(blocks),
            Aes::Of192(aes) => aes.decrypt_blocks(blocks),
            Aes::Of256(aes) => aes.decrypt_blocks(blocks),
        }
    }
}

/// The cipher of a volume's sectors. Its keys are wiped when it is dropped.
pub struct SectorCipher {
    data: Aes,
    /// XTS: the second key. CBC with vectors by a hash: that hash of the key.
    vectors: Option<Aes>,
    spec: Spec,
}

impl fmt::Debug for SectorCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SectorCipher({:?})", self.spec)
    }
}

/// Encryption or decryption.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Encrypt,
    Decrypt,
}

impl Cipher for SectorCipher {
    fn encrypt(&self, first_sector: u64, bytes: &mut [u8]) {
        self.apply(first_sector, bytes, Direction::Encrypt);
    }

    fn decrypt(&self, first_sector: u64, bytes: &mut [u8]) {
        self.apply(first_sector, bytes, Direction::Decrypt);
    }
}

impl SectorCipher {
    /// The cipher of this key, which has [`Spec::key_bytes`].
    pub(super) fn new(spec: Spec, key: &[u8]) -> SectorCipher {
        assert_eq!(key.len(), spec.key_bytes(), "the header fixes the length");
        let (data, rest) = key.split_at(spec.key_size.bytes());
        let vectors = match (spec.mode, spec.iv) {
            (CipherMode::Xts, _) => Some(Aes::new(rest)),
            (CipherMode::Cbc, IvGenerator::Essiv(hash)) => {
                let mut salt = Zeroizing::new([0; Hash::BYTES_MAX]);
                let salt = &mut salt[..hash.bytes()];
                hash.digest(&[data], salt);
                Some(Aes::new(salt))
            }
            (CipherMode::Cbc, _) => None,
        };
        SectorCipher {
            data: Aes::new(data),
            vectors,
            spec,
        }
    }

    /// The cipher of qcow2's encryption method 1, which has no header: the first 16 bytes of the
    /// password are the key, or all of it and zeroes.
    pub fn of_password(password: &Passphrase) -> SectorCipher {
        let spec = Spec {
            key_size: KeySize::Aes128,
            mode: CipherMode::Cbc,
            iv: IvGenerator::Plain64,
        };
        let mut key = Zeroizing::new([0; 16]);
        let len = password.bytes().len().min(key.len());
        key[..len].copy_from_slice(&password.bytes()[..len]);
        SectorCipher::new(spec, &key[..])
    }

    fn apply(&self, first_sector: u64, bytes: &mut [u8], direction: Direction) {
        let mut sectors = bytes.chunks_exact_mut(SECTOR_BYTES);
        for (number, sector) in (first_sector..).zip(&mut sectors) {
            let (blocks, _) = Block::slice_as_chunks_mut(sector);
            let vector = self.vector(number & ((1 << NUMBER_BITS) - 1));
            match (self.spec.mode, direction) {
                (CipherMode::Xts, _) => self.xts(vector, blocks, direction),
                (CipherMode::Cbc, Direction::Encrypt) => self.chain(vector, blocks),
                (CipherMode::Cbc, Direction::Decrypt) => self.unchain(vector, blocks),
            }
        }
        assert!(sectors.into_remainder().is_empty(), "whole sectors");
    }

    fn vector(&self, sector: u64) -> u128 {
        let number = match self.spec.iv {
            IvGenerator::Plain => u128::from(sector as u32),
            IvGenerator::Plain64 | IvGenerator::Essiv(_) => u128::from(sector),
        };
        let number = match (self.spec.mode, self.spec.iv) {
            // XTS with vectors by a hash is in no volume: the header's parser refuses it.
            (CipherMode::Cbc, IvGenerator::Plain | IvGenerator::Plain64) => return number,
            (CipherMode::Xts, _) | (CipherMode::Cbc, IvGenerator::Essiv(_)) => number,
        };
        let mut block = [Block::from(number.to_le_bytes())];
        let vectors = self.vectors.as_ref().expect("made with the cipher");
        vectors.encrypt(&mut block);
        word(&block[0])
    }

    fn xts(&self, vector: u128, blocks: &mut [Block], direction: Direction) {
        let mut tweaks = [0u128; BLOCKS];
        let mut tweak = vector;
        for slot in &mut tweaks {
            *slot = tweak;
            tweak = times_x(tweak);
        }
        mix(blocks, &tweaks);
        match direction {
            Direction::Encrypt => self.data.encrypt(blocks),
            Direction::Decrypt => self.data.decrypt(blocks),
        }
        mix(blocks, &tweaks);
    }

    fn chain(&self, vector: u128, blocks: &mut [Block]) {
        let mut before = vector;
        for block in blocks {
            let block = std::slice::from_mut(block);
            mix(block, &[before]);
            self.data.encrypt(block);
            before = word(&block[0]);
        }
    }

    fn unchain(&self, vector: u128, blocks: &mut [Block]) {
        let mut before = [0u128; BLOCKS];
        before[0] = vector;
        for (slot, block) in before[1..].iter_mut().zip(&*blocks) {
            *slot = word(block);
        }
        self.data.decrypt(blocks);
        mix(blocks, &before);
    }
}

fn word(block: &Block) -> u128 {
    u128::from_le_bytes((*block).into())
}

fn mix(blocks: &mut [Block], words: &[u128]) {
    for (block, other) in blocks.iter_mut().zip(words) {
        *block = Block::from((word(block) ^ other).to_le_bytes());
    }
}

/// Multiplication by x in the field of 2^128 elements that IEEE 1619 names.
fn times_x(word: u128) -> u128 {
    const REDUCED: u128 = 0x87;
    (word << 1) ^ (REDUCED & 0u128.wrapping_sub(word >> 127))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        (0..hex.len()).step_by(2).map(byte).collect()
    }

    fn spec(key_size: KeySize, mode: CipherMode, iv: IvGenerator) -> Spec {
        Spec { key_size, mode, iv }
    }

    /// IEEE 1619-2007, annex B, vectors 4 and 10.
    #[test]
    fn xts_is_that_of_the_standard() {
        let plain: Vec<u8> = (0..SECTOR_BYTES).map(|at| at as u8).collect();
        for (key_size, key, sector, start) in [
            (
                KeySize::Aes128,
                "2718281828459045235360287471352631415926535897932384626433832795",
                0,
                "27a7479befa1d476489f308cd4cfa6e2a96e4bbe3208ff25287dd3819616e89c",
            ),
            (
                KeySize::Aes256,
                "2718281828459045235360287471352662497757247093699959574966967627\
                 3141592653589793238462643383279502884197169399375105820974944592",
                0xff,
                "1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b",
            ),
        ] {
            let spec = spec(key_size, CipherMode::Xts, IvGenerator::Plain64);
            let cipher = SectorCipher::new(spec, &bytes(key));
            let mut sectors = plain.clone();
            cipher.encrypt(sector, &mut sectors);
            assert_eq!(sectors[..32], bytes(start), "{key_size:?}");
            cipher.decrypt(sector, &mut sectors);
            assert_eq!(sectors, plain);
        }
    }

    #[test]
    fn what_is_encrypted_is_decrypted_and_no_two_sectors_are_alike() {
        let modes = [
            (CipherMode::Xts, IvGenerator::Plain64),
            (CipherMode::Xts, IvGenerator::Plain),
            (CipherMode::Cbc, IvGenerator::Plain64),
            (CipherMode::Cbc, IvGenerator::Essiv(Hash::Sha256)),
        ];
        for (_, key_size) in KeySize::ALL {
            for (mode, iv) in modes {
                let spec = spec(key_size, mode, iv);
                let key: Vec<u8> = (0..spec.key_bytes()).map(|at| (at * 7) as u8).collect();
                let cipher = SectorCipher::new(spec, &key);
                let plain = vec![0x5a; 3 * SECTOR_BYTES];
                let mut all = plain.clone();
                cipher.encrypt(9, &mut all);
                let (first, rest) = all.split_at(SECTOR_BYTES);
                assert!(!rest.starts_with(first), "{spec:?}");
                let mut last = plain[..SECTOR_BYTES].to_vec();
                cipher.encrypt(11, &mut last);
                assert_eq!(all[2 * SECTOR_BYTES..], last);
                cipher.decrypt(9, &mut all);
                assert_eq!(all, plain, "{spec:?}");
            }
        }
    }

    #[test]
    fn a_password_is_a_key_cut_or_filled_up() {
        let cipher = |password: &str| SectorCipher::of_password(&Passphrase::new(password.into()));
        let encrypted = |password: &str| {
            let mut sector = vec![0x0a; SECTOR_BYTES];
            cipher(password).encrypt(7, &mut sector);
            sector
        };
        let long = "astrochicken-and-more";
        assert_eq!(encrypted(long), encrypted(&long[..16]));
        assert_ne!(encrypted(long), encrypted(&long[..15]));
        assert_eq!(encrypted("abc"), encrypted("abc\0\0\0"));
        let key = bytes("617374726f636869636b656e00000000");
        let spec = spec(KeySize::Aes128, CipherMode::Cbc, IvGenerator::Plain64);
        let mut sector = vec![0x0a; SECTOR_BYTES];
        SectorCipher::new(spec, &key).encrypt(7, &mut sector);
        assert_eq!(encrypted("astrochicken"), sector);
    }

    #[test]
    fn numbers_before_the_first_sector_count_up_to_it() {
        let cipher = SectorCipher::of_password(&Passphrase::new(b"abc".to_vec()));
        let mut across = vec![3; 2 * SECTOR_BYTES];
        let before = 0u64.wrapping_sub(SECTOR_BYTES as u64) / SECTOR_BYTES as u64;
        cipher.encrypt(before, &mut across);
        let mut first = vec![3; SECTOR_BYTES];
        cipher.encrypt(0, &mut first);
        assert_eq!(across[SECTOR_BYTES..], first);
        cipher.decrypt(before, &mut across);
        assert_eq!(across, [3; 2 * SECTOR_BYTES]);
    }

    #[test]
    fn keys_are_in_no_debug_output() {
        let spec = spec(KeySize::Aes128, CipherMode::Xts, IvGenerator::Plain64);
        let text = format!("{:?}", SectorCipher::new(spec, &[0xab; 32]));
        assert!(!text.contains("171") && !text.contains("ab"), "{text}");
        let passphrase = super::super::passphrase::Passphrase::new(b"hunter2".to_vec());
        assert_eq!(format!("{passphrase:?}"), "Passphrase(..)");
    }
}
