//! Persistent bitmaps as the second opinion reads them: header extension, directory, tables and
//! bits, with the clusters that they use. Only while the autoclear bit says that they are
//! consistent.

use std::ops::Range;

use super::{Reader, Thing, User};
use crate::bitmaps::Reading;

const CONSISTENT: u64 = 1;
const IN_USE: u64 = 1;
const AUTO: u64 = 2;
const FIXED_BYTES: u64 = 24;

/// A bitmap's table, and the bits that it has to have.
struct Table {
    number: u64,
    offset: u64,
    entries: u64,
    granularity: u64,
}

impl Reader<'_> {
    pub(super) fn bitmaps(&mut self) {
        if self.found.autoclear & CONSISTENT == 0 {
            return;
        }
        let Some((at, len)) = super::extension(self.content, super::BITMAPS) else {
            return self.corrupt("bitmaps are consistent, and there is no extension".to_string());
        };
        if len != 24 {
            return self.corrupt(format!("the bitmaps extension has {len} bytes"));
        }
        let field = |offset, bytes| self.content.number(at + offset, bytes);
        let (count, reserved) = (field(0, 4), field(4, 4));
        let (bytes, directory) = (field(8, 8), field(16, 8));
        if count == 0 || reserved != 0 {
            self.corrupt(format!(
                "the extension has {count} bitmaps, reserved {reserved:#x}"
            ));
        }
        if !self.reference(User(None, Thing::BitmapDirectory), directory, bytes) {
            return;
        }
        let (mut at, end) = (directory, directory + bytes);
        for number in 0..count {
            if at + FIXED_BYTES > end {
                return self.corrupt(format!("the directory ends before bitmap {number}"));
            }
            at = self.bitmap(number, at);
        }
        if at != end {
            self.corrupt(format!(
                "the directory has {bytes} bytes, and its entries end at {at:#x}"
            ));
        }
    }

    /// Reads the bitmap whose entry is there; where the next one is.
    fn bitmap(&mut self, number: u64, at: u64) -> u64 {
        let field = |offset, bytes| self.content.number(at + offset, bytes);
        let (flags, kind, bits) = (field(12, 4), field(16, 1), field(17, 1));
        let (name_bytes, extra) = (field(18, 2), field(20, 4));
        let next = (at + FIXED_BYTES + extra + name_bytes).next_multiple_of(8);
        let table = (field(0, 8), field(8, 4));
        if flags & !(IN_USE | AUTO) != 0 || kind != 1 || extra != 0 || !(9..=31).contains(&bits) {
            self.corrupt(format!(
                "bitmap {number} has flags {flags:#x}, type {kind}, granularity {bits}, extra data {extra}"
            ));
            return next;
        }
        let name = self.content.bytes(at + FIXED_BYTES, name_bytes as usize);
        let table = Table {
            number,
            offset: table.0,
            entries: table.1,
            granularity: 1 << bits,
        };
        let in_use = flags & IN_USE != 0;
        let dirty = self.bitmap_table(&table, in_use);
        self.found.bitmaps.push(Reading {
            name: String::from_utf8_lossy(&name).into_owned(),
            granularity: table.granularity,
            in_use,
            auto: flags & AUTO != 0,
            dirty: if in_use { Vec::new() } else { dirty },
        });
        next
    }

    /// Returns the dirty ranges according to a table, whose clusters are counted.
    fn bitmap_table(&mut self, table: &Table, in_use: bool) -> Vec<Range<u64>> {
        let number = table.number;
        let bits = self.size.div_ceil(table.granularity);
        let needed = bits.div_ceil(8 * self.cluster()).max(1);
        // A resize that was cut short leaves tables of the size before.
        if table.entries != needed && !in_use {
            self.corrupt(format!(
                "bitmap {number} has {} table entries, not {needed}",
                table.entries
            ));
        }
        let mut dirty = Vec::new();
        let what = User(None, Thing::BitmapTable(number));
        if !self.reference(what, table.offset, table.entries * 8) {
            return dirty;
        }
        let mut add = |bit: u64| {
            let range = bit * table.granularity..((bit + 1) * table.granularity).min(self.size);
            match dirty.last_mut() {
                Some(Range { end, .. }) if *end == range.start => *end = range.end,
                _ => dirty.push(range),
            }
        };
        let (mut clusters, mut wrong) = (Vec::new(), Vec::new());
        for index in 0..table.entries {
            let entry = self.content.number(table.offset + index * 8, 8);
            let first = index * self.cluster() * 8;
            let held = first..(first + self.cluster() * 8).min(bits);
            match entry {
                0 => {}
                1 => held.for_each(&mut add),
                _ if entry & !super::OFFSET != 0 => wrong.push((index, entry)),
                offset => {
                    clusters.push(offset);
                    let bytes = self.content.bytes(offset, self.cluster() as usize);
                    let set = |bit: u64| {
                        let at = bit - first;
                        bytes[(at / 8) as usize] >> (at % 8) & 1 == 1
                    };
                    held.clone().filter(|&bit| set(bit)).for_each(&mut add);
                    let padding = held.end.max(first)..first + self.cluster() * 8;
                    if padding.clone().any(set) && !in_use {
                        wrong.push((index, entry));
                    }
                }
            }
        }
        for offset in clusters {
            self.reference(User(None, Thing::Bits(number)), offset, self.cluster());
        }
        for (index, entry) in wrong {
            self.corrupt(format!(
                "entry {index} of bitmap {number} is {entry:#x}, or has bits beyond the end"
            ));
        }
        dirty
    }
}
