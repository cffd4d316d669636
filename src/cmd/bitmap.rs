//! `bitmap`: changes persistent dirty bitmaps, with qemu-img's options and words: several changes
//! of one bitmap, in the order of the command line.
//!
//! They are made in memory, and the image has them when it is closed, all together: after a crash
//! it has the old bitmaps or the new ones. A change that is refused ends the list, and those before
//! it stay.

use std::os::unix::fs::MetadataExt;

use clap::{Arg, ArgAction, ArgMatches, Command};
use cowslip::Error;
use cowslip::file::host::Aio;
use cowslip::file::{ReadAs, ReadSet};
use cowslip::image::{BackingChoice, Image};
use cowslip::qcow2::bitmap::BitmapChange;
use serde_json::json;

use crate::bitmaps::{CHECKPOINT, PUBLISHED};
use crate::error::CommandError;
use crate::open::{
    self, Access, ImageSpec, OpenSettings, Trust, block_on, open_image, warn_of_guessed_raw,
};
use crate::options::bytes_within;
use crate::output::{DoneArgs, Program, is_called_as_qemu};
use crate::size::SIZE_MAX;

/// Command line of `bitmap`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    actions: Actions,
    /// Bytes of the disk per bit of a new bitmap; by default a cluster, within 4 KiB and 64 KiB
    #[arg(short, long, value_name = "SIZE", allow_hyphen_values = true)]
    granularity: Option<String>,
    /// The image that --merge takes bitmaps from
    #[arg(short = 'b', long, value_name = "FILENAME")]
    source_file: Option<String>,
    /// Its format
    #[arg(short = 'F', long, value_name = "FMT")]
    source_format: Option<String>,
    /// The image's format
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    /// FILENAME is a complete image specification
    #[arg(long)]
    image_opts: bool,
    #[command(flatten)]
    done: DoneArgs,
    #[command(flatten)]
    trust: Trust,
    /// The image file, and the name of its bitmap
    #[arg(value_name = "FILENAME BITMAP")]
    words: Vec<String>,
}

/// Action on a bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Action {
    Add,
    Remove,
    Clear,
    Enable,
    Disable,
    Merge(String),
}

impl Action {
    fn name(&self) -> &'static str {
        match self {
            Action::Add => "add",
            Action::Remove => "remove",
            Action::Clear => "clear",
            Action::Enable => "enable",
            Action::Disable => "disable",
            Action::Merge(_) => "merge",
        }
    }
}

/// Actions without a value, and their help.
const PLAIN: [(Action, &str); 5] = [
    (
        Action::Add,
        "Create a bitmap, which records writes from now on",
    ),
    (Action::Remove, "Delete the bitmap"),
    (Action::Clear, "Mark everything in the bitmap as clean"),
    (Action::Enable, "Let the bitmap record writes from now on"),
    (Action::Disable, "Let the bitmap record no further writes"),
];
const MERGE: &str = "merge";
const MERGE_HELP: &str =
    "Add the dirty areas of another bitmap, of this image or of the one that -b names";

/// Actions in the order of the command line, which a derived parser does not keep.
struct Actions(Vec<Action>);

impl clap::Args for Actions {
    fn augment_args(command: Command) -> Command {
        let plain = PLAIN.iter().map(|(action, help)| {
            // An option that counts remembers its last place only.
            let arg = Arg::new(action.name()).long(action.name()).help(*help);
            arg.action(ArgAction::Append)
                .num_args(0)
                .default_missing_value("")
        });
        let merge = Arg::new(MERGE).long(MERGE).help(MERGE_HELP);
        let merge = merge.action(ArgAction::Append).value_name("SOURCE");
        command.args(plain).arg(merge)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Actions::augment_args(command)
    }
}

impl clap::FromArgMatches for Actions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Actions, clap::Error> {
        let mut placed: Vec<(usize, Action)> = Vec::new();
        for (action, _) in &PLAIN {
            let places = matches.indices_of(action.name()).unwrap_or_default();
            placed.extend(places.map(|place| (place, action.clone())));
        }
        let places = matches.indices_of(MERGE).unwrap_or_default();
        let sources = matches.get_many::<String>(MERGE).unwrap_or_default();
        placed.extend(
            places
                .zip(sources)
                .map(|(place, name)| (place, Action::Merge(name.clone()))),
        );
        placed.sort_by_key(|(place, _)| *place);
        Ok(Actions(
            placed.into_iter().map(|(_, action)| action).collect(),
        ))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Actions::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Runs `bitmap`: makes, removes, clears, switches or merges persistent bitmaps. Returns the exit
/// code.
pub fn run(args: &Args, program: &Program) -> u8 {
    program.exit_code(changed(args, program))
}

fn changed(args: &Args, program: &Program) -> Result<(), CommandError> {
    let refuse = |text: &str| Err(CommandError::new(text));
    let granularity = match &args.granularity {
        Some(text) => bytes_within("granularity", text, 0..=SIZE_MAX)?,
        None => 0,
    };
    let has = |wanted: fn(&Action) -> bool| args.actions.0.iter().any(wanted);
    if args.actions.0.is_empty() {
        return refuse(
            "Need at least one of --add, --remove, --clear, --enable, --disable, or --merge",
        );
    }
    if granularity > 0 && !has(|action| *action == Action::Add) {
        return refuse("granularity only supported with --add");
    }
    if args.source_format.is_some() && args.source_file.is_none() {
        return refuse("-F only supported with -b");
    }
    if args.source_file.is_some() && !has(|action| matches!(action, Action::Merge(_))) {
        return refuse("Merge bitmap source file only supported with --merge");
    }
    let [filename, bitmap] = &args.words[..] else {
        return refuse("Expecting filename and bitmap name");
    };
    refuse_checkpoint(&args.actions.0, bitmap)?;
    let spec = open::only(
        std::slice::from_ref(filename),
        args.format.as_deref(),
        args.image_opts,
        ("bitmap", program),
    )?;
    let settings = OpenSettings {
        access: Access::Write,
        // Bitmaps are the image's own.
        backing: BackingChoice::None,
        policy: args.trust.backing_policy,
        ..open::settings()
    };
    block_on(Aio::Auto, async {
        let image = open_image(&spec, &settings).await?;
        warn_of_guessed_raw(&image, &spec)?;
        let changed = change_all(
            args,
            &image,
            bitmap,
            (granularity > 0).then_some(granularity),
        );
        let changed = changed.await;
        let closed = image.close().await;
        changed?;
        Ok(closed?)
    })?;
    args.done.report(false, "", || {
        let actions: Vec<&str> = args.actions.0.iter().map(Action::name).collect();
        json!({ "filename": filename, "bitmap": bitmap, "actions": actions })
    });
    Ok(())
}

/// Refuses to change a checkpoint by itself: those before it would seem to know what has changed;
/// and a bitmap that has what has changed since a published version, but for its end.
fn refuse_checkpoint(actions: &[Action], bitmap: &str) -> Result<(), CommandError> {
    let is_harmless = |action: &Action| matches!(action, Action::Add | Action::Merge(_));
    match bitmap.strip_prefix(CHECKPOINT) {
        Some(name) if !is_called_as_qemu() && !actions.iter().all(is_harmless) => {
            Err(CommandError::new(format!(
                "Bitmap '{bitmap}' is a checkpoint, and checkpoints before it rest on it: \
                 'checkpoint --delete {name}' deletes it"
            )))
        }
        _ if bitmap.starts_with(PUBLISHED) && !is_called_as_qemu() => {
            let keeps_all = |action: &Action| matches!(action, Action::Remove | Action::Merge(_));
            match actions.iter().all(keeps_all) {
                true => Ok(()),
                false => Err(CommandError::new(format!(
                    "Bitmap '{bitmap}' has what has changed since a version was published, and \
                     'publish --track' rests on it: it can be removed"
                ))),
            }
        }
        _ => Ok(()),
    }
}

async fn change_all(
    args: &Args,
    image: &Image,
    bitmap: &str,
    granularity: Option<u64>,
) -> Result<(), CommandError> {
    let source = match &args.source_file {
        Some(file) => {
            refuse_itself(image, file)?;
            let source = open_source(args, file).await?;
            let mut read = ReadSet::default();
            source.add_to(&mut read, ReadAs::Source);
            image.check_overwrites(&read)?;
            Some(source)
        }
        None => None,
    };
    for action in &args.actions.0 {
        let change = match (action, &source) {
            (Action::Add, _) => Ok(BitmapChange::Add { granularity }),
            (Action::Remove, _) => Ok(BitmapChange::Remove),
            (Action::Clear, _) => Ok(BitmapChange::Clear),
            (Action::Enable, _) => Ok(BitmapChange::Enable),
            (Action::Disable, _) => Ok(BitmapChange::Disable),
            (Action::Merge(name), None) => Ok(BitmapChange::Merge(name.clone())),
            (Action::Merge(name), Some(source)) => {
                let bits = source.dirty_bits(name).await;
                bits.map(BitmapChange::MergeBits)
            }
        };
        let changed = match change {
            Ok(change) => image.change_bitmap(bitmap, &change).await,
            Err(error) => Err(error),
        };
        changed.map_err(|error| failed(action, (image, bitmap), &error))?;
    }
    if let Some(source) = source {
        source.close().await?;
    }
    Ok(())
}

/// Refuses a source that is the image itself, maybe under another name: the image's own lock would
/// keep it from being opened, and the message would name this process. QEMU's is that message.
fn refuse_itself(image: &Image, source: &str) -> Result<(), CommandError> {
    let name = &image.layers()[0].name;
    let same = match (std::fs::metadata(name), std::fs::metadata(source)) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => false,
    };
    match same && !is_called_as_qemu() {
        true => Err(CommandError::new(format!(
            "'{source}' is the image '{name}' itself: leave out -b to merge bitmaps of one image"
        ))),
        false => Ok(()),
    }
}

async fn open_source(args: &Args, filename: &str) -> Result<Image, CommandError> {
    let settings = OpenSettings {
        policy: args.trust.backing_policy,
        ..open::settings()
    };
    open_image(
        &ImageSpec::named(filename, args.source_format.as_deref()),
        &settings,
    )
    .await
}

/// Returns the error of a failed action, in QEMU's words.
fn failed(action: &Action, (image, bitmap): (&Image, &str), error: &Error) -> CommandError {
    let name = action.name();
    let why = match (action, error) {
        (Action::Add, Error::Unsupported { .. }) if bitmap.is_empty() => {
            "Bitmap name cannot be empty".to_string()
        }
        (Action::Add, Error::Unsupported { .. }) => {
            let file = &image.layers()[0].name;
            format!("Can't store persistent bitmaps to {file}: Operation not supported")
        }
        (_, Error::Unsupported { .. }) => format!("Dirty bitmap '{bitmap}' not found"),
        _ => error.to_string(),
    };
    CommandError::new(format!("Operation {name} on bitmap {bitmap} failed: {why}"))
}
