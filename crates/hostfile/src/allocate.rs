//! Space for a file of any kind, allocated as a [`Job`]: its holes get space, what it holds stays.
//!
//! A [`Plan`] looks at the file first: where its holes are, how much space they need, whether there
//! is so much. [`Plan::carry_out`] fills them, by a [`Method`] that the caller names or that
//! [`choose`] takes from what the directory's file system can do
//! ([`probe_space`](crate::host::probe_space)). Then it looks whether the space is really there.
//!
//! Fails a call, or is the job cancelled, then the file has the length and the holes that it had:
//! holes are punched again, what lies beyond the old end is cut off. Holes that nobody has come to
//! are not touched, and neither is data. A process that is killed leaves a file that is partly
//! allocated; a plan made of that one goes on where it ended, because what has space is no hole.
//!
//! Bytes that others append meanwhile are not cut off: where the file cannot be had alone, or its
//! end is not where it was left, bytes beyond the old end stay, and the error says so (`undo.rs`).
//!
//! Leaves out: others that write into the holes meanwhile. All methods but `fallocate` put zeroes
//! over what has come there since the plan, also where all goes well, and undoing punches it with
//! the hole. Also the time stamps of the file, and space below the file system, as on a thin
//! device.
//!
//! ```no_run
//! use cowslip_hostfile::allocate::{End, Plan, choose};
//! use cowslip_block::file::AlignedFile;
//! use cowslip_hostfile::host::{HostOptions, open_host_file, probe_space};
//! use cowslip_block::job::Job;
//!
//! # async fn example() -> cowslip_block::Result<()> {
//! let options = HostOptions { writable: true, ..HostOptions::default() };
//! let file = AlignedFile::new(open_host_file("/srv/film.mkv".as_ref(), &options)?);
//! let plan = Plan::new(&file, 40 << 30, End::Moves).await?;
//! let chosen = choose(&probe_space("/srv".as_ref())?, &plan)?;
//! let job = Job::default(); // shared with the code that may cancel it
//! let outcome = plan.carry_out(chosen.method, &job).await?;
//! assert_eq!(outcome.missing_bytes, 0);
//! # Ok(())
//! # }
//! ```

use std::io;
use std::ops::Range;

use crate::file::{AlignedFile, FillMethod, HolesBy};
use crate::geometry::BLOCK_BYTES;
use crate::job::{Job, PIECE_BYTES, Stage};
use crate::space::{self, Account, CALL_BYTES};
use crate::units::round_up;
use crate::{Error, Result};

mod method;
mod ranges;
mod undo;

pub use method::{Abilities, Chosen, LibraryMakes, Method, ZeroesTake, choose};
use ranges::{RANGES_BYTES_MAX, Ranges};
use undo::Reach;

/// Bytes between two looks at whether the job is cancelled, where libc writes a byte a block.
const LIBRARY_PIECE_BYTES: u64 = 16 << 20;
/// Holes that are asked for at once.
const BATCH: usize = 4096;
/// Limit of the bytes that an interrupted server has written and not counted yet.
const UNCOUNTED_BYTES: u64 = 256 << 10;
/// Limit of a file's length.
const LEN_MAX: u64 = i64::MAX as u64;

/// Treatment of the end of file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The end of file moves up to the end of the allocated space.
    Moves,
    /// The end of file stays; space beyond it waits for the file to grow.
    Stays,
}

/// A file as it was found, and what it needs.
#[derive(Debug)]
pub struct Plan {
    file: AlignedFile,
    size: u64,
    end: End,
    len: u64,
    allocated_bytes: Option<u64>,
    holes: Ranges,
    /// Space beyond the end of file.
    beyond: Ranges,
    by: HolesBy,
    /// The file has holes, but at unknown places: all of it is taken for one.
    hides_holes: bool,
}

/// Result of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Bytes of the file, from its beginning, that were to have space.
    pub size_bytes: u64,
    /// Bytes of them that had space before.
    pub already_bytes: u64,
    /// Bytes of holes that were filled.
    pub filled_bytes: u64,
    /// Holes that were filled.
    pub holes: u64,
    /// Bytes that have no space after all.
    pub missing_bytes: u64,
    /// Bytes that the file has in all, as `st_blocks` says.
    pub allocated_bytes: Option<u64>,
    /// How that was found out.
    pub by: HolesBy,
}

impl Plan {
    /// Looks at the first `size` bytes of a file. Changes nothing, but has dirty data of the file
    /// written out.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a size of 0, one beyond what files can have, one below the file's
    /// length, and for more holes than can be remembered; [`Error::Unsupported`] for a file that is
    /// open for direct I/O; `ENOSPC` with both numbers where there is less room than the holes
    /// need; I/O.
    pub async fn new(file: &AlignedFile, size: u64, end: End) -> Result<Plan> {
        let name = file.name();
        if file.capabilities().alignment_bytes > 1 {
            // Lengths and holes would be rounded, and libc's and our writes have buffers of any
            // address.
            return Err(Error::Unsupported {
                file: name.to_string(),
                feature: "allocating space through a handle for direct I/O (O_DIRECT)".into(),
            });
        }
        let len = file.len().await?;
        let invalid = |text: String| Err(Error::Invalid(text));
        if size == 0 || size > LEN_MAX {
            return invalid(format!(
                "'{name}': the size must be from 1 to {LEN_MAX} bytes"
            ));
        }
        if size < len {
            return invalid(format!(
                "'{name}' is {len} bytes long, and nothing is truncated: the size must be at least that"
            ));
        }
        let mut plan = Plan {
            file: file.clone(),
            size,
            end,
            len,
            allocated_bytes: file.block_file().allocated_bytes(),
            holes: Ranges::default(),
            beyond: Ranges::default(),
            by: HolesBy::Extents,
            hides_holes: false,
        };
        plan.by = each_hole(file, 0..size, |hole| plan.holes.push(hole)).await?;
        // The rest of the block that the file ends in is no space of its own.
        if plan.by == HolesBy::Seeking {
            plan.allocated_bytes = file.block_file().allocated_bytes();
            plan.look_for_hidden_holes();
        }
        let mut at = round_up(len, BLOCK_BYTES);
        each_hole(file, at..LEN_MAX, |hole| {
            let pushed = plan.beyond.push(at..hole.start);
            at = hole.end;
            pushed
        })
        .await?;
        space::check_room(file.block_file().as_ref(), plan.needed_bytes()).await?;
        Ok(plan)
    }

    /// Where a file system calls all of a file data that has less space than data, as FUSE does.
    fn look_for_hidden_holes(&mut self) {
        let first = self.holes.iter().next();
        let has_none = self.len > 0 && first.is_none_or(|hole| hole.start >= self.len);
        let is_short = |bytes: u64| bytes < round_up(self.len, BLOCK_BYTES);
        if has_none && self.allocated_bytes.is_some_and(is_short) {
            self.hides_holes = true;
            self.holes = Ranges::of(0..self.size);
        }
    }

    /// Bytes of holes that are to be filled.
    pub fn needed_bytes(&self) -> u64 {
        let bytes = self.holes.bytes();
        match (self.by, self.allocated_bytes) {
            // Some of what looks like a hole may have space.
            (HolesBy::Seeking, Some(has)) => bytes.min(self.size.saturating_sub(has)),
            _ => bytes,
        }
    }

    /// Whether the file has holes whose places are not known, so that nothing may be written into
    /// them but by calls that look for themselves.
    pub fn hides_holes(&self) -> bool {
        self.hides_holes
    }

    /// Whether the file has all of it already.
    pub fn is_done(&self) -> bool {
        self.holes.bytes() == 0 && (self.end == End::Stays || self.len == self.size)
    }

    /// Whether there is something to be allocated beyond an end of file that stays.
    pub fn reaches_beyond_end(&self) -> bool {
        self.end == End::Stays && self.size > self.len
    }

    /// Fills the holes, makes that durable, and looks whether the space is there.
    ///
    /// # Errors
    /// [`Error::Cancelled`], `ENOSPC` and other I/O errors; then the file is what it was. If that
    /// could not be brought about, the error says so. [`Error::Unsupported`] for a method that the
    /// file system does not have or that cannot do without moving the end of file.
    pub async fn carry_out(mut self, method: Method, job: &Job) -> Result<Outcome> {
        if self.reaches_beyond_end() && method != Method::Fallocate {
            return Err(self.unsupported(&format!(
                "space beyond the end of file by {}; fallocate alone keeps the length",
                method.name()
            )));
        }
        if self.hides_holes && matches!(method, Method::Mmap | Method::Write { .. }) {
            self.leave_hidden_holes()?;
        }
        job.expect(self.holes.bytes());
        let reach = Reach::new(self.len);
        match self.fill(method, job, &reach).await {
            Ok(outcome) => Ok(outcome),
            Err(error) => {
                job.enter(Stage::Undo);
                let undone = self.take_back(method, &reach).await;
                undone.map_err(|why| not_undone(&error, &why))?;
                Err(error)
            }
        }
    }

    /// Restricts the plan to the space beyond the end, for methods that would write over data.
    fn leave_hidden_holes(&mut self) -> Result<()> {
        let has = self.allocated_bytes.unwrap_or(0);
        if self.len.saturating_sub(has) > UNCOUNTED_BYTES {
            let feature = "telling holes from data, so that zeroes could be written between them,";
            return Err(self.unsupported(feature));
        }
        self.holes = Ranges::of(self.len..self.size);
        Ok(())
    }

    fn unsupported(&self, feature: &str) -> Error {
        Error::Unsupported {
            file: self.file.name().to_string(),
            feature: feature.into(),
        }
    }

    async fn fill(&self, method: Method, job: &Job, reach: &Reach) -> Result<Outcome> {
        job.enter(match method {
            Method::Fallocate | Method::PosixFallocate(_) => Stage::Allocate,
            Method::Mmap | Method::Write { .. } => Stage::WriteZeroes,
        });
        let moves = self.end == End::Moves && self.size > self.len;
        if method == Method::Mmap && moves {
            self.look_at_end(method, reach).await?;
            self.move_end(reach).await?;
        }
        for hole in self.holes.iter() {
            let call = |at, len| self.step(at..at + len, method, reach);
            let piece = self.piece_bytes(method);
            let rest = space::by_calls(hole, piece, (Account::Paced, job), call).await?;
            if !rest.is_empty() {
                return Err(self.unsupported(&format!("{} on this file system", method.name())));
            }
        }
        if moves && self.file.len().await? < self.size {
            self.move_end(reach).await?;
        }
        job.check()?;
        // Space that is only promised so far, as by NFS and by delayed allocation, is settled now.
        job.enter(Stage::Flush);
        self.file.flush().await?;
        let outcome = self.verify().await?;
        job.check()?;
        Ok(outcome)
    }

    /// Gives one piece its space.
    async fn step(&self, piece: Range<u64>, method: Method, reach: &Reach) -> Result<()> {
        // A file that is mapped has its length already.
        let moves = self.end == End::Moves && piece.end > self.len && method != Method::Mmap;
        if moves {
            self.look_at_end(method, reach).await?;
        }
        let end = piece.end;
        let before = reach.begins(end);
        let given = self.give(piece, method).await;
        match &given {
            Ok(()) if moves => reach.has_moved_end(end),
            Err(error) if space::is_unsupported(error) => reach.was_refused(before),
            _ => {}
        }
        given
    }

    /// Checks that no other writer has moved the end of file before we move it.
    async fn look_at_end(&self, method: Method, reach: &Reach) -> Result<()> {
        let is_as_left = reach.is_as_left(self.file.len().await?);
        let writes_over = match method {
            Method::Fallocate | Method::PosixFallocate(_) => false,
            Method::Mmap | Method::Write { .. } => true,
        };
        match is_as_left || !writes_over {
            true => Ok(()),
            false => Err(Error::Invalid(format!(
                "'{}' is written by another process, whose bytes {} would overwrite",
                self.file.name(),
                method.name()
            ))),
        }
    }

    async fn move_end(&self, reach: &Reach) -> Result<()> {
        self.file.set_len(self.size).await?;
        reach.has_moved_end(self.size);
        Ok(())
    }

    fn piece_bytes(&self, method: Method) -> u64 {
        match method {
            Method::Fallocate | Method::PosixFallocate(LibraryMakes::KernelCall) => CALL_BYTES,
            Method::PosixFallocate(_) => LIBRARY_PIECE_BYTES,
            Method::Mmap => PIECE_BYTES,
            Method::Write { chunk_bytes } => {
                let chunk = chunk_bytes.max(1) as u64;
                PIECE_BYTES.next_multiple_of(chunk)
            }
        }
    }

    async fn give(&self, range: Range<u64>, method: Method) -> Result<()> {
        let len = range.end - range.start;
        let way = match (method, self.end) {
            (Method::Fallocate, End::Moves) => return self.file.allocate(range.start, len).await,
            (Method::Fallocate, End::Stays) => {
                return self.file.allocate_keeping_end(range.start, len).await;
            }
            (Method::PosixFallocate(_), _) => FillMethod::Library,
            (Method::Mmap, _) => FillMethod::Mapping,
            (Method::Write { chunk_bytes }, _) => FillMethod::Writes {
                chunk_bytes: chunk_bytes.max(1),
            },
        };
        self.file.give_space(range, way).await
    }

    /// Looks at the file as it is now.
    async fn verify(&self) -> Result<Outcome> {
        let allocated_bytes = self.file.block_file().allocated_bytes();
        let mut missing_bytes = 0;
        let by = each_hole(&self.file, 0..self.size, |hole| {
            missing_bytes += hole.end - hole.start;
            Ok(())
        })
        .await?;
        if by == HolesBy::Seeking {
            // Space that was never written looks like a hole: the count of blocks is all that there
            // is.
            missing_bytes = allocated_bytes.map_or(0, |bytes| self.size.saturating_sub(bytes));
        }
        Ok(Outcome {
            size_bytes: self.size,
            already_bytes: self.size - self.needed_bytes(),
            filled_bytes: self.needed_bytes(),
            holes: self.holes.count(),
            missing_bytes,
            allocated_bytes,
            by,
        })
    }
}

/// The failure of a job, and that it could not be undone.
fn not_undone(error: &Error, why: &Error) -> Error {
    let words = format!("{error}; and not all of it could be undone: {why}");
    match error {
        Error::Io { source, .. } => {
            let kind = source.raw_os_error().map(io::Error::from_raw_os_error);
            Error::io(words, kind.unwrap_or_else(|| io::ErrorKind::Other.into()))
        }
        _ => Error::Invalid(words),
    }
}

/// Calls `each` with the holes of a range, in the order of the file.
async fn each_hole(
    file: &AlignedFile,
    range: Range<u64>,
    mut each: impl FnMut(Range<u64>) -> std::result::Result<(), ranges::Full>,
) -> Result<HolesBy> {
    let mut at = range.start;
    let mut by = HolesBy::Extents;
    while at < range.end {
        let found = file.holes(at..range.end, BATCH).await?;
        by = found.by;
        for hole in found.ranges {
            each(hole).map_err(|ranges::Full| {
                Error::Invalid(format!(
                    "'{}' has too many holes: a list of them would take more than {} MiB",
                    file.name(),
                    RANGES_BYTES_MAX >> 20
                ))
            })?;
        }
        if found.looked_until <= at {
            break;
        }
        at = found.looked_until;
    }
    Ok(by)
}
