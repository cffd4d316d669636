//! A repair told as it goes, in qemu-img's words and order: first what is wrong with the refcounts,
//! then each repair.

use std::sync::Arc;

use cowslip::image::{DirtyImage, RepairAtOpen, RepairWatch};
use cowslip::qcow2::repair::{Event, Step};

use crate::output::print_error;

/// A line on standard error.
pub fn tell(line: &dyn std::fmt::Display) {
    print_error(&format!("{line}\n"));
}

/// Tells a step of a repair.
pub fn tell_step(event: &Event<'_>) {
    match event {
        Event::Planned(step @ (Step::Refcount { .. } | Step::RefcountTable { .. })) => {
            if let Some(finding) = step.finding() {
                tell(&finding);
            }
        }
        // It is told by the line that says that the refcounts are rebuilt.
        Event::Done(Step::RefcountTable { .. }) => {}
        // QEMU takes its marks away without a word, and of snapshots it tells what becomes of their
        // entries.
        Event::Done(Step::Marks { .. } | Step::SnapshotTable { .. }) => {}
        Event::Done(step) => tell(step),
        _ => {}
    }
}

/// An image that was not closed cleanly is repaired when it is opened, and the repair is told.
pub fn repaired_when_opened() -> DirtyImage {
    DirtyImage::Repair(RepairAtOpen {
        watch: Some(RepairWatch(Arc::new(|event| tell_step(&event)))),
        ..RepairAtOpen::default()
    })
}
