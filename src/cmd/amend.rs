//! `amend`: changes options of an existing image, with qemu-img's options and words.
//!
//! Each option is one change of the header, a resize, or a change of key slots, and crash-safe by
//! itself. What is not changed here is refused by name before anything is changed: the backing file
//! (as with qemu-img).

use cowslip::file::host::Aio;
use cowslip::image::{Format, Image};
use cowslip::luks::KeyChange;
use cowslip::qcow2::amend::Amendment;
use cowslip::qcow2::create::{Preallocation, Version};
use cowslip::qcow2::header::CryptMethod;
use cowslip::{Error, Job};
use serde_json::{Value, json};

use super::change::ChangeArgs;
use super::create::{
    FormatOptions, LUKS_OPTIONS, OWN_QCOW2_OPTIONS, QCOW2_OPTIONS, creatable_format,
};
use crate::encryption::{self, SlotOptions};
use crate::error::CommandError;
use crate::interrupt::CancelledOnInterrupt;
use crate::open::{
    self, Access, CacheMode, OneImage, OpenSettings, alloc_policy, block_on, open_image,
    shrink_refused, warn_of_guessed_raw,
};
use crate::options::{self, Kind, Known};
use crate::output::{Program, is_called_as_qemu, print, usage_error, worded};

/// Command line of `amend`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    of_format: FormatOptions,
    /// Cache mode
    #[arg(short = 't', long, value_name = "CACHE", default_value = "writeback")]
    cache: String,
    /// Allow changes that may lose data: overwriting a key slot in use, erasing the last one
    #[arg(long)]
    force: bool,
    /// Allow -o size= to shrink the disk; data beyond its new end is lost
    #[arg(long)]
    shrink: bool,
    #[command(flatten)]
    change: ChangeArgs,
    #[command(flatten)]
    image: OneImage,
}

/// Options of a qcow2 image that are changed here.
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

/// Options that only an existing image has: those of the keys in a qcow2 image, and of a LUKS
/// volume.
#[rustfmt::skip] // An option a line.
const OF_KEYS: &[Known] = &[
    known("encrypt.keyslot", Kind::Number, "Select a single keyslot to modify explicitly"),
    known(
        "encrypt.new-secret",
        Kind::Text,
        "New secret to set in the matching keyslots. Empty string to erase",
    ),
    known("encrypt.old-secret", Kind::Text, "Select all keyslots that match this password"),
    known("encrypt.state", Kind::Text, "Select new state of affected keyslots (active/inactive)"),
];

/// Prefix of the options of keys in a qcow2 image.
const PREFIX: &str = "encrypt.";

const fn known(name: &'static str, kind: Kind, help: &'static str) -> Known {
    Known { name, kind, help }
}

/// Request, checked as far as no image is needed.
#[derive(Debug)]
struct Request {
    options: Vec<(String, String)>,
}

/// Runs `amend`. Returns the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    program.exit_code(amended(&args, program))
}

fn amended(args: &Args, program: &Program) -> Result<(), CommandError> {
    let given = &args.of_format.options;
    if given.is_empty() {
        let text = "Must specify options (-o)";
        return Err(usage_error(text, "amend", program));
    }
    let lists = given.iter().map(|list| options::split(list));
    let lists = lists.collect::<Result<Vec<_>, _>>()?;
    let asks_for_help = given.iter().any(|list| options::asks_for_help(list));
    let format = match (args.image.format.as_deref(), &args.image.filenames[..]) {
        (Some(format), _) => Some(creatable_format(format)),
        // Scripts that take us for qemu-img get its answer, which is that a file is missing.
        (None, []) if !is_called_as_qemu() => Some(Ok(Format::Qcow2)),
        (None, _) => None,
    };
    if let Some(format) = format.filter(|_| asks_for_help) {
        return print_help(format?, program);
    }
    if args.image.filenames.len() != 1 {
        return Err(CommandError::new("Expecting one image file name"));
    }
    let spec = args.image.spec("amend", program)?;
    let cache = CacheMode::parse(&args.cache)
        .ok_or_else(|| CommandError::new(format!("Invalid cache option: {}", args.cache)))?;
    let settings = OpenSettings {
        access: Access::Write,
        cache,
        policy: args.change.trust.backing_policy,
        ..open::settings()
    };
    let job = args.change.job.job()?;
    let interrupted = CancelledOnInterrupt::new(&job);
    let mut done = 0;
    let outcome = block_on(Aio::Auto, async {
        let image = open_image(&spec, &settings).await?;
        warn_of_guessed_raw(&image, &spec)?;
        let format = image.layers().first().map(|layer| layer.format);
        if asks_for_help {
            print_help(format.unwrap_or(Format::Raw), program)?;
            return Ok(image.close().await.map(|()| Vec::new()));
        }
        let (amendable, all) = tables(format.unwrap_or(Format::Raw))?;
        let request = Request {
            options: options::normalise_for_amend(lists.concat(), &amendable, &all)?,
        };
        let current = spec.resolve()?.image.key_secret;
        let changes = request.changes(&image, current.as_deref(), args.force);
        let changes = changes.await?;
        if changes.shrink(&image) && !args.shrink && !is_called_as_qemu() {
            return Err(shrink_refused(program));
        }
        let passes = changes.in_passes(&image);
        let mut image = Some(image);
        for pass in passes {
            let image = match image.take() {
                Some(image) => image,
                None => open_image(&spec, &settings).await?,
            };
            let outcome = pass.carry_out(&image, &job, &mut done).await;
            if let Err(error) = outcome.and(image.close().await) {
                return Ok(Err(error));
            }
        }
        Ok(Ok(request.options))
    })?;
    if let Err(Error::Cancelled) = outcome {
        let left = match done {
            0 => "nothing was changed",
            _ => "changes that were complete stay in place",
        };
        return Err(interrupted.report(program, left));
    }
    let options = outcome?;
    if asks_for_help {
        return Ok(());
    }
    report(args, &spec.filename, options);
    Ok(())
}

fn report(args: &Args, filename: &str, options: Vec<(String, String)>) {
    args.change.job.end();
    args.change.done.report(args.change.quiet, "", || {
        let options = options.into_iter();
        let options = options.map(|(name, value)| (name, Value::from(value)));
        json!({
            "filename": filename,
            "options": Value::Object(options.collect()),
        })
    });
}

/// Changes, in this order.
struct Changes {
    keys: Option<KeyChange>,
    size: Option<u64>,
    amendment: Amendment,
}

impl Changes {
    /// Whether the disk becomes smaller. qemu-img's `amend` shrinks without being asked twice.
    fn shrink(&self, image: &Image) -> bool {
        self.size.is_some_and(|size| size < image.size())
    }

    /// Splits the changes into sessions: two where version 3 allows what version 2 does not, since
    /// an amendment ends its session.
    fn in_passes(self, image: &Image) -> Vec<Changes> {
        let layers = image.layers();
        let header = layers.first().and_then(|layer| layer.header.as_ref());
        let is_old = header.is_some_and(|header| header.version < 3);
        match self.size {
            Some(_) if is_old && self.amendment.version == Some(Version::V3) => vec![
                Changes { size: None, ..self },
                Changes {
                    keys: None,
                    size: self.size,
                    amendment: Amendment::default(),
                },
            ],
            _ => vec![self],
        }
    }

    /// Carries them out; `done` counts those that have come to their end.
    async fn carry_out(self, image: &Image, job: &Job, done: &mut u32) -> Result<(), Error> {
        // Refusals come before any change.
        if self.amendment != Amendment::default() {
            let size = self.size.unwrap_or(image.size());
            image.may_amend(&self.amendment, size).await?;
        }
        if let Some(keys) = self.keys {
            image.change_keys(&keys, &encryption::means(), job).await?;
            *done += 1;
        }
        if let Some(size) = self.size.filter(|&size| size != image.size()) {
            let off = Preallocation::Off;
            image.resize_as_job(size, off, job).await?;
            *done += 1;
        }
        if self.amendment != Amendment::default() {
            image.amend(&self.amendment, job).await?;
            *done += 1;
        }
        Ok(())
    }
}

/// Returns the options of a format that may be amended, in the order of `create`, and all of its
/// options.
fn tables(format: Format) -> Result<(Vec<Known>, Vec<Known>), CommandError> {
    match format {
        Format::Qcow2 => {
            let of_create = QCOW2_OPTIONS.iter();
            let of_create = of_create.filter(|option| AMENDABLE.contains(&option.name));
            let amendable = of_create.chain(OF_KEYS).chain(OWN_QCOW2_OPTIONS).copied();
            Ok((
                amendable.collect(),
                [QCOW2_OPTIONS, OWN_QCOW2_OPTIONS].concat(),
            ))
        }
        Format::Luks => {
            let of_create = LUKS_OPTIONS.iter().copied();
            let of_create = of_create.filter(|option| option.name == "iter-time");
            let of_keys = OF_KEYS.iter().map(|option| Known {
                name: option.name.trim_start_matches(PREFIX),
                ..*option
            });
            Ok((of_create.chain(of_keys).collect(), LUKS_OPTIONS.to_vec()))
        }
        Format::Raw | Format::Other(_) => Err(CommandError::new(format!(
            "Format driver '{}' does not support option amendment",
            format.name()
        ))),
    }
}

fn print_help(format: Format, program: &Program) -> Result<(), CommandError> {
    let (amendable, _) = tables(format)?;
    let hides = program.name.starts_with("qemu-");
    let is_ours = |option: &Known| OWN_QCOW2_OPTIONS.iter().any(|own| own.name == option.name);
    let listed = amendable.into_iter();
    let listed: Vec<_> = listed
        .filter(|option| !(hides && is_ours(option)))
        .collect();
    let text = options::help_text(&listed);
    print(&format!("Amend options for '{}':\n{text}", format.name()));
    Ok(())
}

impl Request {
    /// All that shall change; `current` is the secret that the image was opened by.
    async fn changes(
        &self,
        image: &Image,
        current: Option<&str>,
        force: bool,
    ) -> Result<Changes, CommandError> {
        let keys = self.key_change(image, current, force).await?;
        let size = options::value(&self.options, "size");
        let format = image.layers().first().map(|layer| layer.format);
        Ok(Changes {
            keys,
            amendment: match format {
                Some(Format::Luks) => Amendment::default(),
                _ => self.amendment(image)?,
            },
            size: size.map(|size| options::size("size", size)).transpose()?,
        })
    }

    /// Returns the change of the image's key slots, if one is asked for.
    async fn key_change(
        &self,
        image: &Image,
        current: Option<&str>,
        force: bool,
    ) -> Result<Option<KeyChange>, CommandError> {
        let layers = image.layers();
        let header = layers.first().and_then(|layer| layer.header.as_ref());
        let prefix = match header {
            Some(_) => PREFIX,
            None => "",
        };
        if !self
            .options
            .iter()
            .any(|(name, _)| name.starts_with(prefix))
        {
            return Ok(None);
        }
        let refuse = |text: &str| Err(CommandError::new(text));
        match header.map(|header| header.crypt_method) {
            Some(CryptMethod::None) => {
                return refuse("Can't amend encryption options - encryption not present");
            }
            Some(CryptMethod::Aes) => {
                return refuse("Only LUKS encryption options can be amended");
            }
            Some(CryptMethod::Luks) | None => {}
        }
        let value = |name: &str| options::value(&self.options, &format!("{prefix}{name}"));
        let asked = SlotOptions::parse(value)?;
        let Some(keys) = image.keys().await? else {
            return refuse("the image has no key slots");
        };
        asked
            .change(&keys, current.unwrap_or_default(), force)
            .map(Some)
    }

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
        // To what they are, both of them, as with qemu-img.
        let backing = (value("backing_file"), value("backing_fmt"));
        let now = (header.backing_file.as_deref(), header.backing_format());
        if backing != (None, None) && backing != now {
            let instead = worded("qemu-img rebase", "cowslip rebase");
            let text = format!("Cannot amend the backing file\nYou can use '{instead}' instead.");
            return Err(CommandError::new(text));
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
