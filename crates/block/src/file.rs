//! Byte-addressed files: the trait [`BlockFile`], and [`AlignedFile`], the one adaptor that accepts
//! requests of any alignment. All I/O of the engine goes through them.
//!
//! A driver takes an operation together with its buffers and answers with a completion. It never
//! receives a request that its alignment forbids: [`AlignedFile`] widens unaligned reads and turns
//! unaligned writes into read-modify-write, serialised by host block, for metadata and data alike.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;

use cowslip_queue::cut::{self, Cut};
#[doc(hidden)]
pub use cowslip_queue::file::MemoryAlignment;
use cowslip_queue::{IoVec, IoVecMut, Pending};

use crate::limits::Limits;
use crate::policy::Format;

mod aligned;
mod brake;
mod claim;
mod event;
pub mod memory;
mod storage;

pub use aligned::{AlignedFile, Cipher, Numbering, PreparedWrite};
pub use brake::Brake;
pub use cowslip_queue::space::{Calls, FillMethod, Holes, HolesBy};

pub use event::{Event, Observer};

pub use claim::{Claim, Conflict, Permission, Permissions, Protection, Sharing, Side};

pub use storage::{ContentId, ReadAs, ReadSet, Storage};

/// Capabilities and alignment requirements of a file; fixed once it is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Alignment of offsets and lengths of reads and writes, in bytes; a power of two.
    pub alignment_bytes: u32,
    /// Alignment of offsets and lengths of `zero` and `discard`, in bytes: a power of two and a
    /// multiple of `alignment_bytes`. On a block device this is the logical block size, even where
    /// the page cache accepts reads and writes of any length.
    pub space_alignment_bytes: u32,
    /// The file accepts writes.
    pub writable: bool,
    /// Bytes beyond the end of file, and bytes added by `set_len`, read as zeroes: true of regular
    /// files.
    pub extends_with_zeroes: bool,
    /// `zero` is a single call of the file system or device and does not write zeroes out.
    pub zeroes_fast: bool,
    /// `discard` deallocates space and discarded bytes read as zeroes; so do the holes that
    /// `extents` reports, including holes that another program has made.
    pub punches_holes: bool,
}

impl Capabilities {
    /// Those of a file that is only read, at any byte.
    #[doc(hidden)]
    pub const NONE: Capabilities = Capabilities {
        alignment_bytes: 1,
        space_alignment_bytes: 1,
        writable: false,
        extends_with_zeroes: false,
        zeroes_fast: false,
        punches_holes: false,
    };

    /// Those of a usual regular file that may be written.
    #[doc(hidden)]
    pub fn of_regular_file(alignment_bytes: u32) -> Capabilities {
        Capabilities {
            alignment_bytes,
            space_alignment_bytes: alignment_bytes,
            writable: true,
            extends_with_zeroes: true,
            zeroes_fast: true,
            punches_holes: true,
        }
    }
}

/// Splits the target of a read at the end of what there is, `left` bytes from its start on; what is
/// behind becomes zeroes.
#[doc(hidden)]
pub fn split_at_end(target: &mut IoVecMut, left: u64) -> IoVecMut {
    let there = left.min(target.len() as u64);
    let mut beyond = target.split_off(there as usize);
    beyond.fill(0);
    beyond
}

/// The answer to what a file cannot do.
#[doc(hidden)]
pub fn unsupported<T>() -> Pending<io::Result<T>> {
    Pending::ready(Err(io::ErrorKind::Unsupported.into()))
}

/// Durability of a write at its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Durability {
    /// The data may stay in volatile caches until the next flush.
    #[default]
    Cached,
    /// The data is durable at completion, as if these bytes had been flushed (FUA).
    Durable,
}

impl Durability {
    /// The durability of a request with or without the FUA flag.
    pub fn of_fua(is_set: bool) -> Durability {
        match is_set {
            true => Durability::Durable,
            false => Durability::Cached,
        }
    }
}

/// Treatment of the allocated space below a range of zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Space {
    /// The space stays allocated.
    #[default]
    Keep,
    /// The space may be deallocated.
    Release,
}

impl Space {
    /// The treatment for a request with or without the unmap flag.
    pub fn of_unmap(may_unmap: bool) -> Space {
        match may_unmap {
            true => Space::Release,
            false => Space::Keep,
        }
    }
}

/// A run of a host file in one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// Offset of the first byte in the file, in bytes.
    pub start: u64,
    /// Length in bytes; never 0.
    pub len: u64,
    /// The run is a hole and reads as zeroes.
    pub hole: bool,
}

impl FileExtent {
    /// Data up to the end of a file of this length, and a hole beyond it.
    #[doc(hidden)]
    pub fn split_at_end(offset: u64, len: u64, file_len: u64) -> Vec<FileExtent> {
        let end = offset.saturating_add(len);
        let split = file_len.clamp(offset, end);
        let runs = [(offset, split, false), (split, end, true)];
        let runs = runs.into_iter().filter(|(start, end, _)| start < end);
        runs.map(|(start, end, hole)| FileExtent {
            start,
            len: end - start,
            hole,
        })
        .collect()
    }

    /// Adds the run to those that end where it starts; the last one becomes longer if it is in the
    /// same state.
    #[doc(hidden)]
    pub fn add_to(self, runs: &mut Vec<FileExtent>) {
        match runs.last_mut() {
            Some(last) if last.hole == self.hole => last.len += self.len,
            _ if self.len == 0 => {}
            _ => runs.push(self),
        }
    }
}

/// Identity of a file regardless of its name: device and inode number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId(pub u64, pub u64);

/// The completion of an operation.
#[doc(hidden)]
pub type Reply<T> = Pending<io::Result<T>>;

/// The completion of a read, with the list that it filled.
#[doc(hidden)]
pub type ReadReply = Pending<(io::Result<()>, IoVecMut)>;

/// A file of bytes behind a driver: io_uring, threads, memory, a network connection, a simulator.
///
/// Operations may complete in any order. A read beyond the end of file yields zeroes. The memory of
/// an operation stays alive until it completes, even if its future has been dropped.
#[allow(clippy::len_without_is_empty)] // A length is asked of the system, and may fail.
pub trait BlockFile: Send + Sync + fmt::Debug {
    /// The name for messages, as users know the file.
    fn name(&self) -> &str;

    /// Capabilities and alignment requirements.
    fn capabilities(&self) -> &Capabilities;

    /// Identity of the file, if known; unknown by default.
    fn id(&self) -> Option<FileId> {
        None
    }

    /// Identity of the contents: equal values mean equal bytes, without reading them. Unknown by
    /// default: a file on top of another one may show a part of it, or show it transformed, so it
    /// has to state its own identity.
    fn content_id(&self) -> Option<ContentId> {
        None
    }

    /// The files and devices that a write to this file changes; by default the file itself. A file
    /// on top of others returns theirs.
    fn storage(&self) -> Storage {
        self.id().map_or_else(Storage::default, Storage::whole)
    }

    /// The observer to notify of [`Event`]s of the work on the file. By default there is none.
    fn observer(&self) -> Option<Arc<dyn Observer>> {
        None
    }

    /// Limits by which the file splits larger requests. The disk of an image in the file adopts the
    /// largest transfer length among them, as in QEMU. By default there are none.
    fn limits(&self) -> Limits {
        Limits::default()
    }

    /// Current length in bytes.
    fn len(&self) -> Pending<io::Result<u64>>;

    /// Alignment of the memory of reads and writes; by default that of their offsets.
    fn memory_alignment(&self) -> MemoryAlignment {
        let bytes = self.capabilities().alignment_bytes.max(1) as usize;
        MemoryAlignment {
            start_bytes: bytes,
            len_bytes: bytes,
        }
    }

    /// Reads at `offset` into the list, and returns the list whatever the outcome. Its memory may
    /// belong to a guest: the driver, or the kernel on its behalf, copies into it and never
    /// examines its contents.
    fn read(&self, offset: u64, target: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)>;

    /// Writes the whole list at `offset`, or fails. The memory may change during the operation: a
    /// driver that examines the bytes takes a copy first, and writes that copy.
    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> Pending<io::Result<()>>;

    /// Makes a range read as zeroes. `ErrorKind::Unsupported` where zeroes would have to be written
    /// out, as by default.
    fn zero(&self, _offset: u64, _len: u64, _space: Space) -> Pending<io::Result<()>> {
        unsupported()
    }

    /// Deallocates the space of a range, which then reads as zeroes if `punches_holes`.
    /// `ErrorKind::Unsupported` where there is no such call, as by default.
    fn discard(&self, _offset: u64, _len: u64) -> Pending<io::Result<()>> {
        unsupported()
    }

    /// Allocates space for a range, and extends the file to the end of the range if it is shorter.
    /// Existing bytes stay. `ErrorKind::Unsupported` where there is no such call, as by default.
    fn allocate(&self, _offset: u64, _len: u64) -> Pending<io::Result<()>> {
        unsupported()
    }

    /// Like [`BlockFile::allocate`], but keeps the end of file. `ErrorKind::Unsupported` where
    /// there is no such call, as by default.
    fn allocate_keeping_end(&self, _offset: u64, _len: u64) -> Pending<io::Result<()>> {
        unsupported()
    }

    /// Allocates space for a hole by another method than `fallocate`. `ErrorKind::Unsupported`
    /// where there is none, as by default.
    fn give_space(&self, _range: Range<u64>, _way: FillMethod) -> Pending<io::Result<Calls>> {
        unsupported()
    }

    /// The first `most` holes of a range, in order. `ErrorKind::Unsupported` where they are not
    /// known, as by default.
    fn holes(&self, _range: Range<u64>, _most: usize) -> Pending<io::Result<Holes>> {
        unsupported()
    }

    /// Has the file system free the space that holes of a range keep, where it frees extents only
    /// as a whole, by having it write elsewhere what else is in them. Returns about how many bytes
    /// that were. `ErrorKind::Unsupported` where holes keep nothing, as by default.
    fn release_extents(&self, _range: Range<u64>) -> Pending<io::Result<u64>> {
        unsupported()
    }

    /// Allocates a range as written zeroes, so that later writes to it change no metadata of the
    /// file system; extends the file to the end of the range. `ErrorKind::Unsupported` where the
    /// device or system has no single call for it, as by default.
    fn allocate_written(&self, _offset: u64, _len: u64) -> Pending<io::Result<()>> {
        unsupported()
    }

    /// Whether `allocate_written` is a call of the device, according to the system.
    fn allocates_written(&self) -> bool {
        false
    }

    /// Data and holes of a range, in order and without gaps; bytes beyond the end of file are a
    /// hole.
    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>>;

    /// The same, where a range for which a write may need new space is a hole: that of real holes,
    /// what copies share, and all of a file whose file system writes to new places.
    fn own_space(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        self.extents(offset, len)
    }

    /// Makes all operations durable that had completed when the flush was issued.
    fn flush(&self) -> Pending<io::Result<()>>;

    /// Truncates or extends the file; added bytes read as zeroes. `ErrorKind::Unsupported` where
    /// the length is fixed, as by default.
    fn set_len(&self, _len: u64) -> Pending<io::Result<()>> {
        unsupported()
    }

    /// Truncates the file if no other process has it open. `ErrorKind::Unsupported` where that
    /// cannot be determined, as by default.
    fn cut_alone(&self, _cut: Cut) -> Pending<io::Result<cut::Outcome>> {
        unsupported()
    }

    /// Bytes of host storage that the file occupies, if known; unknown by default.
    fn allocated_bytes(&self) -> Option<u64> {
        None
    }

    /// The descriptor of a host file, for system calls that take two files.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Free bytes of the file system, if known.
    fn free_bytes(&self) -> Option<u64> {
        None
    }

    /// Like [`BlockFile::free_bytes`], but if fewer than `needed_bytes` are free the query is
    /// repeated for a while: a file system may release the space of removed files after the removal
    /// has returned, as XFS does. By default it is queried once.
    fn free_bytes_in_the_end(&self, _needed_bytes: u64) -> Pending<Option<u64>> {
        Pending::ready(self.free_bytes())
    }

    /// The extent size hint in bytes, the unit in which the file system allocates the file's space,
    /// if one is set.
    fn extent_hint_bytes(&self) -> Option<u64> {
        None
    }

    /// Sets the extent size hint in bytes, or removes it with 0; only while the file has no space
    /// allocated.
    ///
    /// # Errors
    /// `ErrorKind::Unsupported` or the system's refusal.
    fn set_extent_hint(&self, _bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Disables copy-on-write in the file system, so that data is overwritten in place (btrfs);
    /// only while the file has no data.
    ///
    /// # Errors
    /// `ErrorKind::Unsupported` or the system's refusal.
    fn set_nocow(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Changes the permissions that this handle holds and shares, and publishes them to other
    /// processes. The claim ends with the last handle of the file. By default there are no other
    /// processes.
    ///
    /// # Errors
    /// [`crate::Error::Locked`] if claims of others forbid it, and the previous claim stays in
    /// effect; the system's failure.
    fn claim(&self, _wanted: Claim) -> crate::Result<Protection> {
        Ok(Protection::Claimed)
    }

    /// Like [`BlockFile::claim`], for a handle that is to replace `predecessor`, another handle of
    /// the same file. The predecessor's claim does not conflict, and the file is claimed by one of
    /// the two at any moment.
    ///
    /// # Errors
    /// As [`BlockFile::claim`]; then the claim of `predecessor` is unchanged.
    fn claim_after(
        &self,
        wanted: Claim,
        _predecessor: &dyn BlockFile,
    ) -> crate::Result<Protection> {
        self.claim(wanted)
    }

    /// Like [`BlockFile::claim`], while another process holds a claim of at least this extent for
    /// this one, and until this one has its own: other processes are not asked. The next
    /// [`BlockFile::claim`] asks them, even for the same claim.
    ///
    /// # Errors
    /// The system's failure.
    fn claim_handed_over(&self, wanted: Claim) -> crate::Result<Protection> {
        self.claim(wanted)
    }

    /// Closes the files that this file keeps open itself, and returns what a file system reports
    /// only when a file is closed; the last request. By default there is nothing to do.
    fn close(&self) -> Pending<io::Result<()>> {
        Pending::ready(Ok(()))
    }

    /// The claim in effect.
    fn claimed(&self) -> Claim {
        Claim::NONE
    }
}

/// Origin of the choice of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChosenBy {
    /// The image, which may be untrusted.
    Image,
    /// The caller, who named it when the image was opened.
    Caller,
}

/// Purpose of another file of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A backing file: opened read-only.
    Backing,
    /// An external data file: opened like the image.
    Data,
}

/// A request to open another file that an image names (invariant S2).
#[derive(Clone, Copy, Debug)]
pub struct FileRequest<'a> {
    /// The name of the image that refers to the file; relative names are resolved against it.
    pub named_by: &'a str,
    /// The file's name as stored in the image or given in the caller's override.
    pub name: &'a str,
    /// The purpose of the file.
    pub role: Role,
    /// Whether the file is to be written.
    pub writable: bool,
    /// Origin of the choice.
    pub chosen_by: ChosenBy,
}

/// The caller's policy on which other files an image may open.
pub trait Gate: Send + Sync {
    /// Opens the file, or refuses.
    ///
    /// # Errors
    /// A refusal, or the system's failure.
    fn open(&self, request: &FileRequest<'_>) -> crate::Result<Arc<dyn BlockFile>>;

    /// Asynchronous [`Gate::open`]: the file may be behind a network, and its name may imply the
    /// format of the image in it. By default it is [`Gate::open`].
    fn open_async<'a>(&'a self, request: &'a FileRequest<'a>) -> OpenFuture<'a> {
        let file = self.open(request);
        Box::pin(std::future::ready(file.map(OpenedFile::from)))
    }
}

/// A file that is being opened.
pub type OpenFuture<'a> = Pin<Box<dyn Future<Output = crate::Result<OpenedFile>> + Send + 'a>>;

/// A file that a [`Gate`] has opened.
#[derive(Clone, Debug)]
pub struct OpenedFile {
    /// The file, which nothing has claimed so far.
    pub file: Arc<dyn BlockFile>,
    /// The format of the image in it, if its name implies one; the reference to the file may name
    /// another.
    pub format: Option<Format>,
}

impl From<Arc<dyn BlockFile>> for OpenedFile {
    fn from(file: Arc<dyn BlockFile>) -> OpenedFile {
        OpenedFile { file, format: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_data_up_to_its_end() {
        let data = |start, len| FileExtent {
            start,
            len,
            hole: false,
        };
        let hole = |start, len| FileExtent {
            start,
            len,
            hole: true,
        };
        assert_eq!(FileExtent::split_at_end(10, 10, 100), [data(10, 10)]);
        assert_eq!(
            FileExtent::split_at_end(10, 10, 15),
            [data(10, 5), hole(15, 5)]
        );
        assert_eq!(FileExtent::split_at_end(10, 10, 10), [hole(10, 10)]);
        assert_eq!(FileExtent::split_at_end(10, 10, 0), [hole(10, 10)]);
    }
}
