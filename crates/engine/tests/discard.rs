//! Discards, and the space that the host gets back: holes in mapped clusters, their order relative
//! to concurrent writes, and how policies differ.

use std::future::Future;
use std::io;
use std::ops::Range;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};

use crate::support::{block_on, write};
use cowslip::file::host::NoFiles;
use cowslip::file::memory::MemoryFile;
use cowslip::file::{BlockFile, Space};
use cowslip::image::{AllocPolicy, DiscardPolicy, Extent, OpenOptions, ZeroOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::qcow2::header::Header;
use cowslip::{BufMut, Image};
use cowslip_queue::{Completer, Pending, pending};

/// A call that concerns the space of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Call {
    Allocate(Range<u64>),
    Discard(Range<u64>),
    Flush,
    SetLen(u64),
}

/// A discard that waits.
type Held = (u64, u64, Completer<io::Result<()>>);

/// A file in memory that records the use of its space, and on which discards may take long.
struct Watched {
    memory: MemoryFile,
    calls: Mutex<Vec<Call>>,
    holds_discards: AtomicBool,
    held: Mutex<Vec<Held>>,
}

cowslip_block::debug_by_name!(Watched);

impl Watched {
    fn note(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }

    /// Returns the calls since the last time, and forgets them.
    fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }

    fn take_discards(&self) -> Vec<Range<u64>> {
        let calls = self.take_calls().into_iter();
        let discards = calls.filter_map(|call| match call {
            Call::Discard(range) => Some(range),
            Call::Allocate(_) | Call::Flush | Call::SetLen(_) => None,
        });
        discards.collect()
    }

    /// The only one.
    fn take_discard(&self) -> Range<u64> {
        let [discard] = &self.take_discards()[..] else {
            panic!("one discard is expected");
        };
        discard.clone()
    }

    fn let_go(&self) {
        self.holds_discards.store(false, Ordering::Relaxed);
        for (offset, len, completer) in self.held.lock().unwrap().drain(..) {
            completer.complete(block_on(self.memory.discard(offset, len)));
        }
    }
}

impl BlockFile for Watched {
    cowslip_block::forward_to_file!(memory: name, capabilities, len, read, write, zero, extents, allocated_bytes);

    fn discard(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.note(Call::Discard(offset..offset + len));
        if !self.holds_discards.load(Ordering::Relaxed) {
            return self.memory.discard(offset, len);
        }
        let (completer, result) = pending();
        self.held.lock().unwrap().push((offset, len, completer));
        result
    }
    fn allocate(&self, offset: u64, len: u64) -> Pending<io::Result<()>> {
        self.note(Call::Allocate(offset..offset + len));
        self.memory.allocate(offset, len)
    }
    fn flush(&self) -> Pending<io::Result<()>> {
        self.note(Call::Flush);
        self.memory.flush()
    }
    fn set_len(&self, len: u64) -> Pending<io::Result<()>> {
        self.note(Call::SetLen(len));
        self.memory.set_len(len)
    }
}

const CLUSTER: u64 = 64 << 10;
const KIB: u64 = 1 << 10;

fn watched(options: &CreateOptions) -> Arc<Watched> {
    let file = Arc::new(Watched {
        memory: MemoryFile::new("a.qcow2", Vec::new(), 1),
        calls: Mutex::default(),
        holds_discards: AtomicBool::new(false),
        held: Mutex::default(),
    });
    block_on(create(file.clone(), None, options)).unwrap();
    file.take_calls();
    file
}

fn open(file: &Arc<Watched>, options: OpenOptions) -> Image {
    let options = OpenOptions {
        writable: true,
        discard: DiscardPolicy::Unmap,
        ..options
    };
    block_on(Image::open(file.clone(), options, &NoFiles)).unwrap()
}

/// A disk of 4 MiB with subclusters of 2 KiB, whose first cluster is written and durable.
fn disk(options: OpenOptions) -> (Arc<Watched>, Image) {
    let create_options = CreateOptions {
        extended_l2: true,
        ..CreateOptions::new(4 << 20)
    };
    let file = watched(&create_options);
    let image = open(&file, options);
    block_on(write(&image, 0, CLUSTER, 0xaa)).unwrap();
    block_on(image.flush()).unwrap();
    file.take_calls();
    (file, image)
}

fn policy(alloc_policy: AllocPolicy) -> OpenOptions {
    OpenOptions {
        alloc_policy,
        ..OpenOptions::default()
    }
}

fn read(image: &Image, offset: u64, len: u64) -> Vec<u8> {
    let buf = block_on(image.read(offset, BufMut::zeroed(len as usize)));
    buf.unwrap().to_vec()
}

/// The first cluster: 0xaa but for these ranges.
fn expect(image: &Image, others: &[(Range<u64>, u8)]) {
    let mut expected = vec![0xaa; CLUSTER as usize];
    for (range, byte) in others {
        expected[range.start as usize..range.end as usize].fill(*byte);
    }
    assert!(read(image, 0, CLUSTER) == expected, "{others:?}");
}

fn first_extent(image: &Image) -> Extent {
    block_on(image.extents(0, 4 << 20, 1)).unwrap()[0]
}

fn host_of_first_cluster(image: &Image) -> u64 {
    first_extent(image).host_offset.unwrap()
}

fn is_sound(file: &Watched) {
    let bytes = file.memory.contents();
    let checked = crate::support::our_check(bytes, &mut Vec::new()).unwrap();
    assert_eq!((checked.corruptions, checked.leaks), (0, 0));
}

#[test]
fn a_sparse_image_gives_subclusters_back_once_their_clearing_is_durable() {
    let (file, image) = disk(policy(AllocPolicy::Sparse));
    let host = host_of_first_cluster(&image);
    block_on(image.discard(4 * KIB, 4 * KIB)).unwrap();
    expect(&image, &[(4 * KIB..8 * KIB, 0)]);
    assert_eq!(file.take_calls(), []);
    block_on(image.flush()).unwrap();
    let calls = file.take_calls();
    let hole = Call::Discard(host + 4 * KIB..host + 8 * KIB);
    assert_eq!(calls.last(), Some(&hole), "{calls:?}");
    assert!(calls.contains(&Call::Flush));
    // The hole is known to be zeroes: nothing is filled.
    block_on(write(&image, 5 * KIB, 512, 0xbb)).unwrap();
    expect(
        &image,
        &[(4 * KIB..8 * KIB, 0), (5 * KIB..5 * KIB + 512, 0xbb)],
    );
    block_on(image.close()).unwrap();
    is_sound(&file);
}

#[test]
fn a_contiguous_image_keeps_the_space_of_subclusters() {
    let (file, image) = disk(policy(AllocPolicy::Contiguous));
    block_on(image.discard(4 * KIB, 4 * KIB)).unwrap();
    block_on(image.flush()).unwrap();
    expect(&image, &[(4 * KIB..8 * KIB, 0)]);
    assert_eq!(file.take_discards(), []);
    block_on(image.close()).unwrap();
    is_sound(&file);
}

#[test]
fn parts_of_subclusters_stay() {
    let (file, image) = disk(policy(AllocPolicy::Sparse));
    let host = host_of_first_cluster(&image);
    block_on(image.discard(3 * KIB, 4 * KIB)).unwrap();
    block_on(image.flush()).unwrap();
    expect(&image, &[(4 * KIB..6 * KIB, 0)]);
    assert_eq!(file.take_discard(), host + 4 * KIB..host + 6 * KIB);
}

#[test]
fn a_write_before_the_flush_calls_the_hole_off() {
    let (file, image) = disk(policy(AllocPolicy::Sparse));
    let host = host_of_first_cluster(&image);
    block_on(image.discard(4 * KIB, 4 * KIB)).unwrap();
    block_on(write(&image, 4 * KIB, 512, 0xbb)).unwrap();
    block_on(image.flush()).unwrap();
    assert_eq!(file.take_discard(), host + 6 * KIB..host + 8 * KIB);
    expect(
        &image,
        &[(4 * KIB..8 * KIB, 0), (4 * KIB..4 * KIB + 512, 0xbb)],
    );
}

#[test]
fn a_write_waits_for_the_hole_that_it_would_fill_and_for_no_other() {
    let (file, image) = disk(policy(AllocPolicy::Sparse));
    block_on(image.discard(4 * KIB, 4 * KIB)).unwrap();
    file.holds_discards.store(true, Ordering::Relaxed);
    let mut flush = pin!(image.flush());
    let mut context = Context::from_waker(Waker::noop());
    assert!(flush.as_mut().poll(&mut context).is_pending());
    let mut filling = pin!(write(&image, 4 * KIB, 512, 0xbb));
    assert!(filling.as_mut().poll(&mut context).is_pending());
    let mut beside = pin!(write(&image, 8 * KIB, 512, 0xcc));
    assert!(beside.as_mut().poll(&mut context).is_ready());
    assert!(filling.as_mut().poll(&mut context).is_pending());
    file.let_go();
    block_on(flush).unwrap();
    block_on(filling).unwrap();
    let others = [
        (4 * KIB..8 * KIB, 0),
        (4 * KIB..4 * KIB + 512, 0xbb),
        (8 * KIB..8 * KIB + 512, 0xcc),
    ];
    expect(&image, &others);
    block_on(image.close()).unwrap();
    is_sound(&file);
}

/// A disk of plain clusters, whose first one is written and durable.
fn plain_disk(options: OpenOptions) -> (Arc<Watched>, Image) {
    let file = watched(&CreateOptions::new(4 << 20));
    let image = open(&file, options);
    block_on(write(&image, 0, CLUSTER, 0xaa)).unwrap();
    block_on(image.flush()).unwrap();
    file.take_calls();
    (file, image)
}

#[test]
fn a_part_of_a_plain_cluster_gives_its_blocks_back_at_once() {
    let (file, image) = plain_disk(policy(AllocPolicy::Sparse));
    let host = host_of_first_cluster(&image);
    // From the middle of a block of the host to the middle of another.
    block_on(image.discard(6 * KIB, 12 * KIB)).unwrap();
    assert_eq!(file.take_discard(), host + 8 * KIB..host + 16 * KIB);
    expect(&image, &[(8 * KIB..16 * KIB, 0)]);
    assert_eq!(host_of_first_cluster(&image), host);
    // The next flush is one of the file, too.
    block_on(image.flush()).unwrap();
    assert!(file.take_calls().contains(&Call::Flush));
    block_on(image.discard(6 * KIB, KIB)).unwrap();
    assert_eq!(file.take_discards(), []);
    // From one cluster, which has no space, to the end of the first.
    block_on(image.discard(CLUSTER - 4 * KIB, 8 * KIB)).unwrap();
    let end = host + CLUSTER;
    assert_eq!(file.take_discard(), end - 4 * KIB..end);
    block_on(image.close()).unwrap();
    is_sound(&file);
}

/// Also in clusters behind the first; discarding all of one waits for the part.
#[test]
fn blocks_of_any_plain_cluster_are_given_back() {
    const START: u64 = 3 * CLUSTER;
    let (file, image) = plain_disk(policy(AllocPolicy::Sparse));
    block_on(write(&image, START, CLUSTER, 0xaa)).unwrap();
    let extents = block_on(image.extents(START, CLUSTER, 1)).unwrap();
    let host = extents[0].host_offset.unwrap();
    file.take_calls();
    file.holds_discards.store(true, Ordering::Relaxed);
    let mut part = pin!(image.discard(START + 8 * KIB, 8 * KIB));
    let mut context = Context::from_waker(Waker::noop());
    assert!(part.as_mut().poll(&mut context).is_pending());
    assert_eq!(file.take_discard(), host + 8 * KIB..host + 16 * KIB);
    let mut whole = pin!(image.discard(START, CLUSTER));
    assert!(whole.as_mut().poll(&mut context).is_pending());
    file.let_go();
    block_on(part).unwrap();
    block_on(whole).unwrap();
    assert_eq!(read(&image, START, CLUSTER), vec![0; CLUSTER as usize]);
    block_on(image.close()).unwrap();
    is_sound(&file);
}

#[test]
fn a_contiguous_image_keeps_the_blocks_of_plain_clusters() {
    let (file, image) = plain_disk(policy(AllocPolicy::Contiguous));
    block_on(image.discard(4 * KIB, 4 * KIB)).unwrap();
    assert_eq!(file.take_discards(), []);
    expect(&image, &[]);
}

#[test]
fn a_cluster_with_a_hole_under_way_is_not_taken_by_another() {
    let (file, image) = plain_disk(policy(AllocPolicy::Sparse));
    let host = host_of_first_cluster(&image);
    file.holds_discards.store(true, Ordering::Relaxed);
    let mut part = pin!(image.discard(4 * KIB, 4 * KIB));
    let mut context = Context::from_waker(Waker::noop());
    assert!(part.as_mut().poll(&mut context).is_pending());
    // Discarding all of it waits for the part.
    let mut whole = pin!(image.discard(0, CLUSTER));
    assert!(whole.as_mut().poll(&mut context).is_pending());
    file.let_go();
    block_on(part).unwrap();
    block_on(whole).unwrap();
    block_on(image.flush()).unwrap();
    block_on(image.flush()).unwrap();
    assert_eq!(file.take_discards().last(), Some(&(host..host + CLUSTER)));
    assert_eq!(read(&image, 0, CLUSTER), vec![0; CLUSTER as usize]);
    block_on(image.close()).unwrap();
    is_sound(&file);
}

#[test]
fn a_cluster_that_is_discarded_in_pieces_is_freed() {
    for alloc_policy in [AllocPolicy::Sparse, AllocPolicy::Contiguous] {
        let (file, image) = disk(policy(alloc_policy));
        let host = host_of_first_cluster(&image);
        for piece in 0..4 {
            block_on(image.discard(piece * CLUSTER / 4, CLUSTER / 4)).unwrap();
        }
        assert_eq!(first_extent(&image).host_offset, None);
        block_on(image.flush()).unwrap();
        block_on(image.flush()).unwrap();
        let discards = file.take_discards();
        assert_eq!(discards.last(), Some(&(host..host + CLUSTER)));
        assert_eq!(read(&image, 0, CLUSTER), vec![0; CLUSTER as usize]);
        block_on(image.close()).unwrap();
        is_sound(&file);
    }
}

#[test]
fn zeroes_that_may_unmap_give_subclusters_back_too() {
    let (file, image) = disk(policy(AllocPolicy::Sparse));
    let host = host_of_first_cluster(&image);
    for may_unmap in [false, true] {
        let options = ZeroOptions {
            space: Space::of_unmap(may_unmap),
            ..ZeroOptions::default()
        };
        let start = if may_unmap { 8 * KIB } else { 16 * KIB };
        block_on(image.write_zeroes(start, 8 * KIB, options)).unwrap();
        block_on(image.flush()).unwrap();
    }
    expect(&image, &[(8 * KIB..24 * KIB, 0)]);
    assert_eq!(file.take_discard(), host + 8 * KIB..host + 16 * KIB);
}

#[test]
fn without_unref_a_discarded_cluster_keeps_its_place() {
    for extended_l2 in [false, true] {
        let create_options = CreateOptions {
            extended_l2,
            ..CreateOptions::new(4 << 20)
        };
        let file = watched(&create_options);
        let options = OpenOptions {
            discard_no_unref: true,
            ..OpenOptions::default()
        };
        let image = open(&file, options);
        block_on(write(&image, 0, CLUSTER, 0xaa)).unwrap();
        block_on(image.flush()).unwrap();
        let host = host_of_first_cluster(&image);
        file.take_calls();
        block_on(image.discard(0, CLUSTER)).unwrap();
        block_on(image.flush()).unwrap();
        assert_eq!(file.take_discard(), host..host + CLUSTER);
        assert_eq!(read(&image, 0, CLUSTER), vec![0; CLUSTER as usize]);
        block_on(write(&image, 512, 512, 0xbb)).unwrap();
        assert_eq!(host_of_first_cluster(&image), host);
        let mut expected = vec![0; CLUSTER as usize];
        expected[512..1024].fill(0xbb);
        assert!(read(&image, 0, CLUSTER) == expected);
        // Shrinking frees all the same.
        block_on(image.resize(0)).unwrap();
        block_on(image.close()).unwrap();
        is_sound(&file);
        assert!(file.memory.contents().len() as u64 <= host + CLUSTER);
    }
}

#[test]
fn the_space_of_tables_is_allocated_before_a_flush_depends_on_it() {
    for alloc_policy in [AllocPolicy::Sparse, AllocPolicy::Contiguous] {
        let file = watched(&CreateOptions::new(4 << 20));
        let image = open(&file, policy(alloc_policy));
        block_on(write(&image, 0, 512, 0xaa)).unwrap();
        let calls = file.take_calls();
        let allocations: Vec<_> = calls
            .iter()
            .filter(
                |call| matches!(call, Call::Allocate(range) if range.end - range.start == CLUSTER),
            )
            .collect();
        assert_eq!(allocations.len(), 1, "{calls:?}");
    }
}

#[test]
fn a_sparse_image_never_allocates_ahead() {
    for (stored, asked, sparse) in [
        (AllocPolicy::Sparse, AllocPolicy::Auto, true),
        (AllocPolicy::Contiguous, AllocPolicy::Sparse, true),
        (AllocPolicy::Sparse, AllocPolicy::Contiguous, false),
        (AllocPolicy::Auto, AllocPolicy::Auto, false),
    ] {
        let create_options = CreateOptions {
            alloc_policy: stored,
            ..CreateOptions::new(64 << 20)
        };
        let file = watched(&create_options);
        let image = open(&file, policy(asked));
        for cluster in 0..64 {
            block_on(write(&image, cluster * CLUSTER, 512, 0xaa)).unwrap();
        }
        let allocated = file.take_calls().into_iter().filter_map(|call| match call {
            Call::Allocate(range) => Some(range.end - range.start),
            Call::Discard(_) | Call::Flush | Call::SetLen(_) => None,
        });
        let most = allocated.max().unwrap();
        assert_eq!(most <= CLUSTER, sparse, "{stored:?} {asked:?}: {most}");
        block_on(image.close()).unwrap();
        is_sound(&file);
    }
}

/// The count of closes that stands in the image, and whether the close trimmed.
fn session(file: &Arc<Watched>, first_cluster: u64) -> (u8, bool) {
    let image = open(file, OpenOptions::default());
    for cluster in first_cluster..first_cluster + 40 {
        block_on(write(&image, cluster * CLUSTER, CLUSTER, 0xaa)).unwrap();
    }
    block_on(image.flush()).unwrap();
    let before = file.memory.contents().len();
    block_on(image.close()).unwrap();
    is_sound(file);
    let bytes = file.memory.contents();
    let header = Header::parse(&bytes, bytes.len() as u64, "a.qcow2").unwrap();
    let hint = header.extensions.allocation.unwrap();
    (hint.closes_ahead, bytes.len() < before)
}

#[test]
fn an_image_that_is_closed_again_and_again_keeps_its_space_ahead() {
    let create_options = CreateOptions {
        alloc_policy: AllocPolicy::Contiguous,
        ..CreateOptions::new(64 << 20)
    };
    let file = watched(&create_options);
    assert_eq!(session(&file, 0), (1, true));
    assert_eq!(session(&file, 40), (2, true));
    assert_eq!(session(&file, 80), (2, false));
    // A shrink ends that.
    let image = open(&file, OpenOptions::default());
    block_on(image.resize(32 << 20)).unwrap();
    block_on(image.close()).unwrap();
    let bytes = file.memory.contents();
    let header = Header::parse(&bytes, bytes.len() as u64, "a.qcow2").unwrap();
    assert_eq!(header.extensions.allocation.unwrap().closes_ahead, 0);
}
