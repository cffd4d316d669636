//! `-s`: what is written goes into a temporary image over the one that is named, and is gone when
//! it is closed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cowslip::Image;
use cowslip::file::BlockFile;
use cowslip::file::host::{HostOptions, open_unnamed_file};
use cowslip::image::{BackingChoice, Format, OpenOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip_console::error::CommandError;

use super::{Access, ImageSpec, OpenSettings, Source, open_image, refused};

/// Opens a new image in an unnamed file over the one that is named, which is only read.
///
/// # Errors
/// As [`open_image`]; the temporary file could not be made.
pub async fn open_above(
    spec: &ImageSpec,
    (source, settings): (&Source, &OpenSettings),
) -> Result<Image, CommandError> {
    refuse_what_has_no_name(source)?;
    let reading = OpenSettings {
        access: Access::Read,
        temporary: false,
        copy_on_read: false,
        ..settings.clone()
    };
    let below = open_image(spec, &reading).await?;
    let (size, format) = (below.size(), below.layers()[0].format);
    below.close().await?;
    let path = std::path::absolute(&source.filename);
    let path = path.map_err(|why| CommandError::new(format!("{}: {why}", source.filename)))?;
    let file = unnamed_file(settings)?;
    create(file.clone(), None, &CreateOptions::new(size)).await?;
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        writable: true,
        backing: BackingChoice::Override {
            name: path.display().to_string(),
            format: Some(format),
        },
        encrypt_format: None,
        passphrase: None,
        backing_passphrase: source
            .opened_by(source.image.key_secret.as_ref(), settings)
            .unwrap_or_default(),
        ..cowslip_nodes::engine_options(source, settings)?
    };
    let opened = Image::open(file, options, &source.gate(settings)).await;
    opened.map_err(|error| refused(source, &error))
}

/// The temporary image names a file below it, and nothing else.
fn refuse_what_has_no_name(source: &Source) -> Result<(), CommandError> {
    let image = &source.image;
    let is_file = source.is_plain_file() && image.limits == Default::default();
    let is_plain = source.data_file.is_none() && !image.compress;
    match is_file && is_plain && image.backing.is_none() && image.snapshot.is_none() {
        true => Ok(()),
        false => Err(CommandError::new(
            "Temporary snapshots (-s) are supported of image files, without filters, servers and options of the \
             image's own",
        )),
    }
}

/// A file that nobody else can open, in `$TMPDIR` or where large temporary files belong.
fn unnamed_file(settings: &OpenSettings) -> Result<Arc<dyn BlockFile>, CommandError> {
    let directory = std::env::var_os("TMPDIR").filter(|value| !value.is_empty());
    let directory = directory.map_or(PathBuf::from("/var/tmp"), PathBuf::from);
    let options = HostOptions {
        page_cache: settings.cache.page_cache(),
        aio: settings.aio,
        ..HostOptions::default()
    };
    open_unnamed_file(&directory, &options).map_err(|error| not_made(&directory, &error))
}

fn not_made(place: &Path, why: &dyn std::fmt::Display) -> CommandError {
    let place = place.display();
    CommandError::new(format!(
        "Could not create a temporary file in '{place}' (set $TMPDIR to use another directory): {why}"
    ))
}
