//! Tables of measurements: Cowslip's images beside QEMU's and beside raw files, what files of any
//! kind cost, the charts and pages of all that; and the demonstration.
//!
//! A table makes its own images and runs several engines in turn, each by the same command line;
//! each run is a process of its own, which is timed from its start to its end ([`stage`]). Ours is
//! the program that this one is part of: it is run as its users run it, so nothing here depends on
//! it.
//!
//! Knows the public API of the engine, the queue and NBD, and the field's words for figures. May
//! not know: the command's verbs and how they open images.

use cowslip_console::output::Program;

mod all;
mod allocate;
mod cell;
mod check;
mod compact;
mod conditions;
mod convert;
mod deadline;
pub mod demo;
mod description;
mod discard;
mod document;
mod fio;
mod flush;
mod fragmentation;
mod guest;
mod host_usage;
pub mod machine;
mod metadata;
mod page;
mod pages;
mod peer_path;
mod peers;
mod places;
mod preallocation;
mod private_files;
mod report;
mod reporter;
mod run;
mod scale;
mod section;
mod served;
mod server;
mod sheet;
mod sources;
mod sparkline;
mod stage;
mod steady;
mod subclusters;
mod tables;
mod threads;
mod transports;
mod writers;

pub use machine::init as guest_init;

/// Verbs of the bench.
#[derive(clap::Subcommand)]
pub enum Verb {
    /// Of images, beside QEMU's
    #[command(flatten)]
    Table(Box<tables::Table>),
    /// Allocation of space for files of any kind: each method on each file system
    Allocate(allocate::Args),
    /// Files that grow side by side: extents, throughput, space ahead; --model has simulated ones
    Writers(writers::Args),
    /// All tables one after the other, on one page, within a given time
    All(all::AllOptions),
    /// Write a page from results that --json has printed
    Report(all::ReportOptions),
}

impl Verb {
    /// Makes tables or a page; the exit code.
    pub fn run(self, program: &Program) -> u8 {
        private_files::keep_private();
        let outcome = match self {
            Verb::Table(table) => tables::run(*table, program),
            Verb::Allocate(args) => allocate::run(args),
            Verb::Writers(args) => writers::run(&args).map(|()| 0),
            Verb::All(options) => all::run(&options, program),
            Verb::Report(options) => all::report(&options),
        };
        outcome.unwrap_or_else(|error| program.fail(&error))
    }
}
