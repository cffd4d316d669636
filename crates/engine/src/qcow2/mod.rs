//! The qcow2 format: `docs/interop/qcow2.rst` of QEMU, versions 2 and 3.

pub mod compress;
pub mod entry;
pub mod geometry;
pub mod header;
