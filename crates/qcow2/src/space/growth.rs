//! How far ahead of need the image file is extended, and how. Pure policy.
//!
//! The steps are those of any file, without leaps ([`Steps::IMAGE`]). What an image adds: direct
//! writes beyond the end of file serialise, so the end moves with the space; each allocation is a
//! barrier for all I/O of the file in XFS, so the first steps of a session only move the end of
//! file, and a one-shot command leaves a file like QEMU's.

use crate::growth::{Situation, Steps};
use crate::header::AllocationHint;
use crate::policy::{AllocPolicy, ZeroMethod};

/// A session that has grown less than this does not allocate.
const ALLOCATE_FROM_BYTES: u64 = 1 << 20;

/// A call holds up all other I/O of the file. Into space that holds data, at depth 32, a write of
/// 64 KiB is three times as fast on ext4 and eight times on XFS, one of 256 KiB 1.5 and 3 times,
/// one of 512 KiB 0.8 and 1.25 times, one of 1 MiB 0.5 and 0.7 times.
const CALL_BYTES: u64 = 256 << 10;
/// Here the call leaves a hole, and space is what counts.
const HOLE_BYTES: u64 = 48 << 10;

/// How space is allocated, decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Clusters as wholes; the file grows by allocated space.
    Contiguous,
    /// Allocates only the blocks that are written; the file grows by holes.
    Sparse,
}

impl Policy {
    /// The meaning of `auto`. Random 4 KiB writes at depth 32 into an empty disk of 2 GiB, direct,
    /// medians of three on a shared machine; the speed of a sparse image over that of a contiguous
    /// one:
    ///
    /// | clusters | subclusters | ext4 | XFS |
    /// | --- | --- | --- | --- |
    /// | 4 KiB | - | 1.2 | 1.3 |
    /// | 64 KiB | off | 0.6 | 0.8 |
    /// | 64 KiB | on | 0.8 | 1.1 |
    ///
    /// Small clusters fill the file from its beginning to its end, so space ahead gains little; but
    /// a sparse file ends up in many extents, scattered over the host. So it is contiguous
    /// everywhere, and on a file system that cannot allocate the space is holes.
    const AUTO: Policy = Policy::Contiguous;

    /// Bytes of zeroes from which on a call of the file system takes the place of a write, where
    /// space is not known to read as zeroes.
    pub fn call_from_bytes(self, method: ZeroMethod) -> u64 {
        match (method, self) {
            (ZeroMethod::Auto, Policy::Contiguous) => CALL_BYTES,
            (ZeroMethod::Auto, Policy::Sparse) => HOLE_BYTES,
            (ZeroMethod::ZeroRange, _) => 0,
            (ZeroMethod::Fresh | ZeroMethod::Write, _) => u64::MAX,
        }
    }

    /// Returns the policy requested at open, else the one stored in the image, else the default.
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
    /// Bytes of the step; at least the need.
    pub bytes: u64,
    /// How its space is allocated.
    pub method: Method,
}

/// The part of a file by which it grows beyond what its disk can need: for what is freed and not
/// yet used again, for tables that move, for bitmaps.
const BEYOND_FULL_FRACTION: u64 = 16;
/// The least of that.
const BEYOND_FULL_BYTES: u64 = 1 << 20;

/// The next step of an image file, whose length is `full_bytes` once all of its disk is allocated:
/// hardly further.
pub fn next_step(policy: Policy, now: &Situation, full_bytes: Option<u64>) -> Step {
    let allocate = policy == Policy::Contiguous && now.grown_bytes >= ALLOCATE_FROM_BYTES;
    let most = full_bytes.map_or(u64::MAX, |full| {
        let left = full.saturating_sub(now.file_bytes);
        left.max(now.file_bytes / BEYOND_FULL_FRACTION)
            .max(BEYOND_FULL_BYTES)
    });
    Step {
        bytes: Steps::IMAGE.next_bytes(now).min(most).max(now.needed_bytes),
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
    fn a_sparse_image_grows_by_holes() {
        let mut now = Situation {
            file_bytes: 1 << 30,
            grown_bytes: 1 << 30,
            free_bytes: Some(1 << 40),
            needed_bytes: 4096,
        };
        let method = |policy, now: &Situation| next_step(policy, now, None).method;
        assert_eq!(method(Policy::Sparse, &now), Method::Extend);
        assert_eq!(method(Policy::Contiguous, &now), Method::Allocate);
        now.grown_bytes = ALLOCATE_FROM_BYTES - 1;
        assert_eq!(method(Policy::Contiguous, &now), Method::Extend);
    }

    #[test]
    fn a_file_hardly_grows_beyond_what_its_disk_can_need() {
        const FULL: u64 = 256 << 20;
        let mut now = Situation {
            file_bytes: 200 << 20,
            grown_bytes: 200 << 20,
            free_bytes: Some(1 << 40),
            needed_bytes: 4096,
        };
        let step = |now: &Situation, full| next_step(Policy::Contiguous, now, full).bytes;
        assert_eq!(step(&now, None), 200 << 20, "as far as free space leads");
        assert_eq!(step(&now, Some(FULL)), 56 << 20);
        now.file_bytes = FULL;
        assert_eq!(step(&now, Some(FULL)), 16 << 20);
        now.file_bytes = 8 << 20;
        assert_eq!(step(&now, Some(8 << 20)), 1 << 20);
        now.needed_bytes = 20 << 20;
        assert_eq!(step(&now, Some(8 << 20)), 20 << 20, "at least the need");
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
