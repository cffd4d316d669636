//! Making, applying and deleting a snapshot, cut short at every write: afterwards there is the old
//! state or the new one, whole, and what a check finds is what docs/durability.md allows.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cowslip::file::BlockFile;
use cowslip::file::memory::MemoryFile;
use cowslip::job::{Attendant, Moment, Progress};
use cowslip::qcow2::check::{Finding, Severity};
use cowslip::{Error, Image, Job, Result};

use super::{Model, Random, by_id, checked_clean, made, named, open};
use crate::support::crash::{Recorder, each_crash};
use crate::support::{block_on, our_check, peers_are_installed};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Create,
    Apply,
    Delete,
}

const CHANGES: [Change; 3] = [Change::Create, Change::Apply, Change::Delete];

impl Change {
    fn begin(self, image: &Image, job: &Job) -> Result<()> {
        match self {
            Change::Create => block_on(image.create_snapshot(&named("new"), job)).map(|_| ()),
            Change::Apply => block_on(image.apply_snapshot(&by_id("1"), job)),
            Change::Delete => block_on(image.delete_snapshot(&by_id("1"), job)),
        }
    }

    /// The state after it.
    fn of(self, model: &Model) -> Model {
        let mut new = model.clone();
        match self {
            Change::Create => {
                let id = (new.snapshots.len() + 1).to_string();
                new.snapshots.push((id, new.disk.clone()));
            }
            Change::Apply => new.disk = new.snapshots[0].1.clone(),
            Change::Delete => drop(new.snapshots.remove(0)),
        }
        new
    }
}

/// An image with two snapshots, the first of which shares some of its clusters and tables with the
/// disk.
fn image(create_options: &str, size: u64) -> (Vec<u8>, Model) {
    let file = Arc::new(MemoryFile::new("image", made(create_options, size), 1));
    let opened = open(file.clone());
    let mut model = Model::new(size);
    let random = &mut Random(size);
    for _ in 0..4 {
        model.write(&opened, random);
        model.compress(&opened, random);
    }
    model.create(&opened, "one");
    model.write(&opened, random);
    model.create(&opened, "two");
    model.write(&opened, random);
    model.write(&opened, random);
    block_on(opened.close()).unwrap();
    checked_clean(&file, create_options);
    (file.contents(), model)
}

/// Asserts that a crash has left in the metadata nothing but leaks, and COPIED bits that differ
/// from refcounts; these only in version 2, or under the dirty bit.
fn judge_findings(what: &str, bytes: &[u8]) {
    let mut findings = Vec::new();
    our_check(bytes.to_vec(), &mut findings).unwrap();
    let (version, dirty) = (bytes[7], bytes[7] > 2 && bytes[79] & 1 != 0);
    for finding in findings {
        let is_flag = matches!(
            finding,
            Finding::CopiedL2 { .. } | Finding::CopiedData { .. }
        );
        let allowed = finding.severity() == Severity::Leak || (is_flag && (version == 2 || dirty));
        assert!(allowed, "{what}: {finding}");
    }
}

/// The image is in one of these states, whole, and goes on from there.
fn judge(what: &str, bytes: &[u8], states: [&Model; 2]) {
    judge_findings(what, bytes);
    let file = Arc::new(MemoryFile::new("image", bytes.to_vec(), 1));
    let found = Model::of(&file);
    assert!(
        states.contains(&&found),
        "{what}: neither the old state nor the new one"
    );
    // Writes after it change nothing of what snapshots hold, and all of them can be deleted.
    let mut model = found;
    let opened = open(file.clone());
    let random = &mut Random(bytes.len() as u64);
    for _ in 0..3 {
        model.write(&opened, random);
    }
    block_on(opened.close()).unwrap();
    model.judge(&file, what);
    let opened = open(file.clone());
    // In version 2 flags stay behind until something rewrites them, and the check still allows
    // them.
    while !model.snapshots.is_empty() {
        model.delete(&opened, model.snapshots.len() - 1);
    }
    block_on(opened.close()).unwrap();
    model.judge(&file, what);
    let mut findings = Vec::new();
    let result = our_check(file.contents(), &mut findings).unwrap();
    assert_eq!(result.corruptions, 0, "{what}: {findings:?}");
}

const SHAPES: [(&str, u64); 4] = [
    ("cluster_size=4096", 60 << 10),
    ("cluster_size=512,compat=0.10", 30 << 10),
    ("cluster_size=512,refcount_bits=8", 30 << 10),
    ("extended_l2=on,cluster_size=16384", 100 << 10),
];

/// Calls this for every change of an image of every shape: with the options of the image, its bytes
/// before the change, and what it holds before and after.
fn each_change(look: impl Fn(&str, Change, &[u8], [&Model; 2])) {
    for (create_options, size) in SHAPES {
        let (start, old) = image(create_options, size);
        for change in CHANGES {
            let new = change.of(&old);
            look(create_options, change, &start, [&old, &new]);
        }
    }
}

#[test]
fn a_crash_leaves_the_old_state_or_the_new_one() {
    if peers_are_installed() {
        each_change(|create_options, change, start, [old, new]| {
            let file = Recorder::new(start.to_vec());
            let opened = open(file.clone());
            change.begin(&opened, &Job::default()).unwrap();
            // The change is durable without a flush.
            let done = file.ops().len();
            block_on(opened.close()).unwrap();
            let ops = file.ops();
            let (mut seen_old, mut seen_new) = (0, 0);
            each_crash(start, &ops[..done], |what, bytes| {
                let what = format!("{create_options}, {change:?}, {what}");
                judge(&what, bytes, [old, new]);
                let found = Model::of(&Arc::new(MemoryFile::new("image", bytes.to_vec(), 1)));
                seen_old += usize::from(found == *old);
                seen_new += usize::from(found == *new);
            });
            assert!(
                seen_old > 3 && seen_new > 0,
                "{change:?}: {seen_old}, {seen_new}"
            );
            let mut durable = start.to_vec();
            let last = ops[..done]
                .iter()
                .rposition(|op| matches!(op, crate::support::crash::Op::Flush));
            each_crash(start, &ops[..=last.unwrap()], |_, bytes| {
                durable = bytes.to_vec()
            });
            judge(&format!("{change:?}, acknowledged"), &durable, [new, new]);
        });
    }
}

/// Cancels a job after a number of calls, of pace and progress together.
struct CancelAfter {
    left: AtomicUsize,
    job: std::sync::OnceLock<Job>,
}

impl CancelAfter {
    fn count(&self) {
        let left = self.left.fetch_sub(1, Ordering::Relaxed);
        if let (1, Some(job)) = (left, self.job.get()) {
            job.cancel();
        }
    }
}

struct Shared(Arc<CancelAfter>);

impl Attendant for Shared {
    fn progress(&self, _: Progress) {
        self.0.count();
    }
    fn pace(&self, _: u64) -> Option<Moment> {
        self.0.count();
        None
    }
}

#[test]
fn a_cancelled_change_leaves_the_old_state() {
    if peers_are_installed() {
        each_change(|create_options, change, start, [old, new]| {
            let mut cancelled = 0;
            for left in 1..60 {
                let what = format!("{create_options}, {change:?}, cancelled after {left}");
                let file = Arc::new(MemoryFile::new("image", start.to_vec(), 1));
                let opened = open(file.clone());
                let after = Arc::new(CancelAfter {
                    left: AtomicUsize::new(left),
                    job: std::sync::OnceLock::new(),
                });
                let job = Job::attended(Shared(after.clone()));
                after.job.set(job.clone()).unwrap();
                let outcome = change.begin(&opened, &job);
                let state = match &outcome {
                    Ok(()) => new,
                    Err(Error::Cancelled) => old,
                    Err(error) => panic!("{what}: {error}"),
                };
                cancelled += usize::from(outcome.is_err());
                // The session goes on.
                let mut model = state.clone();
                model.write(&opened, &mut Random(left as u64));
                block_on(opened.close()).unwrap();
                checked_clean(&file, &what);
                model.judge(&file, &what);
                if outcome.is_ok() && !job.is_cancelled() {
                    break;
                }
            }
            assert!(cancelled > 2, "{create_options}, {change:?}: {cancelled}");
        });
    }
}

#[test]
fn a_medium_that_fails_leaves_one_of_the_states() {
    if !peers_are_installed() {
        return;
    }
    let (create_options, size) = SHAPES[0];
    let (start, old) = image(create_options, size);
    for change in CHANGES {
        let new = change.of(&old);
        for budget in 0..80 {
            let what = format!("{change:?} after {budget}");
            let file = Recorder::failing_after(start.clone(), budget);
            let opened = open(file.clone());
            let outcome = change.begin(&opened, &Job::default());
            // It may be unable to write that to the medium.
            drop(block_on(opened.close()));
            judge(&what, &file.contents(), [&old, &new]);
            if outcome.is_ok() {
                break;
            }
        }
    }
}

/// A snapshot of an image on a full disk fails and takes nothing.
#[test]
fn without_space_nothing_changes() {
    if !peers_are_installed() {
        return;
    }
    let (start, old) = image("cluster_size=4096", 60 << 10);
    let file = Recorder::device(start);
    let opened = open(file.clone());
    let mut taken = 0;
    let error = loop {
        match Change::Create.begin(&opened, &Job::default()) {
            Ok(()) => taken += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(&error, Error::Io { source, .. } if source.raw_os_error() == Some(28)));
    block_on(opened.close()).unwrap();
    let mut findings = Vec::new();
    let result = our_check(file.contents(), &mut findings).unwrap();
    assert!(result.is_clean(), "{findings:?}");
    let found = Model::of(&Arc::new(MemoryFile::new("image", file.contents(), 1)));
    assert_eq!(found.snapshots.len(), old.snapshots.len() + taken);
    assert!(found.disk == old.disk);
    let _: &dyn BlockFile = &*file;
}
