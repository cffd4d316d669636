//! Repair of an image: a plan first, then its run.
//!
//! Promises. Guest data that can be reached is kept, and data that a broken entry still points to
//! is recovered where nothing else uses its space. A crash at any point of the run leaves the image
//! no worse: each stage is durable before the next begins, and no stage makes an entry refer to
//! space that is not counted. Nothing is written where nothing is wrong. Leaves out: the meaning of
//! guest data, the external data file (which is not examined), images whose header is unusable, and
//! those in which a structure reaches over tables that the disk is read by (`overreach.rs`).
//!
//! 1. `survey.rs`: all tables are read once; the correction of each broken entry is decided
//!    (`entry/mend.rs`), and the references are counted as they will be.
//! 2. `refcounts.rs`, `copied.rs`: refcounts and flags that differ from those counts on disk.
//! 3. `run.rs`: the stages.
//!
//! | stage | what is written | a crash after it leaves |
//! | --- | --- | --- |
//! | 0 | the dirty mark (version 3), so that the next read-write open goes on; features that a repair breaks are cleared | the image as it was |
//! | A | broken entries, each corrected or cleared | leaks; entries that were unusable are gone |
//! | B | counts that are too low; or all counts rebuilt elsewhere, then the header switches | counts at least as high as the references |
//! | C | copies of what shares its space, tables that move; then the entries and the header that refer to them | the old or the new place of each, both counted |
//! | D | COPIED cleared where a count is not 1 | |
//! | E | counts that are too high; then holes where nothing is any more, unless entries were broken | entries without COPIED whose count is 1: written by copying, which is safe |
//! | F | COPIED set where a count is 1 | |
//! | G | a check; if it finds no corruption, the dirty and corrupt marks are cleared | |
//!
//! Counts rise before COPIED is cleared: cleared first, a write in between would free a cluster
//! that is still in use elsewhere. They fall after all else.

use std::sync::Arc;

use crate::Result;
use crate::file::BlockFile;

mod copied;
mod overreach;
mod plan;
mod refcounts;
mod roots;
mod run;
mod snapshot_entry;
mod step;
mod survey;
mod tables;

pub use plan::{Event, Observer, Outcome, RepairOptions, Scope, Summary};
pub use step::{Change, SnapshotFate, Step};

use plan::Plan;

/// Returns the plan of a repair; changes nothing.
///
/// # Errors
/// If the file cannot be read, its header is unusable, or it takes more memory than allowed.
pub async fn plan(
    file: &Arc<dyn BlockFile>,
    options: &RepairOptions,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    let mut plan = Plan::make(file, options, observer).await?;
    plan.restrict()?;
    Ok(plan.summary)
}

/// Repairs the image in `file`, which must not be open elsewhere, and checks it.
///
/// # Errors
/// As [`plan()`], or a failure of a write, after which the image is no worse and the repair may be
/// tried again.
pub async fn repair(
    file: &Arc<dyn BlockFile>,
    options: &RepairOptions,
    observer: &mut dyn Observer,
) -> Result<Outcome> {
    let plan = Plan::make(file, options, observer).await?;
    run::run(plan).await
}
