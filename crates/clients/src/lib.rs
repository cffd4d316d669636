//! Clients of a daemon for people: `ctl` sends it one command, `top` shows it live in a terminal.
//!
//! They know the protocol alone (QMP), so they work with qemu-storage-daemon, too.
//!
//! May not know: images, servers, the daemon's inside.

pub mod ctl;
pub mod top;
