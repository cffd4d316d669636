//! Whether the image may be read and written: the latch, and requests that are held back.

pub(super) mod drain;
pub(super) mod latch;
pub(super) mod refuse;
pub(super) mod state;
