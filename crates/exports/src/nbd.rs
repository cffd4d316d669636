//! The transport NBD: a socket, exports by name, metadata contexts, TLS.

use std::cell::Cell;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use clap::{Args, Command};
use cowslip::error::system_words;
use cowslip_cmdline::open;
use cowslip_console::error::CommandError;
use cowslip_nbd::remote::Address;
use cowslip_nbd::server::{Lifetime, ServerHandle, Workers};
use cowslip_nbd::tls::ServerTls;
use cowslip_nbd::{Export, Server, ServerEvent, ServerOptions};
use cowslip_queue::Listener;

use super::image_args::invalid;
use super::kind::{Line, OfLine, TransportKind};
use super::log::{Log, Severity};
use super::members::Members;
use super::sandbox::Rights;
use super::socket_name::{self, Ownership, SocketName};
use super::transport::{AtRest, Endpoint, LocalFuture, Names, Outcome, Part, Served, Transport};

mod export;
pub mod list;
mod listening;

pub use export::depth;
use export::export_of;
pub use listening::Listening;

/// The port that NBD is assigned.
pub const DEFAULT_PORT: u16 = 10809;

/// Options of a command line. Those of the export follow those of the image.
#[derive(clap::Args)]
struct NbdArgs {
    /// Listen on this Unix socket
    #[arg(short = 'k', long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Listen on this address, HOST:PORT; 127.0.0.1:10809 without an address, a socket or another
    /// export, which every user of this host can reach
    #[arg(short, long, value_name = "ADDRESS", conflicts_with = "socket")]
    listen: Option<String>,
    /// The export's name
    #[arg(short = 'x', long = "name", default_value = "", display_order = 101)]
    export_name: String,
    /// Description of the export, shown to clients that list exports
    #[arg(short = 'D', long, default_value = "", display_order = 102)]
    description: String,
    /// Offer the metadata context qemu:allocation-depth: the image of the backing chain that holds
    /// each extent
    #[arg(short = 'A', long, display_order = 103)]
    allocation_depth: bool,
    /// Offer this persistent bitmap, of the image or of one below it, as the metadata context
    /// qemu:dirty-bitmap:NAME; more than once for several
    #[arg(short = 'B', long = "bitmap", value_name = "NAME", display_order = 104)]
    bitmaps: Vec<String>,
    /// End when the last client has left
    #[arg(long, display_order = 105)]
    once: bool,
    /// Serve at most this many clients at a time; others wait. 0 is no limit
    #[arg(short = 'e', long, default_value_t = 0, value_name = "N")]
    #[arg(display_order = 106)]
    clients: usize,
    /// Serve over TLS only, with the credentials of this ID (--object
    /// tls-creds-x509,…,endpoint=server or tls-creds-psk,…)
    #[arg(long, value_name = "ID", display_order = 109)]
    tls_creds: Option<String>,
    /// Serve only clients that the object of this ID authorizes (--object authz-simple,… or
    /// authz-list,…)
    #[arg(long, value_name = "ID", requires = "tls_creds", display_order = 110)]
    tls_authz: Option<String>,
}

/// NBD among the transports; without another one it serves unasked.
pub struct Kind;

impl TransportKind for Kind {
    fn name(&self) -> &'static str {
        "nbd"
    }

    fn declare(&self, command: Command) -> Command {
        NbdArgs::augment_args(command)
    }

    fn of_line(&self, line: Line<'_>) -> Result<OfLine, CommandError> {
        let args: NbdArgs = line.options()?;
        let is_fallback = args.socket.is_none() && args.listen.is_none();
        let nbd = Nbd {
            address: address(args.socket, args.listen)?,
            threads: line.threads.unwrap_or(1),
            export_name: args.export_name,
            description: args.description,
            has_depth_context: args.allocation_depth,
            bitmaps: args.bitmaps,
            clients_max: Some(args.clients).filter(|clients| *clients > 0),
            lifetime: match args.once {
                true => Lifetime::UntilLastClient,
                false => Lifetime::UntilStopped,
            },
            tls: tls(args.tls_creds.as_deref(), args.tls_authz.as_deref())?,
            ..Nbd::default()
        };
        Ok(OfLine {
            transport: Some(Box::new(nbd)),
            is_fallback,
            ..OfLine::default()
        })
    }

    fn of_export(&self, _: Members<'_>) -> Option<Result<Box<dyn Transport>, CommandError>> {
        None
    }
}

/// The address that options name.
fn address(socket: Option<PathBuf>, listen: Option<String>) -> Result<Address, CommandError> {
    // Nobody else's machine is served unless that is asked for.
    let (host, port) = match (socket, &listen) {
        (Some(path), _) => return Ok(Address::Unix(path)),
        (None, None) => ("127.0.0.1", DEFAULT_PORT.to_string()),
        (None, Some(listen)) => {
            let parts = listen.rsplit_once(':');
            let (host, port) = parts.ok_or_else(|| invalid("an address (HOST:PORT)", listen))?;
            (host.trim_matches(['[', ']']), port.to_string())
        }
    };
    Ok(Address::Tcp {
        host: host.to_string(),
        port,
    })
}

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
    /// Threads that connections are spread over; at least one.
    pub threads: usize,
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
            threads: 1,
        }
    }
}

impl Transport for Nbd {
    fn door(&self) -> Option<PathBuf> {
        match &self.address {
            Address::Unix(path) => Some(path.clone()),
            Address::Tcp { .. } => None,
        }
    }

    fn terms(&self) -> Option<serde_json::Value> {
        let address = match &self.address {
            Address::Unix(path) => path.display().to_string(),
            Address::Tcp { host, port } => format!("{host}:{port}"),
        };
        Some(serde_json::json!({ "nbd": address, "export": self.export_name }))
    }

    fn take_over<'a>(
        &'a self,
        served: &'a Served,
        mut part: Part,
    ) -> LocalFuture<'a, Result<Box<dyn Endpoint>, CommandError>> {
        Box::pin(async move {
            let listener = part.descriptors.pop();
            let listener = listener.ok_or_else(|| CommandError::new("no socket".to_string()))?;
            let listener = Listener::from_listening(listener);
            let listener = listener.map_err(|error| CommandError::new(system_words(&error)))?;
            let name = self
                .door()
                .map(|path| SocketName::adopt(&path, &part.ownership));
            let listening = Listening { listener, name };
            self.endpoint((served, self.workers(served)?), listening)
                .await
        })
    }

    fn listen<'a>(
        &'a self,
        served: &'a Served,
    ) -> LocalFuture<'a, Result<Box<dyn Endpoint>, CommandError>> {
        Box::pin(async move {
            let export = export_of(served, self).await?;
            let Listening { listener, name } = Listening::on(&self.address)?;
            let listening = Listening { listener, name };
            Ok(self.socket((export, self.workers(served)?), listening, &served.log))
        })
    }
}

impl Nbd {
    /// Threads besides the one that serves.
    fn workers(&self, served: &Served) -> Result<Workers, CommandError> {
        Workers::new(self.threads.saturating_sub(1), served.poll)
            .map_err(|error| CommandError::new(system_words(&error)))
    }

    async fn endpoint(
        &self,
        (served, workers): (&Served, Workers),
        listening: Listening,
    ) -> Result<Box<dyn Endpoint>, CommandError> {
        let export = export_of(served, self).await?;
        Ok(self.socket((export, workers), listening, &served.log))
    }

    fn socket(
        &self,
        (export, workers): (Export, Workers),
        listening: Listening,
        log: &Log,
    ) -> Box<dyn Endpoint> {
        let mut server = Server::new(ServerOptions {
            connections_max: self.clients_max,
            lifetime: self.lifetime,
            handshake_timeout: self.handshake_timeout,
            tls: self.tls.clone(),
            workers: workers.clone(),
            ..ServerOptions::default()
        });
        server.add_export(self.export_name.clone(), export);
        report_events(&mut server, log);
        Box::new(Socket {
            server,
            listening,
            nbd: self.clone(),
            workers,
            rests: Rc::default(),
        })
    }
}

/// Reports the events of a server.
pub fn report_events(server: &mut Server, log: &Log) {
    let log = log.clone();
    server.observe(move |event| log.report(severity(event), || described(event)));
}

/// A socket that clients connect to.
struct Socket {
    server: Server,
    listening: Listening,
    nbd: Nbd,
    workers: Workers,
    /// Whether it was asked to come to rest.
    rests: Rc<Cell<bool>>,
}

/// The same at rest: its clients were disconnected.
struct Resting {
    listening: Listening,
    nbd: Nbd,
    workers: Workers,
}

impl AtRest for Resting {
    fn part(&self) -> io::Result<Part> {
        Ok(Part {
            state: serde_json::Value::Null,
            descriptors: vec![self.listening.listener.as_fd().try_clone_to_owned()?],
            ownership: Ownership::default(),
        })
    }

    fn go_on<'a>(
        self: Box<Self>,
        served: &'a Served,
    ) -> LocalFuture<'a, Result<Box<dyn Endpoint>, CommandError>> {
        let Resting {
            listening,
            nbd,
            workers,
        } = *self;
        Box::pin(async move { nbd.endpoint((served, workers), listening).await })
    }

    fn leave(self: Box<Self>) {
        if let Some(name) = self.listening.name {
            name.leave();
        }
    }
}

/// How long clients may take for the replies that are ready, before they are disconnected for a
/// handover: all that is served waits for them.
const REST_PATIENCE: Duration = Duration::from_millis(5);

impl Endpoint for Socket {
    fn rights(&self) -> Rights {
        let path = self.listening.name.as_ref().map(SocketName::path);
        // Connections are accepted; new ones cannot be made.
        let mut calls = [&[libc::SYS_accept4], socket_name::REMOVING].concat();
        if self.nbd.threads > 1 {
            // Threads start the rings that were made for them.
            calls.push(libc::SYS_io_uring_register);
        }
        Rights {
            removed: path.map(ToOwned::to_owned).into_iter().collect(),
            calls,
            ..Rights::default()
        }
    }

    fn stopper(&self) -> Box<dyn Fn()> {
        let handle: ServerHandle = self.server.handle();
        Box::new(move || handle.stop())
    }

    fn serve(self: Box<Self>) -> LocalFuture<'static, Names> {
        Box::pin(async move {
            self.server.serve(vec![self.listening.listener]).await;
            self.listening.name.map(|name| Box::new(name) as _)
        })
    }

    fn rester(&self) -> Option<Box<dyn Fn()>> {
        let (handle, asked) = (self.server.handle(), Rc::clone(&self.rests));
        Some(Box::new(move || {
            asked.set(true);
            handle.stop();
            let handle = handle.clone();
            cowslip_queue::spawn(async move {
                cowslip_queue::sleep(REST_PATIENCE).await;
                handle.abort();
            });
        }))
    }

    fn serve_or_rest(self: Box<Self>) -> LocalFuture<'static, Outcome> {
        Box::pin(async move {
            let Socket {
                server,
                listening,
                nbd,
                workers,
                rests,
            } = *self;
            let listener = listening.listener.clone();
            server.serve(vec![listener]).await;
            match rests.get() {
                true => Outcome::AtRest(Box::new(Resting {
                    listening,
                    nbd,
                    workers,
                })),
                false => Outcome::Ended(listening.name.map(|name| Box::new(name) as _)),
            }
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
        } => format!("client {connection}: {request} failed: {error}"),
        ServerEvent::Disconnected { connection, reason } => match reason {
            Some(reason) => format!("client {connection} was lost: {reason}"),
            None => format!("client {connection} left"),
        },
        ServerEvent::AcceptFailed { reason } => format!("accepting a client failed: {reason}"),
    }
}
