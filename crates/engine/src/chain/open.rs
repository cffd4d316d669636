//! Opening of chains: an image, the backing file that it names, that one's, down to the last.

use std::sync::Arc;

use super::{Below, Layer, Naming, Namings};
use crate::file::{self, AlignedFile, ChosenBy, Gate, Role};
use crate::files::{Entry, Files};
use crate::formats::{BackingName, OpenRequest, Opened};
use crate::image::{BackingChoice, OpenOptions};
use crate::policy::Format;
use crate::qcow2::Qcow2;
use crate::{Error, Result};

/// Layers of a chain at most: no user's chain is that long, and a hostile one ends.
const LAYERS_MAX: usize = 1000;

/// The part of the memory for metadata that the index of a chain may take.
const INDEX_PART: u64 = 4;

/// Opens an image and its whole chain; also returns how the images below were named.
///
/// # Errors
/// As [`crate::Image::open`].
pub async fn open(
    file: Arc<dyn file::BlockFile>,
    options: &OpenOptions,
    gate: &dyn Gate,
    files: &Files,
) -> Result<(Layer, Below, Namings)> {
    let mut layers: Vec<Layer> = Vec::new();
    let mut namings = Vec::new();
    files.enter(&file, Role::Backing, options.writable)?;
    let mut next = Some((file, options.clone()));
    while let Some((file, options)) = next.take() {
        let name = file.name().to_string();
        let is_top = layers.is_empty();
        let opened = open_layer(file, &options, gate, (files, is_top)).await;
        let Opened { layer, backing } = opened.map_err(|error| in_chain(error, layers.len()))?;
        layers.push(layer);
        let (backing, chosen_by) = match &options.backing {
            BackingChoice::None => (None, ChosenBy::Caller),
            BackingChoice::AsNamed => {
                let backing = in_named_format(backing, (&options, layers.len()))?;
                (backing, ChosenBy::Image)
            }
            BackingChoice::InFormat(format) => {
                let Some((name, _)) = backing else {
                    let text = "Could not open backing file: A block device must be specified for \"file\"";
                    return Err(Error::Invalid(text.to_string()));
                };
                (Some((name, Some(*format))), ChosenBy::Image)
            }
            BackingChoice::Override { name, format } => {
                // Another file, but of the format that the image names, as in QEMU.
                let named = match format {
                    None => in_named_format(backing, (&options, layers.len()))?,
                    Some(_) => None,
                };
                let format = format.or(named.and_then(|(_, format)| format));
                (Some((name.clone(), format)), ChosenBy::Caller)
            }
        };
        let Some((backing_name, format)) = backing else {
            break;
        };
        let could_not = |detail: &str| {
            Error::Invalid(format!(
                "Could not open backing file '{backing_name}' of '{name}': {detail}"
            ))
        };
        if layers.len() > LAYERS_MAX {
            return Err(could_not("the chain is too long"));
        }
        let naming = Naming {
            named_by: name.clone(),
            name: backing_name.clone(),
            chosen_by,
        };
        let opened = gate.open_async(&naming.request(false)).await;
        let (backing_file, reported) = match opened {
            Ok(opened) => (opened.file, opened.format),
            Err(_) if options.metadata_only => break,
            Err(error) => return Err(backing_failed(error, &backing_name)),
        };
        if let Some(why) = second_use(files.enter(&backing_file, Role::Backing, false)?) {
            return Err(could_not(why));
        }
        let options = OpenOptions {
            format: format.or(reported),
            guessed: false,
            writable: false,
            backing: BackingChoice::AsNamed,
            data_file: None,
            ..options
        };
        namings.push(naming);
        next = Some((backing_file, options));
    }
    let mut layers = layers.into_iter();
    let top = layers.next().expect("the loop opened one");
    let below = Below::new(layers.map(Arc::new).collect());
    share_memory(&top, &below, options.cache_bytes_or_default());
    Ok((top, below, namings.into_iter().collect()))
}

/// Why a backing file cannot be used beside the files of the chain so far, if so.
fn second_use(entry: Entry) -> Option<&'static str> {
    match entry {
        Entry::New => None,
        Entry::Again(Role::Backing) => Some("the backing chain is a loop"),
        Entry::Again(Role::Data) => Some("it is the data file of an image of the chain"),
        Entry::Overlaps => Some("it is stored where another file of the chain is"),
    }
}

/// Shares a budget in bytes for metadata: a part is that of the index of the layers below, if there
/// is one, the rest is for L2 slices, in proportion to what each image could use.
pub fn share_memory(top: &Layer, below: &Below, budget: u64) {
    let of_index = budget / INDEX_PART;
    let budget = budget - of_index + below.set_index_budget(of_index);
    let images = || {
        let below = below.layers().iter().map(|layer| &**layer);
        std::iter::once(top).chain(below).filter_map(Layer::qcow2)
    };
    let all: u64 = images().map(Qcow2::cache_bytes_wanted).sum();
    for image in images() {
        let wanted = u128::from(image.cache_bytes_wanted());
        image.set_cache_budget((u128::from(budget) * wanted / u128::from(all)) as u64);
    }
}

/// A conflict over a file of the layer at this depth, or what its key is, in QEMU's words.
fn in_chain(error: Error, depth: usize) -> Error {
    match error {
        Error::Key(why) => Error::Key("Could not open backing file: ".repeat(depth) + &why),
        Error::Locked(mut conflict) => {
            conflict.context = "Could not open backing file: ".repeat(depth);
            Error::Locked(conflict)
        }
        other => other,
    }
}

fn backing_failed(error: Error, name: &str) -> Error {
    match error {
        Error::Io { source, .. } => Error::io(
            format!("Could not open backing file: Could not open '{name}'"),
            source,
        ),
        other => other,
    }
}

/// The backing file in the format that the image at a depth names. Where only metadata is wanted,
/// one in a format that is not known ends the chain.
fn in_named_format(
    backing: BackingName,
    (options, layers): (&OpenOptions, usize),
) -> Result<Option<(String, Option<Format>)>> {
    let Some((name, Some(format))) = backing else {
        return Ok(backing.map(|(name, _)| (name, None)));
    };
    match options.formats.named(&format) {
        Some(known) => Ok(Some((name, Some(known)))),
        None if options.metadata_only => Ok(None),
        None => {
            let opening = "Could not open backing file: ".repeat(layers);
            Err(Error::Invalid(format!(
                "{opening}Unknown driver '{format}'"
            )))
        }
    }
}

async fn open_layer(
    file: Arc<dyn file::BlockFile>,
    options: &OpenOptions,
    gate: &dyn Gate,
    (files, is_top): (&Files, bool),
) -> Result<Opened> {
    let file = AlignedFile::new(file);
    let formats = &options.formats;
    let format = match options.format {
        Some(format) => format,
        None => formats.probe(&file).await?,
    };
    files.claim_image(file.block_file(), (format, is_top, options.writable))?;
    if options.format.is_none() && formats.probe(&file).await? != format {
        let text = format!("'{}' was replaced while it was being opened", file.name());
        return Err(Error::Invalid(text));
    }
    let is_qcow2 = format == Format::Qcow2;
    if !is_qcow2 && is_top && options.snapshot.is_some() {
        return Err(Error::Unsupported {
            file: file.name().to_string(),
            feature: format!("an internal snapshot of a {} image", format.name()).into(),
        });
    }
    let opening = OpenRequest {
        file_len: file.len().await?,
        file,
        options,
        gate,
        files,
        is_top,
    };
    let opened = formats.way_to_open(format)?(opening).await?;
    if let (Layer::Other(added), true) = (&opened.layer, options.writable)
        && !(added.is_writable() && opened.backing.is_none())
    {
        return Err(Error::ReadOnly(added.file().name().to_string()));
    }
    Ok(opened)
}
