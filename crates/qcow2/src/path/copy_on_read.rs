//! Copies data that is read from the layers below into the image (`copy-on-read`).
//!
//! Layers below do not change while they are read, so their bytes may be fetched ahead. They are
//! written with [`Origin::Below`]: whether the image still has nothing of its own is checked again
//! when the write gets its lease, under the same hold of the metadata lock, so a copy never
//! overwrites data that the guest has written since. For zeroes an entry is changed in the same way
//! ([`EntryRequest::Flag`]); version 2 has no flag, so zeroes are written where a layer below would
//! show.
//!
//! The guest sees no change, so persistent bitmaps do not follow.

use cowslip_boxed::boxed;
use std::ops::Range;

use cowslip_queue::{Buf, BufMut};

use super::admit::{Origin, Request};
use crate::Qcow2;
use crate::Result;
use crate::backing::{Backing, Decided};
use crate::file::Event;
use crate::map::{Run, Source};
use crate::plan::EntryRequest;
use crate::policy::CopyOnRead;
use crate::units::{pieces, round_down, round_up};
use crate::zero::is_zero;

/// Bytes that are copied at a time, unless a cluster has more.
const PIECE_BYTES: u64 = 1 << 20;

/// A range of whole subclusters, or what the disk has of its last one, that the image lacks.
#[derive(Debug, PartialEq, Eq)]
enum Absent {
    /// It reads as zeroes.
    Zero(Range<u64>),
    /// A layer below has bytes for it.
    Data(Range<u64>),
}

impl Qcow2 {
    /// Keeps what a read of `range` will find below.
    pub async fn copy_on_read(
        &self,
        range: Range<u64>,
        (below, what): (&dyn Backing, CopyOnRead),
    ) -> Result<()> {
        let unit = self.geometry().subcluster_bytes();
        let size = self.size();
        let wide = round_down(range.start, unit)..round_up(range.end, unit).min(size);
        if what == CopyOnRead::Off || range.is_empty() || wide.is_empty() {
            return Ok(());
        }
        let runs = {
            let _visit = self.enter().await;
            self.map(wide).await?
        };
        for run in runs.into_iter().filter(|run| run.source == Source::Below) {
            for absent in self.absent(run.range, (below, what)).await? {
                match absent {
                    Absent::Zero(range) => self.copy_zeroes(range, below).await?,
                    Absent::Data(range) => self.copy_data(range, below).await?,
                }
            }
        }
        Ok(())
    }

    /// Returns the parts to copy of a range that the image lacks, in order.
    async fn absent(
        &self,
        range: Range<u64>,
        (below, what): (&dyn Backing, CopyOnRead),
    ) -> Result<Vec<Absent>> {
        if !below.is_there() {
            return Ok(match what {
                CopyOnRead::All => vec![Absent::Zero(range)],
                CopyOnRead::Off | CopyOnRead::DownTo(_) => Vec::new(),
            });
        }
        let decided = below.decide(range.clone()).await?;
        let unit = self.geometry().subcluster_bytes();
        Ok(whole_units(&decided, (range, unit), what))
    }

    async fn copy_zeroes(&self, range: Range<u64>, below: &dyn Backing) -> Result<()> {
        match self.format.version {
            0..3 if !below.is_there() => Ok(()),
            0..3 => self.copy_data(range, below).await,
            _ => self.flag_zeroes(range, below).await,
        }
    }

    async fn flag_zeroes(&self, range: Range<u64>, below: &dyn Backing) -> Result<()> {
        self.ready_for_changes().await?;
        // The rest of the last subcluster, beyond the end of the disk, is not visible.
        let end = round_up(range.end, self.geometry().subcluster_bytes());
        let ask = (EntryRequest::Flag, self.unref);
        let rest = self.change_entries(range.start..end, below, ask).await?;
        debug_assert!(rest.is_empty(), "a flag is never written out");
        Ok(())
    }

    /// Reads from below and writes data that is not zero.
    #[boxed]
    async fn copy_data(&self, range: Range<u64>, below: &dyn Backing) -> Result<()> {
        let unit = PIECE_BYTES.max(self.geometry().cluster_bytes());
        for piece in pieces(range.start, range.end - range.start, unit) {
            let data = self.read_below(piece.clone(), below).await?;
            self.copy_piece(piece.start, &data, below).await?;
        }
        Ok(())
    }

    /// Reads what the layers below have of a range.
    pub(crate) async fn read_below(&self, range: Range<u64>, below: &dyn Backing) -> Result<Buf> {
        let runs = [Run {
            range: range.clone(),
            source: Source::Below,
        }];
        let buf = BufMut::for_overwrite((range.end - range.start) as usize);
        let data = self
            .read_runs(&runs, (range.start, buf.into()), below)
            .await?;
        Ok(BufMut::from(data).freeze())
    }

    /// Stores data read from below: clusters of zeroes as such.
    async fn copy_piece(&self, start: u64, data: &Buf, below: &dyn Backing) -> Result<()> {
        let end = start + data.len() as u64;
        let part = |range: &Range<u64>| {
            data.slice(
                (range.start - start) as usize,
                (range.end - range.start) as usize,
            )
        };
        let mut stretches: Vec<(Range<u64>, bool)> = Vec::new();
        for cluster in pieces(start, end - start, self.geometry().cluster_bytes()) {
            let zero = self.format.version >= 3 && is_zero(&part(&cluster));
            match stretches.last_mut() {
                Some((last, was_zero)) if *was_zero == zero => last.end = cluster.end,
                _ => stretches.push((cluster, zero)),
            }
        }
        for (range, zero) in stretches {
            if zero {
                self.flag_zeroes(range, below).await?;
                continue;
            }
            self.file.reach(Event::CorWrite).await;
            let request = Request::new(range.start, part(&range).into(), Origin::Below);
            self.perform_cached(request, below).await?;
        }
        Ok(())
    }
}

/// Cuts what the layers below decide at whole subclusters of `unit` bytes. The range begins with
/// one, and ends with one or with the disk.
fn whole_units(
    decided: &[Decided],
    (range, unit): (Range<u64>, u64),
    what: CopyOnRead,
) -> Vec<Absent> {
    let mut absent = Vec::new();
    let mut runs = decided;
    let mut at = range.start;
    while at < range.end {
        while let [done, rest @ ..] = runs
            && done.run.range.end <= at
        {
            runs = rest;
        }
        let unit_end = (at + unit).min(range.end);
        let begins = |decided: &&Decided| decided.run.range.start < unit_end;
        let parts = runs.iter().take_while(begins);
        let end = match runs {
            // One run decides this one, and perhaps more whole ones.
            [run, ..] => round_down(run.run.range.end, unit).clamp(unit_end, range.end),
            [] => unit_end,
        };
        push(&mut absent, at..end, CopyAction::of_parts(parts, what));
        at = end;
    }
    absent
}

/// The action for a subcluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyAction {
    Left,
    Zero,
    Data,
}

impl CopyAction {
    /// One with any data in it is data, and is copied as a whole if any of it is to be.
    fn of_parts<'a>(parts: impl Iterator<Item = &'a Decided>, what: CopyOnRead) -> CopyAction {
        let (mut wanted, mut data) = (what == CopyOnRead::All, false);
        for part in parts {
            let source = part.run.source;
            data |= matches!(source, Source::Data(_) | Source::Compressed(..));
            if let CopyOnRead::DownTo(depth) = what {
                wanted |= source != Source::Below && part.depth < depth as usize;
            }
        }
        match (wanted, data) {
            (false, _) => CopyAction::Left,
            (true, false) => CopyAction::Zero,
            (true, true) => CopyAction::Data,
        }
    }
}

fn push(absent: &mut Vec<Absent>, range: Range<u64>, kind: CopyAction) {
    match (absent.last_mut(), kind) {
        (_, CopyAction::Left) => {}
        (Some(Absent::Zero(last)), CopyAction::Zero)
        | (Some(Absent::Data(last)), CopyAction::Data)
            if last.end == range.start =>
        {
            last.end = range.end;
        }
        (_, CopyAction::Zero) => absent.push(Absent::Zero(range)),
        (_, CopyAction::Data) => absent.push(Absent::Data(range)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::HostOffset;

    const DATA: Source = Source::Data(HostOffset(0));

    /// Runs from 0 on: their ends, sources and layers.
    fn decided(runs: &[(u64, Source, usize)]) -> Vec<Decided> {
        let mut start = 0;
        let run = |&(end, source, depth): &(u64, Source, usize)| {
            let range = std::mem::replace(&mut start, end)..end;
            let run = Run { range, source };
            Decided { run, depth }
        };
        runs.iter().map(run).collect()
    }

    /// The oracle: looks at each subcluster separately, byte by byte.
    fn by_bytes(runs: &[Decided], (end, unit): (u64, u64), what: CopyOnRead) -> Vec<Absent> {
        let mut absent = Vec::new();
        for unit in pieces(0, end, unit) {
            let parts = unit.clone().map(|byte| {
                let of_byte = |d: &&Decided| d.run.range.contains(&byte);
                runs.iter().find(of_byte).expect("they cover it")
            });
            push(&mut absent, unit, CopyAction::of_parts(parts, what));
        }
        absent
    }

    #[test]
    fn a_subcluster_with_data_is_copied_as_data() {
        let zero = Source::Zero(None);
        let runs = decided(&[(8, zero, 0), (9, DATA, 0), (30, Source::Below, 0)]);
        let whole = whole_units(&runs, (0..30, 8), CopyOnRead::All);
        let expected = [
            Absent::Zero(0..8),
            Absent::Data(8..16),
            Absent::Zero(16..30),
        ];
        assert_eq!(whole, expected);
    }

    #[test]
    fn what_is_deeper_than_wanted_is_left() {
        let zero = Source::Zero(None);
        let runs = decided(&[
            (8, DATA, 1),
            (16, zero, 0),
            (20, DATA, 1),
            (24, zero, 0),
            (32, Source::Below, 1),
        ]);
        let whole = whole_units(&runs, (0..32, 8), CopyOnRead::DownTo(1));
        assert_eq!(whole, [Absent::Zero(8..16), Absent::Data(16..24)]);
        assert_eq!(whole_units(&runs, (0..32, 8), CopyOnRead::DownTo(0)), []);
    }

    #[test]
    fn cutting_agrees_with_every_byte_on_its_own() {
        let sources = [DATA, Source::Zero(None), Source::Below];
        for case in 0..3_u64.pow(6) {
            let mut left = case;
            let mut end = 0;
            let runs: Vec<_> = (0..6_u64)
                .map(|at| {
                    let kind = (left % 3) as usize;
                    left /= 3;
                    // Some within a subcluster, some across several.
                    end += 1 + (case + at * 5) % 11;
                    (end, sources[kind], (at % 2) as usize)
                })
                .collect();
            let runs = decided(&runs);
            for what in [CopyOnRead::All, CopyOnRead::DownTo(1)] {
                let cut = whole_units(&runs, (0..end, 4), what);
                assert_eq!(cut, by_bytes(&runs, (end, 4), what), "{runs:?}");
            }
        }
    }
}
