//! Long operations: progress and cancellation.

use std::ffi::{c_int, c_void};

use cowslip::Job;
use cowslip::job::{Attendant, Progress};

use crate::error::{cowslip_error, guarded};
use crate::pointer;

/// A long operation; C knows its address alone.
#[allow(non_camel_case_types)] // Its name in C.
#[derive(Debug)]
pub struct cowslip_job {
    job: Job,
}

/// Progress of a job.
#[allow(non_camel_case_types)] // Its name in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct cowslip_progress {
    /// Bytes that are done.
    pub done_bytes: u64,
    /// Bytes of the whole job, as far as known.
    pub total_bytes: u64,
}

impl From<Progress> for cowslip_progress {
    fn from(progress: Progress) -> cowslip_progress {
        cowslip_progress {
            done_bytes: progress.done_bytes,
            total_bytes: progress.total_bytes,
        }
    }
}

/// Is called after each piece of work.
type Report = unsafe extern "C" fn(user: *mut c_void, progress: *const cowslip_progress);

/// A callback of C, and its first argument.
struct Reporter {
    report: Report,
    user: *mut c_void,
}

// SAFETY: the header demands that it may be called from any thread.
unsafe impl Send for Reporter {}
// SAFETY: as above; the header says that calls do not overlap within a job.
unsafe impl Sync for Reporter {}

impl Attendant for Reporter {
    fn progress(&self, progress: Progress) {
        let progress = cowslip_progress::from(progress);
        // SAFETY: the header demands that it may be called with what came with it.
        unsafe { (self.report)(self.user, &raw const progress) };
    }
}

/// The job behind a handle; one that nobody watches for null.
///
/// # Safety
/// `job` is null or a job that was not freed.
pub(crate) unsafe fn job_of(job: *const cowslip_job) -> Job {
    // SAFETY: the caller's promise.
    let job = unsafe { pointer::reference(job) };
    job.map(|job| job.job.clone()).unwrap_or_default()
}

/// Makes a job for one operation.
///
/// # Safety
/// Pointers are null or as the header has them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_job_new(
    report: Option<Report>,
    user: *mut c_void,
    job: *mut *mut cowslip_job,
    error: *mut *mut cowslip_error,
) -> c_int {
    let work = || {
        let made = match report {
            Some(report) => Job::attended(Reporter { report, user }),
            None => Job::default(),
        };
        // SAFETY: the caller's promise.
        unsafe { pointer::give_handle(job, cowslip_job { job: made }, "job") }
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, work) }
}

/// Has the operation end soon; from any thread, and from the job's own callback.
///
/// # Safety
/// `job` is null or a job that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_job_cancel(job: *const cowslip_job) {
    // SAFETY: the caller's promise.
    if let Some(job) = unsafe { pointer::reference(job) } {
        job.job.cancel();
    }
}

/// The progress now; from any thread.
///
/// # Safety
/// `job` is null or a job that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_job_get(job: *const cowslip_job) -> cowslip_progress {
    // SAFETY: the caller's promise.
    let job = unsafe { pointer::reference(job) };
    let progress = job.map(|job| cowslip_progress::from(job.job.progress()));
    progress.unwrap_or(cowslip_progress {
        done_bytes: 0,
        total_bytes: 0,
    })
}

/// Frees a job; its operation, if it is under way, goes on.
///
/// # Safety
/// `job` is null or a job that was not freed; it is freed now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cowslip_job_free(job: *mut cowslip_job) {
    // SAFETY: the caller's promise.
    unsafe { pointer::free(job) };
}
