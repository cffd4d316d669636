//! Operations on whole images: check, convert, close, and descriptions of snapshots.

use std::time::{SystemTime, UNIX_EPOCH};

use cowslip::commit::{Afterwards, Commit};
use cowslip::convert::{Converted, Form, Options, Plan, Sources, TargetContent};
use cowslip::file::Sharing;
use cowslip::image::{DiscardPolicy, Format, OpenOptions};
use cowslip::qcow2::check::{self, CheckOptions, CheckResult, Finding, Observer};
use cowslip::qcow2::snapshot::NewSnapshot;
use cowslip::{Error, Image, Job, Result};
use cowslip_nodes::{ImageSpec, open_alone, open_image};

use crate::open::OpenRequest;

/// How [`convert`] copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConvertOptions {
    /// Clusters are stored compressed.
    pub compressed: bool,
    /// The target reads as zeroes: nothing was written since it was made, on a new file.
    pub target_is_zero: bool,
}

/// Copies the disk of an image to that of another, which is at least as long, with holes as holes,
/// and flushes.
///
/// # Errors
/// The target is shorter; the first failure, when all I/O has ended; [`Error::Cancelled`]. Part of
/// the target is written then.
pub async fn convert(
    (source, target): (&Image, &Image),
    options: ConvertOptions,
    job: &Job,
) -> Result<Converted> {
    let mut sources = Sources::default();
    sources.add(source, 0..source.size());
    if sources.size() > target.size() {
        return Err(Error::Invalid(format!(
            "The target has {} bytes, the source {}",
            target.size(),
            sources.size()
        )));
    }
    let options = Options {
        form: match options.compressed {
            true => Form::Compressed,
            false => Form::Plain,
        },
        unwritten: match options.target_is_zero {
            true => TargetContent::Zeroes,
            false => TargetContent::Unknown,
        },
        ..Options::default()
    };
    // Failures of reads end the copy, so there is none to be shown.
    let watch = |_: &cowslip::convert::Failure| {};
    let plan = Plan::new(&sources, options, job, &watch).await;
    let plan = plan.map_err(cowslip::convert::Failure::into_error)?;
    let done = plan.run(target, job).await;
    let done = done.map_err(cowslip::convert::Failure::into_error)?;
    target.flush().await?;
    Ok(done)
}

/// Writes what the image of a name holds into its backing file, durably, and empties the image. It
/// is opened for that, and closed.
///
/// # Errors
/// As [`Image::commit`]: whatever it is, the image shows its disk as before.
pub async fn commit(name: &str, request: &OpenRequest, job: &Job) -> Result<()> {
    let spec = ImageSpec::named(name, request.format.as_deref());
    let settings = OpenRequest {
        writable: true,
        discard: DiscardPolicy::Unmap,
        ..request.clone()
    };
    let settings = settings.settings();
    let source = spec.resolve_by(&settings.environment.registry)?;
    let image = open_image(&spec, &settings).await?;
    let commit = Commit {
        depth: 1,
        afterwards: Afterwards::Empty,
        base: OpenOptions {
            write_policy: settings.cache.write_policy(),
            discard: settings.discard,
            // While data moves into a base, its length is ours.
            sharing: Sharing::FixedLength,
            passphrase: request.passphrase.clone(),
            backing_passphrase: request.passphrase.clone(),
            ..OpenOptions::default()
        },
    };
    let committed = image.commit(&commit, &source.gate(&settings), job).await;
    // The first failure is the one to report.
    committed.and(image.close().await)
}

/// Checks the structures of the image of a name. Its findings go to `report`; nothing is changed.
///
/// # Errors
/// It cannot be opened or read; its format has no check ([`Error::Unsupported`]);
/// [`Error::Cancelled`].
pub async fn check(
    name: &str,
    request: &OpenRequest,
    (report, job): (&mut (dyn FnMut(&Finding) + Send), &Job),
) -> Result<CheckResult> {
    let spec = ImageSpec::named(name, request.format.as_deref());
    let settings = request.settings();
    let source = spec.resolve_by(&settings.environment.registry)?;
    let (file, format) = open_alone(&source, &settings).await?;
    if format != Format::Qcow2 {
        return Err(Error::Unsupported {
            file: name.to_string(),
            feature: "checks of this image format".into(),
        });
    }
    let mut observer = Reporter { report, job };
    let options = CheckOptions::default();
    let checking = check::check(&file, &options, &mut observer);
    cancellable(checking, job).await
}

/// Ends a future that does not know of the job when the job is cancelled: it changes nothing.
async fn cancellable<T>(work: impl Future<Output = Result<T>>, job: &Job) -> Result<T> {
    let mut work = std::pin::pin!(work);
    std::future::poll_fn(|context| match job.check() {
        Err(cancelled) => std::task::Poll::Ready(Err(cancelled)),
        Ok(()) => work.as_mut().poll(context),
    })
    .await
}

struct Reporter<'a> {
    report: &'a mut (dyn FnMut(&Finding) + Send),
    job: &'a Job,
}

impl Observer for Reporter<'_> {
    fn finding(&mut self, finding: &Finding) {
        (self.report)(finding);
    }

    fn progress(&mut self, done_bytes: u64, total_bytes: u64) {
        let known = self.job.progress();
        self.job
            .expect(total_bytes.saturating_sub(known.total_bytes));
        self.job.done(done_bytes.saturating_sub(known.done_bytes));
    }
}

/// Flushes, if the image is writable, and closes it.
///
/// # Errors
/// As [`Image::close`].
pub async fn close(image: &Image) -> Result<()> {
    if image.is_writable() {
        image.flush().await?;
    }
    image.close().await
}

/// A snapshot of this name, taken now.
pub fn new_snapshot(name: &str) -> NewSnapshot {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default();
    NewSnapshot {
        name: name.to_string(),
        date_sec: u32::try_from(now.as_secs()).unwrap_or(u32::MAX),
        date_nsec: now.subsec_micros() * 1000,
    }
}
