//! A connection to an export that comes back when it is lost, for those who asked for that
//! (`reconnect-delay`).
//!
//! A request that the server has not answered is sent again over the new connection. That is right
//! since all requests of the protocol say what is to be, not what is to be done with what is there:
//! a read, a write of these bytes to this place, zeroes, a discard, a flush. Whether the server had
//! done one of them or not when the connection was lost, it is done afterwards; and requests that
//! overlap have no order as long as they are under address.
//!
//! Two losses remain: a server that ends loses answered writes that were not flushed, if it keeps
//! them in its memory; and one that goes on with a request of the old
//! connection while the new one is there can do an old write after a newer one. So the wait is the
//! user's choice, and off by default; and the first flush after a loss of the first kind
//! fails ([`super::unflushed`]).

use std::cell::RefCell;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::protocol::{OptionReplyCode, TransmissionFlags};
use crate::tls::ClientTls;
use crate::{Client, ClientError, ConnectOptions, ExportDescription};
use cowslip_queue::{Completer, Pending, pending, sleep, spawn};
use futures_util::future::{self, Either};

use super::address::refused;
use super::name::ExportName;
use super::unflushed::Unflushed;
use cowslip_block::Error;

/// First pause between attempts to connect: the time that a server needs to start again at once.
/// Each pause is twice as long as the one before it.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// Longest pause between attempts to connect.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Time limit of the handshake, as servers have for their clients.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of the server's part in a disconnect.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// An export, and the credentials for its server.
#[derive(Clone)]
pub(super) struct ExportAddress {
    pub(super) export: ExportName,
    pub(super) tls: Option<ClientTls>,
}

/// Whether there is a connection.
enum State {
    Up(Rc<Client>),
    Down {
        /// Time until which requests wait for the next one.
        until: Instant,
        /// The error that ended the last one.
        why: ClientError,
    },
}

/// An export, and the connection to it.
pub(super) struct Link {
    address: ExportAddress,
    /// The server's first description. A new connection must have the same.
    description: ExportDescription,
    state: RefCell<State>,
    /// Requests that wait for a connection.
    waiting: RefCell<Vec<Completer<()>>>,
    /// Acknowledged writes that are not durable yet.
    unflushed: Arc<Mutex<Unflushed>>,
}

impl Link {
    /// Connects, and tries again as long as the export's `open-timeout` allows. What is written
    /// over it is counted in `unflushed`.
    ///
    /// # Errors
    /// Those of the last attempt.
    pub(super) async fn open(
        address: ExportAddress,
        unflushed: Arc<Mutex<Unflushed>>,
    ) -> cowslip_block::Result<Link> {
        let client = match address.export.waits.open {
            Duration::ZERO => address.connect().await?,
            patience => address.connect_within(patience).await?,
        };
        Ok(Link {
            address,
            description: client.export().clone(),
            state: RefCell::new(State::Up(Rc::new(client))),
            waiting: RefCell::default(),
            unflushed,
        })
    }

    /// The server's description of the export.
    pub(super) fn description(&self) -> &ExportDescription {
        &self.description
    }

    /// Whether a request may be asked more than once.
    pub(super) fn asks_again(&self) -> bool {
        !self.address.export.waits.reconnect.is_zero()
    }

    /// Asks the server, as often as it takes: again over the next connection where one was lost
    /// before the answer.
    pub(super) async fn ask<T>(
        self: &Rc<Link>,
        request: impl FnMut(&Client) -> Pending<Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        let (answer, _) = self.ask_with_client(request).await?;
        Ok(answer)
    }

    /// Asks for a change that is not durable by itself: until a flush, it may be lost with the
    /// connection.
    pub(super) async fn change(
        self: &Rc<Link>,
        request: impl FnMut(&Client) -> Pending<Result<(), ClientError>>,
    ) -> Result<(), ClientError> {
        let ((), client) = self.ask_with_client(request).await?;
        let mut unflushed = self.unflushed();
        unflushed.acknowledge();
        if !self.is_current(&client) {
            unflushed.connection_lost();
        }
        Ok(())
    }

    /// Makes the server put earlier writes on stable storage.
    ///
    /// # Errors
    /// The connection's; or something may be lost that was written over one that is lost.
    pub(super) async fn flush(
        self: &Rc<Link>,
        request: impl FnMut(&Client) -> Pending<Result<(), ClientError>>,
    ) -> Result<io::Result<()>, ClientError> {
        let begun = self.unflushed().begin_flush();
        self.ask(request).await?;
        Ok(self.unflushed().end_flush(begun))
    }

    async fn ask_with_client<T>(
        self: &Rc<Link>,
        mut request: impl FnMut(&Client) -> Pending<Result<T, ClientError>>,
    ) -> Result<(T, Rc<Client>), ClientError> {
        loop {
            let client = self.client().await?;
            match request(&client).await {
                Err(ClientError::Io(why)) if self.asks_again() => {
                    self.lost(&client, ClientError::Io(why));
                }
                answered => return answered.map(|answer| (answer, client)),
            }
        }
    }

    fn unflushed(&self) -> MutexGuard<'_, Unflushed> {
        self.unflushed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn is_current(&self, client: &Rc<Client>) -> bool {
        matches!(&*self.state.borrow(), State::Up(current) if Rc::ptr_eq(current, client))
    }

    /// The connection, once there is one.
    ///
    /// # Errors
    /// The error that ended the last one, if there is none in time.
    async fn client(&self) -> Result<Rc<Client>, ClientError> {
        loop {
            let (until, why) = match &*self.state.borrow() {
                State::Up(client) => return Ok(Rc::clone(client)),
                State::Down { until, why } => (*until, why.clone()),
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(why);
            }
            let (waiter, back) = pending();
            self.waiting.borrow_mut().push(waiter);
            future::select(back, pin!(sleep(left))).await;
        }
    }

    /// Starts a new connection in the place of this one, unless one was started before.
    fn lost(self: &Rc<Link>, client: &Rc<Client>, why: ClientError) {
        if self.is_current(client) {
            let until = Instant::now() + self.address.export.waits.reconnect;
            self.state.replace(State::Down { until, why });
            self.unflushed().connection_lost();
            spawn(Rc::clone(self).come_back());
        }
    }

    /// Connects until that succeeds: also when no request waits, since others may come later.
    async fn come_back(self: Rc<Link>) {
        let mut pause = PAUSE_MIN;
        let client = loop {
            let attempt = within(HANDSHAKE_TIMEOUT, self.address.connect()).await;
            if let Some(Ok(client)) = attempt
                && is_the_same(&self.description, client.export())
            {
                break client;
            }
            sleep(pause).await;
            pause = (2 * pause).min(PAUSE_MAX);
        };
        self.state.replace(State::Up(Rc::new(client)));
        for waiter in self.waiting.take() {
            waiter.complete(());
        }
    }

    /// Whether this is a connection to the export that is known already.
    pub(super) fn stands_for(&self, known: &ExportDescription) -> bool {
        is_the_same(known, &self.description)
    }

    /// Takes leave of the server, if it is there.
    pub(super) async fn leave(self) {
        let State::Up(client) = self.state.into_inner() else {
            return;
        };
        // Every request has its answer: each held the file until then.
        if let Ok(client) = Rc::try_unwrap(client) {
            // A server's answer to a disconnect is of no consequence.
            drop(within(DISCONNECT_TIMEOUT, client.disconnect()).await);
        }
    }
}

/// Whether this can stand for the export that was opened. Its name may have been given to another
/// disk.
fn is_the_same(known: &ExportDescription, export: &ExportDescription) -> bool {
    let read_only = TransmissionFlags::READ_ONLY;
    export.size == known.size
        && export.block_sizes == known.block_sizes
        && (export.extended_headers || !known.extended_headers)
        && export.contexts == known.contexts
        && export.flags.contains(known.flags)
        && export.flags.contains(read_only) == known.flags.contains(read_only)
}

impl ExportAddress {
    async fn connect(&self) -> cowslip_block::Result<Client> {
        let options = ConnectOptions {
            tls: self.tls.clone(),
            ..ConnectOptions::new(&self.export.export)
        };
        let stream = self.export.server.connect().await?;
        let connected = Client::connect(stream, &options).await;
        connected.map_err(|error| match error {
            ClientError::Refused { reply, .. } if reply != OptionReplyCode::ErrTlsRequired => {
                let text = format!("Requested export not available ({error})");
                Error::invalid(text)
            }
            error => refused(&error, "7 (go)"),
        })
    }

    /// Connects, and tries again until `patience` is over.
    ///
    /// # Errors
    /// The error of the last attempt that had an answer.
    async fn connect_within(&self, patience: Duration) -> cowslip_block::Result<Client> {
        let begun = Instant::now();
        let mut attempts = Attempts::default();
        let mut last = Error::invalid("Connection attempt cancelled by timeout");
        loop {
            let left = patience.saturating_sub(begun.elapsed());
            match within(left, self.connect()).await {
                Some(Ok(client)) => return Ok(client),
                Some(Err(error)) => last = error,
                None => return Err(last),
            }
            match attempts.pause(patience.saturating_sub(begun.elapsed())) {
                Some(pause) => sleep(pause).await,
                None => return Err(last),
            }
        }
    }
}

/// Pauses between attempts that have a deadline.
struct Attempts {
    next: Duration,
}

impl Default for Attempts {
    fn default() -> Attempts {
        Attempts { next: PAUSE_MIN }
    }
}

impl Attempts {
    /// The pause before the next attempt, with `left` remaining; `None` once there is none.
    ///
    /// Each is twice as long as the one before it, but no longer than half of what is left, so
    /// that a server that comes late is found too. The last one ends at the deadline, not before.
    fn pause(&mut self, left: Duration) -> Option<Duration> {
        let pause = self.next.min(left / 2).max(PAUSE_MIN).min(left);
        self.next = (2 * self.next).min(PAUSE_MAX);
        (!pause.is_zero()).then_some(pause)
    }
}

/// Waits for something, but no longer than that.
async fn within<T>(time: Duration, future: impl Future<Output = T>) -> Option<T> {
    match future::select(pin!(future), pin!(sleep(time))).await {
        Either::Left((output, _)) => Some(output),
        Either::Right(((), _)) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use crate::protocol::HandshakeFlags;
    use crate::protocol::handshake::*;
    use cowslip_block::options::{Options, split};
    use cowslip_queue::{Backend, Queue};
    use futures_util::FutureExt;

    /// A server that shakes hands, and leaves it at that.
    fn greets_everybody(socket: &std::path::Path) {
        let listener = UnixListener::bind(socket).unwrap();
        // It ends with the test's process.
        std::thread::spawn(move || {
            let mut met = Vec::new();
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let greeting = encode_greeting(HandshakeFlags::empty());
                stream.write_all(&greeting).unwrap();
                let mut option = [0; CLIENT_FLAGS_BYTES + OPTION_HEADER_BYTES];
                stream.read_exact(&mut option).unwrap();
                let flags = TransmissionFlags::HAS_FLAGS;
                let reply = encode_export_name_reply(1 << 20, flags);
                stream.write_all(&reply).unwrap();
                stream.write_all(&[0; EXPORT_NAME_PADDING_BYTES]).unwrap();
                met.push(stream);
            }
        });
    }

    /// The answer to a write is taken up after the loss of its connection: the server has sent
    /// both at once. `is_back` says whether the next connection is there already.
    async fn a_write_is_acknowledged_late(link: &Rc<Link>, is_back: bool) {
        let flush = || link.flush(|_| Pending::ready(Ok(())));
        let (acknowledge, acknowledged) = pending();
        let mut answer = Some(acknowledged);
        let mut write = pin!(link.change(|_| answer.take().expect("asked once")));
        assert!(write.as_mut().now_or_never().is_none());
        let gone = || ClientError::Io(Arc::new(io::ErrorKind::BrokenPipe.into()));
        link.lost(&link.client().await.unwrap(), gone());
        if is_back {
            link.client().await.unwrap();
        }
        acknowledge.complete(Ok(()));
        write.await.unwrap();
        let flushed = flush().await.unwrap();
        assert!(flushed.is_err(), "no flush covers it, {is_back}");
        assert!(flush().await.unwrap().is_ok(), "it has been reported");
    }

    #[test]
    fn a_write_acknowledged_after_the_loss_of_its_connection_may_be_lost() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        greets_everybody(&socket);
        let options = format!("path={},reconnect-delay=60", socket.display());
        let mut options = Options::new(split(&options).unwrap());
        let export = ExportName::of_options(&mut options).unwrap();
        Queue::new(Backend::Threads).unwrap().block_on(async {
            let address = ExportAddress { export, tls: None };
            let link = Rc::new(Link::open(address, Arc::default()).await.unwrap());
            for is_back in [false, true] {
                a_write_is_acknowledged_late(&link, is_back).await;
            }
        });
    }

    /// When attempts are made that take no time, in milliseconds since the first.
    fn attempts_within(patience: Duration) -> (Vec<u128>, Duration) {
        let mut attempts = Attempts::default();
        let (mut at, mut made) = (Duration::ZERO, vec![0]);
        while let Some(pause) = attempts.pause(patience.saturating_sub(at)) {
            at += pause;
            made.push(at.as_millis());
        }
        (made, at)
    }

    #[test]
    fn attempts_last_as_long_as_the_patience() {
        for millis in [1, 20, 21, 600, 1000, 5000, 60_000, 3_600_000] {
            let patience = Duration::from_millis(millis);
            let (made, given_up_at) = attempts_within(patience);
            assert_eq!(given_up_at, patience, "{made:?}");
            let mut gaps = made.windows(2).map(|pair| pair[1] - pair[0]);
            assert!(gaps.clone().all(|gap| gap <= PAUSE_MAX.as_millis()));
            let last = gaps.next_back().unwrap();
            assert!(last <= 2 * PAUSE_MIN.as_millis(), "{made:?}");
        }
        assert_eq!(attempts_within(Duration::ZERO).0, [0]);
    }
}
