//! Limits of request sizes, and the splitting of larger requests (pure).
//!
//! Devices have such limits; here they are set by the user, for testing the layers above and below.
//! Requests are split as in QEMU's block layer (`block/io.c`), into parts that are done one after
//! the other. Parts of a request for zeroes that the limits do not admit as zeroes are written out.
//!
//! Example: with a `zeroes_unit` of 15 MiB, zeroes over 32..64 MiB become 32..45 written out, as no
//! unit begins at 32, then 45..60 as zeroes, and 60..64 written out.

use std::ops::Range;

/// Bytes of zeroes written at a time without a limit, as in QEMU.
const WRITTEN_ZEROES_MAX: u64 = 16 << 20;

/// Limits of request sizes, in bytes; 0 means no limit, so the default splits nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Limits {
    /// Alignment of reads, writes, zeroes and discards.
    pub align: u64,
    /// Maximum length of a read or write. A multiple of `align`, as are all values below.
    pub transfer_max: u64,
    /// Alignment of requests for zeroes.
    pub zeroes_unit: u64,
    /// Maximum length of a request for zeroes. A multiple of `zeroes_unit`.
    pub zeroes_max: u64,
    /// Unit of discards: a discard does not cross the bounds of units, unless it begins and ends at
    /// such bounds.
    pub discard_unit: u64,
    /// Maximum length of a discard. A multiple of `discard_unit`.
    pub discard_max: u64,
}

/// A part of a request for zeroes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ZeroPart {
    /// A range for a request for zeroes.
    Zeroes(Range<u64>),
    /// A range over which zeroes are written as data.
    Written(Range<u64>),
}

impl Limits {
    /// Whether any limit is set.
    pub fn are_any(&self) -> bool {
        *self
            != Limits {
                align: self.align.min(1),
                ..Limits::default()
            }
    }

    /// These limits, for a disk on top of a file whose limits are `below`.
    pub fn over(self, below: Limits) -> Limits {
        let transfer_max = match (self.transfer_max, below.transfer_max) {
            (0, most) | (most, 0) => most,
            (one, other) => one.min(other),
        };
        Limits {
            transfer_max,
            ..self
        }
    }

    fn align(&self) -> u64 {
        self.align.max(1)
    }

    /// The whole blocks within a range; empty, at the range's start, if there are none.
    fn blocks(&self, range: &Range<u64>) -> Range<u64> {
        let start = range.start.checked_next_multiple_of(self.align());
        let start = start.unwrap_or(u64::MAX);
        let end = range.end - range.end % self.align();
        match start < end {
            true => start..end,
            false => range.start..range.start,
        }
    }

    /// Whether a read or a write of the range is split.
    pub fn cut_transfer(&self, range: &Range<u64>) -> bool {
        self.transfer_max != 0 && self.transfer_end(range.start) < range.end
    }

    /// Latest end of a transfer that begins at `start`. The maximum length counts from the start of
    /// its block.
    fn transfer_end(&self, start: u64) -> u64 {
        match self.transfer_max {
            0 => u64::MAX,
            most => (start - start % self.align()).saturating_add(most.max(self.align())),
        }
    }

    /// The parts of a read or a write.
    pub fn transfers(self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            let part = at..self.transfer_end(at).min(range.end);
            at = part.end;
            (!part.is_empty()).then_some(part)
        })
    }

    /// The parts of a request for zeroes.
    pub fn zeroes(self, range: Range<u64>) -> impl Iterator<Item = ZeroPart> {
        let blocks = self.blocks(&range);
        let mut at = range.start;
        std::iter::from_fn(move || {
            if at >= range.end {
                return None;
            }
            let part = match at {
                at if at < blocks.start => self.written(at..blocks.start),
                at if at >= blocks.end => self.written(at..range.end),
                at => self.zeroes_of_blocks(at..blocks.end),
            };
            at = match &part {
                ZeroPart::Zeroes(part) | ZeroPart::Written(part) => part.end,
            };
            Some(part)
        })
    }

    /// The first part of a range that is written out.
    fn written(&self, range: Range<u64>) -> ZeroPart {
        let most = match self.transfer_max {
            0 => WRITTEN_ZEROES_MAX,
            most => most.min(WRITTEN_ZEROES_MAX),
        };
        ZeroPart::Written(range.start..range.end.min(range.start.saturating_add(most)))
    }

    /// The first part of a request for zeroes over whole blocks.
    fn zeroes_of_blocks(&self, blocks: Range<u64>) -> ZeroPart {
        let unit = self.zeroes_unit.max(self.align());
        let len = blocks.end - blocks.start;
        match blocks.start % unit {
            0 if len < unit => self.written(blocks),
            0 => {
                let most = whole_units(self.zeroes_max, unit);
                let whole = (len - len % unit).min(most);
                ZeroPart::Zeroes(blocks.start..blocks.start + whole)
            }
            before => self.written(blocks.start..blocks.end.min(blocks.start - before + unit)),
        }
    }

    /// The parts of a discard; partial blocks at its ends are left as they are.
    pub fn discards(self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let blocks = self.blocks(&range);
        let unit = self.discard_unit.max(self.align());
        let most = whole_units(self.discard_max, unit);
        let mut at = blocks.start;
        std::iter::from_fn(move || {
            if at >= blocks.end {
                return None;
            }
            let len = blocks.end - at;
            let len = match at % unit {
                0 if len < unit => len,
                0 => (len - len % unit).min(most),
                before => len.min(unit - before),
            };
            at += len;
            Some(at - len..at)
        })
    }
}

/// The largest multiple of `unit` within the maximum `most`, where 0 is no maximum.
fn whole_units(most: u64, unit: u64) -> u64 {
    match most {
        0 => u64::MAX,
        most => (most - most % unit).max(unit),
    }
}

#[cfg(test)]
mod tests {
    use std::iter::once;

    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    #[test]
    fn transfers_are_cut_at_multiples_from_the_first_whole_block_on() {
        let limits = Limits {
            align: 4 * KIB,
            transfer_max: 64 * KIB,
            ..Limits::default()
        };
        let parts: Vec<_> = limits.transfers(1000..1000 + 128 * KIB).collect();
        let ends = [64 * KIB, 128 * KIB, 128 * KIB + 1000];
        assert_eq!(parts[0].start, 1000);
        assert_eq!(parts.iter().map(|part| part.end).collect::<Vec<_>>(), ends);
        assert!(limits.cut_transfer(&(1000..1000 + 64 * KIB)));
        assert!(!limits.cut_transfer(&(1000..64 * KIB)));
        assert!(!Limits::default().cut_transfer(&(0..u64::MAX)));
        assert!(Limits::default().transfers(5..9).eq(once(5..9)));
        assert_eq!(limits.transfers(5..5).count(), 0);
    }

    #[test]
    fn what_is_above_transfers_no_more_at_a_time() {
        let with = |transfer_max| Limits {
            transfer_max,
            zeroes_unit: transfer_max,
            ..Limits::default()
        };
        for (above, below, most) in [(0, 0, 0), (0, 7, 7), (7, 0, 7), (7, 9, 7), (9, 7, 7)] {
            let limits = with(above).over(with(below));
            assert_eq!((limits.transfer_max, limits.zeroes_unit), (most, above));
        }
    }

    #[test]
    fn zeroes_that_are_no_whole_units_are_written_out() {
        let limits = Limits {
            align: 512,
            zeroes_unit: 15 * MIB,
            zeroes_max: 15 * MIB,
            ..Limits::default()
        };
        let parts: Vec<_> = limits.zeroes(32 * MIB..64 * MIB).collect();
        let expected = [
            ZeroPart::Written(32 * MIB..45 * MIB),
            ZeroPart::Zeroes(45 * MIB..60 * MIB),
            ZeroPart::Written(60 * MIB..64 * MIB),
        ];
        assert_eq!(parts, expected);
        let parts: Vec<_> = limits.zeroes(15 * MIB - 700..45 * MIB + 100).collect();
        let expected = [
            ZeroPart::Written(15 * MIB - 700..15 * MIB - 512),
            ZeroPart::Written(15 * MIB - 512..15 * MIB),
            ZeroPart::Zeroes(15 * MIB..30 * MIB),
            ZeroPart::Zeroes(30 * MIB..45 * MIB),
            ZeroPart::Written(45 * MIB..45 * MIB + 100),
        ];
        assert_eq!(parts, expected);
        let whole = ZeroPart::Zeroes(7..u64::MAX);
        assert_eq!(
            Limits::default().zeroes(7..u64::MAX).collect::<Vec<_>>(),
            [whole]
        );
        let none_whole = ZeroPart::Written(513..1023);
        assert_eq!(limits.zeroes(513..1023).collect::<Vec<_>>(), [none_whole]);
    }

    #[test]
    fn discards_leave_what_is_no_block_and_end_at_units() {
        let limits = Limits {
            align: 512,
            discard_unit: 15 * MIB,
            discard_max: 30 * MIB,
            ..Limits::default()
        };
        let start = 80_000_001;
        let parts: Vec<_> = limits.discards(start..start + 90 * MIB).collect();
        let expected = [
            80_000_512..90 * MIB,
            90 * MIB..120 * MIB,
            120 * MIB..150 * MIB,
            150 * MIB..165 * MIB,
            165 * MIB..(start + 90 * MIB) / 512 * 512,
        ];
        assert_eq!(parts, expected);
        assert_eq!(limits.discards(1..1000).count(), 0);
        assert!(Limits::default().discards(1..9).eq(once(1..9)));
    }

    /// Under any limits, the parts cover the request in order, and each is within the limits.
    #[test]
    fn parts_cover_the_request_and_keep_the_limits() {
        for (align, unit) in [(0, 0), (1, 3), (4, 0), (4, 12), (2, 8)] {
            for (transfer_max, factor) in [(0, 0), (4, 1), (8, 2)] {
                let limits = Limits {
                    align,
                    transfer_max,
                    zeroes_unit: unit,
                    zeroes_max: unit * factor,
                    discard_unit: unit,
                    discard_max: unit * factor,
                };
                for start in 0..26 {
                    for end in start + 1..40 {
                        covers(limits, start..end);
                    }
                }
            }
        }
    }

    fn covers(limits: Limits, range: Range<u64>) {
        let step = |at: u64, part: &Range<u64>| {
            assert!(part.start == at && part.end > at, "{limits:?} {range:?}");
            part.end
        };
        let end = limits
            .transfers(range.clone())
            .fold(range.start, |at, part| {
                assert!(limits.transfer_max == 0 || part.end - part.start <= limits.transfer_max);
                step(at, &part)
            });
        assert_eq!(end, range.end);
        let unit = limits.zeroes_unit.max(limits.align());
        let end = limits
            .zeroes(range.clone())
            .fold(range.start, |at, part| match part {
                ZeroPart::Written(part) => step(at, &part),
                ZeroPart::Zeroes(part) => {
                    assert!(part.start.is_multiple_of(unit) && part.end.is_multiple_of(unit));
                    assert!(limits.zeroes_max == 0 || part.end - part.start <= limits.zeroes_max);
                    step(at, &part)
                }
            });
        assert_eq!(end, range.end);
        let blocks = limits.blocks(&range);
        let end = limits
            .discards(range.clone())
            .fold(blocks.start, |at, part| {
                assert!(limits.discard_max == 0 || part.end - part.start <= limits.discard_max);
                step(at, &part)
            });
        assert_eq!(end, blocks.end);
    }
}
