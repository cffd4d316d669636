//! [`Marks`]: a bitmap of what has changed on a disk, wherever it is; and its rotation at the
//! moment of a copy.
//!
//! | step, with requests held back | a failure leaves |
//! | --- | --- |
//! | what is marked is read, and wanted of the copy | the bitmap as it was |
//! | the bitmap begins again | what was marked is put back |
//! | other actions of the same step are prepared | what was marked is put back |
//! | the copy begins to follow its disk | |
//!
//! | later | the bitmap has |
//! | --- | --- |
//! | the copy has succeeded | what has changed since the moment |
//! | it has failed, or never began | that, and what it had at the moment |

use std::future::Future;
use std::sync::Arc;

use crate::backup::Backup;
use crate::dirty::DirtyMap;

/// A bitmap of a disk, in memory or kept by an image.
pub trait Marks {
    /// Its errors.
    type Error;

    /// Whether it notes changes.
    fn is_enabled(&self) -> bool;

    /// Its marks, in a map of their own that follows nothing.
    ///
    /// # Errors
    /// Of the image that keeps it.
    fn marks(&self) -> impl Future<Output = Result<Arc<DirtyMap>, Self::Error>>;

    /// Marks nothing.
    ///
    /// # Errors
    /// Of the image that keeps it.
    fn clear(&self) -> impl Future<Output = Result<(), Self::Error>>;

    /// Marks what a map has marked, too.
    ///
    /// # Errors
    /// Of the image that keeps it.
    fn merge(&self, marks: &DirtyMap) -> impl Future<Output = Result<(), Self::Error>>;

    /// Sets whether changes are noted from now on.
    ///
    /// # Errors
    /// Of the image that keeps it.
    fn enable(&self, is_enabled: bool) -> impl Future<Output = Result<(), Self::Error>>;
}

/// The fate of the marks of a bitmap that a backup copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotates {
    /// The bitmap begins again at the moment of the backup, if the backup succeeds.
    OnSuccess,
    /// It begins again in any case.
    Always,
    /// It goes on.
    Never,
}

/// The marks that were in a bitmap at the moment of a backup, until it is known what becomes of
/// the copy.
#[must_use = "a copy that fails has nothing of what was marked"]
#[derive(Debug)]
pub struct Rotation<B> {
    bitmap: B,
    rotates: Rotates,
    taken: Arc<DirtyMap>,
}

impl<B: Marks> Rotation<B> {
    /// The backup has ended. Unless it has succeeded, the bitmap has again what it had.
    ///
    /// # Errors
    /// Of the image that keeps the bitmap.
    pub async fn end(self, has_succeeded: bool) -> Result<(), B::Error> {
        match self.rotates {
            Rotates::OnSuccess if !has_succeeded => self.bitmap.merge(&self.taken).await,
            _ => Ok(()),
        }
    }

    /// The backup has not begun: the bitmap has again what it had, however it was to rotate.
    ///
    /// # Errors
    /// Of the image that keeps the bitmap.
    pub async fn take_back(self) -> Result<(), B::Error> {
        match self.rotates {
            Rotates::Never => Ok(()),
            _ => self.bitmap.merge(&self.taken).await,
        }
    }
}

impl Backup {
    /// Wants all that a bitmap has marked until now. Later changes are marked in the bitmap for the
    /// next copy; [`Backup::freeze`] takes the moment, before any.
    ///
    /// # Errors
    /// Of the image that keeps the bitmap, which is as it was.
    pub async fn want_since<B: Marks>(
        &self,
        (bitmap, rotates): (B, Rotates),
    ) -> Result<Rotation<B>, B::Error> {
        let taken = bitmap.marks().await?;
        self.want(&taken);
        if rotates != Rotates::Never
            && let Err(error) = bitmap.clear().await
        {
            // Part of it may have been cleared.
            drop(bitmap.merge(&taken).await);
            return Err(error);
        }
        Ok(Rotation {
            bitmap,
            rotates,
            taken,
        })
    }
}

#[cfg(test)]
mod tests;
