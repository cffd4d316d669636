//! The command from outside: against its peers, on file systems of its own, with bad input. One
//! program, so that what these files share is built and linked once; `cargo nextest run -p
//! cowslip-cli convert::` runs one file's tests.

mod allocate;
mod backing_policy;
mod bad_input;
mod bench;
mod bitmap;
mod check_and_map;
mod check_interrupted;
mod cli_differential;
mod clone;
mod convert;
mod create_info;
mod damaged;
mod demo;
mod devices;
mod drivers;
mod encryption;
mod extents;
mod failed_output;
mod file_attributes;
mod filters;
mod foreign_formats;
mod generate;
mod graph;
mod grow;
mod guessed_raw;
mod interop_matrix;
mod interrupted;
mod io_differential;
mod io_shell;
mod lock_bytes;
mod locks;
mod measure_dd;
mod measured_size;
mod nbd_bitmaps;
mod nbd_connections;
mod nbd_files;
mod nbd_peers;
#[cfg(feature = "psk")]
mod nbd_psk;
mod nbd_reconnect;
mod nbd_tls;
mod overwrite;
mod power_cut;
mod preallocation_jobs;
mod private_files;
mod qemu_nbd_lines;
mod report;
mod resize_amend;
mod serve;
mod serve_sandbox;
mod snapshot;
mod support;
mod users_calls;
mod zero_targets;
