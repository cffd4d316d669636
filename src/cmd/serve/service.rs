//! [`Service`]: an image that is opened once, served by transports, and closed.
//!
//! SIGTERM, SIGINT and SIGHUP end a server in order: nothing new is accepted, what was started is
//! finished, the image is flushed and closed, and names of sockets are removed.

use std::future::poll_fn;
use std::path::PathBuf;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use cowslip::disk::DiskPart;
use cowslip::error::system_words;
use cowslip::file::{ReadAs, ReadSet, Sharing};
use cowslip::image::{CacheStatistics, Format};
use cowslip::{Disk, Image};
use cowslip_queue::{Backend, Event, Queue, Signal, Signals};

use super::detach::{self, Daemonize, Detached, Role};
use super::sandbox::{self, Rights};
use super::transport::{Endpoint, LocalFuture, Log, Served, Severity, Transport, Verbosity};
use crate::error::CommandError;
use crate::open::{self, Access, ImageSpec, OpenSettings, read_only};
use crate::output::{Program, is_called_as_qemu};
use crate::text_file;

/// How long, and how often, the locks of a killed server are waited for.
const RELEASE_MAX: Duration = Duration::from_millis(500);
const RELEASE_PAUSE: Duration = Duration::from_millis(2);

/// An image to serve, and options of the server that no transport needs to know.
#[derive(Clone, Debug)]
pub struct Service {
    /// The image.
    pub spec: ImageSpec,
    /// Settings with which it is opened.
    pub settings: OpenSettings,
    /// The first byte of the image that clients see.
    pub offset: u64,
    /// Events that are reported.
    pub verbosity: Verbosity,
    /// Whether the server leaves the terminal.
    pub daemonize: Daemonize,
    /// Longest time for which threads poll before they sleep.
    pub poll: Duration,
    /// A file for the process number.
    pub pid_file: Option<PathBuf>,
    /// The sandbox.
    pub sandbox: sandbox::Mode,
}

/// Longest poll before a sleep if nothing else is asked for: about the time in which a fast device
/// completes a request. A single processor is left to the clients.
fn default_poll() -> Duration {
    match std::thread::available_parallelism() {
        Ok(processors) if processors.get() > 1 => Duration::from_micros(100),
        _ => Duration::ZERO,
    }
}

impl Service {
    /// A service of this image with qemu-nbd's defaults.
    pub fn of(spec: ImageSpec) -> Service {
        Service {
            spec,
            settings: OpenSettings {
                access: Access::Write,
                // The size is announced to clients once.
                sharing: Sharing::FixedLength,
                ..open::settings()
            },
            offset: 0,
            verbosity: Verbosity::Errors,
            daemonize: Daemonize::No,
            poll: default_poll(),
            pid_file: None,
            sandbox: sandbox::Mode::Auto,
        }
    }

    /// Lets clients change the size.
    pub fn let_grow(&mut self) {
        if self.settings.sharing == Sharing::FixedLength {
            self.settings.sharing = open::settings().sharing;
        }
    }

    /// Serves the image over `transports` here, or in another process that this one waits for until
    /// it is ready. Returns the exit code.
    pub fn start(&self, transports: &[&dyn Transport], program: &Program) -> u8 {
        match detach::role(self.daemonize) {
            Role::Parent => detach::start_server(program),
            role => program.exit_code(self.run(transports, program, role)),
        }
    }

    fn run(
        &self,
        transports: &[&dyn Transport],
        program: &Program,
        role: Role,
    ) -> Result<(), CommandError> {
        // Before any thread exists, so that none is ended by the signals.
        let signals = Signals::take_over().map_err(|error| failed(&error))?;
        let queue = Queue::new(Backend::Auto).map_err(|error| failed(&error))?;
        queue.poll_before_sleep(self.poll);
        let log = Log::new(program, self.verbosity);
        queue.block_on(self.serve(transports, log, (role, signals)))
    }

    /// Serves until a signal stops the server, or all transports have ended by themselves.
    async fn serve(
        &self,
        transports: &[&dyn Transport],
        log: Log,
        (role, signals): (Role, Signals),
    ) -> Result<(), CommandError> {
        // The image is opened first: a server that fails to lock it must not touch a socket.
        let mut follows = false;
        for transport in transports {
            follows |= transport.has_predecessor(&log)?;
        }
        let image = Arc::new(self.open_after(follows).await?);
        let served = self.served(&image, log.clone(), transports.len())?;
        let mut endpoints = Vec::new();
        for transport in transports {
            endpoints.push(transport.listen(&served).await?);
        }
        if let Some(path) = &self.pid_file {
            let mut read = ReadSet::default();
            image.add_to(&mut read, ReadAs::Image);
            let text = format!("{}\n", std::process::id());
            // Readable by its owner alone, as QEMU's.
            text_file::write(path, &text, 0o600, "create", &read)?;
        }
        let detached = Detached::prepare(role).map_err(|error| failed(&error))?;
        // No client has been served so far, and every file that will be needed is open.
        self.confine(&endpoints, &log)?;
        let stoppers = endpoints.iter().map(|endpoint| endpoint.stopper());
        watch_signals(signals, (&image, log), stoppers.collect());
        let informers = endpoints.iter().map(|endpoint| endpoint.informer());
        watch_size(served.resized.clone(), informers.collect());
        let maintained = Arc::clone(&image);
        cowslip_queue::spawn(async move { maintained.maintain().await });
        detached.report_ready().map_err(|error| failed(&error))?;
        let names = all(endpoints.into_iter().map(Endpoint::serve).collect()).await;
        let closed = image.close().await;
        drop(names);
        closed.map_err(|error| CommandError::new(format!("Could not close the image: {error}")))
    }

    /// Opens the image, after a server that may have been killed a moment ago: its ring keeps files
    /// and their locks until the system has ended it.
    async fn open_after(&self, follows: bool) -> Result<Image, CommandError> {
        let begun = Instant::now();
        loop {
            let opened = self.open().await;
            if opened.is_ok() || !follows || begun.elapsed() > RELEASE_MAX {
                return opened;
            }
            cowslip_queue::sleep(RELEASE_PAUSE).await;
        }
    }

    async fn open(&self) -> Result<Image, CommandError> {
        let spec = &self.spec;
        let failed = |why: &str| match is_called_as_qemu() {
            true => CommandError::new(format!("Failed to blk_new_open '{}': {why}", spec.filename)),
            false => CommandError::opening(&spec.filename, why),
        };
        let image = open::open_image(spec, &self.settings).await;
        let image = image.map_err(|error| {
            if error.is_of_snapshot() {
                return error;
            }
            failed(&error.reason_not_to_open())
        })?;
        if self.settings.access != Access::Write {
            return Ok(image);
        }
        let source = spec.resolve()?;
        if source.common.read_only {
            return Err(failed(&read_only()));
        }
        if source.format.is_none() && image.layers()[0].format == Format::Raw {
            eprint!("{}", open::guessed_raw(&source.filename));
        }
        Ok(image)
    }

    /// The disk that clients see.
    ///
    /// # Errors
    /// The offset lies beyond the image's end.
    fn served(
        &self,
        image: &Arc<Image>,
        log: Log,
        transports: usize,
    ) -> Result<Served, CommandError> {
        let size = image.size();
        if let Err(offset) = i64::try_from(self.offset).map_err(|_| self.offset as i64) {
            return Err(CommandError::new(format!(
                "Value '{offset}' is out of range for parameter 'offset'"
            )));
        }
        if self.offset > size {
            return Err(CommandError::new(format!(
                "Offset ({}) cannot be greater than size of the containing file ({size})",
                self.offset
            )));
        }
        let whole: Arc<dyn Disk> = image.clone();
        let disk: Arc<dyn Disk> = match self.offset {
            0 => whole,
            offset => Arc::new(DiskPart::after(whole, offset)),
        };
        Ok(Served {
            disk,
            image: Arc::clone(image),
            offset: self.offset,
            filename: self.spec.filename.clone(),
            is_alone: transports == 1,
            poll: self.poll,
            resized: Event::new().map_err(|error| failed(&error))?,
            log,
        })
    }

    fn confine(&self, endpoints: &[Box<dyn Endpoint>], log: &Log) -> Result<(), CommandError> {
        if self.sandbox == sandbox::Mode::Off {
            return Ok(());
        }
        let rights: Rights = endpoints.iter().map(|endpoint| endpoint.rights()).collect();
        let report = sandbox::enter(&rights);
        if self.sandbox == sandbox::Mode::On && !report.is_whole() {
            return Err(CommandError::new(format!(
                "--sandbox=on demands the whole sandbox, and a part of it is not in force \
                 ({report}); --sandbox=auto serves with what there is"
            )));
        }
        // The lines that scripts compare have no place for it.
        if log.reports(Severity::Usual) || !report.is_whole() {
            log.write(report);
        }
        Ok(())
    }
}

fn failed(error: &std::io::Error) -> CommandError {
    CommandError::new(system_words(error))
}

/// Reports statistics when a signal asks for them, and stops all endpoints at another one.
fn watch_signals(signals: Signals, (image, log): (&Arc<Image>, Log), stop: Vec<Box<dyn Fn()>>) {
    let watched = Arc::downgrade(image);
    cowslip_queue::spawn(async move {
        while let (Ok(Signal::Report), Some(image)) = (signals.asked().await, watched.upgrade()) {
            let cache = cache_report(&image.cache_statistics());
            log.write(serde_json::json!({ "cache": cache }));
        }
        // If the signals cannot be waited for, ending early is better than never.
        stop.iter().for_each(|stop| stop());
    });
}

/// Informs the clients of all endpoints when one of them has changed the size of the disk.
fn watch_size(resized: Event, inform: Vec<Box<dyn Fn()>>) {
    cowslip_queue::spawn(async move {
        // An event of ours can always be waited for.
        while resized.wait().await.is_ok() {
            inform.iter().for_each(|inform| inform());
        }
    });
}

/// Runs all futures together, and returns their outputs in the order of completion.
async fn all<T>(mut running: Vec<LocalFuture<'_, T>>) -> Vec<T> {
    let mut done = Vec::new();
    poll_fn(|context| {
        running.retain_mut(|future| match future.as_mut().poll(context) {
            Poll::Ready(output) => {
                done.push(output);
                false
            }
            Poll::Pending => true,
        });
        match running.is_empty() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
    done
}

/// Returns the statistics of the metadata caches of a chain, for programs.
pub fn cache_report(cache: &CacheStatistics) -> serde_json::Value {
    serde_json::json!({
        "budget-bytes": cache.budget_bytes,
        "used-bytes": cache.used_bytes,
        "slices": cache.slices,
        "packed-slices": cache.packed,
        "hits": cache.hits,
        "misses": cache.misses,
        "evicted": cache.evicted,
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::sync::Mutex;

    use cowslip::file::Durability;
    use cowslip::{Buf, BufMut};

    use super::super::transport::Names;
    use super::*;

    /// A transport with one client, which waits for another one to leave, writes its number into a
    /// sector of its own, and leaves.
    struct Toy {
        number: u8,
        waits_for: Option<u8>,
        /// Numbers of the clients that have left.
        left: Arc<Mutex<Vec<u8>>>,
    }

    struct ToyEndpoint {
        number: u8,
        waits_for: Option<u8>,
        left: Arc<Mutex<Vec<u8>>>,
        disk: Arc<dyn Disk>,
    }

    impl Transport for Toy {
        fn listen<'a>(
            &'a self,
            served: &'a Served,
        ) -> LocalFuture<'a, Result<Box<dyn Endpoint>, CommandError>> {
            let endpoint: Box<dyn Endpoint> = Box::new(ToyEndpoint {
                number: self.number,
                waits_for: self.waits_for,
                left: Arc::clone(&self.left),
                disk: Arc::clone(&served.disk),
            });
            Box::pin(std::future::ready(Ok(endpoint)))
        }
    }

    impl Endpoint for ToyEndpoint {
        fn rights(&self) -> Rights {
            Rights::default()
        }

        fn stopper(&self) -> Box<dyn Fn()> {
            Box::new(|| ())
        }

        fn serve(self: Box<Self>) -> LocalFuture<'static, Names> {
            Box::pin(async move {
                let is_due = |other| self.left.lock().unwrap().contains(&other);
                while !self.waits_for.is_none_or(is_due) {
                    cowslip_queue::sleep(Duration::from_millis(1)).await;
                }
                let sector = Buf::copy_of(&[self.number; 512]);
                let at = u64::from(self.number) * 512;
                let written = self.disk.write(at, sector.into(), Durability::Cached);
                written.await.unwrap();
                self.left.lock().unwrap().push(self.number);
                None
            })
        }
    }

    #[test]
    fn transports_share_an_image_that_is_closed_when_all_have_ended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.raw");
        std::fs::write(&path, [0; 2048]).unwrap();
        let spec = ImageSpec::named(path.to_str().unwrap(), Some("raw"));
        let service = Service {
            offset: 512,
            sandbox: sandbox::Mode::Off,
            ..Service::of(spec.clone())
        };
        let left = Arc::default();
        let toy = |number, waits_for| Toy {
            number,
            waits_for,
            left: Arc::clone(&left),
        };
        let (one, two) = (toy(1, Some(2)), toy(2, None));
        let program = Program::called(&OsString::from("cowslip"));
        service.run(&[&one, &two], &program, Role::Only).unwrap();
        assert_eq!(*left.lock().unwrap(), [2, 1], "they are served together");
        let settings = OpenSettings {
            access: Access::Write,
            ..open::settings()
        };
        let queue = Queue::new(Backend::Auto).unwrap();
        let read = queue.block_on(async {
            let image = open::open_image(&spec, &settings).await.unwrap();
            let read = image.read(0, BufMut::zeroed(2048)).await.unwrap();
            image.close().await.unwrap();
            read.to_vec()
        });
        // The first sector is not served.
        assert_eq!(read, [[0; 512], [0; 512], [1; 512], [2; 512]].concat());
    }

    #[test]
    fn futures_run_together_to_their_ends() {
        let queue = Queue::new(Backend::Auto).unwrap();
        let (completer, done) = cowslip_queue::pending();
        let waits: LocalFuture<'_, u8> = Box::pin(done);
        let completes: LocalFuture<'_, u8> = Box::pin(async move {
            completer.complete(1);
            2
        });
        assert_eq!(queue.block_on(all(vec![waits, completes])), [2, 1]);
        assert!(queue.block_on(all::<u8>(Vec::new())).is_empty());
    }
}
