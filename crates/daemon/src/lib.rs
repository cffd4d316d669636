//! `cowslip daemon`, also under the name `qemu-storage-daemon`: disks by name, exports and jobs,
//! which clients of the control protocol (QMP) add, change and remove while machines run.
//!
//! | file | subject |
//! | --- | --- |
//! | `host.rs` | the state of a daemon |
//! | `nodes.rs`, `reopen.rs` | disks by name, and their chains; other options of those in use |
//! | `export.rs`, `exports.rs` | disks for clients, by the protocols of `serve` |
//! | `checkpoint.rs` | views of disks as they were at one moment, with what has changed since another |
//! | `snapshots.rs`, `internal.rs` | overlays over disks in use, transactions; internal snapshots |
//! | `job.rs`, `jobs.rs` | jobs, and the commands that control them |
//! | `fault.rs`, `fleece.rs` | errors that jobs meet, and policies for them; copies of what changes |
//! | `copies.rs`, `backups.rs`, `create.rs` | the work of jobs: copies of disks in use, new images |
//! | `compaction.rs` | the job that gives back the space of an image's file that holds nothing |
//! | `bitmap.rs`, `bitmaps.rs`, `contexts.rs` | dirty bitmaps, in memory and in images; as NBD shows them |
//! | `queries.rs`, `shown.rs` | descriptions; the image that a node has at the moment |
//! | `passed.rs` | files that clients have passed, by names |
//! | `metrics.rs`, `http.rs` | figures for Prometheus, and the way to them |
//! | `line.rs`, `as_qemu.rs`, `stdio.rs` | the command line, also QEMU's; the doors for clients |
//! | `supervisor.rs` | the service manager: readiness, watchdog, sockets that it passes |
//!
//! All of it is on the thread of the daemon's queue. A command that changes the graph has the turn
//! (`turn`); requests are held back no longer than its last step takes.

use std::fs::File;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use cowslip::error::system_words;
use cowslip_cmdline::open;
use cowslip_cmdline::text_file;
use cowslip_console::error::CommandError;
use cowslip_console::output::Program;
use cowslip_exports::sandbox::Mode;
use cowslip_exports::{
    Daemonize, Detached, Log, LogFormat, Role, Verbosity, default_poll, role, start_server,
};
use cowslip_graph::TurnGuard;
use cowslip_qmp::{Call, Executing, Handler, QmpError, Schema, Server};
use cowslip_queue::{Backend, Queue, Signal, Signals};
use serde_json::{Value, json};

use self::job::Status;

mod active;
pub mod as_qemu;
mod aside;
mod backups;
mod bitmap;
mod bitmaps;
mod changing;
mod checkpoint;
mod compaction;
mod contexts;
mod copies;
mod create;
mod export;
mod exports;
mod fault;
mod fleece;
mod given;
mod host;
mod http;
mod internal;
mod job;
mod jobs;
mod line;
mod metrics;
mod nodes;
mod passed;
mod queries;
mod reopen;
mod reserved;
mod scratch;
mod shown;
mod snapshots;
mod stdio;
mod supervisor;
mod wait;
mod words;

use changing::Changing;
use given::Given;
use host::Daemon;
use line::{Doors, Line, Step};
use supervisor::Supervisor;
use words::refused;

/// The longest time for which a thread of the daemon keeps a processor for which others wait. The
/// copies of jobs are made in the kernel, and a request that has come meanwhile waits for its turn;
/// those that the kernel gives by itself last for some milliseconds.
const TURN: Duration = Duration::from_micros(100);

/// Serve disks that are added, changed and removed over a control socket (QMP)
#[derive(clap::Args)]
pub struct Args {
    /// Listen for clients of the control protocol on this Unix socket
    #[arg(long, value_name = "PATH")]
    control: Vec<PathBuf>,
    /// Add a node: driver=DRIVER,node-name=NAME,… or the same as JSON
    #[arg(long, value_name = "OPTIONS")]
    blockdev: Vec<String>,
    /// Define a socket for --monitor: socket,id=ID,path=PATH,server=on,wait=off
    #[arg(long, value_name = "OPTIONS")]
    chardev: Vec<String>,
    /// Add an export of a node: type=nbd,id=ID,node-name=NAME,…; type=vhost-user-blk,…;
    /// type=fuse,…
    #[arg(long, value_name = "OPTIONS")]
    export: Vec<String>,
    /// The form of reports on standard error
    #[arg(long, value_name = "FORMAT", value_enum, default_value = "lines")]
    log_format: LogFormat,
    /// Answer to GET /metrics with figures for Prometheus; HOST:PORT, or the path of a Unix socket
    #[arg(long, value_name = "ADDRESS")]
    metrics: Vec<String>,
    /// Let members of this group connect to the sockets of the control protocol, too
    #[arg(long, value_name = "GROUP", value_parser = line::group)]
    monitor_group: Option<rustix::fs::Gid>,
    /// Confine the daemon before it opens images: auto (with Landlock and seccomp, as far as the
    /// kernel supports them), on (both, or no service), off (the default)
    #[arg(long, value_name = "MODE", value_parser = sandbox_mode)]
    sandbox: Option<Mode>,
    /// A directory in which images and sockets may lie in spite of --sandbox, which is needed with
    /// it; without any, files have to be passed (add-fd)
    #[arg(long, value_name = "DIR")]
    sandbox_dir: Vec<PathBuf>,
    /// Listen for clients of the control protocol on a --chardev: chardev=ID
    #[arg(long, value_name = "OPTIONS")]
    monitor: Vec<String>,
    /// Start the NBD server: addr.type=unix,addr.path=PATH or
    /// addr.type=inet,addr.host=HOST,addr.port=PORT
    #[arg(long, value_name = "OPTIONS")]
    nbd_server: Option<String>,
    /// Write the process number into this file
    #[arg(long, value_name = "PATH")]
    pidfile: Option<PathBuf>,
    /// Go into the background once everything of the command line is there
    #[arg(long)]
    daemonize: bool,
    /// Report events on standard error
    #[arg(short, long)]
    verbose: bool,
}

impl Daemon {
    /// Ends jobs and exports, and closes all images.
    async fn end(&self) -> Result<(), CommandError> {
        self.end_jobs().await;
        self.end_checkpoints().await;
        for export in self.exports.all() {
            self.end_export(&export).await;
        }
        drop(self.nbd_server_stop().await);
        let closed = self.nodes.close().await;
        closed.map_err(|error| CommandError::new(format!("Could not close an image: {error}")))
    }

    /// The turn in which all ends: no job takes part in it, and none is begun meanwhile.
    async fn last_turn(&self) -> TurnGuard<'_, ()> {
        loop {
            // Their last steps take a turn.
            self.end_jobs().await;
            let turn = self.turn.take().await;
            if self
                .jobs
                .all()
                .iter()
                .all(|job| job.status.get() == Status::Concluded)
            {
                return turn;
            }
        }
    }

    async fn command(self: &Rc<Self>, name: &str, given: &Given) -> Result<Value, QmpError> {
        match name {
            "query-jobs" => return Ok(self.query_jobs()),
            "query-block-jobs" => return Ok(self.query_block_jobs()),
            "query-block-exports" => return Ok(self.query_block_exports()),
            "query-named-block-nodes" => {
                let is_flat = given.switch("flat")?.unwrap_or(false);
                return Ok(self.query_named_block_nodes(is_flat).await);
            }
            "query-block" => return Ok(Value::Array(Vec::new())),
            "query-blockstats" => {
                let of_nodes = given.switch("query-nodes")?.unwrap_or(false);
                return Ok(self.query_blockstats(of_nodes));
            }
            "x-debug-query-block-graph" => return Ok(self.query_block_graph()),
            "quit" => {
                // Their events come before the reply, as in QEMU.
                self.end_jobs().await;
                self.quits.set();
                return Ok(json!({}));
            }
            _ if name.starts_with("job-") || name.starts_with("block-job-") => {
                return self.job_command(name, given);
            }
            _ => {}
        }
        let _turn = self.turn.take().await;
        self.change(name, given).await
    }

    /// Counts a command of a client, and reports one that may have changed something.
    fn note_command(&self, name: &str, error: Option<&QmpError>) {
        let count = match error {
            None => &self.commands_done,
            Some(_) => &self.commands_refused,
        };
        count.set(count.get() + 1);
        if error.is_some() || !name.starts_with("query-") {
            let mut data = json!({"name": name});
            if let Some(error) = error {
                data["error"] = error.desc.as_str().into();
            }
            self.log.event("command", &data);
        }
    }

    /// A command that changes the graph.
    async fn change(self: &Rc<Self>, name: &str, given: &Given) -> Result<Value, QmpError> {
        let changed = self.changed_by(name, given).await;
        changed.map_err(|error| self.explained(error))
    }

    async fn changed_by(self: &Rc<Self>, name: &str, given: &Given) -> Result<Value, QmpError> {
        match name {
            "blockdev-add" => {
                let added = self.nodes.add(given.0.clone()).await;
                added.map(|_| json!({}))
            }
            "blockdev-reopen" => self.blockdev_reopen(given).await,
            "blockdev-del" => {
                self.nodes.delete(given.required("node-name")?).await?;
                Ok(json!({}))
            }
            "block-export-add" => self.block_export_add(given).await,
            "block-export-del" => self.block_export_del(given).await,
            "nbd-server-start" => self.nbd_server_start(given),
            "nbd-server-stop" => self.nbd_server_stop().await,
            "nbd-server-add" => self.nbd_server_add(given).await,
            "nbd-server-remove" => self.nbd_server_remove(given).await,
            "block_resize" => self.block_resize(given).await,
            "blockdev-create" => self.blockdev_create(given),
            "blockdev-snapshot" => self.blockdev_snapshot(given).await,
            "blockdev-snapshot-sync" => self.blockdev_snapshot_sync(given).await,
            "block-stream" => self.block_stream(given).await,
            "block-commit" => self.block_commit(given).await,
            "blockdev-mirror" => self.blockdev_mirror(given).await,
            "blockdev-backup" => self.blockdev_backup(given).await,
            "transaction" => self.transaction(given).await,
            "x-cowslip-checkpoint-create" => self.checkpoint_create(given).await,
            "x-cowslip-checkpoint-end" => self.checkpoint_end(given).await,
            "x-cowslip-checkpoint-delete" => self.checkpoint_delete(given).await,
            "x-cowslip-compact" => self.compact(given).await,
            "x-cowslip-query-checkpoints" => self.query_checkpoints().await,
            "blockdev-snapshot-internal-sync" => self.internal_snapshot(given).await,
            "blockdev-snapshot-delete-internal-sync" => self.delete_internal_snapshot(given).await,
            "change-backing-file" => self.change_backing_file(given).await,
            "object-add" => {
                let text = Value::from(given.0.clone()).to_string();
                match open::object::define(&text) {
                    Ok(()) => Ok(json!({})),
                    // Hints are for people.
                    Err(error) => Err(refused(error.to_string().lines().next().unwrap_or(""))),
                }
            }
            "object-del" => self.object_del(given.required("id")?),
            _ => match name.strip_prefix("block-dirty-bitmap-") {
                Some(verb) => self.bitmap_command(verb, given).await,
                None => {
                    let text = format!("'{name}' is not supported by this daemon");
                    Err(QmpError::generic(text))
                }
            },
        }
    }

    /// `object-del`.
    fn object_del(&self, id: &str) -> Result<Value, QmpError> {
        let is_needed = |node: &Rc<nodes::Node>| node.needs_object(id);
        if self.nodes.all().iter().any(is_needed) {
            let text = format!("object '{id}' is in use, can not be deleted");
            return Err(QmpError::generic(text));
        }
        match open::object::remove(id) {
            true => Ok(json!({})),
            false => Err(QmpError::generic(format!("object '{id}' not found"))),
        }
    }

    /// `block_resize`.
    async fn block_resize(&self, given: &Given) -> Result<Value, QmpError> {
        let node = self.nodes.of_device_or_name(given)?;
        let size = given.0.get("size").and_then(Value::as_u64);
        let size = size.ok_or_else(|| refused("Parameter 'size' expects a >0 size"))?;
        node.may_change()?;
        if node.is_read_only() {
            return Err(refused("Image is read-only"));
        }
        self.nodes.is_root(&node)?;
        self.nodes.enter(&node, true).await?;
        let changing = Changing::by(self, given);
        let resized = cowslip_graph::resize(&changing, &node, size).await;
        let left = self.nodes.leave(&node, true).await;
        resized?;
        for export in self.exports.of(&node) {
            export.inform();
        }
        left.map(|()| json!({}))
    }
}

/// The commands for clients.
struct Commands(Rc<Daemon>);

impl Handler for Commands {
    fn execute<'a>(&'a self, call: Call<'a>) -> Executing<'a> {
        Box::pin(async move {
            let given = Given(call.arguments);
            let outcome = self.0.command(call.name, &given).await;
            self.0.note_command(call.name, outcome.as_ref().err());
            outcome
        })
    }
}

fn sandbox_mode(text: &str) -> Result<Mode, String> {
    Mode::parse(text).ok_or_else(|| "a mode is auto, on or off".to_string())
}

impl Args {
    /// The steps in an order in which each finds what it names.
    fn line(self) -> Line {
        let mut steps: Vec<Step> = Vec::new();
        steps.extend(self.chardev.into_iter().map(Step::Chardev));
        steps.extend(self.monitor.into_iter().map(Step::Monitor));
        steps.extend(self.control.into_iter().map(Step::Control));
        steps.extend(self.metrics.into_iter().map(Step::Metrics));
        steps.extend(self.blockdev.into_iter().map(Step::Node));
        steps.extend(self.nbd_server.into_iter().map(Step::NbdServer));
        steps.extend(self.export.into_iter().map(Step::Export));
        Line {
            steps,
            pidfile: self.pidfile,
            daemonize: match self.daemonize {
                true => Daemonize::Yes,
                false => Daemonize::No,
            },
            log_format: self.log_format,
            monitor_group: self.monitor_group,
            sandbox: (self.sandbox, self.sandbox_dir),
            verbosity: match self.verbose {
                true => Verbosity::Everything,
                false => Verbosity::Errors,
            },
        }
    }
}

/// Runs `cowslip daemon`. Returns the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    run_line(args.line(), program)
}

fn run_line(line: Line, program: &Program) -> u8 {
    match role(line.daemonize) {
        Role::Parent => start_server(program),
        role => program.exit_code(start(line, program, role)),
    }
}

fn start(line: Line, program: &Program, role: Role) -> Result<(), CommandError> {
    let io = |error: &std::io::Error| CommandError::new(system_words(error));
    // Before any thread exists, so that none is ended by the signals.
    let signals = Signals::take_over().map_err(|error| io(&error))?;
    // For the threads of the kernel, too, that write files for the ring: they inherit it. Where it
    // is refused, guests wait a little longer.
    drop(cowslip_queue::take_short_turns(TURN));
    cowslip_queue::fix_buffers();
    let queue = Queue::new(Backend::Auto).map_err(|error| io(&error))?;
    queue.poll_before_sleep(default_poll());
    let daemon = Daemon::new(Log::new(program, line.verbosity).in_format(line.log_format));
    let log = daemon.log.clone();
    let ended = queue.block_on(async {
        let served = serve(&daemon, &line, (role, signals)).await;
        let closed = daemon.ended.take().unwrap_or(Ok(()));
        // What a command has added meanwhile, or a line that was not followed to its end.
        let ended = daemon.end().await;
        served.and(closed).and(ended)
    });
    match (ended, line.log_format) {
        (Err(error), LogFormat::Json) => {
            log.fail(&error);
            Err(CommandError::already_reported().with_exit_code(error.exit_code()))
        }
        (ended, _) => ended,
    }
}

async fn serve(
    daemon: &Rc<Daemon>,
    line: &Line,
    (role, signals): (Role, Signals),
) -> Result<(), CommandError> {
    let io = |error: &std::io::Error| CommandError::new(system_words(error));
    let server = Server::new(Schema::of_daemon(), Default::default());
    daemon.clients.replace(Some(server.handle()));
    let sets = Arc::clone(server.handle().sets());
    daemon.nodes.passed.replace(Some(sets));
    let supervisor = Rc::new(Supervisor::of_environment()?);
    let detached = Detached::prepare(role).map_err(|error| io(&error))?;
    // From the beginning: a daemon whose images do not come is asked to end, too.
    watch_signals(signals, Rc::clone(daemon));
    let Doors {
        listeners,
        names,
        connected,
        stdio,
        pidfile,
        ..
    } = line::follow(daemon, line).await?;
    write_process(line, pidfile)?;
    detached.report_ready().map_err(|error| io(&error))?;
    supervisor.watch();
    supervisor.is_ready();
    let handle = server.handle();
    let stopper = Rc::clone(daemon);
    cowslip_queue::spawn(async move {
        stopper.quits.wait().await;
        supervisor.is_stopping();
        // While clients are there to learn of it: to one that waits for the end of its connection
        // all images are closed then, as by QEMU's daemon.
        let turn = stopper.last_turn().await;
        let ended = stopper.end().await;
        stopper.ended.replace(Some(ended));
        handle.stop();
        drop(turn);
    });
    let handler = Rc::new(Commands(Rc::clone(daemon)));
    server.serve(handler, listeners, connected).await;
    drop(names);
    if let Some(stdio) = stdio {
        stdio.finish();
    }
    if let Some(path) = &line.pidfile {
        // It may be gone already.
        drop(std::fs::remove_file(path));
    }
    Ok(())
}

/// Writes the process number, into a file that may be open already.
fn write_process(line: &Line, opened: Option<File>) -> Result<(), CommandError> {
    let Some(path) = &line.pidfile else {
        return Ok(());
    };
    let text = format!("{}\n", std::process::id());
    let written = match opened {
        Some(file) => text_file::write_later(&file, &text)
            .map_err(|error| CommandError::new(system_words(&error))),
        None => text_file::write(path, &text, 0o600, "create", &Default::default()),
    };
    written.map_err(|error| CommandError::new(format!("cannot create PID file: {error}")))
}

fn watch_signals(signals: Signals, daemon: Rc<Daemon>) {
    cowslip_queue::spawn(async move {
        while let Ok(Signal::Report) = signals.asked().await {
            let figures = daemon.query_blockstats(true);
            daemon.log.write_data("figures", &figures);
        }
        cowslip_nodes::drivers::end_requests();
        daemon.quits.set();
    });
}
