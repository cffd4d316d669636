//! The name of a server's socket: how it is created, taken over from a server that was killed, and
//! removed.
//!
//! A killed server leaves its socket behind. Its name is taken over only if no server accepts a
//! connection there; a live socket keeps its name, and so does a file that is no socket. No system
//! call removes a name on condition that it still refers to the inode that was examined, so two
//! servers that check, remove and bind at the same time could remove each other's sockets.
//! Therefore these servers exclude each other: binding, removing a stale socket and removing the
//! server's own socket happen under an exclusive `flock(2)` on the directory.
//!
//! - The lock ends with the process, however that ends, and leaves no file behind. It holds for
//!   all processes that share the directory, also from several containers.
//! - A socket is bound and starts to listen under one lock, so no other server of ours finds it
//!   without a listener.
//! - A socket found stale is checked again under the lock, by its inode, which is held open so that
//!   its number cannot be reused for another socket. Any number of servers may have found it stale:
//!   the first removes it, and the others find a live socket.
//! - Where the directory cannot be locked (it may not be read, its file system has no such locks,
//!   another program keeps it locked) nothing is removed but the server's own socket.
//!
//! Moving the socket away to look at it would need no lock, but a live one would be out of reach
//! meanwhile, a third server could take its name, and a crash would leave it without one. Servers
//! of other programs do not take turns; qemu-nbd removes whatever has the name that it wants.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cowslip::error::system_words;
use cowslip_console::error::CommandError;
use cowslip_console::output::{is_called_as_qemu, worded};
use cowslip_queue::Listener;
use rustix::fs::{FileType, FlockOperation, Gid, Mode, OFlags, flock, fstat, open};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::transport::Name;

/// Pauses after each connection that a socket accepts: after the last it counts as a live server's.
/// Few, since a live server sees each of them as a client.
const ACCEPTED_PAUSES: [Duration; 3] = [
    Duration::from_millis(50),
    Duration::from_millis(150),
    Duration::from_millis(300),
];
/// How often, and how long apart, a socket has to refuse before it counts as stale: other programs'
/// sockets have their names a moment before they listen.
const REFUSALS: u32 = 3;
const REFUSED_PAUSE: Duration = Duration::from_millis(25);
/// How often, and how long apart, a locked directory is tried: 10 s, a turn takes microseconds.
const TURN_TRIES: u32 = 400;
const TURN_PAUSE: Duration = Duration::from_millis(25);
/// Clients that may wait to be accepted, as the standard library has it.
const BACKLOG: i32 = 128;

/// System calls that removing a name makes: the lock of its directory, and the removal itself. The
/// sandbox says where names may be removed.
pub const REMOVING: &[i64] = &[
    libc::SYS_flock,
    libc::SYS_unlinkat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
];

/// The name of a socket; it vanishes when the server ends.
pub struct SocketName {
    path: PathBuf,
    directory: Directory,
    socket: Option<Socket>,
    /// Whether the name is this server's to remove.
    ownership: Ownership,
}

/// Whether names are this server's to remove: another one may still go on with them.
pub type Ownership = Arc<AtomicBool>;

impl SocketName {
    /// Listens on a path, which nobody may be listening on.
    ///
    /// # Errors
    /// `Failed to bind socket to PATH: why`; a server listens there.
    pub fn bind(path: &Path) -> Result<(Listener, SocketName), CommandError> {
        SocketName::bind_within(path, TURN_TRIES, &Listener::unix)
    }

    /// The same for a socket that its owner alone may connect to, and the members of a group, if
    /// one is given.
    ///
    /// # Errors
    /// As for [`SocketName::bind`]; the socket cannot be given to the group.
    pub fn bind_private(
        path: &Path,
        group: Option<Gid>,
    ) -> Result<(Listener, SocketName), CommandError> {
        SocketName::bind_within(path, TURN_TRIES, &|path| listen_private(path, group))
    }

    fn bind_within(
        path: &Path,
        tries: u32,
        listen: &dyn Fn(&Path) -> io::Result<Listener>,
    ) -> Result<(Listener, SocketName), CommandError> {
        let place = Place::once_settled(path);
        if matches!(place, Place::Answers) && !is_called_as_qemu() {
            return Err(in_use(path));
        }
        let stale = place.into_stale();
        let directory = Directory::of(path);
        let turn = directory.take_turn(tries);
        if let (Ok(_), Some(stale)) = (&turn, stale)
            && stale.is_still_stale(path)
        {
            // If it cannot be removed, binding says why.
            drop(std::fs::remove_file(path));
        }
        let bound = listen(path);
        let listener = bound.map_err(|error| {
            let hint = match (Place::of(path), &turn) {
                (Place::Answers, _) if !is_called_as_qemu() => return in_use(path),
                (Place::Answers, _) => " (a server answers there)".to_string(),
                (Place::Stale(_), Err(why)) => format!(
                    " (no server answers there, but the socket is not replaced, since its \
                     directory could not be locked: {why})"
                ),
                _ => String::new(),
            };
            let (path, why) = (path.display(), system_words(&error));
            CommandError::new(worded(
                format!("Failed to bind socket to {path}: {why}{hint}"),
                format!("Could not create the socket '{path}': {why}{hint}"),
            ))
        })?;
        let socket = Socket::at(path);
        drop(turn);
        let path = path.to_path_buf();
        Ok((
            listener,
            SocketName {
                path,
                directory,
                socket,
                ownership: Arc::new(AtomicBool::new(true)),
            },
        ))
    }

    /// Listens on a path that belongs to a server that has a name of its own already
    /// ([`SocketName::bind`]): a socket that is found there was left behind. Its owner alone may
    /// connect.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn bind_beside(path: &Path) -> io::Result<(Listener, SocketName)> {
        if SocketName::is_there(path) {
            std::fs::remove_file(path)?;
        }
        let listener = Listener::unix(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        let name = SocketName::adopt(path, &Arc::new(AtomicBool::new(true)));
        Ok((listener, name))
    }

    /// The name of a socket that another process has bound, and leaves to this one.
    pub fn adopt(path: &Path, ownership: &Ownership) -> SocketName {
        SocketName {
            ownership: Arc::clone(ownership),
            path: path.to_path_buf(),
            directory: Directory::of(path),
            socket: Socket::at(path),
        }
    }

    /// Leaves the name to another process.
    pub fn leave(mut self) {
        self.socket = None;
    }

    /// Whether a path names a socket: of a server that runs, or that was killed.
    pub fn is_there(path: &Path) -> bool {
        socket_id(path).is_some()
    }

    /// The path, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Listens on a socket that nobody else can connect to at any moment: it has its mode before it has
/// its name.
fn listen_private(path: &Path, group: Option<Gid>) -> io::Result<Listener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    let shared = match group {
        None => Ok(()),
        Some(_) => rustix::fs::chown(path, None, group)
            .and_then(|()| rustix::fs::chmod(path, Mode::from_raw_mode(0o660))),
    };
    let listening = shared.and_then(|()| rustix::net::listen(&socket, BACKLOG));
    if let Err(error) = listening {
        drop(std::fs::remove_file(path));
        return Err(error.into());
    }
    Listener::from_listening(socket)
}

impl Name for SocketName {
    fn leave(self: Box<Self>) {
        SocketName::leave(*self);
    }
}

impl Drop for SocketName {
    /// Removes the name, unless it has come to be another server's. A sandbox allows this.
    fn drop(&mut self) {
        let Some(socket) = self
            .socket
            .as_ref()
            .filter(|_| self.ownership.load(Ordering::Relaxed))
        else {
            return;
        };
        let turn = self.directory.take_turn(TURN_TRIES);
        // Then the next server takes it over.
        if matches!(turn, Err(NoTurn::Busy)) {
            return;
        }
        if socket_id(&self.path) == Some(socket.id) {
            drop(std::fs::remove_file(&self.path));
        }
    }
}

/// The directory that a name is in.
struct Directory(Result<OwnedFd, Errno>);

/// The right to change what a name in a directory means; ends when it is dropped.
struct Turn<'a>(&'a OwnedFd);

/// Why there is no turn.
enum NoTurn {
    /// The directory is locked by another program, for longer than turns take.
    Busy,
    /// The file cannot be locked.
    Impossible(Errno),
}

impl std::fmt::Display for NoTurn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NoTurn::Busy => f.write_str("another program keeps it locked"),
            NoTurn::Impossible(why) => f.write_str(&system_words(&(*why).into())),
        }
    }
}

impl Directory {
    /// Opens the directory of a path.
    fn of(path: &Path) -> Directory {
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Directory(open(parent, flags, Mode::empty()))
    }

    /// Locks it; waits for those who have it.
    fn take_turn(&self, tries: u32) -> Result<Turn<'_>, NoTurn> {
        let directory = match &self.0 {
            Ok(directory) => directory,
            Err(why) => return Err(NoTurn::Impossible(*why)),
        };
        for _ in 0..tries {
            match flock(directory, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Turn(directory)),
                Err(Errno::AGAIN | Errno::INTR) => std::thread::sleep(TURN_PAUSE),
                Err(why) => return Err(NoTurn::Impossible(why)),
            }
        }
        Err(NoTurn::Busy)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Should it fail, it ends when the directory is closed.
        flock(self.0, FlockOperation::Unlock).ok();
    }
}

/// Device and inode.
type SocketId = (u64, u64);

/// Returns the identity of the socket that a path names; `None` if it names none.
fn socket_id(path: &Path) -> Option<SocketId> {
    let metadata = path.symlink_metadata().ok()?;
    let is_socket = metadata.file_type().is_socket();
    is_socket.then(|| (metadata.dev(), metadata.ino()))
}

/// A socket in the file system. While this lives, no other file gets its inode number.
struct Socket {
    id: SocketId,
    _inode: OwnedFd,
}

impl Socket {
    /// The one that a path names; `None` if it names none.
    fn at(path: &Path) -> Option<Socket> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let inode = open(path, flags, Mode::empty()).ok()?;
        let stat = fstat(&inode).ok()?;
        let is_socket = FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
        is_socket.then_some(Socket {
            id: (stat.st_dev, stat.st_ino),
            _inode: inode,
        })
    }

    fn is_still_stale(&self, path: &Path) -> bool {
        matches!(Place::of(path), Place::Stale(now) if now.id == self.id)
    }
}

/// The refusal of a socket that a server listens on.
fn in_use(path: &Path) -> CommandError {
    CommandError::new(format!(
        "A server is already listening on the socket '{}': stop it, or choose another path",
        path.display()
    ))
}

/// State of the place where a socket is to be.
enum Place {
    /// A socket that nobody listens on any more.
    Stale(Socket),
    /// A socket that a server listens on.
    Answers,
    /// Nothing, or a file that must not be touched.
    Other,
}

impl Place {
    fn into_stale(self) -> Option<Socket> {
        match self {
            Place::Stale(socket) => Some(socket),
            Place::Answers | Place::Other => None,
        }
    }

    /// Returns its state when it has been the same for a while. The system closes the sockets of a
    /// server that was killed a little later than it ends, if the server had a ring.
    fn once_settled(path: &Path) -> Place {
        let mut place = Place::of(path);
        let mut refusals = 0;
        let mut accepted = ACCEPTED_PAUSES.iter();
        loop {
            let pause = match place {
                Place::Other => return place,
                Place::Answers => accepted.next(),
                Place::Stale(_) => {
                    refusals += 1;
                    (refusals < REFUSALS).then_some(&REFUSED_PAUSE)
                }
            };
            let Some(pause) = pause else { return place };
            std::thread::sleep(*pause);
            place = Place::of(path);
        }
    }

    /// Connects to the socket. This does no harm to a live server: a client that disconnects before
    /// it has chosen an export is ignored.
    fn of(path: &Path) -> Place {
        let Some(socket) = Socket::at(path) else {
            return Place::Other;
        };
        // Where as many as can be are waiting already, that is the answer; it is not waited for.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let connected = SocketAddrUnix::new(path).and_then(|address| {
            let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
            let client = rustix::net::socket_with(family, kind, flags, None)?;
            rustix::net::connect(&client, &address)
        });
        match connected {
            Ok(()) | Err(Errno::AGAIN) => Place::Answers,
            // It says so of the one that was opened only if the path still names that.
            Err(Errno::CONNREFUSED) if socket_id(path) == Some(socket.id) => Place::Stale(socket),
            Err(_) => Place::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::Barrier;

    /// Leaves a socket without a listener.
    fn leave_stale(path: &Path) {
        drop(UnixListener::bind(path).unwrap());
    }

    /// Starts servers on one stale socket at once. Returns their results.
    fn race(path: &Path, servers: usize) -> Vec<Result<(Listener, SocketName), CommandError>> {
        leave_stale(path);
        let start = Barrier::new(servers);
        std::thread::scope(|scope| {
            let racing: Vec<_> = (0..servers)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        SocketName::bind(path)
                    })
                })
                .collect();
            racing.into_iter().map(|one| one.join().unwrap()).collect()
        })
    }

    #[test]
    fn of_servers_that_start_on_one_stale_socket_one_gets_it() {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..6 {
            // Pairs and triples, each in a directory of its own, so that they run side by side.
            std::thread::scope(|scope| {
                for place in 0..8 {
                    let dir = dir.path().join(format!("{round}-{place}"));
                    scope.spawn(move || {
                        std::fs::create_dir(&dir).unwrap();
                        let path = dir.join("s");
                        let outcomes = race(&path, 2 + place % 2);
                        let mut winners = outcomes.iter().filter_map(|one| one.as_ref().ok());
                        let (_, name) = winners.next().expect("one of them listens");
                        assert!(winners.next().is_none(), "two servers have one name");
                        let socket = name.socket.as_ref().unwrap();
                        assert_eq!(socket_id(&path), Some(socket.id), "its socket has the name");
                        assert!(UnixStream::connect(&path).is_ok());
                        drop(outcomes);
                        assert!(!path.exists(), "it is removed in the end");
                    });
                }
            });
        }
    }

    #[test]
    fn the_loser_learns_that_a_server_answers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let first = SocketName::bind(&path).unwrap();
        let error = SocketName::bind(&path).err().unwrap().to_string();
        let socket = format!(
            "A server is already listening on the socket '{}'",
            path.display()
        );
        assert!(
            error.starts_with(&socket) && error.ends_with("choose another path"),
            "{error}"
        );
        drop(first);
    }

    #[test]
    fn a_live_server_sees_few_connections_of_a_second_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let live = UnixListener::bind(&path).unwrap();
        assert!(SocketName::bind(&path).is_err());
        live.set_nonblocking(true).unwrap();
        let connections = std::iter::from_fn(|| live.accept().ok()).count();
        assert!((1..=4).contains(&connections), "{connections}");
    }

    #[test]
    fn a_name_that_has_become_anothers_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (listener, name) = SocketName::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let other = UnixListener::bind(&path).unwrap();
        drop((listener, name));
        assert!(UnixStream::connect(&path).is_ok());
        drop(other);
    }

    #[test]
    fn without_a_turn_a_stale_socket_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        leave_stale(&path);
        let id = socket_id(&path);
        let locked = Directory::of(&path);
        let turn = locked.take_turn(1).ok().unwrap();
        let error = SocketName::bind_within(&path, 2, &Listener::unix)
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("another program keeps it locked"), "{error}");
        assert_eq!(socket_id(&path), id);
        drop(turn);
        assert!(SocketName::bind(&path).is_ok());
    }
}
