//! Processes that end with their test.

use std::ops::{Deref, DerefMut};
use std::process::{Child, Command};

use rustix::process::{Pid, Signal, kill_process};

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
