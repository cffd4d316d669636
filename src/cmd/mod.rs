//! The verbs, one file each, and their names on the command line.
//!
//! A verb is `Args` (its command line) and `run` (its work, which returns the exit code).

use std::ffi::OsString;

use clap::Subcommand;
use cowslip_bench::{demo, guest_init};
use cowslip_clients::{ctl, top};
use cowslip_daemon as daemon;
use cowslip_shell as io;

use crate::output::Program;

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
    Create(create::Args),
    /// Check an image's structures and refcounts
    Check(check::Args),
    /// Copy one or more images into a new one, also of another format
    Convert(Box<convert::Args>),
    /// Copy a part of an image into a new one
    Dd(Box<dd::Args>),
    /// Show how large the file of a new image will be
    Measure(Box<measure::Args>),
    /// Show where the data of an image is stored
    Map(map::Args),
    /// Display information about an image
    Info(info::Args),
    /// Change the size of a disk
    Resize(resize::Args),
    /// Change options of an existing image
    Amend(amend::Args),
    /// Compare the contents of two images
    Compare(compare::Args),
    /// Give an image another backing file
    Rebase(rebase::Args),
    /// Write the data of an image into its backing file
    Commit(commit::Args),
    /// List, create, apply or delete internal snapshots
    Snapshot(snapshot::Args),
    /// Add, remove, clear, enable, disable or merge persistent dirty bitmaps
    Bitmap(bitmap::Args),
}

impl ImgVerb {
    /// Runs the verb. Returns the exit code.
    pub fn run(self, program: &Program) -> u8 {
        match self {
            ImgVerb::Create(args) => create::run(args, program),
            ImgVerb::Check(args) => check::run(args, program),
            ImgVerb::Convert(args) => convert::run(&args, program),
            ImgVerb::Dd(args) => dd::run(&args, program),
            ImgVerb::Measure(args) => measure::run(&args, program),
            ImgVerb::Map(args) => map::run(args, program),
            ImgVerb::Info(args) => info::run(args, program),
            ImgVerb::Resize(args) => resize::run(args, program),
            ImgVerb::Amend(args) => amend::run(args, program),
            ImgVerb::Compare(args) => compare::run(args, program),
            ImgVerb::Rebase(args) => rebase::run(args, program),
            ImgVerb::Commit(args) => commit::run(args, program),
            ImgVerb::Snapshot(args) => snapshot::run(args, program),
            ImgVerb::Bitmap(args) => bitmap::run(&args, program),
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
    Bench(bench::ImageArgs),
}

impl QemuImgVerb {
    /// Runs the verb. Returns the exit code.
    pub fn run(self, program: &Program) -> u8 {
        match self {
            QemuImgVerb::Img(verb) => verb.run(program),
            QemuImgVerb::Bench(args) => bench::run_image(&args, program),
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
    Bench(Box<bench::Args>),
    /// Read, write and examine an image, in the manner of qemu-io
    Io(io::Args),
    /// Serve an image over NBD, to virtual machines as a vhost-user-blk device, or as a file
    Serve(Box<serve::Args>),
    /// Serve disks that are added, changed and removed over a control socket (QMP)
    Daemon(Box<daemon::Args>),
    /// Send a command to a daemon: show its result, wait for its job, follow events
    Ctl(Box<ctl::Args>),
    /// Show the disks and jobs of a daemon, live in a terminal
    Top(top::Args),
    /// Create, list or delete checkpoints of images: what changes from a moment on
    Checkpoint(checkpoint::Args),
    /// Show, shrink or check what is kept of images on web servers and in object stores
    #[cfg(feature = "remote")]
    Cache(cache::Args),
    /// Show the disk of an image as a file
    Mount(Box<mount::Args>),
    /// Unmount the file of an image, and wait until the image is closed
    Umount(umount::Args),
    /// Publish an image to an object store or a directory, list, withdraw and prune what is there
    #[cfg(feature = "remote")]
    Publish(Box<publish::Args>),
    /// Copy a published disk to a new image
    #[cfg(feature = "remote")]
    Pull(Box<pull::Args>),
    /// Create a file that shares its data with an image, on file systems with reflinks
    Clone(clone::Args),
    /// Say which clusters, policy, preallocation, cache and chain would serve images, and the
    /// commands that lead there
    Advise(Box<advise::Args>),
    /// Allocate all space of a file of any kind, as a job that can be interrupted
    Allocate(allocate::Args),
    /// Show where files lie on their devices, and where a guest's disk lies in them
    Extents(Box<extents::Args>),
    /// Give the space of an image's file back that holds nothing, in place
    Compact(compact::Args),
    /// Keep space allocated ahead of the ends of files that other programs write
    Grow(grow::Args),
    /// Run a demonstration on real data: overlays on a golden image are served, written, read back
    /// and checked
    Demo(demo::Args),
    /// Print completions for a shell
    Completions(generate::CompletionsArgs),
    /// Write manual pages into a directory
    Manual(generate::ManualArgs),
    /// Process 1 of a guest of `bench guest`
    #[command(name = guest_init::VERB, hide = true)]
    GuestInit(guest_init::Args),
}

impl CowslipVerb {
    /// Runs the verb. Returns the exit code.
    pub fn run(self, program: &Program) -> u8 {
        match self {
            CowslipVerb::Img(verb) => verb.run(program),
            CowslipVerb::Bench(args) => bench::run(*args, program),
            CowslipVerb::Io(args) => io::run(args, program),
            CowslipVerb::Serve(args) => serve::run(*args, program),
            CowslipVerb::Daemon(args) => daemon::run(*args, program),
            CowslipVerb::Ctl(args) => ctl::run(&args, program),
            CowslipVerb::Top(args) => top::run(&args, program),
            CowslipVerb::Checkpoint(args) => checkpoint::run(&args, program),
            #[cfg(feature = "remote")]
            CowslipVerb::Cache(args) => cache::run(args, program),
            CowslipVerb::Mount(args) => mount::run(*args, program),
            CowslipVerb::Umount(args) => umount::run(&args, program),
            #[cfg(feature = "remote")]
            CowslipVerb::Publish(args) => publish::run(&args, program),
            #[cfg(feature = "remote")]
            CowslipVerb::Pull(args) => pull::run(&args, program),
            CowslipVerb::Demo(args) => demo::run(args, program),
            CowslipVerb::Clone(args) => clone::run(args, program),
            CowslipVerb::Advise(args) => advise::run(&args, program),
            CowslipVerb::Allocate(args) => allocate::run(&args, program),
            CowslipVerb::Extents(args) => extents::run(&args, program),
            CowslipVerb::Compact(args) => compact::run(&args, program),
            CowslipVerb::Grow(args) => grow::run(&args, program),
            CowslipVerb::Completions(args) => generate::completions(&args),
            CowslipVerb::Manual(args) => generate::manual(&args, program),
            CowslipVerb::GuestInit(args) => guest_init::run(&args, program),
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
