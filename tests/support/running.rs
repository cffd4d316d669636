//! Processes that end with their test.

use std::io::{BufRead, BufReader, Read};
use std::ops::{Deref, DerefMut};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// Runs a command that prints its progress as JSON, and sends it a signal, by which it has to end,
/// when it has reported some of its work. Returns the lines that it has said apart from that.
pub fn signalled(mut command: Command, signal: Signal) -> Vec<String> {
    let line = format!("{command:?}");
    let piped = command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut progress = String::new();
    while !progress.contains("\"done\":") || progress.contains("\"done\":0,") {
        progress.clear();
        let read = stderr.read_line(&mut progress).unwrap();
        assert!(read > 0, "{line}: it ended without having begun");
    }
    kill_process(Pid::from_child(&child), signal).unwrap();
    let mut said = String::new();
    stderr.read_to_string(&mut said).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.signal(), Some(signal.as_raw()), "{line}: {said}");
    let said = said.lines().filter(|line| !line.starts_with('{'));
    said.map(str::to_string).collect()
}

/// A process, killed and waited for when this is dropped.
pub struct Running(Child);

impl Running {
    /// Starts a program.
    pub fn start(command: &mut Command) -> Running {
        let child = command.spawn();
        Running(child.unwrap_or_else(|e| panic!("cannot run {command:?}: {e}")))
    }

    /// Sends a signal. The process may have ended, but has not been waited for.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Deref for Running {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Running {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}
