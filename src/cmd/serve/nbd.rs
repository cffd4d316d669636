//! The transport NBD: a socket, exports by name, metadata contexts, TLS.

use std::time::Duration;

use cowslip_nbd::remote::Address;
use cowslip_nbd::server::{Lifetime, ServerHandle};
use cowslip_nbd::tls::ServerTls;
use cowslip_nbd::{Export, Server, ServerEvent, ServerOptions};
use cowslip_queue::Listener;

use super::sandbox::Rights;
use super::socket_name::{self, SocketName};
use super::transport::{Endpoint, LocalFuture, Log, Names, Served, Severity, Transport};
use crate::error::CommandError;
use crate::open;

mod export;
pub mod list;
mod listening;

use export::export_of;
use listening::Listening;

/// The port that NBD is assigned.
pub const DEFAULT_PORT: u16 = 10809;

/// Options of an export, and of the server that offers it.
#[derive(Clone, Debug)]
pub struct Nbd {
    /// The address to listen on.
    pub address: Address,
    /// The name of the export.
    pub export_name: String,
    /// A description for humans; may be empty.
    pub description: String,
    /// Clients may ask which layers of the backing chain data is in.
    pub has_depth_context: bool,
    /// The persistent bitmaps that clients may ask for.
    pub bitmaps: Vec<String>,
    /// Clients at a time. `None` is no limit.
    pub clients_max: Option<usize>,
    /// When the server stops by itself.
    pub lifetime: Lifetime,
    /// How long a client may take to choose an export.
    pub handshake_timeout: Duration,
    /// Credentials; `None` serves in the clear.
    pub tls: Option<ServerTls>,
}

impl Default for Nbd {
    /// The defaults of qemu-nbd.
    fn default() -> Nbd {
        Nbd {
            address: Address::Tcp {
                host: "0.0.0.0".to_string(),
                port: DEFAULT_PORT.to_string(),
            },
            export_name: String::new(),
            description: String::new(),
            has_depth_context: false,
            bitmaps: Vec::new(),
            clients_max: Some(1),
            lifetime: Lifetime::UntilLastClient,
            handshake_timeout: Duration::from_secs(10),
            tls: None,
        }
    }
}

impl Transport for Nbd {
    fn listen<'a>(
        &'a self,
        served: &'a Served,
    ) -> LocalFuture<'a, Result<Box<dyn Endpoint>, CommandError>> {
        Box::pin(async move {
            let export = export_of(served, self).await?;
            let Listening { listener, name } = Listening::on(&self.address)?;
            let server = self.server(export, &served.log);
            Ok(Box::new(Socket {
                server,
                listener,
                name,
            }) as Box<dyn Endpoint>)
        })
    }
}

impl Nbd {
    fn server(&self, export: Export, log: &Log) -> Server {
        let mut server = Server::new(ServerOptions {
            connections_max: self.clients_max,
            lifetime: self.lifetime,
            handshake_timeout: self.handshake_timeout,
            tls: self.tls.clone(),
            ..ServerOptions::default()
        });
        server.add_export(self.export_name.clone(), export);
        if log.reports(Severity::Failure) {
            let log = log.clone();
            server.observe(move |event| {
                if log.reports(severity(event)) {
                    log.write(described(event));
                }
            });
        }
        server
    }
}

/// A socket that clients connect to.
struct Socket {
    server: Server,
    listener: Listener,
    name: Option<SocketName>,
}

impl Endpoint for Socket {
    fn rights(&self) -> Rights {
        let path = self.name.as_ref().map(SocketName::path);
        Rights {
            removed: path.map(ToOwned::to_owned).into_iter().collect(),
            // Connections are accepted; new ones cannot be made.
            calls: [&[libc::SYS_accept4], socket_name::REMOVING].concat(),
        }
    }

    fn stopper(&self) -> Box<dyn Fn()> {
        let handle: ServerHandle = self.server.handle();
        Box::new(move || handle.stop())
    }

    fn serve(self: Box<Self>) -> LocalFuture<'static, Names> {
        Box::pin(async move {
            self.server.serve(vec![self.listener]).await;
            self.name.map(|name| Box::new(name) as _)
        })
    }
}

/// Returns the credentials, by their ID, for serving over TLS, with the authorization.
///
/// # Errors
/// There are no such objects.
pub fn tls(
    credentials: Option<&str>,
    authorization: Option<&str>,
) -> Result<Option<ServerTls>, CommandError> {
    let Some(credentials) = credentials else {
        return Ok(None);
    };
    let tls = open::object::server_credentials(credentials)?;
    let Some(authorization) = authorization else {
        return Ok(Some(tls));
    };
    let authorization = open::object::authorization(authorization)?;
    Ok(Some(tls.authorized_by(move |subject| {
        authorization.allows(subject)
    })))
}

fn severity(event: &ServerEvent) -> Severity {
    match event {
        ServerEvent::Disconnected {
            reason: Some(_), ..
        }
        | ServerEvent::AcceptFailed { .. } => Severity::Failure,
        ServerEvent::Disconnected { reason: None, .. }
        | ServerEvent::Connected { .. }
        | ServerEvent::Option { .. }
        | ServerEvent::Secured { .. }
        | ServerEvent::Chosen { .. }
        | ServerEvent::RequestFailed { .. } => Severity::Usual,
    }
}

fn described(event: &ServerEvent) -> String {
    match event {
        ServerEvent::Connected { connection } => format!("client {connection} connected"),
        ServerEvent::Option { connection, option } => {
            format!("client {connection} sent option {option:?}")
        }
        ServerEvent::Secured { connection } => format!("client {connection} began TLS"),
        ServerEvent::Chosen { connection, export } => {
            format!("client {connection} chose export '{export}'")
        }
        ServerEvent::RequestFailed {
            connection,
            request,
            error,
        } => format!("client {connection}: {request:?} failed: {error}"),
        ServerEvent::Disconnected { connection, reason } => match reason {
            Some(reason) => format!("client {connection} was lost: {reason}"),
            None => format!("client {connection} left"),
        },
        ServerEvent::AcceptFailed { reason } => format!("accepting a client failed: {reason}"),
    }
}
