//! A connection to a server: its messages, and the memory that it is passed.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cowslip_queue::SharedMemory;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::queue::FrontQueue;
use crate::ring::{DEVICE_AT, DRIVER_AT};
use crate::{EVENT_IDX, GUEST, MEMORY_BYTES, PACKED, PROTOCOL, USER};

/// Longest answer that is received, in bytes.
const ANSWER_BYTES_MAX: u32 = 1 << 16;

/// A connection to a server.
pub struct Front {
    stream: UnixStream,
    /// The guest's memory as a file.
    pub file: OwnedFd,
    /// The guest's memory.
    pub memory: Arc<SharedMemory>,
    /// The negotiated features.
    pub features: u64,
}

/// Memory of a guest, of this length in bytes.
///
/// # Errors
/// The system's.
pub fn memory_file(len: u64) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, len)?;
    Ok(file)
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the server {what}"))
}

fn u64_of(payload: &[u8]) -> io::Result<u64> {
    let bytes = payload.try_into();
    bytes
        .map(u64::from_le_bytes)
        .map_err(|_| broken("answers with another message"))
}

/// Receives 0 as the answer of a message: success.
fn taken(answer: u64) -> io::Result<()> {
    match answer {
        0 => Ok(()),
        _ => Err(broken("refuses a message")),
    }
}

/// Description of a slot of memory.
fn region(at: u64, len: u64) -> Vec<u8> {
    let fields = [0, GUEST + at, len, USER + at, 0];
    fields.into_iter().flat_map(u64::to_le_bytes).collect()
}

impl Front {
    /// Connects, negotiates and passes the memory.
    ///
    /// # Errors
    /// As [`Front::connect_with`].
    pub fn connect(path: &Path, features: u64) -> io::Result<Front> {
        let file = memory_file(MEMORY_BYTES)?;
        Front::connect_with(path, features, file)
    }

    /// The same with a guest's memory that there is already.
    ///
    /// # Errors
    /// There is no server, it does not offer these features, or breaks the protocol.
    pub fn connect_with(path: &Path, features: u64, file: OwnedFd) -> io::Result<Front> {
        let stream = UnixStream::connect(path)?;
        let timeout = Some(Duration::from_secs(30));
        stream.set_read_timeout(timeout)?;
        let memory = SharedMemory::map(file.as_fd(), 0, MEMORY_BYTES)?;
        let mut front = Front {
            stream,
            file,
            memory,
            features: 0,
        };
        let offered = front.ask_u64(1)?;
        if offered & features != features {
            return Err(broken(&format!(
                "offers {offered:#x} of {features:#x} alone"
            )));
        }
        front.features = features | PROTOCOL;
        front.send(3, &[], &[]);
        // Queues, acknowledgements, a channel back, configuration, tables, slots of memory.
        let protocol = front.ask_u64(15)? & 0x9229;
        front.send(16, &protocol.to_le_bytes(), &[]);
        front.send(2, &front.features.to_le_bytes(), &[]);
        front.add_memory()?;
        Ok(front)
    }

    fn add_memory(&mut self) -> io::Result<()> {
        let file = self.file.try_clone()?;
        self.add_region(0, MEMORY_BYTES, &file)
    }

    /// Adds a slot of memory: `len` bytes of a file, behind `at` bytes of the guest's memory.
    ///
    /// # Errors
    /// It is refused.
    pub fn add_region(&mut self, at: u64, len: u64, file: &OwnedFd) -> io::Result<()> {
        taken(self.send_acked(37, &region(at, len), &[file.as_fd()])?)
    }

    /// Removes a slot of memory that was added so.
    ///
    /// # Errors
    /// It is refused.
    pub fn remove_region(&mut self, at: u64, len: u64) -> io::Result<()> {
        taken(self.send_acked(38, &region(at, len), &[])?)
    }

    /// Ends the connection; messages fail from then on.
    ///
    /// # Errors
    /// The system's.
    pub fn disconnect(&self) -> io::Result<()> {
        self.stream.shutdown(std::net::Shutdown::Both)
    }

    /// Sends bytes as they are.
    pub fn send_bytes(&mut self, bytes: &[u8]) {
        // The server may have closed the connection already.
        drop(self.stream.write_all(bytes));
    }

    /// Sends bytes until the server has taken none for a while.
    ///
    /// # Errors
    /// The system's.
    pub fn send_bytes_for(&mut self, bytes: &[u8], patience: Duration) -> io::Result<()> {
        self.stream.set_write_timeout(Some(patience))?;
        self.send_bytes(bytes);
        Ok(())
    }

    fn message(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for field in [code, 1 | flags, payload.len() as u32] {
            bytes.extend(field.to_le_bytes());
        }
        bytes.extend(payload);
        bytes
    }

    fn send_flagged(&mut self, message: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fits =
            descriptors.is_empty() || control.push(SendAncillaryMessage::ScmRights(descriptors));
        assert!(fits, "a message has at most 16 descriptors");
        let parts = [IoSlice::new(message)];
        // The server may have closed the connection already.
        let _sent = rustix::io::retry_on_intr(|| {
            sendmsg(&self.stream, &parts, &mut control, SendFlags::NOSIGNAL)
        });
    }

    /// Sends a message with descriptors.
    pub fn send(&mut self, code: u32, payload: &[u8], descriptors: &[BorrowedFd<'_>]) {
        self.send_flagged(&Front::message(code, 0, payload), descriptors);
    }

    /// Sends a message that asks for an answer: 0 is success.
    ///
    /// # Errors
    /// There is no such answer.
    pub fn send_acked(
        &mut self,
        code: u32,
        payload: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<u64> {
        self.send_flagged(&Front::message(code, 8, payload), descriptors);
        u64_of(&self.answer()?.0)
    }

    fn answer(&mut self) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
        self.receive().ok_or_else(|| broken("does not answer"))
    }

    /// Receives an answer: its payload and descriptor. `None` is the end of the connection.
    pub fn receive(&mut self) -> Option<(Vec<u8>, Option<OwnedFd>)> {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut header)];
        let received = rustix::io::retry_on_intr(|| {
            recvmsg(&self.stream, &mut parts, &mut control, RecvFlags::WAITALL)
        });
        if received.ok()?.bytes != 12 {
            return None;
        }
        let passed = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let len = u32::from_le_bytes(*header.last_chunk()?);
        if len > ANSWER_BYTES_MAX {
            return None;
        }
        let mut payload = vec![0; len as usize];
        self.stream.read_exact(&mut payload).ok()?;
        Some((payload, passed))
    }

    /// Sends a message and receives its answer.
    ///
    /// # Errors
    /// There is none.
    pub fn ask(&mut self, code: u32, payload: &[u8]) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
        self.send(code, payload, &[]);
        self.answer()
    }

    /// Sends a message whose answer is a number.
    ///
    /// # Errors
    /// There is no such answer.
    pub fn ask_u64(&mut self, code: u32) -> io::Result<u64> {
        u64_of(&self.ask(code, &[])?.0)
    }

    /// The first bytes of the configuration space of the device.
    ///
    /// # Errors
    /// The answer is shorter.
    pub fn config(&mut self, len: u32) -> io::Result<Vec<u8>> {
        let mut payload = Vec::new();
        for field in [0, len, 0] {
            payload.extend(field.to_le_bytes());
        }
        payload.resize(12 + len as usize, 0);
        let answer = self.ask(24, &payload)?.0;
        let config = answer.get(12..);
        config
            .map(<[u8]>::to_vec)
            .ok_or_else(|| broken("has no configuration"))
    }

    fn is_packed(&self) -> bool {
        self.features & PACKED != 0
    }

    /// Has the server make a table of requests in flight; returns it with its description.
    ///
    /// # Errors
    /// It makes none.
    pub fn get_inflight(&mut self, queues: u16, size: u16) -> io::Result<(OwnedFd, Vec<u8>)> {
        let mut payload = vec![0; 16];
        payload.extend(queues.to_le_bytes());
        payload.extend(size.to_le_bytes());
        payload.extend([0; 4]);
        let (description, file) = self.ask(31, &payload)?;
        let file = file.ok_or_else(|| broken("makes no table of requests in flight"))?;
        Ok((file, description))
    }

    /// Passes a table that another server has used.
    ///
    /// # Errors
    /// It is refused.
    pub fn set_inflight(&mut self, table: &OwnedFd, description: &[u8]) -> io::Result<()> {
        taken(self.send_acked(32, description, &[table.as_fd()])?)
    }

    /// Makes a queue and starts it.
    ///
    /// # Errors
    /// The server refuses it.
    pub fn queue(&mut self, index: u32, size: u16) -> io::Result<FrontQueue> {
        let kinds = (self.is_packed(), self.features & EVENT_IDX != 0);
        let mut queue = FrontQueue::new(&self.memory, (index, size), kinds)?;
        let base = if self.is_packed() { 0x8000_8000 } else { 0 };
        self.start_queue(&mut queue, base)?;
        Ok(queue)
    }

    /// Starts a queue at a place in its ring.
    ///
    /// # Errors
    /// The server refuses it.
    pub fn start_queue(&mut self, queue: &mut FrontQueue, base: u32) -> io::Result<()> {
        let pair = |value: u32| [queue.index.to_le_bytes(), value.to_le_bytes()].concat();
        taken(self.send_acked(8, &pair(u32::from(queue.ring.size)), &[])?)?;
        taken(self.send_acked(10, &pair(base), &[])?)?;
        let start = USER + queue.ring.start as u64;
        let mut addresses = pair(0);
        for part in [0, DEVICE_AT as u64, DRIVER_AT as u64] {
            addresses.extend((start + part).to_le_bytes());
        }
        addresses.extend(0u64.to_le_bytes());
        taken(self.send_acked(9, &addresses, &[])?)?;
        let index = u64::from(queue.index).to_le_bytes();
        taken(self.send_acked(13, &index, &[queue.call_event().as_fd()])?)?;
        taken(self.send_acked(12, &index, &[queue.kick_event().as_fd()])?)?;
        taken(self.send_acked(18, &pair(1), &[])?)
    }

    /// Stops a queue; its requests have completed then. Returns its place.
    ///
    /// # Errors
    /// The server does not answer so.
    pub fn stop_queue(&mut self, index: u32) -> io::Result<u32> {
        let payload = [index.to_le_bytes(), 0u32.to_le_bytes()].concat();
        // The number of the queue, and the place.
        let answer = u64_of(&self.ask(11, &payload)?.0)?;
        Ok((answer >> 32) as u32)
    }
}
