//! Chains of images: an overlay is rebased and committed, and the power fails meanwhile.
//!
//! Runs of their own, with seeds from 2^42 on. There are two chains of one to three images each,
//! and an overlay on the first. Deed follows deed: the overlay is written to, is given another
//! backing file, safely or not, or refcounts of another width, or another version, or is committed
//! into an image below it, and emptied or not. The power fails at a drawn moment, or the job is
//! cancelled, or neither. Whatever happens, the overlay reads as it did, through whichever chain
//! its header names; after an unsafe rebase as one of the two chains has it. What has succeeded
//! stays so: the power may fail right after it.

mod bitmaps;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use cowslip::commit::{Afterwards, Commit};
use cowslip::convert::Form;
use cowslip::file::Capabilities;
use cowslip::image::{BackingChoice, Durability, Format, OpenOptions, ZeroOptions};
use cowslip::job::{Attendant, Moment};
use cowslip::qcow2::amend::{Amendment, BackingFile};
use cowslip::qcow2::bitmap::BitmapChange;
use cowslip::qcow2::create::{CreateOptions, Version, create};
use cowslip::qcow2::snapshot::{NewSnapshot, SnapshotChoice};
use cowslip::{Buf, BufMut, Error, Image, Job};

use crate::bitmaps::What;
use crate::disk::content::Content;
use crate::disk::{Losses, Pace, SimDisk};
use crate::drive::{attempt_watched, block_on};
use crate::inspect::inspect;
use crate::names::TOP;
use crate::prepare;
use crate::rng::Rng;
use crate::second_reader::Layer;
use crate::seeds;
use crate::subject::SimGate;
use crate::totals::Totals;
use crate::trace::Trace;

use bitmaps::{Ended, Followed};

/// Runs in a soak that demands coverage.
const RUNS: u64 = 100;
/// Percent of the flushes of a deed, beside those of roots and those that change snapshots, at
/// which it is looked what the power would leave.
const LOOKS_PERCENT: u64 = 25;

/// An image below the overlay.
#[derive(Clone, Debug)]
struct File {
    name: String,
    format: Format,
    size: u64,
}

/// An operation on the overlay.
#[derive(Clone, Debug)]
enum Deed {
    /// Writes, closed in order.
    Write,
    /// An operation on the bitmaps of an image.
    Bitmap(File, What),
    /// Change to another backing file, or none.
    Rebase(Option<File>, Form),
    /// The same in the header alone.
    Unsafe(File),
    /// Change to another width of refcounts.
    Width(u32),
    /// Version 2, which has no zero clusters.
    Version2,
    /// Into the layer of this depth.
    Commit(usize, Afterwards),
}

/// How a deed is disturbed.
#[derive(Clone, Copy, Debug)]
enum Disturbance {
    None,
    /// Number of issues and completions after which the power fails.
    Power(u64),
    /// The power fails as a flush of this number begins or ends, or this many flushes later.
    PowerAtFlush(u64, u64),
    /// The job is cancelled when it asks for this piece.
    Cancelled(u64),
}

/// Cancels its job after this number of pieces.
struct Cancels {
    left: AtomicU64,
    job: Arc<OnceLock<Job>>,
}

impl Attendant for Cancels {
    fn pace(&self, _: u64) -> Option<Moment> {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 0
            && let Some(job) = self.job.get()
        {
            job.cancel();
        }
        None
    }
}

/// Seeds for some runs.
pub(crate) fn seeds(attempt: u64) -> Vec<u64> {
    (0..RUNS)
        .map(|run| seeds::CHAINS + attempt * RUNS + run)
        .collect()
}

/// Performs the run of a seed; `totals` counts its work.
///
/// # Errors
/// What went wrong.
pub(crate) fn run(seed: u64, trace: &Trace, totals: &mut Totals) -> Result<(), String> {
    let mut run = Run {
        disk: SimDisk::new(Rng::derived(seed, "disk", 0), trace.clone()),
        rng: Rng::derived(seed, "chains", 0),
        trace: trace.clone(),
        chains: Default::default(),
        size: 0,
        view: Vec::new(),
        snapshot: None,
        is_extended: false,
        is_clean: true,
        bitmaps: BTreeMap::new(),
    };
    run.build()?;
    for _ in 0..run.rng.between(2, 6) {
        let deed = run.draw_deed()?;
        run.perform(&deed, totals)?;
    }
    Ok(())
}

struct Run {
    disk: SimDisk,
    rng: Rng,
    trace: Trace,
    /// The lowest image first.
    chains: [Vec<File>; 2],
    /// Bytes of the overlay's disk.
    size: u64,
    /// The overlay's content.
    view: Vec<u8>,
    /// The content of its snapshot, if it has one.
    snapshot: Option<Vec<u8>>,
    /// The overlay has subclusters, which version 2 has not.
    is_extended: bool,
    /// The power has not failed yet.
    is_clean: bool,
    /// The bitmaps of each image.
    bitmaps: BTreeMap<String, Followed>,
}

fn below(file: &File) -> BackingChoice {
    BackingChoice::Override {
        name: file.name.clone(),
        format: Some(file.format),
    }
}

impl Run {
    fn build(&mut self) -> Result<(), String> {
        self.disk.set_pace(
            self.rng
                .pick(&[Pace::Prompt, Pace::Mixed, Pace::Stragglers]),
        );
        let about = self.rng.between(24, 400) << 10;
        for chain in 0..2 {
            let mut backing = None;
            for depth in 0..self.rng.between(1, 3) {
                let file = File {
                    name: format!("chain{chain}-{depth}.img"),
                    format: match depth == 0 && self.rng.chance(35) {
                        true => Format::Raw,
                        false => Format::Qcow2,
                    },
                    size: self.draw_size(about),
                };
                self.make(&file, backing.take())?;
                self.chains[chain].push(file.clone());
                self.fill(&file)?;
                backing = Some(file);
            }
        }
        self.size = self.draw_size(about);
        let top = File {
            name: TOP.to_string(),
            format: Format::Qcow2,
            size: self.size,
        };
        self.make(&top, self.chains[0].last().cloned())?;
        self.fill(&top)?;
        if !self.is_extended && Rng::derived(self.rng.clone().bits(), "snapshot", 0).chance(40) {
            // Zeroes over what was written keep its space.
            self.fill(&top)?;
            self.take_snapshot(&top)?;
        }
        self.disk.persist_all();
        self.view = self.read(TOP, BackingChoice::AsNamed)?;
        Ok(())
    }

    fn draw_size(&mut self, about: u64) -> u64 {
        let factor = self.rng.between(30, 150);
        (about * factor / 100).next_multiple_of(512)
    }

    fn make(&mut self, file: &File, backing: Option<File>) -> Result<(), String> {
        let mut content = Content::default();
        if file.format == Format::Raw {
            content.set_len(file.size);
        }
        self.disk
            .add_file(&file.name, Capabilities::of_regular_file(1), content);
        if file.format == Format::Raw {
            return Ok(());
        }
        let mut options = CreateOptions::new(file.size);
        options.extended_l2 = self.rng.chance(35);
        options.cluster_size = match options.extended_l2 {
            true => 1 << self.rng.pick(&[14, 15, 16]),
            false => 1 << self.rng.pick(&[9, 10, 12, 13, 16]),
        };
        if !options.extended_l2 && self.rng.chance(20) {
            options.version = Version::V2;
        }
        if file.name == TOP {
            self.is_extended = options.extended_l2;
        }
        if let Some(backing) = backing {
            options.backing_format = Some(backing.format.name().to_string());
            options.backing_file = Some(backing.name);
        }
        let handle = self.disk.open(&file.name, true).expect("it was added");
        let making = async move { create(handle, None, &options).await };
        let made = block_on(&self.disk, &mut self.rng, "create", making)?;
        made.map_err(|error| format!("creating {}: {error}", file.name))
    }

    fn open(
        &self,
        name: &str,
        (writable, backing): (bool, BackingChoice),
    ) -> impl Future<Output = cowslip::Result<Image>> + 'static {
        let file = self.disk.open(name, writable).expect("the run has made it");
        let mut files = self.chains.iter().flatten();
        let format = files.find(|file| file.name == name);
        let format = format.map_or(Format::Qcow2, |file| file.format);
        let options = OpenOptions {
            format: Some(format),
            writable,
            backing,
            cache_bytes: 1 << 20,
            ..OpenOptions::default()
        };
        let gate = SimGate(self.disk.clone());
        async move { Image::open(file, options, &gate).await }
    }

    /// Random writes, zeroes and compressed clusters, and a close.
    fn fill(&mut self, file: &File) -> Result<(), String> {
        let (rng, mut deeds) = (&mut self.rng, Vec::new());
        for _ in 0..rng.between(1, 8) {
            let start = rng.below(file.size / 512) * 512;
            let most = (file.size - start).min(rng.pick(&[512, 4096, 20_000, 100_000]));
            let len = rng.between(1, most.div_ceil(512)) * 512;
            let value = rng.chance(70).then(|| rng.between(1, 255) as u8);
            deeds.push((start, len.min(file.size - start), value));
        }
        let opening = self.open(&file.name, (true, BackingChoice::AsNamed));
        let work = async move {
            let image = opening.await?;
            for (start, len, value) in deeds {
                match value {
                    Some(value) => {
                        let data = Buf::copy_of(&vec![value; len as usize]);
                        image.write(start, data, Durability::Cached).await?;
                    }
                    None => {
                        let options = ZeroOptions::default();
                        image.write_zeroes(start, len, options).await?;
                    }
                }
            }
            image.close().await
        };
        let filled = block_on(&self.disk, &mut self.rng, "fill", work)?;
        filled.map_err(|error| format!("filling {}: {error}", file.name))
    }

    /// Takes a snapshot of the overlay, which then becomes another.
    fn take_snapshot(&mut self, top: &File) -> Result<(), String> {
        self.snapshot = Some(self.read(TOP, BackingChoice::AsNamed)?);
        let opening = self.open(TOP, (true, BackingChoice::AsNamed));
        let work = async move {
            let image = opening.await?;
            let new = NewSnapshot::default();
            image.create_snapshot(&new, &Job::default()).await?;
            image.close().await
        };
        let taken = block_on(&self.disk, &mut self.rng, "snapshot", work)?;
        taken.map_err(|error| format!("taking a snapshot: {error}"))?;
        self.fill(top)
    }

    /// The snapshot reads as it did.
    fn check_snapshot(&mut self, when: &str) -> Result<(), String> {
        let Some(wanted) = self.snapshot.clone() else {
            return Ok(());
        };
        let file = self.disk.open(TOP, false).expect("the run has made it");
        let options = OpenOptions {
            format: Some(Format::Qcow2),
            snapshot: Some(SnapshotChoice::Id("1".to_string())),
            ..OpenOptions::default()
        };
        let (gate, len) = (SimGate(self.disk.clone()), wanted.len());
        let work = async move {
            let image = Image::open(file, options, &gate).await?;
            let read = image.read(0, BufMut::zeroed(len)).await?;
            image.close().await?;
            Ok::<_, Error>(read.to_vec())
        };
        let read = block_on(&self.disk, &mut self.rng, "read", work)?;
        let read = read.map_err(|error| format!("{when}: the snapshot is unreadable: {error}"))?;
        match read == wanted {
            true => Ok(()),
            false => Err(format!(
                "{when}: other bytes were found after reopening, in a snapshot"
            )),
        }
    }

    /// All that an image reads as, through its chain or another.
    fn read(&mut self, name: &str, backing: BackingChoice) -> Result<Vec<u8>, String> {
        let opening = self.open(name, (false, backing));
        let work = async move {
            let image = opening.await?;
            let read = image.read(0, BufMut::zeroed(image.size() as usize)).await?;
            image.close().await?;
            Ok::<_, Error>(read.to_vec())
        };
        let read = block_on(&self.disk, &mut self.rng, "read", work)?;
        read.map_err(|error| format!("{name} does not open or cannot be read: {error}"))
    }

    /// The images below the overlay now, the uppermost first.
    fn layers(&mut self) -> Result<Vec<String>, String> {
        let opening = self.open(TOP, (false, BackingChoice::AsNamed));
        let work = async move {
            let image = opening.await?;
            let layers = image.layers().into_iter().skip(1);
            let names: Vec<String> = layers.map(|layer| layer.name).collect();
            image.close().await?;
            Ok::<_, Error>(names)
        };
        let names = block_on(&self.disk, &mut self.rng, "open", work)?;
        names.map_err(|error| format!("the overlay does not open: {error}"))
    }

    /// The overlay's version, and the width of its refcounts.
    fn check_header(&mut self, wanted: (u32, u32)) -> Result<(), String> {
        let opening = self.open(TOP, (false, BackingChoice::AsNamed));
        let work = async move {
            let image = opening.await?;
            let header = image.layers()[0].header.clone();
            image.close().await?;
            let header = header.expect("the overlay is of qcow2");
            Ok::<_, Error>((header.version, 1 << header.refcount_order))
        };
        match block_on(&self.disk, &mut self.rng, "open", work)? {
            Ok(found) if found == wanted => Ok(()),
            Ok(found) => Err(format!(
                "after reopening version and width are {found:?}, not {wanted:?}"
            )),
            Err(error) => Err(format!("the overlay does not open: {error}")),
        }
    }

    fn draw_deed(&mut self) -> Result<Deed, String> {
        let depths = self.layers()?.len() as u64;
        let chain = self.rng.index(2);
        let files = &self.chains[chain];
        let file = self.rng.pick(files);
        if self.snapshot.is_some() {
            // The layers below are the snapshot's, too, and stay.
            return Ok(match self.rng.below(8) {
                0 | 1 => Deed::Write,
                2 | 3 => Deed::Width(1 << self.rng.between(2, 6)),
                _ => Deed::Version2,
            });
        }
        Ok(match self.rng.below(16) {
            0 | 1 => Deed::Write,
            12.. => self.draw_bitmap_deed(),
            2 => Deed::Unsafe(file),
            3 => Deed::Rebase(None, Form::Plain),
            4 | 5 => Deed::Rebase(Some(file), self.rng.pick(&[Form::Plain, Form::Compressed])),
            6 if !self.is_extended => Deed::Version2,
            6 | 7 => Deed::Width(1 << self.rng.below(7)),
            _ if depths == 0 => Deed::Rebase(Some(file), Form::Plain),
            8 => Deed::Commit(self.rng.between(1, depths) as usize, Afterwards::Kept),
            _ => Deed::Commit(1, Afterwards::Empty),
        })
    }

    /// Draws an operation on the bitmaps of the overlay or another image.
    fn draw_bitmap_deed(&mut self) -> Deed {
        let others = self.chains.iter().flatten();
        let others = others.filter(|file| file.format == Format::Qcow2);
        let mut files: Vec<File> = others.cloned().collect();
        files.resize(files.len() * 2, self.top());
        files.push(self.top());
        let file = self.rng.pick(&files);
        let followed = self.bitmaps.entry(file.name.clone()).or_default();
        let what = followed.draw(&mut self.rng);
        Deed::Bitmap(file, what)
    }

    fn top(&self) -> File {
        File {
            name: TOP.to_string(),
            format: Format::Qcow2,
            size: self.size,
        }
    }

    fn version(&self, name: &str) -> u64 {
        let content = self.disk.content(name).expect("the run has made it");
        content.number(4, 4)
    }

    /// Returns the contents of the images with bitmaps.
    fn views(&mut self) -> Result<BTreeMap<String, Vec<u8>>, String> {
        let with = self
            .bitmaps
            .iter()
            .filter(|(_, followed)| followed.is_any());
        let mut names: Vec<String> = with.map(|(name, _)| name.clone()).collect();
        let mut views = BTreeMap::new();
        names.dedup();
        for name in names {
            let view = self.read(&name, BackingChoice::AsNamed)?;
            views.insert(name, view);
        }
        Ok(views)
    }

    /// The bitmaps of all images say what they have to.
    fn check_bitmaps(
        &mut self,
        (deed, written): (&Deed, &[String]),
        ended: Ended,
        before: &BTreeMap<String, Vec<u8>>,
    ) -> Result<(), String> {
        let names: Vec<String> = self.bitmaps.keys().cloned().collect();
        for name in names {
            let view = self.read(&name, BackingChoice::AsNamed)?;
            let old = before.get(&name).unwrap_or(&view);
            let mut followed = self.bitmaps[&name].clone();
            if !written.contains(&name) {
                followed.look_away((old, &view));
            }
            let after = match deed {
                Deed::Bitmap(file, what) if file.name == name => Some(followed.after(*what, old)),
                Deed::Version2 if name == TOP => Some(followed.none()),
                _ => None,
            };
            let possible = match (after, ended) {
                (Some(after), Ended::Closed) => vec![after],
                (Some(after), Ended::Perhaps) => vec![after, followed],
                (None, _) => vec![followed],
            };
            let content = self.disk.content(&name).expect("the run has made it");
            let found = inspect(&content).bitmaps;
            let mut outcomes: Vec<Result<Followed, String>> = possible
                .iter()
                .map(|followed| followed.adopt(&found, (&view, ended)))
                .collect();
            let right = outcomes.iter().position(Result::is_ok);
            let outcome = outcomes.swap_remove(right.unwrap_or(0));
            let adopted = outcome.map_err(|what| format!("after reopening {name}: {what}"))?;
            self.bitmaps.insert(name, adopted);
        }
        Ok(())
    }

    fn draw_disturbance(&mut self) -> Disturbance {
        match self.rng.below(10) {
            0 | 1 => Disturbance::None,
            2 => Disturbance::Cancelled(self.rng.below(4)),
            3..7 => Disturbance::PowerAtFlush(self.rng.between(1, 20), self.rng.below(5)),
            _ => {
                let most = self.rng.pick(&[20, 60, 200, 800]);
                Disturbance::Power(self.rng.between(1, most))
            }
        }
    }

    /// Performs one deed and checks its outcome.
    fn perform(&mut self, deed: &Deed, totals: &mut Totals) -> Result<(), String> {
        if let Deed::Write = deed {
            let before = self.views()?;
            self.fill(&self.top())?;
            let written = [TOP.to_string()];
            self.check_bitmaps((deed, &written), Ended::Closed, &before)?;
            self.view = self.read(TOP, BackingChoice::AsNamed)?;
            self.disk.persist_all();
            return self.check("after writes", std::slice::from_ref(&self.view.clone()));
        }
        let disturbance = self.draw_disturbance();
        self.trace.line(|| format!("{deed:?} {disturbance:?}"));
        let mut views = vec![self.view.clone()];
        if let Deed::Unsafe(file) = deed {
            views.push(self.read(TOP, below(file))?);
        }
        let bases = self.layers()?;
        let before = self.views()?;
        match disturbance {
            Disturbance::Power(events) => self.disk.fail_power_after(events),
            Disturbance::PowerAtFlush(flushes, then) => {
                self.disk.fail_power_at_flush(flushes, then);
            }
            Disturbance::None | Disturbance::Cancelled(_) => {}
        }
        let work = self.work(deed, disturbance);
        let (mut order, mut looks) = (self.rng.clone(), Rng::new(self.rng.clone().bits()));
        // Its barriers stand between tables of a snapshot and counts, and there are few of them.
        let changes_snapshots = matches!(deed, Deed::Version2) && self.snapshot.is_some();
        let mut found = Ok(());
        let outcome = attempt_watched((&self.disk, &mut order), "deed", work, || {
            let Some(at_risk) = self.disk.issued_flush() else {
                return;
            };
            let is_aimed_at = at_risk.has_root() || changes_snapshots;
            let looks_now = is_aimed_at || looks.chance(LOOKS_PERCENT);
            let by_structure = Losses::by_structure(at_risk).filter(|_| is_aimed_at);
            let outcomes = std::iter::once(Losses::Adverse).chain(by_structure);
            for losses in outcomes.filter(|_| looks_now) {
                if found.is_ok() {
                    found = self.look(&views, (&Rng::new(looks.bits()), losses));
                }
            }
        })?;
        self.rng = order;
        found.map_err(|what| format!("if the power failed now: {what}"))?;
        totals.requests += 1;
        let mut when = "after a deed";
        let has_power = self.disk.has_power();
        self.disk.hold_power();
        let crashes = !has_power || outcome.is_none() || self.rng.chance(30);
        if crashes {
            when = "after a crash";
            totals.crashes += 1;
            self.disk
                .set_losses(self.rng.pick(&[Losses::Any, Losses::Adverse]));
            let rngs = [Rng::new(self.rng.bits()), Rng::new(self.rng.bits())];
            let [rng, next] = rngs;
            self.disk = self.disk.crash(rng, next);
        }
        self.is_clean &= !crashes;
        match &outcome {
            Some(Ok(()) | Err(Error::Cancelled)) | None => {}
            // Data that shares a cluster has more references than the width can count.
            Some(Err(Error::Invalid(_))) if matches!(deed, Deed::Width(_)) => {}
            Some(Err(Error::Invalid(_))) if self.is_refused(deed, &bases) => {}
            Some(Err(_)) if !has_power => {}
            Some(Err(error)) => return Err(format!("{deed:?} failed without a fault: {error}")),
        }
        self.check(when, &views)?;
        let ended = match &outcome {
            Some(Ok(())) => Ended::Closed,
            _ => Ended::Perhaps,
        };
        self.check_bitmaps((deed, &deed.written(&bases)), ended, &before)?;
        match outcome {
            Some(Ok(())) => self.check_success(deed, &bases),
            _ => Ok(()),
        }
    }

    /// Whether bitmaps stand against a deed: those of version 2, and a base that cannot grow.
    fn is_refused(&self, deed: &Deed, bases: &[String]) -> bool {
        match deed {
            Deed::Bitmap(file, What::Add) => self.version(&file.name) < 3,
            Deed::Commit(depth, _) => {
                let base = self.bitmaps.get(&bases[depth - 1]);
                base.is_some_and(Followed::has_lost)
            }
            _ => false,
        }
    }

    fn work(
        &self,
        deed: &Deed,
        disturbance: Disturbance,
    ) -> impl Future<Output = cowslip::Result<()>> + 'static {
        let backing = match deed {
            Deed::Unsafe(_) => BackingChoice::None,
            _ => BackingChoice::AsNamed,
        };
        let name = match deed {
            Deed::Bitmap(file, _) => &file.name,
            _ => TOP,
        };
        let opening = self.open(name, (true, backing));
        let change = match deed {
            Deed::Bitmap(file, what) => self.bitmaps.get(&file.name).map(|f| change(f, *what)),
            _ => None,
        };
        let new = match deed {
            Deed::Rebase(Some(file), _) => {
                Some(self.open(&file.name, (false, BackingChoice::AsNamed)))
            }
            _ => None,
        };
        let (deed, gate) = (deed.clone(), SimGate(self.disk.clone()));
        let job = match disturbance {
            Disturbance::Cancelled(left) => {
                let slot = Arc::new(OnceLock::new());
                let job = Job::attended(Cancels {
                    left: AtomicU64::new(left),
                    job: Arc::clone(&slot),
                });
                drop(slot.set(job.clone()));
                job
            }
            _ => Job::default(),
        };
        async move {
            let image = opening.await?;
            let done = match deed {
                Deed::Write => Ok(()),
                Deed::Bitmap(..) => {
                    let (name, change) = change.expect("it was drawn from there");
                    image.change_bitmap(&name, &change).await
                }
                Deed::Unsafe(file) => {
                    let amendment = Amendment::of_backing(named(&file));
                    image.amend(&amendment, &job).await
                }
                Deed::Width(bits) => {
                    let amendment = to_version(Version::V3, bits);
                    image.amend(&amendment, &job).await
                }
                Deed::Version2 => {
                    let amendment = to_version(Version::V2, 16);
                    image.amend(&amendment, &job).await
                }
                Deed::Rebase(file, storage) => {
                    let new = match new {
                        Some(opening) => Some(opening.await?),
                        None => None,
                    };
                    let backing = file.as_ref().map_or(BackingFile::None, named);
                    image.rebase(new.as_ref(), backing, storage, &job).await
                }
                Deed::Commit(depth, afterwards) => {
                    let commit = Commit {
                        depth,
                        afterwards,
                        base: OpenOptions::default(),
                    };
                    image.commit(&commit, &gate, &job).await
                }
            };
            let closed = image.close().await;
            done.and(closed)
        }
    }

    /// Checks the files that a power failure at this moment would leave: every image is sound, and
    /// the overlay reads as it did, as far as the second reader can see.
    fn look(&self, views: &[Vec<u8>], (rng, losses): (&Rng, Losses)) -> Result<(), String> {
        let left = self.disk.if_power_failed(rng, (losses, &Trace::off()));
        for name in self.qcow2_names() {
            let findings = inspect(&left.content(&name).expect("the run has made it"));
            let flags = findings.flags.iter().chain(&findings.low_counts);
            if let Some(first) = findings.corruptions.iter().chain(flags).next() {
                return Err(format!("{name}: corrupt: {first}"));
            }
        }
        let layer = Layer::open(&left, TOP).ok_or("a file that is below is missing")?;
        if let (Some(view), Some(layer)) = (&self.snapshot, layer.at_snapshot(0)) {
            let (mut bytes, mut known) = (vec![0; view.len()], vec![false; view.len()]);
            layer.read(0, &mut bytes, &mut known);
            let mut pairs = bytes.iter().zip(view).zip(&known);
            if let Some(at) = pairs.position(|((a, b), known)| *known && a != b) {
                return Err(format!("a snapshot has other bytes at {at:#x}"));
            }
        }
        let len = layer.size() as usize;
        let (mut bytes, mut known) = (vec![0; len], vec![false; len]);
        layer.read(0, &mut bytes, &mut known);
        let differs = |view: &Vec<u8>| {
            let mut places = bytes.iter().zip(view).zip(&known);
            match view.len() == len {
                true => places.position(|((a, b), known)| *known && a != b),
                false => Some(len),
            }
        };
        let found: Vec<Option<usize>> = views.iter().map(differs).collect();
        match found.contains(&None) {
            true => Ok(()),
            false => Err(format!(
                "other bytes were found after reopening, the first at {:x?}",
                found[0]
            )),
        }
    }

    /// The images that are not raw, the overlay last.
    fn qcow2_names(&self) -> Vec<String> {
        let qcow2 = self.chains.iter().flatten();
        let qcow2 = qcow2.filter(|file| file.format == Format::Qcow2);
        let mut names: Vec<String> = qcow2.map(|file| file.name.clone()).collect();
        names.push(TOP.to_string());
        names
    }

    /// Checks what holds at all times.
    fn check(&mut self, when: &str, views: &[Vec<u8>]) -> Result<(), String> {
        for name in self.qcow2_names() {
            let found =
                prepare::examine(&name, (&self.disk, prepare::Lag::default()), &mut self.rng);
            let (_, found) = found.map_err(|what| format!("{when}: {name}: {what}"))?;
            if self.is_clean && found.leaks > 0 {
                let leaks = found.leaks;
                return Err(format!("{leaks} clusters of {name} are leaked {when}"));
            }
        }
        self.check_snapshot(when)?;
        let found = self.read(TOP, BackingChoice::AsNamed)?;
        if views.contains(&found) {
            self.view = found;
            return Ok(());
        }
        let at = found.iter().zip(&views[0]).position(|(a, b)| a != b);
        Err(format!(
            "{when}: other bytes were found after reopening, the first at {at:x?} of {:#x}",
            found.len()
        ))
    }

    /// Checks the outcome of a deed that has succeeded, though the power may have failed since.
    fn check_success(&mut self, deed: &Deed, bases: &[String]) -> Result<(), String> {
        let layers = self.layers()?;
        match deed {
            Deed::Write | Deed::Bitmap(..) => Ok(()),
            Deed::Width(bits) => self.check_header((3, *bits)),
            Deed::Version2 => self.check_header((2, 16)),
            Deed::Rebase(None, _) if layers.is_empty() => Ok(()),
            Deed::Rebase(Some(file), _) | Deed::Unsafe(file)
                if layers.first() == Some(&file.name) =>
            {
                Ok(())
            }
            Deed::Rebase(..) | Deed::Unsafe(_) => Err(format!(
                "after reopening {layers:?} are below, not what was asked for"
            )),
            Deed::Commit(depth, _) => {
                let base = self.read(&bases[depth - 1], BackingChoice::AsNamed)?;
                match base.get(..self.view.len()) == Some(&self.view[..]) {
                    true => Ok(()),
                    false => Err("the base has not what was committed into it".to_string()),
                }
            }
        }
    }
}

impl Deed {
    /// The images that it writes to, as a guest would.
    fn written(&self, bases: &[String]) -> Vec<String> {
        match self {
            Deed::Unsafe(_) => Vec::new(),
            Deed::Commit(depth, _) => vec![TOP.to_string(), bases[depth - 1].clone()],
            _ => vec![TOP.to_string()],
        }
    }
}

fn change(followed: &Followed, what: What) -> (String, BitmapChange) {
    let (name, source) = followed.names(what);
    let change = match what {
        What::Add => BitmapChange::Add {
            granularity: Some(followed.granularity()),
        },
        What::Clear => BitmapChange::Clear,
        What::Remove => BitmapChange::Remove,
        What::Enable => BitmapChange::Enable,
        What::Disable => BitmapChange::Disable,
        What::Merge => BitmapChange::Merge(source),
        What::Look => unreachable!("nobody draws it"),
    };
    (name, change)
}

fn named(file: &File) -> BackingFile {
    BackingFile::File {
        name: file.name.clone(),
        format: file.format.name().to_string(),
    }
}

fn to_version(version: Version, refcount_bits: u32) -> Amendment {
    Amendment {
        version: Some(version),
        refcount_bits: Some(refcount_bits),
        ..Amendment::default()
    }
}
