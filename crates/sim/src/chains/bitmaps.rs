//! Bitmaps of the images of a chain: what they have to say after each deed.
//!
//! A bitmap follows what is written to its own image. That a chain shows something else because an
//! image below was written to, or another one is below now, is none of its business; so what an
//! content is recorded again after each deed that did not write to it.

use std::collections::BTreeSet;

use crate::bitmaps::{Reading, What};
use crate::model::SECTOR_BYTES;
use crate::rng::Rng;

/// Bitmaps that an image has at most.
const KEPT_MAX: usize = 3;

/// A bitmap.
#[derive(Clone, Debug)]
struct Bitmap {
    name: String,
    granularity: u64,
    enabled: bool,
    lost: bool,
    /// The image's content when it began to record.
    since: Vec<u8>,
    /// Sectors that have to be dirty whatever it reads as.
    must: BTreeSet<usize>,
}

impl Bitmap {
    /// Sectors that have to be dirty if the image reads as this.
    fn required(&self, view: &[u8]) -> BTreeSet<usize> {
        let mut required = self.must.clone();
        let sectors = |bytes: &[u8]| -> Vec<Vec<u8>> {
            let sectors = bytes.chunks(SECTOR_BYTES as usize);
            sectors.map(<[u8]>::to_vec).collect()
        };
        let pairs = sectors(&self.since).into_iter().zip(sectors(view));
        let changed = pairs
            .enumerate()
            .filter(|(_, (a, b))| self.enabled && a != b);
        required.extend(changed.map(|(sector, _)| sector));
        required
    }
}

/// The bitmaps of an image.
#[derive(Clone, Debug, Default)]
pub(super) struct Followed {
    list: Vec<Bitmap>,
    added: u64,
}

/// The possible outcomes of a deed for an image's bitmaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// Its session has ended well.
    Closed,
    /// Perhaps done: the deed was cut short.
    Perhaps,
}

impl Followed {
    /// Draws an operation that is possible if the image takes bitmaps and none is lost.
    pub(super) fn draw(&self, rng: &mut Rng) -> What {
        let lost = self.list.iter().any(|bitmap| bitmap.lost);
        match self.list.len() {
            0 => What::Add,
            _ if lost => What::Remove,
            KEPT_MAX.. => rng.pick(&[What::Clear, What::Remove, What::Merge]),
            _ => rng.pick(&What::ALL[..6]),
        }
    }

    pub(super) fn has_lost(&self) -> bool {
        self.list.iter().any(|bitmap| bitmap.lost)
    }

    pub(super) fn is_any(&self) -> bool {
        !self.list.is_empty()
    }

    /// The name of the bitmap that something is done with, and of another one.
    pub(super) fn names(&self, what: What) -> (String, String) {
        if what == What::Add {
            return (format!("b{}", self.added), String::new());
        }
        let named = |bitmap: Option<&Bitmap>| bitmap.map_or(String::new(), |b| b.name.clone());
        let first = self
            .list
            .iter()
            .find(|bitmap| bitmap.lost)
            .or(self.list.first());
        (named(first), named(self.list.last()))
    }

    /// The granularity of the next one that is added.
    pub(super) fn granularity(&self) -> u64 {
        [512, 4096, 1024, 65536][(self.added % 4) as usize]
    }

    /// Returns the bitmaps after that operation, while the image reads as `view`.
    pub(super) fn after(&self, what: What, view: &[u8]) -> Followed {
        let mut after = self.clone();
        let (name, source) = self.names(what);
        let position = after.list.iter().position(|bitmap| bitmap.name == name);
        let Some(at) = position else {
            after.list.push(Bitmap {
                name,
                granularity: self.granularity(),
                enabled: true,
                lost: false,
                since: view.to_vec(),
                must: BTreeSet::new(),
            });
            after.added += 1;
            return after;
        };
        let from = after.list.iter().find(|bitmap| bitmap.name == source);
        let from = from.map(|bitmap| bitmap.required(view)).unwrap_or_default();
        let bitmap = &mut after.list[at];
        match what {
            What::Add | What::Look => {}
            What::Clear => (bitmap.since, bitmap.must) = (view.to_vec(), BTreeSet::new()),
            What::Remove => drop(after.list.remove(at)),
            What::Enable if bitmap.enabled => {}
            What::Enable => (bitmap.enabled, bitmap.since) = (true, view.to_vec()),
            What::Disable => {
                bitmap.must = bitmap.required(view);
                bitmap.enabled = false;
            }
            What::Merge => bitmap.must.extend(from),
        }
        after
    }

    /// Without any.
    pub(super) fn none(&self) -> Followed {
        Followed {
            list: Vec::new(),
            added: self.added,
        }
    }

    /// Takes a change of the image's content from outside, which no bitmap has to show.
    pub(super) fn look_away(&mut self, (before, now): (&[u8], &[u8])) {
        for bitmap in &mut self.list {
            bitmap.must = bitmap.required(before);
            bitmap.since = now.to_vec();
        }
    }

    /// The image has these bitmaps, and reads as `view`.
    ///
    /// # Errors
    /// If it may not have them.
    pub(super) fn adopt(
        &self,
        found: &[Reading],
        (view, ended): (&[u8], Ended),
    ) -> Result<Followed, String> {
        let mut adopted = self.clone();
        let names = self.list.iter().map(|bitmap| &bitmap.name);
        if !names.eq(found.iter().map(|bitmap| &bitmap.name)) {
            return Err(format!(
                "the bitmaps are {found:?}, not {:?}",
                self.names_of_all()
            ));
        }
        for (bitmap, found) in adopted.list.iter_mut().zip(found) {
            let name = &bitmap.name;
            if (found.granularity, found.auto) != (bitmap.granularity, bitmap.enabled) {
                return Err(format!("bitmap {name} has become another: {found:?}"));
            }
            match (found.in_use, bitmap.lost) {
                (false, true) => {
                    return Err(format!("bitmap {name} was lost, and says so no longer"));
                }
                (true, false) if ended == Ended::Closed => {
                    return Err(format!("bitmap {name} was lost by a close"));
                }
                (true, _) => bitmap.lost = true,
                (false, false) => {
                    let is_dirty = |sector: &usize| {
                        let at = *sector as u64 * SECTOR_BYTES;
                        found.dirty.iter().any(|range| range.contains(&at))
                    };
                    let mut required = bitmap.required(view).into_iter();
                    let within = |sector: &usize| sector * (SECTOR_BYTES as usize) < view.len();
                    if let Some(sector) = required.find(|s| within(s) && !is_dirty(s)) {
                        return Err(format!("bitmap {name} misses a change in sector {sector}"));
                    }
                }
            }
        }
        Ok(adopted)
    }

    fn names_of_all(&self) -> Vec<&String> {
        self.list.iter().map(|bitmap| &bitmap.name).collect()
    }
}
