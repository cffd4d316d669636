//! A counter of events that another process adds to (an eventfd), as something to wait for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::FileType;
use rustix::io::Errno;

use crate::epoll::Interest;
use crate::socket::wait_ready;
use crate::sys;

/// An eventfd; clones are the same one.
#[derive(Clone, Debug)]
pub struct Event {
    fd: Arc<OwnedFd>,
}

impl Event {
    /// A new event, for the threads of this process or to be passed on.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn new() -> io::Result<Event> {
        Ok(Event {
            fd: Arc::new(sys::new_event()?),
        })
    }

    /// Takes over an event of another process: an eventfd, a pipe or a socket. Files and devices
    /// may be readable all the time, so that a wait would end at once, again and again.
    ///
    /// # Errors
    /// It is none of these, or no descriptor that can be made non-blocking.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Event> {
        // An eventfd has no type of file.
        match FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) {
            FileType::Fifo | FileType::Socket | FileType::Unknown => {}
            _ => {
                let what = "it is a file or device, not an eventfd, a pipe or a socket";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
            }
        }
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Event { fd: Arc::new(fd) })
    }

    /// Adds one event. A counter that is full keeps its value: it wakes as well.
    ///
    /// # Errors
    /// The descriptor is no event, or its other side is closed.
    pub fn signal(&self) -> io::Result<()> {
        match rustix::io::write(&*self.fd, &1u64.to_ne_bytes()) {
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn descriptor(&self) -> &Arc<OwnedFd> {
        &self.fd
    }

    /// Waits until there is an event, and takes all that there are.
    ///
    /// # Errors
    /// The descriptor is no event.
    ///
    /// # Panics
    /// Outside a queue, if it has to wait.
    pub async fn wait(&self) -> io::Result<()> {
        loop {
            match rustix::io::read(&*self.fd, &mut [0u8; 8]) {
                Ok(8) => return Ok(()),
                // A pipe or socket whose other side is closed.
                Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => wait_ready(&self.fd, Interest::Readable).await?,
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, Queue};

    #[test]
    fn files_and_devices_are_no_events() {
        for name in ["/dev/zero", "/dev/urandom", "/proc/self/exe", "/"] {
            let file = std::fs::File::open(name).unwrap();
            let error = Event::from_fd(file.into()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{name}");
        }
        let (reader, _writer) = io::pipe().unwrap();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let event = Event::new().unwrap().as_fd().try_clone_to_owned().unwrap();
        for fd in [reader.into(), socket.into(), event] {
            Event::from_fd(fd).unwrap();
        }
    }

    #[test]
    fn events_of_other_threads_are_waited_for() {
        for backend in [Backend::Auto, Backend::Threads] {
            let queue = Queue::new(backend).unwrap();
            let event = Event::new().unwrap();
            let other = event.clone();
            queue.block_on(async {
                event.signal().unwrap();
                event.signal().unwrap();
                event.wait().await.unwrap();
                let thread = std::thread::spawn(move || {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                    other.signal().unwrap();
                });
                event.wait().await.unwrap();
                thread.join().unwrap();
            });
            let (reader, writer) = std::io::pipe().unwrap();
            let closed = Event::from_fd(reader.into()).unwrap();
            drop(writer);
            assert!(queue.block_on(closed.wait()).is_err());
        }
    }
}
