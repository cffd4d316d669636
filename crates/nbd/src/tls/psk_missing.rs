//! Substitute of `psk.rs` in programs that are built without the feature `psk`: nothing that could
//! begin a session.

use std::convert::Infallible;
use std::io::{self, IoSlice};

use super::keys::SharedKeys;
use super::{CredentialsError, Peer, TlsError};

/// Why keys shared beforehand are refused, and what to do; `None` if they are not.
pub const PSK_MISSING: Option<&str> = Some(
    "keys shared beforehand need OpenSSL's library, which this program was built without; build it with `cargo build \
     --release --features psk`, or use tls-creds-x509",
);

/// Keys of a side, of which there can be none.
#[derive(Clone)]
pub(super) struct Context(Infallible);

impl Context {
    pub(super) fn server(_keys: SharedKeys) -> Result<Context, CredentialsError> {
        Err(CredentialsError::KeysUnsupported)
    }

    pub(super) fn client(_user: &str, _keys: &SharedKeys) -> Result<Context, CredentialsError> {
        Err(CredentialsError::KeysUnsupported)
    }

    pub(super) fn connection(&self) -> Result<Connection, TlsError> {
        match self.0 {}
    }
}

/// The state of a session that there cannot be.
pub(crate) struct Connection(Infallible);

impl Connection {
    pub(super) fn is_handshaking(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn digest(&mut self, _arrived: &[u8]) -> io::Result<usize> {
        match self.0 {}
    }

    pub(super) fn read(&mut self, _target: &mut [u8]) -> io::Result<usize> {
        match self.0 {}
    }

    pub(super) fn write_vectored(&mut self, _slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self.0 {}
    }

    pub(super) fn take_sealed(&mut self, _sealed: &mut Vec<u8>) {
        match self.0 {}
    }

    pub(super) fn send_close_notify(&mut self) {
        match self.0 {}
    }

    pub(super) fn peer(&self) -> Peer {
        match self.0 {}
    }
}
