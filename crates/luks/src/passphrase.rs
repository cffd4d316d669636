//! A volume's passphrase: wiped from memory when it is dropped, shown by no output.

use std::fmt;
use std::sync::Arc;

use zeroize::Zeroizing;

/// Passphrase of a key slot.
#[derive(Clone)]
pub struct Passphrase(Arc<Zeroizing<Vec<u8>>>);

impl Passphrase {
    /// Returns a passphrase of these bytes, which may be any.
    pub fn new(bytes: Vec<u8>) -> Passphrase {
        Passphrase(Arc::new(Zeroizing::new(bytes)))
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passphrase(..)")
    }
}
