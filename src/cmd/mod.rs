//! The verbs, one file each, and their names on the command line.
//!
//! A verb is `Args` (its command line) and `run` (its work, which returns the exit code). Its
//! options are declared only where a line names it ([`Deferred`]).

use std::ffi::OsString;

use clap::Subcommand;
use cowslip_bench::{demo, guest_init};
use cowslip_clients::{ctl, top};
use cowslip_daemon as daemon;
use cowslip_shell as io;

use crate::output::Program;
use deferred::Deferred;

pub mod advise;
pub mod allocate;
pub mod amend;
pub mod bench;
pub mod bitmap;
#[cfg(feature = "remote")]
pub mod cache;
mod change;
pub mod check;
pub mod checkpoint;
pub mod clone;
pub mod commit;
pub mod compact;
pub mod compare;
pub mod convert;
pub mod create;
pub mod dd;
pub mod deferred;
pub mod extents;
pub mod generate;
pub mod grow;
pub mod info;
pub mod map;
pub mod measure;
pub mod mount;
pub mod option_order;
#[cfg(feature = "remote")]
pub mod publish;
#[cfg(feature = "remote")]
pub mod pull;
pub mod qemu_nbd;
pub mod rebase;
pub mod resize;
pub mod serve;
pub mod snapshot;
pub mod umount;

/// Verbs that are the same under the names `qemu-img` and `cowslip`.
#[derive(Subcommand)]
pub enum ImgVerb {
    /// Create and format a new image file
    Create(Deferred<create::Args>),
    /// Check an image's structures and refcounts
    Check(Deferred<check::Args>),
    /// Copy one or more images into a new one, also of another format
    Convert(Deferred<Box<convert::Args>>),
    /// Copy a part of an image into a new one
    Dd(Deferred<Box<dd::Args>>),
    /// Show how large the file of a new image will be
    Measure(Deferred<Box<measure::Args>>),
    /// Show where the data of an image is stored
    Map(Deferred<map::Args>),
    /// Display information about an image
    Info(Deferred<info::Args>),
    /// Change the size of a disk
    Resize(Deferred<resize::Args>),
    /// Change options of an existing image
    Amend(Deferred<amend::Args>),
    /// Compare the contents of two images
    Compare(Deferred<compare::Args>),
    /// Give an image another backing file
    Rebase(Deferred<rebase::Args>),
    /// Write the data of an image into its backing file
    Commit(Deferred<commit::Args>),
    /// List, create, apply or delete internal snapshots
    Snapshot(Deferred<snapshot::Args>),
    /// Add, remove, clear, enable, disable or merge persistent dirty bitmaps
    Bitmap(Deferred<bitmap::Args>),
}

impl ImgVerb {
    /// Runs the verb. Returns the exit code.
    pub fn run(self, program: &Program) -> u8 {
        match self {
            ImgVerb::Create(Deferred(args)) => create::run(args, program),
            ImgVerb::Check(Deferred(args)) => check::run(args, program),
            ImgVerb::Convert(Deferred(args)) => convert::run(&args, program),
            ImgVerb::Dd(Deferred(args)) => dd::run(&args, program),
            ImgVerb::Measure(Deferred(args)) => measure::run(&args, program),
            ImgVerb::Map(Deferred(args)) => map::run(args, program),
            ImgVerb::Info(Deferred(args)) => info::run(args, program),
            ImgVerb::Resize(Deferred(args)) => resize::run(args, program),
            ImgVerb::Amend(Deferred(args)) => amend::run(args, program),
            ImgVerb::Compare(Deferred(args)) => compare::run(args, program),
            ImgVerb::Rebase(Deferred(args)) => rebase::run(args, program),
            ImgVerb::Commit(Deferred(args)) => commit::run(args, program),
            ImgVerb::Snapshot(Deferred(args)) => snapshot::run(args, program),
            ImgVerb::Bitmap(Deferred(args)) => bitmap::run(&args, program),
        }
    }
}

/// Verbs under the name `qemu-img`.
#[derive(Subcommand)]
pub enum QemuImgVerb {
    /// Verbs that `cowslip` has under the same names.
    #[command(flatten)]
    Img(ImgVerb),
    /// Run a simple image benchmark
    Bench(Deferred<bench::ImageArgs>),
}

impl QemuImgVerb {
    /// Runs the verb. Returns the exit code.
    pub fn run(self, program: &Program) -> u8 {
        match self {
            QemuImgVerb::Img(verb) => verb.run(program),
            QemuImgVerb::Bench(Deferred(args)) => bench::run_image(&args, program),
        }
    }
}

/// Verbs under the name `cowslip`.
#[derive(Subcommand)]
pub enum CowslipVerb {
    /// Verbs of qemu-img.
    #[command(flatten)]
    Img(ImgVerb),
    /// Measure an image with qemu-img's command line, or make a table of measurements
    Bench(Deferred<Box<bench::Args>>),
    /// Read, write and examine an image, in the manner of qemu-io
    Io(Deferred<io::Args>),
    /// Serve an image over NBD, to virtual machines as a vhost-user-blk device, or as a file
    Serve(Deferred<Box<serve::Args>>),
    /// Serve disks that are added, changed and removed over a control socket (QMP)
    Daemon(Deferred<Box<daemon::Args>>),
    /// Send a command to a daemon: show its result, wait for its job, follow events
    Ctl(Deferred<Box<ctl::Args>>),
    /// Show the disks and jobs of a daemon, live in a terminal
    Top(Deferred<top::Args>),
    /// Create, list or delete checkpoints of images: what changes from a moment on
    Checkpoint(Deferred<checkpoint::Args>),
    /// Show, shrink or check what is kept of images on web servers and in object stores
    #[cfg(feature = "remote")]
    Cache(Deferred<cache::Args>),
    /// Show the disk of an image as a file
    Mount(Deferred<Box<mount::Args>>),
    /// Unmount the file of an image, and wait until the image is closed
    Umount(Deferred<umount::Args>),
    /// Publish an image to an object store or a directory, list, withdraw and prune what is there
    #[cfg(feature = "remote")]
    Publish(Deferred<Box<publish::Args>>),
    /// Copy a published disk to a new image
    #[cfg(feature = "remote")]
    Pull(Deferred<Box<pull::Args>>),
    /// Create a file that shares its data with an image, on file systems with reflinks
    Clone(Deferred<clone::Args>),
    /// Say which clusters, policy, preallocation, cache and chain would serve images, and the
    /// commands that lead there
    Advise(Deferred<Box<advise::Args>>),
    /// Allocate all space of a file of any kind, as a job that can be interrupted
    Allocate(Deferred<allocate::Args>),
    /// Show where files lie on their devices, and where a guest's disk lies in them
    Extents(Deferred<Box<extents::Args>>),
    /// Give the space of an image's file back that holds nothing, in place
    Compact(Deferred<compact::Args>),
    /// Keep space allocated ahead of the ends of files that other programs write
    Grow(Deferred<grow::Args>),
    /// Run a demonstration on real data: overlays on a golden image are served, written, read back
    /// and checked
    Demo(Deferred<demo::Args>),
    /// Print completions for a shell
    Completions(Deferred<generate::CompletionsArgs>),
    /// Write manual pages into a directory
    Manual(Deferred<generate::ManualArgs>),
    /// Process 1 of a guest of `bench guest`
    #[command(name = guest_init::VERB, hide = true)]
    GuestInit(Deferred<guest_init::Args>),
}

impl CowslipVerb {
    /// Runs the verb. Returns the exit code.
    pub fn run(self, program: &Program) -> u8 {
        match self {
            CowslipVerb::Img(verb) => verb.run(program),
            CowslipVerb::Bench(Deferred(args)) => bench::run(*args, program),
            CowslipVerb::Io(Deferred(args)) => io::run(args, program),
            CowslipVerb::Serve(Deferred(args)) => serve::run(*args, program),
            CowslipVerb::Daemon(Deferred(args)) => daemon::run(*args, program),
            CowslipVerb::Ctl(Deferred(args)) => ctl::run(&args, program),
            CowslipVerb::Top(Deferred(args)) => top::run(&args, program),
            CowslipVerb::Checkpoint(Deferred(args)) => checkpoint::run(&args, program),
            #[cfg(feature = "remote")]
            CowslipVerb::Cache(Deferred(args)) => cache::run(args, program),
            CowslipVerb::Mount(Deferred(args)) => mount::run(*args, program),
            CowslipVerb::Umount(Deferred(args)) => umount::run(&args, program),
            #[cfg(feature = "remote")]
            CowslipVerb::Publish(Deferred(args)) => publish::run(&args, program),
            #[cfg(feature = "remote")]
            CowslipVerb::Pull(Deferred(args)) => pull::run(&args, program),
            CowslipVerb::Demo(Deferred(args)) => demo::run(args, program),
            CowslipVerb::Clone(Deferred(args)) => clone::run(args, program),
            CowslipVerb::Advise(Deferred(args)) => advise::run(&args, program),
            CowslipVerb::Allocate(Deferred(args)) => allocate::run(&args, program),
            CowslipVerb::Extents(Deferred(args)) => extents::run(&args, program),
            CowslipVerb::Compact(Deferred(args)) => compact::run(&args, program),
            CowslipVerb::Grow(Deferred(args)) => grow::run(&args, program),
            CowslipVerb::Completions(Deferred(args)) => generate::completions(&args),
            CowslipVerb::Manual(Deferred(args)) => generate::manual(&args, program),
            CowslipVerb::GuestInit(Deferred(args)) => guest_init::run(&args, program),
        }
    }
}

/// The process called `qemu-io`.
pub fn run_qemu_io(args: &[OsString], program: &Program) -> u8 {
    io::run_args(&args[1..], program)
}

/// The process called `qemu-nbd`.
pub fn run_qemu_nbd(args: &[OsString], program: &Program) -> u8 {
    qemu_nbd::run_args(&args[1..], program)
}

/// The process called `qemu-storage-daemon`.
pub fn run_qemu_storage_daemon(args: &[OsString], program: &Program) -> u8 {
    daemon::as_qemu::run_args(&args[1..], program)
}
