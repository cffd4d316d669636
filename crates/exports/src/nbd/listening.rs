//! Where a server listens.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;

use cowslip::error::system_words;
use cowslip_console::error::CommandError;
use cowslip_console::output::{is_called_as_qemu, worded};
use cowslip_queue::Listener;

use super::{Address, SocketName};

/// A socket that clients connect to, and its name, if it is one in the file system.
pub struct Listening {
    /// The socket.
    pub listener: Listener,
    /// Its name.
    pub name: Option<SocketName>,
}

impl Listening {
    /// Listens on an address.
    ///
    /// # Errors
    /// It cannot be resolved, or is in use.
    pub fn on(address: &Address) -> Result<Listening, CommandError> {
        match address {
            Address::Unix(path) => Listening::on_path(path),
            Address::Tcp { host, port } => Listening::on_port(host, port),
        }
    }

    fn on_path(path: &Path) -> Result<Listening, CommandError> {
        let (listener, name) = SocketName::bind(path)?;
        Ok(Listening {
            listener,
            name: Some(name),
        })
    }

    fn on_port(host: &str, port: &str) -> Result<Listening, CommandError> {
        let unresolved = |why: &str| {
            CommandError::new(format!(
                "address resolution failed for {host}:{port}: {why}"
            ))
        };
        let number: u16 = port.parse().map_err(|_| match is_called_as_qemu() {
            true => unresolved("Servname not supported for ai_socktype"),
            false => CommandError::new(format!("'{port}' is not a port: a number up to 65535")),
        })?;
        let addresses: Vec<SocketAddr> = (host, number)
            .to_socket_addrs()
            .map_err(|_| unresolved("Name or service not known"))?
            .collect();
        let mut failure = None;
        for address in addresses {
            match Listener::tcp(address) {
                Ok(listener) => {
                    return Ok(Listening {
                        listener,
                        name: None,
                    });
                }
                Err(error) => failure = Some(system_words(&error)),
            }
        }
        let why = failure.as_deref().unwrap_or("Name or service not known");
        Err(CommandError::new(worded(
            format!("Failed to find an available port: {why}"),
            format!("Could not listen on {host}:{port}: {why}"),
        )))
    }
}
