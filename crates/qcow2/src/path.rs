//! The steps of a request on its way through the image.

pub(super) mod admit;
pub(super) mod compressed_read;
pub(super) mod compressed_tail;
pub(super) mod compressed_write;
pub(super) mod copy_on_read;
pub(super) mod cow;
pub(super) mod direct;
pub(super) mod gather;
pub(super) mod obstacle;
pub mod read;
pub(super) mod unshare;
pub(super) mod write;
pub(super) mod zero_discard;
