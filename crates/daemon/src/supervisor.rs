//! [`Supervisor`]: the service manager that has started the daemon, by systemd's protocols.
//!
//! | variable | |
//! | --- | --- |
//! | `NOTIFY_SOCKET` | a datagram socket (of an abstract name behind `@`) for the daemon's state |
//! | `WATCHDOG_USEC`, `WATCHDOG_PID` | the daemon has to show a sign of life in this time |
//! | `LISTEN_FDS`, `LISTEN_PID`, `LISTEN_FDNAMES` | sockets that are listened on, from descriptor 3 |
//!
//! Signs of life come from the queue that serves clients and jobs, twice in the time that is given:
//! a daemon that is stuck shows none. A state that cannot be sent is not sent: the manager decides
//! what it does without it.

use std::env;
use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::rc::Rc;
use std::time::Duration;

use cowslip::error::system_words;
use cowslip_console::error::CommandError;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

/// The first descriptor that a manager passes.
const FIRST_DESCRIPTOR: i32 = 3;
/// Most descriptors that are taken.
const DESCRIPTORS_MAX: i32 = 64;

/// The service manager, if there is one.
#[derive(Default)]
pub struct Supervisor {
    socket: Option<UnixDatagram>,
    /// Time within which it expects a sign of life.
    patience: Option<Duration>,
}

impl Supervisor {
    /// The one that the environment names. Its socket is opened now: a sandbox would refuse that.
    ///
    /// # Errors
    /// It names a socket that cannot be reached.
    pub fn of_environment() -> Result<Supervisor, CommandError> {
        let Some(name) = env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Ok(Supervisor::default());
        };
        let connected = address(name.as_encoded_bytes()).and_then(|address| {
            let socket = UnixDatagram::unbound()?;
            socket.connect_addr(&address)?;
            Ok(socket)
        });
        let socket = connected.map_err(|error| {
            let (name, why) = (name.to_string_lossy(), system_words(&error));
            CommandError::new(format!(
                "Could not connect to the notify socket '{name}': {why}"
            ))
        })?;
        let process = env::var("WATCHDOG_PID").ok();
        let time = env::var("WATCHDOG_USEC").ok();
        Ok(Supervisor {
            socket: Some(socket),
            patience: patience(time.as_deref(), process.as_deref()),
        })
    }

    /// The daemon serves; clients can connect.
    pub fn is_ready(&self) {
        // In the background it is not the process that the manager has started.
        self.send(&format!("READY=1\nMAINPID={}", std::process::id()));
    }

    /// The daemon ends, on its own or another's wish.
    pub fn is_stopping(&self) {
        self.send("STOPPING=1");
    }

    /// Shows signs of life from now on, as long as the queue of this thread works.
    pub fn watch(self: &Rc<Supervisor>) {
        let Some(patience) = self.patience else {
            return;
        };
        let supervisor = Rc::clone(self);
        cowslip_queue::spawn(async move {
            loop {
                supervisor.send("WATCHDOG=1");
                cowslip_queue::sleep(patience / 2).await;
            }
        });
    }

    fn send(&self, state: &str) {
        if let Some(socket) = &self.socket {
            // A manager that does not listen cannot be informed.
            drop(socket.send(state.as_bytes()));
        }
    }
}

fn address(name: &[u8]) -> io::Result<SocketAddr> {
    use std::os::unix::ffi::OsStrExt;
    match name.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(name)),
    }
}

/// The time of `WATCHDOG_USEC`, if `WATCHDOG_PID` does not mean another process.
fn patience(time: Option<&str>, process: Option<&str>) -> Option<Duration> {
    let is_ours = process.is_none_or(|it| it == std::process::id().to_string());
    let time = time?.parse().ok().filter(|time| *time > 0)?;
    is_ours.then_some(Duration::from_micros(time))
}

/// A socket that a manager listens on for the daemon.
pub struct Passed {
    /// The socket.
    pub fd: OwnedFd,
    /// The name that the manager gives it; empty if it gives none.
    pub name: String,
}

/// The sockets that a manager has passed to this process.
///
/// # Errors
/// One of them is not there.
pub fn passed_sockets() -> Result<Vec<Passed>, CommandError> {
    let variable = |name: &str| env::var(name).unwrap_or_default();
    let is_ours = variable("LISTEN_PID") == std::process::id().to_string();
    let count = variable("LISTEN_FDS").parse().unwrap_or(0);
    if !is_ours {
        return Ok(Vec::new());
    }
    let names = variable("LISTEN_FDNAMES");
    let mut names = names.split(':').map(str::to_string);
    let taken = (0..count.min(DESCRIPTORS_MAX)).map(|at| {
        let number = FIRST_DESCRIPTOR + at;
        let copied = copy(number).map_err(|error| {
            let why = system_words(&error);
            CommandError::new(format!(
                "Could not take the passed descriptor {number}: {why}"
            ))
        });
        copied.map(|fd| Passed {
            fd,
            name: names.next().unwrap_or_default(),
        })
    });
    taken.collect()
}

/// A copy of a descriptor of this process that nothing here owns. The number itself stays open
/// until the process ends.
fn copy(number: i32) -> io::Result<OwnedFd> {
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    Ok(pidfd_getfd(this, number, PidfdGetfdFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watchdog_is_one_of_this_process_with_a_time() {
        let ours = std::process::id().to_string();
        let second = Some(Duration::from_secs(1));
        for (time, process, expected) in [
            (Some("1000000"), None, second),
            (Some("1000000"), Some(ours.as_str()), second),
            (Some("1000000"), Some("1"), None),
            (Some("0"), None, None),
            (Some("soon"), None, None),
            (None, Some(ours.as_str()), None),
        ] {
            assert_eq!(patience(time, process), expected, "{time:?} {process:?}");
        }
    }

    #[test]
    fn a_descriptor_is_copied_by_its_number() {
        use std::io::Write;
        use std::os::fd::AsRawFd;
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        let copied: UnixDatagram = copy(theirs.as_raw_fd()).unwrap().into();
        copied.send(b"x").unwrap();
        assert_eq!(ours.recv(&mut [0; 2]).unwrap(), 1);
        let mut out = std::fs::File::from(copy(theirs.as_raw_fd()).unwrap());
        out.write_all(b"y").unwrap();
        assert!(copy(i32::MAX).is_err());
    }
}
