//! Requests of the table of discards: a synthetic trace, and one that a file system left.

use std::collections::BTreeMap;
use std::ops::Range;

use cowslip_load::permuted;

/// The pieces of the synthetic trace.
pub const PIECE_BYTES: u64 = 64 << 10;
/// The disk that the recorded trace is of.
pub const CHURN_DISK_BYTES: u64 = 1 << 30;

const SEED: u64 = 1;
/// Number of written pieces of a hundred of the disk.
const WRITTEN: u64 = 30;
/// The unit of the recorded trace.
const BLOCK_BYTES: u64 = 4 << 10;
const CHURN: &str = include_str!("churn.trace");

/// Operation on a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Write,
    Zero,
    Discard,
}

/// A request for a range of bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub verb: Verb,
    pub range: Range<u64>,
}

/// Requests that may be in flight together, since no two of them touch the same bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Part {
    pub requests: Vec<Request>,
    /// A flush comes when they have ended.
    pub flush: bool,
}

/// Parts, one after the other.
#[derive(Debug)]
pub struct Trace {
    pub parts: Vec<Part>,
    /// Bytes whose last request was a write.
    pub live_bytes: u64,
}

impl Trace {
    /// 30 % of the disk in pieces of 64 KiB at random places, each once, and a flush; half of them,
    /// drawn at random, discarded, and a flush. It follows from a seed.
    pub fn synthetic(disk_bytes: u64) -> Trace {
        let pieces = pieces(disk_bytes);
        let part = |verb, pieces: &[u64]| Part {
            requests: pieces
                .iter()
                .map(|piece| piece * PIECE_BYTES)
                .map(|start| Request {
                    verb,
                    range: start..start + PIECE_BYTES,
                })
                .collect(),
            flush: true,
        };
        let discarded = &pieces[pieces.len() / 2..];
        Trace {
            parts: vec![part(Verb::Write, &pieces), part(Verb::Discard, discarded)],
            live_bytes: (pieces.len() - discarded.len()) as u64 * PIECE_BYTES,
        }
    }

    /// The churn of a file system with fstrim, as `churn.trace` says.
    pub fn churn() -> Trace {
        let mut parts = vec![Part::default()];
        let mut touched = Ranges::default();
        let mut live = vec![false; (CHURN_DISK_BYTES / BLOCK_BYTES) as usize];
        for line in CHURN.lines().filter(|line| !line.starts_with('#')) {
            let part = parts.last_mut().expect("there is always one");
            let Some(request) = parse(line) else {
                part.flush = true;
                parts.push(Part::default());
                touched = Ranges::default();
                continue;
            };
            let blocks = request.range.start / BLOCK_BYTES..request.range.end / BLOCK_BYTES;
            live[blocks.start as usize..blocks.end as usize].fill(request.verb == Verb::Write);
            if !touched.add(&request.range) {
                touched = Ranges::default();
                touched.add(&request.range);
                parts.push(Part::default());
            }
            let part = parts.last_mut().expect("there is always one");
            part.requests.push(request);
        }
        if let Some(last) = parts.last_mut() {
            last.flush = true;
        }
        let live = live.into_iter().filter(|live| *live).count() as u64;
        Trace {
            parts,
            live_bytes: live * BLOCK_BYTES,
        }
    }

    /// How many requests do this.
    pub fn count(&self, verb: Verb) -> u64 {
        let requests = self.parts.iter().flat_map(|part| &part.requests);
        requests.filter(|request| request.verb == verb).count() as u64
    }

    /// How many requests there are, flushes left out.
    pub fn len(&self) -> u64 {
        self.parts.iter().map(|p| p.requests.len() as u64).sum()
    }
}

/// The pieces that are written, by number, in order; the second half is discarded afterwards.
fn pieces(disk_bytes: u64) -> Vec<u64> {
    let pieces = disk_bytes / PIECE_BYTES;
    let written = (pieces * WRITTEN / 100).max(2) / 2 * 2;
    let places = (0..written).map(|index| permuted(SEED, index, pieces));
    let places: Vec<u64> = places.collect();
    // The blocks to discard are drawn independently: they are not the last written ones.
    let drawn = (0..written).map(|index| permuted(SEED + 1, index, written));
    drawn.map(|index| places[index as usize]).collect()
}

/// A line of the recorded trace; `None` for a flush.
fn parse(line: &str) -> Option<Request> {
    let mut words = line.split(' ');
    let verb = match words.next() {
        Some("w") => Verb::Write,
        Some("z") => Verb::Zero,
        Some("d") => Verb::Discard,
        _ => return None,
    };
    let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
    let start = number()? * BLOCK_BYTES;
    let len = number()? * BLOCK_BYTES;
    Some(Request {
        verb,
        range: start..start + len,
    })
}

/// Ranges that do not overlap, by their ends.
#[derive(Default)]
struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds a range unless it overlaps one; whether it did.
    fn add(&mut self, range: &Range<u64>) -> bool {
        let next = self.0.range(range.start + 1..).next();
        let is_free = next.is_none_or(|(_, start)| *start >= range.end);
        if is_free {
            self.0.insert(range.end, range.start);
        }
        is_free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_synthetic_trace_visits_each_piece_once() {
        let trace = Trace::synthetic(64 << 20);
        assert_eq!(trace.count(Verb::Write), 306);
        assert_eq!(trace.count(Verb::Discard), 153);
        assert_eq!(trace.live_bytes, 153 * PIECE_BYTES);
        let starts = trace.parts[0].requests.iter().map(|r| r.range.start);
        let mut starts: Vec<u64> = starts.collect();
        assert!(!starts.is_sorted());
        starts.sort_unstable();
        starts.dedup();
        assert_eq!(starts.len(), 306);
        assert!(starts.iter().all(|start| *start < 64 << 20));
    }

    #[test]
    fn the_churn_is_whole_and_in_flight_only_what_does_not_overlap() {
        let trace = Trace::churn();
        let lines = CHURN.lines().filter(|line| !line.starts_with('#'));
        let flushes = lines.clone().filter(|line| *line == "f").count();
        assert_eq!(trace.len() as usize + flushes, lines.count());
        assert!(trace.count(Verb::Discard) > 5000 && trace.count(Verb::Write) > 3000);
        let flushed = trace.parts.iter().filter(|part| part.flush).count();
        assert!((flushes..=flushes + 1).contains(&flushed));
        for part in &trace.parts {
            let mut ranges: Vec<_> = part.requests.iter().map(|r| r.range.clone()).collect();
            ranges.sort_by_key(|range| range.start);
            assert!(ranges.iter().all(|range| range.end <= CHURN_DISK_BYTES));
            assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
    }

    #[test]
    fn a_range_is_added_beside_others_but_not_over_them() {
        let mut ranges = Ranges::default();
        assert!(ranges.add(&(8..16)));
        assert!(ranges.add(&(16..24)) && ranges.add(&(0..8)));
        for over in [7..9, 15..17, 0..24, 9..10, 20..30] {
            assert!(!ranges.add(&over), "{over:?}");
        }
        assert!(ranges.add(&(24..30)));
    }
}
