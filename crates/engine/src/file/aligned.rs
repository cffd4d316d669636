//! [`HostFile`]: requests of any alignment on a file that asks for one.
//!
//! A finer read is widened and cut. A finer write becomes a read-modify-write of the host blocks at
//! its ends, and of nothing else; while such a block is between its read and its write, no other
//! write to it starts, and it waits for those under way. So 512-byte clusters work on a device with
//! 4096-byte blocks, metadata and data alike.
//!
//! A write that nobody waits for any more keeps its blocks until it has ended: it would put old bytes
//! beside its own over whatever the next one writes.
//!
//! [`HostFile::encrypted`] is the same file with a cipher between: bytes are decrypted behind each read and encrypted, in a
//! copy, before each write. Its sectors are blocks like those of a device, so finer writes are read, changed and written in
//! the same place, and keep clear of the writes to the file without the cipher. What reads as zeroes below does not read so
//! above: zeroes are written. Where sectors are numbered by the guest's offsets, each use of the file says which these are
//! ([`HostFile::for_guest`]).

use std::borrow::Cow;
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker, ready};

use cowslip_queue::cut::{self, Cut};
use cowslip_queue::{Buf, BufMut, Completer, Pending, pending};

use super::{
    BlockFile, Brake, Capabilities, Durability, Event, FileExtent, Holes, Observer, Space, Way,
};
use crate::luks::SectorCipher;
use crate::planted::{self, Mistake};
use crate::qcow2::geometry::{round_down, round_up};
use crate::sync::{Mutex, lock};
use crate::{Error, Result};

/// A [`BlockFile`] that takes requests of any alignment.
#[derive(Clone, Debug)]
pub struct HostFile {
    file: Arc<dyn BlockFile>,
    alignment: u64,
    writes: Arc<Mutex<Writes>>,
    space_changes: Arc<AtomicU64>,
    cipher: Option<Arc<Ciphered>>,
    /// Bytes by which the guest's offsets are ahead of the file's, modulo 2^64; `None` where it is not said yet. Only sectors that
    /// are numbered by them ask.
    ahead: Option<u64>,
    observer: Option<Arc<dyn Observer>>,
    brake: Brake,
}

/// What the number of an encrypted sector is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbering {
    /// That of its place in the file, counted from this offset.
    Place(u64),
    /// That of the guest's sector in it.
    Guest,
}

/// A cipher between a file and whoever uses it.
#[derive(Debug)]
struct Ciphered {
    cipher: SectorCipher,
    numbering: Numbering,
    /// What can be done with the file through it.
    capabilities: Capabilities,
}

/// Bytes that a cipher takes as one.
const SECTOR_BYTES: u64 = crate::luks::SECTOR_BYTES as u64;

/// How a write treats the blocks at its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    Whole,
    ReadModifyWrite,
}

/// Writes under way and waiting, in order of arrival; only kept for files with an alignment.
#[derive(Default)]
struct Writes {
    active: Vec<(u64, Range<u64>, Ends)>,
    waiting: VecDeque<(u64, Range<u64>, Ends, Completer<()>)>,
    next_id: u64,
}

impl std::fmt::Debug for Writes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Writes(active: {:?}, waiting: {})",
            self.active,
            self.waiting.len()
        )
    }
}

fn conflict(a: (&Range<u64>, Ends), b: (&Range<u64>, Ends)) -> bool {
    !planted::is(Mistake::BlocksNotSerialised)
        && (a.1 == Ends::ReadModifyWrite || b.1 == Ends::ReadModifyWrite)
        && a.0.start < b.0.end
        && b.0.start < a.0.end
}

/// A write that is registered; leaving lets the next ones in.
struct Admitted {
    writes: Arc<Mutex<Writes>>,
    id: u64,
}

impl Admitted {
    /// Awaits an operation on the blocks, and leaves when it has ended, whoever waits then.
    fn until(self, operation: Pending<io::Result<()>>) -> UnderWay {
        UnderWay(Some((operation, self)))
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut writes = lock(&self.writes);
        writes.active.retain(|(id, ..)| *id != self.id);
        writes
            .waiting
            .retain(|(id, _, _, waiter)| *id != self.id && waiter.is_awaited());
        let mut still: VecDeque<(u64, Range<u64>, Ends, Completer<()>)> = VecDeque::new();
        for (id, range, ends, waiter) in std::mem::take(&mut writes.waiting) {
            let blocked = writes
                .active
                .iter()
                .any(|(_, r, e)| conflict((&range, ends), (r, *e)))
                || still
                    .iter()
                    .any(|(_, r, e, _)| conflict((&range, ends), (r, *e)));
            if blocked {
                still.push_back((id, range, ends, waiter));
            } else {
                writes.active.push((id, range, ends));
                waiter.complete(());
            }
        }
        writes.waiting = still;
    }
}

/// An operation and its claim to the blocks that it writes.
type Claimed = (Pending<io::Result<()>>, Admitted);

/// A future of [`Admitted::until`].
struct UnderWay(Option<Claimed>);

impl Future for UnderWay {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let (operation, _) = self
            .0
            .as_mut()
            .expect("a completed future is not polled again");
        let outcome = ready!(Pin::new(operation).poll(cx));
        self.0 = None;
        Poll::Ready(outcome)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Some(claimed) = self.0.take() {
            Arc::new(Abandoned(Mutex::new(Some(claimed)))).wake();
        }
    }
}

/// An operation that nobody waits for: whoever completes it ends its claim.
struct Abandoned(Mutex<Option<Claimed>>);

impl Wake for Abandoned {
    fn wake(self: Arc<Self>) {
        let waker = Waker::from(Arc::clone(&self));
        let mut held = lock(&self.0);
        let Some((operation, _)) = held.as_mut() else {
            return;
        };
        // Its range holds the old or the new bytes, as with any request that is dropped. It has ended, too,
        // if its driver went away.
        if operation
            .poll_ended(&mut Context::from_waker(&waker))
            .is_ready()
        {
            *held = None;
        }
    }
}

impl HostFile {
    /// Wraps a file.
    pub fn new(file: Arc<dyn BlockFile>) -> HostFile {
        let alignment = u64::from(file.capabilities().alignment_bytes.max(1));
        assert!(
            alignment.is_power_of_two(),
            "an alignment is a power of two"
        );
        HostFile {
            observer: file.observer(),
            file,
            alignment,
            writes: Arc::default(),
            space_changes: Arc::default(),
            cipher: None,
            ahead: None,
            brake: Brake::default(),
        }
    }

    /// The same file, whose bytes are encrypted. What is before the first sector is out of reach.
    pub fn encrypted(&self, cipher: SectorCipher, numbering: Numbering) -> HostFile {
        if let Numbering::Place(base) = numbering {
            assert!(base.is_multiple_of(SECTOR_BYTES), "data begins at a sector");
        }
        let alignment = self.alignment.max(SECTOR_BYTES);
        let capabilities = Capabilities {
            alignment_bytes: alignment as u32,
            extends_with_zeroes: false,
            zeroes_fast: false,
            punches_holes: false,
            ..self.file.capabilities().clone()
        };
        HostFile {
            alignment,
            cipher: Some(Arc::new(Ciphered {
                cipher,
                numbering,
                capabilities,
            })),
            ..self.clone()
        }
    }

    /// The same file without the cipher: what is before the data is in the clear.
    pub fn in_the_clear(&self) -> HostFile {
        HostFile {
            alignment: u64::from(self.file.capabilities().alignment_bytes.max(1)),
            cipher: None,
            ..self.clone()
        }
    }

    /// The brake that stops all changes of the file through this handle and those made of it.
    pub(crate) fn brake(&self) -> Brake {
        self.brake.clone()
    }

    /// The same file, stopped by the brake of another one of its session.
    pub(crate) fn stopped_with(self, other: &HostFile) -> HostFile {
        HostFile {
            brake: other.brake(),
            ..self
        }
    }

    /// The same file, which no brake stops: for the mark that an image is corrupt.
    pub(crate) fn without_brake(&self) -> HostFile {
        HostFile {
            brake: Brake::default(),
            ..self.clone()
        }
    }

    /// Refuses to change the file once its brake is pulled; asked right before each change.
    fn unstopped(&self) -> Result<()> {
        match self.brake.is_pulled() {
            true => Err(Error::Latched(self.name().to_string())),
            false => Ok(()),
        }
    }

    /// Whether there is a cipher between.
    pub fn is_encrypted(&self) -> bool {
        self.cipher.is_some()
    }

    /// Whether bytes that lie side by side in the file belong together only if the guest has them side by side, too.
    pub fn is_keyed_by_guest(&self) -> bool {
        let cipher = self.cipher.as_ref();
        cipher.is_some_and(|ciphered| ciphered.numbering == Numbering::Guest)
    }

    /// The file, for bytes that are at `host` in it and at `guest` for the guest.
    pub fn for_guest(&self, host: u64, guest: u64) -> Cow<'_, HostFile> {
        match self.is_keyed_by_guest() {
            false => Cow::Borrowed(self),
            true => Cow::Owned(HostFile {
                ahead: Some(guest.wrapping_sub(host)),
                ..self.clone()
            }),
        }
    }

    /// The number of the sector at an offset in the file.
    fn sector(&self, numbering: Numbering, offset: u64) -> u64 {
        let from_first = match numbering {
            Numbering::Place(base) => offset - base,
            Numbering::Guest => {
                let ahead = self.ahead.expect("whoever uses the file says for what");
                offset.wrapping_add(ahead)
            }
        };
        from_first / SECTOR_BYTES
    }

    /// Tells the file's observer, if it has one, what is about to be done; returns when the work may go on.
    pub async fn reach(&self, event: Event) {
        if let Some(observer) = &self.observer
            && let Some(wait) = observer.reached(event)
        {
            wait.await;
        }
    }

    /// The same from where nothing can be waited for.
    pub fn pass(&self, event: Event) {
        if let Some(observer) = &self.observer {
            observer.passed(event);
        }
    }

    /// How often space was allocated, zeroed or given back, or the length changed, each time counted when it
    /// had ended, well or not. What reads as zeroes since then need not do so after a crash, until a flush
    /// that began later.
    pub fn space_changes(&self) -> u64 {
        self.space_changes.load(Ordering::Acquire)
    }

    /// Ends an operation that changes space.
    fn space_changed<T>(&self, outcome: T) -> T {
        self.space_changes.fetch_add(1, Ordering::AcqRel);
        outcome
    }

    /// The file's name, for messages.
    pub fn name(&self) -> &str {
        self.file.name()
    }

    /// What the file can do.
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

    /// Fills `buf` from `offset` on; zeroes beyond the end of file.
    pub async fn read(&self, offset: u64, buf: BufMut) -> Result<BufMut> {
        let len = buf.len() as u64;
        if self.is_aligned(offset, len) && self.is_memory_aligned(&buf) {
            return self.read_blocks(offset, buf).await;
        }
        let mut buf = buf;
        let start = round_down(offset, self.alignment);
        let end = round_up(offset + len, self.alignment);
        let wide = BufMut::zeroed((end - start) as usize);
        let wide = self.read_blocks(start, wide).await?;
        buf.copy_from_slice(&wide[(offset - start) as usize..][..len as usize]);
        Ok(buf)
    }

    /// Reads whole blocks.
    async fn read_blocks(&self, offset: u64, buf: BufMut) -> Result<BufMut> {
        let (outcome, mut buf) = self.file.read(offset, buf).await;
        outcome.map_err(|error| self.failed("read", error))?;
        if let Some(ciphered) = &self.cipher {
            let first = self.sector(ciphered.numbering, offset);
            ciphered.cipher.decrypt(first, &mut buf);
        }
        Ok(buf)
    }

    /// What is to be written to whole blocks: the bytes, or an encrypted copy.
    fn enciphered(&self, offset: u64, data: Vec<Buf>) -> Vec<Buf> {
        let Some(ciphered) = &self.cipher else {
            return data;
        };
        let mut joined = joined(&data);
        let first = self.sector(ciphered.numbering, offset);
        ciphered.cipher.encrypt(first, &mut joined);
        vec![joined.freeze()]
    }

    /// Reads `len` bytes at `offset` into a new buffer.
    pub async fn read_new(&self, offset: u64, len: u64) -> Result<BufMut> {
        self.read(offset, BufMut::zeroed(len as usize)).await
    }

    /// Writes the buffers one after the other at `offset`.
    pub async fn write(&self, offset: u64, data: Vec<Buf>, durability: Durability) -> Result<()> {
        let len: u64 = data.iter().map(|buf| buf.len() as u64).sum();
        if len == 0 {
            return Ok(());
        }
        if self.alignment == 1 {
            self.reach(Event::Pwritev).await;
            self.unstopped()?;
            let written = self.file.write(offset, data, durability).await;
            self.reach(Event::PwritevDone).await;
            return written.map_err(|error| self.failed("write", error));
        }
        let blocks = round_down(offset, self.alignment)..round_up(offset + len, self.alignment);
        let (admitted, start, data) = if self.is_aligned(offset, len) {
            let admitted = self.admit(blocks, Ends::Whole).await;
            let data = match self.is_encrypted() {
                true => self.enciphered(offset, data),
                false => self.fit_memory(data),
            };
            (admitted, offset, data)
        } else {
            let admitted = self.admit(blocks.clone(), Ends::ReadModifyWrite).await;
            let start = blocks.start;
            let whole = self.fill_ends(offset, data, blocks).await?;
            (admitted, start, self.enciphered(start, vec![whole]))
        };
        self.reach(Event::Pwritev).await;
        self.unstopped()?;
        let written = self.file.write(start, data, durability);
        let written = admitted.until(written).await;
        self.reach(Event::PwritevDone).await;
        written.map_err(|error| self.failed("write", error))
    }

    /// The whole blocks that a finer write lies in, with its bytes in their place.
    async fn fill_ends(&self, offset: u64, data: Vec<Buf>, blocks: Range<u64>) -> Result<Buf> {
        let len: u64 = data.iter().map(|buf| buf.len() as u64).sum();
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
                let old = BufMut::zeroed(self.alignment as usize);
                let old = self.read_blocks(at, old).await?;
                whole[(at - blocks.start) as usize..][..old.len()].copy_from_slice(&old);
                self.reach(after).await;
            }
        }
        let mut at = (offset - blocks.start) as usize;
        for buf in &data {
            whole[at..at + buf.len()].copy_from_slice(buf);
            at += buf.len();
        }
        Ok(whole.freeze())
    }

    /// Makes a range read as zeroes, by one call of the file system where it can, else by writing.
    pub async fn zero(&self, offset: u64, len: u64, space: Space) -> Result<()> {
        self.space_changed(self.make_zero(offset, len, space).await)
    }

    async fn make_zero(&self, offset: u64, len: u64, space: Space) -> Result<()> {
        const CHUNK: u64 = 2 << 20;
        let inner = round_up(offset, self.alignment)..round_down(offset + len, self.alignment);
        let mut rest = [offset..offset + len, 0..0];
        if inner.start < inner.end && self.capabilities().zeroes_fast {
            let admitted = self.admit(inner.clone(), Ends::Whole).await;
            self.reach(Event::PwritevZero).await;
            self.unstopped()?;
            let zeroed = self.file.zero(inner.start, inner.end - inner.start, space);
            match admitted.until(zeroed).await {
                Ok(()) => rest = [offset..inner.start, inner.end..offset + len],
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
                Err(error) => return Err(self.failed("write", error)),
            }
        }
        for range in rest {
            let mut at = range.start;
            while at < range.end {
                let next = (range.end - at).min(CHUNK);
                let zeroes = vec![Buf::zeroed(next as usize)];
                self.write(at, zeroes, Durability::Cached).await?;
                at += next;
            }
        }
        Ok(())
    }

    /// Gives the space of the whole blocks within a range back to the host, and says which part that
    /// was.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<Range<u64>> {
        let start = round_up(offset, self.alignment);
        let inner = start..round_down(offset + len, self.alignment).max(start);
        if inner.is_empty() {
            return Ok(inner);
        }
        let admitted = self.admit(inner.clone(), Ends::Whole).await;
        self.unstopped()?;
        let discarded = self.file.discard(inner.start, inner.end - inner.start);
        let discarded = admitted.until(discarded).await;
        self.space_changed(discarded)
            .map(|()| inner)
            .map_err(|error| self.failed("discard", error))
    }

    /// Allocates space for the blocks of a range, and moves the end of file up to their end.
    pub async fn allocate(&self, offset: u64, len: u64) -> Result<()> {
        let start = round_down(offset, self.alignment);
        let end = round_up(offset + len, self.alignment);
        self.unstopped()?;
        let allocated = self.file.allocate(start, end - start).await;
        self.space_changed(allocated)
            .map_err(|error| self.failed("allocate space for", error))
    }

    /// Allocates space for a range; the end of file stays.
    pub async fn allocate_keeping_end(&self, offset: u64, len: u64) -> Result<()> {
        self.unstopped()?;
        let allocated = self.file.allocate_keeping_end(offset, len).await;
        self.space_changed(allocated)
            .map_err(|error| self.failed("allocate space for", error))
    }

    /// Allocates a range as zeroes that count as written, where there is a call for that.
    pub async fn allocate_written(&self, offset: u64, len: u64) -> Result<()> {
        self.unstopped()?;
        let allocated = self.file.allocate_written(offset, len).await;
        self.space_changed(allocated)
            .map_err(|error| self.failed("allocate space for", error))
    }

    /// Gives a hole its space by other means than the file system's call.
    pub async fn give_space(&self, range: Range<u64>, way: Way) -> Result<()> {
        self.unstopped()?;
        let given = self.file.give_space(range, way).await;
        self.space_changed(given)
            .map(drop)
            .map_err(|error| self.failed("allocate space for", error))
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

    /// Makes durable all that had completed when it was called.
    pub async fn flush(&self) -> Result<()> {
        self.reach(Event::FlushToOs).await;
        self.reach(Event::FlushToDisk).await;
        self.file
            .flush()
            .await
            .map_err(|error| self.failed("flush", error))
    }

    /// Cuts or extends the file.
    pub async fn set_len(&self, len: u64) -> Result<()> {
        self.unstopped()?;
        self.space_changed(self.file.set_len(len).await)
            .map_err(|error| self.failed("resize", error))
    }

    /// Cuts the file if nobody else has it open.
    pub(crate) async fn cut_alone(&self, cut: Cut) -> Result<cut::Outcome> {
        self.unstopped()?;
        self.space_changed(self.file.cut_alone(cut).await)
            .map_err(|error| self.failed("cut", error))
    }

    /// Cuts a file that should have `len` bytes and has more, but no more than whole blocks at its
    /// end explain: what lies further is not ours.
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

    fn is_memory_aligned(&self, bytes: &[u8]) -> bool {
        self.alignment == 1 || (bytes.as_ptr() as u64).is_multiple_of(self.alignment)
    }

    /// Buffers whose addresses and lengths direct I/O takes: the same ones, or a copy.
    fn fit_memory(&self, data: Vec<Buf>) -> Vec<Buf> {
        let fits = |buf: &Buf| self.is_memory_aligned(buf) && self.is_aligned(0, buf.len() as u64);
        if data.iter().all(fits) {
            return data;
        }
        vec![joined(&data).freeze()]
    }

    async fn admit(&self, range: Range<u64>, ends: Ends) -> Admitted {
        let (id, waiting) = {
            let mut writes = lock(&self.writes);
            let id = writes.next_id;
            writes.next_id += 1;
            let mut others = writes.active.iter().map(|(_, r, e)| (r, *e));
            let mut earlier = writes.waiting.iter().map(|(_, r, e, _)| (r, *e));
            let blocked = others.any(|other| conflict((&range, ends), other))
                || earlier.any(|other| conflict((&range, ends), other));
            if blocked {
                let (completer, waiting) = pending();
                writes.waiting.push_back((id, range, ends, completer));
                (id, Some(waiting))
            } else {
                writes.active.push((id, range, ends));
                (id, None)
            }
        };
        // Registered from here on: a future that is dropped while it waits leaves nothing behind.
        let admitted = Admitted {
            writes: Arc::clone(&self.writes),
            id,
        };
        if let Some(waiting) = waiting {
            waiting.await;
        }
        admitted
    }
}

/// A copy of the buffers, one behind the other.
fn joined(data: &[Buf]) -> BufMut {
    let mut joined = BufMut::for_overwrite(data.iter().map(|buf| buf.len()).sum());
    let mut at = 0;
    for buf in data {
        joined[at..at + buf.len()].copy_from_slice(buf);
        at += buf.len();
    }
    joined
}

#[cfg(test)]
mod tests;
