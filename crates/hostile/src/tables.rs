//! Fuzz target: headers, entries, refcounts and NBD messages there and back. What decodes encodes
//! to something that decodes to the same; where no bit is ignored, to the same bits.

use cowslip::luks;
use cowslip::qcow2::entry::{EntryFormat, L2Entry, refcount_at, set_refcount};
use cowslip::qcow2::geometry::Geometry;
use cowslip::qcow2::header::Header;
use cowslip_nbd::protocol::ChunkCode;
use cowslip_nbd::protocol::handshake::{
    BlockSizes, Info, InfoRequest, MetaContextEntry, MetaContextRequest, OptionHeader,
    OptionReplyHeader, ServerEntry,
};
use cowslip_nbd::protocol::transmission::{
    BlockStatus, ErrorChunk, ExtendedChunkHeader, OffsetHole, ReplyHeader, Request, StatusQuery,
};

use crate::draw::Draw;

/// The target's body.
pub fn run(input: &[u8]) {
    let mut draw = Draw::from_bytes(input);
    match draw.below(4) {
        0 => {
            let bytes = draw.rest();
            header(bytes);
            keys(bytes);
        }
        1 => entries(&mut draw),
        2 => refcounts(&mut draw),
        _ => messages(&mut draw),
    }
}

fn header(bytes: &[u8]) {
    for file_len in [u64::MAX, bytes.len() as u64] {
        let Ok(header) = Header::parse(bytes, file_len, "fuzzed") else {
            continue;
        };
        let start = header.fixed_part();
        assert_eq!(start.len(), header.header_length as usize);
        let same = |at: usize| start.get(at) == bytes.get(at);
        // The name's place and length are written as 0 where there is no name.
        let first_other = (0..start.len().min(bytes.len())).find(|&at| !same(at));
        assert!(
            first_other.is_none_or(|at| (8..20).contains(&at)),
            "byte {first_other:?} of the header has changed"
        );
        let mut again = header.clone();
        // Longer than the first cluster, where the extensions had no end: nothing to compare.
        let Ok(encoded) = again.encode() else {
            continue;
        };
        let parsed = Header::parse(&encoded, file_len, "fuzzed");
        assert_eq!(parsed.expect("what was encoded"), again);
    }
}

/// A LUKS header.
fn keys(bytes: &[u8]) {
    for end in [u64::MAX, 2 << 20, bytes.len() as u64] {
        if let Ok(header) = luks::Header::parse(bytes, &(0..end), "fuzzed") {
            assert!(header.slots.iter().all(|slot| slot.key_offset < end));
            let parsed = luks::Header::parse(&header.encode(), &(0..end), "fuzzed");
            assert_eq!(parsed.expect("what was encoded"), header);
        }
    }
}

fn format(draw: &mut Draw) -> Option<EntryFormat> {
    let cluster_bits = 9 + draw.below(13) as u32;
    let geometry = Geometry::new(cluster_bits, draw.below(7) as u32, draw.one_in(2))?;
    let version = if geometry.extended_l2() || !draw.one_in(4) {
        3
    } else {
        2
    };
    Some(EntryFormat {
        geometry,
        version,
        data_file: version == 3 && draw.one_in(3),
    })
}

fn entries(draw: &mut Draw) {
    let Some(format) = format(draw) else {
        return;
    };
    while !draw.is_empty() {
        let (entry, bitmap) = (draw.number(), draw.number());
        if let Ok(Some(table)) = format.decode_l1(entry) {
            assert_eq!(table.encode(), entry);
        }
        if let Ok(Some(block)) = format.decode_refcount_table(entry) {
            assert_eq!(block.0, entry);
        }
        std::hint::black_box(format.inspect_l2(entry, bitmap));
        let Ok(decoded) = format.decode_l2(entry, bitmap) else {
            continue;
        };
        if let L2Entry::Standard(standard) = &decoded {
            assert_eq!(standard.allocated & standard.zeroes, 0);
            let unused = !format.geometry.all_subclusters();
            assert_eq!((standard.allocated | standard.zeroes) & unused, 0);
        }
        let (encoded, encoded_bitmap) = format.encode_l2(&decoded);
        let again = format.decode_l2(encoded, encoded_bitmap);
        assert_eq!(again.expect("what was encoded"), decoded);
        let ignored = matches!(&decoded, L2Entry::Standard(standard) if standard.host.is_none());
        if !ignored {
            assert_eq!(encoded, entry, "an entry has changed");
        }
    }
}

fn refcounts(draw: &mut Draw) {
    let order = draw.below(7) as u32;
    let mut block = vec![0u8; 64];
    let start = draw.take(64);
    block[..start.len()].copy_from_slice(start);
    let slots = (block.len() * 8) >> order;
    let mut model: Vec<u64> = (0..slots).map(|i| refcount_at(&block, i, order)).collect();
    while !draw.is_empty() {
        let index = draw.below(slots as u64) as usize;
        let count = draw.number() & (u64::MAX >> (64 - (1u32 << order)));
        set_refcount(&mut block, index, order, count);
        model[index] = count;
    }
    let counts: Vec<u64> = (0..slots).map(|i| refcount_at(&block, i, order)).collect();
    assert_eq!(counts, model);
}

/// Decodes, encodes, decodes.
macro_rules! there_and_back {
    ($message:expr, $decode:expr) => {
        if let Ok(decoded) = $decode($message) {
            assert_eq!(
                $decode(&decoded.encode()[..]).expect("what was encoded"),
                decoded
            );
        }
    };
}

fn messages(draw: &mut Draw) {
    // The last values are extended headers, so that what fuzzers have kept means what it meant.
    let kind = match draw.byte() {
        0xf0.. => 12,
        kind => kind % 12,
    };
    let code = draw.pick(ChunkCode::KNOWN);
    let message = draw.rest();
    match kind {
        0 => there_and_back!(message, Request::decode),
        1 => there_and_back!(message, InfoRequest::decode),
        2 => there_and_back!(message, MetaContextRequest::decode),
        3 => there_and_back!(message, ServerEntry::decode),
        4 => there_and_back!(message, MetaContextEntry::decode),
        5 => there_and_back!(message, |m: &[u8]| OffsetHole::decode(m)),
        6 => there_and_back!(message, BlockStatus::decode),
        7 => {
            if let Ok(info) = Info::decode(message)
                && !matches!(info, Info::Unknown(_))
            {
                assert_eq!(
                    Info::decode(&info.encode()).expect("what was encoded"),
                    info
                );
            }
        }
        8 => {
            std::hint::black_box(ErrorChunk::decode(code, message).is_ok());
        }
        9 => {
            std::hint::black_box(ReplyHeader::decode_front(message).is_ok());
        }
        10 => {
            std::hint::black_box(OptionHeader::decode(message).is_ok());
            std::hint::black_box(OptionReplyHeader::decode(message).is_ok());
        }
        12 => {
            there_and_back!(message, |m: &[u8]| StatusQuery::decode(m));
            there_and_back!(message, |m: &[u8]| ExtendedChunkHeader::decode(m));
            if let Ok(request) = Request::decode_extended(message) {
                let again = Request::decode_extended(&request.encode_extended());
                assert_eq!(again.expect("what was encoded"), request);
            }
            if let Ok(status) = BlockStatus::decode_extended(message) {
                let again = BlockStatus::decode_extended(&status.encode_extended());
                assert_eq!(again.expect("what was encoded"), status);
            }
        }
        _ => {
            let mut draw = Draw::from_bytes(message);
            let [minimum, preferred, maximum] = [(); 3].map(|()| draw.number() as u32);
            let sizes = BlockSizes {
                minimum,
                preferred,
                maximum,
            };
            if let Ok(sizes) = sizes.validate() {
                assert!(sizes.minimum.is_power_of_two());
            }
        }
    }
}
