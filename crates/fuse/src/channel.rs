//! A channel at work: requests are taken from the kernel, carried out together, and answered as
//! they complete.
//!
//! A write's data goes to the disk where the kernel has put it: messages are received into a large
//! buffer, of which each write keeps its part until it is done, and the next message is received
//! behind it.

use std::cell::Cell;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use cowslip_queue::buf::ALIGNMENT_BYTES;
use cowslip_queue::{BufMut, Completer, FuseDevice, IoVec, IoVecMut};
use futures_util::stream::{FuturesUnordered, Stream};

use crate::export::{Answer, Export, Failure};
use crate::request::{Operation, Request};
use crate::server::{Observer, ServerEvent, Stop};
use crate::wire::{DATA_BYTES_MAX, IN_HEADER_BYTES, WRITE_BYTES, out_header};

/// Requests that a channel has in flight at most.
pub const REQUESTS_MAX: usize = 256;
/// Bytes of reads that it has in flight at most: it takes no further request above that.
pub const READ_BYTES_MAX: usize = 64 << 20;
/// Buffers for messages that are in use at most, and bytes of each: the last has room for the
/// longest write, so this bounds the data of writes in flight, however small they are.
pub const BUFFERS_MAX: usize = 32;
/// See [`BUFFERS_MAX`].
pub const BUFFER_BYTES: usize = 2 << 20;

/// Header and argument of a write: its data begins behind them, in another buffer, so that it lies
/// where direct I/O takes it.
const HEAD_BYTES: usize = IN_HEADER_BYTES + WRITE_BYTES;
/// Bytes of the longest header and argument of other requests, with some more.
const MESSAGE_BYTES: usize = 256;

/// ENODEV: the file system is unmounted.
const ENODEV: i32 = 19;
/// ENOENT: nobody waits for the answer any more.
const ENOENT: i32 = 2;

/// A message from the kernel.
#[derive(Debug)]
struct Message {
    request: Request,
    data: IoVec,
    /// The buffer that has the data of a write.
    buffer: Option<Lent>,
}

/// The part of a buffer that a request keeps in use.
type Lent = Rc<()>;

/// Buffers that messages are received into.
#[derive(Debug)]
struct Inbox {
    /// The rest of the current buffer.
    rest: BufMut,
    current: Lent,
    /// Buffers of which requests may have parts; those that have none any more are left out when it
    /// is counted.
    lent: Vec<std::rc::Weak<()>>,
}

impl Inbox {
    fn new() -> Inbox {
        let current = Lent::default();
        Inbox {
            rest: BufMut::for_overwrite(BUFFER_BYTES),
            lent: vec![Rc::downgrade(&current)],
            current,
        }
    }

    /// Whether another message may come.
    fn has_room(&mut self) -> bool {
        if self.rest.len() >= DATA_BYTES_MAX {
            return true;
        }
        self.lent.retain(|buffer| buffer.strong_count() > 0);
        if self.lent.len() >= BUFFERS_MAX {
            return false;
        }
        self.rest = BufMut::for_overwrite(BUFFER_BYTES);
        self.current = Lent::default();
        self.lent.push(Rc::downgrade(&self.current));
        true
    }

    /// Takes a message, if there is one. To be called when there is room.
    fn receive(&mut self, device: &FuseDevice) -> io::Result<Message> {
        let mut head = [0; MESSAGE_BYTES];
        let len = device.receive(&mut head[..HEAD_BYTES], &mut self.rest)?;
        let in_rest = len.saturating_sub(HEAD_BYTES);
        let more = in_rest.min(MESSAGE_BYTES - HEAD_BYTES);
        head[HEAD_BYTES..HEAD_BYTES + more].copy_from_slice(&self.rest[..more]);
        let known = &head[..len.min(MESSAGE_BYTES)];
        let request = Request::parse(known, len).map_err(|_| io::ErrorKind::InvalidData)?;
        let Operation::Write { len, .. } = request.operation else {
            return Ok(Message {
                request,
                data: IoVec::default(),
                buffer: None,
            });
        };
        let used = len.next_multiple_of(ALIGNMENT_BYTES).min(self.rest.len());
        let mut data = self.rest.split_to(used);
        data.truncate(len);
        Ok(Message {
            request,
            data: data.freeze().into(),
            buffer: Some(Rc::clone(&self.current)),
        })
    }
}

/// A channel of the connection to the kernel.
pub(crate) struct Channel {
    pub device: FuseDevice,
    pub export: Arc<Export>,
    pub stop: Arc<Stop>,
    pub observer: Observer,
    /// Its number, from 0 on.
    pub index: usize,
    /// Completed when the negotiation has been answered.
    pub negotiated: Cell<Option<Completer<()>>>,
}

/// The state of a channel at work.
struct Work {
    channel: Rc<Channel>,
    inbox: Inbox,
    read_bytes: usize,
    /// Whether there may be requests: the device has said so, and has not been found empty since.
    is_ready: bool,
    /// Whether the file system is unmounted.
    is_gone: bool,
}

type Ready = Pin<Box<dyn Future<Output = io::Result<()>>>>;

impl Channel {
    /// Works until the file system is unmounted or the server stops; requests that were taken are
    /// completed.
    pub async fn run(self) {
        let channel = Rc::new(self);
        let mut work = Work {
            inbox: Inbox::new(),
            read_bytes: 0,
            is_ready: true,
            is_gone: false,
            channel: Rc::clone(&channel),
        };
        let mut running = FuturesUnordered::new();
        let mut ready: Option<Ready> = None;
        loop {
            let takes = !work.is_gone && !channel.stop.is_set();
            while takes && work.is_ready && work.has_room(running.len()) {
                if let Some(message) = work.take() {
                    let cost = work.charge(&message);
                    let channel = Rc::clone(&channel);
                    running.push(async move {
                        channel.perform(message).await;
                        cost
                    });
                }
            }
            let ends = work.is_gone || channel.stop.is_set();
            if ends && running.is_empty() {
                return;
            }
            if ready.is_none() && !ends && !work.is_ready {
                let channel = Rc::clone(&channel);
                ready = Some(Box::pin(async move { channel.device.readable().await }));
            }
            std::future::poll_fn(|context| {
                match work.poll(context, (&mut ready, &mut running), ends) {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                }
            })
            .await;
        }
    }

    async fn perform(&self, message: Message) {
        let Message {
            request,
            data,
            buffer,
        } = message;
        let target = |len| IoVecMut::from(BufMut::for_overwrite(len));
        let answer = self.export.perform(request.operation, (data, target)).await;
        drop(buffer);
        let sent = match answer {
            Answer::None => Ok(()),
            Answer::Done => self.answer(&request, 0, &[]),
            Answer::Fields(fields) => self.answer(&request, 0, fields.bytes()),
            Answer::Data(data) => self.answer(&request, 0, &BufMut::from(data)),
            Answer::Failed(failure) => {
                report(&self.observer, &request, &failure);
                self.answer(&request, failure.errno(), &[])
            }
        };
        if let Operation::Init(_) = request.operation
            && sent.is_ok()
            && let Some(negotiated) = self.negotiated.take()
        {
            negotiated.complete(());
        }
        match sent {
            Err(error) if is_lasting(&error) => (self.observer)(&ServerEvent::AnswerRefused {
                request: request.operation.to_string(),
                error: error.to_string(),
            }),
            _ => {}
        }
    }

    fn answer(&self, request: &Request, errno: i32, result: &[u8]) -> io::Result<()> {
        let header = out_header(request.unique, errno, result.len());
        self.device
            .send(&[IoSlice::new(&header), IoSlice::new(result)])
    }
}

/// Reports a request that has failed.
pub(crate) fn report(observer: &Observer, request: &Request, failure: &Failure) {
    if let Some(error) = failure.words() {
        observer(&ServerEvent::RequestFailed {
            request: request.operation.to_string(),
            error,
        });
    }
}

/// Whether an answer was refused for a reason other than that nobody waits for it any more.
pub(crate) fn is_lasting(error: &io::Error) -> bool {
    !matches!(error.raw_os_error(), Some(ENODEV | ENOENT))
}

impl Work {
    fn has_room(&mut self, in_flight: usize) -> bool {
        in_flight < REQUESTS_MAX && self.read_bytes < READ_BYTES_MAX && self.inbox.has_room()
    }

    /// Counts what a request may need; returns what is to be given back at its end.
    fn charge(&mut self, message: &Message) -> usize {
        let cost = match message.request.operation {
            Operation::Read { len, .. } => len,
            _ => 0,
        };
        self.read_bytes += cost;
        cost
    }

    /// The next request, if there is one.
    fn take(&mut self) -> Option<Message> {
        match self.inbox.receive(&self.channel.device) {
            Ok(message) => Some(message),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.is_ready = false;
                None
            }
            Err(error) => {
                self.end(&error);
                None
            }
        }
    }

    /// The connection can do no more: the file system is unmounted, or was cut off.
    fn end(&mut self, error: &io::Error) {
        self.is_gone = true;
        self.is_ready = false;
        if is_lasting(error) {
            (self.channel.observer)(&ServerEvent::ConnectionFailed {
                reason: error.to_string(),
            });
        }
    }

    /// Looks for completions, requests and the stop. Returns whether there is any.
    fn poll<F: Future<Output = usize>>(
        &mut self,
        context: &mut Context<'_>,
        (ready, running): (&mut Option<Ready>, &mut FuturesUnordered<F>),
        ends: bool,
    ) -> bool {
        let mut has_news = false;
        while let Poll::Ready(Some(cost)) = Pin::new(&mut *running).poll_next(context) {
            self.read_bytes -= cost;
            has_news = true;
        }
        if let Some(wait) = ready
            && let Poll::Ready(outcome) = wait.as_mut().poll(context)
        {
            *ready = None;
            match outcome {
                Ok(()) => self.is_ready = true,
                Err(error) => self.end(&error),
            }
            has_news = true;
        }
        let is_stopped = self.channel.stop.register(self.channel.index, context);
        has_news || (is_stopped && !ends)
    }
}
