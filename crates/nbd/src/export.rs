//! [`Export`]: what a server serves, and [`MemoryExport`], the one that needs nothing.
//!
//! The server validates every request before it gets here: ranges lie within the size, writes come
//! to writable exports only, lengths are not 0 and fit the block sizes. Many requests are in flight
//! at once and complete in any order; once started, a request runs to its end, whatever becomes of
//! the client.

use std::collections::HashMap;
use std::fmt;
use std::future::{Future, ready};
use std::io;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard};

use cowslip_queue::{Buf, BufMut};

use crate::protocol::handshake::BlockSizes;
use crate::protocol::{AllocationFlags, BASE_ALLOCATION, ErrorCode, PAYLOAD_BYTES_MAX};

/// A failed request: what the client is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportError {
    /// The reason, in the protocol's words.
    pub code: ErrorCode,
    /// The reason for humans; clients with structured replies get it.
    pub message: String,
}

impl ExportError {
    /// An error with a message.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> ExportError {
        ExportError {
            code,
            message: message.into(),
        }
    }

    /// An error by its Linux `errno`.
    pub fn from_errno(errno: i32, message: impl Into<String>) -> ExportError {
        ExportError::new(ErrorCode::from_errno(errno), message)
    }
}

impl From<io::Error> for ExportError {
    fn from(error: io::Error) -> ExportError {
        let code = match (error.raw_os_error(), error.kind()) {
            (Some(errno), _) => ErrorCode::from_errno(errno),
            (None, io::ErrorKind::Unsupported) => ErrorCode::NotSup,
            (None, _) => ErrorCode::Io,
        };
        ExportError::new(code, error.to_string())
    }
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ExportError {}

/// A request under way; boxed once, because exports are used as objects.
pub type ExportFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, ExportError>> + 'a>>;

/// When a write is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// At the next flush.
    Cached,
    /// At its completion (`FUA`).
    Durable,
}

/// How zeroes are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroRequest {
    /// The space may be given back (not `NO_HOLE`).
    pub may_unmap: bool,
    /// When it is durable.
    pub durability: Durability,
    /// Fail with [`ErrorCode::NotSup`], at once, where zeroes would have to be written out
    /// (`FAST_ZERO`).
    pub fast_only: bool,
}

/// A run of an export with one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusExtent {
    /// Length in bytes; never 0.
    pub len: u64,
    /// Its state in the context `base:allocation`; in others the bits mean something else.
    pub flags: AllocationFlags,
}

/// Who may write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Nobody: the server refuses writes.
    ReadOnly,
    /// Clients.
    #[default]
    ReadWrite,
}

/// What clients are told about an export. A connection takes it once, when it chooses the export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Size in bytes.
    pub size: u64,
    /// Who may write.
    pub access: Access,
    /// Sizes of requests. The maximum is lowered to what the server takes.
    pub block_sizes: BlockSizes,
    /// For humans; may be empty.
    pub description: String,
    /// The medium rotates.
    pub rotational: bool,
    /// A flush on one connection covers the completed writes of all of them.
    pub shared_cache: bool,
    /// `trim` does something.
    pub trims: bool,
    /// `write_zeroes` honours `fast_only`.
    pub zeroes_fast: bool,
    /// The names of the metadata contexts that `block_status` tells, `base:allocation` first.
    /// Clients are told them in this order, and of several of one name they can select the first.
    pub contexts: Vec<String>,
}

impl ExportInfo {
    /// A writable export of `size` bytes that takes requests of any alignment.
    pub fn new(size: u64) -> ExportInfo {
        ExportInfo {
            size,
            access: Access::ReadWrite,
            block_sizes: BlockSizes {
                minimum: 1,
                preferred: 4096,
                maximum: PAYLOAD_BYTES_MAX,
            },
            description: String::new(),
            rotational: false,
            shared_cache: true,
            trims: true,
            zeroes_fast: true,
            contexts: vec![BASE_ALLOCATION.to_owned()],
        }
    }
}

/// Something that can be served.
pub trait Export: Send + Sync {
    /// What clients are told about it, now.
    fn info(&self) -> ExportInfo;

    /// Reads `buf.len()` bytes at `offset`; the buffer comes back filled.
    fn read(&self, offset: u64, buf: BufMut) -> ExportFuture<'_, BufMut>;

    /// Writes `data` at `offset`. The data starts at an address that is good for direct I/O.
    fn write(&self, offset: u64, data: Buf, durability: Durability) -> ExportFuture<'_, ()>;

    /// Makes durable all writes that had completed when it was called.
    fn flush(&self) -> ExportFuture<'_, ()>;

    /// Gives a range up; what it reads as afterwards is the export's choice.
    fn trim(&self, offset: u64, len: u64, durability: Durability) -> ExportFuture<'_, ()>;

    /// Makes a range read as zeroes.
    fn write_zeroes(&self, offset: u64, len: u64, how: ZeroRequest) -> ExportFuture<'_, ()>;

    /// Loads a range into a cache, as far as that makes sense.
    fn cache(&self, offset: u64, len: u64) -> ExportFuture<'_, ()> {
        let _hint_only = (offset, len);
        Box::pin(ready(Ok(())))
    }

    /// States of consecutive runs from `offset` on, at least one and at most `max_extents`, in the
    /// context of this index in [`ExportInfo::contexts`]. They may cover less than `len`, and the
    /// last one may reach beyond.
    fn block_status(
        &self,
        context: usize,
        offset: u64,
        len: u64,
        max_extents: usize,
    ) -> ExportFuture<'_, Vec<StatusExtent>>;
}

/// Bytes of a page of [`MemoryExport`].
const PAGE_BYTES: u64 = 4096;

/// A sparse disk in memory. Every request completes at once.
pub struct MemoryExport {
    info: ExportInfo,
    pages: Mutex<HashMap<u64, Box<[u8]>>>,
}

/// The part of a range that lies in one page.
struct PagePart {
    page: u64,
    /// First byte within the page.
    start: usize,
    /// First byte within the range.
    at: usize,
    len: usize,
}

/// Cuts a range at the edges of pages.
fn page_parts(offset: u64, len: u64) -> impl Iterator<Item = PagePart> {
    let mut done = 0;
    std::iter::from_fn(move || {
        (done < len).then(|| {
            let here = offset + done;
            let start = here % PAGE_BYTES;
            let part = (PAGE_BYTES - start).min(len - done);
            let at = done;
            done += part;
            PagePart {
                page: here / PAGE_BYTES,
                start: in_memory(start),
                at: in_memory(at),
                len: in_memory(part),
            }
        })
    })
}

fn in_memory(len: u64) -> usize {
    usize::try_from(len).expect("what is in memory has a length of its size")
}

impl MemoryExport {
    /// A disk of `size` zeroes.
    pub fn new(size: u64) -> MemoryExport {
        MemoryExport::with_info(ExportInfo::new(size))
    }

    /// A disk of zeroes that tells clients `info`.
    pub fn with_info(info: ExportInfo) -> MemoryExport {
        MemoryExport {
            info,
            pages: Mutex::default(),
        }
    }

    fn pages(&self) -> MutexGuard<'_, HashMap<u64, Box<[u8]>>> {
        self.pages
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn erase(&self, offset: u64, len: u64, space: impl Fn(&PagePart) -> bool) {
        let mut pages = self.pages();
        for part in page_parts(offset, len) {
            if space(&part) {
                pages.remove(&part.page);
            } else if let Some(page) = pages.get_mut(&part.page) {
                page[part.start..part.start + part.len].fill(0);
            }
        }
    }
}

/// Whether a part is its whole page.
fn is_whole_page(part: &PagePart) -> bool {
    part.len as u64 == PAGE_BYTES
}

impl Export for MemoryExport {
    fn info(&self) -> ExportInfo {
        self.info.clone()
    }

    fn read(&self, offset: u64, mut buf: BufMut) -> ExportFuture<'_, BufMut> {
        let pages = self.pages();
        for part in page_parts(offset, buf.len() as u64) {
            let target = &mut buf[part.at..part.at + part.len];
            match pages.get(&part.page) {
                Some(page) => target.copy_from_slice(&page[part.start..part.start + part.len]),
                None => target.fill(0),
            }
        }
        Box::pin(ready(Ok(buf)))
    }

    fn write(&self, offset: u64, data: Buf, _durability: Durability) -> ExportFuture<'_, ()> {
        let mut pages = self.pages();
        for part in page_parts(offset, data.len() as u64) {
            let page = pages
                .entry(part.page)
                .or_insert_with(|| vec![0; in_memory(PAGE_BYTES)].into_boxed_slice());
            page[part.start..part.start + part.len]
                .copy_from_slice(&data[part.at..part.at + part.len]);
        }
        Box::pin(ready(Ok(())))
    }

    fn flush(&self) -> ExportFuture<'_, ()> {
        Box::pin(ready(Ok(())))
    }

    fn trim(&self, offset: u64, len: u64, _durability: Durability) -> ExportFuture<'_, ()> {
        self.erase(offset, len, is_whole_page);
        Box::pin(ready(Ok(())))
    }

    fn write_zeroes(&self, offset: u64, len: u64, how: ZeroRequest) -> ExportFuture<'_, ()> {
        self.erase(offset, len, |part| how.may_unmap && is_whole_page(part));
        Box::pin(ready(Ok(())))
    }

    fn block_status(
        &self,
        context: usize,
        offset: u64,
        len: u64,
        max_extents: usize,
    ) -> ExportFuture<'_, Vec<StatusExtent>> {
        let (written, empty) = match context {
            0 => (
                AllocationFlags::empty(),
                AllocationFlags::HOLE.with(AllocationFlags::ZERO),
            ),
            // Whatever else it is said to tell, it tells what has been written.
            _ => (AllocationFlags(1), AllocationFlags(0)),
        };
        let pages = self.pages();
        let mut extents: Vec<StatusExtent> = Vec::new();
        for part in page_parts(offset, len) {
            let flags = match pages.contains_key(&part.page) {
                true => written,
                false => empty,
            };
            let full = extents.len() == max_extents;
            match extents.last_mut() {
                Some(last) if last.flags == flags => last.len += part.len as u64,
                _ if full => break,
                _ => extents.push(StatusExtent {
                    len: part.len as u64,
                    flags,
                }),
            }
        }
        Box::pin(ready(Ok(extents)))
    }
}
