//! [`PartFile`]: a part of a file as a file, QEMU's `raw` with `offset` and `size`.

use std::io;
use std::sync::Arc;

use cowslip_block::file::{
    BlockFile, Capabilities, Claim, ContentId, Durability, FileExtent, FileId, Observer,
    Protection, Space, Storage,
};
use cowslip_block::limits::Limits;
use cowslip_block::{Error, IoVec, IoVecMut, Result};
use cowslip_queue::Pending;
use cowslip_queue::file::MemoryAlignment;

/// Bytes `start..start + len` of a file.
#[derive(Debug)]
pub struct PartFile {
    inner: Arc<dyn BlockFile>,
    start: u64,
    len: u64,
    capabilities: Capabilities,
}

impl PartFile {
    /// A part of a file of `inner_len` bytes, to its end if no size is given.
    ///
    /// # Errors
    /// It does not lie in the file, or requests to it would not be aligned.
    pub fn new(
        inner: Arc<dyn BlockFile>,
        inner_len: u64,
        (start, size): (u64, Option<u64>),
    ) -> Result<PartFile> {
        let refused = |text: String| Err(Error::Invalid(text));
        if size.is_some_and(|size| !size.is_multiple_of(512)) {
            return refused("Specified size is not multiple of 512".to_string());
        }
        if start > inner_len {
            return refused(format!(
                "Offset ({start}) cannot be greater than size of the containing file ({inner_len})"
            ));
        }
        let len = size.unwrap_or(inner_len - start);
        if len > inner_len - start {
            return refused(format!(
                "The sum of offset ({start}) and size ({len}) has to be smaller or equal to the actual size of the containing file ({inner_len})"
            ));
        }
        let alignment = inner.capabilities().alignment_bytes.max(1);
        if !start.is_multiple_of(u64::from(alignment)) {
            return refused(format!(
                "Offset ({start}) has to be a multiple of the file's block of {alignment} bytes (use a cache mode with the page cache)"
            ));
        }
        let capabilities = Capabilities {
            // The bytes behind the part are not its own.
            extends_with_zeroes: false,
            ..inner.capabilities().clone()
        };
        Ok(PartFile {
            inner,
            start,
            len,
            capabilities,
        })
    }

    /// A range within the part, in the file; writes beyond the part find no space, as on a device.
    fn place(&self, offset: u64, len: u64) -> io::Result<u64> {
        const ENOSPC: i32 = 28;
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.start + offset),
            _ => Err(io::Error::from_raw_os_error(ENOSPC)),
        }
    }

    fn at<T: Send + 'static>(
        &self,
        (offset, len): (u64, u64),
        request: impl FnOnce(&dyn BlockFile, u64) -> Pending<io::Result<T>>,
    ) -> Pending<io::Result<T>> {
        match self.place(offset, len) {
            Ok(at) => request(&*self.inner, at),
            Err(error) => Pending::ready(Err(error)),
        }
    }
}

impl BlockFile for PartFile {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn id(&self) -> Option<FileId> {
        self.inner.id()
    }

    fn content_id(&self) -> Option<ContentId> {
        Some(self.inner.content_id()?.part(self.start, self.len))
    }

    fn storage(&self) -> Storage {
        self.inner.storage().part(self.start, self.len)
    }

    fn limits(&self) -> Limits {
        Limits::default().over(self.inner.limits())
    }

    fn observer(&self) -> Option<Arc<dyn Observer>> {
        self.inner.observer()
    }

    fn len(&self) -> Pending<io::Result<u64>> {
        Pending::ready(Ok(self.len))
    }

    fn memory_alignment(&self) -> MemoryAlignment {
        self.inner.memory_alignment()
    }

    fn read(&self, offset: u64, mut buf: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        let wanted = buf.len() as u64;
        if self.place(offset, wanted).is_ok() {
            return self.inner.read(self.start + offset, buf);
        }
        // Beyond the end there are zeroes, not what follows in the file.
        let there = self.len.saturating_sub(offset).min(wanted);
        let (completer, done) = cowslip_queue::pending();
        let (inner, start) = (Arc::clone(&self.inner), self.start);
        let mut beyond = buf.split_off(there as usize);
        beyond.fill(0);
        cowslip_queue::spawn(async move {
            let (outcome, mut buf) = match buf.is_empty() {
                true => (Ok(()), buf),
                false => inner.read(start + offset, buf).await,
            };
            buf.append(beyond);
            completer.complete((outcome, buf));
        });
        done
    }

    fn write(&self, offset: u64, data: IoVec, durability: Durability) -> Pending<io::Result<()>> {
        let len = data.len() as u64;
        self.at((offset, len), |file, at| file.write(at, data, durability))
    }

    fn zero(&self, offset: u64, len: u64, space: Space) -> Pending<io::Result<()>> {
        self.at((offset, len), |file, at| file.zero(at, len, space))
    }

    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.at((offset, len), |file, at| file.discard(at, len))
    }

    fn allocate(&self, _: u64, _: u64) -> Pending<io::Result<()>> {
        Pending::ready(Err(io::ErrorKind::Unsupported.into()))
    }

    fn extents(&self, start: u64, len: u64) -> Pending<io::Result<Vec<FileExtent>>> {
        // Signal for seldom: nothing is known, so all is data.
        let hole = false;
        Pending::ready(Ok(vec![FileExtent { start, len, hole }]))
    }

    fn flush(&self) -> Pending<io::Result<()>> {
        self.inner.flush()
    }

    fn set_len(&self, _: u64) -> Pending<io::Result<()>> {
        Pending::ready(Err(io::ErrorKind::Unsupported.into()))
    }

    fn allocated_bytes(&self) -> Option<u64> {
        self.inner.allocated_bytes()
    }

    fn close(&self) -> Pending<io::Result<()>> {
        self.inner.close()
    }

    fn claim(&self, wanted: Claim) -> Result<Protection> {
        self.inner.claim(wanted)
    }

    fn claim_after(&self, wanted: Claim, predecessor: &dyn BlockFile) -> Result<Protection> {
        self.inner.claim_after(wanted, predecessor)
    }

    fn claimed(&self) -> Claim {
        self.inner.claimed()
    }
}
