//! The line in which writes take the target's space: one after the other, in the order of the
//! guest. What they write goes down together.

use crate::sync::{Mutex, Waiters, lock};

/// Numbers whose turn comes one after the other, from 0 on.
#[derive(Debug, Default)]
pub struct Line(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    turn: u64,
    waiters: Waiters,
}

impl Line {
    /// Waits until all before `number` have passed.
    pub async fn wait(&self, number: u64) {
        loop {
            let waiting = {
                let mut state = lock(&self.0);
                if state.turn >= number {
                    return;
                }
                state.waiters.wait()
            };
            waiting.await;
        }
    }

    /// The turn is the next one's; a second time changes nothing.
    pub fn pass(&self, number: u64) {
        let mut state = lock(&self.0);
        if state.turn <= number {
            state.turn = number + 1;
            state.waiters.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn turns_come_in_order() {
        let line = Line::default();
        let mut context = Context::from_waker(Waker::noop());
        let mut second = pin!(line.wait(2));
        let mut first = pin!(line.wait(1));
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert!(first.as_mut().poll(&mut context).is_pending());
        line.pass(0);
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert!(first.as_mut().poll(&mut context).is_ready());
        line.pass(1);
        line.pass(0);
        assert!(second.as_mut().poll(&mut context).is_ready());
    }
}
