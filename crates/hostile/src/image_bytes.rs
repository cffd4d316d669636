//! Fuzz target: arbitrary bytes as an image. Described, checked, read, mapped, written, and as a
//! layer of a chain.

use std::sync::Arc;

use crate::draw::Draw;
use crate::file::Watched;
use crate::session;

/// Longer inputs find nothing that shorter ones do not.
pub(crate) const BYTES_MAX: usize = 1 << 20;

/// The target's body.
pub fn run(input: &[u8]) {
    let bytes = &input[..input.len().min(BYTES_MAX)];
    // The operations are derived from the bytes, so that an input is a whole case.
    let seed = bytes.iter().fold(bytes.len() as u64, |seed, &byte| {
        seed.wrapping_mul(0x0100_0000_01b3) ^ u64::from(byte)
    });
    let mut draw = Draw::from_seed(seed);
    session::look(&Arc::new(Watched::new(bytes.to_vec())), &mut draw);
    session::change(&Arc::new(Watched::new(bytes.to_vec())), &mut draw);
    session::read_chain(bytes.to_vec(), vec![bytes.to_vec(); 2]);
}
