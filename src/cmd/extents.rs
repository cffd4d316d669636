//! `extents`: where files are on their devices, and where a guest's disk is in them. The command
//! line, and how files are opened; the report is made in the crate of that name.

use std::path::Path;

use cowslip::file::host::{
    Aio, BackingPolicy, HostGate, HostOptions, open_host_file, resolve_name,
};
use cowslip::file::{ChosenBy, Claim, FileRequest, Gate, ReadAs, ReadSet, Role, Sharing};
use cowslip::image::Format;
use cowslip::qcow2::header::Header;
use cowslip::qcow2::inspect::{inspect, read_start};
use cowslip_extents::{AlignedFile, ImageFile, Keep, Method, Opened, Show, Viewer, When};
use cowslip_queue::fiemap;

use crate::error::CommandError;
use crate::open::{self, ImageSpec, OpenSettings, Source, Trust, block_on, claim_file, sharing};
use crate::output::{OutputArgs, Program};
use crate::text_file;

/// Command line of `extents`.
#[derive(clap::Args)]
#[command(after_help = "\
A seek goes backwards on the device, or forward over more than 1 MiB. The score is the share of a sequential \
read's time that goes into seeks, if one takes as long as reading 1 MiB: seeks x 1 MiB / (seeks x 1 MiB + bytes). \
Interleaving, of several files on one device: of the gaps between a file's runs there, the share in which \
another of the files lies. What is not written back yet is reported as delayed, unless --sync writes it first.")]
pub struct Args {
    /// Format of the files, raw or qcow2; probed by default
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    /// Read images although another process writes to them
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    trust: Trust,
    /// Source of the extents: fiemap, fibmap or seek; by default the first that the file system
    /// supports
    #[arg(long, value_name = "METHOD", value_parser = parse_method)]
    by: Option<Method>,
    /// Write dirty data back first, so that no allocation is delayed
    #[arg(long)]
    sync: bool,
    /// List all extents, and for images all pieces of the disk
    #[arg(long)]
    map: bool,
    /// Draw the first file as a block map
    #[arg(long, value_name = "FILE")]
    svg: Option<String>,
    /// Draw block maps in the output: auto (on a terminal), always or never
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = parse_when)]
    draw: When,
    #[command(flatten)]
    output: OutputArgs,
    /// The files
    #[arg(value_name = "FILE", required = true)]
    files: Vec<String>,
}

fn parse_when(name: &str) -> Result<When, String> {
    match name {
        "auto" => Ok(None),
        "always" => Ok(Some(true)),
        "never" => Ok(Some(false)),
        _ => Err(format!(
            "--draw expects 'auto', 'always' or 'never' not '{name}'"
        )),
    }
}

fn parse_method(name: &str) -> Result<Method, String> {
    Method::parse(name)
        .ok_or_else(|| format!("--by expects 'fiemap', 'fibmap' or 'seek' not '{name}'"))
}

/// Reports on files; the exit code.
pub fn run(args: &Args, program: &Program) -> u8 {
    program.exit_code(reported(args, program))
}

fn reported(args: &Args, program: &Program) -> Result<(), CommandError> {
    let format = args.output.format("extents", program)?;
    let keep = args.svg.as_ref().map(|path| {
        move |picture: &str| {
            text_file::write(Path::new(path), picture, 0o666, "write", &files_read(args))
        }
    });
    let viewer = Viewer {
        show: Show::of(format, args.map, args.draw),
        by: args.by,
        sync: match args.sync {
            true => fiemap::Sync::First,
            false => fiemap::Sync::No,
        },
        open: &|name| open(name, &args.looking()),
        picture: keep.as_ref().map(|keep| keep as Keep<'_>),
    };
    viewer.view(&args.files, program)
}

impl Args {
    fn looking(&self) -> Looking<'_> {
        Looking {
            format: self.format.as_deref(),
            by: self.by,
            sharing: sharing(self.force_share, Sharing::AsFormat),
            policy: self.trust.backing_policy,
        }
    }
}

/// How files are opened to be looked at.
#[derive(Clone, Copy)]
pub struct Looking<'a> {
    /// Their format, if it is given.
    pub format: Option<&'a str>,
    /// How extents are found out.
    pub by: Option<Method>,
    /// Access of other processes meanwhile.
    pub sharing: Sharing,
    /// Policy on files that images name.
    pub policy: BackingPolicy,
}

/// The files that are looked at, as a set that must not be overwritten.
fn files_read(args: &Args) -> ReadSet {
    let mut read = ReadSet::default();
    for name in &args.files {
        if let Ok(file) = open_host_file(Path::new(name), &HostOptions::default()) {
            read.add(file.as_ref(), ReadAs::Source);
        }
    }
    read
}

/// Opens a file to be looked at, and the image in it.
///
/// # Errors
/// `Could not open 'x': why`.
pub fn open(name: &str, looking: &Looking<'_>) -> Result<Opened, CommandError> {
    if open::is_node(name) && !Path::new(name).exists() {
        let text = format!(
            "Could not open '{name}': it is no file of this host, so it has no extents here"
        );
        return Err(CommandError::new(text));
    }
    let source = ImageSpec::named(name, looking.format).resolve()?;
    let unseen = [
        ("data-file", source.data_file.is_some()),
        ("file.driver=qcow2", source.image_below().is_some()),
    ];
    if let Some((option, _)) = unseen.into_iter().find(|(_, is_given)| *is_given) {
        let text = format!("Could not open '{name}': '{option}' is not supported by extents");
        return Err(CommandError::new(text));
    }
    let host = AlignedFile::open(&source.filename, looking.by)?;
    let settings = OpenSettings {
        sharing: looking.sharing,
        policy: looking.policy,
        ..open::settings()
    };
    let image = block_on(Aio::Auto, open_image(&source, &settings))?;
    Ok((host, image))
}

/// Opens a file if it is a qcow2 image, and claims it as a reader; `None` for any other.
///
/// # Errors
/// `Could not open 'x': why`.
async fn open_image(
    source: &Source,
    settings: &OpenSettings,
) -> Result<Option<ImageFile>, CommandError> {
    if matches!(source.format, Some(Format::Raw | Format::Luks)) {
        return Ok(None);
    }
    let opened = opened(source, settings).await;
    opened.map_err(|error| open::refused(source, &error))
}

async fn opened(source: &Source, settings: &OpenSettings) -> cowslip::Result<Option<ImageFile>> {
    let options = source.host_options(settings);
    let file = open_host_file(source.filename.as_ref(), &options)?;
    let format = match source.format {
        Some(format) => format,
        None => open::probe(&read_start(file.as_ref()).await?, &source.filename)?,
    };
    if format != Format::Qcow2 {
        return Ok(None);
    }
    if source.sharing(settings) != Sharing::Forced {
        claim_file(&file, Claim::qcow2(false))?;
    }
    let header = inspect(&file).await?.header;
    let data_file = match header.has_data_file() {
        true => Some(data_file(source, &header, settings)?),
        false => None,
    };
    Ok(Some(ImageFile {
        file,
        header,
        data_file,
    }))
}

/// The name of the data file, if the policy lets the image name it.
fn data_file(source: &Source, header: &Header, settings: &OpenSettings) -> cowslip::Result<String> {
    let Some(name) = header.data_file_name() else {
        return Err(cowslip::Error::Invalid(
            "the image does not say which its data file is".to_string(),
        ));
    };
    let gate = HostGate {
        options: HostOptions::default(),
        policy: settings.policy,
    };
    gate.open(&FileRequest {
        named_by: &source.filename,
        name,
        role: Role::Data,
        writable: false,
        chosen_by: ChosenBy::Image,
    })?;
    open::local_name(&resolve_name(&source.filename, name))
}
