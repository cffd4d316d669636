//! An image without a backing file, as its users see it: no further than its size, and marked
//! corrupt where damage is met.

use std::sync::Arc;

use cowslip_queue::{BufMut, IoVec};

use super::NoFiles;
use crate::backing::NoBacking;
use crate::control::amend::Amendment;
use crate::control::snapshot::{NewSnapshot, SnapshotChoice};
use crate::disk::{ZeroOptions, within};
use crate::file::{AlignedFile, BlockFile, Durability, Sharing};
use crate::files::Files;
use crate::options::{CACHE_BYTES_DEFAULT, OpenOptions};
use crate::policy::Preallocation;
use crate::statistics::CacheStatistics;
use crate::{Job, Result};
use crate::{OpenParameters, Qcow2};

/// The image alone.
pub async fn open(file: Arc<dyn BlockFile>, options: &OpenOptions) -> Result<Qcow2> {
    let files = Files::new(Sharing::default(), Vec::new(), Default::default());
    let opening = OpenParameters {
        file_len: file.len().await.expect("a file in memory has a length"),
        file: AlignedFile::new(file),
        options,
        gate: &NoFiles,
        files: &files,
        is_top: true,
    };
    crate::open(opening).await
}

/// The image.
pub struct Image(Qcow2);

impl Image {
    pub async fn open(file: Arc<dyn BlockFile>, options: &OpenOptions) -> Result<Image> {
        let image = open(file, options).await?;
        // A chain shares out the memory for tables when it is opened.
        image.set_cache_budget(CACHE_BYTES_DEFAULT);
        Ok(Image(image))
    }

    async fn marked<T>(&self, outcome: Result<T>) -> Result<T> {
        self.0.mark_corrupt_on_error(outcome).await
    }

    pub async fn read(&self, offset: u64, buf: BufMut) -> Result<BufMut> {
        within(self.0.size(), offset, buf.len() as u64)?;
        let read = self.0.read_guest(offset, buf.into(), &NoBacking).await;
        Ok(read?.into())
    }

    pub async fn write(
        &self,
        offset: u64,
        data: impl Into<IoVec>,
        durability: Durability,
    ) -> Result<()> {
        let data = data.into();
        within(self.0.size(), offset, data.len() as u64)?;
        let context = (&NoBacking as _, durability);
        let written = self.0.write_notify(offset, data, context, &|| ()).await;
        self.marked(written).await
    }

    pub async fn write_zeroes(&self, offset: u64, len: u64, options: ZeroOptions) -> Result<()> {
        within(self.0.size(), offset, len)?;
        let range = offset..offset + len;
        let zeroed = self.0.write_zeroes(range, &NoBacking, options).await;
        self.marked(zeroed).await
    }

    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        within(self.0.size(), offset, len)?;
        let discarded = self.0.discard(offset..offset + len, &NoBacking).await;
        self.marked(discarded).await
    }

    pub async fn resize(&self, size: u64) -> Result<()> {
        let how = (Preallocation::Off, &Job::default());
        self.0.resize(size, &NoBacking, how).await
    }

    pub async fn amend(&self, amendment: &Amendment, job: &Job) -> Result<()> {
        self.0.amend(amendment, &NoBacking, job).await
    }

    pub async fn create_snapshot(&self, new: &NewSnapshot, job: &Job) -> Result<String> {
        self.marked(self.0.create_snapshot(new, job).await).await
    }

    pub async fn delete_snapshot(&self, choice: &SnapshotChoice, job: &Job) -> Result<()> {
        self.marked(self.0.delete_snapshot(choice, job).await).await
    }

    pub fn cache_statistics(&self) -> CacheStatistics {
        self.0.cache_statistics()
    }

    pub async fn flush(&self) -> Result<()> {
        self.0.flush().await
    }

    pub async fn close(&self) -> Result<()> {
        self.0.close().await
    }
}
