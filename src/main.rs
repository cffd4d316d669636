//! The program `cowslip`; what it does is in `lib.rs`.

use std::process::ExitCode;

/// The allocator of the static build ([docs/static.md](../docs/static.md)).
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cowslip_cli::run(std::env::args_os().collect())
}
