//! [`Index`]: which chunk is where on a disk, and in which pack it is stored.
//!
//! `docs/published-images.md` describes its bytes. An index comes from a store, so from anybody:
//! [`Index::decode`] believes no number before it has compared it with what is there, and the
//! memory that it takes is bounded by the length of the object.

use cowslip_block::{Error, Result};

use crate::cut::{BLOCK_BYTES, CHUNK_BYTES_MAX, ChunkSizes};
use crate::digest::Digest;

mod bytes;

use bytes::{Columns, Reader};

const MAGIC: &[u8; 8] = b"CowsIdx\n";
const VERSION: u32 = 1;
/// Length of the header in bytes.
const HEADER_BYTES: usize = 128;
/// Bytes of a pack in the index: session, digest, length.
const PACK_BYTES: usize = 56;
/// Bytes of a chunk in its compressed table, in four columns of four bytes.
const CHUNK_BYTES: usize = 16;
/// Bytes of a run in its compressed table, in two columns of four bytes.
const RUN_BYTES: usize = 8;

/// Longest index that is read, in bytes.
pub const INDEX_BYTES_MAX: u64 = 768 << 20;
/// Most chunks of a disk.
pub const CHUNKS_MAX: usize = 1 << 24;
/// Most runs of a disk.
pub const RUNS_MAX: usize = 1 << 24;
/// Longest pack in bytes.
pub const PACK_BYTES_MAX: u64 = 1 << 30;
/// Longest disk in bytes.
pub const DISK_BYTES_MAX: u64 = 1 << 60;

/// An identity of a publication, under which its packs are stored.
pub type Session = [u8; 16];

/// An object that stores chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pack {
    /// The publication that stored it.
    pub session: Session,
    /// The digest of its bytes.
    pub digest: Digest,
    /// Its length in bytes.
    pub bytes: u64,
}

/// A chunk, and its place in a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The digest of its data.
    pub digest: Digest,
    /// The pack, by its number in the index.
    pub pack: u32,
    /// First byte in the pack.
    pub offset: u32,
    /// Bytes in the pack. As many as its data has: it is stored as it is; fewer: compressed.
    pub stored_bytes: u32,
    /// Length of the data in blocks.
    pub blocks: u16,
}

impl Chunk {
    /// Length of the data in bytes.
    pub fn data_bytes(&self) -> usize {
        usize::from(self.blocks) * BLOCK_BYTES
    }
}

/// The content of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// No layer of the image stored it; it reads as zeroes.
    Unallocated,
    /// Zeroes.
    Zeroes,
    /// The chunk of this number.
    Chunk(u32),
}

/// A part of a disk, up to where the next one begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First block on the disk.
    pub start: u64,
    /// Its content.
    pub content: Content,
}

/// A disk in chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    /// Length of the disk in bytes.
    pub disk_bytes: u64,
    /// The publication that wrote it.
    pub session: Session,
    /// How it was cut.
    pub sizes: ChunkSizes,
    /// Where chunks are stored.
    pub packs: Vec<Pack>,
    /// Different chunks.
    pub chunks: Vec<Chunk>,
    /// The disk from its beginning to its end, without gaps.
    pub runs: Vec<Run>,
}

impl Index {
    /// Length of the disk in blocks, the last of which may be in part beyond its end.
    pub fn disk_blocks(&self) -> u64 {
        self.disk_bytes.div_ceil(BLOCK_BYTES as u64)
    }

    /// The number of the run that contains a block of the disk.
    pub fn run_at(&self, block: u64) -> usize {
        self.runs.partition_point(|run| run.start <= block) - 1
    }

    /// The block after a run.
    pub fn end_of_run(&self, run: usize) -> u64 {
        match self.runs.get(run + 1) {
            Some(next) => next.start,
            None => self.disk_blocks(),
        }
    }

    /// The index as bytes. They are always the same for the same index.
    ///
    /// # Errors
    /// It has more chunks, runs or bytes than an index may have.
    pub fn encode(&self) -> Result<Vec<u8>> {
        if self.chunks.len() > CHUNKS_MAX || self.runs.len() > RUNS_MAX {
            return Err(Error::invalid(format!(
                "the disk has {} chunks and {} runs, and an index {CHUNKS_MAX} and {RUNS_MAX} at most: a larger --chunk-size makes fewer",
                self.chunks.len(),
                self.runs.len()
            )));
        }
        let chunk_table = packed(&self.chunk_columns())?;
        let run_table = packed(&self.run_columns())?;
        let mut bytes = self.header(chunk_table.len(), run_table.len());
        for pack in &self.packs {
            bytes.extend_from_slice(&pack.session);
            bytes.extend_from_slice(&pack.digest.0);
            bytes.extend_from_slice(&pack.bytes.to_le_bytes());
        }
        for chunk in &self.chunks {
            bytes.extend_from_slice(&chunk.digest.0);
        }
        bytes.extend_from_slice(&chunk_table);
        bytes.extend_from_slice(&run_table);
        bytes.extend_from_slice(&Digest::of(&bytes).0);
        if bytes.len() as u64 > INDEX_BYTES_MAX {
            return Err(Error::invalid("the index would be longer than 768 MiB"));
        }
        Ok(bytes)
    }

    fn header(&self, chunk_table: usize, run_table: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(HEADER_BYTES as u32).to_le_bytes());
        bytes.extend_from_slice(&0_u64.to_le_bytes());
        bytes.extend_from_slice(&self.disk_bytes.to_le_bytes());
        bytes.extend_from_slice(&self.session);
        for size in [self.sizes.min, self.sizes.average, self.sizes.max] {
            bytes.extend_from_slice(&size.to_le_bytes());
        }
        for count in [self.packs.len(), self.chunks.len(), self.runs.len()] {
            bytes.extend_from_slice(&(count as u32).to_le_bytes());
        }
        for len in [chunk_table, run_table] {
            bytes.extend_from_slice(&(len as u64).to_le_bytes());
        }
        bytes.resize(HEADER_BYTES, 0);
        bytes
    }

    /// Chunks by columns: differences to the chunk before are mostly 0, and take no space then.
    fn chunk_columns(&self) -> Columns {
        let mut columns = Columns::new(self.chunks.len(), CHUNK_BYTES / 4);
        let (mut pack, mut end) = (0, 0);
        for (at, chunk) in self.chunks.iter().enumerate() {
            if chunk.pack != pack {
                end = 0;
            }
            columns.put(0, at, chunk.pack.wrapping_sub(pack));
            columns.put(1, at, chunk.offset.wrapping_sub(end));
            columns.put(2, at, chunk.stored_bytes);
            columns.put(3, at, u32::from(chunk.blocks));
            (pack, end) = (chunk.pack, chunk.offset.wrapping_add(chunk.stored_bytes));
        }
        columns
    }

    /// Runs by columns: 0 is unallocated, 1 zeroes, others a chunk by its distance from the one
    /// after the last chunk of a run; and the length of those without a chunk.
    fn run_columns(&self) -> Columns {
        let mut columns = Columns::new(self.runs.len(), RUN_BYTES / 4);
        let mut next = 0_u32;
        for (at, run) in self.runs.iter().enumerate() {
            let blocks = self.end_of_run(at) - run.start;
            let (what, blocks) = match run.content {
                Content::Unallocated => (0, blocks as u32),
                Content::Zeroes => (1, blocks as u32),
                Content::Chunk(chunk) => {
                    let distance = zigzag(chunk.wrapping_sub(next) as i32);
                    next = chunk + 1;
                    (distance + 2, 0)
                }
            };
            columns.put(0, at, what);
            columns.put(1, at, blocks);
        }
        columns
    }

    /// Reads an index; `name` is for messages.
    ///
    /// # Errors
    /// `Unsupported` for another version or unknown features; `Corrupt` names the structure and its
    /// offset.
    pub fn decode(bytes: &[u8], name: &str) -> Result<Index> {
        let mut reader = Reader::new(bytes, name);
        if bytes.get(..MAGIC.len()) != Some(MAGIC.as_slice()) {
            return Err(reader.corrupt("header", "it is no index of a published disk"));
        }
        let header = Header::decode(&mut reader)?;
        let mut packs = Vec::with_capacity(header.packs);
        for _ in 0..header.packs {
            packs.push(pack(&mut reader)?);
        }
        let digests_at = reader.at();
        let digests = reader.take("chunk digests", header.chunks * 32)?;
        let chunk_table = reader.table("chunk table", header.chunk_table, header.chunks, 4)?;
        let run_table = reader.table("run table", header.run_table, header.runs, 2)?;
        let end = reader.at();
        let digest = reader.take("checksum", 32)?;
        if digest != Digest::of(&bytes[..end]).0 {
            return Err(reader.corrupt_at("checksum", end, "it does not fit the bytes before it"));
        }
        if reader.at() != bytes.len() {
            return Err(reader.corrupt("checksum", "more bytes follow"));
        }
        let mut index = Index {
            disk_bytes: header.disk_bytes,
            session: header.session,
            sizes: header.sizes,
            packs,
            chunks: Vec::with_capacity(header.chunks),
            runs: Vec::with_capacity(header.runs),
        };
        let digests = digests.as_chunks::<32>().0;
        index
            .read_chunks(digests, &chunk_table)
            .and_then(|()| index.read_runs(&run_table))
            .map_err(|(structure, detail)| reader.corrupt_at(structure, digests_at, detail))?;
        Ok(index)
    }

    fn read_chunks(&mut self, digests: &[[u8; 32]], table: &Columns) -> Checked<()> {
        let wrong = |at, what| Err(("chunk table", format!("chunk {at}: {what}")));
        let (mut pack, mut end) = (0_u32, 0_u32);
        for (at, digest) in digests.iter().enumerate() {
            let step = table.get(0, at);
            if step != 0 {
                end = 0;
            }
            pack = pack.wrapping_add(step);
            let chunk = Chunk {
                digest: Digest(*digest),
                pack,
                offset: table.get(1, at).wrapping_add(end),
                stored_bytes: table.get(2, at),
                blocks: u16::try_from(table.get(3, at)).unwrap_or(0),
            };
            let data_bytes = chunk.data_bytes();
            if data_bytes == 0 || data_bytes > CHUNK_BYTES_MAX {
                return wrong(at, "its length is not possible");
            }
            if chunk.stored_bytes == 0 || chunk.stored_bytes as usize > data_bytes {
                return wrong(at, "its stored length is not possible");
            }
            let Some(found) = self.packs.get(pack as usize) else {
                return wrong(at, "there is no such pack");
            };
            let stored_end = u64::from(chunk.offset) + u64::from(chunk.stored_bytes);
            if stored_end > found.bytes {
                return wrong(at, "it ends behind its pack");
            }
            end = stored_end as u32;
            self.chunks.push(chunk);
        }
        Ok(())
    }

    fn read_runs(&mut self, table: &Columns) -> Checked<()> {
        let wrong = |at, what| Err(("run table", format!("run {at}: {what}")));
        let disk_blocks = self.disk_blocks();
        let (mut start, mut next) = (0_u64, 0_u32);
        for at in 0..table.rows() {
            let (what, blocks) = (table.get(0, at), table.get(1, at));
            let (content, blocks) = match (what, blocks) {
                (0, blocks) => (Content::Unallocated, u64::from(blocks)),
                (1, blocks) => (Content::Zeroes, u64::from(blocks)),
                (what, 0) => {
                    let number = next.wrapping_add(unzigzag(what - 2) as u32);
                    let Some(chunk) = self.chunks.get(number as usize) else {
                        return wrong(at, "there is no such chunk");
                    };
                    next = number + 1;
                    (Content::Chunk(number), u64::from(chunk.blocks))
                }
                _ => return wrong(at, "a chunk has a length of its own"),
            };
            if blocks == 0 {
                return wrong(at, "it is empty");
            }
            self.runs.push(Run { start, content });
            start += blocks;
            if start > disk_blocks {
                return wrong(at, "it ends behind the disk");
            }
        }
        match start == disk_blocks {
            true => Ok(()),
            false => Err(("run table", "the runs end before the disk does".to_string())),
        }
    }
}

/// A structure and its contradiction.
type Checked<T> = std::result::Result<T, (&'static str, String)>;

/// The numbers of a header, which fit the length of the index.
struct Header {
    disk_bytes: u64,
    session: Session,
    sizes: ChunkSizes,
    packs: usize,
    chunks: usize,
    runs: usize,
    chunk_table: usize,
    run_table: usize,
}

impl Header {
    fn decode(reader: &mut Reader<'_>) -> Result<Header> {
        let whole = reader.len() as u64;
        reader.take("header", MAGIC.len())?;
        let version = reader.u32("header")?;
        if version != VERSION {
            return Err(reader.unsupported(format!("version {version} of published disks")));
        }
        if reader.u32("header")? as usize != HEADER_BYTES {
            return Err(reader.corrupt("header", "its length is not that of version 1"));
        }
        let features = reader.u64("header")?;
        if features != 0 {
            return Err(reader.unsupported(format!("features {features:#x} of published disks")));
        }
        let header = Header {
            disk_bytes: reader.u64("header")?,
            session: reader.array("header")?,
            sizes: ChunkSizes {
                min: reader.u32("header")?,
                average: reader.u32("header")?,
                max: reader.u32("header")?,
            },
            packs: reader.u32("header")? as usize,
            chunks: reader.u32("header")? as usize,
            runs: reader.u32("header")? as usize,
            chunk_table: reader.len_within("header", whole)?,
            run_table: reader.len_within("header", whole)?,
        };
        let reserved = reader.take("header", HEADER_BYTES - reader.at())?;
        if reserved.iter().any(|byte| *byte != 0) {
            return Err(reader.corrupt("header", "reserved bytes are not 0"));
        }
        header.check(reader)?;
        Ok(header)
    }

    fn check(&self, reader: &Reader<'_>) -> Result<()> {
        let wrong = |detail: &str| Err(reader.corrupt_at("header", 0, detail));
        let ChunkSizes { min, average, max } = self.sizes;
        let is_cut_so = (1 << 10..=1 << 20).contains(&min)
            && (min..=max).contains(&average)
            && max as usize <= CHUNK_BYTES_MAX
            && [min, average, max]
                .iter()
                .all(|size| size.is_multiple_of(2));
        match self {
            _ if self.disk_bytes > DISK_BYTES_MAX => wrong("the disk is longer than 2^60 bytes"),
            _ if !is_cut_so => wrong("the lengths of chunks are not possible"),
            _ if self.chunks > CHUNKS_MAX => wrong("there are more than 2^24 chunks"),
            _ if self.runs > RUNS_MAX => wrong("there are more than 2^24 runs"),
            _ => {
                let fixed = self.packs as u64 * PACK_BYTES as u64 + self.chunks as u64 * 32;
                match fixed <= reader.len() as u64 {
                    true => Ok(()),
                    false => wrong("it announces more than there is"),
                }
            }
        }
    }
}

fn pack(reader: &mut Reader<'_>) -> Result<Pack> {
    let pack = Pack {
        session: reader.array("pack")?,
        digest: Digest(reader.array("pack")?),
        bytes: reader.u64("pack")?,
    };
    if pack.bytes == 0 || pack.bytes > PACK_BYTES_MAX {
        return Err(reader.corrupt("pack", "its length is not possible"));
    }
    Ok(pack)
}

/// Small numbers for small distances to either side. Numbers of chunks are below 2^24.
fn zigzag(distance: i32) -> u32 {
    ((distance << 1) ^ (distance >> 31)) as u32
}

fn unzigzag(number: u32) -> i32 {
    (number >> 1) as i32 ^ -((number & 1) as i32)
}

fn packed(columns: &Columns) -> Result<Vec<u8>> {
    zstd::bulk::compress(columns.bytes(), 9)
        .map_err(|error| Error::io("Could not compress the index", error))
}

#[cfg(test)]
mod tests;
