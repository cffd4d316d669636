//! Decides what a write, zeroes or a discard do to one cluster. Pure. Compressed writes, and
//! preallocation in an encrypted image, make entries of their own.
//!
//! | the cluster | a write |
//! | --- | --- |
//! | touched subclusters allocated, count 1 | goes in place |
//! | has space, count 1, a touched subcluster without data | fills the touched subclusters |
//! | has no space | takes a cluster, fills the touched subclusters |
//! | has space that is shared (COPIED clear) | takes a cluster that receives all allocated subclusters too, since an entry has one offset |
//! | is compressed | takes a cluster that receives all of it |
//!
//! The bytes of a filled subcluster that the guest does not write come from what the guest reads
//! there now; zeroes on fresh space need nothing at all. Zeroes and discards change entries only
//! ([`change_entry`]); where an entry cannot express them, zeroes are written, and discards leave a
//! [`hole`].

use std::ops::{Range, RangeInclusive};

use super::entry::{Compressed, EntryFormat, L2Entry, Standard};
use super::geometry::{Geometry, HOST_BLOCK_BYTES, HostCluster, HostOffset, SubclusterMask};
use super::map::{Run, map_cluster, reads_as_zero};
use crate::units::{round_down, round_up};

/// Space for a cluster, and its known freshness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// First byte of the cluster in the file.
    pub host: HostOffset,
    /// Subclusters that are known to read as zeroes, but for what requests of this guest cluster
    /// have written there themselves.
    pub fresh: SubclusterMask,
}

/// The facts about a cluster that planning uses.
#[derive(Clone, Debug)]
pub struct View {
    /// Its first guest byte.
    pub start: u64,
    /// L2 entry before the request.
    pub entry: L2Entry,
    /// Space that other requests fill right now, published or not; or the entry's own space, if
    /// something is known of its freshness.
    pub joined: Option<Space>,
    /// Other requests fill space of the cluster right now.
    pub is_filled: bool,
    /// The offset in the cluster from which on the layer below has nothing: 0 without one.
    pub below_end: u64,
}

/// Bytes that a write adds to the guest's own, to make subclusters whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Which, in the cluster.
    pub range: Range<u64>,
    /// Source of the bytes; empty means zeroes.
    pub content: Vec<Run>,
    /// The space reads as zeroes now, so content that turns out to be zeroes need not be written.
    pub onto_fresh: bool,
}

/// How a write changes the entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Not at all: in place.
    None,
    /// These subclusters become allocated in space that only this guest cluster has.
    Fill(SubclusterMask),
    /// The cluster moves to the new space, with these subclusters allocated; the old space is
    /// freed.
    Replace(SubclusterMask),
}

/// The data that has to be durable before a changed entry is, besides the refcounts and tables that
/// lead to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOrdering {
    /// Nothing: it refers to no bytes, or to space that is fresh where it read as zeroes before, so
    /// that it reads as zeroes or as what is being written there.
    Nothing,
    /// The bytes that it refers to.
    Bytes,
}

/// A write's part in one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// First byte of the host cluster that the bytes go to.
    pub host: HostOffset,
    /// The guest's bytes, in the cluster.
    pub bytes: Range<u64>,
    /// Further bytes, in order, none overlapping `bytes`.
    pub fills: Vec<Fill>,
    /// The change to publish when all of it is written.
    pub change: Change,
    /// The data that must be durable before the change is.
    pub promise: WriteOrdering,
    /// Bytes of the cluster that no other change may touch meanwhile.
    pub lease: Range<u64>,
}

impl Write {
    /// The subclusters that it may leave marks in, even if it fails.
    #[inline]
    pub fn attempted(&self, geometry: &Geometry) -> SubclusterMask {
        let touched = geometry.subclusters_touched(&self.bytes);
        self.fills.iter().fold(touched, |mask, fill| {
            mask | geometry.subclusters_touched(&fill.range)
        })
    }
}

/// Returns whether a write to the cluster needs a newly taken cluster.
#[inline]
pub fn needs_space(view: &View) -> bool {
    match &view.entry {
        L2Entry::Compressed(_) => true,
        L2Entry::Standard(entry) => match entry.host {
            Some(_) => !entry.copied,
            None => view.joined.is_none(),
        },
    }
}

/// Plans a write of `bytes` (in the cluster). `taken` is new space, given exactly when
/// [`needs_space`] says so.
pub fn plan_write(
    format: &EntryFormat,
    view: &View,
    bytes: Range<u64>,
    taken: Option<Space>,
) -> Write {
    assert_eq!(
        taken.is_some(),
        needs_space(view),
        "space is taken when it is needed"
    );
    let geometry = &format.geometry;
    let touched = geometry.subclusters_touched(&bytes);
    let whole = 0..geometry.cluster_bytes();
    let entry = match &view.entry {
        L2Entry::Compressed(_) => {
            let space = taken.expect("asserted above");
            let all = geometry.all_subclusters();
            let fills = fills(format, view, &bytes, all, (0, space.fresh));
            return Write {
                host: space.host,
                bytes,
                fills,
                change: Change::Replace(all),
                promise: WriteOrdering::Bytes,
                lease: whole,
            };
        }
        L2Entry::Standard(entry) => entry,
    };
    let zero = reads_as_zero(format, entry, view.below_end);
    match (entry.host, taken) {
        (Some(host), None) if touched & !entry.allocated == 0 => Write {
            host,
            bytes: bytes.clone(),
            fills: Vec::new(),
            change: Change::None,
            promise: WriteOrdering::Bytes,
            lease: bytes,
        },
        (Some(_), Some(space)) => {
            let received = entry.allocated | touched;
            let fills = fills(format, view, &bytes, received, (zero, space.fresh));
            Write {
                host: space.host,
                bytes,
                fills,
                change: Change::Replace(received),
                promise: WriteOrdering::Bytes,
                lease: whole,
            }
        }
        (host, taken) => {
            let space = taken.or(view.joined).unwrap_or_else(|| Space {
                host: host.expect("a cluster without space takes some"),
                fresh: 0,
            });
            let filled = touched & !entry.allocated;
            let fills = fills(format, view, &bytes, filled, (zero, space.fresh));
            let mut lease = bytes.clone();
            for fill in &fills {
                lease = lease.start.min(fill.range.start)..lease.end.max(fill.range.end);
            }
            Write {
                host: space.host,
                bytes,
                fills,
                change: Change::Fill(filled),
                promise: promise(filled, zero, space.fresh),
                lease,
            }
        }
    }
}

/// Returns the data that must be durable before an entry with these subclusters filled. Where they
/// read as zeroes and lie on fresh space, a crash that keeps the entry and loses the bytes leaves
/// the old content: zeroes.
fn promise(filled: SubclusterMask, zero: SubclusterMask, fresh: SubclusterMask) -> WriteOrdering {
    match filled & !(zero & fresh) {
        0 => WriteOrdering::Nothing,
        _ => WriteOrdering::Bytes,
    }
}

/// Clusters of these sizes, a block of the host or two, are written whole even where the rest reads
/// as zeroes: neighbours then go down in one I/O without gaps, which costs less than the bytes.
const WRITTEN_WHOLE_BYTES: RangeInclusive<u64> = 4 << 10..=8 << 10;

/// Returns the fills that complete the subclusters of `received` around `bytes`. Those of `zero`
/// read as zeroes now, and those of `fresh` do on the host.
fn fills(
    format: &EntryFormat,
    view: &View,
    bytes: &Range<u64>,
    received: SubclusterMask,
    (zero, fresh): (SubclusterMask, SubclusterMask),
) -> Vec<Fill> {
    let geometry = &format.geometry;
    let mut fills: Vec<Fill> = Vec::new();
    for i in (0..geometry.subclusters()).filter(|i| received >> i & 1 != 0) {
        let sub = u64::from(i) << geometry.subcluster_bits();
        let sub = sub..sub + geometry.subcluster_bytes();
        let before = sub.start..sub.end.min(bytes.start);
        let after = sub.start.max(bytes.end)..sub.end;
        let mut parts = [before, after];
        if bytes.end <= sub.start || bytes.start >= sub.end {
            parts = [sub.clone(), sub.end..sub.end];
        }
        let (is_zero, is_fresh) = (zero >> i & 1 != 0, fresh >> i & 1 != 0);
        for part in parts.into_iter().filter(|part| part.start < part.end) {
            if is_zero && is_fresh && !WRITTEN_WHOLE_BYTES.contains(&geometry.cluster_bytes()) {
                continue;
            }
            let mut content = Vec::new();
            if !is_zero {
                let range = view.start + part.start..view.start + part.end;
                map_cluster(format, &view.entry, view.start, range, &mut content);
            }
            push_fill(
                &mut fills,
                Fill {
                    range: part,
                    content,
                    onto_fresh: is_fresh,
                },
            );
        }
    }
    fills
}

fn push_fill(fills: &mut Vec<Fill>, fill: Fill) {
    match fills.last_mut() {
        Some(last)
            if last.range.end == fill.range.start
                && last.onto_fresh == fill.onto_fresh
                && last.content.is_empty() == fill.content.is_empty() =>
        {
            last.range.end = fill.range.end;
            for run in fill.content {
                super::map::push(&mut last.content, run);
            }
        }
        _ => fills.push(fill),
    }
}

/// Space that an entry no longer refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freed {
    /// A cluster of the image file.
    Cluster(HostOffset),
    /// The clusters that a compressed cluster's bytes lie in, one reference each.
    Compressed(Compressed),
    /// Subclusters of a cluster that stays mapped, and that only this guest cluster has.
    Subclusters(HostOffset, SubclusterMask),
}

impl Freed {
    /// All that an entry refers to in the image file; `None` if that is nothing.
    #[inline]
    pub fn of(entry: &L2Entry) -> Option<Freed> {
        match entry {
            L2Entry::Standard(entry) => entry.host.map(Freed::Cluster),
            L2Entry::Compressed(place) => Some(Freed::Compressed(*place)),
        }
    }

    /// The clusters that lose a reference.
    pub fn clusters(&self, geometry: &Geometry) -> impl Iterator<Item = HostCluster> + use<> {
        let bits = geometry.cluster_bits();
        let range = match self {
            Freed::Cluster(host) => host.0 >> bits..(host.0 >> bits) + 1,
            Freed::Compressed(place) => {
                place.start >> bits..((place.start + place.len - 1) >> bits) + 1
            }
            // The cluster stays mapped.
            Freed::Subclusters(..) => 0..0,
        };
        range.map(HostCluster)
    }
}

/// Returns the entry after a write, and the space it freed. `before` is the entry now, which may
/// have been published by another member since the plan.
pub fn publish(format: &EntryFormat, before: &L2Entry, write: &Write) -> (L2Entry, Option<Freed>) {
    let standard = |host, allocated, zeroes| {
        L2Entry::Standard(Standard {
            host: Some(host),
            copied: true,
            allocated,
            zeroes,
        })
    };
    match (write.change, before) {
        (Change::None, _) => (*before, None),
        (Change::Fill(filled), L2Entry::Standard(old)) => {
            assert!(
                old.host.is_none_or(|host| host == write.host),
                "members share one cluster"
            );
            (
                standard(write.host, old.allocated | filled, old.zeroes & !filled),
                None,
            )
        }
        (Change::Fill(_), L2Entry::Compressed(_)) => panic!("a compressed cluster is replaced"),
        (Change::Replace(received), L2Entry::Standard(old)) => {
            let freed = old.host.filter(|_| !format.data_file).map(Freed::Cluster);
            (
                standard(write.host, received, old.zeroes & !received),
                freed,
            )
        }
        (Change::Replace(received), L2Entry::Compressed(place)) => (
            standard(write.host, received, 0),
            Some(Freed::Compressed(*place)),
        ),
    }
}

/// A request that changes entries only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryRequest {
    /// Read as zeroes and keep the space.
    Zero,
    /// Read as zeroes and give the space back.
    ZeroAndUnmap,
    /// As `Zero` if the range holds no data; otherwise the caller writes zeroes.
    ZeroUnwritten,
    /// The guest needs it no longer.
    Discard,
    /// Makes ranges that read as zeroes by their flag read so without it, as version 2 has no flag.
    Unflag,
    /// Sets the zero flag on ranges that are absent here and read as zeroes below; not for version
    /// 2.
    Flag,
}

/// How the space of a cluster whose data is discarded is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unref {
    /// The old cluster loses its reference.
    Free,
    /// The cluster keeps it, without data (`discard-no-unref`).
    Keep,
}

/// The effect of such a request on a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryChange {
    /// No reference is lost.
    None,
    /// The new entry, and the space it frees.
    Set(L2Entry, Option<Freed>),
    /// The format cannot say it: zeroes have to be written.
    Write,
}

/// Decides what `request` does to the subclusters that lie wholly in `bytes` (in the cluster; the
/// caller writes zeroes to the parts of others). Below the end of the layer below, `below_end`, a
/// cluster that is merely unmapped would show that layer's bytes.
pub fn change_entry(
    format: &EntryFormat,
    view: &View,
    bytes: &Range<u64>,
    (request, unref): (EntryRequest, Unref),
) -> EntryChange {
    let geometry = &format.geometry;
    let within = geometry.subclusters_within(bytes);
    let all = geometry.all_subclusters();
    if within == 0 {
        return EntryChange::None;
    }
    if let EntryRequest::Unflag | EntryRequest::Flag = request {
        return change_flag(format, view, (within, request));
    }
    let Some(request) = in_entry(request, &view.entry, within) else {
        return EntryChange::Write;
    };
    let whole = within == all;
    let shows_below = view.below_end > 0;
    let is_discard = request == EntryRequest::Discard;
    // Where the format cannot express it, a discard may do nothing, but zeroes must be written.
    let inexpressible = match is_discard {
        true => EntryChange::None,
        false => EntryChange::Write,
    };
    let entry = match &view.entry {
        L2Entry::Compressed(_) if !whole => return inexpressible,
        L2Entry::Compressed(place) => {
            return match unmapped(format, shows_below) {
                Some(entry) => EntryChange::Set(entry, Some(Freed::Compressed(*place))),
                None => inexpressible,
            };
        }
        L2Entry::Standard(entry) => entry,
    };
    let is_gone = entry.zeroes & within == within || !shows_below;
    if is_discard && entry.allocated & within == 0 && is_gone && !(whole && entry.host.is_some()) {
        return EntryChange::None;
    }
    // A cluster that others fill is not freed for a discard of a part: requests that do not
    // overlap do not wait for each other.
    let is_kept = unref == Unref::Keep || (view.is_filled && !whole);
    let keeps_space = is_kept && format.version >= 3 && entry.host.is_some();
    if whole && request != EntryRequest::Zero && !keeps_space {
        let freed = entry.host.filter(|_| !format.data_file).map(Freed::Cluster);
        return match unmapped(format, shows_below) {
            Some(new) if new == view.entry => EntryChange::None,
            Some(new) => EntryChange::Set(new, freed),
            None => inexpressible,
        };
    }
    if format.version < 3 {
        let zero = reads_as_zero(format, entry, view.below_end) & within == within;
        return if zero {
            EntryChange::None
        } else {
            EntryChange::Write
        };
    }
    let new = Standard {
        allocated: entry.allocated & !within,
        zeroes: entry.zeroes | within,
        ..*entry
    };
    if new == *entry {
        return EntryChange::None;
    }
    let given_up = entry.host.filter(|_| request != EntryRequest::Zero);
    match given_up.filter(|_| !format.data_file) {
        Some(host) if new.allocated == 0 && entry.allocated != 0 && !keeps_space => {
            let new = Standard {
                host: None,
                copied: false,
                ..new
            };
            EntryChange::Set(L2Entry::Standard(new), Some(Freed::Cluster(host)))
        }
        Some(host) if entry.copied => {
            let freed = Freed::Subclusters(host, entry.allocated & within);
            EntryChange::Set(L2Entry::Standard(new), Some(freed))
        }
        _ => EntryChange::Set(L2Entry::Standard(new), None),
    }
}

/// Returns where a discard of a part of a subcluster (`bytes`, in the cluster) leaves a hole in
/// place: the host's first byte of the cluster, and the whole blocks of the host within. Only data
/// that nothing else refers to may become zeroes; the entry stays.
pub fn hole(
    format: &EntryFormat,
    view: &View,
    bytes: &Range<u64>,
) -> Option<(HostOffset, Range<u64>)> {
    let L2Entry::Standard(entry) = &view.entry else {
        return None;
    };
    let hole = round_up(bytes.start, HOST_BLOCK_BYTES)..round_down(bytes.end, HOST_BLOCK_BYTES);
    if hole.start >= hole.end || !entry.copied {
        return None;
    }
    let touched = format.geometry.subclusters_touched(&hole);
    let host = entry.host.filter(|_| touched & !entry.allocated == 0);
    host.map(|host| (host, hole))
}

/// The effect of preallocation on a cluster.
pub enum Preallocated {
    /// Its entry, once it has space.
    Entry(Standard),
    /// It has its space.
    Nothing,
    /// It has to be written: it shows a layer below, or the disk ends in it and a data file holds
    /// what may be anything.
    Write,
}

/// Whether the end of a disk of `size` bytes lies within a cluster.
fn ends_in(format: &EntryFormat, view: &View, size: u64) -> bool {
    let end = view.start + format.geometry.cluster_bytes();
    view.start < size && size < end
}

/// Decides what becomes of a cluster that gets its space before anything is written to it: what the
/// guest reads there stays. The disk has `size` bytes so far.
pub fn preallocated(format: &EntryFormat, view: &View, size: u64) -> Preallocated {
    let L2Entry::Standard(entry) = &view.entry else {
        return Preallocated::Nothing;
    };
    let is_taken = entry.host.is_some() || view.is_filled;
    match format.geometry.extended_l2() {
        _ if is_taken => Preallocated::Nothing,
        // The space is the cluster's; its content stays.
        true => Preallocated::Entry(*entry),
        false if entry.zeroes != 0 => Preallocated::Entry(*entry),
        // Where a layer below shows something.
        false if view.below_end > 0 => Preallocated::Write,
        // The data file may hold anything there, but not in what a resize adds, which was filled.
        false if format.data_file && ends_in(format, view, size) => Preallocated::Write,
        false if format.data_file && view.start < size => Preallocated::Entry(Standard {
            zeroes: 1,
            ..*entry
        }),
        false => Preallocated::Entry(Standard {
            allocated: 1,
            ..*entry
        }),
    }
}

/// Returns the request as a change of the entry, if the entry can express it.
fn in_entry(
    request: EntryRequest,
    entry: &L2Entry,
    within: SubclusterMask,
) -> Option<EntryRequest> {
    match (request, entry) {
        (EntryRequest::ZeroUnwritten, L2Entry::Standard(entry))
            if entry.allocated & within == 0 =>
        {
            Some(EntryRequest::Zero)
        }
        (EntryRequest::ZeroUnwritten, _) => None,
        (request, _) => Some(request),
    }
}

/// [`change_entry`] where only the flag of zeroes changes.
fn change_flag(
    format: &EntryFormat,
    view: &View,
    (within, request): (SubclusterMask, EntryRequest),
) -> EntryChange {
    match &view.entry {
        L2Entry::Compressed(_) => EntryChange::None,
        L2Entry::Standard(entry) if request == EntryRequest::Unflag => {
            unflagged(entry, view.below_end > 0)
        }
        L2Entry::Standard(entry) => flagged(format, entry, within),
    }
}

/// A cluster without the zero flag that reads as zeroes: an unallocated one, unless a layer below
/// shows through it.
pub fn unflagged(entry: &Standard, shows_below: bool) -> EntryChange {
    match entry.zeroes {
        0 => EntryChange::None,
        _ if shows_below => EntryChange::Write,
        _ => {
            let freed = entry.host.map(Freed::Cluster);
            EntryChange::Set(L2Entry::Standard(Standard::UNALLOCATED), freed)
        }
    }
}

/// A cluster whose absent subclusters read as zeroes by their flag. Those that the image has stay.
fn flagged(format: &EntryFormat, entry: &Standard, within: SubclusterMask) -> EntryChange {
    let absent = within & !(entry.allocated | entry.zeroes);
    if absent == 0 || format.version < 3 {
        return EntryChange::None;
    }
    let new = Standard {
        zeroes: entry.zeroes | absent,
        ..*entry
    };
    EntryChange::Set(L2Entry::Standard(new), None)
}

/// The entry of a cluster without space that reads as zeroes.
fn unmapped(format: &EntryFormat, shows_below: bool) -> Option<L2Entry> {
    if format.version >= 3 {
        let zeroes = format.geometry.all_subclusters();
        return Some(L2Entry::Standard(Standard {
            zeroes,
            ..Standard::UNALLOCATED
        }));
    }
    (!shows_below).then_some(L2Entry::Standard(Standard::UNALLOCATED))
}

#[cfg(test)]
mod tests;
