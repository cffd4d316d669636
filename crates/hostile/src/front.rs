//! A front end of vhost-user on a queue, for targets: messages and their answers, on one thread
//! with the server.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cowslip::disk::MemoryDisk;
use cowslip_queue::{Pending, Stream, pending, sleep, spawn};
use cowslip_vhost_user::{Options, Server, ServerEvent};
use futures_util::future::{Either, select};

/// Limit of anything that a server is waited for: its work is bounded, and takes far less.
const PATIENCE: Duration = Duration::from_secs(20);
/// Serial number of the disk, by which a request shows that it was answered.
pub(crate) const SERIAL: &[u8; 20] = b"the hostile crate's ";
/// Size of the disk.
pub(crate) const DISK_BYTES: u64 = 1 << 20;
/// Queues of the device.
pub(crate) const QUEUES: u16 = 4;

/// A server whose connections and queues work on this thread, and its events so far.
pub(crate) struct Served {
    server: Rc<Server>,
    events: Arc<Mutex<Vec<ServerEvent<'static>>>>,
}

impl Served {
    pub(crate) fn new() -> Served {
        let options = Options {
            serial: String::from_utf8_lossy(SERIAL).into_owned(),
            queues: QUEUES,
            threads: 0,
            is_in_order: true,
            ..Options::default()
        };
        let disk = Arc::new(MemoryDisk::new("memory", DISK_BYTES));
        let mut server = Server::new(disk, options).unwrap();
        let events: Arc<Mutex<Vec<ServerEvent<'static>>>> = Arc::default();
        let to = Arc::clone(&events);
        server.observe(move |event: &ServerEvent<'_>| {
            // What requests fail of is none of a target's business.
            let kept = match event {
                ServerEvent::QueueBroken { queue, reason } => ServerEvent::QueueBroken {
                    queue: *queue,
                    reason: reason.clone(),
                },
                ServerEvent::Disconnected { reason } => ServerEvent::Disconnected {
                    reason: reason.clone(),
                },
                _ => return,
            };
            to.lock().unwrap().push(kept);
        });
        Served {
            server: Rc::new(server),
            events,
        }
    }

    /// Events since this was asked last: queues that broke, connections that ended.
    pub(crate) fn events(&self) -> Vec<ServerEvent<'static>> {
        std::mem::take(&mut self.events.lock().unwrap())
    }

    /// Connects a front end. Runs on a queue.
    pub(crate) fn connect(&self) -> Front {
        let (ours, theirs) = UnixStream::pair().unwrap();
        for end in [&ours, &theirs] {
            end.set_nonblocking(true).unwrap();
        }
        let theirs = Stream::from_fd(OwnedFd::from(theirs));
        let server = Rc::clone(&self.server);
        let (completer, ended) = pending();
        spawn(async move {
            server.serve_connection(theirs).await;
            completer.complete(());
        });
        Front {
            stream: Stream::from_fd(OwnedFd::from(ours)),
            ended,
        }
    }
}

/// Waits for the server, but not for ever.
pub(crate) async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    match select(pin!(future), pin!(sleep(PATIENCE))).await {
        Either::Left((value, _)) => value,
        Either::Right(_) => panic!("the server does not {what} in time"),
    }
}

/// A connection to a server.
pub(crate) struct Front {
    stream: Stream,
    ended: Pending<()>,
}

/// A message of this version of the protocol.
pub(crate) fn message(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let fields = [code, 1 | flags, payload.len() as u32];
    let mut bytes: Vec<u8> = fields.into_iter().flat_map(u32::to_le_bytes).collect();
    bytes.extend(payload);
    bytes
}

impl Front {
    /// Sends bytes, with descriptors. Returns whether the connection is still there.
    pub(crate) async fn send_bytes(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> bool {
        let sent = self.stream.send_with_descriptors(bytes, descriptors);
        in_time("take a message", sent).await.is_ok()
    }

    /// Receives an answer: its payload and descriptor. `None` is the end of the connection.
    pub(crate) async fn receive(&self) -> Option<(Vec<u8>, Option<OwnedFd>)> {
        let mut descriptors = Vec::new();
        let mut header = [0; 12];
        let got = self
            .stream
            .receive_with_descriptors(&mut header, &mut descriptors);
        if in_time("answer", got).await.ok()? < header.len() {
            return None;
        }
        let len = u32::from_le_bytes(header[8..].try_into().unwrap());
        let mut payload = vec![0; len as usize];
        let got = self
            .stream
            .receive_with_descriptors(&mut payload, &mut descriptors);
        (in_time("answer", got).await.ok()? == payload.len())
            .then_some((payload, descriptors.pop()))
    }

    /// Asks a question that the server has to answer.
    pub(crate) async fn ask(&self, code: u32, payload: &[u8]) -> (Vec<u8>, Option<OwnedFd>) {
        assert!(self.send_bytes(&message(code, 0, payload), &[]).await);
        self.receive().await.expect("an answer")
    }

    /// Sends a message that the server has to acknowledge. Returns whether it did what was asked
    /// for.
    pub(crate) async fn tell(
        &self,
        code: u32,
        payload: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> bool {
        assert!(
            self.send_bytes(&message(code, 8, payload), descriptors)
                .await
        );
        let (answer, _) = self.receive().await.expect("an answer");
        answer == 0u64.to_le_bytes()
    }

    /// Sends a message without an answer.
    pub(crate) async fn inform(&self, code: u32, payload: &[u8]) {
        assert!(self.send_bytes(&message(code, 0, payload), &[]).await);
    }

    /// Leaves, and waits until the server has done with it.
    pub(crate) async fn leave(self) {
        self.stream.shutdown();
        in_time("end a connection", self.ended).await;
    }
}
