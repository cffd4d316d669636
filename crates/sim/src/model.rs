//! The oracle: the contents that a guest may read.
//!
//! The disk is cut into *granules*: parts of a 512-byte sector, the same in every sector. Requests
//! begin and end at granules, and every write fills a granule with a *stamp*, the number of the
//! write and of the granule, so that bytes that belong elsewhere are known by name. A granule lies
//! within a sector, so a crash never tears it.
//!
//! Each granule has *versions*: writes that it may hold, with the moments of their issue and end.
//! With `V -> W` for "V ended before W was issued":
//! - a read from `a` to `b` may see V if V was issued before `b` and no acknowledged W with V -> W
//!   had ended before `a`;
//! - after a crash V may be seen unless some durable W has V -> W, where W is durable if it was
//!   acknowledged with FUA, or before a flush that succeeded was issued;
//! - a read that saw X while nothing else was in flight decides: every other version is gone for
//!   reads, and for crashes once a flush follows. So values do not flip without a write;
//! - a failed write, and a discard (as zeroes), is a version that may be seen but hides none.

use std::fmt;

use smallvec::{SmallVec, smallvec};

use crate::remembered::Content;

mod vm_state;

pub use vm_state::explained;

/// Bytes of a sector.
pub const SECTOR_BYTES: u64 = 512;

/// A moment of a run; never two events at one moment.
pub type Moment = u64;

/// The moment of an event that has not happened.
const NEVER: Moment = Moment::MAX;

/// The number of a write; 0 is the zeroes that nobody wrote.
pub type WriteId = u32;

/// Zeroes.
pub const ZERO: WriteId = 0;

/// Unknown content: any bytes match it.
pub const ANY: WriteId = WriteId::MAX;

/// How sectors are cut into granules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grain {
    cuts: Vec<u64>,
}

/// The least length of a granule: a stamp and some of its repetition.
pub const GRANULE_BYTES_MIN: u64 = 12;

impl Grain {
    /// Granules that begin at these bytes of every sector, the first at 0.
    ///
    /// # Panics
    /// If granules would be shorter than [`GRANULE_BYTES_MIN`].
    pub fn new(cuts: Vec<u64>) -> Grain {
        assert_eq!(
            cuts.first(),
            Some(&0),
            "the first granule begins the sector"
        );
        let ends = cuts.iter().skip(1).chain(&[SECTOR_BYTES]);
        assert!(
            cuts.iter()
                .zip(ends)
                .all(|(start, end)| start + GRANULE_BYTES_MIN <= *end),
            "granules hold a stamp: {cuts:?}"
        );
        Grain { cuts }
    }

    /// Where granule `index` begins.
    pub fn start(&self, index: u64) -> u64 {
        let per_sector = self.cuts.len() as u64;
        index / per_sector * SECTOR_BYTES + self.cuts[(index % per_sector) as usize]
    }

    /// The granule that holds the byte at `offset`.
    pub fn index_of(&self, offset: u64) -> u64 {
        let within = offset % SECTOR_BYTES;
        let cut = self.cuts.partition_point(|cut| *cut <= within) - 1;
        offset / SECTOR_BYTES * self.cuts.len() as u64 + cut as u64
    }

    /// Granules in a sector.
    pub fn per_sector(&self) -> u64 {
        self.cuts.len() as u64
    }
}

/// The bytes of a write in one granule.
fn stamp(write: WriteId, granule: u64) -> [u8; 8] {
    if write == ZERO {
        return [0; 8];
    }
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&write.to_le_bytes());
    bytes[4..].copy_from_slice(&(granule as u32 ^ 0xa5a5_0000).to_le_bytes());
    bytes
}

/// Fills the bytes of granules `first..end` with the stamp of a write.
pub fn fill(grain: &Grain, write: WriteId, granules: std::ops::Range<u64>, bytes: &mut [u8]) {
    let base = grain.start(granules.start);
    for granule in granules {
        let start = (grain.start(granule) - base) as usize;
        let end = (grain.start(granule + 1) - base) as usize;
        let stamp = stamp(write, granule);
        for chunk in bytes[start..end].chunks_mut(8) {
            chunk.copy_from_slice(&stamp[..chunk.len()]);
        }
    }
}

/// Content of a granule that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The stamp of a write of this very granule, or zeroes.
    Own(WriteId),
    /// The stamp of a write of another granule.
    Foreign(WriteId, u32),
    /// Several things, or nothing that was ever written.
    Mixed,
}

/// Recognises the bytes of a granule.
pub fn recognise(granule: u64, bytes: &[u8]) -> Found {
    let (write, place) = bytes.split_at(4);
    let write = WriteId::from_le_bytes(write.try_into().expect("four bytes"));
    let place = u32::from_le_bytes(place[..4].try_into().expect("four bytes"));
    // The same eight bytes again and again.
    if bytes[8..] != bytes[..bytes.len() - 8] {
        return Found::Mixed;
    }
    if bytes[..8] == stamp(write, granule) {
        Found::Own(write)
    } else if write == ZERO {
        Found::Mixed
    } else {
        Found::Foreign(write, place ^ 0xa5a5_0000)
    }
}

/// A content that a granule may have.
#[derive(Clone, Copy, Debug)]
struct Version {
    /// The request that put it there; 0 for what was there from the start.
    request: u32,
    write: WriteId,
    issued: Moment,
    ended: Moment,
    /// When a read showed that it is not there.
    refuted: Moment,
    /// Whether it was acknowledged and hides versions that ended before it was issued.
    hides: bool,
    /// Whether it is durable at its end.
    durable: bool,
}

/// The versions of a granule. Most granules have one: a model is copied for every look and every
/// attempt at a recovery, without an allocation for each granule.
type Versions = SmallVec<[Version; 1]>;

/// A contradiction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Where the granule begins on the disk.
    pub offset: u64,
    /// Description of the violation.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {:#x}: {}", self.offset, self.what)
    }
}

/// Whether a write is durable at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// A flush must follow.
    Flush,
    /// Visible at once.
    End,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Acknowledged.
    Done(Until),
    /// Failed, or without a promise: it may have happened or not.
    Perhaps,
}

/// A range of the disk that a run uses, with everything that it may hold.
#[derive(Clone, Debug)]
struct Window {
    first: u64,
    granules: Vec<Versions>,
}

/// The disk as the guest sees it.
#[derive(Clone, Debug)]
pub struct Model {
    grain: Grain,
    windows: Vec<Window>,
    now: Moment,
    flushed: Moment,
    reads: Vec<Moment>,
    /// Bytes of the disk now.
    size: u64,
    /// Sizes that a crash may leave, and when the last change of them ended.
    sizes: (Vec<u64>, Moment),
    /// The area behind the disk, if that is used.
    area: Option<vm_state::Area>,
}

/// The run of granules of a request.
pub type Granules = std::ops::Range<u64>;

impl Model {
    /// A disk whose windows hold what `initial` says, durably.
    pub fn new(grain: Grain, windows: &[Granules], initial: impl Fn(u64) -> WriteId) -> Model {
        let windows: Vec<Window> = windows
            .iter()
            .map(|range| Window {
                first: range.start,
                granules: range
                    .clone()
                    .map(|g| smallvec![settled(initial(g))])
                    .collect(),
            })
            .collect();
        let ends = windows.iter().map(|window| {
            let end = window.first + window.granules.len() as u64;
            grain.start(end)
        });
        let size = ends.max().unwrap_or(0);
        Model {
            grain,
            windows,
            now: 1,
            flushed: 0,
            reads: Vec::new(),
            size,
            sizes: (vec![size], 0),
            area: None,
        }
    }

    /// The same disk, ending before its windows do, or behind them.
    pub fn with_size(mut self, size: u64) -> Model {
        self.size = size;
        self.sizes.0 = vec![size];
        self
    }

    /// Bytes of the disk: at first up to the end of the last window.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// A run of granules, as far as it lies on the disk.
    pub fn on_disk(&self, granules: &Granules) -> Granules {
        let end = granules.end.min(self.grain.index_of(self.size));
        granules.start..end.max(granules.start)
    }

    /// Granules of all windows from byte `from` to byte `to`.
    fn between(&self, from: u64, to: u64) -> Vec<Granules> {
        let (from, to) = (self.grain.index_of(from), self.grain.index_of(to));
        let cut = |window: Granules| window.start.max(from)..window.end.min(to);
        let parts = self.windows().into_iter().map(cut);
        parts.filter(|part| part.start < part.end).collect()
    }

    /// The disk begins to change its size, with nothing else in flight. What is added reads as
    /// zeroes.
    pub fn begin_resize(&mut self, request: u32, size: u64) {
        self.sizes.0.push(size);
        self.sizes.1 = NEVER;
        self.vm_state_begins_to_move(request, size);
        for granules in self.between(self.size, size) {
            self.begin_write(request, ZERO, &granules);
        }
    }

    /// Ends a resize, whether it succeeded or not; the disk says that it has the size `now`.
    pub fn end_resize(&mut self, request: u32, (size, now): (u64, u64), outcome: Outcome) {
        for granules in self.between(self.size, size) {
            self.end_write(request, &granules, outcome);
        }
        self.vm_state_has_moved(request, size, outcome);
        self.sizes.1 = self.tick();
        self.size = now;
    }

    /// Takes over the size of the disk after [`Model::crash`].
    ///
    /// # Errors
    /// If it may not have.
    pub fn adopt_size(&mut self, size: u64, survival: Survival) -> Result<(), Violation> {
        if !self.sizes.0.contains(&size) {
            let what = format!("the disk's size was found; possible: {:x?}", self.sizes.0);
            return Err(Violation { offset: size, what });
        }
        self.vm_state_may_have_moved(size);
        self.size = size;
        self.sizes.1 = self.tick();
        if survival == Survival::Durable {
            self.sizes.0 = vec![size];
        }
        Ok(())
    }

    /// The granules.
    pub fn grain(&self) -> &Grain {
        &self.grain
    }

    /// The ranges that it knows.
    pub fn windows(&self) -> Vec<Granules> {
        let range = |window: &Window| window.first..window.first + window.granules.len() as u64;
        self.windows.iter().map(range).collect()
    }

    fn tick(&mut self) -> Moment {
        self.now += 1;
        self.now
    }

    fn versions(&mut self, granule: u64) -> &mut Versions {
        let window = self
            .windows
            .iter_mut()
            .find(|w| (w.first..w.first + w.granules.len() as u64).contains(&granule))
            .expect("requests stay within the windows");
        &mut window.granules[(granule - window.first) as usize]
    }

    /// Request `request` begins to put `write` (itself, or zeroes) into these granules.
    pub fn begin_write(&mut self, request: u32, write: WriteId, granules: &Granules) {
        let issued = self.tick();
        let flushed = self.flushed;
        let oldest_read = self.reads.iter().copied().min().unwrap_or(NEVER);
        for granule in granules.clone() {
            let versions = self.versions(granule);
            forget(versions, flushed, oldest_read);
            versions.push(Version {
                request,
                write,
                issued,
                ended: NEVER,
                refuted: NEVER,
                hides: false,
                durable: false,
            });
        }
    }

    /// Ends a write.
    pub fn end_write(&mut self, request: u32, granules: &Granules, outcome: Outcome) {
        let ended = self.tick();
        for granule in granules.clone() {
            let versions = self.versions(granule).iter_mut();
            for version in versions.filter(|v| v.request == request) {
                version.ended = ended;
                version.hides = outcome != Outcome::Perhaps;
                version.durable = outcome == Outcome::Done(Until::End);
            }
        }
    }

    /// Returns the current moment.
    pub fn moment(&mut self) -> Moment {
        self.tick()
    }

    /// A flush begins; the moment is for its end.
    pub fn begin_flush(&mut self) -> Moment {
        self.tick()
    }

    /// A flush that began then was acknowledged.
    pub fn end_flush(&mut self, begun: Moment) {
        self.flushed = self.flushed.max(begun);
        self.vm_state(|state| state.end_flush(begun));
        if self.sizes.1 < begun && self.sizes.0.len() > 1 {
            self.sizes.0 = vec![self.size];
            // Content that was cut off never comes back.
            for granules in self.between(self.size, u64::MAX / 2) {
                for granule in granules {
                    *self.versions(granule) = smallvec![settled(ZERO)];
                }
            }
        }
    }

    /// A read begins; the moment is for its end.
    pub fn begin_read(&mut self) -> Moment {
        let begun = self.tick();
        self.reads.push(begun);
        begun
    }

    /// Recognises a granule in bytes that begin at `base`.
    fn found(&self, granule: u64, base: u64, bytes: &[u8]) -> Found {
        let (start, end) = (self.grain.start(granule), self.grain.start(granule + 1));
        recognise(
            granule,
            &bytes[(start - base) as usize..(end - base) as usize],
        )
    }

    /// A read that began then failed.
    pub fn abandon_read(&mut self, begun: Moment) {
        self.reads.retain(|read| *read != begun);
    }

    /// A read that began then has delivered `bytes`.
    ///
    /// # Errors
    /// If it may not have.
    pub fn end_read(
        &mut self,
        begun: Moment,
        granules: &Granules,
        bytes: &[u8],
    ) -> Result<(), Violation> {
        self.abandon_read(begun);
        let ended = self.tick();
        let base = self.grain.start(granules.start);
        for granule in granules.clone() {
            let found = self.found(granule, base, bytes);
            let versions = self.versions(granule);
            let visible = |v: &Version| v.issued < ended && !hidden(v, versions, begun);
            let legal = |write| versions.iter().any(|v| v.write == write && visible(v));
            let Some(seen) = explained(found, legal) else {
                let what = explain(found, versions, "read");
                return Err(Violation {
                    offset: self.grain.start(granule),
                    what,
                });
            };
            let quiet = versions.iter().all(|v| v.ended < begun);
            if quiet {
                for version in versions.iter_mut().filter(|v| v.write != seen) {
                    version.refuted = version.refuted.min(ended);
                }
            }
        }
        Ok(())
    }

    /// The process is gone: nothing is in flight any more, and of what was not durable anything may
    /// be left.
    pub fn crash(&mut self) {
        let now = self.tick();
        let flushed = self.flushed;
        self.reads.clear();
        self.vm_state(Model::crash);
        for window in &mut self.windows {
            for versions in &mut window.granules {
                let before = versions.clone();
                versions.retain(|v| !lost(v, &before, flushed));
                for version in versions.iter_mut() {
                    version.ended = version.ended.min(now);
                    version.refuted = NEVER;
                    // Surviving writes are not ordered any more, and none of them will end again.
                    version.request = 0;
                    version.issued = 0;
                    version.durable = false;
                }
            }
        }
    }

    /// Takes over the bytes of the disk after [`Model::crash`].
    ///
    /// # Errors
    /// If they may not be.
    pub fn adopt(
        &mut self,
        granules: &Granules,
        bytes: &[u8],
        survival: Survival,
    ) -> Result<(), Violation> {
        let now = self.tick();
        let base = self.grain.start(granules.start);
        for granule in granules.clone() {
            let found = self.found(granule, base, bytes);
            let versions = self.versions(granule);
            let may_be = |write| versions.iter().any(|v| v.write == write);
            let Some(seen) = explained(found, may_be) else {
                let what = explain(found, versions, "found after reopening");
                return Err(Violation {
                    offset: self.grain.start(granule),
                    what,
                });
            };
            match survival {
                Survival::Durable => *versions = smallvec![settled(seen)],
                Survival::Cached => {
                    for version in versions.iter_mut() {
                        let is_seen = version.write == seen;
                        version.hides = is_seen;
                        version.refuted = if is_seen { NEVER } else { now };
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the contents that a read of each granule might see now, with nothing in flight.
    /// Beyond the end of the disk there is nothing to see.
    pub fn possible(&self) -> Content {
        self.possible_since(self.now + 1)
    }

    /// Returns the contents that a read that began at `begun` might see if it ended now.
    pub fn possible_since(&self, begun: Moment) -> Content {
        let end = self.grain.index_of(self.size);
        let of = |granule: u64, versions: &Versions| -> Vec<WriteId> {
            if granule >= end {
                return vec![ZERO];
            }
            let visible = versions.iter().filter(|v| !hidden(v, versions, begun));
            let mut writes: Vec<WriteId> = visible.map(|v| v.write).collect();
            writes.sort_unstable();
            writes.dedup();
            writes
        };
        let windows = self.windows.iter().map(|window| {
            let granules = window.first..window.first + window.granules.len() as u64;
            let contents = granules.clone().zip(&window.granules);
            let contents = contents.map(|(granule, versions)| of(granule, versions));
            (granules, contents.collect())
        });
        windows.collect()
    }

    /// The same disk with other content, and another VM state, which are durable, and another size.
    pub fn holding(&self, (content, vm_state): (&Content, &Content), size: u64) -> Model {
        let mut model = self.clone();
        model.now += 1;
        model.flushed = model.now;
        for (window, (_, contents)) in model.windows.iter_mut().zip(content) {
            for (versions, writes) in window.granules.iter_mut().zip(contents) {
                *versions = writes.iter().map(|&write| settled(write)).collect();
            }
        }
        model.size = size;
        model.sizes = (vec![size], 0);
        model.vm_state_holding(vm_state);
        model
    }

    /// Returns the content of the granule, if nothing is in flight and it is certain.
    pub fn certain(&mut self, granule: u64) -> Option<WriteId> {
        let now = self.now;
        let versions = self.versions(granule);
        let mut visible = versions.iter().filter(|v| !hidden(v, versions, now + 1));
        let first = visible.next()?.write;
        visible.all(|v| v.write == first).then_some(first)
    }
}

/// Whether what was found after reopening is on the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survival {
    /// The power failed: what is left is durable.
    Durable,
    /// The process died: the system may still lose what was not flushed.
    Cached,
}

fn settled(write: WriteId) -> Version {
    Version {
        request: 0,
        write,
        issued: 0,
        ended: 1,
        refuted: NEVER,
        hides: true,
        durable: true,
    }
}

/// Whether a read that began at `begun` cannot see `v`.
fn hidden(v: &Version, versions: &[Version], begun: Moment) -> bool {
    v.refuted <= begun
        || versions
            .iter()
            .any(|w| w.hides && w.issued > v.ended && w.ended <= begun)
}

/// Whether no crash can bring `v` back.
fn lost(v: &Version, versions: &[Version], flushed: Moment) -> bool {
    v.refuted < flushed
        || versions
            .iter()
            .any(|w| w.hides && w.issued > v.ended && (w.durable || w.ended < flushed))
}

/// Drops versions that neither a read nor a crash can bring back.
fn forget(versions: &mut Versions, flushed: Moment, oldest_read: Moment) {
    if versions.len() > 2 {
        let before = versions.clone();
        versions.retain(|v| !(lost(v, &before, flushed) && hidden(v, &before, oldest_read)));
    }
}

fn explain(found: Found, versions: &[Version], how: &str) -> String {
    let mut text = match found {
        Found::Own(ZERO) => format!("zeroes were {how}"),
        Found::Own(write) => format!("write {write} was {how}"),
        Found::Foreign(write, place) => {
            format!("bytes of write {write} to granule {place:#x} were {how}")
        }
        Found::Mixed => format!("a mixture was {how}"),
    };
    text.push_str("; possible:");
    for v in versions {
        let moment = |at: Moment| {
            if at == NEVER {
                "-".to_string()
            } else {
                at.to_string()
            }
        };
        text.push_str(&format!(
            " [{} by request {} issued {} ended {} refuted {}{}{}]",
            v.write,
            v.request,
            moment(v.issued),
            moment(v.ended),
            moment(v.refuted),
            if v.hides { " acknowledged" } else { "" },
            if v.durable { " durable" } else { "" },
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Granules = 0..4;

    fn model() -> Model {
        Model::new(Grain::new(vec![0]), std::slice::from_ref(&ALL), |_| 7)
    }

    fn bytes(write: WriteId) -> Vec<u8> {
        let mut bytes = vec![0; 2048];
        fill(&Grain::new(vec![0]), write, ALL, &mut bytes);
        bytes
    }

    fn read(model: &mut Model, write: WriteId) -> Result<(), Violation> {
        let begun = model.begin_read();
        model.end_read(begun, &ALL, &bytes(write))
    }

    fn write(model: &mut Model, id: WriteId, outcome: Outcome) {
        model.begin_write(id, id, &ALL);
        model.end_write(id, &ALL, outcome);
    }

    fn survives(model: &Model, write: WriteId) -> bool {
        let mut model = model.clone();
        model.crash();
        model.adopt(&ALL, &bytes(write), Survival::Durable).is_ok()
    }

    const DONE: Outcome = Outcome::Done(Until::Flush);

    #[test]
    fn an_acknowledged_write_is_visible_and_one_in_flight_may_be() {
        let mut model = model();
        model.begin_write(8, 8, &ALL);
        read(&mut model, 8).unwrap();
        read(&mut model, 7).unwrap();
        model.end_write(8, &ALL, DONE);
        assert!(read(&mut model, 7).is_err());
        read(&mut model, 8).unwrap();
    }

    #[test]
    fn a_read_that_began_before_the_acknowledgement_may_see_the_old_bytes() {
        let mut model = model();
        model.begin_write(8, 8, &ALL);
        let begun = model.begin_read();
        model.end_write(8, &ALL, DONE);
        model.end_read(begun, &ALL, &bytes(7)).unwrap();
    }

    #[test]
    fn a_crash_keeps_what_a_flush_covers_and_may_lose_the_rest() {
        let mut model = model();
        write(&mut model, 8, DONE);
        assert!(survives(&model, 7) && survives(&model, 8));
        let begun = model.begin_flush();
        write(&mut model, 9, DONE);
        model.end_flush(begun);
        assert!(!survives(&model, 7) && survives(&model, 8) && survives(&model, 9));
        assert!(!survives(&model, 6), "a write that never was");
        assert!(!survives(&model, ZERO));
    }

    #[test]
    fn a_durable_write_needs_no_flush() {
        let mut model = model();
        write(&mut model, 8, Outcome::Done(Until::End));
        assert!(!survives(&model, 7) && survives(&model, 8));
    }

    #[test]
    fn a_failed_write_or_a_discard_may_have_happened_or_not() {
        let mut model = model();
        model.begin_write(8, ZERO, &ALL);
        model.end_write(8, &ALL, Outcome::Perhaps);
        let mut other = model.clone();
        read(&mut model, 7).unwrap();
        assert!(read(&mut model, ZERO).is_err(), "a read has decided");
        read(&mut other, ZERO).unwrap();
        assert!(read(&mut other, 7).is_err());
        assert!(survives(&other, 7));
        let begun = other.begin_flush();
        other.end_flush(begun);
        assert!(!survives(&other, 7) && survives(&other, ZERO));
    }

    #[test]
    fn what_a_killed_process_left_in_the_cache_may_still_be_lost() {
        let mut model = model();
        write(&mut model, 8, DONE);
        model.crash();
        model.adopt(&ALL, &bytes(8), Survival::Cached).unwrap();
        assert!(read(&mut model, 7).is_err());
        assert!(survives(&model, 7) && survives(&model, 8));
        let begun = model.begin_flush();
        model.end_flush(begun);
        assert!(!survives(&model, 7) && survives(&model, 8));
    }

    #[test]
    fn bytes_of_other_places_are_recognised() {
        let grain = Grain::new(vec![0, 100, 300]);
        let mut bytes = vec![0; 512];
        fill(&grain, 9, 3..6, &mut bytes);
        assert_eq!(recognise(3, &bytes[..100]), Found::Own(9));
        assert_eq!(recognise(4, &bytes[..100]), Found::Foreign(9, 3));
        assert_eq!(recognise(4, &bytes[90..110]), Found::Mixed);
        assert_eq!(grain.index_of(512 + 299), 4);
        assert_eq!(grain.start(5), 512 + 300);
    }
}
