//! A vhost-user-blk server: disks for virtual machines, served by a process of its own.
//!
//! A virtual machine monitor (the *front end*) connects to a socket, passes descriptors of its
//! guest's memory and says where in it the rings of the virtio-blk device are. From then on the
//! server takes requests from the rings and completes them there; the guest's bytes go to the
//! kernel where they are ([`IoVec`](cowslip_queue::IoVec) over
//! [`SharedMemory`](cowslip_queue::SharedMemory)).
//!
//! | file | subject |
//! | --- | --- |
//! | `message.rs` | messages of the protocol, as bytes and as types |
//! | `session.rs` | a connection: what each message does |
//! | `session/handover.rs` | a connection on its way to another process |
//! | `memory.rs` | the guest's memory: regions, addresses, the log of pages that were written |
//! | `fields.rs`, `stores.rs` | fields in memory that is shared, and every store to them |
//! | `ring.rs`, `ring/` | split and packed rings: chains of descriptors in and out |
//! | `inflight.rs` | the table of requests in flight, which outlives this process |
//! | `order.rs` | the order in which requests go back to the driver |
//! | `worker.rs` | a queue at work: takes requests, completes them, notifies |
//! | `request.rs` | a request of virtio-blk, carried out on the disk |
//! | `device.rs` | features, limits and configuration of the device |
//! | `server.rs` | the socket, the threads, stopping |
//!
//! Sources: the vhost-user protocol (QEMU's `docs/interop/vhost-user.rst`) and Virtual I/O Device
//! (VIRTIO) Version 1.2, sections 2.7 (split rings), 2.8 (packed rings) and 5.2 (block device).
//!
//! # A server that ends while requests are in flight
//!
//! With the protocol feature INFLIGHT_SHMFD the front end keeps a table of the requests that the
//! server has taken and not completed. A server that is started after the end of another one
//! carries these out again, in the order in which they were taken. Requests that were completed are
//! in the ring and are not repeated.
//!
//! # Hostile guests
//!
//! Everything in a guest's memory is read once, then checked. A ring with an impossible content
//! stops that queue with an event that says why; other queues, and other disks, go on. What a
//! queue has in flight is bounded in number by its ring, and in bytes by
//! [`BYTES_IN_FLIGHT_MAX`](worker::BYTES_IN_FLIGHT_MAX).
//!
//! The front end itself is trusted with one thing: a file of guest memory that it shortens while it
//! is mapped ends this process (SIGBUS), unless the file is sealed against that.

mod device;
mod fields;
mod inflight;
mod memory;
mod message;
mod order;
mod request;
mod ring;
mod server;
mod session;
mod stores;
pub mod worker;

pub use device::Options;
pub use server::{AtRest, Connection, Server, ServerEvent, ServerHandle};
pub use session::ConnectionState;
