//! Servers of images, each a process of its own, so that the system counts for each alone what it
//! wrote and how long it computed.

use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use cowslip_console::error::{CommandError, failed};

use crate::peer_path;
use crate::run::{Running, run};

/// Owner of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `cowslip serve`, `cowslip mount`.
    Cowslip,
    /// qemu-storage-daemon.
    StorageDaemon,
    /// qemu-nbd.
    QemuNbd,
}

/// How clients reach a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// NBD on a Unix socket.
    Nbd,
    /// A vhost-user-blk device on a Unix socket.
    VhostUser,
    /// A file (FUSE).
    Fuse,
}

/// A disk as a server is asked for it.
#[derive(Clone, Debug)]
pub struct Export {
    /// The server.
    pub kind: Kind,
    /// How clients reach it.
    pub transport: Transport,
    /// The image.
    pub image: PathBuf,
    /// How the image is opened.
    pub page_cache: PageCache,
}

/// How image files are opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageCache {
    /// I/O through the page cache: the file system knows no O_DIRECT.
    Use,
    /// I/O with O_DIRECT.
    Bypass,
}

/// How a server asks the kernel for I/O.
#[derive(Clone, Copy)]
enum Aio {
    Uring,
    Threads,
}

impl Aio {
    fn name(self) -> &'static str {
        match self {
            Aio::Uring => "io_uring",
            Aio::Threads => "threads",
        }
    }
}

/// Costs of a server.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// CPU time, user and system.
    pub cpu_seconds: f64,
    /// Bytes that it sent to storage, or dirtied in the page cache; `None` if the system does not
    /// say.
    pub written_bytes: Option<u64>,
}

impl PageCache {
    /// Whether files in this directory can be opened with O_DIRECT.
    pub fn probe(directory: &Path) -> Result<PageCache, CommandError> {
        let direct = cowslip_testbed::supports_direct_io(directory).map_err(|e| {
            CommandError::new(format!("Could not write to '{}': {e}", directory.display()))
        })?;
        Ok(match direct {
            true => PageCache::Bypass,
            false => PageCache::Use,
        })
    }

    /// Its name on command lines.
    pub fn cache_mode(self) -> &'static str {
        match self {
            PageCache::Use => "writeback",
            PageCache::Bypass => "none",
        }
    }
}

impl Kind {
    /// Its name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Cowslip => "cowslip",
            Kind::StorageDaemon => "qemu-storage-daemon",
            Kind::QemuNbd => "qemu-nbd",
        }
    }

    /// QEMU's server, the faster one if both are there.
    pub fn installed_peer() -> Option<Kind> {
        [Kind::StorageDaemon, Kind::QemuNbd]
            .into_iter()
            .find(|kind| {
                let mut command = peer_path::command(kind.name());
                let outcome = command.arg("--version").stdout(Stdio::null()).status();
                outcome.is_ok_and(|status| status.success())
            })
    }
}

impl Export {
    /// The command that serves it at a path: a socket, or the file that shows the disk.
    fn command(&self, at: &Path, aio: Aio) -> Result<Command, CommandError> {
        let cache = format!("--cache={}", self.page_cache.cache_mode());
        let mut command = match self.kind {
            Kind::Cowslip => Command::new(crate::run::own_path()?),
            kind => peer_path::command(kind.name()),
        };
        match self.kind {
            Kind::Cowslip => {
                let (verb, option) = match self.transport {
                    Transport::Nbd => ("serve", "--socket"),
                    Transport::VhostUser => ("serve", "--vhost-user"),
                    Transport::Fuse => ("mount", "--foreground"),
                };
                command.args([verb, "--format=qcow2", &cache, "--discard=unmap", option]);
                match self.transport {
                    Transport::Fuse => command.arg(&self.image).arg(at),
                    _ => command.arg(at).arg(&self.image),
                };
            }
            Kind::QemuNbd => {
                command.args(["--persistent", "--format=qcow2", &cache]);
                command.arg(format!("--aio={}", aio.name()));
                command.args(["--discard=unmap", "--shared=8", "--socket"]);
                command.arg(at).arg(&self.image);
            }
            Kind::StorageDaemon => self.storage_daemon(&mut command, at, aio),
        }
        Ok(command)
    }

    fn storage_daemon(&self, command: &mut Command, at: &Path, aio: Aio) {
        let direct = match self.page_cache {
            PageCache::Use => "off",
            PageCache::Bypass => "on",
        };
        // Commas in values are doubled.
        let quote = |path: &Path| path.display().to_string().replace(',', ",,");
        let (image, at, aio) = (quote(&self.image), quote(at), aio.name());
        command.arg("--blockdev").arg(format!(
            "driver=file,node-name=file,filename={image},cache.direct={direct},aio={aio},discard=unmap"
        ));
        command.arg("--blockdev").arg(format!(
            "driver=qcow2,node-name=disk,file=file,cache.direct={direct},discard=unmap"
        ));
        let export = match self.transport {
            Transport::Nbd => {
                let address = format!("addr.type=unix,addr.path={at}");
                command.arg("--nbd-server").arg(address);
                "type=nbd,name=".to_string()
            }
            Transport::VhostUser => {
                // Adaptive polling is a thing of these threads.
                command.args(["--object", "iothread,id=thread"]);
                format!("type=vhost-user-blk,addr.type=unix,addr.path={at},iothread=thread")
            }
            Transport::Fuse => format!("type=fuse,mountpoint={at},growable=off"),
        };
        command.arg("--export");
        command.arg(format!("{export},id=export,node-name=disk,writable=on"));
    }
}

/// A running server; killed if it is dropped before it was stopped.
pub struct Server {
    process: Running,
    export: Export,
    /// The socket, or the file that shows the disk.
    at: PathBuf,
    aio: Aio,
}

impl Server {
    /// Serves an image on a socket or as a file in `directory`, and waits until clients can use it.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(export: Export, directory: &Path) -> Result<Server, CommandError> {
        let name = match export.transport {
            Transport::Fuse => "disk",
            _ => "socket",
        };
        let at = directory.join(name);
        if export.transport == Transport::Fuse {
            fs::write(&at, "").map_err(|e| failed("create", &at, &e))?;
        }
        let with = |aio| Server::start_with(&export, &at, aio);
        match with(Aio::Uring) {
            // QEMU without io_uring, or a kernel that forbids it.
            Err(_) if export.kind != Kind::Cowslip => with(Aio::Threads),
            outcome => outcome,
        }
    }

    fn start_with(export: &Export, at: &Path, aio: Aio) -> Result<Server, CommandError> {
        let process = Server::spawn(export, export.command(at, aio)?)?;
        let mut server = Server {
            process,
            export: export.clone(),
            at: at.to_path_buf(),
            aio,
        };
        server.wait_until_it_serves()?;
        Ok(server)
    }

    fn spawn(export: &Export, mut command: Command) -> Result<Running, CommandError> {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Running::start(export.kind.name(), command.stderr(Stdio::piped()))
    }

    fn serves(&self) -> bool {
        match self.export.transport {
            // Below the disk is an empty file.
            Transport::Fuse => fs::metadata(&self.at).is_ok_and(|file| file.len() > 0),
            _ => UnixStream::connect(&self.at).is_ok(),
        }
    }

    fn wait_until_it_serves(&mut self) -> Result<(), CommandError> {
        let start = Instant::now();
        while !self.serves() {
            if let Ok(Some(_)) = self.process.child.try_wait() {
                return Err(self.last_words());
            }
            if start.elapsed() > Duration::from_secs(10) {
                return Err(self.failure("does not serve"));
            }
            sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Kills it and starts another one in its place.
    ///
    /// # Errors
    /// It cannot be killed, or the other one does not start.
    pub fn kill_and_restart(&mut self) -> Result<(), CommandError> {
        let killed = self.process.child.kill();
        let killed = killed.and_then(|()| self.process.child.wait());
        killed.map_err(|e| self.failure(&format!("cannot be killed: {e}")))?;
        let command = self.export.command(&self.at, self.aio)?;
        self.process = Server::spawn(&self.export, command)?;
        self.wait_until_it_serves()
    }

    /// Starts a successor that takes over from it. The predecessor comes back: it serves until it
    /// ends by itself.
    ///
    /// # Errors
    /// The successor cannot be started.
    pub fn hand_over(&mut self) -> Result<Running, CommandError> {
        let mut command = self.export.command(&self.at, self.aio)?;
        let successor = Server::spawn(&self.export, {
            command.arg("--handover");
            command
        })?;
        Ok(std::mem::replace(&mut self.process, successor))
    }

    /// Returns the last messages of a server that has ended.
    fn last_words(&mut self) -> CommandError {
        let mut words = String::new();
        if let Some(mut stderr) = self.process.child.stderr.take()
            && std::io::Read::read_to_string(&mut stderr, &mut words).is_err()
        {
            words.push_str("(not UTF-8)");
        }
        self.failure(&format!("ended: {}", words.trim()))
    }

    fn failure(&self, what: &str) -> CommandError {
        self.process.failure(what)
    }

    /// Its socket, or the file that shows the disk.
    pub fn at(&self) -> &Path {
        &self.at
    }

    /// Returns its costs until now.
    pub fn cost_so_far(&self) -> Result<Cost, CommandError> {
        cost_of(self.process.child.id()).map_err(|e| self.is_silent(&e))
    }

    fn is_silent(&self, error: &io::Error) -> CommandError {
        self.failure(&format!("says nothing about itself: {error}"))
    }

    /// Ends it and returns all that it has cost, closing included: the figures of a process outlive
    /// it until its parent has asked for its status.
    pub fn stop(mut self) -> Result<Cost, CommandError> {
        self.process.signal(rustix::process::Signal::TERM)?;
        let start = Instant::now();
        let pid = self.process.child.id();
        let stat = || proc_file(pid, "stat").map_err(|e| self.is_silent(&e));
        while !fields_after_name(&stat()?)[0].starts_with('Z') {
            if start.elapsed() > Duration::from_secs(60) {
                return Err(self.failure("does not end"));
            }
            sleep(Duration::from_millis(2));
        }
        let cost = self.cost_so_far()?;
        let status = self.process.child.wait();
        if !status.is_ok_and(|status| status.success()) {
            return Err(self.last_words());
        }
        match fs::remove_file(&self.at) {
            // QEMU's servers leave their socket or remove it, by version.
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(self.failure(&format!("leaves '{}': {e}", self.at.display())))
            }
            _ => Ok(cost),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.export.transport == Transport::Fuse
            && let Ok(None) = self.process.child.try_wait()
            && let Ok(own) = crate::run::own_path()
        {
            // A file of a server that was killed would stay mounted.
            drop(run(Command::new(own)
                .args(["umount", "--lazy"])
                .arg(&self.at)));
        }
    }
}

/// Returns the costs of a process until now.
///
/// # Errors
/// The system does not say.
pub fn cost_of(pid: u32) -> io::Result<Cost> {
    let stat = proc_file(pid, "stat")?;
    let fields = fields_after_name(&stat);
    let ticks: u64 = fields[11..13]
        .iter()
        .filter_map(|f| f.parse::<u64>().ok())
        .sum();
    let io = proc_file(pid, "io").unwrap_or_default();
    Ok(Cost {
        cpu_seconds: ticks as f64 / rustix::param::clock_ticks_per_second() as f64,
        written_bytes: io
            .lines()
            .find_map(|line| line.strip_prefix("write_bytes: "))
            .and_then(|bytes| bytes.parse().ok()),
    })
}

fn proc_file(pid: u32, name: &str) -> io::Result<String> {
    fs::read_to_string(format!("/proc/{pid}/{name}"))
}

/// Fields of /proc/PID/stat from the third on, the state. The second, the name, may hold blanks.
fn fields_after_name(stat: &str) -> Vec<&str> {
    let rest = stat.rsplit(") ").next().unwrap_or_default();
    let mut fields: Vec<&str> = rest.split_whitespace().collect();
    fields.resize(fields.len().max(13), "0");
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_behind_a_name_with_blanks_and_parentheses() {
        let stat = "7 (a) b (c) Z 1 2 3 4 5 6 7 8 9 10 11 12 13";
        assert_eq!(fields_after_name(stat)[0], "Z");
        assert_eq!(fields_after_name(stat)[11..13], ["11", "12"]);
    }
}
