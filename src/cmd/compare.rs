//! `compare`: whether two disks hold the same, with qemu-img's words and exit codes.
//!
//! 0 is the same, 1 different, 2 could not open (or a mistake in the options), 3 could not compare
//! what is where, 4 could not read. What both disks say is zero, or have from one image, is not
//! read.

use cowslip::compare::{Comparison, Failure, Side, Strictness, Verdict, compare};
use cowslip::file::Sharing;
use cowslip::file::host::Aio;
use cowslip::image::Image;
use serde_json::{Value, json};

use crate::error::CommandError;
use crate::job::JobArgs;
use crate::open::{self, CacheMode, OpenSettings, Trust, block_on, open_image, sharing};
use crate::output::{Program, print, print_json, usage_error};

/// Exit code: the disks differ.
const EXIT_DIFFERENT: u8 = 1;
/// Exit code: they could not be opened.
const EXIT_NOT_OPENED: u8 = 2;
/// Exit code: the block status of one of the images could not be read.
const EXIT_NO_EXTENTS: u8 = 3;
/// Exit code: one of them could not be read.
const EXIT_NOT_READ: u8 = 4;
/// A raw file counts in whole sectors.
const SECTOR_BYTES: u64 = 512;

/// Command line of `compare`.
#[derive(clap::Args)]
pub struct Args {
    /// The first image's format
    #[arg(short = 'f', long = "a-format", aliases = ["format", "left-format"], value_name = "FMT")]
    a_format: Option<String>,
    /// The second image's format
    #[arg(short = 'F', long = "b-format", alias = "right-format")]
    #[arg(value_name = "FMT")]
    b_format: Option<String>,
    /// The FILENAMEs are complete image specifications
    #[arg(long)]
    image_opts: bool,
    /// Also compare sizes and allocation: data, zeroes, unallocated
    #[arg(short, long)]
    strict: bool,
    /// Cache mode
    #[arg(short = 'T', long = "cache", value_name = "CACHE_MODE")]
    #[arg(default_value = "writeback")]
    cache: String,
    /// Open the images although another process writes to them
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Print the outcome as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    trust: Trust,
    #[command(flatten)]
    job: JobArgs,
    /// The two image files
    #[arg(value_name = "FILENAME")]
    filenames: Vec<String>,
}

/// Result of a comparison of the disks' sizes and contents.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    sizes: [u64; 2],
    /// `None` if the sizes have decided.
    comparison: Option<Comparison>,
}

impl Outcome {
    fn is_identical(&self) -> bool {
        let verdict = self.comparison.map(|comparison| comparison.verdict);
        verdict == Some(Verdict::Identical)
    }

    /// Returns the result for people, in qemu-img's words.
    fn text(&self) -> String {
        let Some(comparison) = self.comparison else {
            return "Strict mode: Image size mismatch!\n".to_string();
        };
        let warning = |at| warning(self.sizes, at);
        match comparison.verdict {
            Verdict::Identical => format!("{}Images are identical.\n", warning(u64::MAX)),
            Verdict::ContentDiffers(at) => {
                format!("{}Content mismatch at offset {at}!\n", warning(at))
            }
            Verdict::StorageDiffers(at) => {
                format!("Strict mode: Offset {at} block status mismatch!\n")
            }
        }
    }

    /// Returns the result for programs.
    fn value(&self) -> Value {
        let (why, at) = match self.comparison.map(|comparison| comparison.verdict) {
            None => (Some("size"), None),
            Some(Verdict::Identical) => (None, None),
            Some(Verdict::ContentDiffers(at)) => (Some("content"), Some(at)),
            Some(Verdict::StorageDiffers(at)) => (Some("storage"), Some(at)),
        };
        let looked_at = self.comparison.map(|comparison| comparison.looked_at_bytes);
        json!({
            "identical": self.is_identical(),
            "difference": why,
            "offset": at,
            "sizes": self.sizes,
            "looked-at-bytes": looked_at.unwrap_or(0),
        })
    }
}

/// Returns the warning of different sizes for disks that are equal up to `at`, the end of the
/// shorter one.
fn warning([first, second]: [u64; 2], at: u64) -> &'static str {
    match first != second && at >= first.min(second) {
        true => "Warning: Image size mismatch!\n",
        false => "",
    }
}

/// Compares two images; the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    match compared(&args, program) {
        Ok(true) => 0,
        Ok(false) => EXIT_DIFFERENT,
        Err(Failed { error, note }) => {
            // Behind the error, as what qemu-img prints into a file or a pipe comes at its end.
            let exit_code = program.fail(&error);
            print(note);
            exit_code
        }
    }
}

/// Why nothing has come of it.
struct Failed {
    error: CommandError,
    /// Note that is printed all the same.
    note: &'static str,
}

impl From<CommandError> for Failed {
    fn from(error: CommandError) -> Failed {
        Failed { error, note: "" }
    }
}

fn compared(args: &Args, program: &Program) -> Result<bool, Failed> {
    let not_opened = |error: CommandError| error.with_exit_code(EXIT_NOT_OPENED);
    let [first, second] = &args.filenames[..] else {
        let text = "Expecting two image file names";
        return Err(usage_error(text, "compare", program).into());
    };
    let cache = CacheMode::parse(&args.cache).ok_or_else(|| {
        let text = format!("Invalid source cache option: {}", args.cache);
        not_opened(CommandError::new(text))
    })?;
    let one = |filename: &String, format: &Option<String>| {
        let filenames = std::slice::from_ref(filename);
        let verb = ("compare", program);
        open::only(filenames, format.as_deref(), args.image_opts, verb).map_err(not_opened)
    };
    let specs = [one(first, &args.a_format)?, one(second, &args.b_format)?];
    let settings = OpenSettings {
        cache,
        sharing: sharing(args.force_share, Sharing::AsFormat),
        policy: args.trust.backing_policy,
        ..open::settings()
    };
    let outcome = block_on(Aio::Auto, async {
        let first = open_image(&specs[0], &settings).await.map_err(not_opened)?;
        let second = open_image(&specs[1], &settings).await.map_err(not_opened)?;
        let outcome = look(args, [&first, &second]).await;
        Ok(outcome.inspect_err(|_| args.job.unless(args.quiet).end_line()))
    })??;
    let shown = args.job.unless(args.quiet);
    shown.clear();
    if args.json {
        print_json(&outcome.value());
    } else if !args.quiet {
        print(&outcome.text());
    }
    shown.end_line();
    Ok(outcome.is_identical())
}

async fn look(args: &Args, images: [&Image; 2]) -> Result<Outcome, Failed> {
    let sizes = images.map(|image| image.size().next_multiple_of(SECTOR_BYTES));
    if args.strict && sizes[0] != sizes[1] {
        let comparison = None;
        return Ok(Outcome { sizes, comparison });
    }
    let strictness = match args.strict {
        true => Strictness::Storage,
        false => Strictness::Content,
    };
    let job = args.job.unless(args.quiet).job()?;
    let name = |side: Side| match side {
        Side::First => &args.filenames[0],
        Side::Second => &args.filenames[1],
    };
    let compared = compare(images, strictness, &job).await;
    let comparison = compared.map_err(|failure| {
        let mut note = "";
        let (text, exit_code) = match failure {
            Failure::Extents(side, error) => {
                let text = format!("Sector allocation test failed for {}: {error}", name(side));
                (text, EXIT_NO_EXTENTS)
            }
            Failure::Read(side, at, error) => {
                if !args.quiet && !args.json {
                    note = warning(sizes, at);
                }
                let words = error.system_words();
                let text = format!("Error while reading offset {at} of {}: {words}", name(side));
                (text, EXIT_NOT_READ)
            }
            Failure::Cancelled => ("Cancelled".to_string(), EXIT_NOT_READ),
        };
        let error = CommandError::new(text).with_exit_code(exit_code);
        Failed { error, note }
    })?;
    Ok(Outcome {
        sizes,
        comparison: Some(comparison),
    })
}
