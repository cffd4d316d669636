//! Fuzz target: a hostile NBD client. Its bytes are sent as they are, or behind a handshake by the
//! rules, or as requests whose fields are drawn. The server must end, and must not have panicked.

use std::sync::Arc;

use cowslip::disk::MemoryDisk;
use cowslip_nbd::protocol::handshake::{
    InfoRequest, MetaContextRequest, encode_client_flags, encode_option,
};
use cowslip_nbd::protocol::transmission::Request;
use cowslip_nbd::protocol::{BASE_ALLOCATION, ClientFlags, Command, CommandFlags, OptionCode};
use cowslip_nbd::{Server, ServerOptions};

use crate::draw::Draw;
use crate::pipe;

const EXPORT_BYTES: u64 = 1 << 20;

/// The target's body.
pub fn run(input: &[u8]) {
    let mut draw = Draw::from_bytes(input);
    // The last values are extended headers, so that what fuzzers have kept means what it meant.
    let (kind, headers) = match draw.byte() {
        0xf0.. => (1 + 2 * draw.below(2), Headers::Extended),
        kind => (u64::from(kind % 4), Headers::Compact),
    };
    let script = match kind {
        0 => draw.rest().to_vec(),
        1 => [handshake(&mut draw, headers), draw.rest().to_vec()].concat(),
        2 => options(&mut draw),
        _ => [handshake(&mut draw, headers), requests(&mut draw, headers)].concat(),
    };
    let queue = pipe::queue();
    queue.block_on(async {
        let mut server = Server::new(ServerOptions {
            requests_in_flight_max: 16,
            bytes_in_flight_max: 1 << 20,
            ..ServerOptions::default()
        });
        server.add_export("", Arc::new(MemoryDisk::new("memory", EXPORT_BYTES)));
        server.add_export("a", Arc::new(MemoryDisk::new("memory", 512)));
        server.serve_connection(pipe::scripted(&script)).await;
    });
}

/// The kind of headers before payload.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Headers {
    Compact,
    Extended,
}

fn handshake(draw: &mut Draw, headers: Headers) -> Vec<u8> {
    let flags = ClientFlags::FIXED_NEWSTYLE.with_if(ClientFlags::NO_ZEROES, !draw.one_in(4));
    let mut script = encode_client_flags(flags).to_vec();
    if draw.one_in(8) {
        encode_option(&mut script, OptionCode::ExportName, b"");
        return script;
    }
    if headers == Headers::Extended {
        encode_option(&mut script, OptionCode::ExtendedHeaders, b"");
    }
    if !draw.one_in(4) {
        encode_option(&mut script, OptionCode::StructuredReply, b"");
        let wanted = MetaContextRequest {
            name: String::new(),
            queries: vec![BASE_ALLOCATION.to_string()],
        };
        encode_option(&mut script, OptionCode::SetMetaContext, &wanted.encode());
    }
    let wanted = InfoRequest {
        name: String::new(),
        infos: Vec::new(),
    };
    encode_option(&mut script, OptionCode::Go, &wanted.encode());
    script
}

/// Options with any data, one after another.
fn options(draw: &mut Draw) -> Vec<u8> {
    let flags = draw.pick(&[3u32, 1, 2, 0, u32::MAX]);
    let mut script = flags.to_be_bytes().to_vec();
    while !draw.is_empty() && script.len() < pipe::SCRIPT_BYTES_MAX {
        let mut option = draw.pick(OptionCode::KNOWN);
        if draw.one_in(16) {
            option = OptionCode::Unknown(draw.number() as u32);
        }
        let len = draw.pick(&[0, 4, 8, 20, 4096, 5000]);
        let data = match draw.below(3) {
            0 => draw.take(len).to_vec(),
            1 => {
                let wanted = MetaContextRequest {
                    name: draw.pick(&["", "a", "b"]).to_string(),
                    queries: vec![
                        draw.pick(&["", "base:", BASE_ALLOCATION, "x"]).to_string();
                        draw.below(4) as usize
                    ],
                };
                wanted.encode()
            }
            _ => {
                let wanted = InfoRequest {
                    name: draw.pick(&["", "a", "b"]).to_string(),
                    infos: vec![draw.pick(cowslip_nbd::protocol::InfoCode::KNOWN); 2],
                };
                wanted.encode()
            }
        };
        encode_option(&mut script, option, &data);
    }
    script
}

/// Requests; most lie within the export.
fn requests(draw: &mut Draw, headers: Headers) -> Vec<u8> {
    let mut script = Vec::new();
    while !draw.is_empty() && script.len() < pipe::SCRIPT_BYTES_MAX {
        let mut command = draw.pick(Command::KNOWN);
        if draw.one_in(32) {
            command = Command::Unknown(draw.number() as u16);
        }
        let offset = match draw.below(6) {
            0 => draw.number(),
            1 => EXPORT_BYTES,
            2 => EXPORT_BYTES - 1,
            _ => draw.below(EXPORT_BYTES),
        };
        let len = match draw.below(8) {
            0 if headers == Headers::Extended => draw.number(),
            0 => u64::from(draw.number() as u32),
            1 => 32 << 20,
            2 => u64::from(u32::MAX),
            3 => 0,
            _ => draw.below(8192),
        };
        let request = Request {
            flags: CommandFlags(match draw.below(3) {
                0 => draw.number() as u16,
                _ => 1 << draw.below(6),
            }),
            command,
            cookie: draw.below(4),
            offset,
            len,
        };
        let has_payload = match headers {
            Headers::Compact => {
                script.extend(request.encode());
                command == Command::Write
            }
            Headers::Extended => {
                script.extend(request.encode_extended());
                command == Command::Write || request.flags.contains(CommandFlags::PAYLOAD_LEN)
            }
        };
        if has_payload && !draw.one_in(16) {
            let room = pipe::SCRIPT_BYTES_MAX.saturating_sub(script.len());
            script.resize(script.len() + (len as usize).min(room), 0xd5);
        }
    }
    script
}
