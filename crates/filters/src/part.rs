//! [`PartFile`]: a range of another file, as QEMU's `raw` with `offset` and `size`.

use std::io;
use std::sync::Arc;

use cowslip_block::errno::ENOSPC;
use cowslip_block::file::{
    BlockFile, Capabilities, ContentId, Durability, FileExtent, Space, Storage,
};
use cowslip_block::limits::Limits;
use cowslip_block::{Error, IoVec, IoVecMut, Result};
use cowslip_queue::Pending;

/// Runs of a range of a file, on their way.
type Runs = Pending<io::Result<Vec<FileExtent>>>;

/// Bytes `start..start + len` of another file.
#[derive(Debug)]
pub struct PartFile {
    inner: Arc<dyn BlockFile>,
    start: u64,
    len: u64,
    capabilities: Capabilities,
}

impl PartFile {
    /// A range of a file of `inner_len` bytes; it extends to the end of the file if no size is
    /// given.
    ///
    /// # Errors
    /// The range does not lie within the file, or is not aligned for its requests.
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
            // Bytes behind the range do not belong to it.
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

    /// Translates an offset to one of the inner file. Fails with ENOSPC beyond the range, as a
    /// device does.
    fn place(&self, offset: u64, len: u64) -> io::Result<u64> {
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

    /// Runs of a range, by what `ask` learns of the whole file.
    fn runs(
        &self,
        (offset, len): (u64, u64),
        ask: impl FnOnce(&dyn BlockFile, u64, u64) -> Runs + Send + 'static,
    ) -> Runs {
        let there = self.len.saturating_sub(offset).min(len);
        let beyond = (len > there).then_some(FileExtent {
            start: offset + there,
            len: len - there,
            hole: true,
        });
        let (completer, done) = cowslip_queue::pending();
        let (inner, start) = (Arc::clone(&self.inner), self.start);
        cowslip_queue::spawn_anywhere(async move {
            let runs = match there {
                0 => Ok(Vec::new()),
                _ => ask(&*inner, start + offset, there).await,
            };
            completer.complete(runs.map(|mut runs| {
                runs.iter_mut().for_each(|run| run.start -= start);
                runs.extend(beyond);
                runs
            }));
        });
        done
    }
}

impl BlockFile for PartFile {
    cowslip_block::forward_to_file!(inner: name, id, observer, memory_alignment, flush, allocated_bytes, close, claim, claim_after, claim_handed_over, claimed);
    cowslip_block::file_from_fields!(capabilities);

    fn content_id(&self) -> Option<ContentId> {
        Some(self.inner.content_id()?.part(self.start, self.len))
    }

    fn storage(&self) -> Storage {
        self.inner.storage().part(self.start, self.len)
    }

    fn limits(&self) -> Limits {
        Limits::default().over(self.inner.limits())
    }

    fn len(&self) -> Pending<io::Result<u64>> {
        Pending::ready(Ok(self.len))
    }

    fn read(&self, offset: u64, mut buf: IoVecMut) -> Pending<(io::Result<()>, IoVecMut)> {
        let wanted = buf.len() as u64;
        if self.place(offset, wanted).is_ok() {
            return self.inner.read(self.start + offset, buf);
        }
        // Reads beyond the end return zeroes, not the bytes of the inner file.
        let there = self.len.saturating_sub(offset).min(wanted);
        let (completer, done) = cowslip_queue::pending();
        let (inner, start) = (Arc::clone(&self.inner), self.start);
        let mut beyond = buf.split_off(there as usize);
        beyond.fill(0);
        cowslip_queue::spawn_anywhere(async move {
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

    fn extents(&self, offset: u64, len: u64) -> Runs {
        self.runs((offset, len), |file, at, len| file.extents(at, len))
    }

    fn own_space(&self, offset: u64, len: u64) -> Runs {
        self.runs((offset, len), |file, at, len| file.own_space(at, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cowslip_block::file::memory::MemoryFile;
    use cowslip_queue::BufMut;

    /// As in a program whose own executor polls the disk.
    #[test]
    fn reads_beyond_the_end_need_no_queue() {
        let inner = Arc::new(MemoryFile::new("a", vec![7; 4096], 1));
        let part = PartFile::new(inner, 4096, (1024, Some(512))).expect("a part");
        let read = part.read(256, BufMut::zeroed(1024).into());
        let (outcome, list) = cowslip_queue::block_here(read);
        outcome.expect("it can be read");
        assert_eq!(list.to_vec(), [vec![7; 256], vec![0; 768]].concat());
    }

    #[test]
    fn runs_are_those_of_the_range() {
        let inner = Arc::new(MemoryFile::new("a", vec![7; 8192], 1));
        let cut = inner.set_len(4096);
        cowslip_queue::block_here(cut).expect("it is cut");
        let grown = inner.set_len(8192);
        cowslip_queue::block_here(grown).expect("it grows");
        let part = PartFile::new(inner, 8192, (1024, Some(6144))).expect("a part");
        let runs = cowslip_queue::block_here(part.extents(512, 8192)).expect("runs");
        let mut at = 512;
        for run in &runs {
            assert_eq!(run.start, at, "{runs:?}");
            at += run.len;
            let is_data = run.start < 3072;
            assert!(is_data || run.hole, "{runs:?}");
            assert!(!run.hole || run.start >= 3072, "{runs:?}");
        }
        assert_eq!(at, 512 + 8192);
    }
}
