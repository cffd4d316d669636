//! [`TransportKind`]: a protocol by which disks are served, with its options for a command line and
//! for a daemon.

use clap::{ArgMatches, Command, FromArgMatches};
use cowslip_console::error::CommandError;

use super::members::Members;
use super::transport::Transport;

/// A protocol, and its options: by the names of a command line, and by those of a daemon's schema.
pub trait TransportKind: Sync {
    /// Type of its exports in a daemon (`block-export-add`).
    fn name(&self) -> &'static str;

    /// Adds its options to a command line.
    fn declare(&self, command: Command) -> Command;

    /// Reads them.
    ///
    /// # Errors
    /// Values that are not understood.
    fn of_line(&self, line: Line<'_>) -> Result<OfLine, CommandError>;

    /// The transport of one export in a daemon. `None`: such exports are of a server that the
    /// daemon starts for all of them.
    ///
    /// # Errors
    /// Arguments that are missing, or that the transport refuses.
    fn of_export(&self, given: Members<'_>) -> Option<Result<Box<dyn Transport>, CommandError>>;

    /// Something that it needs, and that a daemon in its sandbox does not have.
    fn needs_outside_of_sandbox(&self) -> Option<&'static str> {
        None
    }
}

/// A command line that was read.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    matches: &'a ArgMatches,
    /// Threads for its requests, if their number was given.
    pub threads: Option<usize>,
}

impl<'a> Line<'a> {
    /// A line of which the parser has made this.
    pub fn new(matches: &'a ArgMatches) -> Line<'a> {
        Line {
            matches,
            threads: None,
        }
    }

    /// The options that a type declares.
    ///
    /// # Errors
    /// The parser's.
    pub fn options<T: FromArgMatches>(self) -> Result<T, CommandError> {
        let options = T::from_arg_matches(self.matches);
        options.map_err(|error| CommandError::new(error.to_string()))
    }
}

/// A transport of a command line.
#[derive(Default)]
pub struct OfLine {
    /// The transport, if its options make one.
    pub transport: Option<Box<dyn Transport>>,
    /// Whether it serves only if no other transport does.
    pub is_fallback: bool,
    /// Whether clients may change the size of the disk.
    pub lets_grow: bool,
}
