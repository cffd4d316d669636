//! Images that a power failure would leave, read by a reader that shares nothing with the engine.

use cowslip::image::Format;

use crate::disk::SimDisk;
use crate::disk::content::Content;
use crate::inspect::{inspect, is_image};
use crate::model::{Granules, Model, SECTOR_BYTES, Survival};
use crate::second_reader::Layer;

use super::kept::Kept;

/// Checks an image that a power failure has left, and its chain, by a reader that shares nothing
/// with the engine.
///
/// # Errors
/// What is wrong with it.
pub(super) fn second_opinion(
    left: &SimDisk,
    (file, _): &(String, Format),
    model: &Model,
) -> Result<(), String> {
    let content = left.content(file).ok_or("an image is missing")?;
    sound(file, &content)?;
    let layer = Layer::open(left, file).ok_or("a file that is below is missing")?;
    let mut model = model.clone();
    model.crash();
    let adopted = model.adopt_size(layer.size(), Survival::Durable);
    adopted.map_err(|violation| format!("{file}: {violation}"))?;
    for (granules, bytes) in known_parts(&layer, &model) {
        let adopted = model.adopt(&granules, &bytes, Survival::Durable);
        adopted.map_err(|violation| format!("{file}: {violation}"))?;
    }
    Ok(())
}

fn sound(file: &str, content: &Content) -> Result<(), String> {
    if !is_image(content) {
        return Ok(());
    }
    let findings = inspect(content);
    let wrong = findings.corruptions.iter().chain(&findings.flags);
    match wrong.chain(&findings.low_counts).next() {
        None => Ok(()),
        Some(first) => Err(format!("{file}: corrupt: {first}")),
    }
}

/// The runs of granules of a disk of which the second reader knows all bytes.
fn known_parts(layer: &Layer, model: &Model) -> Vec<(Granules, Vec<u8>)> {
    let len = layer.size() as usize;
    let (mut bytes, mut known) = (vec![0; len], vec![false; len]);
    layer.read(0, &mut bytes, &mut known);
    let sector = SECTOR_BYTES as usize;
    let mut parts: Vec<(Granules, Vec<u8>)> = Vec::new();
    for window in model.windows() {
        for granule in model.on_disk(&window) {
            let at = granule as usize * sector;
            if !known[at..at + sector].iter().all(|known| *known) {
                continue;
            }
            let found = &bytes[at..at + sector];
            match parts.last_mut() {
                Some((granules, part)) if granules.end == granule => {
                    granules.end += 1;
                    part.extend_from_slice(found);
                }
                _ => parts.push((granule..granule + 1, found.to_vec())),
            }
        }
    }
    parts
}

/// The same of a backup that was reported complete.
///
/// # Errors
/// Bytes that are not those of its moment.
pub(super) fn kept_opinion(left: &SimDisk, kept: &Kept, model: &Model) -> Result<(), String> {
    let content = left.content(&kept.file).ok_or("a backup is missing")?;
    sound(&kept.file, &content)?;
    let layer = Layer::open(left, &kept.file).ok_or("a file below a backup is missing")?;
    if layer.size() != kept.size {
        let size = layer.size();
        return Err(format!(
            "{}: {size} bytes of a backup were found",
            kept.file
        ));
    }
    let model = model.clone().with_size(kept.size);
    for (granules, bytes) in known_parts(&layer, &model) {
        kept.check(&granules, &bytes)?;
    }
    Ok(())
}
