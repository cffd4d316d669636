//! The messages of the handshake: greeting, options, their replies.
//!
//! `encode` appends a message to a vector, `decode` takes a whole one. Data of options and replies
//! is encoded without its header, so that the header can state the length.

use super::{
    ClientFlags, HandshakeFlags, INIT_MAGIC, InfoCode, Malformed, OLDSTYLE_MAGIC, OPTION_MAGIC,
    OPTION_REPLY_MAGIC, OptionCode, OptionReplyCode, Reader, TransmissionFlags, length_u32,
};

/// Bytes of the server's greeting.
pub const GREETING_BYTES: usize = MAGICS_BYTES + OFFER_BYTES;
/// Bytes of it that identify the style.
pub const MAGICS_BYTES: usize = 16;
/// Bytes of the rest, of a newstyle server.
pub const OFFER_BYTES: usize = 2;
/// Bytes of the rest, of an oldstyle server, without the reserved ones.
pub const OLDSTYLE_EXPORT_BYTES: usize = 12;
/// Bytes of the client's answer to it.
pub const CLIENT_FLAGS_BYTES: usize = 4;
/// Bytes of an option before its data.
pub const OPTION_HEADER_BYTES: usize = 16;
/// Bytes of a reply to an option before its data.
pub const OPTION_REPLY_HEADER_BYTES: usize = 20;
/// Bytes of the answer to `EXPORT_NAME` without the reserved ones.
pub const EXPORT_NAME_REPLY_BYTES: usize = 10;
/// Reserved bytes after it, unless `NO_ZEROES` was agreed on, and after an oldstyle export.
pub const EXPORT_NAME_PADDING_BYTES: usize = 124;

/// The first message, the server's.
pub fn encode_greeting(flags: HandshakeFlags) -> [u8; GREETING_BYTES] {
    let mut message = [0; GREETING_BYTES];
    message[..8].copy_from_slice(&INIT_MAGIC.to_be_bytes());
    message[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
    message[16..].copy_from_slice(&flags.0.to_be_bytes());
    message
}

/// How a server goes on behind the magic numbers of its greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// A server that offers options, and is asked for an export.
    New,
    /// A server that describes its one export, and then takes requests (`doc/proto.md`, "Oldstyle
    /// negotiation").
    /// negotiation").
    Old,
}

/// Takes the magic numbers that begin the greeting.
///
/// # Errors
/// If it is no NBD server.
pub fn decode_magics(message: &[u8]) -> Result<Style, Malformed> {
    let mut reader = Reader::new(message);
    if reader.u64()? != INIT_MAGIC {
        return Err(Malformed("the server does not speak NBD"));
    }
    let style = match reader.u64()? {
        OPTION_MAGIC => Style::New,
        OLDSTYLE_MAGIC => Style::Old,
        _ => return Err(Malformed("the server speaks an unknown style of NBD")),
    };
    reader.end()?;
    Ok(style)
}

/// Decodes the offers of a newstyle server, which follow the magic numbers.
///
/// # Errors
/// If it has not two bytes.
pub fn decode_offer(message: &[u8]) -> Result<HandshakeFlags, Malformed> {
    let mut reader = Reader::new(message);
    let flags = HandshakeFlags(reader.u16()?);
    reader.end()?;
    Ok(flags)
}

/// Size and flags of the export of an oldstyle server, which follow the magic numbers.
///
/// # Errors
/// If it has unknown flags.
pub fn decode_oldstyle_export(message: &[u8]) -> Result<(u64, TransmissionFlags), Malformed> {
    let mut reader = Reader::new(message);
    let size = reader.u64()?;
    let flags = u16::try_from(reader.u32()?);
    let flags = flags.map_err(|_| Malformed("unknown flags of an oldstyle export"))?;
    reader.end()?;
    Ok((size, TransmissionFlags(flags)))
}

/// The client's answer to the greeting.
pub fn encode_client_flags(flags: ClientFlags) -> [u8; CLIENT_FLAGS_BYTES] {
    flags.0.to_be_bytes()
}

/// Takes the client's answer to the greeting apart. A server must drop clients with unknown flags.
///
/// # Errors
/// If it has not four bytes.
pub fn decode_client_flags(message: &[u8]) -> Result<ClientFlags, Malformed> {
    let mut reader = Reader::new(message);
    let flags = ClientFlags(reader.u32()?);
    reader.end()?;
    Ok(flags)
}

/// Header of an option, before its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// The option that the client asks for.
    pub option: OptionCode,
    /// Bytes of data that follow.
    pub len: u32,
}

impl OptionHeader {
    /// Takes the header apart.
    ///
    /// # Errors
    /// If the magic number is wrong.
    pub fn decode(message: &[u8]) -> Result<OptionHeader, Malformed> {
        let mut reader = Reader::new(message);
        if reader.u64()? != OPTION_MAGIC {
            return Err(Malformed("an option does not begin with its magic number"));
        }
        let header = OptionHeader {
            option: reader.u32()?.into(),
            len: reader.u32()?,
        };
        reader.end()?;
        Ok(header)
    }
}

/// An option with its data.
pub fn encode_option(message: &mut Vec<u8>, option: OptionCode, data: &[u8]) {
    message.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    message.extend_from_slice(&u32::from(option).to_be_bytes());
    message.extend_from_slice(&length_u32(data.len()).to_be_bytes());
    message.extend_from_slice(data);
}

/// Header of a reply to an option, before its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The option that is answered.
    pub option: OptionCode,
    /// The type of the reply.
    pub reply: OptionReplyCode,
    /// Bytes of data that follow.
    pub len: u32,
}

impl OptionReplyHeader {
    /// Takes the header apart.
    ///
    /// # Errors
    /// If the magic number is wrong.
    pub fn decode(message: &[u8]) -> Result<OptionReplyHeader, Malformed> {
        let mut reader = Reader::new(message);
        if reader.u64()? != OPTION_REPLY_MAGIC {
            return Err(Malformed(
                "an option reply does not begin with its magic number",
            ));
        }
        let header = OptionReplyHeader {
            option: reader.u32()?.into(),
            reply: reader.u32()?.into(),
            len: reader.u32()?,
        };
        reader.end()?;
        Ok(header)
    }
}

/// A reply to an option with its data.
pub fn encode_option_reply(
    message: &mut Vec<u8>,
    option: OptionCode,
    reply: OptionReplyCode,
    data: &[u8],
) {
    message.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    message.extend_from_slice(&u32::from(option).to_be_bytes());
    message.extend_from_slice(&u32::from(reply).to_be_bytes());
    message.extend_from_slice(&length_u32(data.len()).to_be_bytes());
    message.extend_from_slice(data);
}

fn encode_counted_string(data: &mut Vec<u8>, string: &str) {
    data.extend_from_slice(&length_u32(string.len()).to_be_bytes());
    data.extend_from_slice(string.as_bytes());
}

/// The data of `INFO` and `GO`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InfoRequest {
    /// The name of the export; empty for the default one.
    pub name: String,
    /// Informations that the client asks for beyond size and flags.
    pub infos: Vec<InfoCode>,
}

impl InfoRequest {
    /// The data of the option.
    pub fn encode(&self) -> Vec<u8> {
        let mut data = Vec::with_capacity(6 + self.name.len() + 2 * self.infos.len());
        encode_counted_string(&mut data, &self.name);
        let count = u16::try_from(self.infos.len()).expect("a handful of kinds is asked for");
        data.extend_from_slice(&count.to_be_bytes());
        for &info in &self.infos {
            data.extend_from_slice(&u16::from(info).to_be_bytes());
        }
        data
    }

    /// Takes the data of the option apart.
    ///
    /// # Errors
    /// If lengths contradict each other, or the name is no valid string.
    pub fn decode(data: &[u8]) -> Result<InfoRequest, Malformed> {
        let mut reader = Reader::new(data);
        let name = reader.counted_string()?.to_owned();
        let count = reader.u16()?;
        let infos = (0..count)
            .map(|_| reader.u16().map(InfoCode::from))
            .collect::<Result<_, _>>()?;
        reader.end()?;
        Ok(InfoRequest { name, infos })
    }
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaContextRequest {
    /// The name of the export; empty for the default one.
    pub name: String,
    /// Contexts, or namespaces to list.
    pub queries: Vec<String>,
}

impl MetaContextRequest {
    /// The data of the option.
    pub fn encode(&self) -> Vec<u8> {
        let mut data = Vec::new();
        encode_counted_string(&mut data, &self.name);
        data.extend_from_slice(&length_u32(self.queries.len()).to_be_bytes());
        for query in &self.queries {
            encode_counted_string(&mut data, query);
        }
        data
    }

    /// Takes the data of the option apart.
    ///
    /// # Errors
    /// If lengths contradict each other, or a string is invalid.
    pub fn decode(data: &[u8]) -> Result<MetaContextRequest, Malformed> {
        let mut reader = Reader::new(data);
        let name = reader.counted_string()?.to_owned();
        let count = reader.u32()?;
        // The count is the client's word; each query takes at least four bytes that are really
        // there.
        let mut queries = Vec::new();
        for _ in 0..count {
            queries.push(reader.counted_string()?.to_owned());
        }
        reader.end()?;
        Ok(MetaContextRequest { name, queries })
    }
}

/// The data of a `Server` reply: an export in the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerEntry {
    /// The name of the export or metadata context.
    pub name: String,
    /// Its description, or nothing.
    pub description: String,
}

impl ServerEntry {
    /// The data of the reply.
    pub fn encode(&self) -> Vec<u8> {
        let mut data = Vec::new();
        encode_counted_string(&mut data, &self.name);
        data.extend_from_slice(self.description.as_bytes());
        data
    }

    /// Takes the data of the reply apart.
    ///
    /// # Errors
    /// If lengths contradict each other, or a string is invalid.
    pub fn decode(data: &[u8]) -> Result<ServerEntry, Malformed> {
        let mut reader = Reader::new(data);
        Ok(ServerEntry {
            name: reader.counted_string()?.to_owned(),
            description: reader.rest_string()?.to_owned(),
        })
    }
}

/// The data of a `MetaContext` reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaContextEntry {
    /// Identifier of the context in replies to `BLOCK_STATUS`.
    pub id: u32,
    /// The name of the export or metadata context.
    pub name: String,
}

impl MetaContextEntry {
    /// The data of the reply.
    pub fn encode(&self) -> Vec<u8> {
        let mut data = self.id.to_be_bytes().to_vec();
        data.extend_from_slice(self.name.as_bytes());
        data
    }

    /// Takes the data of the reply apart.
    ///
    /// # Errors
    /// If it is too short, or the name is no valid string.
    pub fn decode(data: &[u8]) -> Result<MetaContextEntry, Malformed> {
        let mut reader = Reader::new(data);
        Ok(MetaContextEntry {
            id: reader.u32()?,
            name: reader.rest_string()?.to_owned(),
        })
    }
}

/// Sizes of requests that an export takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Offsets and lengths are multiples of this; a power of two.
    pub minimum: u32,
    /// Requests are best aligned to this; a power of two.
    pub preferred: u32,
    /// Payloads are at most this long.
    pub maximum: u32,
}

impl BlockSizes {
    /// Checks the rules that the specification has for the three.
    ///
    /// # Errors
    /// If one of them is broken.
    pub fn validate(self) -> Result<BlockSizes, Malformed> {
        if !self.minimum.is_power_of_two() || self.minimum > 64 << 10 {
            return Err(Malformed(
                "the minimum block size is not a power of two up to 64 KiB",
            ));
        }
        if !self.preferred.is_power_of_two() || self.preferred < self.minimum {
            return Err(Malformed(
                "the preferred block size is not a power of two, or is below the minimum",
            ));
        }
        if self.maximum != u32::MAX && !self.maximum.is_multiple_of(self.minimum) {
            return Err(Malformed(
                "the maximum block size is not a multiple of the minimum",
            ));
        }
        if self.maximum < self.minimum {
            return Err(Malformed("the maximum block size is below the minimum"));
        }
        Ok(self)
    }
}

/// The data of an `Info` reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Info {
    /// Size in bytes and what the export can do.
    Export {
        /// Its size in bytes.
        size: u64,
        /// Abilities of the export.
        flags: TransmissionFlags,
    },
    /// The canonical name of the export.
    Name(String),
    /// The description of the export, for humans.
    Description(String),
    /// The sizes of requests that it takes.
    BlockSize(BlockSizes),
    /// An information that is unknown here, to be ignored.
    Unknown(u16),
}

impl Info {
    /// The data of the reply.
    pub fn encode(&self) -> Vec<u8> {
        let mut data = Vec::new();
        let code = match self {
            Info::Export { .. } => InfoCode::Export,
            Info::Name(_) => InfoCode::Name,
            Info::Description(_) => InfoCode::Description,
            Info::BlockSize(_) => InfoCode::BlockSize,
            Info::Unknown(code) => InfoCode::Unknown(*code),
        };
        data.extend_from_slice(&u16::from(code).to_be_bytes());
        match self {
            Info::Export { size, flags } => {
                data.extend_from_slice(&encode_export_name_reply(*size, *flags));
            }
            Info::Name(text) | Info::Description(text) => data.extend_from_slice(text.as_bytes()),
            Info::BlockSize(sizes) => {
                for size in [sizes.minimum, sizes.preferred, sizes.maximum] {
                    data.extend_from_slice(&size.to_be_bytes());
                }
            }
            Info::Unknown(_) => {}
        }
        data
    }

    /// Takes the data of the reply apart.
    ///
    /// # Errors
    /// If the length does not fit the kind, a string is invalid, or block sizes break the rules.
    pub fn decode(data: &[u8]) -> Result<Info, Malformed> {
        let mut reader = Reader::new(data);
        let info = match InfoCode::from(reader.u16()?) {
            InfoCode::Export => Info::Export {
                size: reader.u64()?,
                flags: TransmissionFlags(reader.u16()?),
            },
            InfoCode::Name => Info::Name(reader.rest_string()?.to_owned()),
            InfoCode::Description => Info::Description(reader.rest_string()?.to_owned()),
            InfoCode::BlockSize => Info::BlockSize(
                BlockSizes {
                    minimum: reader.u32()?,
                    preferred: reader.u32()?,
                    maximum: reader.u32()?,
                }
                .validate()?,
            ),
            InfoCode::Unknown(code) => return Ok(Info::Unknown(code)),
        };
        reader.end()?;
        Ok(info)
    }
}

/// Size and flags: the answer to `EXPORT_NAME` without the reserved bytes.
pub fn encode_export_name_reply(
    size: u64,
    flags: TransmissionFlags,
) -> [u8; EXPORT_NAME_REPLY_BYTES] {
    let mut message = [0; EXPORT_NAME_REPLY_BYTES];
    message[..8].copy_from_slice(&size.to_be_bytes());
    message[8..].copy_from_slice(&flags.0.to_be_bytes());
    message
}

/// Takes the answer to `EXPORT_NAME` apart, without the reserved bytes.
///
/// # Errors
/// If it has the wrong length.
pub fn decode_export_name_reply(message: &[u8]) -> Result<(u64, TransmissionFlags), Malformed> {
    let mut reader = Reader::new(message);
    let size = reader.u64()?;
    let flags = TransmissionFlags(reader.u16()?);
    reader.end()?;
    Ok((size, flags))
}
