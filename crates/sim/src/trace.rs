//! A readable record of a run, kept only on request, and a fingerprint of it, kept always: two runs
//! of one seed must have the same.
//!
//! A line has its time (issues and completions of the disk so far), the activity of write-back, and
//! its subject: a guest range, a range of a file, or the run as a whole. When a run fails at some
//! place, [`Trace::story`] is the part of the record that concerns it.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Subject of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum About {
    /// The run: crashes, flushes, judgements. Part of every story.
    Run,
    /// A range of the guest's disk.
    Guest(Range<u64>),
    /// A range of a file.
    Host(String, Range<u64>),
    /// A detail that a story does not need.
    Detail,
}

impl About {
    fn concerns(&self, places: &[About]) -> bool {
        let meet = |a: &Range<u64>, b: &Range<u64>| a.start < b.end && b.start < a.end;
        match self {
            About::Run => true,
            About::Detail => false,
            About::Guest(range) => places
                .iter()
                .any(|place| matches!(place, About::Guest(other) if meet(range, other))),
            About::Host(file, range) => places.iter().any(|place| {
                matches!(place, About::Host(name, other) if name == file && meet(range, other))
            }),
        }
    }
}

type Watch = Arc<dyn Fn() -> String + Send + Sync>;

/// A line of a record.
#[derive(Clone, Debug)]
pub struct Line {
    /// Its subject.
    pub about: About,
    /// The task that does it, or the part of the simulator.
    pub who: String,
    /// The operation of the disk, by number.
    pub io: Option<u64>,
    /// Description of the event.
    pub text: String,
}

/// A line with its moment, and what write-back was doing.
struct Kept {
    line: Line,
    moment: String,
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Line { who, io, text, .. } = &self.line;
        write!(f, "{} {who:<14} ", self.moment)?;
        if let Some(io) = io {
            write!(f, "io{io} ")?;
        }
        f.write_str(text)
    }
}

#[derive(Default)]
struct Record {
    lines: Vec<Kept>,
    now: u64,
    watch: Option<Watch>,
    focus: Vec<About>,
}

/// A handle to the record of one run.
#[derive(Clone)]
pub struct Trace {
    record: Option<Arc<Mutex<Record>>>,
    fingerprint: Arc<AtomicU64>,
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trace({:016x})", self.fingerprint())
    }
}

impl Trace {
    /// A record that keeps its lines.
    pub fn kept() -> Trace {
        Trace {
            record: Some(Arc::default()),
            fingerprint: Arc::default(),
        }
    }

    /// A record that keeps its fingerprint only.
    pub fn off() -> Trace {
        Trace {
            record: None,
            fingerprint: Arc::default(),
        }
    }

    /// Whether lines are kept.
    pub fn is_kept(&self) -> bool {
        self.record.is_some()
    }

    fn record(&self) -> Option<MutexGuard<'_, Record>> {
        let record = self.record.as_ref()?;
        Some(record.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds a line about the run, if lines are kept.
    pub fn line(&self, text: impl FnOnce() -> String) {
        self.about(|| Line {
            about: About::Run,
            who: "run".to_string(),
            io: None,
            text: text(),
        });
    }

    /// Adds a line about something, if lines are kept.
    pub fn about(&self, line: impl FnOnce() -> Line) {
        if let Some(mut record) = self.record() {
            let stage = record.watch.as_ref().map_or(String::new(), |watch| watch());
            let moment = format!("{:>6} {stage:<11}", record.now);
            let line = line();
            record.lines.push(Kept { line, moment });
        }
    }

    /// The moment of the lines to come.
    pub fn set_now(&self, now: u64) {
        if let Some(mut record) = self.record() {
            record.now = now;
        }
    }

    /// Sets the source of write-back's activity.
    pub fn set_watch(&self, watch: Option<Watch>) {
        if let Some(mut record) = self.record() {
            record.watch = watch;
        }
    }

    /// Where something is wrong.
    pub fn focus(&self, places: impl FnOnce() -> Vec<About>) {
        if let Some(mut record) = self.record()
            && record.focus.is_empty()
        {
            record.focus = places();
        }
    }

    /// Adds an event to the fingerprint.
    pub fn mark(&self, event: u64) {
        let before = self.fingerprint.load(Ordering::Relaxed);
        let after = (before.rotate_left(5) ^ event).wrapping_mul(0x517c_c1b7_2722_0a95);
        self.fingerprint.store(after, Ordering::Relaxed);
    }

    /// Returns the fingerprint of all events so far.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint.load(Ordering::Relaxed)
    }

    /// The lines so far.
    pub fn lines(&self) -> Vec<String> {
        let lines = self.record().map(|record| {
            let lines = record.lines.iter();
            lines.map(Kept::to_string).collect()
        });
        lines.unwrap_or_default()
    }

    /// The lines that concern the place where something is wrong, and all that its requests did;
    /// none if no such place is known.
    pub fn story(&self) -> Vec<String> {
        let Some(record) = self.record().filter(|record| !record.focus.is_empty()) else {
            return Vec::new();
        };
        let near = |kept: &&Kept| kept.line.about.concerns(&record.focus);
        let requests = record.lines.iter().filter(near);
        let requests: BTreeSet<&str> = requests
            .filter(|kept| matches!(kept.line.about, About::Guest(_)))
            .map(|kept| kept.line.who.as_str())
            .collect();
        let concerned = |kept: &&Kept| near(kept) || requests.contains(kept.line.who.as_str());
        let ios: BTreeSet<u64> = record
            .lines
            .iter()
            .filter(concerned)
            .filter_map(|kept| kept.line.io)
            .collect();
        let lines = record.lines.iter();
        lines
            .filter(|kept| concerned(kept) || kept.line.io.is_some_and(|io| ios.contains(&io)))
            .map(Kept::to_string)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_story_is_what_concerns_the_place() {
        let trace = Trace::kept();
        let host = |range| About::Host("f".to_string(), range);
        let add = |about, who: &str, io, text: &str| {
            trace.about(|| Line {
                about,
                who: who.to_string(),
                io,
                text: text.to_string(),
            });
        };
        add(About::Guest(0..10), "r1", None, "near");
        add(About::Guest(10..20), "r2", None, "far");
        add(host(0..10), "r2", Some(1), "elsewhere");
        add(host(20..30), "r1", Some(2), "its-own");
        add(host(90..110), "r3", Some(3), "there");
        add(About::Detail, "disk", Some(1), "elsewhere-done");
        add(About::Detail, "disk", Some(2), "its-own-done");
        trace.line(|| "crash".to_string());
        assert!(trace.story().is_empty(), "no place is known");
        trace.focus(|| vec![About::Guest(5..6), host(100..200)]);
        let story = trace.story();
        let words: Vec<&str> = story
            .iter()
            .filter_map(|line| line.split(' ').next_back())
            .collect();
        assert_eq!(words, ["near", "its-own", "there", "its-own-done", "crash"]);
    }
}
