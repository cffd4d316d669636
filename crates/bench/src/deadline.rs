//! A time that several share.

use std::time::Instant;

/// Time until which all are to be done, if it is limited, and the weights of those that are left.
/// Time that one leaves goes to those after it.
#[derive(Clone, Copy, Debug)]
pub struct Shares {
    end: Option<Instant>,
    weight_left: u32,
}

impl Shares {
    /// Among those with these weights in all.
    pub fn new(end: Option<Instant>, weight: u32) -> Shares {
        Shares {
            end,
            weight_left: weight,
        }
    }

    /// Returns the time until which the next one, of this weight, is to be done.
    pub fn next(&mut self, weight: u32) -> Option<Instant> {
        let now = Instant::now();
        let left = self.end?.saturating_duration_since(now);
        let share = left * weight / self.weight_left.max(1);
        self.weight_left = self.weight_left.saturating_sub(weight);
        Some(now + share)
    }
}

/// Whether it is that late.
pub fn is_over(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_last_one_has_all_that_is_left() {
        let end = Instant::now() + Duration::from_secs(3600);
        let mut shares = Shares::new(Some(end), 4);
        let first = shares.next(3).unwrap();
        let half = Instant::now() + Duration::from_secs(1800);
        assert!(first > half && first < end);
        let last = shares.next(1).unwrap();
        assert!(last > end - Duration::from_secs(60) && last <= end);
        assert_eq!(Shares::new(None, 1).next(1), None);
        assert!(!is_over(None) && !is_over(Some(end)) && is_over(Some(Instant::now())));
    }
}
