//! Error numbers of Linux that this workspace names; the same on all its architectures.

pub(crate) mod words;

/// Operation not permitted.
pub const EPERM: i32 = 1;
/// No such file or directory.
pub const ENOENT: i32 = 2;
/// Input/output error.
pub const EIO: i32 = 5;
/// Resource temporarily unavailable.
pub const EAGAIN: i32 = 11;
/// Permission denied.
pub const EACCES: i32 = 13;
/// Device or resource busy.
pub const EBUSY: i32 = 16;
/// Invalid argument.
pub const EINVAL: i32 = 22;
/// File too large.
pub const EFBIG: i32 = 27;
/// No space left on device.
pub const ENOSPC: i32 = 28;
/// Read-only file system.
pub const EROFS: i32 = 30;
/// Operation not supported.
pub const ENOTSUP: i32 = 95;
/// Disk quota exceeded.
pub const EDQUOT: i32 = 122;
/// Operation canceled.
pub const ECANCELED: i32 = 125;
