//! TLS with keys shared beforehand (PSK), which rustls does not have: by the system's OpenSSL,
//! whose sessions read from and write to memory here. `psk_missing.rs` stands in its place where
//! the feature `psk` is off.
//!
//! Versions and ciphers, and no others; each brings forward secrecy, so that a key that is lost
//! later opens no recorded session:
//!
//! | version | key exchange | ciphers |
//! | --- | --- | --- |
//! | 1.3 | `psk_dhe_ke`, with SHA-256, as keys without a hash of their own mean (RFC 8446, 4.2.11) | AES-128-GCM, ChaCha20-Poly1305 |
//! | 1.2 | ECDHE-PSK | ChaCha20-Poly1305 |
//! | 1.2, as a client only | DHE-PSK, 2048 bits at least | AES-GCM, ChaCha20-Poly1305 |
//!
//! A side that has no key proves nothing: certificates are neither shown nor believed here. A user
//! that is not known gets a key made of dice, so that the handshake fails as it does for a wrong
//! key, and does not reveal known names.
//!
//! Left out: resuming sessions, early data, renegotiation, compression.

use std::io::{self, IoSlice, Read, Write};
use std::sync::{Arc, OnceLock};

use openssl::error::ErrorStack;
use openssl::ex_data::Index;
use openssl::rand::rand_bytes;
use openssl::ssl::{
    self, ErrorCode, Ssl, SslContext, SslContextBuilder, SslMethod, SslOptions, SslRef,
    SslSessionCacheMode, SslStream, SslVerifyMode, SslVersion,
};

use super::connection::{SEALED_BYTES, invalid};
use super::keys::SharedKeys;
use super::{CredentialsError, Endpoint, Peer, TlsError};

/// Why keys shared beforehand are refused, and what to do; `None` if they are not.
pub const PSK_MISSING: Option<&str> = None;

/// Ciphers of TLS 1.3: those with SHA-256.
const CIPHERS_13: &str = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
/// Ciphers of TLS 1.2: those with forward secrecy that authenticate what they encrypt. Without
/// parameters for DHE, which servers here have none of, the first is all that a server has.
const CIPHERS_12: &str = "ECDHE-PSK-CHACHA20-POLY1305:DHE-PSK-AES256-GCM-SHA384:DHE-PSK-AES128-GCM-SHA256:DHE-PSK-CHACHA20-POLY1305";
/// OpenSSL's level of security: 112 bits, so 2048 for Diffie-Hellman.
const SECURITY_LEVEL: u32 = 2;
/// All messages of a handshake. They take about one KiB.
const HANDSHAKE_BYTES_MAX: usize = 64 << 10;
/// Data of a record, at most.
const RECORD_BYTES: usize = 16 << 10;
/// Bytes for the library at once: a record with its header and the overhead of encryption.
const PIECE_BYTES: usize = RECORD_BYTES + 512;
/// Limit of the library's own output (key updates, alerts) that waits for the writing side. A peer
/// that causes more of it without a byte of data in between is hostile.
const UNASKED_BYTES_MAX: usize = 64 << 10;
/// The length of the key that stands for an unknown user: that of `psktool`.
const NOBODYS_KEY_BYTES: usize = 32;

/// Keys of one side, and how they may be used.
#[derive(Clone)]
pub(super) struct Context {
    context: SslContext,
    endpoint: Endpoint,
}

/// The user that the client has named, and whether there is one of that name.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Named {
    /// The client has named no user yet.
    Nobody,
    /// A client with a key.
    User(String),
    /// A client without one.
    Stranger(String),
}

/// Where a session keeps [`Named`].
fn named() -> Result<Index<Ssl, Named>, ErrorStack> {
    static INDEX: OnceLock<Index<Ssl, Named>> = OnceLock::new();
    if let Some(index) = INDEX.get() {
        return Ok(*index);
    }
    let index = Ssl::new_ex_index()?;
    // Another thread may have been faster; an index too many costs nothing.
    Ok(*INDEX.get_or_init(|| index))
}

fn library(error: &ErrorStack) -> CredentialsError {
    CredentialsError::Library(reason(error))
}

/// Returns a builder with the demands of both sides.
fn builder() -> Result<SslContextBuilder, ErrorStack> {
    let mut builder = SslContextBuilder::new(SslMethod::tls())?;
    builder.set_min_proto_version(Some(SslVersion::TLS1_2))?;
    builder.set_max_proto_version(Some(SslVersion::TLS1_3))?;
    builder.set_ciphersuites(CIPHERS_13)?;
    builder.set_cipher_list(CIPHERS_12)?;
    builder.set_options(
        SslOptions::NO_TICKET
            | SslOptions::NO_RENEGOTIATION
            | SslOptions::NO_COMPRESSION
            | SslOptions::CIPHER_SERVER_PREFERENCE,
    );
    builder.set_session_cache_mode(SslSessionCacheMode::OFF);
    Ok(builder)
}

impl Context {
    /// A server that serves these users.
    pub(super) fn server(keys: SharedKeys) -> Result<Context, CredentialsError> {
        let context = server_context(Arc::new(keys)).map_err(|error| library(&error))?;
        Ok(Context {
            context,
            endpoint: Endpoint::Server,
        })
    }

    /// A client that is this user, who has a key.
    pub(super) fn client(user: &str, keys: &SharedKeys) -> Result<Context, CredentialsError> {
        let Some(key) = keys.key_of(user) else {
            return Err(CredentialsError::NoSuchUser(user.to_string()));
        };
        let key = zeroize::Zeroizing::new(key.to_vec());
        let user = user.as_bytes().to_vec();
        let context = client_context(user, key).map_err(|error| library(&error))?;
        Ok(Context {
            context,
            endpoint: Endpoint::Client,
        })
    }

    /// A session that has yet to begin; a client's has something to send.
    pub(super) fn connection(&self) -> Result<Connection, TlsError> {
        let begun = self.begin();
        begun.map_err(|error| failed(&reason(&error)))
    }

    fn begin(&self) -> Result<Connection, ErrorStack> {
        let mut ssl = Ssl::new(&self.context)?;
        ssl.set_ex_data(named()?, Named::Nobody);
        // A system that asks for more gets more.
        let level = ssl.security_level().max(SECURITY_LEVEL);
        ssl.set_security_level(level);
        match self.endpoint {
            Endpoint::Server => ssl.set_accept_state(),
            Endpoint::Client => ssl.set_connect_state(),
        }
        let mut connection = Connection {
            stream: SslStream::new(ssl, Pipes::default())?,
            shaking: true,
            taken: 0,
            failed: None,
            gathered: Vec::new(),
        };
        if self.endpoint == Endpoint::Client {
            // An error is stored, and reported by the next call that can return one.
            drop(connection.shake());
        }
        Ok(connection)
    }
}

fn server_context(keys: Arc<SharedKeys>) -> Result<SslContext, ErrorStack> {
    let mut builder = builder()?;
    builder.set_num_tickets(0)?;
    let index = named()?;
    builder.set_psk_server_callback(move |ssl, user, key| {
        let user = user.unwrap_or_default();
        let known = std::str::from_utf8(user)
            .ok()
            .and_then(|name| keys.key_of(name));
        let name = String::from_utf8_lossy(user).into_owned();
        note(
            ssl,
            index,
            match known {
                Some(_) => Named::User(name),
                None => Named::Stranger(name),
            },
        );
        match known {
            Some(known) => Ok(copy(known, key)),
            None => {
                let len = NOBODYS_KEY_BYTES.min(key.len());
                rand_bytes(&mut key[..len])?;
                Ok(len)
            }
        }
    });
    Ok(builder.build())
}

fn client_context(
    user: Vec<u8>,
    key: zeroize::Zeroizing<Vec<u8>>,
) -> Result<SslContext, ErrorStack> {
    let mut builder = builder()?;
    // A server may leave the key alone and show a certificate instead. There is none that would do.
    builder.set_verify_callback(SslVerifyMode::PEER, |_, _| false);
    let index = named()?;
    let name = String::from_utf8_lossy(&user).into_owned();
    builder.set_psk_client_callback(move |ssl, _hint, identity, key_out| {
        // A name and the zero behind it.
        let Some(place) = identity.get_mut(..=user.len()) else {
            return Ok(0);
        };
        place[..user.len()].copy_from_slice(&user);
        place[user.len()] = 0;
        note(ssl, index, Named::User(name.clone()));
        Ok(copy(&key, key_out))
    });
    Ok(builder.build())
}

fn note(ssl: &mut SslRef, index: Index<Ssl, Named>, who: Named) {
    if let Some(place) = ssl.ex_data_mut(index) {
        *place = who;
    }
}

/// Copies a key to where the library wants it; a length of 0 is no key.
fn copy(key: &[u8], target: &mut [u8]) -> usize {
    let Some(target) = target.get_mut(..key.len()) else {
        return 0;
    };
    target.copy_from_slice(key);
    key.len()
}

/// The library's substitute for a socket.
#[derive(Default)]
struct Pipes {
    arrived: Vec<u8>,
    /// Offset in `arrived` up to which the library has read.
    at: usize,
    /// Records that are to be sent.
    sealed: Vec<u8>,
}

impl Read for Pipes {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let len = (self.arrived.len() - self.at).min(target.len());
        if len == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        target[..len].copy_from_slice(&self.arrived[self.at..self.at + len]);
        self.at += len;
        Ok(len)
    }
}

impl Write for Pipes {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.sealed.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The state of a session.
pub(crate) struct Connection {
    stream: SslStream<Pipes>,
    shaking: bool,
    /// Bytes of the handshake that were taken in.
    taken: usize,
    /// Why nothing more is believed.
    failed: Option<TlsError>,
    /// Short slices on their way into one record.
    gathered: Vec<u8>,
}

impl Connection {
    pub(super) fn is_handshaking(&self) -> bool {
        self.shaking
    }

    /// Takes in a piece of what has arrived, if all of the last one has been read.
    pub(super) fn digest(&mut self, arrived: &[u8]) -> io::Result<usize> {
        self.go_on()?;
        let pipes = self.stream.get_mut();
        if pipes.at < pipes.arrived.len() {
            return Ok(0);
        }
        let piece = &arrived[..arrived.len().min(PIECE_BYTES)];
        pipes.arrived.clear();
        pipes.arrived.extend_from_slice(piece);
        pipes.at = 0;
        if self.shaking {
            self.taken += piece.len();
            if self.taken > HANDSHAKE_BYTES_MAX {
                return Err(self.fail("the handshake is too long"));
            }
            self.shake()?;
        }
        Ok(piece.len())
    }

    /// Continues the handshake as far as the received bytes reach.
    fn shake(&mut self) -> io::Result<()> {
        match self.stream.do_handshake() {
            Ok(()) => {
                self.shaking = false;
                Ok(())
            }
            Err(error) if waits(&error) => Ok(()),
            Err(error) => {
                let words = words(&error);
                // For the server's log; a client knows who it is.
                let why = match (self.stream.ssl().is_server(), self.named()) {
                    (true, Some(Named::User(name))) => format!("{words} (user {name:?})"),
                    (true, Some(Named::Stranger(name))) => {
                        format!("{words} (there is no key for user {name:?})")
                    }
                    (false, _) | (true, Some(Named::Nobody) | None) => words,
                };
                Err(self.fail(&why))
            }
        }
    }

    pub(super) fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.go_on()?;
        if target.is_empty() {
            return Ok(0);
        }
        let outcome = self.stream.ssl_read(target);
        if self.stream.get_ref().sealed.len() > UNASKED_BYTES_MAX {
            return Err(self.fail("the peer sends too many messages without data"));
        }
        match outcome {
            Ok(len) => Ok(len),
            Err(error) if error.code() == ErrorCode::ZERO_RETURN => Ok(0),
            Err(error) if waits(&error) => Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => Err(self.fail(&words(&error))),
        }
    }

    pub(super) fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.go_on()?;
        let mut taken = 0;
        for slice in slices {
            let mut left = &slice[..slice.len().min(SEALED_BYTES - taken)];
            taken += left.len();
            while !left.is_empty() {
                let room = RECORD_BYTES - self.gathered.len();
                let whole = left.len() / RECORD_BYTES * RECORD_BYTES;
                if self.gathered.is_empty() && whole > 0 {
                    self.seal(&left[..whole])?;
                    left = &left[whole..];
                    continue;
                }
                let (now, later) = left.split_at(room.min(left.len()));
                self.gathered.extend_from_slice(now);
                left = later;
                if self.gathered.len() == RECORD_BYTES {
                    self.seal_gathered()?;
                }
            }
        }
        self.seal_gathered()?;
        Ok(taken)
    }

    fn seal_gathered(&mut self) -> io::Result<()> {
        let mut gathered = std::mem::take(&mut self.gathered);
        let sealed = self.seal(&gathered);
        gathered.clear();
        self.gathered = gathered;
        sealed
    }

    /// Encrypts all of it.
    fn seal(&mut self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            match self.stream.ssl_write(data) {
                Ok(len @ 1..) => data = &data[len..],
                Ok(0) => return Err(self.fail("nothing can be sent any more")),
                // Memory takes everything at once: what is waited for is the rest of a message
                // between records, and no peer that means well cuts one of those into pieces.
                Err(error) if waits(&error) => {
                    return Err(self.fail("a message of TLS has come in parts"));
                }
                Err(error) => return Err(self.fail(&words(&error))),
            }
        }
        Ok(())
    }

    pub(super) fn take_sealed(&mut self, sealed: &mut Vec<u8>) {
        let own = &mut self.stream.get_mut().sealed;
        match sealed.is_empty() {
            true => std::mem::swap(sealed, own),
            false => sealed.append(own),
        }
    }

    pub(super) fn send_close_notify(&mut self) {
        // Before the handshake is over there is nothing to take leave of, and the library says so.
        drop(self.stream.shutdown());
    }

    pub(super) fn peer(&self) -> Peer {
        match (self.shaking, self.stream.ssl().is_server(), self.named()) {
            (false, true, Some(Named::User(name))) => Peer::User(name.clone()),
            _ => Peer::Nobody,
        }
    }

    fn named(&self) -> Option<&Named> {
        let index = named().ok()?;
        self.stream.ssl().ex_data(index)
    }

    fn go_on(&self) -> io::Result<()> {
        match &self.failed {
            None => Ok(()),
            Some(why) => Err(invalid(why.clone())),
        }
    }

    fn fail(&mut self, why: &str) -> io::Error {
        let error = match self.shaking {
            true => failed(why),
            false => TlsError::in_words(format!("TLS: {why}")),
        };
        self.failed = Some(error.clone());
        invalid(error)
    }
}

/// A handshake that came to nothing, as QEMU says it.
fn failed(why: &str) -> TlsError {
    TlsError::in_words(format!("TLS handshake failed: {why}"))
}

/// Whether more has to arrive first.
fn waits(error: &ssl::Error) -> bool {
    error.code() == ErrorCode::WANT_READ
}

fn words(error: &ssl::Error) -> String {
    error.ssl_error().map_or_else(|| error.to_string(), reason)
}

/// The first reason, which the others follow from. Alerts in GnuTLS's words, and by their names.
fn reason(errors: &ErrorStack) -> String {
    let first = errors.errors().iter().find_map(|error| error.reason());
    let first = first.unwrap_or("the library gives no reason");
    match first.split_once("alert ") {
        Some((_, alert)) => format!("A TLS fatal alert has been received: {alert}"),
        None => first.to_string(),
    }
}
