//! [`ExportName`]: an export of a server, and how to speak to it.

use std::num::NonZeroU8;
use std::path::PathBuf;
use std::time::Duration;

use cowslip_block::file::Storage;
use cowslip_block::{Error, Result};

use super::address::Address;
use crate::tls::{ClientCredentials, ClientTls, PeerCheck};

/// An export of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportName {
    /// The address of the server.
    pub server: Address,
    /// The export; empty for the default one.
    pub export: String,
    /// Parameters of TLS; `None` is a connection in the clear.
    pub tls: Option<TlsName>,
    /// Time to wait for a server that cannot be reached.
    pub waits: Waits,
    /// Limit of connections, where the server offers several.
    pub connections: NonZeroU8,
}

/// Time to wait for a server that cannot be reached; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// When the export is opened (`open-timeout`).
    pub open: Duration,
    /// Wait of requests, from when a connection was lost (`reconnect-delay`).
    pub reconnect: Duration,
}

/// Parameters of TLS with a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsName {
    /// The credentials that the client proves itself by, or trusts the server by.
    pub credentials: ClientSide,
    /// Name that the server's certificate has to be for, if not the host that is connected to.
    pub hostname: Option<String>,
}

/// Place of a client's credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientSide {
    /// The object of this ID.
    Object(String),
    /// The files of this directory, and what a URI says of the server's.
    Directory(PathBuf, PeerCheck),
    /// A user's key in this file; `None` is the user who runs the program.
    Keys(PathBuf, Option<String>),
}

impl TlsName {
    /// Credentials for a connection to the server at this address.
    ///
    /// # Errors
    /// The name that the server's certificate must have is not known.
    pub fn to_server(
        &self,
        server: &Address,
        credentials: &ClientCredentials,
    ) -> Result<ClientTls> {
        let connected = match server {
            Address::Tcp { host, .. } => Some(host),
            Address::Unix(_) => None,
        };
        let hostname = self.hostname.as_ref().or(connected);
        let tls = credentials.to_server(hostname.map(String::as_str));
        tls.map_err(|error| Error::invalid(error.to_string()))
    }
}

impl ExportName {
    /// Its URI in QEMU's form, however it was named; TLS is no part of that.
    pub fn uri(&self) -> String {
        let export = &self.export;
        match &self.server {
            Address::Tcp { host, port } if export.is_empty() => format!("nbd://{host}:{port}"),
            Address::Tcp { host, port } => format!("nbd://{host}:{port}/{export}"),
            Address::Unix(path) => {
                let slash = if export.is_empty() { "" } else { "/" };
                format!("nbd+unix://{slash}{export}?socket={}", path.display())
            }
        }
    }

    /// The place of its bytes, by its name: two names of one socket are one server.
    pub fn storage(&self) -> Storage {
        use std::os::unix::fs::MetadataExt;
        let server = match &self.server {
            Address::Tcp { host, port } => format!("tcp:{host}:{port}"),
            Address::Unix(path) => match std::fs::metadata(path) {
                Ok(found) => format!("unix:{}:{}", found.dev(), found.ino()),
                Err(_) => format!("unix:{}", path.display()),
            },
        };
        Storage::named(&format!("{server}/{}", self.export))
    }
}
