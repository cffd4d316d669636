//! A process that unmounts the file of a server.
//!
//! It is this program again, outside of the server's sandbox, and has one end of a socket for its
//! standard input. It waits there for the order to unmount; without one it ends with the server and
//! does nothing: a mount whose server was killed gives errors to those who use it, which is better
//! than an empty file that takes their data.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use cowslip::error::system_words;
use cowslip_fuse::{Unmount, unmount};
use cowslip_queue::{BufMut, Stream};

/// The option of `umount` by which a server starts it.
pub const OPTION: &str = "--for-server";

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
        })
    }

    /// Unmounts. The file has to be served until then.
    ///
    /// # Errors
    /// The reason in words.
    pub async fn unmount(&self) -> Result<Ended, String> {
        let words = |error: io::Error| system_words(&error);
        let order = cowslip_queue::Buf::copy_of(b"u");
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
        match answer.split_first() {
            Some((&UNUSED, _)) => Ok(Ended::Unused),
            Some((&IN_USE, _)) => Ok(Ended::InUse),
            Some((_, why)) => Err(String::from_utf8_lossy(why).into_owned()),
            None => Err("the process for that has ended".to_string()),
        }
    }
}

/// The process itself. Returns the exit code.
pub fn run(path: &Path) -> u8 {
    let mut order = [0];
    if !matches!(io::stdin().read(&mut order), Ok(1)) {
        return 0;
    }
    let (kind, words) = match carried_out(path) {
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
        Err(_) if !cowslip_fuse::mount::is_own(path)? => Ok(Ended::Unused),
        Err(error) => Err(error),
    }
}
