//! QMP, the control protocol of QEMU: requests, replies and events as JSON over a socket.
//!
//! [`server`] accepts clients, negotiates, checks arguments and hands commands to a [`Handler`];
//! [`client`] is the other side; [`schema`] declares all commands, events and types once; [`json`]
//! reads a stream of values as QEMU does.
//!
//! May not know: images, nodes, the graph of disks, the command line. It prints nothing.
//!
//! Left out: commands out of band, which no command of a storage daemon needs. They answer as they
//! do in QEMU where a client has not asked for them.

pub mod client;
pub mod descriptors;
mod error;
pub mod json;
mod notify;
pub mod schema;
pub mod server;

pub use client::Client;
pub use descriptors::{Descriptors, FdSets};
pub use error::{ErrorClass, QmpError};
pub use schema::Schema;
pub use server::{
    Call, Event, Executing, Handler, Server, ServerEvent, ServerHandle, ServerOptions,
};
