//! Plans against a model of bytes. Every shape of entry, with every range that begins and ends
//! beside an edge, is planned, carried out on host space that is an array, published, and read back
//! through the new entry by a decoder of the tests' own.

use super::*;
use crate::geometry::Geometry;
use crate::map::Source;

const BITS: u32 = 14;
const CLUSTER: u64 = 1 << BITS;
/// The guest cluster is not the first one, so that guest offsets and offsets in it differ.
const START: u64 = CLUSTER;
const HOST_CLUSTERS: u64 = 5;
const OLD: HostOffset = HostOffset(2 * CLUSTER);
const TAKEN: HostOffset = HostOffset(3 * CLUSTER);
const JOINED: HostOffset = HostOffset(4 * CLUSTER);
const PLACE: Compressed = Compressed {
    start: 5 * CLUSTER + 700,
    len: 836,
};

/// Where a byte of the model comes from; no byte of any of them is zero.
#[derive(Clone, Copy)]
enum Origin {
    Old = 1,
    Below,
    Decompressed,
    Guest,
    Garbage,
    OtherGuest,
}

/// The byte at an offset in the cluster: identifies its source and, nearly, its offset.
fn byte(origin: Origin, offset: u64) -> u8 {
    let place = (offset ^ offset >> 4 ^ offset >> 9) & 31;
    (origin as u8) << 5 | place as u8
}

/// The bytes of all origins, made once.
struct Patterns(Vec<Vec<u8>>);

impl Patterns {
    fn new() -> Patterns {
        use Origin::{Below, Decompressed, Garbage, Guest, Old, OtherGuest};
        let all = [Old, Below, Decompressed, Guest, Garbage, OtherGuest];
        let cluster = |origin| (0..CLUSTER).map(|at| byte(origin, at)).collect();
        Patterns(all.into_iter().map(cluster).collect())
    }

    fn of(&self, origin: Origin, range: &Range<u64>) -> &[u8] {
        &self.0[origin as usize - 1][range.start as usize..range.end as usize]
    }
}

fn put(cluster: &mut [u8], range: &Range<u64>, bytes: &[u8]) {
    cluster[range.start as usize..range.end as usize].copy_from_slice(bytes);
}

fn format(extended: bool, version: u32) -> EntryFormat {
    EntryFormat {
        geometry: Geometry::new(BITS, 4, extended).unwrap(),
        version,
        data_file: false,
    }
}

/// All kinds of formats.
fn formats() -> [EntryFormat; 5] {
    let data_file = |extended| EntryFormat {
        data_file: true,
        ..format(extended, 3)
    };
    [
        format(false, 2),
        format(false, 3),
        format(true, 3),
        data_file(false),
        data_file(true),
    ]
}

/// Host space and what lies below.
#[derive(Clone)]
struct World<'a> {
    patterns: &'a Patterns,
    format: EntryFormat,
    below: Vec<u8>,
    host: Vec<u8>,
}

impl<'a> World<'a> {
    /// The state that a view describes. Of space nothing is known but what it says is fresh.
    fn new(patterns: &'a Patterns, format: EntryFormat, view: &View, taken: Option<Space>) -> Self {
        let mut below = vec![0; CLUSTER as usize];
        let reach = 0..view.below_end;
        put(&mut below, &reach, patterns.of(Origin::Below, &reach));
        let host = patterns
            .of(Origin::Garbage, &(0..CLUSTER))
            .repeat(HOST_CLUSTERS as usize);
        let mut world = World {
            patterns,
            format,
            below,
            host,
        };
        let (old, allocated) = match view.entry {
            L2Entry::Standard(Standard {
                host, allocated, ..
            }) => (host, allocated),
            L2Entry::Compressed(_) => (None, 0),
        };
        for (i, sub) in world.subclusters() {
            for space in view.joined.iter().chain(&taken) {
                if space.fresh >> i & 1 != 0 {
                    world.store(space.host, &sub, &vec![0; (sub.end - sub.start) as usize]);
                }
            }
            if allocated >> i & 1 != 0 {
                let bytes = patterns.of(Origin::Old, &sub);
                world.store(old.unwrap(), &sub, bytes);
            }
        }
        world
    }

    fn subclusters(&self) -> Vec<(u32, Range<u64>)> {
        let count = if self.format.geometry.extended_l2() {
            32
        } else {
            1
        };
        let len = CLUSTER / u64::from(count);
        (0..count)
            .map(|i| (i, u64::from(i) * len..u64::from(i + 1) * len))
            .collect()
    }

    /// The subclusters that lie within a range of the cluster: the mask of their bits, and each.
    fn covered(&self, bytes: &Range<u64>) -> (u32, Vec<Range<u64>>) {
        let covered = self
            .subclusters()
            .into_iter()
            .filter(|(_, sub)| bytes.start <= sub.start && sub.end <= bytes.end);
        let (indices, covered): (Vec<u32>, Vec<Range<u64>>) = covered.unzip();
        let mask = indices.iter().fold(0, |mask, i| mask | 1 << i);
        (mask, covered)
    }

    fn store(&mut self, host: HostOffset, range: &Range<u64>, bytes: &[u8]) {
        let at = host.0 + range.start..host.0 + range.end;
        put(&mut self.host, &at, bytes);
    }

    fn load(&self, host: HostOffset, range: &Range<u64>) -> &[u8] {
        &self.host[(host.0 + range.start) as usize..(host.0 + range.end) as usize]
    }

    /// Returns the guest's data in the cluster.
    fn read(&self, entry: &L2Entry) -> Vec<u8> {
        let entry = match entry {
            L2Entry::Compressed(place) => {
                assert_eq!(*place, PLACE);
                return self
                    .patterns
                    .of(Origin::Decompressed, &(0..CLUSTER))
                    .to_vec();
            }
            L2Entry::Standard(entry) => entry,
        };
        let mut cluster = self.below.clone();
        for (i, sub) in self.subclusters() {
            if entry.zeroes >> i & 1 != 0 {
                cluster[sub.start as usize..sub.end as usize].fill(0);
            } else if entry.allocated >> i & 1 != 0 {
                put(&mut cluster, &sub, self.load(entry.host.unwrap(), &sub));
            }
        }
        cluster
    }

    /// Returns the bytes of a fill, taken from the state before any write.
    fn content(&self, fill: &Fill) -> Vec<u8> {
        if fill.content.is_empty() {
            assert!(!fill.onto_fresh, "zeroes are written where zeroes are");
            return vec![0; (fill.range.end - fill.range.start) as usize];
        }
        let mut bytes = Vec::new();
        let mut at = START + fill.range.start;
        for run in &fill.content {
            assert_eq!(run.range.start, at, "the content has no gap");
            at = run.range.end;
            let (len, within) = (
                run.range.end - run.range.start,
                run.range.start - START..run.range.end - START,
            );
            match run.source {
                Source::Below => {
                    bytes.extend_from_slice(&self.below[within.start as usize..within.end as usize])
                }
                Source::Zero(_) => bytes.extend(vec![0; len as usize]),
                Source::Data(host) => bytes.extend_from_slice(self.load(host, &(0..len))),
                Source::Compressed(place, from) => {
                    assert_eq!(place, PLACE);
                    let part = from..from + len;
                    bytes.extend_from_slice(self.patterns.of(Origin::Decompressed, &part));
                }
            }
        }
        assert_eq!(at, START + fill.range.end, "the content is all of the fill");
        bytes
    }

    /// Carries a plan out as cow.rs does, and checks what it touches.
    fn carry_out(&mut self, write: &Write, guest: Origin) {
        let contents: Vec<Vec<u8>> = write.fills.iter().map(|fill| self.content(fill)).collect();
        let mut end = 0;
        for (fill, content) in write.fills.iter().zip(&contents) {
            assert!(fill.range.start >= end && fill.range.start < fill.range.end);
            end = fill.range.end;
            assert!(
                fill.range.end <= write.bytes.start || fill.range.start >= write.bytes.end,
                "fills leave the guest's bytes alone"
            );
            self.assert_leased(write, &fill.range);
            let is_zero = content.iter().all(|&byte| byte == 0);
            if fill.onto_fresh {
                let there = self.load(write.host, &fill.range);
                assert!(there.iter().all(|&byte| byte == 0), "what is fresh is zero");
            }
            if !(fill.onto_fresh && is_zero) {
                self.store(write.host, &fill.range, content);
            }
        }
        self.assert_leased(write, &write.bytes);
        let bytes = self.patterns.of(guest, &write.bytes);
        self.store(write.host, &write.bytes, bytes);
    }

    fn assert_leased(&self, write: &Write, range: &Range<u64>) {
        assert!(
            write.lease.start <= range.start && range.end <= write.lease.end,
            "{range:?} is written without a lease"
        );
    }
}

/// Entries of every shape.
fn entries(format: &EntryFormat) -> Vec<L2Entry> {
    let mut entries = Vec::new();
    if !format.data_file {
        entries.push(L2Entry::Compressed(PLACE));
    }
    let old = if format.data_file {
        HostOffset(START)
    } else {
        OLD
    };
    for (host, copied) in [(None, false), (Some(old), true), (Some(old), false)] {
        for (allocated, zeroes) in states(format) {
            let plausible = match (host, format.geometry.extended_l2()) {
                (None, _) => allocated == 0,
                (Some(_), true) => true,
                (Some(_), false) => allocated | zeroes != 0,
            };
            if plausible && (format.version >= 3 || zeroes == 0) {
                entries.push(L2Entry::Standard(Standard {
                    host,
                    copied,
                    allocated,
                    zeroes,
                }));
            }
        }
    }
    entries
}

/// All states of the subclusters 0, 1 and 31, with one of three states of all others.
fn states(format: &EntryFormat) -> Vec<(SubclusterMask, SubclusterMask)> {
    if !format.geometry.extended_l2() {
        return vec![(0, 0), (1, 0), (0, 1)];
    }
    let mut states = Vec::new();
    for code in 0..81u32 {
        let (mut allocated, mut zeroes) = (0, 0);
        let masks = [1, 1 << 1, 1 << 31, 0x7fff_fffc];
        for (digit, mask) in masks.into_iter().enumerate() {
            match code / 3u32.pow(digit as u32) % 3 {
                0 => {}
                1 => allocated |= mask,
                _ => zeroes |= mask,
            }
        }
        states.push((allocated, zeroes));
    }
    states
}

/// Returns the possible knowledge of space that the cluster has or is getting.
fn joined(format: &EntryFormat, entry: &L2Entry) -> Vec<Option<Space>> {
    let all = format.geometry.all_subclusters();
    let spaces = |host, masks: &[SubclusterMask]| {
        let known = masks.iter().map(|&fresh| Some(Space { host, fresh }));
        std::iter::once(None).chain(known).collect()
    };
    match entry {
        L2Entry::Compressed(_) => vec![None],
        L2Entry::Standard(entry) => match entry.host {
            // Offsets in a data file are given, and nothing is known of what is there.
            _ if format.data_file => spaces(HostOffset(START), &[0]),
            None => spaces(JOINED, &[0, all, 0x8000_0001 & all]),
            Some(_) if !entry.copied => vec![None],
            Some(host) => spaces(host, &[!entry.allocated & all, !entry.allocated & 2]),
        },
    }
}

fn ranges(format: &EntryFormat) -> Vec<Range<u64>> {
    let sub = if format.geometry.extended_l2() {
        CLUSTER / 32
    } else {
        CLUSTER
    };
    let mut edges = vec![0, 1, 100, CLUSTER - 1, CLUSTER];
    for edge in [sub, 2 * sub, CLUSTER - sub] {
        edges.extend([edge.saturating_sub(1), edge, edge + 1]);
    }
    edges.retain(|&edge| edge <= CLUSTER);
    edges.sort_unstable();
    edges.dedup();
    let pairs = edges.iter().flat_map(|&a| edges.iter().map(move |&b| a..b));
    pairs.filter(|range| range.start < range.end).collect()
}

/// Where the layer below may end: nowhere, in the middle of a subcluster, at the end of one,
/// beyond.
const BELOW_ENDS: [u64; 4] = [0, 768, 1024, CLUSTER];

fn views(format: &EntryFormat) -> Vec<View> {
    let mut views = Vec::new();
    for entry in entries(format) {
        for joined in joined(format, &entry) {
            views.extend(BELOW_ENDS.map(|below_end| View {
                start: START,
                entry,
                joined,
                is_filled: false,
                below_end,
            }));
        }
    }
    views
}

fn expects_space(view: &View) -> bool {
    match (&view.entry, view.joined) {
        (L2Entry::Compressed(_), _) => true,
        (L2Entry::Standard(entry), None) if entry.host.is_none() => true,
        (L2Entry::Standard(entry), _) => entry.host.is_some() && !entry.copied,
    }
}

/// The clusters that may be given to a plan.
fn spaces(format: &EntryFormat, view: &View) -> Vec<Option<Space>> {
    assert_eq!(needs_space(view), expects_space(view), "{view:?}");
    if !expects_space(view) {
        return vec![None];
    }
    if format.data_file {
        return vec![Some(Space {
            host: HostOffset(START),
            fresh: 0,
        })];
    }
    let all = format.geometry.all_subclusters();
    [0, all]
        .map(|fresh| Some(Space { host: TAKEN, fresh }))
        .to_vec()
}

fn assert_encodable(format: &EntryFormat, entry: &L2Entry) {
    let (word, bitmap) = format.encode_l2(entry);
    assert_eq!(format.decode_l2(word, bitmap), Ok(*entry));
}

/// Returns the space that clearing an entry frees.
fn space_of(format: &EntryFormat, entry: &L2Entry) -> Option<Freed> {
    match entry {
        L2Entry::Compressed(place) => Some(Freed::Compressed(*place)),
        L2Entry::Standard(_) if format.data_file => None,
        L2Entry::Standard(entry) => entry.host.map(Freed::Cluster),
    }
}

fn check_write(world: &mut World<'_>, view: &View, bytes: &Range<u64>, taken: Option<Space>) {
    let format = world.format;
    let before = world.read(&view.entry);
    let mut expected = before.clone();
    put(
        &mut expected,
        bytes,
        world.patterns.of(Origin::Guest, bytes),
    );
    let write = plan_write(&format, view, bytes.clone(), taken);
    assert_eq!(write.bytes, *bytes);
    let (entry, freed) = publish(&format, &view.entry, &write);
    assert_encodable(&format, &entry);
    match write.change {
        Change::Fill(_) => {
            // A crash that keeps the entry and loses the bytes shows what was there before, or may
            // not come.
            let shows_old = world.read(&entry) == before;
            assert_eq!(
                write.promise == WriteOrdering::Nothing,
                shows_old,
                "{write:?}"
            );
        }
        Change::None | Change::Replace(_) => assert_eq!(write.promise, WriteOrdering::Bytes),
    }
    world.carry_out(&write, Origin::Guest);
    assert!(
        world.read(&entry) == expected,
        "{view:?} {bytes:?} {taken:?}: {write:?}"
    );
    let touched = world
        .subclusters()
        .into_iter()
        .filter(|(_, sub)| sub.start < bytes.end && bytes.start < sub.end)
        .fold(0, |mask, (i, _)| mask | 1 << i);
    let L2Entry::Standard(new) = entry else {
        panic!("a written cluster is not compressed")
    };
    assert!(new.copied && new.allocated & touched == touched);
    match view.entry {
        L2Entry::Standard(old) if taken.is_none() || old.host.is_none() => {
            // In space of its own: nothing is freed, no other subcluster changes.
            assert_eq!(freed, None);
            assert_eq!(write.change == Change::None, touched & !old.allocated == 0);
            assert_eq!(new.allocated, old.allocated | touched);
            assert_eq!(new.zeroes, old.zeroes & !touched);
        }
        _ => {
            assert_eq!(freed, space_of(&format, &view.entry));
            assert_eq!(write.lease, 0..CLUSTER, "all of it moves");
        }
    }
    if let Some(space) = taken {
        assert_eq!(new.host, Some(space.host));
    }
}

fn check_writes(format: EntryFormat) {
    let patterns = Patterns::new();
    let ranges = ranges(&format);
    for view in views(&format) {
        for taken in spaces(&format, &view) {
            let world = World::new(&patterns, format, &view, taken);
            for bytes in &ranges {
                check_write(&mut world.clone(), &view, bytes, taken);
            }
        }
    }
}

#[test]
fn writes_change_their_bytes_and_no_others() {
    check_writes(format(false, 2));
    check_writes(format(false, 3));
}

#[test]
fn writes_into_subclusters_change_their_bytes_and_no_others() {
    check_writes(format(true, 3));
}

/// Fills next to each other of which one is onto zeroes and one is not are not taken for one.
#[test]
fn writes_into_space_that_is_fresh_in_part_change_their_bytes_and_no_others() {
    let patterns = Patterns::new();
    let format = format(true, 3);
    let mut moved = 0;
    for view in views(&format).iter().step_by(5) {
        if !expects_space(view) {
            continue;
        }
        for fresh in [1 << 1, !(1 << 1), 0x7fff_fffc, 0x8000_ffff] {
            let taken = Some(Space { host: TAKEN, fresh });
            let world = World::new(&patterns, format, view, taken);
            for bytes in [600..700, 0..512, 1023..1024, 0..1, CLUSTER - 1..CLUSTER] {
                check_write(&mut world.clone(), view, &bytes, taken);
                moved += 1;
            }
        }
    }
    assert!(moved > 1000, "{moved} writes move");
}

#[test]
fn writes_into_a_data_file_change_their_bytes_and_no_others() {
    for extended in [false, true] {
        check_writes(EntryFormat {
            data_file: true,
            ..format(extended, 3)
        });
    }
}

/// Two writes that fill one space, `second` planned before the first is published. 0 if the first
/// is in the way of it.
fn check_members(
    world: &mut World<'_>,
    view: &View,
    (bytes, taken): (Range<u64>, Option<Space>),
    second: &Range<u64>,
) -> u32 {
    let format = world.format;
    let first = plan_write(&format, view, bytes, taken);
    let view = View {
        joined: view.joined.or(taken),
        is_filled: true,
        ..view.clone()
    };
    if needs_space(&view) {
        return 0; // The first one moves the cluster, and has all of it leased.
    }
    let second = plan_write(&format, &view, second.clone(), None);
    if first.lease.start < second.lease.end && second.lease.start < first.lease.end {
        return 0;
    }
    let mut expected = world.read(&view.entry);
    for (write, guest) in [(&first, Origin::Guest), (&second, Origin::OtherGuest)] {
        let bytes = world.patterns.of(guest, &write.bytes);
        put(&mut expected, &write.bytes, bytes);
    }
    world.carry_out(&first, Origin::Guest);
    world.carry_out(&second, Origin::OtherGuest);
    for order in [[&first, &second], [&second, &first]] {
        let mut entry = view.entry;
        for write in order {
            let (new, freed) = publish(&format, &entry, write);
            assert_eq!(freed, None);
            assert_encodable(&format, &new);
            entry = new;
        }
        let read = world.read(&entry);
        assert!(read == expected, "{view:?}: {first:?} and {second:?}");
    }
    1
}

#[test]
fn writes_that_fill_one_space_keep_each_others_bytes() {
    let patterns = Patterns::new();
    for extended in [false, true] {
        let format = format(extended, 3);
        let ranges = [
            0..1,
            0..100,
            100..200,
            300..512,
            511..512,
            512..600,
            600..1024,
            700..1500,
            CLUSTER - 512..CLUSTER - 1,
            CLUSTER - 1..CLUSTER,
        ];
        let pairs = ranges
            .iter()
            .flat_map(|a| ranges.iter().map(move |b| (a, b)));
        let mut together = 0;
        // Pairs are many: of the larger set of views every fifth one.
        let stride = if extended { 5 } else { 1 };
        for view in views(&format).into_iter().step_by(stride) {
            for taken in spaces(&format, &view) {
                let world = World::new(&patterns, format, &view, taken);
                for (first, second) in pairs.clone() {
                    let first = (first.clone(), taken);
                    together += check_members(&mut world.clone(), &view, first, second);
                }
            }
        }
        assert!(together > 100, "{together} pairs went together");
    }
}

/// Returns whether a request gives space back.
fn gives_up(request: EntryRequest) -> bool {
    matches!(request, EntryRequest::ZeroAndUnmap | EntryRequest::Discard)
}

/// A request may leave an entry as it is only if that is what it asks for.
fn assert_nothing_was_needed(
    world: &World<'_>,
    (view, bytes): (&View, &Range<u64>),
    (request, unref): (EntryRequest, Unref),
    what: &str,
) {
    let format = world.format;
    let read = world.read(&view.entry);
    let (covered_mask, covered) = world.covered(bytes);
    let whole = *bytes == (0..CLUSTER);
    let is_part_of_compressed = matches!(view.entry, L2Entry::Compressed(_)) && !whole;
    let is_discard = request == EntryRequest::Discard;
    let is_zero = |sub: &Range<u64>| {
        let bytes = &read[sub.start as usize..sub.end as usize];
        bytes.iter().all(|&byte| byte == 0)
    };
    // A discard is advice; in version 2 nothing hides the layer below.
    let hides = format.version >= 3 || view.below_end == 0;
    let kept = is_discard && (is_part_of_compressed || !hides);
    assert!(kept || covered.iter().all(is_zero), "{what} does nothing");
    // A zeroed range is marked as zeroes, whatever backing file the image gets later.
    let says_zero = match view.entry {
        L2Entry::Standard(old) => old.zeroes & covered_mask == covered_mask,
        L2Entry::Compressed(_) => covered_mask == 0,
    };
    assert!(
        is_discard || format.version < 3 || says_zero,
        "{what} does nothing"
    );
    if gives_up(request) && whole && unref == Unref::Free && hides {
        let space = space_of(&format, &view.entry);
        assert_eq!(space, None, "{what} keeps the space");
    }
}

fn check_change(
    world: &World<'_>,
    view: &View,
    bytes: &Range<u64>,
    (request, unref): (EntryRequest, Unref),
) {
    let format = world.format;
    let before = world.read(&view.entry);
    let (covered_mask, covered) = world.covered(bytes);
    let whole = *bytes == (0..CLUSTER);
    let is_part_of_compressed = matches!(view.entry, L2Entry::Compressed(_)) && !whole;
    let what = format!("{request:?} of {bytes:?} in {view:?}, {unref:?}");
    let (new, freed) = match change_entry(&format, view, bytes, (request, unref)) {
        EntryChange::None => {
            assert_nothing_was_needed(world, (view, bytes), (request, unref), &what);
            return;
        }
        EntryChange::Write => {
            assert!(request != EntryRequest::Discard, "{what} writes");
            let into_data = request == EntryRequest::ZeroUnwritten
                && match view.entry {
                    L2Entry::Standard(old) => old.allocated & covered_mask != 0,
                    L2Entry::Compressed(_) => true,
                };
            let inexpressible = format.version < 3 || is_part_of_compressed;
            assert!(
                !covered.is_empty() && (inexpressible || into_data),
                "{what} writes"
            );
            return;
        }
        EntryChange::Set(entry, freed) => (entry, freed),
    };
    assert_encodable(&format, &new);
    assert_ne!(new, view.entry, "{what} writes what is there");
    if let (EntryRequest::Discard, L2Entry::Standard(old)) = (request, &view.entry) {
        let hides = view.below_end > 0 && old.zeroes & covered_mask != covered_mask;
        let is_empty_space = whole && old.host.is_some();
        let needed = old.allocated & covered_mask != 0 || hides || is_empty_space;
        assert!(needed, "{what} changes an entry for nothing");
    }
    if let (EntryRequest::ZeroUnwritten, L2Entry::Standard(old)) = (request, &view.entry) {
        assert_eq!(old.allocated & covered_mask, 0, "{what} loses data");
    }
    let mut expected = before;
    for sub in &covered {
        expected[sub.start as usize..sub.end as usize].fill(0);
    }
    assert!(world.read(&new) == expected, "{what}: {new:?}");
    let L2Entry::Standard(new) = new else {
        panic!("{what} is compressed")
    };
    let kept = match view.entry {
        L2Entry::Standard(old) => {
            let emptied = old.allocated != 0 && old.allocated & !covered_mask == 0;
            let goes = whole || (emptied && !format.data_file);
            let is_kept = unref == Unref::Keep || (view.is_filled && !whole);
            let stays = is_kept && format.version >= 3;
            Some(old).filter(|_| !(goes && gives_up(request) && !stays))
        }
        L2Entry::Compressed(_) => None,
    };
    assert_eq!(new.host, kept.and_then(|old| old.host), "{what}");
    let freed_space = match kept {
        None => space_of(&format, &view.entry),
        Some(old) => {
            assert_eq!(new.copied, old.copied);
            let own = old.host.filter(|_| old.copied && !format.data_file);
            own.filter(|_| gives_up(request))
                .map(|host| Freed::Subclusters(host, old.allocated & covered_mask))
        }
    };
    assert_eq!(freed, freed_space, "{what}");
}

#[test]
fn entry_changes_zero_what_they_cover_and_nothing_else() {
    let patterns = Patterns::new();
    for format in formats() {
        let ranges = ranges(&format);
        for view in views(&format) {
            let world = World::new(&patterns, format, &view, None);
            for bytes in &ranges {
                for request in [
                    EntryRequest::Zero,
                    EntryRequest::ZeroAndUnmap,
                    EntryRequest::ZeroUnwritten,
                    EntryRequest::Discard,
                ] {
                    check_change(&world, &view, bytes, (request, Unref::Free));
                    check_change(&world, &view, bytes, (request, Unref::Keep));
                    if view.joined.is_some() {
                        let filled = View {
                            is_filled: true,
                            ..view.clone()
                        };
                        check_change(&world, &filled, bytes, (request, Unref::Free));
                    }
                }
            }
        }
    }
}

/// Flags go where the image has nothing, and nothing else changes.
#[test]
fn flags_are_set_on_what_is_absent_alone() {
    for format in formats() {
        for view in views(&format) {
            for bytes in &ranges(&format) {
                let ask = (EntryRequest::Flag, Unref::Free);
                let within = format.geometry.subclusters_within(bytes);
                let old = match view.entry {
                    L2Entry::Standard(old) => Some(old),
                    L2Entry::Compressed(_) => None,
                };
                let absent = old.map_or(0, |old| within & !(old.allocated | old.zeroes));
                let expected = match old.filter(|_| absent != 0 && format.version >= 3) {
                    None => EntryChange::None,
                    Some(old) => {
                        let zeroes = old.zeroes | absent;
                        EntryChange::Set(L2Entry::Standard(Standard { zeroes, ..old }), None)
                    }
                };
                let change = change_entry(&format, &view, bytes, ask);
                assert_eq!(change, expected, "{view:?} {bytes:?}");
            }
        }
    }
}

/// Preallocation gives a cluster space without changing what the guest reads.
#[test]
fn preallocated_clusters_read_as_before() {
    let patterns = Patterns::new();
    for format in formats() {
        let mut views = views(&format);
        views.retain(|view| view.joined.is_none());
        for view in views {
            for (is_filled, size) in [(false, START), (false, START + 1), (true, START)] {
                let view = View {
                    is_filled,
                    ..view.clone()
                };
                check_preallocated(&patterns, format, &view, size);
            }
        }
    }
}

fn check_preallocated(patterns: &Patterns, format: EntryFormat, view: &View, size: u64) {
    let what = format!("{view:?} in a disk of {size} bytes, {format:?}");
    // Space comes as zeroes; what a data file holds where the disk is may be anything.
    let all = format.geometry.all_subclusters();
    let (host, fresh) = match (format.data_file, view.start >= size) {
        (true, true) => (HostOffset(START), all),
        (true, false) => (HostOffset(START), 0),
        (false, _) => (TAKEN, all),
    };
    let world = World::new(patterns, format, view, Some(Space { host, fresh }));
    let has_space = match view.entry {
        L2Entry::Standard(entry) => entry.host.is_some() || view.is_filled,
        L2Entry::Compressed(_) => true,
    };
    match preallocated(&format, view, size) {
        Preallocated::Nothing => assert!(has_space, "{what}"),
        Preallocated::Write => {
            assert!(!has_space && !format.geometry.extended_l2(), "{what}");
            let is_last = format.data_file && ends_in(&format, view, size);
            assert!(view.below_end > 0 || is_last, "{what}");
            let reads_as_zero = matches!(view.entry, L2Entry::Standard(entry) if entry.zeroes != 0);
            assert!(!reads_as_zero, "{what}");
        }
        Preallocated::Entry(new) => {
            assert!(!has_space, "{what}");
            let new = L2Entry::Standard(Standard {
                host: Some(host),
                copied: true,
                ..new
            });
            assert_encodable(&format, &new);
            assert!(
                world.read(&new) == world.read(&view.entry),
                "{what}: {new:?}"
            );
        }
    }
}

#[test]
fn holes_are_whole_blocks_of_data_that_nobody_else_has() {
    let format = |extended| EntryFormat {
        geometry: Geometry::new(18, 4, extended).expect("a geometry"),
        version: 3,
        data_file: false,
    };
    let hole_in = |extended, entry, bytes: Range<u64>| {
        let view = View {
            start: START,
            entry,
            joined: None,
            is_filled: false,
            below_end: 0,
        };
        hole(&format(extended), &view, &bytes)
    };
    let data = |allocated, copied| {
        L2Entry::Standard(Standard {
            host: Some(OLD),
            copied,
            allocated,
            zeroes: 0,
        })
    };
    let own = data(1, true);
    assert_eq!(hole_in(false, own, 4096..8192), Some((OLD, 4096..8192)));
    assert_eq!(hole_in(false, own, 1..12289), Some((OLD, 4096..12288)));
    assert_eq!(hole_in(false, own, 1..8191), None);
    assert_eq!(hole_in(false, own, 4097..8191), None);
    assert_eq!(hole_in(false, data(1, false), 4096..8192), None);
    assert_eq!(hole_in(false, data(0, true), 4096..8192), None);
    assert_eq!(hole_in(false, L2Entry::Compressed(PLACE), 0..4096), None);
    // Subclusters of 8 KiB, of which only the second one has data.
    let second = data(2, true);
    assert_eq!(hole_in(true, second, 8191..12300), Some((OLD, 8192..12288)));
    assert_eq!(hole_in(true, second, 4096..8192), None);
    assert_eq!(hole_in(true, second, 4096..12288), None);
}
