//! How much space an image takes: under discards that come and go, and for writes of zeroes.

use std::sync::Arc;

use crate::support::block_on;
use crate::support::crash::{Op, Recorder};
use cowslip::file::host::NoFiles;
use cowslip::file::memory::MemoryFile;
use cowslip::image::{
    AllocPolicy, DetectZeroes, DiscardPolicy, Durability, OpenOptions, ZeroMethod,
};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, BufMut, Image};
use cowslip_block::random::Random;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn new_image(options: &CreateOptions) -> Arc<MemoryFile> {
    let file = Arc::new(MemoryFile::new("a.qcow2", Vec::new(), 1));
    block_on(create(file.clone(), None, options)).unwrap();
    file
}

fn try_open(file: &Arc<MemoryFile>, options: OpenOptions) -> cowslip::Result<Image> {
    let options = OpenOptions {
        writable: true,
        ..options
    };
    block_on(Image::open(file.clone(), options, &NoFiles))
}

fn discards() -> OpenOptions {
    OpenOptions {
        discard: DiscardPolicy::Unmap,
        ..OpenOptions::default()
    }
}

fn write(image: &Image, offset: u64, len: u64, byte: u8) {
    let data = Buf::copy_of(&vec![byte; len as usize]);
    block_on(image.write(offset, data, Durability::Cached)).unwrap();
}

/// Bytes of blocks of the host that are not all zero: what a file with holes would occupy.
fn occupied(file: &MemoryFile) -> u64 {
    let contents = file.contents();
    let blocks = contents.chunks(4096);
    blocks.filter(|block| block.iter().any(|&b| b != 0)).count() as u64 * 4096
}

/// Whatever the guest writes and discards, at any offsets: freed space is reused, so
/// the file stays within the disk and its metadata.
#[test]
fn an_image_under_discard_does_not_outgrow_its_disk() {
    const DISK: u64 = 16 * MIB;
    for (cluster_size, extended_l2) in [(4 * KIB, false), (64 * KIB, false), (64 * KIB, true)] {
        for alloc_policy in [AllocPolicy::Sparse, AllocPolicy::Contiguous] {
            let file = new_image(&CreateOptions {
                cluster_size,
                extended_l2,
                ..CreateOptions::new(DISK)
            });
            let options = OpenOptions {
                discard: DiscardPolicy::Unmap,
                alloc_policy,
                ..OpenOptions::default()
            };
            let image = try_open(&file, options).unwrap();
            let mut random = Random(1);
            let piece = 64 * KIB;
            for round in 0..6 {
                for _ in 0..200 {
                    let at = random.below(DISK / piece) * piece;
                    write(&image, at, piece, 1 + round);
                }
                for _ in 0..300 {
                    let at = random.below(DISK / piece) * piece;
                    block_on(image.discard(at, piece)).unwrap();
                }
                block_on(image.flush()).unwrap();
            }
            block_on(image.close()).unwrap();
            // Header, L1 and refcounts take a few clusters; tables one for what they map.
            let entry = if extended_l2 { 16 } else { 8 };
            let tables = DISK / cluster_size * entry + 8 * cluster_size;
            let len = file.contents().len() as u64;
            assert!(
                len <= DISK + tables,
                "clusters of {cluster_size}, {alloc_policy:?}: {len} bytes"
            );
        }
    }
}

/// 30 % of the disk is written, half of that discarded in pieces smaller than a cluster: a
/// sparse image takes only the space of live data.
#[test]
fn a_sparse_image_takes_what_is_live() {
    const DISK: u64 = 128 * MIB;
    let piece = 64 * KIB;
    let file = new_image(&CreateOptions {
        cluster_size: MIB,
        extended_l2: true,
        ..CreateOptions::new(DISK)
    });
    let options = OpenOptions {
        discard: DiscardPolicy::Unmap,
        alloc_policy: AllocPolicy::Sparse,
        ..OpenOptions::default()
    };
    let image = try_open(&file, options).unwrap();
    let mut random = Random(7);
    let mut live = vec![false; (DISK / piece) as usize];
    while live.iter().filter(|&&is| is).count() * 10 < live.len() * 3 {
        let at = random.below(DISK / piece);
        write(&image, at * piece, piece, 0xaa);
        live[at as usize] = true;
    }
    let written: Vec<usize> = (0..live.len()).filter(|&at| live[at]).collect();
    for at in written {
        if random.next().is_multiple_of(2) {
            block_on(image.discard(at as u64 * piece, piece)).unwrap();
            live[at] = false;
        }
    }
    block_on(image.close()).unwrap();
    let live = live.iter().filter(|&&is| is).count() as u64 * piece;
    let taken = occupied(&file);
    // Tables and counts take some blocks.
    assert!(
        (live..=live * 105 / 100).contains(&taken),
        "{taken} bytes for {live}"
    );
}

#[test]
fn writes_of_zeroes_take_no_space_where_they_are_detected() {
    use DetectZeroes::{Off, On, Unmap};
    for (detect_zeroes, discard, takes, keeps) in [
        (Off, DiscardPolicy::Unmap, true, true),
        (On, DiscardPolicy::Ignore, false, true),
        (Unmap, DiscardPolicy::Unmap, false, false),
    ] {
        let file = new_image(&CreateOptions::new(4 * MIB));
        let options = || OpenOptions {
            detect_zeroes,
            discard,
            ..OpenOptions::default()
        };
        let image = try_open(&file, options()).unwrap();
        let host = |image: &Image, at| {
            let extents = block_on(image.extents(at, 64 * KIB, 1)).unwrap();
            (extents[0].zero, extents[0].host_offset.is_some())
        };
        // Where nothing was.
        write(&image, MIB, 64 * KIB, 0);
        assert_eq!(host(&image, MIB).1, takes, "{detect_zeroes:?}");
        // Where data was.
        write(&image, 0, 64 * KIB, 0xaa);
        write(&image, 0, 64 * KIB, 0);
        assert_eq!(host(&image, 0), (!takes, keeps), "{detect_zeroes:?}");
        // One byte makes it data.
        let mut data = BufMut::zeroed(64 << 10);
        data[65535] = 1;
        block_on(image.write(2 * MIB, data.freeze(), Durability::Cached)).unwrap();
        assert_eq!(host(&image, 2 * MIB), (false, true));
        let read = block_on(image.read(0, BufMut::zeroed(4 << 20))).unwrap();
        let set = read.iter().filter(|&&byte| byte != 0).count();
        assert_eq!((set, read[(2 << 20) + 65535]), (1, 1));
        block_on(image.close()).unwrap();
    }
}

/// Free space that holds old bytes: none of them shows beside a small write, whichever way it is
/// zeroed.
#[test]
fn old_bytes_in_free_space_never_show() {
    for zero_method in ["auto", "fresh", "zero-range", "write"] {
        for (alloc_policy, cluster_size) in [
            (AllocPolicy::Contiguous, 256 * KIB),
            (AllocPolicy::Sparse, 256 * KIB),
            (AllocPolicy::Contiguous, 64 * KIB),
            (AllocPolicy::Sparse, 2 * KIB),
        ] {
            let file = new_image(&CreateOptions {
                cluster_size,
                ..CreateOptions::new(4 * MIB)
            });
            let image = try_open(&file, discards()).unwrap();
            write(&image, 0, MIB, 0xee);
            // Behind it, so that what is freed stays within the file.
            write(&image, 3 * MIB, 256 * KIB, 0xcc);
            block_on(image.flush()).unwrap();
            let before = file.contents();
            block_on(image.discard(0, MIB)).unwrap();
            block_on(image.close()).unwrap();
            // The holes get their old bytes back, as where a host cannot punch.
            let mut bytes = file.contents();
            let old = before.chunks(512).zip(bytes.chunks_mut(512));
            let old: Vec<_> = old
                .filter(|(was, _)| was.iter().all(|&b| b == 0xee))
                .collect();
            assert_eq!(old.len() as u64, MIB / 512);
            old.into_iter()
                .for_each(|(was, is)| is.copy_from_slice(was));
            let file = Arc::new(MemoryFile::new("a.qcow2", bytes, 1));
            let options = OpenOptions {
                zero_method: ZeroMethod::from_name(zero_method).unwrap(),
                alloc_policy,
                ..discards()
            };
            let image = try_open(&file, options).unwrap();
            let mut expected = vec![0; MIB as usize];
            for at in [5000, 70_000, 300_000, 700_001] {
                write(&image, at, 600, 0xbb);
                expected[at as usize..][..600].fill(0xbb);
            }
            let read = |image: &Image| block_on(image.read(0, BufMut::zeroed(1 << 20))).unwrap();
            assert!(
                read(&image)[..] == expected[..],
                "{zero_method}, {alloc_policy:?}"
            );
            block_on(image.close()).unwrap();
            let image = try_open(&file, OpenOptions::default()).unwrap();
            assert!(
                read(&image)[..] == expected[..],
                "{zero_method}, {alloc_policy:?}"
            );
        }
    }
}

/// Space that an earlier session has released is written like space at the end of the file: without
/// zeroes around the guest's bytes. Where the host has data, zeroes are written.
#[test]
fn free_space_that_is_a_hole_reads_as_zeroes_in_the_next_session() {
    let file = new_image(&CreateOptions::new(4 * MIB));
    let image = try_open(&file, discards()).unwrap();
    write(&image, 0, MIB, 0xee);
    // Behind it, so that what is freed stays within the file.
    write(&image, 3 * MIB, 64 * KIB, 0xcc);
    block_on(image.discard(0, MIB)).unwrap();
    block_on(image.close()).unwrap();
    let punched = file.contents();
    let free = (0..punched.len() as u64 / (64 * KIB))
        .map(|cluster| (cluster * 64 * KIB) as usize)
        .filter(|&at| at > 0 && punched[at..][..64 << 10].iter().all(|&byte| byte == 0))
        .max()
        .expect("clusters were freed");
    // One of them is no hole to the last byte.
    let mut touched = punched.clone();
    touched[free + 65535] = 0xee;
    for (bytes, clusters_written) in [(punched, 0), (touched, 1)] {
        let file = Recorder::new(bytes);
        let options = OpenOptions {
            writable: true,
            ..OpenOptions::default()
        };
        let image = block_on(Image::open(file.clone(), options, &NoFiles)).unwrap();
        let mut expected = vec![0; MIB as usize];
        for cluster in 0..MIB / (64 * KIB) {
            let at = cluster * 64 * KIB + 8 * KIB;
            write(&image, at, 4 * KIB, 0xbb);
            expected[at as usize..][..4 << 10].fill(0xbb);
        }
        let read = block_on(image.read(0, BufMut::zeroed(1 << 20))).unwrap();
        assert!(read[..] == expected[..]);
        let with_guest_bytes = |op: &Op| match op {
            Op::Write(_, data) if data.contains(&0xbb) => Some(data.len() as u64),
            _ => None,
        };
        let written: u64 = file.ops().iter().filter_map(with_guest_bytes).sum();
        let small = 16 - clusters_written;
        assert_eq!(written, small * 4 * KIB + clusters_written * 64 * KIB);
        block_on(image.close()).unwrap();
    }
}

#[test]
fn zeroes_are_unmapped_only_where_discards_are() {
    let file = new_image(&CreateOptions::new(MIB));
    let options = OpenOptions {
        detect_zeroes: DetectZeroes::Unmap,
        ..OpenOptions::default()
    };
    let refused = try_open(&file, options).unwrap_err().to_string();
    assert!(
        refused.contains("setting detect-zeroes to unmap is not allowed"),
        "{refused}"
    );
}

/// Space ahead that the guest can never need is taken from others.
#[test]
fn a_disk_that_is_full_takes_hardly_more_than_it_can_need() {
    for mib in [24, 40, 56, 72] {
        let disk = mib * MIB;
        let file = new_image(&CreateOptions::new(disk));
        let image = try_open(&file, OpenOptions::default()).unwrap();
        for piece in 0..mib {
            write(&image, piece * MIB, MIB, 1);
            block_on(image.flush()).unwrap();
        }
        let len = file.contents().len() as u64;
        // Its tables have 10 clusters at most.
        let most = (disk + MIB) / 16 * 17;
        assert!(len <= most, "{len} of {disk}");
        block_on(image.close()).unwrap();
    }
}
