//! Servers of a test, on sockets of the file system.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::running::Running;
use std::time::{Duration, Instant};

/// Options of a daemon, ours or QEMU's, that exports the image `a.qcow2` as `e`.
pub const EXPORTED_DISK: [&str; 6] = [
    "--nbd-server",
    "addr.type=unix,addr.path=nbd",
    "--blockdev",
    "qcow2,node-name=a,file.driver=file,file.filename=a.qcow2",
    "--export",
    "nbd,id=e,node-name=a,writable=on",
];

/// A server, killed when it is dropped.
pub struct Server {
    child: Running,
    socket: PathBuf,
}

impl Server {
    /// Starts a server, and waits until it answers on this socket: one more connection, which the
    /// server must be able to bear (qemu-nbd with `-t`).
    pub fn start(command: &mut Command, socket: &Path) -> Server {
        Server::start_for(command, socket, |socket| UnixStream::connect(socket).ok()).0
    }

    /// Starts a server, and waits until there is a client. The first connection that the server
    /// accepts is the client's.
    pub fn start_for<T>(
        command: &mut Command,
        socket: &Path,
        mut client_of: impl FnMut(&Path) -> Option<T>,
    ) -> (Server, T) {
        // One that was killed leaves its socket.
        drop(std::fs::remove_file(socket));
        let command = command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = Running::start(command);
        let socket = socket.to_path_buf();
        let mut server = Server { child, socket };
        let begun = Instant::now();
        loop {
            if let Some(client) = client_of(&server.socket) {
                return (server, client);
            }
            let ended = server.child.try_wait().unwrap();
            assert!(ended.is_none(), "{command:?}: {ended:?}");
            assert!(begun.elapsed() < Duration::from_secs(30), "{command:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// QEMU's server of a raw file, with further words.
    pub fn of_qemu(file: &Path, socket: &Path, words: &[&str]) -> Server {
        let mut command = Command::new("qemu-nbd");
        command.args(["-t", "-f", "raw", "-k"]).arg(socket);
        Server::start(command.args(words).arg(file), socket)
    }

    /// Waits until it has ended by itself.
    pub fn wait(&mut self) {
        self.child.wait().unwrap();
    }

    /// Ends it in order.
    pub fn stop(mut self) {
        let number = i32::try_from(self.child.id()).unwrap();
        let process = rustix::process::Pid::from_raw(number).unwrap();
        rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
        self.wait();
    }

    /// The address of its only export.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
