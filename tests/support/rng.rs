//! Randomness from a seed: SplitMix64, the same on every machine.

use cowslip_testbed::Random;

/// A generator.
#[derive(Clone, Debug)]
pub struct Rng(Random);

impl Rng {
    /// From a seed.
    pub fn new(seed: u64) -> Rng {
        Rng(Random::new(seed))
    }

    /// From a seed and a name, so that cases with one seed differ.
    pub fn named(seed: u64, name: &str) -> Rng {
        // FNV-1a
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Rng::new(seed ^ hash)
    }

    /// 64 random bits.
    pub fn next(&mut self) -> u64 {
        self.0.bits()
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "nothing is below 0");
        self.next() % bound
    }

    /// True once in `times`.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of these.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }

    /// Bytes; sometimes all zeroes or one value, which code may treat apart.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        match self.below(8) {
            0 => vec![0; len],
            1 => vec![self.next() as u8; len],
            _ => {
                let mut bytes = vec![0; len];
                self.0.fill(&mut bytes);
                bytes
            }
        }
    }
}
