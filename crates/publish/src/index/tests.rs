//! Indexes as bytes and back, and bytes that are no index.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use super::*;

fn sample() -> Index {
    let pack = |n: u8, bytes| Pack {
        session: [n; 16],
        digest: Digest::of(&[n]),
        bytes,
    };
    let chunk = |n: u8, pack, offset, stored_bytes, blocks| Chunk {
        digest: Digest::of(&[n, 1]),
        pack,
        offset,
        stored_bytes,
        blocks,
    };
    let run = |start, content| Run { start, content };
    Index {
        disk_bytes: (1 << 40) - 100,
        session: [9; 16],
        sizes: ChunkSizes::default(),
        packs: vec![pack(1, 10_000), pack(2, 1 << 20)],
        chunks: vec![
            chunk(1, 1, 500, 3000, 2),
            chunk(2, 1, 3500, 4096, 1),
            chunk(3, 0, 0, 10_000, 1024),
            chunk(4, 1, 7596, 1, 3),
        ],
        runs: vec![
            run(0, Content::Chunk(3)),
            run(3, Content::Unallocated),
            run(100, Content::Zeroes),
            run(200, Content::Chunk(0)),
            run(202, Content::Chunk(1)),
            run(203, Content::Chunk(3)),
            run(206, Content::Chunk(2)),
            run(1230, Content::Unallocated),
        ],
    }
}

#[test]
fn an_index_is_what_was_encoded() {
    let index = sample();
    let bytes = index.encode().unwrap();
    assert_eq!(Index::decode(&bytes, "i").unwrap(), index);
    assert_eq!(index.run_at(2), 0);
    assert_eq!(index.run_at(3), 1);
    assert_eq!(index.end_of_run(7), (1 << 40) / BLOCK_BYTES as u64);
    let empty = Index {
        disk_bytes: 0,
        packs: vec![],
        chunks: vec![],
        runs: vec![],
        ..sample()
    };
    let bytes = empty.encode().unwrap();
    assert_eq!(Index::decode(&bytes, "i").unwrap(), empty);
}

#[test]
fn a_changed_or_shortened_index_is_refused() {
    let bytes = sample().encode().unwrap();
    for at in 0..bytes.len() {
        for bit in [0, 3, 7] {
            let mut wrong = bytes.clone();
            wrong[at] ^= 1 << bit;
            let refused = Index::decode(&wrong, "i").unwrap_err().to_string();
            assert!(refused.starts_with("'i'"), "{refused}");
        }
        assert!(Index::decode(&bytes[..at], "i").is_err(), "{at}");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert!(Index::decode(&longer, "i").is_err());
}

/// The sample with a change and a checksum that fits it.
fn resealed(change: impl FnOnce(&mut Vec<u8>)) -> String {
    let mut bytes = sample().encode().unwrap();
    bytes.truncate(bytes.len() - 32);
    change(&mut bytes);
    bytes.extend_from_slice(&Digest::of(&bytes).0);
    Index::decode(&bytes, "i").unwrap_err().to_string()
}

#[test]
fn a_lying_header_is_refused() {
    let put = |at: usize, with: &[u8]| {
        let with = with.to_vec();
        resealed(move |bytes| bytes[at..at + with.len()].copy_from_slice(&with))
    };
    for (at, with, said) in [
        (8, &2_u32.to_le_bytes()[..], "version 2 of published disks"),
        (16, &4_u64.to_le_bytes(), "features 0x4"),
        (24, &u64::MAX.to_le_bytes(), "longer than 2^60"),
        (24, &4096_u64.to_le_bytes(), "behind the disk"),
        (48, &1_u32.to_le_bytes(), "lengths of chunks"),
        (60, &u32::MAX.to_le_bytes(), "more than there is"),
        (64, &u32::MAX.to_le_bytes(), "2^24 chunks"),
        (68, &u32::MAX.to_le_bytes(), "2^24 runs"),
        (68, &(1_u32 << 24).to_le_bytes(), "too short for its rows"),
        (72, &u64::MAX.to_le_bytes(), "beyond the end"),
        (100, &[1], "reserved"),
    ] {
        let refused = put(at, with);
        assert!(refused.contains(said), "{at}: {refused}");
    }
}

#[test]
fn an_index_that_contradicts_itself_is_refused() {
    let refused = |change: fn(&mut Index)| {
        let mut index = sample();
        change(&mut index);
        let bytes = index.encode().unwrap();
        Index::decode(&bytes, "i").unwrap_err().to_string()
    };
    for (change, said) in [
        (
            (|index| index.chunks[0].pack = 2) as fn(&mut Index),
            "chunk 0: there is no such pack",
        ),
        (
            |index| index.chunks[2].offset = 1,
            "chunk 2: it ends behind its pack",
        ),
        (|index| index.chunks[1].stored_bytes = 4097, "stored length"),
        (|index| index.chunks[1].stored_bytes = 0, "stored length"),
        (
            |index| index.chunks[2].blocks = 1025,
            "its length is not possible",
        ),
        (
            |index| index.runs[0].content = Content::Chunk(4),
            "no such chunk",
        ),
        (|index| index.runs[2].start = 3, "it is empty"),
        (
            |index| index.packs[0].bytes = 0,
            "its length is not possible",
        ),
        (|index| index.runs.truncate(7), "end before the disk"),
    ] {
        let refused = refused(change);
        assert!(refused.contains(said), "{refused}");
    }
}

#[test]
fn a_table_takes_no_more_memory_than_its_rows() {
    // A table that would expand to a gigabyte is given up when its rows are full.
    let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 3).unwrap();
    let mut reader = Reader::new(&bomb, "i");
    assert!(reader.table("run table", bomb.len(), 100, 2).is_err());
    let honest = zstd::bulk::compress(&vec![0; (1 << 24) * 8], 3).unwrap();
    let mut reader = Reader::new(&honest, "i");
    let table = reader.table("run table", honest.len(), 1 << 24, 2).unwrap();
    assert_eq!(table.get(1, (1 << 24) - 1), 0);
}
