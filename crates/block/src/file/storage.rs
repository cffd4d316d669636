//! Identity of files: where their bytes are stored, and which bytes they are.
//!
//! *Storage* answers whether a write to one file changes what another one reads: a device and the
//! file behind it, a part of a file and the whole. *Content* answers whether two files hold the
//! same bytes at the same offsets: two parts of one file do not, nor do two snapshots of one image.
//! Locks go by neither; they belong to the open file ([`FileId`]).

use std::ops::Range;

use super::{BlockFile, FileId};
use crate::error::Overwrite;
use crate::{Error, Result};

/// Bytes of a file, as a source of contents: equal values hold equal bytes at equal offsets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ContentId {
    file: FileId,
    range: Range<u64>,
}

impl ContentId {
    /// All bytes of a file.
    pub const fn whole(file: FileId) -> ContentId {
        let range = 0..u64::MAX;
        ContentId { file, range }
    }

    /// Offset of the first of these bytes in their file.
    pub fn start(&self) -> u64 {
        self.range.start
    }

    /// A part of these bytes.
    #[must_use]
    pub fn part(&self, start: u64, len: u64) -> ContentId {
        ContentId {
            file: self.file,
            range: part_of(&self.range, start, len),
        }
    }
}

/// The part of a range that begins `start` bytes after the range's start.
fn part_of(range: &Range<u64>, start: u64, len: u64) -> Range<u64> {
    let first = range.start.saturating_add(start).min(range.end);
    first..first.saturating_add(len).min(range.end)
}

/// A place that stores bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Store {
    /// A file or device of this host.
    File(FileId),
    /// A store known only by name, such as an export of a server.
    Named(String),
}

/// Where the bytes of a file are stored: every file and device that a write to it changes. Empty if
/// nothing is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Storage(Vec<(Store, Range<u64>)>);

impl Storage {
    /// A file that stores its bytes itself.
    pub fn whole(file: FileId) -> Storage {
        Storage(vec![(Store::File(file), 0..u64::MAX)])
    }

    /// A store known only by name, such as an address of a server.
    pub fn named(name: &str) -> Storage {
        Storage(vec![(Store::Named(name.to_string()), 0..u64::MAX)])
    }

    /// Adds a range of a file in which the same bytes are stored, as those of a loop device are.
    pub fn add(&mut self, file: FileId, range: Range<u64>) {
        self.0.push((Store::File(file), range));
    }

    /// Adds the storage of another file.
    pub fn extend(&mut self, other: Storage) {
        self.0.extend(other.0);
    }

    /// The storage of a part of the bytes.
    #[must_use]
    pub fn part(&self, start: u64, len: u64) -> Storage {
        let parts = self.0.iter();
        let parts = parts.map(|(store, range)| (store.clone(), part_of(range, start, len)));
        Storage(parts.collect())
    }

    /// Whether a write to one of the two may change the other.
    pub fn overlaps(&self, other: &Storage) -> bool {
        let meets = |(one, a): &(Store, Range<u64>), (two, b): &(Store, Range<u64>)| {
            one == two && a.start < b.end && b.start < a.end
        };
        self.0
            .iter()
            .any(|one| other.0.iter().any(|two| meets(one, two)))
    }
}

/// The use of a file that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadAs {
    /// A file of an image that is copied, compared or merged.
    Source,
    /// A file of a backing chain.
    Backing,
    /// A file of the image that is created or changed.
    Image,
}

impl ReadAs {
    /// The name of the use in messages.
    pub const fn name(self) -> &'static str {
        match self {
            ReadAs::Source => "a source",
            ReadAs::Backing => "a backing file",
            ReadAs::Image => "the image",
        }
    }
}

#[derive(Clone, Debug)]
struct ReadFile {
    name: String,
    read_as: ReadAs,
    storage: Storage,
}

/// The files that a command reads, none of which it may overwrite.
#[derive(Clone, Debug, Default)]
pub struct ReadSet(Vec<ReadFile>);

impl ReadSet {
    /// Adds a file that is open, by its storage.
    pub fn add(&mut self, file: &dyn BlockFile, read_as: ReadAs) {
        self.add_stored(file.name(), file.storage(), read_as);
    }

    /// Adds a file that is known by its name and storage.
    pub fn add_stored(&mut self, name: &str, storage: Storage, read_as: ReadAs) {
        self.0.push(ReadFile {
            name: name.to_string(),
            read_as,
            storage,
        });
    }

    /// Checks, before a file is written, truncated or zeroed, that it stores nothing of the set.
    ///
    /// # Errors
    /// [`Error::Overwrites`]
    pub fn check(&self, file: &dyn BlockFile) -> Result<()> {
        self.check_stored(file.name(), &file.storage())
    }

    /// Like [`ReadSet::check`], for a file known by its name and storage.
    ///
    /// # Errors
    /// [`Error::Overwrites`]
    pub fn check_stored(&self, name: &str, storage: &Storage) -> Result<()> {
        match self.0.iter().find(|file| file.storage.overlaps(storage)) {
            None => Ok(()),
            Some(found) => Err(Error::Overwrites(Box::new(Overwrite {
                file: name.to_string(),
                read: found.name.clone(),
                read_as: found.read_as,
            }))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: FileId = FileId(1, 10);
    const B: FileId = FileId(1, 11);

    #[test]
    fn parts_are_other_bytes_than_the_whole_and_than_one_another() {
        let whole = ContentId::whole(A);
        let (first, second) = (whole.part(0, 100), whole.part(100, 100));
        assert_ne!(first, second);
        assert_ne!(whole, first);
        assert_ne!(whole, ContentId::whole(B));
        assert_eq!(whole.part(100, 100), second);
        assert_eq!(whole.part(50, 1000).part(50, 100), second);
        // A part ends where what it is a part of ends.
        assert_eq!(whole.part(0, 100).part(60, 100), whole.part(60, 40));
        assert_eq!(whole.part(10, u64::MAX), whole.part(10, u64::MAX - 1));
    }

    #[test]
    fn storage_meets_where_ranges_of_one_store_do() {
        let whole = Storage::whole(A);
        assert!(whole.overlaps(&whole));
        assert!(!whole.overlaps(&Storage::whole(B)));
        assert!(whole.overlaps(&whole.part(100, 1)));
        assert!(!whole.part(0, 100).overlaps(&whole.part(100, 100)));
        assert!(whole.part(0, 101).overlaps(&whole.part(100, 100)));
        assert!(!Storage::default().overlaps(&Storage::default()));
        assert!(Storage::named("nbd://a/b").overlaps(&Storage::named("nbd://a/b")));
        assert!(!Storage::named("nbd://a/b").overlaps(&Storage::named("nbd://a/c")));
    }

    #[test]
    fn a_device_over_a_part_of_a_file_meets_that_part() {
        let mut device = Storage::whole(B);
        device.add(A, 4096..8192);
        let file = Storage::whole(A);
        assert!(device.overlaps(&file));
        assert!(device.overlaps(&file.part(8191, 100)));
        assert!(!device.overlaps(&file.part(8192, 100)));
        // The second KiB of the device is the file's from 5120 on.
        assert!(device.part(1024, 1024).overlaps(&file.part(5120, 1)));
        assert!(!device.part(1024, 1024).overlaps(&file.part(4096, 1024)));
    }

    #[test]
    fn a_file_of_the_set_is_not_written_under_any_name() {
        let mut set = ReadSet::default();
        set.add_stored("a.raw", Storage::whole(A), ReadAs::Source);
        assert!(set.check_stored("b", &Storage::whole(B)).is_ok());
        let refused = set.check_stored("x", &Storage::whole(A).part(7, 1));
        let Err(Error::Overwrites(overwrite)) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!(overwrite.read, "a.raw");
        assert_eq!(overwrite.file, "x");
    }
}
