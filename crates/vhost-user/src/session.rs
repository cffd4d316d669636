//! A connection of a front end: what each message does, and the queues that it has started.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use cowslip_queue::{Event, Stream, pending};
use futures_util::future::{Either, select};
use smallvec::SmallVec;

use crate::device::{WRITEBACK_AT, feature};
use crate::inflight::{Shape, Table};
use crate::memory::{DirtyLog, GuestMemory, RegionDescription};
use crate::message::{
    self, HEADER_BYTES, Header, InflightDescription, Message, RingAddresses, encode,
};
use crate::ring::{Features, Layout, Ring, SIZE_MAX, part_bytes};
use crate::server::{ServerEvent, ServerHandle, ServerState};
use crate::worker::{Control, Log, Setup, Worker};

mod handover;

pub use handover::ConnectionState;

/// A ring, as messages have described it so far.
#[derive(Default)]
struct RingState {
    size: u16,
    addresses: Option<RingAddresses>,
    base: u32,
    /// Whether the front end has started it, and the events by which it says that chains are
    /// there; none if it expects that the ring is polled.
    started: Option<Option<Event>>,
    control: Arc<Control>,
    /// Whether a queue works on it.
    is_running: bool,
    /// Whether it has lost its memory while a queue worked on it: it goes on as soon as that is
    /// there again.
    waits_for_memory: bool,
    /// Whether the queue was stopped for a handover, and goes on when that is over.
    rests: bool,
}

/// A connection.
pub(crate) struct Session {
    server: Arc<ServerState>,
    stream: Stream,
    features: u64,
    protocol_features: u64,
    guest: Arc<GuestMemory>,
    rings: Vec<RingState>,
    inflight: Option<Table>,
    log: Option<Arc<DirtyLog>>,
    /// The channel for messages of the server.
    channel: Option<Stream>,
    size_known: SizeKnown,
}

/// Whether the guest knows the size of the disk. One that had another server may know another size:
/// front ends do not look again when they connect again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SizeKnown {
    Yes,
    /// It is to be informed once its rings work.
    Perhaps,
    /// It is to be informed now.
    No,
}

/// The end of a connection that is not the front end's leaving.
pub(crate) type SessionError = io::Error;

fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

/// Waits for the front end, but not beyond the end of the server, nor for long if that is to be
/// handed over.
async fn unless_stopped<T>(
    handle: &ServerHandle,
    transfer: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    let (transfer, stopped) = (
        std::pin::pin!(transfer),
        std::pin::pin!(handle.out_of_patience()),
    );
    match select(transfer, stopped).await {
        Either::Left((outcome, _)) => outcome,
        Either::Right(_) => Err(invalid("the server ends in the middle of a message")),
    }
}

/// An answer, with the descriptor that goes with it.
struct Reply {
    payload: Vec<u8>,
    descriptor: Option<OwnedFd>,
}

impl Reply {
    fn number(value: u64) -> Option<Reply> {
        Some(Reply::bytes(value.to_le_bytes().to_vec()))
    }

    fn bytes(payload: Vec<u8>) -> Reply {
        Reply {
            payload,
            descriptor: None,
        }
    }
}

impl Session {
    pub fn new(server: Arc<ServerState>, stream: Stream) -> Session {
        let queues = usize::from(server.device.options.queues);
        Session {
            server,
            stream,
            features: 0,
            protocol_features: 0,
            guest: Arc::default(),
            rings: (0..queues).map(|_| RingState::default()).collect(),
            inflight: None,
            log: None,
            channel: None,
            size_known: SizeKnown::Yes,
        }
    }

    /// Answers messages until the front end leaves or the server ends its work. The queues go on
    /// until [`Session::end`] or [`Session::rest`].
    ///
    /// # Errors
    /// The front end breaks the protocol, or the connection fails.
    pub async fn run(&mut self, handle: &ServerHandle) -> Result<(), SessionError> {
        while handle.is_serving() {
            // Only a wait is given up for a change, never a message that has begun.
            if !self.next_message(handle).await? {
                if handle.is_serving() {
                    unless_stopped(handle, self.config_changed()).await?;
                }
                continue;
            }
            let Some((header, payload, descriptors)) =
                unless_stopped(handle, self.receive()).await?
            else {
                return Ok(());
            };
            // What a message asks for is done to its end: a queue that is being stopped is waited
            // for.
            let answer = self.answer(header, &payload, descriptors).await?;
            if let Some((bytes, descriptor)) = answer {
                let descriptors: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
                let sent = self.stream.send_with_descriptors(&bytes, &descriptors);
                unless_stopped(handle, sent).await?;
            }
            if self.size_known == SizeKnown::No {
                self.size_known = SizeKnown::Yes;
                unless_stopped(handle, self.config_changed()).await?;
            }
        }
        Ok(())
    }

    /// Receives a message; none at the end of the connection.
    async fn receive(&self) -> Result<Option<(Header, Vec<u8>, Vec<OwnedFd>)>, SessionError> {
        let mut descriptors = Vec::new();
        let mut header = [0; HEADER_BYTES];
        let received = self
            .stream
            .receive_with_descriptors(&mut header, &mut descriptors);
        match received.await? {
            0 => return Ok(None),
            HEADER_BYTES => {}
            some => return Err(invalid(format!("a message of {some} bytes"))),
        }
        let header = Header::parse(header).map_err(|error| invalid(error.0))?;
        let mut payload = vec![0; header.len as usize];
        let received = self
            .stream
            .receive_with_descriptors(&mut payload, &mut descriptors);
        if received.await? != payload.len() {
            return Err(invalid(format!("message {} ends too early", header.code)));
        }
        Ok(Some((header, payload, descriptors)))
    }

    /// Waits for a message. Returns false if the server or the disk has changed before.
    async fn next_message(&self, handle: &ServerHandle) -> Result<bool, SessionError> {
        let readable = std::pin::pin!(self.stream.readable());
        let changed = std::pin::pin!(handle.changed());
        match select(readable, changed).await {
            Either::Left((outcome, _)) => outcome.map(|()| true),
            Either::Right(_) => Ok(false),
        }
    }

    /// Does what a message asks for. Returns the answer, if there is to be one, and the descriptor
    /// that goes with it.
    async fn answer(
        &mut self,
        header: Header,
        payload: &[u8],
        descriptors: Vec<OwnedFd>,
    ) -> Result<Option<(Vec<u8>, Option<OwnedFd>)>, SessionError> {
        let message = Message::parse(header.code, payload).map_err(|error| invalid(error.0))?;
        if !message.descriptors().contains(&descriptors.len()) {
            return Err(invalid(format!(
                "message {} comes with {} descriptors",
                header.code,
                descriptors.len()
            )));
        }
        let outcome = self.act(message, payload.len(), descriptors).await;
        // The message that negotiates answers may ask for one.
        let wants_reply =
            header.needs_reply() && self.protocol_features & message::feature::REPLY_ACK != 0;
        let reply = match outcome {
            Ok(Some(reply)) => reply,
            Ok(None) if wants_reply => Reply::bytes(0u64.to_le_bytes().to_vec()),
            Ok(None) => return Ok(None),
            // The front end can go on without what it asked for, if it is listening.
            Err(error) if wants_reply => {
                self.report(&error);
                Reply::bytes(1u64.to_le_bytes().to_vec())
            }
            Err(error) => return Err(error),
        };
        Ok(Some((header.reply(&reply.payload), reply.descriptor)))
    }

    fn report(&self, error: &io::Error) {
        (self.server.observer)(&ServerEvent::Refused {
            reason: error.to_string(),
        });
    }

    /// Does what a message asks for. `None` is success without an answer of its own.
    async fn act(
        &mut self,
        message: Message,
        payload_len: usize,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<Option<Reply>, SessionError> {
        let descriptor = descriptors.pop();
        match message {
            Message::GetFeatures => return Ok(Reply::number(self.server.device.features())),
            Message::GetProtocolFeatures => return Ok(Reply::number(message::feature::ALL)),
            Message::GetQueueNum => return Ok(Reply::number(self.rings.len() as u64)),
            Message::GetMaxMemSlots => {
                return Ok(Reply::number(crate::memory::REGIONS_MAX as u64));
            }
            Message::SetFeatures(features) => self.set_features(features).await?,
            Message::SetProtocolFeatures(features) => {
                let more = features & !message::feature::ALL;
                if more != 0 {
                    return Err(invalid(format!(
                        "protocol features {more:#x} were not offered"
                    )));
                }
                self.protocol_features = features;
            }
            Message::SetOwner => {}
            Message::ResetOwner | Message::ResetDevice => {
                self.stop_rings().await;
                let controls = self.rings.iter().map(|state| &state.control);
                controls.for_each(|control| control.set_enabled(false));
            }
            Message::SetMemTable(regions) => {
                descriptors.extend(descriptor);
                let mut guest = GuestMemory::default();
                for (region, file) in regions.into_iter().zip(&descriptors) {
                    guest.add(region, file.as_fd())?;
                }
                self.set_guest(guest).await?;
            }
            Message::AddMemReg(region) => {
                let file = descriptor.ok_or_else(|| invalid("a region without a file"))?;
                self.add_region(region, &file).await?;
            }
            Message::RemMemReg(region) => {
                let mut guest = GuestMemory::clone(&self.guest);
                guest.remove(&region)?;
                self.set_guest(guest).await?;
            }
            Message::SetLogBase { len, offset } => {
                let file = descriptor.ok_or_else(|| invalid("a log without a file"))?;
                self.log = Some(Arc::new(DirtyLog::map(file.as_fd(), offset, len)?));
                self.restart_rings().await?;
                return Ok(Reply::number(0));
            }
            // The descriptor is one to notify of writes to the log: there is nobody who needs it.
            Message::SetLogFd => {}
            Message::SetBackendReqFd => {
                let channel = descriptor.ok_or_else(|| invalid("no channel"))?;
                self.channel = Some(Stream::from_fd(channel));
            }
            Message::GetConfig { offset, len, .. } => {
                return Ok(Some(self.get_config(offset, len)));
            }
            Message::SetConfig { offset, bytes } => self.set_config(offset, &bytes)?,
            Message::GetInflightFd(wanted) => {
                return self.get_inflight(wanted, payload_len).map(Some);
            }
            Message::SetInflightFd(description) => {
                let file = descriptor.ok_or_else(|| invalid("a table without a file"))?;
                let shape = self.shape(description)?;
                let part = (description.offset, description.len);
                let table = Table::map(file.as_fd(), part, shape)?;
                if table.is_writethrough() {
                    self.server.device.set_writeback(false);
                }
                self.inflight = Some(table);
                self.size_known = SizeKnown::Perhaps;
            }
            ring => return self.act_on_ring(ring, descriptor).await,
        }
        Ok(None)
    }

    /// The part of [`Session::act`] that concerns one ring.
    async fn act_on_ring(
        &mut self,
        message: Message,
        descriptor: Option<OwnedFd>,
    ) -> Result<Option<Reply>, SessionError> {
        let event = || descriptor.map(Event::from_fd).transpose();
        match message {
            Message::SetVringNum { ring, size } => {
                let state = self.stopped_ring(ring)?;
                let size = u16::try_from(size).unwrap_or(0);
                if size == 0 || size > SIZE_MAX {
                    return Err(invalid(format!("ring {ring}: {size} descriptors")));
                }
                state.size = size;
            }
            Message::SetVringAddr { ring, addresses } => {
                let is_running = self.ring(ring)?.is_running;
                self.ring(ring)?.addresses = Some(addresses);
                if is_running {
                    // The log of its pages begins or ends.
                    self.restart_rings().await?;
                }
            }
            Message::SetVringBase { ring, base } => self.stopped_ring(ring)?.base = base,
            Message::GetVringBase { ring } => {
                self.ring(ring)?;
                self.stop_ring(ring as usize).await;
                let state = &mut self.rings[ring as usize];
                state.started = None;
                let base = state.base;
                let payload = [ring.to_le_bytes(), base.to_le_bytes()].concat();
                return Ok(Some(Reply::bytes(payload)));
            }
            Message::SetVringKick { ring, .. } => {
                let kick = event()?;
                self.ring(ring)?;
                self.stop_ring(ring as usize).await;
                self.rings[ring as usize].started = Some(kick);
                if self.protocol_was_not_negotiated() {
                    self.rings[ring as usize].control.set_enabled(true);
                }
                self.start_ring(ring as usize)?;
            }
            Message::SetVringCall { ring, .. } => self.ring(ring)?.control.set_call(event()?),
            Message::SetVringErr { ring, .. } => self.ring(ring)?.control.set_error(event()?),
            Message::SetVringEnable { ring, is_enabled } => {
                self.ring(ring)?.control.set_enabled(is_enabled);
                if is_enabled && self.size_known == SizeKnown::Perhaps {
                    self.size_known = SizeKnown::No;
                }
            }
            other => return Err(invalid(format!("{other:?} concerns no ring"))),
        }
        Ok(None)
    }

    fn protocol_was_not_negotiated(&self) -> bool {
        self.features & feature::PROTOCOL == 0
    }

    fn ring(&mut self, ring: u32) -> Result<&mut RingState, SessionError> {
        let count = self.rings.len();
        self.rings
            .get_mut(ring as usize)
            .ok_or_else(|| invalid(format!("ring {ring} of {count}")))
    }

    fn stopped_ring(&mut self, ring: u32) -> Result<&mut RingState, SessionError> {
        let state = self.ring(ring)?;
        match state.is_running {
            true => Err(invalid(format!("ring {ring} is changed while it works"))),
            false => Ok(state),
        }
    }

    async fn set_features(&mut self, features: u64) -> Result<(), SessionError> {
        let more = features & !self.server.device.features();
        if more != 0 {
            return Err(invalid(format!("features {more:#x} were not offered")));
        }
        let changed = std::mem::replace(&mut self.features, features) ^ features;
        if changed != 0 {
            // While queues work, the log begins or ends.
            self.restart_rings().await?;
        }
        Ok(())
    }

    /// Requests in flight keep the memory that they have; those that follow use the new one.
    async fn set_guest(&mut self, guest: GuestMemory) -> Result<(), SessionError> {
        self.guest = Arc::new(guest);
        for index in 0..self.rings.len() {
            let was_running = self.rings[index].is_running;
            if was_running {
                self.stop_ring(index).await;
            }
            if !was_running && !self.rings[index].waits_for_memory {
                continue;
            }
            // Front ends replace a region by taking it away first.
            let is_there = self.is_in_memory(index);
            self.rings[index].waits_for_memory = !is_there;
            if is_there {
                self.start_ring(index)?;
            }
        }
        Ok(())
    }

    /// Whether the guest's memory has all parts of a ring.
    fn is_in_memory(&self, index: usize) -> bool {
        let is_packed = self.features & feature::RING_PACKED != 0;
        let addresses = self.rings[index].addresses;
        addresses.is_some_and(|addresses| self.layout(index, addresses, is_packed).is_ok())
    }

    async fn add_region(
        &mut self,
        region: RegionDescription,
        file: &OwnedFd,
    ) -> Result<(), SessionError> {
        let mut guest = GuestMemory::clone(&self.guest);
        guest.add(region, file.as_fd())?;
        self.set_guest(guest).await
    }

    fn get_config(&self, offset: u32, len: u32) -> Reply {
        let config = self.server.device.config();
        let mut payload = Vec::new();
        for field in [offset, len, 0] {
            payload.extend(field.to_le_bytes());
        }
        let bytes = (offset..offset.saturating_add(len))
            .map(|at| config.get(at as usize).copied().unwrap_or(0));
        payload.extend(bytes);
        Reply::bytes(payload)
    }

    fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<(), SessionError> {
        let is_writeback = match (offset, bytes) {
            (WRITEBACK_AT, [0]) => false,
            (WRITEBACK_AT, [1]) => true,
            _ => {
                let len = bytes.len();
                return Err(invalid(format!(
                    "{len} bytes at {offset} of the configuration cannot be changed"
                )));
            }
        };
        if let Some(table) = &self.inflight {
            table.set_writethrough(!is_writeback);
        }
        self.server.device.set_writeback(is_writeback);
        Ok(())
    }

    fn shape(&self, description: InflightDescription) -> Result<Shape, SessionError> {
        let InflightDescription {
            queues, queue_size, ..
        } = description;
        if queues == 0
            || usize::from(queues) > self.rings.len()
            || queue_size == 0
            || queue_size > SIZE_MAX
        {
            return Err(invalid(format!(
                "a table of requests in flight for {queues} queues of {queue_size} descriptors"
            )));
        }
        Ok(Shape {
            queues,
            queue_size,
            is_packed: self.features & feature::RING_PACKED != 0,
        })
    }

    fn get_inflight(
        &mut self,
        wanted: InflightDescription,
        payload_len: usize,
    ) -> Result<Reply, SessionError> {
        let shape = self.shape(wanted)?;
        let file = Table::make_file(shape)?;
        let description = InflightDescription {
            len: shape.bytes(),
            offset: 0,
            ..wanted
        };
        let table = Table::map(file.as_fd(), (0, shape.bytes()), shape)?;
        table.set_writethrough(!self.server.device.is_writeback());
        self.inflight = Some(table);
        Ok(Reply {
            payload: description.encode(payload_len),
            descriptor: Some(file),
        })
    }

    /// Stops all rings, and starts them again with what has changed.
    async fn restart_rings(&mut self) -> Result<(), SessionError> {
        for index in 0..self.rings.len() {
            if self.rings[index].is_running {
                self.stop_ring(index).await;
                self.start_ring(index)?;
            }
        }
        Ok(())
    }

    async fn stop_rings(&mut self) {
        for index in 0..self.rings.len() {
            self.stop_ring(index).await;
            self.rings[index].started = None;
        }
    }

    /// Stops a ring, if a queue works on it, once all its requests have completed.
    async fn stop_ring(&mut self, index: usize) {
        let state = &mut self.rings[index];
        state.waits_for_memory = false;
        if std::mem::take(&mut state.is_running) {
            let (completer, stopped) = pending();
            state.control.stop(completer);
            state.base = stopped.await;
        }
    }

    /// Starts a queue on a ring that the front end has started.
    fn start_ring(&mut self, index: usize) -> Result<(), SessionError> {
        let failed = |why: String| invalid(format!("ring {index}: {why}"));
        let is_packed = self.features & feature::RING_PACKED != 0;
        let state = &self.rings[index];
        let (Some(kick), Some(addresses)) = (state.started.clone(), state.addresses) else {
            return Err(failed("it is started without addresses".to_string()));
        };
        let layout = self.layout(index, addresses, is_packed).map_err(failed)?;
        let features = Features {
            event_idx: self.features & feature::EVENT_IDX != 0,
            indirect: self.features & feature::INDIRECT_DESC != 0,
        };
        let number = index as u16;
        let table = self.inflight.as_ref().and_then(|table| table.queue(number));
        let outlives = table.is_some();
        let ring = Ring::start(&layout, (state.base, is_packed), features, table)
            .map_err(|broken| failed(broken.0))?;
        let is_logging = self.features & feature::LOG_ALL != 0;
        let log = self.log.as_ref().filter(|_| is_logging);
        let log = log.map(|pages| Log {
            pages: Arc::clone(pages),
            ring: self.logged_parts(index, addresses, is_packed),
        });
        let setup = Setup {
            index: number,
            device: Arc::clone(&self.server.device),
            ring,
            guest: Arc::clone(&self.guest),
            features: self.features,
            kick,
            log,
            outlives,
            observer: Arc::clone(&self.server.observer),
        };
        let control = Arc::clone(&state.control);
        self.server
            .run(index, move || Worker::new(setup, control).run())?;
        self.rings[index].is_running = true;
        Ok(())
    }

    /// Guest addresses and lengths of what the device writes of a ring, if that is logged. The
    /// front end names the device's part; of a packed ring the descriptors are written, too.
    fn logged_parts(
        &self,
        index: usize,
        addresses: RingAddresses,
        is_packed: bool,
    ) -> SmallVec<[(u64, u64); 2]> {
        let [descriptors, _, device] = part_bytes(self.rings[index].size, is_packed);
        let mut parts = SmallVec::new();
        if addresses.is_logged {
            parts.push((addresses.log, device));
            let at = self.guest.guest_of_user(addresses.descriptors, descriptors);
            parts.extend(at.filter(|_| is_packed).map(|at| (at, descriptors)));
        }
        parts
    }

    /// Finds the parts of a ring in the guest's memory.
    fn layout(
        &self,
        index: usize,
        addresses: RingAddresses,
        is_packed: bool,
    ) -> Result<Layout, String> {
        let size = self.rings[index].size;
        let [descriptors, driver, device] = part_bytes(size, is_packed);
        let place = |name: &str, address: u64, len: u64| {
            let found = self.guest.place_of_user(address, len);
            found.ok_or_else(|| {
                format!("the {name}, {len} bytes at {address:#x}, is in no memory region")
            })
        };
        Ok(Layout {
            size,
            descriptors: place("descriptor area", addresses.descriptors, descriptors)?,
            driver: place("driver area", addresses.available, driver)?,
            device: place("device area", addresses.used, device)?,
        })
    }

    /// Lets the front end know that the configuration has changed.
    async fn config_changed(&self) -> Result<(), SessionError> {
        if let Some(channel) = &self.channel {
            let message = encode(message::code::CONFIG_CHANGE, 0, &[]);
            if let Err(error) = channel.send_with_descriptors(&message, &[]).await {
                self.report(&error);
            }
        }
        Ok(())
    }

    /// Ends the connection: the queues complete what they have taken, and stop.
    pub async fn end(mut self) {
        self.stop_rings().await;
        self.stream.shutdown();
    }
}
