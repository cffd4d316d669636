//! `mount`: the disk of an image as a file, served by a process in the background.

use std::path::PathBuf;

use cowslip_exports::{FuseArgs, ImageArgs};

use super::serve::start_fuse;
use crate::output::Program;

/// Command line of `mount`.
#[derive(clap::Args)]
#[command(after_help = "\
The command returns when the file is there; 'cowslip umount FILE' ends its server, as does SIGTERM. FILE is created if \
it does not exist, and is removed in the end then. More: docs/fuse.md.")]
pub struct Args {
    /// The image
    image: String,
    /// The file that shows the image's disk
    file: PathBuf,
    /// Serve in the foreground
    #[arg(long)]
    foreground: bool,
    /// Threads that serve the file
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
    #[command(flatten)]
    fuse: FuseArgs,
    #[command(flatten)]
    common: ImageArgs,
}

/// Runs `mount`. Returns the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    let fuse = args.fuse.transport(args.file, usize::from(args.threads));
    start_fuse((&args.image, args.common), fuse, args.foreground, program)
}
