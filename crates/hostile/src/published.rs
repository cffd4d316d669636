//! Fuzz target: hostile objects of a store of published disks: an index as it is, or a sound one
//! with changed bytes and a checksum that fits them again; a chunk; a record. What is accepted is
//! read over its whole length, and is what its own encoding stands for.

use cowslip_publish::cut::{BLOCK_BYTES, ChunkSizes};
use cowslip_publish::digest::{DIGEST_BYTES, Digest};
use cowslip_publish::index::{Chunk, Content, Index, Pack, Run};
use cowslip_publish::pack;
use cowslip_publish::record::{self, Lease, VersionRecord};

/// The target's body.
pub fn run(input: &[u8]) {
    let Some((kind, rest)) = input.split_first() else {
        return;
    };
    match kind % 4 {
        0 => examine(rest),
        1 => examine(&changed(rest)),
        2 => unpack(rest),
        _ => {
            drop(record::decode::<VersionRecord>(rest, "record"));
            drop(record::decode::<Lease>(rest, "record"));
        }
    }
}

fn sample() -> Index {
    let pack = |number: u8| Pack {
        session: [number; 16],
        digest: Digest::of(&[number]),
        bytes: 100_000,
    };
    let chunks = (0..6_u32).map(|number| Chunk {
        digest: Digest::of(&[number as u8; 2]),
        pack: number / 4,
        offset: (number % 4) * 20_000,
        stored_bytes: 20_000,
        blocks: 8,
    });
    let contents = [
        Content::Chunk(0),
        Content::Unallocated,
        Content::Chunk(1),
        Content::Chunk(5),
        Content::Zeroes,
        Content::Chunk(2),
    ];
    let runs = contents.iter().enumerate().map(|(at, content)| Run {
        start: at as u64 * 8,
        content: *content,
    });
    Index {
        disk_bytes: (48 * BLOCK_BYTES - 512) as u64,
        session: [9; 16],
        sizes: ChunkSizes::default(),
        packs: vec![pack(1), pack(2)],
        chunks: chunks.collect(),
        runs: runs.collect(),
    }
}

/// A sound index with changes: pairs of an offset of two bytes and a value. The last byte cuts it.
fn changed(changes: &[u8]) -> Vec<u8> {
    let mut bytes = sample().encode().expect("the sample is sound");
    bytes.truncate(bytes.len() - DIGEST_BYTES);
    let (changes, cut) = changes.as_chunks::<3>();
    for [high, low, value] in changes {
        let at = usize::from(u16::from_be_bytes([*high, *low])) % bytes.len();
        bytes[at] = *value;
    }
    if let [cut, ..] = cut {
        bytes.truncate(bytes.len() - usize::from(*cut) % bytes.len());
    }
    let digest = Digest::of(&bytes);
    bytes.extend_from_slice(&digest.0);
    bytes
}

fn examine(bytes: &[u8]) {
    let Ok(index) = Index::decode(bytes, "index") else {
        return;
    };
    let blocks = index.disk_blocks();
    let mut at = 0;
    for (number, run) in index.runs.iter().enumerate() {
        assert_eq!(run.start, at, "runs leave no gap");
        assert_eq!(index.run_at(at), number);
        at = index.end_of_run(number);
        if let Content::Chunk(chunk) = run.content {
            let chunk = index.chunks[chunk as usize];
            assert_eq!(at - run.start, u64::from(chunk.blocks));
            let pack = index.packs[chunk.pack as usize];
            let end = u64::from(chunk.offset) + u64::from(chunk.stored_bytes);
            assert!(end <= pack.bytes, "a chunk is in its pack");
        }
    }
    assert_eq!(at, blocks, "runs end where the disk does");
    let encoded = index.encode().expect("what was read can be written");
    assert_eq!(Index::decode(&encoded, "index").ok(), Some(index));
}

/// Takes bytes for a chunk of up to 16 blocks, whose digest is that of zeroes.
fn unpack(bytes: &[u8]) {
    let Some((blocks, stored)) = bytes.split_first() else {
        return;
    };
    let blocks = u16::from(blocks % 16 + 1);
    let data = vec![0; usize::from(blocks) * BLOCK_BYTES];
    let chunk = Chunk {
        digest: Digest::of(&data),
        pack: 0,
        offset: 0,
        stored_bytes: stored.len() as u32,
        blocks,
    };
    if let Ok(read) = pack::decompress(&chunk, stored, "pack") {
        assert!(read == data, "no other bytes than those of the digest");
    }
}
