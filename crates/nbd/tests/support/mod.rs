//! Shared parts of the tests: a server on a thread of its own, exports that hold requests back, a
//! client that speaks raw bytes.

#![allow(dead_code)] // Each test file uses its part of it.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use cowslip_block::disk::{Disk, DiskFuture, Extent, MemoryDisk};
pub use cowslip_block::random::Random;
use cowslip_nbd::export::{Durability, MetadataContext, StatusExtent};
use cowslip_nbd::protocol::handshake::*;
use cowslip_nbd::protocol::transmission::*;
use cowslip_nbd::protocol::*;
use cowslip_nbd::{Client, ConnectOptions, Export, Server, ServerHandle, ServerOptions};
use cowslip_queue::{Backend, Completer, IoVec, IoVecMut, Listener, Queue, Stream, pending};
use tempfile::TempDir;

pub const BACKENDS: [Backend; 2] = [Backend::Uring, Backend::Threads];

/// A queue of that kind, or `None`, loudly, where the system has no such thing.
pub fn queue(backend: Backend) -> Option<Queue> {
    match Queue::new(backend) {
        Ok(queue) => Some(queue),
        Err(error) if backend == Backend::Uring => {
            eprintln!("SKIPPED: no io_uring here: {error}");
            None
        }
        Err(error) => panic!("no queue: {error}"),
    }
}

/// Whether a program is installed; says so loudly if not.
pub fn installed(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("SKIPPED: {program} is not installed");
    }
    found
}

/// A server that runs on a thread of its own until it is dropped.
pub struct Running {
    pub path: PathBuf,
    pub handle: ServerHandle,
    thread: Option<JoinHandle<()>>,
    _directory: TempDir,
}

impl Running {
    pub fn start(backend: Backend, server: Server) -> Running {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nbd.sock");
        let handle = server.handle();
        let (listening, is_listening) = mpsc::channel();
        let thread = std::thread::spawn({
            let path = path.clone();
            move || {
                let Some(queue) = queue(backend) else { return };
                let listener = Listener::unix(&path).unwrap();
                listening.send(()).unwrap();
                queue.block_on(server.serve(vec![listener]));
            }
        });
        is_listening.recv().unwrap();
        Running {
            path,
            handle,
            thread: Some(thread),
            _directory: directory,
        }
    }

    pub fn with_export(backend: Backend, export: impl Into<Export>) -> Running {
        let mut server = Server::new(ServerOptions::default());
        server.add_export("", export);
        Running::start(backend, server)
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path.display())
    }

    /// Waits until the server has ended by itself.
    pub fn join(mut self) {
        self.thread.take().unwrap().join().unwrap();
    }

    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    pub fn stop(self) {
        self.handle.stop();
        self.join();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.handle.stop();
        if let Some(thread) = self.thread.take()
            && let Err(panic) = thread.join()
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

pub async fn connect(path: &Path, export: &str) -> Client {
    let stream = Stream::connect_unix(path).await.unwrap();
    Client::connect(stream, &ConnectOptions::new(export))
        .await
        .unwrap()
}

/// Looks again and again until `condition` holds; gives up after ten seconds.
pub fn eventually(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..1000 {
        if condition() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{what}: not within ten seconds");
}

#[derive(Default)]
struct Held {
    waiting: Vec<Completer<()>>,
    /// Requests that are held at most at a time.
    peak: usize,
    open: bool,
    finished: usize,
    /// Requests that had finished when the disk last handed over what it has.
    handed_over: usize,
}

/// A disk in memory that holds reads and writes back until a given number is pending, or until it
/// is opened; then it releases them, the last one first, and holds no more.
pub struct HoldingDisk {
    inner: MemoryDisk,
    held: Mutex<Held>,
    release_at: usize,
}

impl HoldingDisk {
    pub fn new(size: u64, release_at: usize) -> HoldingDisk {
        HoldingDisk {
            inner: MemoryDisk::new("memory", size),
            held: Mutex::default(),
            release_at,
        }
    }

    pub fn held_now(&self) -> usize {
        self.held.lock().unwrap().waiting.len()
    }

    pub fn peak(&self) -> usize {
        self.held.lock().unwrap().peak
    }

    pub fn handed_over(&self) -> usize {
        self.held.lock().unwrap().handed_over
    }

    pub fn finished(&self) -> usize {
        self.held.lock().unwrap().finished
    }

    pub fn open(&self) {
        let waiting = {
            let mut held = self.held.lock().unwrap();
            held.open = true;
            std::mem::take(&mut held.waiting)
        };
        for completer in waiting.into_iter().rev() {
            completer.complete(());
        }
    }

    async fn pass(&self) {
        let (waiting, full) = {
            let mut held = self.held.lock().unwrap();
            if held.open {
                return;
            }
            let (completer, waiting) = pending();
            held.waiting.push(completer);
            held.peak = held.peak.max(held.waiting.len());
            (waiting, held.waiting.len() == self.release_at)
        };
        if full {
            self.open();
        }
        waiting.await;
    }

    fn finish(&self) {
        self.held.lock().unwrap().finished += 1;
    }
}

cowslip_block::debug_by_name!(HoldingDisk);

impl Disk for HoldingDisk {
    cowslip_block::forward_to_disk!(inner: name, size, features, zero, discard, extents);

    fn read(&self, offset: u64, buf: IoVecMut) -> DiskFuture<'_, IoVecMut> {
        Box::pin(async move {
            self.pass().await;
            let buf = self.inner.read(offset, buf).await;
            self.finish();
            buf
        })
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> DiskFuture<'_, ()> {
        Box::pin(async move {
            self.pass().await;
            let written = self.inner.write(offset, data, durability).await;
            self.finish();
            written
        })
    }

    fn write_back(&self) -> DiskFuture<'_, ()> {
        let mut held = self.held.lock().unwrap();
        held.handed_over = held.finished;
        self.inner.write_back()
    }
}

/// A context that shows what has been written, under any name.
struct Written(String, Arc<MemoryDisk>);

impl MetadataContext for Written {
    fn name(&self) -> &str {
        &self.0
    }

    fn runs(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<StatusExtent>> {
        Box::pin(async move {
            let extents = self.1.extents(offset, len, max).await?;
            let state = |extent: &Extent| StatusExtent {
                len: extent.len,
                flags: AllocationFlags(extent.data.into()),
            };
            Ok(extents.iter().map(state).collect())
        })
    }
}

/// An export of a disk in memory with further contexts of these names.
pub fn export_with_contexts(disk: MemoryDisk, names: &[&str]) -> Export {
    let disk = Arc::new(disk);
    let context = |name: &&str| -> Arc<dyn MetadataContext> {
        Arc::new(Written((*name).to_owned(), Arc::clone(&disk)))
    };
    Export {
        contexts: names.iter().map(context).collect(),
        ..disk.clone().into()
    }
}

/// The raw client's cookie.
pub const COOKIE: u64 = 0x1234_5678_9abc_def0;

/// A client that sends arbitrary messages, valid or not.
pub struct RawClient {
    pub stream: UnixStream,
}

impl RawClient {
    /// Connects and sends nothing.
    pub fn silent(path: &Path) -> RawClient {
        let stream = UnixStream::connect(path).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        RawClient { stream }
    }

    /// Connects and exchanges greetings.
    pub fn greeted(path: &Path) -> RawClient {
        let mut client = RawClient::silent(path);
        let greeting = client.receive(GREETING_BYTES);
        assert_eq!(decode_magics(&greeting[..MAGICS_BYTES]), Ok(Style::New));
        client.send(&encode_client_flags(ClientFlags(3)));
        client
    }

    /// Connects and chooses the default export, with simple replies.
    pub fn transmitting(path: &Path) -> RawClient {
        let mut client = RawClient::greeted(path);
        client.option(OptionCode::ExportName, b"");
        client.receive(EXPORT_NAME_REPLY_BYTES);
        client
    }

    /// Connects and chooses the default export, with structured replies and `base:allocation`.
    pub fn structured(path: &Path) -> RawClient {
        let mut client = RawClient::greeted(path);
        client.option(OptionCode::StructuredReply, b"");
        client.replies();
        let request = MetaContextRequest {
            name: String::new(),
            queries: vec![BASE_ALLOCATION.to_owned()],
        };
        client.option(OptionCode::SetMetaContext, &request.encode());
        client.replies();
        let request = InfoRequest {
            name: String::new(),
            infos: Vec::new(),
        };
        client.option(OptionCode::Go, &request.encode());
        assert_eq!(client.replies().last().unwrap().0, OptionReplyCode::Ack);
        client
    }

    /// Connects and chooses the default export, with extended headers and all contexts of these
    /// names; returns their identifiers too.
    pub fn extended(path: &Path, contexts: &[&str]) -> (RawClient, Vec<u32>) {
        let mut client = RawClient::greeted(path);
        client.option(OptionCode::ExtendedHeaders, b"");
        assert_eq!(client.replies(), [(OptionReplyCode::Ack, Vec::new())]);
        let request = MetaContextRequest {
            name: String::new(),
            queries: contexts.iter().map(|&name| name.to_owned()).collect(),
        };
        client.option(OptionCode::SetMetaContext, &request.encode());
        let mut replies = client.replies();
        assert_eq!(replies.pop().unwrap().0, OptionReplyCode::Ack);
        let ids = replies.iter();
        let ids = ids.map(|(_, data)| MetaContextEntry::decode(data).unwrap().id);
        let ids = ids.collect();
        client.option(OptionCode::Go, &[0; 6]);
        assert_eq!(client.replies().last().unwrap().0, OptionReplyCode::Ack);
        (client, ids)
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Sends as much as the server takes before it hangs up.
    pub fn try_send(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    pub fn receive(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub fn option(&mut self, option: OptionCode, data: &[u8]) {
        let mut message = Vec::new();
        encode_option(&mut message, option, data);
        self.send(&message);
    }

    /// Replies to an option, with the one that ends them.
    pub fn replies(&mut self) -> Vec<(OptionReplyCode, Vec<u8>)> {
        let mut replies = Vec::new();
        loop {
            let header = self.receive(OPTION_REPLY_HEADER_BYTES);
            let header = OptionReplyHeader::decode(&header).unwrap();
            let data = self.receive(header.len as usize);
            replies.push((header.reply, data));
            if header.reply == OptionReplyCode::Ack || header.reply.is_error() {
                return replies;
            }
        }
    }

    pub fn request(&mut self, command: cowslip_nbd::protocol::Command, offset: u64, len: u32) {
        self.flagged_request(command, CommandFlags::empty(), offset, len);
    }

    pub fn flagged_request(
        &mut self,
        command: cowslip_nbd::protocol::Command,
        flags: CommandFlags,
        offset: u64,
        len: u32,
    ) {
        let request = Request {
            flags,
            command,
            cookie: COOKIE,
            offset,
            len: len.into(),
        };
        self.send(&request.encode());
    }

    /// A simple reply without payload.
    pub fn simple_reply(&mut self) -> Option<ErrorCode> {
        let message = self.receive(SIMPLE_REPLY_BYTES);
        match ReplyHeader::decode_front(&message).unwrap() {
            Some((_, ReplyHeader::Simple { cookie, error })) => {
                assert_eq!(cookie, COOKIE);
                error
            }
            other => panic!("no simple reply: {other:?}"),
        }
    }

    /// A chunk with its payload.
    pub fn chunk(&mut self) -> (ChunkHeader, Vec<u8>) {
        let message = self.receive(CHUNK_HEADER_BYTES);
        match ReplyHeader::decode_front(&message).unwrap() {
            Some((_, ReplyHeader::Chunk(header))) => {
                assert_eq!(header.cookie, COOKIE);
                let payload = self.receive(header.len as usize);
                (header, payload)
            }
            other => panic!("no chunk: {other:?}"),
        }
    }

    /// A request with extended headers, and its payload if it has one.
    pub fn extended_request(
        &mut self,
        command: cowslip_nbd::protocol::Command,
        flags: CommandFlags,
        (offset, len): (u64, u64),
        payload: &[u8],
    ) {
        let request = Request {
            flags,
            command,
            cookie: COOKIE,
            offset,
            len,
        };
        self.send(&request.encode_extended());
        self.send(payload);
    }

    /// A chunk with its payload, with extended headers: it is of the request at `offset`.
    pub fn extended_chunk(&mut self, offset: u64) -> (ChunkHeader, Vec<u8>) {
        let message = self.receive(EXTENDED_CHUNK_BYTES);
        let header = ExtendedChunkHeader::decode(&message).unwrap();
        assert_eq!((header.chunk.cookie, header.offset), (COOKIE, offset));
        let payload = self.receive(header.chunk.len as usize);
        (header.chunk, payload)
    }

    /// The error of a reply with extended headers, or none.
    pub fn extended_error(&mut self, offset: u64) -> Option<ErrorCode> {
        let (header, payload) = self.extended_chunk(offset);
        assert_eq!(header.flags, ChunkFlags::DONE);
        match header.code {
            ChunkCode::None => None,
            code => Some(ErrorChunk::decode(code, &payload).unwrap().error),
        }
    }

    /// Whether the server hangs up, after whatever it still has to say.
    pub fn is_hung_up(&mut self) -> bool {
        let mut bytes = [0; 4096];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return true,
                Err(_) => return false,
            }
        }
    }
}
