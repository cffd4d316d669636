//! The program `cowslip`; what it does is in `lib.rs`.

use std::process::ExitCode;

fn main() -> ExitCode {
    cowslip_cli::run(std::env::args_os().collect())
}
