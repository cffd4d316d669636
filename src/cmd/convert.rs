//! `convert`: copies the disk of an image, or of several one after the other, into another image.
//!
//! Command line, refusals and exit codes are qemu-img's, and so is what becomes of zeroes, holes
//! and backing files. Whatever ends it early leaves nothing that passes for an image: a new target
//! is removed, one that was there before is emptied; one that `-n` has filled in part stays, and it
//! is said.

use std::time::{Duration, Instant};

use clap::ArgAction;
use cowslip::convert::{
    Converted, CopyMethod, Failure, Form, IN_FLIGHT_FAR, LastSector, OnReadError, Options, Order,
    Plan, Sources, TargetContent,
};
use cowslip::file::host::Aio;
use cowslip::file::{ReadAs, ReadSet, Sharing};
use cowslip::image::Format;
use cowslip::job::Stage;
use cowslip::qcow2::snapshot::SnapshotChoice;
use cowslip::{BufMut, Disk, Error, Image, Job};
use futures_util::future::{Either, select};
use serde_json::{Value, json};

use super::create;
use crate::error::CommandError;
use crate::interrupt::CancelledOnInterrupt;
use crate::job::JobArgs;
use crate::new_file;
use crate::open::{
    self, CacheMode, ImageSpec, OpenSettings, Trust, block_on, chosen_snapshot, foreign,
    open_image, sharing, workers,
};
use crate::options::{self, bytes_within, number_within};
use crate::output::{Program, is_called_as_qemu, print_json};
use crate::size::SIZE_MAX;

mod bitmaps;
mod share;
mod target;

use target::Target;

/// A read of a server that is near takes a fraction of this; one that takes longer is waited for.
const FAR: Duration = Duration::from_millis(4);
/// Bytes that are read to find that out.
const PROBE_BYTES: usize = 512;

/// Command line of `convert`.
#[derive(clap::Args)]
pub struct Args {
    /// Format of the sources
    #[arg(short = 'f', long = "source-format", visible_alias = "format")]
    #[arg(value_name = "FMT")]
    format: Option<String>,
    /// The sources are complete image specifications
    #[arg(long = "source-image-opts", visible_alias = "image-opts")]
    image_opts: bool,
    /// Snapshot of the source to convert
    #[arg(short = 'l', long = "source-snapshot", visible_alias = "snapshot")]
    #[arg(value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Cache mode of the sources
    #[arg(short = 'T', long = "source-cache", value_name = "CACHE")]
    #[arg(default_value = "writeback")]
    source_cache: String,
    /// Format of the target; raw by default
    #[arg(short = 'O', long = "target-format", alias = "output-format")]
    #[arg(value_name = "FMT")]
    target_format: Option<String>,
    /// The target is a complete image specification
    #[arg(long)]
    target_image_opts: bool,
    /// Options of the target's format, as name=value,name=value; `help` lists them
    #[arg(short = 'o', long = "target-options", visible_alias = "options")]
    #[arg(value_name = "OPTIONS", action = ArgAction::Append)]
    #[arg(allow_hyphen_values = true)]
    options: Vec<String>,
    /// Compress the target's clusters
    #[arg(short = 'c', long)]
    compress: bool,
    /// Cache mode of the target
    #[arg(short = 't', long = "target-cache", alias = "output-cache")]
    #[arg(value_name = "CACHE", default_value = "unsafe")]
    target_cache: String,
    /// Backing file of the target: only data of the source's top image is copied
    #[arg(short = 'B', long = "backing", value_name = "FILE")]
    backing: Option<String>,
    /// Format of the backing file
    #[arg(short = 'F', long = "backing-format", value_name = "FMT")]
    backing_format: Option<String>,
    /// Write into an existing target instead of creating it
    #[arg(short = 'n', long)]
    no_create: bool,
    /// The target of -n reads as zeroes
    #[arg(long)]
    target_is_zero: bool,
    /// Zeroes of at least this length become holes; 0 writes all of them
    #[arg(short = 'S', long, value_name = "SIZE")]
    sparse_size: Option<String>,
    /// Copy persistent bitmaps too
    #[arg(long)]
    bitmaps: bool,
    /// Skip inconsistent bitmaps
    #[arg(long)]
    skip_broken_bitmaps: bool,
    /// Open the sources although another process writes to them
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Maximum rate in bytes per second
    #[arg(short = 'r', long, value_name = "RATE", allow_hyphen_values = true)]
    rate: Option<String>,
    /// Number of pieces in flight, 1 to 16, each with up to 2 MiB of memory; by default 8, or 16 if
    /// a server responds slowly
    #[arg(short = 'm', long, value_name = "NUMBER", allow_hyphen_values = true)]
    parallel: Option<String>,
    /// Let the kernel copy (copy_file_range), which shares data on file systems with reflinks
    #[arg(short = 'C', long)]
    copy_range_offloading: bool,
    /// Replace unreadable parts of the source by zeroes
    #[arg(long)]
    salvage: bool,
    /// Write the target in any order
    #[arg(short = 'W', long)]
    oob_writes: bool,
    /// Print nothing
    #[arg(short = 'q', long)]
    quiet: bool,
    /// Print what was done as JSON
    #[arg(long)]
    json: bool,
    /// Start although the data may not fit on the target's file system
    #[arg(long)]
    no_space_check: bool,
    #[command(flatten)]
    trust: Trust,
    #[command(flatten)]
    job: JobArgs,
    /// The source images, and the target
    #[arg(value_name = "SOURCE.. TARGET")]
    names: Vec<String>,
}

/// A command line that makes sense, as far as no file has to be looked at.
struct Request<'a> {
    args: &'a Args,
    sources: &'a [String],
    target: &'a str,
    /// The target's format; `None` if it is a specification.
    format: Option<Format>,
    format_name: &'a str,
    snapshot: Option<SnapshotChoice>,
    /// Options of the new image: names and values, checked one by one.
    created: Vec<(String, String)>,
    source_cache: CacheMode,
    target_cache: CacheMode,
    options: Options,
    /// The target has been opened for writing, or is about to be.
    begun: bool,
}

/// Runs `convert`. Returns the exit code.
pub fn run(args: &Args, program: &Program) -> u8 {
    program.exit_code(converted(args, program))
}

fn converted(args: &Args, program: &Program) -> Result<(), CommandError> {
    if args.options.iter().any(|list| options::asks_for_help(list)) {
        let name = args.target_format.as_deref().unwrap_or("raw");
        let target = args.names.last().filter(|_| args.names.len() > 1);
        return create::print_help(name, target.map(String::as_str), program);
    }
    let mut request = Request::new(args, program)?;
    let mut job_args = args.job.unless(args.quiet);
    if let Some(rate) = rate(args)? {
        job_args = job_args.with_rate(Some(rate));
    }
    let job = job_args.job()?;
    let interrupted = CancelledOnInterrupt::new(&job);
    let begun = Instant::now();
    // Threads copy from and to the page cache side by side; a ring would do so in one.
    let done = block_on(Aio::Threads, request.convert(&job, program));
    if job.is_cancelled() && done.is_err() {
        return Err(interrupted.report(program, request.what_is_left(&job)));
    }
    let done = done?;
    job_args.end();
    if args.json {
        print_json(&request.report(done, begun.elapsed().as_secs_f64()));
    }
    Ok(())
}

/// `-r`; 0 is no limit.
fn rate(args: &Args) -> Result<Option<String>, CommandError> {
    let Some(text) = &args.rate else {
        return Ok(None);
    };
    let rate = bytes_within("rate limit", text, 0..=SIZE_MAX)?;
    Ok((rate > 0).then(|| rate.to_string()))
}

/// Reads `-m`.
///
/// # Errors
/// Not a number from 1 to 16.
pub fn parallel(text: &str) -> Result<u64, CommandError> {
    number_within("number of coroutines", text, 1..=16)
}

/// Reads `-S`.
///
/// # Errors
/// No size, or none that holes can have.
pub fn sparse_bytes(text: &str) -> Result<u64, CommandError> {
    const BYTES_MAX: u64 = 16 << 20;
    let what = "buffer size for sparse output";
    match bytes_within(what, text, 0..=SIZE_MAX)? {
        bytes if bytes.is_multiple_of(512) && bytes <= BYTES_MAX => Ok(bytes),
        _ => Err(CommandError::new(format!(
            "Invalid {what} specified. Valid sizes are multiples of 512 up to {BYTES_MAX}. Select 0 to disable \
             sparse detection (fully allocates output)."
        ))),
    }
}

/// Whether a read takes longer than [`FAR`]: then more has to be under way. Where nothing waits,
/// pieces that no cache holds any more only cost.
async fn is_far(sources: &[Image]) -> bool {
    for image in sources {
        let is_remote = image.layers().iter().any(|layer| layer.id.is_none());
        if !is_remote || image.size() == 0 {
            continue;
        }
        // A read error is reported when the range is copied.
        let probe = BufMut::zeroed(PROBE_BYTES).into();
        let read = Box::pin(async move { drop(Disk::read(image, 0, probe).await) });
        let time = Box::pin(cowslip_queue::sleep(FAR));
        if let Either::Right((_, read)) = select(read, time).await {
            // To its end: it may be loading a table that all other reads would wait for.
            read.await;
            return true;
        }
    }
    false
}

impl<'a> Request<'a> {
    fn new(args: &'a Args, program: &Program) -> Result<Request<'a>, CommandError> {
        let snapshot = chosen_snapshot(args.snapshot.as_deref(), program)?;
        let sparse_bytes = match &args.sparse_size {
            Some(text) => sparse_bytes(text)?,
            None => Options::default().sparse_bytes,
        };
        let in_flight = match &args.parallel {
            Some(text) => parallel(text)? as usize,
            None => Options::default().in_flight,
        };
        refuse_contradictions(args)?;
        let (target, sources) = match &args.names[..] {
            [sources @ .., target] if !sources.is_empty() => (target, sources),
            _ => return Err(CommandError::new("Must specify image file name")),
        };
        let source_cache = CacheMode::parse(&args.source_cache).ok_or_else(|| {
            CommandError::new(format!(
                "Invalid source cache option: {}",
                args.source_cache
            ))
        })?;
        Ok(Request {
            args,
            sources,
            target,
            format: None,
            format_name: args.target_format.as_deref().unwrap_or("raw"),
            snapshot,
            created: Vec::new(),
            target_cache: CacheMode::default(),
            source_cache,
            options: Options {
                in_flight,
                order: if args.oob_writes {
                    Order::Any
                } else {
                    Order::Guest
                },
                form: if args.compress {
                    Form::Compressed
                } else {
                    Form::Plain
                },
                sparse_bytes,
                unwritten: TargetContent::Zeroes,
                unreadable: match args.salvage {
                    true => OnReadError::BecomesZero,
                    false => OnReadError::Fails,
                },
                means: match args.copy_range_offloading {
                    true => CopyMethod::Offload,
                    false => CopyMethod::Copy,
                },
                last_sector: LastSector::Whole,
            },
            begun: false,
        })
    }

    /// Chooses the target from the options. This happens after the sources have been opened, as in
    /// qemu-img, so that their errors are reported first.
    fn choose_target(&mut self) -> Result<(), CommandError> {
        let args = self.args;
        self.format = match args.target_image_opts {
            true => None,
            false => Some(self.target_format()?),
        };
        self.created = self.options_of_creation()?;
        self.target_cache = CacheMode::parse(&args.target_cache).ok_or_else(|| {
            CommandError::new(format!("Invalid cache option: {}", args.target_cache))
        })?;
        Ok(())
    }

    /// The format of a new target, or in which one that exists is opened.
    fn target_format(&self) -> Result<Format, CommandError> {
        let named = create::creatable_format(self.format_name);
        named.map_err(|unknown| match self.args.no_create {
            true => {
                let why = foreign::driver_refused(self.format_name);
                CommandError::opening(self.target, why)
            }
            false => unknown,
        })
    }

    /// Returns the options of `-o`, `-B` and `-F` for a new target.
    fn options_of_creation(&self) -> Result<Vec<(String, String)>, CommandError> {
        let Request {
            args,
            format: Some(format),
            ..
        } = *self
        else {
            return Ok(Vec::new());
        };
        let lists = args.options.iter().map(|list| options::split(list));
        let given = lists.collect::<Result<Vec<_>, _>>()?.concat();
        let mut given = options::normalise(given, &create::options_of(format))?;
        let of_arguments = [
            ("backing_file", &args.backing),
            ("backing_fmt", &args.backing_format),
        ];
        for (name, value) in of_arguments {
            let Some(value) = value else { continue };
            if format != Format::Qcow2 && !args.no_create {
                return Err(create::no_backing(name, self.format_name));
            }
            given.push((name.to_string(), value.clone()));
        }
        let value = |name| options::value(&given, name);
        if value("backing_file") == Some("") {
            let text = "Expected backing file name, got empty string";
            return Err(CommandError::new(text));
        }
        if value("backing_file").is_some() && self.sources.len() > 1 {
            let text = "Having a backing file for the target makes no sense when concatenating multiple input \
                        images";
            return Err(CommandError::new(text));
        }
        if !args.no_create && value("backing_file").is_some() && value("backing_fmt").is_none() {
            let text = "Use of backing file requires explicit backing format";
            return Err(CommandError::new(text));
        }
        if args.compress && format != Format::Qcow2 {
            let text = "Compression not supported for this file format";
            return Err(CommandError::new(text));
        }
        let old_way = value("encryption").map(|on| options::switch("encryption", on));
        let encrypts = old_way.transpose()? == Some(true) || value("encrypt.format").is_some();
        if args.compress && encrypts {
            let text = "Compression and encryption not supported at the same time";
            return Err(CommandError::new(text));
        }
        if args.compress && value("preallocation").is_some_and(|mode| mode != "off") {
            let text = "Compression and preallocation not supported at the same time";
            return Err(CommandError::new(text));
        }
        Ok(given)
    }

    fn has_backing(&self) -> bool {
        options::value(&self.created, "backing_file").is_some()
    }

    async fn convert(&mut self, job: &Job, program: &Program) -> Result<Converted, CommandError> {
        let sources = self.open_sources().await?;
        self.choose_target()?;
        let wanted = bitmaps::wanted(self.args, &sources, program).await?;
        if self.may_share(&sources) {
            self.begun = true;
            if let Some(done) = share::share(&sources[0], self.target, job).await? {
                return Ok(done);
            }
        }
        let disks = Sources::new(&sources);
        let warn = |failure: &Failure| {
            if !self.args.quiet {
                // qemu-img says so in other words where it goes on.
                program.warn(words(failure).replace("reading at byte", "reading offset"));
            }
        };
        let backing = target::named_backing(self).await?;
        let read = files_read(&sources, backing.as_ref());
        let existing = match self.args.no_create {
            true => Some(Target::open(self, &read, disks.size()).await?),
            false => None,
        };
        let mut options = self.options;
        options.unwritten = match &existing {
            Some(target) => target.unwritten(self),
            None => target::unwritten_when_made(self, backing.as_ref().map(Image::size))?,
        };
        if self.args.parallel.is_none() && is_far(&sources).await {
            options.in_flight = IN_FLIGHT_FAR;
        }
        let plan = Plan::new(&disks, options, job, &warn).await;
        let mut plan = plan.map_err(failed)?;
        self.begun = true;
        let target = match existing {
            Some(target) => target,
            None => Target::make(self, (&read, disks.size()), (plan.found(), job)).await?,
        };
        let copied = async {
            bitmaps::refuse_target(self.args, target.image())?;
            if options.unwritten == TargetContent::Zeroes && !target.is_zero(self) {
                // A data file that was there before keeps its bytes.
                options.unwritten = TargetContent::Unknown;
                plan = Plan::new(&disks, options, job, &warn)
                    .await
                    .map_err(failed)?;
            }
            let done = plan.run(target.image(), job).await.map_err(failed)?;
            bitmaps::copy(&wanted, (&sources[0], target.image())).await?;
            Ok(done)
        };
        let done = copied.await;
        target.end(done).await
    }

    async fn open_sources(&self) -> Result<Vec<Image>, CommandError> {
        let several = self.sources.len() > 1;
        let is_name = matches!(self.snapshot, Some(SnapshotChoice::IdOrName(_)));
        let mut settings = OpenSettings {
            snapshot: self.snapshot.clone().filter(|_| !(several && is_name)),
            cache: self.source_cache,
            aio: Aio::Threads,
            sharing: sharing(self.args.force_share, Sharing::Frozen),
            policy: self.args.trust.backing_policy,
            workers: workers(),
            ..open::settings()
        };
        let mut images = Vec::new();
        for name in self.sources {
            let spec = ImageSpec {
                image_opts: self.args.image_opts,
                ..ImageSpec::named(name, self.args.format.as_deref())
            };
            images.push(open_image(&spec, &settings).await?);
            // Said by its parts, it is a snapshot of the first one.
            settings.snapshot = None;
        }
        if is_name && several {
            let text = "No support for concatenating multiple snapshot";
            return Err(CommandError::new(text));
        }
        Ok(images)
    }

    /// Whether the target may simply share the source's data: a copy of a raw file, and nothing
    /// else asked for. Not under QEMU's name, since scripts use that copy to make holes of zeroes.
    fn may_share(&self, sources: &[Image]) -> bool {
        let args = self.args;
        let [source] = sources else { return false };
        let asks = args.no_create
            || args.sparse_size.is_some()
            || args.salvage
            || args.rate.is_some()
            || !self.created.is_empty();
        let is_raw = source.layers()[0].format == Format::Raw;
        !is_called_as_qemu() && !asks && is_raw && self.format == Some(Format::Raw)
    }

    /// Describes the leftovers of a cancelled conversion.
    fn what_is_left(&self, job: &Job) -> String {
        let target = self.target;
        match (self.args.no_create, job.progress().stage) {
            (true, Stage::Begin) => format!("'{target}' is unchanged"),
            (true, _) => format!("'{target}' contains an incomplete copy"),
            (false, _) => new_file::what_is_left(target, job),
        }
    }

    fn report(&self, done: Converted, seconds: f64) -> Value {
        json!({
            "sources": self.sources,
            "target": self.target,
            "format": self.format.map(create::format_name),
            "virtual-size": done.size,
            "bytes-read": done.read_bytes,
            "bytes-written": done.written_bytes,
            "bytes-compressed": done.compressed_bytes,
            "bytes-zeroed": done.zeroed_bytes,
            "bytes-offloaded": done.offloaded_bytes,
            "bytes-lost": done.lost_bytes,
            "seconds": seconds,
        })
    }
}

/// The files that a conversion reads: those of the sources and of the target's backing chain.
fn files_read(sources: &[Image], backing: Option<&Image>) -> ReadSet {
    let mut read = ReadSet::default();
    for source in sources {
        source.add_to(&mut read, ReadAs::Source);
    }
    if let Some(backing) = backing {
        backing.add_to(&mut read, ReadAs::Backing);
    }
    read
}

/// Options that do not go together, and those that are not there.
fn refuse_contradictions(args: &Args) -> Result<(), CommandError> {
    let both = "--image-opts and --format are mutually exclusive";
    let of_formats = [
        (args.image_opts && args.format.is_some(), both),
        (
            args.target_image_opts && !args.no_create,
            "--target-image-opts requires use of -n flag",
        ),
        (args.target_image_opts && args.target_format.is_some(), both),
        (
            args.skip_broken_bitmaps && !args.bitmaps,
            "Use of --skip-broken-bitmaps requires --bitmaps",
        ),
        (
            args.compress && args.copy_range_offloading,
            "Cannot enable copy offloading when -c is used",
        ),
        (
            args.sparse_size.is_some() && args.copy_range_offloading,
            "Cannot enable copy offloading when -S is used",
        ),
        (
            args.salvage && args.copy_range_offloading,
            "Cannot use copy offloading in salvaging mode",
        ),
        (
            args.target_is_zero && !args.no_create,
            "--target-is-zero requires use of -n flag",
        ),
        (
            args.no_create && !args.options.is_empty(),
            "-o has no effect when skipping image creation",
        ),
    ];
    match of_formats.iter().find(|(refused, _)| *refused) {
        Some((_, text)) => Err(CommandError::new(*text)),
        None => Ok(()),
    }
}

/// A failure in qemu-img's words; under our own name with what the engine knows of it.
fn words(failure: &Failure) -> String {
    let (what, error) = match failure {
        Failure::Extents(at, error) => (
            format!("error while reading block status at offset {at}"),
            error,
        ),
        Failure::Reading(at, error) => (format!("error while reading at byte {at}"), error),
        Failure::Writing(at, error) => (format!("error while writing at byte {at}"), error),
        Failure::Cancelled => return Error::Cancelled.to_string(),
    };
    match is_called_as_qemu() {
        true => format!("{what}: {}", error.system_words()),
        false => format!("{what}: {error}"),
    }
}

fn failed(failure: Failure) -> CommandError {
    CommandError::new(words(&failure))
}

/// A command line's mistake that only the files show.
fn too_small() -> CommandError {
    CommandError::new("output file is smaller than input file")
}
