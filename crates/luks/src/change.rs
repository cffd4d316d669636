//! Adding and erasing key slots: the slots to change, and the writes for it. The file is read here;
//! the caller, which has it open, writes the stages, with a barrier after each.
//!
//! | change | stages |
//! | --- | --- |
//! | a key into an empty slot | its stripes and its entry, still inactive; its state |
//! | slots erased | their states; noise over their stripes, and the rest of their entries |
//! | a key in place of another | the same key into an empty slot; the state of the old one; the new key in its place; the first slot erased |
//!
//! A slot's state is one word, so it is the old or the new one after a crash; what a slot consists
//! of else is only written while it is inactive on disk, durably. So whatever opened the volume
//! before opens it until its own state changes, and a key that takes another one's place opens it
//! from before that on. Only with all slots in use there is none to lend: then those that are not
//! replaced open it meanwhile.
//!
//! Stripes are overwritten once. Where a file system or a disk writes to another place than the one
//! that is overwritten, as most do today, more often would not help, and old stripes may survive.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::header::{Header, KeySlot, SALT_BYTES, SLOTS};
use super::{Passphrase, Volume, slot};
use crate::file::AlignedFile;
use crate::job::{Job, Stage};
use crate::{Error, Result, Workers};

/// A change of a volume's key slots.
#[derive(Clone, Debug)]
pub enum KeyChange {
    /// Adds a passphrase that opens the volume.
    Add(NewKey),
    /// Erases passphrases.
    Erase(ErasedKeys),
}

/// A passphrase that shall open a volume.
#[derive(Clone, Debug)]
pub struct NewKey {
    /// A passphrase that opens it now.
    pub current: Passphrase,
    /// The new one.
    pub passphrase: Passphrase,
    /// The slot, counted from 0; else the first that is empty.
    pub slot: Option<u64>,
    /// Iterations of PBKDF2 that opening the slot costs.
    pub iterations: u32,
    /// The slot may be in use; what is in it is replaced.
    pub force: bool,
}

impl NewKey {
    /// A passphrase that costs the least to try, for tests; it replaces what is in its slot.
    #[doc(hidden)]
    pub fn cheap(current: Passphrase, passphrase: Passphrase, slot: Option<u64>) -> NewKey {
        NewKey {
            current,
            passphrase,
            slot,
            iterations: 1,
            force: true,
        }
    }
}

/// Slots that shall be empty: one by its number, or all that a passphrase opens. Of both, the one
/// has to be opened by the other.
#[derive(Clone, Debug)]
pub struct ErasedKeys {
    /// The slot, counted from 0.
    pub slot: Option<u64>,
    /// Passphrase of the slots to erase.
    pub passphrase: Option<Passphrase>,
    /// Whether the last slots may be erased, too, so that nothing is left that opens the volume:
    /// then its data is lost.
    pub force: bool,
}

/// Where unpredictable bytes come from: fills the slice, or fails.
pub type Random = Arc<dyn Fn(&mut [u8]) -> io::Result<()> + Send + Sync>;

/// Input of a change of keys from its caller.
#[derive(Clone)]
pub struct KeyMaterial {
    /// Unpredictable bytes.
    pub random: Random,
    /// Threads that derive keys, which takes seconds.
    pub workers: Workers,
}

impl fmt::Debug for KeyMaterial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyMaterial({:?})", self.workers)
    }
}

impl KeyMaterial {
    fn noise(&self, len: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len as usize];
        (self.random)(&mut bytes).map_err(slot::no_random_bytes)?;
        Ok(bytes)
    }
}

/// Writes at places of the file, in stages.
pub type Stages = Vec<Vec<(u64, Vec<u8>)>>;

/// Returns the writes that change the slots of the volume in these bytes of a file.
///
/// # Errors
/// I/O, a header that is none; `Invalid` for what is refused, in QEMU's words; `Key` if the current
/// passphrase opens nothing; [`Error::Cancelled`].
pub async fn stages(
    file: &AlignedFile,
    place: Range<u64>,
    (change, means): (&KeyChange, &KeyMaterial),
    job: &Job,
) -> Result<Stages> {
    let volume = Volume::read(file, place).await?;
    job.enter(Stage::Keys);
    let stages = match change {
        KeyChange::Add(new) => volume.adding(new, (means, job)).await?,
        KeyChange::Erase(keys) => volume.erasing(keys, (means, job)).await?,
    };
    job.check()?;
    Ok(stages)
}

fn refused(text: impl Into<String>) -> Error {
    Error::Invalid(text.into())
}

fn slot_number(slot: u64) -> Result<usize> {
    let index = usize::try_from(slot).ok().filter(|&index| index < SLOTS);
    index.ok_or_else(|| {
        let last = SLOTS - 1;
        refused(format!(
            "Invalid keyslot {slot} specified, must be between 0 and {last}"
        ))
    })
}

impl Volume<'_> {
    fn empty_slot(&self) -> Option<usize> {
        self.header.slots.iter().position(|slot| !slot.active)
    }

    async fn adding(&self, new: &NewKey, (means, job): (&KeyMaterial, &Job)) -> Result<Stages> {
        let index = match new.slot {
            Some(slot) => slot_number(slot)?,
            None => self
                .empty_slot()
                .ok_or_else(|| refused("Can't add a keyslot - all keyslots are in use"))?,
        };
        let replaces = self.header.slots[index].active;
        if replaces && !new.force {
            return Err(refused(format!(
                "Refusing to overwrite active keyslot {index} - please erase it first"
            )));
        }
        let mut salt = [0; SALT_BYTES];
        (means.random)(&mut salt).map_err(slot::no_random_bytes)?;
        let filled = KeySlot {
            iterations: new.iterations,
            salt,
            ..self.header.slots[index].clone()
        };
        job.expect(slot::slot_work(&self.header, &filled));
        let with = (&means.workers, job);
        let key = self.unlock(&new.current, with).await?;
        let material = {
            let (header, filled) = (self.header.clone(), filled.clone());
            let (passphrase, means, job) = (new.passphrase.clone(), means.clone(), job.clone());
            let seal = move || {
                let mut entropy = |bytes: &mut [u8]| (means.random)(bytes);
                let secrets = (&key[..], &passphrase);
                slot::seal(&header, &filled, secrets, (&mut entropy, &job))
            };
            with.0.run(seal).await?
        };
        let mut writes = Writes::of(self);
        match self.empty_slot().filter(|_| replaces) {
            None => writes.fill(index, &filled, &material),
            Some(lent) => {
                writes.fill(lent, &filled, &material);
                writes.fill(index, &filled, &material);
                writes.erase(&[lent], means)?;
            }
        }
        Ok(writes.stages)
    }

    async fn erasing(
        &self,
        keys: &ErasedKeys,
        (means, job): (&KeyMaterial, &Job),
    ) -> Result<Stages> {
        let active = self.active();
        let slot = keys.slot.map(slot_number).transpose()?;
        let opened = match &keys.passphrase {
            None => None,
            Some(passphrase) => {
                let tried = active.iter().copied();
                let tried = tried.filter(|&index| slot.is_none_or(|slot| slot == index));
                Some(self.opened(tried, passphrase, (means, job)).await?)
            }
        };
        let erased = match (slot, opened) {
            (None, None) => {
                return Err(refused(
                    "To erase keyslot(s), either explicit keyslot index or the password currently contained in them must be given",
                ));
            }
            (Some(slot), Some(opened)) if opened.is_empty() => {
                return Err(refused(format!(
                    "Given keyslot {slot} doesn't contain the given old password for erase operation"
                )));
            }
            (None, Some(opened)) if opened.is_empty() => {
                return Err(refused(
                    "No keyslots match given (old) password for erase operation",
                ));
            }
            (None, Some(opened)) if opened.len() == active.len() && !keys.force => {
                return Err(refused(
                    "All the active keyslots match the (old) password that was given and erasing them will erase all the data in \
                     the image irreversibly - refusing operation",
                ));
            }
            (None, Some(opened)) => opened,
            // QEMU's text has the space at its end too.
            (Some(slot), _) if !active.contains(&slot) && !keys.force => {
                return Err(refused(format!(
                    "Given keyslot {slot} is already erased (inactive) "
                )));
            }
            (Some(slot), _) if active == [slot] && !keys.force => {
                return Err(refused(format!(
                    "Attempt to erase the only active keyslot {slot} which will erase all the data in the image irreversibly - \
                     refusing operation"
                )));
            }
            (Some(slot), _) => vec![slot],
        };
        let mut writes = Writes::of(self);
        writes.erase(&erased, means)?;
        Ok(writes.stages)
    }

    /// Returns the slots that the passphrase opens.
    async fn opened(
        &self,
        slots: impl Iterator<Item = usize> + Clone,
        passphrase: &Passphrase,
        (means, job): (&KeyMaterial, &Job),
    ) -> Result<Vec<usize>> {
        let work = |index: usize| slot::open_work(&self.header, &self.header.slots[index]);
        job.expect(slots.clone().map(work).sum());
        let mut opened = Vec::new();
        for index in slots {
            let key = self.open_slot(index, passphrase, (&means.workers, job));
            if key.await?.is_some() {
                opened.push(index);
            }
        }
        Ok(opened)
    }
}

/// Stages as they are put together, and the header as it is after them.
struct Writes {
    start: u64,
    header: Header,
    stages: Stages,
}

impl Writes {
    fn of(volume: &Volume<'_>) -> Writes {
        Writes {
            start: volume.place.start,
            header: volume.header.clone(),
            stages: Vec::new(),
        }
    }

    fn state(&mut self, index: usize, active: bool) -> (u64, Vec<u8>) {
        self.header.slots[index].active = active;
        let at = self.start + Header::slot_at(index) as u64;
        (at, self.header.slots[index].state().to_vec())
    }

    /// An inactive slot: its stripes, and its entry.
    fn content(&self, index: usize, material: Vec<u8>) -> [(u64, Vec<u8>); 2] {
        let slot = &self.header.slots[index];
        assert!(!slot.active, "slots in use are not written");
        let entry = self.start + Header::slot_at(index) as u64;
        [
            (self.start + slot.key_offset, material),
            (entry, slot.encode().to_vec()),
        ]
    }

    /// Puts these stripes into a slot, after what is in it is out of use.
    fn fill(&mut self, index: usize, filled: &KeySlot, material: &[u8]) {
        if self.header.slots[index].active {
            let state = self.state(index, false);
            self.stages.push(vec![state]);
        }
        let slot = &mut self.header.slots[index];
        (slot.salt, slot.iterations) = (filled.salt, filled.iterations);
        let content = self.content(index, material.to_vec());
        self.stages.push(content.to_vec());
        let state = self.state(index, true);
        self.stages.push(vec![state]);
    }

    fn erase(&mut self, slots: &[usize], means: &KeyMaterial) -> Result<()> {
        let states = slots.iter().map(|&index| self.state(index, false));
        let states = states.collect();
        self.stages.push(states);
        let mut contents = Vec::new();
        for &index in slots {
            let slot = &mut self.header.slots[index];
            (slot.salt, slot.iterations) = ([0; SALT_BYTES], 0);
            let noise = means.noise(self.header.material_bytes())?;
            contents.extend(self.content(index, noise));
        }
        self.stages.push(contents);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
