//! `commit`: writes what an image holds into its backing file, or into one further down, with
//! qemu-img's options and words.

use cowslip::Error;
use cowslip::commit::{Afterwards, Commit};
use cowslip::file::host::{Aio, HostOptions, open_host_file, resolve_name};
use cowslip::file::{ContentId, Sharing};
use cowslip::image::{DiscardPolicy, Image, OpenOptions};
use serde_json::json;

use super::change::ChangeArgs;
use crate::error::CommandError;
use crate::interrupt::CancelledOnInterrupt;
use crate::job::JobArgs;
use crate::open::{
    self, Access, CacheMode, OneImage, OpenSettings, Source, block_on, open_image,
    warn_of_guessed_raw,
};
use crate::options::bytes_within;
use crate::output::{Program, is_called_as_qemu};
use crate::repair_text::repaired_when_opened;
use crate::size::SIZE_MAX;

/// Command line of `commit`.
#[derive(clap::Args)]
pub struct Args {
    /// Cache mode
    #[arg(short = 't', long, value_name = "CACHE_MODE")]
    #[arg(default_value = "writeback")]
    cache: String,
    /// Image of the backing chain to commit into, instead of the first one; implies --drop
    #[arg(short, long, value_name = "BASE_IMG")]
    base: Option<String>,
    /// Do not empty the image afterwards
    #[arg(short, long)]
    drop: bool,
    /// Maximum rate in bytes per second; 0 is no limit
    #[arg(short, long, value_name = "RATE", allow_hyphen_values = true)]
    rate: Option<String>,
    #[command(flatten)]
    change: ChangeArgs,
    #[command(flatten)]
    image: OneImage,
}

/// Runs `commit`. Returns the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    program.exit_code(committed(&args, program))
}

impl Args {
    /// How the job is shown and paced: `-r` is `--rate-limit`, in qemu-img's words.
    fn shown(&self) -> Result<JobArgs, CommandError> {
        let shown = self.change.job.unless(self.change.quiet);
        let Some(rate) = &self.rate else {
            return Ok(shown);
        };
        let limit = match bytes_within("rate limit", rate, 0..=SIZE_MAX)? {
            0 => None,
            _ => Some(rate.clone()),
        };
        Ok(shown.with_rate(limit))
    }
}

fn committed(args: &Args, program: &Program) -> Result<(), CommandError> {
    let cache = CacheMode::parse(&args.cache)
        .ok_or_else(|| CommandError::new(format!("Invalid cache option: {}", args.cache)));
    let spec = args.image.spec("commit", program)?;
    let settings = OpenSettings {
        access: Access::Write,
        cache: cache?,
        discard: DiscardPolicy::Unmap,
        policy: args.change.trust.backing_policy,
        ..open::settings()
    };
    let shown = args.shown()?;
    let job = shown.job()?;
    let interrupted = CancelledOnInterrupt::new(&job);
    let (outcome, base) = block_on(Aio::Auto, async {
        let image = open_image(&spec, &settings).await?;
        warn_of_guessed_raw(&image, &spec)?;
        let source = spec.resolve()?;
        let commit = Commit {
            depth: depth(args, &image, &source)?,
            afterwards: match args.drop || args.base.is_some() {
                true => Afterwards::Kept,
                false => Afterwards::Empty,
            },
            base: OpenOptions {
                write_policy: settings.cache.write_policy(),
                discard: DiscardPolicy::Unmap,
                dirty: repaired_when_opened(),
                // While data moves into a base, its length is ours, as QEMU's jobs have it.
                sharing: Sharing::FixedLength,
                passphrase: source
                    .opened_by(source.image.backing_key_secret.as_ref(), &settings)?,
                backing_passphrase: source
                    .opened_by(source.image.backing_key_secret.as_ref(), &settings)?,
                ..OpenOptions::default()
            },
        };
        let base = image.layers()[commit.depth].name.clone();
        let committed = image.commit(&commit, &source.gate(&settings), &job).await;
        let closed = image.close().await;
        // The first failure is the one to report.
        Ok((committed.and(closed), base))
    })?;
    if let Err(Error::Cancelled) = outcome {
        let filename = &spec.filename;
        let left = format!(
            "'{filename}' still has all of its data, and a part of it was written into '{base}'; \
             run commit again to complete it"
        );
        return Err(interrupted.report(program, left));
    }
    outcome.map_err(not_committed)?;
    shown.end();
    args.change
        .done
        .report(args.change.quiet, "Image committed.\n", || {
            json!({
                "filename": spec.filename,
                "base": base,
                "emptied": !(args.drop || args.base.is_some()),
            })
        });
    Ok(())
}

/// Why a commit failed: to QEMU's callers the system's answer counts, whatever it was asked.
fn not_committed(error: Error) -> CommandError {
    match &error {
        Error::Io { .. } if is_called_as_qemu() => {
            CommandError::new(format!("Block job failed: {}", error.system_words()))
        }
        _ => error.into(),
    }
}

/// Returns the depth of the layer that receives the data.
fn depth(args: &Args, image: &Image, source: &Source) -> Result<usize, CommandError> {
    let layers = image.layers();
    let Some(base) = &args.base else {
        return match layers.len() {
            0 | 1 => Err(CommandError::new("Image does not have a backing file")),
            _ => Ok(1),
        };
    };
    // As it is named there, or as a file: from where the image is, and under our own name from here
    // too.
    let from_here = (!is_called_as_qemu()).then(|| base.clone());
    let wanted = [Some(resolve_name(&source.filename, base)), from_here];
    let wanted = wanted.map(|name| name.and_then(|name| content_of(&name)));
    let is_base = |id: &Option<ContentId>| id.is_some() && wanted.contains(id);
    let found = (1..layers.len()).find(|&depth| {
        let named = layers[depth - 1].header.as_ref();
        let named = named.and_then(|header| header.backing_file.as_deref());
        named == Some(base) || is_base(&layers[depth].content)
    });
    found.ok_or_else(|| {
        let text = format!(
            "Did not find '{base}' in the backing chain of '{}'",
            source.given
        );
        CommandError::new(text)
    })
}

fn content_of(name: &str) -> Option<ContentId> {
    let path = open::local_name(name).ok()?;
    let file = open_host_file(path.as_ref(), &HostOptions::default());
    file.ok().and_then(|file| file.content_id())
}
