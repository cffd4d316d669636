//! Whether bytes are all zero, at the speed of memory.

/// Bytes that are joined before it is asked whether one was set: enough for vector instructions,
/// and few, since data is found out by its first bytes.
const STRIDE_BYTES: usize = 256;

/// Whether all bytes are zero. Data is found out after a few bytes; the rest compiles to vector
/// instructions.
pub fn is_zero(data: &[u8]) -> bool {
    data.chunks(STRIDE_BYTES)
        .all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_anywhere_is_found() {
        for len in [0, 1, 255, 256, 257, 4096] {
            let mut data = vec![0; len];
            assert!(is_zero(&data), "{len}");
            for at in 0..len {
                data[at] = 0x80;
                assert!(!is_zero(&data), "{at} of {len}");
                data[at] = 0;
            }
        }
    }
}
