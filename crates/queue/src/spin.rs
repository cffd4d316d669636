//! [`Spin`]: how long a queue looks for completions before it sleeps.
//!
//! Going to sleep and waking up takes longer than a fast device, or than a guest that waits for
//! each of its requests. So a queue looks for a while first, as long as that finds something: the
//! time grows while waits are short, and is none after a long one. Where others want the processor,
//! looking takes it from them, and the system takes it back: after that, a queue does not look for
//! a while.

use std::time::{Duration, Instant};

/// Shortest time to look that is worth it.
const MIN: Duration = Duration::from_micros(4);
/// Longest time between two looks of a thread that keeps its processor. Interrupts are shorter, the
/// turn of another thread is longer.
const INTERRUPTED: Duration = Duration::from_micros(200);
/// Time without looking after the processor was taken.
const PAUSE: Duration = Duration::from_millis(100);

/// Decides about the time by how long the last waits took.
#[derive(Debug, Default)]
pub(crate) struct Spin {
    max: Duration,
    time: Duration,
    paused_until: Option<Instant>,
}

impl Spin {
    /// Never looks longer than `max`.
    pub fn new(max: Duration) -> Spin {
        Spin {
            max,
            ..Spin::default()
        }
    }

    /// The time to look before the next sleep, which is to begin now.
    pub fn time(&mut self, now: Instant) -> Duration {
        match self.paused_until {
            Some(end) if now < end => Duration::ZERO,
            _ => {
                self.paused_until = None;
                self.time
            }
        }
    }

    /// Whether it looks at all.
    pub fn is_on(&self) -> bool {
        !self.max.is_zero()
    }

    /// Notes the time since the last look, or since the beginning.
    pub fn look(&mut self, now: Instant, since_last: Duration) {
        if since_last > INTERRUPTED {
            self.paused_until = Some(now + PAUSE);
        }
    }

    /// Notes how long a wait took, with its sleep if there was one.
    pub fn note(&mut self, waited: Duration) {
        if waited > self.max {
            self.time = Duration::ZERO;
        } else if waited > self.time {
            self.time = (2 * self.time).clamp(MIN.min(self.max), self.max);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_micros(32);

    #[test]
    fn short_waits_are_looked_through() {
        let (mut spin, now) = (Spin::new(MAX), Instant::now());
        assert_eq!(spin.time(now), Duration::ZERO);
        for expected in [4, 8, 16, 16] {
            spin.note(Duration::from_micros(10));
            assert_eq!(spin.time(now), Duration::from_micros(expected));
        }
    }

    fn at_its_longest() -> Spin {
        let mut spin = Spin::new(MAX);
        for _ in 0..9 {
            spin.note(Duration::from_micros(30));
        }
        assert_eq!(spin.time(Instant::now()), MAX);
        spin
    }

    #[test]
    fn a_long_wait_ends_it() {
        let mut spin = at_its_longest();
        spin.note(Duration::from_micros(33));
        assert_eq!(spin.time(Instant::now()), Duration::ZERO);
    }

    #[test]
    fn a_thread_that_lost_its_processor_leaves_it_to_others() {
        let (mut spin, now) = (at_its_longest(), Instant::now());
        spin.look(now, Duration::from_micros(5));
        assert_eq!(spin.time(now), MAX);
        spin.look(now, Duration::from_millis(3));
        assert_eq!(spin.time(now), Duration::ZERO);
        assert_eq!(spin.time(now + PAUSE / 2), Duration::ZERO);
        assert_eq!(spin.time(now + PAUSE), MAX);
    }

    #[test]
    fn without_a_limit_there_is_no_looking() {
        let mut spin = Spin::default();
        spin.note(Duration::ZERO);
        spin.note(Duration::from_micros(1));
        assert!(!spin.is_on());
        assert_eq!(spin.time(Instant::now()), Duration::ZERO);
    }
}
