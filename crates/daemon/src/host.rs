//! [`Daemon`]: the state of a daemon. What it does is in the files beside this one.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use cowslip_console::error::CommandError;
use cowslip_console::output::is_called_as_qemu;
use cowslip_exports::{Log, default_poll};
use cowslip_graph::Turn;
use cowslip_qmp::{Event, QmpError, ServerHandle};
use serde_json::Value;

use super::active::Active;
use super::aside::Aside;
use super::export::Exports;
use super::job::Jobs;
use super::nodes::Nodes;
use super::wait::Flag;
use super::words::explained;

/// The state of a daemon.
pub struct Daemon {
    /// Disks by name.
    pub nodes: Nodes,
    /// Disks for clients.
    pub exports: Exports,
    /// Checkpoints whose views are still there.
    pub checkpoints: RefCell<Vec<Active>>,
    /// Jobs.
    pub jobs: Jobs,
    /// Threads on which they copy; without, the one that serves clients does.
    pub aside: Option<Arc<Aside>>,
    /// A command, or the last step of a job, changes the graph.
    pub turn: Turn<()>,
    /// Clients of the control protocol.
    pub clients: RefCell<Option<ServerHandle>>,
    /// Commands of clients that were done.
    pub commands_done: Cell<u64>,
    /// Commands of clients that were refused, or have failed.
    pub commands_refused: Cell<u64>,
    /// It is in its sandbox: no programs are run.
    pub is_confined: Cell<bool>,
    /// The directories in which its sandbox lets files be opened.
    pub allowed: RefCell<Vec<PathBuf>>,
    /// The directory that names are relative to; not under QEMU's name, whose errors have no notes.
    directory: Option<PathBuf>,
    /// The place for events.
    pub log: Log,
    /// Longest time for which threads poll before they sleep.
    pub poll: Duration,
    /// It is to end.
    pub quits: Flag,
    /// It has ended, and how.
    pub ended: RefCell<Option<Result<(), CommandError>>>,
}

impl Daemon {
    /// A daemon without disks.
    pub fn new(log: Log) -> Rc<Daemon> {
        Rc::new(Daemon {
            nodes: Nodes::default(),
            exports: Exports::default(),
            checkpoints: RefCell::default(),
            jobs: Jobs::default(),
            aside: Aside::new().ok(),
            turn: Turn::new(()),
            clients: RefCell::default(),
            commands_done: Cell::default(),
            is_confined: Cell::default(),
            allowed: RefCell::default(),
            directory: match is_called_as_qemu() {
                true => None,
                false => std::env::current_dir().ok(),
            },
            commands_refused: Cell::default(),
            log,
            poll: default_poll(),
            quits: Flag::default(),
            ended: RefCell::default(),
        })
    }

    /// An error with what helps to understand it.
    pub fn explained(&self, error: QmpError) -> QmpError {
        let allowed = self.allowed.borrow();
        let is_due = self.is_confined.get() && !is_called_as_qemu();
        explained(
            error,
            self.directory.as_deref(),
            is_due.then_some(&allowed[..]),
        )
    }

    /// Sends an event to all clients.
    pub fn emit(&self, name: &'static str, data: Value) {
        self.log.event(name, &data);
        if let Some(clients) = &*self.clients.borrow() {
            clients.emit(Event::new(name, data));
        }
    }
}
