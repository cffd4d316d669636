//! Listening and stream sockets, local and TCP.
//!
//! On a ring, receiving is an operation of the ring: it shares the system call that submits and
//! waits for everything else. Sending is a direct call first, which leaves at once and costs the
//! same; only where the socket is full the task waits, on the ring or by epoll.
//! (docs/driver-decision.md has the figures.)
//!
//! A read that is dropped while it waits is cancelled; bytes that had just arrived for it are lost,
//! so after that the stream is good for closing only.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, SocketFlags};

use crate::buf::BufMut;
use crate::driver::Driver;
use crate::epoll::Interest;
use crate::executor::{Core, yield_now};
use crate::iovec::IoVec;
use crate::pending::Pending;
use crate::pool::blocking;
use crate::scatter::Scatter;
use crate::uring::Uring;
use crate::watched::Tag;

/// Longest path of a Unix socket, in bytes: `sun_path` less its zero byte, unix(7).
const PATH_BYTES_MAX: usize = 107;

/// Refuses a path that no Unix socket can have; the standard library's message names a constant.
fn check_length(path: &Path) -> io::Result<()> {
    let bytes = path.as_os_str().len();
    match bytes > PATH_BYTES_MAX {
        true => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "the path of a socket has at most {PATH_BYTES_MAX} bytes, this one has {bytes}"
            ),
        )),
        false => Ok(()),
    }
}

/// A socket that accepts connections; clones are the same socket.
#[derive(Clone, Debug)]
pub struct Listener {
    fd: Arc<OwnedFd>,
    local: Option<SocketAddr>,
}

impl Listener {
    /// Listens on a path, which must not exist.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn unix(path: &Path) -> io::Result<Self> {
        check_length(path)?;
        Listener::from_fd(UnixListener::bind(path)?.into(), None)
    }

    /// Listens on a TCP address; port 0 takes a free one.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn tcp(addr: SocketAddr) -> io::Result<Self> {
        let socket = TcpListener::bind(addr)?;
        let local = socket.local_addr()?;
        Listener::from_fd(socket.into(), Some(local))
    }

    /// Takes over a socket that listens already, such as one passed by a service manager.
    ///
    /// # Errors
    /// It is no socket.
    pub fn from_listening(fd: OwnedFd) -> io::Result<Self> {
        let local = rustix::net::getsockname(&fd)?;
        Listener::from_fd(fd, SocketAddr::try_from(local).ok())
    }

    fn from_fd(fd: OwnedFd, local: Option<SocketAddr>) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Listener {
            fd: Arc::new(fd),
            local,
        })
    }

    /// The address that a TCP listener got.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.local
    }

    /// The next connection.
    ///
    /// # Errors
    /// The system's failure; one that concerns a single connection only is passed over.
    pub async fn accept(&self) -> io::Result<Stream> {
        loop {
            match rustix::net::accept_with(&*self.fd, SocketFlags::CLOEXEC) {
                Ok(fd) => return Ok(Stream::from_fd(fd)),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => wait_ready(&self.fd, Interest::Readable).await?,
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A connection; clones are the same connection. Reads and writes may be in flight at once, one of
/// each.
#[derive(Clone)]
pub struct Stream {
    fd: Arc<OwnedFd>,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?})", self.fd)
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Stream {
    /// Takes over a connected stream socket.
    pub fn from_fd(fd: OwnedFd) -> Stream {
        // Replies are gathered by the writer, so waiting for more only delays them. A local socket
        // has no such option and says so.
        let _not_tcp = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
        Stream { fd: Arc::new(fd) }
    }

    pub(crate) fn descriptor(&self) -> &Arc<OwnedFd> {
        &self.fd
    }

    /// Connects to a listener on a path.
    ///
    /// # Errors
    /// The system's refusal.
    pub async fn connect_unix(path: &Path) -> io::Result<Stream> {
        check_length(path)?;
        let path = path.to_path_buf();
        let socket = blocking(move || UnixStream::connect(path)).await?;
        Ok(Stream::from_fd(socket.into()))
    }

    /// Connects to a TCP address.
    ///
    /// # Errors
    /// The system's refusal.
    pub async fn connect_tcp(addr: SocketAddr) -> io::Result<Stream> {
        let socket = blocking(move || TcpStream::connect(addr)).await?;
        Ok(Stream::from_fd(socket.into()))
    }

    /// Reads some bytes, at most as many as the buffer has; 0 is the end. The buffer comes back
    /// whatever the outcome.
    ///
    /// # Panics
    /// Outside a queue.
    pub async fn read(&self, mut buf: BufMut) -> (io::Result<usize>, BufMut) {
        if on_ring() {
            return self.read_on_ring(buf).await;
        }
        loop {
            match rustix::net::recv(&*self.fd, &mut buf[..], RecvFlags::DONTWAIT) {
                Ok((got, _)) => {
                    pace().await;
                    return (Ok(got), buf);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if let Err(error) = wait_ready(&self.fd, Interest::Readable).await {
                        return (Err(error), buf);
                    }
                }
                Err(error) => return (Err(error.into()), buf),
            }
        }
    }

    async fn read_on_ring(&self, mut buf: BufMut) -> (io::Result<usize>, BufMut) {
        loop {
            let receive = OnRing::start(|ring| ring.recv(Arc::clone(&self.fd), buf));
            let result;
            (result, buf) = receive.await;
            match result {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return (result, buf),
            }
        }
    }

    /// Writes all bytes of a buffer or a scatter list. One writer at a time is the caller's duty.
    ///
    /// # Errors
    /// The connection's failure; the number of bytes sent before is unknown.
    ///
    /// # Panics
    /// Outside a queue, if the socket is not ready.
    pub async fn write_all(&self, data: impl Into<IoVec>) -> io::Result<()> {
        let mut data = Scatter::new(data.into());
        while !data.is_done() {
            match data.send(self.fd.as_fd()) {
                Ok(sent) => data.advance(sent),
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => wait_ready(&self.fd, Interest::Writable).await?,
                    _ => return Err(error),
                },
            }
        }
        pace().await;
        Ok(())
    }

    /// Ends both directions: waiting reads and writes come to an end, here and at the peer.
    pub fn shutdown(&self) {
        // A connection that is gone already needs no ending.
        let _gone = rustix::net::shutdown(&*self.fd, Shutdown::Both);
    }
}

/// Transfers in a row on one queue that needed no waiting, before the others get their turn.
const UNPACED_TRANSFERS: u32 = 32;

/// Yields now and then: a busy peer keeps its socket ready for ever, and the file operations that
/// its requests caused are submitted only when the tasks rest.
async fn pace() {
    let due = Core::with_current(|core| {
        let transfers = core.transfers.get() + 1;
        core.transfers.set(transfers % UNPACED_TRANSFERS);
        transfers == UNPACED_TRANSFERS
    });
    if due == Some(true) {
        yield_now().await;
    }
}

/// An operation of the ring that is cancelled when nobody waits for it any more.
struct OnRing<T> {
    core: Rc<Core>,
    tag: Tag,
    result: Option<Pending<T>>,
}

impl<T> OnRing<T> {
    fn start(start: impl FnOnce(&Uring) -> (Tag, Pending<T>)) -> OnRing<T> {
        let started = Core::with_current(|core| match &core.driver {
            Driver::Uring(ring) => {
                let (tag, result) = start(ring);
                OnRing {
                    core: Rc::clone(core),
                    tag,
                    result: Some(result),
                }
            }
            Driver::Epoll(_) => panic!("a future of sockets stays on its queue"),
        });
        started.expect("sockets wait on a running queue")
    }
}

impl<T> Future for OnRing<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let result = self.result.as_mut();
        let result = result.expect("a completed future is not polled again");
        let value = ready!(Pin::new(result).poll(cx));
        self.result = None;
        Poll::Ready(value)
    }
}

impl<T> Drop for OnRing<T> {
    fn drop(&mut self) {
        if self.result.is_some()
            && let Driver::Uring(ring) = &self.core.driver
        {
            ring.cancel(self.tag);
        }
    }
}

/// Whether this thread's queue has a ring.
fn on_ring() -> bool {
    let has_ring = Core::with_current(|core| matches!(core.driver, Driver::Uring(_)));
    has_ring.expect("sockets wait on a running queue")
}

/// Waits until the socket may be ready; it may be early.
pub(crate) async fn wait_ready(fd: &Arc<OwnedFd>, interest: Interest) -> io::Result<()> {
    if on_ring() {
        return OnRing::start(|ring| ring.poll(Arc::clone(fd), interest)).await;
    }
    let mut asked = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut asked, true) {
            return Poll::Ready(Ok(()));
        }
        let result = Core::with_current(|core| match &core.driver {
            Driver::Epoll(epoll) => epoll.wait(fd.as_fd(), interest, cx.waker()),
            Driver::Uring(_) => panic!("a future of sockets stays on its queue"),
        });
        match result.expect("sockets wait on a running queue") {
            Ok(()) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    })
    .await
}
