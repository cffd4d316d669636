//! Text for people and scripts: standard output, errors in the style of QEMU's programs.
//!
//! Both streams often end in one pipe, so standard output is flushed before anything is written to
//! standard error.
//!
//! Text is either a result or a note. A result that cannot be written ([`print()`]) is an error,
//! which names its cause, and ends the process; when the reader of a pipe has gone it ends
//! silently, as other programs do. While an operation runs that must be completed first
//! ([`outlasts_its_output`]), the process goes on, and its exit code reports the failure. Progress
//! and messages that accompany work ([`note`]) are dropped where they cannot be written: they
//! decide about nothing, as in QEMU's programs. Standard output that was closed when the process
//! began takes nothing either (`standard.rs`).

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use cowslip::error::system_words;
use serde_json::Value;

use crate::error::CommandError;
use crate::program;
pub use crate::program::{is_called_as_qemu, worded};
use crate::standard;

/// Exit status of a process that SIGPIPE has killed, as shells report it.
const BROKEN_PIPE_STATUS: u8 = 141;
/// Exit status after any other failure of standard output, so that the code does not report
/// success.
const FAILED_STATUS: u8 = 1;

/// Whether a failure of standard output is reported by the exit code alone.
static OUTLASTS_OUTPUT: AtomicBool = AtomicBool::new(false);
/// The exit status for a failure of standard output; 0 if there was none.
static FAILURE: AtomicU8 = AtomicU8::new(0);

/// Declares that an operation begins which must not be left half done. From now on a failure of
/// standard output does not end the process; nothing more is printed after it, and the exit code is
/// the failure's.
pub fn outlasts_its_output() {
    OUTLASTS_OUTPUT.store(true, Ordering::Release);
}

/// Whether standard output has failed.
pub fn has_failed() -> bool {
    FAILURE.load(Ordering::Acquire) != 0
}

/// The exit code of the process for a verb that has returned `code`: that of a failure of standard
/// output if there was one, else `code`.
pub fn exit_code(code: u8) -> u8 {
    match FAILURE.load(Ordering::Acquire) {
        0 => code,
        failure => failure,
    }
}

/// Writes `NAME: warning: MESSAGE` to standard error.
pub fn warn(message: &str) {
    if let Some(name) = program::name() {
        print_error(&format!("{name}: warning: {message}\n"));
    }
}

/// The name that the process was called by, which prefixes every error message.
#[derive(Clone, Debug)]
pub struct Program {
    /// The name that the program was called by, such as `qemu-img`; messages begin with it.
    pub name: String,
}

impl Program {
    /// The program that was called by this `argv[0]`.
    pub fn called(argv0: &OsStr) -> Program {
        let name = Path::new(argv0).file_name().unwrap_or(argv0);
        let program = Program {
            name: name.to_string_lossy().into_owned(),
        };
        program::is_called(&program.name);
        program
    }

    /// Writes `NAME: MESSAGE` to standard error.
    pub fn complain(&self, message: impl Display) {
        print_error(&format!("{}: {message}\n", self.name));
    }

    /// Writes `NAME: warning: MESSAGE` to standard error.
    pub fn warn(&self, message: impl Display) {
        self.complain(format_args!("warning: {message}"));
    }

    /// Prints `error` and returns its exit code.
    pub fn fail(&self, error: &CommandError) -> u8 {
        if !error.is_already_reported() {
            self.complain(error);
        }
        error.exit_code()
    }

    /// The exit code of a verb's result: 0, or that of the error, which is printed.
    pub fn exit_code(&self, result: Result<(), CommandError>) -> u8 {
        match result {
            Ok(()) => 0,
            Err(error) => self.fail(&error),
        }
    }

    /// Prints the text for `--help` or `--version`, or an error in the command line in QEMU's
    /// words.
    pub fn answer_command_line(&self, error: &clap::Error, args: &[OsString]) -> u8 {
        if matches!(
            error.kind(),
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
        ) {
            print(&error.to_string());
            return 0;
        }
        let verb = args.iter().skip(1).map(|arg| arg.to_string_lossy());
        let verb = verb.into_iter().find(|arg| !arg.starts_with('-'));
        let called = match &verb {
            Some(verb) => format!("{} {verb}", self.name),
            None => self.name.clone(),
        };
        let context = |kind| match error.get(kind) {
            Some(ContextValue::String(text)) => Some(text.clone()),
            _ => None,
        };
        if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
            let name = &self.name;
            print_error(&format!(
                "{}\n\nTry '{name} --help' for more info\n",
                usage_and_verbs(error)
            ));
            return 1;
        }
        let argument = context(ContextKind::InvalidArg).unwrap_or_default();
        let (prefix, text) = match error.kind() {
            ErrorKind::InvalidSubcommand => {
                let name = context(ContextKind::InvalidSubcommand).unwrap_or_default();
                print_error(&format!(
                    "{0}: Command not found: {name}\nTry '{0} --help' for more info\n",
                    self.name
                ));
                return 1;
            }
            ErrorKind::UnknownArgument if argument.starts_with("--") => {
                (&called, format!("unrecognized option '{argument}'"))
            }
            ErrorKind::UnknownArgument if argument.starts_with('-') => {
                let letter = argument.trim_start_matches('-');
                (&called, format!("invalid option -- '{letter}'"))
            }
            ErrorKind::UnknownArgument => (&self.name, format!("Unexpected argument: {argument}")),
            ErrorKind::InvalidUtf8 => (&self.name, not_utf8(args)),
            _ => (&self.name, plain_words(error)),
        };
        print_error(&format!(
            "{prefix}: {text}\nTry '{called} --help' for more info\n"
        ));
        1
    }
}

/// The arguments as text.
///
/// # Errors
/// One of them is not valid UTF-8. Its bytes would be lost, and another file might have the name
/// that is left.
pub fn utf8_arguments(args: &[OsString]) -> Result<Vec<String>, CommandError> {
    let text = |arg: &OsString| arg.to_str().map(str::to_string);
    let texts: Option<Vec<String>> = args.iter().map(text).collect();
    texts.ok_or_else(|| CommandError::new(not_utf8(args)))
}

/// Says which argument is not valid UTF-8.
fn not_utf8(args: &[OsString]) -> String {
    let wrong = args.iter().find(|arg| arg.to_str().is_none());
    let wrong = wrong.map(|arg| arg.to_string_lossy()).unwrap_or_default();
    format!("'{wrong}' is not valid UTF-8, as names of files and values of options have to be")
}

/// The beginning of the help: the usage and the verbs, without the options.
fn usage_and_verbs(error: &clap::Error) -> String {
    let text = error.to_string();
    let start = text.find("Usage:").unwrap_or(0);
    let text = &text[start..];
    let end = text.find("\n\nOptions:").unwrap_or(text.len());
    text[..end].trim_end().to_string()
}

/// The parser's error message on one line, without its prefix and the usage text.
fn plain_words(error: &clap::Error) -> String {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let end = text.find("\n\n").unwrap_or(text.len());
    let words: Vec<&str> = text[..end].split_whitespace().collect();
    words.join(" ")
}

/// Writes a result to standard output.
pub fn print(text: &str) {
    if has_failed() {
        return;
    }
    check(match standard::output_takes_nothing() {
        true => Err(rustix::io::Errno::BADF.into()),
        false => io::stdout().lock().write_all(text.as_bytes()),
    });
}

/// Writes progress, or a message beside some work, to standard output. It is dropped where it
/// cannot be written.
pub fn note(text: &str) {
    flush();
    if has_failed() {
        return;
    }
    // Past the buffer, where text that cannot be written would remain. The lock keeps other text
    // out of it.
    let stdout = io::stdout().lock();
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        match rustix::io::write(stdout.as_fd(), rest) {
            Ok(written @ 1..) => rest = &rest[written..],
            Err(rustix::io::Errno::INTR) => {}
            Ok(_) | Err(_) => return,
        }
    }
}

/// Writes to standard error without a prefix.
pub fn print_error(text: &str) {
    flush();
    // A failure of standard error cannot be reported anywhere.
    drop(io::stderr().lock().write_all(text.as_bytes()));
}

/// Prints a value on standard output as QEMU prints JSON: indented by four spaces per level.
pub fn print_json(value: &Value) {
    print(&format!("{}\n", json_text(value)));
}

/// JSON indented by four spaces per level, keys in their order; an empty list or object takes two
/// lines.
pub fn json_text(value: &Value) -> String {
    let mut out = String::new();
    write_json(value, 0, &mut out);
    out
}

/// This recursion is bounded: the code that builds a report fixes its depth.
fn write_json(value: &Value, level: usize, out: &mut String) {
    let (open, close, members): (char, char, Vec<(Option<&str>, &Value)>) = match value {
        Value::Array(items) => ('[', ']', items.iter().map(|item| (None, item)).collect()),
        Value::Object(members) => {
            let members = members
                .iter()
                .map(|(name, value)| (Some(name.as_str()), value));
            ('{', '}', members.collect())
        }
        plain => {
            out.push_str(&plain.to_string());
            return;
        }
    };
    let indent = |level: usize| format!("\n{:1$}", "", level * 4);
    out.push(open);
    for (index, (name, value)) in members.into_iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        out.push_str(&indent(level + 1));
        if let Some(name) = name {
            out.push_str(&format!("{}: ", Value::from(name)));
        }
        write_json(value, level + 1, out);
    }
    out.push_str(&indent(level));
    out.push(close);
}

/// Flushes standard output. A failure becomes part of the exit code ([`exit_code`]).
pub fn flush() {
    if has_failed() {
        return;
    }
    check(io::stdout().lock().flush());
}

fn check(result: io::Result<()>) {
    let Err(error) = result else { return };
    let status = match error.kind() {
        io::ErrorKind::BrokenPipe => BROKEN_PIPE_STATUS,
        _ => FAILED_STATUS,
    };
    // Only the first failure sets the exit status, and is reported.
    let is_first = FAILURE
        .compare_exchange(0, status, Ordering::AcqRel, Ordering::Acquire)
        .is_ok();
    if is_first && status == FAILED_STATUS {
        let name = program::name().unwrap_or("cowslip");
        let why = system_words(&error);
        print_error(&format!(
            "{name}: Could not write to standard output: {why}\n"
        ));
    }
    if !OUTLASTS_OUTPUT.load(Ordering::Acquire) {
        std::process::exit(status.into());
    }
}

/// An error in the command line, with a hint at the help text.
pub fn usage_error(text: &str, verb: &str, program: &Program) -> CommandError {
    CommandError::new(format!(
        "{text}\nTry '{} {verb} --help' for more info",
        program.name
    ))
}

/// The format of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputFormat {
    /// Text for people.
    Human,
    /// JSON for programs.
    Json,
}

impl OutputFormat {
    /// Parses the value of `--output`.
    ///
    /// # Errors
    /// The value is neither `human` nor `json`.
    pub fn parse(text: &str, verb: &str, program: &Program) -> Result<OutputFormat, CommandError> {
        match text {
            "human" => Ok(OutputFormat::Human),
            "json" => Ok(OutputFormat::Json),
            other => {
                let text = format!("--output expects 'human' or 'json' not '{other}'");
                Err(usage_error(&text, verb, program))
            }
        }
    }
}

/// Options for the output format of a report.
#[derive(clap::Args)]
pub struct OutputArgs {
    /// Output format: human or json
    #[arg(long, value_name = "FORMAT", default_value = "human")]
    output: String,
    /// The same as --output=json
    #[arg(long)]
    json: bool,
}

impl OutputArgs {
    /// The output format that the options select.
    ///
    /// # Errors
    /// `--output` is neither of the two.
    pub fn format(&self, verb: &str, program: &Program) -> Result<OutputFormat, CommandError> {
        Ok(match OutputFormat::parse(&self.output, verb, program)? {
            OutputFormat::Human if self.json => OutputFormat::Json,
            format => format,
        })
    }
}

/// Options for the output of a verb that changes an image.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct DoneArgs {
    /// Print what was done as JSON
    #[arg(long)]
    json: bool,
}

impl DoneArgs {
    /// Whether `--json` is given.
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// Prints what was done: `value` as JSON if `--json` is given, else `words` as a note, unless
    /// `quiet`.
    pub fn report(&self, quiet: bool, words: &str, value: impl FnOnce() -> Value) {
        match self.json {
            _ if quiet => {}
            true => print_json(&value()),
            false => note(words),
        }
    }
}

/// A number of things, as `1 extent` or `2 extents`.
pub fn counted(number: u64, thing: &str) -> String {
    match number {
        1 => format!("1 {thing}"),
        _ => format!("{number} {thing}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular() {
        let all = [0, 1, 2].map(|number| counted(number, "hole"));
        assert_eq!(all, ["0 holes", "1 hole", "2 holes"]);
    }
}
