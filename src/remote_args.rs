//! Options about images on web servers and in object stores, the same for all verbs.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cowslip_remote::{Defaults, Notify, OnFailure};

use crate::error::CommandError;
use crate::options;
use crate::output;

/// Options of the line for all images at URLs that it names.
#[derive(clap::Args, Default)]
#[command(next_help_heading = "Images at http, https, s3, gs and az URLs")]
pub struct RemoteArgs {
    /// Keep what is read of them in this directory, for all processes of this host; if not given,
    /// COWSLIP_CACHE names it, or nothing is kept
    #[arg(long, value_name = "DIR", global = true)]
    remote_cache: Option<PathBuf>,
    /// Space that this may take; if not given, COWSLIP_CACHE_SIZE or 20G
    #[arg(long, value_name = "SIZE", global = true)]
    remote_cache_size: Option<String>,
    /// Repeat failed requests for this many seconds; if not given, COWSLIP_REMOTE_TIMEOUT or 60
    #[arg(long, value_name = "SECONDS", global = true)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    remote_timeout: Option<u32>,
    /// The treatment of a longer failure: report (an I/O error) or stop (wait until the server is
    /// back)
    #[arg(long, value_name = "POLICY", global = true, value_parser = on_failure)]
    remote_on_failure: Option<OnFailure>,
    /// Fetch what this trace of an earlier start says, in its order, into the cache
    #[arg(long, value_name = "FILE", global = true)]
    remote_trace: Option<PathBuf>,
    /// Record a trace of what is read of them, for --remote-trace
    #[arg(long, value_name = "FILE", global = true)]
    remote_record: Option<PathBuf>,
    /// Cache the rest of each image at this many bytes a second while it is not being read
    #[arg(long, value_name = "RATE", global = true)]
    remote_background: Option<String>,
}

fn on_failure(text: &str) -> Result<OnFailure, String> {
    match text {
        "report" => Ok(OnFailure::Report),
        "stop" => Ok(OnFailure::Stop),
        _ => Err("a policy is report or stop".to_string()),
    }
}

impl RemoteArgs {
    /// Makes them the settings of the process.
    ///
    /// # Errors
    /// A value that is no size.
    pub fn set(self) -> Result<(), CommandError> {
        let (trace, record) = (self.remote_trace, self.remote_record);
        let size = |name: &str, text: Option<String>| {
            text.map(|text| options::size(name, &text)).transpose()
        };
        let defaults = Defaults {
            cache: self.remote_cache,
            cache_bytes: size("remote-cache-size", self.remote_cache_size)?,
            timeout: self
                .remote_timeout
                .map(|seconds| Duration::from_secs(seconds.into())),
            on_failure: self.remote_on_failure,
            background_bytes: size("remote-background", self.remote_background)?,
            trace,
            record,
            notify: Notify(Arc::new(|url, notice| {
                output::warn(&format!("{url}: {notice}"))
            })),
        };
        defaults.set();
        Ok(())
    }
}
