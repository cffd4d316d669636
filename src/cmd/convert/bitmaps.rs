//! `--bitmaps`: recreates the persistent bitmaps of the source in the target, with QEMU's messages.

use cowslip::image::Format;
use cowslip::qcow2::bitmap::BitmapChange;
use cowslip::qcow2::inspect::BitmapInfo;
use cowslip::{Error, Image};

use super::super::create::format_name;
use super::Args;
use crate::bitmaps::CHECKPOINT;
use crate::error::CommandError;
use crate::output::Program;

/// Returns the bitmaps to copy; none unless they are asked for.
///
/// # Errors
/// Several sources, one that can have no bitmaps, or bitmaps that were not saved properly.
pub async fn wanted(
    args: &Args,
    sources: &[Image],
    program: &Program,
) -> Result<Vec<BitmapInfo>, CommandError> {
    if !args.bitmaps {
        return Ok(Vec::new());
    }
    let [source] = sources else {
        let text = "Copying bitmaps only possible with single source";
        return Err(CommandError::new(text));
    };
    if !has_room_for_bitmaps(source) {
        return Err(CommandError::new("Source lacks bitmap support"));
    }
    let mut bitmaps = source.bitmaps().await?;
    if let (Some(broken), false) = (
        bitmaps.iter().find(|bitmap| bitmap.in_use),
        args.skip_broken_bitmaps,
    ) {
        return Err(CommandError::new(format!(
            "Cannot copy inconsistent bitmap '{}'\nTry --skip-broken-bitmaps, or use '{} bitmap --remove' to \
             delete it",
            broken.name, program.name
        )));
    }
    for broken in bitmaps.iter().filter(|bitmap| bitmap.in_use) {
        program.warn(format!("Skipping inconsistent bitmap '{}'", broken.name));
    }
    // Without a checkpoint that is lost those before it would seem to know what has changed.
    let is_checkpoint = |bitmap: &BitmapInfo| bitmap.name.starts_with(CHECKPOINT);
    let lost = bitmaps
        .iter()
        .rposition(|bitmap| bitmap.in_use && is_checkpoint(bitmap));
    let mut places = 0..bitmaps.len();
    bitmaps.retain(|bitmap| {
        let rests_on_lost = places.next() < lost && is_checkpoint(bitmap);
        if rests_on_lost && !bitmap.in_use {
            let name = &bitmap.name;
            program.warn(format!(
                "Skipping '{name}': a checkpoint behind it is inconsistent"
            ));
        }
        !bitmap.in_use && !rests_on_lost
    });
    // They end with the disk as it is now, and the snapshot may be older than they are.
    if args.snapshot.is_some() {
        for bitmap in bitmaps.iter().filter(|bitmap| is_checkpoint(bitmap)) {
            let name = &bitmap.name;
            program.warn(format!(
                "Skipping '{name}': a checkpoint of the disk is none of its snapshots"
            ));
        }
        bitmaps.retain(|bitmap| !is_checkpoint(bitmap));
    }
    Ok(bitmaps)
}

/// Refuses a target that can have none, before anything is copied.
///
/// # Errors
/// Its format is another one, or its version is.
pub fn refuse_target(args: &Args, target: &Image) -> Result<(), CommandError> {
    match args.bitmaps && !has_room_for_bitmaps(target) {
        true => Err(CommandError::new(format!(
            "Format driver '{}' does not support bitmaps",
            format_name(target.layers()[0].format)
        ))),
        false => Ok(()),
    }
}

fn has_room_for_bitmaps(image: &Image) -> bool {
    let top = &image.layers()[0];
    let version = top.header.as_ref().map_or(0, |header| header.version);
    top.format == Format::Qcow2 && version >= 3
}

/// Makes them in the target, which has them when it is closed.
///
/// # Errors
/// There is one of that name, or the disks differ in size; I/O.
pub async fn copy(
    bitmaps: &[BitmapInfo],
    (source, target): (&Image, &Image),
) -> Result<(), CommandError> {
    for bitmap in bitmaps {
        let name = &bitmap.name;
        let failed = |what: &'static str| {
            move |error: Error| {
                CommandError::new(format!("Failed to {what} bitmap {name}: {error}"))
            }
        };
        let granularity = Some(bitmap.granularity);
        let add = BitmapChange::Add { granularity };
        let added = target.change_bitmap(name, &add).await;
        added.map_err(failed("create"))?;
        let bits = source.dirty_bits(name).await.map_err(failed("populate"))?;
        let merge = BitmapChange::MergeBits(bits);
        if let Err(error) = target.change_bitmap(name, &merge).await {
            target.change_bitmap(name, &BitmapChange::Remove).await?;
            return Err(failed("populate")(error));
        }
        if !bitmap.auto {
            target.change_bitmap(name, &BitmapChange::Disable).await?;
        }
    }
    Ok(())
}
