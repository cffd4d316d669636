//! `rebase`: changes the backing file of an image, with qemu-img's options and messages.
//!
//! The default is safe, and preserves the contents of the disk: where the new backing file differs,
//! the old data is written into the image first. With `-u` (unsafe) only the header changes. A
//! chain that would be a loop is refused either way, except with `-u` under the name `qemu-img`,
//! which permits it.

use cowslip::Error;
use cowslip::convert::Form;
use cowslip::file::host::{Aio, resolve_name};
use cowslip::file::{ReadAs, Sharing};
use cowslip::image::{BackingChoice, Format, Image};
use cowslip::qcow2::amend::{Amendment, BackingFile};
use serde_json::json;

use super::change::ChangeArgs;
use crate::error::CommandError;
use crate::interrupt::CancelledOnInterrupt;
use crate::layer::{self, ImageFileInfo, InspectOptions};
use crate::open::{
    self, Access, CacheMode, ImageSpec, OneImage, OpenSettings, Source, block_on, foreign,
    format_named, open_image, sharing, warn_of_guessed_raw,
};
use crate::output::{Program, is_called_as_qemu, usage_error};

/// Command line of `rebase`.
#[derive(clap::Args)]
pub struct Args {
    /// The new backing file, relative to the image; empty for none
    #[arg(short, long, value_name = "BACKING_FILENAME")]
    backing: Option<String>,
    /// The new backing file's format
    #[arg(short = 'F', long, value_name = "BACKING_FMT")]
    backing_format: Option<String>,
    /// Change the header only; the contents of the disk may change
    #[arg(short = 'u', long)]
    backing_unsafe: bool,
    /// Compress clusters that have to be written
    #[arg(short, long)]
    compress: bool,
    /// Cache mode of the image
    #[arg(short = 't', long, value_name = "CACHE", default_value = "writeback")]
    cache: String,
    /// Cache mode of the new backing file
    #[arg(short = 'T', long, value_name = "BACKING_CACHE")]
    #[arg(default_value = "writeback")]
    backing_cache: String,
    /// Open the new backing file although another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    change: ChangeArgs,
    #[command(flatten)]
    image: OneImage,
}

/// Runs `rebase`. Returns the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    program.exit_code(rebased(&args, program))
}

impl Args {
    /// The name in the header; empty for none.
    fn name(&self) -> &str {
        self.backing.as_deref().unwrap_or_default()
    }

    fn could_not_change(&self, why: impl std::fmt::Display) -> CommandError {
        let name = self.name();
        CommandError::new(format!(
            "Could not change the backing file to '{name}': {why}"
        ))
    }

    fn could_not_open(&self, why: impl std::fmt::Display) -> CommandError {
        let name = self.name();
        CommandError::new(format!("Could not open new backing file '{name}': {why}"))
    }

    /// Returns the backing file for the header.
    fn header(&self, format: Option<Format>) -> Result<BackingFile, CommandError> {
        match (self.name(), format) {
            ("", _) => Ok(BackingFile::None),
            (_, None) => Err(self.could_not_change("backing format must be specified")),
            (name, Some(_)) => Ok(BackingFile::File {
                name: name.to_string(),
                format: self.backing_format.clone().unwrap_or_default(),
            }),
        }
    }

    fn backing_format(&self) -> Result<Option<Format>, CommandError> {
        let parse = |name: &str| match (format_named(name), foreign::format_refused(name)) {
            (Some(format), _) => Ok(format),
            // Nobody looks at the file then.
            (None, Some(_)) if self.backing_unsafe => Ok(Format::Raw),
            (None, Some(refused)) => Err(CommandError::new(refused)),
            (None, None) => Err(CommandError::new(format!("Invalid format name: '{name}'"))),
        };
        self.backing_format.as_deref().map(parse).transpose()
    }
}

fn rebased(args: &Args, program: &Program) -> Result<(), CommandError> {
    let spec = args.image.spec("rebase", program)?;
    if !args.backing_unsafe && args.backing.is_none() {
        let text = "Must specify backing file (-b) or use unsafe mode (-u)";
        return Err(usage_error(text, "rebase", program));
    }
    let parse = |name: &str, what: &str| {
        CacheMode::parse(name).ok_or_else(|| CommandError::new(format!("Invalid {what}: {name}")))
    };
    let settings = OpenSettings {
        access: Access::Write,
        cache: parse(&args.cache, "cache option")?,
        backing: match args.backing_unsafe {
            true => BackingChoice::None,
            false => BackingChoice::AsNamed,
        },
        policy: args.change.trust.backing_policy,
        ..open::settings()
    };
    let backing_settings = OpenSettings {
        cache: parse(&args.backing_cache, "source cache option")?,
        sharing: sharing(args.force_share, Sharing::AsFormat),
        policy: args.change.trust.backing_policy,
        key_secret: spec.resolve()?.image.backing_key_secret,
        ..open::settings()
    };
    let shown = args.change.job.unless(args.change.quiet);
    let job = shown.job()?;
    let interrupted = CancelledOnInterrupt::new(&job);
    let outcome = block_on(Aio::Auto, async {
        let image = open_image(&spec, &settings).await?;
        warn_of_guessed_raw(&image, &spec)?;
        let asked = (args, &spec.resolve()?);
        let changed = change(&image, asked, &backing_settings, &job).await;
        let closed = image.close().await;
        // The first failure is the one to report.
        Ok(changed?.and(closed))
    })?;
    if let Err(Error::Cancelled) = outcome {
        let left = "the backing file and the contents of the disk are unchanged";
        return Err(interrupted.report(program, left));
    }
    outcome.map_err(|error| args.could_not_change(error))?;
    shown.end();
    args.change.done.report(args.change.quiet, "", || {
        json!({
            "filename": spec.filename,
            "backing-filename": args.backing.as_deref().filter(|name| !name.is_empty()),
            "backing-filename-format": args.backing_format,
            "copied": !args.backing_unsafe,
        })
    });
    Ok(())
}

/// Changes the backing file. What is refused by us is the outer error, what the engine says the
/// inner one.
async fn change(
    image: &Image,
    (args, source): (&Args, &Source),
    settings: &OpenSettings,
    job: &cowslip::Job,
) -> Result<cowslip::Result<()>, CommandError> {
    let format = args.backing_format()?;
    let is_raw = image.layers().first().map(|layer| layer.format) == Some(Format::Raw);
    if is_raw && args.compress {
        let text = "Compression not supported for this file format";
        return Err(CommandError::new(text));
    }
    if is_raw && args.backing_unsafe {
        args.header(format)?;
        return Err(args.could_not_change("Operation not supported"));
    }
    let resolved = resolve_name(&source.filename, args.name());
    if !args.backing_unsafe {
        layer::description((&source.filename, &resolved))
            .map_err(|why| args.could_not_open(why))?;
    }
    let makes_loops = args.backing_unsafe && is_called_as_qemu();
    if !args.name().is_empty() && !makes_loops {
        refuse_loop(image, (args, source), format, settings).await?;
    }
    if args.backing_unsafe {
        let amendment = Amendment::of_backing(args.header(format)?);
        return Ok(image.amend(&amendment, job).await);
    }
    let new = match args.name() {
        "" => None,
        _ => {
            let spec = ImageSpec::named(&resolved, args.backing_format.as_deref());
            let opened = open_image(&spec, settings).await;
            Some(opened.map_err(|error| args.could_not_open(error.reason_not_to_open()))?)
        }
    };
    let storage = match args.compress {
        true => Form::Compressed,
        false => Form::Plain,
    };
    let backing = args.header(format)?;
    if is_raw {
        return Err(args.could_not_change("Operation not supported"));
    }
    let rebased = image.rebase(new.as_ref(), backing, storage, job).await;
    if let Some(new) = new {
        new.close().await?;
    }
    Ok(rebased)
}

/// Refuses a backing file that is, or whose chain has, the image itself, or that is stored where
/// the image writes. A file that cannot be opened is no loop; opening it for the rebase reports
/// why.
async fn refuse_loop(
    image: &Image,
    (args, source): (&Args, &Source),
    format: Option<Format>,
    settings: &OpenSettings,
) -> Result<(), CommandError> {
    let inspect_options = InspectOptions {
        sharing: Sharing::Forced,
        policy: settings.policy,
        ..InspectOptions::default()
    };
    let named = (source.filename.as_str(), args.name());
    let Ok(first) = ImageFileInfo::inspect_named_by(named, format, &inspect_options).await else {
        return Ok(());
    };
    let chain = layer::openable_chain(first, &inspect_options).await;
    let own = image
        .layers()
        .first()
        .and_then(|layer| layer.content.clone());
    let is_own = |layer: &ImageFileInfo| layer.content.is_some() && layer.content == own;
    if chain.iter().any(is_own) {
        return Err(args.could_not_change("the backing chain would be a loop"));
    }
    let read = layer::read_set(&chain, ReadAs::Backing, &inspect_options).await;
    let checked = image.check_overwrites(&read);
    checked.map_err(|error| args.could_not_change(CommandError::from(error)))
}
