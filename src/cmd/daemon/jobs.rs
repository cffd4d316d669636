//! Jobs of a daemon: their states, as QEMU's, and the commands that control them.
//!
//! ```text
//! created -> running <-> paused
//!            running  -> ready <-> standby
//!            running, ready -> waiting -> pending -> concluded -> null
//!            any            -> aborting -> concluded -> null
//! ```
//!
//! What a job does is a future (`copies.rs`, `create.rs`), which asks to be finalised before its
//! last step; the step after that takes effect as a whole.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cowslip::Error;
use cowslip::job::{Attendant, Job as Work, Moment};
use cowslip_graph::Mirror;
use cowslip_qmp::{ErrorClass, QmpError};
use serde_json::{Value, json};

use super::Daemon;
use super::given::Given;
use super::wait::Flag;

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
struct Pace {
    /// Bytes a second; 0 is no limit.
    speed: AtomicU64,
    is_paused: AtomicBool,
    /// When the next bytes may be moved.
    next: Mutex<Instant>,
}

struct Paced(Arc<Pace>);

impl Attendant for Paced {
    fn pace(&self, bytes: u64) -> Option<Moment> {
        let wait = self.0.wait(bytes)?;
        Some(Box::pin(cowslip_queue::blocking(move || {
            std::thread::sleep(wait);
        })))
    }
}

impl Pace {
    fn wait(&self, bytes: u64) -> Option<Duration> {
        if self.is_paused.load(Ordering::Acquire) {
            return Some(WAIT_MAX);
        }
        let speed = self.speed.load(Ordering::Acquire);
        if speed == 0 {
            return None;
        }
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let early = next.saturating_duration_since(now);
        if early > Duration::ZERO {
            return Some(early.min(WAIT_MAX));
        }
        let begun = (*next).max(now.checked_sub(BURST).unwrap_or(now));
        *next = begun + Duration::from_secs_f64(bytes as f64 / speed as f64);
        None
    }
}

/// A job of the daemon.
pub struct Job {
    /// Its ID.
    pub id: String,
    /// Its kind: `commit`, `stream`, `mirror`, `backup` or `create`.
    pub kind: &'static str,
    /// Its progress, for what does the work.
    pub work: Work,
    /// What follows the disk, while the job does.
    pub mirror: RefCell<Option<Rc<Mirror>>>,
    pace: Arc<Pace>,
    status: Cell<Status>,
    error: RefCell<Option<String>>,
    finalizes_itself: bool,
    dismisses_itself: bool,
    /// A user has asked for the end without an effect.
    is_cancelled: Cell<bool>,
    /// It is to end with a copy that is equal, and the disk as it is.
    stays: Cell<bool>,
    finalized: Flag,
    ended: Flag,
}

/// Options of all jobs.
pub struct JobOptions {
    id: String,
    speed: u64,
    finalizes_itself: bool,
    dismisses_itself: bool,
}

impl JobOptions {
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
            finalizes_itself: given.switch("auto-finalize")?.unwrap_or(true),
            dismisses_itself: given.switch("auto-dismiss")?.unwrap_or(device.is_some()),
        })
    }
}

/// The jobs, the last one first.
#[derive(Default)]
pub struct Jobs(RefCell<Vec<Rc<Job>>>);

impl Jobs {
    fn all(&self) -> Vec<Rc<Job>> {
        self.0.borrow().clone()
    }

    fn find(&self, id: &str) -> Option<Rc<Job>> {
        self.0.borrow().iter().find(|job| job.id == id).cloned()
    }
}

impl Job {
    fn is_of_a_disk(&self) -> bool {
        self.kind != "create"
    }

    /// Whether it is to leave the disk as it is, with a copy that is equal.
    pub fn stays(&self) -> bool {
        self.stays.get()
    }

    fn refuses(&self, verb: &str, in_states: &[Status]) -> Result<(), QmpError> {
        match in_states.contains(&self.status.get()) {
            true => Ok(()),
            false => Err(QmpError::generic(format!(
                "Job '{}' in state '{}' cannot accept command verb '{verb}'",
                self.id,
                self.status.get().name()
            ))),
        }
    }

    fn cancel(&self) {
        self.is_cancelled.set(true);
        self.work.cancel();
        self.pace.is_paused.store(false, Ordering::Release);
        self.finalized.set();
        if let Some(mirror) = &*self.mirror.borrow() {
            mirror.wake();
        }
    }

    fn figures(&self) -> Value {
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

impl Daemon {
    fn change_status(&self, job: &Job, status: Status) {
        job.status.set(status);
        let data = json!({"status": status.name(), "id": job.id});
        self.emit("JOB_STATUS_CHANGE", data);
    }

    /// Registers a job, and starts its work.
    ///
    /// # Errors
    /// Its ID is in use, or cannot be one.
    pub fn start_job<F>(
        self: &Rc<Self>,
        (kind, options): (&'static str, JobOptions),
        work: impl FnOnce(Rc<Daemon>, Rc<Job>) -> F,
    ) -> Result<(), QmpError>
    where
        F: Future<Output = Result<(), QmpError>> + 'static,
    {
        let JobOptions { id, speed, .. } = options;
        let is_sign = |sign: char| sign.is_ascii_alphanumeric() || "-._".contains(sign);
        if !id.starts_with(|sign: char| sign.is_ascii_alphabetic()) || !id.chars().all(is_sign) {
            return Err(QmpError::generic(format!("Invalid job ID '{id}'")));
        }
        if self.jobs.find(&id).is_some() {
            return Err(QmpError::generic(format!("Job ID '{id}' already in use")));
        }
        let pace = Arc::new(Pace {
            speed: AtomicU64::new(speed),
            is_paused: AtomicBool::new(false),
            next: Mutex::new(Instant::now()),
        });
        let job = Rc::new(Job {
            id,
            kind,
            work: Work::attended(Paced(Arc::clone(&pace))),
            mirror: RefCell::default(),
            pace,
            status: Cell::new(Status::Created),
            error: RefCell::default(),
            finalizes_itself: options.finalizes_itself,
            dismisses_itself: options.dismisses_itself,
            is_cancelled: Cell::new(false),
            stays: Cell::new(false),
            finalized: Flag::default(),
            ended: Flag::default(),
        });
        self.jobs.0.borrow_mut().insert(0, Rc::clone(&job));
        self.change_status(&job, Status::Created);
        self.change_status(&job, Status::Running);
        let working = work(Rc::clone(self), Rc::clone(&job));
        let daemon = Rc::clone(self);
        cowslip_queue::spawn(async move {
            let outcome = working.await;
            daemon.conclude(&job, outcome);
        });
        Ok(())
    }

    /// The job is ready: its copy is equal, and follows the disk.
    pub fn job_is_ready(&self, job: &Job) {
        self.change_status(job, Status::Ready);
        self.emit("BLOCK_JOB_READY", job.figures());
    }

    /// Waits until the last step of a job may be taken.
    ///
    /// # Errors
    /// It was cancelled meanwhile.
    pub async fn finalize(&self, job: &Job) -> Result<(), QmpError> {
        self.change_status(job, Status::Waiting);
        self.change_status(job, Status::Pending);
        if !job.finalizes_itself {
            if job.is_of_a_disk() {
                let data = json!({"type": job.kind, "id": job.id});
                self.emit("BLOCK_JOB_PENDING", data);
            }
            job.finalized.wait().await;
        }
        match job.is_cancelled.get() {
            true => Err(super::failed(Error::Cancelled)),
            false => Ok(()),
        }
    }

    fn conclude(&self, job: &Rc<Job>, outcome: Result<(), QmpError>) {
        job.mirror.take();
        let mut figures = job.figures();
        let mut event = "BLOCK_JOB_COMPLETED";
        if let Err(error) = outcome {
            self.change_status(job, Status::Aborting);
            let text = match job.is_cancelled.get() {
                true => {
                    event = "BLOCK_JOB_CANCELLED";
                    "Operation canceled".to_string()
                }
                false => {
                    figures["error"] = error.desc.clone().into();
                    error.desc
                }
            };
            job.error.replace(Some(text));
        }
        if job.is_of_a_disk() {
            self.emit(event, figures);
        }
        self.change_status(job, Status::Concluded);
        if job.dismisses_itself {
            self.dismiss(job);
        }
        job.ended.set();
    }

    fn dismiss(&self, job: &Rc<Job>) {
        self.change_status(job, Status::Null);
        let is_other = |other: &Rc<Job>| !Rc::ptr_eq(other, job);
        self.jobs.0.borrow_mut().retain(is_other);
    }

    /// Cancels all jobs, and waits for their ends.
    pub async fn end_jobs(&self) {
        for job in self.jobs.all() {
            if job.status.get() != Status::Concluded {
                job.cancel();
                job.ended.wait().await;
            }
        }
    }

    /// A command about a job: `job-*` and `block-job-*`.
    ///
    /// # Errors
    /// There is no such job, or its state does not allow it.
    pub fn job_command(&self, command: &str, given: &Given) -> Result<Value, QmpError> {
        let (job, verb) = match command.strip_prefix("block-job-") {
            Some(verb) => {
                let id = given
                    .text("device")
                    .or(given.text("id"))
                    .unwrap_or_default();
                let found = self.jobs.find(id).filter(|job| job.is_of_a_disk());
                let not_found = || {
                    let text = format!("Block job '{id}' not found");
                    QmpError::new(ErrorClass::DeviceNotActive, text)
                };
                (found.ok_or_else(not_found)?, verb)
            }
            None => {
                let found = self.jobs.find(given.required("id")?);
                let job = found.ok_or_else(|| QmpError::generic("Job not found"))?;
                (job, command.trim_start_matches("job-"))
            }
        };
        match verb {
            "pause" => self.pause(&job)?,
            "resume" => self.resume(&job)?,
            "cancel" => self.cancel(&job, command, given)?,
            "complete" => {
                job.refuses(verb, &[Status::Ready])?;
                if let Some(mirror) = &*job.mirror.borrow() {
                    mirror.complete();
                }
            }
            "finalize" => {
                job.refuses(verb, &[Status::Pending])?;
                job.finalized.set();
            }
            "dismiss" => {
                job.refuses(verb, &[Status::Concluded])?;
                self.dismiss(&job);
            }
            "set-speed" => {
                let speed = given.number("speed")?.unwrap_or(0);
                job.pace.speed.store(speed, Ordering::Release);
            }
            _ => return Err(QmpError::command_not_found(command)),
        }
        Ok(json!({}))
    }

    fn pause(&self, job: &Job) -> Result<(), QmpError> {
        if job.pace.is_paused.load(Ordering::Acquire) {
            return Err(QmpError::generic("Job is already paused"));
        }
        job.refuses("pause", &[Status::Running, Status::Ready])?;
        job.pace.is_paused.store(true, Ordering::Release);
        let status = match job.status.get() {
            Status::Ready => Status::Standby,
            _ => Status::Paused,
        };
        self.change_status(job, status);
        Ok(())
    }

    fn resume(&self, job: &Job) -> Result<(), QmpError> {
        if !job.pace.is_paused.swap(false, Ordering::AcqRel) {
            let text = "Can't resume a job that was not paused";
            return Err(QmpError::generic(text));
        }
        let status = match job.status.get() {
            Status::Standby => Status::Ready,
            _ => Status::Running,
        };
        self.change_status(job, status);
        Ok(())
    }

    fn cancel(&self, job: &Job, command: &str, given: &Given) -> Result<(), QmpError> {
        let may = [
            Status::Created,
            Status::Running,
            Status::Paused,
            Status::Ready,
            Status::Standby,
            Status::Waiting,
            Status::Pending,
        ];
        job.refuses("cancel", &may)?;
        let is_forced = given.switch("force")?.unwrap_or(false) || command == "job-cancel";
        let is_ready = matches!(job.status.get(), Status::Ready | Status::Standby);
        match (
            &*job.mirror.borrow(),
            is_ready && !is_forced && job.kind == "mirror",
        ) {
            (Some(mirror), true) => {
                job.stays.set(true);
                job.pace.is_paused.store(false, Ordering::Release);
                mirror.complete();
            }
            _ => job.cancel(),
        }
        Ok(())
    }

    /// `query-jobs`.
    pub fn query_jobs(&self) -> Value {
        let describe = |job: &Rc<Job>| {
            let progress = job.work.progress();
            let mut found = json!({
                "current-progress": progress.done_bytes,
                "status": job.status.get().name(),
                "total-progress": progress.total_bytes,
                "type": job.kind,
                "id": job.id,
            });
            if let Some(error) = &*job.error.borrow() {
                found["error"] = error.as_str().into();
            }
            found
        };
        self.jobs.all().iter().map(describe).collect()
    }

    /// `query-block-jobs`.
    pub fn query_block_jobs(&self) -> Value {
        let describe = |job: &Rc<Job>| {
            let status = job.status.get();
            let mut found = job.figures();
            found["auto-finalize"] = job.finalizes_itself.into();
            found["io-status"] = "ok".into();
            found["auto-dismiss"] = job.dismisses_itself.into();
            found["busy"] = (status == Status::Running).into();
            found["status"] = status.name().into();
            found["paused"] = job.pace.is_paused.load(Ordering::Acquire).into();
            found["ready"] = matches!(status, Status::Ready | Status::Standby).into();
            if let Some(error) = &*job.error.borrow() {
                found["error"] = error.as_str().into();
            }
            if job.kind == "mirror" {
                let mirror = job.mirror.borrow();
                let is_synced = mirror.as_ref().is_some_and(|it| it.is_synced());
                found["actively-synced"] = is_synced.into();
            }
            found
        };
        let jobs = self.jobs.all();
        let jobs = jobs.iter().filter(|job| job.is_of_a_disk());
        jobs.map(describe).collect()
    }
}
