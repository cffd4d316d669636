//! A session between two waits, with either library: takes in records, gives out records, and never
//! waits.

use std::io::{self, IoSlice, Read, Write};

use super::{Peer, TlsError, psk};

/// Bytes that are encrypted before they are sent.
pub(super) const SEALED_BYTES: usize = 256 << 10;

/// The state of a session, without its socket.
pub(crate) enum Connection {
    /// A session with certificates, by rustls.
    Certificates(Box<rustls::Connection>),
    /// A session with keys shared beforehand, by OpenSSL.
    Keys(psk::Connection),
}

impl From<rustls::Connection> for Connection {
    fn from(mut connection: rustls::Connection) -> Connection {
        connection.set_buffer_limit(Some(SEALED_BYTES));
        Connection::Certificates(Box::new(connection))
    }
}

impl Connection {
    pub(super) fn is_handshaking(&self) -> bool {
        match self {
            Connection::Certificates(connection) => connection.is_handshaking(),
            Connection::Keys(connection) => connection.is_handshaking(),
        }
    }

    /// Takes in a part of what has arrived: how much of it. None of it if nothing more is taken
    /// before what was is read.
    pub(super) fn digest(&mut self, mut arrived: &[u8]) -> io::Result<usize> {
        match self {
            Connection::Certificates(connection) => {
                let taken = connection.read_tls(&mut arrived)?;
                let outcome = connection.process_new_packets();
                outcome.map_err(|error| invalid(error.into()))?;
                Ok(taken)
            }
            Connection::Keys(connection) => connection.digest(arrived),
        }
    }

    /// Decrypted bytes of what was taken in: how many, 0 if the peer has said that no more will
    /// come or the target is empty. With [`io::ErrorKind::WouldBlock`] more has to be taken in
    /// first.
    pub(super) fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        match self {
            Connection::Certificates(connection) => connection.reader().read(target),
            Connection::Keys(connection) => connection.read(target),
        }
    }

    /// Encrypts the front of what the slices have: how much, about [`SEALED_BYTES`] at most. Short
    /// ones share records.
    pub(super) fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Connection::Certificates(connection) => connection.writer().write_vectored(slices),
            Connection::Keys(connection) => connection.write_vectored(slices),
        }
    }

    /// Moves the records that are to be sent behind those in `sealed`.
    pub(super) fn take_sealed(&mut self, sealed: &mut Vec<u8>) -> io::Result<()> {
        match self {
            Connection::Certificates(connection) => {
                while connection.wants_write() {
                    connection.write_tls(sealed)?;
                }
            }
            Connection::Keys(connection) => connection.take_sealed(sealed),
        }
        Ok(())
    }

    pub(super) fn send_close_notify(&mut self) {
        match self {
            Connection::Certificates(connection) => connection.send_close_notify(),
            Connection::Keys(connection) => connection.send_close_notify(),
        }
    }

    /// Returns the identity that the other side has proven. Counts after the handshake.
    pub(super) fn peer(&self) -> Peer {
        match self {
            Connection::Certificates(connection) => {
                let shown = connection.peer_certificates().and_then(<[_]>::first);
                shown.map_or(Peer::Nobody, |certificate| {
                    Peer::Certificate(certificate.to_vec())
                })
            }
            Connection::Keys(connection) => connection.peer(),
        }
    }
}

/// Returns the error that ends a session.
pub(super) fn invalid(error: TlsError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
