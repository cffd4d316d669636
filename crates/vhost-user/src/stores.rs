//! [`before_store`]: the place at which `tests/crashes` ends the process.

/// Called before each store to a field of shared memory.
#[inline]
pub(crate) fn before_store() {}
