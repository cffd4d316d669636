//! Received bytes of a connection: one large buffer that many small messages are read into at once.
//!
//! Small messages and payloads are taken from the buffer; payload that is large is received
//! straight into its own aligned memory, except for the part that had arrived with its header.
//! After a large payload the buffer asks for little, so that the next large payload is not copied
//! either; as soon as small messages come in numbers again it asks for all that is there.

use std::io;

use cowslip_queue::BufMut;

use crate::wire::Wire;

/// Room for about sixty writes of 4 KiB: what a deep queue of them has sent by the time we look.
const CAPACITY_BYTES: usize = 256 << 10;
/// Bytes to ask for while large payloads go by: their headers and a few small requests among them.
const CAUTIOUS_BYTES: usize = 4 << 10;
/// Payload from this length on is received in place. Below it, copying is cheaper than a system
/// call.
pub(crate) const LARGE_BYTES: usize = 32 << 10;

/// The end of what the peer sends, clean or not.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The peer closed the connection.
    Closed,
    /// Receiving failed.
    Failed(io::Error),
}

impl From<Ended> for io::Error {
    fn from(ended: Ended) -> io::Error {
        match ended {
            Ended::Closed => io::ErrorKind::UnexpectedEof.into(),
            Ended::Failed(error) => error,
        }
    }
}

/// The receiving side of a connection.
pub(crate) struct Inbox {
    wire: Wire,
    /// Taken out while the kernel writes to it.
    memory: BufMut,
    start: usize,
    end: usize,
    /// Large payloads are going by.
    cautious: bool,
}

impl Inbox {
    pub(crate) fn new(wire: Wire) -> Inbox {
        Inbox {
            wire,
            memory: BufMut::zeroed(CAPACITY_BYTES),
            start: 0,
            end: 0,
            cautious: false,
        }
    }

    /// Returns the wire that it receives from.
    pub(crate) fn wire(&self) -> &Wire {
        &self.wire
    }

    /// Receives from `wire` from now on.
    ///
    /// # Panics
    /// If something is left of what was received before: it would be taken for what comes over
    /// `wire`.
    pub(crate) fn switch(&mut self, wire: Wire) {
        assert!(self.arrived().is_empty(), "nothing is carried over");
        self.wire = wire;
    }

    /// Returns the bytes that have arrived and were not taken yet.
    pub(crate) fn arrived(&self) -> &[u8] {
        &self.memory[self.start..self.end]
    }

    /// Takes `len` of the bytes that have arrived.
    pub(crate) fn consume(&mut self, len: usize) {
        assert!(len <= self.end - self.start, "only what arrived is taken");
        self.start += len;
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Waits until at least `len` bytes are there; `len` is at most [`LARGE_BYTES`] and a header.
    pub(crate) async fn fill(&mut self, len: usize) -> Result<(), Ended> {
        while self.end - self.start < len {
            self.receive().await?;
        }
        Ok(())
    }

    /// Receives what there is, at least one byte.
    pub(crate) async fn receive(&mut self) -> Result<(), Ended> {
        if self.start > 0 {
            // The rest is the front of one message, so little is moved.
            self.memory.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        assert!(self.end < CAPACITY_BYTES, "no message fills the buffer");
        let mut memory = std::mem::replace(&mut self.memory, BufMut::zeroed(0));
        let mut room = memory.split_off(self.end);
        let beyond = self
            .cautious
            .then(|| room.split_off(room.len().min(CAUTIOUS_BYTES)));
        let asked = room.len();
        let (received, room) = self.wire.read(room).await;
        memory.unsplit(room);
        if let Some(beyond) = beyond {
            memory.unsplit(beyond);
        }
        self.memory = memory;
        let received = received.map_err(Ended::Failed)?;
        if received == 0 {
            return Err(Ended::Closed);
        }
        self.end += received;
        // A cautious receive that came back full of small messages was too small.
        if received == asked {
            self.cautious = false;
        }
        Ok(())
    }

    /// Takes a payload into `target`, whose length it has.
    pub(crate) async fn take_into(&mut self, mut target: BufMut) -> Result<BufMut, Ended> {
        let len = target.len();
        if len < LARGE_BYTES {
            self.fill(len).await?;
            target.copy_from_slice(&self.arrived()[..len]);
            self.consume(len);
            return Ok(target);
        }
        let here = (self.end - self.start).min(len);
        target[..here].copy_from_slice(&self.arrived()[..here]);
        self.consume(here);
        let mut filled = here;
        while filled < len {
            let room = target.split_off(filled);
            let (received, room) = self.wire.read(room).await;
            target.unsplit(room);
            match received {
                Ok(0) => return Err(Ended::Closed),
                Ok(received) => filled += received,
                Err(error) => return Err(Ended::Failed(error)),
            }
        }
        self.cautious = true;
        Ok(target)
    }

    /// Takes a payload into `target` if all of it has arrived; says whether.
    pub(crate) fn take_arrived(&mut self, target: &mut BufMut) -> bool {
        let len = target.len();
        let Some(arrived) = self.arrived().get(..len) else {
            return false;
        };
        target.copy_from_slice(arrived);
        self.consume(len);
        true
    }

    /// Takes `len` bytes and forgets them.
    pub(crate) async fn skip(&mut self, len: usize) -> Result<(), Ended> {
        let mut left = len;
        loop {
            let here = left.min(self.end - self.start);
            self.consume(here);
            left -= here;
            if left == 0 {
                return Ok(());
            }
            self.receive().await?;
        }
    }

    /// Takes exactly `len` bytes, at most [`LARGE_BYTES`], as an owned message.
    pub(crate) async fn take(&mut self, len: usize) -> Result<Vec<u8>, Ended> {
        self.fill(len).await?;
        let message = self.arrived()[..len].to_vec();
        self.consume(len);
        Ok(message)
    }
}
