//! Plans of many clusters, made in short steps between which others go on.

use std::ops::Range;

use cowslip_queue::yield_now;

use crate::Result;
use crate::job::Job;

/// Units of work in a step: what is done for one cluster takes one, of about 100 ns where its
/// memory is far.
const STEP_UNITS: u64 = 1 << 13;
/// Memory that is given back at once, and the work that this is.
const GIVEN_BACK_BYTES: usize = 1 << 20;
const GIVEN_BACK_UNITS: u64 = STEP_UNITS / 4;
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

    /// Work of this number of units has been done. If that was enough for a step, others go on.
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

    /// Gives the memory of a long list back, some at a time: all at once takes the host as long as
    /// many steps.
    ///
    /// # Errors
    /// [`crate::Error::Cancelled`].
    pub async fn give_back<T>(&mut self, mut all: Vec<T>) -> Result<()> {
        let some = GIVEN_BACK_BYTES / size_of::<T>().max(1);
        while all.capacity() > some {
            let left = all.capacity() - some;
            all.truncate(left);
            all.shrink_to(left);
            self.spend(GIVEN_BACK_UNITS).await?;
        }
        Ok(())
    }

    /// As [`Pace::spend`], of one unit for each of a piece.
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
