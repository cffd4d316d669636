//! Traces: which requests a disk has got, when, of what kind, where and how long. No data.
//!
//! [`RecordingDisk`] passes requests on to another disk and notes each in a [`Recorder`], whose
//! memory is bounded: a request that finds no room is counted and not noted, so that the guest
//! never waits for its trace. A [`Writer`] brings what was noted into a file, up to a limit.
//! [`Reader`] reads a trace from anybody: it trusts nothing, and keeps one chunk in memory.
//!
//! # The format, version 1
//!
//! All numbers are little-endian. A file is a header and any number of chunks.
//!
//! | header, byte | | |
//! | --- | --- | --- |
//! | 0 | 8 | `cowtrace` |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | length of the header, at least 48; what is behind byte 48 is for later versions |
//! | 16 | 8 | size of the disk when the recording began, in bytes |
//! | 24 | 8 | its preferred block in bytes: the cluster of an image |
//! | 32 | 8 | when the recording began, in microseconds since 1970 (UTC) |
//! | 40 | 8 | 0 |
//!
//! | chunk, byte | | |
//! | --- | --- | --- |
//! | 0 | 4 | `chnk` |
//! | 4 | 4 | length of its requests in bytes, at most 1 MiB |
//! | 8 | 4 | number of its requests |
//! | 12 | 4 | 0 |
//! | 16 | 8 | requests that were dropped since the chunk before, which had no room |
//! | 24 | 8 | time from which the first request counts, in microseconds since the beginning |
//!
//! A request is a byte and up to three numbers of variable length (seven bits a byte, the lowest
//! first, the top bit in all but the last byte; at most ten bytes):
//!
//! | bits of the byte | |
//! | --- | --- |
//! | 0 to 2 | kind: 0 read, 1 write, 2 zeroes, 3 discard, 4 allocation, 5 flush |
//! | 3 | durable at its completion (FUA) |
//! | 4 | zeroes may give the space back |
//! | 5 | begins where the request before it ended: there is no second number |
//! | 6 | as long as the request before it: there is no third number |
//! | 7 | 0 |
//!
//! 1. Microseconds since the request before it,
//! 2. its offset less the end of the request before it, with the sign in bit 0 (2n for n, 2n - 1
//!    for -n),
//! 3. its length in bytes.
//!
//! A flush has the first number alone, and is no "request before it" for offset and length. At the
//! beginning of a chunk these are 0. A range ends at 2^63 - 1 at most, and so does a time. A file
//! that ends inside a chunk was cut, by a server that was killed: what comes before counts.
//!
//! May not know: images, formats, networks.

mod disk;
mod format;
mod read;
mod record;
mod write;

pub use disk::RecordingDisk;
pub use format::{Header, Kind, Request};
pub use read::{Reader, TraceError};
pub use record::{Limits, Recorder};
pub use write::Writer;

#[cfg(test)]
mod tests;
