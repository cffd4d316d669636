//! The project's own commands, run as `cargo xtask COMMAND`:
//!
//! - `test` is the whole gate: peers, formatting, lints, tidy rules, doc links, tests;
//! - `bench` is the side-by-side table against QEMU on loop-mounted file systems;
//! - `beside` measures the engine beside others written in Rust, in one process;
//! - `sim` passes its arguments on to the simulator, in a release build;
//! - `models`, `threads`, `tsan` and `miri` look for races, for longer than the gate does;
//! - `features` checks packages with none of their features, with each alone, and with all;
//! - `figures` prints lines by part, and the methods of the largest type;
//! - `fuzz` runs the fuzzers, which need a nightly compiler;
//! - `ceph` starts a Ceph of one node, and tries the command on images in it;
//! - `iotests` runs QEMU's own acceptance tests, from its unpacked source;
//! - `install` installs the command and the library for C, for packages too;
//! - `deb` makes Debian packages of them, and of the module for Python, or the source package;
//! - `static` makes an archive of the command that needs no library of the system;
//! - `oci` makes an image of it for containers, without their tools;
//! - `wheel` makes the wheel of the Python package, and tests it;
//! - `manual` writes the manual as static pages;
//! - `package` makes the packages of the crates that are published, and says what could not be
//!   checked;
//! - `mistakes` plants the mistakes of `crates/sim/mistakes` in a copy of the engine, which the
//!   simulator must notice;
//! - `mutants` changes the engine in many small ways and lists what nothing notices.
//!
//! Leaves out whatever a user of Cowslip might want: that belongs to the command itself.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod apt;
mod archive;
mod bench;
mod beside;
mod ceph;
mod deb;
mod features;
mod figures;
mod fuzz;
mod install;
mod iotests;
mod kernel;
mod libssl;
mod manual;
mod mistakes;
mod musl;
mod mutants;
mod notices;
mod oci;
mod package;
mod peers;
mod recipe;
mod run;
mod scratch_place;
mod source;
mod test;
mod threads;
mod tree;
mod versions;
mod wheel;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Installs the peers where it can, then runs formatting, lints, tidy rules, doc links and all
    /// tests
    Test(test::Args),
    /// Measures Cowslip beside QEMU: 4 KiB random writes over NBD on loop-mounted ext4 and XFS
    Bench(bench::Args),
    /// Measures the engine beside others written in Rust, in one process, on loop-mounted ext4
    Beside(beside::Args),
    /// Measures this version of the command and an older one in turn, on loop-mounted ext4
    Versions(versions::Args),
    /// Runs the simulator in a release build with the arguments that follow
    Sim {
        /// Arguments of the simulator, such as `--seeds 1000`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Runs loom's models and the whole engine on threads in seeded orders
    Models(threads::Models),
    /// Runs several queue threads on one image for a while
    Threads(threads::Threads),
    /// Runs them, and programs in C with the library, under ThreadSanitizer (nightly, rust-src)
    Tsan(threads::Tsan),
    /// Runs the tests of buffers and completions under Miri (nightly, with miri)
    Miri,
    /// Checks packages with none of their features, with each alone, and with all
    Features(features::Args),
    /// Prints the structure in figures: lines by part, methods of the largest type
    Figures(figures::Args),
    /// Fuzzes hostile images, NBD peers, tables and command lines
    Fuzz(fuzz::Args),
    /// Starts a Ceph of one node, and tries the command on images in it
    Ceph(ceph::Args),
    /// Runs QEMU's own acceptance tests under the names of its programs
    Iotests(iotests::Args),
    /// Installs the command and the library for C, with manual pages, completions and units
    Install(install::Args),
    /// Makes Debian packages of the command, the libraries for C and Python, and QEMU's names
    Deb(deb::Args),
    /// Makes an archive of the command, linked with musl: one file that needs no library
    Static(musl::Args),
    /// Makes an image of that command for containers, by contrib/oci/Containerfile
    Oci(oci::Args),
    /// Makes the wheel of the Python package by maturin, installs it and tests it
    Wheel(wheel::Args),
    /// Writes the manual as static pages, with the reference of the command, and checks its links
    Manual(manual::Args),
    /// Makes the packages of all crates that are published, without a network
    Package(package::Args),
    /// Plants the mistakes of crates/sim/mistakes in a copy of the engine; the simulator must
    /// notice each
    Mistakes(mistakes::Args),
    /// Lists mutants of the engine that neither unit tests nor the simulator notice (cargo-mutants)
    Mutants(mutants::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Test(args) => test::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Beside(args) => beside::run(&args),
        Command::Versions(args) => versions::run(&args),
        Command::Sim { arguments } => sim(&arguments),
        Command::Models(args) => threads::models(&args),
        Command::Threads(args) => threads::threads(&args),
        Command::Tsan(args) => threads::tsan(&args),
        Command::Miri => threads::miri(),
        Command::Features(args) => features::run(&args),
        Command::Figures(args) => figures::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Ceph(args) => ceph::run(&args),
        Command::Iotests(args) => iotests::run(&args),
        Command::Install(args) => install::run(&args),
        Command::Deb(args) => deb::run(&args),
        Command::Static(args) => musl::run(&args),
        Command::Oci(args) => oci::run(&args),
        Command::Wheel(args) => wheel::run(&args),
        Command::Manual(args) => manual::run(&args),
        Command::Package(args) => package::run(&args),
        Command::Mistakes(args) => mistakes::run(&args),
        Command::Mutants(args) => mutants::run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}

fn sim(arguments: &[String]) -> Result<(), String> {
    let mut command = run::cargo();
    command.args(["run", "--release", "--package", "cowslip-sim"]);
    command.arg("--");
    command.args(arguments);
    run::run(&mut command)
}
