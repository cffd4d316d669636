//! Fuzz target: a hostile NBD server. Its bytes are sent as they are, or behind a handshake by the
//! rules, or as replies whose fields are drawn. Every request must end, in a result or in an error.

use cowslip_nbd::export::{Durability, Space, ZeroOptions};
use cowslip_nbd::protocol::handshake::{
    Info, MetaContextEntry, encode_greeting, encode_option_reply,
};
use cowslip_nbd::protocol::transmission::{ChunkHeader, ExtendedChunkHeader, encode_simple_reply};
use cowslip_nbd::protocol::{
    BASE_ALLOCATION, ChunkCode, ChunkFlags, ErrorCode, HandshakeFlags, OptionCode, OptionReplyCode,
    TransmissionFlags,
};
use cowslip_nbd::{Client, ConnectOptions};
use cowslip_queue::{Buf, BufMut};

use crate::draw::Draw;
use crate::pipe;

const SIZE: u64 = 1 << 20;
/// Requests that wait for replies. Their cookies count up from 1, in the upper half, and their
/// slots from 0, in the lower.
const REQUESTS: u64 = 6;

/// The target's body.
pub fn run(input: &[u8]) {
    let mut draw = Draw::from_bytes(input);
    // The last values are extended headers, so that what fuzzers have kept means what it meant.
    let (how, headers) = match draw.byte() {
        0xf0.. => (2 + 2 * draw.below(2), Headers::Extended),
        how => (u64::from(how % 5), Headers::Compact),
    };
    let script = match how {
        0 | 1 => draw.rest().to_vec(),
        2 => [handshake(&mut draw, headers), draw.rest().to_vec()].concat(),
        3 => option_replies(&mut draw),
        _ => [handshake(&mut draw, headers), replies(&mut draw, headers)].concat(),
    };
    pipe::queue().block_on(async {
        let stream = pipe::scripted(&script);
        if how == 1 {
            std::hint::black_box(
                Client::list(stream, None)
                    .await
                    .map_err(|e| e.to_string())
                    .is_ok(),
            );
            return;
        }
        let connected = Client::connect(stream, &ConnectOptions::new("")).await;
        let client = match connected {
            Ok(client) => client,
            Err(error) => {
                std::hint::black_box(error.to_string());
                return;
            }
        };
        use_connection(client).await;
    });
}

async fn use_connection(client: Client) {
    let how = ZeroOptions {
        space: Space::Release,
        fast_only: false,
        durability: Durability::Cached,
    };
    let reads = [
        client.read(0, BufMut::zeroed(4096)),
        client.read(8192, BufMut::zeroed(512)),
    ];
    let done = [
        client.write(0, Buf::from(vec![1; 512]), Durability::Durable),
        client.write_zeroes(0, 4096, how),
        client.flush(),
    ];
    let status = client.block_status(0, 65536);
    for read in reads {
        let read = read.await;
        std::hint::black_box(read.map_err(|e| e.to_string()).is_ok());
    }
    for done in done {
        std::hint::black_box(done.await.is_ok());
    }
    if let Ok(runs) = status.await {
        assert!(!runs.is_empty(), "a status without a run");
        assert!(runs.iter().all(|run| run.len > 0), "a run without a length");
    }
    std::hint::black_box(client.disconnect().await.is_ok());
}

/// The kind of headers before payload.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Headers {
    Compact,
    Extended,
}

fn handshake(draw: &mut Draw, headers: Headers) -> Vec<u8> {
    let flags = HandshakeFlags::FIXED_NEWSTYLE.with(HandshakeFlags::NO_ZEROES);
    let mut script = encode_greeting(flags).to_vec();
    let mut reply = |option, code, data: &[u8]| {
        encode_option_reply(&mut script, option, code, data);
    };
    let refused = OptionReplyCode::ErrUnsupported;
    match headers {
        Headers::Compact => reply(OptionCode::ExtendedHeaders, refused, b""),
        Headers::Extended => reply(OptionCode::ExtendedHeaders, OptionReplyCode::Ack, b""),
    }
    if headers == Headers::Compact && draw.one_in(4) {
        reply(OptionCode::StructuredReply, refused, b"");
    } else {
        if headers == Headers::Compact {
            reply(OptionCode::StructuredReply, OptionReplyCode::Ack, b"");
        }
        let entry = MetaContextEntry {
            id: 5,
            name: BASE_ALLOCATION.to_string(),
        };
        let context = OptionCode::SetMetaContext;
        reply(context, OptionReplyCode::MetaContext, &entry.encode());
        reply(context, OptionReplyCode::Ack, b"");
    }
    let info = Info::Export {
        size: SIZE,
        flags: TransmissionFlags(!TransmissionFlags::READ_ONLY.0),
    };
    reply(OptionCode::Go, OptionReplyCode::Info, &info.encode());
    reply(OptionCode::Go, OptionReplyCode::Ack, b"");
    script
}

/// Replies to options with any code and any data.
fn option_replies(draw: &mut Draw) -> Vec<u8> {
    let mut script = encode_greeting(HandshakeFlags(draw.pick(&[3, 1, 0, u16::MAX]))).to_vec();
    while !draw.is_empty() && script.len() < pipe::SCRIPT_BYTES_MAX {
        let option = draw.pick(&[
            OptionCode::StructuredReply,
            OptionCode::SetMetaContext,
            OptionCode::Go,
            OptionCode::ExtendedHeaders,
        ]);
        let code = match draw.below(8) {
            0 => OptionReplyCode::Unknown(draw.number() as u32),
            _ => draw.pick(OptionReplyCode::KNOWN),
        };
        let info = Info::Export {
            size: draw.pick(&[SIZE, 0, u64::MAX, 1 << 63]),
            flags: TransmissionFlags(draw.number() as u16),
        };
        let len = draw.pick(&[0, 2, 4, 12, 14, 20, 600]);
        let data = match draw.below(3) {
            0 => info.encode(),
            _ => draw.take(len).to_vec(),
        };
        encode_option_reply(&mut script, option, code, &data);
    }
    script
}

/// Replies to requests, right and wrong.
fn replies(draw: &mut Draw, headers: Headers) -> Vec<u8> {
    let mut script = Vec::new();
    while !draw.is_empty() && script.len() < pipe::SCRIPT_BYTES_MAX {
        let slot = draw.below(REQUESTS);
        let cookie = match draw.below(16) {
            0 => draw.number(),
            _ => (slot + 1) << 32 | slot,
        };
        if draw.one_in(6) {
            let error = draw.one_in(2).then_some(draw.pick(ErrorCode::KNOWN));
            script.extend(encode_simple_reply(cookie, error));
            let len = draw.pick(&[0, 512, 4096]);
            script.resize(script.len() + len, 0xd5);
            continue;
        }
        let code = match draw.below(16) {
            0 => ChunkCode::Unknown(draw.number() as u16),
            _ => draw.pick(ChunkCode::KNOWN),
        };
        let offset = draw.pick(&[0u64, 512, 4096, 8192, u64::MAX]);
        let data_len = draw.pick(&[512usize, 4096, 1, 0, 5000]);
        let mut payload = match draw.below(4) {
            0 => {
                let len = draw.below(40) as usize;
                draw.take(len).to_vec()
            }
            1 => [&offset.to_be_bytes()[..], &(data_len as u32).to_be_bytes()].concat(),
            2 if headers == Headers::Extended => {
                let runs = [5 << 32 | 2, 4096, draw.below(4), 1 << 40, 3];
                runs.iter()
                    .flat_map(|word: &u64| word.to_be_bytes())
                    .collect()
            }
            2 => {
                let runs = [5u32, 4096, draw.below(4) as u32, 1 << 20, 3];
                runs.iter().flat_map(|word| word.to_be_bytes()).collect()
            }
            _ => [&offset.to_be_bytes()[..], &vec![0xd5; data_len]].concat(),
        };
        payload.truncate(8192);
        let mut len = payload.len() as u32;
        if draw.one_in(16) {
            len = draw.pick(&[u32::MAX, 32 << 20, 0, len + 1]);
        }
        let flags = ChunkFlags(draw.pick(&[1, 0, 1, u16::MAX]));
        let chunk = ChunkHeader {
            flags,
            code,
            cookie,
            len,
        };
        match headers {
            Headers::Compact => script.extend(chunk.encode()),
            Headers::Extended => {
                // Of the requests that there are, all but one read begin here.
                let offset = draw.pick(&[0, 0, 8192, 1]);
                script.extend(ExtendedChunkHeader { chunk, offset }.encode());
            }
        }
        script.extend(payload);
    }
    script
}
