//! Writes of whole new clusters, gathered: what different requests put side by side on the host
//! goes down in one I/O.
//!
//! Requests that arrive together take neighbouring clusters, in whatever order their guest offsets
//! are. Each lays its write down here and gives way once, so that all that are ready lay down
//! theirs; the first to come back joins what is adjacent. So random writes into small clusters
//! become few sequential ones, and nothing waits for a request that has yet to arrive.
//!
//! A joined write belongs to all its members: it goes on as long as one of them is polled, and
//! where it fails each writes its own part again, so that a failure stays with the request that it
//! concerns.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use cowslip_block::joins::Shared;
use cowslip_queue::{Completer, IoVec, pending};

use crate::file::{AlignedFile, Durability};
use crate::sync::{Mutex, lock};
use crate::{Error, Result};

/// Bytes of a joined write, as a rule: more gains nothing, and delays the first member.
const JOINED_BYTES_MAX: u64 = 256 << 10;
/// Buffers of a joined write, as a rule; the system takes 1024.
const BUFFERS_MAX: usize = 512;
/// Longer parts go down by themselves: they are no small writes any more.
pub const PART_BYTES_MAX: u64 = 32 << 10;

/// A write that several requests wait for.
#[derive(Clone)]
struct JointWrite {
    members: usize,
    outcome: Shared<std::result::Result<(), Arc<Error>>>,
}

/// The write of one request.
struct Part {
    offset: u64,
    data: IoVec,
    joined: Completer<JointWrite>,
}

/// Parts whose write has not begun.
#[derive(Default)]
pub struct Gathering(Mutex<Vec<Part>>);

cowslip_block::debug_by_name!(Gathering);

impl Gathering {
    /// Writes to space that only this request knows of, together with what others write beside it.
    pub async fn write(&self, file: &AlignedFile, offset: u64, data: IoVec) -> Result<()> {
        let (joined, joining) = pending();
        lock(&self.0).push(Part {
            offset,
            data: data.clone(),
            joined,
        });
        let mut gave_way = false;
        poll_fn(|context| {
            if std::mem::replace(&mut gave_way, true) {
                return Poll::Ready(());
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
        // The request that is polled again first begins the writes of all.
        begin(file, std::mem::take(&mut *lock(&self.0)));
        let joined = joining.await;
        match joined.outcome.await {
            Ok(()) => Ok(()),
            Err(error) if joined.members == 1 => Err(error.duplicate()),
            Err(_) => file.write(offset, data, Durability::Cached).await,
        }
    }
}

/// Joins adjacent writes, and hands each part the write that it belongs to.
fn begin(file: &AlignedFile, mut parts: Vec<Part>) {
    let has_room =
        |bytes, data: &IoVec| bytes < JOINED_BYTES_MAX && data.segment_count() < BUFFERS_MAX;
    // Writes whose requests were dropped are not begun.
    parts.retain(|part| part.joined.is_awaited());
    parts.sort_by_key(|part| part.offset);
    let mut parts = parts.into_iter().peekable();
    while let Some(first) = parts.next() {
        let offset = first.offset;
        let mut end = offset + first.data.len() as u64;
        let mut data = first.data;
        let mut members = vec![first.joined];
        while let Some(next) =
            parts.next_if(|next| next.offset == end && has_room(end - offset, &data))
        {
            end += next.data.len() as u64;
            data.append(next.data);
            members.push(next.joined);
        }
        let file = file.clone();
        let write = async move {
            let written = file.write(offset, data, Durability::Cached).await;
            written.map_err(Arc::new)
        };
        let joined = JointWrite {
            members: members.len(),
            outcome: Shared::new(write),
        };
        for member in members {
            member.complete(joined.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use cowslip_queue::Buf;
    use futures_util::FutureExt;

    use super::*;
    use crate::file::memory::MemoryFile;

    #[test]
    fn neighbours_are_one_write_in_whatever_order_they_come() {
        let file = AlignedFile::new(Arc::new(MemoryFile::new("parts", Vec::new(), 1)));
        let mut context = Context::from_waker(Waker::noop());
        let mut waiting = Vec::new();
        let mut parts = Vec::new();
        for (offset, byte) in [(8192, 3), (0, 1), (4096, 2), (16384, 4)] {
            let (joined, joining) = pending();
            let data = Buf::copy_of(&[byte; 4096]).into();
            parts.push(Part {
                offset,
                data,
                joined,
            });
            waiting.push(joining);
        }
        begin(&file, parts);
        let members: Vec<usize> = waiting
            .into_iter()
            .map(|mut joining| {
                let Poll::Ready(joined) = joining.poll_unpin(&mut context) else {
                    panic!("it has been joined");
                };
                let mut outcome = joined.outcome;
                assert!(matches!(
                    outcome.poll_unpin(&mut context),
                    Poll::Ready(Ok(()))
                ));
                joined.members
            })
            .collect();
        assert_eq!(members, [3, 3, 3, 1]);
        let mut read = Box::pin(file.read_new(0, 20480));
        let Poll::Ready(Ok(bytes)) = read.poll_unpin(&mut context) else {
            panic!("memory answers at once");
        };
        let block = |at: usize| bytes[at * 4096];
        assert_eq!([0, 1, 2, 3, 4].map(block), [1, 2, 3, 0, 4]);
    }
}
