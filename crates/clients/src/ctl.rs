//! `ctl`: commands to a daemon, over its control socket.
//!
//! | file | subject |
//! | --- | --- |
//! | `tables.rs` | results as tables |
//! | `events.rs` | events as lines |
//! | `help.rs` | help about a verb |
//! | `wait.rs` | jobs until their ends |
//!
//! All commands of the schema are verbs. Arguments are checked by it before anything is sent, so
//! mistakes are reported in the same words without a daemon. It works with qemu-storage-daemon,
//! too.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use cowslip::error::system_words;
use cowslip_cmdline::open::shrink_refused;
use cowslip_console::error::CommandError;
use cowslip_console::output::{self, Program, usage_error};
use cowslip_console::size;
use cowslip_qmp::client::ClientError;
use cowslip_qmp::schema::Command;
use cowslip_qmp::{Client, Schema};
use serde_json::{Map, Value, json};

mod events;
pub mod help;
mod tables;
mod wait;

pub use tables::printable;

/// Longest wait for the greeting: a server that serves one client at a time greets when the one
/// before has left.
const PATIENCE: Duration = Duration::from_secs(10);
/// Exit code when there is no daemon, or it has ended the connection.
const NO_DAEMON: u8 = 2;

/// Verbs that are short for commands, and texts about them.
#[rustfmt::skip] // A verb a line.
const SHORT: [(&str, &str, &str); 9] = [
    ("jobs", "query-jobs", "All jobs, as a table."),
    ("nodes", "query-named-block-nodes", "All nodes, as a table."),
    ("exports", "query-block-exports", "All exports, as a table."),
    ("stats", "query-blockstats", "Figures of all nodes, as a table."),
    ("checkpoints", "x-cowslip-query-checkpoints", "All checkpoints of all nodes, as a table."),
    ("checkpoint", "x-cowslip-checkpoint-create", "Takes a checkpoint of several disks."),
    ("checkpoint-end", "x-cowslip-checkpoint-end", "Ends the exports of a checkpoint."),
    ("checkpoint-delete", "x-cowslip-checkpoint-delete", "Removes a checkpoint."),
    ("compact", "x-cowslip-compact", "Gives back the space of an image's file that holds nothing, while the disk is in use."),
];
const EVENTS: &str = "events";
/// The command that may make a disk smaller.
const RESIZE: &str = "block_resize";

/// Send a command to a daemon, show its result, wait for its job
#[derive(clap::Args)]
#[command(after_help = "\
'cowslip ctl SOCKET VERB --help' describes a verb and its arguments.

Exit codes: 0 done; 1 the command line is wrong, or the daemon refuses; 2 there is no daemon, or it \
                  has gone; 3 the job has failed or was cancelled by others.")]
pub struct Args {
    /// Print results and events as JSON
    #[arg(long)]
    json: bool,
    /// Wait until the job of the command has ended, or waits for job-complete or job-finalize;
    /// Ctrl-C cancels it
    #[arg(long)]
    wait: bool,
    /// Complete the job when it is ready, and wait for its end
    #[arg(long)]
    complete: bool,
    /// Let the job go on when the wait is interrupted
    #[arg(long)]
    no_cancel: bool,
    /// Print events as they come, one a line: while waiting, or until interrupted
    #[arg(long)]
    watch: bool,
    /// Allow block_resize to make a disk smaller; data beyond its new end is lost
    #[arg(long)]
    shrink: bool,
    /// The control socket of the daemon
    socket: PathBuf,
    /// A command of the protocol, or a short one
    #[arg(value_parser = Verbs)]
    verb: String,
    /// Arguments: NAME=VALUE, NAME.MEMBER=VALUE, NAME:=JSON, or all of them as one JSON object;
    /// names of events for 'events'
    words: Vec<String>,
}

/// Names of verbs, for help and completions. Other ones are refused later, in fewer words.
#[derive(Clone)]
struct Verbs;

impl TypedValueParser for Verbs {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let short = SHORT
            .iter()
            .map(|(name, _, text)| PossibleValue::new(*name).help(*text));
        let events = PossibleValue::new(EVENTS).help("Events as they come, as lines.");
        let commands = Schema::of_daemon().commands();
        let commands = commands
            .filter(|command| command.name != "qmp_capabilities")
            .map(|command| PossibleValue::new(command.name.as_str()).help(command.text.as_str()));
        Some(Box::new(short.chain([events]).chain(commands)))
    }
}

/// A command that is to be sent.
struct Request {
    command: &'static Command,
    arguments: Map<String, Value>,
}

/// Runs `ctl`. Returns the exit code.
pub fn run(args: &Args, program: &Program) -> u8 {
    let done = match args.verb.as_str() {
        EVENTS => events(args),
        _ => execute(args, program),
    };
    program.exit_code(done)
}

fn events(args: &Args) -> Result<(), CommandError> {
    let known = |name: &&String| Schema::of_daemon().event(name).is_some();
    if let Some(name) = args.words.iter().find(|name| !known(name)) {
        return Err(CommandError::new(format!("There is no event '{name}'")));
    }
    let mut client = connect(&args.socket)?;
    events::follow(&mut client, &args.words, args.json).map_err(|error| failure(&error))
}

fn execute(args: &Args, program: &Program) -> Result<(), CommandError> {
    let request = Request::of(args, program)?;
    let waits = args.wait || args.complete;
    let jobs = match waits {
        true => request.jobs(program)?,
        false => Vec::new(),
    };
    let mut client = connect(&args.socket)?;
    if request.command.name == RESIZE && !args.shrink {
        refuse_shrink(&mut client, &request.arguments, program)?;
    }
    let watched = wait::Watched::new(jobs, &request, args);
    let Request { command, arguments } = request;
    let result = client.execute(&command.name, arguments.into());
    let mut result = result.map_err(|error| failure(&error))?;
    if waits {
        return wait::until_ended(&mut client, watched, program);
    }
    if command.name == "query-block-exports" && !args.json {
        add_views(&mut client, &mut result)?;
    }
    show(command, &result, args.json);
    match args.watch {
        // The daemon closes its images before it leaves its clients.
        false if command.name == "quit" => {
            while client.next_event(None).is_ok() {}
            Ok(())
        }
        true => events::follow(&mut client, &[], args.json).map_err(|error| failure(&error)),
        false => Ok(()),
    }
}

/// Connects, and negotiates.
///
/// # Errors
/// Nobody listens, or what answers is no daemon.
pub fn connect(socket: &Path) -> Result<Client, CommandError> {
    Client::connect(socket, Some(PATIENCE)).map_err(|error| {
        let why = match &error {
            ClientError::Io(error) if error.kind() == std::io::ErrorKind::TimedOut => {
                "nobody greets; it may be serving another client".to_string()
            }
            ClientError::Io(error) => system_words(error),
            other => other.to_string(),
        };
        let socket = socket.display();
        CommandError::new(format!("Could not connect to '{socket}': {why}"))
            .with_exit_code(NO_DAEMON)
    })
}

/// The failure of a client in words for its user, with the exit code.
pub fn failure(error: &ClientError) -> CommandError {
    match error {
        ClientError::Refused(error) => CommandError::new(error.desc.clone()),
        ClientError::Io(error) => CommandError::new(format!(
            "The connection has failed: {}",
            system_words(error)
        ))
        .with_exit_code(NO_DAEMON),
        other => CommandError::new(other.to_string()).with_exit_code(NO_DAEMON),
    }
}

/// Refuses to make a disk smaller, as `resize` does: what is beyond its new end would be lost.
fn refuse_shrink(
    client: &mut Client,
    arguments: &Map<String, Value>,
    program: &Program,
) -> Result<(), CommandError> {
    let mut query = |command: &str| match client.execute(command, json!({})) {
        Ok(result) => Ok(result),
        // Not every daemon has each of them.
        Err(ClientError::Refused(_)) => Ok(Value::Null),
        Err(error) => Err(failure(&error)),
    };
    let size = arguments.get("size").and_then(Value::as_u64);
    let names = ["node-name", "device"].map(|name| arguments.get(name));
    let is_meant = |name: &Value| name.is_string() && names.contains(&Some(name));
    let nodes = query("query-named-block-nodes")?;
    let mut disks = nodes.as_array().into_iter().flatten();
    let mut now = disks
        .find(|node| is_meant(&node["node-name"]))
        .and_then(|node| node["image"]["virtual-size"].as_u64());
    if now.is_none() && names[1].is_some() {
        let devices = query("query-block")?;
        let mut devices = devices.as_array().into_iter().flatten();
        now = devices
            .find(|it| is_meant(&it["device"]) || is_meant(&it["qdev"]))
            .and_then(|it| it["inserted"]["image"]["virtual-size"].as_u64());
    }
    match (size, now) {
        (Some(size), Some(now)) if size < now => Err(shrink_refused(program)),
        _ => Ok(()),
    }
}

/// Arguments that are numbers of bytes, or of bytes a second, though the schema says numbers only.
const BYTES: [&str; 4] = ["speed", "size", "granularity", "buf-size"];

/// A word of the command line whose number of bytes has a unit, in digits: `speed=20M`.
///
/// # Errors
/// There is no such unit. All other mistakes are left to the check of the arguments.
fn in_digits(word: &str) -> Result<Cow<'_, str>, CommandError> {
    let Some((key, value)) = word.split_once('=') else {
        return Ok(Cow::Borrowed(word));
    };
    let last = key.rsplit('.').next().unwrap_or(key);
    let is_hex = value.starts_with("0x") || value.starts_with("0X");
    let has_unit = value.starts_with(|sign: char| sign.is_ascii_digit())
        && value.ends_with(|sign: char| sign.is_ascii_alphabetic());
    if !BYTES.contains(&last) || !has_unit || is_hex {
        return Ok(Cow::Borrowed(word));
    }
    match size::parse(value) {
        Ok(bytes) => Ok(Cow::Owned(format!("{key}={bytes}"))),
        Err(_) => Err(CommandError::new(format!(
            "Parameter '{key}' expects a number of bytes, with k, M, G, T, P or E after it for \
             kilobytes, megabytes and so on, rather than '{value}'"
        ))),
    }
}

impl Request {
    fn of(args: &Args, program: &Program) -> Result<Request, CommandError> {
        let schema = Schema::of_daemon();
        let short = SHORT.iter().find(|(name, ..)| *name == args.verb);
        let name = short.map_or(args.verb.as_str(), |(_, command, _)| command);
        let command = schema.command(name).ok_or_else(|| {
            let text = format!("There is no command '{name}'");
            usage_error(&text, "ctl", program)
        })?;
        if args.shrink && name != RESIZE {
            let text = format!("--shrink belongs to {RESIZE}; '{name}' does not take it");
            return Err(usage_error(&text, "ctl", program));
        }
        let is_json = matches!(args.words.as_slice(), [text] if text.starts_with('{'));
        let words = args.words.iter().map(|word| match is_json {
            true => Ok(Cow::Borrowed(word.as_str())),
            false => in_digits(word),
        });
        let words: Vec<Cow<'_, str>> = words.collect::<Result<_, _>>()?;
        let words = words.iter().map(|word| &**word);
        let arguments = match args.words.as_slice() {
            [text] if text.starts_with('{') => {
                schema.object_of_text(&command.arguments, None, text)
            }
            _ => schema.arguments_of_words(command, words),
        };
        let mut arguments = arguments.map_err(|error| CommandError::new(error.desc))?;
        if short.is_some() && command.name == "query-blockstats" {
            arguments.insert("query-nodes".into(), true.into());
        }
        Ok(Request { command, arguments })
    }

    /// The jobs that the command starts, or is about.
    fn jobs(&self, program: &Program) -> Result<Vec<String>, CommandError> {
        let name = self.command.name.as_str();
        let text = |of: &Map<String, Value>, names: [&str; 3]| {
            let found = names.iter().find_map(|name| of.get(*name)?.as_str());
            found.map(str::to_string)
        };
        let is_about_a_job = name.starts_with("job-") || name.starts_with("block-job-");
        let jobs: Vec<String> = match name {
            "block-commit" | "block-stream" | "blockdev-mirror" | "blockdev-backup"
            | "blockdev-create" | "x-cowslip-compact" => {
                let job = text(&self.arguments, ["job-id", "device", ""]);
                job.into_iter().collect()
            }
            "transaction" => {
                let actions = self.arguments.get("actions").and_then(Value::as_array);
                let is_job = |action: &&Value| action["type"] == "blockdev-backup";
                let actions = actions.into_iter().flatten().filter(is_job);
                let data = actions.filter_map(|action| action["data"].as_object());
                data.filter_map(|data| text(data, ["job-id", "device", ""]))
                    .collect()
            }
            "x-cowslip-checkpoint-create" => {
                let checkpoint = self.arguments.get("name").and_then(Value::as_str);
                let disks = self.arguments.get("disks").and_then(Value::as_array);
                let copied = |disk: &&Value| disk.get("target").is_some();
                let disks = disks.into_iter().flatten().filter(copied);
                let nodes = disks.filter_map(|disk| disk["node"].as_str());
                let job = |node: &str| Some(format!("{}-{node}", checkpoint?));
                nodes.filter_map(job).collect()
            }
            _ if is_about_a_job => {
                let job = text(&self.arguments, ["id", "device", ""]);
                job.into_iter().collect()
            }
            _ => Vec::new(),
        };
        match jobs.is_empty() {
            true => {
                let text = format!("'{name}' has no job to wait for");
                Err(usage_error(&text, "ctl", program))
            }
            false => Ok(jobs),
        }
    }
}

/// Adds the views of checkpoints to the exports: they are offered, too, until they are ended.
fn add_views(client: &mut Client, exports: &mut Value) -> Result<(), CommandError> {
    let checkpoints = match client.execute("x-cowslip-query-checkpoints", json!({})) {
        Ok(checkpoints) => checkpoints,
        // QEMU's daemon has none.
        Err(ClientError::Refused(_)) => return Ok(()),
        Err(error) => return Err(failure(&error)),
    };
    let exports = exports.as_array_mut().into_iter();
    let checkpoints = checkpoints.as_array().into_iter().flatten();
    let offered = checkpoints.filter(|it| it.get("export-name").is_some());
    let views = offered.map(|it| {
        json!({
            "id": it["name"],
            "type": "nbd",
            "node-name": it["node"],
            "x-cowslip-name": it["export-name"],
            tables::IS_VIEW: true,
        })
    });
    let views: Vec<Value> = views.collect();
    exports.for_each(|exports| exports.extend(views.iter().cloned()));
    Ok(())
}

/// Prints the result of a command: a table where there is one for it.
fn show(command: &Command, result: &Value, as_json: bool) {
    if !as_json {
        if *result == json!({}) {
            return;
        }
        if let Some(table) = tables::of(&command.name, result) {
            return output::print(&table);
        }
    }
    output::print_json(result);
}
