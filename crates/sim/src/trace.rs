//! A readable record of a run, kept only where somebody wants to read it, and a fingerprint of it,
//! kept always: two runs of one seed must have the same.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A handle to the record of one run.
#[derive(Clone, Debug)]
pub struct Trace {
    lines: Option<Arc<Mutex<Vec<String>>>>,
    fingerprint: Arc<AtomicU64>,
}

impl Trace {
    /// A record that keeps its lines.
    pub fn kept() -> Trace {
        Trace {
            lines: Some(Arc::default()),
            fingerprint: Arc::default(),
        }
    }

    /// A record that keeps its fingerprint only.
    pub fn off() -> Trace {
        Trace {
            lines: None,
            fingerprint: Arc::default(),
        }
    }

    /// Adds a line, if lines are kept.
    pub fn line(&self, text: impl FnOnce() -> String) {
        if let Some(lines) = &self.lines {
            let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
            lines.push(text());
        }
    }

    /// Adds an event to the fingerprint.
    pub fn mark(&self, event: u64) {
        let before = self.fingerprint.load(Ordering::Relaxed);
        let after = (before.rotate_left(5) ^ event).wrapping_mul(0x517c_c1b7_2722_0a95);
        self.fingerprint.store(after, Ordering::Relaxed);
    }

    /// What all events so far come to.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint.load(Ordering::Relaxed)
    }

    /// The lines so far.
    pub fn lines(&self) -> Vec<String> {
        self.lines.as_ref().map_or_else(Vec::new, |lines| {
            lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
        })
    }
}
