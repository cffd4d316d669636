//! The tests of the protocol from outside, as one program.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod support;

mod client_server;
mod hostile_clients;
mod hostile_servers;
mod peers;
mod plain_servers;
#[cfg(feature = "psk")]
mod psk;
mod threads;
mod tls;
