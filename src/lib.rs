//! The command `cowslip`, which also answers to the names `qemu-img`, `qemu-io`, `qemu-nbd` and
//! `qemu-storage-daemon`.
//!
//! Chooses the personality by the name that it was called by (or by its first argument), parses the
//! command line and hands it to one verb in `cmd/`. Start-up does nothing else: scripts start
//! hundreds of these.
//!
//! A library only so that tests reach it; `main.rs` is the program.
//!
//! May not know: table entries, locks of the engine, bytes of any format.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, CommandFactory, FromArgMatches, Parser, Subcommand};
use signal_hook::consts::SIGXFSZ;

mod cmd;
mod encryption;
mod layer;
mod qemu_img;
#[cfg(feature = "remote")]
mod remote_args;

// Modules that the command shares with its servers, its benches and viewers.
use cowslip_cmdline::{
    bitmaps, compaction, getopt, job, new_file, open, repair_text, text_file, trace,
};
use cowslip_console::{error, interrupt, options, output, size, time};

use cmd::deferred::{self, WITHOUT_IMAGES};
use cmd::option_order::OptionValidator;
use cmd::{CowslipVerb, QemuImgVerb};
use output::Program;

/// The release, in `--version` texts.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Under QEMU's names the version begins as QEMU's does, because scripts look for it.
const VERSION_AS_QEMU: &str = concat!("version 10.0.2 (cowslip ", env!("CARGO_PKG_VERSION"), ")");

/// Program that the process behaves like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Personality {
    Cowslip,
    QemuImg,
    QemuIo,
    QemuNbd,
    QemuStorageDaemon,
}

impl Personality {
    fn of_name(name: &str) -> Option<Personality> {
        Some(match name {
            "cowslip" => Personality::Cowslip,
            "qemu-img" => Personality::QemuImg,
            "qemu-io" => Personality::QemuIo,
            "qemu-nbd" => Personality::QemuNbd,
            "qemu-storage-daemon" => Personality::QemuStorageDaemon,
            _ => return None,
        })
    }
}

/// The command line under the name `cowslip`, without its verb.
#[derive(Parser)]
#[command(
    name = "cowslip",
    version,
    about = "A qcow2 storage engine that allocates well",
    after_help = "Also: 'cowslip qemu-img ARGS...' behaves as qemu-img does; so do qemu-io, qemu-nbd \
                  and qemu-storage-daemon.",
    args_override_self = true,
    infer_long_args = true,
    subcommand_required = true,
    arg_required_else_help = true
)]
struct CowslipLine {
    #[command(flatten)]
    objects: Objects,
    #[cfg(feature = "remote")]
    #[command(flatten)]
    remote: remote_args::RemoteArgs,
}

impl CowslipLine {
    /// The declaration for a line, the program's name first.
    fn declared(args: &[OsString]) -> Command {
        deferred::with_verbs::<CowslipVerb>(CowslipLine::command(), args)
    }

    /// The declaration with the options of all verbs, except in the help of verbs that they are
    /// not for.
    fn in_full() -> Command {
        let line = deferred::in_full::<CowslipVerb>(CowslipLine::command());
        let globals = line.get_arguments().filter(|arg| arg.is_global_set());
        let hidden: Vec<Arg> = globals.map(|arg| arg.clone().hide(true)).collect();
        WITHOUT_IMAGES.iter().fold(line, |line, verb| {
            line.mut_subcommand(verb, |verb| verb.args(hidden.clone()))
        })
    }

    /// Says which option of a line is not for its verb.
    fn misplaced(matches: &ArgMatches) -> Option<String> {
        let verb = matches.subcommand_name()?;
        if !WITHOUT_IMAGES.contains(&verb) {
            return None;
        }
        let line = CowslipLine::command();
        let globals = line.get_arguments().filter(|arg| arg.is_global_set());
        let mut given = globals.filter(|arg| {
            matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine)
        });
        let option = given.next()?.get_long()?;
        Some(format!(
            "'--{option}' is not an option of '{verb}', which opens no image by its name"
        ))
    }
}

/// The command line under the name `qemu-img`, without its verb.
#[derive(Parser)]
#[command(
    name = "qemu-img",
    version,
    about = "Disk image utility",
    after_help = supported_formats(),
    args_override_self = true,
    infer_long_args = true,
    disable_help_subcommand = true,
    subcommand_required = true,
    arg_required_else_help = true
)]
struct QemuImgLine {
    /// Accepted for compatibility; there are no trace points
    #[arg(short = 'T', long, value_name = "TRACE")]
    trace: Option<String>,
    #[command(flatten)]
    objects: Objects,
}

impl QemuImgLine {
    /// The declaration for a line, the program's name first.
    fn declared(args: &[OsString]) -> Command {
        deferred::with_verbs::<QemuImgVerb>(QemuImgLine::command(), args)
    }

    /// The declaration with the options of all verbs.
    fn in_full() -> Command {
        deferred::in_full::<QemuImgVerb>(QemuImgLine::command())
    }
}

/// The end of the help: the drivers of images and files.
fn supported_formats() -> String {
    format!(
        "Supported image formats:\n\n  {}",
        open::driver_names().join(" ")
    )
}

/// Objects that all verbs may name by an ID.
#[derive(clap::Args)]
struct Objects {
    /// Define an object: secret,id=ID,data=TEXT or secret,id=ID,file=PATH, with format=raw or
    /// base64; tls-creds-x509 or tls-creds-psk,id=ID,dir=DIR,endpoint=server or client;
    /// authz-simple,id=ID,identity=NAME
    #[arg(long = "object", value_name = "OBJECT", global = true)]
    definitions: Vec<String>,
}

impl Objects {
    /// Defines them, and does the work; or says what is wrong with them.
    fn before(&self, program: &Program, work: impl FnOnce() -> u8) -> u8 {
        match open::object::define_all(&self.definitions) {
            Ok(()) => work(),
            Err(error) => program.fail(&error),
        }
    }
}

/// Runs the command line, the program's name first.
pub fn run(mut args: Vec<OsString>) -> ExitCode {
    if args.is_empty() {
        args.push("cowslip".into());
    }
    let mut personality = named(&args[0]).unwrap_or(Personality::Cowslip);
    if personality == Personality::Cowslip
        && let Some(other) = args.get(1).and_then(named)
    {
        personality = other;
        args.remove(0);
    }
    if personality == Personality::Cowslip {
        shield_size(&mut args);
    }
    let program = Program::called(&args[0]);
    // A write beyond the limit of files (`ulimit -f`) is to fail, not to end the process.
    drop(signal_hook::flag::register(SIGXFSZ, Arc::default()));
    // Also under the names of QEMU's programs, which have no options for it.
    #[cfg(feature = "remote")]
    drop(remote_args::RemoteArgs::default().set());
    interrupt::when_cancelled(cowslip_nodes::drivers::end_requests);
    let code = dispatch(personality, &args, &program);
    // Writing the buffered output may fail, too.
    output::flush();
    let code = output::exit_code(code);
    #[cfg(feature = "rbd")]
    cowslip_rbd::end(code);
    ExitCode::from(code)
}

/// The last word of `resize` is a size, and may begin with a minus.
fn shield_size(args: &mut Vec<OsString>) {
    let is_resize = args.iter().skip(1).any(|arg| arg == "resize");
    let is_shielded = args.iter().any(|arg| arg == "--");
    let less = args
        .last()
        .and_then(|last| last.to_str())
        .is_some_and(|last| {
            let digits = last.strip_prefix('-').unwrap_or_default();
            digits.starts_with(|first: char| first.is_ascii_digit())
        });
    if is_resize && less && !is_shielded {
        args.insert(args.len() - 1, "--".into());
    }
}

fn named(name: &OsString) -> Option<Personality> {
    Path::new(name)
        .file_name()
        .and_then(|name| Personality::of_name(&name.to_string_lossy()))
}

fn dispatch(personality: Personality, args: &[OsString], program: &Program) -> u8 {
    if personality == Personality::Cowslip
        && let Some(text) = cowslip_clients::ctl::help::asked_for(args)
    {
        output::print(&text);
        return 0;
    }
    match personality {
        Personality::Cowslip => match parse_cowslip(args, program) {
            Ok((line, verb)) => {
                #[cfg(feature = "remote")]
                if let Err(error) = line.remote.set() {
                    return program.fail(&error);
                }
                line.objects.before(program, || verb.run(program))
            }
            Err(code) => code,
        },
        Personality::QemuImg => run_qemu_img(args, program),
        Personality::QemuIo => cmd::run_qemu_io(args, program),
        Personality::QemuNbd => cmd::run_qemu_nbd(args, program),
        Personality::QemuStorageDaemon => cmd::run_qemu_storage_daemon(args, program),
    }
}

/// Parses a line under the name `cowslip`, or answers it.
///
/// # Errors
/// The exit code to end with.
fn parse_cowslip(args: &[OsString], program: &Program) -> Result<(CowslipLine, CowslipVerb), u8> {
    let matches = matches_of(CowslipLine::declared(args), args, program)?;
    if let Some(misplaced) = CowslipLine::misplaced(&matches) {
        let verb = matches.subcommand_name().unwrap_or_default();
        return Err(program.fail(&output::usage_error(&misplaced, verb, program)));
    }
    values_of(matches).map_err(|error| program.answer_command_line(&error, args))
}

/// The process called `qemu-img`: getopt's reading of the line, and then the parser's.
fn run_qemu_img(args: &[OsString], program: &Program) -> u8 {
    let parser = QemuImgLine::declared(args);
    let words: Option<Vec<&str>> = args.iter().map(|arg| arg.to_str()).collect();
    let read = words.map(|words| {
        let words: Vec<String> = words.into_iter().map(str::to_string).collect();
        let mut validator = OptionValidator::new(program);
        qemu_img::unambiguous(&words, &parser, |verb, name, value| {
            validator.validate(verb, name, value)
        })
    });
    let args: Vec<OsString> = match read {
        Some(Ok(words)) => words.into_iter().map(OsString::from).collect(),
        Some(Err(refusal)) => return refusal.report(program),
        // The parser says what is wrong with a line that is no text.
        None => args.to_vec(),
    };
    let parsed = matches_of(parser, &args, program).and_then(|matches| {
        let values = values_of::<QemuImgLine, QemuImgVerb>(matches);
        values.map_err(|error| program.answer_command_line(&error, &args))
    });
    match parsed {
        Ok((line, verb)) => line.objects.before(program, || verb.run(program)),
        Err(code) => code,
    }
}

/// The values of a line, and those of its verb.
fn values_of<L: FromArgMatches, V: Subcommand>(
    mut matches: ArgMatches,
) -> Result<(L, V), clap::Error> {
    let line = L::from_arg_matches_mut(&mut matches)?;
    Ok((line, V::from_arg_matches_mut(&mut matches)?))
}

/// Parses a command line, or answers `--help`, `--version` and mistakes; then the exit code.
///
/// # Errors
/// The exit code to end with.
fn matches_of(parser: Command, args: &[OsString], program: &Program) -> Result<ArgMatches, u8> {
    let matches = parser
        .bin_name(program.name.clone())
        .version(version_text(program))
        .try_get_matches_from(args);
    matches.map_err(|error| program.answer_command_line(&error, args))
}

fn version_text(program: &Program) -> &'static str {
    match Personality::of_name(&program.name) {
        None | Some(Personality::Cowslip) => VERSION,
        Some(_) => VERSION_AS_QEMU,
    }
}
