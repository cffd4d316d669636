//! [`AlignedFile`]: a file with alignment requirements that accepts requests of any alignment.
//!
//! An unaligned read is widened, and its result trimmed. An unaligned write becomes a
//! read-modify-write of the blocks at its ends, and of nothing else. Between the read and the write
//! of such a block no other write to it starts, and the read waits for writes to it that are under
//! way. So 512-byte clusters work on a device with 4096-byte blocks, metadata and data alike.
//!
//! A write whose future has been dropped keeps its blocks until it has ended: it would overwrite
//! the next write's bytes with old ones beside its own.
//!
//! Calls that zero or discard may have a coarser unit than reads and writes, as on a block device
//! through the page cache. Unaligned ends of a range are zeroed by writing, and are not discarded.
//!
//! [`AlignedFile::guarded`] is the same file with a guard that examines changes of its first sector
//! (`aligned/first_sector.rs`).
//!
//! [`AlignedFile::encrypted`] is the same file behind a cipher: bytes are decrypted after each
//! read, and encrypted, in a copy, before each write. Its sectors are blocks like those of a
//! device, so unaligned writes take the same read-modify-write path, which also serialises them
//! with writes to the file without the cipher. Zeroes in the file do not read as zeroes through the
//! cipher, so zeroes are written out. Where sectors are numbered by guest offsets, each use of the
//! file states them ([`AlignedFile::for_guest`]).

use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cowslip_queue::cut::{self, Cut};
use cowslip_queue::file::MemoryAlignment;
use cowslip_queue::{Buf, BufMut, IoVec, IoVecMut, Pending};

use super::{
    BlockFile, Brake, Capabilities, Durability, Event, FileExtent, FillMethod, Holes, Observer,
    Space,
};
use crate::foreign::Signature;
use crate::sync::Mutex;
use crate::units::{SECTOR_BYTES, round_down, round_up};
use crate::{Error, Result};
use first_sector::Change;
use given::Given;
use left_behind::LeftBehind;
use turns::{Ends, Turn, Turns};

mod first_sector;
mod given;
mod left_behind;
mod turns;

/// A [`BlockFile`] that accepts requests of any alignment.
#[derive(Clone, Debug)]
pub struct AlignedFile {
    file: Arc<dyn BlockFile>,
    alignment: u64,
    /// Alignment of the memory of reads and writes.
    memory: MemoryAlignment,
    /// The unit of calls that zero or discard: a multiple of `alignment`.
    space_alignment: u64,
    /// Guards the first sector: no request may make it look like that of an image, of the built-in
    /// formats or of these.
    guarded: Option<Arc<[Signature]>>,
    turns: Arc<Mutex<Turns>>,
    space_changes: Arc<AtomicU64>,
    cipher: Option<Arc<Ciphered>>,
    /// Guest offset minus file offset in bytes, modulo 2^64; `None` until stated. Used only for
    /// sectors that are numbered by guest offsets.
    guest_minus_file: Option<u64>,
    observer: Option<Arc<dyn Observer>>,
    brake: Brake,
    left_behind: Arc<LeftBehind>,
    given: Arc<Given>,
}

/// Numbering of encrypted sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbering {
    /// By their place in the file, counted from this offset in bytes.
    Place(u64),
    /// By the guest's offset.
    Guest,
}

/// A cipher on top of a file.
#[derive(Debug)]
struct Ciphered {
    cipher: Arc<dyn Cipher>,
    numbering: Numbering,
    /// Capabilities of the file as seen through the cipher.
    capabilities: Capabilities,
}

/// A cipher of whole sectors of [`SECTOR_BYTES`]. Their numbers are counted modulo 2^55, as offsets
/// in bytes are modulo 2^64.
pub trait Cipher: Send + Sync + std::fmt::Debug {
    /// Encrypts whole sectors, the first of which has this number.
    fn encrypt(&self, first_sector: u64, bytes: &mut [u8]);

    /// Decrypts whole sectors, the first of which has this number.
    fn decrypt(&self, first_sector: u64, bytes: &mut [u8]);
}

/// A write that is ready to be issued: its blocks are reserved, if it needs any to itself, and all
/// bytes are present. Dropping it releases the blocks.
pub struct PreparedWrite {
    turn: Option<Turn>,
    start: u64,
    data: IoVec,
}

/// Whether the file supports the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Support {
    Yes,
    No,
}

impl AlignedFile {
    /// A view of a file that takes requests of any alignment.
    pub fn new(file: Arc<dyn BlockFile>) -> AlignedFile {
        let (alignment, space_alignment) = alignments(file.as_ref());
        AlignedFile {
            observer: file.observer(),
            memory: file.memory_alignment(),
            file,
            alignment,
            space_alignment,
            guarded: None,
            turns: Arc::default(),
            space_changes: Arc::default(),
            cipher: None,
            guest_minus_file: None,
            brake: Brake::default(),
            left_behind: Arc::default(),
            given: Arc::default(),
        }
    }

    /// The same file with its bytes encrypted. Bytes before the first sector are not accessible.
    pub fn encrypted(&self, cipher: Arc<dyn Cipher>, numbering: Numbering) -> AlignedFile {
        if let Numbering::Place(base) = numbering {
            assert!(base.is_multiple_of(SECTOR_BYTES), "data begins at a sector");
        }
        let alignment = self.alignment.max(SECTOR_BYTES);
        let space_alignment = self.space_alignment.max(SECTOR_BYTES);
        let capabilities = Capabilities {
            alignment_bytes: alignment as u32,
            space_alignment_bytes: space_alignment as u32,
            extends_with_zeroes: false,
            zeroes_fast: false,
            punches_holes: false,
            ..self.file.capabilities().clone()
        };
        AlignedFile {
            alignment,
            space_alignment,
            cipher: Some(Arc::new(Ciphered {
                cipher,
                numbering,
                capabilities,
            })),
            ..self.clone()
        }
    }

    /// The same file without the cipher, for the unencrypted bytes before the data.
    pub fn in_the_clear(&self) -> AlignedFile {
        let (alignment, space_alignment) = alignments(self.file.as_ref());
        AlignedFile {
            alignment,
            space_alignment,
            cipher: None,
            ..self.clone()
        }
    }

    /// The brake of this handle and of the handles derived from it.
    pub fn brake(&self) -> Brake {
        self.brake.clone()
    }

    /// The same file with the brake of another file of its session.
    pub fn stopped_with(self, other: &AlignedFile) -> AlignedFile {
        AlignedFile {
            brake: other.brake(),
            ..self
        }
    }

    /// The same file without a brake, for marking an image corrupt.
    pub fn without_brake(&self) -> AlignedFile {
        AlignedFile {
            brake: Brake::default(),
            ..self.clone()
        }
    }

    /// Fails if the brake is set; checked right before each change.
    fn unstopped(&self) -> Result<()> {
        match self.brake.is_pulled() {
            true => Err(Error::Latched(self.name().to_string())),
            false => Ok(()),
        }
    }

    /// Whether the file is behind a cipher.
    pub fn is_encrypted(&self) -> bool {
        self.cipher.is_some()
    }

    /// Whether sectors are numbered by guest offsets, so that bytes adjacent in the file may be
    /// joined only if they are adjacent for the guest.
    pub fn is_keyed_by_guest(&self) -> bool {
        let cipher = self.cipher.as_ref();
        cipher.is_some_and(|ciphered| ciphered.numbering == Numbering::Guest)
    }

    /// The file, for bytes at offset `host` in it that have offset `guest` for the guest.
    pub fn for_guest(&self, host: u64, guest: u64) -> Cow<'_, AlignedFile> {
        match self.is_keyed_by_guest() {
            false => Cow::Borrowed(self),
            true => Cow::Owned(AlignedFile {
                guest_minus_file: Some(guest.wrapping_sub(host)),
                ..self.clone()
            }),
        }
    }

    /// The number of the sector at an offset in the file.
    fn sector(&self, numbering: Numbering, offset: u64) -> u64 {
        let from_first = match numbering {
            // The first block of a device may begin before the data: its sectors there have the
            // numbers that count up to 0, modulo 2^64 bytes. The cipher counts alike, so what is
            // decrypted of them is encrypted again as it was.
            Numbering::Place(base) => offset.wrapping_sub(base),
            Numbering::Guest => {
                let shift = self.guest_minus_file.expect("the user of the file sets it");
                offset.wrapping_add(shift)
            }
        };
        from_first / SECTOR_BYTES
    }

    /// Reports an event to the file's observer, if any, and waits until the work may go on.
    pub async fn reach(&self, event: Event) {
        if let Some(observer) = &self.observer
            && let Some(wait) = observer.reached(event)
        {
            wait.await;
        }
    }

    /// Reports an event at a point where the work cannot wait.
    pub fn pass(&self, event: Event) {
        if let Some(observer) = &self.observer {
            observer.passed(event);
        }
    }

    /// Number of operations that allocated, zeroed or deallocated space or changed the length,
    /// counted at their end whatever their outcome. Zeroes that such an operation has made may be
    /// lost in a crash until a flush that began later has completed.
    pub fn space_changes(&self) -> u64 {
        self.space_changes.load(Ordering::Acquire)
    }

    /// Counts the end of an operation that changes space.
    fn space_changed<T>(&self, outcome: T) -> T {
        self.space_changes.fetch_add(1, Ordering::AcqRel);
        outcome
    }

    /// The file's name, for messages.
    pub fn name(&self) -> &str {
        self.file.name()
    }

    /// Capabilities of the file.
    pub fn capabilities(&self) -> &Capabilities {
        match &self.cipher {
            None => self.file.capabilities(),
            Some(ciphered) => &ciphered.capabilities,
        }
    }

    /// The file itself, without a cipher.
    pub fn block_file(&self) -> &Arc<dyn BlockFile> {
        &self.file
    }

    fn failed(&self, verb: &str, source: io::Error) -> Error {
        Error::io(format!("Could not {verb} '{}'", self.name()), source)
    }

    /// The file's length in bytes.
    pub async fn len(&self) -> Result<u64> {
        self.file
            .len()
            .await
            .map_err(|error| self.failed("get the size of", error))
    }

    /// Reads at `offset` into a buffer or a list; bytes beyond the end of file read as zeroes.
    pub async fn read<T>(&self, offset: u64, target: T) -> Result<T>
    where
        T: Into<IoVecMut> + From<IoVecMut>,
    {
        let target = target.into();
        let is_aligned = self.is_aligned(offset, target.len() as u64);
        if is_aligned && self.cipher.is_none() && target.fits(self.memory) {
            let (outcome, target) = self.file.read(offset, target).await;
            outcome.map_err(|error| self.failed("read", error))?;
            return Ok(target.into());
        }
        // A future is moved with all that it may need: what is rare is kept apart.
        let read = Box::pin(self.read_otherwise(offset, target));
        Ok(read.await?.into())
    }

    /// Reads bytes that are decrypted, or that the file reads only into other memory: through a
    /// buffer.
    async fn read_otherwise(&self, offset: u64, mut target: IoVecMut) -> Result<IoVecMut> {
        let len = target.len() as u64;
        if !self.is_aligned(offset, len) {
            let start = round_down(offset, self.alignment);
            let end = round_up(offset + len, self.alignment);
            let wide = self.read_own(start, end - start).await?;
            target.copy_from_slice(0, &wide[(offset - start) as usize..][..len as usize]);
            return Ok(target);
        }
        if target.is_buffer() && target.fits(self.memory) {
            return self.read_blocks(offset, target).await;
        }
        // Direct I/O refuses this memory, or others must not see it before it is decrypted.
        let own = self.read_own(offset, len).await?;
        target.copy_from_slice(0, &own);
        Ok(target)
    }

    /// Reads whole blocks into a new buffer, whose memory suits every file.
    async fn read_own(&self, offset: u64, len: u64) -> Result<BufMut> {
        let own = BufMut::for_overwrite(len as usize).into();
        Ok(self.read_blocks(offset, own).await?.into())
    }

    /// Reads whole blocks into one buffer, and decrypts them there.
    async fn read_blocks(&self, offset: u64, target: IoVecMut) -> Result<IoVecMut> {
        let (outcome, target) = self.file.read(offset, target).await;
        outcome.map_err(|error| self.failed("read", error))?;
        let Some(ciphered) = &self.cipher else {
            return Ok(target);
        };
        let first = self.sector(ciphered.numbering, offset);
        let mut buf = BufMut::from(target);
        ciphered.cipher.decrypt(first, &mut buf);
        Ok(buf.into())
    }

    /// The data to write to whole blocks: the bytes themselves or an encrypted copy.
    fn enciphered(&self, offset: u64, data: IoVec) -> IoVec {
        let Some(ciphered) = &self.cipher else {
            return data;
        };
        let mut copy = data.to_buf_mut();
        let first = self.sector(ciphered.numbering, offset);
        ciphered.cipher.encrypt(first, &mut copy);
        copy.freeze().into()
    }

    /// Reads `len` bytes at `offset` into a new buffer.
    pub async fn read_new(&self, offset: u64, len: u64) -> Result<BufMut> {
        self.read(offset, BufMut::zeroed(len as usize)).await
    }

    /// Writes a buffer, or a list of them, at `offset`.
    pub async fn write(
        &self,
        offset: u64,
        data: impl Into<IoVec>,
        durability: Durability,
    ) -> Result<()> {
        let (prepared, waiting) = match self.prepare_whole(offset, data.into()) {
            Ok(prepared) => prepared,
            Err(data) => (Box::pin(self.prepare(offset, data)).await?, None),
        };
        if let Some(waiting) = waiting {
            waiting.await;
        }
        self.write_prepared(prepared, durability).await
    }

    /// A write that reads nothing and copies nothing, and what it has to wait for; or its data, if
    /// it is none.
    fn prepare_whole(
        &self,
        offset: u64,
        data: IoVec,
    ) -> std::result::Result<(PreparedWrite, Option<Pending<()>>), IoVec> {
        let range = offset..offset + data.len() as u64;
        let mut prepared = PreparedWrite {
            turn: None,
            start: offset,
            data,
        };
        if range.is_empty() || (self.alignment == 1 && !self.guards(&range)) {
            return Ok((prepared, None));
        }
        let is_whole = self.is_aligned(offset, range.end - range.start);
        let goes_as_it_is = !self.is_encrypted() && prepared.data.fits(self.memory);
        if !is_whole || !goes_as_it_is || self.guards(&range) {
            return Err(prepared.data);
        }
        let (turn, waiting) = Turn::take(&self.turns, range, Ends::Whole);
        prepared.turn = Some(turn);
        Ok((prepared, waiting))
    }

    /// The first half of a write: waits for conflicting writes, and reads the blocks at its ends.
    /// If it fails, nothing has been written.
    pub async fn prepare_write(
        &self,
        offset: u64,
        data: impl Into<IoVec>,
    ) -> Result<PreparedWrite> {
        self.prepare(offset, data.into()).await
    }

    async fn prepare(&self, offset: u64, data: IoVec) -> Result<PreparedWrite> {
        let data = match self.prepare_whole(offset, data) {
            Ok((prepared, None)) => return Ok(prepared),
            Ok((prepared, Some(waiting))) => {
                waiting.await;
                return Ok(prepared);
            }
            Err(data) => data,
        };
        let len = data.len() as u64;
        let end = offset + len;
        let blocks = round_down(offset, self.alignment)..round_up(end, self.alignment);
        let data = match self.guards(&blocks) {
            // The bytes that are examined must be the bytes that are written.
            true => data.to_buf().into(),
            false => data,
        };
        let change = Change::Bytes(offset, &data);
        if self.is_aligned(offset, len) {
            let turn = self.admit(blocks, Ends::Whole, change).await?;
            let data = match self.is_encrypted() {
                true => self.enciphered(offset, data),
                false if data.fits(self.memory) => data,
                false => data.to_buf_mut().freeze().into(),
            };
            return Ok(PreparedWrite {
                turn: Some(turn),
                start: offset,
                data,
            });
        }
        let turn = self.admit(blocks.clone(), Ends::ReadModifyWrite, change);
        let turn = turn.await?;
        let start = blocks.start;
        let whole = self.fill_ends(offset, data, blocks).await?;
        Ok(PreparedWrite {
            turn: Some(turn),
            start,
            data: self.enciphered(start, whole.into()),
        })
    }

    /// The second half of a write.
    pub async fn write_prepared(
        &self,
        prepared: PreparedWrite,
        durability: Durability,
    ) -> Result<()> {
        let PreparedWrite { turn, start, data } = prepared;
        if data.is_empty() {
            return Ok(());
        }
        self.reach(Event::Pwritev).await;
        self.unstopped()?;
        let written = self.file.write(start, data, durability);
        let written = match turn {
            Some(turn) => turn.until(written).await,
            None => written.await,
        };
        self.reach(Event::PwritevDone).await;
        written.map_err(|error| self.failed("write", error))
    }

    /// The whole blocks around an unaligned write, with its bytes in place.
    async fn fill_ends(&self, offset: u64, data: IoVec, blocks: Range<u64>) -> Result<Buf> {
        let len = data.len() as u64;
        let mut whole = BufMut::zeroed((blocks.end - blocks.start) as usize);
        let last = blocks.end - self.alignment;
        let head_partial = offset > blocks.start;
        let tail_partial = offset + len < blocks.end && (last > blocks.start || !head_partial);
        let head = (Event::PwritevRmwHead, Event::PwritevRmwAfterHead);
        let tail = (Event::PwritevRmwTail, Event::PwritevRmwAfterTail);
        let ends = [
            (head_partial, blocks.start, head),
            (tail_partial, last, tail),
        ];
        for (partial, at, (before, after)) in ends {
            if partial {
                self.reach(before).await;
                let old = self.read_own(at, self.alignment).await?;
                whole[(at - blocks.start) as usize..][..old.len()].copy_from_slice(&old);
                self.reach(after).await;
            }
        }
        let at = (offset - blocks.start) as usize;
        data.copy_to_slice(0, &mut whole[at..at + data.len()]);
        Ok(whole.freeze())
    }

    /// Makes a range read as zeroes, by a call of the file system where possible, else by writing.
    pub async fn zero(&self, offset: u64, len: u64, space: Space) -> Result<()> {
        self.space_changed(self.make_zero(offset, len, space).await)
    }

    async fn make_zero(&self, offset: u64, len: u64, space: Space) -> Result<()> {
        let end = offset + len;
        let inner = round_up(offset, self.space_alignment)..round_down(end, self.space_alignment);
        if inner.is_empty() || !self.capabilities().zeroes_fast {
            return self.write_zeroes(offset..end).await;
        }
        self.write_zeroes(offset..inner.start).await?;
        let rest = match self.zero_blocks(inner.clone(), space).await? {
            Support::Yes => inner.end..end,
            Support::No => inner.start..end,
        };
        self.write_zeroes(rest).await
    }

    /// Zeroes whole blocks by one call.
    async fn zero_blocks(&self, blocks: Range<u64>, space: Space) -> Result<Support> {
        let change = Change::Zeroes(blocks.clone());
        let turn = self.admit(blocks.clone(), Ends::Whole, change).await?;
        self.reach(Event::PwritevZero).await;
        self.unstopped()?;
        // On some file systems by a hole that is filled again, whatever becomes of the space.
        let losing = self.given.losing(&blocks);
        let zeroed = self
            .file
            .zero(blocks.start, blocks.end - blocks.start, space);
        let zeroed = turn.until(zeroed).await;
        losing.ended();
        match zeroed {
            Ok(()) => Ok(Support::Yes),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(Support::No),
            Err(error) => Err(self.failed("write", error)),
        }
    }

    async fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        const CHUNK: u64 = 2 << 20;
        let mut at = range.start;
        while at < range.end {
            let next = (range.end - at).min(CHUNK);
            let zeroes = Buf::zeroed(next as usize);
            self.write(at, zeroes, Durability::Cached).await?;
            at += next;
        }
        Ok(())
    }

    /// Deallocates the whole blocks within a range, and returns the deallocated part.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<Range<u64>> {
        let start = round_up(offset, self.space_alignment);
        let inner = start..round_down(offset + len, self.space_alignment).max(start);
        let inner = self.spare_first_sector(inner);
        if inner.is_empty() {
            return Ok(inner);
        }
        let change = Change::Zeroes(inner.clone());
        let turn = self.admit(inner.clone(), Ends::Whole, change).await?;
        self.unstopped()?;
        let losing = self.given.losing(&inner);
        let discarded = self.file.discard(inner.start, inner.end - inner.start);
        let discarded = turn.until(discarded).await;
        losing.ended();
        self.space_changed(discarded)
            .map(|()| inner)
            .map_err(|error| self.failed("discard", error))
    }

    /// Allocates space for the blocks of a range, and extends the file to their end.
    pub async fn allocate(&self, offset: u64, len: u64) -> Result<()> {
        let start = round_down(offset, self.space_alignment);
        let end = round_up(offset + len, self.space_alignment);
        self.unstopped()?;
        let allocated = self.file.allocate(start, end - start).await;
        self.space_changed(allocated)
            .map_err(|error| self.failed("allocate space for", error))
    }

    /// Allocates space for a range, and keeps the end of file.
    pub async fn allocate_keeping_end(&self, offset: u64, len: u64) -> Result<()> {
        self.unstopped()?;
        let allocated = self.file.allocate_keeping_end(offset, len).await;
        self.space_changed(allocated)
            .map_err(|error| self.failed("allocate space for", error))
    }

    /// Allocates a range as written zeroes, where there is a call for it.
    pub async fn allocate_written(&self, offset: u64, len: u64) -> Result<()> {
        self.unstopped()?;
        let allocated = self.file.allocate_written(offset, len).await;
        self.space_changed(allocated)
            .map_err(|error| self.failed("allocate space for", error))
    }

    /// Allocates space for a hole by another method than `fallocate`.
    pub async fn give_space(&self, range: Range<u64>, way: FillMethod) -> Result<()> {
        self.unstopped()?;
        let given = self.file.give_space(range, way).await;
        self.space_changed(given)
            .map(drop)
            .map_err(|error| self.failed("allocate space for", error))
    }

    /// Has the file system free the space that holes of a range keep; about how many bytes it has
    /// written elsewhere for that.
    pub async fn release_extents(&self, range: Range<u64>) -> Result<u64> {
        self.unstopped()?;
        let released = self.file.release_extents(range).await;
        released.map_err(|error| self.failed("release space of", error))
    }

    /// The first `most` holes of a range.
    pub async fn holes(&self, range: Range<u64>, most: usize) -> Result<Holes> {
        let holes = self.file.holes(range, most).await;
        holes.map_err(|error| self.failed("map", error))
    }

    /// Data and holes of a range.
    pub async fn extents(&self, offset: u64, len: u64) -> Result<Vec<FileExtent>> {
        let extents = self.file.extents(offset, len).await;
        extents.map_err(|error| self.failed("map", error))
    }

    /// Makes all operations durable that had completed when it was called.
    pub async fn flush(&self) -> Result<()> {
        self.reach(Event::FlushToOs).await;
        self.reach(Event::FlushToDisk).await;
        self.file
            .flush()
            .await
            .map_err(|error| self.failed("flush", error))
    }

    /// Truncates or extends the file.
    pub async fn set_len(&self, len: u64) -> Result<()> {
        self.unstopped()?;
        let losing = self.given.losing(&(len..u64::MAX));
        let set = match self.guards(&(len..u64::MAX)) {
            false => self.file.set_len(len).await,
            true => {
                let cut = len..first_sector::BYTES;
                let change = Change::Zeroes(cut.clone());
                let turn = self.admit(cut, Ends::Whole, change).await?;
                turn.until(self.file.set_len(len)).await
            }
        };
        losing.ended();
        self.space_changed(set)
            .map_err(|error| self.failed("resize", error))
    }

    /// Truncates the file if no other process has it open.
    pub async fn cut_alone(&self, cut: Cut) -> Result<cut::Outcome> {
        self.unstopped()?;
        let losing = self.given.losing(&(0..u64::MAX));
        let cut = self.file.cut_alone(cut).await;
        losing.ended();
        self.space_changed(cut)
            .map_err(|error| self.failed("cut", error))
    }

    /// Truncates the file to `len` bytes if it is longer by no more than the padding of its last
    /// block; bytes further on are not this program's.
    pub async fn cut_padding(&self, len: u64) -> Result<()> {
        let now = self.len().await?;
        if now > len && now <= round_up(len, self.alignment) {
            self.set_len(len).await?;
        }
        Ok(())
    }

    fn is_aligned(&self, offset: u64, len: u64) -> bool {
        (offset | len) & (self.alignment - 1) == 0
    }

    /// Waits for conflicting changes to these blocks, and examines the result of the change if the
    /// first sector is guarded and affected. No other change to that sector starts until this one
    /// has ended.
    async fn admit(&self, blocks: Range<u64>, ends: Ends, change: Change<'_>) -> Result<Turn> {
        if !self.guards(&blocks) {
            return Ok(self.register(blocks, ends).await);
        }
        let claim = 0..blocks.end.max(first_sector::BYTES);
        let turn = self.register(claim, Ends::ReadModifyWrite).await;
        // Boxed, since few files are guarded and every write's future would grow by it.
        Box::pin(self.examine(change)).await?;
        Ok(turn)
    }

    async fn register(&self, range: Range<u64>, ends: Ends) -> Turn {
        let (turn, waiting) = Turn::take(&self.turns, range, ends);
        if let Some(waiting) = waiting {
            waiting.await;
        }
        turn
    }
}

/// The units, in bytes, of reads and writes, and of calls that zero or discard.
fn alignments(file: &dyn BlockFile) -> (u64, u64) {
    let capabilities = file.capabilities();
    let alignment = u64::from(capabilities.alignment_bytes.max(1));
    let space = u64::from(capabilities.space_alignment_bytes).max(alignment);
    assert!(
        alignment.is_power_of_two() && space.is_power_of_two(),
        "an alignment is a power of two"
    );
    (alignment, space)
}

#[cfg(test)]
mod tests;
