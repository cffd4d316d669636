//! The memory of a guest, as the front end has passed it: regions, by guest and by front end
//! address, and the log of pages that were written.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use cowslip_queue::{IoVec, IoVecMut, SharedMemory};
use serde::{Deserialize, Serialize};

/// Most regions of one guest (QEMU's limit of memory slots of a vhost-user device is 509).
pub(crate) const REGIONS_MAX: usize = 509;
/// Regions begin with a page, as those of all known front ends do. Their ends may be anywhere:
/// those of libblkio's rings are.
const PAGE_BYTES: u64 = 4096;

/// A region as a message describes it. Addresses and lengths are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RegionDescription {
    /// Address by which the guest, and so descriptors, name its first byte.
    pub guest: u64,
    pub len: u64,
    /// Address by which the front end names it, in messages about rings.
    pub user: u64,
    /// Offset in the file that was passed with the message.
    pub offset: u64,
}

/// A region in the memory of this process.
#[derive(Clone, Debug)]
struct Region {
    description: RegionDescription,
    memory: Arc<SharedMemory>,
    /// The file, for another server.
    file: Arc<OwnedFd>,
}

/// Bytes of one region, side by side.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub memory: Arc<SharedMemory>,
    pub range: Range<usize>,
}

/// An address that is not, or not in full, in the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadAddress {
    address: u64,
    len: u64,
}

impl fmt::Display for BadAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BadAddress { address, len } = self;
        write!(
            f,
            "{len} bytes at the guest's address {address:#x} are not in its memory"
        )
    }
}

/// All regions of a guest. A change makes another one, so that requests in flight keep theirs.
#[derive(Clone, Debug, Default)]
pub(crate) struct GuestMemory {
    /// In the order of their guest addresses.
    regions: Vec<Region>,
}

fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

fn overlap(a: (u64, u64), b: (u64, u64)) -> bool {
    // Neither range ends beyond the last address: `add` has checked that.
    a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}

impl GuestMemory {
    /// Maps a region and adds it.
    ///
    /// # Errors
    /// The region is empty, does not begin with a page, overlaps another one, or is one too many;
    /// its file is too short or cannot be mapped.
    pub fn add(&mut self, region: RegionDescription, file: BorrowedFd<'_>) -> io::Result<()> {
        let RegionDescription {
            guest,
            len,
            user,
            offset,
        } = region;
        let place = format!("memory region of {len:#x} bytes at the guest's address {guest:#x}");
        let begins_with_page = [guest, user, offset]
            .iter()
            .all(|number| number.is_multiple_of(PAGE_BYTES));
        if len == 0 || !begins_with_page {
            return Err(invalid(format!(
                "{place}, {user:#x} of the front end, at {offset:#x} of its file: it is empty or \
                 does not begin with a page"
            )));
        }
        if guest.checked_add(len).is_none() || user.checked_add(len).is_none() {
            return Err(invalid(format!("{place}: ends beyond the last address")));
        }
        if self.regions.len() >= REGIONS_MAX {
            return Err(invalid(format!("{place}: more than {REGIONS_MAX} regions")));
        }
        let clash = self.regions.iter().find(|known| {
            let known = &known.description;
            overlap((known.guest, known.len), (guest, len))
                || overlap((known.user, known.len), (user, len))
        });
        if let Some(known) = clash {
            let at = known.description.guest;
            return Err(invalid(format!("{place}: overlaps the one at {at:#x}")));
        }
        let memory = SharedMemory::map(file, offset, len)
            .map_err(|error| io::Error::new(error.kind(), format!("{place}: {error}")))?;
        let at = self
            .regions
            .partition_point(|r| r.description.guest < guest);
        let region = Region {
            description: region,
            memory,
            file: Arc::new(file.try_clone_to_owned()?),
        };
        self.regions.insert(at, region);
        Ok(())
    }

    /// Removes a region, which is named by its addresses and its length.
    ///
    /// # Errors
    /// There is no such region.
    pub fn remove(&mut self, region: &RegionDescription) -> io::Result<()> {
        let is_it = |known: &RegionDescription| {
            (known.guest, known.len, known.user) == (region.guest, region.len, region.user)
        };
        let found = self.regions.iter().position(|r| is_it(&r.description));
        let Some(found) = found else {
            let RegionDescription { guest, len, .. } = region;
            return Err(invalid(format!(
                "there is no memory region of {len:#x} bytes at the guest's address {guest:#x}"
            )));
        };
        self.regions.remove(found);
        Ok(())
    }

    /// All regions, with their files.
    pub fn regions(&self) -> impl Iterator<Item = (RegionDescription, BorrowedFd<'_>)> {
        let regions = self.regions.iter();
        regions.map(|region| (region.description, region.file.as_fd()))
    }

    /// The region that has the guest's address, with the offset of the address in it.
    fn find(&self, guest: u64) -> Option<(&Region, u64)> {
        let after = self
            .regions
            .partition_point(|region| region.description.guest <= guest);
        let region = &self.regions[after.checked_sub(1)?];
        let offset = guest - region.description.guest;
        (offset < region.description.len).then_some((region, offset))
    }

    /// Calls `f` with the pieces of a range of guest addresses, one for each region.
    fn pieces(
        &self,
        (address, len): (u64, u64),
        mut f: impl FnMut(&Arc<SharedMemory>, Range<usize>),
    ) -> Result<(), BadAddress> {
        let (mut at, mut left) = (address, len);
        while left > 0 {
            let Some((region, offset)) = self.find(at) else {
                return Err(BadAddress { address, len });
            };
            let piece = left.min(region.description.len - offset);
            let start = offset as usize;
            f(&region.memory, start..start + piece as usize);
            // A region ends before the last address, so this does not either.
            at += piece;
            left -= piece;
        }
        Ok(())
    }

    /// Adds a range of guest addresses to data of a write.
    pub fn append_to(&self, list: &mut IoVec, range: (u64, u64)) -> Result<(), BadAddress> {
        self.pieces(range, |memory, part| {
            list.append(IoVec::shared(memory, part))
        })
    }

    /// Adds a range of guest addresses to the target of a read.
    pub fn append_to_mut(&self, list: &mut IoVecMut, range: (u64, u64)) -> Result<(), BadAddress> {
        self.pieces(range, |memory, part| {
            list.append(IoVecMut::shared(memory, part))
        })
    }

    /// The place of a range of guest addresses that lies in one region.
    pub fn place(&self, address: u64, len: u64) -> Result<Place, BadAddress> {
        let mut place = None;
        let mut count = 0;
        self.pieces((address, len), |memory, range| {
            count += 1;
            let memory = Arc::clone(memory);
            place = Some(Place { memory, range });
        })?;
        place
            .filter(|_| count == 1)
            .ok_or(BadAddress { address, len })
    }

    /// The region that has all of a range of front end addresses.
    fn find_user(&self, user: u64, len: u64) -> Option<&Region> {
        self.regions.iter().find(|region| {
            let RegionDescription {
                user: start,
                len: region_len,
                ..
            } = region.description;
            user >= start && user - start < region_len && len <= region_len - (user - start)
        })
    }

    /// The guest's address of a range of front end addresses that lies in one region.
    pub fn guest_of_user(&self, user: u64, len: u64) -> Option<u64> {
        let region = self.find_user(user, len)?.description;
        Some(region.guest + (user - region.user))
    }

    /// The place of a range of front end addresses that lies in one region.
    pub fn place_of_user(&self, user: u64, len: u64) -> Option<Place> {
        let region = self.find_user(user, len)?;
        let start = (user - region.description.user) as usize;
        Some(Place {
            memory: Arc::clone(&region.memory),
            range: start..start + len as usize,
        })
    }
}

/// The log of pages that were written, for a migration: a bit a page, in memory of the front end
/// (vhost-user protocol, "Migration").
#[derive(Debug)]
pub(crate) struct DirtyLog {
    memory: Arc<SharedMemory>,
    /// The file and the offset in it, for another server.
    file: OwnedFd,
    offset: u64,
}

impl DirtyLog {
    /// Maps the log.
    ///
    /// # Errors
    /// As of [`SharedMemory::map`].
    pub fn map(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<DirtyLog> {
        Ok(DirtyLog {
            memory: SharedMemory::map(file, offset, len)?,
            file: file.try_clone_to_owned()?,
            offset,
        })
    }

    /// Its offset and length in its file.
    pub fn part(&self) -> (u64, u64) {
        (self.offset, self.memory.len() as u64)
    }

    /// Marks the pages of a range of guest addresses. Pages that the log does not have are left
    /// out: the front end has made it as large as the guest's memory.
    pub fn mark(&self, (address, len): (u64, u64)) {
        let Some(last) = len.checked_sub(1).and_then(|len| address.checked_add(len)) else {
            return;
        };
        let logged = self.memory.len() as u64 * 8;
        let (first, last) = (address / PAGE_BYTES, last / PAGE_BYTES);
        for page in first..(last + 1).min(logged) {
            let bit = 1 << (page % 8);
            self.memory.set_bits((page / 8) as usize, bit);
        }
    }
}

impl AsFd for DirtyLog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn region(guest: u64, len: u64, offset: u64) -> RegionDescription {
        RegionDescription {
            guest,
            len,
            user: guest + (1 << 40),
            offset,
        }
    }

    #[test]
    fn addresses_are_found_in_their_regions_and_nowhere_else() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(0x10_000).unwrap();
        let mut memory = GuestMemory::default();
        memory
            .add(region(0x8000, 0x2000, 0x1000), file.as_fd())
            .unwrap();
        memory.add(region(0x0, 0x1000, 0), file.as_fd()).unwrap();
        memory
            .add(region(0xA000, 0x1000, 0x8000), file.as_fd())
            .unwrap();
        let mut list = IoVec::default();
        memory.append_to(&mut list, (0x9FF0, 0x20)).unwrap();
        assert_eq!((list.len(), list.segment_count()), (0x20, 2));
        for (address, len) in [
            (0x1000, 1),
            (0xFFF, 2),
            (0x7FFF, 2),
            (0xAFFF, 2),
            (u64::MAX, 1),
            (0x8000, u64::MAX),
        ] {
            let mut list = IoVec::default();
            assert!(memory.append_to(&mut list, (address, len)).is_err());
        }
        assert!(memory.place(0x9FF0, 0x20).is_err(), "two regions");
        let place = memory.place(0x9FF0, 0x10).unwrap();
        assert_eq!(place.range, 0x1FF0..0x2000);
        let user = (1 << 40) + 0xA010;
        assert_eq!(memory.place_of_user(user, 8).unwrap().range, 0x10..0x18);
        assert_eq!(memory.guest_of_user(user, 8), Some(0xA010));
        assert!(memory.place_of_user(user, 0x1000).is_none());
        assert!(memory.place_of_user(0xA010, 8).is_none());
        assert!(memory.place_of_user(u64::MAX, 2).is_none());
        memory.remove(&region(0xA000, 0x1000, 0)).unwrap();
        assert!(memory.place_of_user(user, 8).is_none());
        assert!(memory.remove(&region(0xA000, 0x1000, 0)).is_err());
    }

    #[test]
    fn regions_that_cannot_be_are_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(0x4000).unwrap();
        let mut memory = GuestMemory::default();
        memory.add(region(0x8000, 0x2000, 0), file.as_fd()).unwrap();
        for wrong in [
            region(0x9000, 0x1000, 0),
            region(0x7000, 0x2000, 0),
            region(0x7000, 0x4000, 0),
            region(0x20_000, 0, 0),
            region(0x20_001, 0x1000, 0),
            region(0x20_000, 0x5000, 0),
            region(0x20_000, 0x1000, 0x4000),
            region(0x20_000, 0x1000, u64::MAX - 0xFFF),
            RegionDescription {
                guest: u64::MAX - 0xFFF,
                len: 0x1000,
                user: 0,
                offset: 0,
            },
            RegionDescription {
                user: (1 << 40) + 0x8000,
                ..region(0x20_000, 0x1000, 0)
            },
        ] {
            assert!(memory.add(wrong, file.as_fd()).is_err(), "{wrong:x?}");
        }
        memory
            .add(region(0x20_000, 0x3ED0, 0), file.as_fd())
            .unwrap();
        assert!(memory.place(0x20_000, 0x3ED0).is_ok());
        assert!(memory.place(0x20_000, 0x3ED1).is_err());
    }

    #[test]
    fn written_pages_are_logged() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4).unwrap();
        let log = DirtyLog::map(file.as_fd(), 0, 4).unwrap();
        log.mark((0xFFF, 2));
        log.mark((0x9000, 0x1000));
        log.mark((31 * 4096, u64::MAX));
        log.mark((31 * 4096, 1 << 40));
        log.mark((0, 0));
        let mut bits = [0; 4];
        log.memory.read(0, &mut bits);
        assert_eq!(bits, [0b11, 0b10, 0, 0x80]);
    }
}
