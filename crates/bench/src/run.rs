//! A program, run to its end: its time and the resources that the system accounts to it.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use cowslip_console::error::CommandError;
use cowslip_console::interrupt::KilledOnInterrupt;
use cowslip_console::output::print_error;
use rustix::process::{Pid, Signal, kill_process};
use wait4::Wait4;

/// Costs of a run, from its start to its end.
#[derive(Clone, Debug)]
pub struct Run {
    /// Elapsed time.
    pub seconds: f64,
    /// CPU time, user and system.
    pub cpu_seconds: f64,
    /// The most memory that it had at a time.
    pub peak_rss_bytes: u64,
    /// Its standard output.
    pub output: String,
}

/// Where this program is: it is run as its users run it.
///
/// # Errors
/// The system does not say.
pub fn own_path() -> Result<PathBuf, CommandError> {
    std::env::current_exe()
        .map_err(|e| CommandError::new(format!("Could not find this program: {e}")))
}

/// Runs a program that must succeed.
///
/// # Errors
/// It cannot be run, or fails: what it said.
pub fn run(command: &mut Command) -> Result<Run, CommandError> {
    let name = command.get_program().to_string_lossy().into_owned();
    let failed = |e: std::io::Error| {
        let words = cowslip::error::system_words(&e);
        CommandError::new(format!("Could not run '{name}': {words}"))
    };
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = Instant::now();
    let mut child = command.spawn().map_err(failed)?;
    let killed = KilledOnInterrupt::new(&child);
    let output = read_all(&mut child).map_err(failed)?;
    let used = child.wait4().map_err(failed)?;
    drop(killed);
    let seconds = start.elapsed().as_secs_f64();
    if !used.status.success() {
        return Err(CommandError::new(format!(
            "{command:?}: {}\n{}",
            used.status,
            output.1.trim()
        )));
    }
    let cpu = used.rusage.utime + used.rusage.stime;
    Ok(Run {
        seconds,
        cpu_seconds: cpu.as_secs_f64(),
        peak_rss_bytes: used.rusage.maxrss,
        output: output.0,
    })
}

/// Standard output and standard error. One after the other: nobody here says so much that the
/// second pipe could fill up meanwhile.
fn read_all(child: &mut Child) -> std::io::Result<(String, String)> {
    let mut texts = (String::new(), String::new());
    if let Some(mut stdout) = child.stdout.take() {
        stdout.read_to_string(&mut texts.0)?;
    }
    if let Some(mut stderr) = child.stderr.take() {
        stderr.read_to_string(&mut texts.1)?;
    }
    Ok(texts)
}

/// Runs a program under strace and counts its system calls, those of all its threads.
///
/// # Errors
/// As [`run`]; strace is not there, or says something else.
pub fn system_calls(command: &Command, scratch: &Path) -> Result<u64, CommandError> {
    let summary = scratch.join("system-calls");
    let mut traced = Command::new("strace");
    traced.args(["-f", "-qq", "-c", "-o"]).arg(&summary);
    traced.arg(command.get_program()).args(command.get_args());
    run(&mut traced)?;
    let text = std::fs::read_to_string(&summary).unwrap_or_default();
    if std::fs::remove_file(&summary).is_err() {
        return Err(CommandError::new("strace left no summary"));
    }
    // "100.00    0.012345          12      1034         3 total"; errors may be missing.
    let total = text.lines().rev().find(|line| line.ends_with(" total"));
    let calls = total.and_then(|line| line.split_whitespace().nth(3)?.parse().ok());
    calls.ok_or_else(|| CommandError::new(format!("strace says:\n{text}")))
}

/// A process that does not outlive this value, however that ends.
pub struct Running {
    name: &'static str,
    /// The process.
    pub child: Child,
    _killed: KilledOnInterrupt,
}

impl Running {
    /// Starts it.
    ///
    /// # Errors
    /// It cannot be run.
    pub fn start(name: &'static str, command: &mut Command) -> Result<Running, CommandError> {
        let child = command.spawn();
        let child = child.map_err(|e| {
            let words = cowslip::error::system_words(&e);
            CommandError::new(format!("Could not run {name}: {words}"))
        })?;
        Ok(Running {
            name,
            _killed: KilledOnInterrupt::new(&child),
            child,
        })
    }

    /// Returns the error that it has ended so, or does something else that it should not.
    pub fn failure(&self, what: &str) -> CommandError {
        CommandError::new(format!("{} {what}", self.name))
    }

    /// Sends it a signal, unless it has ended.
    ///
    /// # Errors
    /// The system's.
    pub fn signal(&self, signal: Signal) -> Result<(), CommandError> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        match kill_process(pid.expect("a child has a process number"), signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(self.failure(&format!("cannot be stopped: {e}"))),
        }
    }

    /// Waits for its end, which must be a success.
    ///
    /// # Errors
    /// How else it ended.
    pub fn wait(mut self) -> Result<(), CommandError> {
        match self.child.wait() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(self.failure(&format!("ends with {status}"))),
            Err(e) => Err(self.failure(&format!("cannot be waited for: {e}"))),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait()
            && self.child.kill().and_then(|()| self.child.wait()).is_err()
        {
            print_error(&format!("cowslip: {} runs on\n", self.name));
        }
    }
}
