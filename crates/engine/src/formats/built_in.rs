//! The built-in formats: qcow2, LUKS and raw.

use super::{Open, OpenRequest, Opened};
use crate::chain::Layer;
use crate::policy::Format;
use crate::raw::Raw;
use crate::units::SECTOR_BYTES;
use crate::{Error, Result, luks, qcow2};

/// The way to open an image of a format, if it is built in.
pub(super) fn way_to_open(format: Format) -> Option<Open> {
    let open: Open = match format {
        Format::Qcow2 => |opening| Box::pin(open_qcow2(opening)),
        Format::Luks => |opening| Box::pin(open_luks(opening)),
        Format::Raw => |opening| Box::pin(std::future::ready(Ok(open_raw(opening)))),
        Format::Other(_) => return None,
    };
    Some(open)
}

fn open_raw(opening: OpenRequest<'_>) -> Opened {
    let (file, options) = (opening.file, opening.options);
    let file = match options.format.is_none() || options.guessed {
        true => file.guarded(options.formats.signatures()),
        false => file,
    };
    // As with QEMU, a disk has whole sectors: the last one of a file that can grow reads as zeroes
    // behind its end.
    let size = match file.capabilities().extends_with_zeroes {
        true => opening.file_len.next_multiple_of(SECTOR_BYTES),
        false => opening.file_len,
    };
    Opened::new(Layer::Raw(Box::new(Raw::new(file, size))), None)
}

async fn open_luks(opening: OpenRequest<'_>) -> Result<Opened> {
    let (file, file_len, options) = (opening.file, opening.file_len, opening.options);
    luks::check_built(file.name())?;
    let passphrase = options
        .passphrase_for(opening.is_top)
        .ok_or_else(|| Error::Key("Parameter 'key-secret' is required for cipher".to_string()))?;
    let key = (passphrase, &options.workers);
    let (header, cipher) = luks::unlock(&file, 0..file_len, key).await?;
    let raw = Raw::encrypted(&file, file_len, (cipher, header.payload_offset))?;
    Ok(Opened::new(Layer::Raw(Box::new(raw)), None))
}

async fn open_qcow2(opening: OpenRequest<'_>) -> Result<Opened> {
    let options = opening.options.of_qcow2(opening.is_top);
    let image = qcow2::open(qcow2::OpenParameters {
        file: opening.file,
        file_len: opening.file_len,
        options: &options,
        gate: opening.gate,
        files: opening.files,
        is_top: opening.is_top,
    });
    let image = image.await?;
    let header = image.header();
    let format = header.backing_format().map(str::to_string);
    let backing = header.backing_file.clone().map(|name| (name, format));
    Ok(Opened::new(Layer::Qcow2(Box::new(image)), backing))
}
