//! Requests by way of the kernel's ring (Linux 6.14): one operation answers a request and waits for
//! the next one, and goes down with all others of its thread.
//!
//! The kernel has a queue for each processor, and uses none of them before all have a slot. Queues
//! are spread over the threads. What comes before the negotiation, and what the kernel forgets,
//! comes by way of the device still; so does everything where it refuses the slots.

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use cowslip_queue::{FUSE_HEAD_BYTES, FuseDevice, FuseSlot, IoVec, Threads};
use futures_util::stream::{FuturesUnordered, Stream};

use crate::channel::{is_lasting, report};
use crate::export::{Answer, Export};
use crate::request::{Operation, Request};
use crate::server::{Observer, ServerEvent, Stop};
use crate::wire::{DATA_BYTES_MAX, out_header};

/// Slots of all queues together, where each has the fewest or more with that.
const SLOTS: usize = 128;
/// Slots of a queue.
const SLOTS_MIN: usize = 4;
const SLOTS_MAX: usize = 64;

/// ECONNABORTED, ENOTCONN and ECANCELED: the connection is gone.
const GONE: [i32; 3] = [103, 107, 125];

/// Threads and slots, made where making them is still allowed.
pub(crate) struct Prepared {
    pub threads: Threads,
    /// By thread.
    pub slots: Vec<Vec<FuseSlot>>,
}

impl Prepared {
    /// Threads with rings that take commands of devices, and slots for all processors that there
    /// may be.
    ///
    /// # Errors
    /// The kernel has no such rings; it does not say how many processors there may be.
    pub fn new(count: usize, poll: Duration) -> io::Result<Prepared> {
        let count = count.max(1);
        let queues = processors(&std::fs::read_to_string(
            "/sys/devices/system/cpu/possible",
        )?);
        let queues = queues.ok_or(io::ErrorKind::InvalidData)?;
        let threads = Threads::with_commands("fuse", count, poll)?;
        let mut slots: Vec<Vec<FuseSlot>> = (0..count).map(|_| Vec::new()).collect();
        let each = (SLOTS / usize::from(queues)).clamp(SLOTS_MIN, SLOTS_MAX);
        for queue in 0..queues {
            let new = || FuseSlot::new(queue, DATA_BYTES_MAX);
            slots[usize::from(queue) % count].extend((0..each).map(|_| new()));
        }
        Ok(Prepared { threads, slots })
    }
}

/// The number of processors of a list such as `0-3`, or `0,2-7`: one more than the last.
fn processors(list: &str) -> Option<u16> {
    let last = list.trim().rsplit([',', '-']).next()?;
    last.parse::<u16>().ok()?.checked_add(1)
}

/// The slots of a thread at work.
pub(crate) struct RingChannel {
    pub device: FuseDevice,
    pub slots: Vec<FuseSlot>,
    pub export: Arc<Export>,
    pub stop: Arc<Stop>,
    pub observer: Observer,
    /// Its number among all channels.
    pub index: usize,
}

/// State that the slots of a thread share.
struct Work {
    device: FuseDevice,
    export: Arc<Export>,
    stop: Arc<Stop>,
    observer: Observer,
    /// Requests that are being carried out.
    in_flight: Cell<usize>,
}

impl RingChannel {
    /// Works until the file system is unmounted or the server stops; requests that were taken are
    /// completed. Slots that the kernel has then stay with it.
    pub async fn run(self) {
        let work = Rc::new(Work {
            device: self.device,
            export: self.export,
            stop: self.stop,
            observer: self.observer,
            in_flight: Cell::new(0),
        });
        let serve = |slot| {
            let work = Rc::clone(&work);
            async move {
                let ended = work.serve(slot).await;
                ended.err().filter(|error| work.is_worth_telling(error))
            }
        };
        let mut running: FuturesUnordered<_> = self.slots.into_iter().map(serve).collect();
        let mut failure = None;
        std::future::poll_fn(|context| {
            loop {
                match Pin::new(&mut running).poll_next(context) {
                    Poll::Ready(Some(ended)) => failure = failure.take().or(ended),
                    Poll::Ready(None) => return Poll::Ready(()),
                    Poll::Pending => break,
                }
            }
            let is_stopped = work.stop.register(self.index, context);
            match is_stopped && work.in_flight.get() == 0 {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
        if let Some(error) = failure {
            (work.observer)(&ServerEvent::ConnectionFailed {
                reason: error.to_string(),
            });
        }
    }
}

impl Work {
    /// Whether a slot has ended by something else than the end of the file system.
    fn is_worth_telling(&self, error: &io::Error) -> bool {
        let is_gone = error.raw_os_error().is_some_and(|it| GONE.contains(&it));
        is_lasting(error) && !is_gone && !self.stop.is_set()
    }

    /// Carries out the requests that come in one slot.
    async fn serve(&self, slot: FuseSlot) -> io::Result<()> {
        let mut exchange = self.device.exchange(slot)?;
        loop {
            let slot = exchange.await?;
            if self.stop.is_set() {
                return Ok(());
            }
            self.in_flight.set(self.in_flight.get() + 1);
            self.carry_out(&slot).await;
            // The answer goes down with the next submission, so the request counts no more.
            let next = self.device.exchange(slot);
            self.in_flight.set(self.in_flight.get() - 1);
            exchange = next?;
        }
    }

    async fn carry_out(&self, slot: &FuseSlot) {
        let head = slot.head();
        let request = parse(&head);
        let data = match request.operation {
            Operation::Write { len, .. } => slot.data(len),
            _ => IoVec::default(),
        };
        let target = |len| slot.target(len);
        let answer = self.export.perform(request.operation, (data, target)).await;
        let (errno, len) = match &answer {
            Answer::None | Answer::Done => (0, 0),
            Answer::Fields(fields) => {
                slot.write(fields.bytes());
                (0, fields.bytes().len())
            }
            // It is there already.
            Answer::Data(data) => (0, data.len()),
            Answer::Failed(failure) => {
                report(&self.observer, &request, failure);
                (failure.errno(), 0)
            }
        };
        slot.answer(&out_header(request.unique, errno, len), len as u32);
    }
}

/// A request by its header and argument: the header has the length of the whole message.
fn parse(head: &[u8; FUSE_HEAD_BYTES]) -> Request {
    let (len, _) = head.split_first_chunk().expect("a head has its length");
    let len = u32::from_ne_bytes(*len) as usize;
    // A message is no longer than it says; what is shorter lacks a part of its argument.
    let known = &head[..len.min(FUSE_HEAD_BYTES)];
    Request::parse(known, len).unwrap_or_else(|_| {
        let (unique, _) = head[8..]
            .split_first_chunk()
            .expect("a head has its number");
        Request {
            unique: u64::from_ne_bytes(*unique),
            operation: Operation::Malformed("a length that is less than the header's"),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_counted_by_the_last() {
        for (list, count) in [("0\n", 1), ("0-1\n", 2), ("0-3,8-15", 16), ("0,2", 3)] {
            assert_eq!(processors(list), Some(count));
        }
        for list in ["", "\n", "0-", "a", "65535", "-1x"] {
            assert_eq!(processors(list), None, "{list}");
        }
    }

    #[test]
    fn lengths_of_the_kernel_are_checked() {
        let mut head = [0; FUSE_HEAD_BYTES];
        head[8] = 7;
        for len in [0, 1, 39] {
            head[0] = len;
            assert_eq!(parse(&head).unique, 7);
            assert!(matches!(parse(&head).operation, Operation::Malformed(_)));
        }
        // An attribute request with its argument, and a write that claims more than there is.
        (head[0], head[4], head[16]) = (56, 3, 1);
        assert_eq!(parse(&head).operation, Operation::GetAttributes);
        (head[0], head[4]) = (81, 16);
        assert!(matches!(parse(&head).operation, Operation::Malformed(_)));
    }
}
