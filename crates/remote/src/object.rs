//! [`Object`]: one version of a remote object, whose bytes are fetched with patience.
//!
//! A request is repeated until it has failed without any progress for as long as the settings say;
//! bytes that have arrived are kept. Each answer is compared with the version that was opened.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use cowslip_block::{Error, Result};
use futures_util::StreamExt;
use object_store::{GetOptions, GetRange, GetResult};

use crate::ending;
use crate::environment::Environment;
use crate::failure::{Failure, Remedy};
use crate::notice::{Notice, Notify};
use crate::options::StoreOptions;
use crate::store::{Location, locate};
use crate::url::ObjectUrl;
use crate::version::Version;

/// Treatment of a request that fails for as long as requests may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OnFailure {
    /// It is reported as an I/O error.
    #[default]
    Report,
    /// It waits until it succeeds, as a guest does that is stopped. A failure that waiting cannot
    /// mend is reported.
    Stop,
}

/// Patience with a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Time for which a request is repeated without progress.
    pub timeout: Duration,
    /// Treatment of a failure that lasts longer.
    pub on_failure: OnFailure,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            timeout: Duration::from_secs(60),
            on_failure: OnFailure::Report,
        }
    }
}

/// The first pause between two attempts; each one is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A wait of this length is reported, and then again after each such time.
const REPORTED_AFTER: Duration = Duration::from_secs(5);
/// Time for which a server is sought that cannot be reached when the file is opened: longer waits
/// would hide misspelt names.
const SOUGHT_AT_OPENING: Duration = Duration::from_secs(3);
/// Pauses between attempts to find out what a changed object is now are shorter: two seconds in
/// all.
const DESCRIBED_WITHIN: Duration = Duration::from_secs(1);
/// The longest object: one that says it is longer is not believed.
const LONGEST: u64 = 1 << 46;

/// The way to an object.
#[derive(Debug)]
pub(crate) struct Way {
    pub(crate) url: ObjectUrl,
    pub(crate) options: StoreOptions,
    pub(crate) environment: Environment,
    pub(crate) patience: Patience,
    pub(crate) notify: Notify,
}

/// The receiver of pieces that arrive.
pub(crate) trait Take: Send {
    /// Takes the bytes at an offset.
    fn take(&mut self, offset: u64, bytes: Bytes) -> impl Future<Output = ()> + Send;
}

/// An object in one version.
#[derive(Debug)]
pub(crate) struct Object {
    way: Way,
    location: Mutex<Location>,
    version: Version,
    /// The object was seen in another version: nothing is read any more.
    changed: Mutex<Option<String>>,
    abandoned: AtomicBool,
}

impl Object {
    /// Opens an object; returns it with its first bytes, `first` of them unless it is shorter.
    pub(crate) async fn open(way: Way, first: u64) -> Result<(Object, Bytes)> {
        let location = locate(&way.url, &way.options, &way.environment)?;
        let mut waiting = Waiting::new(&way, Moment::Opening);
        let (version, bytes) = loop {
            let described = ending::within(describe(&location, first)).await;
            match described.unwrap_or_else(Failure::of_ending) {
                Ok(described) => break described,
                Err(failure) => waiting.after(failure).await.map_err(Error::invalid)?,
            }
        };
        waiting.end();
        if version.bytes > LONGEST {
            return Err(Error::invalid(format!(
                "the server says that it has {} bytes; at most {LONGEST} are supported",
                version.bytes
            )));
        }
        let object = Object {
            way,
            location: Mutex::new(location),
            version,
            changed: Mutex::new(None),
            abandoned: AtomicBool::new(false),
        };
        Ok((object, bytes))
    }

    pub(crate) fn version(&self) -> &Version {
        &self.version
    }

    pub(crate) fn url(&self) -> &ObjectUrl {
        &self.way.url
    }

    pub(crate) fn notify(&self, notice: &Notice<'_>) {
        (self.way.notify.0)(&self.way.url, notice);
    }

    /// No one reads it any more: requests end.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }

    /// The error of all requests, once the object was seen in another version.
    pub(crate) fn change(&self) -> Option<String> {
        let changed = self.changed.lock();
        changed.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Fetches a range, and hands it over in pieces that begin at multiples of `unit`. Pieces that
    /// have been handed over are not fetched again.
    ///
    /// # Errors
    /// In words: the object has changed; the server fails for longer than requests may wait.
    pub(crate) async fn fetch(
        &self,
        range: Range<u64>,
        unit: u64,
        take: &mut impl Take,
    ) -> std::result::Result<(), String> {
        let mut at = range.start;
        let mut waiting = Waiting::new(&self.way, Moment::Reading);
        while at < range.end {
            if let Some(change) = self.change() {
                return Err(change);
            }
            let before = at;
            let outcome = ending::within(self.attempt((&mut at, range.end), unit, take)).await;
            let outcome = outcome.unwrap_or_else(Failure::of_ending);
            if at > before {
                waiting.end();
            }
            let Err(failure) = outcome else {
                continue;
            };
            if self.is_abandoned() {
                return Err("nobody reads it any more".to_string());
            }
            match failure.remedy {
                Remedy::Changed => return Err(self.report_change().await),
                Remedy::Credentials => self.renew(),
                Remedy::Wait | Remedy::Reach | Remedy::None => {}
            }
            waiting.after(failure).await?;
        }
        waiting.end();
        Ok(())
    }

    /// One request for what is left.
    async fn attempt(
        &self,
        (at, end): (&mut u64, u64),
        unit: u64,
        take: &mut impl Take,
    ) -> std::result::Result<(), Failure> {
        let location = self.location();
        let request = self.version.request(*at..end);
        let answer = location.store.get_opts(&location.path, request).await;
        let answer = answer.map_err(|error| Failure::of(&error))?;
        if !self.version.is_of(&answer.meta) {
            return Err(Failure::new("it has changed", Remedy::Changed));
        }
        if answer.range != (*at..end) {
            let why = format!(
                "a wrong answer: bytes {:?}, not {:?}",
                answer.range,
                *at..end
            );
            return Err(Failure::new(why, Remedy::Wait));
        }
        let mut stream = answer.into_stream();
        let mut piece = BytesMut::new();
        while let Some(arrived) = stream.next().await {
            let mut arrived = arrived.map_err(|error| Failure::of(&error))?;
            while !arrived.is_empty() {
                let piece_end = ((*at / unit + 1) * unit).min(end);
                if *at == end {
                    let why = "a wrong answer: more bytes than its range has";
                    return Err(Failure::new(why, Remedy::Wait));
                }
                let missing = (piece_end - *at) as usize - piece.len();
                let part = arrived.split_to(missing.min(arrived.len()));
                piece.extend_from_slice(&part);
                if part.len() == missing {
                    take.take(*at, piece.split().freeze()).await;
                    *at = piece_end;
                }
            }
        }
        match *at == end {
            true => Ok(()),
            false => Err(Failure::new("an answer that ended early", Remedy::Wait)),
        }
    }

    fn location(&self) -> Location {
        let location = self.location.lock();
        location.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads credentials once more. Where their files are out of reach, those that are known stay.
    fn renew(&self) {
        let renewed = locate(&self.way.url, &self.way.options, &self.way.environment);
        if let Ok(renewed) = renewed {
            let location = self.location.lock();
            *location.unwrap_or_else(PoisonError::into_inner) = renewed;
        }
    }

    /// The version that the object has now; failures that pass are waited for, but not for long.
    async fn describe_patiently(&self) -> std::result::Result<Version, Failure> {
        let mut pause = FIRST_PAUSE;
        loop {
            match describe(&self.location(), 1).await {
                Ok((now, _)) => return Ok(now),
                Err(failure) => {
                    let passes = matches!(failure.remedy, Remedy::Wait | Remedy::Reach);
                    let is_over = !passes || pause >= DESCRIBED_WITHIN;
                    if is_over || !ending::pause(pause).await {
                        return Err(failure);
                    }
                    pause *= 2;
                }
            }
        }
    }

    /// Finds out what the object is now, and refuses all further requests.
    async fn report_change(&self) -> String {
        let now = match self.describe_patiently().await {
            Ok(now) if now != self.version => now.to_string(),
            Ok(_) => "the server gives both versions".to_string(),
            Err(failure) => format!("its version is unknown ({failure})"),
        };
        let why = format!(
            "'{}' has changed since it was opened: then {}; now {now}",
            self.way.url, self.version
        );
        let mut changed = self.changed.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = changed.is_none();
        let why = changed.get_or_insert(why).clone();
        drop(changed);
        if is_first {
            let then = &self.version;
            self.notify(&Notice::Changed { then, now: &now });
        }
        why
    }
}

/// The version of an object, and its first bytes.
async fn describe(
    location: &Location,
    first: u64,
) -> std::result::Result<(Version, Bytes), Failure> {
    let request = GetOptions {
        range: Some(GetRange::Bounded(0..first)),
        ..GetOptions::default()
    };
    let answer = location.store.get_opts(&location.path, request).await;
    match answer {
        Ok(answer) => beginning(answer, first).await,
        Err(error) => {
            let failure = Failure::of(&error);
            // An empty object has no first byte (RFC 9110, section 15.5.17).
            if failure.why.contains("416") {
                let head = GetOptions {
                    head: true,
                    ..GetOptions::default()
                };
                let meta = location.store.get_opts(&location.path, head).await;
                let meta = meta.map_err(|error| Failure::of(&error))?.meta;
                if meta.size == 0 {
                    return Ok((Version::of(&meta), Bytes::new()));
                }
            }
            Err(failure)
        }
    }
}

async fn beginning(
    answer: GetResult,
    first: u64,
) -> std::result::Result<(Version, Bytes), Failure> {
    let version = Version::of(&answer.meta);
    let expected = version.bytes.min(first);
    let mut stream = answer.into_stream();
    let mut bytes = BytesMut::new();
    while let Some(arrived) = stream.next().await {
        bytes.extend_from_slice(&arrived.map_err(|error| Failure::of(&error))?);
        if bytes.len() as u64 > expected {
            break;
        }
    }
    match bytes.len() as u64 == expected {
        true => Ok((version, bytes.freeze())),
        false => {
            let why = "a wrong answer: not the bytes of its range";
            Err(Failure::new(why, Remedy::Wait))
        }
    }
}

/// The occasion of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    Opening,
    Reading,
}

/// A request that fails for the moment.
struct Waiting<'a> {
    way: &'a Way,
    moment: Moment,
    since: Option<Instant>,
    reported: Duration,
    pause: Duration,
}

impl<'a> Waiting<'a> {
    fn new(way: &'a Way, moment: Moment) -> Waiting<'a> {
        Waiting {
            way,
            moment,
            since: None,
            reported: Duration::ZERO,
            pause: FIRST_PAUSE,
        }
    }

    /// There is progress.
    fn end(&mut self) {
        if self.reported > Duration::ZERO
            && let Some(since) = self.since
        {
            let waited = since.elapsed();
            (self.way.notify.0)(&self.way.url, &Notice::Recovered { waited });
        }
        *self = Waiting::new(self.way, self.moment);
    }

    /// Waits for the time of the next attempt.
    ///
    /// # Errors
    /// There is no other attempt.
    async fn after(&mut self, failure: Failure) -> std::result::Result<(), String> {
        let Patience {
            timeout,
            on_failure,
        } = self.way.patience;
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        let limit = match (self.moment, failure.remedy) {
            (_, Remedy::None | Remedy::Changed) => return Err(failure.why),
            (Moment::Opening, Remedy::Credentials) => return Err(failure.why),
            (Moment::Opening, Remedy::Reach) => Some(timeout.min(SOUGHT_AT_OPENING)),
            (Moment::Opening, Remedy::Wait) => Some(timeout),
            (Moment::Reading, _) => match on_failure {
                OnFailure::Report => Some(timeout),
                OnFailure::Stop => None,
            },
        };
        if limit.is_some_and(|limit| waited + self.pause > limit) {
            let why = match waited.as_secs() {
                0 => failure.why,
                seconds => format!("{}, for {seconds} s", failure.why),
            };
            return Err(why);
        }
        if waited >= self.reported + REPORTED_AFTER {
            self.reported = waited;
            let why = &failure.why;
            (self.way.notify.0)(&self.way.url, &Notice::Waiting { why, waited });
        }
        // Clients that failed together do not come back together.
        let spread = self.pause.mul_f64(chance() / 2.0);
        if !ending::pause(self.pause + spread).await {
            return Err(format!("{}, {}", failure.why, ending::WHY));
        }
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Ok(())
    }
}

/// A number between 0 and 1, another one for each process and moment.
fn chance() -> f64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let mixed = now.unwrap_or_default().subsec_nanos() ^ std::process::id().rotate_left(12);
    f64::from(mixed % 1000) / 1000.0
}
