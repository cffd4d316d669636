//! Choices: from the bytes of a fuzzer's input, or from a seed. What decides is the same for both.

/// A source of choices.
#[derive(Clone, Debug)]
pub struct Draw<'a> {
    source: Source<'a>,
}

#[derive(Clone, Debug)]
enum Source<'a> {
    /// Bytes from the front; when they are used up every choice is the first.
    Bytes(&'a [u8]),
    /// A generator: Knuth's MMIX constants.
    Seed(u64),
}

impl<'a> Draw<'a> {
    /// Choices that a fuzzer makes.
    pub fn from_bytes(bytes: &'a [u8]) -> Draw<'a> {
        Draw {
            source: Source::Bytes(bytes),
        }
    }

    /// Choices that follow from a seed.
    pub fn from_seed(seed: u64) -> Draw<'static> {
        Draw {
            source: Source::Seed(seed),
        }
    }

    /// Whether all of a fuzzer's bytes are used up; a seed's never are.
    pub fn is_empty(&self) -> bool {
        matches!(self.source, Source::Bytes([]))
    }

    /// Returns the rest of a fuzzer's bytes.
    pub fn rest(&mut self) -> &'a [u8] {
        match &mut self.source {
            Source::Bytes(bytes) => std::mem::take(bytes),
            Source::Seed(_) => &[],
        }
    }

    /// Up to `len` of a fuzzer's bytes.
    pub fn take(&mut self, len: usize) -> &'a [u8] {
        match &mut self.source {
            Source::Bytes(bytes) => {
                let (taken, rest) = bytes.split_at(len.min(bytes.len()));
                *bytes = rest;
                taken
            }
            Source::Seed(_) => &[],
        }
    }

    fn bits(&mut self, bytes: usize) -> u64 {
        match &mut self.source {
            Source::Bytes(source) => {
                let (taken, rest) = source.split_at(bytes.min(source.len()));
                *source = rest;
                taken
                    .iter()
                    .fold(0, |bits, &byte| bits << 8 | u64::from(byte))
            }
            Source::Seed(state) => {
                *state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                *state >> 16
            }
        }
    }

    /// A number of 48 bits or more.
    pub fn number(&mut self) -> u64 {
        self.bits(8)
    }

    /// A byte.
    pub fn byte(&mut self) -> u8 {
        self.bits(1) as u8
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        let bytes = match end {
            0..=0x100 => 1,
            0x101..=0x1_0000 => 2,
            0x1_0001..=0x1_0000_0000 => 4,
            _ => 8,
        };
        self.bits(bytes) % end
    }

    /// True once in `n` times. When a fuzzer's bytes are used up: false.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == n - 1
    }

    /// One of the values.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}
