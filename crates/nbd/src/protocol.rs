//! The values of the protocol: magic numbers, flags, option, reply, command and error codes.
//!
//! All masks and numbers of the specification stand here and in the two submodules, which encode
//! and decode the messages of the [`handshake`] and of the [`transmission`] phase. Nothing here
//! does I/O, and decoding arbitrary bytes never panics. Fields that the specification wants a
//! receiver to tolerate (unknown options, commands, reply types) decodes to an `Unknown` value;
//! what it forbids is [`Malformed`].

use cowslip_block::errno::EIO;
use std::fmt;

pub mod handshake;
pub mod transmission;

#[cfg(test)]
mod tests;

/// The first eight bytes that a server sends: `NBDMAGIC`.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Marks the newstyle handshake and begins every option: `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Marks the oldstyle handshake.
pub const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Begins every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Begins every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Begins a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Begins a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// Begins a request with extended headers.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Begins a chunk of a reply with extended headers.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// The longest string that the specification allows, export names included.
pub const STRING_BYTES_MAX: usize = 4096;
/// The largest payload of a request or reply: what every peer is known to accept.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// The one metadata context that the specification defines.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// The namespace of [`BASE_ALLOCATION`], which as a query lists everything in it.
pub const BASE_NAMESPACE: &str = "base:";
/// A metadata context of QEMU's: how deep below the top of a backing chain data lies (qemu's
/// `docs/interop/nbd.rst`).
pub const ALLOCATION_DEPTH: &str = "qemu:allocation-depth";
/// The namespace of [`ALLOCATION_DEPTH`], which as a query lists everything in it.
pub const QEMU_NAMESPACE: &str = "qemu:";
/// Metadata contexts of QEMU's: this and the name of a dirty bitmap; as a query it lists them all.
/// Bit 0 of a state is set where the disk has changed (qemu's `docs/interop/nbd.rst`).
pub const DIRTY_BITMAP_NAMESPACE: &str = "qemu:dirty-bitmap:";

/// A message that breaks the protocol; says how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Malformed {}

/// Declares a set of flags of one field, each with its bit.
macro_rules! flags {
    ($(#[$meta:meta])* $name:ident: $repr:ty { $($(#[$flag_meta:meta])* $flag:ident = $bit:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name(pub $repr);

        impl $name {
            $($(#[$flag_meta])* pub const $flag: $name = $name(1 << $bit);)*

            /// Returns the empty set of flags.
            pub const fn empty() -> $name {
                $name(0)
            }

            /// Whether all of `flags` are set.
            pub const fn contains(self, flags: $name) -> bool {
                self.0 & flags.0 == flags.0
            }

            /// Returns the union of these flags and `flags`.
            #[must_use]
            pub const fn with(self, flags: $name) -> $name {
                $name(self.0 | flags.0)
            }

            /// Returns these flags, with `flags` if `condition` holds.
            #[must_use]
            pub const fn with_if(self, flags: $name, condition: bool) -> $name {
                if condition { self.with(flags) } else { self }
            }

            /// Whether a flag is set that is none of `known`.
            pub const fn has_other_than(self, known: $name) -> bool {
                self.0 & !known.0 != 0
            }

            /// The names of the flags that are set, in the order of their bits.
            pub fn names(self) -> Vec<&'static str> {
                [$((Self::$flag, stringify!($flag)),)*]
                    .into_iter()
                    .filter(|&(flag, _)| self.contains(flag))
                    .map(|(_, name)| name)
                    .collect()
            }
        }
    };
}

flags! {
    /// Offers of the server in its greeting.
    HandshakeFlags: u16 {
        /// Several options, each with its reply.
        FIXED_NEWSTYLE = 0,
        /// The 124 reserved bytes after `EXPORT_NAME` may be left out.
        NO_ZEROES = 1,
    }
}

flags! {
    /// The client's choice of the offers of the greeting.
    ClientFlags: u32 {
        /// Several options, each with its reply.
        FIXED_NEWSTYLE = 0,
        /// The 124 reserved bytes after `EXPORT_NAME` are left out.
        NO_ZEROES = 1,
    }
}

flags! {
    /// Abilities of an export.
    TransmissionFlags: u16 {
        /// Always set.
        HAS_FLAGS = 0,
        /// Writes are refused.
        READ_ONLY = 1,
        /// `FLUSH` is supported.
        SEND_FLUSH = 2,
        /// `FUA` is supported.
        SEND_FUA = 3,
        /// The medium rotates.
        ROTATIONAL = 4,
        /// `TRIM` is supported.
        SEND_TRIM = 5,
        /// `WRITE_ZEROES` and `NO_HOLE` are supported.
        SEND_WRITE_ZEROES = 6,
        /// `DF` is supported.
        SEND_DF = 7,
        /// A flush on one connection covers the writes of all.
        CAN_MULTI_CONN = 8,
        /// `RESIZE` is supported.
        SEND_RESIZE = 9,
        /// `CACHE` is supported.
        SEND_CACHE = 10,
        /// `FAST_ZERO` is supported.
        SEND_FAST_ZERO = 11,
        /// `BLOCK_STATUS` takes a payload (extended headers only).
        BLOCK_STATUS_PAYLOAD = 12,
    }
}

flags! {
    /// Modifiers of one request.
    CommandFlags: u16 {
        /// Durable before the reply.
        FUA = 0,
        /// Zeroes keep their space.
        NO_HOLE = 1,
        /// The reply has one content chunk at most.
        DF = 2,
        /// The reply has one extent at most.
        REQ_ONE = 3,
        /// Fail rather than write zeroes out.
        FAST_ZERO = 4,
        /// The request has a payload (extended headers only).
        PAYLOAD_LEN = 5,
    }
}

flags! {
    /// Flags of a chunk of a structured reply.
    ChunkFlags: u16 {
        /// The last chunk of its reply.
        DONE = 0,
    }
}

flags! {
    /// The state of an extent in the context `base:allocation`.
    AllocationFlags: u32 {
        /// The range is not allocated.
        HOLE = 0,
        /// The range reads as zeroes.
        ZERO = 1,
    }
}

/// Declares an enum of codes with `Unknown` for all others, and the conversions both ways.
macro_rules! codes {
    ($(#[$meta:meta])* $name:ident: $repr:ty { $($(#[$code_meta:meta])* $code:ident = $value:expr,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$code_meta])* $code,)*
            /// A code that this implementation does not know.
            Unknown($repr),
        }

        impl From<$repr> for $name {
            fn from(value: $repr) -> $name {
                $(if value == $value { return $name::$code; })*
                $name::Unknown(value)
            }
        }

        impl From<$name> for $repr {
            fn from(code: $name) -> $repr {
                match code {
                    $($name::$code => $value,)*
                    $name::Unknown(value) => value,
                }
            }
        }

        impl $name {
            /// All codes that have a name.
            pub const KNOWN: &'static [$name] = &[$($name::$code,)*];
        }
    };
}

codes! {
    /// Option that a client asks for during option haggling.
    OptionCode: u32 {
        /// Choose an export and begin transmission, without any reply if it fails.
        ExportName = 1,
        /// End the session.
        Abort = 2,
        /// List the exports.
        List = 3,
        /// Begin TLS.
        StartTls = 5,
        /// Describe an export.
        Info = 6,
        /// Describe an export and begin transmission.
        Go = 7,
        /// Use structured replies.
        StructuredReply = 8,
        /// List metadata contexts.
        ListMetaContext = 9,
        /// Select metadata contexts.
        SetMetaContext = 10,
        /// Use 64-bit lengths.
        ExtendedHeaders = 11,
    }
}

/// Set in all reply codes that are errors.
const ERROR_REPLY: u32 = 1 << 31;

codes! {
    /// Answer of a server to an option.
    OptionReplyCode: u32 {
        /// The option was carried out, or a list has ended.
        Ack = 1,
        /// An export's name.
        Server = 2,
        /// A piece of information about an export.
        Info = 3,
        /// A metadata context.
        MetaContext = 4,
        /// The option is unknown.
        ErrUnsupported = ERROR_REPLY + 1,
        /// The option is forbidden.
        ErrPolicy = ERROR_REPLY + 2,
        /// The option is malformed, or not allowed at this point.
        ErrInvalid = ERROR_REPLY + 3,
        /// The server's platform lacks the option.
        ErrPlatform = ERROR_REPLY + 4,
        /// TLS must come first.
        ErrTlsRequired = ERROR_REPLY + 5,
        /// The export does not exist.
        ErrUnknown = ERROR_REPLY + 6,
        /// The server is going away.
        ErrShutdown = ERROR_REPLY + 7,
        /// The client must ask for the block sizes first.
        ErrBlockSizeRequired = ERROR_REPLY + 8,
        /// The option is too long.
        ErrTooBig = ERROR_REPLY + 9,
        /// The client must ask for extended headers first.
        ErrExtendedHeadersRequired = ERROR_REPLY + 10,
    }
}

impl OptionReplyCode {
    /// Whether the option failed.
    pub fn is_error(self) -> bool {
        u32::from(self) & ERROR_REPLY != 0
    }
}

codes! {
    /// Kinds of information about an export.
    InfoCode: u16 {
        /// Size and transmission flags; always sent.
        Export = 0,
        /// The name in its canonical form.
        Name = 1,
        /// A description for humans.
        Description = 2,
        /// Minimum, preferred and maximum block size.
        BlockSize = 3,
    }
}

codes! {
    /// Operation of a request.
    Command: u16 {
        /// Read a range.
        Read = 0,
        /// Write a range.
        Write = 1,
        /// End the session.
        Disconnect = 2,
        /// Make completed writes durable.
        Flush = 3,
        /// Give a range up.
        Trim = 4,
        /// Load a range into the server's cache.
        Cache = 5,
        /// Make a range read as zeroes.
        WriteZeroes = 6,
        /// Describe a range.
        BlockStatus = 7,
        /// Change the size.
        Resize = 8,
    }
}

/// Set in all chunk types that are errors.
const ERROR_CHUNK: u16 = 1 << 15;

codes! {
    /// Content of a chunk of a structured reply.
    ChunkCode: u16 {
        /// No content; ends the reply.
        None = 0,
        /// Data of a read.
        OffsetData = 1,
        /// A run of zeroes of a read.
        OffsetHole = 2,
        /// Extents of a metadata context.
        BlockStatus = 5,
        /// Extents of a metadata context in 64 bits; with extended headers only, and then always.
        ExtendedStatus = 6,
        /// The request failed.
        Error = ERROR_CHUNK + 1,
        /// The request failed at an offset.
        ErrorOffset = ERROR_CHUNK + 2,
    }
}

impl ChunkCode {
    /// Whether the chunk, known or not, says that the request failed.
    pub fn is_error(self) -> bool {
        u16::from(self) & ERROR_CHUNK != 0
    }
}

codes! {
    /// Why a request failed. The values are Linux's, on every platform.
    ErrorCode: u32 {
        /// Operation not permitted.
        Perm = 1,
        /// Input/output error.
        Io = 5,
        /// Cannot allocate memory.
        NoMem = 12,
        /// Invalid argument.
        Inval = 22,
        /// No space left on device.
        NoSpc = 28,
        /// Value too large.
        Overflow = 75,
        /// Operation not supported; only in answer to `FAST_ZERO`.
        NotSup = 95,
        /// The server is going away.
        Shutdown = 108,
    }
}

impl ErrorCode {
    /// The code that stands for a Linux `errno`; `Io` for those that the protocol has no word for.
    pub fn from_errno(errno: i32) -> ErrorCode {
        const EACCES: u32 = 13;
        const EFBIG: u32 = 27;
        const EROFS: u32 = 30;
        const EDQUOT: u32 = 122;
        match u32::try_from(errno).unwrap_or(0) {
            EACCES | EROFS => ErrorCode::Perm,
            EFBIG | EDQUOT => ErrorCode::NoSpc,
            errno => match ErrorCode::from(errno) {
                ErrorCode::Unknown(_) => ErrorCode::Io,
                known => known,
            },
        }
    }

    /// The Linux `errno` of the code; `EIO` for codes that the protocol does not define.
    pub fn errno(self) -> i32 {
        match self {
            ErrorCode::Unknown(_) => EIO,
            known => i32::try_from(u32::from(known)).unwrap_or(EIO),
        }
    }
}

/// Takes a message apart; every step checks what is left.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

const TRUNCATED: Malformed = Malformed("the message is shorter than its fields");

impl<'a> Reader<'a> {
    pub(crate) fn new(message: &'a [u8]) -> Reader<'a> {
        Reader { rest: message }
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.rest.split_at_checked(len).ok_or(TRUNCATED)?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(TRUNCATED)?;
        self.rest = rest;
        Ok(*taken)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_be_bytes)
    }

    /// Reads a 32-bit length and a string of that many bytes.
    pub(crate) fn counted_string(&mut self) -> Result<&'a str, Malformed> {
        let len = usize::try_from(self.u32()?).map_err(|_| TRUNCATED)?;
        string(self.bytes(len)?)
    }

    /// All that is left, as a string.
    pub(crate) fn rest_string(&mut self) -> Result<&'a str, Malformed> {
        string(std::mem::take(&mut self.rest))
    }

    pub(crate) fn end(self) -> Result<(), Malformed> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(Malformed("the message is longer than its fields"))
        }
    }
}

/// Checks the rules that the specification has for every string.
pub(crate) fn string(bytes: &[u8]) -> Result<&str, Malformed> {
    if bytes.len() > STRING_BYTES_MAX {
        return Err(Malformed("a string is longer than 4096 bytes"));
    }
    if bytes.contains(&0) {
        return Err(Malformed("a string contains a NUL character"));
    }
    std::str::from_utf8(bytes).map_err(|_| Malformed("a string is not UTF-8"))
}

/// The length of a part of a message, which its bounds keep far below 4 GiB.
pub(crate) fn length_u32(len: usize) -> u32 {
    u32::try_from(len).expect("messages are built from bounded parts")
}
