//! Options of qemu-img whose values are judged where they stand on the line: of several mistakes
//! the first is told.

use super::{check, convert, resize};
use crate::error::CommandError;
use crate::getopt::Name;
use crate::open::{CacheMode, chosen_snapshot, object, parse_aio};
use crate::options::{self, bytes_within, number_within};
use crate::output::{OutputFormat, Program, usage_error};
use crate::size::SIZE_MAX;

/// What becomes of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judged {
    /// The verb gets it.
    Passed,
    /// It is done with.
    Done,
}

/// The judge of one line.
pub struct Judge<'a> {
    program: &'a Program,
    /// Things that `snapshot` is to do.
    actions: u32,
}

impl<'a> Judge<'a> {
    /// One that has seen nothing yet.
    pub fn new(program: &'a Program) -> Judge<'a> {
        Judge {
            program,
            actions: 0,
        }
    }

    /// Judges an option of the verb.
    ///
    /// # Errors
    /// What is wrong with its value.
    pub fn judge(&mut self, verb: &str, name: Name, value: &str) -> Result<Judged, CommandError> {
        match (verb, name) {
            (_, Name::Long("object")) => {
                object::define(value).map_err(|error| match verb {
                    // One is the code for different images.
                    "compare" => error.with_exit_code(2),
                    _ => error,
                })?;
                return Ok(Judged::Done);
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
        Ok(Judged::Passed)
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
    let judged = match (verb, name) {
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
    judged.map(drop)
}

fn bench(name: Name, value: &str) -> Result<(), CommandError> {
    const MAX: u64 = i32::MAX as u64;
    let judged = match name {
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
    judged.map(drop)
}
