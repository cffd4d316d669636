//! Cowslip for C: the functions that `include/cowslip.h` declares.
//!
//! Handles are opaque. A function that can fail returns 0 or a negative errno, and gives the error
//! with its words to a caller who wants it. Nothing aborts: a panic, which is a mistake of this
//! library, becomes an error of its own kind. Descriptions that callers fill in begin with their
//! size, so that later versions may add to them.
//!
//! Besides `cowslip-queue` this is the only crate with `unsafe` code: pointers of C are taken here,
//! and nowhere else. The safety section of each function says in one sentence what C's header says
//! at length.
//!
//! May not know: table entries, files, how a request is carried out.

mod check;
pub mod constants;
mod description;
mod error;
mod image;
mod io;
mod job;
mod memory;
mod pointer;
mod queue;
mod snapshot;

pub use check::{cowslip_check, cowslip_check_result, cowslip_convert};
pub use description::{cowslip_create_options, cowslip_naming, cowslip_open_options};
pub use error::{
    cowslip_error, cowslip_error_errno, cowslip_error_free, cowslip_error_kind,
    cowslip_error_message,
};
pub use image::{
    cowslip_block_size, cowslip_close, cowslip_create, cowslip_image, cowslip_is_writable,
    cowslip_layer_count, cowslip_layer_format, cowslip_layer_name, cowslip_open, cowslip_open_fd,
    cowslip_resize, cowslip_size, cowslip_version,
};
pub use io::{
    cowslip_discard, cowslip_extent, cowslip_flush, cowslip_next_extent, cowslip_read,
    cowslip_request_run, cowslip_write, cowslip_write_zeroes,
};
pub use job::{
    cowslip_job, cowslip_job_cancel, cowslip_job_free, cowslip_job_get, cowslip_job_new,
    cowslip_progress,
};
pub use memory::cowslip_iovec;
pub use queue::{
    cowslip_completion, cowslip_queue, cowslip_queue_complete, cowslip_queue_fd,
    cowslip_queue_free, cowslip_queue_new, cowslip_queue_submit, cowslip_request,
};
pub use snapshot::{
    cowslip_snapshot_apply, cowslip_snapshot_create, cowslip_snapshot_delete, cowslip_snapshot_id,
    cowslip_snapshot_list, cowslip_snapshot_name, cowslip_snapshots, cowslip_snapshots_count,
    cowslip_snapshots_free,
};
