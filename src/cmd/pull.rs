//! `pull`: copies a published disk to a new image of any format. All bytes are checked; the image
//! gets its name when it is complete, and what was interrupted is continued.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::ArgAction;
use cowslip::file::host::{Aio, FlushPolicy};
use cowslip::file::{ReadSet, Sharing};
use cowslip::image::Format;
use cowslip::{Error, Job};
use cowslip_publish::catalog;
use cowslip_publish::disk::{CACHE_BYTES, PublishedDisk};
use cowslip_publish::location::{Location, Version};
use cowslip_publish::pull::{Before, Pulled, pull};
use serde_json::json;

use super::change::OutcomeArgs;
use super::create;
use super::publish::StoreArgs;
use crate::error::CommandError;
use crate::interrupt::CancelledOnInterrupt;
use crate::new_file::NewFile;
use crate::open::{self, Access, ImageSpec, OpenSettings, block_on, open_image, workers};
use crate::options;
use crate::output::Program;

/// Command line of `pull`.
#[derive(clap::Args)]
#[command(after_help = "\
Until it is complete, the image is in FILE.part; run the same command again to continue what was interrupted: what is \
there is compared with the digests and not fetched again. More: docs/published-images.md.")]
pub struct Args {
    /// Format of the new image
    #[arg(short = 'O', long = "target-format", value_name = "FMT")]
    #[arg(default_value = "qcow2")]
    target_format: String,
    /// Options of that format, as for `create`
    #[arg(short = 'o', long = "options", value_name = "OPTIONS", action = ArgAction::Append, allow_hyphen_values = true)]
    options: Vec<String>,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    outcome: OutcomeArgs,
    /// The published disk: STORE/NAME, the newest version, or STORE/NAME@VERSION
    name: String,
    /// The new image, which must not exist
    file: String,
}

/// Runs `pull`. Returns the exit code.
pub fn run(args: &Args, program: &Program) -> u8 {
    program.exit_code(pulled(args, program))
}

/// Where the image is until it is complete.
fn part_of(file: &str) -> String {
    format!("{file}.part")
}

fn pulled(args: &Args, program: &Program) -> Result<(), CommandError> {
    let name = args.name.strip_prefix("published:").unwrap_or(&args.name);
    let location = Location::parse(name)?;
    let format = create::creatable_format(&args.target_format)?;
    refuse_existing(&args.file)?;
    let shown = args.outcome.job.unless(args.quiet);
    let job = shown.job()?;
    let store = args.store.open(&location.root)?;
    let interrupted = CancelledOnInterrupt::new(&job);
    let outcome = block_on(Aio::Auto, async {
        let digest = catalog::index_digest(&store, &location).await?;
        let way = (CACHE_BYTES, workers());
        let disk = PublishedDisk::open(&store, digest, name, way).await?;
        let done = copy(args, format, &disk, &job).await?;
        Ok(done.map(|done| (done, location.at(Version::Pinned(digest)), disk.size())))
    })?;
    let (done, location, disk_bytes) = match outcome {
        Ok(done) => done,
        Err(Error::Cancelled) => {
            let part = part_of(&args.file);
            let left = format!("'{part}' contains a part of it; run pull again to continue");
            return Err(interrupted.report(program, left));
        }
        Err(error) => return Err(error.into()),
    };
    shown.end();
    let words = format!("Pulled {location} to '{}'.\n", args.file);
    args.outcome.done.report(args.quiet, &words, || {
        json!({
            "source": format!("published:{location}"),
            "target": args.file,
            "format": create::format_name(format),
            "virtual-size": disk_bytes,
            "data-bytes": done.data_bytes,
            "kept-bytes": done.kept_bytes,
        })
    });
    Ok(())
}

fn refuse_existing(file: &str) -> Result<(), CommandError> {
    match std::fs::symlink_metadata(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed("look at", file, error)),
        Ok(_) => Err(CommandError::new(format!("'{file}' exists already"))),
    }
}

/// Copies the disk to the unfinished image, and gives that its name.
async fn copy(
    args: &Args,
    format: Format,
    disk: &PublishedDisk,
    job: &Job,
) -> Result<cowslip::Result<Pulled>, CommandError> {
    let part = part_of(&args.file);
    let before = match Path::new(&part).try_exists() {
        Ok(true) => Before::Interrupted,
        Ok(false) => Before::Zeroes,
        Err(error) => return Err(failed("look at", &part, error)),
    };
    let opened = match before {
        Before::Interrupted => open_for_writing(&part, format).await,
        Before::Zeroes => {
            make(args, (&part, format), disk.size()).await?;
            open_for_writing(&part, format).await
        }
    };
    let image = opened.map_err(|error| match before {
        Before::Zeroes => error,
        Before::Interrupted => CommandError::new(format!(
            "{error}; remove it to begin from the beginning, if no other pull writes to it"
        )),
    })?;
    if image.size() != disk.size() {
        image.close().await?;
        let text = format!(
            "'{part}' was left by the pull of another disk; remove it to begin from the beginning"
        );
        return Err(CommandError::new(text));
    }
    // A part of a new file that was not written may hold anything in an encrypted image.
    let before = match image.is_zero_when_new() {
        true => before,
        false => Before::Interrupted,
    };
    let done = pull(disk, &image, before, (&workers(), job)).await;
    let flushed = match done.is_ok() {
        true => image.flush().await,
        false => Ok(()),
    };
    let closed = image.close().await;
    let done = done.and_then(|done| flushed.and(closed).map(|()| done));
    if done.is_ok() {
        name_it(Path::new(&part), Path::new(&args.file))?;
    }
    Ok(done)
}

async fn make(args: &Args, (part, format): (&str, Format), size: u64) -> Result<(), CommandError> {
    let lists = args.options.iter().map(|list| options::split(list));
    let given = lists.collect::<Result<Vec<_>, _>>()?.concat();
    let given = options::normalise(given, &create::options_of(format))?;
    for refused in ["backing_file", "data_file", "encrypt.format", "key-secret"] {
        if options::value(&given, refused).is_some() {
            let text = format!("pull has no option '{refused}': 'cowslip convert' has it");
            return Err(CommandError::new(text));
        }
    }
    let request = create::Request {
        destination: open::destination(part)?,
        format,
        options: given,
        size: Some(size),
        flush: FlushPolicy::Honour,
    };
    let files = create::make_files(&request, ReadSet::default(), &Job::default()).await?;
    files.into_iter().for_each(NewFile::finished);
    Ok(())
}

async fn open_for_writing(part: &str, format: Format) -> Result<cowslip::Image, CommandError> {
    let settings = OpenSettings {
        access: Access::Write,
        workers: workers(),
        sharing: Sharing::AsFormat,
        ..open::settings()
    };
    open_image(&ImageSpec::named(part, Some(format.name())), &settings).await
}

/// Gives a complete image its name, for good.
///
/// # Errors
/// There is a file of this name; I/O.
pub(super) fn name_it(part: &Path, file: &Path) -> cowslip::Result<()> {
    let flags = rustix::fs::RenameFlags::NOREPLACE;
    let here = rustix::fs::CWD;
    let failed = |verb: &str, of: &Path, error: std::io::Error| {
        Error::io(format!("Could not {verb} '{}'", of.display()), error)
    };
    match rustix::fs::renameat_with(here, part, here, file, flags) {
        Ok(()) => {}
        // Not every file system has it.
        Err(rustix::io::Errno::INVAL) if !file.exists() => {
            std::fs::rename(part, file).map_err(|error| failed("rename", part, error))?;
        }
        Err(error) => return Err(failed("rename", part, error.into())),
    }
    let parent = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    };
    let synced = std::fs::File::open(parent).and_then(|directory| directory.sync_all());
    synced.map_err(|error| failed("flush the directory of", file, error))
}

fn failed(verb: &str, file: &str, error: std::io::Error) -> CommandError {
    CommandError::from(Error::io(format!("Could not {verb} '{file}'"), error))
}
