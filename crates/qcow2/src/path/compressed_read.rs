//! Reading compressed clusters: those adjacent on the host are read together, and the workers
//! unpack it.
//!
//! An image that was written in one go has them side by side, byte by byte, so a request of several
//! takes one read of the host, and as many pieces of work as keep the processors busy.

use cowslip_boxed::boxed;
use std::ops::Range;
use std::sync::Arc;

use cowslip_block::joins::join_all;
use cowslip_queue::{Buf, IoVecMut};

use crate::Qcow2;
use crate::compress::{decompress, missing_codec};
use crate::entry::Compressed;
use crate::file::Event;
use crate::header::CompressionType;
use crate::workers::GROUP_BYTES;
use crate::{Error, Result};

/// Bytes between two clusters that are cheaper to read than to leave out.
const GAP_BYTES: u64 = 4096;
/// Bytes of the host that are read at once at most: this much lies in memory beside what is asked
/// for.
const READ_BYTES_MAX: u64 = 1 << 20;

/// A part of a request that a compressed cluster holds.
pub(crate) struct CompressedPart {
    /// Where it is on the disk.
    pub at: u64,
    /// The compressed cluster's place in the file.
    pub place: Compressed,
    /// Where it begins in the cluster.
    pub from: u64,
    /// The buffers to fill.
    pub part: IoVecMut,
}

/// Neighbours on the host.
struct Group {
    range: Range<u64>,
    parts: Vec<CompressedPart>,
}

/// The parameters of decompression.
#[derive(Clone)]
struct Unpacking {
    kind: CompressionType,
    cluster_bytes: usize,
    name: Arc<str>,
}

impl Qcow2 {
    /// Reads parts, each with its own outcome.
    #[boxed]
    pub(crate) async fn read_compressed(
        &self,
        parts: Vec<CompressedPart>,
    ) -> Vec<Result<(u64, IoVecMut)>> {
        if parts.is_empty() {
            return Vec::new();
        }
        let groups = join_all(
            groups(parts)
                .into_iter()
                .map(|group| self.read_group(group)),
        );
        groups.await.into_iter().flatten().collect()
    }

    async fn read_group(&self, group: Group) -> Vec<Result<(u64, IoVecMut)>> {
        let len = group.range.end - group.range.start;
        self.file.reach(Event::ReadCompressed).await;
        let input = match self.file.read_new(group.range.start, len).await {
            Ok(input) => input.freeze(),
            Err(error) => {
                let failed = |_| Err(error.duplicate());
                return group.parts.iter().map(failed).collect();
            }
        };
        let unpacking = Unpacking {
            kind: self.compression,
            cluster_bytes: self.geometry().cluster_bytes() as usize,
            name: self.name().into(),
        };
        let share = (GROUP_BYTES as usize / unpacking.cluster_bytes).max(1);
        let mut parts = group.parts.into_iter().peekable();
        let mut work = Vec::new();
        while parts.peek().is_some() {
            let some: Vec<CompressedPart> = parts.by_ref().take(share).collect();
            let (unpacking, input) = (unpacking.clone(), input.clone());
            let start = group.range.start;
            work.push(
                self.workers
                    .run(move || unpacking.unpack(some, (start, &input))),
            );
        }
        join_all(work).await.into_iter().flatten().collect()
    }
}

/// Joins parts whose clusters are neighbours on the host.
fn groups(mut parts: Vec<CompressedPart>) -> Vec<Group> {
    parts.sort_by_key(|wanted| wanted.place.start);
    let mut groups: Vec<Group> = Vec::new();
    for wanted in parts {
        let Compressed { start, len } = wanted.place;
        let end = start + len;
        match groups.last_mut() {
            Some(group)
                if start <= group.range.end + GAP_BYTES
                    && end.max(group.range.end) - group.range.start <= READ_BYTES_MAX =>
            {
                group.range.end = group.range.end.max(end);
                group.parts.push(wanted);
            }
            _ => groups.push(Group {
                range: start..end,
                parts: vec![wanted],
            }),
        }
    }
    groups
}

impl Unpacking {
    /// Unpacks clusters of which the bytes from `start` on are `input`.
    fn unpack(
        &self,
        parts: Vec<CompressedPart>,
        (start, input): (u64, &Buf),
    ) -> Vec<Result<(u64, IoVecMut)>> {
        let mut scratch = Vec::new();
        let unpack = |wanted: CompressedPart| {
            let CompressedPart {
                at,
                place,
                from,
                mut part,
            } = wanted;
            let packed = &input[(place.start - start) as usize..][..place.len as usize];
            let outcome = match part.len() == self.cluster_bytes {
                true => {
                    // Not in the caller's memory: decompression reads back its own output.
                    let (mut buf, bounce) = part.bounce();
                    decompress(self.kind, packed, &mut buf).map(|()| bounce.end(buf))
                }
                false => {
                    scratch.resize(self.cluster_bytes, 0);
                    decompress(self.kind, packed, &mut scratch).map(|()| {
                        let (from, len) = (from as usize, part.len());
                        part.copy_from_slice(0, &scratch[from..from + len]);
                        part
                    })
                }
            };
            let part = outcome.map_err(|error| match missing_codec(self.kind) {
                Some(codec) => Error::Unsupported {
                    file: self.name.to_string(),
                    feature: codec.into(),
                },
                None => Error::Corrupt {
                    file: self.name.to_string(),
                    structure: "compressed cluster",
                    offset: place.start,
                    detail: error.to_string(),
                },
            })?;
            Ok((at, part))
        };
        parts.into_iter().map(unpack).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_read_together_within_bounds() {
        let wanted = |(start, len): &(u64, u64)| CompressedPart {
            at: 0,
            place: Compressed {
                start: *start,
                len: *len,
            },
            from: 0,
            part: IoVecMut::default(),
        };
        let ranges = |places: &[(u64, u64)]| {
            let groups = groups(places.iter().map(wanted).collect());
            let range = |group: Group| (group.range.start, group.range.end, group.parts.len());
            groups.into_iter().map(range).collect::<Vec<_>>()
        };
        // Two clusters may share a sector, and the order of the guest is not that of the host.
        assert_eq!(ranges(&[(1024, 1024), (0, 1536)]), [(0, 2048, 2)]);
        assert_eq!(ranges(&[(0, 512), (4608, 512)]), [(0, 5120, 2)]);
        assert_eq!(
            ranges(&[(0, 512), (4609, 512)]),
            [(0, 512, 1), (4609, 5121, 1)]
        );
        let half = READ_BYTES_MAX / 2;
        let three = [(0, half), (half, half), (2 * half, half)];
        assert_eq!(ranges(&three), [(0, 2 * half, 2), (2 * half, 3 * half, 1)]);
    }
}
