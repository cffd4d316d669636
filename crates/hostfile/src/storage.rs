//! The files and devices that a block device of the host stores its bytes in.
//!
//! Loop devices and partitions are followed. Devices of the device mapper and arrays are not: two
//! volumes of one group are different disks, and the kernel keeps the devices below them for
//! itself.

use std::fs;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

use cowslip_queue::loop_device;
use rustix::fs::{major, makedev, minor};

use crate::file::FileId;
use crate::file::Storage;

/// The unit of a partition's place, whatever the device's block.
const PARTITION_UNIT_BYTES: u64 = 512;
/// Devices that lie one over the other, at most.
const DEPTH_MAX: usize = 16;

/// Where the bytes of the block device `rdev` are stored, beside itself.
pub(super) fn of_block_device(device: impl AsFd, rdev: u64) -> Storage {
    let mut storage = Storage::whole(FileId(rdev, 0));
    let mut next = behind_loop(&device, rdev).or_else(|| below(rdev));
    let mut range = 0..u64::MAX;
    for _ in 0..DEPTH_MAX {
        let Some(below_it) = next else { break };
        range = within(&range, &below_it.range);
        storage.add(below_it.id, range.clone());
        next = below_it.rdev.and_then(below);
    }
    storage
}

/// The file or device that a device lies on.
struct Below {
    id: FileId,
    range: Range<u64>,
    /// Its number, if it is a device.
    rdev: Option<u64>,
}

/// A range of a device in what the device lies on, which shows `shown` of that.
fn within(range: &Range<u64>, shown: &Range<u64>) -> Range<u64> {
    let start = shown.start.saturating_add(range.start).min(shown.end);
    start..shown.start.saturating_add(range.end).min(shown.end)
}

/// A range of `len` bytes; 0 is all.
fn shown(offset: u64, len: u64) -> Range<u64> {
    match len {
        0 => offset..u64::MAX,
        len => offset..offset.saturating_add(len),
    }
}

/// The file behind a loop device that is open: the kernel names it by numbers, so no name can
/// mislead.
fn behind_loop(device: &impl AsFd, rdev: u64) -> Option<Below> {
    let found = loop_device::behind(device, rdev)?;
    let is_device = found.rdevice != 0;
    Some(Below {
        id: match is_device {
            true => FileId(found.rdevice, 0),
            false => FileId(found.device, found.inode),
        },
        range: shown(found.offset, found.size_limit),
        rdev: is_device.then_some(found.rdevice),
    })
}

/// Finds the file or device below a device by the kernel's publications: the disk of a partition,
/// the file behind a loop device.
fn below(rdev: u64) -> Option<Below> {
    let directory = format!("/sys/dev/block/{}:{}", major(rdev), minor(rdev));
    let text = |name: &str| fs::read_to_string(PathBuf::from(&directory).join(name)).ok();
    let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
    if let Some(start) = number("start") {
        let parent = text("../dev")?;
        let (major, minor) = parent.trim().split_once(':')?;
        let rdev = makedev(major.parse().ok()?, minor.parse().ok()?);
        let units = |count: u64| count.saturating_mul(PARTITION_UNIT_BYTES);
        return Some(Below {
            id: FileId(rdev, 0),
            range: shown(units(start), units(number("size")?)),
            rdev: Some(rdev),
        });
    }
    let file = text("loop/backing_file")?;
    let found = fs::metadata(file.trim_end_matches('\n')).ok()?;
    let is_device = found.file_type().is_block_device();
    Some(Below {
        id: match is_device {
            true => FileId(found.rdev(), 0),
            false => FileId(found.dev(), found.ino()),
        },
        range: shown(number("loop/offset")?, number("loop/sizelimit")?),
        rdev: is_device.then(|| found.rdev()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_a_device_is_cut_to_what_the_device_shows() {
        assert_eq!(within(&(0..u64::MAX), &(100..200)), 100..200);
        assert_eq!(within(&(10..20), &(100..200)), 110..120);
        assert_eq!(within(&(50..150), &(100..200)), 150..200);
        assert_eq!(within(&(500..600), &(100..200)), 200..200);
        assert_eq!(shown(7, 0), 7..u64::MAX);
    }
}
