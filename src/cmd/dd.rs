//! `dd`: copies a part of an image's disk into a new image, all of it as data, as `qemu-img dd`
//! does.
//!
//! `count` is counted from the beginning of the input, also where blocks are skipped: that is what
//! qemu-img does.

use std::time::Instant;

use cowslip::convert::{Converted, LastSector, Options, Plan, Sources, TargetContent};
use cowslip::file::host::{Aio, FlushPolicy};
use cowslip::file::{ReadAs, ReadSet, Sharing};
use cowslip::image::Format;
use serde_json::json;

use super::change::OutcomeArgs;
use super::create::{self, format_name};
use crate::error::CommandError;
use crate::interrupt::CancelledOnInterrupt;
use crate::new_file::{NewFile, what_is_left};
use crate::open::{
    self, Access, ImageSpec, OpenSettings, Trust, block_on, foreign, open_image, sharing, workers,
};
use crate::options::{bytes_within, number_within};
use crate::output::Program;

/// Bytes of a block where none are named.
const BLOCK_BYTES: u64 = 512;
/// The largest value of `bs=`, in bytes.
const BLOCK_BYTES_MAX: u64 = i32::MAX as u64;

/// Command line of `dd`.
#[derive(clap::Args)]
pub struct Args {
    /// Format of the input
    #[arg(short = 'f', long, value_name = "FMT")]
    format: Option<String>,
    /// The input is a complete image specification
    #[arg(long)]
    image_opts: bool,
    /// Format of the output
    #[arg(short = 'O', long = "output-format", value_name = "FMT")]
    #[arg(default_value = "raw")]
    output_format: String,
    /// Open the input although another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    trust: Trust,
    #[command(flatten)]
    outcome: OutcomeArgs,
    /// if=INPUT of=OUTPUT, bs=BYTES of a block, count=BLOCKS, skip=BLOCKS of the input
    #[arg(value_name = "OPERAND")]
    operands: Vec<String>,
}

/// Values of the operands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Operands {
    input: Option<String>,
    output: Option<String>,
    block_bytes: Option<u64>,
    count: Option<u64>,
    skip: u64,
}

impl Operands {
    fn parse(words: &[String]) -> Result<Operands, CommandError> {
        let mut out = Operands::default();
        for word in words {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            let blocks = |what| number_within(what, value, 0..=i64::MAX as u64);
            match name {
                "if" => out.input = Some(value.to_string()),
                "of" => out.output = Some(value.to_string()),
                "bs" => out.block_bytes = Some(bytes_within("bs", value, 1..=BLOCK_BYTES_MAX)?),
                "count" => out.count = Some(blocks("count")?),
                "skip" => out.skip = blocks("skip")?,
                _ => {
                    let text = format!("unrecognized operand {name}");
                    return Err(CommandError::new(text));
                }
            }
        }
        Ok(out)
    }

    /// Returns the range of a disk of `size` bytes that is copied; `None` if the disk ends before
    /// it.
    fn range(&self, size: u64) -> Option<std::ops::Range<u64>> {
        let block_bytes = self.block_bytes.unwrap_or(BLOCK_BYTES);
        let end = match self.count {
            Some(count) => size.min(count.saturating_mul(block_bytes)),
            None => size,
        };
        let start = self.skip.saturating_mul(block_bytes);
        (start <= end).then_some(start..end)
    }
}

/// Runs `dd`. Returns the exit code.
pub fn run(args: &Args, program: &Program) -> u8 {
    program.exit_code(copied(args, program))
}

fn copied(args: &Args, program: &Program) -> Result<(), CommandError> {
    let operands = Operands::parse(&args.operands)?;
    let (Some(input), Some(output)) = (&operands.input, &operands.output) else {
        let text = "Must specify both input and output files";
        return Err(CommandError::new(text));
    };
    if args.image_opts && args.format.is_some() {
        let text = "--image-opts and --format are mutually exclusive";
        return Err(CommandError::new(text));
    }
    let job = args.outcome.job.job()?;
    let interrupted = CancelledOnInterrupt::new(&job);
    let work = async {
        let settings = OpenSettings {
            aio: Aio::Threads,
            sharing: sharing(args.force_share, Sharing::Frozen),
            policy: args.trust.backing_policy,
            workers: workers(),
            ..open::settings()
        };
        let spec = ImageSpec {
            image_opts: args.image_opts,
            ..ImageSpec::named(input, args.format.as_deref())
        };
        let image = open_image(&spec, &settings).await?;
        let format = output_format(args)?;
        let range = operands.range(image.size()).unwrap_or_else(|| {
            program.complain(format_args!("{input}: cannot skip to specified offset"));
            0..0
        });
        let mut sources = Sources::default();
        sources.add(&image, range);
        let mut read = ReadSet::default();
        image.add_to(&mut read, ReadAs::Source);
        copy(args, (&sources, read), (output, format), &job).await
    };
    let begun = Instant::now();
    let done = block_on(Aio::Threads, work);
    if done.is_err() && job.is_cancelled() {
        return Err(interrupted.report(program, what_is_left(output, &job)));
    }
    let done = done?;
    args.outcome.job.end();
    args.outcome.done.report(false, "", || {
        json!({
            "source": input,
            "target": output,
            "format": args.output_format,
            "virtual-size": done.size,
            "bytes-read": done.read_bytes,
            "bytes-written": done.written_bytes,
            "seconds": begun.elapsed().as_secs_f64(),
        })
    });
    Ok(())
}

/// The format of the output. It is looked at when the input is open, as qemu-img does.
fn output_format(args: &Args) -> Result<Format, CommandError> {
    let format = create::creatable_format(&args.output_format);
    format.map_err(|error| match foreign::is_format(&args.output_format) {
        true => error,
        false => CommandError::new("Unknown file format"),
    })
}

async fn copy(
    args: &Args,
    (sources, read): (&Sources<'_>, ReadSet),
    (output, format): (&str, Format),
    job: &cowslip::Job,
) -> Result<Converted, CommandError> {
    if format == Format::Luks {
        // It has no options, so nobody can say what shall open the volume.
        let text = "Parameter 'key-secret' is required for cipher";
        return Err(refused(output, &CommandError::new(text)));
    }
    let wanted = create::Request {
        destination: open::destination(output)?,
        format,
        options: Vec::new(),
        size: Some(sources.size()),
        flush: FlushPolicy::Honour,
    };
    let made = create::make_files(&wanted, read, job).await;
    let files = made.map_err(|error| refused(output, &error))?;
    let settings = OpenSettings {
        access: Access::Write,
        aio: Aio::Threads,
        policy: args.trust.backing_policy,
        ..open::settings()
    };
    let target = open_image(
        &ImageSpec::named(output, Some(format_name(format))),
        &settings,
    )
    .await?;
    let options = Options {
        sparse_bytes: 0,
        unwritten: TargetContent::Zeroes,
        // Bytes behind the copy on a device are not the copy's.
        last_sector: LastSector::DataAlone,
        ..Options::default()
    };
    let failed = |failure: cowslip::convert::Failure| match failure {
        cowslip::convert::Failure::Writing(_, error) => {
            CommandError::new(format!("error while writing to output image file: {error}"))
        }
        other => CommandError::new(other.to_string()),
    };
    target.mark_unfinished().await?;
    let plan = Plan::new(sources, options, job, &|_| {}).await;
    let done = match plan {
        Ok(plan) => plan.run(&target, job).await,
        Err(failure) => Err(failure),
    };
    let marked = match &done {
        Ok(_) => target.mark_finished().await,
        Err(_) => Ok(()),
    };
    let closed = target.close().await;
    let done = done.map_err(failed)?;
    marked?;
    closed?;
    files.into_iter().for_each(NewFile::finished);
    Ok(done)
}

fn refused(output: &str, error: &CommandError) -> CommandError {
    CommandError::new(format!(
        "{output}: error while creating output image: {error}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(words: &[&str], size: u64) -> Option<(u64, u64)> {
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        let range = Operands::parse(&words).unwrap().range(size);
        range.map(|range| (range.start, range.end))
    }

    #[test]
    fn operands_name_a_part_of_the_disk() {
        assert_eq!(range(&[], 1000), Some((0, 1000)));
        assert_eq!(range(&["bs=3", "count=5", "skip=1"], 512), Some((3, 15)));
        assert_eq!(range(&["bs=4k", "count=3", "skip=10"], 1 << 20), None);
        assert_eq!(range(&["skip=2"], 1024), Some((1024, 1024)));
        assert_eq!(range(&["skip=9223372036854775807"], 1024), None);
        assert_eq!(
            range(&["bs=1k", "bs=2k", "count=1"], 1 << 20),
            Some((0, 2048))
        );
        for bad in ["bs=0", "bs=2G", "count=1k", "skip=-1", "seek=1", "foo"] {
            assert!(Operands::parse(&[bad.to_string()]).is_err(), "{bad}");
        }
    }
}
