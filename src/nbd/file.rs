//! An export of an NBD server as a file: [`BlockFile`] over the client.
//!
//! The client belongs to one queue, and files are used from several threads. So a thread of its own has the queue and
//! the connection; requests go there through a [`Mailbox`], their results come back as completions. Requests are cut to
//! what the server takes. Ranges and capabilities are what the server has told; whatever it answers later, [`cowslip_nbd::Client`] has
//! checked.
//!
//! Left out: several connections.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use cowslip::file::{BlockFile, Capabilities, Durability, FileExtent, FileId, Space};
use cowslip_nbd::export::{Durability as NbdDurability, ZeroRequest};
use cowslip_nbd::protocol::{AllocationFlags, ErrorCode, TransmissionFlags};
use cowslip_nbd::{ClientError, ExportDescription};
use cowslip_queue::{Backend, Buf, BufMut, Completer, Pending, Queue, pending, spawn};
use futures_util::future;

use super::ExportName;
use super::link::Link;
use crate::error::CommandError;

/// Payloads without a word of the server (`doc/proto.md`, "Block sizes").
const PAYLOAD_BYTES: u64 = 32 << 20;
/// Bytes of a request without payload: its length has 32 bits, and some servers take it as signed.
const PLAIN_BYTES: u64 = 1 << 30;
/// The same with extended headers: far more than any disk has, and far from where sums of 63 bits end.
const EXTENDED_PLAIN_BYTES: u64 = 1 << 60;

/// Opens an export; `name` is what users know it by.
///
/// # Errors
/// The server cannot be reached, has no such export, or it is read-only and `writable` is wanted.
pub async fn open(
    export: &ExportName,
    name: &str,
    writable: bool,
) -> Result<Arc<dyn BlockFile>, CommandError> {
    let mailbox = Arc::new(Mailbox::default());
    let (told, connected) = pending();
    let worker = {
        let (export, mailbox) = (export.clone(), Arc::clone(&mailbox));
        let work = move || work(&export, &mailbox, told);
        std::thread::Builder::new()
            .name("nbd".to_string())
            .spawn(work)
    };
    let worker = worker.map_err(|error| {
        let words = cowslip::error::system_words(&error);
        CommandError::new(format!("Could not start a thread: {words}"))
    })?;
    // From here on dropping it ends the thread.
    let mut file = NbdFile {
        name: name.to_string(),
        mailbox,
        worker: Some(worker),
        size: 0,
        flags: TransmissionFlags::empty(),
        capabilities: Capabilities {
            alignment_bytes: 1,
            writable: false,
            extends_with_zeroes: false,
            zeroes_fast: false,
            punches_holes: false,
        },
    };
    let description = connected.await?;
    file.describe(&description, writable)?;
    Ok(Arc::new(file))
}

/// How long requests may be.
#[derive(Clone, Copy, Debug)]
struct Limits {
    payload_bytes: u64,
    plain_bytes: u64,
}

/// What is asked of the connection's thread.
enum Request {
    Read(u64, BufMut, Completer<(io::Result<()>, BufMut)>),
    Write(u64, Vec<Buf>, NbdDurability, Completer<io::Result<()>>),
    Zero(u64, u64, Space, Completer<io::Result<()>>),
    Trim(u64, u64, Completer<io::Result<()>>),
    Status(u64, u64, Completer<io::Result<Vec<FileExtent>>>),
    Flush(Completer<io::Result<()>>),
}

/// Requests on their way to the thread.
#[derive(Default)]
struct Mailbox(Mutex<Letters>);

#[derive(Default)]
struct Letters {
    waiting: VecDeque<Request>,
    /// The thread waits for the next one.
    awaited: Option<Completer<()>>,
    is_closed: bool,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Letters> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn post(&self, request: Request) {
        let awaited = {
            let mut letters = self.lock();
            letters.waiting.push_back(request);
            letters.awaited.take()
        };
        if let Some(awaited) = awaited {
            awaited.complete(());
        }
    }

    fn close(&self) {
        let awaited = {
            let mut letters = self.lock();
            letters.is_closed = true;
            letters.awaited.take()
        };
        if let Some(awaited) = awaited {
            awaited.complete(());
        }
    }

    /// The next request; `None` when nobody can ask any more.
    async fn next(&self) -> Option<Request> {
        loop {
            let comes = {
                let mut letters = self.lock();
                if let Some(request) = letters.waiting.pop_front() {
                    return Some(request);
                }
                if letters.is_closed {
                    return None;
                }
                let (awaited, comes) = pending();
                letters.awaited = Some(awaited);
                comes
            };
            comes.await;
        }
    }
}

/// The connection's thread, from its start to its end.
fn work(
    export: &ExportName,
    mailbox: &Mailbox,
    told: Completer<Result<ExportDescription, CommandError>>,
) {
    let queue = match Queue::new(Backend::Auto) {
        Ok(queue) => queue,
        Err(error) => {
            let words = cowslip::error::system_words(&error);
            let text = format!("Could not set up the I/O queue: {words}");
            return told.complete(Err(CommandError::new(text)));
        }
    };
    queue.block_on(async {
        let link = match Link::open(export).await {
            Ok(link) => Rc::new(link),
            Err(error) => return told.complete(Err(error)),
        };
        told.complete(Ok(link.description().clone()));
        let limits = limits(link.description());
        while let Some(request) = mailbox.next().await {
            let link = Rc::clone(&link);
            spawn(async move { answer(&link, limits, request).await });
        }
        if let Ok(link) = Rc::try_unwrap(link) {
            link.leave().await;
        }
    });
}

fn limits(export: &ExportDescription) -> Limits {
    let sizes = export.block_sizes;
    let minimum = sizes.map_or(1, |sizes| u64::from(sizes.minimum.max(1)));
    let whole = |bytes: u64| bytes / minimum * minimum;
    let payload = sizes.map_or(PAYLOAD_BYTES, |sizes| u64::from(sizes.maximum));
    let plain = match export.extended_headers {
        true => EXTENDED_PLAIN_BYTES,
        false => PLAIN_BYTES,
    };
    Limits {
        payload_bytes: whole(payload.clamp(minimum, PAYLOAD_BYTES)).max(minimum),
        plain_bytes: whole(plain).max(minimum),
    }
}

async fn answer(link: &Rc<Link>, limits: Limits, request: Request) {
    match request {
        Request::Read(offset, buf, to) => to.complete(read(link, limits, offset, buf).await),
        Request::Write(offset, data, durability, to) => {
            to.complete(write(link, limits, (offset, data), durability).await);
        }
        Request::Zero(offset, len, space, to) => {
            let how = ZeroRequest {
                may_unmap: space == Space::Release,
                durability: NbdDurability::Cached,
                fast_only: false,
            };
            let pieces = pieces(offset, len, limits.plain_bytes);
            let zeroed = pieces
                .map(|(offset, len)| link.ask(move |client| client.write_zeroes(offset, len, how)));
            to.complete(all(zeroed).await);
        }
        Request::Trim(offset, len, to) => {
            let pieces = pieces(offset, len, limits.plain_bytes);
            let trimmed = pieces.map(|(offset, len)| {
                link.ask(move |client| client.trim(offset, len, NbdDurability::Cached))
            });
            to.complete(all(trimmed).await);
        }
        Request::Status(offset, len, to) => {
            to.complete(status(link, limits, offset, len).await);
        }
        Request::Flush(to) => to.complete(flush(link).await),
    }
}

/// Neighbouring parts of a range, none longer than `most`.
fn pieces(offset: u64, len: u64, most: u64) -> impl Iterator<Item = (u64, u64)> {
    let starts = (0..len.div_ceil(most)).map(move |index| index * most);
    starts.map(move |start| (offset + start, most.min(len - start)))
}

/// Waits for all of them; the first error.
async fn all(requests: impl Iterator<Item = impl Future<Output = Answer>>) -> io::Result<()> {
    let done = future::join_all(requests).await;
    let done: Result<Vec<()>, ClientError> = done.into_iter().collect();
    done.map(drop).map_err(io_error)
}

/// What becomes of a request that wants nothing back.
type Answer = Result<(), ClientError>;

/// Reads; beyond the end of the export there are zeroes.
async fn read(
    link: &Rc<Link>,
    limits: Limits,
    offset: u64,
    mut buf: BufMut,
) -> (io::Result<()>, BufMut) {
    let len = buf.len();
    let size = link.description().size;
    let there = size.saturating_sub(offset).min(len as u64);
    let mut beyond = buf.split_off(there as usize);
    beyond.fill(0);
    let mut reads = Vec::new();
    for (at, piece) in pieces(offset, there, limits.payload_bytes) {
        reads.push(read_part(link, at, buf.split_to(piece as usize)));
    }
    let read: Result<Vec<BufMut>, ClientError> =
        future::join_all(reads).await.into_iter().collect();
    match read {
        Ok(parts) => {
            let mut whole = parts.into_iter().chain([beyond]);
            let first = whole.next().unwrap_or_else(|| BufMut::zeroed(0));
            let joined = whole.fold(first, |mut joined, part| {
                joined.unsplit(part);
                joined
            });
            (Ok(()), joined)
        }
        Err(error) => (Err(io_error(error)), BufMut::zeroed(len)),
    }
}

/// Reads what one request can. The memory comes back, filled.
async fn read_part(link: &Rc<Link>, at: u64, mut part: BufMut) -> Result<BufMut, ClientError> {
    if !link.asks_again() {
        let mut part = Some(part);
        let read = link.ask(move |client| client.read(at, part.take().expect("asked once")));
        return read.await;
    }
    // The client keeps the memory of a request that has failed, so this one is not lent to it.
    let len = part.len();
    let data = link.ask(move |client| client.read(at, BufMut::zeroed(len)));
    part.copy_from_slice(&data.await?);
    Ok(part)
}

async fn write(
    link: &Rc<Link>,
    limits: Limits,
    (offset, data): (u64, Vec<Buf>),
    durability: NbdDurability,
) -> io::Result<()> {
    let has_fua = has(link, TransmissionFlags::SEND_FUA);
    let (durability, flushes) = match durability {
        NbdDurability::Durable if !has_fua => (NbdDurability::Cached, true),
        durability => (durability, false),
    };
    let mut at = offset;
    let mut writes = Vec::new();
    for buf in data {
        for (start, len) in pieces(0, buf.len() as u64, limits.payload_bytes) {
            let (at, part) = (at + start, buf.slice(start as usize, len as usize));
            writes.push(link.ask(move |client| client.write(at, part.clone(), durability)));
        }
        at += buf.len() as u64;
    }
    all(writes.into_iter()).await?;
    match flushes {
        true => flush(link).await,
        false => Ok(()),
    }
}

fn has(link: &Link, flag: TransmissionFlags) -> bool {
    link.description().flags.contains(flag)
}

/// Makes durable what was written. A server without such requests has no cache that it may lose.
async fn flush(link: &Rc<Link>) -> io::Result<()> {
    match has(link, TransmissionFlags::SEND_FLUSH) {
        true => link.ask(|client| client.flush()).await.map_err(io_error),
        false => Ok(()),
    }
}

/// Data and holes as the server tells them, what reads as zeroes being holes; all is data if it tells nothing.
async fn status(
    link: &Rc<Link>,
    limits: Limits,
    offset: u64,
    len: u64,
) -> io::Result<Vec<FileExtent>> {
    let end = offset + len;
    let mut extents: Vec<FileExtent> = Vec::new();
    let mut add = |start: u64, len: u64, hole: bool| match extents.last_mut() {
        Some(last) if last.hole == hole => last.len += len,
        _ if len == 0 => {}
        _ => extents.push(FileExtent { start, len, hole }),
    };
    let mut at = offset;
    let size = link.description().size;
    while at < end.min(size) {
        let rest = (end.min(size) - at).min(limits.plain_bytes);
        match link.ask(move |client| client.block_status(at, rest)).await {
            Ok(runs) => {
                for run in runs {
                    let len = run.len.min(end - at);
                    add(at, len, run.flags.contains(AllocationFlags::ZERO));
                    at += len;
                }
            }
            Err(ClientError::Request(refused)) if refused.code == ErrorCode::NotSup => {
                add(at, rest, false);
                at += rest;
            }
            Err(error) => return Err(io_error(error)),
        }
    }
    add(at, end - at, true);
    Ok(extents)
}

/// As errors of files are.
fn io_error(error: ClientError) -> io::Error {
    match error {
        ClientError::Io(error) => io::Error::new(error.kind(), ClientError::Io(error)),
        ClientError::Request(refused) => io::Error::from_raw_os_error(refused.code.errno()),
        other => io::Error::other(other),
    }
}

/// An export as a file.
struct NbdFile {
    name: String,
    mailbox: Arc<Mailbox>,
    worker: Option<JoinHandle<()>>,
    size: u64,
    flags: TransmissionFlags,
    capabilities: Capabilities,
}

impl fmt::Debug for NbdFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdFile")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl NbdFile {
    /// Takes over what the server has told.
    fn describe(&mut self, export: &ExportDescription, writable: bool) -> Result<(), CommandError> {
        let is_read_only = export.flags.contains(TransmissionFlags::READ_ONLY);
        if writable && is_read_only {
            return Err(CommandError::new(
                "request on write denied without write permission",
            ));
        }
        self.size = export.size;
        self.flags = export.flags;
        self.capabilities.alignment_bytes = export.block_sizes.map_or(1, |sizes| sizes.minimum);
        self.capabilities.writable = writable;
        self.capabilities.zeroes_fast = export.flags.contains(TransmissionFlags::SEND_WRITE_ZEROES);
        Ok(())
    }

    fn ask<T>(&self, request: impl FnOnce(Completer<T>) -> Request) -> Pending<T> {
        let (to, result) = pending();
        self.mailbox.post(request(to));
        result
    }

    /// Whether the server has told that it takes requests of a kind.
    fn has<T>(&self, flag: TransmissionFlags) -> Result<(), Pending<io::Result<T>>> {
        match self.flags.contains(flag) {
            true => Ok(()),
            false => Err(unsupported()),
        }
    }
}

fn unsupported<T>() -> Pending<io::Result<T>> {
    Pending::ready(Err(io::ErrorKind::Unsupported.into()))
}

impl Drop for NbdFile {
    fn drop(&mut self) {
        self.mailbox.close();
        if let Some(worker) = self.worker.take() {
            // It has said all it had to say by results.
            drop(worker.join());
        }
    }
}

impl BlockFile for NbdFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn id(&self) -> Option<FileId> {
        None
    }

    fn len(&self) -> Pending<io::Result<u64>> {
        Pending::ready(Ok(self.size))
    }

    fn read(&self, offset: u64, buf: BufMut) -> Pending<(io::Result<()>, BufMut)> {
        self.ask(|to| Request::Read(offset, buf, to))
    }

    fn write(
        &self,
        offset: u64,
        data: Vec<Buf>,
        durability: Durability,
    ) -> Pending<io::Result<()>> {
        let durability = match durability {
            Durability::Cached => NbdDurability::Cached,
            Durability::Durable => NbdDurability::Durable,
        };
        self.ask(|to| Request::Write(offset, data, durability, to))
    }

    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>> {
        match self.has(TransmissionFlags::SEND_WRITE_ZEROES) {
            Ok(()) => self.ask(|to| Request::Zero(offset, len, space, to)),
            Err(refused) => refused,
        }
    }

    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        match self.has(TransmissionFlags::SEND_TRIM) {
            Ok(()) => self.ask(|to| Request::Trim(offset, len, to)),
            Err(refused) => refused,
        }
    }

    fn allocate(&self, _offset: u64, _len: u64) -> Pending<io::Result<()>> {
        unsupported()
    }

    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        self.ask(|to| Request::Status(offset, len, to))
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        self.ask(Request::Flush)
    }

    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        match len == self.size {
            true => Pending::ready(Ok(())),
            false => unsupported(),
        }
    }

    fn allocated_bytes(&self) -> Option<u64> {
        None
    }
}
