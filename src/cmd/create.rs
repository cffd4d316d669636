//! `create`: makes an empty image, with QEMU's options, words and layout.
//!
//! All that can be checked is checked before the file is touched; a new file of the host that
//! could not be finished is removed.

use cowslip::Job;
use cowslip::file::host::{Aio, FlushPolicy, resolve_name};
use cowslip::file::{Claim, ReadAs, ReadSet, Sharing};
use cowslip::image::Format;
use cowslip::job::Stage;
use cowslip::qcow2::create::{
    CreateOptions, Preallocation, Version, create_as_job, create_luks, create_raw,
};
use cowslip::qcow2::header::CompressionType;
use serde_json::{Value, json};

use crate::encryption::{EncryptionOptions, KeyOptions};
use crate::error::CommandError;
use crate::interrupt::CancelledOnInterrupt;
use crate::job::JobArgs;
use crate::layer::{self, ImageFileInfo, InspectOptions};
use crate::new_file::{NewFile, same_as_backing, what_is_left};
use crate::open::{self, Destination, Trust, alloc_policy, block_on, foreign, parse_format};
use crate::options::{self, Kind, Known};
use crate::output::{Program, is_called_as_qemu, note, print, print_json, usage_error};
use crate::size::{self, SIZE_MAX, SizeError};

mod hints;

use hints::set_file_system_options;

/// Options of a format, for verbs that write a header.
#[derive(clap::Args)]
pub struct FormatOptions {
    /// Options of the format, as name=value,name=value; `help` lists them
    #[arg(short = 'o', long = "options", value_name = "OPTIONS")]
    #[arg(action = clap::ArgAction::Append, allow_hyphen_values = true)]
    pub options: Vec<String>,
}

/// Command line of `create`.
#[derive(clap::Args)]
pub struct Args {
    /// Format of the new image
    #[arg(short = 'f', long = "format", value_name = "FMT")]
    #[arg(default_value = "raw")]
    format: String,
    #[command(flatten)]
    of_format: FormatOptions,
    /// Backing file of the new image
    #[arg(short = 'b', long = "backing", value_name = "FILE")]
    backing: Option<String>,
    /// Format of the backing file
    #[arg(short = 'F', long = "backing-format", value_name = "FMT")]
    backing_format: Option<String>,
    #[command(flatten)]
    trust: Trust,
    /// Do not open the backing file
    #[arg(short = 'u', long = "backing-unsafe")]
    backing_unsafe: bool,
    /// Print nothing
    #[arg(short = 'q', long)]
    quiet: bool,
    /// Print what was created as JSON
    #[arg(long)]
    json: bool,
    /// Make the new file a clone of this image, sharing its data (see `clone`)
    #[arg(long, value_name = "SOURCE", conflicts_with_all = ["options", "backing", "backing_format", "size"])]
    reflink: Option<String>,
    #[command(flatten)]
    job: JobArgs,
    /// The image file; overwritten if it exists
    filename: Option<String>,
    /// Size of the disk, with suffix b, k, M, G, T, P or E; by default the backing file's
    size: Option<String>,
    #[arg(hide = true)]
    excess: Vec<String>,
}

const fn known(name: &'static str, kind: Kind, help: &'static str) -> Known {
    Known { name, kind, help }
}

const fn text(name: &'static str, help: &'static str) -> Known {
    known(name, Kind::Text, help)
}

const fn switch(name: &'static str, help: &'static str) -> Known {
    known(name, Kind::Switch, help)
}

const fn number(name: &'static str, help: &'static str) -> Known {
    known(name, Kind::Number, help)
}

const fn size(name: &'static str, help: &'static str) -> Known {
    known(name, Kind::Size, help)
}

/// The options of qcow2, in the order in which they are printed.
#[rustfmt::skip] // An option a line.
pub(super) const QCOW2_OPTIONS: &[Known] = &[
    switch(
        "encryption",
        "Encrypt the image with format 'aes'. (Deprecated in favor of encrypt.format=aes)",
    ),
    text("encrypt.format", "Encrypt the image, format choices: 'aes', 'luks'"),
    text("encrypt.key-secret", "ID of secret providing qcow AES key or LUKS passphrase"),
    text("encrypt.cipher-alg", "Name of encryption cipher algorithm"),
    text("encrypt.cipher-mode", "Name of encryption cipher mode"),
    text("encrypt.ivgen-alg", "Name of IV generator algorithm"),
    text("encrypt.ivgen-hash-alg", "Name of IV generator hash algorithm"),
    text("encrypt.hash-alg", "Name of encryption hash algorithm"),
    number("encrypt.iter-time", "Time to spend in PBKDF in milliseconds"),
    size("cluster_size", "qcow2 cluster size"),
    switch("extended_l2", "Extended L2 tables"),
    text("preallocation", "Preallocation mode (allowed values: off, metadata, falloc, full)"),
    text("compression_type", "Compression method used for image cluster compression"),
    size("size", "Virtual disk size"),
    text("compat", "Compatibility level (v2 [0.10] or v3 [1.1])"),
    text("backing_file", "File name of a base image"),
    text("backing_fmt", "Image format of the base image"),
    text("data_file", "File name of an external data file"),
    switch("data_file_raw", "The external data file must stay valid as a raw image"),
    switch("lazy_refcounts", "Postpone refcount updates"),
    number("refcount_bits", "Width of a reference count entry in bits"),
];

/// Options that QEMU's images do not have. Links named as QEMU's programs take them, and do not
/// list them.
pub(super) const OWN_QCOW2_OPTIONS: &[Known] = &[text(
    "alloc_policy",
    "How space is allocated later (allowed values: auto, contiguous, sparse)",
)];

const RAW_OPTIONS: &[Known] = &[size("size", "Virtual disk size")];

/// The options of LUKS volumes, in the order in which they are printed.
#[rustfmt::skip] // An option a line.
pub(super) const LUKS_OPTIONS: &[Known] = &[
    size("size", "Virtual disk size"),
    text("key-secret", "ID of the secret that provides the keyslot passphrase"),
    text("cipher-alg", "Name of encryption cipher algorithm"),
    text("cipher-mode", "Name of encryption cipher mode"),
    text("ivgen-alg", "Name of IV generator algorithm"),
    text("ivgen-hash-alg", "Name of IV generator hash algorithm"),
    text("hash-alg", "Name of encryption hash algorithm"),
    number("iter-time", "Time to spend in PBKDF in milliseconds"),
    switch("detached-header", "Create a detached LUKS header"),
];

/// Options of the file that an image is in.
#[rustfmt::skip] // An option a line.
const FILE_OPTIONS: &[Known] = &[
    switch("nocow", "Turn off copy-on-write (valid only on btrfs)"),
    text("preallocation", "Preallocation mode (allowed values: off, falloc, full)"),
    size("extent_size_hint", "Extent size hint for the image file, 0 to disable"),
];

/// Options of what is there already, and stays as long as it is.
const FIXED_OPTIONS: &[Known] = &[text(
    "preallocation",
    "Preallocation mode (allowed values: off)",
)];

/// Formats that a backing file may be said to have although nobody looks at it.
const BACKING_FORMATS: &[&str] = &[
    "raw",
    "qcow2",
    "qcow",
    "qed",
    "luks",
    "vmdk",
    "vdi",
    "vpc",
    "vhdx",
    "parallels",
    "bochs",
    "cloop",
    "dmg",
    "file",
    "host_device",
    "host_cdrom",
    "nbd",
    "ssh",
    "http",
    "https",
    "ftp",
    "ftps",
    "rbd",
    "iscsi",
    "nfs",
    "gluster",
    "null-co",
    "null-aio",
    "blkdebug",
    "vvfat",
];

/// Runs `create`. Returns the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    if let (Some(source), Some(target)) = (&args.reflink, &args.filename) {
        let clone = super::clone::Args::by_create(source.clone(), target.clone(), args.job);
        return super::clone::run(clone, program);
    }
    match create_image(&args, program) {
        Ok(()) => 0,
        Err(error) => program.fail(&error),
    }
}

/// An image that is to be made, everything known and checked but what the files say.
#[derive(Debug)]
pub(super) struct Request {
    /// The file or node in which it is made.
    pub(super) destination: Destination,
    /// The format of the new image.
    pub(super) format: Format,
    /// Names and values, checked one by one.
    pub(super) options: Vec<(String, String)>,
    /// The size of its disk.
    pub(super) size: Option<u64>,
    /// Whether it is durable once it is made.
    pub(super) flush: FlushPolicy,
}

fn create_image(args: &Args, program: &Program) -> Result<(), CommandError> {
    let of_format = &args.of_format.options;
    let lists: Vec<_> = of_format.iter().map(|list| options::split(list)).collect();
    let lists = lists.into_iter().collect::<Result<Vec<_>, _>>()?;
    if of_format.iter().any(|list| options::asks_for_help(list)) {
        return print_help(&args.format, args.filename.as_deref(), program);
    }
    let Some(filename) = &args.filename else {
        return Err(usage_error("Expecting image file name", "create", program));
    };
    let size = args.size.as_deref().map(disk_size).transpose()?;
    if let Some(excess) = args.excess.first() {
        let text = format!("Unexpected argument: {excess}");
        return Err(usage_error(&text, "create", program));
    }
    let prefixed = |error: CommandError| CommandError::new(format!("{filename}: {error}"));
    let mut request = request(args, filename, lists.concat(), size).map_err(prefixed)?;
    let job = args.job.job()?;
    block_on(Aio::Auto, async {
        let read = look_at_backing(&mut request, args)
            .await
            .map_err(prefixed)?;
        announce(&request, args);
        let interrupted = CancelledOnInterrupt::new(&job);
        let made = make(&request, read, &job).await;
        match made.is_err() && job.is_cancelled() {
            true => Err(interrupted.report(program, what_is_left(filename, &job))),
            false => made.map_err(prefixed),
        }
    })?;
    args.job.end();
    report(&request, args);
    Ok(())
}

fn disk_size(text: &str) -> Result<u64, CommandError> {
    match size::parse(text) {
        Ok(size) if size <= SIZE_MAX => Ok(size),
        Ok(_) | Err(SizeError::TooLarge) => Err(CommandError::new(format!(
            "Invalid image size specified. Must be between 0 and {SIZE_MAX}."
        ))),
        Err(SizeError::Malformed) => Err(CommandError::new(format!(
            "Invalid image size specified: '{text}'."
        ))),
    }
}

/// The options of a format: QEMU's, and ours.
fn options_of_format(format: Format) -> Vec<Known> {
    match format {
        Format::Raw => RAW_OPTIONS.to_vec(),
        Format::Luks => LUKS_OPTIONS.to_vec(),
        Format::Other(_) => Vec::new(),
        Format::Qcow2 => [QCOW2_OPTIONS, OWN_QCOW2_OPTIONS].concat(),
    }
}

/// The options of a format and of the file that it is in.
pub(super) fn options_of(format: Format) -> Vec<Known> {
    let own = options_of_format(format);
    let is_new = |option: &&Known| own.iter().all(|other| other.name != option.name);
    let of_file = FILE_OPTIONS.iter().filter(is_new);
    let of_file: Vec<_> = of_file.copied().collect();
    [own, of_file].concat()
}

/// Returns the options that a program of this name lists.
fn listed(options: Vec<Known>, program: &Program) -> Vec<Known> {
    let is_ours = |option: &Known| OWN_QCOW2_OPTIONS.iter().any(|own| own.name == option.name);
    let hides = program.name.starts_with("qemu-");
    let listed = options.into_iter();
    listed
        .filter(|option| !(hides && is_ours(option)))
        .collect()
}

pub(super) fn creatable_format(name: &str) -> Result<Format, CommandError> {
    match name {
        "raw" | "file" => Ok(Format::Raw),
        "qcow2" => Ok(Format::Qcow2),
        "luks" => Ok(Format::Luks),
        _ => Err(CommandError::new(
            foreign::new_format_refused(name)
                .unwrap_or_else(|| format!("Unknown file format '{name}'")),
        )),
    }
}

/// Lists the options of a format; with a file, those of files too.
pub(super) fn print_help(
    name: &str,
    filename: Option<&str>,
    program: &Program,
) -> Result<(), CommandError> {
    let format = creatable_format(name)?;
    if let Some(filename) = filename {
        let known = options_at(&open::destination(filename)?, format);
        let text = options::help_text(&listed(known, program));
        print(&format!("Supported options:\n{text}"));
        return Ok(());
    }
    let own = listed(options_of_format(format), program);
    print(&format!(
        "Supported {name} options:\n{}\nThe protocol level may support further options.\nSpecify the \
         target filename to include those options.\n",
        options::help_text(&own)
    ));
    Ok(())
}

/// The options that an image of a format has at a destination.
fn options_at(destination: &Destination, format: Format) -> Vec<Known> {
    if !destination.is_fixed() {
        return options_of(format);
    }
    let mut known = options_of_format(format);
    for option in FIXED_OPTIONS {
        if known.iter().all(|other| other.name != option.name) {
            known.push(*option);
        }
    }
    known
}

/// The refusal of `backing_file` or `backing_fmt` where a format has no backing files.
pub(super) fn no_backing(name: &str, format: &str) -> CommandError {
    let what = match name {
        "backing_file" => "file",
        _ => "file format",
    };
    CommandError::new(format!(
        "Backing {what} not supported for file format '{format}'"
    ))
}

/// Joins what the arguments and the options say, as far as no file has to be looked at.
fn request(
    args: &Args,
    filename: &str,
    given: Vec<(String, String)>,
    size: Option<u64>,
) -> Result<Request, CommandError> {
    let format = creatable_format(&args.format)?;
    let destination = open::destination(filename)?;
    let mut given = options::normalise(given, &options_at(&destination, format))?;
    for (name, value) in [
        ("backing_file", &args.backing),
        ("backing_fmt", &args.backing_format),
    ] {
        let Some(value) = value else { continue };
        if format != Format::Qcow2 {
            return Err(no_backing(name, &args.format));
        }
        given.push((name.to_string(), value.clone()));
    }
    let in_options = options::value(&given, "size").map(str::to_string);
    if in_options.is_some() && size.is_some() {
        let text = "The image size must be specified only once";
        return Err(CommandError::new(text));
    }
    let size = match in_options {
        Some(text) => Some(options::size("size", &text)?),
        None => size,
    };
    let backing = options::value(&given, "backing_file");
    if backing == Some("") {
        let text = "Expected backing file name, got empty string";
        return Err(CommandError::new(text));
    }
    if backing == Some(filename) {
        return Err(same_as_backing());
    }
    Ok(Request {
        destination,
        format,
        options: given,
        size,
        flush: FlushPolicy::Honour,
    })
}

/// Opens the backing chain for its size, unless that is not wanted, and settles the size. Returns
/// the files of the chain; of one that is not wanted, those that are there.
async fn look_at_backing(request: &mut Request, args: &Args) -> Result<ReadSet, CommandError> {
    let name = options::value(&request.options, "backing_file").map(str::to_string);
    let format = options::value(&request.options, "backing_fmt").map(str::to_string);
    let mut read = ReadSet::default();
    if let Some(name) = &name {
        let without_format = "Backing file specified without backing format";
        if args.backing_unsafe {
            if format.is_none() {
                return Err(CommandError::new(without_format));
            }
            read = openable_files(request, name, format.as_deref(), &args.trust).await;
        } else {
            let chain = open_chain(request, name, format.as_deref(), &args.trust).await;
            let (chain, files) = chain.map_err(|why| {
                CommandError::new(format!("{why}\nCould not open backing image."))
            })?;
            if format.is_none() {
                let detected = format_name(chain[0].format);
                return Err(CommandError::new(format!(
                    "{without_format}\nDetected format of {detected}."
                )));
            }
            let size = chain[0].virtual_size();
            request.size = request.size.or(Some(size));
            read = files;
        }
    }
    if request.size.is_none() {
        return Err(CommandError::new("Image creation needs a size parameter"));
    }
    Ok(read)
}

/// How a backing chain is looked at, whatever other processes do with it: nothing is read but sizes
/// and names. If the new image or its data file is a node of a protocol, such as an export, the
/// file behind it is not known. The locks of its server count, so no other process may be writing
/// to the chain then.
fn inspect_options(request: &Request, trust: &Trust) -> InspectOptions {
    let data_file = options::value(&request.options, "data_file");
    let is_node =
        matches!(request.destination, Destination::Node(_)) || data_file.is_some_and(open::is_node);
    InspectOptions {
        sharing: match is_node {
            true => Sharing::Frozen,
            false => Sharing::Forced,
        },
        policy: trust.backing_policy,
        ..InspectOptions::default()
    }
}

/// The files of a backing chain that need not be there, as far as they are.
pub(super) async fn openable_files(
    request: &Request,
    name: &str,
    format: Option<&str>,
    trust: &Trust,
) -> ReadSet {
    let inspect_options = InspectOptions {
        sharing: Sharing::Forced,
        ..inspect_options(request, trust)
    };
    let format = format.and_then(|name| parse_format(name).ok());
    let named = (request.destination.name(), name);
    match ImageFileInfo::inspect_named_by(named, format, &inspect_options).await {
        Ok(first) => {
            let chain = layer::openable_chain(first, &inspect_options).await;
            layer::read_set(&chain, ReadAs::Backing, &inspect_options).await
        }
        Err(_) => ReadSet::default(),
    }
}

/// Refuses a relative name of a backing file for an image behind a protocol: it would name another
/// export of the same server. Under QEMU's names the attempt to open that says so.
fn refuse_beside_a_node(request: &Request, name: &str) -> Result<(), CommandError> {
    let target = request.destination.name();
    let is_node = matches!(request.destination, Destination::Node(_));
    let is_relative = !name.starts_with('/') && !open::is_node(name);
    match is_node && is_relative && !is_called_as_qemu() {
        true => Err(CommandError::new(format!(
            "The backing file '{name}' has a relative name, which is relative to the image's \
             directory, and '{target}' is not in a directory of this host: give an absolute path"
        ))),
        false => Ok(()),
    }
}

/// Looks at the chain; also returns its files.
async fn open_chain(
    request: &Request,
    name: &str,
    format: Option<&str>,
    trust: &Trust,
) -> Result<(Vec<ImageFileInfo>, ReadSet), CommandError> {
    let inspect_options = inspect_options(request, trust);
    let format = format.map(parse_format).transpose()?;
    refuse_beside_a_node(request, name)?;
    let named = (request.destination.name(), name);
    let first = ImageFileInfo::inspect_named_by(named, format, &inspect_options).await?;
    let chain = layer::chain(first, &inspect_options).await;
    let chain =
        chain.map_err(|why| CommandError::new(format!("Could not open backing file: {why}")))?;
    if inspect_options.sharing == Sharing::Frozen {
        layer::refuse_written_data(&chain, &inspect_options).await?;
    }
    let read = layer::read_set(&chain, ReadAs::Backing, &inspect_options).await;
    Ok((chain, read))
}

/// The name of a format on command lines and in images.
pub fn format_name(format: Format) -> &'static str {
    format.name()
}

/// The options as they are printed: in their order, with the defaults that QEMU shows.
fn shown_options(request: &Request) -> Vec<(&'static str, String)> {
    let defaults: &[(&str, &str)] = match request.format {
        Format::Raw | Format::Luks | Format::Other(_) => &[],
        Format::Qcow2 => &[
            ("cluster_size", "65536"),
            ("extended_l2", "off"),
            ("compression_type", "zlib"),
            ("lazy_refcounts", "off"),
            ("refcount_bits", "16"),
        ],
    };
    let mut shown = Vec::new();
    for option in options_of(request.format) {
        let default = defaults.iter().find(|(name, _)| *name == option.name);
        let value = match (option.name, request.size) {
            ("size", Some(size)) => Some(size.to_string()),
            _ => options::value(&request.options, option.name)
                .or(default.map(|(_, value)| *value))
                .map(str::to_string),
        };
        shown.extend(value.map(|value| (option.name, value)));
    }
    shown
}

/// The name of the image and of its format, as both are printed.
fn shown_names<'a>(request: &Request, args: &'a Args) -> (&'a str, &'static str) {
    let filename = args.filename.as_deref().unwrap_or_default();
    let format = match args.format.as_str() {
        // The protocol is a format, too.
        "file" => "file",
        _ => format_name(request.format),
    };
    (filename, format)
}

/// Says what is about to be made.
fn announce(request: &Request, args: &Args) {
    if args.quiet || args.json {
        return;
    }
    let (filename, format) = shown_names(request, args);
    let shown = shown_options(request);
    let shown = shown
        .iter()
        .map(|(name, value)| format!(" {name}={}", options::escaped(value)));
    let shown: String = shown.collect();
    note(&format!("Formatting '{filename}', fmt={format}{shown}\n"));
}

/// Prints what was made, if it is to be JSON.
fn report(request: &Request, args: &Args) {
    if args.quiet || !args.json {
        return;
    }
    let (filename, format) = shown_names(request, args);
    let shown = shown_options(request).into_iter();
    let shown = shown.map(|(name, value)| (name.to_string(), Value::from(value)));
    print_json(&json!({
        "filename": filename,
        "format": format,
        "options": Value::Object(shown.collect()),
    }));
}

/// How space is allocated, by the option.
///
/// # Errors
/// There is no such mode, or not for this format and place.
pub(super) fn preallocation(request: &Request) -> Result<Preallocation, CommandError> {
    let Some(value) = options::value(&request.options, "preallocation") else {
        return Ok(Preallocation::Off);
    };
    let mode = Preallocation::from_name(value).ok_or_else(|| match request.format {
        Format::Raw | Format::Luks | Format::Other(_) => {
            CommandError::new(format!("invalid parameter value: {value}"))
        }
        Format::Qcow2 => not_accepted("preallocation", value),
    })?;
    let refused = match request.format {
        Format::Raw if request.destination.is_fixed() && mode != Preallocation::Off => {
            format!("Unsupported preallocation mode '{value}'")
        }
        Format::Raw if mode == Preallocation::Metadata => {
            format!("Unsupported preallocation mode: {value}")
        }
        _ => return Ok(mode),
    };
    Err(CommandError::new(refused))
}

fn not_accepted(name: &str, value: &str) -> CommandError {
    CommandError::new(format!(
        "Parameter '{name}' does not accept value '{value}'"
    ))
}

pub(super) fn qcow2_options(request: &Request) -> Result<CreateOptions, CommandError> {
    let value = |name| options::value(&request.options, name);
    let switch = |name| value(name).map_or(Ok(false), |text| options::switch(name, text));
    let mut out = CreateOptions::new(request.size.unwrap_or(0));
    out.version = match value("compat") {
        None | Some("1.1" | "v3") => Version::V3,
        Some("0.10" | "v2") => Version::V2,
        Some(other) => return Err(not_accepted("version", other)),
    };
    if let Some(size) = value("cluster_size") {
        out.cluster_size = options::size("cluster_size", size)?;
    }
    out.extended_l2 = switch("extended_l2")?;
    // Anything that is no 64-bit number is no valid width either.
    out.refcount_bits = value("refcount_bits").map_or(16, |bits| bits.parse().unwrap_or(0));
    out.lazy_refcounts = switch("lazy_refcounts")?;
    out.compression_type = match value("compression_type") {
        None | Some("zlib") => CompressionType::Deflate,
        Some("zstd") => CompressionType::Zstd,
        Some(other) => return Err(not_accepted("compression-type", other)),
    };
    out.backing_file = value("backing_file").map(str::to_string);
    out.backing_format = value("backing_fmt").map(str::to_string);
    if let Some(format) = &out.backing_format
        && !BACKING_FORMATS.contains(&format.as_str())
    {
        return Err(not_accepted("backing-fmt", format));
    }
    out.data_file = value("data_file").map(str::to_string);
    out.data_file_raw = switch("data_file_raw")?;
    out.preallocation = preallocation(request)?;
    if let Some(policy) = value("alloc_policy") {
        out.alloc_policy = alloc_policy("alloc_policy", policy)?;
    }
    if let Some(keys) = keys_of_qcow2(&value)? {
        out.encryption = Some(keys.make()?);
    }
    out.validate()?;
    Ok(out)
}

/// Reads the options of an image's encryption, if it is to be encrypted.
///
/// # Errors
/// Another way to encrypt than LUKS and QEMU's old one, or options of keys that are not.
pub(super) fn keys_of_qcow2<'a>(
    value: &impl Fn(&'static str) -> Option<&'a str>,
) -> Result<Option<EncryptionOptions>, CommandError> {
    const KEY_SECRET: &str = "encrypt.key-secret";
    const OPTIONS: &[&str] = &[
        KEY_SECRET,
        "encrypt.cipher-alg",
        "encrypt.cipher-mode",
        "encrypt.ivgen-alg",
        "encrypt.ivgen-hash-alg",
        "encrypt.hash-alg",
        "encrypt.iter-time",
    ];
    let refuse = |text: &str| Err(CommandError::new(text));
    let aes = || {
        // Nothing of it can be chosen.
        let others = OPTIONS.iter().filter(|name| **name != KEY_SECRET);
        let mut others = others.filter(|name| value(name).is_some());
        match others.next() {
            Some(other) => Err(CommandError::new(format!(
                "Parameter '{other}' is unexpected"
            ))),
            None => Ok(Some(EncryptionOptions::Aes {
                secret: value(KEY_SECRET).map(str::to_string),
            })),
        }
    };
    match (value("encryption"), value("encrypt.format")) {
        (Some(_), Some(_)) => {
            refuse("'encrypt.format' and its alias 'encryption' can't be used at the same time")
        }
        (Some(on), None) if options::switch("encryption", on)? => aes(),
        (_, Some("luks")) => {
            let named = |name: &str| OPTIONS.iter().find(|known| **known == name);
            let keys = KeyOptions::parse("encrypt.", |name| value(named(name)?))?;
            Ok(Some(EncryptionOptions::Luks(keys)))
        }
        (_, Some("aes")) => aes(),
        (_, Some(other)) => Err(not_accepted("format", other)),
        (_, None) if OPTIONS.iter().any(|name| value(name).is_some()) => {
            refuse("Parameter 'encrypt.format' is missing")
        }
        (_, None) => Ok(None),
    }
}

/// Reads the options of a LUKS volume's keys.
///
/// # Errors
/// An algorithm that is not supported, or a header in another file.
pub(super) fn keys_of_luks(given: &[(String, String)]) -> Result<KeyOptions, CommandError> {
    let detached = options::value(given, "detached-header");
    if detached.map_or(Ok(false), |on| options::switch("detached-header", on))? {
        return Err(CommandError::new("detached-header is not supported"));
    }
    KeyOptions::parse("", |name| options::value(given, name))
}

async fn make(request: &Request, read: ReadSet, job: &Job) -> Result<(), CommandError> {
    for file in make_files(request, read, job).await? {
        file.finished();
    }
    Ok(())
}

/// Makes the image's file, and its data file if it has one. All of them are open, and known to
/// store nothing of `read`, before any of them is cut or written.
pub(super) async fn make_files(
    request: &Request,
    mut read: ReadSet,
    job: &Job,
) -> Result<Vec<NewFile>, CommandError> {
    let open = async |read: &ReadSet, claim| {
        let destination = &request.destination;
        let (new, file) = NewFile::create(destination, read, claim, request.flush).await?;
        set_file_system_options(request, &*file)?;
        Ok::<_, CommandError>((new, file))
    };
    if request.format == Format::Raw {
        let preallocation = preallocation(request)?;
        let size = request.size.unwrap_or(0);
        let (new, file) = open(&read, Claim::CREATE_RAW).await?;
        let made = create_raw(file, size, preallocation, job).await;
        return filled(vec![new], made, job);
    }
    if request.format == Format::Luks {
        let volume = keys_of_luks(&request.options)?.make()?;
        let (size, preallocation) = (request.size.unwrap_or(0), preallocation(request)?);
        let (new, file) = open(&read, Claim::qcow2(true)).await?;
        let made = create_luks(file, size, &volume, preallocation, job).await;
        return filled(vec![new], made, job);
    }
    let options = qcow2_options(request)?;
    let (new, file) = open(&read, Claim::qcow2(true)).await?;
    let data = match &options.data_file {
        Some(name) => {
            read.add(file.as_ref(), ReadAs::Image);
            let name = open::local_name(&resolve_name(request.destination.name(), name))?;
            let claim = Claim::data_file(true);
            Some(NewFile::open_with(&name, &read, claim, request.flush)?)
        }
        None => None,
    };
    let (new_data, data_file) = data.unzip();
    let made = create_as_job(file, data_file, &options, job).await;
    let files = std::iter::once(new).chain(new_data).collect();
    filled(files, made, job)
}

/// Notes whether what the files held is lost, before a failure gives them up.
fn filled(
    mut files: Vec<NewFile>,
    made: cowslip::Result<()>,
    job: &Job,
) -> Result<Vec<NewFile>, CommandError> {
    if job.progress().stage != Stage::Begin {
        files.iter_mut().for_each(NewFile::mark_overwritten);
    }
    made?;
    Ok(files)
}
