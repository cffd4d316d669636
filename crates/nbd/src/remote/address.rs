//! Addresses of NBD servers, and connections to them.

use std::net::ToSocketAddrs;
use std::path::PathBuf;

use cowslip_block::error::system_words;
use cowslip_block::{Error, Result};
use cowslip_queue::Stream;

use crate::ClientError;
use crate::protocol::OptionReplyCode;

/// The port that servers have by default (IANA).
pub(super) const PORT: &str = "10809";

/// Address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket, by its path.
    Unix(PathBuf),
    /// A port of a host.
    Tcp {
        /// Name or address of the host.
        host: String,
        /// Number, or name of a service.
        port: String,
    },
}

impl Address {
    /// Connects to the server.
    ///
    /// # Errors
    /// `Failed to connect to 'x': why`.
    pub async fn connect(&self) -> Result<Stream> {
        let words = |error: &std::io::Error| system_words(error);
        let (name, connected) = match self {
            Address::Unix(path) => (
                path.display().to_string(),
                Stream::connect_unix(path).await.map_err(|e| words(&e)),
            ),
            Address::Tcp { host, port } => {
                let name = format!("{host}:{port}");
                let resolved = (host.as_str(), port.parse().unwrap_or(0)).to_socket_addrs();
                let resolved = resolved.map_err(|_| {
                    Error::invalid(format!(
                        "address resolution failed for {name}: Name or service not known"
                    ))
                })?;
                let mut connected = Err("Name or service not known".to_string());
                for address in resolved {
                    connected = Stream::connect_tcp(address).await.map_err(|e| words(&e));
                    if connected.is_ok() {
                        break;
                    }
                }
                (name, connected)
            }
        };
        connected.map_err(|why| Error::invalid(format!("Failed to connect to '{name}': {why}")))
    }
}

/// The error for a server's refusal of a client whose last option was `option`.
pub fn refused(error: &ClientError, option: &str) -> Error {
    match error {
        ClientError::Refused {
            reply: OptionReplyCode::ErrTlsRequired,
            message,
        } => Error::invalid(format!(
            "TLS negotiation required before option {option}\nDid you forget a valid tls-creds?\nserver reported: {message}"
        )),
        ClientError::Io(_) | ClientError::Protocol(_) => {
            Error::invalid(format!("Failed to negotiate with the server: {error}"))
        }
        error => Error::invalid(error.to_string()),
    }
}
