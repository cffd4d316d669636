//! `clone`: a second file that shares all its data with the first, by the file system's reflinks
//! (XFS, btrfs): made in an instant, independent of the first from then on.
//!
//! Where the file system has none the refusal offers an overlay, which shares data everywhere;
//! `--copy` copies instead. The source is claimed as backing files are, so nobody writes to it
//! meanwhile. What a qcow2 image names keeps its meaning at the new place.

use std::path::{Path, absolute};
use std::sync::Arc;

use cowslip::file::host::{Aio, reflink, resolve_name};
use cowslip::file::{AlignedFile, BlockFile, Claim, Durability, ReadAs, ReadSet, Sharing};
use cowslip::image::Format;
use cowslip::qcow2::header::Header;
use cowslip::qcow2::inspect::inspect;
use cowslip::{Buf, Error, Job, space};
use serde_json::json;

use super::change::OutcomeArgs;
use super::create::format_name;
use crate::error::CommandError;
use crate::job::JobArgs;
use crate::layer::{self, ImageFileInfo, InspectOptions};
use crate::new_file::NewFile;
use crate::open::{self, ImageSpec, OpenSettings, Source, block_on, open_alone, sharing};
use crate::output::{DoneArgs, Program};

/// How names of published disks begin: a relative one has a directory that is relative.
const PUBLISHED: &str = "published:";

/// Command line of `clone`.
#[derive(clap::Args)]
pub struct Args {
    /// The source's format
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    /// Name of the clone's external data file, if the source has one, which is cloned too
    #[arg(long, value_name = "FILE")]
    data_file: Option<String>,
    /// Copy the data where the file system has no reflinks
    #[arg(long)]
    copy: bool,
    /// Overwrite the new file if it exists
    #[arg(long)]
    force: bool,
    /// The verb on the command line is `create`, which has no `--copy`.
    #[arg(skip)]
    by_create: bool,
    /// Clone the image although another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    outcome: OutcomeArgs,
    /// The image
    source: String,
    /// The new file; one that exists is refused unless --force overwrites it
    target: String,
}

impl Args {
    /// Returns the arguments that stand for `create --reflink`.
    pub fn by_create(source: String, target: String, job: JobArgs) -> Args {
        Args {
            format: None,
            data_file: None,
            copy: false,
            // As `create` does.
            force: true,
            by_create: true,
            force_share: false,
            outcome: OutcomeArgs {
                done: DoneArgs::default(),
                job,
            },
            source,
            target,
        }
    }
}

/// Runs `clone`. Returns the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    program.exit_code(cloned(&args))
}

fn cloned(args: &Args) -> Result<(), CommandError> {
    let job = args.outcome.job.job()?;
    let spec = ImageSpec::named(&args.source, args.format.as_deref());
    let source = spec.resolve()?;
    block_on(Aio::Auto, async {
        let settings = OpenSettings {
            sharing: sharing(args.force_share, Sharing::Frozen),
            ..open::settings()
        };
        let (file, format) = open_alone(&source, &settings).await?;
        let header = match format {
            Format::Qcow2 => Some(usable_header(&file, args).await?),
            Format::Raw | Format::Luks | Format::Other(_) => None,
        };
        let mut read = files_below(&source, format).await;
        read.add(file.as_ref(), ReadAs::Source);
        let claim = match format {
            Format::Qcow2 | Format::Luks | Format::Other(_) => Claim::qcow2(true),
            Format::Raw => Claim::CREATE_RAW,
        };
        let data = match header.as_ref().and_then(Header::data_file_name) {
            Some(name) => Some(clone_data_file(name, &mut read, args, (&settings, &job)).await?),
            None => None,
        };
        let (new, target) = NewFile::open(&args.target, &read, claim)?;
        refuse_existing(&new, &args.target, args)?;
        share(&file, &target, (args, format), &job).await?;
        if let Some(header) = header {
            rename_files(&target, header, args).await?;
        }
        flush(&target).await?;
        sync_directory(&args.target)?;
        new.finished();
        if let Some(data) = data {
            data.finished();
        }
        Ok(())
    })?;
    args.outcome.job.end();
    args.outcome.done.report(false, "", || {
        json!({
            "source": args.source,
            "target": args.target,
            "data-file": args.data_file,
        })
    });
    Ok(())
}

/// The header of an image that is sound, as far as it says itself.
async fn usable_header(file: &Arc<dyn BlockFile>, args: &Args) -> Result<Header, CommandError> {
    let source = &args.source;
    let refuse = |why: String| {
        Err(CommandError::new(format!(
            "Could not clone '{source}': {why}"
        )))
    };
    let header = inspect(file).await?.header;
    if header.is_corrupt() {
        return refuse("it is marked corrupt (check -r all repairs it)".to_string());
    }
    if header.is_dirty() {
        return refuse("it was not closed cleanly (check -r all repairs it)".to_string());
    }
    match (header.data_file_name(), &args.data_file) {
        (Some(name), None) => refuse(format!(
            "its data is in the external data file '{name}', which the clone cannot share; name another one for the clone with --data-file, and it is cloned too"
        )),
        (None, Some(_)) => refuse("it has no external data file".to_string()),
        _ => Ok(header),
    }
}

/// The files of the chain below the source, as far as they are there: the clone needs them too.
async fn files_below(source: &Source, format: Format) -> ReadSet {
    let inspect_options = InspectOptions {
        sharing: Sharing::Forced,
        ..InspectOptions::default()
    };
    let mut source = source.clone();
    source.format = Some(format);
    let Ok(first) = ImageFileInfo::inspect_source(&source, &inspect_options).await else {
        return ReadSet::default();
    };
    let chain = layer::openable_chain(first, &inspect_options).await;
    layer::read_set(&chain, ReadAs::Source, &inspect_options).await
}

/// Refuses to overwrite a file that was there: it may be a disk in use since it was cloned.
fn refuse_existing(new: &NewFile, name: &str, args: &Args) -> Result<(), CommandError> {
    match new.has_existed() && !args.force {
        true => Err(CommandError::new(format!(
            "'{name}' exists already; --force overwrites it"
        ))),
        false => Ok(()),
    }
}

async fn clone_data_file(
    name: &str,
    read: &mut ReadSet,
    args: &Args,
    (settings, job): (&OpenSettings, &Job),
) -> Result<NewFile, CommandError> {
    let target = args.data_file.as_deref().unwrap_or_default();
    let spec = ImageSpec::named(&resolve_name(&args.source, name), Some("raw"));
    let (file, _) = open_alone(&spec.resolve()?, settings).await?;
    read.add(file.as_ref(), ReadAs::Source);
    let target = open::local_name(&resolve_name(&args.target, target))?;
    let (new, target) = NewFile::open(&target, read, Claim::data_file(true))?;
    refuse_existing(&new, target.name(), args)?;
    read.add(target.as_ref(), ReadAs::Image);
    share(&file, &target, (args, Format::Raw), job).await?;
    flush(&target).await?;
    Ok(new)
}

/// Makes the target's bytes those of the source.
async fn share(
    source: &Arc<dyn BlockFile>,
    target: &Arc<dyn BlockFile>,
    (args, format): (&Args, Format),
    job: &Job,
) -> Result<(), CommandError> {
    let cut = target.set_len(0).await;
    cut.map_err(|error| failed("clear", target, error))?;
    let Err(error) = reflink(source.as_ref(), target.as_ref()) else {
        return Ok(());
    };
    let cannot = matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::EXDEV | libc::EINVAL | libc::ENOTTY | libc::ENOSYS)
    );
    if !cannot {
        return Err(failed("clone into", target, error));
    }
    if args.copy {
        let (from, to) = (
            AlignedFile::new(source.clone()),
            AlignedFile::new(target.clone()),
        );
        return Ok(space::copy(&from, &to, job).await?);
    }
    let why = match error.raw_os_error() {
        Some(libc::EXDEV) => {
            "they are on different file systems, and data can only be shared within one"
        }
        _ => "the file system has no reflinks (XFS and btrfs do)",
    };
    let backing = absolute(source.name()).map_or(source.name().to_string(), |path| {
        path.to_string_lossy().into_owned()
    });
    let (from, to) = (quoted(source.name()), quoted(&args.target));
    let copying = match args.by_create {
        true => format!("To copy the data instead:\n    cowslip clone --copy {from} {to}"),
        false => "--copy copies the data instead.".to_string(),
    };
    Err(CommandError::new(format!(
        "Could not clone '{}' to '{}': {why}. An overlay shares the data of any image that is no longer \
         written to:\n    cowslip create -f qcow2 -b {} -F {} {to}\n{copying}",
        source.name(),
        target.name(),
        quoted(&backing),
        format_name(format),
    )))
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+,:=@".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_string(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// Relative names in an image are relative to it: in another directory they become absolute. Nobody
/// uses the clone yet, so its header is simply written.
async fn rename_files(
    target: &Arc<dyn BlockFile>,
    header: Header,
    args: &Args,
) -> Result<(), CommandError> {
    let mut new = header.clone();
    let moved = directory(&args.source)? != directory(&args.target)?;
    if let Some(name) = &header.backing_file
        && moved
    {
        let resolved = resolve_name(&args.source, name);
        let is_relative = resolved != *name;
        // In the current directory there is nothing to put before a name.
        if is_relative || (!name.starts_with('/') && !name.contains(':')) {
            let (kind, path) = match resolved.strip_prefix(PUBLISHED) {
                Some(store) => (PUBLISHED, store),
                None => ("", resolved.as_str()),
            };
            let path = absolute(path);
            let path = path.map_err(|error| CommandError::new(error.to_string()))?;
            new.backing_file = Some(format!("{kind}{}", path.display()));
        }
    }
    if args.data_file.is_some() {
        new.extensions.data_file.clone_from(&args.data_file);
    }
    if new == header {
        return Ok(());
    }
    let mut bytes = new.encode()?;
    let was = header.clone().encode()?.len();
    // The rest of a longer header belongs to no structure.
    bytes.resize(bytes.len().max(was), 0);
    let file = AlignedFile::new(target.clone());
    file.write(0, vec![Buf::from(bytes)], Durability::Cached)
        .await?;
    Ok(())
}

/// The directory that a file is in.
fn directory(name: &str) -> Result<std::path::PathBuf, CommandError> {
    let parent = Path::new(name).parent().unwrap_or(Path::new(""));
    let parent = match parent.as_os_str().is_empty() {
        true => Path::new("."),
        false => parent,
    };
    std::fs::canonicalize(parent).map_err(|error| {
        let error = Error::io(format!("Could not open '{}'", parent.display()), error);
        CommandError::from(error)
    })
}

async fn flush(file: &Arc<dyn BlockFile>) -> Result<(), CommandError> {
    let flushed = file.flush().await;
    flushed.map_err(|error| failed("flush", file, error))
}

/// Makes the new name durable.
fn sync_directory(name: &str) -> Result<(), CommandError> {
    let path = directory(name)?;
    let synced = std::fs::File::open(&path).and_then(|directory| directory.sync_all());
    synced.map_err(|error| {
        let error = Error::io(format!("Could not flush '{}'", path.display()), error);
        CommandError::from(error)
    })
}

fn failed(verb: &str, file: &Arc<dyn BlockFile>, error: std::io::Error) -> CommandError {
    CommandError::from(Error::io(
        format!("Could not {verb} '{}'", file.name()),
        error,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell_where_they_must_be() {
        assert_eq!(quoted("/a/b-1.qcow2"), "/a/b-1.qcow2");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), "'it'\\''s'");
        assert_eq!(quoted(""), "''");
    }
}
