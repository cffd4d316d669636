//! `map`: where the data of an image is, layer by layer.
//!
//! Text, JSON and refusals are qemu-img's: neighbouring extents of one kind are one line; the table
//! for people lists data only and gives up at data that has no place of its own in a file.

use cowslip::file::Sharing;
use cowslip::file::host::Aio;
use cowslip::image::{Extent, Format, Image, LayerInfo};

use super::change::ReportArgs;
use crate::error::CommandError;
use crate::open::{self, OneImage, OpenSettings, block_on, open_image, sharing};
use crate::options::bytes_within;
use crate::output::{self, OutputFormat, Program};
use crate::size;

/// Extents asked for at once.
const EXTENTS_AT_ONCE: usize = 1024;

/// Command line of `map`.
#[derive(clap::Args)]
pub struct Args {
    /// Offset of the first byte to map
    #[arg(short = 's', long, value_name = "OFFSET", allow_hyphen_values = true)]
    start_offset: Option<String>,
    /// Number of bytes to map
    #[arg(short = 'l', long, value_name = "LENGTH", allow_hyphen_values = true)]
    max_length: Option<String>,
    /// Open the image although another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    image: OneImage,
}

/// Prints extents, each as soon as the next one does not go on from it.
struct Printer {
    format: OutputFormat,
    /// Names of the files of each layer.
    files: Vec<String>,
    last: Option<Extent>,
}

impl Printer {
    fn new(format: OutputFormat, files: Vec<String>) -> Printer {
        let last = None;
        Printer {
            format,
            files,
            last,
        }
    }

    fn begin(&self) -> String {
        match self.format {
            OutputFormat::Human => {
                let [offset, length, mapped] = ["Offset", "Length", "Mapped to"];
                format!("{offset:<16}{length:<16}{mapped:<16}File\n")
            }
            OutputFormat::Json => "[".to_string(),
        }
    }

    /// The text that a further extent completes.
    fn push(&mut self, extent: Extent) -> Result<String, CommandError> {
        match &mut self.last {
            Some(last) if self::goes_on(last, &extent) => {
                last.len += extent.len;
                Ok(String::new())
            }
            _ => match self.last.replace(extent) {
                Some(last) => {
                    let mut text = self.line(&last)?;
                    if self.format == OutputFormat::Json {
                        text += ",\n";
                    }
                    Ok(text)
                }
                None => Ok(String::new()),
            },
        }
    }

    /// The text at the end of a map that begins at `start`.
    fn end(mut self, start: u64) -> Result<String, CommandError> {
        // An empty map has one empty extent.
        let last = self.last.take().unwrap_or(Extent {
            start,
            len: 0,
            depth: 0,
            present: false,
            zero: false,
            data: false,
            compressed: false,
            host_offset: None,
        });
        let mut text = self.line(&last)?;
        if self.format == OutputFormat::Json {
            text += "]\n";
        }
        Ok(text)
    }

    fn line(&self, extent: &Extent) -> Result<String, CommandError> {
        match self.format {
            OutputFormat::Human => self.human_line(extent),
            OutputFormat::Json => Ok(json_line(extent)),
        }
    }

    fn human_line(&self, extent: &Extent) -> Result<String, CommandError> {
        if !extent.data {
            return Ok(String::new());
        }
        let Some(host_offset) = extent.host_offset else {
            return Err(CommandError::new(
                "File contains external, encrypted or compressed clusters.",
            ));
        };
        if extent.zero {
            return Ok(String::new());
        }
        let file = self.files.get(extent.depth as usize);
        Ok(format!(
            "{:<16}{:<16}{:<16}{}\n",
            hexadecimal(extent.start),
            hexadecimal(extent.len),
            hexadecimal(host_offset),
            file.map_or("", String::as_str)
        ))
    }
}

/// Formats as C's `%#x`: zero has no prefix.
fn hexadecimal(number: u64) -> String {
    match number {
        0 => "0".to_string(),
        number => format!("{number:#x}"),
    }
}

fn json_line(extent: &Extent) -> String {
    let (start, len, depth) = (extent.start, extent.len, extent.depth);
    let mut text = format!("{{ \"start\": {start}, \"length\": {len}, \"depth\": {depth}");
    let state = [extent.present, extent.zero, extent.data, extent.compressed];
    for (name, is_so) in ["present", "zero", "data", "compressed"].iter().zip(state) {
        text += &format!(", \"{name}\": {is_so}");
    }
    if let Some(host_offset) = extent.host_offset {
        text += &format!(", \"offset\": {host_offset}");
    }
    text + "}"
}

/// Whether `next` is of the same kind and, where that means anything, goes on in the same file.
fn goes_on(last: &Extent, next: &Extent) -> bool {
    let same_kind = last.depth == next.depth
        && last.present == next.present
        && last.zero == next.zero
        && last.data == next.data
        && last.compressed == next.compressed;
    let same_place = match (last.host_offset, next.host_offset) {
        (None, None) => true,
        (Some(last_offset), Some(next_offset)) => last_offset + last.len == next_offset,
        (Some(_), None) | (None, Some(_)) => false,
    };
    same_kind && same_place
}

/// Offset of the disk in its file, for a raw layer that is a part of one.
fn start_in_file(layer: &LayerInfo) -> u64 {
    match (layer.format, &layer.content) {
        (Format::Raw, Some(content)) => content.start(),
        _ => 0,
    }
}

async fn print_map(
    image: &Image,
    start: u64,
    max_length: Option<u64>,
    format: OutputFormat,
) -> Result<(), CommandError> {
    let layers = image.layers();
    let starts: Vec<u64> = layers.iter().map(start_in_file).collect();
    let files = layers.into_iter().map(|layer| layer.data_name);
    let mut printer = Printer::new(format, files.collect());
    output::print(&printer.begin());
    let size = image.size();
    let end = max_length.map_or(size, |len| start.saturating_add(len).min(size));
    let mut at = start;
    while at < end {
        let extents = image.extents(at, end - at, EXTENTS_AT_ONCE).await;
        let extents = extents
            .map_err(|error| CommandError::new(format!("Could not read file metadata: {error}")))?;
        for mut extent in extents {
            at = extent.start + extent.len;
            let start = starts.get(extent.depth as usize);
            extent.host_offset = extent.host_offset.map(|at| at + start.unwrap_or(&0));
            output::print(&printer.push(extent)?);
        }
    }
    output::print(&printer.end(start)?);
    Ok(())
}

/// Prints the map of an image; the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    program.exit_code(mapped(&args, program))
}

fn mapped(args: &Args, program: &Program) -> Result<(), CommandError> {
    let format = args.report.output.format("map", program)?;
    let start = match &args.start_offset {
        Some(text) => bytes_within("start offset", text, 0..=size::SIZE_MAX)?,
        None => 0,
    };
    let max_length = match &args.max_length {
        Some(text) => Some(bytes_within("max length", text, 0..=size::SIZE_MAX)?),
        None => None,
    };
    let spec = args.image.spec("map", program)?;
    let settings = OpenSettings {
        sharing: sharing(args.force_share, Sharing::AsFormat),
        policy: args.report.trust.backing_policy,
        ..open::settings()
    };
    block_on(Aio::Auto, async {
        let image = open_image(&spec, &settings).await?;
        print_map(&image, start, max_length, format).await
    })
}
