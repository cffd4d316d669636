//! Disks of the crate `cowslip` behind the traits of others: examples to copy from.
//!
//! The traits here are written from the documentation of their projects, with as much of their
//! types as a disk meets; memory of a guest is [`cowslip::SharedMemory`], where a real one has
//! [`cowslip::IoVec::foreign`]. Each adapter is tested by requests on a qcow2 image that are
//! compared with a model.
//!
//! | module | for | face of the library |
//! | --- | --- | --- |
//! | [`cloud_hypervisor`] | `AsyncIo`, and the traits of its disk files | submit and complete |
//! | [`crosvm`] | `AsyncDisk`, on its executor | futures, a ring on the executor's thread |
//! | [`openvmm`] | `DiskIo`, on its executor | futures, rings on threads of their own |
//! | [`libkrun`] | reads and writes of volatile memory by a worker | blocking |
//! | [`tokio_disk`] | `AsyncRead`, `AsyncWrite`, `AsyncSeek` of tokio | futures |
//! | [`drivers`] | tokio and smol as drivers of a ring | futures |
//!
//! `std::io::{Read, Write, Seek}` is part of the library: `cowslip::blocking::DiskCursor`.

pub mod cloud_hypervisor;
pub mod crosvm;
pub mod drivers;
pub mod libkrun;
pub mod openvmm;
pub mod tokio_disk;

#[cfg(test)]
mod testing;
