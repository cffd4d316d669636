//! The hashes of key slots and of initialization vectors.

use sha1::Sha1;
use sha2::{Digest, Sha256, Sha512};

/// A hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hash {
    /// 20 bytes; what old volumes have.
    Sha1,
    /// 32 bytes.
    Sha256,
    /// 64 bytes.
    Sha512,
}

impl Hash {
    /// All, by their names.
    pub const ALL: [(&'static str, Hash); 3] = [
        ("sha1", Hash::Sha1),
        ("sha256", Hash::Sha256),
        ("sha512", Hash::Sha512),
    ];
    pub(super) const BYTES_MAX: usize = 64;

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Hash::Sha1 => "sha1",
            Hash::Sha256 => "sha256",
            Hash::Sha512 => "sha512",
        }
    }

    /// The hash of a name.
    pub fn from_name(name: &str) -> Option<Hash> {
        let all = Hash::ALL.iter();
        all.copied()
            .find_map(|(its, hash)| (its == name).then_some(hash))
    }

    /// Bytes of a digest.
    pub fn bytes(self) -> usize {
        match self {
            Hash::Sha1 => 20,
            Hash::Sha256 => 32,
            Hash::Sha512 => 64,
        }
    }

    /// The digest of the parts, one behind the other.
    pub(super) fn digest(self, parts: &[&[u8]], out: &mut [u8]) {
        fn of<D: Digest>(parts: &[&[u8]], out: &mut [u8]) {
            let mut state = D::new();
            parts.iter().for_each(|part| state.update(part));
            out.copy_from_slice(&state.finalize());
        }
        match self {
            Hash::Sha1 => of::<Sha1>(parts, out),
            Hash::Sha256 => of::<Sha256>(parts, out),
            Hash::Sha512 => of::<Sha512>(parts, out),
        }
    }
}
