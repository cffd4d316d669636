//! [`Index`]: which layer of a chain holds what, and where, for all layers below the first
//! together.
//!
//! These layers do not change while they lie below an image, so the answer is found once for a
//! region of the disk and kept: a read then costs the same however many layers there are. Within
//! its budget the index keeps the regions that came last; it may lose any of them at any time.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backing::Decided;
use crate::run::{Run, Source};
use crate::sync::{Mutex, lock};

/// Bytes of the disk that are looked up together.
pub const REGION_BYTES: u64 = 2 << 20;
/// Bytes of the disk that are looked up at most when a region is not there: what a slice of L2
/// entries maps with clusters of the usual size, so that each layer is asked once for it.
pub const SPAN_BYTES: u64 = 32 << 20;
/// Memory of the index until it gets its share of the chain's.
const BUDGET_BYTES: u64 = 4 << 20;
/// Bytes that a region takes besides its runs.
const OVERHEAD_BYTES: usize = 96;

/// The runs of a region: in order, covering it.
pub type Region = Arc<[Decided]>;

/// Regions that were looked up.
#[derive(Debug)]
pub struct Index {
    budget_bytes: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    regions: HashMap<u64, Region>,
    /// Their numbers, in the order in which they came.
    order: VecDeque<u64>,
    bytes: u64,
    /// Regions had to go.
    is_full: bool,
}

fn bytes_of(region: &Region) -> u64 {
    (OVERHEAD_BYTES + size_of_val::<[Decided]>(region)) as u64
}

impl Default for Index {
    fn default() -> Index {
        Index {
            budget_bytes: AtomicU64::new(BUDGET_BYTES),
            state: Mutex::default(),
        }
    }
}

impl Index {
    /// Sets the memory that it may take, in bytes.
    pub fn set_budget(&self, bytes: u64) {
        self.budget_bytes.store(bytes, Ordering::Relaxed);
        self.shrink(&mut lock(&self.state));
    }

    /// The region of this number, if it is there.
    pub fn get(&self, number: u64) -> Option<Region> {
        lock(&self.state).regions.get(&number).cloned()
    }

    /// Keeps a region.
    pub fn keep(&self, number: u64, region: &Region) {
        let mut state = lock(&self.state);
        if state.regions.insert(number, Arc::clone(region)).is_none() {
            state.order.push_back(number);
            state.bytes += bytes_of(region);
        }
        self.shrink(&mut state);
    }

    /// Whether it has all that was looked up so far: tables are not needed again then.
    pub fn has_all(&self) -> bool {
        !lock(&self.state).is_full
    }

    fn shrink(&self, state: &mut State) {
        let budget = self.budget_bytes.load(Ordering::Relaxed);
        while state.bytes > budget {
            let Some(number) = state.order.pop_front() else {
                return;
            };
            if let Some(region) = state.regions.remove(&number) {
                state.bytes -= bytes_of(&region);
                state.is_full = true;
            }
        }
    }
}

/// The parts of a region's runs that lie in a range.
pub fn within(region: &Region, range: &Range<u64>) -> Vec<Decided> {
    let first = region.partition_point(|it| it.run.range.end <= range.start);
    let meets = |it: &&Decided| it.run.range.start < range.end;
    region[first..]
        .iter()
        .take_while(meets)
        .map(|it| Decided {
            run: cut(&it.run, range),
            depth: it.depth,
        })
        .collect()
}

/// The part of a run in a range that it meets.
pub fn cut(run: &Run, range: &Range<u64>) -> Run {
    let start = run.range.start.max(range.start);
    let skipped = start - run.range.start;
    Run {
        range: start..run.range.end.min(range.end),
        source: match run.source {
            Source::Data(host) => Source::Data(host.plus(skipped)),
            Source::Zero(host) => Source::Zero(host.map(|host| host.plus(skipped))),
            Source::Compressed(place, from) => Source::Compressed(place, from + skipped),
            Source::Below => Source::Below,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::{Compressed, HostOffset};

    fn decided(range: Range<u64>, source: Source, depth: usize) -> Decided {
        let run = Run { range, source };
        Decided { run, depth }
    }

    #[test]
    fn a_part_of_a_run_is_where_the_run_has_it() {
        let place = Compressed { start: 7, len: 9 };
        let region: Region = Arc::from([
            decided(0..100, Source::Data(HostOffset(1000)), 3),
            decided(100..200, Source::Compressed(place, 5), 1),
            decided(200..300, Source::Zero(Some(HostOffset(50))), 0),
            decided(300..400, Source::Below, 9),
        ]);
        let found = within(&region, &(90..310));
        let sources: Vec<_> = found
            .iter()
            .map(|it| (it.run.range.clone(), it.run.source))
            .collect();
        let expected = [
            (90..100, Source::Data(HostOffset(1090))),
            (100..200, Source::Compressed(place, 5)),
            (200..300, Source::Zero(Some(HostOffset(50)))),
            (300..310, Source::Below),
        ];
        assert_eq!(sources, expected);
        let inner = within(&region, &(150..160));
        assert_eq!(inner[0].run.source, Source::Compressed(place, 55));
        assert_eq!((inner.len(), inner[0].depth), (1, 1));
    }

    #[test]
    fn regions_that_came_first_go_first() {
        let region: Region = Arc::from([decided(0..1, Source::Below, 0)]);
        let index = Index::default();
        index.set_budget(3 * bytes_of(&region));
        for number in [5, 6, 7, 8] {
            index.keep(number, &region);
            index.keep(number, &region);
        }
        let kept = [5, 6, 7, 8].map(|number| index.get(number).is_some());
        assert_eq!(kept, [false, true, true, true]);
        assert!(!index.has_all());
        index.set_budget(0);
        assert!(index.get(8).is_none());
        assert_eq!(lock(&index.state).bytes, 0);
    }
}
