//! LUKS version 1: the header, its key slots, and the cipher of the data behind it. In front of a disk it is the
//! format `luks`; in clusters of a qcow2 image it holds that image's keys.
//!
//! | what | in which file |
//! | --- | --- |
//! | the header's bytes and their rules | `header.rs` (pure) |
//! | sectors under AES | `cipher.rs` (pure) |
//! | a master key in a key slot, and back | `slot.rs` (pure) |
//! | unlocking a volume in a file | here |
//!
//! The words are those of the on-disk format 1.2.3: the *master key* encrypts the data and is in no file; a *key slot*
//! has it split into 4000 *stripes* and encrypted under a key that PBKDF2 derives from a passphrase.
//!
//! A header is untrusted: its fields bound neither memory nor time here, they are held against bounds. Keys are wiped from
//! memory when they are dropped, and show in no `Debug` output. Neither time nor randomness is asked of the system: who
//! makes a volume passes in both.
//!
//! Left out: version 2, detached headers, ciphers other than AES.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use zeroize::Zeroizing;

use crate::file::{BlockFile, HostFile};
use crate::{Error, Result, Workers};

mod cipher;
mod header;
mod slot;

pub use cipher::{CipherMode, IvGenerator, KeySize, SECTOR_BYTES, SectorCipher, Spec};
pub use header::{HEADER_BYTES, Hash, Header, KeySlot, MAGIC};
pub use slot::{Entropy, NewVolume, VolumeOptions, iterations_run};

/// What opens a key slot.
#[derive(Clone)]
pub struct Passphrase(Arc<Zeroizing<Vec<u8>>>);

impl Passphrase {
    /// These bytes, which may be any.
    pub fn new(bytes: Vec<u8>) -> Passphrase {
        Passphrase(Arc::new(Zeroizing::new(bytes)))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passphrase(..)")
    }
}

/// Reads the header of the volume that is in these bytes of a file.
///
/// # Errors
/// I/O; `Corrupt` for what no volume has, `Unsupported` for what is not done here.
pub async fn inspect(file: &Arc<dyn BlockFile>, place: Range<u64>) -> Result<Header> {
    read_header(&HostFile::new(Arc::clone(file)), &place).await
}

async fn read_header(file: &HostFile, place: &Range<u64>) -> Result<Header> {
    let len = place.end.saturating_sub(place.start);
    let bytes = file.read_new(place.start, len.min(HEADER_BYTES as u64));
    Header::parse(&bytes.await?, place, file.name())
}

/// The header of the volume that is in these bytes of a file, and the cipher of its data.
///
/// # Errors
/// As [`inspect`]; `Key` if the passphrase opens no key slot.
pub(crate) async fn unlock(
    file: &HostFile,
    place: Range<u64>,
    (passphrase, workers): (&Passphrase, &Workers),
) -> Result<(Header, SectorCipher)> {
    let header = read_header(file, &place).await?;
    for slot in header.slots.iter().filter(|slot| slot.active) {
        let material = file
            .read_new(place.start + slot.key_offset, header.material_bytes())
            .await?;
        let (header, slot, passphrase) = (header.clone(), slot.clone(), passphrase.clone());
        let opened = workers.run(move || {
            let key = slot::open(&header, &slot, (&passphrase, &material))?;
            Some((SectorCipher::new(header.spec, &key), header))
        });
        if let Some((cipher, header)) = opened.await {
            return Ok((header, cipher));
        }
    }
    let text = "Invalid password, cannot unlock any keyslot";
    Err(Error::Key(text.to_string()))
}
