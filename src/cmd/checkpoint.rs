//! `checkpoint`: checkpoints of images that no other process writes; those of disks in use are
//! made by `daemon`.
//!
//! A checkpoint is a persistent bitmap, `checkpoint-NAME`. They lie one behind the other in the
//! image, and the last one notes what changes: so what has changed since one of them is in its
//! bitmap and those behind it. Changes are made in memory, in all images, before any image is
//! closed; each of them has its old bitmaps or its new ones after a crash.

use clap::ArgGroup;
use cowslip::file::host::Aio;
use cowslip::image::{BackingChoice, Image};
use cowslip::qcow2::bitmap::{BitmapChange, DirtyBits};
use cowslip::qcow2::inspect::BitmapInfo;
use cowslip_graph::{Link, complete_from, removed_with};
use serde_json::{Value, json};

use crate::bitmaps::CHECKPOINT;
use crate::error::CommandError;
use crate::open::{self, Access, ImageSpec, OpenSettings, Trust, block_on, open_image};
use crate::output::{Program, print, print_json};

/// Command line of `checkpoint`.
#[derive(clap::Args)]
#[command(group = ArgGroup::new("action").args(["create", "delete", "since"]))]
pub struct Args {
    /// Create a checkpoint of this name in all of the images; without an action they are listed
    #[arg(short, long, value_name = "NAME")]
    create: Option<String>,
    /// Delete a checkpoint: what has changed since then counts for the one before. With one whose
    /// changes are not known those before it go, which cannot be used any more either
    #[arg(short, long, value_name = "NAME")]
    delete: Option<String>,
    /// Print which parts of the disk have changed since this checkpoint
    #[arg(long, value_name = "NAME")]
    since: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    trust: Trust,
    /// qcow2 images
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<String>,
}

/// An image, and its checkpoints, the oldest first.
struct Opened<'a> {
    name: &'a str,
    image: Image,
    checkpoints: Vec<BitmapInfo>,
}

/// Runs `checkpoint`. Returns the exit code.
pub fn run(args: &Args, program: &Program) -> u8 {
    program.exit_code(block_on(Aio::Auto, done(args)))
}

fn bitmap_name(checkpoint: &str) -> String {
    format!("{CHECKPOINT}{checkpoint}")
}

async fn done(args: &Args) -> Result<(), CommandError> {
    let access = match args.create.is_some() || args.delete.is_some() {
        true => Access::Write,
        false => Access::Read,
    };
    let mut opened = Vec::new();
    for name in &args.images {
        opened.push(opened_image(args, name, access).await?);
    }
    let outcome = match (&args.create, &args.delete, &args.since) {
        (Some(name), ..) => create(&opened, name).await,
        (None, Some(name), _) => delete(&opened, name).await,
        (None, None, Some(name)) => print_changed(&opened, name, args.json).await,
        (None, None, None) => list(&opened, args.json).await,
    };
    let (mut closed, mut failed) = (Vec::new(), Ok(()));
    for one in &opened {
        match one.image.close().await {
            Ok(()) => closed.push(one.name),
            Err(error) => {
                let text = format!("'{}' may keep its old bitmaps: {error}", one.name);
                failed = failed.and(Err(text));
            }
        }
    }
    outcome?;
    failed.map_err(|text| match (&args.create, &closed[..]) {
        (Some(name), [_, ..]) => CommandError::new(format!(
            "{text}; remove the checkpoint from the others: checkpoint --delete {name} {}",
            closed.join(" ")
        )),
        _ => CommandError::new(text),
    })
}

async fn opened_image<'a>(
    args: &Args,
    name: &'a str,
    access: Access,
) -> Result<Opened<'a>, CommandError> {
    let settings = OpenSettings {
        access,
        // Bitmaps are the image's own.
        backing: BackingChoice::None,
        policy: args.trust.backing_policy,
        ..open::settings()
    };
    let image = open_image(&ImageSpec::named(name, Some("qcow2")), &settings).await?;
    let mut checkpoints = image.bitmaps().await?;
    checkpoints.retain(|bitmap| bitmap.name.starts_with(CHECKPOINT));
    Ok(Opened {
        name,
        image,
        checkpoints,
    })
}

impl Opened<'_> {
    fn find(&self, name: &str) -> Option<usize> {
        let wanted = bitmap_name(name);
        self.checkpoints.iter().position(|it| it.name == wanted)
    }

    fn links(&self) -> Vec<Link> {
        let link = |bitmap: &BitmapInfo| Link {
            is_sound: !bitmap.in_use,
            is_recording: bitmap.auto && !bitmap.in_use,
        };
        self.checkpoints.iter().map(link).collect()
    }

    /// The checkpoint that notes what changes.
    fn last(&self) -> Option<&BitmapInfo> {
        let last = self.checkpoints.last();
        last.filter(|bitmap| bitmap.auto && !bitmap.in_use)
    }

    async fn change(&self, bitmap: &str, change: BitmapChange) -> Result<(), CommandError> {
        let changed = self.image.change_bitmap(bitmap, &change).await;
        // Advice about bitmaps follows the first line.
        changed.map_err(|error| {
            let reason = error.to_string();
            let reason = reason.lines().next().unwrap_or_default();
            CommandError::new(format!("'{}': {reason}", self.name))
        })
    }

    /// The changes since a checkpoint.
    async fn changed_since(&self, name: &str) -> Result<DirtyBits, CommandError> {
        let Some(place) = self.find(name) else {
            return Err(self.missing(name));
        };
        let bitmaps = &self.checkpoints[place..];
        if let Some(lost) = bitmaps.iter().find(|bitmap| bitmap.in_use) {
            return Err(CommandError::new(format!(
                "what has changed in '{}' since checkpoint '{name}' is not known: the image was \
                 not closed in order, and '{}' is inconsistent; a full backup is needed",
                self.name, lost.name
            )));
        }
        let mut all: Option<DirtyBits> = None;
        for bitmap in bitmaps {
            let bits = self.image.dirty_bits(&bitmap.name).await?;
            match &mut all {
                None => all = Some(bits),
                Some(all) => drop(all.merge(&bits)),
            }
        }
        if place < complete_from(&self.links()) {
            let last = self.checkpoints[self.checkpoints.len() - 1].name.as_str();
            return Err(CommandError::new(format!(
                "what has changed in '{}' since checkpoint '{name}' is not known: the last one, \
                 '{last}', notes nothing, and the one behind it was removed; a full backup is \
                 needed",
                self.name
            )));
        }
        Ok(all.expect("the checkpoint is one of them"))
    }

    fn missing(&self, name: &str) -> CommandError {
        CommandError::new(format!("'{}' has no checkpoint '{name}'", self.name))
    }
}

async fn create(opened: &[Opened<'_>], name: &str) -> Result<(), CommandError> {
    let is_sign = |sign: char| sign.is_ascii_alphanumeric() || "-._".contains(sign);
    if !name.starts_with(|sign: char| sign.is_ascii_alphabetic()) || !name.chars().all(is_sign) {
        return Err(CommandError::new(format!(
            "Invalid checkpoint name '{name}': a letter, then letters, digits, '-', '.' and '_'"
        )));
    }
    for one in opened {
        if one.find(name).is_some() {
            let text = format!("'{}' has a checkpoint '{name}' already", one.name);
            return Err(CommandError::new(text));
        }
    }
    let mut made: Vec<&Opened<'_>> = Vec::new();
    for one in opened {
        made.push(one);
        let added = create_in(one, name).await;
        if let Err(error) = added {
            for one in made {
                // In memory: none of it has reached an image.
                drop(one.change(&bitmap_name(name), BitmapChange::Remove).await);
                if let Some(last) = one.last() {
                    drop(one.change(&last.name, BitmapChange::Enable).await);
                }
            }
            return Err(error);
        }
    }
    Ok(())
}

async fn create_in(one: &Opened<'_>, name: &str) -> Result<(), CommandError> {
    // With a new one behind them they would seem to know what has changed.
    for useless in &one.checkpoints[..complete_from(&one.links())] {
        one.change(&useless.name, BitmapChange::Remove).await?;
    }
    let add = BitmapChange::Add { granularity: None };
    one.change(&bitmap_name(name), add).await?;
    if let Some(last) = one.last() {
        one.change(&last.name, BitmapChange::Disable).await?;
    }
    Ok(())
}

async fn delete(opened: &[Opened<'_>], name: &str) -> Result<(), CommandError> {
    if let Some(without) = opened.iter().find(|one| one.find(name).is_none()) {
        return Err(without.missing(name));
    }
    for one in opened {
        let place = one.find(name).expect("it was looked for");
        let removed = removed_with(&one.links(), place);
        let gone = &one.checkpoints[place];
        let before = removed.start.checked_sub(1);
        let before = before.map(|at| &one.checkpoints[at]);
        if let Some(before) = before.filter(|it| !it.in_use && !gone.in_use) {
            if gone.auto {
                one.change(&before.name, BitmapChange::Enable).await?;
            }
            let merge = BitmapChange::Merge(gone.name.clone());
            one.change(&before.name, merge).await?;
        }
        for gone in &one.checkpoints[removed] {
            one.change(&gone.name, BitmapChange::Remove).await?;
        }
    }
    Ok(())
}

/// Bytes of the disk that lie in parts that have changed.
fn bytes_of(bits: &DirtyBits) -> u64 {
    let ranges = bits.dirty_ranges();
    ranges.map(|range| range.end - range.start).sum()
}

async fn list(opened: &[Opened<'_>], as_json: bool) -> Result<(), CommandError> {
    let (mut found, mut lines) = (Vec::new(), String::new());
    for one in opened {
        let complete = complete_from(&one.links());
        for (place, bitmap) in one.checkpoints.iter().enumerate() {
            let name = bitmap.name.trim_start_matches(CHECKPOINT);
            let changed = match bitmap.in_use {
                true => None,
                false => Some(bytes_of(&one.image.dirty_bits(&bitmap.name).await?)),
            };
            let state = match (changed, bitmap.auto) {
                (None, _) => "inconsistent".to_string(),
                (Some(_), _) if place < complete => {
                    "not all changes since are known; a full backup is needed".to_string()
                }
                (Some(bytes), true) => format!("{bytes} bytes changed so far"),
                (Some(bytes), false) => format!("{bytes} bytes changed until the next"),
            };
            lines.push_str(&format!("{}: {name}: {state}\n", one.name));
            found.push(json!({
                "image": one.name,
                "name": name,
                "recording": bitmap.auto && !bitmap.in_use,
                "inconsistent": bitmap.in_use,
                "usable": place >= complete,
                "granularity": bitmap.granularity,
                "changed-bytes": changed,
            }));
        }
    }
    match as_json {
        true => print_json(&Value::Array(found)),
        false => print(&lines),
    }
    Ok(())
}

async fn print_changed(
    opened: &[Opened<'_>],
    name: &str,
    as_json: bool,
) -> Result<(), CommandError> {
    let (mut found, mut lines) = (Vec::new(), String::new());
    for one in opened {
        for range in one.changed_since(name).await?.dirty_ranges() {
            let len = range.end - range.start;
            lines.push_str(&format!("{}: {} {len}\n", one.name, range.start));
            found.push(json!({"image": one.name, "start": range.start, "length": len}));
        }
    }
    match as_json {
        true => print_json(&Value::Array(found)),
        false => print(&lines),
    }
    Ok(())
}
