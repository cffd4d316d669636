//! [`Daemon`]: the state of a daemon. What it does is in the files beside this one.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use cowslip_graph::Turn;
use cowslip_qmp::{Event, ServerHandle};
use serde_json::Value;

use super::export::Exports;
use super::job::Jobs;
use super::nodes::Nodes;
use super::wait::Flag;
use crate::cmd::serve::{Log, Verbosity, default_poll};
use crate::output::Program;

/// The state of a daemon.
pub struct Daemon {
    /// Disks by name.
    pub nodes: Nodes,
    /// Disks for clients.
    pub exports: Exports,
    /// Jobs.
    pub jobs: Jobs,
    /// A command, or the last step of a job, changes the graph.
    pub turn: Turn<()>,
    /// Clients of the control protocol.
    pub clients: RefCell<Option<ServerHandle>>,
    /// The place for events.
    pub log: Log,
    /// Longest time for which threads poll before they sleep.
    pub poll: Duration,
    /// It is to end.
    pub quits: Flag,
}

impl Daemon {
    /// A daemon without disks.
    pub fn new(program: &Program, verbosity: Verbosity) -> Rc<Daemon> {
        Rc::new(Daemon {
            nodes: Nodes::default(),
            exports: Exports::default(),
            jobs: Jobs::default(),
            turn: Turn::new(()),
            clients: RefCell::default(),
            log: Log::new(program, verbosity),
            poll: default_poll(),
            quits: Flag::default(),
        })
    }

    /// Sends an event to all clients.
    pub fn emit(&self, name: &'static str, data: Value) {
        if let Some(clients) = &*self.clients.borrow() {
            clients.emit(Event::new(name, data));
        }
    }
}
