//! How far ahead of need the image file is extended. Pure policy.
//!
//! Direct writes beyond the end of file serialise, and each allocation is a barrier for all I/O of
//! the file in XFS, so the file is extended rarely and in big steps, as XFS's dynamic speculative
//! preallocation does: doubling from 64 KiB to 4 MiB, then half of the file up to 8 GiB, but never
//! more than a sixteenth of what the file system has left. The first steps of a session only move
//! the end of file, so that a one-shot command leaves a file like QEMU's.

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

/// What the policy looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Situation {
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
    let allocate = now.grown_bytes >= ALLOCATE_FROM_BYTES;
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
}
