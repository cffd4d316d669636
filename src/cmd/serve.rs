//! `cowslip serve`, also under the name `qemu-nbd`: an image for clients of other programs.
//!
//! What all servers do is in `service.rs`; a transport, such as NBD, is a file beside it, and its
//! options in the command lines below. Left out, and refused in plain words: the kernel's NBD
//! devices.

use std::path::PathBuf;
use std::time::Duration;

use cowslip_nbd::remote::Address;
use cowslip_nbd::server::Lifetime;

use crate::cmd::discard_policy;
use crate::error::CommandError;
use crate::open::{self, Access, CacheMode, ImageSpec, Trust};
use crate::options;
use crate::output::Program;

mod detach;
mod nbd;
pub mod qemu_nbd;
mod sandbox;
mod service;
mod socket_name;
mod transport;
mod vhost_user;

use detach::Daemonize;
use nbd::Nbd;
use service::Service;
use transport::{Transport, Verbosity};
use vhost_user::VhostUser;

pub use service::cache_report;

/// Serve an image over NBD, or to virtual machines as a vhost-user-blk device
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
    /// Serve a virtual machine monitor as a vhost-user-blk device on this Unix socket; NBD is
    /// served too if --socket or --listen is given
    #[arg(long, value_name = "PATH")]
    vhost_user: Option<PathBuf>,
    /// Most queues of the vhost-user-blk device
    #[arg(long, value_name = "N", default_value_t = 8, requires = "vhost_user")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: u16,
    /// Threads that its queues are spread over; one for each processor if not given
    #[arg(long, value_name = "N", requires = "vhost_user")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
    /// Its serial number, at most 20 bytes
    #[arg(long, value_name = "TEXT", default_value = "", requires = "vhost_user")]
    serial: String,
    /// Its logical block size: 512, 1024, 2048 or 4096
    #[arg(
        long,
        value_name = "BYTES",
        default_value_t = 512,
        requires = "vhost_user"
    )]
    #[arg(value_parser = block_size)]
    block_size: u32,
    /// Longest time, in microseconds, for which threads poll for requests and completions before
    /// they sleep; 0 to sleep at once. By default 100, or 0 with a single processor
    #[arg(long, value_name = "MICROSECONDS")]
    #[arg(value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    poll: Option<u32>,
    /// The image's format, such as qcow2, raw or luks; guessed from the image if not given
    #[arg(short, long)]
    format: Option<String>,
    /// The export's name
    #[arg(short = 'x', long = "name", default_value = "")]
    export_name: String,
    /// Description of the export, shown to clients that list exports
    #[arg(short = 'D', long, default_value = "")]
    description: String,
    /// Offer the metadata context qemu:allocation-depth: the image of the backing chain that holds
    /// each extent
    #[arg(short = 'A', long)]
    allocation_depth: bool,
    /// Offer this persistent bitmap, of the image or of one below it, as the metadata context
    /// qemu:dirty-bitmap:NAME; more than once for several
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
    /// Cache mode: none, writeback, writethrough, directsync or unsafe
    #[arg(short = 't', long, default_value = "writeback")]
    cache: String,
    /// I/O engine: threads or io_uring; by default the faster one that works here
    #[arg(long)]
    aio: Option<String>,
    /// Effect of clients' discards: unmap or ignore
    #[arg(long, default_value = "unmap")]
    discard: String,
    /// Effect of clients' writes of zeroes: off (written as data), on (allocate no new space), or
    /// unmap (release the space)
    #[arg(long, default_value = "off", value_name = "MODE")]
    detect_zeroes: String,
    /// How space is allocated: contiguous (whole clusters, ahead of need), sparse (only what is
    /// written), or auto (as stored in the image)
    #[arg(long, default_value = "auto", value_name = "POLICY")]
    alloc_policy: String,
    /// Bytes of L2 tables kept in memory for the image and its backing chain, 32M if not given;
    /// on SIGUSR1 the server prints statistics of this cache
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
    /// Confine the server with Landlock and seccomp once its files are open: auto (as far as the
    /// kernel supports them), on (refuse to serve unless both are in force), off
    #[arg(long, default_value = "auto", value_name = "MODE")]
    sandbox: String,
    /// Serve over TLS only, with the credentials of this ID (--object
    /// tls-creds-x509,…,endpoint=server or tls-creds-psk,…)
    #[arg(long, value_name = "ID")]
    tls_creds: Option<String>,
    /// Serve only clients that the object of this ID authorizes (--object authz-simple,… or
    /// authz-list,…)
    #[arg(long, value_name = "ID", requires = "tls_creds")]
    tls_authz: Option<String>,
    /// Report events on standard error
    #[arg(short, long)]
    verbose: bool,
}

/// Runs `cowslip serve`.
pub fn run(args: Args, program: &Program) -> u8 {
    let vhost_user = args.vhost_user();
    let has_nbd = vhost_user.is_none() || args.socket.is_some() || args.listen.is_some();
    match args.service() {
        Ok((service, nbd)) => {
            let nbd = has_nbd.then_some(&nbd as &dyn Transport);
            let vhost_user = vhost_user.as_ref().map(|it| it as &dyn Transport);
            let transports: Vec<&dyn Transport> = nbd.into_iter().chain(vhost_user).collect();
            service.start(&transports, program)
        }
        Err(error) => program.fail(&error),
    }
}

fn block_size(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(bytes @ (512 | 1024 | 2048 | 4096)) => Ok(bytes),
        _ => Err("a block has 512, 1024, 2048 or 4096 bytes".to_string()),
    }
}

impl Args {
    fn poll(&self) -> Duration {
        let given = self.poll.map(u64::from).map(Duration::from_micros);
        given.unwrap_or_else(service::default_poll)
    }

    fn vhost_user(&self) -> Option<VhostUser> {
        let defaults = cowslip_vhost_user::Options::default();
        let threads = self.threads.map_or(defaults.threads, usize::from);
        Some(VhostUser {
            socket: self.vhost_user.clone()?,
            options: cowslip_vhost_user::Options {
                serial: self.serial.clone(),
                queues: self.queues,
                threads: threads.min(usize::from(self.queues)),
                block_bytes: self.block_size,
                poll: self.poll(),
                ..defaults
            },
        })
    }

    fn service(self) -> Result<(Service, Nbd), CommandError> {
        let invalid =
            |what: &str, value: &str| CommandError::new(format!("'{value}' is not {what}"));
        let poll = self.poll();
        let mut service = Service::of(ImageSpec::named(&self.file, self.format.as_deref()));
        let address = match (self.socket, self.listen) {
            (Some(path), _) => Address::Unix(path),
            (None, Some(listen)) => {
                let (host, port) = listen
                    .rsplit_once(':')
                    .ok_or_else(|| invalid("an address (HOST:PORT)", &listen))?;
                Address::Tcp {
                    host: host.trim_matches(['[', ']']).to_string(),
                    port: port.to_string(),
                }
            }
            // Nobody else's machine is served unless that is asked for.
            (None, None) => Address::Tcp {
                host: "127.0.0.1".to_string(),
                port: nbd::DEFAULT_PORT.to_string(),
            },
        };
        service.settings.cache =
            CacheMode::parse(&self.cache).ok_or_else(|| invalid("a cache mode", &self.cache))?;
        service.settings.discard = discard_policy(&self.discard)
            .ok_or_else(|| invalid("a discard mode (unmap or ignore)", &self.discard))?;
        service.settings.detect_zeroes = open::detect_zeroes(&self.detect_zeroes)?;
        service.settings.alloc_policy = open::alloc_policy("alloc-policy", &self.alloc_policy)?;
        if let Some(aio) = &self.aio {
            service.settings.aio = open::parse_aio(aio)
                .ok_or_else(|| invalid("an I/O engine (threads or io_uring)", aio))?;
        }
        service.sandbox = sandbox::Mode::parse(&self.sandbox)
            .ok_or_else(|| invalid("a sandbox mode (auto, on or off)", &self.sandbox))?;
        if let Some(size) = &self.cache_size {
            service.settings.cache_bytes = options::size("cache-size", size)?;
        }
        if self.read_only {
            service.settings.access = Access::Read;
        }
        service.settings.sharing = open::sharing(self.force_share, service.settings.sharing);
        service.settings.policy = self.trust.backing_policy;
        service.offset = self.offset;
        service.poll = poll;
        if self.verbose {
            service.verbosity = Verbosity::Everything;
        }
        if self.fork {
            service.daemonize = Daemonize::Yes;
        }
        service.pid_file = self.pid_file;
        let nbd = Nbd {
            address,
            export_name: self.export_name,
            description: self.description,
            has_depth_context: self.allocation_depth,
            bitmaps: self.bitmaps,
            clients_max: Some(self.clients).filter(|clients| *clients > 0),
            lifetime: match self.once {
                true => Lifetime::UntilLastClient,
                false => Lifetime::UntilStopped,
            },
            tls: nbd::tls(self.tls_creds.as_deref(), self.tls_authz.as_deref())?,
            ..Nbd::default()
        };
        Ok((service, nbd))
    }
}
