//! The extents of the disk, as `qemu-img map` and NBD's block status report them.

use std::ops::Range;

use crate::run::{HostOffset, Source};

use crate::Result;
use crate::backing::Decided;
use crate::chain::{Below, Layer, decide};
use crate::file::FileExtent;
use crate::image::Extent;
use crate::qcow2::Qcow2;

/// Bytes of the disk that are looked at at a time, to begin with. Where they are all of a kind it
/// becomes twice as much, so that a disk of exbibytes with nothing on it does not take hours.
const STEP_BYTES: u64 = 1 << 30;
/// Nor has the first step more (sub)clusters than this.
const STEP_CLUSTERS: u64 = 1 << 14;
/// A step has no more (sub)clusters than this, which bounds its memory: each may be a run of its
/// own.
const STEP_CLUSTERS_MAX: u64 = 1 << 17;
/// A step of this many runs is of a kind.
const FEW_RUNS: usize = 16;

/// See [`crate::Image::extents`].
pub async fn extents(
    top: &Layer,
    below: &Below,
    (range, max): (Range<u64>, usize),
) -> Result<Vec<Extent>> {
    let mut found: Vec<Extent> = Vec::new();
    let layers = below.layers().iter().map(|layer| &**layer);
    let unit = layers.chain([top]).filter_map(unit_bytes).min();
    let step_max = unit.map_or(u64::MAX, |unit| unit * STEP_CLUSTERS_MAX);
    let step_first = unit.map_or(STEP_BYTES, |unit| STEP_BYTES.min(unit * STEP_CLUSTERS));
    let (mut at, mut step) = (range.start, step_first);
    while at < range.end {
        let end = range.end.min(at.saturating_add(step));
        let runs = decide(top, below.layers(), at..end).await?;
        at = end;
        step = if runs.len() <= FEW_RUNS {
            step.saturating_mul(2).min(step_max)
        } else {
            step_first
        };
        for decided in runs {
            let layer = match decided.depth {
                0 => top,
                depth => &below.layers()[depth - 1],
            };
            for extent in describe(layer, &decided).await? {
                push(&mut found, extent);
            }
        }
        if found.len() > max {
            break;
        }
    }
    Ok(found)
}

/// The smallest part of a layer that has a state of its own.
fn unit_bytes(layer: &Layer) -> Option<u64> {
    layer.qcow2().map(Qcow2::subcluster_bytes)
}

fn push(extents: &mut Vec<Extent>, next: Extent) {
    if let Some(last) = extents.last_mut() {
        let contiguous = match (last.host_offset, next.host_offset) {
            (Some(a), Some(b)) => a + last.len == b,
            (None, None) => true,
            _ => false,
        };
        let flags = |e: &Extent| (e.depth, e.present, e.zero, e.data, e.compressed);
        if contiguous && flags(last) == flags(&next) {
            last.len += next.len;
            return;
        }
    }
    extents.push(next);
}

async fn describe(layer: &Layer, decided: &Decided) -> Result<Vec<Extent>> {
    let range = &decided.run.range;
    let blank = Extent {
        start: range.start,
        len: range.end - range.start,
        depth: decided.depth as u32,
        present: true,
        zero: false,
        data: false,
        compressed: false,
        host_offset: None,
    };
    let is_encrypted = layer.data_file().is_encrypted();
    let extent = match decided.run.source {
        Source::Below => {
            let nothing = Extent {
                present: false,
                zero: true,
                ..blank
            };
            if let Some(image) = layer.qcow2()
                && !is_encrypted
            {
                let spaces = image.unallocated_space(range.clone()).await?;
                return Ok(with_spaces(nothing, &spaces));
            }
            nothing
        }
        Source::Zero(host) => Extent {
            zero: true,
            host_offset: host.map(|host| host.0).filter(|_| !is_encrypted),
            ..blank
        },
        Source::Compressed(..) => Extent {
            data: true,
            compressed: true,
            ..blank
        },
        // No offset: the bytes on the host are not those of the disk.
        Source::Data(_) if is_encrypted => Extent {
            data: true,
            ..blank
        },
        Source::Data(host) => {
            if let Layer::Raw(raw) = layer {
                let parts = raw.file().extents(range.start, blank.len).await?;
                return Ok(parts.iter().map(|part| raw_extent(part, blank)).collect());
            }
            if let Some(image) = layer.qcow2()
                && image.is_sparse().await?
            {
                let parts = image.data_file().extents(host.0, blank.len).await?;
                let start = range.start;
                return Ok(parts
                    .iter()
                    .map(|part| sparse_extent(part, start + (part.start - host.0), blank))
                    .collect());
            }
            Extent {
                data: true,
                host_offset: Some(host.0),
                ..blank
            }
        }
    };
    Ok(vec![extent])
}

fn raw_extent(part: &FileExtent, blank: Extent) -> Extent {
    Extent {
        start: part.start,
        len: part.len,
        zero: part.hole,
        data: !part.hole,
        host_offset: Some(part.start),
        ..blank
    }
}

/// A part of a qcow2 image's data: allocated there, though it may be a hole in the file.
fn sparse_extent(part: &FileExtent, start: u64, blank: Extent) -> Extent {
    Extent {
        start,
        len: part.len,
        zero: part.hole,
        data: true,
        host_offset: Some(part.start),
        ..blank
    }
}

/// Unallocated subclusters, cut where their clusters have space.
fn with_spaces(nothing: Extent, spaces: &[(Range<u64>, HostOffset)]) -> Vec<Extent> {
    let end = nothing.start + nothing.len;
    let mut extents = Vec::new();
    let mut at = nothing.start;
    for (range, host) in spaces {
        extents.push(Extent {
            start: at,
            len: range.start - at,
            ..nothing
        });
        extents.push(Extent {
            start: range.start,
            len: range.end - range.start,
            host_offset: Some(host.0),
            ..nothing
        });
        at = range.end;
    }
    extents.push(Extent {
        start: at,
        len: end - at,
        ..nothing
    });
    extents.retain(|extent| extent.len > 0);
    extents
}
