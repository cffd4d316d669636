//! A volume's passphrase: wiped from memory when it is dropped, shown by no output.

use std::fmt;
use std::sync::Arc;

use cowslip_block::sync::{Mutex, lock};
use zeroize::Zeroizing;

use super::header::Header;
use super::slot::Key;

/// Most volumes whose keys a passphrase keeps: those of a chain of images.
const OPENED_MAX: usize = 16;

/// Passphrase of a key slot. Clones are the same one: it keeps the keys of volumes that it has
/// opened, since deriving them takes seconds, until the last clone is dropped.
#[derive(Clone)]
pub struct Passphrase(Arc<Secret>);

struct Secret {
    bytes: Zeroizing<Vec<u8>>,
    /// Headers of volumes, as they were, and their master keys.
    opened: Mutex<Vec<(Header, Key)>>,
}

impl Passphrase {
    /// Returns a passphrase of these bytes, which may be any.
    pub fn new(bytes: Vec<u8>) -> Passphrase {
        Passphrase(Arc::new(Secret {
            bytes: Zeroizing::new(bytes),
            opened: Mutex::default(),
        }))
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0.bytes
    }

    /// The master key of a volume with exactly this header, if it has opened that.
    pub(super) fn key_of(&self, header: &Header) -> Option<Key> {
        let opened = lock(&self.0.opened);
        let mut found = opened.iter().filter(|(known, _)| known == header);
        found.next().map(|(_, key)| key.clone())
    }

    /// Keeps the master key of a volume that it has opened.
    pub(super) fn keep(&self, header: &Header, key: &Key) {
        let mut opened = lock(&self.0.opened);
        if opened.len() < OPENED_MAX {
            opened.push((header.clone(), key.clone()));
        }
    }
}

impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passphrase(..)")
    }
}
