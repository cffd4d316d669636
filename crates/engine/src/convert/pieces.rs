//! From what the source has to what is to be done. Pure: extents in, work out, in the order of the
//! guest.

use std::collections::VecDeque;
use std::ops::Range;

use super::survey::{SourcePlace, Span, SpanAction};
use crate::units::{round_down, round_up};

/// Holes up to this length are read with the data around them: a request more costs as much.
const GAP_BYTES: u64 = 64 << 10;
/// Zeroes that one request writes.
const ZERO_BYTES: u64 = 1 << 30;
/// Bytes that the system copies in one call, so that progress is reported and the job can be
/// cancelled.
const OFFLOAD_BYTES: u64 = 64 << 20;

/// A step of the conversion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Data is read and written.
    Copy(Piece),
    /// The target is made zero.
    Zero(Range<u64>),
    /// The kernel copies the range (`copy_file_range`).
    Offload(Range<u64>, SourcePlace),
}

/// A part of the disk that is read at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The range to read.
    pub range: Range<u64>,
    /// The parts of the range that belong in the target: all of it, but for holes in between.
    pub data: Vec<Range<u64>>,
}

/// How the disk is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CutOptions {
    /// No piece crosses a multiple of this.
    pub piece_bytes: u64,
    /// Pieces begin and end at multiples of this, which divides the other: what is written beside
    /// data must be known.
    pub unit_bytes: u64,
    /// The disk ends here.
    pub size: u64,
}

/// Turns extents into work.
#[derive(Debug)]
pub struct Cutter {
    cut: CutOptions,
    open: Option<Piece>,
    /// Zeroes whose end may be data's, once that is rounded.
    zero: Option<Range<u64>>,
    /// Before this all is decided.
    covered: u64,
    out: VecDeque<Work>,
}

impl Cutter {
    /// A cutter at the start of the disk.
    pub fn new(cut: CutOptions) -> Cutter {
        assert!(
            cut.piece_bytes.is_multiple_of(cut.unit_bytes),
            "a unit lies in one piece"
        );
        Cutter {
            cut,
            open: None,
            zero: None,
            covered: 0,
            out: VecDeque::new(),
        }
    }

    /// The next work, if there is some that no later extent can change.
    pub fn take(&mut self) -> Option<Work> {
        self.out.pop_front()
    }

    /// The next extent; they come in order.
    pub fn push(&mut self, span: &Span) {
        let range = span.start..span.start + span.len;
        match &span.what {
            SpanAction::Nothing => {}
            SpanAction::Zero => {
                self.end_zero(u64::MAX);
                self.zero = Some(range);
            }
            SpanAction::Data(Some(place)) => {
                self.end();
                for part in cut(range, OFFLOAD_BYTES) {
                    let place = place.plus(part.start - span.start);
                    self.out.push_back(Work::Offload(part, place));
                }
                self.covered = span.start + span.len;
            }
            SpanAction::Data(None) => {
                for part in cut(range, self.cut.piece_bytes) {
                    self.data(part);
                }
            }
        }
    }

    /// No more extents: what is open is work.
    pub fn end(&mut self) {
        self.end_piece();
        self.end_zero(u64::MAX);
    }

    fn data(&mut self, part: Range<u64>) {
        let CutOptions {
            piece_bytes,
            unit_bytes,
            size,
        } = self.cut;
        let start = round_down(part.start, unit_bytes).max(self.covered);
        let end = round_up(part.end, unit_bytes).min(size);
        let same = |open: &&mut Piece| {
            (open.range.end - 1) / piece_bytes == part.start / piece_bytes
                && start.saturating_sub(open.range.end) <= GAP_BYTES
        };
        if let Some(open) = self.open.as_mut().filter(same) {
            open.range.end = open.range.end.max(end);
            match open.data.last_mut() {
                Some(last) if last.end >= start => last.end = last.end.max(end),
                _ => open.data.push(start..end),
            }
            self.end_zero(start);
        } else if start < end {
            self.end_piece();
            self.end_zero(start);
            self.open = Some(Piece {
                range: start..end,
                data: vec![start..end; 1],
            });
        }
        self.covered = self.covered.max(end);
    }

    fn end_piece(&mut self) {
        self.out.extend(self.open.take().map(Work::Copy));
    }

    /// Zeroes before `end` are to be written, where no data covers them.
    fn end_zero(&mut self, end: u64) {
        let Some(zero) = self.zero.take() else { return };
        let range = zero.start.max(self.covered)..zero.end.min(end);
        if range.start < range.end {
            self.out.extend(cut(range, ZERO_BYTES).map(Work::Zero));
        }
    }
}

/// A range, cut at multiples of `unit`.
fn cut(range: Range<u64>, unit: u64) -> impl Iterator<Item = Range<u64>> {
    crate::units::pieces(range.start, range.end - range.start, unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const K: u64 = 1 << 10;

    fn work(cut: CutOptions, spans: &[(u64, u64, SpanAction)]) -> Vec<Work> {
        let mut cutter = Cutter::new(cut);
        let mut out = Vec::new();
        for (start, end, what) in spans {
            cutter.push(&Span {
                start: *start,
                len: end - start,
                what: what.clone(),
            });
            out.extend(std::iter::from_fn(|| cutter.take()));
        }
        cutter.end();
        out.extend(std::iter::from_fn(|| cutter.take()));
        out
    }

    fn copy(data: &[(u64, u64)]) -> Work {
        Work::Copy(Piece {
            range: data[0].0..data[data.len() - 1].1,
            data: data.iter().map(|(start, end)| *start..*end).collect(),
        })
    }

    const CUT: CutOptions = CutOptions {
        piece_bytes: 2048 * K,
        unit_bytes: 1,
        size: 1 << 40,
    };

    #[test]
    fn data_is_cut_at_multiples_and_small_holes_are_read_along() {
        use SpanAction::{Data, Nothing, Zero};
        let long = work(CUT, &[(K, 4100 * K, Data(None))]);
        let ends = [(K, 2048 * K), (2048 * K, 4096 * K), (4096 * K, 4100 * K)];
        assert_eq!(long, ends.map(|part| copy(&[part])));
        let holes = [
            (0, 4 * K, Data(None)),
            (4 * K, 68 * K, Nothing),
            (68 * K, 72 * K, Data(None)),
            (72 * K, 200 * K, Zero),
            (200 * K, 204 * K, Data(None)),
        ];
        assert_eq!(
            work(CUT, &holes),
            [
                copy(&[(0, 4 * K), (68 * K, 72 * K)]),
                Work::Zero(72 * K..200 * K),
                copy(&[(200 * K, 204 * K)]),
            ]
        );
    }

    #[test]
    fn pieces_are_whole_units_and_nothing_is_done_twice() {
        use SpanAction::{Data, Zero};
        let cut = CutOptions {
            unit_bytes: 64 * K,
            size: 1000 * K,
            ..CUT
        };
        let spans = [
            (0, 100 * K, Zero),
            (100 * K, 104 * K, Data(None)),
            (104 * K, 120 * K, Zero),
            (120 * K, 130 * K, Data(None)),
            (130 * K, 400 * K, Zero),
            (990 * K, 1000 * K, Data(None)),
        ];
        assert_eq!(
            work(cut, &spans),
            [
                Work::Zero(0..64 * K),
                copy(&[(64 * K, 192 * K)]),
                Work::Zero(192 * K..400 * K),
                copy(&[(960 * K, 1000 * K)]),
            ]
        );
    }

    #[test]
    fn what_the_system_copies_keeps_its_place() {
        let place = SourcePlace {
            source: 1,
            depth: 2,
            offset: 4096,
        };
        let spans = [(0, 65536 * K + 512, SpanAction::Data(Some(place)))];
        let expected = [
            Work::Offload(0..65536 * K, place),
            Work::Offload(65536 * K..65536 * K + 512, place.plus(65536 * K)),
        ];
        assert_eq!(work(CUT, &spans), expected);
    }
}
