//! A process that unmounts the file of a server.
//!
//! It is this program again, outside of the server's sandbox, and has one end of a socket for its
//! standard input. It waits there for an order, or for the end of the server:
//!
//! | the server | the process |
//! | --- | --- |
//! | is asked to end | writes pages of programs back, and unmounts |
//! | fails, or panics ([`Unmounter::abandon`]) | unmounts at once |
//! | is killed before it serves | unmounts: nobody has got an answer |
//! | is killed while it serves | leaves the mount: it gives errors to those who use it, which is better than an empty file that takes their data |

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use cowslip::error::system_words;
use cowslip_fuse::{Standing, Unmount, mount, unmount};
use cowslip_queue::{BufMut, Stream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The option of `umount` by which a server starts it.
pub const OPTION: &str = "--for-server";

/// Orders: note that programs are served from now on; unmount; unmount a file that nobody serves.
const SERVES: u8 = b's';
const UNMOUNT: u8 = b'u';
const ABANDON: u8 = b'a';
/// How long a server that fails waits for the end of its mount.
const ABANDON_MAX: Timespec = Timespec {
    tv_sec: 5,
    tv_nsec: 0,
};

/// Answers: the file is unmounted, and nobody used it; some programs did; it is not.
const UNUSED: u8 = b'u';
const IN_USE: u8 = b'i';
const FAILED: u8 = b'f';
/// Bytes of the longest answer.
const ANSWER_BYTES: usize = 4096;

/// The result of unmounting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Nobody used the file.
    Unused,
    /// Programs have it open still.
    InUse,
}

/// The process, for its server.
#[derive(Debug)]
pub struct Unmounter {
    socket: Stream,
    has_unmounted: Cell<bool>,
}

impl Unmounter {
    /// Starts the process for a mount at a path.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn start(path: &Path) -> io::Result<Unmounter> {
        let (own, theirs) = UnixStream::pair()?;
        own.set_nonblocking(true)?;
        let theirs: std::os::fd::OwnedFd = theirs.into();
        Command::new("/proc/self/exe")
            .arg0("cowslip")
            .args(["umount", OPTION])
            .arg(path)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // The keys of a terminal are for the server.
            .process_group(0)
            .spawn()?;
        Ok(Unmounter {
            socket: Stream::from_fd(own.into()),
            has_unmounted: Cell::new(false),
        })
    }

    /// Says that programs are served from now on.
    pub fn note_service(&self) {
        // A process that has ended will say so when it is to unmount.
        let _written = rustix::io::write(self.socket.as_fd(), &[SERVES]);
    }

    /// Unmounts a file that nobody serves any more, if that was not done yet. Waits for it, and not
    /// for the queue: it may be ending.
    pub fn abandon(&self) {
        if self.has_unmounted.replace(true) {
            return;
        }
        if rustix::io::write(self.socket.as_fd(), &[ABANDON]).is_ok() {
            let mut answer = [PollFd::new(&self.socket, PollFlags::IN)];
            let _waited = poll(&mut answer, Some(&ABANDON_MAX));
        }
    }

    /// Unmounts. The file has to be served until then.
    ///
    /// # Errors
    /// The reason in words.
    pub async fn unmount(&self) -> Result<Ended, String> {
        let words = |error: io::Error| system_words(&error);
        let order = cowslip_queue::Buf::copy_of(&[UNMOUNT]);
        let sent = self.socket.write_all(vec![order]).await;
        sent.map_err(words)?;
        let mut answer = Vec::new();
        loop {
            let (got, buf) = self.socket.read(BufMut::zeroed(ANSWER_BYTES)).await;
            match got.map_err(words)? {
                0 => break,
                got => answer.extend_from_slice(&buf[..got]),
            }
        }
        let ended = match answer.split_first() {
            Some((&UNUSED, _)) => Ended::Unused,
            Some((&IN_USE, _)) => Ended::InUse,
            Some((_, why)) => return Err(String::from_utf8_lossy(why).into_owned()),
            None => return Err("the process for that has ended".to_string()),
        };
        self.has_unmounted.set(true);
        Ok(ended)
    }
}

/// The process itself. Returns the exit code.
pub fn run(path: &Path) -> u8 {
    let mut is_served = false;
    let outcome = loop {
        let mut order = [0];
        match (io::stdin().read(&mut order), order[0]) {
            (Ok(1), SERVES) => is_served = true,
            (Ok(1), UNMOUNT) => break carried_out(path),
            (Ok(1), _) => break abandoned(path),
            (Ok(_) | Err(_), _) if is_served => return 0,
            (Ok(_) | Err(_), _) => {
                // Another server may have mounted there meanwhile, and answers.
                let is_dead = mount::standing(path).is_ok_and(|it| it == Standing::Dead);
                return u8::from(is_dead && abandoned(path).is_err());
            }
        }
    };
    let (kind, words) = match outcome {
        Ok(Ended::Unused) => (UNUSED, String::new()),
        Ok(Ended::InUse) => (IN_USE, String::new()),
        Err(error) => (FAILED, system_words(&error)),
    };
    let mut answer = vec![kind];
    answer.extend(words.bytes().take(ANSWER_BYTES - 1));
    // A server that has ended meanwhile waits for nothing.
    let _gone = rustix::io::write(rustix::stdio::stdin(), &answer);
    u8::from(kind == FAILED)
}

fn carried_out(path: &Path) -> io::Result<Ended> {
    // Pages that programs have written by maps reach the server first.
    let synced = File::open(path).and_then(|file| file.sync_all());
    drop(synced);
    match unmount(path, Unmount::IfUnused) {
        Ok(()) => Ok(Ended::Unused),
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            unmount(path, Unmount::Lazily).map(|()| Ended::InUse)
        }
        // It was unmounted by others just now.
        Err(_) if !mount::is_own(path)? => Ok(Ended::Unused),
        Err(error) => Err(error),
    }
}

fn abandoned(path: &Path) -> io::Result<Ended> {
    if mount::is_own(path)? {
        unmount(path, Unmount::Lazily)?;
    }
    Ok(Ended::Unused)
}
