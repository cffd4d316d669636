//! The area behind the disk that holds the state of a virtual machine.

use cowslip_queue::{IoVec, IoVecMut};

use super::Image;
use crate::Result;
use crate::qcow2::Qcow2;

impl Image {
    /// Fills a buffer or a list from `offset` on of the area behind the disk that QEMU keeps the
    /// state of a virtual machine in. Unwritten ranges read as zeroes; backing files have no
    /// part in it.
    ///
    /// # Errors
    /// `Unsupported` for a raw image; an offset beyond what can be addressed, I/O, or a corrupt
    /// table entry.
    pub async fn read_vm_state<T>(&self, offset: u64, target: T) -> Result<T>
    where
        T: Into<IoVecMut> + From<IoVecMut>,
    {
        let image = self.with_vm_state()?;
        let filled = image.read_vm_state(offset, target.into()).await?;
        Ok(filled.into())
    }

    /// Writes to that area: at the next flush it is durable. An internal snapshot takes it along,
    /// and the area is empty again when the image is committed, or resized so that it begins
    /// elsewhere ([`Image::vm_state_offset`]).
    ///
    /// # Errors
    /// As [`Image::write`], and [`Image::read_vm_state`]; `Io` with EFBIG where the L1 table would
    /// become longer than 32 MiB.
    pub async fn write_vm_state(&self, offset: u64, data: impl Into<IoVec>) -> Result<()> {
        self.validate_write(0, 0)?;
        let image = self.with_vm_state()?;
        let written = image.write_vm_state(offset, data.into()).await;
        image.mark_corrupt_on_error(written).await
    }

    /// Returns where that area begins among the guest's offsets: with the first L1 entry that the
    /// disk does not need. `None` for a raw image.
    pub fn vm_state_offset(&self) -> Option<u64> {
        let image = self.with_vm_state().ok()?;
        Some(image.header().geometry().vm_state_offset(self.size()))
    }

    fn with_vm_state(&self) -> Result<&Qcow2> {
        self.qcow2_for("the state of a virtual machine in")
    }
}
