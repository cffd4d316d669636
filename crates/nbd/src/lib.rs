//! NBD, server and client: the fixed newstyle handshake, simple and structured replies, extended
//! headers.
//!
//! The specification is `doc/proto.md` of the NetworkBlockDevice project, with that of its branch
//! `extension-ext-header`; names are its own. [`protocol`] encodes and decodes every message and
//! does no I/O; [`tls`] is what may lie between; [`export`] is a disk as a server offers it;
//! [`server`] and [`client`] speak through the sockets of `cowslip-queue`.
//!
//! May not know: any image format, the command line. It prints nothing.
//!
//! Left out: resizing. A client reads no metadata context but `base:allocation`.

pub mod client;
mod event;
pub mod export;
mod inbox;
mod outbox;
pub mod protocol;
pub mod remote;
pub mod server;
mod slab;
pub mod tls;
mod wire;

pub use client::{Client, ClientError, ConnectOptions, ExportDescription};
pub use export::{Export, ExportError, ExportInfo, MetadataContext};
pub use server::{Server, ServerEvent, ServerHandle, ServerOptions};
