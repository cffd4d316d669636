//! The snapshot table as a value: its entries, which one is meant, what a new one is called. Pure.
//!
//! An entry is kept byte for byte, its extra data too, so that unknown fields survive;
//! only what version 3 demands is added.

use crate::entry::snapshot::{
    EXTRA_BYTES_KNOWN, Extra, FIXED_BYTES, Fixed, TABLE_BYTES_MAX, completed_extra,
};
use crate::header::SNAPSHOTS_MAX;
use crate::inspect::before_zero;
use crate::{Error, Result};

/// The longest name of a new snapshot in bytes: QEMU's tools cut longer ones.
#[doc(hidden)]
pub const NAME_BYTES_MAX: usize = 255;

/// Which snapshot is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotChoice {
    /// The one with this ID, or else the first with this name.
    IdOrName(String),
    /// The one with this ID.
    Id(String),
    /// The first with this name.
    Name(String),
    /// The one with this ID, if it has this name.
    IdAndName {
        /// ID that matches.
        id: String,
        /// Name that matches.
        name: String,
    },
}

impl std::fmt::Display for SnapshotChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SnapshotChoice::IdOrName(text) => write!(f, "'{text}'"),
            SnapshotChoice::Id(id) => write!(f, "with ID '{id}'"),
            SnapshotChoice::Name(name) => write!(f, "with name '{name}'"),
            SnapshotChoice::IdAndName { id, name } => write!(f, "'{name}' with ID '{id}'"),
        }
    }
}

/// The description of a new snapshot. The engine has no clock, so the date is the caller's.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct NewSnapshot {
    /// Its name; others may have it, too.
    pub name: String,
    /// When it is taken, in seconds since the epoch.
    pub date_sec: u32,
    /// The rest of that time.
    pub date_nsec: u32,
}

/// An entry of the snapshot table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Fields of fixed length of the table entry.
    pub fixed: Fixed,
    /// Extra data, fields of later versions included.
    pub extra: Vec<u8>,
    /// Unique ID, as stored.
    pub id: Vec<u8>,
    /// Name, as stored.
    pub name: Vec<u8>,
}

impl Entry {
    /// Size of the disk, if the entry says so.
    pub fn disk_bytes(&self) -> Option<u64> {
        Extra::decode(&self.extra).disk_bytes
    }

    /// The ID as it is compared: a zero byte ends it.
    fn told_id(&self) -> &[u8] {
        before_zero(&self.id)
    }

    /// Name up to the first NUL byte, as QEMU reads it.
    fn told_name(&self) -> &[u8] {
        before_zero(&self.name)
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend(self.fixed.encode());
        out.extend(&self.extra);
        out.extend(&self.id);
        out.extend(&self.name);
        out.resize(start + self.fixed.entry_bytes() as usize, 0);
    }
}

/// Where the L1 table of a new snapshot is, and the size of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Root {
    /// Offset of the L1 table.
    pub l1_offset: u64,
    /// Number of entries of the snapshot's L1 table.
    pub l1_size: u32,
    /// Size of the disk in bytes.
    pub disk_bytes: u64,
}

/// All snapshots, in the table's order.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct SnapshotList {
    entries: Vec<Entry>,
}

impl SnapshotList {
    /// Decodes a table of `count` entries; `None` if it ends before they do.
    pub fn decode(bytes: &[u8], count: u32) -> Option<SnapshotList> {
        let mut entries = Vec::new();
        let mut rest = bytes;
        for _ in 0..count {
            let fixed = Fixed::decode(rest.get(..FIXED_BYTES)?);
            let names = usize::try_from(fixed.names_start()).ok()?;
            let (id, name) = (usize::from(fixed.id_bytes), usize::from(fixed.name_bytes));
            entries.push(Entry {
                fixed,
                extra: rest.get(FIXED_BYTES..names)?.to_vec(),
                id: rest.get(names..names + id)?.to_vec(),
                name: rest.get(names + id..names + id + name)?.to_vec(),
            });
            // The padding of the last entry may be missing where the table is the end of the file.
            let len = usize::try_from(fixed.entry_bytes()).ok()?;
            rest = rest.get(len..).unwrap_or_default();
        }
        Some(SnapshotList { entries })
    }

    /// The bytes of the table.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for entry in &self.entries {
            entry.encode(&mut out);
        }
        out
    }

    /// Returns how many there are.
    pub fn len(&self) -> u32 {
        u32::try_from(self.entries.len()).expect("a list has SNAPSHOTS_MAX entries at most")
    }

    /// The entry at a position.
    pub fn entry(&self, position: usize) -> &Entry {
        &self.entries[position]
    }

    /// The position of the snapshot that is meant.
    pub fn find(&self, choice: &SnapshotChoice) -> Option<usize> {
        let by_id = |id: &str| {
            self.entries
                .iter()
                .position(|e| e.told_id() == id.as_bytes())
        };
        let has_name = |entry: &Entry, name: &str| entry.told_name() == name.as_bytes();
        let by_name = |name: &str| self.entries.iter().position(|e| has_name(e, name));
        match choice {
            SnapshotChoice::IdOrName(text) => by_id(text).or_else(|| by_name(text)),
            SnapshotChoice::Id(id) => by_id(id),
            SnapshotChoice::Name(name) => by_name(name),
            SnapshotChoice::IdAndName { id, name } => {
                by_id(id).filter(|&at| has_name(&self.entries[at], name))
            }
        }
    }

    /// The ID of the next snapshot: one more than the highest number that an ID begins with, and
    /// not taken.
    fn next_id(&self) -> String {
        let highest = self.entries.iter().map(|entry| number(&entry.id)).max();
        let mut next = highest.unwrap_or(0).wrapping_add(1);
        loop {
            let id = next.to_string();
            if self.find(&SnapshotChoice::Id(id.clone())).is_none() {
                return id;
            }
            // There are fewer snapshots than numbers.
            next = next.wrapping_add(1);
        }
    }

    /// The list with a snapshot more, at its end, as QEMU's tools write it; and its ID.
    ///
    /// # Errors
    /// `Invalid` if the name or the list would be too long.
    pub fn with(&self, new: &NewSnapshot, root: Root) -> Result<(SnapshotList, String)> {
        if new.name.len() > NAME_BYTES_MAX {
            let text = format!("a snapshot's name has {NAME_BYTES_MAX} bytes at most");
            return Err(Error::Invalid(text));
        }
        if self.len() >= SNAPSHOTS_MAX {
            let text = format!("an image has {SNAPSHOTS_MAX} snapshots at most");
            return Err(Error::Invalid(text));
        }
        let id = self.next_id();
        // No VM state; the size of the disk; no instructions counted, which QEMU's tools write as
        // 0.
        let mut extra = vec![0; EXTRA_BYTES_KNOWN as usize];
        extra[8..16].copy_from_slice(&root.disk_bytes.to_be_bytes());
        let fixed = Fixed {
            l1_offset: root.l1_offset,
            l1_size: root.l1_size,
            id_bytes: u16::try_from(id.len()).expect("a number has 20 digits at most"),
            name_bytes: new.name.len() as u16,
            date_sec: new.date_sec,
            date_nsec: new.date_nsec,
            vm_clock_nsec: 0,
            vm_state_bytes: 0,
            extra_bytes: EXTRA_BYTES_KNOWN,
        };
        let mut list = self.clone();
        list.entries.push(Entry {
            fixed,
            extra,
            id: id.clone().into_bytes(),
            name: new.name.clone().into_bytes(),
        });
        if list.encode().len() as u64 > TABLE_BYTES_MAX {
            let text = format!("a snapshot table has {TABLE_BYTES_MAX} bytes at most");
            return Err(Error::Invalid(text));
        }
        Ok((list, id))
    }

    /// The list with entries that lack nothing, of a disk of this size; as it is if the table would
    /// be too long.
    pub fn completed(&self, disk_bytes: u64) -> SnapshotList {
        let mut list = self.clone();
        for entry in &mut list.entries {
            entry.extra = completed_extra(&entry.extra, entry.fixed.vm_state_bytes, disk_bytes);
            entry.fixed.extra_bytes = entry.extra.len() as u32;
        }
        match list.encode().len() as u64 <= TABLE_BYTES_MAX {
            true => list,
            false => self.clone(),
        }
    }

    /// The list without the snapshot at a position.
    pub fn without(&self, position: usize) -> SnapshotList {
        let mut list = self.clone();
        list.entries.remove(position);
        list
    }
}

/// The number that an ID begins with, as C's `strtoul` reads it but for signs; 0 if there is none.
fn number(id: &[u8]) -> u64 {
    let digits = id.iter().skip_while(|byte| byte.is_ascii_whitespace());
    let digits = digits.take_while(|byte| byte.is_ascii_digit());
    digits.fold(0, |value: u64, digit| {
        let value = value.saturating_mul(10);
        value.saturating_add(u64::from(digit - b'0'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: Root = Root {
        l1_offset: 0x50000,
        l1_size: 3,
        disk_bytes: 10 << 20,
    };

    fn named(name: &str) -> NewSnapshot {
        NewSnapshot {
            name: name.to_string(),
            date_sec: 7,
            date_nsec: 8,
        }
    }

    fn list(names: &[&str]) -> SnapshotList {
        let none = SnapshotList::default();
        let with = |list: SnapshotList, name: &&str| list.with(&named(name), ROOT).unwrap().0;
        names.iter().fold(none, with)
    }

    #[test]
    fn a_table_decodes_to_what_was_encoded() {
        let mut list = list(&["one", "", "a name of some length"]);
        // Fields that are not understood stay: unknown extra data, none at all, an ID that is no
        // number.
        list.entries[1].extra.extend([9; 13]);
        list.entries[1].fixed.extra_bytes += 13;
        list.entries[2].extra.clear();
        list.entries[2].fixed.extra_bytes = 0;
        list.entries[0].id = b"x\xff".to_vec();
        list.entries[0].fixed.id_bytes = 2;
        let bytes = list.encode();
        assert!(bytes.len().is_multiple_of(8));
        assert_eq!(SnapshotList::decode(&bytes, 3), Some(list.clone()));
        for len in 0..bytes.len() - 7 {
            assert_eq!(SnapshotList::decode(&bytes[..len], 3), None, "{len} bytes");
        }
        assert_eq!(list.entry(1).disk_bytes(), Some(10 << 20));
        assert_eq!(list.entry(2).disk_bytes(), None);
        let shorter = list.without(1);
        assert_eq!((shorter.len(), shorter.entry(1)), (2, list.entry(2)));
    }

    #[test]
    fn an_id_goes_before_a_name() {
        let list = list(&["2", "b", "b"]);
        let find = |choice: SnapshotChoice| list.find(&choice);
        assert_eq!(find(SnapshotChoice::IdOrName("2".to_string())), Some(1));
        assert_eq!(find(SnapshotChoice::IdOrName("b".to_string())), Some(1));
        assert_eq!(find(SnapshotChoice::Name("2".to_string())), Some(0));
        assert_eq!(find(SnapshotChoice::Id("b".to_string())), None);
        assert_eq!(find(SnapshotChoice::Id("3".to_string())), Some(2));
        let both = |id: &str, name: &str| {
            find(SnapshotChoice::IdAndName {
                id: id.to_string(),
                name: name.to_string(),
            })
        };
        assert_eq!((both("3", "b"), both("1", "b")), (Some(2), None));
        assert_eq!(find(SnapshotChoice::IdOrName(String::new())), None);
    }

    #[test]
    fn a_zero_byte_ends_ids_and_names() {
        let mut list = list(&["a", "b"]);
        list.entries[1].id = b"9\x002".to_vec();
        list.entries[1].name = b"n\0b".to_vec();
        for (choice, expected) in [
            (SnapshotChoice::Name("n".to_string()), Some(1)),
            (SnapshotChoice::Name("n\0b".to_string()), None),
            (SnapshotChoice::Id("9".to_string()), Some(1)),
        ] {
            assert_eq!(list.find(&choice), expected, "{choice}");
        }
        // The bytes after it are kept, as they belong to the image.
        assert!(list.encode().windows(3).any(|bytes| bytes == b"n\0b"));
    }

    #[test]
    fn ids_are_the_next_number() {
        let mut three = list(&["a", "b", "c"]);
        assert_eq!(three.with(&named("d"), ROOT).unwrap().1, "4");
        assert_eq!(three.without(0).with(&named("d"), ROOT).unwrap().1, "4");
        assert_eq!(three.without(2).with(&named("d"), ROOT).unwrap().1, "3");
        // QEMU reads the number that an ID begins with, whatever follows.
        for (id, next) in [
            ("x", "3"),
            ("17", "18"),
            (" 9z", "10"),
            ("18446744073709551615", "0"),
            ("99999999999999999999999", "0"),
        ] {
            three.entries[0].id = id.as_bytes().to_vec();
            let with = three.without(2).with(&named("d"), ROOT);
            assert_eq!(with.unwrap().1, next, "{id}");
        }
        // The number after the highest one wraps to one that is taken.
        three.entries[1].id = b"0".to_vec();
        assert_eq!(three.with(&named("d"), ROOT).unwrap().1, "1");
    }

    #[test]
    fn names_and_lists_have_their_limits() {
        let none = SnapshotList::default();
        let with = |len| none.with(&named(&"n".repeat(len)), ROOT);
        assert!(with(NAME_BYTES_MAX).is_ok());
        assert!(matches!(with(NAME_BYTES_MAX + 1), Err(Error::Invalid(_))));
        let mut full = list(&["n"]);
        full.entries = vec![full.entries[0].clone(); SNAPSHOTS_MAX as usize];
        let refused = full.with(&named("one more"), ROOT);
        assert!(matches!(refused, Err(Error::Invalid(text)) if text.contains("65536")));
    }
}
