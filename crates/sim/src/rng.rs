//! Randomness from a seed: small, fast, and the same on every machine and in every version.
//!
//! Independent streams are derived by name, so that leaving out one request of a workload, or
//! looking at one value more, does not change what the other parts of a run draw.

/// A stream of pseudo-random numbers (SplitMix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

/// A well mixed function of its input.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Rng {
        Rng(mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)))
    }

    /// A stream of its own for the part `name` and number `index` of a run with this seed.
    pub fn derived(seed: u64, name: &str, index: u64) -> Rng {
        let mut state = mix(seed ^ 0x5151_5151);
        for byte in name.bytes() {
            state = mix(state ^ u64::from(byte)).wrapping_add(0x9e37_79b9_7f4a_7c15);
        }
        Rng(mix(state ^ mix(index)))
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number in `[0, limit)`.
    ///
    /// # Panics
    /// If `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        assert!(limit > 0, "nothing lies below 0");
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }

    /// An index into something of `len` elements.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// A number in `[low, high]`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True in about `percent` of a hundred cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Picks one of the values.
    pub fn pick<T: Clone>(&mut self, values: &[T]) -> T {
        values[self.index(values.len())].clone()
    }

    /// An index drawn with these weights, of which at least one is not 0.
    pub fn weighted(&mut self, weights: &[u64]) -> usize {
        let mut rest = self.below(weights.iter().sum());
        for (index, weight) in weights.iter().enumerate() {
            if rest < *weight {
                return index;
            }
            rest -= weight;
        }
        unreachable!("the rest is below the sum of the weights")
    }

    /// Puts the elements into a random order.
    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for last in (1..values.len()).rev() {
            values.swap(last, self.index(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_repeat_and_differ_by_name_and_number() {
        let first = |name, index| Rng::derived(7, name, index).bits();
        assert_eq!(first("crash", 1), first("crash", 1));
        assert_ne!(first("crash", 1), first("crash", 2));
        assert_ne!(first("crash", 1), first("fault", 1));
    }

    #[test]
    fn weights_are_kept_roughly() {
        let mut rng = Rng::new(1);
        let mut hits = [0u32; 3];
        for _ in 0..1000 {
            hits[rng.weighted(&[1, 0, 3])] += 1;
        }
        assert_eq!(hits[1], 0);
        assert!(hits[0] > 150 && hits[2] > 600, "{hits:?}");
    }
}
