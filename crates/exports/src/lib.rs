//! Exports of disks: what the verbs `serve` and `mount`, the name `qemu-nbd` and the daemon have in
//! common.
//!
//! A [`Transport`] is a protocol with its options, such as [`Nbd`]: a file here beside the crate
//! that has the protocol, and a line in `registry.rs`. A [`Service`] serves one image over
//! transports: it is opened once, and closed in order. [`sandbox`] has what a server may do then.
//! One server takes over from another in the order that `handover.rs` has.
//!
//! May not know: verbs, nodes of a daemon, QMP, table entries.

mod compaction;
mod detach;
mod fuse;
mod handover;
mod image_args;
mod kind;
mod log;
mod members;
pub mod nbd;
mod record;
mod registry;
pub mod sandbox;
mod service;
mod socket_name;
mod transport;
mod vhost_user;

pub use detach::{Daemonize, Detached, Role, role, start_server};
pub use fuse::{Fuse, FuseArgs, unmounter, wait_for_close};
pub use image_args::ImageArgs;
pub use kind::TransportKind;
pub use log::{Log, LogFormat, Verbosity};
pub use members::Members;
pub use nbd::Nbd;
pub use registry::{TransportArgs, transport_kind};
pub use service::{Handover, Service, cache_report, default_poll};
pub use socket_name::SocketName;
pub use transport::{Endpoint, Served, Transport};
