//! `snapshot`: lists, makes, applies and deletes internal snapshots, with qemu-img's options and
//! words.
//!
//! Interrupted, a change is taken back, unless it has been made already: then it goes to its end.

use std::time::{SystemTime, UNIX_EPOCH};

use clap::ArgAction;
use cowslip::file::Sharing;
use cowslip::file::host::Aio;
use cowslip::image::{DiscardPolicy, Format, Image};
use cowslip::qcow2::inspect::SnapshotInfo;
use cowslip::qcow2::snapshot::{NewSnapshot, SnapshotChoice};
use cowslip::{Error, Job};
use serde_json::{Value, json};

use super::info::{snapshot_json, snapshot_lines};
use crate::error::CommandError;
use crate::interrupt::CancelledOnInterrupt;
use crate::job::JobArgs;
use crate::layer::{ImageFileInfo, InspectOptions};
use crate::open::{
    self, Access, ImageSpec, OneImage, OpenSettings, Trust, block_on, open_image, sharing,
    warn_of_guessed_raw,
};
use crate::output::{self, Program, print, print_json, usage_error};

/// Command line of `snapshot`.
#[derive(clap::Args)]
pub struct Args {
    /// List the snapshots; the default
    #[arg(short, long, action = ArgAction::Count)]
    list: u8,
    /// Create a snapshot of this name, which others may have too
    #[arg(short, long, value_name = "NAME", action = ArgAction::Append)]
    create: Vec<String>,
    /// Revert the disk to the snapshot with this ID or name; its current contents are lost
    #[arg(short, long, value_name = "ID|NAME", action = ArgAction::Append)]
    apply: Vec<String>,
    /// Delete the first snapshot of this name; under the name cowslip also the one with this ID
    #[arg(short, long, value_name = "NAME|ID", action = ArgAction::Append)]
    delete: Vec<String>,
    /// List the snapshots of an image although another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Print the list, or what was done, as JSON
    #[arg(long)]
    json: bool,
    /// Accepted for compatibility: nothing but lists is printed
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    trust: Trust,
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    image: OneImage,
}

/// Action on a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action<'a> {
    List,
    Create(&'a str),
    Apply(&'a str),
    Delete(&'a str),
}

impl<'a> Action<'a> {
    /// Returns the action's name, and the snapshot's.
    fn words(self) -> (&'static str, &'a str) {
        match self {
            Action::List => ("list", ""),
            Action::Create(name) => ("create", name),
            Action::Apply(name) => ("apply", name),
            Action::Delete(name) => ("delete", name),
        }
    }

    /// Returns the error of an action that has failed, in QEMU's words.
    fn failed(self, error: &Error, format: Format) -> CommandError {
        let (verb, name) = self.words();
        let is_unknown = matches!(error, Error::Io { source, .. }
            if source.kind() == std::io::ErrorKind::NotFound);
        let is_unsupported = matches!(error, Error::Unsupported { .. });
        let why = match self {
            Action::List => return CommandError::new(error.to_string()),
            Action::Delete(_) if is_unknown || is_unsupported => "snapshot not found".to_string(),
            Action::Apply(_) if is_unsupported && format != Format::Qcow2 => {
                "Block driver does not support snapshots".to_string()
            }
            Action::Apply(_) if is_unknown || is_unsupported => {
                format!("Failed to load snapshot: {}", error.system_words())
            }
            Action::Create(_) if is_unsupported => error.system_words(),
            _ => error.to_string(),
        };
        CommandError::new(format!("Could not {verb} snapshot '{name}': {why}"))
    }
}

impl Args {
    fn action(&self, program: &Program) -> Result<Action<'_>, CommandError> {
        let creates = self.create.iter().map(|name| Action::Create(name));
        let applies = self.apply.iter().map(|name| Action::Apply(name));
        let deletes = self.delete.iter().map(|name| Action::Delete(name));
        let lists = (0..self.list).map(|_| Action::List);
        let mut actions = lists.chain(creates).chain(applies).chain(deletes);
        match (actions.next(), actions.next()) {
            (action, None) => Ok(action.unwrap_or(Action::List)),
            (_, Some(_)) => {
                let text = "Cannot mix '-l', '-a', '-c', '-d'";
                Err(usage_error(text, "snapshot", program))
            }
        }
    }
}

/// Runs the verb. Returns the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    program.exit_code(done(&args, program))
}

fn done(args: &Args, program: &Program) -> Result<(), CommandError> {
    let action = args.action(program)?;
    let spec = args.image.spec("snapshot", program)?;
    match action {
        Action::List => list(args, &spec),
        action => change(args, &spec, action, program),
    }
}

fn list(args: &Args, spec: &ImageSpec) -> Result<(), CommandError> {
    let source = spec.resolve()?;
    let inspect_options = InspectOptions::of_image(&source, args.force_share, &args.trust);
    let layer = block_on(Aio::Auto, async {
        let layer = ImageFileInfo::inspect_source(&source, &inspect_options).await;
        layer.map_err(|why| CommandError::opening(&source.given, why.to_string()))
    })?;
    let snapshots: &[SnapshotInfo] = match &layer.inspection {
        Some(inspection) => &inspection.snapshots,
        None => &[],
    };
    if args.json {
        print_json(&Value::Array(snapshots.iter().map(snapshot_json).collect()));
    } else if !snapshots.is_empty() {
        let lines = snapshot_lines(snapshots);
        print(&format!("Snapshot list:\n{}\n", lines.join("\n")));
    }
    Ok(())
}

fn change(
    args: &Args,
    spec: &ImageSpec,
    action: Action<'_>,
    program: &Program,
) -> Result<(), CommandError> {
    let settings = OpenSettings {
        access: Access::Write,
        discard: DiscardPolicy::Unmap,
        sharing: sharing(args.force_share, Sharing::AsFormat),
        policy: args.trust.backing_policy,
        ..open::settings()
    };
    let job = args.job.job()?;
    let interrupted = CancelledOnInterrupt::new(&job);
    let (outcome, format) = block_on(Aio::Auto, async {
        let image = open_image(spec, &settings).await?;
        warn_of_guessed_raw(&image, spec)?;
        let format = image.layers()[0].format;
        let changed = perform(&image, action, &job).await;
        let closed = image.close().await;
        // The first failure is the one to report.
        Ok((changed.and(closed), format))
    })?;
    match outcome {
        Err(Error::Cancelled) => {
            let filename = &spec.filename;
            Err(interrupted.report(program, format_args!("'{filename}' is unchanged")))
        }
        Err(error) => Err(action.failed(&error, format)),
        Ok(()) => {
            args.job.end();
            if args.json && !args.quiet {
                let (verb, name) = action.words();
                print_json(&json!({ "filename": spec.filename, "action": verb, "name": name }));
            }
            Ok(())
        }
    }
}

async fn perform(image: &Image, action: Action<'_>, job: &Job) -> cowslip::Result<()> {
    match action {
        Action::List => Ok(()),
        Action::Create(name) => {
            let created = image.create_snapshot(&new_snapshot(name), job).await;
            created.map(|_id| ())
        }
        Action::Apply(name) => {
            let choice = SnapshotChoice::IdOrName(name.to_string());
            image.apply_snapshot(&choice, job).await
        }
        Action::Delete(name) => {
            let choice = SnapshotChoice::Name(name.to_string());
            let is_unknown = |error: &Error| {
                matches!(error, Error::Io { source, .. }
                    if source.kind() == std::io::ErrorKind::NotFound)
            };
            match image.delete_snapshot(&choice, job).await {
                // QEMU's tool knows names only: a script may rely on that.
                Err(error) if is_unknown(&error) && !output::is_called_as_qemu() => {
                    let choice = SnapshotChoice::Id(name.to_string());
                    image.delete_snapshot(&choice, job).await
                }
                outcome => outcome,
            }
        }
    }
}

/// A snapshot that is taken now; as by QEMU's tools, to the microsecond.
fn new_snapshot(name: &str) -> NewSnapshot {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    NewSnapshot {
        name: name.to_string(),
        date_sec: u32::try_from(now.as_secs()).unwrap_or(u32::MAX),
        date_nsec: now.subsec_micros() * 1000,
    }
}
