//! Jobs of a daemon: their states, as QEMU's, and the commands that control them.
//!
//! What a job does is a future (`copies.rs`, `create.rs`), which asks to be finalised before its
//! last step; the step after that takes effect as a whole.

use std::future::Future;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use cowslip::Error;
use cowslip::job::Verdict;
use cowslip_graph::CopyMode;
use cowslip_qmp::{ErrorClass, QmpError};
use serde_json::{Value, json};

use super::aside::Aside;
use super::given::Given;
use super::host::Daemon;
use super::job::{Job, JobOptions, Outcome, Status};
use super::words::{failed, refused};

/// States in which a job moves data, or will again.
const IN_WORK: [Status; 5] = [
    Status::Created,
    Status::Running,
    Status::Paused,
    Status::Ready,
    Status::Standby,
];

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
        self.check_job_id(options.id())?;
        self.begin_job((kind, options), work);
        Ok(())
    }

    /// Refuses the ID of a new job.
    ///
    /// # Errors
    /// It is in use, or cannot be one.
    pub fn check_job_id(&self, id: &str) -> Result<(), QmpError> {
        let is_sign = |sign: char| sign.is_ascii_alphanumeric() || "-._".contains(sign);
        if !id.starts_with(|sign: char| sign.is_ascii_alphabetic()) || !id.chars().all(is_sign) {
            return Err(QmpError::generic(format!("Invalid job ID '{id}'")));
        }
        if self.jobs.find(id).is_some() {
            return Err(QmpError::generic(format!("Job ID '{id}' already in use")));
        }
        Ok(())
    }

    /// The same as [`Daemon::start_job`] with an ID that was checked.
    pub fn begin_job<F>(
        self: &Rc<Self>,
        (kind, options): (&'static str, JobOptions),
        work: impl FnOnce(Rc<Daemon>, Rc<Job>) -> F,
    ) where
        F: Future<Output = Result<(), QmpError>> + 'static,
    {
        let place = self.aside.as_ref().and_then(Aside::place);
        let job = self.jobs.add(Job::new(kind, options, place));
        self.change_status(&job, Status::Created);
        self.change_status(&job, Status::Running);
        let working = work(Rc::clone(self), Rc::clone(&job));
        let (daemon, watched) = (Rc::clone(self), Rc::clone(&job));
        cowslip_queue::spawn(async move {
            while watched.in_work() {
                watched.pace.faults.wait(|| !watched.in_work()).await;
                daemon.report_faults(&watched);
            }
        });
        let daemon = Rc::clone(self);
        cowslip_queue::spawn(async move {
            let outcome = working.await;
            daemon.conclude(&job, outcome);
        });
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
            true => Err(failed(Error::Cancelled)),
            false => Ok(()),
        }
    }

    /// Lets clients know of the errors that a job has met.
    fn report_faults(&self, job: &Job) {
        for fault in job.pace.faults.take() {
            let data = json!({
                "device": job.id,
                "operation": fault.operation(),
                "action": fault.action(),
            });
            self.emit("BLOCK_JOB_ERROR", data);
            if fault.verdict == Verdict::Stop {
                job.stopped_by.set(job.stopped_by.get().or(Some(fault)));
                match job.status.get() {
                    Status::Running => self.change_status(job, Status::Paused),
                    Status::Ready => self.change_status(job, Status::Standby),
                    _ => {}
                }
            }
        }
    }

    fn conclude(&self, job: &Rc<Job>, outcome: Result<(), QmpError>) {
        job.mirror.take();
        self.report_faults(job);
        let mut figures = job.figures();
        let mut event = "BLOCK_JOB_COMPLETED";
        self.jobs.count_ended(
            job,
            match (&outcome, job.is_cancelled.get()) {
                (Ok(()), _) => Outcome::Completed,
                (Err(_), true) => Outcome::Cancelled,
                (Err(_), false) => Outcome::Failed,
            },
        );
        if let Err(error) = outcome {
            self.change_status(job, Status::Aborting);
            let text = match job.is_cancelled.get() {
                true => {
                    event = "BLOCK_JOB_CANCELLED";
                    "Operation canceled".to_string()
                }
                false => {
                    let error = self.explained(error);
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
        job.pace.faults.wake();
        if job.dismisses_itself {
            self.dismiss(job);
        }
        job.ended.set();
    }

    fn dismiss(&self, job: &Rc<Job>) {
        self.change_status(job, Status::Null);
        self.jobs.remove(job);
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
                job.refuses(verb, &IN_WORK)?;
                let speed = given.number("speed")?.unwrap_or(0);
                job.pace.set_speed(speed);
            }
            "change" => change(&job, given)?,
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
        job.stopped_by.take();
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
        // It goes on, so that it can end.
        match job.status.get() {
            Status::Paused => self.change_status(job, Status::Running),
            Status::Standby => self.change_status(job, Status::Ready),
            _ => {}
        }
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
            found["io-status"] = job.io_status().into();
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

/// `block-job-change`: a mirror in the background becomes one that blocks writes.
fn change(job: &Job, given: &Given) -> Result<(), QmpError> {
    job.refuses("change", &IN_WORK)?;
    let mirror = job.mirror.borrow();
    let Some(mirror) = mirror.as_ref().filter(|_| job.kind == "mirror") else {
        return Err(refused("Job type does not support change"));
    };
    let wanted = given.required("copy-mode")?;
    match (wanted, mirror.mode()) {
        ("background", CopyMode::Background) => Ok(()),
        ("write-blocking", _) => {
            mirror.block_writes();
            Ok(())
        }
        _ => {
            let text = format!("Change to copy mode '{wanted}' is not implemented");
            Err(QmpError::generic(text))
        }
    }
}
