//! A front end of vhost-user-blk, as a virtual machine monitor has one: the socket, the guest's
//! memory, and queues with requests. It drives servers, ours and others, in measurements
//! ([`load`]) and in tests, which may write anything to its rings.
//!
//! A server that breaks the protocol, or does not answer in time, is an error here. May not know:
//! our server, images, networks.

mod front;
pub mod load;
mod queue;
pub mod ring;

pub use front::{Front, memory_file};
pub use queue::{FrontQueue, Made, Make};

/// Address of the guest's memory, for the guest.
pub const GUEST: u64 = 0x10_0000;
/// Address of the guest's memory, for the front end.
pub const USER: u64 = 0x7000_0000_0000;
/// Size of the guest's memory in bytes.
pub const MEMORY_BYTES: u64 = 16 << 20;
/// Offset in the memory behind rings, headers, status bytes and tables: data of requests.
pub const DATA_AT: usize = 6 << 20;

/// VIRTIO_F_VERSION_1.
pub const VERSION_1: u64 = 1 << 32;
/// VIRTIO_F_RING_PACKED.
pub const PACKED: u64 = 1 << 34;
/// VIRTIO_F_IN_ORDER.
pub const IN_ORDER: u64 = 1 << 35;
/// VIRTIO_F_EVENT_IDX.
pub const EVENT_IDX: u64 = 1 << 29;
/// VIRTIO_F_INDIRECT_DESC.
pub const INDIRECT: u64 = 1 << 28;
/// VHOST_USER_F_PROTOCOL_FEATURES.
pub const PROTOCOL: u64 = 1 << 30;
/// VIRTIO_BLK_F_FLUSH.
pub const FLUSH: u64 = 1 << 9;

/// Address for the guest of an offset in its memory.
pub fn guest(at: usize) -> u64 {
    GUEST + at as u64
}
