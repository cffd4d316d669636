//! Errors of disks that jobs meet: the policies for them, and what becomes of the jobs.
//!
//! | policy | a copy | a stream |
//! | --- | --- | --- |
//! | `report` | fails | fails |
//! | `ignore` | is tried again later | goes on, and fails at its end |
//! | `stop` | is paused, and tries again when it is resumed | the same |
//! | `enospc`, `auto` | as `stop` where there is no space, else as `report` | the same |

use std::future::poll_fn;
use std::sync::{Mutex, PoisonError};
use std::task::{Poll, Waker};

use cowslip::Error;
use cowslip::job::{Side, Verdict};
use cowslip_qmp::QmpError;

use super::given::Given;

/// The error of a disk that is full.
const ENOSPC: i32 = 28;

/// The consequence of an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Policy {
    #[default]
    Report,
    Ignore,
    Stop,
    StopWithoutSpace,
}

impl Policy {
    fn of(given: &Given, member: &str) -> Result<Option<Policy>, QmpError> {
        Ok(Some(match given.text(member) {
            None => return Ok(None),
            Some("report") => Policy::Report,
            Some("ignore") => Policy::Ignore,
            Some("stop") => Policy::Stop,
            Some("enospc" | "auto") => Policy::StopWithoutSpace,
            Some(other) => {
                let text = format!("Parameter '{member}' does not accept value '{other}'");
                return Err(QmpError::generic(text));
            }
        }))
    }
}

/// The policies of a job for its two disks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Policies {
    source: Policy,
    target: Policy,
}

impl Policies {
    /// Those of a command.
    ///
    /// # Errors
    /// No such policy.
    pub fn of(given: &Given) -> Result<Policies, QmpError> {
        let both = Policy::of(given, "on-error")?.unwrap_or_default();
        Ok(Policies {
            source: Policy::of(given, "on-source-error")?.unwrap_or(both),
            target: Policy::of(given, "on-target-error")?.unwrap_or(both),
        })
    }

    fn verdict(&self, side: Side, error: &Error) -> Verdict {
        let policy = match side {
            Side::Source => self.source,
            Side::Target => self.target,
        };
        match policy {
            Policy::Report => Verdict::Report,
            Policy::Ignore => Verdict::Ignore,
            Policy::StopWithoutSpace if error.errno() != ENOSPC => Verdict::Report,
            Policy::Stop | Policy::StopWithoutSpace => Verdict::Stop,
        }
    }
}

/// An error that a job has met.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    side: Side,
    /// The consequence for the job.
    pub verdict: Verdict,
    /// There was no space.
    pub is_full: bool,
}

impl Fault {
    /// The operation that has failed, as the protocol has it.
    pub fn operation(&self) -> &'static str {
        match self.side {
            Side::Source => "read",
            Side::Target => "write",
        }
    }

    /// The consequence for the job, as the protocol has it.
    pub fn action(&self) -> &'static str {
        match self.verdict {
            Verdict::Report => "report",
            Verdict::Ignore => "ignore",
            Verdict::Stop => "stop",
        }
    }
}

/// The errors that a job has met, until clients have been informed.
#[derive(Debug, Default)]
pub struct Faults {
    policies: Policies,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    met: Vec<Fault>,
    /// The task that informs clients.
    waiting: Option<Waker>,
}

impl Faults {
    /// None so far.
    pub fn new(policies: Policies) -> Faults {
        Faults {
            policies,
            state: Mutex::default(),
        }
    }

    /// Decides what an error means, and keeps it.
    pub fn meet(&self, side: Side, error: &Error) -> Verdict {
        let fault = Fault {
            side,
            verdict: self.policies.verdict(side, error),
            is_full: error.errno() == ENOSPC,
        };
        let mut state = self.lock();
        state.met.push(fault);
        drop(state);
        self.wake();
        fault.verdict
    }

    /// Those of which clients know nothing yet.
    pub fn take(&self) -> Vec<Fault> {
        std::mem::take(&mut self.lock().met)
    }

    /// Waits for one of those, or until `is_over` when it is woken.
    pub async fn wait(&self, is_over: impl Fn() -> bool) {
        poll_fn(|context| {
            let mut state = self.lock();
            if !state.met.is_empty() || is_over() {
                return Poll::Ready(());
            }
            state.waiting = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Has the wait look again.
    pub fn wake(&self) {
        if let Some(waker) = self.lock().waiting.take() {
            waker.wake();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
