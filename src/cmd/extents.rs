//! `extents`: where files are on their devices, and where a guest's disk is in them.
//!
//! Each file is walked once: its mapping records are summed up as they come. They are kept in memory only where a
//! second look needs them: where several files are held beside each other, where a qcow2 image is joined with
//! them, where a picture is drawn. A single raw file of any number of extents takes a few megabytes.
//!
//! `host.rs` asks the system; `guest.rs` reads a qcow2 image's tables; `perfect.rs`, `summary.rs`,
//! `sequential.rs`, `interleave.rs`, `join.rs` and `draw.rs` decide, without I/O; `text.rs`, `json.rs` and
//! `svg.rs` put it in words. The definitions of all figures are in docs/extents.md.

use std::path::Path;

use cowslip::file::host::{Aio, HostOptions, open_host_file};
use cowslip::file::{ReadAs, ReadSet, Sharing};
use cowslip_queue::fiemap::{self, Flags};

use crate::error::CommandError;
use crate::open::{ImageSpec, OpenHow, Trust, block_on, sharing};
use crate::output::{OutputArgs, Program};
use crate::text_file;

mod draw;
mod guest;
pub(super) mod host;
mod interleave;
mod join;
mod json;
mod look;
pub(super) mod perfect;
mod print;
mod report;
mod sequential;
mod summary;
mod svg;
mod text;

pub use host::other_than_file;
use host::{HostFile, Method};
use interleave::Interleaving;
use look::{Beside, Subject};
use print::{Out, Show};

/// Records that are kept in memory, of all files together: 512 MiB.
const RECORDS_MAX: usize = 1 << 24;
/// Command line of `extents`.
#[derive(clap::Args)]
#[command(after_help = "\
A seek goes backwards on the device, or forward over more than 1 MiB. The score is the share of a sequential \
read's time that goes into seeks, if one takes as long as reading 1 MiB: seeks x 1 MiB / (seeks x 1 MiB + bytes). \
Interleaving, of several files on one device: of the gaps between a file's runs there, the share in which \
another of the files lies. What is not written back yet is told as delayed, unless --sync writes it first.")]
pub struct Args {
    /// Format of the files, raw or qcow2; probed by default
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    /// Look at images although another process writes to them
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    trust: Trust,
    /// How extents are found out: fiemap, fibmap or seek; the first that the file system knows by default
    #[arg(long, value_name = "METHOD", value_parser = parse_method)]
    by: Option<Method>,
    /// Write data back first, so that nothing is delayed
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

/// `--draw`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Auto,
    Always,
    Never,
}

fn parse_when(name: &str) -> Result<When, String> {
    match name {
        "auto" => Ok(When::Auto),
        "always" => Ok(When::Always),
        "never" => Ok(When::Never),
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
    let show = Show::of(format, args.map, args.draw);
    let (mut subjects, complaints) = open_all(args, program);
    let is_pictured = |number: usize| show.drawn || (number == 0 && args.svg.is_some());
    let keep_all = subjects.len() > 1;
    let mut room = RECORDS_MAX;
    for (number, subject) in subjects.iter_mut().enumerate() {
        if keep_all || subject.image.is_some() || is_pictured(number) {
            subject.collect(sync(args), &mut room)?;
        }
    }
    let names: Vec<String> = subjects.iter().map(|s| s.host.name.clone()).collect();
    let mut out = Out::new(show);
    for number in 0..subjects.len() {
        let neighbours = look::neighbours(&subjects, number);
        let beside = Beside {
            number,
            names: &names,
            neighbours: neighbours.as_ref(),
            is_pictured: is_pictured(number),
            sync: sync(args),
        };
        let scene = beside.report(&mut subjects, &mut out)?;
        if let (0, Some(path), Some(scene)) = (number, &args.svg, &scene) {
            let picture = scene.svg(neighbours.as_ref())?;
            text_file::write(Path::new(path), &picture, 0o666, "write", &files_read(args))?;
        }
        if let (true, Some(scene)) = (show.drawn, &scene) {
            out.text(&scene.terminal(show.ink, neighbours.as_ref())?);
        }
        out.end_file(number + 1 == subjects.len());
    }
    if !subjects.is_empty() {
        out.end(&interleavings(&subjects));
    }
    match complaints {
        0 => Ok(()),
        _ => Err(CommandError::told()),
    }
}

/// What one file has, in short.
#[derive(Clone, Debug)]
pub struct Figures {
    /// `xfs`, `ext4` …
    pub file_system: String,
    /// Extents, as `perfect` counts them; `None` where the file system does not tell places.
    pub extents: Option<u64>,
    /// The fewest that there could be.
    pub perfect: u64,
    /// Bytes that were never written.
    pub unwritten_bytes: u64,
    /// Bytes that are stored in another form than they read.
    pub encoded_bytes: u64,
}

/// Sums up one file, once what is dirty has been written back.
///
/// # Errors
/// It is no regular file, or the system's.
pub fn figures(name: &str) -> Result<Figures, CommandError> {
    let mut subject = Subject::new(HostFile::open(name, None)?, None, None);
    let summary = subject.sum_up(fiemap::Sync::First)?;
    let bytes_of = |wanted: Flags| {
        let at = summary::MARKS.iter().position(|(flag, _)| *flag == wanted);
        at.map_or(0, |at| summary.marked[at].bytes)
    };
    Ok(Figures {
        extents: subject.host.has_places().then_some(summary.expressed()),
        perfect: summary.perfect(),
        unwritten_bytes: bytes_of(Flags::UNWRITTEN),
        encoded_bytes: bytes_of(Flags::ENCODED),
        file_system: subject.host.on.kind,
    })
}

fn sync(args: &Args) -> fiemap::Sync {
    match args.sync {
        true => fiemap::Sync::First,
        false => fiemap::Sync::No,
    }
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

/// Opens all files, and the data files of images behind them, each once. Complains of those that cannot be
/// opened, and counts them.
fn open_all(args: &Args, program: &Program) -> (Vec<Subject>, usize) {
    let mut subjects: Vec<Subject> = Vec::new();
    let mut complaints = 0;
    let given = args.files.iter().map(|name| (name.clone(), None));
    let mut wanted: Vec<(String, Option<usize>)> = given.collect();
    let mut next = 0;
    while let Some((name, data_of)) = wanted.get(next).cloned() {
        next += 1;
        let opened = match data_of {
            None => open(&name, args),
            Some(_) => HostFile::open(&name, args.by).map(|host| (host, None)),
        };
        let (host, image) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                program.complain(error);
                complaints += 1;
                continue;
            }
        };
        let known = subjects.iter().position(|s| s.host.id == host.id);
        let number = known.unwrap_or(subjects.len());
        if let Some(image) = data_of {
            subjects[image].data = Some(number);
        }
        if known.is_none() {
            let data_file = image.as_ref().map(|image| image.data_file.clone());
            let data = match &data_file {
                Some(None) => Some(number),
                Some(Some(_)) | None => None,
            };
            if let Some(Some(name)) = data_file {
                wanted.push((name, Some(number)));
            }
            subjects.push(Subject::new(host, image, data));
        }
    }
    (subjects, complaints)
}

fn open(name: &str, args: &Args) -> Result<(HostFile, Option<guest::ImageFile>), CommandError> {
    let source = ImageSpec::named(name, args.format.as_deref()).resolve()?;
    let unseen = [
        ("data-file", source.data_file.is_some()),
        ("file.driver=qcow2", source.filters.image.is_some()),
    ];
    if let Some((option, _)) = unseen.into_iter().find(|(_, is_given)| *is_given) {
        let text = format!("Could not open '{name}': '{option}' is not supported by extents");
        return Err(CommandError::new(text));
    }
    let host = HostFile::open(&source.filename, args.by)?;
    let how = OpenHow {
        sharing: sharing(args.force_share, Sharing::AsFormat),
        policy: args.trust.backing_policy,
        ..OpenHow::default()
    };
    let image = block_on(Aio::Auto, guest::open(&source, &how))?;
    Ok((host, image))
}

/// For each device with several of the files: its name, and how each lies between the others.
fn interleavings(subjects: &[Subject]) -> Vec<(String, Vec<(&str, Interleaving)>)> {
    let mut devices: Vec<&str> = Vec::new();
    let mut found = Vec::new();
    for (number, subject) in subjects.iter().enumerate() {
        let device = subject.host.device.as_str();
        if devices.contains(&device) {
            continue;
        }
        devices.push(device);
        let Some(neighbours) = look::neighbours(subjects, number) else {
            continue;
        };
        let on = subjects
            .iter()
            .enumerate()
            .filter(|(_, other)| other.host.device == device && other.host.has_places());
        let files =
            on.map(|(number, other)| (other.host.name.as_str(), neighbours.of_file(number)));
        let source = subject.host.on.source.as_deref();
        found.push((source.unwrap_or(device).to_string(), files.collect()));
    }
    found
}
