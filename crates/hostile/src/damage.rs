//! Fuzz target: a valid image with malicious or random changes, made where its structures are.

use std::ops::Range;
use std::sync::Arc;

use crate::draw::Draw;
use crate::file::Watched;
use crate::layout::{Layout, be64};
use crate::{samples, session};

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

/// The target's body. Without a change the image must be clean, before and after it is written.
pub fn run(input: &[u8]) {
    let mut draw = Draw::from_bytes(input);
    let sample = &samples::all()[draw.below(samples::COUNT as u64) as usize];
    if draw.one_in(16) {
        let file = Arc::new(Watched::new(sample.clone()));
        session::change(&file, &mut draw);
        assert!(session::run_check(&file).unwrap().is_clean());
        return;
    }
    let mut bytes = damage(sample, &mut draw);
    while !draw.is_empty() && draw.one_in(4) {
        bytes = damage(&bytes, &mut draw);
    }
    session::look(&Arc::new(Watched::new(bytes.clone())), &mut draw);
    session::change(&Arc::new(Watched::new(bytes)), &mut draw);
}

/// A damaged copy: one to four changes.
pub fn damage(sample: &[u8], draw: &mut Draw) -> Vec<u8> {
    let layout = Layout::of(sample);
    let mut bytes = sample.to_vec();
    for _ in 0..1 + draw.below(4) {
        match draw.below(24) {
            0..=2 => header_field(&mut bytes, &layout, draw),
            3 => extension(&mut bytes, &layout, draw),
            4..=6 => entries(&mut bytes, layout.l1.clone(), &layout, draw),
            7..=12 => {
                if !layout.l2_tables.is_empty() {
                    let at = draw.below(layout.l2_tables.len() as u64) as usize;
                    l2_entries(&mut bytes, layout.l2_tables[at].clone(), &layout, draw);
                }
            }
            13 | 14 => entries(&mut bytes, layout.refcount_table.clone(), &layout, draw),
            15 | 16 if !layout.refcount_blocks.is_empty() => {
                let at = draw.below(layout.refcount_blocks.len() as u64) as usize;
                counts(&mut bytes, layout.refcount_blocks[at].clone(), draw);
            }
            17 => {
                let len = draw.below(bytes.len() as u64 + 1);
                bytes.truncate(len as usize);
            }
            18 => {
                let more = bytes.len() + draw.below(300_000) as usize;
                bytes.resize(more, draw.pick(&[0, 0xff]));
            }
            19 => snapshots(&mut bytes, &layout, draw),
            20 => bitmaps(&mut bytes, &layout, draw),
            21 => names(&mut bytes, draw),
            _ => flips(&mut bytes, draw),
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
fn number(draw: &mut Draw) -> u64 {
    match draw.below(4) {
        0 => 1 << draw.below(64),
        1 => (1 << draw.below(64)) - 1,
        2 => draw.number() >> draw.below(48),
        _ => draw.pick(&[0, 1, 2, u64::MAX, i64::MAX as u64, 1 << 56, (1 << 56) - 512]),
    }
}

/// An offset of some structure, or of something that is none.
fn offset(bytes: &[u8], layout: &Layout, draw: &mut Draw) -> u64 {
    let end = bytes.len() as u64;
    let cluster = layout.cluster_bytes;
    let start = |places: &[Range<usize>], draw: &mut Draw| match places.len() {
        0 => 0,
        len => places[draw.below(len as u64) as usize].start as u64,
    };
    let aligned = match draw.below(9) {
        0 => 0,
        1 => layout.l1.start as u64,
        2 => layout.refcount_table.start as u64,
        3 => start(&layout.refcount_blocks, draw),
        4 => start(&layout.l2_tables, draw),
        5 => end / cluster * cluster + cluster * draw.below(4),
        6 => draw.pick(&[1 << 55, 1 << 40, (1 << 56) - cluster, 1 << 30, 1 << 62]),
        _ => draw.below(end / cluster + 1) * cluster,
    };
    match draw.below(12) {
        0 => aligned + 512,
        1 => number(draw),
        _ => aligned,
    }
}

fn header_field(bytes: &mut [u8], layout: &Layout, draw: &mut Draw) {
    let (at, len) = draw.pick(&FIELDS);
    let value = if draw.one_in(2) {
        number(draw)
    } else {
        offset(bytes, layout, draw)
    };
    put(bytes, at, &value.to_be_bytes()[8 - len..]);
}

/// Something behind the header: a bitmaps extension that lies, or garbage.
fn extension(bytes: &mut [u8], layout: &Layout, draw: &mut Draw) {
    let at = 112;
    let kind: u32 = draw.pick(&[
        0x2385_2875,
        0xe279_2aca,
        0x4441_5441,
        0x6803_f857,
        0x0537_be77,
        5,
    ]);
    let len = draw.pick(&[24u32, 16, 0, 7, 1000, u32::MAX]);
    put(bytes, at, &kind.to_be_bytes());
    put(bytes, at + 4, &len.to_be_bytes());
    put(bytes, at + 8, &u64::to_be_bytes(draw.below(3) << 32));
    put(bytes, at + 16, &number(draw).to_be_bytes());
    let place = offset(bytes, layout, draw);
    put(bytes, at + 24, &place.to_be_bytes());
    put(bytes, at + 32, &[0; 16]);
    if draw.one_in(2) {
        put(bytes, 88, &u64::to_be_bytes(1));
    }
}

fn entries(bytes: &mut [u8], table: Range<usize>, layout: &Layout, draw: &mut Draw) {
    for _ in 0..1 + draw.below(4) {
        let at = some_entry(bytes, &table, 8, draw);
        let entry = offset(bytes, layout, draw) | draw.pick(&[0, 0, COPIED, COPIED, COMPRESSED, 1]);
        put(bytes, at, &entry.to_be_bytes());
    }
}

/// The place of an entry, more often one that is in use.
fn some_entry(bytes: &[u8], table: &Range<usize>, unit: usize, draw: &mut Draw) -> usize {
    let count = (table.len() / unit).max(1) as u64;
    let mut at = table.start;
    for _ in 0..4 {
        at = table.start + draw.below(count) as usize * unit;
        if bytes.get(at..at + 8).is_some_and(|entry| entry != [0; 8]) {
            break;
        }
    }
    at
}

fn l2_entries(bytes: &mut [u8], table: Range<usize>, layout: &Layout, draw: &mut Draw) {
    let unit = if layout.extended_l2 { 16 } else { 8 };
    for _ in 0..1 + draw.below(6) {
        let at = some_entry(bytes, &table, unit, draw);
        let mut entry = offset(bytes, layout, draw);
        entry |= draw.pick(&[0, 0, COPIED, COPIED, COPIED, COMPRESSED, 1, 2, COPIED | 1]);
        if entry & COMPRESSED != 0 {
            entry |= draw.below(1 << 20) << 42 & !COPIED;
        }
        put(bytes, at, &entry.to_be_bytes());
        if layout.extended_l2 && draw.one_in(2) {
            let bitmap = draw.pick(&[0, 1, 1 << 32, 0xffff_ffff, u64::MAX, 0xff00_0000_00ff]);
            let bitmap = if draw.one_in(3) { number(draw) } else { bitmap };
            put(bytes, at + 8, &bitmap.to_be_bytes());
        }
    }
}

fn counts(bytes: &mut [u8], block: Range<usize>, draw: &mut Draw) {
    let start = block.start + draw.below(64) as usize;
    let fill = draw.pick(&[0, 0, 1, 0xff]);
    let len = draw.pick(&[1, 2, 8, 64, block.len() as u64]);
    put(bytes, start, &vec![fill; len as usize]);
}

fn flips(bytes: &mut [u8], draw: &mut Draw) {
    let span = (bytes.len() as u64).min(draw.pick(&[512, 8192, u64::MAX]));
    if span == 0 {
        return;
    }
    for _ in 0..1 + draw.below(16) {
        let at = draw.below(span) as usize;
        put(bytes, at, &[draw.number() as u8]);
    }
}

/// Appends what begins at a cluster, and returns where that is.
fn append(bytes: &mut Vec<u8>, layout: &Layout, structure: &[u8]) -> u64 {
    let start = (bytes.len() as u64).next_multiple_of(layout.cluster_bytes);
    bytes.resize(start as usize, 0);
    bytes.extend_from_slice(structure);
    start
}

/// A snapshot table, mostly well-formed, whose L1 tables are the active one or anything.
fn snapshots(bytes: &mut Vec<u8>, layout: &Layout, draw: &mut Draw) {
    let count = draw.pick(&[1u32, 2, 7, 100]);
    let mut table = Vec::new();
    for _ in 0..count {
        let l1_offset = match draw.below(3) {
            0 => offset(bytes, layout, draw),
            _ => layout.l1.start as u64,
        };
        let l1_entries = match draw.below(4) {
            0 => number(draw) as u32,
            _ => (layout.l1.len() / 8) as u32,
        };
        let [id, name] = [draw.pick(&[1u16, 0, 9]), draw.pick(&[3u16, 0, 300])];
        let extra = draw.pick(&[16u32, 24, 0, 1024, 1025, u32::MAX]);
        table.extend(l1_offset.to_be_bytes());
        table.extend(l1_entries.to_be_bytes());
        table.extend(id.to_be_bytes());
        table.extend(name.to_be_bytes());
        table.extend([0; 20]);
        table.extend(extra.to_be_bytes());
        let tail = extra.min(1024) as usize + usize::from(id) + usize::from(name);
        table.extend(std::iter::repeat_n(b'1', tail));
        table.resize(table.len().next_multiple_of(8), 0);
    }
    let start = append(bytes, layout, &table);
    let claimed = if draw.one_in(8) { 65536 } else { count };
    put(bytes, 60, &claimed.to_be_bytes());
    put(bytes, 64, &start.to_be_bytes());
}

/// A bitmap directory with its extension, mostly well-formed.
fn bitmaps(bytes: &mut Vec<u8>, layout: &Layout, draw: &mut Draw) {
    let count = draw.pick(&[1u32, 2, 50]);
    let granularity = draw.pick(&[16u8, 9, 31, 63]);
    let bits = be64(bytes, 24).div_ceil(1 << granularity.min(62));
    let mut directory = Vec::new();
    for _ in 0..count {
        let table = offset(bytes, layout, draw);
        let entries = match draw.below(4) {
            0 => number(draw) as u32,
            _ => bits.div_ceil(8).div_ceil(layout.cluster_bytes) as u32,
        };
        let name = draw.pick(&[1u16, 0, 20, 1024]);
        directory.extend(table.to_be_bytes());
        directory.extend(entries.to_be_bytes());
        directory.extend(draw.pick(&[0u32, 2, 1, 8]).to_be_bytes());
        directory.extend([draw.pick(&[1u8, 0]), granularity]);
        directory.extend(name.to_be_bytes());
        directory.extend(draw.pick(&[0u32, 8, u32::MAX]).to_be_bytes());
        directory.extend(std::iter::repeat_n(b'b', usize::from(name)));
        directory.resize(directory.len().next_multiple_of(8), 0);
    }
    let start = append(bytes, layout, &directory);
    let len = match draw.below(8) {
        0 => number(draw),
        _ => directory.len() as u64,
    };
    let at = 112;
    put(bytes, at, &0x2385_2875u32.to_be_bytes());
    put(bytes, at + 4, &24u32.to_be_bytes());
    put(
        bytes,
        at + 8,
        &u64::from(count).rotate_left(32).to_be_bytes(),
    );
    put(bytes, at + 16, &len.to_be_bytes());
    put(bytes, at + 24, &start.to_be_bytes());
    put(bytes, at + 32, &[0; 8]);
    put(bytes, 88, &u64::to_be_bytes(1));
}

/// A backing file's name, somewhere.
fn names(bytes: &mut [u8], draw: &mut Draw) {
    let at = draw.pick(&[300u64, 112, 0, 511, 1 << 20, u64::MAX]);
    let len = draw.pick(&[1u32, 20, 0, 1023, 1024, u32::MAX]);
    put(bytes, 8, &at.to_be_bytes());
    put(bytes, 16, &len.to_be_bytes());
    put(
        bytes,
        300,
        draw.pick(&[&b"base.img"[..], b"/dev/\xff", b"json:{\"a\":1}"]),
    );
}
