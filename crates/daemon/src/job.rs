//! [`Job`]: a job as clients see it, with its state and its pace.
//!
//! ```text
//! created -> running <-> paused
//!            running  -> ready <-> standby
//!            running, ready -> waiting -> pending -> concluded -> null
//!            any            -> aborting -> concluded -> null
//! ```

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cowslip::job::{Attendant, Job as Work, Moment, Side, Verdict};
use cowslip_graph::{Mirror, Quiet, View};
use cowslip_qmp::QmpError;
use serde_json::{Value, json};

use super::aside::Place;
use super::fault::{Fault, Faults, Policies};
use super::given::Given;
use super::wait::Flag;

/// Time after an error that is ignored before more is tried.
const REST: Duration = Duration::from_millis(100);
/// The longest wait for the pace before a job looks at whether it is cancelled.
const WAIT_MAX: Duration = Duration::from_millis(50);
/// Amount that may be moved at once before the pace is kept.
const BURST: Duration = Duration::from_millis(100);

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It was made.
    Created,
    /// It works.
    Running,
    /// It was working, and waits for its user.
    Paused,
    /// It follows its disk, and can be completed.
    Ready,
    /// It was ready, and waits for its user.
    Standby,
    /// Its work is done.
    Waiting,
    /// It waits to be finalised.
    Pending,
    /// It has failed, or was cancelled.
    Aborting,
    /// It has ended, and waits to be dismissed.
    Concluded,
    /// It is gone.
    Null,
}

impl Status {
    /// Its name in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Status::Created => "created",
            Status::Running => "running",
            Status::Paused => "paused",
            Status::Ready => "ready",
            Status::Standby => "standby",
            Status::Waiting => "waiting",
            Status::Pending => "pending",
            Status::Aborting => "aborting",
            Status::Concluded => "concluded",
            Status::Null => "null",
        }
    }
}

/// The pace of a job, which its user changes while it runs.
pub(super) struct Pace {
    /// Bytes a second; 0 is no limit.
    pub(super) speed: AtomicU64,
    pub(super) is_paused: AtomicBool,
    /// The disks whose clients go first.
    quiet: Option<Quiet>,
    /// When the next bytes may be moved.
    next: Mutex<Instant>,
    pub(super) faults: Faults,
}

struct Paced {
    pace: Arc<Pace>,
    /// The thread on which the job copies; `None` is the one that serves clients.
    place: Option<Place>,
}

impl Attendant for Paced {
    fn run_aside(&self, work: Moment) -> Option<Moment> {
        match &self.place {
            None => Some(work),
            Some(place) => {
                place.run(work);
                None
            }
        }
    }

    fn pace(&self, bytes: u64) -> Option<Moment> {
        let wait = self.pace.wait(bytes)?;
        Some(Box::pin(cowslip_queue::blocking(move || {
            std::thread::sleep(wait);
        })))
    }

    fn failed(&self, side: Side, error: &cowslip::Error) -> Verdict {
        let verdict = self.pace.faults.meet(side, error);
        match verdict {
            Verdict::Report => {}
            Verdict::Ignore => *self.pace.next() = Instant::now() + REST,
            Verdict::Stop => self.pace.is_paused.store(true, Ordering::Release),
        }
        verdict
    }
}

impl Pace {
    fn wait(&self, bytes: u64) -> Option<Duration> {
        if self.is_paused.load(Ordering::Acquire) {
            return Some(WAIT_MAX);
        }
        if let Some(wait) = self.quiet.as_ref().and_then(Quiet::wait) {
            return Some(wait.min(WAIT_MAX));
        }
        let mut next = self.next();
        let now = Instant::now();
        let early = next.saturating_duration_since(now);
        if early > Duration::ZERO {
            return Some(early.min(WAIT_MAX));
        }
        let speed = self.speed.load(Ordering::Acquire);
        if speed == 0 {
            return None;
        }
        let begun = (*next).max(now.checked_sub(BURST).unwrap_or(now));
        *next = begun + Duration::from_secs_f64(bytes as f64 / speed as f64);
        None
    }

    fn next(&self) -> std::sync::MutexGuard<'_, Instant> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the bytes a second from now on; 0 is no limit.
    pub(super) fn set_speed(&self, speed: u64) {
        self.speed.store(speed, Ordering::Release);
        *self.next() = Instant::now();
    }
}

/// A job of the daemon.
pub struct Job {
    /// Its ID.
    pub id: String,
    /// Its kind: `commit`, `stream`, `mirror`, `backup`, `create` or `x-cowslip-compact`.
    pub kind: &'static str,
    /// Its progress, for what does the work.
    pub work: Work,
    /// The mirror, while the job follows its disk.
    pub mirror: RefCell<Option<Arc<Mirror>>>,
    /// The view that the job keeps.
    pub(super) view: RefCell<Option<Arc<View>>>,
    pub(super) pace: Arc<Pace>,
    pub(super) status: Cell<Status>,
    pub(super) error: RefCell<Option<String>>,
    pub(super) finalizes_itself: bool,
    pub(super) dismisses_itself: bool,
    /// The error that has stopped it, until it is resumed.
    pub(super) stopped_by: Cell<Option<Fault>>,
    /// A user has asked for the end without an effect.
    pub(super) is_cancelled: Cell<bool>,
    /// It is to end with a copy that is equal, and the disk as it is.
    pub(super) stays: Cell<bool>,
    pub(super) finalized: Flag,
    pub(super) ended: Flag,
}

/// Options of all jobs.
pub struct JobOptions {
    id: String,
    speed: u64,
    policies: Policies,
    finalizes_itself: bool,
    dismisses_itself: bool,
    quiet: Option<Quiet>,
}

impl JobOptions {
    /// Has the job wait while clients use these disks; then it moves no more than `speed` bytes a
    /// second, unless it was given another limit.
    #[must_use]
    pub fn behind(self, quiet: Quiet, speed: u64) -> JobOptions {
        JobOptions {
            speed: match self.speed {
                0 => speed,
                given => given,
            },
            quiet: Some(quiet),
            ..self
        }
    }

    /// The ID of the job.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Those of a command. The ID is that of the device if none is given.
    ///
    /// # Errors
    /// Values of the wrong type.
    pub fn of(given: &Given, device: Option<&str>) -> Result<JobOptions, QmpError> {
        let id = given.text("job-id").or(device).unwrap_or_default();
        Ok(JobOptions {
            id: id.to_string(),
            speed: given.number("speed")?.unwrap_or(0),
            policies: Policies::of(given)?,
            finalizes_itself: given.switch("auto-finalize")?.unwrap_or(true),
            dismisses_itself: given.switch("auto-dismiss")?.unwrap_or(device.is_some()),
            quiet: None,
        })
    }
}

/// The jobs, the last one first.
#[derive(Default)]
pub struct Jobs {
    list: RefCell<Vec<Rc<Job>>>,
    /// Jobs that have ended, by kind and outcome.
    pub ended: RefCell<BTreeMap<(&'static str, Outcome), u64>>,
}

/// How a job has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// With its effect.
    Completed,
    /// Its user has asked for that.
    Cancelled,
    /// By an error.
    Failed,
}

impl Outcome {
    /// Its name in figures.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Completed => "completed",
            Outcome::Cancelled => "cancelled",
            Outcome::Failed => "failed",
        }
    }
}

impl Jobs {
    /// Adds one.
    pub fn add(&self, job: Job) -> Rc<Job> {
        let job = Rc::new(job);
        self.list.borrow_mut().insert(0, Rc::clone(&job));
        job
    }

    /// Takes one out.
    pub fn remove(&self, job: &Rc<Job>) {
        let is_other = |other: &Rc<Job>| !Rc::ptr_eq(other, job);
        self.list.borrow_mut().retain(is_other);
    }

    /// Counts one that has ended.
    pub fn count_ended(&self, job: &Job, outcome: Outcome) {
        let mut ended = self.ended.borrow_mut();
        *ended.entry((job.kind, outcome)).or_default() += 1;
    }

    /// All of them.
    pub fn all(&self) -> Vec<Rc<Job>> {
        self.list.borrow().clone()
    }

    /// The job of this ID.
    pub fn find(&self, id: &str) -> Option<Rc<Job>> {
        self.list.borrow().iter().find(|job| job.id == id).cloned()
    }
}

impl Job {
    /// A job that has not begun, and the thread on which it copies.
    pub fn new(kind: &'static str, options: JobOptions, place: Option<Place>) -> Job {
        let pace = Arc::new(Pace {
            speed: AtomicU64::new(options.speed),
            is_paused: AtomicBool::new(false),
            quiet: options.quiet,
            next: Mutex::new(Instant::now()),
            faults: Faults::new(options.policies),
        });
        Job {
            id: options.id,
            kind,
            work: Work::attended(Paced {
                pace: Arc::clone(&pace),
                place,
            }),
            mirror: RefCell::default(),
            view: RefCell::default(),
            pace,
            status: Cell::new(Status::Created),
            error: RefCell::default(),
            finalizes_itself: options.finalizes_itself,
            dismisses_itself: options.dismisses_itself,
            stopped_by: Cell::default(),
            is_cancelled: Cell::new(false),
            stays: Cell::new(false),
            finalized: Flag::default(),
            ended: Flag::default(),
        }
    }

    /// Whether it is about a disk; that of a new image is not.
    pub fn is_of_a_disk(&self) -> bool {
        self.kind != "create"
    }

    /// Whether it has not concluded.
    pub fn in_work(&self) -> bool {
        !matches!(self.status.get(), Status::Concluded | Status::Null)
    }

    /// Whether an error has stopped it, as the protocol has it.
    pub fn io_status(&self) -> &'static str {
        match self.stopped_by.get() {
            None => "ok",
            Some(fault) if fault.is_full => "nospace",
            Some(_) => "failed",
        }
    }

    /// Whether it is to leave the disk as it is, with a copy that is equal.
    pub fn stays(&self) -> bool {
        self.stays.get()
    }

    /// Refuses a command that the state does not allow.
    ///
    /// # Errors
    /// In QEMU's words.
    pub fn refuses(&self, verb: &str, in_states: &[Status]) -> Result<(), QmpError> {
        match in_states.contains(&self.status.get()) {
            true => Ok(()),
            false => Err(QmpError::generic(format!(
                "Job '{}' in state '{}' cannot accept command verb '{verb}'",
                self.id,
                self.status.get().name()
            ))),
        }
    }

    /// Ends it without an effect.
    pub fn cancel(&self) {
        self.is_cancelled.set(true);
        self.work.cancel();
        self.pace.is_paused.store(false, Ordering::Release);
        self.finalized.set();
        if let Some(mirror) = &*self.mirror.borrow() {
            mirror.wake();
        }
        if let Some(view) = &*self.view.borrow() {
            view.wake();
        }
    }

    /// Its figures, as events have them.
    pub fn figures(&self) -> Value {
        let progress = self.work.progress();
        json!({
            "device": self.id,
            "len": progress.total_bytes,
            "offset": progress.done_bytes,
            "speed": self.pace.speed.load(Ordering::Acquire),
            "type": self.kind,
        })
    }
}
