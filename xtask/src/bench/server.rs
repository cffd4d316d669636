//! The servers that are compared, with the same options: O_DIRECT, io_uring, discards passed on.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::run;

/// Which server.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `cowslip serve`.
    Cowslip,
    /// qemu-storage-daemon.
    StorageDaemon,
    /// qemu-nbd.
    QemuNbd,
}

impl Kind {
    /// Its name in tables and results.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Cowslip => "cowslip",
            Kind::StorageDaemon => "qemu-storage-daemon",
            Kind::QemuNbd => "qemu-nbd",
        }
    }

    /// Ours and those of QEMU's that are there.
    pub fn installed(binary: &Path) -> Vec<Kind> {
        println!("cowslip: {}", binary.display());
        let mut kinds = vec![Kind::Cowslip];
        for kind in [Kind::StorageDaemon, Kind::QemuNbd] {
            if run::find_program(kind.name()).is_none() {
                eprintln!("xtask: {} is not installed and is left out", kind.name());
                continue;
            }
            if let Ok(version) = run::output(Command::new(kind.name()).arg("--version")) {
                println!("{}", version.lines().next().unwrap_or_default());
            }
            kinds.push(kind);
        }
        kinds
    }

    fn command(self, binary: &Path, image: &Path, socket: &Path) -> Command {
        let (image, socket) = (image.display(), socket.display());
        match self {
            Kind::Cowslip => {
                let mut command = Command::new(binary);
                command.args(["serve", "--cache=none", "--aio=io_uring", "--discard=unmap"]);
                command.arg("--format=qcow2");
                command
                    .arg(format!("--socket={socket}"))
                    .arg(image.to_string());
                command
            }
            Kind::QemuNbd => {
                let mut command = Command::new("qemu-nbd");
                command.args([
                    "--persistent",
                    "--cache=none",
                    "--aio=io_uring",
                    "--discard=unmap",
                ]);
                command.args(["--shared=8", "--format=qcow2"]);
                command
                    .arg(format!("--socket={socket}"))
                    .arg(image.to_string());
                command
            }
            Kind::StorageDaemon => {
                let file = format!(
                    "driver=file,node-name=file,filename={image},cache.direct=on,aio=io_uring,discard=unmap"
                );
                let mut command = Command::new("qemu-storage-daemon");
                command.args(["--blockdev", &file]);
                command.args([
                    "--blockdev",
                    "driver=qcow2,node-name=disk,file=file,cache.direct=on,discard=unmap",
                ]);
                command.arg("--nbd-server");
                command.arg(format!("addr.type=unix,addr.path={socket}"));
                command.args([
                    "--export",
                    "type=nbd,id=export,node-name=disk,name=,writable=on",
                ]);
                command
            }
        }
    }
}

/// A running server; stopped by force if it is dropped.
pub struct Server {
    kind: Kind,
    child: Child,
    socket: PathBuf,
}

impl Server {
    /// Starts it and waits until it listens.
    pub fn start(kind: Kind, binary: &Path, image: &Path, socket: &Path) -> Result<Server, String> {
        let mut command = kind.command(binary, image, socket);
        let child = command
            .stdin(Stdio::null())
            .spawn()
            .map_err(|e| format!("cannot run {}: {e}", run::describe(&command)))?;
        let mut server = Server {
            kind,
            child,
            socket: socket.to_path_buf(),
        };
        let start = Instant::now();
        while UnixStream::connect(socket).is_err() {
            if let Ok(Some(status)) = server.child.try_wait() {
                return Err(format!("{}: {status}", run::describe(&command)));
            }
            if start.elapsed() > Duration::from_secs(20) {
                return Err(format!("{} does not listen", kind.name()));
            }
            sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    /// CPU time that it has used so far, user and system, all threads.
    pub fn cpu_seconds(&self) -> Result<f64, String> {
        let text = fs::read_to_string(format!("/proc/{}/stat", self.child.id()))
            .map_err(|e| format!("{} is gone: {e}", self.kind.name()))?;
        // The second field, the name in parentheses, may hold blanks; utime and stime are 14 and 15.
        let after_name = text.rsplit(") ").next().unwrap_or_default();
        let ticks: u64 = after_name
            .split(' ')
            .skip(11)
            .take(2)
            .filter_map(|field| field.parse::<u64>().ok())
            .sum();
        #[expect(clippy::cast_precision_loss, reason = "ticks of one short run")]
        let seconds = ticks as f64 / rustix::param::clock_ticks_per_second() as f64;
        Ok(seconds)
    }

    /// Asks it to end and waits until it has.
    pub fn stop(mut self) -> Result<(), String> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.expect("a child has a process id");
        kill_process(pid, Signal::TERM).map_err(|e| format!("{}: {e}", self.kind.name()))?;
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(60) {
            match self.child.try_wait() {
                Ok(None) => sleep(Duration::from_millis(5)),
                // QEMU's servers take the socket away or leave it, by version.
                Ok(Some(_)) => return self.remove_socket(),
                Err(error) => return Err(error.to_string()),
            }
        }
        Err(format!("{} does not end", self.kind.name()))
    }

    fn remove_socket(&self) -> Result<(), String> {
        match fs::remove_file(&self.socket) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.to_string()),
            _ => Ok(()),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let killed = self.child.kill().and_then(|()| self.child.wait());
            if let Err(error) = killed {
                eprintln!("xtask: {}: {error}", self.kind.name());
            }
        }
    }
}
