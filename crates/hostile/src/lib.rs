//! Hostile input: what an attacker may hand to us, and what must come of it.
//!
//! [`TARGETS`] are the bodies of the fuzz targets, plain functions of bytes: `fuzz/` runs them
//! under libFuzzer, `tests/smoke.rs` over the committed corpus. [`damage`] breaks valid images by
//! structure, [`worst`] makes images that maximise work and memory. A finding is a panic: an
//! assertion that does not hold, or one of ours that did its duty on input that it should never
//! have seen.
//!
//! Leaves out: images that lie about nothing; those are the simulator's.

#![allow(clippy::unwrap_used)] // A finding is a panic.

pub mod damage;
pub mod draw;
pub mod file;
mod front;
pub mod fuse_server;
pub mod image_bytes;
pub mod io_lines;
pub mod layout;
pub mod nbd_client;
pub mod nbd_server;
mod pipe;
pub mod published;
pub mod qmp;
pub mod repair;
pub mod samples;
pub mod session;
pub mod tables;
pub mod vhost_messages;
pub mod vhost_rings;
pub mod worst;

/// A fuzz target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, which is that of its corpus.
    pub name: &'static str,
    /// Its body. Panics where there is a finding.
    pub run: fn(&[u8]),
}

/// All fuzz targets.
pub const TARGETS: [Target; 12] = [
    Target {
        name: "image_bytes",
        run: image_bytes::run,
    },
    Target {
        name: "image_damage",
        run: damage::run,
    },
    Target {
        name: "image_repair",
        run: repair::run,
    },
    Target {
        name: "tables",
        run: tables::run,
    },
    Target {
        name: "nbd_server",
        run: nbd_server::run,
    },
    Target {
        name: "nbd_client",
        run: nbd_client::run,
    },
    Target {
        name: "fuse_server",
        run: fuse_server::run,
    },
    Target {
        name: "vhost_rings",
        run: vhost_rings::run,
    },
    Target {
        name: "vhost_messages",
        run: vhost_messages::run,
    },
    Target {
        name: "io_lines",
        run: io_lines::run,
    },
    Target {
        name: "qmp",
        run: qmp::run,
    },
    Target {
        name: "published",
        run: published::run,
    },
];
