//! Files and processes that must not survive an interrupted process, and what its user is told
//! then.
//!
//! A thread waits for the signals that end a process; it kills and removes what is listed, prints
//! and says what is to be said, and then lets the signal do what it would have done. Nothing is set
//! up before that. It never gives the lists back, so whoever fails because of it, and ends the use
//! of something, waits there for the end.
//!
//! A job that can take back what it has done is cancelled by the first signal instead, and the
//! process ends by it when the job has ended; a second signal, a second later, does not wait for
//! that.

use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, Once, TryLockError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use cowslip::Job;
use rustix::process::{Pid, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

static FILES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
static TREES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
static CHILDREN: Mutex<Vec<Pid>> = Mutex::new(Vec::new());
/// What is printed on standard output; held while more than that is printed.
static PRINTED: Mutex<Option<String>> = Mutex::new(None);
static WORDS: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// What is done before the process ends.
static ACT: Mutex<Option<Act>> = Mutex::new(None);
static JOB: Mutex<Option<Job>> = Mutex::new(None);
/// The signal that has cancelled the job; 0 is none.
static CANCELLED_BY: AtomicI32 = AtomicI32::new(0);
/// Signals that come so soon after another are the same interruption.
const SAME_SIGNAL: Duration = Duration::from_secs(1);
/// The line of a terminal on which a bar may be is erased.
const ERASE_LINE: &str = "\r\x1b[K";
/// So long it is waited for whoever prints; he may wait for a reader that does not come.
const PRINTING_MAX: Duration = Duration::from_secs(1);
/// The signal of a terminal reaches every process within that time, if one has already died of it.
const SIGNAL_WITHIN: Duration = Duration::from_millis(300);
/// A tree in which somebody makes files is tried to be removed so often.
const TREE_TRIES: usize = 100;
static WATCH: Once = Once::new();

type Act = Box<dyn FnOnce() + Send>;

fn act() -> MutexGuard<'static, Option<Act>> {
    ACT.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn files() -> MutexGuard<'static, Vec<PathBuf>> {
    FILES
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn trees() -> MutexGuard<'static, Vec<PathBuf>> {
    TREES
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn children() -> MutexGuard<'static, Vec<Pid>> {
    CHILDREN
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn words() -> MutexGuard<'static, Vec<String>> {
    WORDS
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn job() -> MutexGuard<'static, Option<Job>> {
    JOB.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// While this value lives, an interruption cancels a job instead of ending the process.
#[derive(Debug)]
pub struct CancelledOnInterrupt;

impl CancelledOnInterrupt {
    /// There is one at a time.
    pub fn new(cancelled: &Job) -> CancelledOnInterrupt {
        WATCH.call_once(watch);
        *job() = Some(cancelled.clone());
        CancelledOnInterrupt
    }

    /// Whether a signal has cancelled the job.
    pub fn has_come(&self) -> bool {
        CANCELLED_BY.load(Ordering::Acquire) != 0
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
        *job() = None;
    }
}

/// What an interruption prints on standard output while this value lives: the end of a document
/// that is printed piece by piece. There is one at a time.
#[derive(Debug)]
pub struct PrintedOnInterrupt;

impl PrintedOnInterrupt {
    /// Prints nothing so far.
    pub fn nothing() -> PrintedOnInterrupt {
        WATCH.call_once(watch);
        PrintedOnInterrupt
    }

    /// Prints a piece, after which the end is `end`. An interruption comes before both or after
    /// both.
    pub fn replace(&self, print: impl FnOnce(), end: String) {
        let mut printed = printed();
        print();
        crate::output::flush();
        *printed = Some(end);
    }

    /// Waits for an interruption that may have caused a failure; if there is one, it ends the
    /// process.
    pub fn give_way(&self) {
        sleep(SIGNAL_WITHIN);
        drop(printed());
    }
}

impl Drop for PrintedOnInterrupt {
    fn drop(&mut self) {
        *printed() = None;
    }
}

fn printed() -> MutexGuard<'static, Option<String>> {
    PRINTED
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// As [`printed`], but nobody is waited for in vain.
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

/// What an interruption does while this value lives, such as writing a file that tells what is
/// known. There is one at a time.
#[derive(Debug)]
pub struct DoneOnInterrupt;

impl DoneOnInterrupt {
    /// Nothing so far.
    pub fn nothing() -> DoneOnInterrupt {
        WATCH.call_once(watch);
        DoneOnInterrupt
    }

    /// From now on it is this. It may not use the lists of this module, which are held then.
    pub fn replace(&self, done: impl FnOnce() + Send + 'static) {
        *act() = Some(Box::new(done));
    }
}

impl Drop for DoneOnInterrupt {
    fn drop(&mut self) {
        *act() = None;
    }
}

/// What an interruption says while this value lives.
#[derive(Debug)]
pub struct ToldOnInterrupt;

impl ToldOnInterrupt {
    /// Says `text`, a line, to standard error.
    pub fn new(text: String) -> ToldOnInterrupt {
        WATCH.call_once(watch);
        words().push(text);
        ToldOnInterrupt
    }
}

impl Drop for ToldOnInterrupt {
    fn drop(&mut self) {
        words().pop();
    }
}

/// A file, or an empty directory, that an interruption removes while this value lives.
#[derive(Debug)]
pub struct RemovedOnInterrupt {
    path: PathBuf,
}

impl RemovedOnInterrupt {
    /// Lists a file.
    pub fn new(path: &Path) -> RemovedOnInterrupt {
        WATCH.call_once(watch);
        files().push(path.to_path_buf());
        RemovedOnInterrupt {
            path: path.to_path_buf(),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for RemovedOnInterrupt {
    fn drop(&mut self) {
        files().retain(|path| *path != self.path);
    }
}

/// A directory of ours that an interruption removes with all that is in it while this value lives.
#[derive(Debug)]
pub struct TreeRemovedOnInterrupt {
    path: PathBuf,
}

impl TreeRemovedOnInterrupt {
    /// Lists a directory.
    pub fn new(path: &Path) -> TreeRemovedOnInterrupt {
        WATCH.call_once(watch);
        trees().push(path.to_path_buf());
        TreeRemovedOnInterrupt {
            path: path.to_path_buf(),
        }
    }
}

impl Drop for TreeRemovedOnInterrupt {
    fn drop(&mut self) {
        trees().retain(|path| *path != self.path);
    }
}

/// A process that an interruption kills while this value lives, which ends with the wait for the
/// process.
#[derive(Debug)]
pub struct KilledOnInterrupt {
    pid: Option<Pid>,
}

impl KilledOnInterrupt {
    /// Lists a process.
    pub fn new(child: &Child) -> KilledOnInterrupt {
        WATCH.call_once(watch);
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        children().extend(pid);
        KilledOnInterrupt { pid }
    }
}

impl Drop for KilledOnInterrupt {
    fn drop(&mut self) {
        children().retain(|pid| Some(*pid) != self.pid);
    }
}

/// Writes past the locks of the streams: who holds one may be waiting for a reader that does not
/// come, and the signal must end the program all the same.
fn say(stream: BorrowedFd<'_>, text: &str) {
    let mut rest = text.as_bytes();
    while let Ok(written @ 1..) = rustix::io::write(stream, rest) {
        rest = &rest[written..];
    }
}

fn watch() {
    // Without the watch an interruption leaves a file that is no valid image; no reason to stop.
    let Ok(mut signals) = Signals::new([SIGHUP, SIGINT, SIGTERM]) else {
        return;
    };
    std::thread::spawn(move || {
        let mut cancelled: Option<Instant> = None;
        for signal in signals.forever() {
            // `timeout` and its like send a signal twice.
            if cancelled.is_some_and(|at| at.elapsed() < SAME_SIGNAL) {
                continue;
            }
            if let Some(job) = job().take() {
                cancelled = Some(Instant::now());
                CANCELLED_BY.store(signal, Ordering::Release);
                job.cancel();
                continue;
            }
            end_by(signal);
        }
    });
}

fn end_by(signal: i32) {
    let printed = printed_soon();
    let (files, children) = (files(), children());
    for child in children.iter() {
        // It may have ended.
        kill_process(*child, rustix::process::Signal::KILL).ok();
    }
    for tree in trees().iter() {
        // Whoever writes there goes on until the process ends.
        for _ in 0..TREE_TRIES {
            if std::fs::remove_dir_all(tree).is_ok() {
                break;
            }
        }
    }
    // A file that is finished just now goes too: whoever interrupts does not want it.
    // What was listed last lies in what was listed first.
    for path in files.iter().rev() {
        drop(std::fs::remove_file(path).or_else(|_| remove_directory(path)));
    }
    if let Some(done) = act().take() {
        // Whatever goes wrong there, the signal ends the process.
        drop(catch_unwind(AssertUnwindSafe(done)));
    }
    if let Some(text) = printed.as_ref().and_then(|printed| printed.as_deref()) {
        if rustix::termios::isatty(rustix::stdio::stderr()) {
            say(rustix::stdio::stderr(), ERASE_LINE);
        }
        say(rustix::stdio::stdout(), text);
    }
    for text in words().iter() {
        say(rustix::stdio::stderr(), &format!("{text}\n"));
    }
    if emulate_default_handler(signal).is_err() {
        std::process::exit(1);
    }
}

/// A file system of ours may be mounted there, which a process that has just been killed keeps
/// busy.
fn remove_directory(path: &Path) -> std::io::Result<()> {
    std::fs::remove_dir(path).or_else(|error| match error.kind() {
        ErrorKind::ResourceBusy => {
            rustix::mount::unmount(path, rustix::mount::UnmountFlags::DETACH)?;
            std::fs::remove_dir(path)
        }
        _ => Err(error),
    })
}
