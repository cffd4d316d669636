//! The index of a cache file: which blocks are there.
//!
//! | offset | length | |
//! | --- | --- | --- |
//! | 0 | 8 | `CWSLPCCH` |
//! | 8 | 4 | version of this format: 1 |
//! | 12 | 4 | bits of the block size |
//! | 16 | 8 | length of the object, in bytes |
//! | 24 | 8 | time of the last change, in seconds after 1970; 0 if it is not known |
//! | 32 | 4 | length of the ETag; `0xffff_ffff` if there is none |
//! | 36 | 4 | length of the URL |
//! | 40 | … | ETag, URL |
//! | 4076 | 4 | CRC-32C of all before |
//! | 4080 | 16 | the boot of the host in which entries were made that are not durable |
//! | 4096 | 16 each | entries |
//!
//! An entry has the CRC-64 of the block, its state, and the CRC-32C of its number, that sum and
//! that state; zeroes for a block that is not there. All numbers are little-endian.
//!
//! *What a crash leaves.* A block is *present* once its bytes were written, and *durable* once they
//! were flushed. As long as the host runs, the page cache shows both as they were written, whatever
//! processes end. After the host was started again, only durable entries count: bytes were durable
//! before the entry said so. Whatever the entry says, the bytes are compared with the sum before
//! they are used.

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::version::Version;

/// Bytes before the entries.
pub(crate) const HEAD_BYTES: u64 = 4096;
const ENTRY_BYTES: u64 = 16;
const MAGIC: &[u8; 8] = b"CWSLPCCH";
const FORMAT: u32 = 1;
const SUM_AT: usize = 4076;
const BOOT_AT: usize = 4080;
const TEXT_AT: usize = 40;
const TEXT_MAX: usize = SUM_AT - TEXT_AT;
const NO_TAG: u32 = u32::MAX;

/// Bytes that an index is in: a file, or a simulated one.
pub(crate) trait Medium {
    /// Reads; bytes beyond the end are zeroes.
    fn read_at(&self, to: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes.
    fn write_at(&self, from: &[u8], offset: u64) -> io::Result<()>;
    /// Makes all durable that was written.
    fn sync(&self) -> io::Result<()>;
}

impl Medium for std::fs::File {
    fn read_at(&self, to: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < to.len() {
            match FileExt::read_at(self, &mut to[done..], offset + done as u64) {
                Ok(0) => {
                    to[done..].fill(0);
                    break;
                }
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write_at(&self, from: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(from, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}

/// The first page of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) url: String,
    pub(crate) version: Version,
    pub(crate) block_bits: u32,
    /// The boot of the host.
    pub(crate) boot: [u8; 16],
}

impl Head {
    /// The page, or nothing if the names are too long for it.
    pub(crate) fn encode(&self) -> Option<Vec<u8>> {
        let tag = self.version.e_tag.as_deref().unwrap_or_default();
        let mut page = vec![0; HEAD_BYTES as usize];
        if tag.len() + self.url.len() > TEXT_MAX {
            return None;
        }
        let tag_len = self.version.e_tag.as_ref().map(|tag| tag.len() as u32);
        page[..8].copy_from_slice(MAGIC);
        page[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        page[12..16].copy_from_slice(&self.block_bits.to_le_bytes());
        page[16..24].copy_from_slice(&self.version.bytes.to_le_bytes());
        let changed = self.version.last_modified.unwrap_or(0);
        page[24..32].copy_from_slice(&changed.to_le_bytes());
        page[32..36].copy_from_slice(&tag_len.unwrap_or(NO_TAG).to_le_bytes());
        page[36..40].copy_from_slice(&(self.url.len() as u32).to_le_bytes());
        let url_at = TEXT_AT + tag.len();
        page[TEXT_AT..url_at].copy_from_slice(tag.as_bytes());
        page[url_at..url_at + self.url.len()].copy_from_slice(self.url.as_bytes());
        let sum = crc_fast::crc32_iscsi(&page[..SUM_AT]);
        page[SUM_AT..SUM_AT + 4].copy_from_slice(&sum.to_le_bytes());
        page[BOOT_AT..].copy_from_slice(&self.boot);
        Some(page)
    }

    /// Reads a page; nothing if it is none, or damaged.
    pub(crate) fn decode(page: &[u8]) -> Option<Head> {
        let number = |at: usize| Some(u32::from_le_bytes(page.get(at..at + 4)?.try_into().ok()?));
        let long = |at: usize| Some(i64::from_le_bytes(page.get(at..at + 8)?.try_into().ok()?));
        let is_ours = page.len() == HEAD_BYTES as usize
            && page.starts_with(MAGIC)
            && number(8)? == FORMAT
            && number(SUM_AT)? == crc_fast::crc32_iscsi(&page[..SUM_AT]);
        if !is_ours {
            return None;
        }
        let (tag_len, url_len) = (number(32)?, number(36)? as usize);
        let url_at = TEXT_AT
            + if tag_len == NO_TAG {
                0
            } else {
                tag_len as usize
            };
        let text = |start: usize, end: usize| {
            let text = page[..SUM_AT].get(start..end)?;
            Some(std::str::from_utf8(text).ok()?.to_string())
        };
        let e_tag = match tag_len {
            NO_TAG => None,
            _ => Some(text(TEXT_AT, url_at)?),
        };
        let block_bits = number(12)?;
        if !(12..=40).contains(&block_bits) {
            return None;
        }
        Some(Head {
            url: text(url_at, url_at.checked_add(url_len)?)?,
            version: Version {
                e_tag,
                last_modified: Some(long(24)?).filter(|changed| *changed != 0),
                bytes: long(16)? as u64,
            },
            block_bits,
            boot: page[BOOT_AT..].try_into().ok()?,
        })
    }

    /// Number of blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.version.bytes.div_ceil(1 << self.block_bits)
    }
}

/// State of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// It is not there, or its entry is damaged.
    Absent,
    /// Its bytes were written; a crash of the host may have lost them.
    Present(u64),
    /// Its bytes were durable before.
    Durable(u64),
}

const PRESENT: u32 = 1;
const DURABLE: u32 = 2;

impl Entry {
    fn encode(self, block: u64) -> [u8; ENTRY_BYTES as usize] {
        let (sum, state) = match self {
            Entry::Absent => return [0; ENTRY_BYTES as usize],
            Entry::Present(sum) => (sum, PRESENT),
            Entry::Durable(sum) => (sum, DURABLE),
        };
        let mut bytes = [0; ENTRY_BYTES as usize];
        bytes[..8].copy_from_slice(&sum.to_le_bytes());
        bytes[8..12].copy_from_slice(&state.to_le_bytes());
        let own = entry_sum(block, &bytes);
        bytes[12..].copy_from_slice(&own.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; ENTRY_BYTES as usize], block: u64) -> Entry {
        let [sum @ .., _, _, _, _, _, _, _, _] = *bytes;
        let sum = u64::from_le_bytes(sum);
        let [_, _, _, _, _, _, _, _, state @ .., _, _, _, _] = *bytes;
        let [_, _, _, _, _, _, _, _, _, _, _, _, own @ ..] = *bytes;
        let is_whole = u32::from_le_bytes(own) == entry_sum(block, bytes);
        match (is_whole, u32::from_le_bytes(state)) {
            (true, PRESENT) => Entry::Present(sum),
            (true, DURABLE) => Entry::Durable(sum),
            _ => Entry::Absent,
        }
    }
}

fn entry_sum(block: u64, bytes: &[u8; ENTRY_BYTES as usize]) -> u32 {
    let mut summed = [0; 20];
    summed[..8].copy_from_slice(&block.to_le_bytes());
    summed[8..].copy_from_slice(&bytes[..12]);
    crc_fast::crc32_iscsi(&summed)
}

/// Where the entries of blocks are.
pub(crate) fn range_of(blocks: &Range<u64>) -> Range<u64> {
    HEAD_BYTES + blocks.start * ENTRY_BYTES..HEAD_BYTES + blocks.end * ENTRY_BYTES
}

/// The checksum of a block's bytes.
pub(crate) fn sum_of(bytes: &[u8]) -> u64 {
    crc_fast::crc64_nvme(bytes)
}

/// The index of one version of an object.
#[derive(Debug)]
pub(crate) struct Index<M> {
    pub(crate) medium: M,
    pub(crate) head: Head,
}

impl<M: Medium> Index<M> {
    /// Reads the head of an index; the medium comes back if there is none, or a damaged one.
    pub(crate) fn open(medium: M) -> io::Result<Result<Index<M>, M>> {
        let mut page = vec![0; HEAD_BYTES as usize];
        medium.read_at(&mut page, 0)?;
        Ok(match Head::decode(&page) {
            Some(head) => Ok(Index { medium, head }),
            None => Err(medium),
        })
    }

    pub(crate) fn entry(&self, block: u64) -> io::Result<Entry> {
        let mut bytes = [0; ENTRY_BYTES as usize];
        let offset = HEAD_BYTES + block * ENTRY_BYTES;
        self.medium.read_at(&mut bytes, offset)?;
        Ok(Entry::decode(&bytes, block))
    }

    /// The first entries, at most `most` of them.
    pub(crate) fn first_entries(&self, most: u64) -> io::Result<Vec<Entry>> {
        let count = self.head.blocks().min(most);
        let mut bytes = vec![0; (count * ENTRY_BYTES) as usize];
        self.medium.read_at(&mut bytes, HEAD_BYTES)?;
        let entries = (0..).zip(bytes.as_chunks().0);
        Ok(entries
            .map(|(block, bytes)| Entry::decode(bytes, block))
            .collect())
    }

    pub(crate) fn set(&self, block: u64, entry: Entry) -> io::Result<()> {
        let offset = HEAD_BYTES + block * ENTRY_BYTES;
        self.medium.write_at(&entry.encode(block), offset)
    }

    /// The boot that the index is of, which another process may have changed.
    pub(crate) fn boot(&self) -> io::Result<[u8; 16]> {
        let mut boot = [0; 16];
        self.medium.read_at(&mut boot, BOOT_AT as u64)?;
        Ok(boot)
    }

    /// Forgets what may have been lost when the host ended, and belongs to this boot from then on.
    /// Nobody else may use the index meanwhile.
    pub(crate) fn begin_boot(&self, boot: &[u8; 16]) -> io::Result<()> {
        const AT_ONCE: u64 = 4096;
        let mut block = 0;
        let mut bytes = vec![0; (AT_ONCE * ENTRY_BYTES) as usize];
        while block < self.head.blocks() {
            let count = AT_ONCE.min(self.head.blocks() - block);
            let bytes = &mut bytes[..(count * ENTRY_BYTES) as usize];
            let offset = HEAD_BYTES + block * ENTRY_BYTES;
            self.medium.read_at(bytes, offset)?;
            let mut is_changed = false;
            for (number, bytes) in (block..).zip(bytes.as_chunks_mut().0) {
                let is_kept = matches!(Entry::decode(bytes, number), Entry::Durable(_));
                if !is_kept && *bytes != [0; ENTRY_BYTES as usize] {
                    bytes.fill(0);
                    is_changed = true;
                }
            }
            if is_changed {
                self.medium.write_at(bytes, offset)?;
            }
            block += count;
        }
        // Entries of the boot before must not come back under the name of this one.
        self.medium.sync()?;
        self.medium.write_at(boot, BOOT_AT as u64)?;
        self.medium.sync()
    }

    /// Stores a block: its bytes first, then its entry.
    pub(crate) fn store(&self, data: &impl Medium, block: u64, bytes: &[u8]) -> io::Result<()> {
        data.write_at(bytes, block << self.head.block_bits)?;
        self.set(block, Entry::Present(sum_of(bytes)))
    }

    /// Marks blocks that are present as durable, after it has made them that.
    pub(crate) fn mark_durable(&self, data: &impl Medium, blocks: &[u64]) -> io::Result<()> {
        data.sync()?;
        for &block in blocks {
            if let Entry::Present(sum) = self.entry(block)? {
                self.set(block, Entry::Durable(sum))?;
            }
        }
        Ok(())
    }
}
