//! Step 7: data moves. Runs planned writes: reads what fills subclusters, joins it with the guest's
//! bytes, and joins writes that are adjacent on the host. Holds no lock.

use std::sync::OnceLock;

use cowslip_block::joins::{join_all, try_join_all};
use cowslip_queue::{Buf, BufMut, IoVec};
use smallvec::smallvec;

use super::admit::{Batch, Step};
use super::gather::PART_BYTES_MAX;
use crate::Result;
use crate::backing::Backing;
use crate::file::{Durability, Event, Space};
use crate::geometry::HOST_BLOCK_BYTES;
use crate::map::{Run, Source};
use crate::plan::{Change, Fill};
use crate::space::growth::Policy;
use crate::units::{round_down, round_up};
use crate::{InlineVec, Qcow2};

/// Buffers that go down in one write; the system takes 1024.
const BUFFERS_PER_WRITE: usize = 512;

/// A part of a write to the host.
struct Segment {
    offset: u64,
    /// Where the guest has it.
    guest: u64,
    data: IoVec,
    step: usize,
}

/// Segments that are adjacent on the host.
struct HostWrite {
    offset: u64,
    end: u64,
    /// Where the guest has the first.
    guest: u64,
    data: IoVec,
    steps: InlineVec<usize>,
}

/// Which segments go down together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Join {
    /// Neighbours on the host.
    OnHost,
    /// Neighbours on the host that are neighbours for the guest.
    OnBoth,
}

impl Qcow2 {
    /// Writes the batch; one outcome a step.
    pub(crate) async fn carry_out(
        &self,
        batch: &Batch<'_>,
        below: &dyn Backing,
    ) -> InlineVec<Result<()>> {
        if let [step] = &batch.steps[..]
            && step.write.fills.is_empty()
        {
            let offset = step.write.host.0 + step.write.bytes.start;
            let write = HostWrite {
                offset,
                end: offset + step.data.len() as u64,
                guest: self.geometry().guest_offset(step.cluster).0 + step.write.bytes.start,
                data: step.data.clone(),
                steps: smallvec![0],
            };
            return smallvec![self.write_host(batch, write).await.1];
        }
        let mut outcome: InlineVec<Result<()>> = batch.steps.iter().map(|_| Ok(())).collect();
        let segments = self.segments(&batch.steps, below, &mut outcome).await;
        let join = match self.data.is_keyed_by_guest() {
            true => Join::OnBoth,
            false => Join::OnHost,
        };
        let writes = join_adjacent(segments, join);
        let done = join_all(
            writes
                .into_iter()
                .map(|write| self.write_host(batch, write)),
        );
        for (steps, written) in done.await {
            if let Err(error) = written {
                for step in steps {
                    outcome[step] = Err(error.duplicate());
                }
            }
        }
        outcome
    }

    /// One write to the host; together with those of other requests if all of it is small new
    /// clusters, which lie side by side where they were taken one after the other. The steps that
    /// it belongs to.
    async fn write_host(
        &self,
        batch: &Batch<'_>,
        write: HostWrite,
    ) -> (InlineVec<usize>, Result<()>) {
        let is_new = |&step: &usize| batch.steps[step].write.change != Change::None;
        self.file.reach(Event::WriteAio).await;
        let is_whole = (write.offset | write.end) & (self.geometry().cluster_bytes() - 1) == 0;
        let written = if is_whole
            && write.end - write.offset <= PART_BYTES_MAX
            && batch.durability == Durability::Cached
            && write.steps.iter().all(is_new)
            && !self.data.is_keyed_by_guest()
        {
            let gathered = self.gathering.write(&self.data, write.offset, write.data);
            gathered.await
        } else {
            let HostWrite { offset, data, .. } = write;
            let file = self.data.for_guest(offset, write.guest);
            file.write(offset, data, batch.durability).await
        };
        (write.steps, written)
    }

    /// The guest's bytes and the fills of all steps, in the order of their host offsets.
    async fn segments(
        &self,
        steps: &[Step],
        below: &dyn Backing,
        outcome: &mut [Result<()>],
    ) -> Vec<Segment> {
        let fills = join_all(steps.iter().map(|step| self.fill(step, below))).await;
        let mut segments: Vec<Segment> = Vec::new();
        for (index, (step, fills)) in steps.iter().zip(fills).enumerate() {
            let host = step.write.host.0;
            let guest = self.geometry().guest_offset(step.cluster).0;
            let mut add = |offset, data| {
                segments.push(Segment {
                    offset: host + offset,
                    guest: guest + offset,
                    data,
                    step: index,
                });
            };
            match fills {
                Ok(fills) => {
                    add(step.write.bytes.start, step.data.clone());
                    fills
                        .into_iter()
                        .for_each(|(offset, data)| add(offset, data.into()));
                }
                Err(error) => outcome[index] = Err(error),
            }
        }
        segments.sort_by_key(|segment| segment.offset);
        segments
    }

    /// Returns the data that a step writes beside the guest's bytes, by offset in the cluster.
    /// Zeroes are left out where the space reads as zeroes already.
    async fn fill(&self, step: &Step, below: &dyn Backing) -> Result<Vec<(u64, Buf)>> {
        let fills = &step.write.fills;
        let joint = match &fills[..] {
            [head, tail] => one_source(head, tail),
            _ => None,
        };
        let contents = match (&fills[..], joint) {
            ([], _) => return Ok(Vec::new()),
            (fills, _) if self.zeroes_by_call(fills) => return self.zero_by_call(step).await,
            ([head, tail], Some(run)) => {
                self.file.reach(Event::CowRead).await;
                let place = (run.range.start, buffer(&run).into());
                let all = BufMut::from(self.read_runs(&[run], place, below).await?).freeze();
                let len = |fill: &Fill| (fill.range.end - fill.range.start) as usize;
                let tail_start = (tail.range.start - head.range.start) as usize;
                vec![all.slice(0, len(head)), all.slice(tail_start, len(tail))]
            }
            (fills, _) => {
                let contents = fills.iter().map(|fill| self.content(step, fill, below));
                try_join_all(contents).await?
            }
        };
        let needed = |(fill, data): &(&Fill, Buf)| {
            fill.content.is_empty() || !fill.onto_fresh || data.iter().any(|&byte| byte != 0)
        };
        let filled = fills.iter().zip(contents).filter(needed);
        Ok(filled
            .filter_map(|(fill, data)| {
                let data = self.within_file(step, fill, data)?;
                Some((fill.range.start, data))
            })
            .collect())
    }

    /// Returns whether all fills are zeroes, and long enough that a call of the file system is
    /// cheaper than writes.
    fn zeroes_by_call(&self, fills: &[Fill]) -> bool {
        let bytes: u64 = fills
            .iter()
            .map(|fill| fill.range.end - fill.range.start)
            .sum();
        bytes >= self.policy.call_from_bytes(self.zero_method)
            && fills.iter().all(|fill| fill.content.is_empty())
            && self.data.capabilities().zeroes_fast
            && !self.raw_data
    }

    /// Zeroes the fills' whole blocks of the host, before anything is written beside them; what is
    /// left is returned, to be written.
    async fn zero_by_call(&self, step: &Step) -> Result<Vec<(u64, Buf)>> {
        let space = match self.policy {
            Policy::Contiguous => Space::Keep,
            Policy::Sparse => Space::Release,
        };
        let mut rest = Vec::new();
        for Fill { range, .. } in &step.write.fills {
            // Clusters smaller than a block have no whole ones.
            let start =
                round_up(step.write.host.0 + range.start, HOST_BLOCK_BYTES) - step.write.host.0;
            let start = start.min(range.end);
            let end = round_down(step.write.host.0 + range.end, HOST_BLOCK_BYTES);
            let end = end.saturating_sub(step.write.host.0).max(start);
            if start < end {
                self.file.reach(Event::ClusterAllocSpace).await;
                self.data
                    .zero(step.write.host.0 + start, end - start, space)
                    .await?;
            }
            let edges = [range.start..start, end..range.end];
            let edges = edges.into_iter().filter(|edge| !edge.is_empty());
            rest.extend(edges.map(|edge| (edge.start, zeroes((edge.end - edge.start) as usize))));
        }
        Ok(rest)
    }

    /// A raw data file has exactly the length of the disk, or is longer by a VM state: what would
    /// fill the disk's last cluster beyond is left out, and reads as zeroes.
    fn within_file(&self, step: &Step, fill: &Fill, data: Buf) -> Option<Buf> {
        let (cluster, size) = (self.geometry().guest_offset(step.cluster).0, self.size());
        if !self.raw_data || cluster >= self.geometry().vm_state_offset(size) {
            return Some(data);
        }
        let start = cluster + fill.range.start;
        let len = size.saturating_sub(start).min(data.len() as u64);
        (len > 0).then(|| data.slice(0, len as usize))
    }

    async fn content(&self, step: &Step, fill: &Fill, below: &dyn Backing) -> Result<Buf> {
        let len = (fill.range.end - fill.range.start) as usize;
        if fill.content.is_empty() {
            return Ok(zeroes(len));
        }
        self.file.reach(Event::CowRead).await;
        let start = self.geometry().guest_offset(step.cluster).0 + fill.range.start;
        let place = (start, BufMut::for_overwrite(len).into());
        let filled = self.read_runs(&fill.content, place, below).await?;
        Ok(BufMut::from(filled).freeze())
    }
}

/// The gap between two fills that is cheaper to read than to leave out.
const GAP_BYTES: u64 = 16 << 10;

/// The run that holds two fills and the gap between them, if one read gets both.
fn one_source(head: &Fill, tail: &Fill) -> Option<Run> {
    let ([first], [last]) = (&head.content[..], &tail.content[..]) else {
        return None;
    };
    let apart = last.range.start - first.range.start;
    let continues = match (first.source, last.source) {
        (Source::Below, Source::Below) => true,
        (Source::Data(a), Source::Data(b)) => a.plus(apart) == b,
        _ => false,
    };
    let range = first.range.start..last.range.end;
    let near = last.range.start - first.range.end <= GAP_BYTES;
    (continues && near).then_some(Run {
        range,
        source: first.source,
    })
}

fn buffer(run: &Run) -> BufMut {
    BufMut::for_overwrite((run.range.end - run.range.start) as usize)
}

/// Zeroes to write; shared up to a size that covers every cluster.
pub(crate) fn zeroes(len: usize) -> Buf {
    const SHARED_BYTES: usize = 2 << 20;
    static SHARED: OnceLock<Buf> = OnceLock::new();
    if len > SHARED_BYTES {
        return Buf::zeroed(len);
    }
    SHARED
        .get_or_init(|| Buf::zeroed(SHARED_BYTES))
        .slice(0, len)
}

fn join_adjacent(segments: Vec<Segment>, join: Join) -> Vec<HostWrite> {
    let mut writes: Vec<HostWrite> = Vec::new();
    for segment in segments {
        let len = segment.data.len() as u64;
        let continues = |last: &HostWrite| match join {
            Join::OnHost => last.end == segment.offset,
            Join::OnBoth => {
                let guest_end = last.guest + (last.end - last.offset);
                last.end == segment.offset && guest_end == segment.guest
            }
        };
        match writes.last_mut() {
            Some(last) if continues(last) && last.data.segment_count() < BUFFERS_PER_WRITE => {
                last.end += len;
                last.data.append(segment.data);
                if last.steps.last() != Some(&segment.step) {
                    last.steps.push(segment.step);
                }
            }
            _ => writes.push(HostWrite {
                offset: segment.offset,
                end: segment.offset + len,
                guest: segment.guest,
                data: segment.data,
                steps: smallvec![segment.step],
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
        let segment = |(offset, guest), start, len, step| Segment {
            offset,
            guest,
            data: data.slice(start, len).into(),
            step,
        };
        let segments = || {
            vec![
                segment((100, 500), 0, 10, 0),
                segment((110, 510), 10, 10, 1),
                segment((120, 800), 40, 4, 1),
                segment((200, 804), 50, 4, 2),
            ]
        };
        let shape = |join| -> Vec<_> {
            join_adjacent(segments(), join)
                .iter()
                .map(|w| {
                    (
                        w.offset..w.end,
                        w.guest,
                        w.data.segment_count(),
                        w.steps.to_vec(),
                    )
                })
                .collect()
        };
        assert_eq!(
            shape(Join::OnHost),
            [(100..124, 500, 2, vec![0, 1]), (200..204, 804, 1, vec![2])]
        );
        assert_eq!(
            shape(Join::OnBoth),
            [
                (100..120, 500, 1, vec![0, 1]),
                (120..124, 800, 1, vec![1]),
                (200..204, 804, 1, vec![2])
            ]
        );
    }

    #[test]
    fn shared_zeroes_are_zeroes() {
        assert!(zeroes(5000).iter().all(|&byte| byte == 0));
        assert_eq!(zeroes(3 << 20).len(), 3 << 20);
    }
}
