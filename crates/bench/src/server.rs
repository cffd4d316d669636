//! The servers of the demonstration, each a process of its own, so that the system counts for each
//! alone what it wrote and how long it computed.

use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use cowslip_console::error::CommandError;

use crate::run::Running;

/// Owner of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `cowslip serve`.
    Cowslip,
    /// The same, as a vhost-user-blk device.
    CowslipVhostUser,
    /// qemu-storage-daemon.
    StorageDaemon,
    /// qemu-nbd.
    QemuNbd,
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
            Kind::Cowslip | Kind::CowslipVhostUser => "cowslip",
            Kind::StorageDaemon => "qemu-storage-daemon",
            Kind::QemuNbd => "qemu-nbd",
        }
    }

    /// QEMU's server, the faster one if both are there.
    pub fn installed_peer() -> Option<Kind> {
        [Kind::StorageDaemon, Kind::QemuNbd]
            .into_iter()
            .find(|kind| {
                let mut command = Command::new(kind.name());
                let outcome = command.arg("--version").stdout(Stdio::null()).status();
                outcome.is_ok_and(|status| status.success())
            })
    }

    fn command(
        self,
        image: &Path,
        socket: &Path,
        (page_cache, aio): (PageCache, Aio),
    ) -> Result<Command, CommandError> {
        let cache = format!("--cache={}", page_cache.cache_mode());
        let aio_option = format!("--aio={}", aio.name());
        match self {
            Kind::Cowslip | Kind::CowslipVhostUser => {
                let transport = match self {
                    Kind::CowslipVhostUser => "--vhost-user",
                    _ => "--socket",
                };
                let mut command = Command::new(crate::run::own_path()?);
                command.args(["serve", "--format=qcow2", &cache, "--discard=unmap"]);
                command.arg(transport).arg(socket).arg(image);
                Ok(command)
            }
            Kind::QemuNbd => {
                let mut command = Command::new("qemu-nbd");
                command.args(["--persistent", "--format=qcow2", &cache, &aio_option]);
                command.args(["--discard=unmap", "--shared=8", "--socket"]);
                command.arg(socket).arg(image);
                Ok(command)
            }
            Kind::StorageDaemon => Ok(storage_daemon(image, socket, page_cache, aio)),
        }
    }
}

fn storage_daemon(image: &Path, socket: &Path, page_cache: PageCache, aio: Aio) -> Command {
    let direct = match page_cache {
        PageCache::Use => "off",
        PageCache::Bypass => "on",
    };
    // Commas in values are doubled.
    let quote = |path: &Path| path.display().to_string().replace(',', ",,");
    let mut command = Command::new("qemu-storage-daemon");
    command.arg("--blockdev").arg(format!(
        "driver=file,node-name=file,filename={},cache.direct={direct},aio={},discard=unmap",
        quote(image),
        aio.name()
    ));
    command.arg("--blockdev").arg(format!(
        "driver=qcow2,node-name=disk,file=file,cache.direct={direct},discard=unmap"
    ));
    command.arg("--nbd-server");
    command.arg(format!("addr.type=unix,addr.path={}", quote(socket)));
    command.arg("--export");
    command.arg("type=nbd,id=export,node-name=disk,name=,writable=on");
    command
}

/// A running server; killed if it is dropped before it was stopped.
pub struct Server {
    process: Running,
    socket: PathBuf,
}

impl Server {
    /// Serves `image` on a socket in `directory` and waits until clients can connect.
    pub fn start(
        kind: Kind,
        image: &Path,
        directory: &Path,
        page_cache: PageCache,
    ) -> Result<Server, CommandError> {
        let socket = directory.join("socket");
        let with = |aio| Server::start_with(kind, image, &socket, (page_cache, aio));
        match with(Aio::Uring) {
            // QEMU without io_uring, or a kernel that forbids it.
            Err(_) if !matches!(kind, Kind::Cowslip | Kind::CowslipVhostUser) => with(Aio::Threads),
            outcome => outcome,
        }
    }

    fn start_with(
        kind: Kind,
        image: &Path,
        socket: &Path,
        how: (PageCache, Aio),
    ) -> Result<Server, CommandError> {
        let mut command = kind.command(image, socket, how)?;
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut server = Server {
            process: Running::start(kind.name(), command.stderr(Stdio::piped()))?,
            socket: socket.to_path_buf(),
        };
        server.wait_until_it_listens()?;
        Ok(server)
    }

    fn wait_until_it_listens(&mut self) -> Result<(), CommandError> {
        let start = Instant::now();
        while UnixStream::connect(&self.socket).is_err() {
            if let Ok(Some(_)) = self.process.child.try_wait() {
                return Err(self.last_words());
            }
            if start.elapsed() > Duration::from_secs(10) {
                return Err(self.failure("does not listen"));
            }
            sleep(Duration::from_millis(2));
        }
        Ok(())
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

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
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
        match fs::remove_file(&self.socket) {
            // QEMU's servers leave their socket or remove it, by version.
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(self.failure(&format!("leaves its socket: {e}")))
            }
            _ => Ok(cost),
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
