//! Images with calls that block.

use std::sync::Arc;

use cowslip::image::{Durability, Image, Space, ZeroOptions};
use cowslip::qcow2::bitmap::BitmapChange;
use cowslip::qcow2::compact::CompactOptions;
use cowslip::qcow2::inspect::BitmapInfo;
use cowslip::qcow2::snapshot::SnapshotChoice::IdOrName;
use cowslip::{BufMut, Error, Result};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::to_python;
use crate::handle::{Handle, Kind, Use};
use crate::job::NativeJob;
use crate::options::{Opening, preallocation};
use crate::{memory, run};

/// Bytes that `pread` reads at a time: its memory beside that of the result, which a processor's
/// cache has room for.
const READ_BYTES: usize = 256 << 10;

/// An open image; `cowslip.Image` derives from it.
#[pyclass(frozen, subclass, name = "Image", module = "cowslip._cowslip")]
pub struct NativeImage {
    pub(crate) handle: Arc<Handle>,
}

/// Start, length, depth, present, zero, data, compressed, offset in the file.
type ExtentFields = (u64, u64, u32, bool, bool, bool, bool, Option<u64>);

/// ID, name, seconds and nanoseconds of the date, bytes of the machine's state, nanoseconds of its
/// clock.
type SnapshotFields = (String, String, u32, u32, u64, u64);

impl NativeImage {
    fn call(&self) -> PyResult<Use> {
        self.handle.begin(Kind::Call)
    }

    /// Begins a call for a range of the disk.
    fn call_within(&self, offset: u64, length: u64) -> PyResult<Use> {
        let image = self.call()?;
        within(&image, offset, length)?;
        Ok(image)
    }
}

/// A list of what the image has, each as fields.
fn listed<T: Send, F>(
    py: Python<'_>,
    all: impl Future<Output = Result<Vec<T>>> + Send,
    fields: impl Fn(T) -> F,
) -> PyResult<Vec<F>> {
    Ok(run(py, all)?.into_iter().map(fields).collect())
}

/// Durability by a flag.
pub fn durability(fua: bool) -> Durability {
    Durability::of_fua(fua)
}

/// How zeroes are written, by flags.
pub fn zero_options(unmap: bool, fua: bool) -> ZeroOptions {
    ZeroOptions {
        space: Space::of_unmap(unmap),
        durability: durability(fua),
        fast_only: false,
    }
}

/// Refuses a range that is not within the disk, before memory is asked for.
///
/// # Errors
/// `InvalidError`.
pub fn within(image: &Image, offset: u64, length: u64) -> PyResult<()> {
    let size = image.size();
    match offset.checked_add(length).is_some_and(|end| end <= size) {
        true => Ok(()),
        false => Err(to_python(Error::Invalid(format!(
            "{length} bytes at offset {offset} are not within the disk, which has {size} bytes"
        )))),
    }
}

#[pymethods]
impl NativeImage {
    #[new]
    fn new(py: Python<'_>, name: &str, options: Opening) -> PyResult<NativeImage> {
        let request = options.request().map_err(to_python)?;
        let image = run(py, cowslip_embed::open(name, &request))?;
        let handle = Handle::new(image);
        Ok(NativeImage { handle })
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.handle.is_closed()
    }

    /// Requests of queues that are under way.
    #[getter]
    fn requests(&self) -> usize {
        self.handle.requests()
    }

    /// Bytes of the disk.
    #[getter]
    fn size(&self) -> PyResult<u64> {
        Ok(self.call()?.size())
    }

    /// Bytes of the unit of allocation.
    #[getter]
    fn block_size(&self) -> PyResult<u64> {
        Ok(self.call()?.preferred_block_bytes())
    }

    /// Whether it may be written.
    #[getter]
    fn writable(&self) -> PyResult<bool> {
        Ok(self.call()?.is_writable())
    }

    fn layer_fields(&self) -> PyResult<Vec<(String, &'static str, u64)>> {
        let layers = self.call()?.layers().into_iter();
        let fields = |layer: cowslip::image::LayerInfo| (layer.name, layer.format.name());
        Ok(layers
            .map(|layer| (layer.size, fields(layer)))
            .map(|(size, (name, format))| (name, format, size))
            .collect())
    }

    /// Reads bytes of the disk.
    fn pread<'py>(
        &self,
        py: Python<'py>,
        length: usize,
        offset: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let image = self.call_within(offset, length as u64)?;
        // The memory of the result is asked for first: it may be refused, ours may not.
        PyBytes::new_with(py, length, |bytes| {
            let mut at = offset;
            let mut buf = BufMut::for_overwrite(length.min(READ_BYTES));
            for piece in bytes.chunks_mut(READ_BYTES) {
                buf.truncate(piece.len());
                buf = run(py, image.read(at, buf))?;
                piece.copy_from_slice(&buf);
                at += piece.len() as u64;
            }
            Ok(())
        })
    }

    /// Fills a buffer from the disk; returns its length in bytes.
    fn pread_into(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        offset: u64,
    ) -> PyResult<usize> {
        let (target, _hold) = memory::to_fill(buffer)?;
        let length = target.len();
        let image = self.call_within(offset, length as u64)?;
        run(py, image.read(offset, target))?;
        Ok(length)
    }

    /// Writes a buffer to the disk; returns its length in bytes.
    #[pyo3(signature = (data, offset, *, fua = false))]
    fn pwrite(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        offset: u64,
        fua: bool,
    ) -> PyResult<usize> {
        let (data, _hold) = memory::to_write(data)?;
        let length = data.len();
        let image = self.call_within(offset, length as u64)?;
        run(py, image.write(offset, data, durability(fua)))?;
        Ok(length)
    }

    /// Makes durable what was written.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let image = self.call()?;
        run(py, image.flush())
    }

    /// Gives up bytes of the disk.
    fn discard(&self, py: Python<'_>, length: u64, offset: u64) -> PyResult<()> {
        let image = self.call_within(offset, length)?;
        run(py, image.discard(offset, length))
    }

    /// Makes bytes of the disk read as zeroes.
    #[pyo3(signature = (length, offset, *, unmap = false, fua = false))]
    #[allow(clippy::too_many_arguments)] // Callers name the last ones.
    fn zero(
        &self,
        py: Python<'_>,
        length: u64,
        offset: u64,
        unmap: bool,
        fua: bool,
    ) -> PyResult<()> {
        let image = self.call_within(offset, length)?;
        let options = zero_options(unmap, fua);
        run(py, image.write_zeroes(offset, length, options))
    }

    fn extent_fields(
        &self,
        py: Python<'_>,
        offset: u64,
        length: u64,
        max: usize,
    ) -> PyResult<Vec<ExtentFields>> {
        let image = self.call_within(offset, length)?;
        listed(py, image.extents(offset, length, max), |extent| {
            (
                extent.start,
                extent.len,
                extent.depth,
                extent.present,
                extent.zero,
                extent.data,
                extent.compressed,
                extent.host_offset,
            )
        })
    }

    fn resize_as_job(
        &self,
        py: Python<'_>,
        size: u64,
        preallocate: &str,
        job: Option<&NativeJob>,
    ) -> PyResult<()> {
        let image = self.call()?;
        let preallocate = preallocation(preallocate).map_err(to_python)?;
        run(
            py,
            image.resize_as_job(size, preallocate, &NativeJob::of(job)),
        )
    }

    fn compact_as_job(
        &self,
        py: Python<'_>,
        job: Option<&NativeJob>,
    ) -> PyResult<(u64, u64, u64, u64)> {
        let image = self.call()?;
        let options = CompactOptions::default();
        let done = run(py, image.compact(&options, &NativeJob::of(job)))?;
        Ok((
            done.file_bytes_before,
            done.file_bytes,
            done.moved_bytes,
            done.leaked_bytes,
        ))
    }

    fn snapshot_fields(&self, py: Python<'_>) -> PyResult<Vec<SnapshotFields>> {
        let image = self.call()?;
        listed(py, image.snapshots(), |one| {
            (
                one.id,
                one.name,
                one.date_sec,
                one.date_nsec,
                one.vm_state_size,
                one.vm_clock_nsec,
            )
        })
    }

    fn create_snapshot_as_job(
        &self,
        py: Python<'_>,
        name: &str,
        job: Option<&NativeJob>,
    ) -> PyResult<String> {
        let image = self.call()?;
        let new = cowslip_embed::new_snapshot(name);
        run(py, image.create_snapshot(&new, &NativeJob::of(job)))
    }

    /// Takes the disk back to a snapshot, or deletes that.
    fn snapshot_as_job(
        &self,
        py: Python<'_>,
        id_or_name: String,
        deletes: bool,
        job: Option<&NativeJob>,
    ) -> PyResult<()> {
        let (image, choice, job) = (self.call()?, IdOrName(id_or_name), NativeJob::of(job));
        match deletes {
            true => run(py, image.delete_snapshot(&choice, &job)),
            false => run(py, image.apply_snapshot(&choice, &job)),
        }
    }

    fn bitmap_fields(&self, py: Python<'_>) -> PyResult<Vec<(String, u64, bool, bool)>> {
        let image = self.call()?;
        let fields = |one: BitmapInfo| (one.name, one.granularity, one.auto, one.in_use);
        listed(py, image.bitmaps(), fields)
    }

    /// Makes a bitmap that follows writes from now on.
    #[pyo3(signature = (name, *, granularity = None))]
    fn add_bitmap(&self, py: Python<'_>, name: &str, granularity: Option<u64>) -> PyResult<()> {
        self.change_bitmap(py, name, &BitmapChange::Add { granularity })
    }

    /// Removes a bitmap.
    fn remove_bitmap(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.change_bitmap(py, name, &BitmapChange::Remove)
    }

    /// Forgets what a bitmap has noted.
    fn clear_bitmap(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.change_bitmap(py, name, &BitmapChange::Clear)
    }

    fn dirty_fields(
        &self,
        py: Python<'_>,
        name: &str,
        start: u64,
        max: usize,
    ) -> PyResult<Vec<(u64, bool)>> {
        let image = self.call()?;
        let range = start..image.size();
        let runs = run(py, image.dirty_runs(name, range, max))?;
        Ok(runs.into_iter().map(|run| (run.len, run.dirty)).collect())
    }

    /// Waits for calls of other threads, flushes and closes; a closed image stays so.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.handle.close(py)
    }
}

impl NativeImage {
    fn change_bitmap(&self, py: Python<'_>, name: &str, change: &BitmapChange) -> PyResult<()> {
        let image = self.call()?;
        run(py, image.change_bitmap(name, change))
    }
}
