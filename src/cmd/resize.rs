//! `resize`: changes the size of a disk, with qemu-img's words; what is added may be preallocated.
//!
//! Interrupted, it takes back what it has allocated, and the disk keeps its size.

use cowslip::Error;
use cowslip::file::host::Aio;
use cowslip::image::Image;
use cowslip::qcow2::create::Preallocation;
use serde_json::json;

use super::change::ChangeArgs;
use crate::error::CommandError;
use crate::interrupt::CancelledOnInterrupt;
use crate::open::{
    self, Access, OpenSettings, block_on, open_image, shrink_refused, warn_of_guessed_raw,
};
use crate::options;
use crate::output::{Program, usage_error};

/// Command line of `resize`.
#[derive(clap::Args)]
pub struct Args {
    /// The image's format
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    /// FILENAME is a complete image specification
    #[arg(long)]
    image_opts: bool,
    /// Preallocation of the added space: off, metadata, falloc or full
    #[arg(long, value_name = "PREALLOC", default_value = "off")]
    preallocation: String,
    /// Allow the disk to shrink; data beyond its new end is lost
    #[arg(long)]
    shrink: bool,
    #[command(flatten)]
    change: ChangeArgs,
    /// The image file, and its new size; with + or - by how much it changes
    #[arg(value_name = "FILENAME [+-]SIZE")]
    words: Vec<String>,
}

/// Size that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Size(u64),
    More(u64),
    Less(u64),
}

impl Wanted {
    fn parse(text: &str) -> Result<Wanted, CommandError> {
        let (make, digits): (fn(u64) -> Wanted, &str) = match text.split_at_checked(1) {
            Some(("+", rest)) => (Wanted::More, rest),
            Some(("-", rest)) => (Wanted::Less, rest),
            _ => (Wanted::Size, text),
        };
        Ok(options::size("size", digits).map(make)?)
    }

    /// The new size of a disk of `now` bytes, in bytes.
    fn of(self, now: u64) -> Result<u64, CommandError> {
        let size = match self {
            Wanted::Size(size) => Some(size),
            Wanted::More(more) => now.checked_add(more),
            Wanted::Less(less) => now.checked_sub(less),
        };
        size.filter(|&size| size > 0 && i64::try_from(size).is_ok())
            .ok_or_else(|| CommandError::new("New image size must be positive"))
    }
}

/// Runs `resize`. Returns the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    program.exit_code(resized(&args, program))
}

/// Reads `--preallocation`.
///
/// # Errors
/// No such mode.
pub fn preallocation(name: &str) -> Result<Preallocation, CommandError> {
    Preallocation::from_name(name)
        .ok_or_else(|| CommandError::new(format!("Invalid preallocation mode '{name}'")))
}

fn resized(args: &Args, program: &Program) -> Result<(), CommandError> {
    let preallocation = preallocation(&args.preallocation)?;
    let (filename, size) = match &args.words[..] {
        [filename, size] => (filename, size),
        [] | [_] => {
            let text = "Expecting image file name and size";
            return Err(usage_error(text, "resize", program));
        }
        _ => {
            let text = "Extra argument(s) in command line";
            return Err(usage_error(text, "resize", program));
        }
    };
    let wanted = Wanted::parse(size)?;
    let spec = open::only(
        std::slice::from_ref(filename),
        args.format.as_deref(),
        args.image_opts,
        ("resize", program),
    )?;
    let settings = OpenSettings {
        access: Access::Write,
        policy: args.change.trust.backing_policy,
        ..open::settings()
    };
    let job = args.change.job.job()?;
    let interrupted = CancelledOnInterrupt::new(&job);
    let outcome = block_on(Aio::Auto, async {
        let image = open_image(&spec, &settings).await?;
        warn_of_guessed_raw(&image, &spec)?;
        let before = image.size();
        let size = checked_size(&image, wanted, (args, preallocation), program)?;
        let resized = image.resize_as_job(size, preallocation, &job).await;
        let closed = image.close().await;
        // The first failure is the one to report.
        Ok(resized.and(closed).map(|()| (before, size)))
    })?;
    match outcome {
        Err(Error::Cancelled) => {
            let left = format!(
                "'{filename}' keeps its old size, and the space that was allocated has been freed"
            );
            Err(interrupted.report(program, left))
        }
        outcome => {
            let (before, size) = outcome.map_err(|error| not_resized(filename, error))?;
            args.change.job.end();
            args.change
                .done
                .report(args.change.quiet, "Image resized.\n", || {
                    json!({
                        "filename": filename,
                        "virtual-size-before": before,
                        "virtual-size": size,
                        "preallocation": args.preallocation,
                    })
                });
            Ok(())
        }
    }
}

/// Why a resize failed. Whether others allow a change of the length is asked when it begins; QEMU
/// asks when it opens the image.
fn not_resized(filename: &str, error: Error) -> CommandError {
    match error {
        Error::Locked(conflict) => CommandError::opening(filename, conflict.to_string()),
        other => other.into(),
    }
}

fn checked_size(
    image: &Image,
    wanted: Wanted,
    (args, preallocation): (&Args, Preallocation),
    program: &Program,
) -> Result<u64, CommandError> {
    let now = image.size();
    let size = wanted.of(now)?;
    if size <= now && preallocation != Preallocation::Off {
        let text = "Preallocation can only be used for growing images";
        return Err(CommandError::new(text));
    }
    if size < now && !args.shrink {
        return Err(shrink_refused(program));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_absolute_or_relative() {
        let of = |text| Wanted::parse(text).and_then(|wanted| wanted.of(1 << 20));
        assert_eq!(of("2M").unwrap(), 2 << 20);
        assert_eq!(of("+512").unwrap(), (1 << 20) + 512);
        assert_eq!(of("-1k").unwrap(), (1 << 20) - 1024);
        for bad in ["-1M", "0", "+8E", "9E", "-2M"] {
            let error = of(bad).unwrap_err().to_string();
            assert_eq!(error, "New image size must be positive", "{bad}");
        }
        assert!(of("").is_err() && of("+").is_err() && of("+-5").is_err());
    }
}
