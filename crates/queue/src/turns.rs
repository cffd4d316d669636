//! [`take_short_turns`]: the time for which the kernel has a thread run while others wait for the
//! same processor.
//!
//! With the turns that the kernel gives by itself, a thread that copies runs for some milliseconds
//! before one gets its turn that a client has just woken. Shorter ones change nobody's share of the
//! processor.
#![allow(unsafe_code)] // Two calls of libc; each says why it is sound.

use std::io;
use std::time::Duration;

/// The kernel's `struct sched_attr` in its first version, sched_setattr(2).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    /// For threads without a real-time policy the length of their turns in nanoseconds.
    runtime: u64,
    deadline: u64,
    period: u64,
}

const SIZE: u32 = size_of::<Attributes>() as u32;
/// The thread that calls.
const SELF: libc::pid_t = 0;

fn attributes() -> io::Result<Attributes> {
    let mut found = Attributes::default();
    let flags: libc::c_uint = 0;
    // SAFETY: the call writes at most `SIZE` bytes to the address given, which is `found`.
    let result =
        unsafe { libc::syscall(libc::SYS_sched_getattr, SELF, &raw mut found, SIZE, flags) };
    match result {
        0 => Ok(found),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has this thread, and those that it starts from now on, take turns of this length while others
/// wait; the kernel allows 0.1 to 100 ms. It is a wish: kernels before Linux 6.12 have one length
/// for all threads, and threads with a real-time policy keep theirs.
///
/// # Errors
/// The system's refusal, as in a sandbox.
pub fn take_short_turns(length: Duration) -> io::Result<()> {
    let before = attributes()?;
    let is_fair = [libc::SCHED_OTHER, libc::SCHED_BATCH].contains(&(before.policy as i32));
    if !is_fair {
        return Ok(());
    }
    let wanted = Attributes {
        size: SIZE,
        runtime: length.as_nanos() as u64,
        ..before
    };
    let flags: libc::c_uint = 0;
    // SAFETY: the call reads `SIZE` bytes from the address given, which is `wanted`.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, SELF, &raw const wanted, flags) };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.

    use super::*;

    #[test]
    fn threads_inherit_turns_and_keep_their_niceness() {
        let on_thread = || {
            let before = attributes().unwrap();
            take_short_turns(Duration::from_micros(300)).unwrap();
            let inherits = std::thread::spawn(|| attributes().unwrap());
            (before, inherits.join().unwrap())
        };
        let (before, after) = std::thread::spawn(on_thread).join().unwrap();
        assert_eq!((after.policy, after.nice), (before.policy, before.nice));
        if before.runtime == 0 {
            eprintln!("SKIPPED: the kernel has one length of turns");
            return;
        }
        assert_eq!(after.runtime, 300_000);
        assert_ne!(
            attributes().unwrap().runtime,
            300_000,
            "other threads keep theirs"
        );
    }
}
