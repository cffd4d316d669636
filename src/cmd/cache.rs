//! `cowslip cache`: what is kept of remote images on this host.

use std::path::PathBuf;
use std::time::SystemTime;

use clap::Subcommand;
use cowslip_remote::{CACHE_BYTES, CacheDirectory, Cached, Environment};

use crate::error::CommandError;
use crate::output::{self, Program};
use crate::size;

/// Show, shrink or check what is kept of images on web servers and in object stores
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// List the cached images, those used last first
    List(Common),
    /// Remove images that are not in use, those used longest ago first
    Prune {
        #[command(flatten)]
        common: Common,
        /// Stop when all take at most this much space; if not given, COWSLIP_CACHE_SIZE or 20G
        #[arg(long, value_name = "SIZE", conflicts_with = "all")]
        size: Option<String>,
        /// Remove all that are not in use
        #[arg(long)]
        all: bool,
    },
    /// Compare all blocks with their checksums, and drop those that are damaged; the exit code is 2
    /// if there are any
    Verify(Common),
}

#[derive(clap::Args)]
struct Common {
    /// The directory of the cache; if not given, the one that COWSLIP_CACHE names
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Exit code of `verify` if something was damaged.
const DAMAGED: u8 = 2;

/// Runs `cache`. Returns the exit code.
pub fn run(args: Args, program: &Program) -> u8 {
    let done = match args.task {
        Task::List(common) => list(&common),
        Task::Prune { common, size, all } => prune(&common, size.as_deref(), all),
        Task::Verify(common) => verify(&common),
    };
    match done {
        Ok(code) => code,
        Err(error) => program.fail(&error),
    }
}

impl Common {
    fn directory(&self) -> Result<CacheDirectory, CommandError> {
        let environment = Environment::of_process();
        let named = environment.get("COWSLIP_CACHE").map(PathBuf::from);
        let path = self.dir.clone().or(named).ok_or_else(|| {
            CommandError::new("no cache is named: --dir or COWSLIP_CACHE does that")
        })?;
        if !path.is_dir() {
            let path = path.display();
            return Err(CommandError::new(format!("there is no directory '{path}'")));
        }
        let limit = match environment.get("COWSLIP_CACHE_SIZE") {
            Some(text) => bytes(text)?,
            None => CACHE_BYTES,
        };
        Ok(CacheDirectory::open(&path, limit)?)
    }
}

fn bytes(text: &str) -> Result<u64, CommandError> {
    size::parse(text).map_err(|_| CommandError::new(format!("'{text}' is no size")))
}

fn list(common: &Common) -> Result<u8, CommandError> {
    let directory = common.directory()?;
    let all = directory.list()?;
    let taken = directory.taken_bytes()?;
    if common.json {
        let value = serde_json::json!({
            "directory": directory.path(),
            "taken-bytes": taken,
            "limit-bytes": directory.limit_bytes(),
            "images": all.iter().map(json).collect::<Vec<_>>(),
        });
        output::print(&format!("{value:#}\n"));
        return Ok(0);
    }
    for cached in &all {
        output::print(&format!("{}\n", line(cached)));
    }
    let (taken, limit) = (size::human(taken), size::human(directory.limit_bytes()));
    let count = all.len();
    output::print(&format!("{count} images take {taken} of {limit}\n"));
    Ok(0)
}

fn prune(common: &Common, size: Option<&str>, all: bool) -> Result<u8, CommandError> {
    let directory = common.directory()?;
    let to = match (size, all) {
        (Some(text), _) => bytes(text)?,
        (None, true) => 0,
        (None, false) => directory.limit_bytes(),
    };
    let (removed, taken) = directory.prune(to)?;
    if common.json {
        let value = serde_json::json!({
            "removed": removed.iter().map(json).collect::<Vec<_>>(),
            "taken-bytes": taken,
        });
        output::print(&format!("{value:#}\n"));
        return Ok(0);
    }
    for cached in &removed {
        output::print(&format!("removed {}\n", line(cached)));
    }
    output::print(&format!("{} are taken\n", size::human(taken)));
    Ok(0)
}

fn verify(common: &Common) -> Result<u8, CommandError> {
    let all = common.directory()?.verify()?;
    let damaged: usize = all.iter().map(|verified| verified.damaged.len()).sum();
    if common.json {
        let images = all.iter().map(|verified| {
            let mut value = json(&verified.object);
            value["blocks"] = verified.blocks.into();
            value["damaged-offsets"] = verified.damaged.clone().into();
            value
        });
        let value = serde_json::json!({ "images": images.collect::<Vec<_>>() });
        output::print(&format!("{value:#}\n"));
    } else {
        for verified in &all {
            let (blocks, damaged) = (verified.blocks, verified.damaged.len());
            let line = line(&verified.object);
            output::print(&format!("{line}: {blocks} blocks, {damaged} damaged\n"));
        }
    }
    Ok(if damaged > 0 { DAMAGED } else { 0 })
}

fn line(cached: &Cached) -> String {
    let taken = size::human(cached.disk_bytes);
    let length = size::human(cached.version.bytes);
    let used = if cached.is_in_use { ", in use" } else { "" };
    format!(
        "{} ({}): {taken} of {length}{used}",
        cached.url, cached.version
    )
}

fn json(cached: &Cached) -> serde_json::Value {
    let used = cached.used.duration_since(SystemTime::UNIX_EPOCH);
    serde_json::json!({
        "url": cached.url,
        "etag": cached.version.e_tag,
        "last-modified": cached.version.last_modified,
        "bytes": cached.version.bytes,
        "block-bytes": cached.block_bytes,
        "taken-bytes": cached.disk_bytes,
        "used": used.unwrap_or_default().as_secs(),
        "in-use": cached.is_in_use,
        "key": cached.key,
    })
}
