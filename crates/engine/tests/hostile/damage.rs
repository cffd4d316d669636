//! Seeded damage: one to four malicious or random changes of a valid image.

use std::ops::Range;

use super::Random;
use super::layout::Layout;

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

/// Header fields: offset and bytes.
const FIELDS: [(usize, usize); 20] = [
    (0, 4),
    (4, 4),
    (8, 8),
    (16, 4),
    (20, 4),
    (24, 8),
    (32, 4),
    (36, 4),
    (40, 8),
    (48, 8),
    (56, 4),
    (60, 4),
    (64, 8),
    (72, 8),
    (80, 8),
    (88, 8),
    (96, 4),
    (100, 4),
    (104, 1),
    (105, 7),
];

/// A damaged copy.
pub fn damage(sample: &[u8], random: &mut Random) -> Vec<u8> {
    let layout = Layout::of(sample);
    let mut bytes = sample.to_vec();
    for _ in 0..1 + random.below(4) {
        match random.below(20) {
            0..=2 => header_field(&mut bytes, &layout, random),
            3 => extension(&mut bytes, &layout, random),
            4..=6 => entries(&mut bytes, layout.l1.clone(), &layout, random),
            7..=12 => {
                if !layout.l2_tables.is_empty() {
                    let at = random.below(layout.l2_tables.len() as u64) as usize;
                    l2_entries(&mut bytes, layout.l2_tables[at].clone(), &layout, random);
                }
            }
            13 | 14 => entries(&mut bytes, layout.refcount_table.clone(), &layout, random),
            15 | 16 => {
                let at = random.below(layout.refcount_blocks.len() as u64) as usize;
                counts(&mut bytes, layout.refcount_blocks[at].clone(), random);
            }
            17 => {
                let len = random.below(bytes.len() as u64 + 1);
                bytes.truncate(len as usize);
            }
            18 => {
                let more = bytes.len() + random.below(300_000) as usize;
                bytes.resize(more, random.pick(&[0, 0xff]));
            }
            _ => flips(&mut bytes, random),
        }
    }
    bytes
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    for (at, &byte) in (at..).zip(value) {
        if let Some(place) = bytes.get_mut(at) {
            *place = byte;
        }
    }
}

/// A number that sizes and counts are bad at.
fn number(random: &mut Random) -> u64 {
    match random.below(4) {
        0 => 1 << random.below(64),
        1 => (1 << random.below(64)) - 1,
        2 => random.next() >> random.below(48),
        _ => random.pick(&[0, 1, 2, u64::MAX, i64::MAX as u64, 1 << 56, (1 << 56) - 512]),
    }
}

/// An offset of some structure, or of something that is none.
fn offset(bytes: &[u8], layout: &Layout, random: &mut Random) -> u64 {
    let end = bytes.len() as u64;
    let cluster = layout.cluster_bytes;
    let start = |places: &[Range<usize>], random: &mut Random| match places.len() {
        0 => 0,
        len => places[random.below(len as u64) as usize].start as u64,
    };
    let aligned = match random.below(9) {
        0 => 0,
        1 => layout.l1.start as u64,
        2 => layout.refcount_table.start as u64,
        3 => start(&layout.refcount_blocks, random),
        4 => start(&layout.l2_tables, random),
        5 => end / cluster * cluster + cluster * random.below(4),
        6 => random.pick(&[1 << 55, 1 << 40, (1 << 56) - cluster, 1 << 30, 1 << 62]),
        _ => random.below(end / cluster + 1) * cluster,
    };
    match random.below(12) {
        0 => aligned + 512,
        1 => number(random),
        _ => aligned,
    }
}

fn header_field(bytes: &mut [u8], layout: &Layout, random: &mut Random) {
    let (at, len) = random.pick(&FIELDS);
    let value = if random.one_in(2) {
        number(random)
    } else {
        offset(bytes, layout, random)
    };
    put(bytes, at, &value.to_be_bytes()[8 - len..]);
}

/// Something behind the header: a bitmaps extension that lies, or garbage.
fn extension(bytes: &mut [u8], layout: &Layout, random: &mut Random) {
    let at = 112;
    let kind: u32 = random.pick(&[
        0x2385_2875,
        0xe279_2aca,
        0x4441_5441,
        0x6803_f857,
        0x0537_be77,
        5,
    ]);
    let len = random.pick(&[24u32, 16, 0, 7, 1000, u32::MAX]);
    put(bytes, at, &kind.to_be_bytes());
    put(bytes, at + 4, &len.to_be_bytes());
    put(bytes, at + 8, &u64::to_be_bytes(random.below(3) << 32));
    put(bytes, at + 16, &number(random).to_be_bytes());
    let place = offset(bytes, layout, random);
    put(bytes, at + 24, &place.to_be_bytes());
    put(bytes, at + 32, &[0; 16]);
    if random.one_in(2) {
        put(bytes, 88, &u64::to_be_bytes(1));
    }
}

fn entries(bytes: &mut [u8], table: Range<usize>, layout: &Layout, random: &mut Random) {
    for _ in 0..1 + random.below(4) {
        let at = some_entry(bytes, &table, 8, random);
        let entry =
            offset(bytes, layout, random) | random.pick(&[0, 0, COPIED, COPIED, COMPRESSED, 1]);
        put(bytes, at, &entry.to_be_bytes());
    }
}

/// The place of an entry, more often one that is in use.
fn some_entry(bytes: &[u8], table: &Range<usize>, unit: usize, random: &mut Random) -> usize {
    let count = (table.len() / unit).max(1) as u64;
    let mut at = table.start;
    for _ in 0..4 {
        at = table.start + random.below(count) as usize * unit;
        if bytes.get(at..at + 8).is_some_and(|entry| entry != [0; 8]) {
            break;
        }
    }
    at
}

fn l2_entries(bytes: &mut [u8], table: Range<usize>, layout: &Layout, random: &mut Random) {
    let unit = if layout.extended_l2 { 16 } else { 8 };
    for _ in 0..1 + random.below(6) {
        let at = some_entry(bytes, &table, unit, random);
        let mut entry = offset(bytes, layout, random);
        entry |= random.pick(&[0, 0, COPIED, COPIED, COPIED, COMPRESSED, 1, 2, COPIED | 1]);
        if entry & COMPRESSED != 0 {
            entry |= random.below(1 << 20) << 42 & !COPIED;
        }
        put(bytes, at, &entry.to_be_bytes());
        if layout.extended_l2 && random.one_in(2) {
            let bitmap = random.pick(&[0, 1, 1 << 32, 0xffff_ffff, u64::MAX, 0xff00_0000_00ff]);
            let bitmap = if random.one_in(3) {
                number(random)
            } else {
                bitmap
            };
            put(bytes, at + 8, &bitmap.to_be_bytes());
        }
    }
}

fn counts(bytes: &mut [u8], block: Range<usize>, random: &mut Random) {
    let start = block.start + random.below(64) as usize;
    let fill = random.pick(&[0, 0, 1, 0xff]);
    let len = random.pick(&[1, 2, 8, 64, block.len() as u64]);
    put(bytes, start, &vec![fill; len as usize]);
}

fn flips(bytes: &mut [u8], random: &mut Random) {
    let span = (bytes.len() as u64).min(random.pick(&[512, 8192, u64::MAX]));
    if span == 0 {
        return;
    }
    for _ in 0..1 + random.below(16) {
        let at = random.below(span) as usize;
        put(bytes, at, &[random.next() as u8]);
    }
}
