//! `measure`: how large the file of a new image will be, empty or with the data of another.

use clap::ArgAction;
use cowslip::convert::Sources;
use cowslip::file::Sharing;
use cowslip::file::host::Aio;
use cowslip::image::Format;
use cowslip::measure::{bitmaps_bytes, geometry, measure};
use cowslip::qcow2::create::{CreateOptions, Preallocation, Version};
use cowslip::qcow2::inspect::BitmapInfo;
use cowslip::qcow2::snapshot::SnapshotChoice;
use serde_json::json;

use super::create::{creatable_format, keys_of_luks, keys_of_qcow2, options_of};
use crate::error::CommandError;
use crate::layer::{ImageFileInfo, InspectOptions};
use crate::open::{
    self, ImageSpec, OpenSettings, Trust, block_on, chosen_snapshot, open_image, sharing,
};
use crate::options::{self, bytes_within};
use crate::output::{OutputArgs, OutputFormat, Program, print, print_json};
use crate::size::SIZE_MAX;

/// Unit of the sizes of disks.
const SECTOR_BYTES: u64 = 512;

/// Command line of `measure`.
#[derive(clap::Args)]
pub struct Args {
    /// Format of the new image
    #[arg(short = 'O', long = "target-format", value_name = "FMT")]
    #[arg(default_value = "raw")]
    target_format: String,
    /// Options of that format, as for `create`
    #[arg(short = 'o', long = "options", value_name = "OPTIONS", action = ArgAction::Append, allow_hyphen_values = true)]
    options: Vec<String>,
    /// Size of the disk, instead of an image
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    size: Option<String>,
    /// Format of the source image
    #[arg(short = 'f', long, value_name = "FMT")]
    format: Option<String>,
    /// FILENAME is a complete image specification
    #[arg(long)]
    image_opts: bool,
    /// Snapshot of the source image
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Open the image although another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    trust: Trust,
    /// The source image
    #[arg(value_name = "FILENAME")]
    filenames: Vec<String>,
}

/// The sizes to report, in bytes.
struct Sizes {
    required: u64,
    fully_allocated: u64,
    bitmaps: Option<u64>,
}

/// Runs `measure`. Returns the exit code.
pub fn run(args: &Args, program: &Program) -> u8 {
    program.exit_code(measured(args, program))
}

fn measured(args: &Args, program: &Program) -> Result<(), CommandError> {
    let output = args.output.format("measure", program)?;
    let size = args.size.as_deref();
    let size = size.map(|text| bytes_within("image size", text, 0..=SIZE_MAX));
    let size = size.transpose()?;
    let refuse = |text: &str| Err(CommandError::new(text));
    if args.filenames.len() > 1 {
        return refuse("At most one filename argument is allowed.");
    }
    let asks_of_file = args.image_opts || args.format.is_some() || args.snapshot.is_some();
    if args.filenames.is_empty() && asks_of_file {
        return refuse("--image-opts, -f, and -l require a filename argument.");
    }
    if args.filenames.is_empty() && size.is_none() {
        return refuse("Either --size N or one filename must be specified.");
    }
    if !args.filenames.is_empty() && size.is_some() {
        return refuse("--size N cannot be used together with a filename.");
    }
    let snapshot = chosen_snapshot(args.snapshot.as_deref(), program)?;
    let sizes = block_on(Aio::Auto, find(args, (size, snapshot), program))?;
    match output {
        OutputFormat::Human => {
            let bitmaps = sizes
                .bitmaps
                .map(|bytes| format!("bitmaps size: {bytes}\n"));
            print(&format!(
                "required size: {}\nfully allocated size: {}\n{}",
                sizes.required,
                sizes.fully_allocated,
                bitmaps.unwrap_or_default()
            ));
        }
        OutputFormat::Json => {
            let mut object = json!({});
            if let Some(bytes) = sizes.bitmaps {
                object["bitmaps"] = bytes.into();
            }
            object["required"] = sizes.required.into();
            object["fully-allocated"] = sizes.fully_allocated.into();
            print_json(&object);
        }
    }
    Ok(())
}

async fn find(
    args: &Args,
    (size, snapshot): (Option<u64>, Option<SnapshotChoice>),
    program: &Program,
) -> Result<Sizes, CommandError> {
    let image = match &args.filenames[..] {
        [name] => {
            let settings = OpenSettings {
                snapshot,
                sharing: sharing(args.force_share, Sharing::default()),
                policy: args.trust.backing_policy,
                ..open::settings()
            };
            let spec = open::only(
                std::slice::from_ref(name),
                args.format.as_deref(),
                args.image_opts,
                ("measure", program),
            )?;
            Some((open_image(&spec, &settings).await?, spec))
        }
        _ => None,
    };
    if args.target_format == "file" {
        let text = "Block driver 'file' does not support size measurement";
        return Err(CommandError::new(text));
    }
    let format = creatable_format(&args.target_format)?;
    let given = options_given(args, format, program)?;
    let value = |name| options::value(&given, name);
    let images = image.as_ref().map(|(image, _)| std::slice::from_ref(image));
    let sources = images.map(Sources::new);
    let disk = match &sources {
        Some(sources) => sources.size(),
        None => size.unwrap_or(0).next_multiple_of(SECTOR_BYTES),
    };
    if format == Format::Raw {
        return Ok(Sizes {
            required: disk,
            fully_allocated: disk,
            bitmaps: None,
        });
    }
    if format == Format::Luks {
        let bytes = disk + keys_of_luks(&given)?.header_bytes()?;
        return Ok(Sizes {
            required: bytes,
            fully_allocated: bytes,
            bitmaps: None,
        });
    }
    let options = qcow2_options(disk, &value)?;
    let geometry = geometry(&options)?;
    let keys = match keys_of_qcow2(&value)? {
        Some(keys) => keys.header_bytes()?,
        None => 0,
    };
    let sizes = measure(&options, &geometry, keys, sources.as_ref()).await;
    let sizes = sizes.map_err(|failure| CommandError::from(failure.into_error()))?;
    let bitmaps = match &image {
        Some((_, spec)) if options.version == Version::V3 => bitmaps_of(args, spec).await?,
        _ => None,
    };
    Ok(Sizes {
        required: sizes.required,
        fully_allocated: sizes.fully_allocated,
        bitmaps: bitmaps.map(|found| bitmaps_bytes(&found, disk, options.cluster_size)),
    })
}

/// The bitmaps of an image that can have some.
async fn bitmaps_of(
    args: &Args,
    spec: &ImageSpec,
) -> Result<Option<Vec<BitmapInfo>>, CommandError> {
    let source = spec.resolve()?;
    let inspect_options = InspectOptions {
        sharing: Sharing::Forced,
        policy: args.trust.backing_policy,
        ..InspectOptions::default()
    };
    let layer = ImageFileInfo::inspect_source(&source, &inspect_options).await?;
    let inspection = layer.inspection.filter(|found| found.header.version >= 3);
    Ok(inspection.map(|found| found.bitmaps))
}

fn options_given(
    args: &Args,
    format: Format,
    program: &Program,
) -> Result<Vec<(String, String)>, CommandError> {
    let lists = args.options.iter().map(|list| options::split(list));
    let given = lists.collect::<Result<Vec<_>, _>>()?.concat();
    options::normalise(given, &options_of(format)).map_err(|error| {
        program.complain(error);
        let name = &args.target_format;
        CommandError::new(format!("Invalid options for file format '{name}'"))
    })
}

/// Returns the options that change sizes; the others are not looked at, as in qemu-img.
fn qcow2_options<'a>(
    size: u64,
    value: &impl Fn(&'static str) -> Option<&'a str>,
) -> Result<CreateOptions, CommandError> {
    let switch = |name| value(name).map_or(Ok(false), |text| options::switch(name, text));
    let mut out = CreateOptions::new(size);
    out.extended_l2 = switch("extended_l2")?;
    if let Some(text) = value("cluster_size") {
        out.cluster_size = options::size("cluster_size", text)?;
    }
    if let Some(name) = value("preallocation") {
        out.preallocation = Preallocation::from_name(name)
            .ok_or_else(|| CommandError::new(format!("invalid parameter value: {name}")))?;
    }
    out.backing_file = value("backing_file").map(str::to_string);
    out.version = match value("compat") {
        None | Some("1.1" | "v3") => Version::V3,
        Some("0.10" | "v2") => Version::V2,
        Some(other) => {
            let text = format!("Invalid compatibility level: '{other}'");
            return Err(CommandError::new(text));
        }
    };
    // Anything that is no 64-bit number is no valid width either.
    out.refcount_bits = value("refcount_bits").map_or(16, |bits| bits.parse().unwrap_or(0));
    Ok(out)
}
