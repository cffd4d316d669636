//! Messages of the vhost-user protocol: bytes to types and back, without I/O. All numbers are
//! little-endian, as on the machines that both sides run on.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::memory::{REGIONS_MAX, RegionDescription};

/// Bytes before the payload: code, flags, length of the payload.
pub(crate) const HEADER_BYTES: usize = 12;
/// Longest payload that is accepted.
const PAYLOAD_BYTES_MAX: u32 = 4096;

/// Flags of a message: the protocol's version, an answer, an answer is wanted.
const VERSION_MASK: u32 = 3;
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Flag in the number of a ring: no descriptor comes with the message.
const NO_DESCRIPTOR: u64 = 1 << 8;

/// Protocol features that are offered.
pub(crate) mod feature {
    pub const MQ: u64 = 1;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub const ALL: u64 = MQ
        | LOG_SHMFD
        | REPLY_ACK
        | BACKEND_REQ
        | CONFIG
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS;
}

/// Codes of the messages of a front end.
pub(crate) mod code {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;

    /// A message of the server, on the channel that the front end has passed: the configuration
    /// has changed.
    pub const CONFIG_CHANGE: u32 = 2;
}

/// A message that breaks the protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Malformed(pub String);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub code: u32,
    pub flags: u32,
    /// Bytes of the payload.
    pub len: u32,
}

impl Header {
    /// # Errors
    /// Another version of the protocol, an answer, a payload that is too long.
    pub fn parse(bytes: [u8; HEADER_BYTES]) -> Result<Header, Malformed> {
        let mut fields = Fields(&bytes);
        let header = Header {
            code: fields.u32()?,
            flags: fields.u32()?,
            len: fields.u32()?,
        };
        let Header { code, flags, len } = header;
        if flags & VERSION_MASK != VERSION || flags & REPLY != 0 {
            return Err(Malformed(format!("message {code} has flags {flags:#x}")));
        }
        if len > PAYLOAD_BYTES_MAX {
            return Err(Malformed(format!(
                "message {code} has a payload of {len} bytes"
            )));
        }
        Ok(header)
    }

    /// Whether the front end waits for an answer to a message that has none of its own.
    pub fn needs_reply(self) -> bool {
        self.flags & NEED_REPLY != 0
    }

    /// The answer to the message.
    pub fn reply(self, payload: &[u8]) -> Vec<u8> {
        encode(self.code, REPLY, payload)
    }
}

/// A message of this version.
pub(crate) fn encode(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    bytes.extend(code.to_le_bytes());
    bytes.extend((VERSION | flags).to_le_bytes());
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.extend(payload);
    bytes
}

/// Addresses of a ring, as the front end names its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RingAddresses {
    /// Whether writes to the device's part are logged, at the guest address `log`.
    pub is_logged: bool,
    pub descriptors: u64,
    /// The part that the device writes.
    pub used: u64,
    /// The part that the driver writes.
    pub available: u64,
    pub log: u64,
}

/// A table of requests in flight, as messages describe it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InflightDescription {
    pub len: u64,
    pub offset: u64,
    pub queues: u16,
    pub queue_size: u16,
}

impl InflightDescription {
    /// The payload. C compilers pad the structure to 24 bytes, so front ends differ in its length.
    pub fn encode(&self, payload_len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.len.to_le_bytes());
        bytes.extend(self.offset.to_le_bytes());
        bytes.extend(self.queues.to_le_bytes());
        bytes.extend(self.queue_size.to_le_bytes());
        bytes.resize(payload_len, 0);
        bytes
    }
}

/// A request of a front end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    ResetDevice,
    SetMemTable(Vec<RegionDescription>),
    GetMaxMemSlots,
    AddMemReg(RegionDescription),
    RemMemReg(RegionDescription),
    SetLogBase { len: u64, offset: u64 },
    SetLogFd,
    SetVringNum { ring: u32, size: u32 },
    SetVringAddr { ring: u32, addresses: RingAddresses },
    SetVringBase { ring: u32, base: u32 },
    GetVringBase { ring: u32 },
    SetVringKick { ring: u32, has_descriptor: bool },
    SetVringCall { ring: u32, has_descriptor: bool },
    SetVringErr { ring: u32, has_descriptor: bool },
    SetVringEnable { ring: u32, is_enabled: bool },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetBackendReqFd,
    GetConfig { offset: u32, len: u32, flags: u32 },
    SetConfig { offset: u32, bytes: Vec<u8> },
    GetInflightFd(InflightDescription),
    SetInflightFd(InflightDescription),
}

impl Message {
    /// # Errors
    /// An unknown code, or a payload that is too short, too long or impossible.
    pub fn parse(code: u32, payload: &[u8]) -> Result<Message, Malformed> {
        let mut fields = Fields(payload);
        let message = fields.message(code)?;
        match fields.0.len() {
            0 => Ok(message),
            more => Err(Malformed(format!(
                "message {code} has {more} bytes too many"
            ))),
        }
    }

    /// Descriptors that must come with the message.
    pub fn descriptors(&self) -> std::ops::RangeInclusive<usize> {
        match self {
            Message::SetMemTable(regions) => regions.len()..=regions.len(),
            Message::AddMemReg(_)
            | Message::SetLogBase { .. }
            | Message::SetLogFd
            | Message::SetBackendReqFd
            | Message::SetInflightFd(_) => 1..=1,
            Message::SetVringKick { has_descriptor, .. }
            | Message::SetVringCall { has_descriptor, .. }
            | Message::SetVringErr { has_descriptor, .. } => {
                let count = usize::from(*has_descriptor);
                count..=count
            }
            // Old front ends send one with the region's removal; it is closed.
            Message::RemMemReg(_) => 0..=1,
            _ => 0..=0,
        }
    }
}

/// The rest of a payload.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let Some((field, rest)) = self.0.split_first_chunk::<N>() else {
            return Err(Malformed("a message is too short".to_string()));
        };
        self.0 = rest;
        Ok(*field)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.take()?))
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    fn region(&mut self) -> Result<RegionDescription, Malformed> {
        Ok(RegionDescription {
            guest: self.u64()?,
            len: self.u64()?,
            user: self.u64()?,
            offset: self.u64()?,
        })
    }

    fn single_region(&mut self) -> Result<RegionDescription, Malformed> {
        let _padding = self.u64()?;
        self.region()
    }

    fn regions(&mut self) -> Result<Vec<RegionDescription>, Malformed> {
        let count = self.u32()?;
        let _padding = self.u32()?;
        if count as usize > REGIONS_MAX {
            return Err(Malformed(format!("a table of {count} memory regions")));
        }
        (0..count).map(|_| self.region()).collect()
    }

    fn addresses(&mut self) -> Result<Message, Malformed> {
        let ring = self.u32()?;
        let flags = self.u32()?;
        if flags > 1 {
            return Err(Malformed(format!(
                "addresses of ring {ring} with flags {flags:#x}"
            )));
        }
        let (descriptors, used) = (self.u64()?, self.u64()?);
        let (available, log) = (self.u64()?, self.u64()?);
        let addresses = RingAddresses {
            is_logged: flags == 1,
            descriptors,
            used,
            available,
            log,
        };
        Ok(Message::SetVringAddr { ring, addresses })
    }

    /// The number of a ring, and whether a descriptor comes for it.
    fn ring(&mut self) -> Result<(u32, bool), Malformed> {
        let value = self.u64()?;
        Ok(((value & 0xFF) as u32, value & NO_DESCRIPTOR == 0))
    }

    fn inflight(&mut self) -> Result<InflightDescription, Malformed> {
        let description = InflightDescription {
            len: self.u64()?,
            offset: self.u64()?,
            queues: self.u16()?,
            queue_size: self.u16()?,
        };
        if self.0.len() == 4 {
            let _padding = self.u32()?;
        }
        Ok(description)
    }

    fn config(&mut self) -> Result<Message, Malformed> {
        let (offset, len, _flags) = (self.u32()?, self.u32()?, self.u32()?);
        if len as usize != self.0.len() {
            return Err(Malformed(format!(
                "configuration of {len} bytes in another length"
            )));
        }
        let bytes = std::mem::take(&mut self.0).to_vec();
        Ok(Message::SetConfig { offset, bytes })
    }

    fn get_config(&mut self) -> Result<Message, Malformed> {
        let (offset, len, flags) = (self.u32()?, self.u32()?, self.u32()?);
        // The bytes that follow have no meaning in a question.
        if len as usize != std::mem::take(&mut self.0).len() {
            return Err(Malformed(format!(
                "configuration of {len} bytes in another length"
            )));
        }
        Ok(Message::GetConfig { offset, len, flags })
    }

    fn message(&mut self, code: u32) -> Result<Message, Malformed> {
        Ok(match code {
            code::GET_FEATURES => Message::GetFeatures,
            code::SET_FEATURES => Message::SetFeatures(self.u64()?),
            code::SET_OWNER => Message::SetOwner,
            code::RESET_OWNER => Message::ResetOwner,
            code::RESET_DEVICE => Message::ResetDevice,
            code::SET_MEM_TABLE => Message::SetMemTable(self.regions()?),
            code::GET_MAX_MEM_SLOTS => Message::GetMaxMemSlots,
            code::ADD_MEM_REG => Message::AddMemReg(self.single_region()?),
            code::REM_MEM_REG => Message::RemMemReg(self.single_region()?),
            code::SET_LOG_BASE => Message::SetLogBase {
                len: self.u64()?,
                offset: self.u64()?,
            },
            code::SET_LOG_FD => Message::SetLogFd,
            code::SET_VRING_NUM => Message::SetVringNum {
                ring: self.u32()?,
                size: self.u32()?,
            },
            code::SET_VRING_ADDR => self.addresses()?,
            code::SET_VRING_BASE => Message::SetVringBase {
                ring: self.u32()?,
                base: self.u32()?,
            },
            code::GET_VRING_BASE => {
                let (ring, _unused) = (self.u32()?, self.u32()?);
                Message::GetVringBase { ring }
            }
            code::SET_VRING_KICK => {
                let (ring, has_descriptor) = self.ring()?;
                Message::SetVringKick {
                    ring,
                    has_descriptor,
                }
            }
            code::SET_VRING_CALL => {
                let (ring, has_descriptor) = self.ring()?;
                Message::SetVringCall {
                    ring,
                    has_descriptor,
                }
            }
            code::SET_VRING_ERR => {
                let (ring, has_descriptor) = self.ring()?;
                Message::SetVringErr {
                    ring,
                    has_descriptor,
                }
            }
            code::SET_VRING_ENABLE => {
                let (ring, value) = (self.u32()?, self.u32()?);
                if value > 1 {
                    return Err(Malformed(format!("ring {ring} is enabled with {value}")));
                }
                Message::SetVringEnable {
                    ring,
                    is_enabled: value == 1,
                }
            }
            code::GET_PROTOCOL_FEATURES => Message::GetProtocolFeatures,
            code::SET_PROTOCOL_FEATURES => Message::SetProtocolFeatures(self.u64()?),
            code::GET_QUEUE_NUM => Message::GetQueueNum,
            code::SET_BACKEND_REQ_FD => Message::SetBackendReqFd,
            code::GET_CONFIG => self.get_config()?,
            code::SET_CONFIG => self.config()?,
            code::GET_INFLIGHT_FD => Message::GetInflightFd(self.inflight()?),
            code::SET_INFLIGHT_FD => Message::SetInflightFd(self.inflight()?),
            _ => return Err(Malformed(format!("message {code} is not supported"))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_other_protocols_are_refused() {
        let header = |flags: u32, len: u32| {
            let mut bytes = [0; HEADER_BYTES];
            bytes[0] = 1;
            bytes[4..8].copy_from_slice(&flags.to_le_bytes());
            bytes[8..].copy_from_slice(&len.to_le_bytes());
            Header::parse(bytes)
        };
        assert!(header(1, 8).is_ok_and(|header| !header.needs_reply()));
        assert!(header(9, 4096).is_ok_and(Header::needs_reply));
        for (flags, len) in [(0, 8), (2, 8), (5, 8), (1, 4097), (1, u32::MAX)] {
            assert!(header(flags, len).is_err(), "{flags} {len}");
        }
        let reply = header(1, 0).unwrap().reply(&[7]);
        assert_eq!(reply, [1, 0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 7]);
    }

    #[test]
    fn payloads_of_any_length_are_messages_or_errors() {
        for code in 0..60 {
            for len in 0..=300 {
                for fill in [0, 1, 0xFF] {
                    // None panics; few are messages.
                    let parsed = Message::parse(code, &vec![fill; len]);
                    drop(parsed.map(|message| message.descriptors()));
                }
            }
        }
        let ring = 0x101_u64.to_le_bytes();
        let expected = Message::SetVringKick {
            ring: 1,
            has_descriptor: false,
        };
        assert_eq!(Message::parse(code::SET_VRING_KICK, &ring), Ok(expected));
        let description = InflightDescription {
            len: 1,
            offset: 2,
            queues: 3,
            queue_size: 4,
        };
        for len in [20, 24] {
            let parsed = Message::parse(code::GET_INFLIGHT_FD, &description.encode(len));
            assert_eq!(parsed, Ok(Message::GetInflightFd(description)));
        }
        assert!(Message::parse(code::GET_INFLIGHT_FD, &description.encode(22)).is_err());
    }
}
