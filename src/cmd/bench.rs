//! `bench`: what an image costs, measured.
//!
//! `bench FILE` measures one image in process, with qemu-img's command line ([`image`]). `bench
//! TABLE` makes a whole table, `bench all` all of them, `bench report` a page of results that were
//! made before: all that is in the crate of the benches. A file that is called as a table is
//! measured as `./NAME`.

use crate::output::Program;

mod image;

pub use image::{ImageArgs, run_image};

/// Command line of `bench`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    verb: Option<cowslip_bench::Verb>,
    #[command(flatten)]
    image: ImageArgs,
}

/// Measures an image, makes tables or a page; the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    match args.verb {
        None => run_image(&args.image, program),
        Some(verb) => verb.run(program),
    }
}
