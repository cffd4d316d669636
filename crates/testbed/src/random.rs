//! Random numbers of measurements, the same in every run of one seed: SplitMix64.

/// A stream of them.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From any seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// Fills these bytes with them, eight at a time, the lowest first.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for piece in bytes.chunks_mut(8) {
            piece.copy_from_slice(&self.bits().to_le_bytes()[..piece.len()]);
        }
    }

    /// A number below `end`, which is above 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.bits() % end
    }

    /// From 0 to 1.
    pub fn share(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The generator's finaliser: a permutation of all numbers that leaves no pattern.
pub(crate) fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_algorithm() {
        // The reference implementation's, for the seed 1234567.
        let mut random = Random::new(1_234_567);
        let first = [random.bits(), random.bits(), random.bits()];
        assert_eq!(
            first,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
        let mut bytes = [0; 12];
        Random::new(1_234_567).fill(&mut bytes);
        let [head, tail] = [first[0], first[1]].map(u64::to_le_bytes);
        assert_eq!((&bytes[..8], &bytes[8..]), (&head[..], &tail[..4]));
        assert!((0..1000).all(|_| (0.0..1.0).contains(&random.share())));
    }
}
