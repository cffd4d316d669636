//! Jobs: progress and cancellation of what runs in another thread.

use cowslip::Job;
use pyo3::prelude::*;

/// A long operation, as seen by others than the one that runs it.
#[pyclass(frozen, name = "Job", module = "cowslip._cowslip")]
#[derive(Default)]
pub struct NativeJob(Job);

impl NativeJob {
    /// The job of a call; one that nobody looks at, if the caller passes none.
    pub fn of(job: Option<&NativeJob>) -> Job {
        job.map(|job| job.0.clone()).unwrap_or_default()
    }
}

#[pymethods]
impl NativeJob {
    #[new]
    fn new() -> NativeJob {
        NativeJob::default()
    }

    /// Asks the operation to end.
    fn cancel(&self) {
        self.0.cancel();
    }

    /// Whether it was asked to end.
    #[getter]
    fn cancelled(&self) -> bool {
        self.0.is_cancelled()
    }

    /// Stage, bytes done, bytes in all.
    fn progress(&self) -> (&'static str, u64, u64) {
        let progress = self.0.progress();
        let stage = progress.stage.name();
        (stage, progress.done_bytes, progress.total_bytes)
    }
}
