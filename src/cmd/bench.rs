//! `bench`: what an image costs, measured.
//!
//! `bench FILE` measures one image in process, with qemu-img's command line ([`image`]). `bench TABLE`
//! makes a whole table: its own images, several engines in turn with that same command line, each run
//! a process of its own that is timed from its start to its end ([`stage`]). `bench all` makes all tables, and
//! `bench report` a page of results that were made before. A file that is called as a table is measured as `./NAME`.

use crate::output::Program;

mod all;
mod allocate;
mod cell;
mod conditions;
mod deadline;
mod discard;
mod flush;
mod fragmentation;
mod guest;
mod image;
mod latency;
mod load;
mod metadata;
mod page;
mod pages;
mod peers;
mod places;
mod preallocation;
mod report;
mod run;
mod section;
mod sheet;
mod sources;
mod sparkline;
mod stage;
mod steady;
mod subclusters;
mod tables;
mod telling;
mod told;
mod writers;

pub use guest::init as guest_init;
pub use image::{ImageArgs, run_image};

/// Command line of `bench`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,
    #[command(flatten)]
    image: ImageArgs,
}

/// What `bench` does beside measuring an image.
#[derive(clap::Subcommand)]
enum Verb {
    /// Of images, beside QEMU's
    #[command(flatten)]
    Table(Box<tables::Table>),
    /// Files of any kind that are given their space: each method on each file system
    Allocate(allocate::Args),
    /// Files that grow side by side: extents, throughput, space ahead; --model simulates large ones
    Writers(writers::Args),
    /// All tables one after the other, on one page, within a given time
    All(all::AllOptions),
    /// A page of results that --json has printed
    Report(all::ReportOptions),
}

/// Measures an image, makes tables or a page; the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    if args.verb.is_some() {
        crate::private_files::keep_private();
    }
    let outcome = match args.verb {
        None => return run_image(&args.image, program),
        Some(Verb::Table(table)) => tables::run(*table, program),
        Some(Verb::Allocate(args)) => allocate::run(args),
        Some(Verb::Writers(args)) => writers::run(&args).map(|()| 0),
        Some(Verb::All(options)) => all::run(&options, program),
        Some(Verb::Report(options)) => all::report(&options),
    };
    outcome.unwrap_or_else(|error| program.fail(&error))
}
