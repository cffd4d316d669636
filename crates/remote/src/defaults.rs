//! [`Defaults`]: what holds for all remote files of a process that say nothing else.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use cowslip_block::{Error, Result, size};

use crate::cache::PATIENCE;
use crate::environment::Environment;
use crate::notice::Notify;
use crate::object::OnFailure;

/// Space of a cache whose size is not said, in bytes.
pub const CACHE_BYTES: u64 = 20 << 30;

/// Settings for all remote files of the process. Options of a file come before them, and they come
/// before the environment.
#[derive(Clone, Debug, Default)]
pub struct Defaults {
    /// The directory of the cache.
    pub cache: Option<PathBuf>,
    /// Space that the cache may take, in bytes.
    pub cache_bytes: Option<u64>,
    /// Time for which requests are repeated.
    pub timeout: Option<Duration>,
    /// Treatment of a failure that lasts longer.
    pub on_failure: Option<OnFailure>,
    /// Bytes a second at which the rest of each object is fetched into the cache.
    pub background_bytes: Option<u64>,
    /// A trace of an earlier start, which is fetched ahead of the guest.
    pub trace: Option<PathBuf>,
    /// The file for a trace of this one.
    pub record: Option<PathBuf>,
    /// Receiver of notices.
    pub notify: Notify,
}

static DEFAULTS: Mutex<Option<Defaults>> = Mutex::new(None);

impl Defaults {
    /// Makes them the settings of the process.
    pub fn set(self) {
        let mut defaults = DEFAULTS.lock().unwrap_or_else(PoisonError::into_inner);
        *defaults = Some(self);
    }

    /// The settings of the process, with those of the environment where they say nothing:
    /// `COWSLIP_CACHE`, `COWSLIP_CACHE_SIZE`, `COWSLIP_REMOTE_TIMEOUT`.
    ///
    /// # Errors
    /// A variable that cannot be.
    pub fn in_force(environment: &Environment) -> Result<Defaulted> {
        let set = {
            let defaults = DEFAULTS.lock().unwrap_or_else(PoisonError::into_inner);
            defaults.clone().unwrap_or_default()
        };
        let cache_bytes = match (set.cache_bytes, environment.get("COWSLIP_CACHE_SIZE")) {
            (Some(bytes), _) => bytes,
            (None, Some(text)) => size::parse(text).map_err(|_| {
                Error::invalid(format!("'COWSLIP_CACHE_SIZE' is no size: '{text}'"))
            })?,
            (None, None) => CACHE_BYTES,
        };
        let timeout = match (set.timeout, environment.get("COWSLIP_REMOTE_TIMEOUT")) {
            (Some(timeout), _) => Some(timeout),
            (None, Some(text)) => Some(text.parse().map(Duration::from_secs).map_err(|_| {
                let text = format!("'COWSLIP_REMOTE_TIMEOUT' is no number of seconds: '{text}'");
                Error::invalid(text)
            })?),
            (None, None) => None,
        };
        let cache = environment.get("COWSLIP_CACHE").map(PathBuf::from);
        Ok(Defaulted {
            cache: set.cache.or(cache),
            cache_bytes,
            timeout,
            on_failure: set.on_failure.unwrap_or_default(),
            background_bytes: set.background_bytes.unwrap_or(0),
            trace: set.trace,
            record: set.record,
            notify: set.notify,
            cache_patience: PATIENCE,
        })
    }
}

/// [`Defaults`] with a value for each setting.
#[derive(Clone, Debug)]
pub struct Defaulted {
    /// The directory of the cache, if there is one.
    pub cache: Option<PathBuf>,
    /// Space that the cache may take, in bytes.
    pub cache_bytes: u64,
    /// Time for which requests are repeated, if it is said.
    pub timeout: Option<Duration>,
    /// Treatment of a failure that lasts longer.
    pub on_failure: OnFailure,
    /// Bytes a second of the background; 0 is none.
    pub background_bytes: u64,
    /// A trace of an earlier start.
    pub trace: Option<PathBuf>,
    /// The file for a trace of this one.
    pub record: Option<PathBuf>,
    /// Receiver of notices.
    pub notify: Notify,
    /// Time for which a cache is waited for that others hold.
    pub(crate) cache_patience: Duration,
}
