//! Whether standard output takes anything. Rust's runtime opens `/dev/null` in the place of a
//! standard stream that is closed before `main` begins, and ignores that one is not open for
//! writing; so results would be lost without an error.

#![allow(unsafe_code)] // A function in a section of the linker's, which is called before the runtime.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::OFlags;

static TAKES_NOTHING: AtomicBool = AtomicBool::new(false);

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = look;

/// It makes one system call and stores a flag, so it needs nothing that is set up later.
extern "C" fn look() {
    let flags = rustix::fs::fcntl_getfl(rustix::stdio::stdout());
    let is_writable = flags.is_ok_and(|flags| flags & OFlags::ACCMODE != OFlags::RDONLY);
    TAKES_NOTHING.store(!is_writable, Ordering::Release);
}

/// Whether standard output was closed when the process began, or is open for reading only.
pub(crate) fn output_takes_nothing() -> bool {
    TAKES_NOTHING.load(Ordering::Acquire)
}
