//! `cowslip demo`: the main job on real data, with the figures that say what it cost.
//!
//! A populated golden image; thin overlays on it, with and without subclusters; each served over
//! NBD on a Unix socket by a process of its own, written at random, flushed, read back whole and
//! compared, closed, checked. Everything goes through the commands that a user has: create, serve,
//! check. Where QEMU is installed its server does the same, as further rows, for the same client on
//! images of the same kind.
//!
//! It leaves no files behind unless `--keep` asks for them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cowslip_console::error::CommandError;
use cowslip_console::output::{self, Program};
use cowslip_console::progress::Progress;
use cowslip_queue::{Backend, Queue};

use crate::cell::Subclusters;
use crate::host_usage::HostUsage;
use crate::peer_path;
use crate::run::own_path;

mod load;
mod table;

use crate::server::{Export, Kind, PageCache, Server, Transport};
use load::Load;
use table::{Checked, Report, Row};

/// Show the main job on real data: a thin overlay on a golden image, served, written, read back,
/// checked
#[derive(clap::Args)]
pub struct Args {
    /// Work in this directory; a temporary one is used if not given
    #[arg(long, value_name = "PATH")]
    dir: Option<PathBuf>,
    /// Random writes to each overlay
    #[arg(long, value_name = "N", default_value_t = 12_000)]
    operations: u64,
    /// Size of the golden image in MiB
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    size: u64,
    /// Seed of the order and contents of the writes
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Keep the images
    #[arg(long)]
    keep: bool,
    /// Print the figures as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the demonstration; fails if anything was not as it must be.
pub fn run(args: Args, program: &Program) -> u8 {
    crate::private_files::keep_private();
    match demonstrate(&args) {
        Ok(report) => {
            if args.json {
                output::print_json(&report.json());
            } else {
                output::print(&report.text());
            }
            u8::from(!report.all_is_well())
        }
        Err(error) => program.fail(&error),
    }
}

fn demonstrate(args: &Args) -> Result<Report, CommandError> {
    let load = Load::new(args.size << 20, args.operations, args.seed)?;
    let directory = WorkDirectory::make(args)?;
    let page_cache = PageCache::probe(&directory.path)?;
    let queue = Queue::new(Backend::Auto)
        .map_err(|e| CommandError::new(format!("Could not make a queue: {e}")))?;
    let mut cases = vec![
        (Kind::Cowslip, Subclusters::On),
        (Kind::Cowslip, Subclusters::Off),
    ];
    if let Some(peer) = Kind::installed_peer() {
        cases.extend([(peer, Subclusters::On), (peer, Subclusters::Off)]);
    }
    let progress = Progress::of(load.populate_units() + cases.len() as u64 * load.case_units());
    let stage = Stage {
        directory: &directory.path,
        page_cache,
        queue: &queue,
        load: &load,
        progress: &progress,
    };
    stage.make_golden_image()?;
    let mut report = Report::new(&directory.path, page_cache, &load);
    for (kind, subclusters) in cases {
        report.add(stage.run(kind, subclusters)?);
    }
    drop(progress);
    directory.leave(args)?;
    Ok(report)
}

/// State that all cases share.
struct Stage<'a> {
    directory: &'a Path,
    page_cache: PageCache,
    queue: &'a Queue,
    load: &'a Load,
    progress: &'a Progress,
}

impl Stage<'_> {
    fn golden(&self) -> PathBuf {
        self.directory.join("golden.qcow2")
    }

    fn serve(&self, kind: Kind, image: &Path) -> Result<Server, CommandError> {
        let export = Export {
            kind,
            transport: Transport::Nbd,
            image: image.to_path_buf(),
            page_cache: self.page_cache,
        };
        Server::start(export, self.directory)
    }

    fn make_golden_image(&self) -> Result<(), CommandError> {
        self.progress.say("filling the golden image");
        let golden = self.golden();
        cowslip(
            Command::new(own_path()?)
                .args(["create", "-q", "-f", "qcow2"])
                .arg(&golden)
                .arg(self.load.disk_bytes().to_string()),
        )?;
        let server = self.serve(Kind::Cowslip, &golden)?;
        self.queue
            .block_on(self.load.populate(server.at(), self.progress))?;
        server.stop()?;
        Ok(())
    }

    /// Makes one row: create, serve, write, read back, close, check.
    fn run(&self, kind: Kind, subclusters: Subclusters) -> Result<Row, CommandError> {
        let name = format!("{}, subclusters {}", kind.name(), subclusters.word());
        let overlay = self
            .directory
            .join(format!("{}-{}.qcow2", kind.name(), subclusters.word()));
        let option = format!("extended_l2={}", subclusters.word());
        cowslip(
            Command::new(own_path()?)
                .args([
                    "create", "-q", "-f", "qcow2", "-o", &option, "-F", "qcow2", "-b",
                ])
                .arg(self.golden())
                .arg(&overlay),
        )?;
        let server = self.serve(kind, &overlay)?;
        self.progress.say(&format!("{name}: writing"));
        let written = self
            .queue
            .block_on(self.load.write(server.at(), self.progress))?;
        let cpu_seconds = server.cost_so_far()?.cpu_seconds;
        self.progress.say(&format!("{name}: reading back"));
        self.queue
            .block_on(self.load.read_back(server.at(), self.progress))
            .map_err(|e| CommandError::new(format!("{name}: {e}")))?;
        let cost = server.stop()?;
        self.progress.say(&format!("{name}: checking"));
        let row = Row {
            kind,
            subclusters,
            seconds: written.as_secs_f64(),
            cpu_seconds,
            file_bytes: cost.written_bytes,
            host: HostUsage::of(&overlay)?,
            own_check: check(Command::new(own_path()?).arg("check"), &overlay)?,
            qemu_check: check(peer_path::command("qemu-img").arg("check"), &overlay)?,
        };
        self.progress.advance(self.load.check_units());
        Ok(row)
    }
}

/// Runs a command that must succeed.
fn cowslip(command: &mut Command) -> Result<(), CommandError> {
    let output = command
        .output()
        .map_err(|e| CommandError::new(format!("Could not run {command:?}: {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr).trim().to_string();
    Err(CommandError::new(words))
}

/// Checks an image with a program that may not be there.
fn check(command: &mut Command, image: &Path) -> Result<Checked, CommandError> {
    let output = match command.args(["-f", "qcow2"]).arg(image).output() {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(Checked::NotInstalled);
        }
        Err(error) => {
            return Err(CommandError::new(format!(
                "Could not run {command:?}: {error}"
            )));
        }
    };
    if output.status.success() {
        return Ok(Checked::Clean);
    }
    let mut words = String::from_utf8_lossy(&output.stdout).into_owned();
    words.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok(Checked::Bad(words))
}

/// The directory that the images are in; removed when dropped.
struct WorkDirectory {
    path: PathBuf,
    leave: bool,
}

impl WorkDirectory {
    fn make(args: &Args) -> Result<WorkDirectory, CommandError> {
        let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
        // The images name their backing files: relative to them, a relative name would be another.
        let path = std::path::absolute(&parent)
            .unwrap_or_else(|_| parent.clone())
            .join(format!("cowslip-demo-{}", std::process::id()));
        // A directory that was there already would belong to another program.
        let made = fs::create_dir_all(&parent).and_then(|()| fs::create_dir(&path));
        made.map_err(|e| {
            let words = cowslip::error::system_words(&e);
            CommandError::new(format!("Could not create '{}': {words}", path.display()))
        })?;
        Ok(WorkDirectory { path, leave: false })
    }

    /// Ends its use, in good order.
    fn leave(mut self, args: &Args) -> Result<(), CommandError> {
        self.leave = true;
        if args.keep {
            return Ok(());
        }
        fs::remove_dir_all(&self.path).map_err(|e| {
            let words = cowslip::error::system_words(&e);
            CommandError::new(format!(
                "Could not remove '{}': {words}",
                self.path.display()
            ))
        })
    }
}

impl Drop for WorkDirectory {
    fn drop(&mut self) {
        if !self.leave && fs::remove_dir_all(&self.path).is_err() {
            output::print_error(&format!(
                "cowslip: '{}' is left behind\n",
                self.path.display()
            ));
        }
    }
}
