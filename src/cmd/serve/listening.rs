//! Where a server listens, and how it comes by the name of its socket.
//!
//! A name that is taken is taken over only if nobody answers there: a server that was killed leaves its
//! socket behind. One that answers keeps it, and so does what is no socket.

use std::net::{SocketAddr, ToSocketAddrs};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use cowslip_queue::Listener;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::{Address, words};
use crate::error::CommandError;

/// How often, and how long apart, a socket that answers is looked at before it is believed.
const SETTLING_TRIES: u32 = 20;
const SETTLING_PAUSE: Duration = Duration::from_millis(25);
/// How often a socket has to refuse before it is believed: it has its name a moment before its server listens.
const REFUSALS: u32 = 3;

/// A socket that clients connect to, and its name, if it is one in the file system.
pub(super) struct Listening {
    pub listener: Listener,
    pub name: Option<SocketName>,
}

/// The name of a socket; it vanishes when the server ends.
pub(super) struct SocketName {
    path: PathBuf,
    id: Option<SocketId>,
}

/// Device and inode.
type SocketId = (u64, u64);

impl Listening {
    pub fn on(address: &Address) -> Result<Listening, CommandError> {
        match address {
            Address::Unix(path) => Listening::on_path(path),
            Address::Tcp { host, port } => Listening::on_port(host, port),
        }
    }

    /// The path of the socket, if it has one.
    pub fn socket_path(&self) -> Option<&Path> {
        self.name.as_ref().map(|name| &*name.path)
    }

    fn on_path(path: &Path) -> Result<Listening, CommandError> {
        let place = Place::once_settled(path);
        if place == Place::Stale {
            // If it cannot be removed, or another server was faster, binding says why.
            drop(std::fs::remove_file(path));
        }
        let listener = Listener::unix(path).map_err(|error| {
            let answered = match place {
                Place::Answers => " (a server answers there)",
                Place::Stale | Place::Other => "",
            };
            let (path, why) = (path.display(), words(&error));
            CommandError::new(format!("Failed to bind socket to {path}: {why}{answered}"))
        })?;
        Ok(Listening {
            listener,
            name: Some(SocketName {
                path: path.to_path_buf(),
                id: socket_id(path),
            }),
        })
    }

    fn on_port(host: &str, port: &str) -> Result<Listening, CommandError> {
        let unresolved = |why: &str| {
            CommandError::new(format!(
                "address resolution failed for {host}:{port}: {why}"
            ))
        };
        let number: u16 = port
            .parse()
            .map_err(|_| unresolved("Servname not supported for ai_socktype"))?;
        let addresses: Vec<SocketAddr> = (host, number)
            .to_socket_addrs()
            .map_err(|_| unresolved("Name or service not known"))?
            .collect();
        let mut failure = None;
        for address in addresses {
            match Listener::tcp(address) {
                Ok(listener) => {
                    return Ok(Listening {
                        listener,
                        name: None,
                    });
                }
                Err(error) => failure = Some(words(&error)),
            }
        }
        Err(CommandError::new(format!(
            "Failed to find an available port: {}",
            failure.as_deref().unwrap_or("Name or service not known")
        )))
    }
}

impl Drop for SocketName {
    fn drop(&mut self) {
        // Whoever removed ours may have put another server's there.
        if self.id.is_some() && socket_id(&self.path) == self.id {
            drop(std::fs::remove_file(&self.path));
        }
    }
}

/// Which socket a path names; `None` if it names none.
fn socket_id(path: &Path) -> Option<SocketId> {
    let metadata = path.symlink_metadata().ok()?;
    let is_socket = metadata.file_type().is_socket();
    is_socket.then(|| (metadata.dev(), metadata.ino()))
}

/// What is where a socket is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// A socket that nobody listens on any more.
    Stale,
    /// A socket that somebody listens on.
    Answers,
    /// Nothing, or what must not be touched.
    Other,
}

impl Place {
    /// What is there when it has been the same for a while. The system closes the sockets of a server that was
    /// killed a little later than it ends, if the server had a ring.
    fn once_settled(path: &Path) -> Place {
        let mut place = Place::of(path);
        let mut refusals = 0;
        for _ in 0..SETTLING_TRIES {
            refusals += u32::from(place == Place::Stale);
            if place == Place::Other || refusals == REFUSALS {
                break;
            }
            std::thread::sleep(SETTLING_PAUSE);
            place = Place::of(path);
        }
        place
    }

    /// Connects to whoever is there, which does a server no harm: a client that leaves before it has
    /// chosen an export counts for nothing.
    fn of(path: &Path) -> Place {
        if socket_id(path).is_none() {
            return Place::Other;
        }
        // Where as many as can be are waiting already, that is the answer; it is not waited for.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let connected = SocketAddrUnix::new(path).and_then(|address| {
            let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
            let socket = rustix::net::socket_with(family, kind, flags, None)?;
            rustix::net::connect(&socket, &address)
        });
        match connected {
            Ok(()) | Err(Errno::AGAIN) => Place::Answers,
            Err(Errno::CONNREFUSED) => Place::Stale,
            Err(_) => Place::Other,
        }
    }
}
