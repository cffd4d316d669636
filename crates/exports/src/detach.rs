//! `--fork`: a server in the background, and a parent that ends when clients can connect.
//!
//! The program is started again rather than forked: that needs no `unsafe`, and works with any
//! number of threads. The server's standard output is the pipe through which it reports that it is
//! ready; until then its standard error is that of the parent.

use std::env;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use cowslip_console::output::Program;

/// Set in the environment of a server that a parent has started.
const SERVER_VARIABLE: &str = "COWSLIP_DETACHED_SERVER";

/// Whether the server leaves the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Daemonize {
    /// It stays.
    #[default]
    No,
    /// In a process of its own, detached from the terminal.
    Yes,
}

/// Role of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Serve in the foreground.
    Only,
    /// Start the server and wait until it is ready.
    Parent,
    /// Serve in the background.
    Server,
}

/// The role of this process.
pub fn role(daemonize: Daemonize) -> Role {
    match (daemonize, env::var_os(SERVER_VARIABLE)) {
        (Daemonize::No, _) => Role::Only,
        (Daemonize::Yes, None) => Role::Parent,
        (Daemonize::Yes, Some(_)) => Role::Server,
    }
}

/// Starts the server and waits until it is ready or has failed. Returns the exit code.
pub fn start_server(program: &Program) -> u8 {
    match try_start_server() {
        Ok(code) => code,
        Err(error) => {
            let words = cowslip::error::system_words(&error);
            program.complain(format_args!("Could not start the server: {words}"));
            1
        }
    }
}

fn try_start_server() -> io::Result<u8> {
    let mut args = env::args_os();
    let mut command = Command::new("/proc/self/exe");
    if let Some(name) = args.next() {
        command.arg0(name);
    }
    let mut server = command
        .args(args)
        .env(SERVER_VARIABLE, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut ready = server.stdout.take().expect("its output is a pipe");
    let mut byte = [0];
    if ready.read(&mut byte)? == 1 {
        return Ok(0);
    }
    let code = server.wait()?.code();
    Ok(code
        .and_then(|code| u8::try_from(code).ok())
        .filter(|code| *code != 0)
        .unwrap_or(1))
}

/// Means of a server in the background to leave its parent's session and streams; nothing in
/// others.
pub struct Detached {
    null: Option<File>,
}

impl Detached {
    /// Opens the files of [`Detached::report_ready`].
    ///
    /// # Errors
    /// The system's; then the server cannot go on.
    pub fn prepare(role: Role) -> io::Result<Detached> {
        let open_null = || File::options().read(true).write(true).open("/dev/null");
        let null = (role == Role::Server).then(open_null).transpose()?;
        Ok(Detached { null })
    }

    /// Says to the parent, if there is one, that clients can connect, and leaves its session and
    /// streams.
    ///
    /// # Errors
    /// The system's; then the server cannot go on.
    pub fn report_ready(self) -> io::Result<()> {
        let Some(null) = self.null else {
            return Ok(());
        };
        // A process that leads its group already cannot leave its session, and need not.
        let _session = rustix::process::setsid();
        // A parent that is gone does not wait.
        let _written = rustix::io::write(rustix::stdio::stdout(), b"\n");
        rustix::stdio::dup2_stdout(&null)?;
        rustix::stdio::dup2_stderr(&null)?;
        Ok(())
    }
}
