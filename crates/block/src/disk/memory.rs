//! [`MemoryDisk`]: a sparse disk in memory.

use std::collections::HashMap;
use std::future::ready;

use cowslip_queue::{IoVec, IoVecMut};

use super::{Disk, DiskFuture, Extent, Features, ZeroOptions, within};
use crate::Result;
use crate::file::{Durability, Space};
use crate::sync::{Mutex, MutexGuard, lock};

/// Page size in bytes, the unit of allocation.
const PAGE_BYTES: u64 = 4096;

/// A sparse disk in memory. Requests complete at once.
#[derive(Debug)]
pub struct MemoryDisk {
    name: String,
    size: u64,
    features: Features,
    pages: Mutex<HashMap<u64, Box<[u8]>>>,
}

/// The part of a range that lies in one page.
struct PagePart {
    page: u64,
    /// First byte within the page.
    start: usize,
    /// First byte within the range.
    at: usize,
    len: usize,
}

impl PagePart {
    fn is_whole_page(&self) -> bool {
        self.len as u64 == PAGE_BYTES
    }
}

/// Splits a range at the edges of pages.
fn page_parts(offset: u64, len: u64) -> impl Iterator<Item = PagePart> {
    let mut done = 0;
    std::iter::from_fn(move || {
        (done < len).then(|| {
            let here = offset + done;
            let start = here % PAGE_BYTES;
            let part = (PAGE_BYTES - start).min(len - done);
            let at = done;
            done += part;
            PagePart {
                page: here / PAGE_BYTES,
                start: in_memory(start),
                at: in_memory(at),
                len: in_memory(part),
            }
        })
    })
}

fn in_memory(len: u64) -> usize {
    usize::try_from(len).expect("what is in memory has a length of its size")
}

impl MemoryDisk {
    /// A writable disk of `size` zeroes.
    pub fn new(name: impl Into<String>, size: u64) -> MemoryDisk {
        MemoryDisk {
            name: name.into(),
            size,
            features: Features {
                writable: true,
                preferred_block_bytes: PAGE_BYTES,
            },
            pages: Mutex::default(),
        }
    }

    /// This disk, refusing writes.
    #[must_use]
    pub fn read_only(mut self) -> MemoryDisk {
        self.features.writable = false;
        self
    }

    fn pages(&self) -> MutexGuard<'_, HashMap<u64, Box<[u8]>>> {
        lock(&self.pages)
    }

    fn erase(&self, offset: u64, len: u64, gives_back: impl Fn(&PagePart) -> bool) -> Result<()> {
        within(self.size, offset, len)?;
        let mut pages = self.pages();
        for part in page_parts(offset, len) {
            if gives_back(&part) {
                pages.remove(&part.page);
            } else if let Some(page) = pages.get_mut(&part.page) {
                page[part.start..part.start + part.len].fill(0);
            }
        }
        Ok(())
    }

    fn read_now(&self, offset: u64, mut buf: IoVecMut) -> Result<IoVecMut> {
        within(self.size, offset, buf.len() as u64)?;
        let pages = self.pages();
        for part in page_parts(offset, buf.len() as u64) {
            match pages.get(&part.page) {
                Some(page) => {
                    buf.copy_from_slice(part.at, &page[part.start..part.start + part.len]);
                }
                None => buf.fill_range(part.at..part.at + part.len, 0),
            }
        }
        Ok(buf)
    }

    fn write_now(&self, offset: u64, data: &IoVec) -> Result<()> {
        within(self.size, offset, data.len() as u64)?;
        let mut pages = self.pages();
        for part in page_parts(offset, data.len() as u64) {
            let page = pages
                .entry(part.page)
                .or_insert_with(|| vec![0; in_memory(PAGE_BYTES)].into_boxed_slice());
            data.copy_to_slice(part.at, &mut page[part.start..part.start + part.len]);
        }
        Ok(())
    }

    fn extents_now(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>> {
        within(self.size, offset, len)?;
        let pages = self.pages();
        let mut extents: Vec<Extent> = Vec::new();
        for part in page_parts(offset, len) {
            let data = pages.contains_key(&part.page);
            let is_full = extents.len() == max;
            match extents.last_mut() {
                Some(last) if last.data == data => last.len += part.len as u64,
                _ if is_full => break,
                _ => extents.push(Extent {
                    start: offset + part.at as u64,
                    len: part.len as u64,
                    depth: 0,
                    present: data,
                    zero: !data,
                    data,
                    compressed: false,
                    host_offset: None,
                }),
            }
        }
        Ok(extents)
    }
}

impl Disk for MemoryDisk {
    fn name(&self) -> &str {
        &self.name
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn features(&self) -> Features {
        self.features
    }

    fn read(&self, offset: u64, buf: IoVecMut) -> DiskFuture<'_, IoVecMut> {
        Box::pin(ready(self.read_now(offset, buf)))
    }

    fn write(&self, offset: u64, data: IoVec, _durability: Durability) -> DiskFuture<'_, ()> {
        Box::pin(ready(self.write_now(offset, &data)))
    }

    fn zero(&self, offset: u64, len: u64, options: ZeroOptions) -> DiskFuture<'_, ()> {
        let may_release = options.space == Space::Release;
        let erased = self.erase(offset, len, |part| may_release && part.is_whole_page());
        Box::pin(ready(erased))
    }

    fn discard(&self, offset: u64, len: u64) -> DiskFuture<'_, ()> {
        Box::pin(ready(self.erase(offset, len, PagePart::is_whole_page)))
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> DiskFuture<'_, Vec<Extent>> {
        Box::pin(ready(self.extents_now(offset, len, max)))
    }
}
