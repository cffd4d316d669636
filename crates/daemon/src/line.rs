//! The command line of a daemon: the same commands as clients send, and the doors for clients.
//!
//! Options are followed in the order of the line, as by qemu-storage-daemon: an export names a node
//! that was added before it.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use cowslip::error::system_words;
use cowslip_cmdline::{open, text_file};
use cowslip_console::error::CommandError;
use cowslip_console::options;
use cowslip_console::output::is_called_as_qemu;
use cowslip_exports::nbd::Listening;
use cowslip_exports::sandbox::{self, Mode, Rights};
use cowslip_exports::{Daemonize, LogFormat, SocketName, Verbosity};
use cowslip_nbd::remote::Address;
use cowslip_qmp::{QmpError, Schema};
use cowslip_queue::{Listener, Stream};
use rustix::fs::Gid;

use super::given::Given;
use super::host::Daemon;
use super::http::{self, Figures};
use super::stdio::Stdio;
use super::supervisor::{Passed, passed_sockets};
use super::words::complaint;

/// A step that the line asks for, with the value of its option.
#[derive(Clone, Debug)]
pub enum Step {
    /// `--object`.
    Object(String),
    /// `--blockdev`.
    Node(String),
    /// `--nbd-server`.
    NbdServer(String),
    /// `--export`.
    Export(String),
    /// `--chardev`.
    Chardev(String),
    /// `--monitor`.
    Monitor(String),
    /// `--control`.
    Control(PathBuf),
    /// `--metrics`.
    Metrics(String),
    /// An argument that is no option.
    Operand(String),
}

/// A command line that was read.
#[derive(Clone, Debug)]
pub struct Line {
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// The file for the process number.
    pub pidfile: Option<PathBuf>,
    /// Whether to go into the background.
    pub daemonize: Daemonize,
    /// The events that are reported.
    pub verbosity: Verbosity,
    /// The form of reports.
    pub log_format: LogFormat,
    /// Members of this group may connect to sockets for clients of the control protocol.
    pub monitor_group: Option<Gid>,
    /// The sandbox, if anything is said about it, and the directories that files lie in.
    pub sandbox: (Option<Mode>, Vec<PathBuf>),
}

/// Ways of clients of the control protocol to the daemon.
#[derive(Default)]
pub struct Doors {
    /// Sockets that are listened on.
    pub listeners: Vec<Listener>,
    /// Their names, which vanish with this.
    pub names: Vec<SocketName>,
    /// A client that is there already.
    pub connected: Vec<Stream>,
    /// Standard input and output, if they are a client.
    pub stdio: Option<Stdio>,
    chardevs: Vec<Chardev>,
    /// Members of this group may connect.
    group: Option<Gid>,
    is_confined: bool,
    /// The file for the process number, if it had to be opened before its time.
    pub pidfile: Option<File>,
}

/// A way for a monitor, by its ID.
struct Chardev {
    id: String,
    way: Way,
    is_used: bool,
}

enum Way {
    Socket(PathBuf),
    /// A socket that the client listens on.
    Client(PathBuf),
    Stdio,
}

impl Step {
    /// Whether it opens files that are not named by an option for doors.
    fn opens_images(&self) -> bool {
        matches!(self, Step::Node(_) | Step::Export(_) | Step::Operand(_))
    }

    /// The option with its value, for messages. Objects have secrets.
    fn words(&self) -> String {
        match self {
            Step::Object(_) => "--object".to_string(),
            Step::Node(text) => format!("--blockdev {text}"),
            Step::NbdServer(text) => format!("--nbd-server {text}"),
            Step::Export(text) => format!("--export {text}"),
            Step::Chardev(text) => format!("--chardev {text}"),
            Step::Monitor(text) => format!("--monitor {text}"),
            Step::Control(path) => format!("--control {}", path.display()),
            Step::Metrics(text) => format!("--metrics {text}"),
            Step::Operand(text) => text.clone(),
        }
    }
}

/// Arguments of a type from the text of an option.
fn arguments(kind: &str, implied: Option<&str>, text: &str) -> Result<Given, CommandError> {
    let members = Schema::of_daemon().object_of_text(kind, implied, text);
    members
        .map(Given)
        .map_err(|error: QmpError| complaint(&error))
}

/// Follows a line. Clients can connect from then on.
///
/// # Errors
/// The first step that cannot be done.
pub async fn follow(daemon: &Rc<Daemon>, line: &Line) -> Result<Doors, CommandError> {
    if let (None, [directory, ..]) = (line.sandbox.0, line.sandbox.1.as_slice()) {
        let directory = directory.display();
        return Err(CommandError::new(format!(
            "--sandbox-dir {directory}: without --sandbox=on or --sandbox=auto nothing would be \
             confined to it"
        )));
    }
    let is_verbose = matches!(line.verbosity, Verbosity::Everything);
    if is_verbose && matches!(line.daemonize, Daemonize::Yes) {
        return Err(CommandError::new(
            "--verbose: in the background (--daemonize) nobody would see the reports; a service \
             manager keeps those of a daemon in the foreground",
        ));
    }
    let mut doors = Doors {
        group: line.monitor_group,
        ..Doors::default()
    };
    doors.take_passed(daemon)?;
    for step in &line.steps {
        if step.opens_images() {
            doors.confine(daemon, line)?;
        }
        let done = match step {
            Step::Object(text) => open::object::define(text),
            Step::Node(text) => {
                let kind = ("BlockdevOptions", Some("driver"));
                execute(daemon, "blockdev-add", kind, text).await
            }
            Step::NbdServer(text) => {
                execute(daemon, "nbd-server-start", ("NbdServerOptions", None), text).await
            }
            Step::Export(text) => {
                let kind = ("BlockExportOptions", Some("type"));
                execute(daemon, "block-export-add", kind, text).await
            }
            Step::Chardev(text) => doors.define(text, line.daemonize),
            Step::Monitor(text) => doors.open_monitor(text),
            Step::Control(path) => doors.listen(path),
            Step::Metrics(text) => doors.show_metrics(daemon, text),
            Step::Operand(_) => Err(CommandError::new("Unexpected argument")),
        };
        done.map_err(|why| CommandError::new(format!("{}: {why}", step.words())))?;
    }
    doors.confine(daemon, line)?;
    // QEMU's daemon runs all the same.
    if !is_called_as_qemu() && !doors.lead_in(daemon) {
        return Err(CommandError::new(
            "Nobody could reach the daemon: --control, --monitor, --export or --nbd-server is \
             needed",
        ));
    }
    Ok(doors)
}

async fn execute(
    daemon: &Rc<Daemon>,
    command: &str,
    (kind, implied): (&str, Option<&str>),
    text: &str,
) -> Result<(), CommandError> {
    let given = arguments(kind, implied, text)?;
    let done = daemon.change(command, &given).await;
    done.map(drop).map_err(|error| complaint(&error))
}

impl Doors {
    /// Whether anybody can reach the daemon, or a disk of it.
    fn lead_in(&self, daemon: &Daemon) -> bool {
        let has_clients = !self.listeners.is_empty() || !self.connected.is_empty();
        has_clients || !daemon.exports.all().is_empty() || daemon.exports.nbd().is_ok()
    }

    /// Takes the sockets that a service manager has passed: `metrics` by this name, all others for
    /// clients of the control protocol.
    fn take_passed(&mut self, daemon: &Rc<Daemon>) -> Result<(), CommandError> {
        for Passed { fd, name } in passed_sockets()? {
            let listener = Listener::from_listening(fd).map_err(|error| {
                let why = system_words(&error);
                CommandError::new(format!(
                    "Could not listen on the passed socket '{name}': {why}"
                ))
            })?;
            match name.as_str() {
                "metrics" => serve_metrics(daemon, listener),
                _ => self.listeners.push(listener),
            }
        }
        Ok(())
    }

    /// Closes the sandbox, if one is asked for: from now on files are opened in its directories,
    /// and those that clients pass.
    fn confine(&mut self, daemon: &Daemon, line: &Line) -> Result<(), CommandError> {
        let (mode, directories) = &line.sandbox;
        let mode = mode.unwrap_or(Mode::Off);
        if mode == Mode::Off || std::mem::replace(&mut self.is_confined, true) {
            return Ok(());
        }
        let mut rights = Rights::within(directories.clone());
        let names = self.names.iter().map(|name| name.path().to_path_buf());
        rights.removed.extend(names);
        if let Some(path) = &line.pidfile {
            let opened = text_file::open_for_later(path, 0o600, "create", &Default::default())?;
            self.pidfile = Some(opened);
            rights.removed.push(path.clone());
        }
        for directory in directories {
            // One that is not there cannot be allowed.
            std::fs::metadata(directory).map_err(|error| {
                let (name, why) = (directory.display(), system_words(&error));
                CommandError::new(format!("--sandbox-dir {name}: {why}"))
            })?;
        }
        if let Some(report) = sandbox::enforce(mode, &rights)? {
            daemon.is_confined.set(true);
            daemon.allowed.replace(directories.clone());
            daemon.log.sandbox(&report.to_string(), report.is_whole());
        }
        Ok(())
    }

    fn listen(&mut self, path: &Path) -> Result<(), CommandError> {
        let (listener, name) = SocketName::bind_private(path, self.group)?;
        self.listeners.push(listener);
        self.names.push(name);
        Ok(())
    }

    fn show_metrics(&mut self, daemon: &Rc<Daemon>, text: &str) -> Result<(), CommandError> {
        let Listening { listener, name } = Listening::on(&metrics_address(text)?)?;
        self.names.extend(name);
        serve_metrics(daemon, listener);
        Ok(())
    }

    fn define(&mut self, text: &str, daemonize: Daemonize) -> Result<(), CommandError> {
        let refuse = |text: String| Err(CommandError::new(text));
        let (id, way) = chardev(text)?;
        if self.chardevs.iter().any(|other| other.id == id) {
            return refuse(format!("Duplicate ID '{id}' for chardev"));
        }
        if matches!(way, Way::Stdio) {
            if daemonize == Daemonize::Yes {
                return refuse("cannot use stdio with --daemonize".to_string());
            }
            let is_stdio = |other: &Chardev| matches!(other.way, Way::Stdio);
            if self.chardevs.iter().any(is_stdio) {
                return refuse("cannot use stdio by multiple character devices".to_string());
            }
        }
        let is_used = false;
        self.chardevs.push(Chardev { id, way, is_used });
        Ok(())
    }

    fn open_monitor(&mut self, text: &str) -> Result<(), CommandError> {
        let refuse = |text: String| Err(CommandError::new(text));
        let given = arguments("MonitorOptions", Some("chardev"), text)?;
        let id = given.text("chardev").unwrap_or_default();
        let found = self.chardevs.iter_mut().find(|it| it.id == id);
        let Some(chardev) = found else {
            return refuse(format!("chardev \"{id}\" not found"));
        };
        if given.text("mode").is_some_and(|mode| mode != "control") {
            return refuse("only mode=control is supported".to_string());
        }
        if std::mem::replace(&mut chardev.is_used, true) {
            return refuse(format!("Device '{id}' is in use"));
        }
        match &chardev.way {
            Way::Socket(path) => {
                let path = path.clone();
                self.listen(&path)
            }
            Way::Client(path) => {
                let connected = UnixStream::connect(path).map_err(|error| {
                    let (path, why) = (path.display(), system_words(&error));
                    CommandError::new(format!("Failed to connect to '{path}': {why}"))
                })?;
                self.connected.push(Stream::from_fd(connected.into()));
                Ok(())
            }
            Way::Stdio => {
                let connected = Stdio::connect();
                let (stream, stdio) =
                    connected.map_err(|error| CommandError::new(system_words(&error)))?;
                self.connected.push(stream);
                self.stdio = Some(stdio);
                Ok(())
            }
        }
    }
}

fn serve_metrics(daemon: &Rc<Daemon>, listener: Listener) {
    let daemon = Rc::clone(daemon);
    let figures: Figures = Rc::new(move || daemon.metrics());
    cowslip_queue::spawn(http::serve(listener, figures));
}

/// Reads the name of a group of the host, or its number.
///
/// # Errors
/// There is no such group in `/etc/group`.
pub fn group(text: &str) -> Result<Gid, String> {
    if let Ok(number) = text.parse() {
        return Ok(Gid::from_raw(number));
    }
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let number = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let is_it = fields.next() == Some(text);
        let number = fields.nth(1)?.parse().ok()?;
        is_it.then_some(number)
    });
    let number = number.ok_or_else(|| format!("there is no group '{text}' in /etc/group"))?;
    Ok(Gid::from_raw(number))
}

/// Reads `HOST:PORT`, or the path of a Unix socket.
fn metrics_address(text: &str) -> Result<Address, CommandError> {
    if text.contains('/') {
        return Ok(Address::Unix(PathBuf::from(text)));
    }
    let Some((host, port)) = text.rsplit_once(':') else {
        let text = "it has to be HOST:PORT, or the path of a Unix socket with a slash";
        return Err(CommandError::new(text));
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    Ok(Address::Tcp {
        host: match host {
            "" => "localhost".to_string(),
            host => host.to_string(),
        },
        port: port.to_string(),
    })
}

/// Reads `socket,id=ID,path=PATH,server=on,wait=off`, the same without `server` for a socket that
/// is connected to, or `stdio,id=ID`.
fn chardev(text: &str) -> Result<(String, Way), CommandError> {
    let refuse = |text: String| Err(CommandError::new(text));
    let first = text.split(',').next().unwrap_or_default();
    let text = match first.contains('=') {
        true => text.to_string(),
        false => format!("backend={text}"),
    };
    let pairs = options::split(&text)?;
    let value = |name| options::value(&pairs, name);
    let Some(id) = value("id") else {
        return refuse("chardev: no id specified".to_string());
    };
    let known: &[&str] = match value("backend") {
        None => return refuse(format!("chardev: \"{id}\" missing backend")),
        Some("socket") => &["path", "server", "wait"],
        Some("stdio") => &["signal"],
        Some(other) => {
            return refuse(format!(
                "chardevs of type '{other}' are not supported; socket and stdio are"
            ));
        }
    };
    let is_known = |name: &str| ["id", "backend"].contains(&name) || known.contains(&name);
    if let Some((name, _)) = pairs.iter().find(|(name, _)| !is_known(name)) {
        return refuse(format!("Invalid parameter '{name}'"));
    }
    for name in ["server", "wait", "signal"] {
        if let Some(text) = value(name) {
            options::switch(name, text)?;
        }
    }
    if value("backend") == Some("stdio") {
        return Ok((id.to_string(), Way::Stdio));
    }
    let is_server = value("server").map(|text| options::switch("server", text));
    let is_server = is_server.transpose()?.unwrap_or(false);
    match (value("path"), is_server) {
        (Some(path), true) => Ok((id.to_string(), Way::Socket(PathBuf::from(path)))),
        (Some(path), false) => Ok((id.to_string(), Way::Client(PathBuf::from(path)))),
        _ => refuse(format!("it has to be socket,id={id},path=PATH")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_and_standard_streams_are_chardevs() {
        let (id, way) = chardev("socket,path=/run/a,,b,server=on,wait=off,id=c").unwrap();
        assert!(matches!(way, Way::Socket(path) if path == Path::new("/run/a,b")));
        assert_eq!(id, "c");
        // In the older way.
        let (_, way) = chardev("socket,id=c,path=/run/a,server,nowait").unwrap();
        assert!(matches!(way, Way::Socket(_)));
        for text in [
            "socket,path=/run/a,id=c",
            "socket,path=/run/a,server=off,id=c",
        ] {
            let (_, way) = chardev(text).unwrap();
            assert!(matches!(way, Way::Client(_)));
        }
        let (id, way) = chardev("stdio,id=s,signal=off").unwrap();
        assert!(matches!(way, Way::Stdio));
        assert_eq!(id, "s");
    }

    #[test]
    fn other_chardevs_are_refused() {
        for (text, why) in [
            ("socket,path=/run/a,server=on", "no id"),
            ("path=/run/a,id=c", "missing backend"),
            ("socket,server=on,id=c", "path=PATH"),
            ("socket,path=/run/a,server=maybe,id=c", "server"),
            ("socket,host=::,port=1,server=on,id=c", "'host'"),
            ("pty,id=c", "'pty'"),
            ("socket,,id=c", "no id"),
        ] {
            let error = chardev(text).err().expect(text).to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
