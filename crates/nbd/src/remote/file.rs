//! An export of an NBD server as a [`BlockFile`].
//!
//! A client belongs to one queue, but files are used from several threads. So each connection has a
//! thread with a queue of its own ([`Worker`]). Ranges and capabilities are those that the server
//! announced; [`crate::Client`] checks later replies against them.
//!
//! The default is one connection. With `connections=N` there are more, if the server offers
//! `CAN_MULTI_CONN`: data written over one connection is visible over the others, and a flush over
//! one covers all acknowledged writes (`doc/proto.md`, "Transmission flags"). A flush is
//! nevertheless sent over each connection that has written: the loss of a server may not have been
//! noticed on one connection while another is already connected to its successor. Further
//! connections are opened in the background after the first, so no request waits for them, and a
//! server that accepts no more clients costs only the attempt. A request goes to the connection
//! with the fewest requests in flight.

use std::cmp::Ordering;
use std::io;
use std::sync::Arc;

use crate::ExportDescription;
use crate::export::Durability as NbdDurability;
use crate::protocol::TransmissionFlags;
use crate::tls::ClientTls;
use cowslip_block::file::{
    BlockFile, Capabilities, Durability, FileExtent, Space, Storage, unsupported,
};
use cowslip_queue::{Completer, IoVec, IoVecMut, Pending, pending};

use super::link::ExportAddress;
use super::name::ExportName;
use super::requests::Request;
use super::unflushed::FlushPart;
use super::worker::Worker;
use cowslip_block::Error;

/// Opens an export; `tls` is for those whose name asks for it, `name` what users know it by.
///
/// # Errors
/// The server cannot be reached, has no such export, or it is read-only and `writable` is wanted.
pub async fn open(
    export: &ExportName,
    tls: Option<ClientTls>,
    name: &str,
    writable: bool,
) -> cowslip_block::Result<Arc<dyn BlockFile>> {
    let way = ExportAddress {
        export: export.clone(),
        tls,
    };
    let (first, connected) = Worker::first(&way)?;
    let description = connected.await?;
    let is_read_only = description.flags.contains(TransmissionFlags::READ_ONLY);
    if writable && is_read_only {
        return Err(Error::invalid(
            "request on write denied without write permission",
        ));
    }
    let mut workers = vec![first];
    if description
        .flags
        .contains(TransmissionFlags::CAN_MULTI_CONN)
    {
        for _ in 1..export.connections.get() {
            workers.push(Worker::another(&way, &description)?);
        }
    }
    Ok(Arc::new(NbdFile {
        name: name.to_string(),
        workers,
        storage: export.storage(),
        size: description.size,
        flags: description.flags,
        capabilities: capabilities(&description, writable),
    }))
}

fn capabilities(export: &ExportDescription, writable: bool) -> Capabilities {
    let minimum = export.block_sizes.map_or(1, |sizes| sizes.minimum);
    Capabilities {
        alignment_bytes: minimum,
        space_alignment_bytes: minimum,
        writable,
        extends_with_zeroes: false,
        zeroes_fast: export.flags.contains(TransmissionFlags::SEND_WRITE_ZEROES),
        punches_holes: false,
    }
}

/// An export as a file.
struct NbdFile {
    name: String,
    storage: Storage,
    /// Never empty: the first one has a connection.
    workers: Vec<Worker>,
    size: u64,
    flags: TransmissionFlags,
    capabilities: Capabilities,
}

cowslip_block::debug_by_name!(NbdFile, name);

impl NbdFile {
    fn ask<T>(&self, request: impl FnOnce(Completer<T>) -> Request) -> Pending<T> {
        let (to, result) = pending();
        let ready = self.workers.iter().filter(|worker| worker.is_ready());
        if let Some(idlest) = ready.min_by_key(|worker| worker.under_way()) {
            idlest.post(request(to));
        }
        result
    }

    /// Checks that the server has announced support for a kind of request.
    fn has<T>(&self, flag: TransmissionFlags) -> Result<(), Pending<io::Result<T>>> {
        match self.flags.contains(flag) {
            true => Ok(()),
            false => Err(unsupported()),
        }
    }
}

impl BlockFile for NbdFile {
    cowslip_block::file_from_fields!(name, capabilities, storage);

    fn len(&self) -> Pending<io::Result<u64>> {
        Pending::ready(Ok(self.size))
    }

    fn read(&self, offset: u64, buf: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        self.ask(|to| Request::Read(offset, buf, to))
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> Pending<io::Result<()>> {
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

    fn extents(&self, offset: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        self.ask(|to| Request::Status(offset, len, to))
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        let (to, flushed) = pending();
        let ready: Vec<&Worker> = self.workers.iter().filter(|w| w.is_ready()).collect();
        let states = ready.iter().map(|worker| FlushState {
            has_unflushed: worker.has_unflushed(),
            under_way: worker.under_way(),
        });
        let over = flushed_over(&states.collect::<Vec<_>>());
        let parts = FlushPart::split(to, over.len());
        for (index, part) in over.into_iter().zip(parts) {
            ready[index].post(Request::Flush(part));
        }
        flushed
    }

    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        let what = match len.cmp(&self.size) {
            Ordering::Equal => return Pending::ready(Ok(())),
            Ordering::Greater => "Cannot grow NBD nodes",
            Ordering::Less => "Cannot resize NBD nodes",
        };
        Pending::ready(Err(io::Error::new(io::ErrorKind::Unsupported, what)))
    }
}

/// State of a connection that decides whether a flush goes over it.
#[derive(Clone, Copy, Debug)]
struct FlushState {
    has_unflushed: bool,
    under_way: usize,
}

/// Over which connections a flush goes: all that have written something since their last one, or
/// else the one with the fewest requests.
fn flushed_over(connections: &[FlushState]) -> Vec<usize> {
    let indices = || 0..connections.len();
    let written: Vec<usize> = indices()
        .filter(|&i| connections[i].has_unflushed)
        .collect();
    match written.is_empty() {
        true => indices()
            .min_by_key(|&i| connections[i].under_way)
            .into_iter()
            .collect(),
        false => written,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_goes_over_each_connection_that_has_written() {
        let over = |states: &[(bool, usize)]| {
            let states = states.iter().map(|&(has_unflushed, under_way)| FlushState {
                has_unflushed,
                under_way,
            });
            flushed_over(&states.collect::<Vec<_>>())
        };
        assert_eq!(over(&[(false, 3), (false, 1), (false, 2)]), [1]);
        assert_eq!(over(&[(true, 3), (false, 0), (true, 2)]), [0, 2]);
        assert_eq!(over(&[(false, 0)]), [0]);
        assert!(over(&[]).is_empty());
    }
}
