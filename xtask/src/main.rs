//! The project's own commands, run as `cargo xtask COMMAND`:
//!
//! - `test` is the whole gate: peers, formatting, lints, tidy rules, doc links, tests;
//! - `bench` is the side-by-side table against QEMU on loop-mounted file systems;
//! - `sim` passes its arguments on to the simulator, in a release build.
//!
//! Leaves out whatever a user of Cowslip might want: that belongs to the command itself.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod peers;
mod run;
mod test;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Installs the peers where it can, then runs formatting, lints, tidy rules, doc links and all tests
    Test(test::Args),
    /// Measures Cowslip beside QEMU: 4 KiB random writes over NBD on loop-mounted ext4 and XFS
    Bench(bench::Args),
    /// Runs the simulator in a release build with the arguments that follow
    Sim {
        /// Arguments of the simulator, such as `--seeds 1000`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Test(args) => test::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Sim { arguments } => sim(&arguments),
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
    if arguments.iter().any(|argument| argument == "--planted") {
        command.args(["--features", "planted"]);
    }
    command.arg("--");
    command.args(arguments);
    run::run(&mut command)
}
