//! How far ahead of need a file that grows is given space. Pure policy, for image files and for any
//! other.
//!
//! Files that grow side by side take turns with their space: each ends up in as many pieces as it
//! has had allocations. So space is allocated ahead of the end, rarely and in steps that grow with
//! the file, as XFS's dynamic speculative preallocation does for buffered writes; never more at
//! once than a fraction of what the file system has left; and given back when the file is closed. A
//! file that is closed after every write, as an NFS server does, keeps it from the third close on.
//!
//! [`Steps`] says how long the next step is, [`Ahead`] follows one file, [`at_close`] decides about
//! its end. None of them does I/O: the caller allocates (`fallocate` with `FALLOC_FL_KEEP_SIZE`),
//! and reports what came of it.
//!
//! ```
//! use cowslip_hostfile::growth::{Ahead, Refill, Rule};
//!
//! let mut ahead = Ahead::new(Rule::DYNAMIC, 0);
//! let free_bytes = Some(1 << 40);
//! let step = ahead.next(0, 4096, Refill::WhenUsedUp, free_bytes).expect("there is nothing yet");
//! // fallocate(file, FALLOC_FL_KEEP_SIZE, step.start, step.end - step.start) goes here.
//! ahead.granted(&step);
//! assert!(ahead.next(4096, 4096, Refill::WhenUsedUp, free_bytes).is_none());
//! ```

use std::ops::Range;

/// Closes in a row with space ahead of need after which it is left where it is: the file is one of
/// those that are opened and closed all the time.
const CLOSES_BEFORE_KEEPING: u8 = 2;

/// Treatment of space ahead of need when the file is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtClose {
    /// The space is given back, and this is the count of closes in a row from now on.
    Trim(u8),
    /// The space stays for the next opener of the file.
    Keep,
}

/// `closes_ahead` is how often in a row the file was closed with space ahead; `None` if that cannot
/// be remembered.
pub fn at_close(closes_ahead: Option<u8>) -> AtClose {
    match closes_ahead {
        Some(count) if count >= CLOSES_BEFORE_KEEPING => AtClose::Keep,
        count => AtClose::Trim(count.unwrap_or(0).saturating_add(1)),
    }
}

/// Conditions that decide the length of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Situation {
    /// Length of the file.
    pub file_bytes: u64,
    /// Bytes by which the caller has grown the file so far.
    pub grown_bytes: u64,
    /// Free space of the file system, if known.
    pub free_bytes: Option<u64>,
    /// Bytes that are needed now.
    pub needed_bytes: u64,
}

/// The lengths of steps: they double, and then follow the size of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steps {
    /// The first step.
    pub first_bytes: u64,
    /// Size up to which a step is as long as all before it.
    pub doubling_bytes: u64,
    /// Divisor of the file's length that gives the later steps: 2 for a half.
    pub file_fraction: u64,
    /// A step is longer than that where space is ample: this part of what is free, which nobody
    /// misses. `u64::MAX` for none.
    pub ample_fraction: u64,
    /// Limit of that leap: this multiple of the sum of all steps before it.
    pub leap_times: u64,
    /// The largest step.
    pub max_bytes: u64,
    /// The largest step where the free space is not known.
    pub blind_bytes: u64,
    /// A step takes at most this part of the free space.
    pub free_fraction: u64,
}

impl Steps {
    /// Doubling from 64 KiB to 4 MiB, then half of the file; a thousandth of the free space where
    /// that is more, in leaps of 64 times; up to 8 GiB, and a little less: XFS's largest extent is
    /// one block shorter, and a step of 8 GiB would make two. At most a sixteenth of the free
    /// space. docs/writers.md says how these were found, and what others lead to.
    pub const DYNAMIC: Steps = Steps {
        first_bytes: 64 << 10,
        doubling_bytes: 4 << 20,
        file_fraction: 2,
        ample_fraction: 1024,
        leap_times: 64,
        max_bytes: (8 << 30) - (2 << 20),
        blind_bytes: 64 << 20,
        free_fraction: 16,
    };

    /// Rule of thin images: no leaps. Many of them stay open beside each other for months, and a
    /// thousandth of the free space for each would leave a thousand of them hardly anything. The
    /// space ahead is at most as much as the session has added, or half of the file.
    pub const IMAGE: Steps = Steps {
        leap_times: 1,
        ..Steps::DYNAMIC
    };

    /// The next step in bytes: at least what is needed.
    pub fn next_bytes(&self, now: &Situation) -> u64 {
        self.wanted_bytes(now)
            .min(self.limit_bytes(now.free_bytes))
            .max(now.needed_bytes)
    }

    fn wanted_bytes(&self, now: &Situation) -> u64 {
        let by_size = if now.grown_bytes < self.doubling_bytes {
            now.grown_bytes.max(self.first_bytes)
        } else {
            (now.file_bytes / self.file_fraction).max(self.doubling_bytes)
        };
        let ample = now.free_bytes.unwrap_or(0) / self.ample_fraction;
        let ample = ample.min(now.grown_bytes.saturating_mul(self.leap_times));
        by_size.max(ample).min(self.max_bytes)
    }

    fn limit_bytes(&self, free_bytes: Option<u64>) -> u64 {
        free_bytes.map_or(self.blind_bytes, |free| free / self.free_fraction)
    }
}

/// How much is allocated ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// No space ahead.
    None,
    /// Steps of this many bytes.
    Fixed(u64),
    /// Steps that grow.
    Dynamic(Steps),
}

impl Rule {
    /// [`Steps::DYNAMIC`].
    pub const DYNAMIC: Rule = Rule::Dynamic(Steps::DYNAMIC);

    /// The next step; `None` where there is too little room for one that is worth a call.
    fn step_bytes(&self, now: &Situation) -> Option<u64> {
        let (wanted, steps) = match self {
            Rule::None => return None,
            Rule::Fixed(bytes) => (*bytes, &Steps::DYNAMIC),
            Rule::Dynamic(steps) => (steps.wanted_bytes(now), steps),
        };
        // A length that leaps does not make a step longer than the longest.
        let bytes = wanted.max(now.needed_bytes.min(steps.max_bytes));
        let bytes = bytes.min(steps.limit_bytes(now.free_bytes));
        // The needed space is allocated by the writes themselves.
        (bytes >= steps.first_bytes.min(wanted) && bytes > 0).then_some(bytes)
    }
}

/// When the next step is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refill {
    /// When what is needed does not fit into the rest of the last: for a writer that allocates
    /// before it writes.
    WhenUsedUp,
    /// When half of the last is used: for callers that look at the file from time to time.
    WhenHalfUsed,
}

/// Space ahead of the end of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ahead {
    rule: Rule,
    /// Space is allocated up to here, as far as is known.
    end_bytes: u64,
    grown_bytes: u64,
    /// The last step.
    step_bytes: u64,
}

impl Ahead {
    /// Returns the state of a file of this length, with nothing behind its end.
    pub fn new(rule: Rule, file_bytes: u64) -> Ahead {
        Ahead {
            rule,
            end_bytes: file_bytes,
            grown_bytes: 0,
            step_bytes: 0,
        }
    }

    /// Returns the range to allocate for a file of this length, of which `needed_bytes` more are
    /// about to be written. `None` if enough is allocated, or if the file system has too little
    /// room.
    pub fn next(
        &self,
        file_bytes: u64,
        needed_bytes: u64,
        refill: Refill,
        free_bytes: Option<u64>,
    ) -> Option<Range<u64>> {
        let low_water = match refill {
            Refill::WhenUsedUp => 0,
            Refill::WhenHalfUsed => self.step_bytes / 2,
        };
        let reach = file_bytes.saturating_add(needed_bytes);
        if reach.saturating_add(low_water) <= self.end_bytes {
            return None;
        }
        let start = self.end_bytes.max(file_bytes);
        let bytes = self.rule.step_bytes(&Situation {
            file_bytes: start,
            grown_bytes: self.grown_bytes,
            free_bytes,
            needed_bytes: reach.saturating_sub(start),
        })?;
        Some(start..start.checked_add(bytes)?)
    }

    /// Records that a range returned by [`Ahead::next`] is allocated.
    pub fn granted(&mut self, step: &Range<u64>) {
        self.end_bytes = self.end_bytes.max(step.end);
        self.step_bytes = step.end - step.start;
        self.grown_bytes = self.grown_bytes.saturating_add(self.step_bytes);
    }

    /// Marks the space behind the end as gone: it was deallocated, or the file was truncated to
    /// this length. After a truncation the steps start over.
    pub fn trimmed(&mut self, file_bytes: u64, cut: CutPoint) {
        self.end_bytes = file_bytes;
        self.step_bytes = 0;
        if cut == CutPoint::Shorter {
            self.grown_bytes = 0;
        }
    }

    /// Bytes that lie behind the end of a file of this length.
    pub fn held_bytes(&self, file_bytes: u64) -> u64 {
        self.end_bytes.saturating_sub(file_bytes)
    }
}

/// Where a file was cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutPoint {
    /// Cut at its end: only space behind is gone.
    AtEnd,
    /// Before its end.
    Shorter,
}

#[cfg(test)]
mod tests {
    use super::*;

    const AMPLE: Option<u64> = Some(1 << 40);

    /// Steps of a file that is written in pieces of 64 KiB, in KiB.
    fn steps(rule: Rule, file_bytes: u64, free_bytes: Option<u64>) -> Vec<u64> {
        let mut ahead = Ahead::new(rule, 0);
        let mut steps = Vec::new();
        for at in (0..file_bytes).step_by(64 << 10) {
            if let Some(step) = ahead.next(at, 64 << 10, Refill::WhenUsedUp, free_bytes) {
                assert!(step.start >= at && step.end > step.start);
                ahead.granted(&step);
                steps.push((step.end - step.start) >> 10);
            }
        }
        steps
    }

    #[test]
    fn steps_double_and_then_follow_the_size_of_the_file() {
        let doubled = [
            64, 64, 128, 256, 512, 1024, 2048, 4096, 4096, 6144, 9216, 13824,
        ];
        assert_eq!(steps(Rule::DYNAMIC, 32 << 20, None), doubled);
        // Where a thousandth of the free space is less.
        assert_eq!(steps(Rule::DYNAMIC, 1 << 20, Some(64 << 20)), doubled[..5]);
        let now = Situation {
            file_bytes: 1 << 50,
            grown_bytes: 1 << 50,
            free_bytes: AMPLE,
            needed_bytes: 4096,
        };
        assert_eq!(Steps::DYNAMIC.next_bytes(&now), (8 << 30) - (2 << 20));
    }

    #[test]
    fn where_space_is_ample_steps_leap() {
        // 64 times what there is, a thousandth of 1 TiB, half of the file.
        const GIB: u64 = 1 << 20;
        let half = (64 + 4096 + 65 * 4096 + 2 * GIB) / 2;
        let found = steps(Rule::DYNAMIC, 4 << 30, AMPLE);
        assert_eq!(found, [64, 4096, 65 * 4096, GIB, GIB, half, half / 2 * 3]);
        let huge = steps(Rule::DYNAMIC, 1 << 30, Some(16 << 40));
        assert_eq!(huge, [64, 4096, 65 * 4096, 8 * GIB - 2048]);
    }

    #[test]
    fn an_image_holds_no_more_ahead_than_it_has_grown_by_or_half_of_itself() {
        let mut ahead = Ahead::new(Rule::Dynamic(Steps::IMAGE), 0);
        for at in (0..8u64 << 30).step_by(64 << 10) {
            let step = ahead.next(at, 64 << 10, Refill::WhenUsedUp, Some(1 << 50));
            if let Some(step) = step {
                ahead.granted(&step);
                assert!(ahead.held_bytes(at) <= at.max(64 << 10), "{step:?}");
            }
        }
    }

    #[test]
    fn a_nearly_full_file_system_is_not_filled_ahead_of_need() {
        let mut now = Situation {
            file_bytes: 1 << 30,
            grown_bytes: 1 << 30,
            free_bytes: Some(1 << 20),
            needed_bytes: 4096,
        };
        assert_eq!(Steps::DYNAMIC.next_bytes(&now), 65536);
        now.free_bytes = Some(0);
        assert_eq!(Steps::DYNAMIC.next_bytes(&now), 4096);
        now.free_bytes = None;
        assert_eq!(Steps::DYNAMIC.next_bytes(&now), 64 << 20);
        // A plain file gets nothing then: its writes allocate what they need.
        assert!(steps(Rule::DYNAMIC, 1 << 20, Some(512 << 10)).is_empty());
        assert!(steps(Rule::Fixed(1 << 30), 1 << 20, Some(0)).is_empty());
        assert_eq!(
            steps(Rule::Fixed(1 << 30), 1 << 20, Some(1 << 30)),
            [64 << 10]
        );
    }

    #[test]
    fn fixed_steps_and_none() {
        assert_eq!(steps(Rule::Fixed(1 << 20), 3 << 20, AMPLE), [1024; 3]);
        assert_eq!(steps(Rule::Fixed(4096), 1 << 20, AMPLE), [64; 16]);
        assert!(steps(Rule::None, 1 << 20, AMPLE).is_empty());
    }

    #[test]
    fn whoever_looks_from_time_to_time_is_ahead_of_what_came_since() {
        let mut ahead = Ahead::new(Rule::DYNAMIC, 10 << 20);
        let step = ahead.next(10 << 20, 3 << 20, Refill::WhenHalfUsed, None);
        assert_eq!(step, Some(10 << 20..13 << 20));
        ahead.granted(&step.unwrap());
        let next = |ahead: &Ahead, at: u64| ahead.next(at, 0, Refill::WhenHalfUsed, None);
        assert_eq!(next(&ahead, 11 << 20), None);
        assert_eq!(next(&ahead, 12 << 20), Some(13 << 20..16 << 20));
        assert_eq!(ahead.held_bytes(12 << 20), 1 << 20);
        // Overtaken: the next step begins at the end of the file.
        assert_eq!(next(&ahead, 20 << 20), Some(20 << 20..23 << 20));
        ahead.trimmed(1 << 20, CutPoint::Shorter);
        assert_eq!(ahead.held_bytes(1 << 20), 0);
        let first = ahead.next(1 << 20, 4096, Refill::WhenUsedUp, None);
        assert_eq!(first, Some(1 << 20..(1 << 20) + (64 << 10)));
    }

    #[test]
    fn no_need_makes_a_step_longer_than_the_longest() {
        let ahead = Ahead::new(Rule::DYNAMIC, 0);
        let step = ahead.next(4096, 1 << 40, Refill::WhenHalfUsed, Some(1 << 50));
        assert_eq!(step, Some(4096..4096 + Steps::DYNAMIC.max_bytes));
        let fixed = Ahead::new(Rule::Fixed(16 << 30), 0);
        let step = fixed.next(0, 1 << 40, Refill::WhenHalfUsed, Some(1 << 50));
        assert_eq!(step, Some(0..16 << 30));
    }

    #[test]
    fn the_third_close_in_a_row_keeps_what_is_ahead() {
        assert_eq!(at_close(Some(0)), AtClose::Trim(1));
        assert_eq!(at_close(Some(1)), AtClose::Trim(2));
        assert_eq!(at_close(Some(2)), AtClose::Keep);
        assert_eq!(at_close(None), AtClose::Trim(1));
    }

    #[test]
    fn no_length_overflows() {
        let ahead = Ahead::new(Rule::DYNAMIC, u64::MAX);
        assert_eq!(ahead.next(u64::MAX, 1, Refill::WhenUsedUp, AMPLE), None);
    }
}
