//! Descriptors that travel with the bytes of a local stream socket (`SCM_RIGHTS`).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::epoll::Interest;
use crate::socket::{Stream, wait_ready};

/// Most descriptors of one message.
pub const DESCRIPTORS_MAX: usize = 16;

impl Stream {
    /// Receives bytes until the slice is full, with the descriptors that came with them. Returns
    /// the number of bytes, which is less than the slice has if the connection has ended.
    ///
    /// # Errors
    /// The connection's failure; more than [`DESCRIPTORS_MAX`] descriptors, all of which are closed
    /// then.
    ///
    /// # Panics
    /// Outside a queue, if it has to wait.
    pub async fn receive_with_descriptors(
        &self,
        to: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> io::Result<usize> {
        let mut got = 0;
        while got < to.len() {
            match receive_now(self.as_fd(), &mut to[got..], descriptors) {
                Ok(0) => break,
                Ok(more) => got += more,
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => {
                        wait_ready(self.descriptor(), Interest::Readable).await?;
                    }
                    _ => return Err(error),
                },
            }
        }
        Ok(got)
    }

    /// Receives some bytes, at most as many as the slice has, with the descriptors that came with
    /// them; 0 is the end. Nothing is lost if the future is dropped.
    ///
    /// # Errors
    /// The connection's failure; more than [`DESCRIPTORS_MAX`] descriptors, all of which are closed
    /// then.
    ///
    /// # Panics
    /// Outside a queue, if it has to wait.
    pub async fn receive_some_with_descriptors(
        &self,
        to: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> io::Result<usize> {
        loop {
            match receive_now(self.as_fd(), to, descriptors) {
                Ok(got) => return Ok(got),
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => self.readable().await?,
                    _ => return Err(error),
                },
            }
        }
    }

    /// Waits until there are bytes to receive, or the connection has ended. Nothing is lost if the
    /// future is dropped.
    ///
    /// # Errors
    /// The connection's failure.
    ///
    /// # Panics
    /// Outside a queue.
    pub async fn readable(&self) -> io::Result<()> {
        wait_ready(self.descriptor(), Interest::Readable).await
    }

    /// Sends all bytes, and descriptors with the first of them. One writer at a time is the
    /// caller's duty.
    ///
    /// # Errors
    /// The connection's failure.
    ///
    /// # Panics
    /// Outside a queue, if it has to wait.
    pub async fn send_with_descriptors(
        &self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let mut sent = 0;
        while sent < bytes.len() {
            let with = if sent == 0 { descriptors } else { &[] };
            match send_now(self.as_fd(), &bytes[sent..], with) {
                Ok(more) => sent += more,
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => {
                        wait_ready(self.descriptor(), Interest::Writable).await?;
                    }
                    _ => return Err(error),
                },
            }
        }
        Ok(())
    }
}

fn receive_now(
    socket: BorrowedFd<'_>,
    to: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(to)];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut parts, &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            descriptors.extend(passed);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) || descriptors.len() > DESCRIPTORS_MAX {
        descriptors.clear();
        return Err(Errno::TOOBIG.into());
    }
    Ok(received.bytes)
}

fn send_now(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    if descriptors.len() > DESCRIPTORS_MAX {
        // There may be space for one more, as the space is aligned.
        return Err(Errno::TOOBIG.into());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::TOOBIG.into());
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    Ok(sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        flags,
    )?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::{Backend, Queue};

    #[test]
    fn descriptors_arrive_with_their_bytes() {
        let (one, two) = UnixStream::pair().unwrap();
        let (one, two) = (Stream::from_fd(one.into()), Stream::from_fd(two.into()));
        let file = tempfile::tempfile().unwrap();
        let queue = Queue::new(Backend::Auto).unwrap();
        queue.block_on(async {
            let fds = [file.as_fd(), file.as_fd()];
            one.send_with_descriptors(b"hello", &fds).await.unwrap();
            one.send_with_descriptors(b"world", &[]).await.unwrap();
            let mut bytes = [0; 5];
            let mut passed = Vec::new();
            let got = two.receive_with_descriptors(&mut bytes, &mut passed).await;
            assert_eq!((got.unwrap(), &bytes), (5, b"hello"));
            assert_eq!(passed.len(), 2);
            let mut passed = Vec::new();
            let mut bytes = [0; 4];
            let got = two.receive_with_descriptors(&mut bytes, &mut passed).await;
            assert_eq!((got.unwrap(), &bytes, passed.len()), (4, b"worl", 0));
            drop(one);
            let mut bytes = [0; 4];
            let got = two.receive_with_descriptors(&mut bytes, &mut passed).await;
            assert_eq!((got.unwrap(), &bytes[..1]), (1, &b"d"[..]));
        });
    }

    #[test]
    fn too_many_descriptors_are_refused() {
        let (one, two) = UnixStream::pair().unwrap();
        let (one, two) = (Stream::from_fd(one.into()), Stream::from_fd(two.into()));
        let file = tempfile::tempfile().unwrap();
        let queue = Queue::new(Backend::Auto).unwrap();
        queue.block_on(async {
            let fds = [file.as_fd(); DESCRIPTORS_MAX];
            let more = [file.as_fd(); DESCRIPTORS_MAX + 1];
            assert!(one.send_with_descriptors(b"x", &more).await.is_err());
            one.send_with_descriptors(b"x", &fds).await.unwrap();
            one.send_with_descriptors(b"y", &fds).await.unwrap();
            let mut passed = Vec::new();
            let mut byte = [0];
            let got = two.receive_with_descriptors(&mut byte, &mut passed).await;
            assert_eq!((got.unwrap(), passed.len()), (1, DESCRIPTORS_MAX));
            let got = two.receive_with_descriptors(&mut byte, &mut passed).await;
            assert!(got.is_err() && passed.is_empty());
        });
    }
}
