//! Images of a command line. The crate of nodes opens them; here are this program's objects and
//! texts for that.

use std::sync::Arc;

use cowslip::file::host::BackingPolicy;
use cowslip::file::{BlockFile, Claim, Protection};
use cowslip::image::Format;
use cowslip::{Image, Workers};
use cowslip_console::error::CommandError;
use cowslip_console::output::{self, Program};
use cowslip_nodes::{Environment, OpenError, drivers, open_source};

use crate::repair_text::repaired_when_opened;

mod image_args;
pub mod object;
pub mod psk;
mod refusal;
mod snapshot_arg;
mod temporary;
pub mod tls;

pub use cowslip_console::queue::block_on;
pub use cowslip_nodes::options::{alloc_policy, detect_zeroes, parse_aio};
pub use cowslip_nodes::{
    Access, CacheMode, Destination, ImageSpec, NodeGate, OpenSettings, Source, foreign, local_name,
    open_alone, open_file, reopen_image, sharing,
};
pub use image_args::{OneImage, only};
pub use refusal::{opening_failed, opening_reason, refused};
pub use snapshot_arg::{chosen_snapshot, parse_choice};

/// The refusal to write to an image that is read-only.
pub fn read_only() -> String {
    output::worded("Block node is read-only", "The image is read-only")
}

/// Complains of a shrink without `--shrink`. Returns the error for that.
pub fn shrink_refused(program: &Program) -> CommandError {
    program.complain("Use the --shrink option to perform a shrink operation.");
    program.warn(
        "Shrinking an image will delete all data beyond the shrunken image's end. Before \
         performing such an operation, make sure there is no important data there.",
    );
    CommandError::already_reported()
}

/// Settings for reading an image by this program, with the default for everything else.
pub fn settings() -> OpenSettings {
    OpenSettings::new(Environment {
        registry: drivers::standard(),
        objects: Arc::new(object::Defined),
        passed: None,
        warn: output::warn,
        reason: opening_reason,
        dirty: repaired_when_opened,
    })
}

/// The names of all drivers of images and files.
pub fn driver_names() -> Vec<&'static str> {
    drivers::standard().driver_names()
}

/// Returns the policy for the name of a mode of discarding on command lines.
pub fn discard_policy(mode: &str) -> Option<cowslip::image::DiscardPolicy> {
    match mode {
        "ignore" | "off" => Some(cowslip::image::DiscardPolicy::Ignore),
        "unmap" | "on" => Some(cowslip::image::DiscardPolicy::Unmap),
        _ => None,
    }
}

/// Whether a name, as images have it, is not that of a file of the host.
pub fn is_description(name: &str) -> bool {
    drivers::standard().is_description(name)
}

/// The file, device or node of this name, in which an image can be made.
///
/// # Errors
/// As [`Destination::named`].
pub fn destination(name: &str) -> cowslip::Result<Destination> {
    Destination::named(name, &drivers::standard())
}

/// Whether a name is that of a node of a protocol, be it whole or not.
pub fn is_node(name: &str) -> bool {
    !matches!(drivers::standard().protocol_node(name), Ok(None))
}

/// The format of images of this name.
///
/// # Errors
/// `Unknown driver 'x'`.
pub fn parse_format(name: &str) -> cowslip::Result<Format> {
    drivers::standard().format(name)
}

/// The format of images of this name, in which no node of the host's files is a format.
pub fn format_named(name: &str) -> Option<Format> {
    drivers::standard().engine_formats().named(name)
}

/// The format of a file that begins with these bytes.
///
/// # Errors
/// A format that is only recognised.
pub fn probe(start: &[u8], file: &str) -> cowslip::Result<Format> {
    drivers::standard().probe(start, file)
}

/// The queue's threads for blocking calls, which pack and unpack clusters too: for verbs that move
/// much data.
pub fn workers() -> Workers {
    Workers::new(|work| drop(cowslip_queue::blocking(work)))
}

/// Options of every verb that opens images.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct Trust {
    /// Backing files and data files that images may name: any, same-directory or none
    #[arg(
        long,
        value_name = "POLICY",
        default_value = "any",
        value_parser = parse_policy
    )]
    pub backing_policy: BackingPolicy,
}

/// `--backing-policy`.
///
/// # Errors
/// The policies that there are.
pub fn parse_policy(name: &str) -> Result<BackingPolicy, String> {
    BackingPolicy::from_name(name).ok_or_else(|| {
        format!("--backing-policy expects 'any', 'same-directory' or 'none' not '{name}'")
    })
}

/// Opens the image, and its chain, as `qemu-img` and its kin do.
///
/// # Errors
/// `Could not open 'x': why`; `Failed to load snapshot: why`.
pub async fn open_image(spec: &ImageSpec, settings: &OpenSettings) -> Result<Image, CommandError> {
    let source = spec.resolve()?;
    if settings.temporary && settings.access == Access::Write {
        return Box::pin(temporary::open_above(spec, (&source, settings))).await;
    }
    match open_source(&source, settings).await {
        Ok(image) => Ok(image),
        Err(OpenError::Refused(why)) => Err(why.into()),
        Err(OpenError::Snapshot(why)) => Err(not_loaded(&source, settings, &why).await),
    }
}

/// Whether it is the image or its snapshot that cannot be opened: what scripts look for differs.
async fn not_loaded(
    source: &Source,
    settings: &OpenSettings,
    why: &cowslip::Error,
) -> CommandError {
    let without = OpenSettings {
        snapshot: None,
        ..settings.clone()
    };
    let format = match open_source(source, &without).await {
        Err(error) => return cowslip::Error::from(error).into(),
        Ok(disk) => disk.layers()[0].format,
    };
    let why = match (output::is_called_as_qemu(), format, why) {
        (true, Format::Raw, _) => "Block format 'raw' used by device '' does not support \
                                   temporarily loading internal snapshots"
            .to_string(),
        (true, _, cowslip::Error::Io { .. }) => "Can't find snapshot".to_string(),
        (_, _, why) => why.to_string(),
    };
    CommandError::loading_snapshot(why)
}

/// Claims a file, and warns if nothing protects it.
///
/// # Errors
/// Another process uses it.
pub fn claim_file(file: &Arc<dyn BlockFile>, claim: Claim) -> cowslip::Result<()> {
    if let Protection::Unprotected(why) = file.claim(claim)? {
        warn_unprotected(&format!("'{}' ({why})", file.name()));
    }
    Ok(())
}

/// The warning of a raw image whose format was guessed, and which will be written.
pub fn guessed_raw(filename: &str) -> String {
    format!(
        "WARNING: Image format was not specified for '{filename}' and probing guessed raw.
         Automatically detecting the format is dangerous for raw images, write operations on block 0 will be restricted.
         Specify the 'raw' format explicitly to remove the restrictions.
"
    )
}

/// Warns of a raw image whose format was guessed, if the image is one.
///
/// # Errors
/// The specification's.
pub fn warn_of_guessed_raw(image: &Image, spec: &ImageSpec) -> Result<(), CommandError> {
    let source = spec.resolve()?;
    let is_raw = image.layers().first().map(|layer| layer.format) == Some(Format::Raw);
    if is_raw && source.format.is_none() {
        output::print_error(&guessed_raw(&source.filename));
    }
    Ok(())
}

fn warn_unprotected(file: &str) {
    output::warn(&format!(
        "the file system has no locks: nothing keeps other processes from {file}"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;
    use cowslip::file::host::{Aio, CreateMode, HostOptions, open_host_file};

    #[test]
    fn a_new_image_opens_in_every_cache_mode_and_can_be_written() {
        // Beside the test's binary is a disk, where direct I/O works; /tmp may be memory.
        let test = std::env::current_exe().unwrap();
        let dir = tempfile::tempdir_in(test.parent().unwrap()).unwrap();
        let path = dir.path().join("a.qcow2");
        let name = path.to_str().unwrap();
        let options = HostOptions {
            writable: true,
            create: CreateMode::Truncate,
            ..HostOptions::default()
        };
        for mode in ["writeback", "none", "writethrough", "directsync", "unsafe"] {
            let settings = OpenSettings {
                access: Access::Write,
                cache: CacheMode::parse(mode).unwrap(),
                ..settings()
            };
            let work = async {
                let file = open_host_file(&path, &options)?;
                let fresh = cowslip::qcow2::create::CreateOptions::new(1 << 20);
                cowslip::qcow2::create::create(file, None, &fresh).await?;
                let image = open_image(&ImageSpec::named(name, Some("qcow2")), &settings).await?;
                let data = cowslip::Buf::copy_of(&[7; 512]);
                image.write(512, data, Default::default()).await?;
                image.close().await?;
                let image = open_image(&ImageSpec::named(name, None), &super::settings()).await?;
                let read = image.read(0, cowslip::BufMut::zeroed(1536)).await?;
                Ok((image.size(), read.to_vec()))
            };
            let (size, read) = block_on(Aio::Auto, work).unwrap();
            assert_eq!(size, 1 << 20, "{mode}");
            assert_eq!(read, [[0; 512], [7; 512], [0; 512]].concat(), "{mode}");
        }
    }
}
