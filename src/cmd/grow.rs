//! `grow`: space ahead of the ends of files that other programs write.
//!
//! The policy is the engine's ([`cowslip::growth`]). `watch.rs` reports events, `files.rs` and
//! `entry.rs` say what follows, `target.rs` does it, and has the reason why no byte is lost;
//! `report.rs` puts it in words.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cowslip::growth::Rule;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::error::CommandError;
use crate::options::bytes_within;
use crate::output::{self, Program};

mod entry;
mod files;
mod report;
mod target;
mod trim;
mod watch;

use files::{Files, Settings};
use report::{ReportStyle, Reporter};
use watch::{Batch, Watch};

/// Between one look and the next, so that the writers' events come in batches: at a gigabyte a
/// second a file gets a megabyte longer in it.
const PAUSE: Duration = Duration::from_millis(1);
/// The longest fixed step.
const FIXED_MAX: u64 = 1 << 40;

/// Command line of `grow`.
#[derive(clap::Args)]
#[command(after_help = "\
Files that grow at the same time end up interleaved on the disk. This command keeps space allocated ahead of the ends \
of the named files, or of all regular files of a directory (not of its subdirectories), while other programs write them. \
Lengths and contents of the files do not change. The space is freed when a file is closed; from the third close with \
growth on it stays until nothing has been written for --idle seconds. At most a sixteenth of the free space is \
allocated at a time. A signal ends the command, which frees what it has allocated, unless --keep is given.

Limits: files have to be writable, and owned by the caller unless the process has CAP_LEASE. Programs with set-user-ID, \
set-group-ID or capabilities are skipped. Data that is written before the notification of it arrives is laid out \
without help. Space is freed only while no process has the file open, not even for reading: the space of files that are \
open when the command ends stays allocated, and they are named; 'cowslip grow --trim' frees it later. While a file is \
truncated, for some microseconds, programs that open it wait, or fail with O_NONBLOCK. A program that was just written \
may be busy for a moment. File systems without fallocate beyond the end, or without leases (NFS), are not supported. On \
btrfs a snapshot or a reflink turns allocated space into copies. More: docs/writers.md.")]
pub struct Args {
    /// How much is allocated ahead: none, fixed=SIZE, or dynamic: steps that grow with the file
    #[arg(long, value_name = "POLICY", default_value = "dynamic", value_parser = parse_rule)]
    policy: Rule,
    /// End when files have been written and then stayed unchanged for --idle seconds
    #[arg(long)]
    once: bool,
    /// End after this many seconds
    #[arg(long = "for", value_name = "SECONDS", value_parser = parse_seconds)]
    time: Option<Duration>,
    /// Seconds without a change after which a file is no longer given space
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = parse_seconds)]
    idle: Duration,
    /// Keep the space that is allocated ahead when the command ends
    #[arg(long)]
    keep: bool,
    /// Watch nothing: free the space beyond the ends of files that no process has open, and end
    #[arg(long, conflicts_with_all = ["once", "time", "keep", "policy"])]
    trim: bool,
    /// Report all events as lines of JSON
    #[arg(long)]
    json: bool,
    /// Report problems only
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
    /// Files, which need not exist yet, or directories
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,
}

/// Reads `none`, `fixed=SIZE` or `dynamic`.
///
/// # Errors
/// It is none of them.
pub fn parse_rule(text: &str) -> Result<Rule, String> {
    match text.split_once('=') {
        None if text == "none" => Ok(Rule::None),
        None if text == "dynamic" => Ok(Rule::DYNAMIC),
        Some(("fixed", size)) => bytes_within("fixed size", size, 4096..=FIXED_MAX)
            .map(Rule::Fixed)
            .map_err(|error| error.to_string()),
        _ => Err(format!(
            "a policy is none, fixed=SIZE or dynamic, not '{text}'"
        )),
    }
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.parse().ok();
    let seconds = seconds.filter(|seconds| (0.0..1e9).contains(seconds));
    let seconds = seconds.ok_or_else(|| format!("'{text}' is not a number of seconds"))?;
    Ok(Duration::from_secs_f64(seconds))
}

/// Watches and allocates until it is stopped; returns the exit code.
pub fn run(args: &Args, program: &Program) -> u8 {
    let style = match (args.json, args.quiet) {
        (true, _) => ReportStyle::Json,
        (_, true) => ReportStyle::Nothing,
        _ => ReportStyle::Lines,
    };
    let mut reporter = Reporter::new(style);
    let outcome = match args.trim {
        true => trim::run(&args.paths, &mut reporter),
        false => watched(args, &mut reporter),
    };
    program.exit_code(outcome)
}

fn watched(args: &Args, reporter: &mut Reporter) -> Result<(), CommandError> {
    let mut watch = Watch::new(&args.paths)?;
    let signals = signals()?;
    let mut files = Files::new(Settings {
        rule: args.policy,
        idle: args.idle,
    });
    // Whatever ends it, what was allocated is given back first; a standard output that fails is
    // looked for below.
    output::outlasts_its_output();
    reporter.begin(&args.paths);
    let outcome = attended(args, (&mut watch, &signals), &mut files, reporter);
    if !args.keep {
        files.end(&watch, reporter);
    }
    reporter.end();
    outcome
}

/// Allocates and gives back until it is to end.
fn attended(
    args: &Args,
    (watch, signals): (&mut Watch, &UnixStream),
    files: &mut Files,
    reporter: &mut Reporter,
) -> Result<(), CommandError> {
    let end = args.time.map(|time| Instant::now() + time);
    while !output::has_failed() {
        let deadlines = [end, files.next_deadline()];
        let deadline = deadlines.into_iter().flatten().min();
        if wait(watch, signals, deadline)? {
            break;
        }
        std::thread::sleep(PAUSE);
        let mut batch = Batch::default();
        watch.read(&mut batch)?;
        files.take(watch, &batch, reporter);
        files.tick(watch, reporter);
        let is_over = end.is_some_and(|end| end <= Instant::now());
        if is_over || !watch.is_alive() || (args.once && files.are_done()) {
            break;
        }
    }
    Ok(())
}

/// Returns a stream that becomes readable when a signal that asks for the end has come.
fn signals() -> Result<UnixStream, CommandError> {
    let failed = |error: std::io::Error| {
        let words = cowslip::error::system_words(&error);
        CommandError::new(format!("Could not wait for signals: {words}"))
    };
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        let theirs = theirs.try_clone().map_err(failed)?;
        signal_hook::low_level::pipe::register(signal, theirs).map_err(failed)?;
    }
    Ok(ours)
}

/// Waits until something has happened, or until it is time. Whether a signal has come.
fn wait(
    watch: &Watch,
    signals: &UnixStream,
    deadline: Option<Instant>,
) -> Result<bool, CommandError> {
    let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
    let timeout = left.map(|left| Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(left.subsec_nanos()),
    });
    let mut waited = [
        PollFd::from_borrowed_fd(watch.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
    ];
    match poll(&mut waited, timeout.as_ref()) {
        Ok(_) => Ok(waited[1].revents().contains(PollFlags::IN)),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => {
            let words = cowslip::error::system_words(&error.into());
            Err(CommandError::new(format!("Could not wait: {words}")))
        }
    }
}

/// A file in the words of events.
fn shown(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_understood_or_refused() {
        assert_eq!(parse_rule("none"), Ok(Rule::None));
        assert_eq!(parse_rule("dynamic"), Ok(Rule::DYNAMIC));
        assert_eq!(parse_rule("fixed=16M"), Ok(Rule::Fixed(16 << 20)));
        for wrong in ["", "fixed", "fixed=", "fixed=1", "dynamic=1", "fixed=2T"] {
            assert!(parse_rule(wrong).is_err(), "{wrong}");
        }
        assert!(parse_seconds("-1").is_err() && parse_seconds("x").is_err());
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
    }
}
