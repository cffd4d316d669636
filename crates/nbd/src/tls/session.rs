//! A TLS session over a socket: the library ([`Connection`]) decides what bytes mean, this moves
//! them.
//!
//! One task reads and one writes, at the same time. Neither holds the session while it waits: what
//! is received is decrypted between two waits, and what is sent is encrypted piece by piece, each
//! sent before the next is made. Records leave in the order in which they were made, because only
//! the writing side sends, alerts too.
//!
//! Memory is bounded whatever the peer does: [`ARRIVED_BYTES`] of what was received,
//! [`SEALED_BYTES`] of what is to be sent, and the library's own limits for a record (16 KiB) and
//! for a message of the handshake (64 KiB).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, IoSlice};

use cowslip_queue::{Buf, BufMut, IoVec, Stream};

use super::Peer;
use super::connection::{Connection, SEALED_BYTES};

/// Bytes to receive at once: sixteen records.
const ARRIVED_BYTES: usize = 256 << 10;
/// Room for what records add to it: five bytes of header, 17 at the end, in each 16 KiB; and for
/// small messages.
const RECORDS_BYTES: usize = 4 << 10;

/// A session, from its handshake to its end.
pub(crate) struct Session {
    stream: Stream,
    state: RefCell<State>,
}

struct State {
    connection: Connection,
    /// Taken out while the kernel writes to it.
    memory: BufMut,
    /// Start of the bytes that have arrived and were not given to the library yet.
    start: usize,
    end: usize,
}

impl Session {
    /// A session that has yet to begin.
    pub(crate) fn new(stream: Stream, connection: Connection) -> Session {
        Session {
            stream,
            state: RefCell::new(State {
                connection,
                memory: BufMut::zeroed(ARRIVED_BYTES),
                start: 0,
                end: 0,
            }),
        }
    }

    /// Performs the handshake: each side knows the identity of the other afterwards, as far as it
    /// asked for one. A client may learn only later that its certificate was refused.
    pub(crate) async fn handshake(&self) -> io::Result<()> {
        loop {
            self.flush().await?;
            if !self.state.borrow().connection.is_handshaking() {
                return Ok(());
            }
            if self.state.borrow().is_empty() && !self.receive().await? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let digested = self.state.borrow_mut().digest();
            if let Err(error) = digested {
                // The alert that says why; if it cannot be sent, the reason stands all the same.
                drop(self.flush().await);
                return Err(error);
            }
        }
    }

    /// Returns the identity of the other side, as far as it had to prove one. Counts after the
    /// handshake.
    pub(crate) fn peer(&self) -> Peer {
        self.state.borrow().connection.peer()
    }

    /// Reads as [`Stream::read`].
    pub(crate) async fn read(&self, mut target: BufMut) -> (io::Result<usize>, BufMut) {
        loop {
            let taken = self.state.borrow_mut().take(&mut target);
            match taken {
                Ok(Some(len)) => return (Ok(len), target),
                Ok(None) => {}
                Err(error) => return (Err(error), target),
            }
            match self.receive().await {
                Ok(true) => {}
                // A peer that leaves without a word: where messages end they say themselves.
                Ok(false) => return (Ok(0), target),
                Err(error) => return (Err(error), target),
            }
        }
    }

    /// Writes as [`Stream::write_all`]. What is encrypted must not change meanwhile: memory of
    /// others is copied.
    pub(crate) async fn write_all(&self, data: &IoVec) -> io::Result<()> {
        let mut left: VecDeque<Buf> = data.to_bufs().collect();
        while !left.is_empty() {
            let sealed = self.state.borrow_mut().seal(&mut left)?;
            self.stream.write_all(Buf::from(sealed)).await?;
        }
        Ok(())
    }

    /// Sends the announcement of the end of data.
    pub(crate) async fn close(&self) {
        self.state.borrow_mut().connection.send_close_notify();
        // A peer that is gone does not need it.
        drop(self.flush().await);
    }

    pub(crate) fn shutdown(&self) {
        self.stream.shutdown();
    }

    /// Sends what the library has to say by itself.
    async fn flush(&self) -> io::Result<()> {
        let sealed = self.state.borrow_mut().seal(&mut VecDeque::new())?;
        match sealed.is_empty() {
            true => Ok(()),
            false => self.stream.write_all(Buf::from(sealed)).await,
        }
    }

    /// Receives what there is; `false` at the end. All that had arrived was taken before.
    async fn receive(&self) -> io::Result<bool> {
        let memory = {
            let mut state = self.state.borrow_mut();
            std::mem::replace(&mut state.memory, BufMut::zeroed(0))
        };
        let (received, memory) = self.stream.read(memory).await;
        let mut state = self.state.borrow_mut();
        state.memory = memory;
        (state.start, state.end) = (0, received?);
        Ok(state.end > 0)
    }
}

impl State {
    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Gives the library a part of what has arrived.
    fn digest(&mut self) -> io::Result<()> {
        let arrived = &self.memory[self.start..self.end];
        let taken = self.connection.digest(arrived)?;
        if taken == 0 {
            let text = "a TLS record that makes no sense";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        self.start += taken;
        Ok(())
    }

    /// Decrypts what has arrived into `target`, as much as it holds: how much, 0 at the end; `None`
    /// if more has to be received first.
    fn take(&mut self, target: &mut [u8]) -> io::Result<Option<usize>> {
        let mut filled = 0;
        loop {
            match self.connection.read(&mut target[filled..]) {
                // The target is full, or the peer has said that nothing more will come.
                Ok(0) => return Ok(Some(filled)),
                Ok(len) => filled += len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => match self.is_empty() {
                    true => return Ok(Some(filled).filter(|filled| *filled > 0)),
                    false => self.digest()?,
                },
                Err(error) => return Err(error),
            }
        }
    }

    /// Encrypts the front of `left`, at most [`SEALED_BYTES`] of it, and takes it away there: what
    /// is to be sent now.
    fn seal(&mut self, left: &mut VecDeque<Buf>) -> io::Result<Vec<u8>> {
        let mut planned = 0;
        let front = left.iter().take_while(|buf| {
            let begins = planned < SEALED_BYTES;
            planned += buf.len();
            begins
        });
        let slices: Vec<IoSlice<'_>> = front.map(|buf| IoSlice::new(buf)).collect();
        let mut taken = match slices.is_empty() {
            true => 0,
            // Short buffers share records.
            false => self.connection.write_vectored(&slices)?,
        };
        if planned > 0 && taken == 0 {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let mut sealed = Vec::with_capacity(taken + RECORDS_BYTES);
        while taken > 0 || left.front().is_some_and(|buf| buf.is_empty()) {
            let buf = left.pop_front().expect("what was taken was there");
            if buf.len() > taken {
                left.push_front(buf.slice(taken, buf.len() - taken));
                break;
            }
            taken -= buf.len();
        }
        self.connection.take_sealed(&mut sealed)?;
        Ok(sealed)
    }
}
