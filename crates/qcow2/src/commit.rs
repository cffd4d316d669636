//! The order of durable writes: cycles of write-back, and roots.

pub(super) mod observe;
pub mod probe;
pub(super) mod roots;
pub(super) mod state;
pub(super) mod turn;
pub(super) mod writeback;
