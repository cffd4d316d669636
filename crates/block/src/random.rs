//! Random numbers for tests, the same in every run: Marsaglia's xorshift64.

/// Random numbers from a seed other than 0.
pub struct Random(pub u64);

impl Random {
    /// The next number, of 64 random bits.
    // Tests ask for numbers one by one, and want no `Option`.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end
    }
}
