//! The engine's tests from outside, as one program: each program that uses the engine compiles its
//! futures again. `threads.rs` is a program of its own, which sanitizers build.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod support;

mod allocate;
mod bitmaps;
mod blocking;
mod chains;
mod check_qemu;
mod claims;
mod closing;
mod compact;
mod compress_qemu;
mod control_plane;
mod copied_bytes;
mod copy_on_read;
mod discard;
mod dropped;
mod failed_writes;
mod first_sector;
mod foreign;
mod formats;
mod gather;
mod guest_memory;
mod holes_of_the_host;
mod host_file;
mod keys;
mod layout;
mod left_behind;
mod limits;
mod measured;
mod model;
mod portable;
mod redundant;
mod repair_noise;
mod repair_qemu;
mod requests;
mod snapshots;
mod space;
mod stack;
mod stream;
mod subclusters;
mod unfinished;
mod vm_state;
mod without_lock;
mod write_statistics;
mod zeroes_beside_writes;
