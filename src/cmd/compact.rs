//! `compact`: space of an image's file comes back, in place: clusters move from its end into free
//! ones, leaks are freed, the file is cut, and what is free in it becomes holes.
//!
//! Interrupted, it gives back what it has emptied by then.

use std::time::Instant;

use cowslip::Error;
use cowslip::file::host::Aio;
use cowslip::image::{BackingChoice, Image};
use cowslip::qcow2::compact::{BUDGET_BYTES, CompactOptions, Compaction, CompactionPlan};
use cowslip::{BufMut, Job};
use serde_json::{Value, json};

use super::change::ChangeArgs;
use crate::compaction::{figures, reaches};
use crate::error::CommandError;
use crate::interrupt::CancelledOnInterrupt;
use crate::open::{self, Access, OpenSettings, block_on, open_image};
use crate::options;
use crate::output::{Program, counted};
use crate::size;

/// Bytes that are read to find out how long moving takes.
const TRIAL_BYTES: u64 = 16 << 20;
/// Extents of the disk that are looked at for these bytes.
const TRIAL_EXTENTS: usize = 256;

/// Command line of `compact`.
#[derive(clap::Args)]
#[command(after_help = "\
Clusters move from the end of the file into free ones before it; the file is cut behind the last one in use, and \
what is free before becomes holes. No second file is needed, and at most --budget of additional space at a time. \
Interrupted or cancelled, the command gives back what it has emptied by then; killed, or after a power failure, the image \
is sound but for leaks, which the next compaction frees. Subclusters that hold nothing lose their space too, unless \
--keep-subclusters says otherwise. Tables of several clusters, and \
compressed clusters that continue in the next cluster of the file, stay where they are; --plan says what holds the end \
of the file. With --zeroes or --dedupe-backing, --plan reads all data, as they do. \
With --defragment clusters move that lie well before the end, too, and most of them twice; what it has done when it is \
interrupted is in order from the beginning of the disk on. \
See docs/compaction.md.")]
pub struct Args {
    /// The image's format
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    /// FILENAME is a complete image specification
    #[arg(long)]
    image_opts: bool,
    /// Show what would be moved and what would come back, and change nothing
    #[arg(long)]
    plan: bool,
    /// Additional space that may be taken at a time; 64M if not given
    #[arg(long, value_name = "SIZE")]
    budget: Option<String>,
    /// Length of the file that suffices; without it, as short as possible
    #[arg(long, value_name = "SIZE")]
    target_size: Option<String>,
    /// Before that, take the space of clusters that hold zeroes, preallocated ones too
    #[arg(long)]
    zeroes: bool,
    /// Before that, take the space of clusters that hold what the backing file shows there
    #[arg(long)]
    dedupe_backing: bool,
    /// Leave the space of subclusters that hold nothing: writes to them need none then
    #[arg(long)]
    keep_subclusters: bool,
    /// Leave extents of the file system as they are: btrfs frees the space of holes only with the
    /// rest of the extents that they are in, which is written elsewhere for that
    #[arg(long)]
    keep_extents: bool,
    /// Also put the disk's clusters into the guest's order, until they lie in at most 1.2 times as
    /// few extents as there can be
    #[arg(long)]
    defragment: bool,
    #[command(flatten)]
    change: ChangeArgs,
    /// The image file
    #[arg(value_name = "FILENAME")]
    filename: Vec<String>,
}

/// Runs `compact`. Returns the exit code.
pub fn run(args: &Args, program: &Program) -> u8 {
    program.exit_code(compacted(args, program))
}

fn compacted(args: &Args, program: &Program) -> Result<(), CommandError> {
    let spec = open::only(
        &args.filename,
        args.format.as_deref(),
        args.image_opts,
        ("compact", program),
    )?;
    let settings = OpenSettings {
        access: match args.plan {
            true => Access::Read,
            false => Access::Write,
        },
        backing: match args.dedupe_backing {
            true => BackingChoice::AsNamed,
            // Nothing of the layers below is looked at.
            false => BackingChoice::None,
        },
        policy: args.change.trust.backing_policy,
        ..open::settings()
    };
    let options = wanted(args)?;
    let job = args.change.job.job()?;
    let interrupted = CancelledOnInterrupt::new(&job);
    let outcome = block_on(Aio::Auto, async {
        let image = open_image(&spec, &settings).await?;
        let done = carry_out(&image, args, (&options, &job)).await;
        let closed = image.close().await;
        // The first failure is the one to report.
        Ok(done.and_then(|done| closed.map(|()| done)))
    })?;
    let filename = &args.filename[0];
    match outcome {
        Err(Error::Cancelled) if args.plan => {
            let left = format!("'{filename}' is as it was");
            Err(interrupted.report(program, left))
        }
        Err(Error::Cancelled) => {
            let left = format!("what was moved in '{filename}' by then has been given back");
            Err(interrupted.report(program, left))
        }
        outcome => {
            let done = outcome?;
            args.change.job.end();
            let words = done.words(filename);
            let value = || done.json(filename);
            args.change.done.report(args.change.quiet, &words, value);
            Ok(())
        }
    }
}

fn wanted(args: &Args) -> Result<CompactOptions, CommandError> {
    let budget_bytes = match &args.budget {
        Some(text) => options::size("budget", text)?,
        None => BUDGET_BYTES,
    };
    let target = args.target_size.as_deref();
    let target_bytes = target.map(|text| options::size("target-size", text));
    Ok(CompactOptions {
        budget_bytes,
        target_bytes: target_bytes.transpose()?,
        zeroes: args.zeroes,
        dedupe_backing: args.dedupe_backing,
        subclusters: !args.keep_subclusters,
        defragment: args.defragment,
        whole_extents: !args.keep_extents,
    })
}

/// Outcome of the command.
enum Done {
    Planned {
        plan: CompactionPlan,
        /// Bytes that are read in a second.
        rate: Option<f64>,
    },
    Compacted(Compaction),
}

async fn carry_out(
    image: &Image,
    args: &Args,
    (options, job): (&CompactOptions, &Job),
) -> Result<Done, Error> {
    if args.plan || options.target_bytes.is_some() {
        let plan = image.compaction_plan(options, job).await?;
        reaches(&plan, options)?;
        if args.plan {
            let rate = read_rate(image).await?;
            return Ok(Done::Planned { plan, rate });
        }
    }
    image.compact(options, job).await.map(Done::Compacted)
}

/// How fast the image's data is read, by reading some of it.
async fn read_rate(image: &Image) -> Result<Option<f64>, Error> {
    let extents = image.extents(0, image.size(), TRIAL_EXTENTS).await?;
    let begun = Instant::now();
    let mut bytes = 0;
    for extent in extents.iter().filter(|extent| extent.data) {
        let len = extent.len.min(TRIAL_BYTES - bytes);
        if len == 0 {
            break;
        }
        image
            .read(extent.start, BufMut::zeroed(len as usize))
            .await?;
        bytes += len;
    }
    let seconds = begun.elapsed().as_secs_f64();
    Ok((bytes > 0 && seconds > 0.0).then(|| bytes as f64 / seconds))
}

impl Done {
    fn words(&self, filename: &str) -> String {
        match self {
            Done::Planned { plan, rate } => {
                let mut words = format!(
                    "'{filename}' would have {} instead of {}: {} would move, {} is free, {} leaked.\n",
                    size::human(plan.file_bytes_after),
                    size::human(plan.file_bytes),
                    size::human(plan.moved_bytes),
                    size::human(plan.free_bytes),
                    size::human(plan.leaked_bytes),
                );
                if plan.redundant_bytes > 0 {
                    let redundant = size::human(plan.redundant_bytes);
                    words += &format!("{redundant} of the disk would lose their space before.\n");
                }
                if plan.subcluster_bytes > 0 {
                    let unused = size::human(plan.subcluster_bytes);
                    words +=
                        &format!("{unused} of subclusters that hold nothing would come back.\n");
                }
                if let Some(after) = plan.extents_after {
                    let (now, perfect) = (plan.extents, plan.extents_perfect);
                    words += &format!(
                        "The disk would lie in {} instead of {now}; {perfect} is perfect.\n",
                        counted(after, "extent")
                    );
                }
                if let Some(seconds) = seconds(plan, *rate) {
                    words += &format!("It would take about {:.0} s.\n", seconds.ceil());
                }
                if let Some(what) = plan.held_by {
                    words += &format!("The end is held by {what}, which stay where they are.\n");
                }
                words
            }
            Done::Compacted(done) => {
                let mut words = format!(
                    "'{filename}' has {} instead of {}: {} moved.\n",
                    size::human(done.file_bytes),
                    size::human(done.file_bytes_before),
                    size::human(done.moved_bytes),
                );
                if done.redundant_bytes > 0 {
                    let redundant = size::human(done.redundant_bytes);
                    words += &format!("{redundant} of the disk needed no space of their own.\n");
                }
                if done.subcluster_bytes > 0 {
                    let unused = size::human(done.subcluster_bytes);
                    words += &format!("{unused} of subclusters that held nothing came back.\n");
                }
                if done.rewritten_bytes > 0 {
                    let rewritten = size::human(done.rewritten_bytes);
                    words += &format!(
                        "The file system has written {rewritten} elsewhere, so that it frees what \
                         lies between.\n"
                    );
                }
                if let Some(order) = done.defragmentation {
                    words += &format!(
                        "The disk lies in {} instead of {}; {} is perfect.\n",
                        counted(order.extents, "extent"),
                        order.extents_before,
                        order.extents_perfect
                    );
                }
                words
            }
        }
    }

    fn json(&self, filename: &str) -> Value {
        match self {
            Done::Planned { plan, rate } => json!({
                "filename": filename,
                "file-length": plan.file_bytes,
                "file-length-after": plan.file_bytes_after,
                "moved-bytes": plan.moved_bytes,
                "used-bytes": plan.used_bytes,
                "free-bytes": plan.free_bytes,
                "leaked-bytes": plan.leaked_bytes,
                "data-bytes": plan.data_bytes,
                "extents": plan.extents,
                "extents-perfect": plan.extents_perfect,
                "extents-after": plan.extents_after,
                "redundant-bytes": plan.redundant_bytes,
                "subcluster-bytes": plan.subcluster_bytes,
                "held-by": plan.held_by,
                "seconds": seconds(plan, *rate),
            }),
            Done::Compacted(done) => {
                let mut value = figures(done);
                value["filename"] = filename.into();
                value
            }
        }
    }
}

/// How long the moves take, if they are written as fast as they are read.
fn seconds(plan: &CompactionPlan, rate: Option<f64>) -> Option<f64> {
    match plan.moved_bytes {
        0 => Some(0.0),
        moved => rate.map(|rate| 2.0 * moved as f64 / rate),
    }
}
