//! Lists the extents of the sources, in their order.
//!
//! All are listed once before anything is copied, because progress and preallocation need the
//! total. A list that is not too long is kept for the copy; otherwise extents are listed again,
//! some way ahead of the copy.

use std::collections::VecDeque;
use std::ops::Range;

use super::{
    CopyMethod, Failure, OnReadError, Options, Outcome, SECTOR_BYTES, Sources, TargetContent,
    Watch, go_on,
};
use crate::Error;
use crate::image::{Extent, Image};
use crate::job::Job;
use crate::units::{round_down, round_up};

/// Extents that are asked for at once.
const ASKED: usize = 4096;
/// Extents that are kept: 3 MiB. A disk of 4 GiB in pieces of 64 KiB has as many.
pub const SPANS_MAX: usize = 1 << 16;
/// Where the tables cannot be read, so much is taken for data, to be read sector by sector.
const UNKNOWN_BYTES: u64 = 64 << 10;

/// Where a source keeps data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourcePlace {
    /// Index of the source in the concatenation.
    pub source: usize,
    /// Which layer of it; 0 is the image itself.
    pub depth: usize,
    /// Where in that layer's file.
    pub offset: u64,
}

impl SourcePlace {
    /// Returns the place `bytes` further on.
    pub fn plus(self, bytes: u64) -> SourcePlace {
        SourcePlace {
            offset: self.offset + bytes,
            ..self
        }
    }
}

/// The work that an extent requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpanAction {
    /// The target reads as it should already.
    Nothing,
    /// The range is written as zeroes.
    Zero,
    /// Data is copied; by the system, if it lies at a place.
    Data(Option<SourcePlace>),
}

/// An extent of all sources together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte on the disk.
    pub start: u64,
    /// Length of the span, in bytes.
    pub len: u64,
    /// The work that it requires.
    pub what: SpanAction,
}

/// Totals of the survey.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Totals {
    /// Data to copy, in bytes.
    pub data_bytes: u64,
    /// Bytes of zeroes that have to be written.
    pub zero_bytes: u64,
}

/// The extents to copy, in order.
pub struct Feed<'a> {
    asker: Asker<'a>,
    spans: VecDeque<Span>,
    /// The place at which the next query begins.
    asked_to: u64,
    /// The target reads as zeroes by now.
    no_zeroes: bool,
}

impl<'a> Feed<'a> {
    /// The next extent that is known.
    pub fn next_known(&mut self) -> Option<Span> {
        loop {
            let span = self.spans.pop_front()?;
            if !self.no_zeroes || span.what != SpanAction::Zero {
                return Some(span);
            }
        }
    }

    /// Zeroes need not be written any more.
    pub fn forget_zeroes(&mut self) {
        self.no_zeroes = true;
    }

    /// Extents that are known and not used yet.
    pub fn known(&self) -> usize {
        self.spans.len()
    }

    /// Whether more have to be asked for; then by what, and from where on.
    pub fn to_ask(&self) -> Option<(Asker<'a>, u64)> {
        let more = self.asked_to < self.asker.sources.size();
        more.then_some((self.asker, self.asked_to))
    }

    /// Adds the spans that a query has returned.
    pub fn add(&mut self, (spans, asked_to): (Vec<Span>, u64)) {
        self.spans.extend(spans);
        self.asked_to = asked_to;
    }
}

/// Looks through all sources.
pub async fn survey<'a>(
    sources: &'a Sources<'a>,
    options: Options,
    (job, watch): (&Job, &'a Watch<'a>),
) -> Outcome<(Totals, Feed<'a>)> {
    let asker = Asker {
        sources,
        options,
        watch,
    };
    let mut found = Totals::default();
    let mut kept = Some(Vec::new());
    let mut at = 0;
    while at < sources.size() {
        go_on(job.check())?;
        let (spans, end) = asker.ask(at).await?;
        at = end;
        for span in &spans {
            match span.what {
                SpanAction::Nothing => {}
                SpanAction::Zero => found.zero_bytes += span.len,
                SpanAction::Data(_) => found.data_bytes += span.len,
            }
        }
        kept = kept.filter(|kept: &Vec<Span>| kept.len() + spans.len() <= SPANS_MAX);
        if let Some(kept) = &mut kept {
            kept.extend(spans);
        }
    }
    let asked_to = if kept.is_some() { at } else { 0 };
    let feed = Feed {
        asker,
        spans: kept.unwrap_or_default().into(),
        asked_to,
        no_zeroes: false,
    };
    Ok((found, feed))
}

/// Returns the total size, in bytes, of the units of `unit_bytes` that contain data.
///
/// # Errors
/// The tables of a source cannot be read.
#[doc(hidden)]
pub async fn touched_bytes(sources: &Sources<'_>, unit_bytes: u64) -> Outcome<u64> {
    let asker = Asker {
        sources,
        options: Options::default(),
        watch: &|_| {},
    };
    let (mut at, mut counted_to, mut touched) = (0, 0, 0);
    while at < sources.size() {
        let (spans, end) = asker.ask(at).await?;
        at = end;
        for span in &spans {
            let start = round_down(span.start, unit_bytes).max(counted_to);
            counted_to = round_up(span.start + span.len, unit_bytes).max(counted_to);
            touched += counted_to - start.min(counted_to);
        }
    }
    Ok(touched)
}

/// Lists the extents of the sources.
#[derive(Clone, Copy)]
pub struct Asker<'a> {
    sources: &'a Sources<'a>,
    options: Options,
    watch: &'a Watch<'a>,
}

impl Asker<'_> {
    /// Some extents from `at` on, and where they end.
    pub async fn ask(&self, at: u64) -> Outcome<(Vec<Span>, u64)> {
        let parts = &self.sources.0;
        let index = parts.partition_point(|part| part.start + part.len() <= at);
        let part = &parts[index];
        let local = part.range.start + (at - part.start);
        if local >= part.range.end {
            // The rest of its last sector.
            return Ok((Vec::new(), part.start + part.len()));
        }
        let extents = self.extents(part.image, local..part.range.end, at).await?;
        let end = extents.last().map_or(local, |last| last.start + last.len);
        let below = match self.options.unwritten {
            TargetContent::Backing(_) => part.image.layers().get(1).map_or(0, |layer| layer.size),
            TargetContent::Zeroes | TargetContent::Unknown => 0,
        };
        let extents = cut_at(extents, round_up(below, SECTOR_BYTES));
        let in_all = |local: u64| local - part.range.start + part.start;
        let spans = extents.iter().filter_map(|extent| {
            let start = in_all(extent.start);
            let is_below = extent.start < below && (extent.depth > 0 || !extent.present);
            let what = match (self.options.unwritten, is_below) {
                (TargetContent::Backing(_), true) => SpanAction::Nothing,
                _ => what(extent, (index, start), &self.options),
            };
            let len = extent.len;
            (what != SpanAction::Nothing).then_some(Span { start, len, what })
        });
        Ok((spans.collect(), in_all(end)))
    }

    /// Some extents of a range of an image, which begins at `at` of all.
    async fn extents(&self, image: &Image, range: Range<u64>, at: u64) -> Outcome<Vec<Extent>> {
        let (local, rest) = (range.start, range.end - range.start);
        let error = match image.extents(local, rest, ASKED).await {
            Ok(extents) => return Ok(extents),
            Err(error) => error,
        };
        if self.options.unreadable == OnReadError::Fails {
            return Err(first_failure(image, range, (at, error)).await);
        }
        let len = (round_down(local, UNKNOWN_BYTES) + UNKNOWN_BYTES - local).min(rest);
        match image.extents(local, len, ASKED).await {
            Ok(extents) => Ok(extents),
            Err(error) => {
                (self.watch)(&Failure::Extents(at, error));
                Ok(vec![Extent {
                    start: local,
                    len,
                    depth: 0,
                    present: true,
                    zero: false,
                    data: true,
                    compressed: false,
                    host_offset: None,
                }])
            }
        }
    }
}

/// The failure to list a range of an image, which begins at `at` of all: with the place of the
/// first sector whose extent cannot be listed.
async fn first_failure(image: &Image, range: Range<u64>, (at, mut error): (u64, Error)) -> Failure {
    // Up to `good` extents can be listed, from there to `bad` they cannot.
    let (mut good, mut bad) = (range.start, range.end);
    while bad - good > SECTOR_BYTES {
        let half = round_up((bad - good) / 2, SECTOR_BYTES);
        match image.extents(good, half, ASKED).await {
            Ok(_) => good += half,
            Err(nearer) => (bad, error) = (good + half, nearer),
        }
    }
    Failure::Extents(at + (good - range.start), error)
}

/// The extents, the one that `end` lies in as two.
fn cut_at(extents: Vec<Extent>, end: u64) -> Vec<Extent> {
    let mut out = Vec::with_capacity(extents.len() + 1);
    for extent in extents {
        let split = end.clamp(extent.start, extent.start + extent.len);
        let first = split - extent.start;
        let parts = [
            (extent.start, first, extent.host_offset),
            (
                split,
                extent.len - first,
                extent.host_offset.map(|at| at + first),
            ),
        ];
        for (start, len, host_offset) in parts.into_iter().filter(|(_, len, _)| *len > 0) {
            out.push(Extent {
                start,
                len,
                host_offset,
                ..extent
            });
        }
    }
    out
}

/// Returns the work for an extent of a source, which begins at `start` of the concatenated sources.
/// With a backing file, an extent counts only if the source's own image decides it: the image holds
/// it, or no layer below does. Pure.
fn what(extent: &Extent, (source, start): (usize, u64), options: &Options) -> SpanAction {
    let writes_all = options.sparse_bytes == 0;
    // Beyond the end of its backing file the target reads as zeroes.
    if let TargetContent::Backing(backing_bytes) = options.unwritten
        && extent.zero
        && !writes_all
        && start >= round_up(backing_bytes, SECTOR_BYTES)
    {
        return SpanAction::Nothing;
    }
    match extent.zero {
        true if writes_all => SpanAction::Data(None),
        true if options.unwritten == TargetContent::Zeroes => SpanAction::Nothing,
        true => SpanAction::Zero,
        false if options.means == CopyMethod::Offload && !extent.compressed => {
            SpanAction::Data(extent.host_offset.map(|offset| SourcePlace {
                source,
                depth: extent.depth as usize,
                offset,
            }))
        }
        false => SpanAction::Data(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: Extent = Extent {
        start: 1 << 20,
        len: 4096,
        depth: 0,
        present: true,
        zero: false,
        data: true,
        compressed: false,
        host_offset: Some(512),
    };
    const ZERO: Extent = Extent {
        zero: true,
        data: false,
        ..DATA
    };
    const NOTHING: Extent = Extent {
        present: false,
        ..ZERO
    };

    fn of(extent: Extent, change: impl Fn(&mut Options)) -> SpanAction {
        let mut options = Options::default();
        change(&mut options);
        what(&extent, (3, 2 << 20), &options)
    }

    #[test]
    fn zeroes_are_written_where_the_target_does_not_read_so() {
        assert_eq!(of(DATA, |_| {}), SpanAction::Data(None));
        assert_eq!(of(ZERO, |_| {}), SpanAction::Nothing);
        let unknown = |o: &mut Options| o.unwritten = TargetContent::Unknown;
        assert_eq!(of(ZERO, unknown), SpanAction::Zero);
        assert_eq!(of(NOTHING, unknown), SpanAction::Zero);
        let all = |o: &mut Options| o.sparse_bytes = 0;
        assert_eq!(of(NOTHING, all), SpanAction::Data(None));
    }

    #[test]
    fn extents_are_cut_where_the_backing_file_ends() {
        let start_and_len = |end| {
            let cut = cut_at(vec![NOTHING, DATA], end);
            let reported = |e: &Extent| (e.start, e.len, e.host_offset);
            cut.iter().map(reported).collect::<Vec<_>>()
        };
        let whole = (1 << 20, 4096, Some(512));
        assert_eq!(start_and_len(0), [whole, whole]);
        assert_eq!(start_and_len(1 << 20), [whole, whole]);
        assert_eq!(start_and_len((1 << 20) + 4096), [whole, whole]);
        let halves = [
            (1 << 20, 1024, Some(512)),
            ((1 << 20) + 1024, 3072, Some(1536)),
        ];
        assert_eq!(start_and_len((1 << 20) + 1024), [halves, halves].concat());
    }

    #[test]
    fn on_a_backing_file_zeroes_are_written_up_to_its_end() {
        let long = |o: &mut Options| o.unwritten = TargetContent::Backing(1 << 30);
        assert_eq!(of(DATA, long), SpanAction::Data(None));
        assert_eq!(of(ZERO, long), SpanAction::Zero);
        // No layer below has it.
        assert_eq!(of(NOTHING, long), SpanAction::Zero);
        // The extent begins at 2 MiB of all.
        let short = |o: &mut Options| o.unwritten = TargetContent::Backing((2 << 20) - 100);
        assert_eq!(of(ZERO, short), SpanAction::Nothing);
        let longer = |o: &mut Options| o.unwritten = TargetContent::Backing((2 << 20) + 1);
        assert_eq!(of(ZERO, longer), SpanAction::Zero);
    }

    #[test]
    fn the_system_copies_what_has_a_place() {
        let offload = |o: &mut Options| o.means = CopyMethod::Offload;
        let place = SourcePlace {
            source: 3,
            depth: 0,
            offset: 512,
        };
        assert_eq!(of(DATA, offload), SpanAction::Data(Some(place)));
        let packed = Extent {
            compressed: true,
            host_offset: None,
            ..DATA
        };
        assert_eq!(of(packed, offload), SpanAction::Data(None));
    }
}
