//! Options of qemu-img whose values are validated in the order of the command line, so that the
//! first of several errors is reported.

use super::{check, convert, resize};
use crate::error::CommandError;
use crate::getopt::Name;
use crate::open::{CacheMode, chosen_snapshot, object, parse_aio};
use crate::options::{self, bytes_within, number_within};
use crate::output::{OutputFormat, Program, usage_error};
use crate::size::SIZE_MAX;

/// The outcome for a valid option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Validated {
    /// The option is passed on to the verb.
    Passed,
    /// The option has been dealt with, and is not passed on.
    Done,
}

/// Validates the options of one command line.
pub struct OptionValidator<'a> {
    program: &'a Program,
    /// Number of actions that the options of `snapshot` select.
    actions: u32,
}

impl<'a> OptionValidator<'a> {
    /// A validator for a line, before its first option.
    pub fn new(program: &'a Program) -> OptionValidator<'a> {
        OptionValidator {
            program,
            actions: 0,
        }
    }

    /// Validates an option of the verb.
    ///
    /// # Errors
    /// The value is invalid.
    pub fn validate(
        &mut self,
        verb: &str,
        name: Name,
        value: &str,
    ) -> Result<Validated, CommandError> {
        match (verb, name) {
            (_, Name::Long("object")) => {
                object::define(value).map_err(|error| match verb {
                    // One is the code for different images.
                    "compare" => error.with_exit_code(2),
                    _ => error,
                })?;
                return Ok(Validated::Done);
            }
            (_, Name::Long("output")) => drop(OutputFormat::parse(value, verb, self.program)?),
            ("snapshot", Name::Letter('l' | 'a' | 'c' | 'd')) => self.one_action()?,
            ("amend" | "convert" | "create" | "measure", Name::Letter('o')) => {
                options::split(value)?;
            }
            ("convert" | "measure", Name::Letter('l')) => {
                chosen_snapshot(Some(value), self.program)?;
            }
            ("resize", Name::Long("preallocation")) => drop(resize::preallocation(value)?),
            ("check", Name::Letter('r')) => drop(check::scope(value, self.program)?),
            ("bench", _) => self::bench(name, value)?,
            _ => self::number(verb, name, value)?,
        }
        Ok(Validated::Passed)
    }

    fn one_action(&mut self) -> Result<(), CommandError> {
        self.actions += 1;
        match self.actions {
            1 => Ok(()),
            _ => {
                let text = "Cannot mix '-l', '-a', '-c', '-d'";
                Err(usage_error(text, "snapshot", self.program))
            }
        }
    }
}

fn number(verb: &str, name: Name, value: &str) -> Result<(), CommandError> {
    let validated = match (verb, name) {
        ("convert", Name::Letter('S')) => convert::sparse_bytes(value),
        ("convert", Name::Letter('m')) => convert::parallel(value),
        ("convert" | "commit", Name::Letter('r')) => {
            bytes_within("rate limit", value, 0..=SIZE_MAX)
        }
        ("bitmap", Name::Letter('g')) => bytes_within("granularity", value, 0..=SIZE_MAX),
        ("map", Name::Letter('s')) => bytes_within("start offset", value, 0..=SIZE_MAX),
        ("map", Name::Letter('l')) => bytes_within("max length", value, 0..=SIZE_MAX),
        ("measure", Name::Long("size")) => bytes_within("image size", value, 0..=SIZE_MAX),
        _ => return Ok(()),
    };
    validated.map(drop)
}

fn bench(name: Name, value: &str) -> Result<(), CommandError> {
    const MAX: u64 = i32::MAX as u64;
    let validated = match name {
        Name::Letter('c') => number_within("request count", value, 1..=MAX),
        Name::Letter('d') => number_within("queue depth", value, 1..=MAX),
        Name::Letter('o') => bytes_within("offset", value, 0..=SIZE_MAX),
        Name::Letter('s') => bytes_within("buffer size", value, 1..=MAX),
        Name::Letter('S') => bytes_within("step size", value, 0..=MAX),
        Name::Long("pattern") => number_within("pattern byte", value, 0..=u64::from(u8::MAX)),
        Name::Long("flush-interval") => number_within("flush interval", value, 0..=MAX),
        Name::Letter('t') if CacheMode::parse(value).is_none() => {
            return Err(CommandError::new("Invalid cache mode"));
        }
        Name::Letter('i') if parse_aio(value).is_none() => {
            return Err(CommandError::new(format!("Invalid aio option: {value}")));
        }
        _ => return Ok(()),
    };
    validated.map(drop)
}
