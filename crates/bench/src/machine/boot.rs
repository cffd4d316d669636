//! A running guest: QEMU with our kernel, our archive and one disk.
//!
//! The guest's second serial port is QEMU's standard input and output, for commands and replies
//! ([`super::init`]). Its console is QEMU's standard error, so that messages of QEMU and of the
//! guest are reported together when something fails. Every wait has a limit; a guest that is
//! dropped is killed.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::{ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::spawn;
use std::time::{Duration, Instant};

use cowslip_console::error::CommandError;
use serde_json::Value;

use super::init::{READY, VERB};
use super::{Accelerator, Machine, QEMU};
use crate::run::Running;
use crate::server::cost_of;

/// Processors. The load is one thread's; what the guest's kernel does beside it is little.
pub const PROCESSORS: u32 = 1;
/// Memory in MiB of a guest without tools: the archive, packed and unpacked, and the kernel.
pub const MEMORY_MIB: u32 = 512;
/// Bytes of the guest's console output that are kept for error messages.
const CONSOLE_BYTES_MAX: usize = 4096;
/// Turning off takes a moment; on a busy machine, without KVM, a few.
const OFF_WITHIN: Duration = Duration::from_secs(60);

/// A guest's disk.
#[derive(Clone, Debug)]
pub enum GuestDisk {
    /// A virtio-blk device of QEMU's over this `-blockdev`, whose node is `disk`.
    Block(Value),
    /// A vhost-user-blk device at this socket. If the server ends, QEMU connects to the next one.
    VhostUser(PathBuf),
}

/// A guest that takes orders; killed if it is dropped.
pub struct Guest {
    qemu: Running,
    orders: ChildStdin,
    answers: Receiver<String>,
    console: Arc<Mutex<String>>,
}

impl Guest {
    /// Boots one with this disk, and waits until it takes orders.
    ///
    /// # Errors
    /// QEMU cannot be run, or the guest does not come up within `limit`.
    pub fn boot(
        machine: &Machine,
        disk: &GuestDisk,
        limit: Duration,
    ) -> Result<Guest, CommandError> {
        let mut command = command(machine, disk);
        command.stdin(Stdio::piped());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut qemu = Running::start(QEMU, &mut command)?;
        let child = &mut qemu.child;
        let (Some(orders), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            unreachable!("the streams are pipes");
        };
        let console = Arc::default();
        keep_console(stderr, Arc::clone(&console));
        let mut guest = Guest {
            qemu,
            orders,
            answers: lines_of(stdout),
            console,
        };
        guest.output(limit).map(|_| guest)
    }

    /// Runs this program in the guest with these words, none of which has a blank, or another one
    /// if the first word is its path; its standard output.
    ///
    /// # Errors
    /// It fails there, or takes longer than `limit`.
    pub fn run(&mut self, words: &[String], limit: Duration) -> Result<String, CommandError> {
        let sent = writeln!(self.orders, "{}", words.join(" "));
        sent.map_err(|e| self.failure(&format!("takes no orders: {e}")))?;
        self.output(limit)
    }

    /// CPU time of QEMU so far.
    ///
    /// # Errors
    /// The system does not say.
    pub fn cpu_seconds(&self) -> Result<f64, CommandError> {
        let cost = cost_of(self.qemu.child.id());
        let cost = cost.map_err(|e| self.failure(&format!("says nothing about itself: {e}")))?;
        Ok(cost.cpu_seconds)
    }

    /// Ends it in order.
    ///
    /// # Errors
    /// It does not end.
    pub fn turn_off(mut self) -> Result<(), CommandError> {
        let sent = writeln!(self.orders);
        sent.map_err(|e| self.failure(&format!("takes no orders: {e}")))?;
        // The answers end with QEMU.
        let start = Instant::now();
        while let Some(left) = OFF_WITHIN.checked_sub(start.elapsed()) {
            if self.answers.recv_timeout(left) == Err(RecvTimeoutError::Disconnected) {
                return match self.qemu.child.wait() {
                    Ok(status) if status.success() => Ok(()),
                    Ok(status) => Err(self.failure(&format!("ended with {status}"))),
                    Err(e) => Err(self.failure(&format!("cannot be waited for: {e}"))),
                };
            }
        }
        Err(self.failure("does not turn off"))
    }

    /// Returns the output up to the guest's readiness for the next order.
    fn output(&mut self, limit: Duration) -> Result<String, CommandError> {
        let start = Instant::now();
        let mut output = String::new();
        loop {
            let left = limit.saturating_sub(start.elapsed());
            match self.answers.recv_timeout(left) {
                Ok(line) => match line.strip_prefix(READY) {
                    Some("0") => return Ok(output),
                    Some(code) => {
                        return Err(self.failure(&format!("failed, with exit code {code}")));
                    }
                    None => output += &(line + "\n"),
                },
                Err(RecvTimeoutError::Timeout) => {
                    let seconds = limit.as_secs();
                    return Err(self.failure(&format!("did not answer within {seconds} s")));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(self.failure("ended too early")),
            }
        }
    }

    /// Returns the error, with the end of the console.
    fn failure(&self, what: &str) -> CommandError {
        let console = self.console.lock().unwrap_or_else(PoisonError::into_inner);
        let console = match console.trim() {
            "" => "Its console is empty.".to_string(),
            text => format!("The end of its console:\n{text}"),
        };
        CommandError::new(format!("The guest {what}. {console}"))
    }
}

fn command(machine: &Machine, disk: &GuestDisk) -> Command {
    let mut command = Command::new(QEMU);
    command.args(["-nodefaults", "-no-user-config", "-no-reboot"]);
    command.args(["-display", "none", "-machine", "pc", "-cpu", "max"]);
    command.args(["-accel", machine.accelerator.option()]);
    command.args(["-smp", &PROCESSORS.to_string()]);
    command.args(["-m", &machine.memory_mib.to_string()]);
    command.arg("-kernel").arg(&machine.kernel.file);
    command.arg("-initrd").arg(format!(
        "/proc/{}/fd/{}",
        std::process::id(),
        machine.archive.as_raw_fd()
    ));
    // A kernel that panics ends the machine. What follows two dashes is for process 1.
    command.arg("-append").arg(format!(
        "console=ttyS0 quiet panic=-1 tsc=reliable cryptomgr.notests -- {VERB}"
    ));
    command.args(["-serial", "file:/dev/stderr"]);
    command.args(["-chardev", "stdio,id=orders,signal=off"]);
    command.args(["-serial", "chardev:orders"]);
    match disk {
        GuestDisk::Block(disk) => {
            command.args(["-object", "iothread,id=io"]);
            command.arg("-blockdev").arg(disk.to_string());
            command.args(["-device", "virtio-blk-pci,drive=disk,iothread=io"]);
        }
        GuestDisk::VhostUser(socket) => {
            let mib = machine.memory_mib;
            command.arg("-object");
            command.arg(format!("memory-backend-memfd,id=mem,size={mib}M,share=on"));
            command.args(["-numa", "node,memdev=mem"]);
            let socket = socket.display().to_string().replace(',', ",,");
            command.arg("-chardev");
            command.arg(format!("socket,id=disk,path={socket},reconnect=1"));
            command.args(["-device", "vhost-user-blk-pci,chardev=disk,num-queues=1"]);
        }
    }
    command
}

impl Accelerator {
    fn option(self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        }
    }
}

fn lines_of(stdout: ChildStdout) -> Receiver<String> {
    let (sender, receiver) = channel();
    spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

/// Keeps the end of what is said.
fn keep_console(mut stderr: ChildStderr, console: Arc<Mutex<String>>) {
    spawn(move || {
        let mut piece = [0; 4096];
        while let Ok(length @ 1..) = stderr.read(&mut piece) {
            let mut console = console.lock().unwrap_or_else(PoisonError::into_inner);
            console.push_str(&String::from_utf8_lossy(&piece[..length]));
            let mut cut = console.len().saturating_sub(CONSOLE_BYTES_MAX);
            while !console.is_char_boundary(cut) {
                cut += 1;
            }
            console.drain(..cut);
        }
    });
}
