//! From table entries to what a guest reads: runs of one source. Pure.

use std::ops::Range;

use super::entry::{EntryFormat, L2Entry, Standard};
use super::geometry::mask;

pub use crate::run::{Run, Source, push};

/// Appends the runs of a part of one cluster: `start` is the cluster's first guest byte, `range`
/// the part, in guest bytes.
pub fn map_cluster(
    format: &EntryFormat,
    entry: &L2Entry,
    start: u64,
    range: Range<u64>,
    runs: &mut Vec<Run>,
) {
    match entry {
        L2Entry::Compressed(place) => {
            let source = Source::Compressed(*place, range.start - start);
            push(runs, Run { range, source });
        }
        L2Entry::Standard(entry) => map_standard(format, entry, start, range, runs),
    }
}

fn map_standard(
    format: &EntryFormat,
    entry: &Standard,
    start: u64,
    range: Range<u64>,
    runs: &mut Vec<Run>,
) {
    let geometry = &format.geometry;
    let bits = geometry.subcluster_bits();
    let mut at = range.start;
    while at < range.end {
        let first = (at - start) >> bits;
        let state = |i: u64| (entry.allocated >> i & 1, entry.zeroes >> i & 1);
        let mut last = first + 1;
        while start + (last << bits) < range.end && state(last) == state(first) {
            last += 1;
        }
        let end = (start + (last << bits)).min(range.end);
        let host = entry.host.map(|host| host.plus(at - start));
        let source = match state(first) {
            (0, 0) => Source::Below,
            (0, _) => Source::Zero(host),
            _ => Source::Data(host.expect("decoding refuses allocated subclusters without space")),
        };
        push(
            runs,
            Run {
                range: at..end,
                source,
            },
        );
        at = end;
    }
}

/// The subclusters of an entry that read as zeroes without asking the layer below, where
/// `below_end` is the offset in the cluster from which on that layer has nothing.
#[inline]
pub fn reads_as_zero(format: &EntryFormat, entry: &Standard, below_end: u64) -> u32 {
    let geometry = &format.geometry;
    let unallocated = !(entry.allocated | entry.zeroes) & geometry.all_subclusters();
    let first_clear = below_end.div_ceil(geometry.subcluster_bytes());
    let clear = if first_clear >= u64::from(geometry.subclusters()) {
        0
    } else {
        mask(first_clear, u64::from(geometry.subclusters()))
    };
    entry.zeroes | (unallocated & clear)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{Geometry, HostOffset};

    fn format(extended: bool) -> EntryFormat {
        let geometry = Geometry::new(14, 4, extended).unwrap();
        EntryFormat {
            geometry,
            version: 3,
            data_file: false,
        }
    }

    /// The oracle: every byte on its own.
    fn byte_source(f: &EntryFormat, entry: &Standard, offset: u64) -> Source {
        let i = offset >> f.geometry.subcluster_bits();
        let host = entry.host.map(|host| host.plus(offset));
        match (entry.allocated >> i & 1, entry.zeroes >> i & 1) {
            (1, _) => Source::Data(host.unwrap()),
            (_, 1) => Source::Zero(host),
            _ => Source::Below,
        }
    }

    #[test]
    fn runs_agree_with_bytes_for_every_state_and_alignment() {
        let f = format(true);
        let start = 5 << 14;
        let patterns: [(u32, u32); 7] = [
            (0, 0),
            (u32::MAX, 0),
            (0, u32::MAX),
            (0x0f0f_0f0f, 0xf0f0_0000),
            (1, 1 << 31),
            (0x5555_5555, 0xaaaa_aaaa),
            (0xffff_0000, 0x0000_00ff),
        ];
        for (allocated, zeroes) in patterns {
            let host = Some(HostOffset(9 << 14));
            let entry = Standard {
                host,
                copied: true,
                allocated,
                zeroes,
            };
            for (from, to) in [
                (0, 16384),
                (0, 1),
                (511, 513),
                (512, 1024),
                (700, 9000),
                (16383, 16384),
            ] {
                let mut runs = Vec::new();
                map_cluster(
                    &f,
                    &L2Entry::Standard(entry),
                    start,
                    start + from..start + to,
                    &mut runs,
                );
                let mut at = start + from;
                for (i, run) in runs.iter().enumerate() {
                    assert_eq!(run.range.start, at);
                    at = run.range.end;
                    for byte in run.range.clone() {
                        let into = byte - run.range.start;
                        let expected = match run.source {
                            Source::Data(host) => Source::Data(host.plus(into)),
                            Source::Zero(host) => Source::Zero(host.map(|host| host.plus(into))),
                            other => other,
                        };
                        assert_eq!(byte_source(&f, &entry, byte - start), expected);
                    }
                    assert!(
                        i == 0 || !runs[i - 1].continues_with(run),
                        "runs are maximal"
                    );
                }
                assert_eq!(at, start + to);
            }
        }
    }

    #[test]
    fn zero_subclusters_depend_on_how_far_the_layer_below_reaches() {
        let f = format(true);
        let entry = Standard {
            host: None,
            copied: false,
            allocated: 0,
            zeroes: 1,
        };
        assert_eq!(reads_as_zero(&f, &entry, 0), u32::MAX);
        assert_eq!(reads_as_zero(&f, &entry, 513), !2);
        assert_eq!(reads_as_zero(&f, &entry, 1 << 14), 1);
        let f = format(false);
        assert_eq!(reads_as_zero(&f, &Standard::UNALLOCATED, 0), 1);
        assert_eq!(reads_as_zero(&f, &Standard::UNALLOCATED, 1), 0);
    }
}
