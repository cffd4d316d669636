//! LUKS version 1: the header, its key slots, and the cipher of the data behind it. In front of a
//! disk it is the format `luks`; in clusters of a qcow2 image it holds that image's keys.
//!
//! | what | in which file |
//! | --- | --- |
//! | the header's bytes and their rules | `header.rs` (pure) |
//! | sectors under AES | `cipher.rs` (pure) |
//! | a master key in a key slot, and back | `slot.rs` (pure) |
//! | what a passphrase costs: PBKDF2, as part of a job | `derive.rs` |
//! | one key slot more, or less: the stages of that | `change.rs` |
//! | unlocking a volume in a file | here |
//!
//! The words are those of the on-disk format 1.2.3: the *master key* encrypts the data and is in no
//! file; a *key slot* has it split into 4000 *stripes* and encrypted under a key that PBKDF2
//! derives from a passphrase.
//!
//! A header is untrusted: its fields bound neither memory nor time here, they are held against
//! bounds. Keys are wiped from memory when they are dropped, and show in no `Debug` output. Neither
//! time nor randomness is asked of the system: who makes a volume passes in both.
//!
//! Left out: version 2, detached headers, ciphers other than AES.

use std::ops::Range;
use std::sync::Arc;

use cowslip_block::file::{self, AlignedFile, BlockFile};
use cowslip_block::job::{self, Job};
#[cfg(test)]
use cowslip_block::random;
use cowslip_block::{Error, Result, Workers};

mod change;
mod cipher;
mod derive;
mod hash;
mod header;
mod passphrase;
mod slot;

pub use change::{ErasedKeys, KeyChange, KeyMaterial, NewKey, Random};
pub use change::{Stages, stages};
pub use cipher::{CipherMode, IvGenerator, KeySize, SECTOR_BYTES, SectorCipher, Spec};
pub use hash::Hash;
pub use header::{HEADER_BYTES, Header, KeySlot, MAGIC};
pub use passphrase::Passphrase;
pub use slot::{Entropy, NewVolume, VolumeOptions, iterations_run};

/// Says that the library can open encrypted images: this crate is part of it.
///
/// # Errors
/// None here.
#[doc(hidden)]
pub fn check_built(_file: &str) -> Result<()> {
    Ok(())
}

/// Reads the header of the volume that is in these bytes of a file.
///
/// # Errors
/// I/O; `Corrupt` for what no volume has, `Unsupported` for what is not done here.
pub async fn inspect(file: &Arc<dyn BlockFile>, place: Range<u64>) -> Result<Header> {
    let file = AlignedFile::new(Arc::clone(file));
    Ok(Volume::read(&file, place).await?.header)
}

/// The header of the volume that is in these bytes of a file, and the cipher of its data.
///
/// # Errors
/// As [`inspect`]; `Key` if the passphrase opens no key slot.
pub async fn unlock(
    file: &AlignedFile,
    place: Range<u64>,
    (passphrase, workers): (&Passphrase, &Workers),
) -> Result<(Header, SectorCipher)> {
    let volume = Volume::read(file, place).await?;
    let key = match passphrase.key_of(&volume.header) {
        Some(key) => key,
        None => {
            let with = (workers, &Job::default());
            let key = volume.unlock(passphrase, with).await?;
            passphrase.keep(&volume.header, &key);
            key
        }
    };
    let cipher = SectorCipher::new(volume.header.spec, &key);
    Ok((volume.header, cipher))
}

/// A volume in a file.
struct Volume<'a> {
    file: &'a AlignedFile,
    place: Range<u64>,
    /// Header as it was read.
    header: Header,
}

impl Volume<'_> {
    async fn read(file: &AlignedFile, place: Range<u64>) -> Result<Volume<'_>> {
        let len = place.end.saturating_sub(place.start);
        let bytes = file.read_new(place.start, len.min(HEADER_BYTES as u64));
        let header = Header::parse(&bytes.await?, &place, file.name())?;
        Ok(Volume {
            file,
            place,
            header,
        })
    }

    /// The slots that hold the master key.
    fn active(&self) -> Vec<usize> {
        let slots = self.header.slots.iter().enumerate();
        slots
            .filter_map(|(index, slot)| slot.active.then_some(index))
            .collect()
    }

    /// The master key, if the passphrase opens this slot.
    async fn open_slot(
        &self,
        index: usize,
        passphrase: &Passphrase,
        (workers, job): (&Workers, &Job),
    ) -> Result<Option<slot::Key>> {
        let header = self.header.clone();
        let slot = header.slots[index].clone();
        let material = self
            .file
            .read_new(self.place.start + slot.key_offset, header.material_bytes())
            .await?;
        let (passphrase, job) = (passphrase.clone(), job.clone());
        let open = move || slot::open(&header, &slot, (&passphrase, &material), &job);
        workers.run(open).await
    }

    /// The master key.
    async fn unlock(&self, passphrase: &Passphrase, with: (&Workers, &Job)) -> Result<slot::Key> {
        let slots = &self.header.slots;
        let work = |index: usize| slot::open_work(&self.header, &slots[index]);
        let mut left: u64 = self.active().into_iter().map(work).sum();
        let (_, job) = with;
        job.expect(left);
        for index in self.active() {
            left -= work(index);
            if let Some(key) = self.open_slot(index, passphrase, with).await? {
                // The others are not tried.
                job.done(left);
                return Ok(key);
            }
        }
        let hint = match passphrase.bytes().ends_with(b"\n") {
            // Files of passphrases that editors and `echo` have written.
            true => " (it ends with a line end, which is a part of it)",
            false => "",
        };
        let text = format!("Invalid password, cannot unlock any keyslot{hint}");
        Err(Error::Key(text))
    }
}
