//! [`Run`]: the source of a range of a disk, as an image format reports it. Pure.

use std::ops::Range;

/// Offset in bytes in the file that holds guest data or metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct HostOffset(pub u64);

impl HostOffset {
    /// The address `bytes` further.
    #[must_use]
    pub const fn plus(self, bytes: u64) -> HostOffset {
        HostOffset(self.0 + bytes)
    }
}

/// Place of a compressed cluster, in bytes rather than clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compressed {
    /// First byte of the compressed data.
    pub start: u64,
    /// Length in bytes up to the end of the last sector, at least that of the data.
    pub len: u64,
}

/// Source of the bytes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The next lower layer.
    Below,
    /// Zeroes; with the offset of the allocated space that a later write would use, if any.
    Zero(Option<HostOffset>),
    /// Data in the data file from this offset on.
    Data(HostOffset),
    /// A compressed cluster; the run starts at this offset in the decompressed bytes.
    Compressed(Compressed, u64),
}

/// A run of bytes of a disk with one source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Range on the disk, in bytes.
    pub range: Range<u64>,
    /// Source of the bytes.
    pub source: Source,
}

impl Run {
    /// Whether `next` continues this run, on the disk and in the file.
    pub fn continues_with(&self, next: &Run) -> bool {
        let len = self.range.end - self.range.start;
        self.range.end == next.range.start
            && match (self.source, next.source) {
                (Source::Below, Source::Below) | (Source::Zero(None), Source::Zero(None)) => true,
                (Source::Zero(Some(a)), Source::Zero(Some(b)))
                | (Source::Data(a), Source::Data(b)) => a.plus(len) == b,
                (Source::Compressed(a, from), Source::Compressed(b, to)) => {
                    a == b && from + len == to
                }
                _ => false,
            }
    }
}

/// Appends a run, or extends the last one by it.
#[doc(hidden)]
pub fn push(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.continues_with(&run) => last.range.end = run.range.end,
        _ => runs.push(run),
    }
}
