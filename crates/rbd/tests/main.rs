//! Images in RBD through Ceph's libraries over plain files, with faults. What these libraries
//! forbid, or what the real ones could not bear, ends the test.
#![allow(clippy::unwrap_used)] // A panic is the report of a test.

mod files;
mod opening;
mod support;
