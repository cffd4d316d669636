//! `check`: verifies every structure and every refcount of a qcow2 image; `-r` repairs them, and
//! `--plan` reports what a repair would do.
//!
//! Text, JSON and exit codes are qemu-img's: 0 sound, 1 could not check, 2 corruptions, 3 leaks
//! only, 63 for formats without checks; after a repair they describe what remains. Unlike qemu-img
//! it needs neither the backing file nor the external data file nor the key of an encrypted image,
//! and opens none of them.

use std::sync::Arc;

use cowslip::BufMut;
use cowslip::file::host::Aio;
use cowslip::file::{BlockFile, Sharing};
use cowslip::image::Format;
use cowslip::qcow2::check::{self, CheckOptions, CheckResult, Finding, Observer};
use cowslip::qcow2::header::{FIRST_READ_BYTES, Header};
use cowslip::qcow2::repair::{Scope, Summary};
use serde_json::{Map, Value};

use super::change::ReportArgs;
use crate::error::CommandError;
use crate::open::{
    self, Access, CacheMode, OneImage, OpenSettings, Source, block_on, guessed_raw, open_alone,
    opening_failed, sharing,
};
use crate::output::{self, OutputFormat, Program, usage_error};
use crate::repair_text::print_line;

mod repair;

/// Exit code: the image's format has no checks.
const EXIT_NOT_SUPPORTED: u8 = 63;

/// Command line of `check`.
#[derive(clap::Args)]
pub struct Args {
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Cache mode
    #[arg(short = 'T', long = "cache", value_name = "CACHE_MODE")]
    #[arg(default_value = "writeback")]
    cache: String,
    /// Open the image although another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    report: ReportArgs,
    /// Damage to repair: leaks or all
    #[arg(short, long, value_name = "WHAT")]
    repair: Option<String>,
    /// Show what a repair would do, why, and which data may be lost, and change nothing
    #[arg(long)]
    plan: bool,
    #[command(flatten)]
    image: OneImage,
}

/// Reports findings as they come, on standard error, and progress on standard output.
struct Reporter {
    progress: Option<f64>,
}

impl Reporter {
    fn new(args: &Args) -> Reporter {
        Reporter {
            progress: args.progress.then_some(-1.0),
        }
    }
}

impl Observer for Reporter {
    fn finding(&mut self, finding: &Finding) {
        print_line(finding);
    }

    fn progress(&mut self, done_bytes: u64, total_bytes: u64) {
        let Some(last) = &mut self.progress else {
            return;
        };
        let percent = done_bytes as f64 * 100.0 / total_bytes.max(1) as f64;
        // As qemu-img: at most once for each per cent.
        if percent >= *last + 1.0 || done_bytes == total_bytes {
            *last = percent;
            output::note(&format!("    ({percent:.2}/100%)\r"));
        }
    }
}

/// The report for people.
fn human_text(result: &CheckResult) -> String {
    let mut text = String::new();
    if result.is_clean() {
        text += "No errors were found on the image.\n";
    }
    if result.corruptions > 0 {
        text += &format!(
            "\n{} errors were found on the image.\nData may be corrupted, or further writes to the \
             image may corrupt it.\n",
            result.corruptions
        );
    }
    if result.leaks > 0 {
        text += &format!(
            "\n{} leaked clusters were found on the image.\nThis means waste of disk space, but no \
             harm to data.\n",
            result.leaks
        );
    }
    if result.check_errors > 0 {
        text += &format!(
            "\n{} internal errors have occurred during the check.\n",
            result.check_errors
        );
    }
    if result.total_clusters != 0 && result.allocated_clusters != 0 {
        let percent = |part: u64, whole: u64| part as f64 * 100.0 / whole as f64;
        let allocated = result.allocated_clusters;
        text += &format!(
            "{allocated}/{} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters\n",
            result.total_clusters,
            percent(allocated, result.total_clusters),
            percent(result.fragmented_clusters, allocated),
            percent(result.compressed_clusters, allocated),
        );
    }
    if result.image_end_offset > 0 {
        text += &format!("Image end offset: {}\n", result.image_end_offset);
    }
    text
}

/// The report for programs; the order of the keys is qemu-img's.
fn json_value(result: &CheckResult, repaired: &Summary, filename: &str) -> Value {
    let mut map = Map::new();
    let mut number = |name: &str, value: u64, always: bool| {
        if always || value != 0 {
            map.insert(name.to_string(), Value::from(value));
        }
    };
    number("image-end-offset", result.image_end_offset, false);
    number("compressed-clusters", result.compressed_clusters, false);
    number("total-clusters", result.total_clusters, false);
    number("corruptions", result.corruptions, false);
    number("corruptions-fixed", repaired.corruptions, false);
    number("check-errors", result.check_errors, true);
    number("leaks", result.leaks, false);
    number("leaks-fixed", repaired.leaks, false);
    number("allocated-clusters", result.allocated_clusters, false);
    map.insert("filename".to_string(), Value::from(filename));
    map.insert("format".to_string(), Value::from("qcow2"));
    if result.fragmented_clusters != 0 {
        let value = Value::from(result.fragmented_clusters);
        map.insert("fragmented-clusters".to_string(), value);
    }
    Value::Object(map)
}

/// The exit code of the outcome; complains where something could not be checked.
fn exit_code(result: &CheckResult, program: &Program) -> u8 {
    if result.check_errors > 0 {
        program.complain("Check failed");
        1
    } else if result.corruptions > 0 {
        2
    } else if result.leaks > 0 {
        3
    } else {
        0
    }
}

/// Checks an image; the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    match checked(&args, program) {
        Ok(code) => code,
        Err(error) => program.fail(&error),
    }
}

/// Reads `-r`.
///
/// # Errors
/// It is neither of the two.
pub fn scope(what: &str, program: &Program) -> Result<Scope, CommandError> {
    match what {
        "leaks" => Ok(Scope::Leaks),
        "all" => Ok(Scope::All),
        _ => {
            let text = format!("--repair (-r) expects 'leaks' or 'all' not '{what}'");
            Err(usage_error(&text, "check", program))
        }
    }
}

fn checked(args: &Args, program: &Program) -> Result<u8, CommandError> {
    let format = args.report.output.format("check", program)?;
    let scope = args.repair.as_deref().map(|what| scope(what, program));
    let scope = scope.transpose()?;
    let cache = CacheMode::parse(&args.cache)
        .ok_or_else(|| CommandError::new(format!("Invalid source cache option: {}", args.cache)))?;
    let spec = args.image.spec("check", program)?;
    let source = spec.resolve()?;
    let settings = OpenSettings {
        access: match scope {
            Some(_) if !args.plan => Access::Write,
            _ => Access::Read,
        },
        cache,
        sharing: sharing(args.force_share, Sharing::AsFormat),
        policy: args.report.trust.backing_policy,
        ..open::settings()
    };
    if args.plan {
        let scope = scope.unwrap_or(Scope::All);
        return block_on(Aio::Auto, async {
            let (file, _) = open_damaged(&source, &settings).await?;
            repair::plan(&file, scope, (args, format)).await
        });
    }
    let (result, repaired) = block_on(Aio::Auto, async {
        let (file, header) = open_damaged(&source, &settings).await?;
        match scope {
            Some(scope) => repair::run(&file, scope, (args, format)).await,
            None => {
                let result = check_file(&file, &header, &mut Reporter::new(args)).await?;
                end_progress(args);
                Ok((result, Summary::default()))
            }
        }
    })?;
    if !args.quiet {
        match format {
            OutputFormat::Human => output::print(&human_text(&result)),
            OutputFormat::Json => {
                output::print_json(&json_value(&result, &repaired, &args.image.filenames[0]));
            }
        }
    }
    Ok(exit_code(&result, program))
}

fn end_progress(args: &Args) {
    if args.progress {
        output::note("\n");
    }
}

async fn check_file(
    file: &Arc<dyn BlockFile>,
    header: &Header,
    reporter: &mut Reporter,
) -> Result<CheckResult, CommandError> {
    check::check_with_header(file, header, &CheckOptions::default(), reporter)
        .await
        .map_err(|error| CommandError::new(format!("Check failed: {error}")))
}

/// Opens an image that may be damaged; refuses formats without checks.
async fn open_damaged(
    source: &Source,
    settings: &OpenSettings,
) -> Result<(Arc<dyn BlockFile>, Header), CommandError> {
    let name = source.given.as_str();
    let (file, format) = open_alone(source, settings).await?;
    if format != Format::Qcow2 {
        let is_guessed = format == Format::Raw && source.format.is_none();
        if is_guessed && settings.access == Access::Write {
            output::print_error(&guessed_raw(&source.filename));
        }
        let text = "This image format does not support checks";
        return Err(CommandError::new(text).with_exit_code(EXIT_NOT_SUPPORTED));
    }
    let start = read_start(&file, FIRST_READ_BYTES, name).await?;
    let wanted = Header::wanted_bytes(&start, u64::MAX);
    let start = read_start(&file, wanted, name).await?;
    // Structures beyond the end of the file are for the check to find, not for the parser to
    // refuse.
    let header =
        Header::parse_damaged(&start, name).map_err(|error| opening_failed(name, &error))?;
    Ok((file, header))
}

/// The first `len` bytes of the file, and as many more as its alignment demands.
async fn read_start(
    file: &Arc<dyn BlockFile>,
    len: u64,
    name: &str,
) -> Result<BufMut, CommandError> {
    let len = len.next_multiple_of(u64::from(file.capabilities().alignment_bytes));
    let len = usize::try_from(len).expect("a header is in the first cluster");
    let (result, buf) = file.read(0, BufMut::zeroed(len).into()).await;
    result.map_err(|error| {
        let error = cowslip::Error::io("Could not read the image header", error);
        opening_failed(name, &error)
    })?;
    Ok(buf.into())
}
