//! The files that are being written, and what is done for each.
//!
//! A file is remembered from its first growth on until nothing has happened to it for a while:
//! bounded in number, and in descriptors. What we do to a file shows up as events of it, too:
//! allocating and cutting as a modification, closing as a close. So nothing here relies on who did
//! something, only on what the file is like now: a length that has not changed needs nothing, and
//! only growth since the last close makes another close count.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use cowslip::growth::{Rule, Steps};
use rustix::fs::{AtFlags, Stat, fstatvfs, statat};
use rustix::process::{Resource, getrlimit};

use super::entry::Entry;
use super::report::{Event, Reporter};
use super::target::{self, Handle, Id};
use super::watch::{Batch, Change, Key, Watch};

/// Files that are remembered.
const FILES_MAX: usize = 4096;
/// Forgotten files that are known to have been given space.
const GIVEN_MAX: usize = 1 << 16;
/// Files that are given space at a time.
const HELD_MAX: u64 = 1024;
/// Descriptors for each of these: one that does not count as open, one that does.
const DESCRIPTORS: u64 = 2;
/// Growth that is assumed of a file when it is first seen, if it is that long.
const FIRST_GROWTH_BYTES: u64 = 1 << 20;
/// Limit of the time that is spent on it at the end.
const END_MAX: Duration = Duration::from_secs(2);

/// Settings of all files.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How much is allocated.
    pub rule: Rule,
    /// A file that nothing has happened to for so long is forgotten, and what was kept for it given
    /// back.
    pub idle: Duration,
}

/// All files that are watched, with the totals of their space.
#[derive(Debug)]
pub struct Files {
    settings: Settings,
    entries: HashMap<Key, Entry>,
    /// Files that have lost their name and owe space, with their old names.
    orphans: Vec<(String, Entry)>,
    /// Files that were given space and are forgotten.
    given: HashSet<Id>,
    held_max: usize,
    /// Totals over all files: bytes behind their ends, and number of files with such space.
    /// Recounted for each batch, and updated within it.
    held_bytes: u64,
    held_files: usize,
    has_warned: bool,
    has_seen_any: bool,
}

fn name(watch: &Watch, key: &Key) -> String {
    let path = watch.directory(key.0).path.join(&key.1);
    path.display().to_string()
}

impl Files {
    /// Files of these settings; there are none so far.
    pub fn new(settings: Settings) -> Files {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let held = (descriptors / 2 / DESCRIPTORS).clamp(1, HELD_MAX);
        Files {
            settings,
            entries: HashMap::new(),
            orphans: Vec::new(),
            given: HashSet::new(),
            held_max: usize::try_from(held).unwrap_or(1),
            held_bytes: 0,
            held_files: 0,
            has_warned: false,
            has_seen_any: false,
        }
    }

    fn all(&self) -> impl Iterator<Item = &Entry> {
        let orphans = self.orphans.iter().map(|(_, entry)| entry);
        self.entries.values().chain(orphans)
    }

    /// Whether there was a file, and all is settled and quiet.
    pub fn are_done(&self) -> bool {
        self.has_seen_any && self.all().next().is_none()
    }

    /// When something is to be done although nothing happens.
    pub fn next_deadline(&self) -> Option<Instant> {
        let idle = self.settings.idle;
        self.all().filter_map(|entry| entry.deadline(idle)).min()
    }

    /// Acts on a batch.
    pub fn take(&mut self, watch: &Watch, batch: &Batch, reporter: &mut Reporter) {
        let now = Instant::now();
        self.held_bytes = self.all().map(Entry::held_bytes).sum();
        self.held_files = self.all().filter(|entry| entry.is_held()).count();
        for (key, change) in &batch.changes {
            self.look(watch, key, *change, (now, reporter));
        }
        if batch.has_lost {
            let anything = Change {
                is_modified: true,
                is_closed: true,
            };
            let keys: Vec<Key> = self.entries.keys().cloned().collect();
            for key in keys {
                self.look(watch, &key, anything, (now, reporter));
            }
        }
    }

    fn look(
        &mut self,
        watch: &Watch,
        key: &Key,
        change: Change,
        (now, reporter): (Instant, &mut Reporter),
    ) {
        let directory = watch.directory(key.0).handle();
        let found = statat(directory, &key.1, AtFlags::SYMLINK_NOFOLLOW);
        let Some(stat) = found.ok().filter(target::is_regular) else {
            return self.detach(watch, key, now);
        };
        let (id, size) = (target::id(&stat), target::size(&stat));
        let space = target::space(&stat);
        if self.entries.get(key).is_some_and(|known| known.id != id) {
            self.detach(watch, key, now);
        }
        if !self.admit(key, (id, &stat), change, now) {
            return;
        }
        let may_hold = self.held_files < self.held_max;
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        let grown = entry.take_size((size, space), now);
        let mut events = Vec::new();
        if grown > 0 && entry.wants_space(change.is_closed, now) {
            if may_hold || entry.is_held() {
                // What is ahead of need is not free, and not taken either: both count, so that all
                // files together leave room.
                let free = fstatvfs(directory).ok();
                let free = free.map(|free| free.f_bavail.saturating_mul(free.f_frsize));
                let free = free.map(|free| free.saturating_sub(self.held_bytes));
                let find = || Handle::find(directory, &key.1);
                let (first, was_held) = (entry.steps() == 0, entry.is_held());
                let before = entry.held_bytes();
                events.extend(entry.allocate(grown, free, find, now));
                self.held_bytes += entry.held_bytes().saturating_sub(before);
                self.held_files += usize::from(entry.is_held() && !was_held);
                reporter.summary.files += u64::from(first && entry.steps() > 0);
            } else if !std::mem::replace(&mut self.has_warned, true) {
                let why = format!(
                    "space is already allocated for {} other files",
                    self.held_max
                );
                events.push(Event::LeftAlone { why });
            }
        }
        if change.is_closed {
            let find = || Handle::find(directory, &key.1);
            events.extend(entry.closed(self.settings.idle, find, now));
        }
        for event in events {
            reporter.event(&name(watch, key), &event);
        }
        reporter.summary.held_max = reporter.summary.held_max.max(self.held_bytes);
    }

    /// Whether the file is one of ours, from now on if need be.
    fn admit(&mut self, key: &Key, (id, stat): (Id, &Stat), change: Change, now: Instant) -> bool {
        let (size, space) = (target::size(stat), target::space(stat));
        if self.entries.contains_key(key) {
            return true;
        }
        // It has come back by another name.
        if let Some(at) = self.orphans.iter().position(|(_, entry)| entry.id == id) {
            let (_, entry) = self.orphans.swap_remove(at);
            self.entries.insert(key.clone(), entry);
            return true;
        }
        // The other name of a rename, whose event comes later, or another link. Two entries would
        // each hold the file open, and keep each other from getting a lease.
        let known = self.entries.iter().find(|(_, entry)| entry.id == id);
        if let Some(old) = known.map(|(key, _)| key.clone()) {
            if let Some(entry) = self.entries.remove(&old) {
                self.entries.insert(key.clone(), entry);
            }
            return true;
        }
        // Growth of that size is written at once, as a rule.
        if !change.is_modified || size < Steps::DYNAMIC.first_bytes {
            return false;
        }
        if self.entries.len() >= FILES_MAX {
            let settled = self.entries.extract_if(|_, entry| !entry.owes());
            let settled: Vec<Entry> = settled.map(|(_, entry)| entry).collect();
            for entry in &settled {
                self.recall_later(entry);
            }
        }
        if self.entries.len() >= FILES_MAX {
            return false;
        }
        self.has_seen_any = true;
        // How fast it grows is not known; that it does, is.
        let before = (
            size.saturating_sub(FIRST_GROWTH_BYTES),
            space.saturating_sub(FIRST_GROWTH_BYTES),
        );
        let mut entry = Entry::new(id, before, self.settings.rule, now);
        if self.given.remove(&id) {
            entry.recalled();
        }
        self.entries.insert(key.clone(), entry);
        true
    }

    /// The file has another name now, or none.
    fn detach(&mut self, watch: &Watch, key: &Key, now: Instant) {
        let Some(mut entry) = self.entries.remove(key) else {
            return;
        };
        if entry.owes() && !entry.is_deleted() {
            entry.orphaned(now);
            self.orphans.push((name(watch, key), entry));
        } else {
            self.recall_later(&entry);
        }
    }

    /// Remembers of a file that is forgotten that it was given space: it may come back, by this
    /// name or by another.
    fn recall_later(&mut self, entry: &Entry) {
        if entry.was_given() && self.given.len() < GIVEN_MAX {
            self.given.insert(entry.id);
        }
    }

    /// Carries out the actions that are due, and forgets quiet files.
    pub fn tick(&mut self, watch: &Watch, reporter: &mut Reporter) {
        let now = Instant::now();
        let named = self.entries.iter_mut();
        for (key, entry) in named.filter(|(_, entry)| entry.is_due(now)) {
            if let Some(event) = entry.give_back(now) {
                reporter.event(&name(watch, key), &event);
            }
        }
        for (name, entry) in self.orphans.iter_mut().filter(|(_, e)| e.is_due(now)) {
            if let Some(event) = entry.give_back(now) {
                reporter.event(name, &event);
            }
        }
        let idle = self.settings.idle;
        let quiet = self.entries.extract_if(|_, e| e.is_forgotten(idle, now));
        let quiet = quiet.map(|(_, entry)| entry);
        let settled = |e: &Entry| !e.owes() || e.is_deleted();
        let orphans = self.orphans.extract_if(.., |(_, e)| settled(e));
        let left: Vec<Entry> = quiet.chain(orphans.map(|(_, entry)| entry)).collect();
        for entry in &left {
            self.recall_later(entry);
        }
    }

    /// Gives back the space of all files that are not open elsewhere, and reports the rest.
    pub fn end(mut self, watch: &Watch, reporter: &mut Reporter) {
        let named = self.entries.drain();
        let mut rest: Vec<(String, Entry)> = named
            .map(|(key, entry)| (name(watch, &key), entry))
            .chain(self.orphans)
            .filter(|(_, entry)| entry.owes())
            .collect();
        let begun = Instant::now();
        while !rest.is_empty() && begun.elapsed() < END_MAX {
            for (name, entry) in &mut rest {
                if let Some(event) = entry.give_back(Instant::now()) {
                    reporter.event(name, &event);
                }
            }
            rest.retain(|(_, entry)| entry.owes() && !entry.is_deleted());
            if !rest.is_empty() {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        for (name, entry) in &rest {
            let event = Event::Left {
                bytes: entry.held_bytes(),
                why: "another process has it open; 'cowslip grow --trim' frees it later"
                    .to_string(),
            };
            reporter.event(name, &event);
        }
    }
}
