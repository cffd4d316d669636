//! How much room a file system has left.

use std::os::fd::AsFd;
use std::time::Duration;

/// How often room that may yet come is asked for: what XFS does after a file was removed begins at
/// once and takes some milliseconds, or hundreds of them for a file of very many extents.
const ASKED_EVERY: Duration = Duration::from_millis(10);
const ASKED_TIMES: u32 = 200;
/// Number of equal answers in a row after which no more space will come.
const IDLE_TIMES: u32 = 25;

/// Bytes that the file system of this file has left.
pub fn free_bytes(file: impl AsFd) -> Option<u64> {
    rooms(file).map(|(free, _)| free)
}

/// Free bytes once there are at least `needed_bytes` or no more appear, after two seconds at most.
pub fn wait_for_free_bytes(file: impl AsFd, needed_bytes: u64) -> Option<u64> {
    let (mut most, all) = rooms(&file)?;
    let mut idle = 0;
    for _ in 0..ASKED_TIMES {
        if most >= needed_bytes || needed_bytes > all || idle == IDLE_TIMES {
            break;
        }
        std::thread::sleep(ASKED_EVERY);
        let now = free_bytes(&file)?;
        idle = if now > most { 0 } else { idle + 1 };
        most = most.max(now);
    }
    free_bytes(&file)
}

/// Bytes that a file system has left, and in all.
fn rooms(file: impl AsFd) -> Option<(u64, u64)> {
    let system = rustix::fs::fstatvfs(file).ok()?;
    let free = match rustix::process::geteuid().is_root() {
        // The reserved space is reserved for root.
        true => system.f_bfree,
        false => system.f_bavail,
    };
    let bytes = |blocks: u64| blocks.saturating_mul(system.f_frsize);
    Some((bytes(free), bytes(system.f_blocks)))
}
