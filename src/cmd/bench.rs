//! `bench`: what an image costs, measured.
//!
//! `bench FILE` measures one image in process, with qemu-img's command line ([`image`]). `bench TABLE`
//! makes a whole table: its own images, several engines in turn with that same command line, each run
//! a process of its own that is timed from its start to its end ([`stage`]). A file that is called as
//! a table is measured as `./NAME`.

use clap::Subcommand;

use crate::output::Program;

mod allocate;
mod cell;
mod discard;
mod flush;
mod fragmentation;
mod guest;
mod image;
mod latency;
mod load;
mod metadata;
mod peers;
mod preallocation;
mod report;
mod run;
mod sheet;
mod sparkline;
mod stage;
mod steady;
mod subclusters;
mod tables;

pub use guest::init as guest_init;
pub use image::{ImageArgs, run_image};
pub use tables::Table;

/// Command line of `bench`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    what: Option<What>,
    #[command(flatten)]
    image: ImageArgs,
}

/// What is measured beside an image.
#[derive(Subcommand)]
enum What {
    /// Of images, beside QEMU's.
    #[command(flatten)]
    Table(Table),
    /// Files of any kind that are given their space: each method on each file system
    Allocate(allocate::Args),
}

/// Measures an image or makes a table; the exit code.
pub fn run(args: &Args, program: &Program) -> u8 {
    match &args.what {
        None => run_image(&args.image, program),
        Some(What::Table(table)) => {
            tables::run(table, program).unwrap_or_else(|error| program.fail(&error))
        }
        Some(What::Allocate(args)) => {
            allocate::run(args).unwrap_or_else(|error| program.fail(&error))
        }
    }
}
