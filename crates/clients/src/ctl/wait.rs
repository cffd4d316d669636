//! Jobs until their ends, by their events; a bar shows how far they are.
//!
//! All events since the command was sent are there, so no end is missed. A job that a mirror or a
//! commit of an active image has begun does not end by itself: the wait ends where it is ready,
//! unless it is to be completed; and where a job waits to be finalised.

use std::time::Duration;

use cowslip_console::error::CommandError;
use cowslip_console::interrupt::CancelledOnInterrupt;
use cowslip_console::output::{self, Program};
use cowslip_console::progress::Progress;
use cowslip_console::size;
use cowslip_qmp::Client;
use cowslip_qmp::client::{ClientError, Received};
use serde_json::{Map, Value, json};

use super::{Args, Request, events, failure};

/// The event that has the figures of a compaction.
const COMPACTED: &str = "X_COWSLIP_COMPACTED";
/// Exit code for a job that has failed, or that others have cancelled.
const FAILED: u8 = 3;
/// Time between two looks at the progress, and at whether the wait was interrupted.
const PERIOD: Duration = Duration::from_millis(200);

/// The end of a wait for a job.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    Completed,
    Failed(String),
    Cancelled,
    /// It waits for `job-complete`.
    Ready,
    /// It waits for `job-finalize`.
    Pending,
}

impl End {
    fn status(&self) -> &'static str {
        match self {
            End::Completed => "completed",
            End::Failed(_) => "failed",
            End::Cancelled => "cancelled",
            End::Ready => "ready",
            End::Pending => "pending",
        }
    }
}

struct Job {
    id: String,
    /// As an event has reported it before the end.
    outcome: Option<End>,
    end: Option<End>,
    /// The figures of a compaction.
    compacted: Option<Map<String, Value>>,
}

/// Jobs that are waited for.
pub struct Watched {
    jobs: Vec<Job>,
    completes: bool,
    /// They stay in the daemon's list when they have ended, and their command has no option for
    /// that.
    dismisses: bool,
    cancels: bool,
    watch: bool,
    as_json: bool,
}

impl Watched {
    /// The jobs of a command that is to be sent.
    pub fn new(ids: Vec<String>, request: &Request, args: &Args) -> Watched {
        let job = |id| Job {
            id,
            outcome: None,
            end: None,
            compacted: None,
        };
        Watched {
            jobs: ids.into_iter().map(job).collect(),
            completes: args.complete,
            dismisses: request.command.name == "blockdev-create",
            cancels: !args.no_cancel,
            watch: args.watch,
            as_json: args.json,
        }
    }

    /// The IDs of those that are still waited for.
    fn left(&self) -> Vec<String> {
        let left = self.jobs.iter().filter(|job| job.end.is_none());
        left.map(|job| job.id.clone()).collect()
    }

    /// Notes what an event says. Returns the command that is to be sent because of it.
    fn note(&mut self, event: &Received) -> Option<(&'static str, String)> {
        let text = |name: &str| event.data.get(name).and_then(Value::as_str);
        let id = text("id").or(text("device"))?;
        let completes = self.completes;
        let job = self.jobs.iter_mut().find(|job| job.id == id)?;
        if job.end.is_some() {
            return None;
        }
        match event.name.as_str() {
            "BLOCK_JOB_COMPLETED" => {
                job.outcome = Some(match text("error") {
                    Some(error) => End::Failed(error.to_string()),
                    None => End::Completed,
                });
            }
            COMPACTED => job.compacted = Some(event.data.clone()),
            "BLOCK_JOB_CANCELLED" => job.outcome = Some(End::Cancelled),
            "BLOCK_JOB_PENDING" => job.end = Some(End::Pending),
            "JOB_STATUS_CHANGE" => match text("status")? {
                "ready" if completes => return Some(("job-complete", job.id.clone())),
                "ready" => job.end = Some(End::Ready),
                "concluded" if job.outcome.is_none() => {
                    return Some(("query-jobs", job.id.clone()));
                }
                "concluded" | "null" => {
                    job.end = Some(job.outcome.take().unwrap_or(End::Completed));
                }
                _ => {}
            },
            _ => {}
        }
        None
    }

    /// Takes the end of a job from the list of all.
    fn end_by_list(&mut self, id: &str, jobs: &Value) {
        let jobs = jobs.as_array().into_iter().flatten();
        let found = jobs.into_iter().find(|job| job["id"] == id);
        let error = found.and_then(|job| job["error"].as_str());
        let end = match error {
            Some(error) => End::Failed(error.to_string()),
            None => End::Completed,
        };
        for job in self.jobs.iter_mut().filter(|job| job.id == id) {
            job.end = Some(end.clone());
        }
    }

    /// Says how the wait has ended.
    fn report(&self) -> Result<(), CommandError> {
        if self.as_json {
            let describe = |job: &Job| {
                let end = job.end.clone().unwrap_or(End::Completed);
                let mut found = json!({"id": job.id, "end": end.status()});
                if let End::Failed(error) = end {
                    found["error"] = error.into();
                }
                if let Some(figures) = &job.compacted {
                    found["compacted"] = figures.clone().into();
                }
                found
            };
            output::print_json(&self.jobs.iter().map(describe).collect());
        }
        let mut lines = Vec::new();
        for job in &self.jobs {
            if let (Some(figures), false) = (&job.compacted, self.as_json) {
                output::note(&compaction(figures));
            }
            match &job.end {
                Some(End::Failed(error)) => lines.push(format!("Job '{}': {error}", job.id)),
                Some(End::Cancelled) => lines.push(format!("Job '{}' was cancelled", job.id)),
                Some(end @ (End::Ready | End::Pending)) if !self.as_json => {
                    output::note(&format!("Job '{}' is {}\n", job.id, end.status()));
                }
                _ => {}
            }
        }
        match lines.is_empty() {
            true => Ok(()),
            false => Err(CommandError::new(lines.join("; ")).with_exit_code(FAILED)),
        }
    }
}

/// The figures of a compaction as a line.
fn compaction(figures: &Map<String, Value>) -> String {
    let bytes = |name: &str| figures.get(name).and_then(Value::as_u64).unwrap_or(0);
    let shown = |name: &str| size::human(bytes(name));
    let mut line = format!(
        "The file had {} and has {}; {} moved",
        shown("file-length-before"),
        shown("file-length"),
        shown("moved-bytes")
    );
    for (name, what) in [
        ("leaked-bytes", "of leaks freed"),
        ("redundant-bytes", "of redundant clusters freed"),
    ] {
        if bytes(name) > 0 {
            line.push_str(&format!(", {} {what}", shown(name)));
        }
    }
    line.push('\n');
    line
}

/// Waits for the ends of jobs.
///
/// # Errors
/// One of them has failed, or was cancelled; the connection has ended.
pub fn until_ended(
    client: &mut Client,
    mut watched: Watched,
    program: &Program,
) -> Result<(), CommandError> {
    // It is there for its signal alone.
    let interruption = cowslip::Job::default();
    let interrupted = watched
        .cancels
        .then(|| CancelledOnInterrupt::new(&interruption));
    let is_interrupted = || interrupted.as_ref().is_some_and(|it| it.has_come());
    let bar = Progress::of(0);
    let waited = wait(client, &mut watched, (&bar, &is_interrupted));
    drop(bar);
    waited.map_err(|error| failure(&error))?;
    let came = is_interrupted();
    let is_cancelled = |job: &Job| matches!(job.end, Some(End::Cancelled | End::Failed(_)));
    if let Some(interrupted) = interrupted
        && came
        && watched.jobs.iter().any(is_cancelled)
    {
        let ids: Vec<String> = watched.jobs.iter().map(|it| it.id.clone()).collect();
        let left = format!("job '{}' has ended without its effect", ids.join("', '"));
        return Err(interrupted.report(program, left));
    }
    watched.report()
}

fn wait(
    client: &mut Client,
    watched: &mut Watched,
    (bar, is_interrupted): (&Progress, &dyn Fn() -> bool),
) -> Result<(), ClientError> {
    let mut is_cancelled = false;
    loop {
        let left = watched.left();
        if left.is_empty() {
            return Ok(());
        }
        if !is_cancelled && is_interrupted() {
            is_cancelled = true;
            for id in left {
                unless_refused(client.execute("job-cancel", json!({"id": id})))?;
            }
        }
        let Some(event) = client.next_event(Some(PERIOD))? else {
            let jobs = client.execute("query-jobs", json!({}))?;
            show(bar, watched, &jobs);
            continue;
        };
        if watched.watch {
            bar.suspend(|| events::print(&event, watched.as_json));
        }
        match watched.note(&event) {
            Some(("query-jobs", id)) => {
                let jobs = client.execute("query-jobs", json!({}))?;
                watched.end_by_list(&id, &jobs);
                if watched.dismisses {
                    unless_refused(client.execute("job-dismiss", json!({"id": id})))?;
                }
            }
            Some((command, id)) => {
                // If it is refused, the job's own events say why.
                unless_refused(client.execute(command, json!({"id": id})))?;
            }
            None => {}
        }
    }
}

/// Passes over the refusal of a command whose job may have ended meanwhile.
fn unless_refused(result: Result<Value, ClientError>) -> Result<(), ClientError> {
    match result {
        Ok(_) | Err(ClientError::Refused(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Moves the bar to the progress of all jobs together.
fn show(bar: &Progress, watched: &Watched, jobs: &Value) {
    let is_meant = |job: &&Map<String, Value>| {
        let id = job.get("id").and_then(Value::as_str);
        watched.jobs.iter().any(|it| Some(it.id.as_str()) == id)
    };
    let jobs = jobs.as_array().into_iter().flatten();
    let jobs: Vec<_> = jobs.filter_map(Value::as_object).filter(is_meant).collect();
    let sum = |name: &str| {
        let numbers = jobs.iter().filter_map(|job| job.get(name)?.as_u64());
        numbers.sum()
    };
    bar.stand_at(sum("current-progress"), sum("total-progress"));
    if let Some(status) = jobs.first().and_then(|job| job.get("status")?.as_str()) {
        bar.say(status);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(ids: &[&str], completes: bool) -> Watched {
        let job = |id: &&str| Job {
            id: id.to_string(),
            outcome: None,
            end: None,
            compacted: None,
        };
        Watched {
            jobs: ids.iter().map(job).collect(),
            completes,
            dismisses: false,
            cancels: true,
            watch: false,
            as_json: false,
        }
    }

    fn event(name: &str, data: Value) -> Received {
        Received {
            name: name.to_string(),
            data: data.as_object().cloned().unwrap(),
            time: Duration::ZERO,
        }
    }

    fn status(id: &str, status: &str) -> Received {
        event("JOB_STATUS_CHANGE", json!({"id": id, "status": status}))
    }

    #[test]
    fn a_job_ends_when_its_events_say_so() {
        let mut jobs = watched(&["a", "b"], false);
        for change in ["created", "running", "waiting", "pending"] {
            assert_eq!(jobs.note(&status("a", change)), None);
        }
        assert_eq!(jobs.left(), ["a", "b"]);
        jobs.note(&event("BLOCK_JOB_COMPLETED", json!({"device": "a"})));
        jobs.note(&status("other", "concluded"));
        assert_eq!(jobs.left(), ["a", "b"]);
        jobs.note(&status("a", "concluded"));
        assert_eq!(jobs.left(), ["b"]);
        let failed = json!({"device": "b", "error": "no space"});
        jobs.note(&event("BLOCK_JOB_COMPLETED", failed));
        jobs.note(&status("b", "null"));
        assert!(jobs.left().is_empty());
        let error = jobs.report().unwrap_err();
        assert_eq!(error.to_string(), "Job 'b': no space");
        assert_eq!(error.exit_code(), FAILED);
    }

    #[test]
    fn a_job_without_events_of_disks_ends_by_the_list() {
        let mut jobs = watched(&["c"], false);
        let asks = jobs.note(&status("c", "concluded"));
        assert_eq!(asks, Some(("query-jobs", "c".to_string())));
        jobs.end_by_list("c", &json!([{"id": "c", "error": "it exists"}]));
        assert_eq!(jobs.jobs[0].end, Some(End::Failed("it exists".to_string())));
    }

    #[test]
    fn a_compaction_has_its_figures() {
        let mut jobs = watched(&["c"], false);
        let figures = json!({"id": "c", "file-length-before": 3 << 20, "file-length": 1 << 20,
            "moved-bytes": 65536, "leaked-bytes": 0, "redundant-bytes": 131_072});
        jobs.note(&event(COMPACTED, figures));
        let figures = jobs.jobs[0].compacted.as_ref().unwrap();
        let expected = "The file had 3 MiB and has 1 MiB; 64 KiB moved, 128 KiB of redundant \
                        clusters freed\n";
        assert_eq!(compaction(figures), expected);
    }

    #[test]
    fn a_job_that_is_ready_is_completed_only_if_that_is_asked_for() {
        let mut waits = watched(&["m"], false);
        assert_eq!(waits.note(&status("m", "ready")), None);
        assert_eq!(waits.jobs[0].end, Some(End::Ready));
        let mut completes = watched(&["m"], true);
        let asks = completes.note(&status("m", "ready"));
        assert_eq!(asks, Some(("job-complete", "m".to_string())));
        assert_eq!(completes.left(), ["m"]);
    }
}
