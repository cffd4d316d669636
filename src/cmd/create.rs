//! `create`.
use crate::output::Program;
/// Command line.
#[derive(clap::Args)]
pub struct Args {}
/// Runs.
pub fn run(_args: Args, program: &Program) -> u8 {
    program.complain("not yet");
    1
}
