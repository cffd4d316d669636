//! The device: features, limits, configuration space (VIRTIO 1.2, sections 5.2.3 to 5.2.6).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cowslip_block::Disk;

/// Bytes of a sector, the unit of all numbers of the device.
pub(crate) const SECTOR_BYTES: u64 = 512;
/// Bytes of a serial number (VIRTIO 1.2, section 5.2.6).
pub(crate) const SERIAL_BYTES: usize = 20;
/// Bytes of the configuration space that is answered; the rest, up to the limit of messages, is 0.
const CONFIG_BYTES: usize = 60;
/// Offset of the field that says whether the cache is write-back.
pub(crate) const WRITEBACK_AT: u32 = 32;

/// Segments of a request: what a ring of 128 descriptors takes beside header and status.
const SEGMENTS_MAX: u32 = 126;
/// Segments of a request to discard or to zero, and sectors of each (1 GiB).
pub(crate) const RANGES_MAX: u32 = 32;
pub(crate) const RANGE_SECTORS_MAX: u32 = 1 << 21;

/// Features of the device, by bit (VIRTIO 1.2, sections 5.2.3 and 6).
pub(crate) mod feature {
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Pages that are written are logged (vhost).
    pub const LOG_ALL: u64 = 1 << 26;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    /// Protocol features can be negotiated (vhost-user).
    pub const PROTOCOL: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
    pub const RING_PACKED: u64 = 1 << 34;
    pub const IN_ORDER: u64 = 1 << 35;
}

/// Options of a disk that is served.
#[derive(Clone, Debug)]
pub struct Options {
    /// Serial number: at most 20 bytes of it are shown to the guest.
    pub serial: String,
    /// Most queues that a front end may use.
    pub queues: u16,
    /// Threads that the queues are spread over. Without any, queues work on the thread that serves
    /// the connection.
    pub threads: usize,
    /// Longest time for which they poll before they sleep; zero is never. As
    /// [`Queue::poll_before_sleep`](cowslip_queue::Queue::poll_before_sleep) has it.
    pub poll: Duration,
    /// Bytes of a logical block, a power of two from 512 to 4096: the smallest unit that the guest
    /// reads and writes.
    pub block_bytes: u32,
    /// Whether packed rings are offered.
    pub has_packed_rings: bool,
    /// Whether VIRTIO_F_IN_ORDER is offered. A driver that accepts it gets its requests back in the
    /// order in which it made them: a slow one holds up those behind it.
    pub is_in_order: bool,
}

impl Default for Options {
    fn default() -> Options {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Options {
            serial: String::new(),
            queues: 8,
            threads: cores,
            poll: Duration::ZERO,
            block_bytes: 512,
            has_packed_rings: true,
            is_in_order: false,
        }
    }
}

/// A disk as a device.
pub(crate) struct Device {
    pub disk: Arc<dyn Disk>,
    pub options: Options,
    /// Whether writes may stay in volatile caches until the next flush. The guest can change it.
    is_writeback: AtomicBool,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.disk.name())
    }
}

impl Device {
    pub fn new(disk: Arc<dyn Disk>, options: Options) -> Device {
        Device {
            disk,
            options,
            is_writeback: AtomicBool::new(true),
        }
    }

    /// The same device over another disk.
    pub fn over(&self, disk: Arc<dyn Disk>) -> Device {
        Device {
            disk,
            options: self.options.clone(),
            is_writeback: AtomicBool::new(self.is_writeback()),
        }
    }

    pub fn is_writable(&self) -> bool {
        self.disk.features().writable
    }

    /// All features that are offered.
    pub fn features(&self) -> u64 {
        let always = feature::SEG_MAX
            | feature::BLK_SIZE
            | feature::FLUSH
            | feature::TOPOLOGY
            | feature::CONFIG_WCE
            | feature::MQ
            | feature::LOG_ALL
            | feature::INDIRECT_DESC
            | feature::EVENT_IDX
            | feature::PROTOCOL
            | feature::VERSION_1;
        let by_access = match self.is_writable() {
            true => feature::DISCARD | feature::WRITE_ZEROES,
            false => feature::RO,
        };
        let packed = match self.options.has_packed_rings {
            true => feature::RING_PACKED,
            false => 0,
        };
        let order = match self.options.is_in_order {
            true => feature::IN_ORDER,
            false => 0,
        };
        always | by_access | packed | order
    }

    /// Whether a write must be durable at its completion, by the features that the driver has
    /// accepted (VIRTIO 1.2, section 5.2.5.2).
    pub fn is_writethrough(&self, accepted: u64) -> bool {
        let can_flush = accepted & feature::FLUSH != 0;
        let can_choose = accepted & feature::CONFIG_WCE != 0;
        !can_flush || (can_choose && !self.is_writeback())
    }

    /// Whether writes may stay in volatile caches, as the guest has chosen last.
    pub fn is_writeback(&self) -> bool {
        self.is_writeback.load(Ordering::Relaxed)
    }

    pub fn set_writeback(&self, is_writeback: bool) {
        self.is_writeback.store(is_writeback, Ordering::Relaxed);
    }

    /// The configuration space as it is now, from its first byte on.
    pub fn config(&self) -> [u8; CONFIG_BYTES] {
        let mut config = [0; CONFIG_BYTES];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        let sectors = self.disk.size() / SECTOR_BYTES;
        put(0, &sectors.to_le_bytes());
        put(12, &SEGMENTS_MAX.to_le_bytes());
        let block = self.options.block_bytes;
        put(20, &block.to_le_bytes());
        // Topology: exponent of blocks in a physical block, offset of the first one, then the
        // smallest and the best length of a request, in blocks.
        let preferred = self.disk.features().preferred_block_bytes;
        let blocks = (preferred / u64::from(block)).clamp(1, 1 << 15);
        put(24, &[blocks.ilog2() as u8, 0]);
        put(26, &1u16.to_le_bytes());
        put(28, &(blocks as u32).to_le_bytes());
        put(WRITEBACK_AT as usize, &[u8::from(self.is_writeback())]);
        put(34, &self.options.queues.to_le_bytes());
        if self.is_writable() {
            put(36, &RANGE_SECTORS_MAX.to_le_bytes());
            put(40, &RANGES_MAX.to_le_bytes());
            put(
                44,
                &((preferred / SECTOR_BYTES).max(1) as u32).to_le_bytes(),
            );
            put(48, &RANGE_SECTORS_MAX.to_le_bytes());
            put(52, &RANGES_MAX.to_le_bytes());
            // Zeroes may be holes.
            put(56, &[1]);
        }
        config
    }

    /// The serial number, padded with zero bytes.
    pub fn serial(&self) -> [u8; SERIAL_BYTES] {
        let mut serial = [0; SERIAL_BYTES];
        let bytes = self.options.serial.as_bytes();
        let len = bytes.len().min(SERIAL_BYTES);
        serial[..len].copy_from_slice(&bytes[..len]);
        serial
    }
}

#[cfg(test)]
mod tests {
    use cowslip_block::disk::MemoryDisk;

    use super::*;

    #[test]
    fn the_configuration_has_its_fields_where_the_specification_has_them() {
        let options = Options {
            serial: "0123456789012345678901234".to_string(),
            queues: 3,
            block_bytes: 4096,
            ..Options::default()
        };
        let device = Device::new(Arc::new(MemoryDisk::new("disk", 10 << 20)), options);
        let config = device.config();
        let u32_at = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
        assert_eq!(u64::from_le_bytes(config[..8].try_into().unwrap()), 20_480);
        assert_eq!((u32_at(12), u32_at(20)), (126, 4096));
        assert_eq!((config[32], config[34], config[56]), (1, 3, 1));
        assert_eq!((u32_at(36), u32_at(40)), (1 << 21, 32));
        assert_eq!(&device.serial(), b"01234567890123456789");
    }

    #[test]
    fn a_write_is_durable_at_once_where_the_guest_cannot_flush_or_has_chosen_so() {
        let disk = Arc::new(MemoryDisk::new("disk", 1 << 20));
        let device = Device::new(disk, Options::default());
        assert!(device.is_writethrough(0));
        // It can choose, but not flush (VIRTIO 1.2, section 5.2.5.2).
        assert!(device.is_writethrough(feature::CONFIG_WCE));
        assert!(!device.is_writethrough(feature::FLUSH));
        let both = feature::FLUSH | feature::CONFIG_WCE;
        assert!(!device.is_writethrough(both));
        device.set_writeback(false);
        assert!(device.is_writethrough(both));
        assert!(!device.is_writethrough(feature::FLUSH));
    }
}
