//! A queue at work: requests are taken from its ring, carried out together, given back as they
//! complete, and the driver is notified once for all that completed in a turn.

use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use cowslip_block::file::Durability;
use cowslip_queue::{Completer, Event, Sleep, Watch};
use futures_util::stream::{FuturesUnordered, Stream};
use smallvec::SmallVec;

use crate::device::{Device, feature};
use crate::memory::{DirtyLog, GuestMemory};
use crate::order::InOrder;
use crate::request::{Completed, Request};
use crate::ring::{Broken, Ring, Slot};
use crate::server::{Observer, ServerEvent};

/// Bytes of requests that a queue has in flight at most: it takes no further request above that. A
/// long request counts with what it may need beside the guest's memory.
pub const BYTES_IN_FLIGHT_MAX: u64 = 64 << 20;

/// How often a ring is looked at whose front end expects that it is polled.
const POLL_PAUSE: Duration = Duration::from_millis(1);

/// How a queue works, fixed from its start on.
pub(crate) struct Setup {
    pub index: u16,
    pub device: Arc<Device>,
    pub ring: Ring,
    pub guest: Arc<GuestMemory>,
    /// Features that the driver has accepted.
    pub features: u64,
    /// Events of the driver: chains are available. Without, the ring is polled.
    pub kick: Option<Event>,
    pub log: Option<Log>,
    /// Whether the front end keeps a table of requests in flight.
    pub outlives: bool,
    pub observer: Observer,
}

/// Where writes to the guest's memory are logged.
#[derive(Clone)]
pub(crate) struct Log {
    pub pages: Arc<DirtyLog>,
    /// Guest addresses and lengths of the parts of the ring that the device writes, if these are
    /// logged.
    pub ring: SmallVec<[(u64, u64); 2]>,
}

/// State that the connection's task changes while a queue works.
#[derive(Default)]
pub(crate) struct Control {
    state: Mutex<ControlState>,
}

#[derive(Default)]
struct ControlState {
    /// The events that the driver waits for: chains were used; the ring is broken.
    call: Option<Event>,
    error: Option<Event>,
    is_enabled: bool,
    stop: Option<Completer<u32>>,
    /// The queue's task, if it waits.
    waker: Option<Waker>,
}

impl Control {
    fn change<T>(&self, change: impl FnOnce(&mut ControlState) -> T) -> T {
        // Nothing that holds the lock panics.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let value = change(&mut state);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        value
    }

    /// Sets the event that notifies the driver, and signals it: what was used last may have gone to
    /// an event that nobody listens to any more, or to none, if another server ended between the
    /// ring and the event. A driver that is notified without a reason looks and goes on.
    pub fn set_call(&self, call: Option<Event>) {
        self.change(|state| state.call.clone_from(&call));
        if let Some(event) = call {
            // The front end may have closed its side.
            drop(event.signal());
        }
    }

    pub fn set_error(&self, error: Option<Event>) {
        self.change(|state| state.error = error);
    }

    pub fn set_enabled(&self, is_enabled: bool) {
        self.change(|state| state.is_enabled = is_enabled);
    }

    /// Asks the queue to end: it takes no more requests, completes those that it has, and delivers
    /// its place in the ring.
    pub fn stop(&self, done: Completer<u32>) {
        self.change(|state| state.stop = Some(done));
    }

    /// Whether the queue is enabled, and whether it is to stop.
    fn look(&self) -> (bool, bool) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.is_enabled, state.stop.is_some())
    }

    fn call(&self) -> Option<Event> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.call.clone()
    }

    /// The events of the driver: chains were used, the ring is broken; and whether it is enabled.
    pub fn settings(&self) -> (Option<Event>, Option<Event>, bool) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.call.clone(), state.error.clone(), state.is_enabled)
    }
}

/// Waits for the driver's kicks, or until it is time to look again.
enum Kicks {
    Watch(Watch),
    Poll(Pin<Box<Sleep>>),
}

impl Kicks {
    fn new(event: Option<Event>) -> Kicks {
        match event {
            Some(event) => Kicks::Watch(Watch::new(event)),
            None => Kicks::Poll(Box::pin(cowslip_queue::sleep(POLL_PAUSE))),
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self {
            Kicks::Watch(watch) => watch.poll_next(context),
            Kicks::Poll(sleep) => {
                ready!(sleep.as_mut().poll(context));
                sleep.set(cowslip_queue::sleep(POLL_PAUSE));
                Poll::Ready(Ok(()))
            }
        }
    }
}

/// A queue at work.
pub(crate) struct Worker {
    setup: Setup,
    control: Arc<Control>,
    bytes_in_flight: u64,
    /// Requests that the driver has not got back, if it gets them back in order.
    order: Option<InOrder>,
    /// Whether the ring was found broken: it is not touched any more.
    is_broken: bool,
}

impl Worker {
    pub fn new(setup: Setup, control: Arc<Control>) -> Worker {
        let is_in_order = setup.features & feature::IN_ORDER != 0;
        Worker {
            order: is_in_order.then(InOrder::default),
            setup,
            control,
            bytes_in_flight: 0,
            is_broken: false,
        }
    }

    /// Works until the queue is stopped.
    pub async fn run(mut self) {
        let device = Rc::new(Arc::clone(&self.setup.device));
        let mut running = FuturesUnordered::new();
        // From its first request on: a queue that is not enabled has no kicks to look for.
        let mut kicks: Option<Kicks> = None;
        let mut done = Vec::new();
        loop {
            let (is_enabled, stops) = self.control.look();
            let takes = is_enabled && !stops && !self.is_broken;
            let mut has_more = false;
            if takes {
                self.setup.ring.disable_kicks();
                while self.has_room(running.len()) {
                    let Some(request) = self.take() else { break };
                    let how = (self.durability(), self.setup.outlives);
                    let device = Rc::clone(&device);
                    running.push(async move { request.perform(&device, how).await });
                }
                has_more = !self.is_broken
                    && self.has_room(running.len())
                    && self.setup.ring.wait_for_chain();
            }
            if stops && running.is_empty() {
                return self.end();
            }
            if kicks.is_none() && takes {
                kicks = Some(Kicks::new(self.setup.kick.clone()));
            }
            let before = (is_enabled, stops);
            std::future::poll_fn(|context| {
                let news = self.poll(context, (&mut kicks, &mut running, &mut done), before);
                match news || has_more {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                }
            })
            .await;
            if !done.is_empty() {
                self.give_back(&mut done);
            }
        }
    }

    /// Looks for completions, kicks and changes of the control. Returns whether there were any.
    fn poll<F: Future<Output = Completed>>(
        &mut self,
        context: &mut Context<'_>,
        (kicks, running, done): (
            &mut Option<Kicks>,
            &mut FuturesUnordered<F>,
            &mut Vec<Completed>,
        ),
        before: (bool, bool),
    ) -> bool {
        let mut has_news = false;
        while let Poll::Ready(Some(completed)) = Pin::new(&mut *running).poll_next(context) {
            done.push(completed);
            has_news = true;
        }
        if let Some(wait) = kicks
            && let Poll::Ready(outcome) = wait.poll(context)
        {
            if let Err(error) = outcome {
                self.set_broken(&Broken(format!("its kick descriptor failed: {error}")));
            }
            has_news = true;
        }
        let mut state = self
            .control
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if (state.is_enabled, state.stop.is_some()) != before {
            return true;
        }
        state.waker = Some(context.waker().clone());
        has_news
    }

    /// Whether one more request may be taken. A driver has no more in flight than its ring has
    /// descriptors, unless it makes chains available that it has not got back.
    fn has_room(&self, in_flight: usize) -> bool {
        let size = usize::from(self.setup.ring.size());
        let in_flight = self.order.as_ref().map_or(in_flight, InOrder::len);
        self.bytes_in_flight < BYTES_IN_FLIGHT_MAX && in_flight < size
    }

    fn durability(&self) -> Durability {
        Durability::of_fua(self.setup.device.is_writethrough(self.setup.features))
    }

    /// The next request of the ring, if there is one.
    fn take(&mut self) -> Option<Request> {
        let popped = self.setup.ring.pop(&self.setup.guest);
        let request = popped.and_then(|chain| chain.map(Request::of).transpose());
        match request {
            Ok(request) => {
                let request = request?;
                self.bytes_in_flight += request.cost_bytes();
                if let Some(order) = &mut self.order {
                    order.take(request.slot);
                }
                Some(request)
            }
            Err(broken) => {
                self.set_broken(&broken);
                None
            }
        }
    }

    fn set_broken(&mut self, broken: &Broken) {
        if std::mem::replace(&mut self.is_broken, true) {
            return;
        }
        (self.setup.observer)(&ServerEvent::QueueBroken {
            queue: self.setup.index,
            reason: broken.to_string(),
        });
        let error = self.control.change(|state| state.error.clone());
        if let Some(event) = error {
            // The front end may have closed its side.
            drop(event.signal());
        }
    }

    /// Gives completed requests back, and notifies the driver of all of them at once.
    fn give_back(&mut self, done: &mut Vec<Completed>) {
        for completed in done.drain(..) {
            self.bytes_in_flight -= completed.bytes;
            if let Some((request, failure)) = &completed.failure {
                (self.setup.observer)(&ServerEvent::RequestFailed {
                    queue: self.setup.index,
                    request,
                    error: failure.to_string(),
                });
            }
            self.push(completed.slot, completed.written);
            if let Some(log) = &self.setup.log {
                // After the last write: a page that is marked before may be copied too early.
                let ranges = completed.ranges.iter().chain(&log.ring).copied();
                ranges.for_each(|range| log.pages.mark(range));
            }
        }
        if !self.is_broken
            && self.setup.ring.take_notification()
            && let Some(call) = self.control.call()
        {
            // The front end may have closed its side; then it will not wait for it.
            drop(call.signal());
        }
    }

    /// Puts a completed request into the ring, or those that waited for it and itself when its
    /// turn has come.
    fn push(&mut self, slot: Slot, written: u32) {
        if self.is_broken {
            return;
        }
        let ring = &mut self.setup.ring;
        let Some(order) = &mut self.order else {
            return ring.push(slot, written);
        };
        order.complete(slot, written);
        while let Some((slot, written)) = order.next() {
            ring.push(slot, written);
        }
    }

    fn end(self) {
        let base = self.setup.ring.base();
        if let Some(stop) = self.control.change(|state| state.stop.take()) {
            stop.complete(base);
        }
    }
}
