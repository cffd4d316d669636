//! The bitmaps of an image as a value: the directory as it is on disk, its changes in memory,
//! and the permitted changes. Pure.
//!
//! Entries are kept byte for byte, extra data too, so that unknown fields survive.

use std::ops::Range;

use super::bits::DirtyBits;
use crate::entry::bitmap::{
    BITS_BYTES_MAX, COUNT_MAX, DIRECTORY_BYTES_MAX, FIXED_BYTES, Fixed, GRANULARITY_BITS,
    NAME_BYTES_MAX,
};
use crate::geometry::Geometry;
use crate::inspect::before_zero;
use crate::{Error, Result};

/// Bytes that the bits of an image's bitmaps may take in memory together.
const BITS_BYTES_IN_MEMORY_MAX: u64 = 1 << 30;
/// Bounds of a new bitmap's default granularity, in bytes: a cluster, clamped to this range.
const DEFAULT_GRANULARITY: Range<u64> = 4096..65536;

/// A change to a bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BitmapChange {
    /// It comes into being, clean, and follows all writes from now on.
    Add {
        /// Bytes of the disk that a bit stands for: a power of 2 from 512 to 2 GiB. `None` is a
        /// cluster, but 4 KiB at least and 64 KiB at most.
        granularity: Option<u64>,
    },
    /// It ceases to exist. The only thing that can be done with one that was not saved properly.
    Remove,
    /// Nothing has changed, from its point of view.
    Clear,
    /// It follows writes from now on.
    Enable,
    /// It stays as it is.
    Disable,
    /// The bits of another bitmap of the image are set in it, too.
    Merge(String),
    /// The bits of a bitmap from elsewhere are set in it, too.
    MergeBits(DirtyBits),
}

/// An entry of the bitmap directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Fields of fixed length of the directory entry.
    pub fixed: Fixed,
    extra: Vec<u8>,
    name: Vec<u8>,
}

impl Entry {
    /// The name, for messages and reports.
    pub fn name(&self) -> String {
        String::from_utf8_lossy(&self.name).into_owned()
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend(self.fixed.encode());
        out.extend(&self.extra);
        out.extend(&self.name);
        out.resize(start + self.fixed.entry_bytes() as usize, 0);
    }
}

/// Decodes a directory of `count` entries.
///
/// # Errors
/// Where it contradicts itself (an offset within it), and how.
pub fn decode(bytes: &[u8], count: u32) -> std::result::Result<Vec<Entry>, (u64, &'static str)> {
    let mut entries = Vec::new();
    let mut at = 0;
    for _ in 0..count {
        let rest = &bytes[at..];
        let failed = |why| (at as u64, why);
        let fixed = rest.get(..FIXED_BYTES).map(Fixed::decode);
        let fixed = fixed.ok_or(failed("the directory ends before its last entry"))?;
        let len = usize::try_from(fixed.entry_bytes()).unwrap_or(usize::MAX);
        let entry = rest
            .get(..len)
            .ok_or(failed("an entry is longer than the directory"))?;
        if let Some(flaw) = fixed.flaw() {
            return Err(failed(flaw));
        }
        let names = FIXED_BYTES + fixed.extra_bytes as usize;
        entries.push(Entry {
            fixed,
            extra: entry[FIXED_BYTES..names].to_vec(),
            name: entry[names..names + usize::from(fixed.name_bytes)].to_vec(),
        });
        at += len;
    }
    match at == bytes.len() {
        true => Ok(entries),
        false => Err((at as u64, "the directory is longer than its entries")),
    }
}

/// The bytes of a directory.
pub fn encode<'a>(entries: impl Iterator<Item = &'a Entry>) -> Vec<u8> {
    let mut out = Vec::new();
    entries.for_each(|entry| entry.encode(&mut out));
    out
}

/// The state of a bitmap's bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bits {
    /// They were not saved properly: they say nothing.
    Lost,
    /// They are on disk, and correct there.
    Stored,
    /// They are in memory.
    Loaded {
        /// The bitmap has these bits.
        bits: DirtyBits,
        /// They differ from those on disk.
        changed: bool,
    },
}

/// A dirty bitmap of an open image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// The entry as it was read from disk, or name and granularity of a new one; flags and table
    /// may have changed since.
    pub entry: Entry,
    /// Writes of the guest set its bits.
    pub enabled: bool,
    /// Bits, or where the file has them.
    pub bits: Bits,
}

impl Bitmap {
    fn of(entry: Entry) -> Bitmap {
        Bitmap {
            enabled: entry.fixed.auto(),
            bits: match entry.fixed.in_use() {
                true => Bits::Lost,
                false => Bits::Stored,
            },
            entry,
        }
    }

    fn refuse_lost(&self) -> Result<()> {
        match self.bits {
            Bits::Lost => Err(Error::Invalid(format!(
                "Bitmap '{}' is inconsistent and cannot be used\nTry block-dirty-bitmap-remove to delete this bitmap \
                 from disk",
                self.entry.name()
            ))),
            Bits::Stored | Bits::Loaded { .. } => Ok(()),
        }
    }

    /// Bytes that its bits take, for a disk of that size.
    fn bits_bytes(&self, disk_bytes: u64) -> u64 {
        disk_bytes
            .div_ceil(1 << self.entry.fixed.granularity_bits)
            .div_ceil(8)
    }
}

/// Which bitmaps are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Those that follow writes.
    Following,
    /// All that were saved properly.
    All,
}

impl Which {
    fn includes(self, bitmap: &Bitmap) -> bool {
        bitmap.bits != Bits::Lost && (self == Which::All || bitmap.enabled)
    }
}

/// All bitmaps of an image that is open for writing.
#[derive(Clone, Debug, Default)]
pub struct Bitmaps {
    /// The directory on disk.
    directory: Vec<Entry>,
    list: Vec<Bitmap>,
    /// The list differs from that on disk, apart from bits.
    edited: bool,
    /// The disk gets another size: those that follow no writes are marked too.
    resizing: bool,
    /// All that follow writes are in memory, and on disk all that will not be right any more are
    /// marked, durably.
    tracking: bool,
}

impl Bitmaps {
    /// As they are on disk.
    pub fn new(directory: Vec<Entry>) -> Bitmaps {
        Bitmaps {
            list: directory.iter().cloned().map(Bitmap::of).collect(),
            directory,
            edited: false,
            resizing: false,
            tracking: false,
        }
    }

    /// The bitmaps, in the order of the directory.
    pub fn list(&self) -> &[Bitmap] {
        &self.list
    }

    /// The directory on disk.
    pub fn directory(&self) -> &[Entry] {
        &self.directory
    }

    /// The table of a bitmap is at another place, on disk, too.
    pub fn table_moved(&mut self, from: u64, to: u64) {
        let listed = self.list.iter_mut().map(|bitmap| &mut bitmap.entry);
        for entry in listed.chain(&mut self.directory) {
            if entry.fixed.table_offset == from {
                entry.fixed.table_offset = to;
            }
        }
    }

    /// Returns whether memory has changes that have to be written to disk.
    pub fn is_to_be_stored(&self) -> bool {
        let is_loaded = |bitmap: &Bitmap| matches!(bitmap.bits, Bits::Loaded { .. });
        self.edited || self.tracking && self.list.iter().any(is_loaded)
    }

    /// Returns whether a bitmap follows writes.
    pub fn follow_writes(&self) -> bool {
        self.list.iter().any(|bitmap| bitmap.enabled)
    }

    /// The guest's bytes in this range change, or will.
    pub fn mark(&mut self, range: &Range<u64>) {
        for bitmap in self.list.iter_mut().filter(|bitmap| bitmap.enabled) {
            if let Bits::Loaded { bits, changed } = &mut bitmap.bits {
                *changed |= bits.mark(range);
            }
        }
    }

    /// Returns which bitmaps have to be brought into memory.
    pub fn to_load(&self, which: Which) -> Vec<usize> {
        let wanted = |bitmap: &Bitmap| bitmap.bits == Bits::Stored && which.includes(bitmap);
        let list = self.list.iter().enumerate();
        list.filter(|(_, bitmap)| wanted(bitmap))
            .map(|(at, _)| at)
            .collect()
    }

    /// Refuses to have so much in memory, before any of it is read.
    ///
    /// # Errors
    /// `Invalid`, and which bitmap goes beyond the limits.
    pub fn refuse_too_large(&self, which: Which, disk_bytes: u64) -> Result<()> {
        let mut sum = 0;
        for bitmap in self.list.iter().filter(|bitmap| which.includes(bitmap)) {
            let bytes = bitmap.bits_bytes(disk_bytes);
            sum += bytes;
            if bytes > BITS_BYTES_MAX || sum > BITS_BYTES_IN_MEMORY_MAX {
                return Err(Error::Invalid(format!(
                    "Bitmap '{}' is too large: its bits would take {bytes} bytes, {sum} with those before it; {} and {} \
                     are the most",
                    bitmap.entry.name(),
                    BITS_BYTES_MAX,
                    BITS_BYTES_IN_MEMORY_MAX
                )));
            }
        }
        Ok(())
    }

    /// The bits of a bitmap have been read.
    pub fn loaded(&mut self, at: usize, bits: DirtyBits) {
        self.list[at].bits = Bits::Loaded {
            bits,
            changed: false,
        };
    }

    /// The directory as it has to be on disk before anything changes; `None` if it is. What follows
    /// writes there is marked, whatever the list in memory has made of it; and all of it before a
    /// resize, since tables are as long as the disk asks for.
    pub fn marked(&self) -> Option<Vec<Entry>> {
        let mut marked = self.directory.clone();
        for entry in &mut marked {
            if entry.fixed.auto() || self.resizing {
                entry.fixed = entry.fixed.marked_in_use();
            }
        }
        (marked != self.directory).then_some(marked)
    }

    /// The directory on disk is marked, durably, and what follows writes is in memory.
    pub fn now_tracking(&mut self, marked: Option<Vec<Entry>>) {
        debug_assert!(self.to_load(Which::Following).is_empty(), "they are loaded");
        if let Some(directory) = marked {
            self.directory = directory;
        }
        self.tracking = true;
    }

    /// All is on disk as this list has it.
    pub fn now_stored(&mut self, directory: Vec<Entry>) {
        *self = Bitmaps::new(directory);
    }

    /// Adapts to a new size of the disk; an added range counts as changed.
    pub fn resize(&mut self, disk_bytes: u64) {
        for bitmap in &mut self.list {
            let enabled = bitmap.enabled;
            if let Bits::Loaded { bits, changed } = &mut bitmap.bits {
                let old = bits.disk_bytes();
                bits.resize(disk_bytes);
                if enabled {
                    bits.mark(&(old..disk_bytes));
                }
                *changed = true;
            }
        }
    }

    /// Every bitmap can get another size.
    ///
    /// # Errors
    /// `Invalid`: a bitmap was not saved properly, would be too large, or have no bit.
    pub fn refuse_resize(&self, disk_bytes: u64) -> Result<()> {
        self.list.iter().try_for_each(Bitmap::refuse_lost)?;
        if let (0, Some(bitmap)) = (disk_bytes, self.list.first()) {
            let name = bitmap.entry.name();
            return Err(Error::Invalid(format!(
                "A disk of no bytes cannot have bitmap '{name}': it has to have a bit"
            )));
        }
        self.refuse_too_large(Which::All, disk_bytes)
    }

    /// All of them are about to change on disk.
    pub fn about_to_resize(&mut self) {
        self.edited = true;
        self.resizing = true;
    }

    /// There are none any more.
    pub fn remove_all(&mut self) {
        self.edited |= !self.list.is_empty();
        self.list.clear();
    }

    /// The position of a bitmap.
    ///
    /// # Errors
    /// `Invalid` if there is none, in QEMU's words.
    pub fn find(&self, name: &str) -> Result<usize> {
        let found = self
            .list
            .iter()
            .position(|bitmap| before_zero(&bitmap.entry.name) == name.as_bytes());
        found.ok_or_else(|| Error::Invalid(format!("Dirty bitmap '{name}' not found")))
    }

    /// The position of a bitmap whose bits can be read.
    ///
    /// # Errors
    /// As [`Bitmaps::find`], and if they were not saved properly.
    pub fn find_sound(&self, name: &str) -> Result<usize> {
        let at = self.find(name)?;
        self.list[at].refuse_lost()?;
        Ok(at)
    }

    /// The bitmaps whose bits a change needs in memory.
    ///
    /// # Errors
    /// `Invalid`: the change cannot be, in QEMU's words.
    pub fn needed_for(&self, name: &str, change: &BitmapChange) -> Result<Vec<usize>> {
        let mut needed = Vec::new();
        match change {
            BitmapChange::Add { .. } => {}
            BitmapChange::Remove => drop(self.find(name)?),
            BitmapChange::Clear | BitmapChange::Disable => drop(self.find_sound(name)?),
            // An enabled bitmap continues from its present bits.
            BitmapChange::Enable => needed.push(self.find_sound(name)?),
            BitmapChange::Merge(source) => {
                needed.push(self.find(name)?);
                needed.push(self.find_sound(source)?);
                self.find_sound(name)?;
            }
            BitmapChange::MergeBits(_) => needed.push(self.find_sound(name)?),
        }
        needed.retain(|&at| self.list[at].bits == Bits::Stored);
        Ok(needed)
    }

    /// Changes a bitmap in memory, for a disk of that size in the file of that name; what it needs
    /// is loaded.
    ///
    /// # Errors
    /// As [`Bitmaps::needed_for`], or `Invalid` for a bitmap that cannot be added.
    pub fn change(
        &mut self,
        name: &str,
        change: &BitmapChange,
        (geometry, disk_bytes, file): (&Geometry, u64, &str),
    ) -> Result<()> {
        debug_assert_eq!(self.needed_for(name, change)?, [], "they are loaded");
        match change {
            BitmapChange::Add { granularity } => {
                let granularity = granularity.unwrap_or_else(|| default_granularity(geometry));
                let bitmap = self.new_bitmap((name, file), granularity, disk_bytes)?;
                self.list.push(bitmap);
            }
            BitmapChange::Remove => drop(self.list.remove(self.find(name)?)),
            BitmapChange::Clear => {
                let at = self.find_sound(name)?;
                let bits = DirtyBits::clean(self.list[at].entry.fixed.granularity_bits, disk_bytes);
                self.list[at].bits = Bits::Loaded {
                    bits,
                    changed: true,
                };
            }
            BitmapChange::Enable | BitmapChange::Disable => {
                let at = self.find_sound(name)?;
                self.list[at].enabled = *change == BitmapChange::Enable;
            }
            BitmapChange::Merge(source) => {
                let source = self.find_sound(source)?;
                if let Bits::Loaded { bits, .. } = self.list[source].bits.clone() {
                    self.merge(name, &bits)?;
                }
            }
            BitmapChange::MergeBits(bits) => self.merge(name, bits)?,
        }
        self.edited = true;
        Ok(())
    }

    fn merge(&mut self, name: &str, source: &DirtyBits) -> Result<()> {
        let at = self.find_sound(name)?;
        if let Bits::Loaded { bits, changed } = &mut self.list[at].bits {
            if bits.disk_bytes() != source.disk_bytes() {
                let text = format!(
                    "Bitmaps are of different sizes (destination size is {}, source size is {}) and \
                                    can't be merged",
                    bits.disk_bytes(),
                    source.disk_bytes()
                );
                return Err(Error::Invalid(text));
            }
            *changed |= bits.merge(source);
        }
        Ok(())
    }

    fn new_bitmap(
        &self,
        (name, file): (&str, &str),
        granularity: u64,
        disk_bytes: u64,
    ) -> Result<Bitmap> {
        let refuse = |text: String| Err(Error::Invalid(text));
        let bits = granularity.trailing_zeros() as u8;
        if name.is_empty() {
            return refuse("Bitmap name cannot be empty".to_string());
        }
        if !granularity.is_power_of_two() || !GRANULARITY_BITS.contains(&bits) {
            return refuse("Granularity must be power of 2 and at least 512".to_string());
        }
        if self.find(name).is_ok() {
            return refuse(format!("Bitmap already exists: {name}"));
        }
        let persistent = |why: &str| {
            refuse(format!(
                "Can't make bitmap '{name}' persistent in '{file}': {why}"
            ))
        };
        if name.len() > usize::from(NAME_BYTES_MAX) {
            return persistent(&format!(
                "Name length exceeds maximum ({NAME_BYTES_MAX} characters)"
            ));
        }
        if self.list.len() >= COUNT_MAX as usize {
            return persistent("Maximum number of persistent bitmaps is already reached");
        }
        if disk_bytes == 0 {
            return persistent("The disk is empty, and a bitmap has to have a bit");
        }
        let fixed = Fixed::new(bits, name.len() as u16);
        let entry = Entry {
            fixed,
            extra: Vec::new(),
            name: name.as_bytes().to_vec(),
        };
        let used = self
            .list
            .iter()
            .map(|bitmap| bitmap.entry.fixed.entry_bytes());
        if used.sum::<u64>() + fixed.entry_bytes() > DIRECTORY_BYTES_MAX {
            return persistent("Not enough space in the bitmap directory");
        }
        let bitmap = Bitmap {
            enabled: true,
            bits: Bits::Lost,
            entry,
        };
        if bitmap.bits_bytes(disk_bytes) > BITS_BYTES_MAX {
            return persistent(
                "Too much space will be occupied by the bitmap. Use larger granularity",
            );
        }
        Ok(Bitmap {
            bits: Bits::Loaded {
                bits: DirtyBits::clean(bits, disk_bytes),
                changed: true,
            },
            ..bitmap
        })
    }
}

fn default_granularity(geometry: &Geometry) -> u64 {
    let bytes = geometry.cluster_bytes();
    bytes.clamp(DEFAULT_GRANULARITY.start, DEFAULT_GRANULARITY.end)
}
