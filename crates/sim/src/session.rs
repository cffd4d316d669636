//! The requests of a session: each is performed on the subject and recorded in the model.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use cowslip::errno::ENOSPC;
use cowslip::image::{DetectZeroes, Durability, Space, WritePolicy, ZeroOptions};
use cowslip::job::{Attendant, Progress, Stage};
use cowslip::qcow2::compact::CompactOptions;
use cowslip::qcow2::create::Preallocation;
use cowslip::{Error, Job};
use cowslip_queue::BufMut;

use crate::bitmaps::{self, Bitmaps};
use crate::config::{Config, Ending, PREALLOCATED_BYTES_MAX, Room, Round};
use crate::disk::SimDisk;
use crate::model::{self, Model, Outcome, Until, Violation, WriteId, ZERO};
use crate::places;
use crate::remembered::{Snapshots, What};
use crate::rng::Rng;
use crate::subject::Subject;
use crate::trace::{About, Line, Trace};
use crate::workload::{Request, Verb, Way};

/// State that the tasks of a session share.
pub(crate) struct Session {
    pub model: RefCell<Model>,
    pub disk: SimDisk,
    pub trace: Trace,
    pub failure: RefCell<Option<String>>,
    pub answered: Cell<u64>,
    pub snapshots: RefCell<Snapshots>,
    pub bitmaps: RefCell<Bitmaps>,
    pub resizing: Cell<Resizing>,
    /// Whether no further request is made, since it is unknown whether the last one has changed the
    /// disk.
    pub is_over: Cell<bool>,
    /// Jobs of the compactions under way.
    compactions: RefCell<BTreeMap<WriteId, Job>>,
    /// Each is to be cut short; the number selects where.
    cut_short: Option<u64>,
    /// Issues and completions until the power fails, from the moment on at which one changes
    /// something.
    cut_later: Cell<Option<u64>>,
    /// The image's version.
    version: u32,
    /// The device that it is on may have no space left.
    may_be_full: bool,
    /// A device that has enough space for what is written has not enough for all of the disk.
    may_preallocate: bool,
    write_policy: WritePolicy,
    discards: bool,
    detect_zeroes: DetectZeroes,
    /// The power is to fail, or the process to die.
    ends_early: bool,
}

/// The work of a compaction that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compacting {
    /// It checks and surveys.
    Looks,
    /// It moves clusters, or gives space back.
    Changes,
}

/// Whether the disk is changing its size; a guest keeps away from it meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resizing {
    Yes,
    /// Snapshots are changed; a guest keeps away likewise.
    Snapshots,
    No,
}

impl Session {
    pub fn new(
        (model, snapshots, bitmaps): (Model, Snapshots, Bitmaps),
        (disk, trace): (&SimDisk, &Trace),
        (round, config): (&Round, &Config),
    ) -> Session {
        Session {
            model: RefCell::new(model),
            disk: disk.clone(),
            trace: trace.clone(),
            failure: RefCell::new(None),
            answered: Cell::new(0),
            snapshots: RefCell::new(snapshots),
            bitmaps: RefCell::new(bitmaps),
            resizing: Cell::new(Resizing::No),
            is_over: Cell::new(false),
            compactions: RefCell::default(),
            cut_short: round.cut_short,
            cut_later: Cell::new(None),
            version: config.layout.version,
            may_be_full: config.room == Room::Scarce,
            may_preallocate: config.room != Room::Fixed,
            write_policy: round.write_policy,
            ends_early: round.ending != Ending::Close,
            detect_zeroes: round.detect_zeroes,
            discards: round.discard == cowslip::image::DiscardPolicy::Unmap,
        }
    }

    /// Has the power fail soon, if that was to be when a compaction changes something.
    pub fn cut_short(&self) {
        let is_due = self.compacting() == Some(Compacting::Changes);
        if let (true, Some(events)) = (is_due, self.cut_later.get()) {
            self.cut_later.set(None);
            self.disk.fail_power_after(events);
        }
    }

    /// The work of the compactions under way, if there are any.
    pub fn compacting(&self) -> Option<Compacting> {
        let jobs = self.compactions.borrow();
        let changes = |job: &Job| job.progress().stage != Stage::Begin;
        match jobs.values().any(changes) {
            true => Some(Compacting::Changes),
            false => (!jobs.is_empty()).then_some(Compacting::Looks),
        }
    }

    /// Whether a write of zeroes goes down as zeroes, so that the guest may as well write the
    /// bytes.
    fn detects_zeroes(&self, may_unmap: bool) -> bool {
        match self.detect_zeroes {
            DetectZeroes::Off => false,
            DetectZeroes::On => !may_unmap,
            DetectZeroes::Unmap => may_unmap,
        }
    }

    /// A read has delivered what it may not have.
    fn violated(&self, id: WriteId, violation: &Violation) {
        let at = violation.offset;
        self.trace.focus(|| places::of(&self.disk, at));
        self.fail(format!("request {id}: {violation}"));
    }

    /// A line about a request.
    fn record(&self, id: WriteId, guest: std::ops::Range<u64>, what: impl FnOnce() -> String) {
        let about = match guest.is_empty() {
            true => About::Run,
            false => About::Guest(guest),
        };
        self.trace.about(|| Line {
            about,
            who: format!("request {id}"),
            io: None,
            text: what(),
        });
    }

    pub fn fail(&self, what: String) {
        self.trace.line(|| format!("FAILED: {what}"));
        let mut failure = self.failure.borrow_mut();
        if failure.is_none() {
            *failure = Some(what);
        }
    }

    /// A request failed: that is a finding unless the disk was set to fail, or is full.
    fn failed(&self, what: &str, error: &cowslip::Error) {
        let is_full = self.may_be_full
            && matches!(error, Error::Io { source, .. } if source.raw_os_error() == Some(ENOSPC));
        if is_full {
            return self
                .trace
                .line(|| format!("{what} finds no space: {error}"));
        }
        self.failed_for_good(what, error);
    }

    /// The same for what needs no space.
    fn failed_for_good(&self, what: &str, error: &cowslip::Error) {
        self.trace.line(|| format!("{what} failed: {error}"));
        if self.disk.delivered().0 == 0 {
            self.fail(format!("{what} failed although the disk did not: {error}"));
        }
    }
}

/// Performs one request, from its issue to its answer.
pub(crate) async fn perform(subject: Subject, session: Rc<Session>, mut request: Request) {
    if let Verb::VmState(way) = request.verb {
        vm_state(&subject, &session, &request, way).await;
        session.answered.set(session.answered.get() + 1);
        return;
    }
    let id = request.id;
    let wanted = request.granules;
    request.granules = session.model.borrow().on_disk(&wanted);
    let cut = request.granules != wanted && request.verb == Verb::Compressed;
    if cut || (request.granules.is_empty() && request.verb.has_range()) {
        return;
    }
    session.trace.mark(u64::from(id) << 8 | 2);
    let (start, len) = {
        let model = session.model.borrow();
        let start = model.grain().start(request.granules.start);
        (start, model.grain().start(request.granules.end) - start)
    };
    session.record(id, start..start + len, || {
        format!("asks: {:?} guest {start:#x}+{len:#x}", request.verb)
    });
    match request.verb {
        Verb::Read => read(&subject, &session, &request, (start, len)).await,
        Verb::Flush => flush(&subject, &session, id).await,
        Verb::Resize(size) => resize(&subject, &session, (id, size)).await,
        Verb::Snapshot(what) => snapshot(&subject, &session, (id, what)).await,
        Verb::VmState(_) => unreachable!("it is not on the disk"),
        Verb::Allocate => allocate(&subject, &session, id, (start, len)).await,
        Verb::Compact => compact(&subject, &session, id).await,
        Verb::Bitmap(what) => bitmap(&subject, &session, (id, what)).await,
        Verb::Write { .. } | Verb::Compressed | Verb::Zeroes { .. } | Verb::Discard => {
            change(&subject, &session, &request, (start, len)).await;
        }
    }
    session.trace.mark(u64::from(id) << 8 | 3);
    session.answered.set(session.answered.get() + 1);
}

async fn read(subject: &Subject, session: &Session, request: &Request, range: (u64, u64)) {
    let begun = session.model.borrow_mut().begin_read();
    let read = subject
        .read(range.0, BufMut::zeroed(range.1 as usize))
        .await;
    let mut model = session.model.borrow_mut();
    match read {
        Ok(buf) => {
            session.record(request.id, range.0..range.0 + range.1, || {
                "done".to_string()
            });
            match model.end_read(begun, &request.granules, &buf) {
                Ok(()) => {
                    let seen = (&request.granules, &buf[..]);
                    let mut bitmaps = session.bitmaps.borrow_mut();
                    bitmaps.saw(begun, seen, model.grain());
                }
                Err(violation) => session.violated(request.id, &violation),
            }
        }
        Err(error) => {
            model.abandon_read(begun);
            session.failed(&format!("request {} (read)", request.id), &error);
        }
    }
}

/// Reads or writes the VM state.
async fn vm_state(subject: &Subject, session: &Session, request: &Request, way: Way) {
    let (id, granules) = (request.id, &request.granules);
    let (start, len) = {
        let model = session.model.borrow();
        let start = model.grain().start(granules.start);
        (start, model.grain().start(granules.end) - start)
    };
    session.record(id, 0..0, || {
        format!("asks: {way:?} VM state {start:#x}+{len:#x}")
    });
    let mut buf = BufMut::zeroed(len as usize);
    let outcome = match way {
        Way::Read => {
            let begun = session.model.borrow_mut().vm_state(Model::begin_read);
            let begun = begun.expect("it is part of the run");
            let read = subject.read_vm_state(start, buf).await;
            let mut model = session.model.borrow_mut();
            let checked = model.vm_state(|state| match &read {
                Ok(buf) => state.end_read(begun, granules, buf),
                Err(_) => {
                    state.abandon_read(begun);
                    Ok(())
                }
            });
            if let Some(Err(violation)) = checked {
                session.fail(format!("request {id}: VM state: {violation}"));
            }
            read.map(drop)
        }
        Way::Write => {
            model::fill(
                session.model.borrow().grain(),
                id,
                granules.clone(),
                &mut buf,
            );
            let begin = |state: &mut Model| state.begin_write(id, id, granules);
            session.model.borrow_mut().vm_state(begin);
            let written = subject.write_vm_state(start, buf.freeze()).await;
            let outcome = match (&written, session.write_policy) {
                (Ok(()), WritePolicy::Writethrough) => Outcome::Done(Until::End),
                (Ok(()), WritePolicy::Writeback) => Outcome::Done(Until::Flush),
                (Err(_), _) => Outcome::Perhaps,
            };
            let end = |state: &mut Model| state.end_write(id, granules, outcome);
            session.model.borrow_mut().vm_state(end);
            written
        }
    };
    match outcome {
        Ok(()) => session.record(id, 0..0, || "done: VM state".to_string()),
        Err(error) => session.failed(&format!("request {id} (VM state)"), &error),
    }
}

async fn flush(subject: &Subject, session: &Session, id: WriteId) {
    let begun = session.model.borrow_mut().begin_flush();
    match subject.flush().await {
        Ok(()) => {
            session.record(id, 0..0, || "done: a flush".to_string());
            session.model.borrow_mut().end_flush(begun);
        }
        Err(error) => session.failed_for_good(&format!("request {id} (flush)"), &error),
    }
}

/// Allocates in advance. The model knows nothing of it, since nothing may be seen of it.
async fn allocate(subject: &Subject, session: &Session, id: WriteId, (start, len): (u64, u64)) {
    match subject.allocate(start, len).await {
        Ok(()) => session.record(id, start..start + len, || "done: allocated".to_string()),
        Err(error) if is_unsupported(&error) => {}
        Err(error) => session.failed(&format!("request {id} (allocate)"), &error),
    }
}

/// Compacts the file. The model knows nothing of it either.
async fn compact(subject: &Subject, session: &Session, id: WriteId) {
    let (rng, orders) = &mut match session.cut_short {
        None => (
            Rng::derived(u64::from(id), "compaction", 0),
            Rng::derived(u64::from(id), "defragmentation", 0),
        ),
        Some(number) => (
            Rng::derived(number, "compaction", u64::from(id)),
            Rng::derived(number, "defragmentation", u64::from(id)),
        ),
    };
    if session.cut_short.is_some() {
        cut_short(session, rng);
    } else if session.ends_early && rng.chance(25) {
        session.disk.fail_power_after(rng.between(1, 100));
    }
    let job = job_cancelled_after(rng.chance(20).then(|| rng.between(1, 10)));
    let options = CompactOptions {
        budget_bytes: rng.pick(&[1, 8 << 10, 64 << 10, 1 << 20]),
        target_bytes: None,
        zeroes: rng.chance(40),
        // Refused where there is no layer below.
        dedupe_backing: subject.has_below() && rng.chance(60),
        subclusters: rng.chance(80),
        // Refused where the data is in a file of its own.
        defragment: orders.chance(40),
        // The disks of the simulator keep nothing for holes.
        whole_extents: true,
    };
    session.compactions.borrow_mut().insert(id, job.clone());
    let compacted = subject.compact(&options, &job).await;
    session.compactions.borrow_mut().remove(&id);
    match compacted {
        Ok(()) => session.record(id, 0..0, || "done: compacted".to_string()),
        Err(Error::Cancelled) if job.is_cancelled() => {}
        // A raw image; a request that was broken off.
        Err(Error::Invalid(_) | Error::Unsupported { .. }) => {}
        Err(error) => session.failed(&format!("request {id} (compact)"), &error),
    }
}

/// Has the power fail, or the process die, while a compaction is under way.
fn cut_short(session: &Session, rng: &mut Rng) {
    let events = {
        let among = rng.pick(&[10, 40, 150, 500]);
        rng.between(1, among)
    };
    match rng.below(20) {
        0 => session.disk.fail_power_after(events),
        1 => {
            let (flushes, then) = (rng.between(1, 12), rng.pick(&[0, 0, 1, 2, 4, 8]));
            session.disk.fail_power_at_flush(flushes, then);
        }
        _ => session.cut_later.set(Some(events)),
    }
}

fn is_unsupported(error: &Error) -> bool {
    match error {
        Error::Unsupported { .. } => true,
        Error::Io { source, .. } => source.kind() == std::io::ErrorKind::Unsupported,
        _ => false,
    }
}

async fn resize(subject: &Subject, session: &Session, (id, size): (WriteId, u64)) {
    if session.bitmaps.borrow().has_lost() {
        refuses_to_resize(subject, session, (id, size)).await;
        return session.resizing.set(Resizing::No);
    }
    let old = session.model.borrow().size();
    session.model.borrow_mut().begin_resize(id, size);
    session.bitmaps.borrow_mut().begin_resize((old, size));
    // Resizes are few and have many stages: some sessions end within one.
    let rng = &mut Rng::derived(u64::from(id), "end of a resize", size);
    if session.ends_early && rng.chance(30) {
        session.disk.fail_power_after(rng.between(1, 40));
    }
    let how = match rng.below(8) {
        0 => Preallocation::Metadata,
        1 => Preallocation::Falloc,
        2 => Preallocation::Full,
        _ => Preallocation::Off,
    };
    let how = match subject.size() {
        _ if !session.may_preallocate => Preallocation::Off,
        Some(old) if old < size && size - old <= PREALLOCATED_BYTES_MAX => how,
        _ => Preallocation::Off,
    };
    let outcome = match subject.resize(size, how).await {
        Ok(()) => {
            session.record(id, 0..0, || format!("done: the disk has {size:#x} bytes"));
            Outcome::Done(Until::Flush)
        }
        Err(error) => {
            session.failed(&format!("request {id} (resize)"), &error);
            Outcome::Perhaps
        }
    };
    let now = subject.size().unwrap_or(size);
    if now != size && (now != old || outcome != Outcome::Perhaps) {
        session.fail(format!(
            "request {id}: the disk has {now:#x} bytes after a resize"
        ));
    }
    let mut model = session.model.borrow_mut();
    model.end_resize(id, (size, now), outcome);
    // The end of the disk is given up later, where there is no space to do it at once.
    if now < old && session.disk.delivered().0 > 0 {
        model.forget_vm_state();
    }
    session.bitmaps.borrow_mut().end_resize(now, &model);
    drop(model);
    session.resizing.set(Resizing::No);
}

/// Checks that a resize is refused: the bits of a bitmap that was not saved properly are unknown
/// for a disk of another size.
async fn refuses_to_resize(subject: &Subject, session: &Session, (id, size): (WriteId, u64)) {
    match subject.resize(size, Preallocation::Off).await {
        Err(Error::Invalid(_)) => {}
        Err(error) => session.failed(&format!("request {id} (resize)"), &error),
        Ok(()) => session.fail(format!(
            "request {id}: a disk with a bitmap that is inconsistent was resized"
        )),
    }
}

/// Cancels its job at this number of units of progress.
struct Impatient {
    left: AtomicU64,
    job: OnceLock<Job>,
}

struct Attended(Arc<Impatient>);

impl Attendant for Attended {
    fn progress(&self, _: Progress) {
        if let (1, Some(job)) = (self.0.left.fetch_sub(1, Relaxed), self.0.job.get()) {
            job.cancel();
        }
    }
}

/// Returns a job that may be cancelled after this number of pieces of work.
fn job_cancelled_after(pieces: Option<u64>) -> Job {
    let Some(pieces) = pieces else {
        return Job::default();
    };
    let impatient = Arc::new(Impatient {
        left: AtomicU64::new(pieces),
        job: OnceLock::new(),
    });
    let job = Job::attended(Attended(Arc::clone(&impatient)));
    impatient.job.get_or_init(|| job.clone());
    job
}

async fn snapshot(subject: &Subject, session: &Session, (id, what): (WriteId, What)) {
    let rng = &mut Rng::derived(u64::from(id), "snapshot", 0);
    if session.ends_early && rng.chance(25) {
        session.disk.fail_power_after(rng.between(1, 100));
    }
    let job = job_cancelled_after(rng.chance(20).then(|| rng.between(1, 30)));
    let begun = session.model.borrow_mut().begin_flush();
    let change = {
        let model = session.model.borrow();
        let mut snapshots = session.snapshots.borrow_mut();
        snapshots.begin(what, rng.bits(), &model)
    };
    if let Some(change) = change {
        session.record(id, 0..0, || format!("asks: {change:?}"));
        if what == What::Apply {
            let size = session.model.borrow().size();
            session.bitmaps.borrow_mut().begin_everything(size);
        }
        let changed = subject.change_snapshots(&change, &job).await;
        let mut snapshots = session.snapshots.borrow_mut();
        match changed {
            Ok(()) if what == What::Apply && session.bitmaps.borrow().is_any() => {
                session.fail(format!("request {id}: applied under the eyes of bitmaps"));
            }
            Ok(()) => {
                session.record(id, 0..0, || "done: snapshots".to_string());
                let mut model = session.model.borrow_mut();
                model.end_flush(begun);
                if let Some(disk) = snapshots.end() {
                    *model = disk;
                }
            }
            Err(Error::Cancelled) if job.is_cancelled() => snapshots.taken_back(),
            // Counts that are too narrow; an image that has none.
            Err(Error::Invalid(_) | Error::Unsupported { .. }) => snapshots.taken_back(),
            Err(error) => {
                session.failed(&format!("request {id} ({change:?})"), &error);
                session.is_over.set(true);
            }
        }
    }
    session.resizing.set(Resizing::No);
}

async fn bitmap(subject: &Subject, session: &Session, (id, what): (WriteId, bitmaps::What)) {
    let rng = &mut Rng::derived(u64::from(id), "bitmap", 0);
    let change = {
        let mut model = session.model.borrow_mut();
        let mut bitmaps = session.bitmaps.borrow_mut();
        bitmaps.begin_change(what, rng, &mut model)
    };
    let Some(change) = change else {
        return;
    };
    session.record(id, 0..0, || format!("asks: {change:?}"));
    let changed = subject.change_bitmaps(&change).await;
    let mut model = session.model.borrow_mut();
    let mut bitmaps = session.bitmaps.borrow_mut();
    let refuses = bitmaps.refuses(session.version);
    match changed {
        Ok(_) if refuses => session.fail(format!("request {id}: {change:?} was not refused")),
        Ok(dirty) => {
            session.record(id, 0..0, || "done: bitmaps".to_string());
            if let Err(what) = bitmaps.end_change(&dirty, &mut model) {
                session.fail(format!("request {id}: {what}"));
            }
        }
        Err(error) => {
            bitmaps.taken_back(&mut model);
            if !(refuses && matches!(error, Error::Invalid(_))) {
                session.failed(&format!("request {id} ({change:?})"), &error);
            }
        }
    }
}

async fn change(subject: &Subject, session: &Session, request: &Request, range: (u64, u64)) {
    let id = request.id;
    let granules = &request.granules;
    let (start, len) = range;
    let writethrough = session.write_policy == WritePolicy::Writethrough;
    let done = |fua: bool| {
        Outcome::Done(if fua || writethrough {
            Until::End
        } else {
            Until::Flush
        })
    };
    let stamped = matches!(request.verb, Verb::Write { .. } | Verb::Compressed);
    let written = if stamped { id } else { ZERO };
    session.bitmaps.borrow_mut().begin(id, start..start + len);
    if request.verb != Verb::Discard || session.discards {
        session
            .model
            .borrow_mut()
            .begin_write(id, written, granules);
    }
    let stamps = || {
        let mut buf = BufMut::zeroed(len as usize);
        model::fill(
            session.model.borrow().grain(),
            id,
            granules.clone(),
            &mut buf,
        );
        buf.freeze()
    };
    let (answer, outcome) = match request.verb {
        Verb::Write { fua } => {
            let durability = Durability::of_fua(fua);
            (subject.write(start, stamps(), durability).await, done(fua))
        }
        Verb::Compressed => (subject.write_compressed(start, stamps()).await, done(false)),
        Verb::Zeroes { may_unmap, fua } if session.detects_zeroes(may_unmap) => {
            let zeroes = BufMut::zeroed(len as usize).freeze();
            let durability = Durability::of_fua(fua);
            (subject.write(start, zeroes, durability).await, done(fua))
        }
        Verb::Zeroes { may_unmap, fua } => {
            let options = ZeroOptions {
                space: Space::of_unmap(may_unmap),
                durability: Durability::of_fua(fua),
                fast_only: false,
            };
            (subject.write_zeroes(start, len, options).await, done(fua))
        }
        _ => (subject.discard(start, len).await, Outcome::Perhaps),
    };
    let outcome = match answer {
        Ok(()) => {
            session.record(id, start..start + len, || "done".to_string());
            outcome
        }
        Err(error) => {
            session.failed(&format!("request {id} ({:?})", request.verb), &error);
            Outcome::Perhaps
        }
    };
    session.model.borrow_mut().end_write(id, granules, outcome);
    session.bitmaps.borrow_mut().end(id);
}
