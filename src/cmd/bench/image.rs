//! `bench FILE`: how fast an image takes requests, measured in process.
//!
//! It has qemu-img's command line and messages, so that one command line measures both engines. The
//! printed time is defined as qemu-img's: until the last request has completed. The time of the
//! close is reported separately (`--json`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use cowslip::Image;
use cowslip::file::Sharing;
use cowslip::file::host::Aio;
use cowslip::image::WriteStatistics;
use cowslip_load::{Direction, Figures, Load, Order, Pause, SERIES_STEP_MS, Verbosity};
use cowslip_queue::pending;
use serde_json::json;

use crate::error::CommandError;
use crate::open::{
    self, Access, CacheMode, ImageSpec, OneImage, OpenSettings, Trust, alloc_policy, block_on,
    open_image, parse_aio, sharing, warn_of_guessed_raw,
};
use crate::options::{bytes_within, number_within};
use crate::output::{self, Program};
use crate::size;
use cowslip_exports::cache_report;

/// qemu-img's limit of most numbers.
const NUMBER_MAX: u64 = i32::MAX as u64;

/// Command line of `bench FILE`.
#[derive(clap::Args)]
pub struct ImageArgs {
    /// Number of requests
    #[arg(short, long, value_name = "COUNT", default_value = "75000")]
    #[arg(allow_hyphen_values = true)]
    count: String,
    /// Requests in flight
    #[arg(short, long, value_name = "DEPTH", default_value = "64")]
    #[arg(allow_hyphen_values = true)]
    depth: String,
    /// I/O engine: threads, native or io_uring
    #[arg(short = 'i', long, value_name = "AIO")]
    aio: Option<String>,
    /// The same as --aio=native
    #[arg(short, long)]
    native: bool,
    /// Offset of the first request
    #[arg(short, long, value_name = "OFFSET", default_value = "0")]
    #[arg(allow_hyphen_values = true)]
    offset: String,
    /// Accepted for compatibility
    #[arg(short, long)]
    quiet: bool,
    /// Size of a request
    #[arg(short = 's', long, value_name = "SIZE", default_value = "4096")]
    #[arg(allow_hyphen_values = true)]
    buffer_size: String,
    /// Distance between the offsets of successive requests; 0 is the size of a request
    #[arg(short = 'S', long, value_name = "SIZE", default_value = "0")]
    #[arg(allow_hyphen_values = true)]
    step_size: String,
    /// Cache mode: none, writeback, writethrough, directsync or unsafe
    #[arg(short = 't', long, value_name = "CACHE", default_value = "writeback")]
    cache: String,
    /// Write instead of reading
    #[arg(short, long)]
    write: bool,
    /// Byte that is written
    #[arg(long, value_name = "BYTE", default_value = "0")]
    #[arg(allow_hyphen_values = true)]
    pattern: String,
    /// Flush after every N writes; 0 is never
    #[arg(long, value_name = "COUNT", default_value = "0")]
    #[arg(allow_hyphen_values = true)]
    flush_interval: String,
    /// Flush while requests are in flight, rather than when all have ended
    #[arg(long)]
    no_drain: bool,
    /// Print after each flush how many requests had completed before it
    #[arg(long, conflicts_with = "no_drain")]
    tell_flushes: bool,
    /// Open the image although another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Access each place once, in the random order of this seed, rather than in steps
    #[arg(long, value_name = "SEED")]
    random: Option<u64>,
    /// Number of places, spread evenly over the disk, to read before the measurement starts
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    warm_up: u64,
    /// Threads that the requests are spread over, each with --depth of them in flight
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
    /// How space is allocated: contiguous, sparse, or auto (as stored in the image)
    #[arg(long, default_value = "auto", value_name = "POLICY")]
    alloc_policy: String,
    #[command(flatten)]
    trust: Trust,
    /// Print the figures as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: OneImage,
}

/// Measures an image; the exit code.
pub fn run_image(args: &ImageArgs, program: &Program) -> u8 {
    program.exit_code(measure(args, program))
}

fn measure(args: &ImageArgs, program: &Program) -> Result<(), CommandError> {
    let load = args.load()?;
    let settings = args.settings()?;
    let spec = args.image.spec("bench", program)?;
    if load.flush_interval > 0 && load.direction == Direction::Read {
        let text = "--flush-interval is only available in write tests";
        return Err(CommandError::new(text));
    }
    if load.flush_interval > 0 && load.flush_interval < load.depth as u64 {
        let text = "Flush interval can't be smaller than depth";
        return Err(CommandError::new(text));
    }
    if load.flush_interval > 0 && args.threads > 1 {
        let text = "--flush-interval is only available with one thread";
        return Err(CommandError::new(text));
    }
    args.refuse_native_without_direct(&spec)?;
    // An image that is written has to be closed.
    output::outlasts_its_output();
    cowslip_queue::fix_buffers();
    block_on(settings.aio, async {
        let opening = Instant::now();
        let image = Arc::new(open_image(&spec, &settings).await?);
        if settings.access == Access::Write {
            warn_of_guessed_raw(&image, &spec)?;
        }
        let opened = opening.elapsed();
        if !args.json {
            output::note(&announcement(&load));
        }
        let work = async {
            args.warm_up(&load, &image).await?;
            let run = on_threads(&image, &load, (args.threads, settings.aio));
            close_after(&image, (&load, run), args.json.then_some(opened)).await
        };
        // Tasks that a server runs beside its requests; they end with the close.
        futures_util::future::join(work, image.maintain()).await.0
    })
}

/// Runs equal parts of a load on as many threads, each with a queue of its own.
async fn on_threads(
    image: &Arc<Image>,
    load: &Load,
    (threads, aio): (u16, Aio),
) -> cowslip::Result<Figures> {
    let count = u64::from(threads);
    let others: Vec<_> = (1..count)
        .map(|index| {
            let (image, part) = (Arc::clone(image), load.part(index, count));
            let (completer, outcome) = pending();
            std::thread::spawn(move || {
                let run = async { Ok(part.run(&image).await) };
                completer.complete(block_on(aio, run));
            });
            outcome
        })
        .collect();
    let mut outcome = load.part(0, count).run(image).await;
    for other in others {
        // All end before the image is closed.
        let other = other
            .await
            .map_err(|error| cowslip::Error::invalid(error.to_string()));
        outcome = outcome.and_then(|mut figures| {
            figures.add(&other.flatten()?);
            Ok(figures)
        });
    }
    outcome
}

/// Awaits a run and closes the image. Prints the figures as JSON if `opened`, the time that it took
/// to open the image, is given.
async fn close_after(
    image: &Image,
    (load, run): (&Load, impl Future<Output = cowslip::Result<Figures>>),
    opened: Option<Duration>,
) -> Result<(), CommandError> {
    let cache_before = image.cache_statistics();
    let outcome = run.await;
    let mut cache = image.cache_statistics();
    cache.hits -= cache_before.hits;
    cache.misses -= cache_before.misses;
    cache.evicted -= cache_before.evicted;
    if let (Ok(figures), None) = (&outcome, opened) {
        let seconds = figures.elapsed.as_secs_f64();
        output::print(&format!("Run completed in {seconds:.3} seconds.\n"));
    }
    let closing = Instant::now();
    let closed = image.close().await;
    let closing = closing.elapsed();
    let figures = outcome.map_err(|error| failed_request(&error))?;
    closed.map_err(|error| CommandError::new(format!("Could not close the image: {error}")))?;
    if let Some(opened) = opened {
        let mut json = report(load, &figures);
        json["open-seconds"] = json!(opened.as_secs_f64());
        json["close-seconds"] = json!(closing.as_secs_f64());
        json["cache"] = cache_report(&cache);
        output::print_json(&json);
    }
    Ok(())
}

fn failed_request(error: &cowslip::Error) -> CommandError {
    CommandError::new(format!("Failed request: {}", error.system_words()))
}

fn announcement(load: &Load) -> String {
    let direction = match load.direction {
        Direction::Read => "read",
        Direction::Write(_) => "write",
    };
    let order = match load.order {
        Order::Steps { start, step } => format!("starting at offset {start}, step size {step}"),
        Order::Random(seed) => format!("each place once, in the random order {seed}"),
    };
    let mut text = format!(
        "Sending {} {direction} requests, {} bytes each, {} in parallel ({order})\n",
        load.count, load.request_bytes, load.depth
    );
    if load.flush_interval > 0 {
        text += &format!("Sending flush every {} requests\n", load.flush_interval);
    }
    text
}

fn report(load: &Load, figures: &Figures) -> serde_json::Value {
    let seconds = figures.elapsed.as_secs_f64();
    let microseconds = |of_a_million| figures.latency.percentile(of_a_million).as_secs_f64() * 1e6;
    let mut json = json!({
        "requests": load.count,
        "request-bytes": load.request_bytes,
        "depth": load.depth,
        "seconds": seconds,
        "iops": load.count as f64 / seconds,
        "latency-us": {
            "p50": microseconds(500_000),
            "p99": microseconds(990_000),
            "p99.9": microseconds(999_000),
        },
        "flushes": figures.flushes,
        "series-step-ms": SERIES_STEP_MS,
        "series": figures.series,
    });
    if !figures.writes.is_empty() {
        let series = |found: fn(&WriteStatistics) -> u64| -> Vec<u64> {
            figures.writes.iter().map(found).collect()
        };
        json["series-allocated"] = json!({
            "cluster": series(|writes| writes.new_space),
            "subcluster": series(|writes| writes.filled),
            "nothing": series(|writes| writes.in_place),
        });
    }
    json
}

impl ImageArgs {
    async fn warm_up(&self, load: &Load, image: &Image) -> Result<(), CommandError> {
        /// Enough for any device; it is not measured.
        const DEPTH: usize = 32;
        if self.warm_up == 0 {
            return Ok(());
        }
        let request_bytes = load.request_bytes as u64;
        let step = image.size() / self.warm_up / request_bytes * request_bytes;
        let reads = Load {
            count: self.warm_up,
            depth: DEPTH,
            direction: Direction::Read,
            order: Order::Steps { start: 0, step },
            flush_interval: 0,
            verbosity: Verbosity::Nothing,
            ..*load
        };
        let outcome = reads.run(image).await;
        outcome.map(drop).map_err(|error| failed_request(&error))
    }

    fn load(&self) -> Result<Load, CommandError> {
        let number = |what: &str, text: &str, least| number_within(what, text, least..=NUMBER_MAX);
        let bytes = |what: &str, text: &str, least| bytes_within(what, text, least..=NUMBER_MAX);
        let request_bytes = bytes("buffer size", &self.buffer_size, 1)?;
        let start = bytes_within("offset", &self.offset, 0..=size::SIZE_MAX)?;
        let step = match bytes("step size", &self.step_size, 0)? {
            0 => request_bytes,
            step => step,
        };
        let pattern = number_within("pattern byte", &self.pattern, 0..=u64::from(u8::MAX))?;
        Ok(Load {
            count: number("request count", &self.count, 1)?,
            request_bytes: fitting(request_bytes),
            depth: fitting(number("queue depth", &self.depth, 1)?),
            direction: match self.write {
                true => Direction::Write(pattern.to_le_bytes()[0]),
                false => Direction::Read,
            },
            order: match self.random {
                Some(seed) => Order::Random(seed),
                None => Order::Steps { start, step },
            },
            flush_interval: number("flush interval", &self.flush_interval, 0)?,
            pause: match self.no_drain {
                true => Pause::None,
                false => Pause::Drain,
            },
            verbosity: match self.tell_flushes {
                true => Verbosity::Flushes,
                false => Verbosity::Nothing,
            },
            skipped: 0,
        })
    }

    fn settings(&self) -> Result<OpenSettings, CommandError> {
        let aio = match &self.aio {
            Some(name) => parse_aio(name)
                .ok_or_else(|| CommandError::new(format!("Invalid aio option: {name}")))?,
            None => open::settings().aio,
        };
        let cache =
            CacheMode::parse(&self.cache).ok_or_else(|| CommandError::new("Invalid cache mode"))?;
        Ok(OpenSettings {
            access: match self.write {
                true => Access::Write,
                false => Access::Read,
            },
            cache,
            aio,
            alloc_policy: alloc_policy("alloc-policy", &self.alloc_policy)?,
            sharing: sharing(self.force_share, Sharing::AsFormat),
            policy: self.trust.backing_policy,
            ..open::settings()
        })
    }

    /// The ring works without O_DIRECT too, but the peer's command line would not.
    fn refuse_native_without_direct(&self, spec: &ImageSpec) -> Result<(), CommandError> {
        let native = self.native || self.aio.as_deref() == Some("native");
        let cache = matches!(self.cache.as_str(), "none" | "off" | "directsync");
        if native && !spec.resolve()?.common.direct.unwrap_or(cache) {
            return Err(CommandError::new(format!(
                "Could not open '{}': aio=native was specified, but it requires cache.direct=on, \
                 which was not specified.",
                spec.filename
            )));
        }
        Ok(())
    }
}

/// Converts a number that was checked to be below 2^31.
fn fitting(number: u64) -> usize {
    usize::try_from(number).expect("the number was checked")
}
