//! The oracle of persistent bitmaps, beside the guest's ([`model`](crate::model)).
//!
//! When a bitmap is added, cleared or enabled, the oracle remembers what the disk may hold then.
//! From then on a part of the disk that can hold none of that any more has to be dirty; that stays
//! so when the bitmap is disabled, and goes over to those that it is merged into. Only what a
//! request asked for since may be dirty.
//!
//! A write that was under way then may have been part of what the disk held. The first read of its
//! place that begins later decides: whatever it sees was there after the bitmap began to record, so
//! anything else that is found there afterwards has changed under its eyes.
//!
//! An image in memory has one list of bitmaps, and the medium has the one that was stored last: its
//! bitmaps follow the disk in here as if nobody had changed the list since. After a crash the file
//! has that list or, if the close had begun, the current one, as a whole. A bitmap that is marked
//! IN_USE is not checked; every other one is.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::model::{Found, Grain, Granules, Model, Moment, Survival, WriteId, recognise};
use crate::remembered::Content;
use crate::rng::Rng;

/// Ranges of bytes; those that touch are one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    fn add(&mut self, range: &Range<u64>) {
        let (mut start, mut end) = (range.start, range.end);
        if start >= end {
            return;
        }
        while let Some((&from, &to)) = self.0.range(..=end).next_back() {
            if to < start {
                break;
            }
            (start, end) = (start.min(from), end.max(to));
            self.0.remove(&from);
        }
        self.0.insert(start, end);
    }

    fn add_all(&mut self, other: &Ranges) {
        other.iter().for_each(|range| self.add(&range));
    }

    fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.0.iter().map(|(&start, &end)| start..end)
    }

    /// The same in whole units.
    fn rounded(&self, unit: u64) -> Ranges {
        let mut out = Ranges::default();
        for range in self.iter() {
            out.add(&(range.start / unit * unit..range.end.next_multiple_of(unit)));
        }
        out
    }

    fn contain(&self, range: &Range<u64>) -> bool {
        let before = self.0.range(..=range.start).next_back();
        before.is_some_and(|(_, &end)| end >= range.end)
    }

    fn cut_at(&mut self, end: u64) {
        let behind = self.0.split_off(&end);
        drop(behind);
        if let Some((_, to)) = self.0.iter_mut().next_back() {
            *to = (*to).min(end);
        }
    }
}

/// A bitmap as a reader finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Its name.
    pub name: String,
    /// Bytes that a bit stands for.
    pub granularity: u64,
    /// Whether it was not saved properly.
    pub in_use: bool,
    /// Whether it follows writes.
    pub auto: bool,
    /// The dirty ranges, in order, as long as ranges can be; nothing if it was not saved properly.
    pub dirty: Vec<Range<u64>>,
}

/// An operation on bitmaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Adds a bitmap.
    Add,
    /// Forgets its recorded bits.
    Clear,
    /// Deletes a bitmap.
    Remove,
    /// Starts recording writes.
    Enable,
    /// Stops recording writes.
    Disable,
    /// Merges the recorded bits of another bitmap.
    Merge,
    /// A look at the ranges that it calls dirty.
    Look,
}

impl What {
    /// All of them.
    pub const ALL: [What; 7] = [
        What::Add,
        What::Clear,
        What::Remove,
        What::Enable,
        What::Disable,
        What::Merge,
        What::Look,
    ];
}

/// An operation for the subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Add one of this name and granularity.
    Add(String, u64),
    /// Clear it.
    Clear(String),
    /// Remove it.
    Remove(String),
    /// Enable it.
    Enable(String),
    /// Disable it.
    Disable(String),
    /// Add to the first what the second has recorded.
    Merge(String, String),
    /// Read it.
    Look(String),
}

/// A bitmap that is followed.
#[derive(Clone, Debug)]
struct Tracked {
    name: String,
    granularity: u64,
    enabled: bool,
    /// Whether it was not saved properly.
    lost: bool,
    /// The possible contents of the disk when it began to record.
    since: Content,
    /// A moment at which it had begun.
    recording: Moment,
    /// Granules that have to be dirty whatever the disk holds.
    must: BTreeSet<u64>,
    /// Granules that may be dirty.
    may: Ranges,
}

impl Tracked {
    /// A read that began at `begun` has seen this in a granule, after the bitmap began to record:
    /// no matter what the disk held then, anything but this is a change.
    fn saw(&mut self, begun: Moment, (granule, write): (u64, WriteId)) {
        if !self.enabled || begun <= self.recording {
            return;
        }
        let mut parts = self.since.iter_mut();
        let part = parts.find(|(granules, _)| granules.contains(&granule));
        if let Some((granules, contents)) = part {
            let possible = &mut contents[(granule - granules.start) as usize];
            if possible.len() > 1 && possible.contains(&write) {
                *possible = vec![write];
            }
        }
    }

    /// Returns the granules that have to be dirty if a reader might find `found` on the disk; none
    /// beyond its end.
    fn required(&self, (found, model): (&Content, &Model)) -> BTreeSet<u64> {
        let mut required = self.must.clone();
        let since = self.since.iter().filter(|_| self.enabled);
        for ((granules, before), (_, now)) in since.zip(found) {
            let contents = granules.clone().zip(before.iter().zip(now));
            for (granule, (before, now)) in contents {
                if !now.iter().any(|write| before.contains(write)) {
                    required.insert(granule);
                }
            }
        }
        required.retain(|&granule| model.grain().start(granule) < model.size());
        required
    }

    /// Checks its dirty ranges while a reader might find `found` on the disk.
    fn check(
        &self,
        dirty: &[Range<u64>],
        (found, model): (&Content, &Model),
    ) -> Result<(), String> {
        let mut is = Ranges::default();
        dirty.iter().for_each(|range| is.add(range));
        let name = &self.name;
        for granule in self.required((found, model)) {
            let start = model.grain().start(granule);
            if !is.contain(&(start..start + 1)) {
                return Err(format!("bitmap {name} misses a change at {start:#x}"));
            }
        }
        let may = self.may.rounded(self.granularity);
        match dirty.iter().find(|range| !may.contain(range)) {
            Some(range) => Err(format!(
                "bitmap {name} has {range:x?} dirty, where nobody asked for anything"
            )),
            None => Ok(()),
        }
    }
}

/// Bitmaps that an image has at most.
const KEPT_MAX: usize = 4;

/// An operation that is under way.
#[derive(Clone, Debug)]
struct Pending {
    change: Change,
    /// The moment of its begin.
    begun: Moment,
    /// Ranges of requests that were begun meanwhile.
    may: Ranges,
}

/// All bitmaps of an image.
#[derive(Clone, Debug, Default)]
pub struct Bitmaps {
    now: Vec<Tracked>,
    /// Lists that the medium may have. What was found or stored last comes first; others only if it
    /// may get lost.
    stored: Vec<Vec<Tracked>>,
    in_flight: Vec<(WriteId, Range<u64>)>,
    pending: Option<Pending>,
    /// The close has begun.
    closing: bool,
    /// Whether the close has ended well.
    closed: bool,
    added: u64,
}

impl Bitmaps {
    /// Whether bitmaps of the current list were not saved properly, so that no disk changes its
    /// size.
    pub fn has_lost(&self) -> bool {
        self.now.iter().any(|bitmap| bitmap.lost)
    }

    /// Whether the current list has any.
    pub fn is_any(&self) -> bool {
        !self.now.is_empty()
    }

    fn lists(&mut self) -> impl Iterator<Item = &mut Tracked> {
        self.now.iter_mut().chain(self.stored.iter_mut().flatten())
    }

    /// A request that changes something begins.
    pub fn begin(&mut self, id: WriteId, range: Range<u64>) {
        for bitmap in self.lists().filter(|bitmap| bitmap.enabled) {
            bitmap.may.add(&range);
        }
        if let Some(pending) = &mut self.pending {
            pending.may.add(&range);
        }
        self.in_flight.push((id, range));
    }

    /// Ends a request, whether it succeeded or not.
    pub fn end(&mut self, id: WriteId) {
        self.in_flight.retain(|(other, _)| *other != id);
    }

    /// A read that began at `begun` has delivered `bytes`, rightly.
    pub fn saw(&mut self, begun: Moment, (granules, bytes): (&Granules, &[u8]), grain: &Grain) {
        let base = grain.start(granules.start);
        for granule in granules.clone() {
            let from = (grain.start(granule) - base) as usize;
            let to = (grain.start(granule + 1) - base) as usize;
            if let Found::Own(write) = recognise(granule, &bytes[from..to]) {
                self.lists()
                    .for_each(|bitmap| bitmap.saw(begun, (granule, write)));
            }
        }
    }

    /// The disk is about to have another size, with nothing else in flight.
    pub fn begin_resize(&mut self, (old, new): (u64, u64)) {
        for bitmap in self.lists().filter(|bitmap| bitmap.enabled) {
            bitmap.may.add(&(old..new));
        }
    }

    /// Ends a resize; the disk has the new size or the old one.
    pub fn end_resize(&mut self, size: u64, model: &Model) {
        for bitmap in &mut self.now {
            bitmap
                .must
                .retain(|&granule| model.grain().start(granule) < size);
            bitmap.may.cut_at(size.next_multiple_of(bitmap.granularity));
        }
    }

    /// All of the disk is about to change.
    pub fn begin_everything(&mut self, size: u64) {
        for bitmap in self.lists().filter(|bitmap| bitmap.enabled) {
            bitmap.may.add(&(0..size));
        }
    }

    /// Begins an operation, on bitmaps that `rng` chooses. `None` if there is none for it, or
    /// another one is under way.
    pub fn begin_change(&mut self, what: What, rng: &mut Rng, model: &mut Model) -> Option<Change> {
        if self.pending.is_some() {
            return None;
        }
        let change = self.draw(what, rng, model.size())?;
        let mut may = Ranges::default();
        self.in_flight.iter().for_each(|(_, range)| may.add(range));
        self.pending = Some(Pending {
            change: change.clone(),
            begun: model.begin_read(),
            may,
        });
        Some(change)
    }

    fn draw(&mut self, what: What, rng: &mut Rng, size: u64) -> Option<Change> {
        let names: Vec<String> = self.now.iter().map(|b| b.name.clone()).collect();
        if names.is_empty() || what == What::Add && names.len() < KEPT_MAX {
            // Bits of several clusters where they are small, but not for a disk of gigabytes.
            let least = (size >> 16).max(512).next_power_of_two();
            let granularity = least << rng.pick(&[0, 0, 1, 2, 3, 7]);
            self.added += 1;
            return Some(Change::Add(format!("bitmap{}", self.added), granularity));
        }
        let (target, source) = (rng.pick(&names), rng.pick(&names));
        let lost = self.now.iter().find(|bitmap| bitmap.lost);
        if let (Some(lost), true) = (lost, what == What::Add || rng.chance(50)) {
            // Nothing else can be done with it, and while it is there the disk keeps its size.
            return Some(Change::Remove(lost.name.clone()));
        }
        Some(match what {
            What::Add => return None,
            What::Clear => Change::Clear(target),
            What::Remove => Change::Remove(target),
            What::Enable => Change::Enable(target),
            What::Disable => Change::Disable(target),
            What::Merge => Change::Merge(target, source),
            What::Look => Change::Look(target),
        })
    }

    fn find(&self, name: &str) -> usize {
        let found = self.now.iter().position(|bitmap| bitmap.name == name);
        found.expect("changes name what there is")
    }

    /// Whether the operation that is under way cannot be, on an image of this version.
    pub fn refuses(&self, version: u32) -> bool {
        let lost = |name: &String| self.now[self.find(name)].lost;
        match self.pending.as_ref().map(|pending| &pending.change) {
            Some(Change::Add(..)) => version < 3,
            Some(Change::Merge(target, source)) => lost(target) || lost(source),
            Some(
                Change::Clear(name)
                | Change::Enable(name)
                | Change::Disable(name)
                | Change::Look(name),
            ) => lost(name),
            Some(Change::Remove(_)) | None => false,
        }
    }

    /// Ends a change that has failed, or was refused: nothing has changed.
    pub fn taken_back(&mut self, model: &mut Model) {
        if let Some(pending) = self.pending.take() {
            model.abandon_read(pending.begun);
        }
    }

    /// Ends a change that has succeeded; `dirty` are the ranges that a look has found.
    ///
    /// # Errors
    /// If that may not be.
    pub fn end_change(&mut self, dirty: &[Range<u64>], model: &mut Model) -> Result<(), String> {
        let Some(Pending { change, begun, may }) = self.pending.take() else {
            return Ok(());
        };
        let found = model.possible_since(begun);
        model.abandon_read(begun);
        let recording = model.moment();
        match change {
            Change::Add(name, granularity) => self.now.push(Tracked {
                name,
                granularity,
                enabled: true,
                lost: false,
                since: found,
                recording,
                must: BTreeSet::new(),
                may,
            }),
            Change::Remove(name) => drop(self.now.remove(self.find(&name))),
            Change::Clear(name) => {
                let at = self.find(&name);
                let bitmap = &mut self.now[at];
                (bitmap.since, bitmap.must) = (found, BTreeSet::new());
                bitmap.recording = recording;
                bitmap.may = if bitmap.enabled {
                    may
                } else {
                    Ranges::default()
                };
            }
            Change::Enable(name) => {
                let at = self.find(&name);
                let bitmap = &mut self.now[at];
                if !bitmap.enabled {
                    (bitmap.enabled, bitmap.since) = (true, found);
                    bitmap.recording = recording;
                    bitmap.may.add_all(&may);
                }
            }
            Change::Disable(name) => {
                let at = self.find(&name);
                let bitmap = &mut self.now[at];
                bitmap.must = bitmap.required((&found, model));
                bitmap.enabled = false;
            }
            Change::Merge(target, source) => {
                let source = &self.now[self.find(&source)];
                let (must, may) = (
                    source.required((&found, model)),
                    source.may.rounded(source.granularity),
                );
                let at = self.find(&target);
                self.now[at].must.extend(must);
                self.now[at].may.add_all(&may);
            }
            Change::Look(name) => {
                return self.now[self.find(&name)].check(dirty, (&found, model));
            }
        }
        Ok(())
    }

    /// The image is about to be closed.
    pub fn begin_close(&mut self) {
        self.closing = true;
    }

    /// Ends a close: the list is durable.
    pub fn end_close(&mut self) {
        self.stored = vec![self.now.clone()];
        (self.closing, self.closed) = (false, true);
    }

    /// The process is gone.
    pub fn crash(&mut self) {
        self.in_flight.clear();
        self.pending = None;
    }

    /// Takes over the bitmaps of the file after an ending, when the disk is known.
    ///
    /// # Errors
    /// If it may not have.
    pub fn adopt(
        &mut self,
        found: &[Reading],
        (model, survival): (&Model, Survival),
    ) -> Result<(), String> {
        let closed = std::mem::take(&mut self.closed);
        let mut stored = std::mem::take(&mut self.stored);
        if stored.is_empty() {
            stored.push(Vec::new());
        }
        if std::mem::take(&mut self.closing) {
            stored.insert(0, std::mem::take(&mut self.now));
        }
        let content = model.possible();
        let check = |list: &Vec<Tracked>| check_list((list, closed), found, (&content, model));
        let outcomes: Vec<Result<(), String>> = stored.iter().map(check).collect();
        let Some(at) = outcomes.iter().position(Result::is_ok) else {
            let texts: Vec<String> = outcomes.into_iter().filter_map(Result::err).collect();
            return Err(format!("after reopening {}", texts.join("; or ")));
        };
        self.now = stored[at].clone();
        for (bitmap, found) in self.now.iter_mut().zip(found) {
            bitmap.lost |= found.in_use;
        }
        match survival {
            Survival::Durable => stored.clear(),
            Survival::Cached => {}
        }
        stored.insert(0, self.now.clone());
        self.stored = stored;
        Ok(())
    }
}

/// Checks the bitmaps that were found against those of a list.
fn check_list(
    (list, closed): (&[Tracked], bool),
    found: &[Reading],
    disk: (&Content, &Model),
) -> Result<(), String> {
    let names: Vec<&String> = list.iter().map(|bitmap| &bitmap.name).collect();
    if !names
        .iter()
        .copied()
        .eq(found.iter().map(|bitmap| &bitmap.name))
    {
        return Err(format!("the bitmaps are {found:?}, not {names:?}"));
    }
    for (bitmap, found) in list.iter().zip(found) {
        let name = &bitmap.name;
        if (found.granularity, found.auto) != (bitmap.granularity, bitmap.enabled) {
            return Err(format!("bitmap {name} has become another: {found:?}"));
        }
        match (found.in_use, bitmap.lost) {
            (false, true) => return Err(format!("bitmap {name} was lost, and says so no longer")),
            (true, false) if closed => return Err(format!("bitmap {name} was lost by a close")),
            (true, _) => {}
            (false, false) => bitmap.check(&found.dirty, disk)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Outcome, Until, fill};

    const SECTORS: Range<u64> = 0..64;

    fn model() -> Model {
        Model::new(Grain::new(vec![0]), std::slice::from_ref(&SECTORS), |_| 7)
    }

    fn write(bitmaps: &mut Bitmaps, model: &mut Model, (id, sector): (WriteId, u64)) {
        let granules = sector..sector + 1;
        bitmaps.begin(id, sector * 512..sector * 512 + 512);
        model.begin_write(id, id, &granules);
        model.end_write(id, &granules, Outcome::Done(Until::End));
        bitmaps.end(id);
    }

    fn change(bitmaps: &mut Bitmaps, model: &mut Model, what: What) {
        let rng = &mut Rng::new(1);
        bitmaps.begin_change(what, rng, model).unwrap();
        bitmaps.end_change(&[], model).unwrap();
    }

    /// Returns one bitmap, and a disk whose sector 4 has been written since.
    fn tracked() -> (Bitmaps, Model) {
        let (mut bitmaps, mut model) = (Bitmaps::default(), model());
        write(&mut bitmaps, &mut model, (8, 20));
        change(&mut bitmaps, &mut model, What::Add);
        write(&mut bitmaps, &mut model, (9, 4));
        (bitmaps, model)
    }

    fn reading(bitmaps: &Bitmaps, sectors: &[u64]) -> Reading {
        let bitmap = &bitmaps.now[0];
        let mut dirty = Ranges::default();
        sectors
            .iter()
            .for_each(|sector| dirty.add(&(sector * 512..sector * 512 + 512)));
        Reading {
            name: bitmap.name.clone(),
            granularity: bitmap.granularity,
            in_use: false,
            auto: true,
            dirty: dirty.rounded(bitmap.granularity).iter().collect(),
        }
    }

    fn adopt(bitmaps: &Bitmaps, model: &Model, found: &[Reading]) -> Result<(), String> {
        let (mut bitmaps, mut model) = (bitmaps.clone(), model.clone());
        model.crash();
        bitmaps.crash();
        bitmaps.adopt(found, (&model, Survival::Durable))
    }

    #[test]
    fn a_bitmap_must_have_what_changed_and_nothing_else() {
        let (mut bitmaps, model) = tracked();
        bitmaps.end_close();
        adopt(&bitmaps, &model, &[reading(&bitmaps, &[4])]).unwrap();
        assert!(adopt(&bitmaps, &model, &[reading(&bitmaps, &[])]).is_err());
        assert!(adopt(&bitmaps, &model, &[reading(&bitmaps, &[4, 20])]).is_err());
        assert!(adopt(&bitmaps, &model, &[]).is_err());
    }

    #[test]
    fn after_a_crash_the_list_is_the_stored_one_unless_the_close_had_begun() {
        let (mut bitmaps, mut model) = tracked();
        let [missing, right] = [reading(&bitmaps, &[]), reading(&bitmaps, &[4])];
        adopt(&bitmaps, &model, &[]).unwrap();
        assert!(adopt(&bitmaps, &model, std::slice::from_ref(&right)).is_err());
        bitmaps.begin_close();
        adopt(&bitmaps, &model, &[]).unwrap();
        adopt(&bitmaps, &model, std::slice::from_ref(&right)).unwrap();
        bitmaps.end_close();
        write(&mut bitmaps, &mut model, (10, 4));
        let mut marked = missing.clone();
        marked.in_use = true;
        bitmaps.closed = false;
        adopt(&bitmaps, &model, &[marked]).unwrap();
        assert!(adopt(&bitmaps, &model, &[missing]).is_err());
    }

    #[test]
    fn what_was_lost_stays_lost() {
        let (mut bitmaps, mut model) = tracked();
        bitmaps.end_close();
        let mut found = reading(&bitmaps, &[4]);
        found.in_use = true;
        assert!(
            adopt(&bitmaps, &model, &[found.clone()]).is_err(),
            "by a close"
        );
        bitmaps.closed = false;
        model.crash();
        bitmaps
            .adopt(&[found], (&model, Survival::Durable))
            .unwrap();
        assert!(bitmaps.has_lost());
        assert!(adopt(&bitmaps, &model, &[reading(&bitmaps, &[4])]).is_err());
    }

    #[test]
    fn what_is_cut_off_has_to_be_dirty_nowhere() {
        let (mut bitmaps, mut model) = tracked();
        let resize = |bitmaps: &mut Bitmaps, model: &mut Model, size: u64| {
            bitmaps.begin_resize((model.size(), size));
            model.begin_resize(40, size);
            model.end_resize(40, (size, size), Outcome::Done(Until::End));
            bitmaps.end_resize(size, model);
        };
        resize(&mut bitmaps, &mut model, 8 * 512);
        change(&mut bitmaps, &mut model, What::Disable);
        resize(&mut bitmaps, &mut model, 64 * 512);
        bitmaps.end_close();
        let mut found = reading(&bitmaps, &[4]);
        found.auto = false;
        let sizes = |mut bitmaps: Bitmaps, found: &[Reading]| {
            bitmaps.adopt(found, (&model, Survival::Durable))
        };
        sizes(bitmaps.clone(), std::slice::from_ref(&found)).unwrap();
        found.dirty.clear();
        assert!(sizes(bitmaps, &[found]).is_err());
    }

    /// A write that is under way when a bitmap is cleared may belong to what is recorded or not; a
    /// read that begins later and does not see it yet decides that it does.
    #[test]
    fn a_write_that_a_later_read_does_not_see_yet_is_recorded() {
        for is_seen in [false, true] {
            let (mut bitmaps, mut model) = tracked();
            bitmaps.begin(30, 30 * 512..31 * 512);
            model.begin_write(30, 30, &(30..31));
            change(&mut bitmaps, &mut model, What::Clear);
            let (begun, mut bytes) = (model.begin_read(), vec![0; 512]);
            let written = if is_seen { 30 } else { 7 };
            fill(&model.grain().clone(), written, 30..31, &mut bytes);
            model.end_read(begun, &(30..31), &bytes).unwrap();
            bitmaps.saw(begun, (&(30..31), &bytes), &model.grain().clone());
            model.end_write(30, &(30..31), Outcome::Done(Until::End));
            bitmaps.end(30);
            bitmaps.end_close();
            let clean = adopt(&bitmaps, &model, &[reading(&bitmaps, &[])]);
            assert_eq!(clean.is_ok(), is_seen, "{clean:?}");
            adopt(&bitmaps, &model, &[reading(&bitmaps, &[30])]).unwrap();
        }
    }

    /// A read that began before the bitmap was cleared says nothing.
    #[test]
    fn a_read_that_began_earlier_decides_nothing() {
        let (mut bitmaps, mut model) = tracked();
        let (begun, mut bytes) = (model.begin_read(), vec![0; 512]);
        bitmaps.begin(30, 30 * 512..31 * 512);
        model.begin_write(30, 30, &(30..31));
        change(&mut bitmaps, &mut model, What::Clear);
        fill(&model.grain().clone(), 7, 30..31, &mut bytes);
        bitmaps.saw(begun, (&(30..31), &bytes), &model.grain().clone());
        model.end_write(30, &(30..31), Outcome::Done(Until::End));
        bitmaps.end(30);
        bitmaps.end_close();
        adopt(&bitmaps, &model, &[reading(&bitmaps, &[])]).unwrap();
    }

    #[test]
    fn a_clear_may_fall_before_or_after_what_is_in_flight() {
        let (mut bitmaps, mut model) = tracked();
        bitmaps.begin(30, 30 * 512..31 * 512);
        model.begin_write(30, 30, &(30..31));
        change(&mut bitmaps, &mut model, What::Clear);
        model.end_write(30, &(30..31), Outcome::Done(Until::End));
        bitmaps.end(30);
        bitmaps.end_close();
        adopt(&bitmaps, &model, &[reading(&bitmaps, &[])]).unwrap();
        adopt(&bitmaps, &model, &[reading(&bitmaps, &[30])]).unwrap();
        assert!(adopt(&bitmaps, &model, &[reading(&bitmaps, &[4])]).is_err());
    }
}
