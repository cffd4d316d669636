//! Requests of a file at the server: split to the server's limits, and its answers joined.

use std::io;
use std::rc::Rc;

use crate::export::{Durability, ZeroOptions};
use crate::protocol::{AllocationFlags, ErrorCode, TransmissionFlags};
use crate::{Client, ClientError, ExportDescription};
use cowslip_block::file::{FileExtent, Space};
use cowslip_queue::{BufMut, Completer, IoVec, IoVecMut, Pending};
use futures_util::future;

use super::link::Link;
use super::unflushed::FlushPart;

/// Payloads without a word of the server (`doc/proto.md`, "Block sizes").
const PAYLOAD_BYTES: u64 = 32 << 20;
/// Bytes of a request without payload: its length has 32 bits, and some servers take it as signed.
const PLAIN_BYTES: u64 = 1 << 30;
/// Bytes of a request without payload, with extended headers: far more than any disk has, and far
/// from where sums of 63 bits end.
const EXTENDED_PLAIN_BYTES: u64 = 1 << 60;

/// Limits of a request's length.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    payload_bytes: u64,
    plain_bytes: u64,
}

/// A request to a connection.
pub(super) enum Request {
    Read(u64, IoVecMut, Completer<(io::Result<()>, IoVecMut)>),
    Write(u64, IoVec, Durability, Completer<io::Result<()>>),
    Zero(u64, u64, Space, Completer<io::Result<()>>),
    Trim(u64, u64, Completer<io::Result<()>>),
    Status(u64, u64, Completer<io::Result<Vec<FileExtent>>>),
    Flush(FlushPart),
}

/// Limits of requests to the server, from the block sizes that it has announced, in whole blocks.
pub(super) fn limits(export: &ExportDescription) -> Limits {
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

/// Asks the server, and completes the request.
pub(super) async fn answer(link: &Rc<Link>, limits: Limits, request: Request) {
    match request {
        Request::Read(offset, buf, to) => to.complete(read(link, limits, offset, buf).await),
        Request::Write(offset, data, durability, to) => {
            to.complete(write(link, limits, (offset, data), durability).await);
        }
        Request::Zero(offset, len, space, to) => {
            let how = ZeroOptions {
                space: Space::of_unmap(space == Space::Release),
                durability: Durability::Cached,
                fast_only: false,
            };
            let pieces = pieces(offset, len, limits.plain_bytes);
            let zeroed = pieces.map(|(offset, len)| {
                link.change(move |client| client.write_zeroes(offset, len, how))
            });
            to.complete(all(zeroed).await);
        }
        Request::Trim(offset, len, to) => {
            let pieces = pieces(offset, len, limits.plain_bytes);
            let trimmed = pieces.map(|(offset, len)| {
                link.change(move |client| client.trim(offset, len, Durability::Cached))
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

/// The outcome of a request that returns nothing.
type Answer = Result<(), ClientError>;

/// Reads; beyond the end of the export there are zeroes.
async fn read(
    link: &Rc<Link>,
    limits: Limits,
    offset: u64,
    target: IoVecMut,
) -> (io::Result<()>, IoVecMut) {
    // The client receives into buffers of ours: one that has lost its connection answers at once,
    // while the system may still be filling the memory of a read.
    let (mut buf, bounce) = target.bounce();
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
            (Ok(()), bounce.end(joined))
        }
        Err(error) => (Err(io_error(error)), BufMut::zeroed(len).into()),
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
    (offset, data): (u64, IoVec),
    durability: Durability,
) -> io::Result<()> {
    let has_fua = has(link, TransmissionFlags::SEND_FUA);
    let (durability, flushes) = match durability {
        Durability::Durable if !has_fua => (Durability::Cached, true),
        durability => (durability, false),
    };
    let writes = pieces(0, data.len() as u64, limits.payload_bytes).map(|(start, len)| {
        let part = data.slice(start as usize, len as usize);
        write_part(link, offset + start, part, durability)
    });
    all(writes).await?;
    match flushes {
        true => flush(link).await,
        false => Ok(()),
    }
}

/// Writes what one request can.
async fn write_part(link: &Rc<Link>, at: u64, part: IoVec, durability: Durability) -> Answer {
    let write = move |client: &Client| client.write(at, part.clone(), durability);
    match durability {
        Durability::Cached => link.change(write).await,
        Durability::Durable => link.ask(write).await,
    }
}

fn has(link: &Link, flag: TransmissionFlags) -> bool {
    link.description().flags.contains(flag)
}

/// Makes durable what was written. A server without such requests has no cache that it may lose.
async fn flush(link: &Rc<Link>) -> io::Result<()> {
    let can_flush = has(link, TransmissionFlags::SEND_FLUSH);
    let flushed = link.flush(|client| match can_flush {
        true => client.flush(),
        false => Pending::ready(Ok(())),
    });
    flushed.await.map_err(io_error)?
}

/// Data and holes by the server's block status: a hole is a range that reads as zeroes. Without
/// block status all is data.
async fn status(
    link: &Rc<Link>,
    limits: Limits,
    offset: u64,
    len: u64,
) -> io::Result<Vec<FileExtent>> {
    let end = offset + len;
    let mut extents: Vec<FileExtent> = Vec::new();
    let mut add = |start: u64, len: u64, hole: bool| {
        FileExtent { start, len, hole }.add_to(&mut extents);
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

/// Converts an error into one of files.
fn io_error(error: ClientError) -> io::Error {
    match error {
        ClientError::Io(error) => io::Error::new(error.kind(), ClientError::Io(error)),
        ClientError::Request(refused) => io::Error::from_raw_os_error(refused.code.errno()),
        other => io::Error::other(other),
    }
}
