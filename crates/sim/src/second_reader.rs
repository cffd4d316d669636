//! Reads what a guest sees from the files alone, without the engine: the second opinion on bytes.
//!
//! Compressed clusters are left out.

use crate::cipher::Cipher;
use crate::disk::SimDisk;
use crate::disk::content::Content;
use crate::names::DATA;

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

/// An image and what lies below it.
#[derive(Clone, Debug)]
pub struct Layer {
    content: Content,
    /// The cipher of its guest data.
    cipher: Option<Cipher>,
    /// Where a raw disk begins in its file.
    start: u64,
    /// Where its guest data is, if that is another file.
    data: Option<Content>,
    /// `None`: a raw image.
    table: Option<Table>,
    size: u64,
    below: Option<Box<Layer>>,
}

#[derive(Clone, Debug)]
struct Table {
    cluster_bits: u32,
    extended: bool,
    version: u64,
    l1: (u64, u64),
}

impl Layer {
    /// The same image with its guest data encrypted so; that of a raw disk begins at `start` in its
    /// file.
    pub fn encrypted(self, cipher: Option<Cipher>, start: u64) -> Layer {
        let size = match self.table {
            Some(_) => self.size,
            None => self.size.saturating_sub(start),
        };
        Layer {
            cipher,
            start,
            size,
            ..self
        }
    }

    /// The image as it was when the snapshot of this number in the table was taken.
    pub fn at_snapshot(&self, number: usize) -> Option<Layer> {
        let field = |offset, bytes| self.content.number(offset, bytes);
        let mut at = field(64, 8);
        for _ in 0..number {
            let names = field(at + 12, 2) + field(at + 14, 2);
            at = (at + 40 + field(at + 36, 4) + names).next_multiple_of(8);
        }
        let mut layer = self.clone();
        layer.table.as_mut()?.l1 = (field(at, 8), field(at + 8, 4));
        if field(at + 36, 4) >= 16 {
            layer.size = field(at + 48, 8);
        }
        Some(layer)
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The image of that name, and its chain. `None` if a file is missing.
    pub fn open(disk: &SimDisk, name: &str) -> Option<Layer> {
        let content = disk.content(name)?;
        let field = |offset, bytes| content.number(offset, bytes);
        if content.len() < 72 || field(0, 4) != 0x5146_49fb {
            return Some(Layer {
                size: content.len(),
                content,
                cipher: None,
                start: 0,
                data: None,
                table: None,
                below: None,
            });
        }
        let version = field(4, 4);
        let features = if version == 3 { field(72, 8) } else { 0 };
        let table = Table {
            cluster_bits: field(20, 4) as u32,
            extended: features & 16 != 0,
            version,
            l1: (field(40, 8), field(36, 4)),
        };
        let (at, len) = (field(8, 8), field(16, 4));
        let below = if at == 0 {
            None
        } else {
            let name = String::from_utf8(content.bytes(at, len as usize)).ok()?;
            Some(Box::new(Layer::open(disk, &name)?))
        };
        let data = if features & 4 != 0 {
            Some(disk.content(DATA)?)
        } else {
            None
        };
        Some(Layer {
            size: field(24, 8),
            data,
            table: Some(table),
            below,
            content,
            cipher: None,
            start: 0,
        })
    }

    /// Reads a range of the disk; `known` says which bytes were read.
    pub fn read(&self, offset: u64, bytes: &mut [u8], known: &mut [bool]) {
        let Some(table) = &self.table else {
            let within = (self.size.saturating_sub(offset) as usize).min(bytes.len());
            bytes.fill(0);
            self.read_raw(offset, &mut bytes[..within]);
            return known.fill(true);
        };
        self.read_units(table, (offset, self.size), bytes, known);
    }

    /// Reads a range of a raw disk.
    fn read_raw(&self, offset: u64, bytes: &mut [u8]) {
        let Some(cipher) = &self.cipher else {
            return self.content.read(self.start + offset, bytes);
        };
        let end = offset + bytes.len() as u64;
        let sectors = offset / 512 * 512..end.next_multiple_of(512);
        let len = (sectors.end - sectors.start) as usize;
        let mut whole = self.content.bytes(self.start + sectors.start, len);
        cipher.read((self.start + sectors.start, sectors.start), &mut whole);
        let skipped = (offset - sectors.start) as usize;
        bytes.copy_from_slice(&whole[skipped..skipped + bytes.len()]);
    }

    /// Reads a range of the VM state, which begins at the first L1 entry behind the disk and has
    /// nothing below.
    pub fn read_vm_state(&self, offset: u64, bytes: &mut [u8], known: &mut [bool]) {
        if let Some(table) = &self.table {
            let entry_bytes = if table.extended { 16 } else { 8 };
            let mapped = (1u64 << table.cluster_bits << table.cluster_bits) / entry_bytes;
            let begin = self.size.next_multiple_of(mapped);
            self.read_units(table, (begin + offset, u64::MAX), bytes, known);
        }
    }

    /// Reads guest offsets below `end`.
    fn read_units(
        &self,
        table: &Table,
        (offset, end): (u64, u64),
        bytes: &mut [u8],
        known: &mut [bool],
    ) {
        let unit = match table.extended {
            true => 1 << (table.cluster_bits - 5),
            false => 1 << table.cluster_bits,
        };
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let len = ((unit - at % unit) as usize).min(bytes.len() - done);
            let part = done..done + len;
            let (bytes, known) = (&mut bytes[part.clone()], &mut known[part]);
            self.read_unit(table, (at, end), bytes, known);
            done += len;
        }
    }

    /// Reads within one subcluster.
    fn read_unit(
        &self,
        table: &Table,
        (at, end): (u64, u64),
        bytes: &mut [u8],
        known: &mut [bool],
    ) {
        known.fill(true);
        bytes.fill(0);
        if at >= end {
            return;
        }
        let entry_bytes = if table.extended { 16 } else { 8 };
        let cluster = 1u64 << table.cluster_bits;
        let (index, per_table) = (at >> table.cluster_bits, cluster / entry_bytes);
        let mut entry = (0, 0);
        if index / per_table < table.l1.1 {
            let l1 = self.content.number(table.l1.0 + index / per_table * 8, 8) & OFFSET;
            if l1 != 0 {
                let place = l1 + index % per_table * entry_bytes;
                entry.0 = self.content.number(place, 8);
                if table.extended {
                    entry.1 = self.content.number(place + 8, 8);
                }
            }
        }
        let (word, bitmap) = entry;
        if word & COMPRESSED != 0 {
            return known.fill(false);
        }
        let sub = at % cluster * 32 / cluster;
        let present = word & OFFSET != 0 || (self.data.is_some() && word & COPIED != 0);
        let (allocated, zero) = match table.extended {
            true => (bitmap >> sub & 1 != 0, bitmap >> (sub + 32) & 1 != 0),
            false => (present, table.version == 3 && word & 1 != 0),
        };
        if zero {
            return;
        }
        if allocated {
            let place = (word & OFFSET) + at % cluster;
            return self.read_data((place, at), bytes);
        }
        if let (Some(below), true) = (&self.below, at < self.size) {
            let within = (below.size.saturating_sub(at) as usize).min(bytes.len());
            below.read(at, &mut bytes[..within], &mut known[..within]);
        }
    }

    /// Reads guest data that is at `host` in its file and at `guest` for the guest.
    fn read_data(&self, (host, guest): (u64, u64), bytes: &mut [u8]) {
        let file = self.data.as_ref().unwrap_or(&self.content);
        let Some(cipher) = &self.cipher else {
            return file.read(host, bytes);
        };
        let before = host % 512;
        let mut sectors = vec![0; (before as usize + bytes.len()).next_multiple_of(512)];
        file.read(host - before, &mut sectors);
        cipher.read((host - before, guest - before), &mut sectors);
        bytes.copy_from_slice(&sectors[before as usize..][..bytes.len()]);
    }
}
