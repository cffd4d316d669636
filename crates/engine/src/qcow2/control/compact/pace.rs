//! Plans of many clusters, made in short steps between which others go on.

use std::ops::Range;

use cowslip_queue::yield_now;

use crate::Result;
use crate::job::Job;

/// Units of work in a step: what is done for one cluster takes one, of about 100 ns where its
/// memory is far.
const STEP_UNITS: u64 = 1 << 13;
/// Clusters that are looked at without a glance at the clock of the step.
const PIECE: usize = 1 << 9;

/// The work of a step that is left.
#[derive(Debug)]
pub struct Pace<'a> {
    job: &'a Job,
    left: u64,
}

impl<'a> Pace<'a> {
    /// A step begins. A job that is cancelled ends with the step.
    pub fn of(job: &'a Job) -> Pace<'a> {
        Pace {
            job,
            left: STEP_UNITS,
        }
    }

    /// Notes work that is done. After enough for a step, others go on.
    ///
    /// # Errors
    /// [`crate::Error::Cancelled`].
    pub async fn spend(&mut self, units: u64) -> Result<()> {
        match self.left.checked_sub(units) {
            Some(left) => self.left = left,
            None => {
                self.left = STEP_UNITS;
                yield_now().await;
                self.job.check()?;
            }
        }
        Ok(())
    }

    /// The same, of one unit for each of a piece.
    ///
    /// # Errors
    /// [`crate::Error::Cancelled`].
    pub async fn spend_on(&mut self, piece: &Range<usize>) -> Result<()> {
        self.spend(piece.len() as u64).await
    }
}

/// A range in pieces that are done at once.
pub(super) fn pieces_of(range: Range<usize>) -> impl Iterator<Item = Range<usize>> + Send {
    let Range { start, end } = range;
    (start..end)
        .step_by(PIECE)
        .map(move |at| at..end.min(at + PIECE))
}
