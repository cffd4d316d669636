//! Compactions, as the verb and the daemon refuse and report them.

use cowslip::Error;
use cowslip::qcow2::compact::{CompactOptions, Compaction, CompactionPlan};
use cowslip_console::size;
use serde_json::{Value, json};

/// Refuses a length of the file that cannot be reached.
///
/// # Errors
/// `Invalid`: the shortest length is in its words.
pub fn reaches(plan: &CompactionPlan, options: &CompactOptions) -> Result<(), Error> {
    match options.target_bytes {
        Some(target) if plan.file_bytes_after > target && plan.file_bytes > target => {
            let least = plan.file_bytes_after;
            Err(Error::Invalid(format!(
                "the file cannot be shorter than {least} bytes ({}); the target size is {target}",
                size::human(least)
            )))
        }
        Some(_) | None => Ok(()),
    }
}

/// The figures of a compaction, for programs.
pub fn figures(done: &Compaction) -> Value {
    let mut value = json!({
        "file-length-before": done.file_bytes_before,
        "file-length": done.file_bytes,
        "moved-bytes": done.moved_bytes,
        "leaked-bytes": done.leaked_bytes,
        "redundant-bytes": done.redundant_bytes,
        "subcluster-bytes": done.subcluster_bytes,
        "rewritten-bytes": done.rewritten_bytes,
    });
    if let Some(order) = done.defragmentation {
        value["extents-before"] = order.extents_before.into();
        value["extents"] = order.extents.into();
        value["extents-perfect"] = order.extents_perfect.into();
    }
    value
}
