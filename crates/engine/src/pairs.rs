//! Compares the extents of two disks before anything is read: it separates ranges that are known to
//! be the same on both from ranges that have to be read.
//!
//! A range is the same on both if both say that it reads as zeroes, or if both have it from one
//! image: overlays of one golden image differ only where one of them holds something.

use std::collections::VecDeque;
use std::ops::Range;

use crate::image::{Extent, Image};
use crate::{Error, Result};

/// Extents asked for at once, of each disk.
const EXTENTS_AT_ONCE: usize = 1024;

/// One of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that was named first.
    First,
    /// The second disk.
    Second,
}

impl Side {
    /// Both sides, in order.
    pub const BOTH: [Side; 2] = [Side::First, Side::Second];
}

/// A range, and what the tables of both disks say of it. Adjacent ranges about which they say the
/// same are merged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The range; never empty.
    pub range: Range<u64>,
    /// The facts known about it.
    pub known: Known,
}

impl Span {
    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// Facts about a range that are known without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// It reads the same on both.
    pub same: bool,
    /// Both store it in the same way, as `map` reports it, host offsets aside.
    pub stored_alike: bool,
    /// Which of them say that it reads as zeroes.
    pub zero: [bool; 2],
    /// The first disk's own image holds it, and not one below.
    pub held_by_first: bool,
}

/// The extents of one disk from some place on. Where there is no disk, or none any more, it reads
/// as zeroes.
struct Cursor<'a> {
    image: Option<&'a Image>,
    ahead: VecDeque<Extent>,
}

impl Cursor<'_> {
    /// The extent that `range` begins with, cut to it.
    async fn at(&mut self, range: Range<u64>) -> Result<Extent> {
        let nothing = Extent {
            start: range.start,
            len: range.end - range.start,
            depth: 0,
            present: false,
            zero: true,
            data: false,
            compressed: false,
            host_offset: None,
        };
        let size = self.image.map_or(0, Image::size);
        let Some(image) = self.image.filter(|_| range.start < size) else {
            return Ok(nothing);
        };
        while let Some(first) = self.ahead.front()
            && first.start + first.len <= range.start
        {
            self.ahead.pop_front();
        }
        if self.ahead.is_empty() {
            let len = range.end.min(size) - range.start;
            let asked = image.extents(range.start, len, EXTENTS_AT_ONCE);
            self.ahead = asked.await?.into();
        }
        let found = *self.ahead.front().expect("a range has extents");
        let end = (found.start + found.len).min(range.end);
        Ok(Extent {
            start: range.start,
            len: end - range.start,
            ..found
        })
    }
}

/// The spans of a range, in order.
pub struct Spans<'a> {
    sides: [Cursor<'a>; 2],
    /// Keeps the facts that matter: ranges that differ in others only are one span.
    matters: fn(Known) -> Known,
    rest: Range<u64>,
    /// Spans found behind the last one.
    found: VecDeque<Span>,
}

impl<'a> Spans<'a> {
    /// Those of a range of two disks; `None` is a disk that has nothing.
    pub fn new(
        images: [Option<&'a Image>; 2],
        range: Range<u64>,
        matters: fn(Known) -> Known,
    ) -> Spans<'a> {
        let cursor = |image| Cursor {
            image,
            ahead: VecDeque::new(),
        };
        Spans {
            sides: images.map(cursor),
            matters,
            rest: range,
            found: VecDeque::new(),
        }
    }

    /// Returns the next span; at most `bytes_max` of it if it has to be read.
    ///
    /// # Errors
    /// The extents of a disk could not be listed: which disk, and why.
    pub async fn next(
        &mut self,
        bytes_max: u64,
    ) -> std::result::Result<Option<Span>, (Side, Error)> {
        let Some(mut span) = self.take().await? else {
            return Ok(None);
        };
        let is_full = |span: &Span| !span.known.same && span.len() >= bytes_max;
        while !is_full(&span)
            && let Some(next) = self.take().await?
        {
            if next.known != span.known {
                self.found.push_front(next);
                break;
            }
            span.range.end = next.range.end;
        }
        if is_full(&span) {
            let cut = span.range.start + bytes_max;
            let behind = Span {
                range: cut..span.range.end,
                ..span
            };
            span.range.end = cut;
            if behind.len() > 0 {
                self.found.push_front(behind);
            }
        }
        Ok(Some(span))
    }

    async fn take(&mut self) -> std::result::Result<Option<Span>, (Side, Error)> {
        if let Some(found) = self.found.pop_front() {
            return Ok(Some(found));
        }
        if self.rest.start >= self.rest.end {
            return Ok(None);
        }
        let [first, second] = &mut self.sides;
        let first = first.at(self.rest.clone()).await;
        let first = first.map_err(|error| (Side::First, error))?;
        let second = second.at(self.rest.clone()).await;
        let second = second.map_err(|error| (Side::Second, error))?;
        let range = self.rest.start..self.rest.start + first.len.min(second.len);
        self.rest.start = range.end;
        let known = (self.matters)(self.known(&first, &second));
        Ok(Some(Span { range, known }))
    }

    fn known(&self, first: &Extent, second: &Extent) -> Known {
        let flags = |e: &Extent| (e.present, e.zero, e.data, e.compressed);
        let origin = |side: usize, extent: &Extent| {
            let image = self.sides[side].image.filter(|_| extent.present);
            image.and_then(|image| image.origin(extent.depth))
        };
        let (from_first, from_second) = (origin(0, first), origin(1, second));
        Known {
            same: (first.zero && second.zero)
                || (from_first.is_some() && from_first == from_second),
            stored_alike: flags(first) == flags(second),
            zero: [first.zero, second.zero],
            held_by_first: first.present && first.depth == 0,
        }
    }
}
