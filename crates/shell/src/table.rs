//! The commands of the qemu-io shell, declared: names, arguments, usage and help. `help`, usage
//! complaints and the checks before a command runs all come from here. Pure.

use std::fmt::Write as _;

/// The action of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Ends the process as a crash does.
    Abort,
    /// Starts a discard.
    AioDiscard,
    /// Waits for the `aio_` requests.
    AioFlush,
    /// Starts a read.
    AioRead,
    /// Starts a write.
    AioWrite,
    /// Counts allocated bytes.
    Alloc,
    /// Sets a breakpoint: needs a debugging driver.
    Break,
    /// Closes the image.
    Close,
    /// Discards a range.
    Discard,
    /// Flushes the image.
    Flush,
    /// Prints the usage of commands.
    Help,
    /// Prints facts about the image.
    Info,
    /// Prints the size of the disk.
    Length,
    /// Lists extents.
    Map,
    /// Opens an image.
    Open,
    /// Ends the shell.
    Quit,
    /// Reads a range.
    Read,
    /// Reads into several buffers.
    Readv,
    /// Removes a breakpoint.
    RemoveBreak,
    /// Reopens the image with other options.
    Reopen,
    /// Resumes a request at a breakpoint.
    Resume,
    /// Raises a signal.
    Sigraise,
    /// Waits for a time in milliseconds.
    Sleep,
    /// Changes the size of the disk.
    Truncate,
    /// Waits for a request at a breakpoint.
    WaitBreak,
    /// Writes a range.
    Write,
    /// Writes from several buffers.
    Writev,
    /// An operation on zones, which no image here has.
    Zone(&'static str),
}

/// Conditions of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// The command needs no image.
    Nothing,
    /// The command needs an open image.
    Image,
    /// An image open for writing.
    WritableImage,
}

/// How many arguments, options included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Exactly this many.
    Exactly(usize),
    /// This number or more.
    AtLeast(usize),
    /// From the first number to the second.
    Between(usize, usize),
}

/// A command of the shell, declared: name, arguments, usage and help.
#[derive(Debug)]
pub struct Command {
    /// The action.
    pub verb: Verb,
    /// The name in the shell.
    pub name: &'static str,
    /// A second, shorter name.
    pub alias: Option<&'static str>,
    /// Conditions that hold before the command runs.
    pub needs: Needs,
    /// How many arguments it takes.
    pub count: Count,
    /// Its arguments, as `help` shows them.
    pub args: Option<&'static str>,
    /// Its purpose, in a line.
    pub purpose: &'static str,
    /// Its help, at length.
    pub help: &'static str,
}

/// Defaults of most commands.
const PLAIN: Command = Command {
    verb: Verb::Quit,
    name: "",
    alias: None,
    needs: Needs::Image,
    count: Count::Exactly(0),
    args: None,
    purpose: "",
    help: "",
};

/// All of them, by name.
pub const COMMANDS: &[Command] = &[
    Command {
        verb: Verb::Abort,
        name: "abort",
        needs: Needs::Nothing,
        purpose: "simulate a program crash using abort(3)",
        ..PLAIN
    },
    // Since QEMU 10.0.13.
    Command {
        verb: Verb::AioDiscard,
        name: "aio_discard",
        needs: Needs::WritableImage,
        count: Count::AtLeast(2),
        args: Some("[-Cq] off len"),
        purpose: "asynchronously discards a number of bytes",
        help: "
 asynchronously discards a range of bytes from the given offset

 Example:
 'aio_discard 512 1k' - discards 1 kilobyte from 512 bytes into the file

 Discards a segment of the currently open file.
 -C, -- report statistics in a machine parsable format
 -q, -- quiet mode, do not show I/O statistics
 The discard is performed asynchronously and the aio_flush command must be
 used to ensure all outstanding aio requests have been completed.
 Note that due to its asynchronous nature, this command will be
 considered successful once the request is submitted, independently
 of potential I/O errors.

",
        ..PLAIN
    },
    Command {
        verb: Verb::AioFlush,
        name: "aio_flush",
        purpose: "completes all outstanding aio requests",
        ..PLAIN
    },
    Command {
        verb: Verb::AioRead,
        name: "aio_read",
        count: Count::AtLeast(2),
        args: Some("[-Ciqrv] [-P pattern] off len [len..]"),
        purpose: "asynchronously reads a number of bytes",
        help: "
 asynchronously reads a range of bytes from the given offset

 Example:
 'aio_read -v 512 1k 1k ' - dumps 2 kilobytes read from 512 bytes into the file

 Reads a segment of the currently open file, optionally dumping it to the
 standard output stream (with -v option) for subsequent inspection.
 The read is performed asynchronously and the aio_flush command must be
 used to ensure all outstanding aio requests have been completed.
 Note that due to its asynchronous nature, this command will be
 considered successful once the request is submitted, independently
 of potential I/O errors or pattern mismatches.
 -C, -- report statistics in a machine parsable format
 -i, -- treat request as invalid, for exercising stats
 -P, -- use a pattern to verify read data
 -q, -- quiet mode, do not show I/O statistics
 -r, -- register I/O buffer
 -v, -- dump buffer to standard output

",
        ..PLAIN
    },
    Command {
        verb: Verb::AioWrite,
        name: "aio_write",
        needs: Needs::WritableImage,
        count: Count::AtLeast(2),
        args: Some("[-Cfiqruz] [-P pattern] off len [len..]"),
        purpose: "asynchronously writes a number of bytes",
        help: "
 asynchronously writes a range of bytes from the given offset source
 from multiple buffers

 Example:
 'aio_write 512 1k 1k' - writes 2 kilobytes at 512 bytes into the open file

 Writes into a segment of the currently open file, using a buffer
 filled with a set pattern (0xcdcdcdcd).
 The write is performed asynchronously and the aio_flush command must be
 used to ensure all outstanding aio requests have been completed.
 Note that due to its asynchronous nature, this command will be
 considered successful once the request is submitted, independently
 of potential I/O errors or pattern mismatches.
 -C, -- report statistics in a machine parsable format
 -f, -- use Force Unit Access semantics
 -i, -- treat request as invalid, for exercising stats
 -P, -- use different pattern to fill file
 -q, -- quiet mode, do not show I/O statistics
 -r, -- register I/O buffer
 -u, -- with -z, allow unmapping
 -z, -- write zeroes using blk_aio_pwrite_zeroes

",
        ..PLAIN
    },
    Command {
        verb: Verb::Alloc,
        name: "alloc",
        alias: Some("a"),
        count: Count::Between(1, 2),
        args: Some("offset [count]"),
        purpose: "checks if offset is allocated in the file",
        ..PLAIN
    },
    Command {
        verb: Verb::Break,
        name: "break",
        count: Count::Exactly(2),
        args: Some("event tag"),
        purpose: "sets a breakpoint on event and tags the stopped request as tag",
        ..PLAIN
    },
    Command {
        verb: Verb::Close,
        name: "close",
        alias: Some("c"),
        purpose: "close the current open file",
        ..PLAIN
    },
    Command {
        verb: Verb::Discard,
        name: "discard",
        alias: Some("d"),
        needs: Needs::WritableImage,
        count: Count::AtLeast(2),
        args: Some("[-Cq] off len"),
        purpose: "discards a number of bytes at a specified offset",
        help: "
 discards a range of bytes from the given offset

 Example:
 'discard 512 1k' - discards 1 kilobyte from 512 bytes into the file

 Discards a segment of the currently open file.
 -C, -- report statistics in a machine parsable format
 -q, -- quiet mode, do not show I/O statistics

",
    },
    Command {
        verb: Verb::Flush,
        name: "flush",
        alias: Some("f"),
        purpose: "flush all in-core file state to disk",
        ..PLAIN
    },
    Command {
        verb: Verb::Help,
        name: "help",
        alias: Some("?"),
        needs: Needs::Nothing,
        count: Count::Between(0, 1),
        args: Some("[command]"),
        purpose: "help for one or all commands",
        ..PLAIN
    },
    Command {
        verb: Verb::Info,
        name: "info",
        alias: Some("i"),
        purpose: "prints information about the current file",
        ..PLAIN
    },
    Command {
        verb: Verb::Length,
        name: "length",
        alias: Some("l"),
        purpose: "gets the length of the current file",
        ..PLAIN
    },
    Command {
        verb: Verb::Map,
        name: "map",
        args: Some(""),
        purpose: "prints the allocated areas of a file",
        ..PLAIN
    },
    Command {
        verb: Verb::Open,
        name: "open",
        alias: Some("o"),
        needs: Needs::Nothing,
        count: Count::AtLeast(1),
        args: Some("[-rsCnkU] [-t cache] [-d discard] [-o options] [path]"),
        purpose: "open the file specified by path",
        help: "
 opens a new file in the requested mode

 Example:
 'open -n -o driver=raw /tmp/data' - opens raw data file read-write, uncached

 Opens a file for subsequent use by all of the other qemu-io commands.
 -r, -- open file read-only
 -s, -- use snapshot file
 -C, -- use copy-on-read
 -n, -- disable host cache, short for -t none
 -U, -- force shared permissions
 -k, -- use kernel AIO implementation (Linux only, prefer use of -i)
 -i, -- use AIO mode (threads, native or io_uring)
 -t, -- use the given cache mode for the image
 -d, -- use the given discard mode for the image
 -o, -- options to be given to the block driver
",
    },
    Command {
        verb: Verb::Quit,
        name: "quit",
        alias: Some("q"),
        needs: Needs::Nothing,
        count: Count::AtLeast(0),
        purpose: "exit the program",
        ..PLAIN
    },
    Command {
        verb: Verb::Read,
        name: "read",
        alias: Some("r"),
        count: Count::AtLeast(2),
        args: Some("[-abCqrv] [-P pattern [-s off] [-l len]] off len"),
        purpose: "reads a number of bytes at a specified offset",
        help: "
 reads a range of bytes from the given offset

 Example:
 'read -v 512 1k' - dumps 1 kilobyte read from 512 bytes into the file

 Reads a segment of the currently open file, optionally dumping it to the
 standard output stream (with -v option) for subsequent inspection.
 -b, -- read from the VM state rather than the virtual disk
 -C, -- report statistics in a machine parsable format
 -l, -- length for pattern verification (only with -P)
 -p, -- ignored for backwards compatibility
 -P, -- use a pattern to verify read data
 -q, -- quiet mode, do not show I/O statistics
 -r, -- register I/O buffer
 -s, -- start offset for pattern verification (only with -P)
 -v, -- dump buffer to standard output

",
        ..PLAIN
    },
    Command {
        verb: Verb::Readv,
        name: "readv",
        count: Count::AtLeast(2),
        args: Some("[-Cqrv] [-P pattern] off len [len..]"),
        purpose: "reads a number of bytes at a specified offset",
        help: "
 reads a range of bytes from the given offset into multiple buffers

 Example:
 'readv -v 512 1k 1k ' - dumps 2 kilobytes read from 512 bytes into the file

 Reads a segment of the currently open file, optionally dumping it to the
 standard output stream (with -v option) for subsequent inspection.
 Uses multiple iovec buffers if more than one byte range is specified.
 -C, -- report statistics in a machine parsable format
 -P, -- use a pattern to verify read data
 -q, -- quiet mode, do not show I/O statistics
 -r, -- register I/O buffer
 -v, -- dump buffer to standard output

",
        ..PLAIN
    },
    Command {
        verb: Verb::RemoveBreak,
        name: "remove_break",
        count: Count::Exactly(1),
        args: Some("tag"),
        purpose: "remove a breakpoint by tag",
        ..PLAIN
    },
    Command {
        verb: Verb::Reopen,
        name: "reopen",
        count: Count::AtLeast(0),
        args: Some("[(-r|-w)] [-c cache] [-o options]"),
        purpose: "reopens an image with new options",
        help: "
 Changes the open options of an already opened image

 Example:
 'reopen -o lazy-refcounts=on' - activates lazy refcount writeback on a qcow2 image

 -r, -- Reopen the image read-only
 -w, -- Reopen the image read-write
 -c, -- Change the cache mode to the given value
 -o, -- Changes block driver options (cf. 'open' command)

",
        ..PLAIN
    },
    Command {
        verb: Verb::Resume,
        name: "resume",
        count: Count::Exactly(1),
        args: Some("tag"),
        purpose: "resumes the request tagged as tag",
        ..PLAIN
    },
    Command {
        verb: Verb::Sigraise,
        name: "sigraise",
        needs: Needs::Nothing,
        count: Count::Exactly(1),
        args: Some("signal"),
        purpose: "raises a signal",
        help: "
 raises the given signal

 Example:
 'sigraise 15' - raises SIGTERM

 Invokes raise(signal), where \"signal\" is the mandatory integer argument
 given to sigraise.

",
        ..PLAIN
    },
    Command {
        verb: Verb::Sleep,
        name: "sleep",
        needs: Needs::Nothing,
        count: Count::Exactly(1),
        purpose: "waits for the given value in milliseconds",
        ..PLAIN
    },
    Command {
        verb: Verb::Truncate,
        name: "truncate",
        alias: Some("t"),
        needs: Needs::WritableImage,
        count: Count::Between(1, 3),
        args: Some("[-m prealloc_mode] off"),
        purpose: "truncates the current file at the given offset",
        ..PLAIN
    },
    Command {
        verb: Verb::WaitBreak,
        name: "wait_break",
        count: Count::Exactly(1),
        args: Some("tag"),
        purpose: "waits for the suspension of a request",
        ..PLAIN
    },
    Command {
        verb: Verb::Write,
        name: "write",
        alias: Some("w"),
        needs: Needs::WritableImage,
        count: Count::AtLeast(2),
        args: Some("[-bcCfnqruz] [-P pattern | -s source_file] off len"),
        purpose: "writes a number of bytes at a specified offset",
        help: "
 writes a range of bytes from the given offset

 Example:
 'write 512 1k' - writes 1 kilobyte at 512 bytes into the open file

 Writes into a segment of the currently open file, using a buffer
 filled with a set pattern (0xcdcdcdcd).
 -b, -- write to the VM state rather than the virtual disk
 -c, -- write compressed data with blk_write_compressed
 -C, -- report statistics in a machine parsable format
 -f, -- use Force Unit Access semantics
 -n, -- with -z, don't allow slow fallback
 -p, -- ignored for backwards compatibility
 -P, -- use different pattern to fill file
 -q, -- quiet mode, do not show I/O statistics
 -r, -- register I/O buffer
 -s, -- use a pattern file to fill the write buffer
 -u, -- with -z, allow unmapping
 -z, -- write zeroes using blk_pwrite_zeroes

",
    },
    Command {
        verb: Verb::Writev,
        name: "writev",
        needs: Needs::WritableImage,
        count: Count::AtLeast(2),
        args: Some("[-Cfqr] [-P pattern] off len [len..]"),
        purpose: "writes a number of bytes at a specified offset",
        help: "
 writes a range of bytes from the given offset source from multiple buffers

 Example:
 'writev 512 1k 1k' - writes 2 kilobytes at 512 bytes into the open file

 Writes into a segment of the currently open file, using a buffer
 filled with a set pattern (0xcdcdcdcd).
 -C, -- report statistics in a machine parsable format
 -f, -- use Force Unit Access semantics
 -P, -- use different pattern to fill file
 -q, -- quiet mode, do not show I/O statistics
 -r, -- register I/O buffer

",
        ..PLAIN
    },
    Command {
        count: Count::Between(3, 4),
        ..zone(
            "append",
            "zone_append",
            "zap",
            "offset len [len..]",
            "append write a number of bytes at a specified offset",
        )
    },
    zone(
        "close",
        "zone_close",
        "zc",
        "offset len",
        "close a range of zones in zone block device",
    ),
    zone(
        "finish",
        "zone_finish",
        "zf",
        "offset len",
        "finish a range of zones in zone block device",
    ),
    zone(
        "open",
        "zone_open",
        "zo",
        "offset len",
        "explicit open a range of zones in zone block device",
    ),
    zone(
        "report",
        "zone_report",
        "zrp",
        "offset number",
        "report zone information",
    ),
    zone(
        "reset",
        "zone_reset",
        "zrs",
        "offset len",
        "reset a zone write pointer in zone block device",
    ),
];

const fn zone(
    what: &'static str,
    name: &'static str,
    alias: &'static str,
    args: &'static str,
    purpose: &'static str,
) -> Command {
    Command {
        verb: Verb::Zone(what),
        name,
        alias: Some(alias),
        count: Count::Exactly(2),
        args: Some(args),
        purpose,
        ..PLAIN
    }
}

/// The command of this name.
pub fn find(name: &str) -> Option<&'static Command> {
    COMMANDS
        .iter()
        .find(|command| command.name == name || command.alias == Some(name))
}

impl Command {
    /// The line that shows how it is called.
    pub fn usage(&self) -> String {
        self.usage_as(self.name)
    }

    fn usage_as(&self, name: &str) -> String {
        match self.args {
            Some(args) => format!("{name} {args} -- {}\n", self.purpose),
            None => format!("{name} -- {}\n", self.purpose),
        }
    }

    /// Checks the number of arguments.
    ///
    /// # Errors
    /// An error that names the command as it was called.
    pub fn check_count(&self, called: &str, given: usize) -> Result<(), String> {
        let (fits, expected) = match self.count {
            Count::Exactly(n) => (given == n, format!("expected {n} arguments")),
            Count::AtLeast(n) => (given >= n, format!("expected at least {n} arguments")),
            Count::Between(low, high) => (
                (low..=high).contains(&given),
                format!("expected between {low} and {high} arguments"),
            ),
        };
        match fits {
            true => Ok(()),
            false => Err(format!(
                "bad argument count {given} to {called}, {expected}"
            )),
        }
    }
}

/// The text of `help`.
pub fn help() -> String {
    let mut text: String = COMMANDS.iter().map(Command::usage).collect();
    text.push_str("\nUse 'help commandname' for extended help.\n");
    text
}

/// The text of `help COMMAND`.
///
/// # Errors
/// The complaint.
pub fn help_of(name: &str) -> Result<String, String> {
    let command = find(name).ok_or_else(|| format!("command {name} not found\n"))?;
    let mut text = command.usage_as(name);
    write!(text, "{}", command.help).expect("a string takes all");
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Whole texts are compared with qemu-io's, where it is installed, in tests/io_shell.rs.

    #[test]
    fn names_and_aliases_are_unique_and_names_sorted() {
        let names: Vec<&str> = COMMANDS.iter().map(|command| command.name).collect();
        assert!(names.is_sorted(), "{names:?}");
        let mut all = names.clone();
        all.extend(COMMANDS.iter().filter_map(|command| command.alias));
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn usage_names_the_command_and_help_what_was_asked_for() {
        let discard = find("d").unwrap();
        assert_eq!(
            discard.usage(),
            "discard [-Cq] off len -- discards a number of bytes at a specified offset\n"
        );
        assert!(help_of("d").unwrap().starts_with("d [-Cq] off len -- "));
        assert_eq!(find("q").unwrap().usage(), "quit -- exit the program\n");
        assert_eq!(
            find("map").unwrap().usage(),
            "map  -- prints the allocated areas of a file\n"
        );
        assert_eq!(help_of("foo"), Err("command foo not found\n".to_string()));
    }

    #[test]
    fn wrong_counts_are_reported_in_three_ways() {
        for (name, given, expected) in [
            (
                "w",
                1,
                "bad argument count 1 to w, expected at least 2 arguments",
            ),
            (
                "close",
                2,
                "bad argument count 2 to close, expected 0 arguments",
            ),
            (
                "alloc",
                0,
                "bad argument count 0 to alloc, expected between 1 and 2 arguments",
            ),
        ] {
            let command = find(name).unwrap();
            assert_eq!(
                command.check_count(name, given),
                Err(expected.to_string()),
                "{name}"
            );
        }
        assert_eq!(find("quit").unwrap().check_count("quit", 5), Ok(()));
    }
}
