//! The only door to bytes: the trait [`BlockFile`], and [`AlignedFile`], the one adaptor around it
//! that makes requests of any alignment fit the file.
//!
//! A driver takes an operation with its buffers and answers with a completion. It never sees a
//! request that its alignment forbids: [`AlignedFile`] widens reads and turns finer writes into
//! read-modify-write, serialised by host block, for metadata and data alike.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;

use cowslip_queue::cut::{self, Cut};
use cowslip_queue::file::MemoryAlignment;
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
pub use cowslip_queue::space::{Calls, Holes, HolesBy, Way};

pub use event::{Event, Observer};

pub use claim::{Claim, Conflict, Permission, Permissions, Protection, Sharing, Side};

pub use storage::{ContentId, ReadAs, ReadSet, Storage};

/// What a file can do and what it asks for; fixed once it is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Offsets and lengths of reads and writes must be multiples of this many bytes (a power of
    /// two).
    pub alignment_bytes: u32,
    /// Offsets and lengths of `zero` and `discard` must be multiples of this many bytes (a power of
    /// two), and of `alignment_bytes`: those of a block device go by its logical blocks also where
    /// the page cache takes reads and writes of any length.
    pub space_alignment_bytes: u32,
    /// The file may be written.
    pub writable: bool,
    /// What lies beyond the end of file, and what `set_len` adds, reads as zeroes: regular files.
    pub extends_with_zeroes: bool,
    /// `zero` is a single call of the file system or device, not written zeroes.
    pub zeroes_fast: bool,
    /// `discard` gives space back, what it discards reads as zeroes, and what `extents` calls a
    /// hole reads so, too, whoever has written it.
    pub punches_holes: bool,
}

/// Whether a write must be durable when it completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Durability {
    /// It may linger in volatile caches until the next flush.
    #[default]
    Cached,
    /// It is durable at completion, as if a flush of these bytes had followed.
    Durable,
}

impl Durability {
    /// That of a request with or without FUA.
    pub fn of_fua(is_set: bool) -> Durability {
        match is_set {
            true => Durability::Durable,
            false => Durability::Cached,
        }
    }
}

/// What happens to the space under zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Space {
    /// It stays allocated.
    #[default]
    Keep,
    /// It may be given back.
    Release,
}

impl Space {
    /// That of zeroes that may unmap, or may not.
    pub fn of_unmap(may_unmap: bool) -> Space {
        match may_unmap {
            true => Space::Release,
            false => Space::Keep,
        }
    }
}

/// A run of a host file with one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// First byte.
    pub start: u64,
    /// Length in bytes; never 0.
    pub len: u64,
    /// A hole: reads as zeroes.
    pub hole: bool,
}

/// Which file this is, whatever its name: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId(pub u64, pub u64);

/// A file of bytes, through some driver: a ring, threads, memory, a network, a simulator.
///
/// Operations may complete in any order. A read beyond the end of file yields zeroes. The memory
/// of an operation stays alive until it completes, whether or not anybody still waits.
#[allow(clippy::len_without_is_empty)] // A length is asked of the system, and may fail.
pub trait BlockFile: Send + Sync + fmt::Debug {
    /// The name that users know it by, for messages.
    fn name(&self) -> &str;

    /// What it can do.
    fn capabilities(&self) -> &Capabilities;

    /// Which file it is, where that can be told.
    fn id(&self) -> Option<FileId>;

    /// Identity of its bytes, to tell without reading them that two files hold the same. Unknown by
    /// default: a file over another one, which may show it in part or transformed, has to say what
    /// it shows.
    fn content_id(&self) -> Option<ContentId> {
        None
    }

    /// The files and devices that a write to it changes; by default itself. A file over others
    /// names theirs.
    fn storage(&self) -> Storage {
        self.id().map_or_else(Storage::default, Storage::whole)
    }

    /// Who is told what the work on the file has reached. By default nobody.
    fn observer(&self) -> Option<Arc<dyn Observer>> {
        None
    }

    /// What it cuts larger requests by. Of these the disk of an image in it has the most that is
    /// read or written at a time, as with QEMU. By default there are none.
    fn limits(&self) -> Limits {
        Limits::default()
    }

    /// Its length in bytes, now.
    fn len(&self) -> Pending<io::Result<u64>>;

    /// What it asks of the memory of reads and writes; by default, what it asks of their offsets.
    fn memory_alignment(&self) -> MemoryAlignment {
        let bytes = self.capabilities().alignment_bytes.max(1) as usize;
        MemoryAlignment {
            start_bytes: bytes,
            len_bytes: bytes,
        }
    }

    /// Fills the list from `offset` on; it comes back whatever the outcome. Its memory may be a
    /// guest's: the driver copies into it, or has the kernel do so, and does not look at it.
    fn read(&self, offset: u64, target: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)>;

    /// Writes the list at `offset`; all of it or an error. Its memory may change meanwhile: what a
    /// driver decides by the bytes, it decides by a copy, which it then writes.
    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> Pending<io::Result<()>>;

    /// Makes a range read as zeroes. `ErrorKind::Unsupported` where it would have to write them.
    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>>;

    /// Gives the space of a range back; afterwards it reads as zeroes if `punches_holes`.
    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>>;

    /// Allocates space for a range and moves the end of file up to its end if it was before.
    /// Existing bytes stay. `ErrorKind::Unsupported` where there is no such call.
    fn allocate(&self, offset: u64, len: u64) -> Pending<io::Result<()>>;

    /// The same, but the end of file stays. `ErrorKind::Unsupported` where there is no such call,
    /// as by default.
    fn allocate_keeping_end(&self, _offset: u64, _len: u64) -> Pending<io::Result<()>> {
        Pending::ready(Err(io::ErrorKind::Unsupported.into()))
    }

    /// Gives a hole its space by other means. `ErrorKind::Unsupported` where there are none, as by
    /// default.
    fn give_space(&self, _range: Range<u64>, _way: Way) -> Pending<io::Result<Calls>> {
        Pending::ready(Err(io::ErrorKind::Unsupported.into()))
    }

    /// The first `most` parts of a range that have no space, in order. `ErrorKind::Unsupported`
    /// where they are not known, as by default.
    fn holes(&self, _range: Range<u64>, _most: usize) -> Pending<io::Result<Holes>> {
        Pending::ready(Err(io::ErrorKind::Unsupported.into()))
    }

    /// Allocates a range as zeroes that count as written, so that later writes there change no
    /// metadata of the file system; the end of file moves up to its end. `ErrorKind::Unsupported`
    /// where device or system cannot do it by one call, as by default.
    fn allocate_written(&self, _offset: u64, _len: u64) -> Pending<io::Result<()>> {
        Pending::ready(Err(io::ErrorKind::Unsupported.into()))
    }

    /// Whether `allocate_written` is a call of the device, as far as the system tells.
    fn allocates_written(&self) -> bool {
        false
    }

    /// Data and holes of a range, in order, covering it; whatever is beyond the end is a hole.
    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>>;

    /// Makes durable all that had completed when it was issued.
    fn flush(&self) -> Pending<io::Result<()>>;

    /// Cuts or extends the file; what it adds reads as zeroes.
    fn set_len(&self, len: u64) -> Pending<io::Result<()>>;

    /// Cuts the file if nobody else has it open. `ErrorKind::Unsupported` where that is not known,
    /// as by default.
    fn cut_alone(&self, _cut: Cut) -> Pending<io::Result<cut::Outcome>> {
        Pending::ready(Err(io::ErrorKind::Unsupported.into()))
    }

    /// Bytes of host storage that the file occupies, where that can be told.
    fn allocated_bytes(&self) -> Option<u64>;

    /// The descriptor of a file of the host, for what only the system can do with two files.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Bytes that the file system has left, where that can be told.
    fn free_bytes(&self) -> Option<u64> {
        None
    }

    /// The same; if that is less than `needed_bytes`, asked again for a while, since a file system
    /// may give back the space of removed files after their removal has returned, as XFS does. At
    /// once by default.
    fn free_bytes_in_the_end(&self, _needed_bytes: u64) -> Pending<Option<u64>> {
        Pending::ready(self.free_bytes())
    }

    /// The unit in bytes in which the file system allocates the file's space, where it has been
    /// told one.
    fn extent_hint_bytes(&self) -> Option<u64> {
        None
    }

    /// Tells the file system that unit, or none by 0; only while the file has no space.
    ///
    /// # Errors
    /// `ErrorKind::Unsupported` or the system's refusal.
    fn set_extent_hint(&self, _bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Has the file system overwrite what is there instead of copying it (btrfs); only while the
    /// file has no data.
    ///
    /// # Errors
    /// `ErrorKind::Unsupported` or the system's refusal.
    fn set_nocow(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Changes what is done with the file and what others may do meanwhile, and lets them know. The
    /// claim ends with the last handle of the file. By default there are no others.
    ///
    /// # Errors
    /// [`crate::Error::Locked`] if others' claims forbid it; then the claim is what it was. The
    /// system's failure.
    fn claim(&self, _wanted: Claim) -> crate::Result<Protection> {
        Ok(Protection::Claimed)
    }

    /// The same for a file that is to replace `predecessor`, another handle of the same file: its
    /// claim is no obstacle, and there is no moment at which neither is claimed.
    ///
    /// # Errors
    /// As [`BlockFile::claim`]; then the claim of `predecessor` is what it was.
    fn claim_after(
        &self,
        wanted: Claim,
        _predecessor: &dyn BlockFile,
    ) -> crate::Result<Protection> {
        self.claim(wanted)
    }

    /// Ends what the file itself keeps open below; the last request. By default there is nothing.
    fn close(&self) -> Pending<io::Result<()>> {
        Pending::ready(Ok(()))
    }

    /// The claim as it is.
    fn claimed(&self) -> Claim {
        Claim::NONE
    }
}

/// Who chose a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChosenBy {
    /// The image, which may be a stranger's.
    Image,
    /// The caller, who named it when the image was opened.
    Caller,
}

/// What another file is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A backing file: opened read-only.
    Backing,
    /// An external data file: opened like the image.
    Data,
}

/// Another file that an image names (invariant S2).
#[derive(Clone, Copy, Debug)]
pub struct FileRequest<'a> {
    /// The name of the image that names it; relative names are resolved against it.
    pub named_by: &'a str,
    /// The name as it stands in the image or in the caller's override.
    pub name: &'a str,
    /// What it is wanted for.
    pub role: Role,
    /// Whether it will be written.
    pub writable: bool,
    /// Who chose it.
    pub chosen_by: ChosenBy,
}

/// The caller's say over which other files an image may open.
pub trait Gate: Send + Sync {
    /// Opens the file, or refuses.
    ///
    /// # Errors
    /// A refusal, or the system's failure.
    fn open(&self, request: &FileRequest<'_>) -> crate::Result<Arc<dyn BlockFile>>;

    /// The same for whoever can wait: the file may be behind a network, and its name may tell the
    /// format of the image in it. By default it is [`Gate::open`].
    fn reach<'a>(&'a self, request: &'a FileRequest<'a>) -> OpenFuture<'a> {
        let file = self.open(request);
        Box::pin(std::future::ready(file.map(OpenedFile::from)))
    }
}

/// A file that is being opened.
pub type OpenFuture<'a> = Pin<Box<dyn Future<Output = crate::Result<OpenedFile>> + Send + 'a>>;

/// A file that was opened.
#[derive(Clone, Debug)]
pub struct OpenedFile {
    /// The file.
    pub file: Arc<dyn BlockFile>,
    /// The format of the image in it, if its name tells; what names the file may tell another.
    pub format: Option<Format>,
}

impl From<Arc<dyn BlockFile>> for OpenedFile {
    fn from(file: Arc<dyn BlockFile>) -> OpenedFile {
        OpenedFile { file, format: None }
    }
}
