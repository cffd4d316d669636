//! Operations that do not go together: while one is under way the others wait in line, and the
//! thread that does it goes on with the next one. No thread waits that could do something else.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

/// Operations in the order of their coming, of which one is under way.
pub(crate) struct Line<T>(Mutex<State<T>>);

struct State<T> {
    waiting: VecDeque<T>,
    /// An operation is under way, and its thread takes the next one when it leaves.
    taken: bool,
}

impl<T> Default for Line<T> {
    fn default() -> Self {
        Line(Mutex::new(State {
            waiting: VecDeque::new(),
            taken: false,
        }))
    }
}

impl<T> Line<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.0
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns the operation if it is to be done at once, by a caller that calls [`Line::leave`]
    /// after it; else the thread that is at work gets it.
    pub(crate) fn enter(&self, operation: T) -> Option<T> {
        let mut state = self.lock();
        if state.taken {
            state.waiting.push_back(operation);
            return None;
        }
        state.taken = true;
        Some(operation)
    }

    /// The next one to be done, after one that is done.
    pub(crate) fn leave(&self) -> Option<T> {
        let mut state = self.lock();
        let next = state.waiting.pop_front();
        state.taken = next.is_some();
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_under_way_and_the_others_follow_in_order() {
        let line = Line::default();
        assert_eq!(line.enter(1), Some(1));
        assert_eq!(line.enter(2), None);
        assert_eq!(line.enter(3), None);
        assert_eq!(line.leave(), Some(2));
        assert_eq!(line.enter(4), None);
        assert_eq!(line.leave(), Some(3));
        assert_eq!(line.leave(), Some(4));
        assert_eq!(line.leave(), None);
        assert_eq!(line.enter(5), Some(5));
    }
}
