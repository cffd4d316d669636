//! The verbs, one file each, and their names on the command line.
//!
//! A verb is `Args` (its command line) and `run` (its work, which returns the exit code).

use std::ffi::OsString;

use clap::Subcommand;

use crate::output::Program;

pub mod check;
pub mod create;
pub mod info;
pub mod map;
mod source;

/// Verbs under the names `qemu-img` and `cowslip`.
#[derive(Subcommand)]
pub enum ImgVerb {
    /// Create and format a new image file
    Create(create::Args),
    /// Check an image's structures and refcounts
    Check(check::Args),
    /// Tell where the data of an image is
    Map(map::Args),
    /// Display information about an image
    Info(info::Args),
}

impl ImgVerb {
    /// Does the verb's work.
    pub fn run(self, program: &Program) -> u8 {
        match self {
            ImgVerb::Create(args) => create::run(args, program),
            ImgVerb::Check(args) => check::run(args, program),
            ImgVerb::Map(args) => map::run(args, program),
            ImgVerb::Info(args) => info::run(args, program),
        }
    }
}

/// Verbs under the name `cowslip`.
#[derive(Subcommand)]
pub enum CowslipVerb {
    /// What qemu-img does.
    #[command(flatten)]
    Img(ImgVerb),
}

impl CowslipVerb {
    /// Does the verb's work.
    pub fn run(self, program: &Program) -> u8 {
        match self {
            CowslipVerb::Img(verb) => verb.run(program),
        }
    }
}

/// The process called `qemu-io`.
pub fn run_qemu_io(_args: &[OsString], program: &Program) -> u8 {
    program.complain("this build has no qemu-io");
    1
}

/// The process called `qemu-nbd`.
pub fn run_qemu_nbd(_args: &[OsString], program: &Program) -> u8 {
    program.complain("this build has no qemu-nbd");
    1
}
