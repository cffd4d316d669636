//! Options about the image that a server opens, the same for all verbs that serve one.

use std::path::PathBuf;
use std::time::Duration;

use cowslip_cmdline::open::discard_policy;
use cowslip_cmdline::open::{self, Access, CacheMode, ImageSpec, Trust};
use cowslip_console::error::CommandError;
use cowslip_console::options;

use super::compaction::Background;
use super::log::Verbosity;
use super::record::Record;
use super::sandbox;
use super::service::Service;

/// Options of `serve` and `mount`.
#[derive(clap::Args)]
pub struct ImageArgs {
    /// The image's format, such as qcow2, raw or luks; guessed from the image if not given
    #[arg(short, long)]
    format: Option<String>,
    /// IMAGE is a complete image specification
    #[arg(long, conflicts_with = "format")]
    image_opts: bool,
    /// Show this internal snapshot, by its ID or name, in the place of the disk; refuses writes
    #[arg(long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Refuse writes
    #[arg(short, long)]
    read_only: bool,
    /// Serve the image although another process writes to it; only with --read-only
    #[arg(short = 'U', long, requires = "read_only")]
    force_share: bool,
    #[command(flatten)]
    trust: Trust,
    /// Cache mode: none, writeback, writethrough, directsync or unsafe
    #[arg(short = 't', long, default_value = "writeback")]
    cache: String,
    /// I/O engine: threads or io_uring; by default the faster one that works here
    #[arg(long)]
    aio: Option<String>,
    /// Effect of clients' discards: unmap or ignore
    #[arg(long, default_value = "unmap")]
    discard: String,
    /// Effect of clients' writes of zeroes: off (written as data), on (allocate no new space), or
    /// unmap (release the space)
    #[arg(long, default_value = "off", value_name = "MODE")]
    detect_zeroes: String,
    /// How space is allocated: contiguous (whole clusters, ahead of need), sparse (only what is
    /// written), or auto (as stored in the image)
    #[arg(long, default_value = "auto", value_name = "POLICY")]
    alloc_policy: String,
    /// Bytes of L2 tables kept in memory for the image and its backing chain, 32M if not given;
    /// on SIGUSR1 the server prints statistics of this cache
    #[arg(long, value_name = "SIZE")]
    cache_size: Option<String>,
    /// Longest time, in microseconds, for which threads poll for requests and completions before
    /// they sleep; 0 to sleep at once. By default 100, or 0 with a single processor
    #[arg(long, value_name = "MICROSECONDS")]
    #[arg(value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    poll: Option<u32>,
    /// Start serving at this byte of the image
    #[arg(short, long, default_value_t = 0)]
    offset: u64,
    /// Write the server's process number into this file
    #[arg(long, value_name = "PATH")]
    pid_file: Option<PathBuf>,
    /// Record the time, kind, offset and length of each request in this file, for 'cowslip advise';
    /// requests that it cannot keep up with are counted, and never wait
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Most bytes of the file that --record writes; a million requests take 2 to 8 MB
    #[arg(long, value_name = "SIZE", default_value = "256M", requires = "record")]
    record_limit: String,
    /// While clients leave the disk alone, give back the space of the image's file that holds
    /// nothing, moving no more than this in a second: 20M, for one
    #[arg(long, value_name = "RATE", conflicts_with_all = ["read_only", "snapshot"])]
    compact_background: Option<String>,
    /// Milliseconds for which clients have to leave the disk alone before anything moves
    #[arg(long, value_name = "MS", default_value_t = 500)]
    #[arg(requires = "compact_background")]
    compact_idle_ms: u32,
    /// Seconds from the end of a compaction until another one may begin
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    #[arg(requires = "compact_background")]
    compact_pause: u32,
    /// With --compact-background, also put the disk's clusters into the guest's order
    #[arg(long, requires = "compact_background")]
    compact_defragment: bool,
    /// Confine the server with Landlock and seccomp once its files are open: auto (as far as the
    /// kernel supports them), on (refuse to serve unless both are in force), off
    #[arg(long, default_value = "auto", value_name = "MODE")]
    sandbox: String,
    /// Report events on standard error
    #[arg(short, long)]
    verbose: bool,
}

/// The message for a value that an option does not take.
pub fn invalid(what: &str, value: &str) -> CommandError {
    CommandError::new(format!("'{value}' is not {what}"))
}

impl ImageArgs {
    /// The service of an image with these options.
    ///
    /// # Errors
    /// Values that are not understood.
    pub fn service(self, file: &str) -> Result<Service, CommandError> {
        let mut service = Service::of(ImageSpec {
            image_opts: self.image_opts,
            ..ImageSpec::named(file, self.format.as_deref())
        });
        if let Some(snapshot) = &self.snapshot {
            let choice = open::parse_choice(snapshot).map_err(CommandError::new)?;
            service.settings.snapshot = Some(choice);
            service.settings.access = Access::Read;
        }
        service.settings.cache =
            CacheMode::parse(&self.cache).ok_or_else(|| invalid("a cache mode", &self.cache))?;
        service.settings.discard = discard_policy(&self.discard)
            .ok_or_else(|| invalid("a discard mode (unmap or ignore)", &self.discard))?;
        service.settings.detect_zeroes = open::detect_zeroes(&self.detect_zeroes)?;
        service.settings.alloc_policy = open::alloc_policy("alloc-policy", &self.alloc_policy)?;
        if let Some(aio) = &self.aio {
            service.settings.aio = open::parse_aio(aio)
                .ok_or_else(|| invalid("an I/O engine (threads or io_uring)", aio))?;
        }
        service.sandbox = sandbox::Mode::parse(&self.sandbox)
            .ok_or_else(|| invalid("a sandbox mode (auto, on or off)", &self.sandbox))?;
        if let Some(size) = &self.cache_size {
            service.settings.cache_bytes = options::size("cache-size", size)?;
        }
        if self.read_only {
            service.settings.access = Access::Read;
        }
        service.settings.sharing = open::sharing(self.force_share, service.settings.sharing);
        service.settings.policy = self.trust.backing_policy;
        service.offset = self.offset;
        if let Some(time) = self.poll {
            service.poll = Duration::from_micros(u64::from(time));
        }
        if let Some(path) = self.record {
            let file_bytes = options::size("record-limit", &self.record_limit)?;
            service.record = Some(Record { path, file_bytes });
        }
        if let Some(rate) = &self.compact_background {
            let rate = rate.strip_suffix("/s").unwrap_or(rate);
            let rate = match options::size("compact-background", rate)? {
                0 => return Err(CommandError::new("--compact-background must be above 0")),
                rate => rate,
            };
            service.compaction = Some(Background {
                rate,
                idle: Duration::from_millis(u64::from(self.compact_idle_ms)),
                pause: Duration::from_secs(u64::from(self.compact_pause)),
                defragment: self.compact_defragment,
            });
        }
        if self.verbose {
            service.verbosity = Verbosity::Everything;
        }
        service.pid_file = self.pid_file;
        Ok(service)
    }
}
