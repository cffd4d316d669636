//! [`Service`]: an image that is opened once, served by transports, and closed.
//!
//! SIGTERM, SIGINT and SIGHUP end a server in order: nothing new is accepted, what was started is
//! finished, the image is flushed and closed, and names of sockets are removed.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

use cowslip::disk::DiskPart;
use cowslip::error::system_words;
use cowslip::file::{ReadAs, ReadSet, Sharing};
use cowslip::image::{CacheStatistics, Format};
use cowslip::{Disk, Image};
use cowslip_cmdline::open::{self, Access, ImageSpec, OpenSettings, object, read_only};
use cowslip_cmdline::text_file;
use cowslip_console::error::CommandError;
use cowslip_console::output::{Program, is_called_as_qemu};
use cowslip_graph::LiveDisk;
use cowslip_nodes::KeptFiles;
use cowslip_queue::{Backend, Event, Queue, Signal, Signals};

use super::compaction::{Background, Compacting};
use super::detach::{self, Daemonize, Detached, Role};
use super::handover::{self, Desk, Door, ImageName, Taken, Terms};
use super::log::{Log, Severity, Verbosity};
use super::record::{Record, Recording};
use super::sandbox::{self, Rights};
use super::transport::{AtRest, Endpoint, LocalFuture, Names, Outcome, Served, Transport};

/// How long, and how often, the locks of a killed server are waited for.
pub(super) const RELEASE_MAX: Duration = Duration::from_millis(500);
pub(super) const RELEASE_PAUSE: Duration = Duration::from_millis(2);

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
    /// A trace of the requests.
    pub record: Option<Record>,
    /// Compactions while clients leave the disk alone, if there are to be any.
    pub compaction: Option<Background>,
    /// The sandbox.
    pub sandbox: sandbox::Mode,
    /// Whether it takes over from another server, and lets another one take over.
    pub handover: Handover,
}

/// Part in a handover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Handover {
    /// None.
    #[default]
    Never,
    /// A successor can take over.
    Offer,
    /// It takes over from a running server; a successor can take over then.
    TakeOver,
}

/// Longest poll before a sleep if nothing else is asked for: about the time in which a fast device
/// completes a request. A single processor is left to the clients.
pub fn default_poll() -> Duration {
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
            record: None,
            compaction: None,
            sandbox: sandbox::Mode::Auto,
            handover: Handover::Never,
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
        cowslip_queue::fix_buffers();
        let queue = Queue::new(Backend::Auto).map_err(|error| failed(&error))?;
        queue.poll_before_sleep(self.poll);
        let log = Log::new(program, self.verbosity);
        queue.block_on(self.serve(transports, log, (role, signals)))
    }

    /// Serves until a signal stops the server, all transports have ended by themselves, or another
    /// server has taken over.
    async fn serve(
        &self,
        transports: &[&dyn Transport],
        log: Log,
        (role, signals): (Role, Signals),
    ) -> Result<(), CommandError> {
        // From the beginning: a server whose image does not come is asked to end, too.
        let control = Rc::new(Control::default());
        watch_signals(signals, Rc::clone(&control), log.clone());
        let mut taken = self.take_over(transports).await?;
        let prepared = self.prepare((transports, role), &log, taken.as_mut()).await;
        let prepared = match (prepared, &taken) {
            (Err(error), Some(taken)) => {
                taken.fail(&error).await;
                return Err(error);
            }
            (prepared, _) => prepared?,
        };
        if let Some(taken) = taken {
            let is_alone = taken.finish(&prepared.image).await?;
            log.write(match is_alone {
                false => "took over from the running server",
                true => "took over from a server that ended meanwhile",
            });
        }
        let Prepared { pid_file, .. } = &prepared;
        if let Some(file) = pid_file {
            let text = format!("{}\n", std::process::id());
            text_file::write_later(file, &text).map_err(|error| failed(&error))?;
        }
        self.serve_prepared(prepared, log, control).await
    }

    /// The state of a running server that this one takes over from, if it does.
    async fn take_over(
        &self,
        transports: &[&dyn Transport],
    ) -> Result<Option<Taken>, CommandError> {
        if self.handover != Handover::TakeOver {
            return Ok(None);
        }
        let door = handover::door_path(transports).ok_or_else(|| {
            CommandError::new("--handover needs --vhost-user or --socket".to_string())
        })?;
        let terms = self.terms(transports)?;
        if object::has_secrets() {
            self.derive_keys().await?;
        }
        Taken::from(&door, &terms).await
    }

    /// Opens the image for reading beside the running server: its passphrases keep the keys, which
    /// take seconds to derive, and guests do not wait for that.
    async fn derive_keys(&self) -> Result<(), CommandError> {
        let settings = OpenSettings {
            access: Access::Read,
            sharing: Sharing::Forced,
            ..self.settings.clone()
        };
        let image = open::open_image(&self.spec, &settings).await;
        let image = image.map_err(|error| self.not_opened(error))?;
        let closed = image.close().await;
        closed.map_err(|error| self.not_opened(error.into()))
    }

    fn terms(&self, transports: &[&dyn Transport]) -> Result<Terms, CommandError> {
        let source = self.spec.resolve()?;
        let of_image = source.image.snapshot.as_ref();
        let snapshot = self.settings.snapshot.as_ref().or(of_image);
        Ok(Terms {
            image: ImageName::of(&source.filename),
            snapshot: snapshot.map(|choice| format!("{choice:?}")),
            offset: self.offset,
            is_read_only: self.settings.access != Access::Write,
            transports: transports.iter().filter_map(|it| it.terms()).collect(),
            shown: transports.iter().map(|it| it.shown()).collect(),
        })
    }

    /// Does all that comes before the first request: opens the image and the sockets, and closes
    /// the sandbox.
    async fn prepare(
        &self,
        (transports, role): (&[&dyn Transport], Role),
        log: &Log,
        taken: Option<&mut Taken>,
    ) -> Result<Prepared, CommandError> {
        let settings = OpenSettings {
            kept: (self.handover != Handover::Never).then(KeptFiles::default),
            handed_over: taken.as_ref().map_or_else(Vec::new, |taken| taken.claims()),
            ..self.settings.clone()
        };
        #[cfg(feature = "remote")]
        cowslip_remote::hold();
        // The image is opened first: a server that fails to lock it must not touch a socket.
        let mut follows = false;
        if taken.is_none() {
            for transport in transports {
                follows |= transport.has_predecessor(log)?;
            }
        }
        let image = Arc::new(self.open_after(&settings, follows).await?);
        // Looks at the image's name, where a file may be mounted soon that nobody serves yet.
        let terms = self.terms(transports)?;
        let resized = Event::new().map_err(|error| failed(&error))?;
        let mut served = self.served(&image, (resized.clone(), log.clone()), transports.len())?;
        let live = self.watched(&mut served);
        let recording = self.begin_recording(&served).await?;
        recorded(&mut served, recording.as_ref());
        let door = handover::door_path(transports).filter(|_| self.handover != Handover::Never);
        let has_successor = taken.is_some();
        let (endpoints, door) = match (taken, &door) {
            (Some(taken), Some(door)) => {
                taken.check(&image)?;
                let (endpoints, door) = taken.endpoints(transports, (&served, door)).await?;
                (endpoints, Some(door))
            }
            (_, door) => {
                let mut endpoints = Vec::new();
                for transport in transports {
                    endpoints.push(transport.listen(&served).await?);
                }
                (
                    endpoints,
                    door.as_ref().and_then(|path| open_door(path, log)),
                )
            }
        };
        let pid_file = self.pid_file.as_ref().map(|path| {
            let mut read = ReadSet::default();
            image.add_to(&mut read, ReadAs::Image);
            if has_successor {
                // Until the end of the handover it is the other server's.
                return text_file::open_for_later(path, 0o600, "create", &read).map(Some);
            }
            let text = format!("{}\n", std::process::id());
            // Readable by its owner alone, as QEMU's.
            text_file::write(path, &text, 0o600, "create", &read).map(|()| None)
        });
        let pid_file = pid_file.transpose()?.flatten();
        let detached = Detached::prepare(role).map_err(|error| failed(&error))?;
        let desk = Desk::new(terms, log.clone(), &image).map_err(|error| failed(&error))?;
        // No client has been served so far, and every file that will be needed is open.
        self.confine((&endpoints, door.as_ref()), log)?;
        #[cfg(feature = "remote")]
        cowslip_remote::release();
        Ok(Prepared {
            image,
            endpoints,
            live,
            door,
            desk,
            detached,
            pid_file,
            recording,
            resized,
            settings: OpenSettings {
                handed_over: Vec::new(),
                ..settings
            },
        })
    }

    async fn serve_prepared(
        &self,
        prepared: Prepared,
        log: Log,
        control: Rc<Control>,
    ) -> Result<(), CommandError> {
        let Prepared {
            mut image,
            mut endpoints,
            mut live,
            door,
            desk,
            detached,
            recording,
            resized,
            settings,
            ..
        } = prepared;
        watch_size(resized.clone(), Rc::clone(&control));
        if let Some(door) = &door {
            desk.watch(door);
        }
        detached.report_ready().map_err(|error| failed(&error))?;
        let names = loop {
            control.serve(&image, &endpoints);
            let compacting = self.begin_compacting(&image, (live.take(), log.clone()));
            desk.serve(&image, endpoints.iter().map(|it| it.rester()).collect());
            let maintained = Arc::clone(&image);
            cowslip_queue::spawn(async move { maintained.maintain().await });
            let (names, resting) = outcomes(endpoints).await;
            if let Some(compacting) = compacting {
                compacting.end().await;
            }
            let Some(way) = door.as_ref().filter(|_| !resting.is_empty()) else {
                break (names, resting);
            };
            if control.stops() {
                break (names, resting);
            }
            if desk.hand_over(&resting, way).await {
                resting.into_iter().for_each(|endpoint| endpoint.leave());
                names.into_iter().flatten().for_each(|name| name.leave());
                if let Some(door) = door {
                    door.leave();
                }
                finish_recording(recording).await;
                return Ok(());
            }
            image = Arc::new(self.open(&settings).await?);
            let parts = (resized.clone(), log.clone());
            let mut served = self.served(&image, parts, resting.len())?;
            live = self.watched(&mut served);
            recorded(&mut served, recording.as_ref());
            endpoints = Vec::new();
            for endpoint in resting {
                endpoints.push(endpoint.go_on(&served).await?);
            }
        };
        desk.end();
        let closed = image.close().await;
        finish_recording(recording).await;
        drop((names, door));
        closed.map_err(|error| CommandError::new(format!("Could not close the image: {error}")))
    }

    /// Opens the image, after a server that may have been killed a moment ago: its ring keeps files
    /// and their locks until the system has ended it.
    async fn open_after(
        &self,
        settings: &OpenSettings,
        follows: bool,
    ) -> Result<Image, CommandError> {
        let begun = Instant::now();
        loop {
            let opened = self.open(settings).await;
            if opened.is_ok() || !follows || begun.elapsed() > RELEASE_MAX {
                return opened;
            }
            cowslip_queue::sleep(RELEASE_PAUSE).await;
        }
    }

    fn refused(&self, why: &str) -> CommandError {
        let filename = &self.spec.filename;
        match is_called_as_qemu() {
            true => CommandError::new(format!("Failed to blk_new_open '{filename}': {why}")),
            false => CommandError::opening(filename, why),
        }
    }

    fn not_opened(&self, error: CommandError) -> CommandError {
        match error.is_of_snapshot() {
            true => error,
            false => self.refused(&error.reason_not_to_open()),
        }
    }

    async fn open(&self, settings: &OpenSettings) -> Result<Image, CommandError> {
        let image = open::open_image(&self.spec, settings).await;
        let image = image.map_err(|error| self.not_opened(error))?;
        if self.settings.access != Access::Write {
            return Ok(image);
        }
        let source = self.spec.resolve()?;
        if source.common.read_only {
            return Err(self.refused(&read_only()));
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
        (resized, log): (Event, Log),
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
            filename: self.spec.resolve()?.filename,
            is_alone: transports == 1,
            poll: self.poll,
            resized,
            log,
        })
    }

    /// Has it be known when clients use the disk, if something waits until they do not.
    fn watched(&self, served: &mut Served) -> Option<Arc<LiveDisk>> {
        self.compaction?;
        let live = LiveDisk::new(served.disk.name(), Arc::clone(&served.disk));
        served.disk = live.clone();
        Some(live)
    }

    /// Begins compactions while clients leave the disk alone, if there are to be any.
    fn begin_compacting(
        &self,
        image: &Arc<Image>,
        (live, log): (Option<Arc<LiveDisk>>, Log),
    ) -> Option<Compacting> {
        let (background, live) = (self.compaction?, live?);
        Some(Compacting::begin(image, &live, (background, log)))
    }

    /// Begins the trace of the disk that clients see, if there is to be one.
    async fn begin_recording(&self, served: &Served) -> Result<Option<Recording>, CommandError> {
        let Some(record) = &self.record else {
            return Ok(None);
        };
        let mut read = ReadSet::default();
        served.image.add_to(&mut read, ReadAs::Image);
        let recording = record.begin(served.disk.as_ref(), &read, &served.log);
        recording.await.map(Some)
    }

    fn confine(
        &self,
        (endpoints, door): (&[Box<dyn Endpoint>], Option<&Door>),
        log: &Log,
    ) -> Result<(), CommandError> {
        let mut rights: Rights = endpoints.iter().map(|endpoint| endpoint.rights()).collect();
        let removed = door.map(|door| door.path().to_path_buf());
        rights.removed.extend(removed);
        #[cfg(feature = "remote")]
        if let Some(reach) = cowslip_remote::reach() {
            rights = [rights, reach.into()].into_iter().collect();
        }
        #[cfg(feature = "rbd")]
        if cowslip_rbd::is_in_use() {
            rights = [rights, Rights::of_ceph()].into_iter().collect();
        }
        let Some(report) = sandbox::enforce(self.sandbox, &rights)? else {
            return Ok(());
        };
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

/// Lets the trace note the requests to the disk that clients see.
fn recorded(served: &mut Served, recording: Option<&Recording>) {
    if let Some(recording) = recording {
        served.disk = recording.of(Arc::clone(&served.disk));
    }
}

async fn finish_recording(recording: Option<Recording>) {
    if let Some(recording) = recording {
        recording.finish().await;
    }
}

/// A server that can serve.
struct Prepared {
    image: Arc<Image>,
    endpoints: Vec<Box<dyn Endpoint>>,
    /// The disk that clients see, if it matters when they use it.
    live: Option<Arc<LiveDisk>>,
    door: Option<Door>,
    desk: Rc<Desk>,
    detached: Detached,
    /// The file for the process number, if that is still to be written.
    pid_file: Option<std::fs::File>,
    /// The trace of the requests.
    recording: Option<Recording>,
    /// Signalled when a transport has changed the size of the disk.
    resized: Event,
    /// Settings with which the image is opened again.
    settings: OpenSettings,
}

/// Opens the door for a successor. A server can do without.
fn open_door(path: &Path, log: &Log) -> Option<Door> {
    let opened = Door::open(path);
    if let Err(error) = &opened
        && log.reports(Severity::Failure)
    {
        let (path, why) = (path.display(), system_words(error));
        log.write(format_args!(
            "no handover will be possible: '{path}': {why}"
        ));
    }
    opened.ok()
}

/// Objects of a running server that signals and changes of the size are about.
#[derive(Default)]
struct Control {
    image: RefCell<Weak<Image>>,
    stoppers: RefCell<Vec<Box<dyn Fn()>>>,
    informers: RefCell<Vec<Box<dyn Fn()>>>,
    stops: Cell<bool>,
}

impl Control {
    /// Changes to another image and other endpoints, which are stopped at once if a signal came
    /// before.
    fn serve(&self, image: &Arc<Image>, endpoints: &[Box<dyn Endpoint>]) {
        *self.image.borrow_mut() = Arc::downgrade(image);
        *self.stoppers.borrow_mut() = endpoints.iter().map(|it| it.stopper()).collect();
        *self.informers.borrow_mut() = endpoints.iter().map(|it| it.informer()).collect();
        if self.stops() {
            self.stop();
        }
    }

    fn stops(&self) -> bool {
        self.stops.get()
    }

    fn stop(&self) {
        self.stops.set(true);
        self.stoppers.borrow().iter().for_each(|stop| stop());
    }
}

/// Reports statistics when a signal asks for them, and stops all endpoints at another one.
fn watch_signals(signals: Signals, control: Rc<Control>, log: Log) {
    cowslip_queue::spawn(async move {
        while let Ok(Signal::Report) = signals.asked().await {
            let image = control.image.borrow().upgrade();
            if let Some(image) = image {
                let cache = cache_report(&image.cache_statistics());
                log.write(serde_json::json!({ "cache": cache }));
            }
        }
        // If the signals cannot be waited for, ending early is better than never.
        cowslip_nodes::drivers::end_requests();
        control.stop();
    });
}

/// Informs the clients of all endpoints when one of them has changed the size of the disk.
fn watch_size(resized: Event, control: Rc<Control>) {
    cowslip_queue::spawn(async move {
        // An event of ours can always be waited for.
        while resized.wait().await.is_ok() {
            control
                .informers
                .borrow()
                .iter()
                .for_each(|inform| inform());
        }
    });
}

/// Serves over all endpoints until they have ended or have come to rest. Returns the names of the
/// first, and the others in their order.
async fn outcomes(endpoints: Vec<Box<dyn Endpoint>>) -> (Vec<Names>, Vec<Box<dyn AtRest>>) {
    let running = endpoints.into_iter().enumerate().map(|(index, endpoint)| {
        let serving = endpoint.serve_or_rest();
        let numbered: LocalFuture<'_, _> = Box::pin(async move { (index, serving.await) });
        numbered
    });
    let mut done = all(running.collect()).await;
    done.sort_by_key(|(index, _)| *index);
    let (mut names, mut resting) = (Vec::new(), Vec::new());
    for (_, outcome) in done {
        match outcome {
            Outcome::Ended(name) => names.push(name),
            Outcome::AtRest(endpoint) => resting.push(endpoint),
        }
    }
    (names, resting)
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
