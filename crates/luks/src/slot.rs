//! Key slots: a master key split, encrypted under a passphrase, and got back. Pure.
//!
//! *Splitting* makes a key of n bytes into 4000 stripes of n bytes, all of which are needed to have
//! it again, so that overwriting any of them destroys it. All stripes but the last are random;
//! between them the sum so far is hashed, piece by piece.

use std::fmt;
use std::io;

use zeroize::Zeroizing;

use cowslip_block::file::Cipher as _;

use super::cipher::{CipherMode, IvGenerator, KeySize, SectorCipher, Spec};
use super::derive::{derive, work_bytes};
use super::hash::Hash;
use super::header::{DIGEST_BYTES, Header, KEY_OFFSET, KeySlot, SALT_BYTES, SLOTS, STRIPES};
use super::passphrase::Passphrase;
use crate::job::Job;
use crate::{Error, Result};

pub(super) type Key = Zeroizing<Vec<u8>>;

/// Reason why a derivation without an attendant does not fail.
const UNATTENDED: &str = "nobody cancels this job";

/// Where unpredictable bytes come from: fills the slice, or fails.
pub type Entropy<'a> = &'a mut dyn FnMut(&mut [u8]) -> io::Result<()>;

/// Runs this many iterations of PBKDF2 as for an active key slot, to measure their time.
pub fn iterations_run(hash: Hash, spec: &Spec, iterations: u32) {
    let mut key = Zeroizing::new(vec![0; spec.key_bytes()]);
    let cost = (&[0; SALT_BYTES][..], iterations);
    derive(hash, b"passphrase", cost, (&mut key, &Job::default())).expect(UNATTENDED);
}

/// Diffuses the running sum between two stripes.
fn diffuse(hash: Hash, block: &mut [u8]) {
    for (index, piece) in block.chunks_mut(hash.bytes()).enumerate() {
        let mut digest = Zeroizing::new([0; Hash::BYTES_MAX]);
        let digest = &mut digest[..hash.bytes()];
        hash.digest(&[&(index as u32).to_be_bytes(), piece], digest);
        let len = piece.len();
        piece.copy_from_slice(&digest[..len]);
    }
}

fn add(sum: &mut [u8], stripe: &[u8]) {
    for (byte, other) in sum.iter_mut().zip(stripe) {
        *byte ^= other;
    }
}

/// The sum of all stripes but the last.
fn sum(hash: Hash, stripes: &[u8], key_bytes: usize) -> Key {
    let mut sum = Zeroizing::new(vec![0; key_bytes]);
    for stripe in stripes.chunks_exact(key_bytes).take(STRIPES as usize - 1) {
        add(&mut sum, stripe);
        diffuse(hash, &mut sum);
    }
    sum
}

fn merge(hash: Hash, stripes: &[u8], key_bytes: usize) -> Key {
    let mut key = sum(hash, stripes, key_bytes);
    add(&mut key, &stripes[stripes.len() - key_bytes..]);
    key
}

fn split(hash: Hash, key: &[u8], entropy: Entropy<'_>) -> io::Result<Key> {
    let mut stripes = Zeroizing::new(vec![0; key.len() * STRIPES as usize]);
    let random = stripes.len() - key.len();
    entropy(&mut stripes[..random])?;
    let mut last = sum(hash, &stripes, key.len());
    add(&mut last, key);
    stripes[random..].copy_from_slice(&last);
    Ok(stripes)
}

/// The cipher of a slot's stripes.
fn slot_cipher(
    header: &Header,
    slot: &KeySlot,
    (passphrase, job): (&Passphrase, &Job),
) -> Result<SectorCipher> {
    let mut key = Zeroizing::new(vec![0; header.spec.key_bytes()]);
    let cost = (&slot.salt[..], slot.iterations);
    derive(header.hash, passphrase.bytes(), cost, (&mut key[..], job))?;
    Ok(SectorCipher::new(header.spec, &key))
}

fn digest(header: &Header, key: &[u8], job: &Job) -> Result<[u8; DIGEST_BYTES]> {
    let mut digest = [0; DIGEST_BYTES];
    let cost = (&header.digest_salt[..], header.digest_iterations);
    derive(header.hash, key, cost, (&mut digest[..], job))?;
    Ok(digest)
}

/// Bytes of progress that deriving a slot's key reports to its job.
pub(super) fn slot_work(header: &Header, slot: &KeySlot) -> u64 {
    work_bytes(header.hash, slot.iterations, header.spec.key_bytes())
}

/// Bytes of progress that [`open`] reports to its job.
pub(super) fn open_work(header: &Header, slot: &KeySlot) -> u64 {
    let digest = work_bytes(header.hash, header.digest_iterations, DIGEST_BYTES);
    slot_work(header, slot) + digest
}

/// The master key, if the passphrase opens the slot, whose stripes on disk are `material`.
///
/// # Errors
/// The job is cancelled.
pub(super) fn open(
    header: &Header,
    slot: &KeySlot,
    (passphrase, material): (&Passphrase, &[u8]),
    job: &Job,
) -> Result<Option<Key>> {
    let key_bytes = header.spec.key_bytes();
    let mut stripes = Zeroizing::new(material.to_vec());
    slot_cipher(header, slot, (passphrase, job))?.decrypt(0, &mut stripes);
    let key = merge(header.hash, &stripes[..header.split_bytes()], key_bytes);
    let is_it = digest(header, &key, job)? == header.digest;
    Ok(is_it.then_some(key))
}

/// The stripes of a master key as they are on disk, in whole sectors.
///
/// # Errors
/// There are no random bytes, or the job is cancelled.
pub(super) fn seal(
    header: &Header,
    slot: &KeySlot,
    (key, passphrase): (&[u8], &Passphrase),
    (entropy, job): (Entropy<'_>, &Job),
) -> Result<Vec<u8>> {
    let stripes = split(header.hash, key, entropy).map_err(no_random_bytes)?;
    let mut material = vec![0; header.material_bytes() as usize];
    material[..stripes.len()].copy_from_slice(&stripes);
    slot_cipher(header, slot, (passphrase, job))?.encrypt(0, &mut material);
    Ok(material)
}

/// The system has no random bytes.
pub(super) fn no_random_bytes(source: io::Error) -> Error {
    Error::io("Could not get random bytes", source)
}

/// Options of a new volume.
#[derive(Clone, Debug)]
pub struct VolumeOptions {
    /// How sectors are encrypted.
    pub spec: Spec,
    /// The hash of key slots.
    pub hash: Hash,
    /// Passphrase of slot 0.
    pub passphrase: Passphrase,
    /// Iterations of PBKDF2 that opening slot 0 costs.
    pub slot_iterations: u32,
    /// Iterations of the digest that proves a key right.
    pub digest_iterations: u32,
}

impl VolumeOptions {
    /// Options of the volume that costs the least to make and to open, for tests.
    #[doc(hidden)]
    pub fn cheap(mode: CipherMode, passphrase: Passphrase) -> VolumeOptions {
        VolumeOptions {
            spec: Spec {
                key_size: KeySize::Aes128,
                mode,
                iv: IvGenerator::Plain64,
            },
            hash: Hash::Sha1,
            passphrase,
            slot_iterations: 1,
            digest_iterations: 1,
        }
    }
}

/// The header of a new volume with one key slot, to be written. Nothing in it is secret: the master
/// key is not kept.
#[derive(Clone, PartialEq, Eq)]
pub struct NewVolume {
    header: Header,
    /// The stripes of slot 0, encrypted.
    material: Vec<u8>,
}

impl fmt::Debug for NewVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NewVolume({:?})", self.header)
    }
}

impl NewVolume {
    /// Draws a master key and puts it into slot 0.
    ///
    /// # Errors
    /// There are no random bytes.
    pub fn make(options: &VolumeOptions, entropy: Entropy<'_>) -> Result<NewVolume> {
        let key_bytes = options.spec.key_bytes();
        let nobody = Job::default();
        let mut random = |bytes: &mut [u8]| entropy(bytes).map_err(no_random_bytes);
        let mut uuid = [0; 16];
        random(&mut uuid)?;
        let slot_bytes = Header::slot_bytes(key_bytes);
        let slots = std::array::from_fn(|index| KeySlot {
            active: index == 0,
            iterations: if index == 0 {
                options.slot_iterations
            } else {
                0
            },
            salt: [0; SALT_BYTES],
            key_offset: KEY_OFFSET + index as u64 * slot_bytes,
        });
        let mut header = Header {
            spec: options.spec,
            hash: options.hash,
            payload_offset: NewVolume::bytes_before_data(&options.spec),
            digest: [0; DIGEST_BYTES],
            digest_salt: [0; SALT_BYTES],
            digest_iterations: options.digest_iterations,
            uuid: uuid_text(uuid),
            slots,
        };
        random(&mut header.digest_salt)?;
        random(&mut header.slots[0].salt)?;
        let mut key = Zeroizing::new(vec![0; key_bytes]);
        random(&mut key)?;
        header.digest = digest(&header, &key, &nobody)?;
        let secrets = (&key[..], &options.passphrase);
        let material = seal(&header, &header.slots[0], secrets, (entropy, &nobody))?;
        Ok(NewVolume { header, material })
    }

    /// Bytes before the data of a volume: the header and its slots.
    pub fn bytes_before_data(spec: &Spec) -> u64 {
        KEY_OFFSET + SLOTS as u64 * Header::slot_bytes(spec.key_bytes())
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the bytes to write with their offsets from the volume's start. The rest of the slots
    /// may be anything.
    pub fn pieces(&self) -> [(u64, Vec<u8>); 2] {
        [
            (0, self.header.encode()),
            (self.header.slots[0].key_offset, self.material.clone()),
        ]
    }
}

/// A random UUID (version 4) in its usual form.
fn uuid_text(mut bytes: [u8; 16]) -> String {
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    [
        hex[..4].concat(),
        hex[4..6].concat(),
        hex[6..8].concat(),
        hex[8..10].concat(),
        hex[10..].concat(),
    ]
    .join("-")
}
