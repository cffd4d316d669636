//! Step 7: data moves. Runs planned writes: reads what fills subclusters, joins it with the guest's
//! bytes, and writes what is adjacent on the host in one go. Holds no lock.

use std::sync::OnceLock;

use cowslip_queue::{Buf, BufMut};
use futures_util::future::join_all;

use super::Qcow2;
use super::admit::{Batch, Step};
use super::plan::Fill;
use crate::chain::{Below, read_runs};
use crate::{Error, Result};

/// Buffers that go down in one write; the system takes 1024.
const BUFFERS_PER_WRITE: usize = 512;

/// A part of a write to the host.
struct Segment {
    offset: u64,
    data: Buf,
    step: usize,
}

/// Segments that are adjacent on the host.
struct HostWrite {
    offset: u64,
    end: u64,
    data: Vec<Buf>,
    steps: Vec<usize>,
}

impl Qcow2 {
    /// Writes the batch; one outcome a step.
    pub(super) async fn carry_out(&self, batch: &Batch<'_>, below: &Below) -> Vec<Result<()>> {
        let durability = batch.durability;
        if let [step] = &batch.steps[..]
            && step.write.fills.is_empty()
        {
            let offset = step.write.host.0 + step.write.bytes.start;
            let data = vec![step.data.clone()];
            return vec![self.data.write(offset, data, durability).await];
        }
        let mut outcome: Vec<Result<()>> = batch.steps.iter().map(|_| Ok(())).collect();
        let segments = self.segments(&batch.steps, below, &mut outcome).await;
        let writes = join_adjacent(segments);
        let done = join_all(writes.into_iter().map(|write| async move {
            (
                self.data.write(write.offset, write.data, durability).await,
                write.steps,
            )
        }));
        for (written, steps) in done.await {
            if let Err(error) = written {
                for step in steps {
                    outcome[step] = Err(error.duplicate());
                }
            }
        }
        outcome
    }

    /// The guest's bytes and the fills of all steps, in the order of steps and offsets.
    async fn segments(
        &self,
        steps: &[Step],
        below: &Below,
        outcome: &mut [Result<()>],
    ) -> Vec<Segment> {
        let mut wanted = Vec::new();
        for (index, step) in steps.iter().enumerate() {
            wanted.extend(step.write.fills.iter().map(|fill| (index, fill)));
        }
        let contents = join_all(
            wanted
                .iter()
                .map(|(index, fill)| self.fill_content(&steps[*index], fill, below)),
        );
        let contents = contents.await;
        let mut segments: Vec<Segment> = Vec::new();
        for ((index, fill), content) in wanted.into_iter().zip(contents) {
            match content {
                Ok(None) => {}
                Ok(Some(data)) => {
                    let offset = steps[index].write.host.0 + fill.range.start;
                    segments.push(Segment {
                        offset,
                        data,
                        step: index,
                    });
                }
                Err(error) => outcome[index] = Err(error),
            }
        }
        for (index, step) in steps.iter().enumerate() {
            let offset = step.write.host.0 + step.write.bytes.start;
            segments.push(Segment {
                offset,
                data: step.data.clone(),
                step: index,
            });
        }
        segments.retain(|segment| outcome[segment.step].is_ok());
        segments.sort_by_key(|segment| segment.offset);
        segments
    }

    /// The bytes of a fill; `None` if they are zeroes where zeroes are already.
    async fn fill_content(&self, step: &Step, fill: &Fill, below: &Below) -> Result<Option<Buf>> {
        let len = fill.range.end - fill.range.start;
        if fill.content.is_empty() {
            return Ok(Some(zeroes(len as usize)));
        }
        let start = self.geometry().guest_offset(step.cluster).0 + fill.range.start;
        let buf = BufMut::zeroed(len as usize);
        let filled = read_runs(self, &fill.content, (start, buf), below).await?;
        let is_zero = fill.onto_fresh && filled.iter().all(|&byte| byte == 0);
        Ok((!is_zero).then(|| filled.freeze()))
    }

    /// Decompresses a cluster.
    pub(crate) async fn decompress(&self, place: super::entry::Compressed) -> Result<Vec<u8>> {
        let input = self.file.read_new(place.start, place.len).await?;
        let mut cluster = vec![0; self.geometry().cluster_bytes() as usize];
        super::compress::decompress(self.compression, &input, &mut cluster).map_err(|error| {
            Error::Corrupt {
                file: self.name().to_string(),
                structure: "compressed cluster",
                offset: place.start,
                detail: error.to_string(),
            }
        })?;
        Ok(cluster)
    }
}

/// Zeroes to write; shared up to a size that covers every cluster.
pub(super) fn zeroes(len: usize) -> Buf {
    const SHARED_BYTES: usize = 2 << 20;
    static SHARED: OnceLock<Buf> = OnceLock::new();
    if len > SHARED_BYTES {
        return Buf::zeroed(len);
    }
    SHARED
        .get_or_init(|| Buf::zeroed(SHARED_BYTES))
        .slice(0, len)
}

fn join_adjacent(segments: Vec<Segment>) -> Vec<HostWrite> {
    let mut writes: Vec<HostWrite> = Vec::new();
    for segment in segments {
        let len = segment.data.len() as u64;
        match writes.last_mut() {
            Some(last) if last.end == segment.offset && last.data.len() < BUFFERS_PER_WRITE => {
                last.end += len;
                let joined = last.data.last().and_then(|data| data.joined(&segment.data));
                match (joined, last.data.last_mut()) {
                    (Some(joined), Some(data)) => *data = joined,
                    _ => last.data.push(segment.data),
                }
                if last.steps.last() != Some(&segment.step) {
                    last.steps.push(segment.step);
                }
            }
            _ => writes.push(HostWrite {
                offset: segment.offset,
                end: segment.offset + len,
                data: vec![segment.data],
                steps: vec![segment.step],
            }),
        }
    }
    writes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_segments_go_down_together() {
        let data = Buf::copy_of(&[7; 64]);
        let segment = |offset, start, len, step| Segment {
            offset,
            data: data.slice(start, len),
            step,
        };
        let writes = join_adjacent(vec![
            segment(100, 0, 10, 0),
            segment(110, 10, 10, 1),
            segment(120, 40, 4, 1),
            segment(200, 50, 4, 2),
        ]);
        let shape: Vec<_> = writes
            .iter()
            .map(|w| (w.offset, w.end, w.data.len(), w.steps.clone()))
            .collect();
        assert_eq!(shape, [(100, 124, 2, vec![0, 1]), (200, 204, 1, vec![2])]);
    }

    #[test]
    fn shared_zeroes_are_zeroes() {
        assert!(zeroes(5000).iter().all(|&byte| byte == 0));
        assert_eq!(zeroes(3 << 20).len(), 3 << 20);
    }
}
