//! Transport of a connection: a socket, or TLS over it.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use cowslip_queue::{BufMut, IoVec, Stream, sleep};

use crate::event::first;
use crate::tls::session::Session;

/// How long the end of a TLS session may take to be sent, to a peer that does not read.
const FAREWELL: Duration = Duration::from_secs(1);

/// A connection's two directions; clones are the same connection. Reads and writes may be in flight
/// at once, one of each.
#[derive(Clone)]
pub(crate) enum Wire {
    Plain(Stream),
    Tls(Rc<Session>),
}

impl Wire {
    /// Reads as [`Stream::read`].
    pub(crate) async fn read(&self, buf: BufMut) -> (io::Result<usize>, BufMut) {
        match self {
            Wire::Plain(stream) => stream.read(buf).await,
            Wire::Tls(session) => session.read(buf).await,
        }
    }

    /// Writes as [`Stream::write_all`].
    pub(crate) async fn write_all(&self, data: impl Into<IoVec>) -> io::Result<()> {
        match self {
            Wire::Plain(stream) => stream.write_all(data).await,
            Wire::Tls(session) => session.write_all(&data.into()).await,
        }
    }

    /// Announces to the peer that nothing more will be sent, if there is a way to say so. Nothing
    /// is written afterwards.
    pub(crate) async fn farewell(&self) {
        if let Wire::Tls(session) = self {
            // Whether a peer receives it is of no consequence: the messages themselves say where
            // they end.
            first(sleep(FAREWELL), session.close()).await;
        }
    }

    /// Ends both directions at once.
    pub(crate) fn shutdown(&self) {
        match self {
            Wire::Plain(stream) => stream.shutdown(),
            Wire::Tls(session) => session.shutdown(),
        }
    }
}
