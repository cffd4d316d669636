//! Failures of the simulated disk that a run asks for.

pub use cowslip::errno::{EIO, ENOSPC};

/// The kinds of operations that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Reads.
    Read,
    /// Writes, durable ones too.
    Write,
    /// Durable writes only.
    DurableWrite,
    /// Writes of counts only.
    CountWrite,
    /// Writes of L1 entries only.
    L1Write,
    /// Zeroing.
    Zero,
    /// Discards.
    Discard,
    /// Allocations.
    Allocate,
    /// Flushes.
    Flush,
    /// Changes of length.
    SetLen,
    /// Questions about length and extents.
    Query,
}

/// How long a failure lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duration {
    /// One operation fails.
    Once,
    /// All operations of the kind fail from then on.
    Forever,
}

/// A failure to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Operations that fail.
    pub verb: Verb,
    /// How many of them succeed before.
    pub after: u64,
    /// The error.
    pub errno: i32,
    /// Duration of the failure.
    pub duration: Duration,
    /// The name of the only file that it strikes; any file if none.
    pub file: Option<&'static str>,
}

/// The failures of one disk and what came of them.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    planned: Vec<(Fault, u64)>,
    /// How many operations have failed so far.
    pub delivered: u64,
    /// Whether a flush was among them, or a durable write, which flushes too.
    pub flush_failed: bool,
    /// The last one: what failed, and how.
    pub last: Option<(Verb, i32)>,
}

impl Faults {
    /// Returns these failures, counted from now.
    pub fn new(faults: &[Fault]) -> Faults {
        Faults {
            planned: faults.iter().map(|fault| (*fault, 0)).collect(),
            delivered: 0,
            flush_failed: false,
            last: None,
        }
    }

    /// Adds one, counted from now.
    pub fn add(&mut self, fault: Fault) {
        self.planned.push((fault, 0));
    }

    /// Whether one of these is planned.
    pub fn has(&self, verb: Verb) -> bool {
        self.planned.iter().any(|(fault, _)| fault.verb == verb)
    }

    /// Counts an operation on a file, which may be a special one of its kind; the error that it
    /// shall end with, if any.
    pub fn strike(&mut self, verb: Verb, special: Option<Verb>, file: &str) -> Option<i32> {
        let mut errno = None;
        for (fault, seen) in &mut self.planned {
            let is_meant = fault.verb == verb || Some(fault.verb) == special;
            if !is_meant || fault.file.is_some_and(|name| name != file) {
                continue;
            }
            let hit = match fault.duration {
                Duration::Once => *seen == fault.after,
                Duration::Forever => *seen >= fault.after,
            };
            *seen += 1;
            if hit {
                errno = Some(fault.errno);
            }
        }
        if let Some(errno) = errno {
            self.delivered += 1;
            self.flush_failed |= verb == Verb::Flush || special == Some(Verb::DurableWrite);
            self.last = Some((verb, errno));
        }
        errno
    }
}
