//! Jobs on the command line: `-p` and `--rate-limit`, for every verb that takes its time.
//!
//! Progress is shown as qemu-img shows it, or as lines of JSON for programs; without either,
//! SIGUSR1 prints one line on standard error, as in qemu-img. Under our own name it also shows the
//! rate and the remaining time. Progress that cannot be written is dropped.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cowslip::job::{Attendant, Job, Moment, Progress};
use cowslip_console::error::CommandError;
use cowslip_console::options;
use cowslip_console::output;
use cowslip_console::size;
use serde_json::json;
use signal_hook::consts::SIGUSR1;

/// The longest wait for the pace before it is asked whether the job is cancelled.
const WAIT_MAX: Duration = Duration::from_millis(100);
/// Amount that may be moved at once before the pace is kept.
const BURST: Duration = Duration::from_millis(100);
/// No end is predicted before a job has run so long: the first pieces are slower or faster than
/// the others.
const PREDICTED_AFTER_SECONDS: f64 = 2.0;
/// Nor before this part of its work is done, unless it has run for [`SLOW_AFTER_SECONDS`].
const PREDICTED_AFTER_PART: f64 = 0.01;
/// A job whose first per cent takes longer than this has shown its rate by then.
const SLOW_AFTER_SECONDS: f64 = 30.0;
/// Width of "999 MiB/s, 100000 s left".
const BESIDE_WIDTH: usize = 24;
/// Width of "    (100.00/100%)".
const PERCENT_WIDTH: usize = 17;

/// Options of a verb that runs a job.
#[derive(clap::Args, Clone, Debug)]
pub struct JobArgs {
    /// Show progress; `json` writes lines of JSON to standard error instead
    #[arg(
        short = 'p',
        long,
        value_name = "FORMAT",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "human"
    )]
    progress: Option<String>,
    /// Maximum rate in bytes per second
    #[arg(long, value_name = "BYTES")]
    rate_limit: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Show {
    Nothing,
    Human,
    Json,
}

/// Shows a job's progress on the streams of the process, and keeps its pace.
struct Shown {
    show: Show,
    /// The last reported percentage.
    reported: Mutex<f64>,
    asked: Arc<AtomicBool>,
    pace: Option<Pace>,
    begun: Instant,
}

/// A number of bytes a second.
pub struct Pace {
    rate: u64,
    /// When the next bytes may be moved.
    next: Mutex<Instant>,
}

impl Pace {
    /// A pace of `rate` bytes a second, which is not 0.
    pub fn new(rate: u64) -> Pace {
        Pace {
            rate,
            next: Mutex::new(Instant::now()),
        }
    }

    /// Counts bytes that may be moved now, or returns how long to wait before asking again.
    pub fn wait(&self, bytes: u64) -> Option<Duration> {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let early = next.saturating_duration_since(now);
        if early > Duration::ZERO {
            return Some(early.min(WAIT_MAX));
        }
        let begun = (*next).max(now.checked_sub(BURST).unwrap_or(now));
        *next = begun + Duration::from_secs_f64(bytes as f64 / self.rate as f64);
        None
    }
}

/// How fast a job has been so far, and when it will end if that goes on.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Speed {
    bytes_per_second: f64,
    /// `None` while too little is done to predict it.
    seconds_left: Option<f64>,
}

impl Speed {
    /// `None` until something is known.
    fn of(progress: Progress, seconds: f64) -> Option<Speed> {
        if progress.done_bytes == 0 || seconds <= 0.0 {
            return None;
        }
        let bytes_per_second = progress.done_bytes as f64 / seconds;
        let left = progress.total_bytes.saturating_sub(progress.done_bytes);
        let part = progress.done_bytes as f64 / progress.total_bytes.max(1) as f64;
        let is_known = seconds >= PREDICTED_AFTER_SECONDS
            && (part >= PREDICTED_AFTER_PART || seconds >= SLOW_AFTER_SECONDS);
        Some(Speed {
            bytes_per_second,
            seconds_left: is_known.then_some(left as f64 / bytes_per_second),
        })
    }

    fn words(self) -> String {
        let rate = size::human(self.bytes_per_second as u64);
        match self.seconds_left {
            Some(seconds) => format!("{rate}/s, {:.0} s left", seconds.ceil()),
            None => format!("{rate}/s"),
        }
    }
}

/// Returns the text beside the percentage, always as wide, so that it covers the text before it.
fn beside(speed: Option<Speed>) -> String {
    match speed {
        _ if output::is_called_as_qemu() => String::new(),
        Some(speed) => format!("  {:<BESIDE_WIDTH$}", speed.words()),
        None => format!("  {:<BESIDE_WIDTH$}", ""),
    }
}

impl JobArgs {
    /// The job that these options ask for.
    ///
    /// # Errors
    /// An option's value.
    pub fn job(&self) -> Result<Job, CommandError> {
        let show = match self.progress.as_deref() {
            None => Show::Nothing,
            Some("human") => Show::Human,
            Some("json") => Show::Json,
            Some(other) => {
                let text = format!("--progress expects 'human' or 'json' not '{other}'");
                return Err(CommandError::new(text));
            }
        };
        let pace = match &self.rate_limit {
            None => None,
            Some(text) => match options::size("rate-limit", text)? {
                0 => return Err(CommandError::new("--rate-limit must be above 0")),
                rate => Some(Pace::new(rate)),
            },
        };
        let asked = Arc::new(AtomicBool::new(false));
        // Without it a signal ends the process, as it would end any other.
        drop(signal_hook::flag::register(SIGUSR1, Arc::clone(&asked)));
        output::outlasts_its_output();
        Ok(Job::attended(Shown {
            show,
            reported: Mutex::new(-1.0),
            asked,
            pace,
            begun: Instant::now(),
        }))
    }

    /// These options with another rate limit.
    pub fn with_rate(&self, rate_limit: Option<String>) -> JobArgs {
        JobArgs {
            rate_limit,
            ..self.clone()
        }
    }

    /// These options, without progress if `quiet`.
    pub fn unless(&self, quiet: bool) -> JobArgs {
        JobArgs {
            progress: self.progress.clone().filter(|_| !quiet),
            ..self.clone()
        }
    }

    /// Makes room for a line of text in the place of the progress.
    pub fn clear(&self) {
        let width = beside(None).len();
        if self.progress.as_deref() == Some("human") && width > 0 {
            output::note(&format!("{:1$}\r", "", PERCENT_WIDTH + width));
        }
    }

    /// Ends the line of the progress, whatever stands in it.
    pub fn end_line(&self) {
        if self.progress.as_deref() == Some("human") {
            output::note("\n");
        }
    }

    /// Ends what is shown of a job that has come to its end.
    pub fn end(&self) {
        self.clear();
        if self.progress.as_deref() == Some("human") {
            output::note("    (100.00/100%)\r\n");
        }
    }
}

impl Attendant for Shown {
    fn progress(&self, progress: Progress) {
        let percent = progress.done_bytes as f64 * 100.0 / progress.total_bytes.max(1) as f64;
        let speed = Speed::of(progress, self.begun.elapsed().as_secs_f64());
        if self.asked.swap(false, Ordering::Relaxed) {
            let line = format!("    ({percent:.2}/100%){}", beside(speed));
            output::print_error(&format!("{}\n", line.trim_end()));
        }
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        // As qemu-img: at most once for each per cent. What there is to do may become more.
        let is_last = progress.done_bytes == progress.total_bytes && *reported < 100.0;
        if (percent - *reported).abs() < 1.0 && !is_last {
            return;
        }
        *reported = percent;
        match self.show {
            Show::Nothing => {}
            Show::Human => {
                output::note(&format!("    ({percent:.2}/100%){}\r", beside(speed)));
            }
            Show::Json => {
                let line = json!({
                    "stage": progress.stage.name(),
                    "done": progress.done_bytes,
                    "total": progress.total_bytes,
                    "bytes-per-second": speed.map(|speed| speed.bytes_per_second),
                    "seconds-left": speed.and_then(|speed| speed.seconds_left),
                });
                // A closed standard error is no reason to stop the job.
                drop(writeln!(std::io::stderr(), "{line}"));
            }
        }
    }

    fn pace(&self, bytes: u64) -> Option<Moment> {
        let wait = self.pace.as_ref()?.wait(bytes)?;
        Some(Box::pin(cowslip_queue::blocking(move || {
            std::thread::sleep(wait);
        })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(progress: Option<&str>, rate_limit: Option<&str>) -> JobArgs {
        JobArgs {
            progress: progress.map(str::to_string),
            rate_limit: rate_limit.map(str::to_string),
        }
    }

    #[test]
    fn options_are_understood_or_refused() {
        assert!(args(None, Some("10M")).job().is_ok());
        assert!(args(Some("json"), None).job().is_ok());
        for (bad, why) in [
            (args(Some("xml"), None), "'human' or 'json'"),
            (args(None, Some("0")), "above 0"),
            (args(None, Some("fast")), "rate-limit"),
        ] {
            let error = bad.job().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn the_rate_predicts_the_end() {
        let progress = |done_bytes| Progress {
            stage: cowslip::job::Stage::Allocate,
            done_bytes,
            total_bytes: 30 << 20,
        };
        assert_eq!(Speed::of(progress(0), 1.0), None);
        let speed = Speed::of(progress(10 << 20), 2.0).unwrap();
        assert_eq!(speed.seconds_left, Some(4.0));
        assert_eq!(speed.words(), "5 MiB/s, 4 s left");
    }

    #[test]
    fn the_end_is_not_predicted_before_enough_is_done() {
        let left = |done_bytes, seconds| {
            let progress = Progress {
                stage: cowslip::job::Stage::Allocate,
                done_bytes,
                total_bytes: 1 << 30,
            };
            Speed::of(progress, seconds).unwrap().seconds_left
        };
        let per_cent = (1 << 30) / 100 + 1;
        assert_eq!(left(50 * per_cent, 0.5), None, "too early");
        assert_eq!(left(4096, 2.5), None, "too little: 7 days");
        assert!(left(per_cent, 2.5).is_some());
        assert!(left(4096, 31.0).is_some(), "slow, and known to be");
    }

    #[test]
    fn the_pace_is_the_rate() {
        let shown = Shown {
            show: Show::Nothing,
            reported: Mutex::new(0.0),
            asked: Arc::default(),
            pace: Some(Pace::new(1 << 20)),
            begun: Instant::now(),
        };
        assert!(shown.pace(1 << 20).is_none());
        // A second's worth is on its way: the next piece has to wait.
        assert!(shown.pace(1).is_some());
        let next = *shown.pace.as_ref().unwrap().next.lock().unwrap();
        assert!(next.saturating_duration_since(Instant::now()) > Duration::from_millis(500));
    }
}
