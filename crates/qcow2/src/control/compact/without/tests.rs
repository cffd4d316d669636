//! The parts that a cluster loses, against a model of each subcluster.

#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use super::*;
use crate::geometry::{Geometry, HostOffset};
use crate::map::{Source, map_cluster};
use crate::random::Random;

const HOST: HostOffset = HostOffset(7 << 14);

fn format(extended: bool) -> EntryFormat {
    EntryFormat {
        geometry: Geometry::new(14, 4, extended).unwrap(),
        version: 3,
        data_file: false,
    }
}

/// Where a subcluster's first byte comes from.
fn source(format: &EntryFormat, entry: &L2Entry, index: u32) -> Source {
    let at = u64::from(index) * format.geometry.subcluster_bytes();
    let mut runs = Vec::new();
    map_cluster(format, entry, 0, at..at + 1, &mut runs);
    runs[0].source
}

/// A mask with few, some or nearly all bits.
fn mask(random: &mut Random, all: SubclusterMask) -> SubclusterMask {
    let (one, other) = (random.next() as u32, random.next() as u32);
    all & match random.next() % 5 {
        0 => one & other,
        1 => one | other,
        2 => 0,
        3 => all,
        _ => one,
    }
}

#[test]
fn each_subcluster_reads_as_it_did_and_what_is_freed_was_redundant() {
    let random = &mut Random(5);
    let (mut wholes, mut parts) = (0, 0);
    for round in 0..20_000 {
        let extended = round % 4 != 0;
        let format = format(extended);
        let all = format.geometry.all_subclusters();
        let allocated = mask(random, all);
        let zeroes = mask(random, all) & !allocated;
        let entry = L2Entry::Standard(Standard {
            host: Some(HOST),
            copied: true,
            allocated,
            zeroes,
        });
        // Only data was compared.
        let found = Redundant {
            zero: mask(random, all) & allocated,
            like_below: mask(random, all) & allocated,
        };
        let ways = Ways {
            zeroes: [Zeroes::Stay, Zeroes::Unmapped, Zeroes::Flagged][round % 3],
            like_below: true,
            in_parts: !random.next().is_multiple_of(3),
        };
        let found = match ways.zeroes {
            Zeroes::Stay => Redundant { zero: 0, ..found },
            Zeroes::Unmapped | Zeroes::Flagged => found,
        };
        let what = format!("{entry:?} {found:?} {ways:?}");
        let Some((new, freed)) = without(&format, &entry, found, ways) else {
            let may_stay = (found.zero | found.like_below) & allocated == 0 || !ways.in_parts;
            assert!(allocated != 0 && may_stay, "{what}");
            continue;
        };
        let mut dropped = 0;
        for index in 0..format.geometry.subclusters() {
            let is = |mask: SubclusterMask| mask >> index & 1 != 0;
            let (before, after) = (source(&format, &entry, index), source(&format, &new, index));
            match (before, after) {
                (Source::Data(_), Source::Data(_)) => assert_eq!(before, after, "{what}"),
                (Source::Data(_), Source::Below) => {
                    let is_unmapped = is(found.zero) && ways.zeroes == Zeroes::Unmapped;
                    assert!(is(found.like_below) || is_unmapped, "{what}");
                    dropped |= 1 << index;
                }
                (Source::Data(_), Source::Zero(_)) => {
                    assert!(is(found.zero) && !is(found.like_below), "{what}");
                    dropped |= 1 << index;
                }
                (Source::Below, _) => assert_eq!(after, Source::Below, "{what}"),
                (Source::Zero(_), _) => assert!(matches!(after, Source::Zero(_)), "{what}"),
                (Source::Compressed(..), _) | (Source::Data(_), Source::Compressed(..)) => {
                    unreachable!("it is not compressed")
                }
            }
        }
        match (freed, new) {
            (Freed::Cluster(host), L2Entry::Standard(new)) => {
                assert_eq!((host, new.host, new.copied), (HOST, None, false), "{what}");
                wholes += 1;
            }
            (Freed::Subclusters(host, mask), L2Entry::Standard(new)) => {
                assert_eq!(
                    (host, new.host, new.copied),
                    (HOST, Some(HOST), true),
                    "{what}"
                );
                assert_eq!(mask, dropped, "{what}");
                assert!(ways.in_parts && mask != 0, "{what}");
                parts += 1;
            }
            (Freed::Compressed(_), _) | (_, L2Entry::Compressed(_)) => panic!("{what}"),
        }
    }
    assert!(wholes > 1000 && parts > 1000, "{wholes} {parts}");
}

#[test]
fn a_compressed_cluster_goes_as_a_whole_or_stays() {
    let format = format(true);
    let place = crate::run::Compressed {
        start: 5 << 14,
        len: 700,
    };
    let entry = L2Entry::Compressed(place);
    let ways = Ways {
        zeroes: Zeroes::Flagged,
        like_below: true,
        in_parts: true,
    };
    let all = Redundant {
        zero: 0xff,
        like_below: !0xf0,
    };
    let (new, freed) = without(&format, &entry, all, ways).unwrap();
    let expected = Standard {
        zeroes: 0xf0,
        ..Standard::UNALLOCATED
    };
    assert_eq!(new, L2Entry::Standard(expected));
    assert_eq!(freed, Freed::Compressed(place));
    let most = Redundant {
        zero: 0xff,
        like_below: 0x7fff_ff00,
    };
    assert_eq!(without(&format, &entry, most, ways), None);
}
