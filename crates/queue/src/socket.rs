//! Listening and stream sockets, local and TCP.
//!
//! A transfer is first tried as a direct call that does not block; only where the socket is not ready
//! the task waits, on the ring or by epoll.
//!
//! A read that is dropped while it waits is cancelled; bytes that had just arrived for it are lost, so
//! after that the stream is good for closing only.

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
use std::task::{Context, Poll};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketFlags};

use crate::buf::{Buf, BufMut};
use crate::driver::Driver;
use crate::epoll::Interest;
use crate::executor::{Core, yield_now};
use crate::pending::Pending;
use crate::pool::blocking;
use crate::scatter::Scatter;
use crate::uring::Tag;

/// A socket that accepts connections.
#[derive(Debug)]
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
                Err(Errno::AGAIN) => ready(&self.fd, Interest::Readable).await?,
                Err(error) => return Err(error.into()),
            }
        }
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

    /// Connects to a listener on a path.
    ///
    /// # Errors
    /// The system's refusal.
    pub async fn connect_unix(path: &Path) -> io::Result<Stream> {
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
    /// Outside a queue, if the socket is not ready.
    pub async fn read(&self, mut buf: BufMut) -> (io::Result<usize>, BufMut) {
        loop {
            match rustix::net::recv(&*self.fd, &mut buf[..], RecvFlags::DONTWAIT) {
                Ok((got, _)) => {
                    pace().await;
                    return (Ok(got), buf);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if let Err(error) = ready(&self.fd, Interest::Readable).await {
                        return (Err(error), buf);
                    }
                }
                Err(error) => return (Err(error.into()), buf),
            }
        }
    }

    /// Writes all the bytes of the buffers, one after the other. One writer at a time is the
    /// caller's duty.
    ///
    /// # Errors
    /// The connection's failure; how much was sent before is not told.
    ///
    /// # Panics
    /// Outside a queue, if the socket is not ready.
    pub async fn write_all(&self, bufs: Vec<Buf>) -> io::Result<()> {
        let mut data = Scatter::new(bufs);
        while !data.is_done() {
            match self.try_write(&data) {
                Ok(sent) => data.advance(sent),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => ready(&self.fd, Interest::Writable).await?,
                Err(error) => return Err(error.into()),
            }
        }
        pace().await;
        Ok(())
    }

    fn try_write(&self, data: &Scatter) -> rustix::io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let mut nothing = SendAncillaryBuffer::default();
        rustix::net::sendmsg(&*self.fd, &data.slices(), &mut nothing, flags)
    }

    /// Ends both directions: waiting reads and writes come to an end, here and at the peer.
    pub fn shutdown(&self) {
        // A connection that is gone already needs no ending.
        let _gone = rustix::net::shutdown(&*self.fd, Shutdown::Both);
    }
}

/// Transfers in a row on one queue that needed no waiting, before the others get their turn.
const UNPACED_TRANSFERS: u32 = 32;

/// Yields now and then: a busy peer keeps its socket ready for ever, and the file operations that its
/// requests caused are submitted only when the tasks rest.
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

/// A wait until the socket may be ready; it may be early.
struct Ready<'a> {
    fd: &'a Arc<OwnedFd>,
    interest: Interest,
    state: Wait,
}

enum Wait {
    New,
    /// In the hands of the ring of that queue, under a tag.
    Ring(Rc<Core>, Tag, Pending<io::Result<()>>),
    /// Registered with epoll: the next poll is the event.
    Epoll,
}

fn ready(fd: &Arc<OwnedFd>, interest: Interest) -> Ready<'_> {
    Ready {
        fd,
        interest,
        state: Wait::New,
    }
}

impl Ready<'_> {
    fn start(&self, cx: &Context<'_>) -> io::Result<Wait> {
        let started = Core::with_current(|core| match &core.driver {
            Driver::Uring(ring) => {
                let (tag, result) = ring.poll(Arc::clone(self.fd), self.interest);
                Ok(Wait::Ring(Rc::clone(core), tag, result))
            }
            Driver::Epoll(epoll) => {
                epoll.wait(self.fd.as_fd(), self.interest, cx.waker())?;
                Ok(Wait::Epoll)
            }
        });
        started.expect("sockets wait on a running queue")
    }
}

impl Future for Ready<'_> {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.state {
            Wait::New => {
                self.state = self.start(cx)?;
                match &mut self.state {
                    Wait::Ring(_, _, result) => Pin::new(result).poll(cx),
                    _ => Poll::Pending,
                }
            }
            Wait::Ring(_, _, result) => {
                let result = std::task::ready!(Pin::new(result).poll(cx));
                self.state = Wait::Epoll;
                Poll::Ready(result)
            }
            Wait::Epoll => Poll::Ready(Ok(())),
        }
    }
}

impl Drop for Ready<'_> {
    fn drop(&mut self) {
        if let Wait::Ring(core, tag, _) = &self.state
            && let Driver::Uring(ring) = &core.driver
        {
            ring.cancel(*tag);
        }
    }
}
