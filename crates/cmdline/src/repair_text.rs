//! Reports of a running repair, in qemu-img's words and order: first the errors of the refcounts,
//! then each repair.

use std::sync::Arc;

use cowslip::image::{DirtyImage, RepairAtOpen, RepairWatch};
use cowslip::qcow2::repair::{Event, Step};
use cowslip_console::output::{is_called_as_qemu, print_error};

/// Prints a line on standard error.
pub fn print_line(line: &dyn std::fmt::Display) {
    print_error(&format!("{line}\n"));
}

/// Prints a step of a repair.
pub fn print_step(event: &Event<'_>) {
    match event {
        Event::Planned(step @ (Step::Refcount { .. } | Step::RefcountTable { .. })) => {
            if let Some(finding) = step.finding() {
                print_line(&finding);
            }
        }
        // Covered by the line about the rebuilt refcounts.
        Event::Done(Step::RefcountTable { .. }) => {}
        // QEMU takes its marks away without a word, and of snapshots it says what becomes of their
        // entries.
        Event::Done(Step::Marks { .. } | Step::SnapshotTable { .. }) => {}
        // QEMU neither sees nor clears them.
        Event::Done(Step::CountsBeyondEnd { .. }) if is_called_as_qemu() => {}
        Event::Done(step) => print_line(step),
        _ => {}
    }
}

/// Repairs an image that was not closed cleanly when it is opened, and reports the repair.
pub fn repaired_when_opened() -> DirtyImage {
    DirtyImage::Repair(RepairAtOpen {
        watch: Some(RepairWatch(Arc::new(|event| print_step(&event)))),
        ..RepairAtOpen::default()
    })
}
