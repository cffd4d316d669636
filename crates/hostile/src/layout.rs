//! Where the structures of an image are, read without the engine's help and without trust.

use std::ops::Range;

/// The byte that guests write here. Eight in a row are no valid entry of any table.
pub const MARK: u8 = 0xd5;
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

/// The structures of an image, as far as they lie within the file.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// Bytes of a cluster.
    pub cluster_bytes: u64,
    /// L2 entries of 16 bytes.
    pub extended_l2: bool,
    /// The active L1 table.
    pub l1: Range<usize>,
    /// The refcount table.
    pub refcount_table: Range<usize>,
    /// The blocks that the refcount table refers to.
    pub refcount_blocks: Vec<Range<usize>>,
    /// Of the active L1 table.
    pub l2_tables: Vec<Range<usize>>,
    /// Those that are not shared, so that they keep their place.
    own_l2_tables: Vec<Range<usize>>,
}

/// Eight bytes as a number; 0 beyond the end.
pub fn be64(bytes: &[u8], at: usize) -> u64 {
    bytes
        .get(at..at + 8)
        .map_or(0, |bytes| u64::from_be_bytes(bytes.try_into().unwrap()))
}

/// Four bytes as a number; 0 beyond the end.
pub fn be32(bytes: &[u8], at: usize) -> u32 {
    (be64(bytes, at) >> 32) as u32
}

fn within(bytes: &[u8], offset: u64, len: u64) -> Range<usize> {
    let end = offset.saturating_add(len).min(bytes.len() as u64);
    (offset.min(end) as usize)..end as usize
}

impl Layout {
    /// The structures of this image.
    pub fn of(bytes: &[u8]) -> Layout {
        let cluster_bits = be32(bytes, 20).clamp(9, 21);
        let cluster_bytes = 1u64 << cluster_bits;
        let refcount_table = within(
            bytes,
            be64(bytes, 48),
            u64::from(be32(bytes, 56)) << cluster_bits,
        );
        let l1 = within(bytes, be64(bytes, 40), u64::from(be32(bytes, 36)) * 8);
        let mut layout = Layout {
            cluster_bytes,
            extended_l2: be32(bytes, 4) >= 3 && be64(bytes, 72) & 16 != 0,
            ..Layout::default()
        };
        for at in refcount_table.clone().step_by(8) {
            let block = be64(bytes, at);
            if block != 0 {
                layout
                    .refcount_blocks
                    .push(within(bytes, block, cluster_bytes));
            }
        }
        for at in l1.clone().step_by(8) {
            let table = be64(bytes, at);
            if table & OFFSET_MASK != 0 {
                let place = within(bytes, table & OFFSET_MASK, cluster_bytes);
                layout.l2_tables.push(place.clone());
                if table >> 63 == 1 {
                    layout.own_l2_tables.push(place);
                }
            }
        }
        layout.l1 = l1;
        layout.refcount_table = refcount_table;
        layout
    }

    /// Asserts invariant S3, as far as two states of the file show it: no structure has received
    /// guest data, or lost its references. A refcount table that has moved elsewhere is no
    /// structure any more.
    pub fn assert_intact(&self, before: &[u8], after: &[u8]) {
        let header = 0..(self.cluster_bytes as usize).min(before.len());
        let moved = before[..64][48..60] != after[..64][48..60];
        // The backing name lies behind the extensions, which may become longer.
        let fields = |bytes: &[u8]| [&bytes[..8], &bytes[20..48], &bytes[60..72]].concat();
        assert_eq!(fields(before), fields(after), "the header has changed");
        let (old, new) = (backing_name(before), backing_name(after));
        assert!(
            old == new,
            "the backing name {} became {}",
            shown(old),
            shown(new)
        );
        assert_no_mark("header", before, after, &header);
        assert_no_mark("L1 table", before, after, &self.l1);
        assert_keeps_entries("L1 table", before, after, &self.l1);
        if !moved {
            assert_no_mark("refcount table", before, after, &self.refcount_table);
            assert_keeps_entries("refcount table", before, after, &self.refcount_table);
        }
        for block in &self.refcount_blocks {
            assert_no_mark("refcount block", before, after, block);
        }
        for table in &self.own_l2_tables {
            assert_no_mark("L2 table", before, after, table);
        }
    }
}

fn shown(name: Option<&[u8]>) -> String {
    name.map_or("none".to_string(), |name| {
        format!("'{}'", name.escape_ascii())
    })
}

/// Without a place, or without a length, there is none; a zero byte ends it.
fn backing_name(bytes: &[u8]) -> Option<&[u8]> {
    let len = u64::from(be32(bytes, 16));
    let place = within(bytes, be64(bytes, 8), len);
    let start = place.start;
    let name = bytes[place].split(|&byte| byte == 0).next();
    name.filter(|name| start > 0 && !name.is_empty())
}

fn assert_no_mark(what: &str, before: &[u8], after: &[u8], place: &Range<usize>) {
    assert!(
        after.len() >= place.end,
        "the {what} at {place:x?} is cut off"
    );
    for at in place.clone().step_by(8) {
        let end = (at + 8).min(place.end);
        let marked = |bytes: &[u8]| bytes[at..end].iter().all(|&byte| byte == MARK);
        assert!(
            !marked(after) || marked(before),
            "a guest's bytes are in the {what} at {at:#x}"
        );
    }
}

/// Entries may come, and change their place, but not go.
fn assert_keeps_entries(what: &str, before: &[u8], after: &[u8], place: &Range<usize>) {
    for at in place.clone().step_by(8) {
        assert!(
            be64(before, at) == 0 || be64(after, at) != 0,
            "the {what} has lost its entry at {at:#x}"
        );
    }
}
