//! A connection on its way to another server process: its queues come to rest, its state is
//! described, and the other process goes on with it. The front end notices nothing.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use cowslip_queue::{Event, Stream, pending};
use serde::{Deserialize, Serialize};

use super::{RingState, Session, invalid};
use crate::inflight::{Shape, Table};
use crate::memory::{DirtyLog, GuestMemory, RegionDescription};
use crate::message::RingAddresses;
use crate::ring::SIZE_MAX;
use crate::server::ServerState;

/// Number of a descriptor in the list that goes with a state.
type DescriptorNumber = usize;

/// State of a connection without requests in flight, for another process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ConnectionState {
    stream: DescriptorNumber,
    features: u64,
    protocol_features: u64,
    is_writeback: bool,
    regions: Vec<(RegionDescription, DescriptorNumber)>,
    rings: Vec<RestingRing>,
    inflight: Option<(Shape, u64, DescriptorNumber)>,
    /// Offset and length in the file.
    log: Option<(u64, u64, DescriptorNumber)>,
    channel: Option<DescriptorNumber>,
}

/// A ring that no queue works on.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct RestingRing {
    size: u16,
    addresses: Option<RingAddresses>,
    base: u32,
    /// Whether the front end has started it, and by which events it says that chains are there.
    is_started: bool,
    kick: Option<DescriptorNumber>,
    call: Option<DescriptorNumber>,
    error: Option<DescriptorNumber>,
    is_enabled: bool,
    waits_for_memory: bool,
    rests: bool,
}

/// Descriptors that a state refers to.
#[derive(Default)]
struct Collected(Vec<OwnedFd>);

impl Collected {
    fn add(&mut self, descriptor: BorrowedFd<'_>) -> io::Result<DescriptorNumber> {
        self.0.push(descriptor.try_clone_to_owned()?);
        Ok(self.0.len() - 1)
    }

    fn add_some(&mut self, one: Option<&impl AsFd>) -> io::Result<Option<DescriptorNumber>> {
        one.map(|one| self.add(one.as_fd())).transpose()
    }
}

/// Descriptors that have arrived with a state. Each is taken once.
struct Arrived(Vec<Option<OwnedFd>>);

impl Arrived {
    fn take(&mut self, number: DescriptorNumber) -> io::Result<OwnedFd> {
        let place = self.0.get_mut(number).and_then(Option::take);
        place.ok_or_else(|| invalid(format!("descriptor {number} of the state is missing")))
    }

    fn take_event(&mut self, number: Option<DescriptorNumber>) -> io::Result<Option<Event>> {
        number
            .map(|number| Event::from_fd(self.take(number)?))
            .transpose()
    }
}

impl Session {
    /// Stops all queues once their requests have completed, so that they can go on, here or in
    /// another process.
    pub async fn rest(&mut self) {
        let mut stopping = Vec::new();
        for (index, state) in self.rings.iter_mut().enumerate() {
            if std::mem::take(&mut state.is_running) {
                let (completer, stopped) = pending();
                state.control.stop(completer);
                state.rests = true;
                stopping.push((index, stopped));
            }
        }
        for (index, stopped) in stopping {
            self.rings[index].base = stopped.await;
        }
    }

    /// Starts the queues that were at rest.
    ///
    /// # Errors
    /// A ring is broken, or its thread could not be started.
    pub fn go_on(&mut self) -> io::Result<()> {
        for index in 0..self.rings.len() {
            if std::mem::take(&mut self.rings[index].rests) {
                self.start_ring(index)?;
            }
        }
        Ok(())
    }

    /// Changes the server that the connection is one of; its queues are at rest.
    pub fn set_server(&mut self, server: Arc<ServerState>) {
        self.server = server;
    }

    /// Its state, with the queues at rest.
    ///
    /// # Errors
    /// The system's refusal of a copy of a descriptor.
    pub fn state(&self) -> io::Result<(ConnectionState, Vec<OwnedFd>)> {
        let mut collected = Collected::default();
        let mut regions = Vec::new();
        for (description, file) in self.guest.regions() {
            regions.push((description, collected.add(file)?));
        }
        let rings: io::Result<Vec<RestingRing>> = self
            .rings
            .iter()
            .map(|state| resting(state, &mut collected))
            .collect();
        let inflight = self.inflight.as_ref().map(|table| {
            let (shape, offset) = table.part();
            Ok((shape, offset, collected.add(table.as_fd())?))
        });
        let inflight: io::Result<_> = inflight.transpose();
        let log = self.log.as_ref().map(|log| {
            let (offset, len) = log.part();
            Ok((offset, len, collected.add(log.as_fd())?))
        });
        let log: io::Result<_> = log.transpose();
        let state = ConnectionState {
            stream: collected.add(self.stream.as_fd())?,
            features: self.features,
            protocol_features: self.protocol_features,
            is_writeback: self.server.device.is_writeback(),
            regions,
            rings: rings?,
            inflight: inflight?,
            log: log?,
            channel: collected.add_some(self.channel.as_ref())?,
        };
        Ok((state, collected.0))
    }

    /// A connection of another process, at rest.
    ///
    /// # Errors
    /// See [`crate::Server::connection_of`].
    pub fn of_state(
        server: Arc<ServerState>,
        state: &ConnectionState,
        descriptors: Vec<OwnedFd>,
    ) -> io::Result<Session> {
        let mut arrived = Arrived(descriptors.into_iter().map(Some).collect());
        let stream = Stream::from_fd(arrived.take(state.stream)?);
        let mut session = Session::new(server, stream);
        let more = state.features & !session.server.device.features();
        let protocol_more = state.protocol_features & !crate::message::feature::ALL;
        if more != 0 || protocol_more != 0 {
            return Err(invalid(format!(
                "the front end uses features {more:#x} and protocol features {protocol_more:#x}, \
                 which this server does not offer"
            )));
        }
        session.features = state.features;
        session.protocol_features = state.protocol_features;
        let mut guest = GuestMemory::default();
        for (description, file) in &state.regions {
            guest.add(*description, arrived.take(*file)?.as_fd())?;
        }
        session.guest = Arc::new(guest);
        if let Some((shape, offset, file)) = state.inflight {
            let part = (offset, shape.bytes());
            session.inflight = Some(Table::map(arrived.take(file)?.as_fd(), part, shape)?);
        }
        if let Some((offset, len, file)) = state.log {
            let log = DirtyLog::map(arrived.take(file)?.as_fd(), offset, len)?;
            session.log = Some(Arc::new(log));
        }
        let channel = state.channel.map(|number| arrived.take(number));
        session.channel = channel.transpose()?.map(Stream::from_fd);
        for (index, ring) in state.rings.iter().enumerate() {
            session.restore_ring(index, ring, &mut arrived)?;
        }
        session.server.device.set_writeback(state.is_writeback);
        Ok(session)
    }

    fn restore_ring(
        &mut self,
        index: usize,
        ring: &RestingRing,
        arrived: &mut Arrived,
    ) -> io::Result<()> {
        let count = self.rings.len();
        let (kick, call) = (
            arrived.take_event(ring.kick)?,
            arrived.take_event(ring.call)?,
        );
        let error = arrived.take_event(ring.error)?;
        let Some(state) = self.rings.get_mut(index) else {
            return match ring.is_started || ring.addresses.is_some() {
                true => Err(invalid(format!(
                    "the front end uses queue {index}, and this server has {count}"
                ))),
                false => Ok(()),
            };
        };
        if ring.size > SIZE_MAX {
            return Err(invalid(format!("ring {index}: {} descriptors", ring.size)));
        }
        state.size = ring.size;
        state.addresses = ring.addresses;
        state.base = ring.base;
        state.started = ring.is_started.then_some(kick);
        state.waits_for_memory = ring.waits_for_memory;
        state.rests = ring.rests;
        state.control.set_call(call);
        state.control.set_error(error);
        state.control.set_enabled(ring.is_enabled);
        if ring.rests && !self.is_in_memory(index) {
            return Err(invalid(format!(
                "ring {index} is not in the guest's memory"
            )));
        }
        Ok(())
    }
}

fn resting(state: &RingState, collected: &mut Collected) -> io::Result<RestingRing> {
    let (call, error, is_enabled) = state.control.settings();
    let kick = state.started.as_ref().and_then(Option::as_ref);
    Ok(RestingRing {
        size: state.size,
        addresses: state.addresses,
        base: state.base,
        is_started: state.started.is_some(),
        kick: collected.add_some(kick)?,
        call: collected.add_some(call.as_ref())?,
        error: collected.add_some(error.as_ref())?,
        is_enabled,
        waits_for_memory: state.waits_for_memory,
        rests: state.rests,
    })
}
