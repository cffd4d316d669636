//! The keys of an encrypted image: which passphrases open it.

use std::ops::Range;

use super::Image;
use crate::chain::Layer;
use crate::file::AlignedFile;
use crate::luks::{self, KeyChange, KeyMaterial};
use crate::{Error, Job, Result, job};

impl Image {
    /// The LUKS header of the image's keys, as it is in the file; `None` if it has none.
    ///
    /// # Errors
    /// I/O, or a header that is none.
    #[doc(hidden)]
    pub async fn keys(&self) -> Result<Option<luks::Header>> {
        match self.place_of_keys().await? {
            Some((file, place)) => luks::inspect(file.block_file(), place).await.map(Some),
            None => Ok(None),
        }
    }

    async fn place_of_keys(&self) -> Result<Option<(AlignedFile, Range<u64>)>> {
        match &*self.top {
            Layer::Raw(raw) => raw.keys().await,
            Layer::Qcow2(image) => image.keys().await,
            Layer::Other(..) => Ok(None),
        }
    }

    /// Changes which passphrases open an encrypted image, durably. The data stays as it is, under
    /// the same master key; the image stays open, and requests go on.
    ///
    /// # Errors
    /// `Invalid` for a refused change, in QEMU's words, `Key` if the current passphrase opens
    /// nothing, [`Error::Cancelled`]: then nothing is changed. I/O: then, as after a crash, what
    /// opened the image before still does, or the new passphrase does.
    pub async fn change_keys(
        &self,
        change: &KeyChange,
        means: &KeyMaterial,
        job: &Job,
    ) -> Result<()> {
        self.validate_write(0, 0)?;
        let _turn = self.keys.take().await;
        let Some((file, place)) = self.place_of_keys().await? else {
            return Err(Error::Invalid(
                "the image is not encrypted with LUKS".to_string(),
            ));
        };
        let stages = luks::stages(&file, place, (change, means), job).await?;
        job.enter(job::Stage::Flush);
        match &*self.top {
            Layer::Raw(raw) => raw.write_keys(stages).await,
            Layer::Qcow2(image) => image.write_keys(stages).await,
            Layer::Other(..) => unreachable!("it has no keys"),
        }
    }
}
