//! Files that a command makes for itself, through the programs that it starts too: nobody else may
//! open them. Files that users ask for have the mode that the users' mask allows.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::sync::OnceLock;

use rustix::fs::Mode;

/// The user's mask, once it is replaced.
static USERS: OnceLock<Mode> = OnceLock::new();

/// Keeps others from all files that this process, or one that it starts, makes from now on.
pub fn keep_private() {
    let users = rustix::process::umask(Mode::RWXG | Mode::RWXO);
    USERS.get_or_init(|| users);
}

/// Gives a new file the mode that files of the user's have, before it gets its name.
///
/// # Errors
/// The file system's.
pub fn hand_over(file: &File) -> io::Result<()> {
    match USERS.get() {
        Some(mask) => file.set_permissions(Permissions::from_mode(0o666 & !mask.as_raw_mode())),
        // The mask is the user's.
        None => Ok(()),
    }
}
