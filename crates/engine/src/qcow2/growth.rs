//! How far ahead of need the image file is extended. Pure policy.
//!
//! Direct writes beyond the end of file serialise, and each allocation is a barrier for all I/O of
//! the file in XFS, so the file is extended rarely and in big steps, as XFS's dynamic speculative
//! preallocation does: doubling from 64 KiB to 4 MiB, then half of the file up to 8 GiB, but never
//! more than a sixteenth of what the file system has left. The first steps of a session only move
//! the end of file, so that a one-shot command leaves a file like QEMU's.

use super::header::AllocationHint;
use crate::image::{AllocPolicy, ZeroMethod};

/// The first step.
const STEP_MIN_BYTES: u64 = 64 << 10;
/// Up to here the step doubles.
const STEP_DOUBLING_BYTES: u64 = 4 << 20;
/// The largest step: XFS's largest extent.
const STEP_MAX_BYTES: u64 = 8 << 30;
/// The largest step where the free space is not known.
const STEP_BLIND_BYTES: u64 = 64 << 20;
/// A session that has grown less than this does not allocate.
const ALLOCATE_FROM_BYTES: u64 = 1 << 20;
/// A step takes at most this part of the free space.
const FREE_FRACTION: u64 = 16;

/// A call holds up all other I/O of the file. Into space that holds data, at depth 32, a write of 64 KiB is three times as
/// fast on ext4 and eight times on XFS, one of 256 KiB 1.5 and 3 times, one of 512 KiB 0.8 and 1.25 times, one
/// of 1 MiB 0.5 and 0.7 times.
const CALL_BYTES: u64 = 256 << 10;
/// Here the call leaves a hole, and space is what counts.
const HOLE_BYTES: u64 = 48 << 10;

/// Closes in a row with space ahead of need after which it is left where it is: the image is one of those
/// that are opened and closed all the time.
const CLOSES_BEFORE_KEEPING: u8 = 2;

/// How space is allocated, decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Clusters as wholes; the file grows by allocated space.
    Contiguous,
    /// What is written only; the file grows by holes.
    Sparse,
}

impl Policy {
    /// What `auto` is. Random 4 KiB writes at depth 32 into an empty disk of 2 GiB, direct, medians of three on
    /// a shared machine; the speed of a sparse image over that of a contiguous one:
    ///
    /// | clusters | subclusters | ext4 | XFS |
    /// | --- | --- | --- | --- |
    /// | 4 KiB | - | 1.2 | 1.3 |
    /// | 64 KiB | off | 0.6 | 0.8 |
    /// | 64 KiB | on | 0.8 | 1.1 |
    ///
    /// Small clusters fill the file from its beginning to its end, so space ahead gains little; but what
    /// is found between them and elsewhere on the host later is the reason to keep the file in few extents. So it
    /// is contiguous everywhere, and a file system that cannot allocate makes holes of it.
    const AUTO: Policy = Policy::Contiguous;

    /// Bytes of zeroes from which on a call of the file system takes the place of a write, where space is not
    /// known to read as zeroes.
    pub fn call_from_bytes(self, method: ZeroMethod) -> u64 {
        match (method, self) {
            (ZeroMethod::Auto, Policy::Contiguous) => CALL_BYTES,
            (ZeroMethod::Auto, Policy::Sparse) => HOLE_BYTES,
            (ZeroMethod::ZeroRange, _) => 0,
            (ZeroMethod::Fresh | ZeroMethod::Write, _) => u64::MAX,
        }
    }

    /// What was asked for at open, else what the image says, else the default.
    pub fn decide(asked: AllocPolicy, hint: Option<&AllocationHint>) -> Policy {
        let stored = hint.map_or(AllocPolicy::Auto, |hint| hint.policy);
        let chosen = match asked {
            AllocPolicy::Auto => stored,
            asked => asked,
        };
        match chosen {
            AllocPolicy::Sparse => Policy::Sparse,
            AllocPolicy::Auto => Policy::AUTO,
            AllocPolicy::Contiguous => Policy::Contiguous,
        }
    }
}

/// What becomes of space ahead of need when the image is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtClose {
    /// It is given back, and this is the count of closes that stands in the image from now on.
    Trim(u8),
    /// It stays for the next who opens the image.
    Keep,
}

/// `closes_ahead` is the count so far; `None` if the image has no place for it.
pub fn at_close(closes_ahead: Option<u8>) -> AtClose {
    match closes_ahead {
        Some(count) if count >= CLOSES_BEFORE_KEEPING => AtClose::Keep,
        count => AtClose::Trim(count.unwrap_or(0).saturating_add(1)),
    }
}

/// What the policy looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Situation {
    /// How space is allocated.
    pub policy: Policy,
    /// Length of the file.
    pub file_bytes: u64,
    /// What this session has grown it by so far.
    pub grown_bytes: u64,
    /// Free space of the file system, if known.
    pub free_bytes: Option<u64>,
    /// What is needed now.
    pub needed_bytes: u64,
}

/// How space is claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Move the end of file: holes.
    Extend,
    /// Allocate, and move the end of file.
    Allocate,
}

/// A step of growth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// How much; at least what is needed.
    pub bytes: u64,
    /// How.
    pub method: Method,
}

/// The next step.
pub fn next_step(now: &Situation) -> Step {
    let ahead = if now.grown_bytes < STEP_DOUBLING_BYTES {
        now.grown_bytes.max(STEP_MIN_BYTES)
    } else {
        (now.file_bytes / 2).clamp(STEP_DOUBLING_BYTES, STEP_MAX_BYTES)
    };
    let limit = now
        .free_bytes
        .map_or(STEP_BLIND_BYTES, |free| free / FREE_FRACTION);
    let bytes = ahead.min(limit).max(now.needed_bytes);
    let allocate = now.policy == Policy::Contiguous && now.grown_bytes >= ALLOCATE_FROM_BYTES;
    Step {
        bytes,
        method: if allocate {
            Method::Allocate
        } else {
            Method::Extend
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_double_and_then_follow_the_size_of_the_file() {
        let mut now = Situation {
            policy: Policy::Contiguous,
            file_bytes: 0,
            grown_bytes: 0,
            free_bytes: Some(1 << 40),
            needed_bytes: 4096,
        };
        let mut steps = Vec::new();
        for _ in 0..12 {
            let step = next_step(&now);
            now.grown_bytes += step.bytes;
            now.file_bytes += step.bytes;
            steps.push(step.bytes >> 10);
        }
        assert_eq!(
            steps,
            [
                64, 64, 128, 256, 512, 1024, 2048, 4096, 4096, 6144, 9216, 13824
            ]
        );
        now.file_bytes = 1 << 50;
        assert_eq!(next_step(&now).bytes, STEP_MAX_BYTES);
    }

    #[test]
    fn a_nearly_full_file_system_is_not_filled_ahead_of_need() {
        let mut now = Situation {
            policy: Policy::Contiguous,
            file_bytes: 1 << 30,
            grown_bytes: 1 << 30,
            free_bytes: Some(1 << 20),
            needed_bytes: 4096,
        };
        assert_eq!(next_step(&now).bytes, 65536);
        now.free_bytes = Some(0);
        assert_eq!(next_step(&now).bytes, 4096);
        now.free_bytes = None;
        assert_eq!(next_step(&now).bytes, STEP_BLIND_BYTES);
    }

    #[test]
    fn a_sparse_image_grows_by_holes() {
        let now = Situation {
            policy: Policy::Sparse,
            file_bytes: 1 << 30,
            grown_bytes: 1 << 30,
            free_bytes: Some(1 << 40),
            needed_bytes: 4096,
        };
        assert_eq!(next_step(&now).method, Method::Extend);
        let contiguous = Situation {
            policy: Policy::Contiguous,
            ..now
        };
        assert_eq!(next_step(&contiguous).method, Method::Allocate);
    }

    #[test]
    fn the_third_close_in_a_row_keeps_what_is_ahead() {
        assert_eq!(at_close(Some(0)), AtClose::Trim(1));
        assert_eq!(at_close(Some(1)), AtClose::Trim(2));
        assert_eq!(at_close(Some(2)), AtClose::Keep);
        assert_eq!(at_close(None), AtClose::Trim(1));
    }

    #[test]
    fn what_is_asked_for_goes_before_what_the_image_says() {
        let hint = |policy| Some(AllocationHint::new(policy));
        let decide = |asked, hint: Option<AllocationHint>| Policy::decide(asked, hint.as_ref());
        use AllocPolicy::{Auto, Contiguous, Sparse};
        assert_eq!(decide(Auto, None), Policy::Contiguous);
        assert_eq!(decide(Auto, hint(Sparse)), Policy::Sparse);
        assert_eq!(decide(Contiguous, hint(Sparse)), Policy::Contiguous);
        assert_eq!(decide(Sparse, hint(Contiguous)), Policy::Sparse);
    }
}
