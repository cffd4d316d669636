//! PBKDF2 (RFC 8018) with HMAC: derives keys from passphrases and makes each guess expensive. Pure,
//! except that it checks a job for cancellation now and then: with the iteration counts that
//! programs choose it takes seconds.
//!
//! Its progress is the number of bytes that the iterations have output; each one outputs as many as
//! the hash has.

use hmac::digest::OutputSizeUser;
use hmac::{EagerHash, Hmac, KeyInit, Mac};
use sha1::Sha1;
use sha2::{Sha256, Sha512};
use zeroize::Zeroizing;

use super::hash::Hash;
use crate::Result;
use crate::job::Job;

/// Iterations between two looks at the job: a millisecond, or two.
const AT_ONCE: u32 = 4096;

/// Bytes that deriving so long a key puts out.
pub(super) fn work_bytes(hash: Hash, iterations: u32, key_bytes: usize) -> u64 {
    u64::from(iterations) * (key_bytes.next_multiple_of(hash.bytes()) as u64)
}

/// Fills `key` with what the secret gives.
///
/// # Errors
/// [`crate::Error::Cancelled`].
pub(super) fn derive(
    hash: Hash,
    secret: &[u8],
    (salt, iterations): (&[u8], u32),
    (key, job): (&mut [u8], &Job),
) -> Result<()> {
    match hash {
        Hash::Sha1 => with::<Sha1>(secret, (salt, iterations), (key, job)),
        Hash::Sha256 => with::<Sha256>(secret, (salt, iterations), (key, job)),
        Hash::Sha512 => with::<Sha512>(secret, (salt, iterations), (key, job)),
    }
}

fn with<D: EagerHash>(
    secret: &[u8],
    (salt, iterations): (&[u8], u32),
    (key, job): (&mut [u8], &Job),
) -> Result<()>
where
    Hmac<D>: Mac + KeyInit + Clone,
{
    let keyed =
        <Hmac<D> as KeyInit>::new_from_slice(secret).expect("HMAC takes keys of any length");
    let hash_bytes = <Hmac<D> as OutputSizeUser>::output_size();
    let hash = |parts: &[&[u8]]| {
        let mut state = keyed.clone();
        parts.iter().for_each(|part| Mac::update(&mut state, part));
        let mut out = [0; Hash::BYTES_MAX];
        out[..hash_bytes].copy_from_slice(&state.finalize().into_bytes());
        out
    };
    for (index, block) in key.chunks_mut(hash_bytes).enumerate() {
        let number = (index as u32 + 1).to_be_bytes();
        let mut last = Zeroizing::new([0; Hash::BYTES_MAX]);
        let mut sum = Zeroizing::new([0; Hash::BYTES_MAX]);
        for first in (0..iterations).step_by(AT_ONCE as usize) {
            job.check()?;
            let end = iterations.min(first + AT_ONCE);
            for step in first..end {
                *last = match step {
                    0 => hash(&[salt, &number]),
                    _ => hash(&[&last[..hash_bytes]]),
                };
                sum.iter_mut()
                    .zip(&*last)
                    .for_each(|(sum, byte)| *sum ^= byte);
            }
            job.done(u64::from(end - first) * hash_bytes as u64);
        }
        block.copy_from_slice(&sum[..block.len()]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn derived(hash: Hash, iterations: u32, key: &mut [u8]) {
        let secret = b"passwordPASSWORDpassword";
        let salt = b"saltSALTsaltSALTsaltSALTsaltSALTsalt";
        derive(hash, secret, (salt, iterations), (key, &Job::default())).unwrap();
    }

    /// RFC 6070 for SHA-1; the others are known as widely, and what QEMU opens says the same.
    #[test]
    fn keys_are_those_of_the_published_vectors() {
        let mut key = [0; 25];
        derived(Hash::Sha1, 4096, &mut key);
        assert_eq!(
            key,
            [
                0x3d, 0x2e, 0xec, 0x4f, 0xe4, 0x1c, 0x84, 0x9b, 0x80, 0xc8, 0xd8, 0x36, 0x62, 0xc0,
                0xe4, 0x4a, 0x8b, 0x29, 0x1a, 0x96, 0x4c, 0xf2, 0xf0, 0x70, 0x38
            ]
        );
        let mut key = [0; 40];
        derived(Hash::Sha256, 4096, &mut key);
        assert_eq!(
            key,
            [
                0x34, 0x8c, 0x89, 0xdb, 0xcb, 0xd3, 0x2b, 0x2f, 0x32, 0xd8, 0x14, 0xb8, 0x11, 0x6e,
                0x84, 0xcf, 0x2b, 0x17, 0x34, 0x7e, 0xbc, 0x18, 0x00, 0x18, 0x1c, 0x4e, 0x2a, 0x1f,
                0xb8, 0xdd, 0x53, 0xe1, 0xc6, 0x35, 0x51, 0x8c, 0x7d, 0xac, 0x47, 0xe9
            ]
        );
        let mut key = [0; 16];
        derived(Hash::Sha512, 4096, &mut key);
        assert_eq!(
            key,
            [
                0x8c, 0x05, 0x11, 0xf4, 0xc6, 0xe5, 0x97, 0xc6, 0xac, 0x63, 0x15, 0xd8, 0xf0, 0x36,
                0x2e, 0x22
            ]
        );
    }

    #[test]
    fn a_derivation_reports_progress_and_ends_when_it_is_cancelled() {
        let job = Job::default();
        let mut key = [0; 64];
        let cost = (&b"salt"[..], AT_ONCE + 1);
        derive(Hash::Sha256, b"a", cost, (&mut key, &job)).unwrap();
        let work = work_bytes(Hash::Sha256, AT_ONCE + 1, 64);
        assert_eq!(job.progress().done_bytes, work);
        job.cancel();
        assert!(derive(Hash::Sha256, b"a", cost, (&mut key, &job)).is_err());
        assert_eq!(job.progress().done_bytes, work);
    }
}
