//! Cleanup on a signal that ends the process: files and processes to remove, and text to print.
//!
//! A thread waits for SIGHUP, SIGINT and SIGTERM. It kills and removes what is on its lists, prints
//! the registered texts, and then lets the signal take its default action. Nothing is set up before
//! the first registration. The thread never releases the locks of its lists, so code that fails
//! because of the cleanup, and then takes its own entry off a list, blocks there until the process
//! ends.
//!
//! If a job can undo its work, the first signal cancels the job instead, and the process ends by
//! that signal when the job has ended. A second signal, at least a second later, ends the process
//! at once.

use std::fmt::Display;
use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{MutexGuard, Once, TryLockError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use cowslip::Job;
use cowslip_block::sync::{Mutex, lock};
use rustix::process::{Pid, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::error::CommandError;
use crate::output::Program;

static FILES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
static TREES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
static CHILDREN: Mutex<Vec<Pid>> = Mutex::new(Vec::new());
/// The text for standard output; locked while a piece of the document is being printed.
static PRINTED: Mutex<Option<String>> = Mutex::new(None);
static WORDS: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// The action to run before the process ends.
static ACT: Mutex<Option<Act>> = Mutex::new(None);
static JOB: Mutex<Option<Job>> = Mutex::new(None);
/// Called after a signal has cancelled the job.
static CANCELLED: Mutex<Vec<fn()>> = Mutex::new(Vec::new());
/// The signal that has cancelled the job; 0 if there is none.
static CANCELLED_BY: AtomicI32 = AtomicI32::new(0);
/// Signals within this time of the first one count as the same interruption.
const SAME_SIGNAL: Duration = Duration::from_secs(1);
/// Erases the line of a terminal, where a progress bar may be.
const ERASE_LINE: &str = "\r\x1b[K";
/// Longest wait for a thread that is printing: it may be blocked by a reader that has stopped
/// reading.
const PRINTING_MAX: Duration = Duration::from_secs(1);
/// A signal from the terminal reaches all processes of the group within this time, even if one of
/// them has already died of it.
const SIGNAL_WITHIN: Duration = Duration::from_millis(300);
/// Attempts to remove a tree in which another process may still create files.
const TREE_TRIES: usize = 100;
static WATCH: Once = Once::new();

type Act = Box<dyn FnOnce() + Send>;

/// Has `call` made whenever a signal has cancelled the job: what the job waits for may take longer
/// than its user will wait now.
pub fn when_cancelled(call: fn()) {
    lock(&CANCELLED).push(call);
}

/// While this value lives, an interruption cancels a job instead of ending the process.
#[derive(Debug)]
pub struct CancelledOnInterrupt;

impl CancelledOnInterrupt {
    /// Registers the job. Only one may be registered at a time.
    pub fn new(cancelled: &Job) -> CancelledOnInterrupt {
        WATCH.call_once(watch);
        *lock(&JOB) = Some(cancelled.clone());
        CancelledOnInterrupt
    }

    /// Whether a signal has cancelled the job.
    pub fn has_come(&self) -> bool {
        CANCELLED_BY.load(Ordering::Acquire) != 0
    }

    /// Reports in one line what the cancelled job leaves, and ends the process by the signal that
    /// has cancelled it; without one, returns the failure.
    pub fn report(self, program: &Program, left: impl Display) -> CommandError {
        program.complain(format_args!("Cancelled: {left}"));
        self.end_by_signal();
        CommandError::already_reported()
    }

    /// Ends the process by the signal that has cancelled the job, if one has.
    pub fn end_by_signal(self) {
        let signal = CANCELLED_BY.load(Ordering::Acquire);
        if signal != 0 {
            crate::output::flush();
            drop(emulate_default_handler(signal));
        }
    }
}

impl Drop for CancelledOnInterrupt {
    fn drop(&mut self) {
        *lock(&JOB) = None;
    }
}

/// Text that an interruption prints on standard output while this value lives: the end of a
/// document that is printed piece by piece. Only one may exist at a time.
#[derive(Debug)]
pub struct PrintedOnInterrupt;

impl PrintedOnInterrupt {
    /// A registration without text.
    pub fn nothing() -> PrintedOnInterrupt {
        WATCH.call_once(watch);
        PrintedOnInterrupt
    }

    /// Prints a piece of the document, and registers `end` as the text that completes it. An
    /// interruption comes before both or after both.
    pub fn replace(&self, print: impl FnOnce(), end: String) {
        let mut printed = lock(&PRINTED);
        print();
        crate::output::flush();
        *printed = Some(end);
    }

    /// Waits for an interruption that may have caused a failure; if one has come, it ends the
    /// process here.
    pub fn give_way(&self) {
        sleep(SIGNAL_WITHIN);
        drop(lock(&PRINTED));
    }
}

impl Drop for PrintedOnInterrupt {
    fn drop(&mut self) {
        *lock(&PRINTED) = None;
    }
}

/// Locks [`PRINTED`]; gives up after [`PRINTING_MAX`].
fn printed_soon() -> Option<MutexGuard<'static, Option<String>>> {
    let start = Instant::now();
    loop {
        match PRINTED.try_lock() {
            Ok(printed) => return Some(printed),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if start.elapsed() < PRINTING_MAX => {
                sleep(Duration::from_millis(5));
            }
            Err(TryLockError::WouldBlock) => return None,
        }
    }
}

/// An action that an interruption runs while this value lives, such as writing a file with the
/// results so far. Only one may exist at a time.
#[derive(Debug)]
pub struct DoneOnInterrupt;

impl DoneOnInterrupt {
    /// A registration without an action.
    pub fn nothing() -> DoneOnInterrupt {
        WATCH.call_once(watch);
        DoneOnInterrupt
    }

    /// Replaces the action. The action must not use the lists of this module, which are locked
    /// while it runs.
    pub fn replace(&self, done: impl FnOnce() + Send + 'static) {
        *lock(&ACT) = Some(Box::new(done));
    }
}

impl Drop for DoneOnInterrupt {
    fn drop(&mut self) {
        *lock(&ACT) = None;
    }
}

/// A line that an interruption prints on standard error while this value lives.
#[derive(Debug)]
pub struct MessageOnInterrupt;

impl MessageOnInterrupt {
    /// Registers `text`, without a newline.
    pub fn new(text: String) -> MessageOnInterrupt {
        WATCH.call_once(watch);
        lock(&WORDS).push(text);
        MessageOnInterrupt
    }
}

impl Drop for MessageOnInterrupt {
    fn drop(&mut self) {
        lock(&WORDS).pop();
    }
}

/// A file, or an empty directory, that an interruption removes while this value lives.
#[derive(Debug)]
pub struct RemovedOnInterrupt {
    path: PathBuf,
}

impl RemovedOnInterrupt {
    /// Registers a file or an empty directory.
    pub fn new(path: &Path) -> RemovedOnInterrupt {
        WATCH.call_once(watch);
        lock(&FILES).push(path.to_path_buf());
        RemovedOnInterrupt {
            path: path.to_path_buf(),
        }
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for RemovedOnInterrupt {
    fn drop(&mut self) {
        lock(&FILES).retain(|path| *path != self.path);
    }
}

/// A directory that an interruption removes with all its contents while this value lives.
#[derive(Debug)]
pub struct TreeRemovedOnInterrupt {
    path: PathBuf,
}

impl TreeRemovedOnInterrupt {
    /// Registers a directory.
    pub fn new(path: &Path) -> TreeRemovedOnInterrupt {
        WATCH.call_once(watch);
        lock(&TREES).push(path.to_path_buf());
        TreeRemovedOnInterrupt {
            path: path.to_path_buf(),
        }
    }
}

impl Drop for TreeRemovedOnInterrupt {
    fn drop(&mut self) {
        lock(&TREES).retain(|path| *path != self.path);
    }
}

/// A child process that an interruption kills while this value lives. Drop the value when the
/// process has been waited for.
#[derive(Debug)]
pub struct KilledOnInterrupt {
    pid: Option<Pid>,
}

impl KilledOnInterrupt {
    /// Registers a process.
    pub fn new(child: &Child) -> KilledOnInterrupt {
        WATCH.call_once(watch);
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        lock(&CHILDREN).extend(pid);
        KilledOnInterrupt { pid }
    }
}

impl Drop for KilledOnInterrupt {
    fn drop(&mut self) {
        lock(&CHILDREN).retain(|pid| Some(*pid) != self.pid);
    }
}

/// Writes past the locks of the streams: the holder of a lock may be blocked by a reader that has
/// stopped reading, and the signal must end the program all the same.
fn say(stream: BorrowedFd<'_>, text: &str) {
    let mut rest = text.as_bytes();
    while let Ok(written @ 1..) = rustix::io::write(stream, rest) {
        rest = &rest[written..];
    }
}

fn watch() {
    // Without the thread an interruption may leave a partial file behind, which is no reason to
    // stop.
    let Ok(mut signals) = Signals::new([SIGHUP, SIGINT, SIGTERM]) else {
        return;
    };
    let watching = std::thread::Builder::new().spawn(move || {
        let mut cancelled: Option<Instant> = None;
        for signal in signals.forever() {
            // Programs such as `timeout` send a signal twice.
            if cancelled.is_some_and(|at| at.elapsed() < SAME_SIGNAL) {
                continue;
            }
            if let Some(job) = lock(&JOB).take() {
                cancelled = Some(Instant::now());
                CANCELLED_BY.store(signal, Ordering::Release);
                job.cancel();
                lock(&CANCELLED).iter().for_each(|call| call());
                continue;
            }
            end_by(signal);
        }
    });
    drop(watching);
}

fn end_by(signal: i32) {
    let printed = printed_soon();
    let (files, children) = (lock(&FILES), lock(&CHILDREN));
    for child in children.iter() {
        // The process may have ended already.
        kill_process(*child, rustix::process::Signal::KILL).ok();
    }
    for tree in lock(&TREES).iter() {
        // Other threads may create files there until the process ends.
        for _ in 0..TREE_TRIES {
            if std::fs::remove_dir_all(tree).is_ok() {
                break;
            }
        }
    }
    // A file that has just been completed is removed too, since the user has cancelled it. Reverse
    // order: later entries may lie in directories that earlier entries name.
    for path in files.iter().rev() {
        drop(remove_file(path).or_else(|_| remove_directory(path)));
    }
    if let Some(done) = lock(&ACT).take() {
        // A panic of the action must not keep the signal from ending the process.
        drop(catch_unwind(AssertUnwindSafe(done)));
    }
    if let Some(text) = printed.as_ref().and_then(|printed| printed.as_deref()) {
        if rustix::termios::isatty(rustix::stdio::stderr()) {
            say(rustix::stdio::stderr(), ERASE_LINE);
        }
        say(rustix::stdio::stdout(), text);
    }
    for text in lock(&WORDS).iter() {
        say(rustix::stdio::stderr(), &format!("{text}\n"));
    }
    if emulate_default_handler(signal).is_err() {
        std::process::exit(1);
    }
}

/// Removes a file. A disk may be shown there by a process that has just been killed; it is then
/// unmounted.
fn remove_file(path: &Path) -> std::io::Result<()> {
    std::fs::remove_file(path).or_else(|error| match error.kind() {
        ErrorKind::ResourceBusy => {
            rustix::mount::unmount(path, rustix::mount::UnmountFlags::DETACH)?;
            std::fs::remove_file(path)
        }
        _ => Err(error),
    })
}

/// Removes a directory. One of our file systems may be mounted there and still be busy, because of
/// a process that has just been killed; it is then unmounted lazily.
fn remove_directory(path: &Path) -> std::io::Result<()> {
    std::fs::remove_dir(path).or_else(|error| match error.kind() {
        ErrorKind::ResourceBusy => {
            rustix::mount::unmount(path, rustix::mount::UnmountFlags::DETACH)?;
            std::fs::remove_dir(path)
        }
        _ => Err(error),
    })
}
