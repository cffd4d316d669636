//! [`Workload`]: what a guest does, by name, from a trace, or from statistics.

use std::collections::{HashSet, VecDeque};

use cowslip_trace::{Kind, Request};

/// Streams that are followed at a time: a request that goes on where one of the last requests of
/// this number ended is one in order.
const STREAMS: usize = 32;
/// Distinct blocks that are kept of a trace; beyond them it is summed up no further.
const BLOCKS_MAX: usize = 1 << 21;
const BLOCK_BYTES: u64 = 4096;

/// Requests of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Requests {
    /// Their number.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The share of them that go on where another one ended.
    pub in_order: f64,
}

impl Requests {
    /// Bytes of one, on average; 0 without any.
    pub fn mean_bytes(&self) -> f64 {
        self.bytes as f64 / self.count.max(1) as f64
    }

    /// Of requests at random.
    pub fn at_random(&self) -> f64 {
        self.count as f64 * (1.0 - self.in_order)
    }
}

/// Distinct parts that writes touched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Distinct {
    /// Distinct units, by the unit: from 4 KiB on, each twice the one before it, to 2 MiB.
    units: [u64; 10],
}

impl Distinct {
    /// Counts the units of blocks of 4 KiB.
    fn of(blocks: &HashSet<u64>) -> Distinct {
        let mut units = [0; 10];
        let mut sorted: Vec<u64> = blocks.iter().copied().collect();
        sorted.sort_unstable();
        for (shift, count) in units.iter_mut().enumerate() {
            sorted.dedup_by_key(|block| *block >> shift);
            *count = sorted.len() as u64;
        }
        Distinct { units }
    }

    /// Distinct units of this size, a power of two.
    pub fn units(&self, unit_bytes: u64) -> u64 {
        let bits = unit_bytes.max(BLOCK_BYTES).ilog2() - BLOCK_BYTES.ilog2();
        self.units[(bits as usize).min(self.units.len() - 1)]
    }
}

/// A workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Its name, for people.
    pub name: String,
    /// Reads.
    pub reads: Requests,
    /// Writes of data or zeroes.
    pub writes: Requests,
    /// Discards.
    pub discards: Requests,
    /// Flushes.
    pub flushes: u64,
    /// The share of writes that are the first to what they write; `None`: as much as the image is
    /// empty.
    pub first: Option<f64>,
    /// Parts that writes touched, if that is known.
    pub distinct: Option<Distinct>,
    /// Bytes of the disk over which requests are spread; `None`: all of it.
    pub span_bytes: Option<u64>,
    /// Files grow side by side.
    pub is_streams: bool,
    /// Lookups of tables that were there, and that were not.
    pub cache: Option<(u64, u64)>,
    /// The disk will be written throughout.
    pub fills: bool,
    /// Requests that are not in the figures above.
    pub unknown: u64,
}

/// The names of workloads, and what they are.
const NAMED: [(&str, &str); 8] = [
    ("random-writes", "90 % writes of 4 KiB at random"),
    ("sequential", "writes and reads of 1 MiB in order"),
    ("read-mostly", "95 % reads of 16 KiB, most at random"),
    (
        "mixed",
        "70 % reads and 30 % writes of 8 KiB, most at random",
    ),
    ("boot", "reads of 32 KiB, half of them in order, few writes"),
    ("discards", "a file system that writes, deletes and trims"),
    ("streams", "files that grow side by side, in order"),
    ("fill", "one file of known size, written once in order"),
];

impl Workload {
    /// The names that [`Workload::named`] takes.
    pub fn names() -> impl Iterator<Item = &'static str> {
        NAMED.iter().map(|(name, _)| *name)
    }

    fn empty(name: &str) -> Workload {
        Workload {
            name: name.to_string(),
            reads: Requests::default(),
            writes: Requests::default(),
            discards: Requests::default(),
            flushes: 0,
            first: None,
            distinct: None,
            span_bytes: None,
            is_streams: false,
            cache: None,
            fills: false,
            unknown: 0,
        }
    }

    /// A workload by its name.
    pub fn named(name: &str) -> Option<Workload> {
        let (_, text) = NAMED.iter().find(|(known, _)| *known == name)?;
        let of = |percent: u64, kib: u64, in_order: f64| Requests {
            count: percent * 1000,
            bytes: percent * 1000 * kib * 1024,
            in_order,
        };
        let mut workload = Workload::empty(&format!("{name}: {text}"));
        let (reads, writes, discards) = match name {
            "random-writes" => (of(10, 4, 0.0), of(90, 4, 0.0), of(0, 0, 0.0)),
            "sequential" => (of(50, 1024, 0.99), of(50, 1024, 0.99), of(0, 0, 0.0)),
            "read-mostly" => (of(95, 16, 0.2), of(5, 8, 0.2), of(0, 0, 0.0)),
            "mixed" => (of(70, 8, 0.2), of(30, 8, 0.2), of(0, 0, 0.0)),
            "boot" => (of(90, 32, 0.5), of(10, 8, 0.3), of(0, 0, 0.0)),
            "discards" => (of(30, 32, 0.5), of(40, 64, 0.5), of(30, 512, 0.2)),
            "streams" => (of(10, 256, 0.95), of(90, 64, 0.95), of(0, 0, 0.0)),
            _ => (of(0, 0, 0.0), of(100, 1024, 0.99), of(0, 0, 0.0)),
        };
        (workload.reads, workload.writes, workload.discards) = (reads, writes, discards);
        workload.flushes = 100;
        workload.is_streams = name == "streams";
        workload.fills = name == "fill";
        Some(workload)
    }

    /// A workload of which counts and bytes are known: reads, writes, discards.
    pub fn counted(name: &str, counts: [(u64, u64); 3], flushes: u64) -> Workload {
        let of = |(count, bytes): (u64, u64)| Requests {
            count,
            bytes,
            // Counters do not say; long requests are parts of something longer.
            in_order: match bytes / count.max(1) >= 128 << 10 {
                true => 0.9,
                false => 0.2,
            },
        };
        Workload {
            reads: of(counts[0]),
            writes: of(counts[1]),
            discards: of(counts[2]),
            flushes,
            ..Workload::empty(name)
        }
    }

    /// The workload of a trace. Memory is bounded, whatever the trace holds: beyond two million
    /// distinct blocks of 4 KiB its rest is counted and not looked at.
    pub fn of_trace(name: &str, requests: impl IntoIterator<Item = Request>) -> Workload {
        let mut sums = Sums::default();
        requests.into_iter().for_each(|request| sums.push(&request));
        let mut workload = Workload::empty(name);
        let of = |kind: usize| Requests {
            count: sums.counts[kind],
            bytes: sums.bytes[kind],
            in_order: sums.in_order[kind] as f64 / sums.counts[kind].max(1) as f64,
        };
        workload.reads = of(0);
        workload.writes = of(1);
        workload.discards = of(2);
        workload.flushes = sums.flushes;
        workload.unknown = sums.passed;
        workload.span_bytes = Some((sums.regions.len() as u64).saturating_mul(REGION_BYTES));
        if !sums.blocks.is_empty() {
            let distinct = Distinct::of(&sums.blocks);
            workload.distinct = Some(distinct);
        }
        workload
    }

    /// Requests that read or write.
    pub fn total(&self) -> f64 {
        (self.reads.count + self.writes.count).max(1) as f64
    }

    /// The share of requests that are reads, writes.
    pub fn share_of(&self, requests: &Requests) -> f64 {
        requests.count as f64 / self.total()
    }

    /// The share of all bytes that are read in order.
    pub fn read_in_order(&self) -> f64 {
        let bytes = (self.reads.bytes + self.writes.bytes).max(1) as f64;
        self.reads.bytes as f64 * self.reads.in_order / bytes
    }

    /// The share of writes that are the first to their unit, of those that are the first to their
    /// block.
    pub fn unit_share(&self, unit_bytes: u64) -> f64 {
        let Some(distinct) = &self.distinct else {
            // Writes in order fill a unit with many.
            let mean = self.writes.mean_bytes().max(512.0);
            let per_unit = (unit_bytes as f64 / mean).max(1.0);
            return (1.0 - self.writes.in_order) + self.writes.in_order / per_unit;
        };
        let writes = self.writes.count.max(1) as f64;
        (distinct.units(unit_bytes) as f64 / writes).min(1.0)
    }
}

/// Parts of the disk that are counted as touched by a trace.
const REGION_BYTES: u64 = 1 << 20;

/// Sums of a trace: reads, writes, discards.
#[derive(Default)]
struct Sums {
    counts: [u64; 3],
    bytes: [u64; 3],
    in_order: [u64; 3],
    flushes: u64,
    /// Ends of the last requests of each kind.
    ends: [VecDeque<u64>; 3],
    blocks: HashSet<u64>,
    regions: HashSet<u64>,
    /// Requests that came when there was no more room.
    passed: u64,
}

impl Sums {
    fn push(&mut self, request: &Request) {
        let kind = match request.kind {
            Kind::Read => 0,
            Kind::Write | Kind::Zero | Kind::Allocate => 1,
            Kind::Discard => 2,
            Kind::Flush => return self.flushes += 1,
        };
        if self.blocks.len() >= BLOCKS_MAX || self.regions.len() >= BLOCKS_MAX {
            self.passed += 1;
            return;
        }
        self.counts[kind] += 1;
        self.bytes[kind] = self.bytes[kind].saturating_add(request.len);
        let end = request.offset + request.len;
        let ends = &mut self.ends[kind];
        match ends.iter().position(|end| *end == request.offset) {
            Some(at) => {
                self.in_order[kind] += 1;
                ends.remove(at);
            }
            None if ends.len() == STREAMS => drop(ends.pop_front()),
            None => {}
        }
        ends.push_back(end);
        if request.len == 0 {
            return;
        }
        // A discard of a whole disk touches no table entry for each region.
        if kind < 2 {
            extend(&mut self.regions, request, REGION_BYTES);
        }
        if request.kind == Kind::Write {
            extend(&mut self.blocks, request, BLOCK_BYTES);
        }
    }
}

/// Adds the parts that a request touches, as far as there is room.
fn extend(parts: &mut HashSet<u64>, request: &Request, bytes: u64) {
    let last = (request.offset + request.len - 1) / bytes;
    let room = BLOCKS_MAX - parts.len().min(BLOCKS_MAX);
    parts.extend((request.offset / bytes..=last).take(room));
}
