//! The transport vhost-user-blk: a socket by which a virtual machine monitor passes its guest's
//! memory, and the rings in it.

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;

use clap::{Args, Command};
use cowslip::error::system_words;
use cowslip_console::error::CommandError;
use cowslip_nbd::remote::Address;
use cowslip_queue::Listener;
use cowslip_vhost_user::{Connection, ConnectionState, Options, Server, ServerEvent};

use super::kind::{Line, OfLine, TransportKind};
use super::log::{Log, Severity};
use super::members::Members;
use super::sandbox::Rights;
use super::socket_name::{self, Ownership, SocketName};
use super::transport::{AtRest, Endpoint, LocalFuture, Names, Outcome, Part, Served, Transport};

/// Most queues that a device may have.
const QUEUES_MAX: u16 = 256;

/// Options of a command line; those of an export in a daemon are beside them, in [`Kind`].
#[derive(clap::Args)]
struct VhostUserArgs {
    /// Serve a virtual machine monitor as a vhost-user-blk device on this Unix socket; NBD is
    /// served too if --socket or --listen is given
    #[arg(long, value_name = "PATH")]
    vhost_user: Option<PathBuf>,
    /// Most queues of the vhost-user-blk device
    #[arg(long, value_name = "N", default_value_t = 8, requires = "vhost_user")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
    queues: u16,
    /// Its serial number, at most 20 bytes
    #[arg(long, value_name = "TEXT", default_value = "", requires = "vhost_user")]
    serial: String,
    /// Its logical block size: 512, 1024, 2048 or 4096
    #[arg(long, value_name = "BYTES", default_value_t = 512)]
    #[arg(requires = "vhost_user")]
    #[arg(value_parser = block_size)]
    block_size: u32,
    /// Offer to give its requests back in order (VIRTIO_F_IN_ORDER), for front ends that need it;
    /// a slow request holds up those behind it
    #[arg(long, requires = "vhost_user")]
    in_order: bool,
}

fn block_size(text: &str) -> Result<u32, String> {
    let bytes = text.parse().ok().filter(|bytes| is_block_size(*bytes));
    bytes.ok_or_else(|| "a block has 512, 1024, 2048 or 4096 bytes".to_string())
}

fn is_block_size(bytes: u32) -> bool {
    matches!(bytes, 512 | 1024 | 2048 | 4096)
}

/// vhost-user-blk among the transports.
pub struct Kind;

impl TransportKind for Kind {
    fn name(&self) -> &'static str {
        "vhost-user-blk"
    }

    fn declare(&self, command: Command) -> Command {
        VhostUserArgs::augment_args(command)
    }

    fn of_line(&self, line: Line<'_>) -> Result<OfLine, CommandError> {
        let args: VhostUserArgs = line.options()?;
        let defaults = Options::default();
        let threads = line.threads.unwrap_or(defaults.threads);
        let options = Options {
            serial: args.serial,
            queues: args.queues,
            threads: threads.min(usize::from(args.queues)),
            block_bytes: args.block_size,
            is_in_order: args.in_order,
            ..defaults
        };
        let of_socket = |socket| Box::new(VhostUser { socket, options }) as Box<dyn Transport>;
        Ok(OfLine {
            transport: args.vhost_user.map(of_socket),
            ..OfLine::default()
        })
    }

    fn of_export(&self, given: Members<'_>) -> Option<Result<Box<dyn Transport>, CommandError>> {
        Some(of_export(given).map(|transport| Box::new(transport) as _))
    }
}

fn of_export(given: Members<'_>) -> Result<VhostUser, CommandError> {
    let Address::Unix(socket) = given.address("addr")? else {
        return Err(CommandError::new(
            "Only socket addresses of type 'unix' are supported",
        ));
    };
    let mut options = Options::default();
    if let Some(queues) = given.number("num-queues")? {
        let queues = match u16::try_from(queues) {
            Ok(0) => Err("num-queues must be greater than 0"),
            Ok(queues @ 1..=QUEUES_MAX) => Ok(queues),
            _ => Err("num-queues must be 1 to 256"),
        };
        options.queues = queues.map_err(CommandError::new)?;
    }
    if let Some(bytes) = given.number("logical-block-size")? {
        if !bytes.is_power_of_two() || !(512..=2 << 20).contains(&bytes) {
            return Err(CommandError::new(
                "parameter logical-block-size must be a power of 2 between 512 and 2097152",
            ));
        }
        options.block_bytes = bytes as u32;
        if !is_block_size(options.block_bytes) {
            return Err(CommandError::new(
                "logical-block-size must be 512, 1024, 2048 or 4096 bytes",
            ));
        }
    }
    Ok(VhostUser { socket, options })
}

/// Options of the device, and the socket.
#[derive(Clone, Debug)]
struct VhostUser {
    /// Path of the socket.
    socket: PathBuf,
    /// Options of the device.
    options: Options,
}

impl Transport for VhostUser {
    fn has_predecessor(&self, _: &Log) -> Result<bool, CommandError> {
        Ok(SocketName::is_there(&self.socket))
    }

    fn door(&self) -> Option<PathBuf> {
        Some(self.socket.clone())
    }

    fn terms(&self) -> Option<serde_json::Value> {
        Some(serde_json::json!({
            "vhost-user": self.socket,
            "block-bytes": self.options.block_bytes,
        }))
    }

    fn shown(&self) -> serde_json::Value {
        serde_json::json!({
            "block-size": self.options.block_bytes,
            "queues": self.options.queues,
            "serial": self.options.serial,
            "in-order": self.options.is_in_order,
        })
    }

    fn take_over<'a>(
        &'a self,
        served: &'a Served,
        part: Part,
    ) -> LocalFuture<'a, Result<Box<dyn Endpoint>, CommandError>> {
        let taken = self.taken_over(served, part);
        Box::pin(std::future::ready(taken))
    }

    fn listen<'a>(
        &'a self,
        served: &'a Served,
    ) -> LocalFuture<'a, Result<Box<dyn Endpoint>, CommandError>> {
        Box::pin(async move {
            let (listener, name) = SocketName::bind(&self.socket)?;
            Ok(Box::new(Socket {
                server: self.server(served)?,
                listener,
                connection: None,
                name,
            }) as Box<dyn Endpoint>)
        })
    }
}

/// State on the way to another process; the first descriptor is the socket's.
#[derive(serde::Serialize, serde::Deserialize)]
struct State {
    connection: Option<ConnectionState>,
}

impl VhostUser {
    fn server(&self, served: &Served) -> Result<Server, CommandError> {
        let disk = std::sync::Arc::clone(&served.disk);
        let options = Options {
            poll: served.poll,
            ..self.options.clone()
        };
        let server = Server::new(disk, options);
        let mut server = server.map_err(|error| CommandError::new(system_words(&error)))?;
        let log = served.log.clone();
        server.observe(move |event| log.report(severity(event), || described(event)));
        Ok(server)
    }

    fn taken_over(&self, served: &Served, part: Part) -> Result<Box<dyn Endpoint>, CommandError> {
        let failed = |error: io::Error| CommandError::new(system_words(&error));
        let mut descriptors = part.descriptors;
        let of_connection = descriptors.split_off(descriptors.len().min(1));
        let state: State = serde_json::from_value(part.state)
            .map_err(|error| CommandError::new(error.to_string()))?;
        let listener = descriptors.pop();
        let listener = listener.ok_or_else(|| CommandError::new("no socket".to_string()))?;
        let server = self.server(served)?;
        let connection = state.connection.as_ref();
        let connection = connection.map(|state| server.connection_of(state, of_connection));
        Ok(Box::new(Socket {
            connection: connection.transpose().map_err(failed)?,
            server,
            listener: Listener::from_listening(listener).map_err(failed)?,
            name: SocketName::adopt(&self.socket, &part.ownership),
        }))
    }
}

/// A socket that front ends connect to.
struct Socket {
    server: Server,
    listener: Listener,
    connection: Option<Connection>,
    name: SocketName,
}

/// The same at rest.
struct Resting {
    server: cowslip_vhost_user::AtRest,
    name: SocketName,
}

impl AtRest for Resting {
    fn part(&self) -> io::Result<Part> {
        let mut descriptors = vec![self.server.listener.as_fd().try_clone_to_owned()?];
        let connection = self.server.connection.as_ref();
        let connection = connection.map(|connection| {
            let (state, more) = connection.state()?;
            descriptors.extend(more);
            Ok(state)
        });
        let connection: io::Result<_> = connection.transpose();
        let state = State {
            connection: connection?,
        };
        Ok(Part {
            state: serde_json::to_value(state)?,
            descriptors,
            ownership: Ownership::default(),
        })
    }

    fn go_on<'a>(
        self: Box<Self>,
        served: &'a Served,
    ) -> LocalFuture<'a, Result<Box<dyn Endpoint>, CommandError>> {
        let disk = std::sync::Arc::clone(&served.disk);
        let (server, listener, connection) = self.server.over(disk);
        let socket: Box<dyn Endpoint> = Box::new(Socket {
            server,
            listener,
            connection,
            name: self.name,
        });
        Box::pin(std::future::ready(Ok(socket)))
    }

    fn leave(self: Box<Self>) {
        self.name.leave();
    }
}

impl Endpoint for Socket {
    fn rights(&self) -> Rights {
        Rights {
            removed: vec![self.name.path().to_owned()],
            // Front ends are accepted; threads start the rings that were made for them; tables of
            // requests in flight are made and sealed. Memory is mapped as data (`sandbox.rs`).
            calls: [
                &[
                    libc::SYS_accept4,
                    libc::SYS_io_uring_register,
                    libc::SYS_memfd_create,
                ],
                socket_name::REMOVING,
            ]
            .concat(),
            ..Rights::default()
        }
    }

    fn stopper(&self) -> Box<dyn Fn()> {
        let handle = self.server.handle();
        Box::new(move || handle.stop())
    }

    fn informer(&self) -> Box<dyn Fn()> {
        let handle = self.server.handle();
        Box::new(move || handle.resized())
    }

    fn serve(self: Box<Self>) -> LocalFuture<'static, Names> {
        Box::pin(async move {
            drop(self.server.serve_on(self.listener, self.connection).await);
            Some(Box::new(self.name) as _)
        })
    }

    fn rester(&self) -> Option<Box<dyn Fn()>> {
        let handle = self.server.handle();
        Some(Box::new(move || handle.rest()))
    }

    fn serve_or_rest(self: Box<Self>) -> LocalFuture<'static, Outcome> {
        Box::pin(async move {
            let name = self.name;
            match self.server.serve_on(self.listener, self.connection).await {
                Some(server) => Outcome::AtRest(Box::new(Resting { server, name })),
                None => Outcome::Ended(Some(Box::new(name) as _)),
            }
        })
    }
}

fn severity(event: &ServerEvent<'_>) -> Severity {
    match event {
        ServerEvent::Connected
        | ServerEvent::Disconnected { reason: None }
        | ServerEvent::RequestFailed { .. } => Severity::Usual,
        ServerEvent::Disconnected { reason: Some(_) }
        | ServerEvent::Refused { .. }
        | ServerEvent::QueueBroken { .. }
        | ServerEvent::AcceptFailed { .. } => Severity::Failure,
    }
}

fn described(event: &ServerEvent<'_>) -> String {
    match event {
        ServerEvent::Connected => "a front end connected".to_string(),
        ServerEvent::Disconnected { reason: None } => "the front end left".to_string(),
        ServerEvent::Disconnected {
            reason: Some(reason),
        } => format!("the front end was disconnected: {reason}"),
        ServerEvent::Refused { reason } => format!("a message was refused: {reason}"),
        ServerEvent::QueueBroken { queue, reason } => {
            format!("queue {queue} is stopped until the guest resets the device: {reason}")
        }
        ServerEvent::RequestFailed {
            queue,
            request,
            error,
        } => format!("queue {queue}: {request} failed: {error}"),
        ServerEvent::AcceptFailed { reason } => format!("accepting a front end failed: {reason}"),
    }
}
