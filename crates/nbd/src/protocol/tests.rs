//! Round trips of every message, and decoding of arbitrary bytes.

use super::handshake::*;
use super::transmission::*;
use super::*;
use cowslip_block::random::Random;

/// All values of a width at which bits change.
fn edges(bits: u32) -> Vec<u64> {
    let mut values = vec![0];
    for bit in 0..bits {
        values.extend([1 << bit, u64::MAX >> (63 - bit), (1 << bit) | 1]);
    }
    values
}

fn all_codes<C: Copy + From<R>, R>(known: &[C], unknown: R) -> Vec<C> {
    let mut codes = known.to_vec();
    codes.push(unknown.into());
    codes
}

#[test]
fn the_greeting_survives() {
    for flags in 0..=3 {
        let flags = HandshakeFlags(flags);
        let greeting = encode_greeting(flags);
        let (magics, offer) = greeting.split_at(MAGICS_BYTES);
        assert_eq!(decode_magics(magics), Ok(Style::New));
        assert_eq!(decode_offer(offer), Ok(flags));
        let client = ClientFlags(flags.0.into());
        assert_eq!(
            decode_client_flags(&encode_client_flags(client)),
            Ok(client)
        );
    }
    assert_eq!(
        &encode_greeting(HandshakeFlags::empty())[..16],
        b"NBDMAGICIHAVEOPT"
    );
}

#[test]
fn options_and_their_replies_survive() {
    for option in all_codes(OptionCode::KNOWN, 4711) {
        for data in [&b""[..], b"x", &[7; 300]] {
            let mut message = Vec::new();
            encode_option(&mut message, option, data);
            let (header, rest) = message.split_at(OPTION_HEADER_BYTES);
            let len = data.len() as u32;
            assert_eq!(
                OptionHeader::decode(header),
                Ok(OptionHeader { option, len })
            );
            assert_eq!(rest, data);
            for reply in all_codes(OptionReplyCode::KNOWN, 99) {
                let mut message = Vec::new();
                encode_option_reply(&mut message, option, reply, data);
                let (header, rest) = message.split_at(OPTION_REPLY_HEADER_BYTES);
                let expected = OptionReplyHeader { option, reply, len };
                assert_eq!(OptionReplyHeader::decode(header), Ok(expected));
                assert_eq!(rest, data);
            }
        }
    }
}

#[test]
fn data_of_options_survives() {
    let long = "ü".repeat(STRING_BYTES_MAX / 2);
    for name in ["", "disk", "a b/c", &long] {
        for count in 0..5 {
            let infos = all_codes(InfoCode::KNOWN, 77)[..count].to_vec();
            let request = InfoRequest {
                name: name.to_owned(),
                infos,
            };
            assert_eq!(InfoRequest::decode(&request.encode()), Ok(request));
            let queries = ["", BASE_NAMESPACE, BASE_ALLOCATION, "x-y:z", &long][..count]
                .iter()
                .map(|&query| query.to_owned())
                .collect();
            let request = MetaContextRequest {
                name: name.to_owned(),
                queries,
            };
            assert_eq!(MetaContextRequest::decode(&request.encode()), Ok(request));
        }
    }
}

#[test]
fn data_of_option_replies_survives() {
    for text in ["", "x", "a longer text"] {
        let entry = ServerEntry {
            name: text.to_owned(),
            description: format!("about {text}"),
        };
        assert_eq!(ServerEntry::decode(&entry.encode()), Ok(entry));
        let entry = MetaContextEntry {
            id: 0xdead_beef,
            name: text.to_owned(),
        };
        assert_eq!(MetaContextEntry::decode(&entry.encode()), Ok(entry));
        for info in [Info::Name(text.into()), Info::Description(text.into())] {
            assert_eq!(Info::decode(&info.encode()), Ok(info));
        }
    }
    assert_eq!(
        Info::decode(&Info::Unknown(9).encode()),
        Ok(Info::Unknown(9))
    );
    for size in edges(64) {
        for bit in 0..16 {
            let flags = TransmissionFlags(1 << bit);
            let info = Info::Export { size, flags };
            assert_eq!(Info::decode(&info.encode()), Ok(info));
            let message = encode_export_name_reply(size, flags);
            assert_eq!(decode_export_name_reply(&message), Ok((size, flags)));
        }
    }
}

#[test]
fn block_sizes_follow_the_rules() {
    let powers = || (0..32).map(|bits| 1u32 << bits);
    for minimum in powers().chain([0, 3]) {
        for preferred in powers().chain([0, 513]) {
            for maximum in powers().chain([0, 1000, u32::MAX]) {
                let sizes = BlockSizes {
                    minimum,
                    preferred,
                    maximum,
                };
                let valid = minimum.is_power_of_two()
                    && minimum <= 65_536
                    && preferred.is_power_of_two()
                    && preferred >= minimum
                    && maximum >= minimum
                    && (maximum == u32::MAX || maximum % minimum == 0);
                let expected = valid.then_some(Info::BlockSize(sizes));
                assert_eq!(
                    Info::decode(&Info::BlockSize(sizes).encode()).ok(),
                    expected
                );
            }
        }
    }
}

#[test]
fn requests_survive() {
    for command in all_codes(Command::KNOWN, 9) {
        for flags in 0..64 {
            for (offset, len) in edges(64).into_iter().zip(edges(32).into_iter().cycle()) {
                let request = Request {
                    flags: CommandFlags(flags),
                    command,
                    cookie: !offset,
                    offset,
                    len,
                };
                assert_eq!(Request::decode(&request.encode()), Ok(request));
                let long = Request {
                    len: offset,
                    ..request
                };
                let message = long.encode_extended();
                assert_eq!(Request::decode_extended(&message), Ok(long));
                assert!(Request::decode(&message).is_err());
                assert!(Request::decode_extended(&request.encode()).is_err());
            }
        }
    }
}

#[test]
fn reply_headers_survive_however_they_arrive() {
    let mut messages = Vec::new();
    for error in ErrorCode::KNOWN.iter().copied().map(Some).chain([None]) {
        let cookie = 0x0102_0304_0506_0708;
        messages.push((
            encode_simple_reply(cookie, error).to_vec(),
            ReplyHeader::Simple { cookie, error },
        ));
    }
    for code in all_codes(ChunkCode::KNOWN, 0x8fff) {
        for flags in [ChunkFlags::empty(), ChunkFlags::DONE] {
            let header = ChunkHeader {
                flags,
                code,
                cookie: u64::MAX - 1,
                len: 0x0a0b_0c0d,
            };
            messages.push((header.encode().to_vec(), ReplyHeader::Chunk(header)));
            let extended = ExtendedChunkHeader {
                chunk: header,
                offset: u64::MAX - 2,
            };
            let message = extended.encode();
            assert_eq!(ExtendedChunkHeader::decode(&message), Ok(extended));
            assert!(ExtendedChunkHeader::decode(&message[..31]).is_err());
            assert!(ReplyHeader::decode_front(&message).is_err());
        }
    }
    for (message, header) in messages {
        for arrived in 0..message.len() {
            assert_eq!(ReplyHeader::decode_front(&message[..arrived]), Ok(None));
        }
        let mut arrived = message.clone();
        for _ in 0..3 {
            let decoded = ReplyHeader::decode_front(&arrived);
            assert_eq!(decoded, Ok(Some((message.len(), header))));
            arrived.push(0xff);
        }
    }
}

#[test]
fn payloads_of_chunks_survive() {
    for offset in edges(64) {
        let hole = OffsetHole { offset, len: 512 };
        assert_eq!(OffsetHole::decode(&hole.encode()), Ok(hole));
        assert_eq!(decode_offset_data(&offset.to_be_bytes()), Ok(offset));
        for error in all_codes(ErrorCode::KNOWN, 200) {
            for (code, offset) in [
                (ChunkCode::Error, None),
                (ChunkCode::ErrorOffset, Some(offset)),
            ] {
                let chunk = ErrorChunk {
                    error,
                    message: "no space".into(),
                    offset,
                };
                assert_eq!(ErrorChunk::decode(code, &chunk.encode()), Ok(chunk));
            }
        }
    }
    for count in 1..20u32 {
        let mut status = BlockStatus {
            context_id: 1,
            descriptors: (1..=count)
                .map(|len| StatusDescriptor {
                    len: len.into(),
                    flags: AllocationFlags(len % 4),
                })
                .collect(),
        };
        assert_eq!(BlockStatus::decode(&status.encode()).as_ref(), Ok(&status));
        status.descriptors[0].len = u64::MAX;
        let payload = status.encode_extended();
        assert_eq!(BlockStatus::decode_extended(&payload), Ok(status));
        let query = StatusQuery {
            len: u64::MAX - u64::from(count),
            context_ids: (0..count).collect(),
        };
        assert_eq!(StatusQuery::decode(&query.encode()), Ok(query));
    }
}

#[test]
fn a_long_error_message_is_cut_at_a_character() {
    let chunk = ErrorChunk {
        error: ErrorCode::Io,
        message: format!("x{}", "ü".repeat(40_000)),
        offset: None,
    };
    let decoded = ErrorChunk::decode(ChunkCode::Error, &chunk.encode()).unwrap();
    assert!(chunk.message.starts_with(&decoded.message));
    assert_eq!(decoded.message.len(), 1023);
}

/// A descriptor of an extended status: a byte in that state.
fn one_run(state: u64) -> Vec<u8> {
    [1u64, state].map(u64::to_be_bytes).concat()
}

#[test]
fn what_breaks_the_rules_is_refused() {
    let refused: &[(&str, bool)] = &[
        (
            "an empty hole",
            OffsetHole::decode(&OffsetHole { offset: 0, len: 0 }.encode()).is_err(),
        ),
        (
            "a status without descriptors",
            BlockStatus::decode(&[0, 0, 0, 1]).is_err(),
        ),
        (
            "an empty descriptor",
            BlockStatus::decode(&[0; 12]).is_err(),
        ),
        ("half a descriptor", BlockStatus::decode(&[1; 16]).is_err()),
        (
            "an extended status without descriptors",
            BlockStatus::decode_extended(&[0; 8]).is_err(),
        ),
        (
            "half an extended descriptor",
            BlockStatus::decode_extended(&[[0, 0, 0, 1].repeat(2), vec![1; 8]].concat()).is_err(),
        ),
        (
            "more descriptors than there are",
            BlockStatus::decode_extended(&[&[0, 0, 0, 2].repeat(2)[..], &one_run(0)].concat())
                .is_err(),
        ),
        (
            "a state of more than 32 bits",
            BlockStatus::decode_extended(
                &[&[0, 0, 0, 1].repeat(2)[..], &one_run(1 << 32)].concat(),
            )
            .is_err(),
        ),
        ("half an identifier", StatusQuery::decode(&[1; 10]).is_err()),
        (
            "a query without a length",
            StatusQuery::decode(&[1; 7]).is_err(),
        ),
        (
            "an error chunk without an error",
            ErrorChunk::decode(ChunkCode::Error, &[0; 6]).is_err(),
        ),
        (
            "a message beyond its chunk",
            ErrorChunk::decode(ChunkCode::Unknown(0x8123), &[0, 0, 0, 5, 0, 1]).is_err(),
        ),
        (
            "a name with a NUL",
            InfoRequest::decode(&[0, 0, 0, 1, 0, 0, 0]).is_err(),
        ),
        (
            "a name that is not UTF-8",
            InfoRequest::decode(&[0, 0, 0, 1, 0xff, 0, 0]).is_err(),
        ),
        (
            "more infos than counted",
            InfoRequest::decode(&[0, 0, 0, 0, 0, 0, 0, 3]).is_err(),
        ),
        (
            "fewer infos than counted",
            InfoRequest::decode(&[0, 0, 0, 0, 0, 2, 0, 3]).is_err(),
        ),
        (
            "queries that are not there",
            MetaContextRequest::decode(&[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]).is_err(),
        ),
        (
            "a string that is too long",
            string(&[b'x'; STRING_BYTES_MAX + 1]).is_err(),
        ),
        (
            "a reply with strange magic",
            ReplyHeader::decode_front(&[1, 2, 3, 4]).is_err(),
        ),
    ];
    for (what, is_refused) in refused {
        assert!(is_refused, "{what} passes");
    }
}

#[test]
fn errors_of_the_system_have_a_word_in_the_protocol() {
    let cases = [
        (1, ErrorCode::Perm),
        (13, ErrorCode::Perm),
        (30, ErrorCode::Perm),
        (5, ErrorCode::Io),
        (12, ErrorCode::NoMem),
        (22, ErrorCode::Inval),
        (28, ErrorCode::NoSpc),
        (27, ErrorCode::NoSpc),
        (122, ErrorCode::NoSpc),
        (75, ErrorCode::Overflow),
        (95, ErrorCode::NotSup),
        (108, ErrorCode::Shutdown),
        (2, ErrorCode::Io),
        (0, ErrorCode::Io),
        (-1, ErrorCode::Io),
    ];
    for (errno, code) in cases {
        assert_eq!(ErrorCode::from_errno(errno), code, "errno {errno}");
    }
    for &code in ErrorCode::KNOWN {
        assert_eq!(ErrorCode::from_errno(code.errno()), code);
    }
}

/// Decodes the bytes as each structure in turn. Values that decode must encode to bytes that decode
/// to the same values.
fn decode_everything(bytes: &[u8]) {
    let _ignored = decode_magics(bytes);
    let _ignored = decode_offer(bytes);
    let _ignored = decode_oldstyle_export(bytes);
    let _ignored = decode_client_flags(bytes);
    let _ignored = OptionHeader::decode(bytes);
    let _ignored = OptionReplyHeader::decode(bytes);
    let _ignored = decode_export_name_reply(bytes);
    let _ignored = decode_offset_data(bytes);
    let _ignored = ReplyHeader::decode_front(bytes);
    macro_rules! round_trips {
        ($($type:ident: $decode:ident, $encode:ident;)+) => {$(
            if let Ok(value) = $type::$decode(bytes) {
                let message = value.$encode();
                assert_eq!($type::$decode(&message), Ok(value));
            }
        )+};
    }
    round_trips! {
        Request: decode, encode;
        Request: decode_extended, encode_extended;
        StatusQuery: decode, encode;
        ExtendedChunkHeader: decode, encode;
        BlockStatus: decode_extended, encode_extended;
        InfoRequest: decode, encode;
        MetaContextRequest: decode, encode;
        ServerEntry: decode, encode;
        MetaContextEntry: decode, encode;
        Info: decode, encode;
        OffsetHole: decode, encode;
        BlockStatus: decode, encode;
    }
    for code in [ChunkCode::Error, ChunkCode::ErrorOffset] {
        if let Ok(value) = ErrorChunk::decode(code, bytes)
            && value.message.len() <= 1024
        {
            assert_eq!(ErrorChunk::decode(code, &value.encode()), Ok(value));
        }
    }
}

#[test]
fn arbitrary_bytes_never_panic() {
    let seed = 0x5eed_cafe;
    let mut random = Random(seed);
    for round in 0..200_000 {
        // Small numbers in most places, so that lengths often fit.
        let bytes: Vec<u8> = (0..random.below(80))
            .map(|_| match random.below(4) {
                0 => random.next() as u8,
                1 => b'a',
                _ => random.below(4) as u8,
            })
            .collect();
        let outcome = std::panic::catch_unwind(|| decode_everything(&bytes));
        assert!(
            outcome.is_ok(),
            "seed {seed:#x}, round {round}, bytes {bytes:?}"
        );
    }
}

#[test]
fn truncated_messages_are_refused_or_shorter() {
    let request = MetaContextRequest {
        name: "disk".into(),
        queries: vec![BASE_ALLOCATION.into(), "x:y".into()],
    };
    let message = request.encode();
    for len in 0..message.len() {
        assert!(MetaContextRequest::decode(&message[..len]).is_err());
    }
    let request = InfoRequest {
        name: "disk".into(),
        infos: vec![InfoCode::Name],
    };
    let message = request.encode();
    for len in 0..message.len() {
        assert!(InfoRequest::decode(&message[..len]).is_err());
    }
}
