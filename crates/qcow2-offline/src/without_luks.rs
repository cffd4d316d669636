//! The names of the crate `cowslip-luks` where the feature `luks` is off. There are no passphrases
//! and no new volumes, so that what needs one cannot be called; an encrypted image is refused with
//! an error that names the feature.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use cowslip_block::Workers;
use cowslip_block::file::{AlignedFile, BlockFile, Cipher};

use crate::{Error, Job, Result};

/// A passphrase: of the feature `luks`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Passphrase {}

/// A change of keys: of the feature `luks`.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub enum KeyChange {}

/// The means of a change of keys: of the feature `luks`.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub enum KeyMaterial {}

/// A new volume: of the feature `luks`.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewVolume {}

/// The header of a volume: of the feature `luks`.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Offset of the encrypted data in the volume, in bytes.
    pub payload_offset: u64,
    never: Infallible,
}

/// The cipher of an image: of the feature `luks`.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub enum SectorCipher {}

#[doc(hidden)]
pub type Stages = Vec<Vec<(u64, Vec<u8>)>>;

/// Refuses an encrypted image.
///
/// # Errors
/// `Unsupported`, always.
#[doc(hidden)]
pub fn check_built(file: &str) -> Result<()> {
    Err(off(file))
}

fn off(file: &str) -> Error {
    Error::Unsupported {
        file: file.to_string(),
        feature: "encryption without the library's feature 'luks'".into(),
    }
}

impl NewVolume {
    pub fn header(&self) -> &Header {
        match *self {}
    }

    pub fn pieces(&self) -> Vec<(u64, Vec<u8>)> {
        match *self {}
    }
}

impl SectorCipher {
    pub fn of_password(password: &Passphrase) -> SectorCipher {
        match *password {}
    }
}

impl Cipher for SectorCipher {
    fn encrypt(&self, _first_sector: u64, _bytes: &mut [u8]) {
        match *self {}
    }

    fn decrypt(&self, _first_sector: u64, _bytes: &mut [u8]) {
        match *self {}
    }
}

#[doc(hidden)]
pub async fn inspect(file: &Arc<dyn BlockFile>, _place: Range<u64>) -> Result<Header> {
    Err(off(file.name()))
}

#[doc(hidden)]
pub async fn unlock(
    _file: &AlignedFile,
    _place: Range<u64>,
    (passphrase, _workers): (&Passphrase, &Workers),
) -> Result<(Header, SectorCipher)> {
    match *passphrase {}
}

#[doc(hidden)]
pub async fn stages(
    _file: &AlignedFile,
    _place: Range<u64>,
    (change, _means): (&KeyChange, &KeyMaterial),
    _job: &Job,
) -> Result<Stages> {
    match *change {}
}
