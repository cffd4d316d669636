//! `cowslip serve`: an image for clients of other programs.
//!
//! Transports, and all that servers do, are in the crate of exports.

use cowslip_exports::{Daemonize, Fuse, Handover, ImageArgs, TransportArgs};

use crate::error::CommandError;
use crate::output::Program;

/// Serve an image over NBD, to virtual machines as a vhost-user-blk device, or as a file
#[derive(clap::Args)]
pub struct Args {
    /// The image
    image: String,
    #[command(flatten)]
    transports: TransportArgs,
    #[command(flatten)]
    common: ImageArgs,
    /// Go into the background once clients can connect
    #[arg(long, display_order = 107)]
    fork: bool,
    /// Take over from the server that runs with the same image and sockets: its clients, its locks
    /// and its sockets, with a pause of milliseconds. It goes on if that fails
    #[arg(long, display_order = 108)]
    handover: bool,
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
            if fuse.is_growable() {
                service.let_grow();
            }
            service.start(&[&fuse], program)
        }
        Err(error) => program.fail(&error),
    }
}

/// Runs `cowslip serve`.
pub fn run(args: Args, program: &Program) -> u8 {
    match args.start(program) {
        Ok(code) => code,
        Err(error) => program.fail(&error),
    }
}

impl Args {
    fn start(self, program: &Program) -> Result<u8, CommandError> {
        let (transports, lets_grow) = self.transports.transports()?;
        let mut service = self.common.service(&self.image)?;
        if lets_grow {
            service.let_grow();
        }
        if self.fork {
            service.daemonize = Daemonize::Yes;
        }
        service.handover = match self.handover {
            true => Handover::TakeOver,
            false => Handover::Offer,
        };
        let transports: Vec<_> = transports.iter().map(AsRef::as_ref).collect();
        Ok(service.start(&transports, program))
    }
}
