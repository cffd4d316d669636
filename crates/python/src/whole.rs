//! Operations on whole images. Each blocks; the package runs it in a thread with a job.

use cowslip::Job;
use cowslip::qcow2::check::Finding;
use cowslip_embed::ConvertOptions;
use pyo3::prelude::*;

use crate::error::to_python;
use crate::handle::Kind;
use crate::image::NativeImage;
use crate::job::NativeJob;
use crate::options::{Making, Opening};
use crate::run;

/// Findings of which a check keeps the words; a hostile image has any number.
const FINDINGS_MAX: usize = 1000;

/// Makes an image.
#[pyfunction]
pub fn create(
    py: Python<'_>,
    name: &str,
    options: Making,
    job: Option<&NativeJob>,
) -> PyResult<()> {
    let image = options.image().map_err(to_python)?;
    run(py, cowslip_embed::create(name, &image, &NativeJob::of(job)))
}

/// Counts of a check: corruptions, leaks, errors, allocated, fragmented and all clusters.
type Counts = (u64, u64, u64, u64, u64, u64);

/// Checks an image; returns counts, and findings in words.
#[pyfunction]
pub fn check(
    py: Python<'_>,
    name: &str,
    options: Opening,
    job: Option<&NativeJob>,
) -> PyResult<(Counts, Vec<String>)> {
    let request = options.request().map_err(to_python)?;
    let mut findings = Vec::new();
    let mut note = |finding: &Finding| {
        if findings.len() < FINDINGS_MAX {
            findings.push(finding.to_string());
        }
    };
    let job: Job = NativeJob::of(job);
    let checked = run(py, cowslip_embed::check(name, &request, (&mut note, &job)))?;
    let counts = (
        checked.corruptions,
        checked.leaks,
        checked.check_errors,
        checked.allocated_clusters,
        checked.fragmented_clusters,
        checked.total_clusters,
    );
    Ok((counts, findings))
}

/// Copies the disk of an image to that of another, which may have been made just now; returns bytes
/// read, written and zeroed.
#[pyfunction]
pub fn convert(
    py: Python<'_>,
    source: &NativeImage,
    target: &NativeImage,
    flags: (bool, bool),
    job: Option<&NativeJob>,
) -> PyResult<(u64, u64, u64)> {
    let source = source.handle.begin(Kind::Call)?;
    let target = target.handle.begin(Kind::Call)?;
    let job = NativeJob::of(job);
    let (compressed, is_new) = flags;
    let options = ConvertOptions {
        compressed,
        target_is_zero: is_new && target.is_zero_when_new(),
    };
    let done = run(
        py,
        cowslip_embed::convert((&source, &target), options, &job),
    )?;
    Ok((done.read_bytes, done.written_bytes, done.zeroed_bytes))
}

/// Writes an image into its backing file and empties it.
#[pyfunction]
pub fn commit(
    py: Python<'_>,
    name: &str,
    options: Opening,
    job: Option<&NativeJob>,
) -> PyResult<()> {
    let request = options.request().map_err(to_python)?;
    run(
        py,
        cowslip_embed::commit(name, &request, &NativeJob::of(job)),
    )
}
