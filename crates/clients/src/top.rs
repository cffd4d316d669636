//! `top`: the disks of a daemon, live in a terminal.
//!
//! | file | subject |
//! | --- | --- |
//! | `sample.rs` | figures of a daemon at one moment, and what happened between two |
//! | `table.rs` | the figures of disks and jobs as texts in columns |
//! | `screen.rs` | the terminal: drawing, keys |
//!
//! It asks as any client of the protocol does (`query-blockstats`, `query-block-exports`,
//! `query-named-block-nodes`, `query-jobs`), so it shows qemu-storage-daemon, too: its disks
//! and jobs, without rates, which that does not count by node.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cowslip_console::error::CommandError;
use cowslip_console::output::{self, Program};
use cowslip_qmp::Client;
use serde_json::json;

use super::ctl::{connect, failure};

mod sample;
mod screen;
mod table;

use sample::{Interval, Sample};

/// Show the disks and jobs of a daemon, live in a terminal
#[derive(clap::Args)]
#[command(after_help = "\
Keys: q or Ctrl-C ends; s changes the order; a shows all nodes, or those with exports; the arrows, \
                  Page Up and Page Down scroll; space holds the figures.
Exit codes: 0 done; 1 the command line is wrong; 2 there is no daemon, or it has gone.")]
pub struct Args {
    /// Print the figures of one interval, and end
    #[arg(long)]
    once: bool,
    /// Print the figures as JSON, an object a line for each interval
    #[arg(long)]
    json: bool,
    /// Show nodes without exports, too
    #[arg(short, long)]
    all: bool,
    /// Length of an interval in seconds
    #[arg(short, long, value_name = "SECONDS", default_value_t = 1.0)]
    #[arg(value_parser = interval)]
    interval: f64,
    /// Order of the disks
    #[arg(short, long, value_enum, default_value = "name", value_name = "ORDER")]
    sort: Sort,
    /// The control socket of the daemon
    socket: PathBuf,
}

/// An order of disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sort {
    /// By name.
    Name,
    /// Most requests first.
    Requests,
    /// Most bytes first.
    Bytes,
    /// The longest mean latency first.
    Latency,
}

impl Sort {
    fn next(self) -> Sort {
        match self {
            Sort::Name => Sort::Requests,
            Sort::Requests => Sort::Bytes,
            Sort::Bytes => Sort::Latency,
            Sort::Latency => Sort::Name,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Sort::Name => "name",
            Sort::Requests => "requests",
            Sort::Bytes => "bytes",
            Sort::Latency => "latency",
        }
    }
}

fn interval(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("an interval has 0.1 to 3600 seconds".to_string()),
    }
}

/// Runs `top`. Returns the exit code.
pub fn run(args: &Args, program: &Program) -> u8 {
    program.exit_code(run_until_end(args, program))
}

fn run_until_end(args: &Args, program: &Program) -> Result<(), CommandError> {
    let is_live = !args.once && !args.json;
    if is_live && !std::io::stdout().is_terminal() {
        let text = "Standard output is no terminal; --once and --json are for others";
        return Err(output::usage_error(text, "top", program));
    }
    let client = connect(&args.socket)?;
    let mut source = Source { client, args };
    let before = source.sample()?;
    if is_live {
        return screen::run(&mut source, before);
    }
    let mut before = before;
    loop {
        std::thread::sleep(Duration::from_secs_f64(args.interval));
        let now = source.sample()?;
        let interval = Interval::between(&before, &now);
        match args.json {
            true => output::print(&format!("{}\n", json!(interval))),
            false => output::print(&table::text(&interval, (args.sort, args.all))),
        }
        output::flush();
        if args.once {
            return Ok(());
        }
        before = now;
    }
}

/// A daemon that is asked again and again.
struct Source<'a> {
    client: Client,
    args: &'a Args,
}

impl Source<'_> {
    fn sample(&mut self) -> Result<Sample, CommandError> {
        let mut ask = |command: &str, arguments| {
            let answer = self.client.execute(command, arguments);
            answer.map_err(|error| failure(&error))
        };
        let stats = ask("query-blockstats", json!({"query-nodes": true}))?;
        let moment = Instant::now();
        let exports = ask("query-block-exports", json!({}))?;
        let nodes = ask("query-named-block-nodes", json!({"flat": true}))?;
        let jobs = ask("query-jobs", json!({}))?;
        Ok(Sample::read(moment, (&stats, &exports), (&nodes, &jobs)))
    }
}
