//! `cowslip serve`: an image for clients of other programs.
//!
//! What all servers do is in the crate of exports, with the transports; here are their options.

use std::path::PathBuf;

use cowslip_exports::nbd::{self, DEFAULT_PORT};
use cowslip_exports::{
    Daemonize, Fuse, Handover, ImageArgs, Nbd, Service, Transport, VhostUser, invalid,
};
use cowslip_nbd::remote::Address;
use cowslip_nbd::server::Lifetime;

use crate::error::CommandError;
use crate::output::Program;

/// Serve an image over NBD, to virtual machines as a vhost-user-blk device, or as a file
#[derive(clap::Args)]
pub struct Args {
    /// The image
    image: String,
    /// Listen on this Unix socket
    #[arg(short = 'k', long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Listen on this address, HOST:PORT; 127.0.0.1:10809 without an address, a socket or another
    /// export, which every user of this host can reach
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
    /// Threads that its queues, the connections of NBD, or the requests of --fuse are spread over;
    /// if not given, one for each processor, and one for NBD and for --fuse
    #[arg(long, value_name = "N")]
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
    /// Offer to give its requests back in order (VIRTIO_F_IN_ORDER), for front ends that need it;
    /// a slow request holds up those behind it
    #[arg(long, requires = "vhost_user")]
    in_order: bool,
    /// Show the disk as this file (FUSE); NBD is served too if --socket or --listen is given
    #[arg(long, value_name = "FILE")]
    fuse: Option<PathBuf>,
    #[command(flatten)]
    file: FuseArgs,
    #[command(flatten)]
    common: ImageArgs,
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
    /// End when the last client has left
    #[arg(long)]
    once: bool,
    /// Serve at most this many clients at a time; others wait. 0 is no limit
    #[arg(short = 'e', long, default_value_t = 0, value_name = "N")]
    clients: usize,
    /// Go into the background once clients can connect
    #[arg(long)]
    fork: bool,
    /// Take over from the server that runs with the same image and sockets: its clients, its locks
    /// and its sockets, with a pause of milliseconds. It goes on if that fails
    #[arg(long)]
    handover: bool,
    /// Serve over TLS only, with the credentials of this ID (--object
    /// tls-creds-x509,…,endpoint=server or tls-creds-psk,…)
    #[arg(long, value_name = "ID")]
    tls_creds: Option<String>,
    /// Serve only clients that the object of this ID authorizes (--object authz-simple,… or
    /// authz-list,…)
    #[arg(long, value_name = "ID", requires = "tls_creds")]
    tls_authz: Option<String>,
}

/// A choice of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Switch {
    On,
    Off,
}

/// Options of an image that is shown as a file.
#[derive(clap::Args)]
pub struct FuseArgs {
    /// Let writes beyond the end of the file, and truncate(2), grow the disk
    #[arg(long)]
    growable: bool,
    /// Let other users use the file, as its mode allows
    #[arg(long)]
    allow_other: bool,
    /// Take the file's requests by way of io_uring, where the kernel offers that (its parameter
    /// fuse.enable_uring)
    #[arg(long, value_enum, default_value = "on", value_name = "MODE")]
    fuse_uring: Switch,
}

impl FuseArgs {
    /// The transport for a file.
    pub fn transport(&self, file: PathBuf, threads: usize) -> Fuse {
        Fuse {
            file,
            is_growable: self.growable,
            allows_others: self.allow_other,
            uses_ring: self.fuse_uring == Switch::On,
            threads,
        }
    }
}

/// Serves an image as a file, in the background unless asked otherwise. Returns the exit code.
pub fn start_fuse(
    (image, args): (&str, ImageArgs),
    fuse: Fuse,
    foreground: bool,
    program: &Program,
) -> u8 {
    match args.service(image) {
        Ok(mut service) => {
            if !foreground {
                service.daemonize = Daemonize::Yes;
            }
            if fuse.is_growable {
                service.let_grow();
            }
            service.start(&[&fuse], program)
        }
        Err(error) => program.fail(&error),
    }
}

/// Runs `cowslip serve`.
pub fn run(args: Args, program: &Program) -> u8 {
    let vhost_user = args.vhost_user();
    let fuse = args.fuse();
    let is_nbd_asked_for = args.socket.is_some() || args.listen.is_some();
    let has_nbd = is_nbd_asked_for || (vhost_user.is_none() && fuse.is_none());
    match args.service() {
        Ok((service, nbd)) => {
            let nbd = has_nbd.then_some(&nbd as &dyn Transport);
            let vhost_user = vhost_user.as_ref().map(|it| it as &dyn Transport);
            let fuse = fuse.as_ref().map(|it| it as &dyn Transport);
            let transports = nbd.into_iter().chain(vhost_user).chain(fuse);
            service.start(&transports.collect::<Vec<_>>(), program)
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
                is_in_order: self.in_order,
                ..defaults
            },
        })
    }

    fn fuse(&self) -> Option<Fuse> {
        let threads = self.threads.map_or(1, usize::from);
        Some(self.file.transport(self.fuse.clone()?, threads))
    }

    fn service(self) -> Result<(Service, Nbd), CommandError> {
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
                port: DEFAULT_PORT.to_string(),
            },
        };
        let mut service = self.common.service(&self.image)?;
        if self.file.growable {
            service.let_grow();
        }
        if self.fork {
            service.daemonize = Daemonize::Yes;
        }
        service.handover = match self.handover {
            true => Handover::TakeOver,
            false => Handover::Offer,
        };
        let nbd = Nbd {
            address,
            threads: self.threads.map_or(1, usize::from),
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
