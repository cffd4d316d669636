//! Breakpoints and the requests suspended at them: `break`, `wait_break`, `resume` and
//! `remove_break` of qemu-io.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cowslip_block::file::Event;
use cowslip_queue::{Completer, Pending, pending};

/// No breakpoint or suspended request has this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoSuch;

/// The breakpoints of one open image; clones share their state.
#[derive(Clone, Default)]
pub struct Breakpoints(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    attached: bool,
    set: Vec<(Event, String)>,
    stopped: Vec<(String, Arc<Stop>)>,
    awaited: Vec<(String, Completer<()>)>,
    notes: String,
}

/// A suspended request. It resumes when the last clone of this value is dropped.
struct Stop(Option<Completer<()>>);

cowslip_block::debug_by_name!(Breakpoints);

impl Drop for Stop {
    fn drop(&mut self) {
        if let Some(completer) = self.0.take() {
            completer.complete(());
        }
    }
}

impl Breakpoints {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the breakpoints as attached: a file suspends requests at them from now on.
    pub fn attach(&self) {
        self.lock().attached = true;
    }

    /// Whether a file suspends requests at them.
    pub fn is_attached(&self) -> bool {
        self.lock().attached
    }

    /// Suspends the next request that reaches `event`, under the name `tag`.
    pub fn set(&self, event: Event, tag: &str) {
        self.lock().set.push((event, tag.to_string()));
    }

    /// Removes the breakpoints named `tag`, and resumes the requests suspended under that name.
    ///
    /// # Errors
    /// There are none of that name.
    pub fn remove(&self, tag: &str) -> Result<(), NoSuch> {
        let mut state = self.lock();
        let before = state.set.len() + state.stopped.len();
        state.set.retain(|(_, other)| other != tag);
        let (gone, left) = std::mem::take(&mut state.stopped)
            .into_iter()
            .partition(|(other, _)| other == tag);
        state.stopped = left;
        let found = before > state.set.len() + state.stopped.len();
        drop(state);
        // Outside the lock: a resumed request may stop at another breakpoint at once.
        drop::<Vec<(String, Arc<Stop>)>>(gone);
        match found {
            true => Ok(()),
            false => Err(NoSuch),
        }
    }

    /// Resumes the first request suspended under the name `tag`.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn resume(&self, tag: &str) -> Result<(), NoSuch> {
        let mut state = self.lock();
        let first = state.stopped.iter().position(|(other, _)| other == tag);
        let stop = state.stopped.remove(first.ok_or(NoSuch)?);
        state
            .notes
            .push_str(&format!("blkdebug: Resuming request '{tag}'\n"));
        drop(state);
        drop(stop);
        Ok(())
    }

    /// Completes when a request is suspended under the name `tag`.
    pub fn stopped(&self, tag: &str) -> Pending<()> {
        let mut state = self.lock();
        if state.stopped.iter().any(|(other, _)| other == tag) {
            return Pending::ready(());
        }
        let (completer, comes) = pending();
        state.awaited.push((tag.to_string(), completer));
        comes
    }

    /// Resumes all requests and removes all breakpoints. Called when the image is closed.
    pub fn clear(&self) {
        let mut state = self.lock();
        state.attached = false;
        state.set.clear();
        let stopped = std::mem::take(&mut state.stopped);
        drop(state);
        drop(stopped);
    }

    /// Returns the messages for the user since the last call, one per line.
    pub fn take_notes(&self) -> String {
        std::mem::take(&mut self.lock().notes)
    }

    /// Called when a request reaches `event`: if a breakpoint is set there, returns a wait that
    /// ends when the request is resumed.
    pub fn reached(&self, event: Event) -> Option<Pending<()>> {
        let mut state = self.lock();
        if !state.set.iter().any(|(other, _)| *other == event) {
            return None;
        }
        let (hit, left): (Vec<_>, Vec<_>) = std::mem::take(&mut state.set)
            .into_iter()
            .partition(|(other, _)| *other == event);
        state.set = left;
        let (completer, goes_on) = pending();
        let stop = Arc::new(Stop(Some(completer)));
        let mut reached = Vec::new();
        for (_, tag) in hit {
            state
                .notes
                .push_str(&format!("blkdebug: Suspended request '{tag}'\n"));
            let waiters = std::mem::take(&mut state.awaited);
            for (awaited, completer) in waiters {
                match awaited == tag {
                    true => reached.push(completer),
                    false => state.awaited.push((awaited, completer)),
                }
            }
            state.stopped.push((tag, Arc::clone(&stop)));
        }
        drop(state);
        reached
            .into_iter()
            .for_each(|completer| completer.complete(()));
        Some(goes_on)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_stops_until_all_that_stopped_it_let_go() {
        let points = Breakpoints::default();
        points.set(Event::ReadAio, "A");
        points.set(Event::ReadAio, "B");
        let wait = points.stopped("B");
        assert!(points.reached(Event::WriteAio).is_none());
        let held = points.reached(Event::ReadAio).unwrap();
        assert!(wait.has_value() && points.reached(Event::ReadAio).is_none());
        assert_eq!(points.resume("C"), Err(NoSuch));
        points.resume("A").unwrap();
        assert!(!held.has_value());
        points.remove("B").unwrap();
        assert!(held.has_value());
        assert_eq!(points.remove("B"), Err(NoSuch));
        let notes = points.take_notes();
        assert_eq!(notes.lines().count(), 3, "{notes}");
    }
}
