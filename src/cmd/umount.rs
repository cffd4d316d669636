//! `umount`: ends the server of a file that `mount` or `serve --fuse` has mounted.

use std::path::{Path, PathBuf};

use cowslip::error::system_words;
use cowslip_exports::{unmounter, wait_for_close};
use cowslip_fuse::{Standing, Unmount, mount, unmount};

use crate::error::CommandError;
use crate::output::Program;

/// Command line of `umount`.
#[derive(clap::Args)]
pub struct Args {
    /// The file that an image is mounted on
    file: PathBuf,
    /// Take its name away although programs use it, and do not wait for them: they are served until
    /// they have closed it
    #[arg(short, long)]
    lazy: bool,
    /// Wait for a server's order on standard input
    #[arg(long, hide = true)]
    for_server: bool,
}

/// Runs `umount`. Returns the exit code.
pub fn run(args: &Args, program: &Program) -> u8 {
    match args.for_server {
        true => unmounter::run(&args.file),
        false => program.exit_code(unmounted(args, program)),
    }
}

fn unmounted(args: &Args, program: &Program) -> Result<(), CommandError> {
    let name = args.file.display();
    let failed = |error: std::io::Error| {
        let hint = match error.kind() {
            std::io::ErrorKind::ResourceBusy => " (programs use it; --lazy does not wait for them)",
            _ => "",
        };
        let why = system_words(&error);
        CommandError::new(format!("Could not unmount '{name}': {why}{hint}"))
    };
    let path = mount::resolved(&args.file).map_err(failed)?;
    let standing = mount::standing(&path).map_err(failed)?;
    if standing == Standing::Free || !mount::is_own(&path).map_err(failed)? {
        let text = format!("Could not unmount '{name}': no image is mounted there");
        return Err(CommandError::new(text));
    }
    let manner = match standing == Standing::Dead || args.lazy {
        true => Unmount::Lazily,
        false => Unmount::IfUnused,
    };
    unmount(&path, manner).map_err(failed)?;
    match standing {
        Standing::Dead => program.warn(format!("the server of '{name}' had ended before")),
        // Its server ends with the last program that has it open, which may be never.
        _ if args.lazy => {}
        _ => wait(&path, program),
    }
    Ok(())
}

/// Waits until the image is closed. Who may unmount the file, and not open it, does without.
fn wait(path: &Path, program: &Program) {
    if let Err(error) = wait_for_close(path) {
        let why = system_words(&error);
        program.warn(format!(
            "cannot wait until the image is closed: '{}': {why}",
            path.display()
        ));
    }
}
