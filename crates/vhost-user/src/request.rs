//! A request of virtio-blk (VIRTIO 1.2, section 5.2.6): a header that the device reads, data, and a
//! byte of status that it writes last.

use std::fmt;

use cowslip_block::Error;
use cowslip_block::disk::ZeroOptions;
use cowslip_block::file::{Durability, Space};
use cowslip_queue::{IoVec, IoVecMut};

use crate::device::{Device, RANGE_SECTORS_MAX, RANGES_MAX, SECTOR_BYTES, SERIAL_BYTES};
use crate::ring::{Broken, Chain, Slot};

/// Kinds of requests.
mod kind {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
}

/// Status of a request.
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

const HEADER_BYTES: usize = 16;
/// Bytes of a range to discard or to zero.
const RANGE_BYTES: usize = 16;
/// Flag of a range to zero: its space may be deallocated.
const UNMAP: u32 = 1;

/// Longest part of a request that the disk gets at a time: where direct I/O does not take the
/// guest's memory as it is, a copy of that length is made.
const PART_BYTES: u64 = 8 << 20;

/// Memory of a request itself, and of each piece of its memory: many pieces of a byte each are more
/// than their bytes.
const REQUEST_BYTES: u64 = 4096;
const PIECE_BYTES: u64 = 128;

/// A request, with the memory that it works on.
#[derive(Debug)]
pub(crate) struct Request {
    pub slot: Slot,
    kind: u32,
    sector: u64,
    data: IoVec,
    target: IoVecMut,
    status: IoVecMut,
    /// Guest addresses and lengths that the device may write.
    pub written: smallvec::SmallVec<[(u64, u64); 2]>,
}

/// A request that was carried out.
#[derive(Debug)]
pub(crate) struct Completed {
    pub slot: Slot,
    /// Writable bytes that were written.
    pub written: u32,
    /// Guest addresses and lengths of these.
    pub ranges: smallvec::SmallVec<[(u64, u64); 2]>,
    /// Bytes that counted as in flight.
    pub bytes: u64,
    /// The failure, with the kind of the request.
    pub failure: Option<(&'static str, Failure)>,
}

impl Request {
    /// The request of a chain, however its bytes are spread over descriptors.
    ///
    /// # Errors
    /// The chain has no room for a header or for a status.
    pub fn of(chain: Chain) -> std::result::Result<Request, Broken> {
        let Chain {
            slot,
            mut readable,
            mut writable,
            written,
        } = chain;
        if readable.len() < HEADER_BYTES || writable.is_empty() {
            return Err(Broken(format!(
                "{slot}: a request with {} readable and {} writable bytes has no place for header and \
                 status",
                readable.len(),
                writable.len()
            )));
        }
        let header = readable.split_to(HEADER_BYTES);
        let mut bytes = [0; HEADER_BYTES];
        header.copy_to_slice(0, &mut bytes);
        let value = u128::from_le_bytes(bytes);
        let status = writable.split_off(writable.len() - 1);
        Ok(Request {
            slot,
            // Four bytes between kind and sector are reserved.
            kind: value as u32,
            sector: (value >> 64) as u64,
            data: readable,
            target: writable,
            status,
            written,
        })
    }

    /// Bytes of memory that it may need beside the guest's, at most: a copy of a part, and itself.
    pub fn cost_bytes(&self) -> u64 {
        let copy = (self.data.len() as u64 + self.target.len() as u64).min(PART_BYTES);
        let pieces = self.data.segment_count() + self.target.segment_count() + self.written.len();
        copy + REQUEST_BYTES + pieces as u64 * PIECE_BYTES
    }

    /// Carries the request out, and writes its status. Where the front end keeps a table of
    /// requests in flight (`outlives`), a request is complete only when the end of this process
    /// cannot undo it: the guest goes on with another server, and never learns that there was an
    /// end.
    pub async fn perform(
        self,
        device: &Device,
        (durability, outlives): (Durability, bool),
    ) -> Completed {
        let bytes = self.cost_bytes();
        let Request {
            slot,
            kind,
            sector,
            data,
            target,
            mut status,
            written: ranges,
        } = self;
        let target_len = target.len();
        let mut outcome = match kind {
            kind::IN => read(device, sector, target).await,
            kind::OUT => write(device, sector, data, durability).await,
            kind::FLUSH => device.disk.flush().await.map_err(Failure::Disk),
            kind::GET_ID => get_id(device, target),
            kind::DISCARD => discard(device, &data).await,
            kind::WRITE_ZEROES => write_zeroes(device, &data, durability).await,
            _ => Err(Failure::Unsupported),
        };
        if outlives && outcome.is_ok() && is_change(kind) {
            outcome = device.disk.write_back().await.map_err(Failure::Disk);
        }
        let code = match outcome {
            Ok(()) => OK,
            Err(Failure::Unsupported) => UNSUPPORTED,
            Err(Failure::Malformed(_) | Failure::Disk(_)) => IO_ERROR,
        };
        status.copy_from_slice(0, &[code]);
        Completed {
            slot,
            // All of the memory counts as written: the status is its last byte.
            written: u32::try_from(target_len + 1).unwrap_or(u32::MAX),
            ranges,
            bytes,
            failure: outcome.err().map(|failure| (name(kind), failure)),
        }
    }
}

/// The reason why a request was not carried out.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The kind of request, or one of its flags, is not supported.
    Unsupported,
    /// The request contradicts the device's limits or itself.
    Malformed(&'static str),
    /// The disk's failure.
    Disk(Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Unsupported => f.write_str("not supported"),
            Failure::Malformed(why) => f.write_str(why),
            Failure::Disk(error) => error.fmt(f),
        }
    }
}

type Outcome = std::result::Result<(), Failure>;

fn is_change(kind: u32) -> bool {
    matches!(kind, kind::OUT | kind::DISCARD | kind::WRITE_ZEROES)
}

fn name(kind: u32) -> &'static str {
    match kind {
        kind::IN => "read",
        kind::OUT => "write",
        kind::FLUSH => "flush",
        kind::GET_ID => "get-id",
        kind::DISCARD => "discard",
        kind::WRITE_ZEROES => "write-zeroes",
        _ => "unknown request",
    }
}

/// The offset and length on the disk, in bytes, of a number of bytes at a sector.
fn range(device: &Device, sector: u64, len: u64) -> std::result::Result<u64, Failure> {
    let unit = u64::from(device.options.block_bytes);
    let Some(start) = sector.checked_mul(SECTOR_BYTES) else {
        return Err(Failure::Malformed("beyond the end of the disk"));
    };
    if !len.is_multiple_of(SECTOR_BYTES) {
        return Err(Failure::Malformed("not of whole sectors"));
    }
    if !start.is_multiple_of(unit) || !len.is_multiple_of(unit) {
        return Err(Failure::Malformed("not of whole logical blocks"));
    }
    // The last sector may be cut short by the end of the disk; it is not shown.
    let end = device.disk.size() / SECTOR_BYTES * SECTOR_BYTES;
    match start.checked_add(len) {
        Some(last) if last <= end => Ok(start),
        _ => Err(Failure::Malformed("beyond the end of the disk")),
    }
}

async fn read(device: &Device, sector: u64, mut target: IoVecMut) -> Outcome {
    let mut at = range(device, sector, target.len() as u64)?;
    while !target.is_empty() {
        let part = target.split_to(target.len().min(PART_BYTES as usize));
        let len = part.len() as u64;
        device.disk.read(at, part).await.map_err(Failure::Disk)?;
        at += len;
    }
    Ok(())
}

async fn write(device: &Device, sector: u64, mut data: IoVec, durability: Durability) -> Outcome {
    let mut at = range(device, sector, data.len() as u64)?;
    while !data.is_empty() {
        let part = data.split_to(data.len().min(PART_BYTES as usize));
        let len = part.len() as u64;
        let written = device.disk.write(at, part, durability).await;
        written.map_err(Failure::Disk)?;
        at += len;
    }
    Ok(())
}

fn get_id(device: &Device, mut target: IoVecMut) -> Outcome {
    let len = target.len().min(SERIAL_BYTES);
    target.copy_from_slice(0, &device.serial()[..len]);
    Ok(())
}

/// The ranges of a request to discard or to zero: offset, length and flags of each.
fn ranges(device: &Device, data: &IoVec) -> std::result::Result<Vec<(u64, u64, u32)>, Failure> {
    let count = data.len() / RANGE_BYTES;
    if !data.len().is_multiple_of(RANGE_BYTES) || count == 0 || count > RANGES_MAX as usize {
        return Err(Failure::Malformed("an impossible number of ranges"));
    }
    let mut bytes = vec![0; data.len()];
    data.copy_to_slice(0, &mut bytes);
    let parse = |bytes: &[u8]| {
        let value = u128::from_le_bytes(bytes.try_into().expect("chunks are of that size"));
        let (sector, count, flags) = (value as u64, (value >> 64) as u32, (value >> 96) as u32);
        if count > RANGE_SECTORS_MAX {
            return Err(Failure::Malformed("more sectors than the device's limit"));
        }
        if flags & !UNMAP != 0 {
            return Err(Failure::Unsupported);
        }
        let len = u64::from(count) * SECTOR_BYTES;
        Ok((range(device, sector, len)?, len, flags))
    };
    bytes.chunks_exact(RANGE_BYTES).map(parse).collect()
}

async fn discard(device: &Device, data: &IoVec) -> Outcome {
    let ranges = ranges(device, data)?;
    // The flag is for zeroes.
    if ranges.iter().any(|(_, _, flags)| flags & UNMAP != 0) {
        return Err(Failure::Unsupported);
    }
    for (start, len, _) in ranges.into_iter().filter(|(_, len, _)| *len > 0) {
        let discarded = device.disk.discard(start, len).await;
        discarded.map_err(Failure::Disk)?;
    }
    Ok(())
}

async fn write_zeroes(device: &Device, data: &IoVec, durability: Durability) -> Outcome {
    for (start, len, flags) in ranges(device, data)? {
        let space = match flags & UNMAP {
            0 => Space::Keep,
            _ => Space::Release,
        };
        let options = ZeroOptions {
            space,
            durability,
            fast_only: false,
        };
        if len > 0 {
            let zeroed = device.disk.zero(start, len, options).await;
            zeroed.map_err(Failure::Disk)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_costs_what_its_pieces_take() {
        let chain = |count: usize| {
            let memory = cowslip_queue::SharedMemory::new(8192);
            let mut chain = Chain {
                slot: Slot::default(),
                readable: IoVec::default(),
                writable: IoVecMut::default(),
                written: smallvec::SmallVec::new(),
            };
            chain
                .readable
                .append(IoVec::shared(&memory, 0..HEADER_BYTES));
            for at in 0..count {
                chain
                    .readable
                    .append(IoVec::shared(&memory, 2 * at..2 * at + 1));
            }
            chain.writable.append(IoVecMut::shared(&memory, 0..1));
            Request::of(chain).unwrap().cost_bytes()
        };
        assert!(chain(4096) > 256 << 10);
        assert!((1024..16 << 10).contains(&chain(1)));
    }
}
