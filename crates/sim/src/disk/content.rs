//! The bytes of a simulated file, sparse by pages of 4 KiB that copies share: a crash image costs
//! the pages that differ.

use std::collections::BTreeMap;
use std::sync::Arc;

/// The unit in which pages are shared.
pub const PAGE_BYTES: u64 = 4096;

type Page = [u8; PAGE_BYTES as usize];

/// The length and the bytes of a file; pages that are absent read as zeroes.
#[derive(Clone, Debug, Default)]
pub struct Content {
    pages: BTreeMap<u64, Arc<Page>>,
    len: u64,
}

/// The same length and the same bytes; pages of zeroes may be present or not.
impl PartialEq for Content {
    fn eq(&self, other: &Content) -> bool {
        let has_all_of = |a: &Content, b: &Content| {
            b.pages
                .iter()
                .all(|(number, page)| match a.pages.get(number) {
                    Some(same) => Arc::ptr_eq(same, page) || same == page,
                    None => page.iter().all(|&byte| byte == 0),
                })
        };
        self.len == other.len && has_all_of(self, other) && has_all_of(other, self)
    }
}

/// The parts `(page, start within it, length)` of a range.
fn parts(offset: u64, len: u64) -> impl Iterator<Item = (u64, usize, usize)> {
    let end = offset + len;
    let mut at = offset;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let start = at % PAGE_BYTES;
            let part = (PAGE_BYTES - start).min(end - at);
            let page = at / PAGE_BYTES;
            at += part;
            (page, start as usize, part as usize)
        })
    })
}

impl Content {
    /// A file with these bytes.
    pub fn of(bytes: &[u8]) -> Content {
        let mut content = Content::default();
        content.write(0, bytes);
        content
    }

    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is no byte in it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Fills `buf` with the bytes at `offset`, zeroes beyond the end.
    pub fn read(&self, offset: u64, buf: &mut [u8]) {
        let mut done = 0;
        for (page, start, len) in parts(offset, buf.len() as u64) {
            let part = &mut buf[done..done + len];
            match self.pages.get(&page) {
                Some(bytes) => part.copy_from_slice(&bytes[start..start + len]),
                None => part.fill(0),
            }
            done += len;
        }
    }

    /// Bytes at `offset` as a vector.
    pub fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes);
        bytes
    }

    /// The big-endian number of up to eight bytes at `offset`.
    pub fn number(&self, offset: u64, bytes: usize) -> u64 {
        let mut read = [0; 8];
        self.read(offset, &mut read[8 - bytes..]);
        u64::from_be_bytes(read)
    }

    /// The big-endian numbers of eight bytes each in a range, which is a multiple of eight bytes
    /// long. A page that is absent costs nothing.
    pub fn numbers(&self, offset: u64, len: u64) -> Vec<u64> {
        let is_absent = self.pages_of(offset, len).next().is_none();
        if is_absent {
            return vec![0; (len / 8) as usize];
        }
        let bytes = self.bytes(offset, len as usize);
        let numbers = bytes.as_chunks::<8>().0.iter();
        numbers.map(|bytes| u64::from_be_bytes(*bytes)).collect()
    }

    /// The pages that are present and hold bytes of a range.
    fn pages_of(&self, offset: u64, len: u64) -> impl Iterator<Item = &Arc<Page>> {
        let pages = offset / PAGE_BYTES..(offset + len).div_ceil(PAGE_BYTES);
        self.pages.range(pages).map(|(_, page)| page)
    }

    /// Writes `data` at `offset`; moves the end if it lies before.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let mut done = 0;
        for (page, start, len) in parts(offset, data.len() as u64) {
            let bytes = self
                .pages
                .entry(page)
                .or_insert_with(|| Arc::new([0; PAGE_BYTES as usize]));
            Arc::make_mut(bytes)[start..start + len].copy_from_slice(&data[done..done + len]);
            done += len;
        }
        self.extend_to(offset + data.len() as u64);
    }

    /// Makes a range read as zeroes, and gives up its whole pages. The end stays where it is.
    pub fn zero(&mut self, offset: u64, len: u64) {
        let end = (offset + len).min(self.len.next_multiple_of(PAGE_BYTES));
        for (page, start, len) in parts(offset, end.saturating_sub(offset)) {
            if len as u64 == PAGE_BYTES {
                self.pages.remove(&page);
            } else if let Some(bytes) = self.pages.get_mut(&page) {
                Arc::make_mut(bytes)[start..start + len].fill(0);
            }
        }
    }

    /// Moves the end to `end` if it lies before.
    pub fn extend_to(&mut self, end: u64) {
        self.len = self.len.max(end);
    }

    /// Cuts or extends the file; what is added reads as zeroes.
    pub fn set_len(&mut self, len: u64) {
        if len < self.len {
            drop(self.pages.split_off(&len.div_ceil(PAGE_BYTES)));
            let start = (len % PAGE_BYTES) as usize;
            if start != 0
                && let Some(bytes) = self.pages.get_mut(&(len / PAGE_BYTES))
            {
                Arc::make_mut(bytes)[start..].fill(0);
            }
        }
        self.len = len;
    }

    /// Whether the page that holds `offset` is present.
    pub fn has_page_at(&self, offset: u64) -> bool {
        self.pages.contains_key(&(offset / PAGE_BYTES))
    }

    /// Bytes of the pages that are present.
    pub fn allocated_bytes(&self) -> u64 {
        self.pages.len() as u64 * PAGE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn contents_are_the_same_whatever_pages_they_have() {
        let mut zeroed = Content::of(&[0; 9000]);
        let mut sparse = Content::default();
        sparse.set_len(9000);
        let same = |a: &Content, b: &Content| a == b;
        assert!(same(&zeroed, &sparse) && same(&sparse, &zeroed));
        sparse.set_len(1 << 50);
        assert!(zeroed != sparse);
        zeroed.set_len(1 << 50);
        zeroed.write(1 << 40, &[1]);
        assert!(!same(&zeroed, &sparse) && !same(&sparse, &zeroed));
    }

    #[test]
    fn content_agrees_with_a_plain_vector() {
        let mut rng = Rng::new(3);
        let mut content = Content::default();
        let mut plain: Vec<u8> = Vec::new();
        for round in 0..2000u32 {
            let offset = rng.below(20_000);
            let len = rng.below(9000) as usize;
            match rng.below(4) {
                0 => {
                    content.set_len(offset);
                    plain.resize(offset as usize, 0);
                }
                1 => {
                    content.zero(offset, len as u64);
                    let end = plain.len().min(offset as usize + len);
                    if (offset as usize) < end {
                        plain[offset as usize..end].fill(0);
                    }
                }
                _ => {
                    let data = vec![round as u8 | 1; len];
                    content.write(offset, &data);
                    let end = offset as usize + len;
                    if plain.len() < end {
                        plain.resize(end, 0);
                    }
                    plain[offset as usize..end].copy_from_slice(&data);
                }
            }
            assert_eq!(content.len(), plain.len() as u64);
            assert_eq!(content.bytes(0, plain.len()), plain, "after round {round}");
            assert!(content.bytes(content.len(), 5000).iter().all(|b| *b == 0));
        }
    }
}
