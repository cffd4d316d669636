//! One change of a file fails, wherever it falls in a job: done all the same, by half, or not at
//! all. The session goes on: the job again, a guest's write, a flush, the close. What is in the
//! files then, and what a power failure leaves of it, is the old state or the new one, whole.
//!
//! A failed write may have happened. So after the failed write of a header, or a failed flush, no
//! file of the image may change any more.

mod jobs;

use std::ops::Range;
use std::sync::Arc;

use cowslip::errno::{EIO, ENOSPC};
use cowslip::file::BlockFile;
use cowslip::image::{DiscardPolicy, Durability, OpenOptions};
use cowslip::luks::Passphrase;
use cowslip::qcow2::check::{Finding, Severity};
use cowslip::qcow2::header::Header;
use cowslip::qcow2::repair::{self, RepairOptions, Scope};
use cowslip::qcow2::snapshot::SnapshotChoice;
use cowslip::{Buf, BufMut, Error, Image, Result};

use crate::support::failing::{Contents, Medium, Reach, Strike};
use crate::support::{block_on, our_check};

/// Where the guest writes after the job.
const GUEST: Range<usize> = 20_000..23_000;
const GUEST_BYTE: u8 = 0xee;

type Work = Box<dyn Fn(&Image, &Medium) -> Result<()>>;

/// A job, and what it begins with.
struct Case {
    name: &'static str,
    /// The image is the first of these files.
    start: Contents,
    job: Work,
    /// Its keys change.
    changes_keys: bool,
    /// Its change is in memory until the image is closed.
    ends_with_close: bool,
    /// It takes long: only changes near the write of a header fail.
    is_long: bool,
    /// The guest's bytes that it writes: they may be the old or the new ones by sectors.
    writes: Option<Range<usize>>,
}

#[derive(Clone, Debug, PartialEq)]
struct SeenBitmap {
    name: String,
    follows_writes: bool,
    /// Its dirty ranges; `None` if it was not saved.
    dirty: Option<Vec<Range<u64>>>,
}

/// The state of the image as seen by a guest and by tools.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    disk: Vec<u8>,
    snapshots: Vec<(String, Vec<u8>)>,
    /// Other fields of the header: version, features, backing file, refcount width.
    says: String,
    bitmaps: Vec<SeenBitmap>,
    opened_by: Vec<&'static str>,
}

fn options(writable: bool, passphrase: &str) -> OpenOptions {
    OpenOptions {
        writable,
        discard: DiscardPolicy::Unmap,
        passphrase: Some(Passphrase::new(passphrase.as_bytes().to_vec())),
        ..OpenOptions::default()
    }
}

/// Opens a file of a medium with the first passphrase that fits.
fn open(medium: &Medium, name: &str, writable: bool) -> Result<Image> {
    let mut failed = None;
    for passphrase in ["a", "b"] {
        let opened = Image::open(medium.file(name), options(writable, passphrase), medium);
        match block_on(opened) {
            Err(error @ Error::Key(_)) => failed = Some(error),
            other => return other,
        }
    }
    Err(failed.unwrap())
}

fn read(image: &Image) -> Vec<u8> {
    let buf = BufMut::zeroed(image.size() as usize);
    block_on(image.read(0, buf)).unwrap().to_vec()
}

fn is_qcow2(bytes: &[u8]) -> bool {
    bytes.starts_with(b"QFI\xfb")
}

fn says(header: &Header) -> String {
    let hint = header.extensions.allocation.map(|hint| hint.policy);
    let features = (
        header.incompatible_features & !1,
        header.compatible_features,
        header.backing_file.as_deref(),
    );
    format!(
        "{} {features:?} {hint:?} {} {}",
        header.version, header.refcount_order, header.size
    )
}

fn seen(contents: &Contents) -> Seen {
    let medium = Medium::new(contents, None);
    let name = &contents[0].0;
    let opened = ["a", "b"].map(|passphrase| {
        let options = options(false, passphrase);
        let image = block_on(Image::open(medium.file(name), options, &medium));
        (passphrase, image)
    });
    let opened_by = opened.iter().filter(|(_, image)| image.is_ok());
    let opened_by = opened_by.map(|(passphrase, _)| *passphrase).collect();
    let [(_, first), (_, second)] = opened;
    let image = first.or(second).unwrap();
    let header = is_qcow2(&contents[0].1)
        .then(|| Header::parse(&contents[0].1, contents[0].1.len() as u64, name).unwrap());
    let snapshots = block_on(image.snapshots()).unwrap();
    let snapshots = snapshots.into_iter().map(|snapshot| {
        let then = OpenOptions {
            snapshot: Some(SnapshotChoice::Id(snapshot.id.clone())),
            ..options(false, "a")
        };
        let then = block_on(Image::open(medium.file(name), then, &medium)).unwrap();
        (snapshot.id, read(&then))
    });
    let bitmaps = block_on(image.bitmaps()).unwrap().into_iter();
    let bitmaps = bitmaps.map(|bitmap| {
        let dirty = (!bitmap.in_use).then(|| {
            let bits = block_on(image.dirty_bits(&bitmap.name)).unwrap();
            bits.dirty_ranges().collect()
        });
        SeenBitmap {
            name: bitmap.name,
            follows_writes: bitmap.auto,
            dirty,
        }
    });
    Seen {
        disk: read(&image),
        snapshots: snapshots.collect(),
        says: header.as_ref().map_or(String::new(), says),
        bitmaps: bitmaps.collect(),
        opened_by,
    }
}

/// The state of the guest's write.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Guest {
    /// It may be there.
    MayBe,
    /// It was flushed.
    IsThere,
}

/// Why what was found is not this state with the guest's write.
fn difference(found: &Seen, state: &Seen, guest: Guest) -> Option<String> {
    if (&found.says, &found.snapshots) != (&state.says, &state.snapshots) {
        return Some(format!("the header says {}", found.says));
    }
    if found.disk.len() != state.disk.len() {
        return Some(format!("the disk has {} bytes", found.disk.len()));
    }
    let differs = |at: &usize| {
        let (is, was) = (found.disk[*at], state.disk[*at]);
        match GUEST.contains(at) {
            true if guest == Guest::IsThere => is != GUEST_BYTE,
            true => is != GUEST_BYTE && is != was,
            false => is != was,
        }
    };
    if let Some(at) = (0..found.disk.len()).find(differs) {
        return Some(format!("byte {at} of the disk is {:#x}", found.disk[at]));
    }
    let names = |seen: &Seen| {
        let names = seen.bitmaps.iter().map(|bitmap| bitmap.name.clone());
        names.collect::<Vec<_>>()
    };
    if names(found) != names(state) {
        return Some(format!("the bitmaps are {:?}", names(found)));
    }
    let is_new = |at: &usize| found.disk[*at] == GUEST_BYTE && state.disk[*at] != GUEST_BYTE;
    let written = GUEST.filter(is_new).map(|at| at as u64..at as u64 + 1);
    let written: Vec<_> = written.collect();
    for (bitmap, was) in found.bitmaps.iter().zip(&state.bitmaps) {
        let Some(dirty) = &bitmap.dirty else {
            continue;
        };
        let covers = |part: &Range<u64>| {
            let mut ranges = dirty.iter();
            ranges.any(|range| range.start <= part.start && part.end <= range.end)
        };
        let written = written.iter().filter(|_| bitmap.follows_writes);
        if !was.dirty.iter().flatten().chain(written).all(covers) {
            return Some(format!("{bitmap:?}"));
        }
    }
    None
}

/// Nothing but leaks, and flags that may be behind the counts: in version 2, or under the dirty
/// bit.
fn judge_metadata(what: &str, contents: &Contents) {
    for (name, bytes) in contents.iter().filter(|(_, bytes)| is_qcow2(bytes)) {
        let mut findings = Vec::new();
        our_check(bytes.clone(), &mut findings).unwrap_or_else(|error| panic!("{what}: {error}"));
        let may_lag = bytes[7] == 2 || bytes[79] & 1 != 0;
        let data_file = contents.iter().find(|(name, _)| name == "data");
        if let Some((_, data)) = data_file {
            let size = u64::from_be_bytes(bytes[24..32].try_into().unwrap());
            assert!(
                data.len() as u64 >= size,
                "{what}: the data file ends before the disk"
            );
        }
        for finding in findings {
            let is_flag = matches!(
                finding,
                Finding::CopiedL2 { .. } | Finding::CopiedData { .. }
            );
            let allowed = finding.severity() == Severity::Leak || (is_flag && may_lag);
            assert!(allowed, "{what}: {name}: {finding}");
        }
    }
}

/// Asserts that the image is in one of these states, and can be opened, written and closed.
fn judge(what: &str, (contents, found): (&Contents, &Seen), states: &[&Seen], guest: Guest) {
    let why = states.iter().map(|state| difference(found, state, guest));
    let why: Vec<_> = why.collect();
    assert!(why.contains(&None), "{what}: {why:?}");
    if !is_qcow2(&contents[0].1) {
        return;
    }
    let medium = Medium::new(contents, None);
    let image = open(&medium, &contents[0].0, true).unwrap();
    write(&image).unwrap();
    block_on(image.close()).unwrap_or_else(|error| panic!("{what}: {error}"));
    let contents = medium.contents();
    judge_metadata(what, &contents);
    let after = seen(&contents);
    let differs = difference(&after, found, Guest::IsThere);
    assert!(differs.is_none(), "{what}: later {differs:?}");
}

fn write(image: &Image) -> Result<()> {
    let data = Buf::from(vec![GUEST_BYTE; GUEST.len()]);
    block_on(image.write(GUEST.start as u64, data, Durability::Cached))
}

/// How a session has ended.
struct Ended {
    medium: Medium,
    done: bool,
    guest: Guest,
}

/// A session: the job, perhaps a second time, a write, a flush, the close.
fn session(case: &Case, strike: Option<Strike>, again: bool) -> Ended {
    let medium = Medium::new(&case.start, strike);
    let image = open(&medium, &case.start[0].0, true).unwrap();
    let mut done = (case.job)(&image, &medium).is_ok();
    if !done && again {
        done = (case.job)(&image, &medium).is_ok();
        // Nobody knows which slots are in use.
        assert!(!done || !case.changes_keys, "{}, {strike:?}", case.name);
    }
    let written = write(&image).is_ok();
    let flushed = block_on(image.flush()).is_ok();
    // If the close fails, changes that were not flushed may be missing.
    let closed = block_on(image.close()).is_ok();
    done &= closed || !case.ends_with_close;
    let guest = match written && (flushed || closed) {
        true => Guest::IsThere,
        false => Guest::MayBe,
    };
    Ended {
        medium,
        done,
        guest,
    }
}

/// Each change in turn fails.
fn each_failure(case: &Case) {
    let clean = session(case, None, false);
    assert!(clean.done, "{}", case.name);
    let medium = Medium::new(&case.start, None);
    let image = open(&medium, &case.start[0].0, true).unwrap();
    (case.job)(&image, &medium).unwrap();
    block_on(image.close()).unwrap();
    let (old, new) = (seen(&case.start), seen(&medium.contents()));
    let contents = clean.medium.contents();
    let found = seen(&contents);
    judge(case.name, (&contents, &found), &[&new], clean.guest);
    let halves = clean.medium.halves();
    assert!(halves.len() > 2, "{} changes something", case.name);
    let headers = clean.medium.headers();
    let is_near = |at: &usize| headers.iter().any(|header| header.abs_diff(*at) <= 6);
    assert!(!case.is_long || !headers.is_empty(), "{}", case.name);
    for (at, can_be_halved) in halves.into_iter().enumerate() {
        if case.is_long && !is_near(&at) {
            continue;
        }
        for reach in [Reach::All, Reach::Half, Reach::Nothing] {
            if reach == Reach::Half && !can_be_halved {
                continue;
            }
            let both = [(EIO, at % 2 == 0), (ENOSPC, at % 2 == 1)];
            // Keys take time, too.
            let tried = if case.changes_keys || case.is_long {
                1
            } else {
                2
            };
            for (errno, again) in both.into_iter().cycle().skip(at / 2).take(tried) {
                let strike = Strike { at, reach, errno };
                judge_failure(case, (strike, again), (&old, &new));
            }
        }
    }
}

fn judge_failure(case: &Case, (strike, again): (Strike, bool), (old, new): (&Seen, &Seen)) {
    let ended = session(case, Some(strike), again);
    let struck = ended.medium.struck().expect("there are that many changes");
    let what = format!("{}, {strike:?} again {again} at {struck}", case.name);
    let late = ended.medium.late();
    let goes_on = !is_qcow2(&case.start[0].1);
    assert!(late.is_empty() || goes_on, "{what}: then {late:x?}");
    let seen_by_others = ended.medium.contents();
    let durable = ended.medium.durable();
    let differs = seen_by_others != durable;
    let power_fails = differs.then_some(("the power fails", durable));
    for (when, contents) in [("", seen_by_others)].into_iter().chain(power_fails) {
        let what = format!("{what} {when}");
        judge_metadata(&what, &contents);
        let found = seen(&contents);
        let between = case.writes.as_ref();
        let between = between.map(|range| in_between(&found, (old, new), range));
        let states = match (ended.done, &between) {
            (true, _) => vec![new],
            (false, Some(between)) => vec![between],
            (false, None) => vec![old, new],
        };
        judge(&what, (&contents, &found), &states, ended.guest);
        let opened_by = &found.opened_by;
        let known = |key| states.iter().any(|state| state.opened_by.contains(key));
        assert!(opened_by.iter().all(known), "{what}: {opened_by:?} open it");
        let is_whole = !case.changes_keys || ended.done;
        let is_state = states.iter().any(|state| &state.opened_by == opened_by);
        assert!(is_state || !is_whole, "{what}: {opened_by:?} open it");
    }
}

/// The state in which the job has written what was found in its range, which is new or old.
fn in_between(found: &Seen, (old, new): (&Seen, &Seen), range: &Range<usize>) -> Seen {
    let mut between = old.clone();
    for at in range.clone() {
        if found.disk[at] == new.disk[at] {
            between.disk[at] = new.disk[at];
        }
    }
    if between.disk != old.disk {
        between.bitmaps.clone_from(&new.bitmaps);
    }
    between
}

/// Files in memory, for what is made before anything fails.
fn plain(contents: &Contents) -> Medium {
    Medium::new(contents, None)
}

/// A repair that fails at a change, and is tried again at once.
#[test]
fn a_repair_that_failed_can_be_repeated() {
    for start in jobs::damaged() {
        let old = seen(&start);
        let clean = plain(&start);
        let file: Arc<dyn BlockFile> = clean.file(&start[0].0);
        let all = RepairOptions::new(Scope::All);
        block_on(repair::repair(&file, &all, &mut ())).unwrap();
        let halves = clean.halves();
        assert!(halves.len() > 5, "there is something to repair");
        for at in 0..halves.len() {
            for reach in [Reach::All, Reach::Half, Reach::Nothing] {
                let strike = Strike {
                    at,
                    reach,
                    errno: EIO,
                };
                let medium = Medium::new(&start, Some(strike));
                let file: Arc<dyn BlockFile> = medium.file(&start[0].0);
                let failed = block_on(repair::repair(&file, &all, &mut ()));
                let what = format!("{strike:?} at {}", medium.struck().unwrap());
                assert!(medium.late().is_empty(), "{what}: {:?}", medium.late());
                // A hole that is not punched costs space.
                let punches = what.contains("Discard");
                assert!(failed.is_err() || punches, "{what}");
                // The medium may have lost what the failed flush should have covered: from there,
                // and from what a reader sees.
                for contents in [medium.durable(), medium.contents()] {
                    let again = plain(&contents);
                    let file: Arc<dyn BlockFile> = again.file(&start[0].0);
                    let outcome = block_on(repair::repair(&file, &all, &mut ())).unwrap();
                    assert!(outcome.check.is_clean(), "{what}: {:?}", outcome.check);
                    let mut found = seen(&again.contents());
                    found.says.clone_from(&old.says);
                    assert!(found == old, "{what}");
                }
            }
        }
    }
}
