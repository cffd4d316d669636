//! Signals that ask something of the process, as something to wait for.
//!
//! They are blocked in the calling thread and in those that it starts later, and read from a
//! descriptor instead: no handler runs, so nothing is interrupted.
#![allow(unsafe_code)] // Three system calls on a signal set; each says why it is sound.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use crate::epoll::Interest;
use crate::socket::wait_ready;

/// Request that a signal stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// End: SIGTERM, SIGINT, SIGHUP.
    End,
    /// Report of the state: SIGUSR1.
    Report,
}

/// The signals that ask something of a process, waited for.
#[derive(Debug)]
pub struct Signals {
    signals: Arc<OwnedFd>,
}

impl Signals {
    /// Takes the signals over. To be called before the process has other threads: those that exist
    /// already would still be ended by them.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn take_over() -> io::Result<Signals> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigemptyset` initialises the whole set that it is given.
        let mut set = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            set.assume_init()
        };
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGUSR1] {
            // SAFETY: the set is initialised, and the signal is a valid one.
            unsafe { libc::sigaddset(&raw mut set, signal) };
        }
        // SAFETY: the set is initialised; the mask before is not asked for.
        let error =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: the set is initialised; -1 asks for a new descriptor.
        let fd =
            unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Signals {
            signals: Arc::new(fd),
        })
    }

    /// Waits for one of the signals, on a running queue. It takes no thread meanwhile: the pool may
    /// get no other one.
    ///
    /// # Errors
    /// The system's.
    pub async fn asked(&self) -> io::Result<Signal> {
        loop {
            // One `signalfd_siginfo`, which begins with the number of the signal.
            let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
            match rustix::io::read(&*self.signals, &mut info) {
                Ok(_) => {
                    let number = i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
                    return Ok(match number {
                        libc::SIGUSR1 => Signal::Report,
                        _ => Signal::End,
                    });
                }
                Err(Errno::AGAIN) => wait_ready(&self.signals, Interest::Readable).await?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}
