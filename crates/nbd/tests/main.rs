//! The tests of the protocol from outside, as one program.

mod support;

mod client_server;
mod hostile_clients;
mod hostile_servers;
mod peers;
