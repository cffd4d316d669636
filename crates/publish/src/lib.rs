//! Disks in object stores: an immutable form in chunks, which is published, read in place, pulled,
//! listed and pruned.
//!
//! A disk is cut into chunks by its contents ([`cut`]), at the guest's blocks, so equal data gives
//! equal chunks wherever an image file keeps it. Chunks are compressed, named by their hashes and
//! packed into objects ([`pack`]). An [`index`] says which chunk is where on the disk, and a
//! [`record`] gives an index a name and a version. They are written in this order
//! ([`mod@publish`]), so a name never stands for half a disk. [`mod@prune`] removes what nothing
//! refers to.
//! [`disk::PublishedDisk`] reads such a disk, and [`mod@file`] shows it as a file.
//!
//! All of it works on [`objects::Objects`], a store of objects, which tests replace.
//!
//! May not know: any image format, the command line.

pub mod catalog;
pub mod cut;
pub mod digest;
pub mod disk;
pub mod file;
pub mod index;
pub mod location;
pub mod objects;
pub mod pack;
pub mod prune;
pub mod publish;
pub mod pull;
pub mod record;
pub mod store;
