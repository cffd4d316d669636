//! Packs: chunks, compressed one by one, one after another in an object.

use cowslip_block::{Error, Result};

use crate::digest::Digest;
use crate::index::{Chunk, Pack, Session};

/// Usual length after which a pack takes no more chunks, in bytes.
pub const PACK_BYTES: usize = 16 << 20;

/// A chunk as it is stored.
#[derive(Clone, Debug)]
pub struct StoredChunk {
    /// The digest of its data.
    pub digest: Digest,
    /// Length of its data in blocks.
    pub blocks: u16,
    /// Its bytes: those of its data, or fewer, compressed by zstd.
    pub bytes: Vec<u8>,
}

/// Compresses the data of a chunk, unless that makes it no shorter.
///
/// # Errors
/// The compressor's.
pub fn compress(digest: Digest, data: Vec<u8>, level: i32) -> Result<StoredChunk> {
    let compressed = zstd::bulk::compress(&data, level)
        .map_err(|error| Error::io("Could not compress a chunk", error))?;
    let blocks = (data.len() / crate::cut::BLOCK_BYTES) as u16;
    let bytes = match compressed.len() < data.len() {
        true => compressed,
        false => data,
    };
    Ok(StoredChunk {
        digest,
        blocks,
        bytes,
    })
}

/// The data of a chunk from its bytes in a pack. It is never longer than the index says, and has
/// the digest that the index says.
///
/// # Errors
/// `Corrupt`; `pack` names the object.
pub fn decompress(chunk: &Chunk, stored: &[u8], pack: &str) -> Result<Vec<u8>> {
    let corrupt = |detail: String| Error::Corrupt {
        file: pack.to_string(),
        structure: "chunk",
        offset: u64::from(chunk.offset),
        detail,
    };
    let bytes = chunk.data_bytes();
    let data = match stored.len() == bytes {
        true => stored.to_vec(),
        false => {
            let data = zstd::bulk::decompress(stored, bytes);
            data.map_err(|error| corrupt(error.to_string()))?
        }
    };
    if data.len() != bytes {
        return Err(corrupt(format!("it has {} bytes of {bytes}", data.len())));
    }
    if Digest::of(&data) != chunk.digest {
        return Err(corrupt("its data does not have its digest".to_string()));
    }
    Ok(data)
}

/// A pack that is being filled.
#[derive(Debug, Default)]
pub struct OpenPack {
    bytes: Vec<u8>,
}

impl OpenPack {
    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Bytes in it.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Adds a chunk. Returns its entry for the index, with the number that the pack will have.
    pub fn add(&mut self, chunk: &StoredChunk, pack: u32) -> Chunk {
        let entry = Chunk {
            digest: chunk.digest,
            pack,
            offset: self.bytes.len() as u32,
            stored_bytes: chunk.bytes.len() as u32,
            blocks: chunk.blocks,
        };
        self.bytes.extend_from_slice(&chunk.bytes);
        entry
    }

    /// Its bytes; it is empty afterwards.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

/// The entry of a pack of these bytes.
pub fn entry(session: Session, bytes: &[u8]) -> Pack {
    Pack {
        session,
        digest: Digest::of(bytes),
        bytes: bytes.len() as u64,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.

    use super::*;

    fn chunk_of(data: &[u8], stored: &StoredChunk) -> Chunk {
        let mut pack = OpenPack::default();
        pack.add(stored, 0);
        let chunk = pack.add(stored, 0);
        assert_eq!(chunk.offset as usize, stored.bytes.len());
        assert_eq!(chunk.data_bytes(), data.len());
        chunk
    }

    #[test]
    fn a_chunk_is_what_was_stored() {
        let text = b"a guest's bytes ".repeat(512);
        let mut noise = Vec::new();
        while noise.len() < 4096 {
            noise.extend_from_slice(&Digest::of(&noise).0);
        }
        for (data, is_shorter) in [(text, true), (noise, false)] {
            let stored = compress(Digest::of(&data), data.clone(), 3).unwrap();
            assert_eq!(stored.bytes.len() < data.len(), is_shorter);
            let chunk = chunk_of(&data, &stored);
            assert_eq!(decompress(&chunk, &stored.bytes, "p").unwrap(), data);
            for at in (0..stored.bytes.len()).step_by(37) {
                let mut wrong = stored.bytes.clone();
                wrong[at] ^= 0x10;
                assert!(decompress(&chunk, &wrong, "p").is_err(), "{at}");
            }
        }
    }

    #[test]
    fn a_chunk_that_expands_beyond_its_length_is_refused() {
        let data = vec![7; 8192];
        let bomb = zstd::bulk::compress(&vec![7; 256 << 20], 3).unwrap();
        let mut stored = compress(Digest::of(&data), data.clone(), 3).unwrap();
        let chunk = chunk_of(&data, &stored);
        let refused = decompress(&chunk, &bomb[..bomb.len().min(8191)], "p");
        assert!(refused.is_err());
        stored.bytes = zstd::bulk::compress(&data[..4096], 3).unwrap();
        let refused = decompress(&chunk, &stored.bytes, "p").unwrap_err();
        let said = "'p' is corrupt: chunk at offset";
        assert!(refused.to_string().starts_with(said), "{refused}");
    }
}
