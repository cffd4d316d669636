//! `amend`: changes options of an existing image, with qemu-img's options and words.
//!
//! Each option is one change of the header, or a resize, and crash-safe by itself. What this release does not
//! change is refused by name before anything is changed: the width of refcounts, the backing file (as with
//! qemu-img), encryption.

use clap::ArgAction;
use cowslip::Error;
use cowslip::file::host::Aio;
use cowslip::image::{Format, Image};
use cowslip::qcow2::amend::Amendment;
use cowslip::qcow2::create::Version;

use super::create::{OWN_QCOW2_OPTIONS, QCOW2_OPTIONS};
use crate::error::CommandError;
use crate::interrupt::CancelledOnInterrupt;
use crate::job::JobArgs;
use crate::open::{
    Access, CacheMode, OneImage, OpenHow, Trust, alloc_policy, block_on, open_image,
};
use crate::options::{self, Kind, Known};
use crate::output::{Program, print, usage_error};

/// Command line of `amend`.
#[derive(clap::Args)]
pub struct Args {
    /// Options of the format, as name=value,name=value; `help` lists them
    #[arg(
        short = 'o',
        long = "options",
        value_name = "OPTIONS",
        action = ArgAction::Append,
        allow_hyphen_values = true
    )]
    options: Vec<String>,
    /// Cache mode
    #[arg(short = 't', long, value_name = "CACHE", default_value = "writeback")]
    cache: String,
    /// Accepted for compatibility; nothing that it allows is supported
    #[arg(long)]
    force: bool,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    trust: Trust,
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    image: OneImage,
}

/// The options that qemu-img lists; those of encryption are refused.
const AMENDABLE: &[&str] = &[
    "backing_file",
    "backing_fmt",
    "compat",
    "data_file",
    "data_file_raw",
    "encrypt.iter-time",
    "lazy_refcounts",
    "refcount_bits",
    "size",
];

/// Options that only an existing image has.
const FOR_AMEND: &[Known] = &[
    known(
        "encrypt.keyslot",
        Kind::Number,
        "Select a single keyslot to modify explicitly",
    ),
    known(
        "encrypt.new-secret",
        Kind::Text,
        "New secret to set in the matching keyslots. Empty string to erase",
    ),
    known(
        "encrypt.old-secret",
        Kind::Text,
        "Select all keyslots that match this password",
    ),
    known(
        "encrypt.state",
        Kind::Text,
        "Select new state of affected keyslots (active/inactive)",
    ),
];

const fn known(name: &'static str, kind: Kind, help: &'static str) -> Known {
    Known { name, kind, help }
}

/// What is asked for, checked as far as no image is needed.
#[derive(Debug)]
struct Request {
    options: Vec<(String, String)>,
}

/// Amends an image.
pub fn run(args: Args, program: &Program) -> u8 {
    program.exit_code(amended(&args, program))
}

fn amended(args: &Args, program: &Program) -> Result<(), CommandError> {
    if args.options.is_empty() {
        let text = "Must specify options (-o)";
        return Err(usage_error(text, "amend", program));
    }
    let lists = args.options.iter().map(|list| options::split(list));
    let lists = lists.collect::<Result<Vec<_>, _>>()?;
    let cache = CacheMode::parse(&args.cache)
        .ok_or_else(|| CommandError::new(format!("Invalid cache option: {}", args.cache)))?;
    if args.options.iter().any(|list| options::asks_for_help(list)) {
        return print_help(args, program);
    }
    if args.image.filenames.len() != 1 {
        return Err(CommandError::new("Expecting one image file name"));
    }
    let spec = args.image.spec("amend", program)?;
    let how = OpenHow {
        access: Access::Write,
        cache,
        policy: args.trust.backing_policy,
        ..OpenHow::default()
    };
    let job = args.job.job()?;
    let interrupted = CancelledOnInterrupt::new(&job);
    let outcome = block_on(Aio::Auto, async {
        let image = open_image(&spec, &how).await?;
        let format = image.layers().first().map(|layer| layer.format);
        if format == Some(Format::Raw) {
            let text = "Format driver 'raw' does not support option amendment";
            return Err(CommandError::new(text));
        }
        if format == Some(Format::Luks) {
            let text = "amending the key slots of a LUKS volume is not supported";
            return Err(CommandError::new(text));
        }
        let request = Request {
            options: options::normalise_for_amend(lists.concat(), &amendable(), &all_known())?,
        };
        let amendment = request.amendment(&image)?;
        let size = options::value(&request.options, "size");
        let size = size.map(|size| options::size("size", size)).transpose()?;
        let mut outcome = Ok(());
        if let Some(size) = size.filter(|&size| size != image.size()) {
            let off = cowslip::qcow2::create::Preallocation::Off;
            outcome = image.resize_as_job(size, off, &job).await;
        }
        if outcome.is_ok() && amendment != Amendment::default() {
            outcome = image.amend(&amendment, &job).await;
        }
        let closed = image.close().await;
        Ok(outcome.and(closed))
    })?;
    if let Err(Error::Cancelled) = outcome {
        program.complain("Cancelled: nothing is changed");
        interrupted.end_by_signal();
    }
    outcome?;
    args.job.end();
    Ok(())
}

/// What may be amended, in the table's order of `create`.
fn amendable() -> Vec<Known> {
    let of_create = QCOW2_OPTIONS.iter();
    let of_create = of_create.filter(|option| AMENDABLE.contains(&option.name));
    of_create
        .chain(FOR_AMEND)
        .chain(OWN_QCOW2_OPTIONS)
        .copied()
        .collect()
}

fn all_known() -> Vec<Known> {
    [QCOW2_OPTIONS, OWN_QCOW2_OPTIONS].concat()
}

fn print_help(args: &Args, program: &Program) -> Result<(), CommandError> {
    match args.image.format.as_deref().unwrap_or("qcow2") {
        "qcow2" => {}
        "raw" | "file" => {
            let text = "Format driver 'raw' does not support option amendment";
            return Err(CommandError::new(text));
        }
        other => return Err(CommandError::new(format!("Unknown file format '{other}'"))),
    }
    let hides = program.name.starts_with("qemu-");
    let is_ours = |option: &Known| OWN_QCOW2_OPTIONS.iter().any(|own| own.name == option.name);
    let listed = amendable().into_iter();
    let listed: Vec<_> = listed
        .filter(|option| !(hides && is_ours(option)))
        .collect();
    let text = options::help_text(&listed);
    print(&format!("Amend options for 'qcow2':\n{text}"));
    Ok(())
}

impl Request {
    fn amendment(&self, image: &Image) -> Result<Amendment, CommandError> {
        let refuse = |text: &str| Err(CommandError::new(text));
        let value = |name| options::value(&self.options, name);
        let switch = |name| {
            value(name)
                .map(|text| options::switch(name, text))
                .transpose()
        };
        let layers = image.layers();
        let Some(header) = layers.first().and_then(|layer| layer.header.clone()) else {
            return refuse("the image has no header");
        };
        let version = match value("compat") {
            None => None,
            Some("0.10" | "v2") => Some(Version::V2),
            Some("1.1" | "v3") => Some(Version::V3),
            Some(other) => {
                let text = format!("Unknown compatibility level {other}");
                return Err(CommandError::new(text));
            }
        };
        if self
            .options
            .iter()
            .any(|(name, _)| name.starts_with("encrypt."))
        {
            return refuse("amending the key slots of an encrypted image is not supported");
        }
        // To what they are, both of them, as with qemu-img.
        let backing = (value("backing_file"), value("backing_fmt"));
        let now = (header.backing_file.as_deref(), header.backing_format());
        if backing != (None, None) && backing != now {
            return refuse("Cannot amend the backing file\nYou can use 'qemu-img rebase' instead.");
        }
        Ok(Amendment {
            version,
            // No number is no power of two.
            refcount_bits: value("refcount_bits").map(|bits| bits.parse().unwrap_or(0)),
            lazy_refcounts: switch("lazy_refcounts")?,
            data_file: value("data_file").map(str::to_string),
            data_file_raw: switch("data_file_raw")?,
            alloc_policy: value("alloc_policy")
                .map(|policy| alloc_policy("alloc_policy", policy))
                .transpose()?,
            backing: None,
        })
    }
}
