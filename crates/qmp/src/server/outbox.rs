//! Lines that wait to be sent to a client, and the task that sends them.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use cowslip_queue::{Buf, Stream};

use crate::notify::Notify;

/// Bytes that may wait before the client's next command is read.
const WAITING_MAX: usize = 1 << 20;

/// Lines that are sent in one system call.
const BATCH_MAX: usize = 64;

/// Lines that wait to be sent, in order.
pub(super) struct Outbox {
    lines: RefCell<VecDeque<Buf>>,
    bytes: Cell<usize>,
    /// Why nothing is sent any more.
    broken: RefCell<Option<String>>,
    /// Nothing is added any more.
    closed: Cell<bool>,
    /// Everything was sent that was there when it was closed, or nothing can be sent.
    ended: Cell<bool>,
    changed: Notify,
}

impl Outbox {
    pub fn new() -> Outbox {
        Outbox {
            lines: RefCell::new(VecDeque::new()),
            bytes: Cell::new(0),
            broken: RefCell::new(None),
            closed: Cell::new(false),
            ended: Cell::new(false),
            changed: Notify::default(),
        }
    }

    pub fn push(&self, line: Buf) {
        if self.is_broken() || self.closed.get() {
            return;
        }
        self.bytes.set(self.bytes.get() + line.len());
        self.lines.borrow_mut().push_back(line);
        self.changed.notify();
    }

    /// Adds an event; a client that lets too many wait is cut off.
    pub fn push_event(&self, line: Buf, waiting_max: usize) {
        if self.lines.borrow().len() >= waiting_max {
            self.break_off(format!("it left {waiting_max} messages unread"));
        }
        self.push(line);
    }

    /// Has nothing be sent any more.
    pub fn break_off(&self, reason: String) {
        self.broken.borrow_mut().get_or_insert(reason);
        self.lines.borrow_mut().clear();
        self.bytes.set(0);
        self.changed.notify();
    }

    fn is_broken(&self) -> bool {
        self.broken.borrow().is_some()
    }

    /// Waits until it is broken off, and returns the reason.
    pub async fn broken(&self) -> String {
        self.changed.until(|| self.is_broken()).await;
        self.broken.borrow().clone().unwrap_or_default()
    }

    /// Waits until little enough waits to be sent.
    pub async fn room(&self) {
        let room = || self.is_broken() || self.bytes.get() <= WAITING_MAX;
        self.changed.until(room).await;
    }

    /// Adds nothing more, and waits until all is sent, or nothing can be.
    pub async fn drain(&self) {
        self.closed.set(true);
        self.changed.notify();
        self.changed
            .until(|| self.ended.get() || self.is_broken())
            .await;
    }

    /// Sends lines until the outbox is closed and empty, or the connection fails.
    pub async fn send(self: Rc<Self>, stream: Stream) {
        loop {
            let ready = || self.is_broken() || self.closed.get() || !self.lines.borrow().is_empty();
            self.changed.until(ready).await;
            let batch = {
                let mut lines = self.lines.borrow_mut();
                let length = lines.len().min(BATCH_MAX);
                lines.drain(..length).collect::<Vec<Buf>>()
            };
            if batch.is_empty() {
                break;
            }
            let length: usize = batch.iter().map(|line| line.len()).sum();
            if let Err(error) = stream.write_all(batch).await {
                self.break_off(format!("sending failed: {error}"));
                break;
            }
            self.bytes.set(self.bytes.get().saturating_sub(length));
            self.changed.notify();
        }
        self.ended.set(true);
        self.changed.notify();
    }
}
