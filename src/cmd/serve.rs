//! `cowslip serve`, also under the name `qemu-nbd`: an image as an NBD export.
//!
//! The image is opened once and shared by all connections. SIGTERM, SIGINT and SIGHUP end the
//! server in order: nothing new is accepted, what was started is finished, the image is flushed and
//! closed, the socket removed. Left out, and refused in plain words: the kernel's NBD devices.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cowslip::file::{ReadAs, ReadSet, Sharing};
use cowslip::image::Format;
use cowslip_nbd::server::Lifetime;
use cowslip_nbd::tls::ServerTls;
use cowslip_nbd::{Export, Server, ServerEvent, ServerOptions};
use cowslip_queue::{Backend, Queue, Signal, Signals};

use crate::cmd::discard_policy;
use crate::error::CommandError;
use crate::open::{self, Access, CacheMode, ImageSpec, OpenHow, Trust};
use crate::options;
use crate::output::{Program, is_called_as_qemu};
use crate::text_file;
use cowslip_nbd::remote::Address;

mod detach;
mod export;
mod list;
mod listening;
pub mod qemu_nbd;
mod sandbox;
mod socket_name;

use detach::{Detached, Role};
use export::export_of;
use listening::Listening;

/// The port that NBD is assigned.
const DEFAULT_PORT: u16 = 10809;

/// Serve an image over NBD
#[derive(clap::Args)]
pub struct Args {
    /// The image
    file: String,
    /// Listen on this Unix socket
    #[arg(short = 'k', long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Listen on this address, HOST:PORT
    #[arg(short, long, value_name = "ADDRESS", conflicts_with = "socket")]
    listen: Option<String>,
    /// The image's format: qcow2 or raw
    #[arg(short, long)]
    format: Option<String>,
    /// The export's name
    #[arg(short = 'x', long = "name", default_value = "")]
    export_name: String,
    /// Say this about the export to those who list it
    #[arg(short = 'D', long, default_value = "")]
    description: String,
    /// Tell clients that ask (qemu:allocation-depth) which image of the backing chain holds what
    #[arg(short = 'A', long)]
    allocation_depth: bool,
    /// Tell clients that ask (qemu:dirty-bitmap:NAME) what this persistent bitmap, of the image or
    /// of one below it, says; more than once for several
    #[arg(short = 'B', long = "bitmap", value_name = "NAME")]
    bitmaps: Vec<String>,
    /// Refuse writes
    #[arg(short, long)]
    read_only: bool,
    /// Serve the image although another process writes to it; only with --read-only
    #[arg(short = 'U', long, requires = "read_only")]
    force_share: bool,
    #[command(flatten)]
    trust: Trust,
    /// End when the last client has left
    #[arg(long)]
    once: bool,
    /// Serve at most this many clients at a time; others wait. 0 is no limit
    #[arg(short = 'e', long, default_value_t = 0, value_name = "N")]
    clients: usize,
    /// none, writeback, writethrough, directsync or unsafe
    #[arg(short = 't', long, default_value = "writeback")]
    cache: String,
    /// threads or io_uring; the better one that works, if not given
    #[arg(long)]
    aio: Option<String>,
    /// Effect of clients' discards: unmap or ignore
    #[arg(long, default_value = "unmap")]
    discard: String,
    /// Effect of clients' writes of zeroes: off (nothing special), on (they need no space that is
    /// not there), or unmap (their space is given back)
    #[arg(long, default_value = "off", value_name = "MODE")]
    detect_zeroes: String,
    /// How space is allocated: contiguous (whole clusters, ahead of need), sparse (what is written
    /// only), or auto: as the image says
    #[arg(long, default_value = "auto", value_name = "POLICY")]
    alloc_policy: String,
    /// Bytes of L2 tables kept in memory for the image and its backing chain, 32M if not given;
    /// SIGUSR1 makes the server say what it keeps, and how often that did
    #[arg(long, value_name = "SIZE")]
    cache_size: Option<String>,
    /// Start serving at this byte of the image
    #[arg(short, long, default_value_t = 0)]
    offset: u64,
    /// Go into the background once clients can connect
    #[arg(long)]
    fork: bool,
    /// Write the server's process number into this file
    #[arg(long, value_name = "PATH")]
    pid_file: Option<PathBuf>,
    /// Give up what serving does not need: auto (what the system has of it), on (or do not serve),
    /// off
    #[arg(long, default_value = "auto", value_name = "MODE")]
    sandbox: String,
    /// Serve over TLS with the credentials of this ID (--object tls-creds-x509,…,endpoint=server or
    /// tls-creds-psk,…), and nobody without
    #[arg(long, value_name = "ID")]
    tls_creds: Option<String>,
    /// Serve those clients only whom the object of this ID allows (--object authz-simple,… or
    /// authz-list,…)
    #[arg(long, value_name = "ID", requires = "tls_creds")]
    tls_authz: Option<String>,
    /// Tell what happens, on standard error
    #[arg(short, long)]
    verbose: bool,
}

/// Whether the server says what happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
enum Verbosity {
    #[default]
    Errors,
    Everything,
}

/// Whether the server leaves the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
enum Daemonize {
    #[default]
    No,
    /// In a process of its own, detached from the terminal.
    Yes,
}

/// Images to serve, and how.
#[derive(Clone, Debug)]
struct Service {
    spec: ImageSpec,
    how: OpenHow,
    offset: u64,
    address: Address,
    export_name: String,
    description: String,
    /// Clients may ask which layers of the backing chain data is in.
    has_depth_context: bool,
    /// The persistent bitmaps that clients may ask for.
    bitmaps: Vec<String>,
    /// `None` is no limit.
    clients_max: Option<usize>,
    lifetime: Lifetime,
    handshake_timeout: Duration,
    verbosity: Verbosity,
    daemonize: Daemonize,
    pid_file: Option<PathBuf>,
    sandbox: sandbox::Mode,
    tls: Option<ServerTls>,
}

impl Service {
    /// A service of this image with qemu-nbd's defaults.
    fn of(spec: ImageSpec) -> Service {
        Service {
            spec,
            how: OpenHow {
                access: Access::Write,
                // The size is announced to clients once.
                sharing: Sharing::FixedLength,
                ..open::how()
            },
            offset: 0,
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
            verbosity: Verbosity::Errors,
            daemonize: Daemonize::No,
            pid_file: None,
            sandbox: sandbox::Mode::Auto,
            tls: None,
        }
    }
}

/// Runs `cowslip serve`.
pub fn run(args: Args, program: &Program) -> u8 {
    match args.service() {
        Ok(service) => start(&service, program),
        Err(error) => program.fail(&error),
    }
}

impl Args {
    fn service(self) -> Result<Service, CommandError> {
        let invalid = |what: &str, value: &str| {
            CommandError::new(format!("'{value}' is no {what} that is known here"))
        };
        let mut service = Service::of(ImageSpec::named(&self.file, self.format.as_deref()));
        service.address = match (self.socket, self.listen) {
            (Some(path), _) => Address::Unix(path),
            (None, Some(listen)) => {
                let (host, port) = listen
                    .rsplit_once(':')
                    .ok_or_else(|| invalid("address (HOST:PORT)", &listen))?;
                Address::Tcp {
                    host: host.trim_matches(['[', ']']).to_string(),
                    port: port.to_string(),
                }
            }
            // Nobody else's machine is served unless that is asked for.
            (None, None) => Address::Tcp {
                host: "127.0.0.1".to_string(),
                port: DEFAULT_PORT.to_string(),
            },
        };
        service.how.cache =
            CacheMode::parse(&self.cache).ok_or_else(|| invalid("cache mode", &self.cache))?;
        service.how.discard =
            discard_policy(&self.discard).ok_or_else(|| invalid("discard mode", &self.discard))?;
        service.how.detect_zeroes = open::detect_zeroes(&self.detect_zeroes)?;
        service.how.alloc_policy = open::alloc_policy("alloc-policy", &self.alloc_policy)?;
        if let Some(aio) = &self.aio {
            service.how.aio = open::parse_aio(aio).ok_or_else(|| invalid("I/O engine", aio))?;
        }
        service.sandbox = sandbox::Mode::parse(&self.sandbox)
            .ok_or_else(|| invalid("sandbox mode", &self.sandbox))?;
        if let Some(size) = &self.cache_size {
            service.how.cache_bytes = options::size("cache-size", size)?;
        }
        if self.read_only {
            service.how.access = Access::Read;
        }
        service.how.sharing = open::sharing(self.force_share, service.how.sharing);
        service.how.policy = self.trust.backing_policy;
        service.offset = self.offset;
        service.export_name = self.export_name;
        service.description = self.description;
        service.has_depth_context = self.allocation_depth;
        service.bitmaps = self.bitmaps;
        service.clients_max = Some(self.clients).filter(|clients| *clients > 0);
        if !self.once {
            service.lifetime = Lifetime::UntilStopped;
        }
        if self.verbose {
            service.verbosity = Verbosity::Everything;
        }
        if self.fork {
            service.daemonize = Daemonize::Yes;
        }
        service.pid_file = self.pid_file;
        service.tls = tls(self.tls_creds.as_deref(), self.tls_authz.as_deref())?;
        Ok(service)
    }
}

/// Returns the credentials, by their ID, for serving over TLS, with the authorization.
///
/// # Errors
/// There are no such objects.
fn tls(
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

/// Runs the service here, or in another process that this one waits for until it is ready.
fn start(service: &Service, program: &Program) -> u8 {
    match detach::role(service.daemonize) {
        Role::Parent => detach::start_server(program),
        Role::Server => program.exit_code(serve(service, program, Role::Server)),
        Role::Only => program.exit_code(serve(service, program, Role::Only)),
    }
}

fn words(error: &std::io::Error) -> String {
    cowslip::error::system_words(error)
}

fn serve(service: &Service, program: &Program, role: Role) -> Result<(), CommandError> {
    let failed = |error: std::io::Error| CommandError::new(words(&error));
    // Before any thread exists, so that none is ended by the signals.
    let signals = Signals::take_over().map_err(failed)?;
    let queue = Queue::new(Backend::Auto).map_err(failed)?;
    queue.block_on(serve_image(service, program, role, signals))
}

/// Serves until the server is asked to end or has no more clients.
async fn serve_image(
    service: &Service,
    program: &Program,
    role: Role,
    signals: Signals,
) -> Result<(), CommandError> {
    // The image is opened first: a server that fails to lock it must not touch a socket.
    let image = Arc::new(open_served(service).await?);
    let size = image.size();
    if let Err(offset) = i64::try_from(service.offset).map_err(|_| service.offset as i64) {
        return Err(CommandError::new(format!(
            "Value '{offset}' is out of range for parameter 'offset'"
        )));
    }
    if service.offset > size {
        return Err(CommandError::new(format!(
            "Offset ({}) cannot be greater than size of the containing file ({size})",
            service.offset
        )));
    }
    let disk = export_of(&image, service).await?;
    let listening = Listening::on(&service.address)?;
    if let Some(path) = &service.pid_file {
        let mut read = ReadSet::default();
        image.add_to(&mut read, ReadAs::Image);
        let text = format!("{}\n", std::process::id());
        // Nobody else's, as QEMU's.
        text_file::write(path, &text, 0o600, "create", &read)?;
    }
    let server = server(service, program, disk);
    let detached = Detached::prepare(role).map_err(|error| CommandError::new(words(&error)))?;
    // No client has been served so far, and every file that will be needed is open.
    confine(service, program, &listening)?;
    let handle = server.handle();
    let (watched, watching) = (Arc::downgrade(&image), program.clone());
    cowslip_queue::spawn(async move {
        while let (Ok(Signal::Report), Some(image)) = (signals.asked().await, watched.upgrade()) {
            let cache = cache_report(&image.cache_statistics());
            watching.complain(serde_json::json!({ "cache": cache }));
        }
        // If the signals cannot be waited for, ending early is better than never.
        handle.stop();
    });
    let maintained = Arc::clone(&image);
    cowslip_queue::spawn(async move { maintained.maintain().await });
    detached
        .report_ready()
        .map_err(|error| CommandError::new(words(&error)))?;
    let Listening { listener, name } = listening;
    server.serve(vec![listener]).await;
    let closed = image.close().await;
    drop(name);
    closed.map_err(|error| CommandError::new(format!("Could not close the image: {error}")))
}

/// Returns the statistics of the metadata caches of a chain, for programs.
pub(super) fn cache_report(cache: &cowslip::image::CacheStatistics) -> serde_json::Value {
    serde_json::json!({
        "budget-bytes": cache.budget_bytes,
        "used-bytes": cache.used_bytes,
        "slices": cache.slices,
        "packed-slices": cache.packed,
        "hits": cache.hits,
        "misses": cache.misses,
        "evicted": cache.evicted,
    })
}

fn confine(
    service: &Service,
    program: &Program,
    listening: &Listening,
) -> Result<(), CommandError> {
    if service.sandbox == sandbox::Mode::Off {
        return Ok(());
    }
    let report = sandbox::enter(listening.socket_path());
    if service.sandbox == sandbox::Mode::On && !report.is_whole() {
        return Err(CommandError::new(report.to_string()));
    }
    // The lines that scripts compare have no place for it.
    let is_asked = service.verbosity == Verbosity::Everything && !is_called_as_qemu();
    if is_asked || !report.is_whole() {
        program.complain(report);
    }
    Ok(())
}

async fn open_served(service: &Service) -> Result<cowslip::Image, CommandError> {
    let spec = &service.spec;
    let failed =
        |why: &str| CommandError::new(format!("Failed to blk_new_open '{}': {why}", spec.filename));
    let image = open::open_image(spec, &service.how).await;
    let image = image.map_err(|error| {
        if error.is_of_snapshot() {
            return error;
        }
        failed(&error.reason_not_to_open())
    })?;
    if service.how.access != Access::Write {
        return Ok(image);
    }
    let source = spec.resolve()?;
    if source.common.read_only {
        return Err(failed("Block node is read-only"));
    }
    if source.format.is_none() && image.layers()[0].format == Format::Raw {
        eprint!("{}", open::guessed_raw(&source.filename));
    }
    Ok(image)
}

fn server(service: &Service, program: &Program, export: Export) -> Server {
    let mut server = Server::new(ServerOptions {
        connections_max: service.clients_max,
        lifetime: service.lifetime,
        handshake_timeout: service.handshake_timeout,
        tls: service.tls.clone(),
        ..ServerOptions::default()
    });
    server.add_export(service.export_name.clone(), export);
    if service.verbosity == Verbosity::Everything {
        let program = program.clone();
        let reports_all = !is_called_as_qemu();
        server.observe(move |event| {
            if reports_all || has_gone_wrong(event) {
                program.complain(described(event));
            }
        });
    }
    server
}

/// Whether `qemu-nbd -v` reports it: scripts compare its output.
fn has_gone_wrong(event: &ServerEvent) -> bool {
    match event {
        ServerEvent::Disconnected { reason, .. } => reason.is_some(),
        ServerEvent::AcceptFailed { .. } => true,
        ServerEvent::Connected { .. }
        | ServerEvent::Option { .. }
        | ServerEvent::Secured { .. }
        | ServerEvent::Chosen { .. }
        | ServerEvent::RequestFailed { .. } => false,
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
