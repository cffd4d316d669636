//! The layout of an image: the parts of the disk compared with the block status, and all clusters
//! reported compared with the refcounts on disk.

use cowslip_block::random::Random;
use std::sync::Arc;

use crate::support::{self, block_on};
use cowslip::file::BlockFile;
use cowslip::file::host::NoFiles;
use cowslip::file::memory::MemoryFile;
use cowslip::image::{Durability, Extent, OpenOptions, ZeroOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::qcow2::entry::refcount_at;
use cowslip::qcow2::header::Header;
use cowslip::qcow2::layout::{Area, Layout, Part, PartKind};
use cowslip::{Buf, Error, Image};

fn layout(bytes: Vec<u8>) -> cowslip::Result<(Vec<Part>, Vec<Area>, Header)> {
    let header = Header::parse(&bytes, bytes.len() as u64, "image")?;
    let file: Arc<dyn BlockFile> = Arc::new(MemoryFile::new("image", bytes, 4096));
    block_on(async {
        let layout = Layout::read(&file, &header).await?;
        let mut parts = Vec::new();
        layout.parts(&mut parts).await?;
        Ok((parts, layout.areas().await?, header.clone()))
    })
}

/// Writes, zeroes and discards at random; returns the file and its block status.
fn scribbled(cluster_size: u64, extended_l2: bool, seed: u64) -> (Vec<u8>, Vec<Extent>) {
    let mut random = Random(seed);
    let memory = Arc::new(MemoryFile::new("image", Vec::new(), 512));
    let file: Arc<dyn BlockFile> = memory.clone();
    let clusters = 300;
    let size = clusters * cluster_size + cluster_size / 2;
    let options = CreateOptions {
        cluster_size,
        extended_l2,
        ..CreateOptions::new(size)
    };
    let open = OpenOptions {
        writable: true,
        ..OpenOptions::default()
    };
    let extents = block_on(async {
        create(file.clone(), None, &options).await?;
        let image = Image::open(file, open, &NoFiles).await?;
        for _ in 0..150 {
            let at = random.next() % (image.size() / 512) * 512;
            let len = (random.next() % (3 * cluster_size / 512) + 1) * 512;
            let len = len.min(image.size() - at);
            match random.next() % 5 {
                0 => image.write_zeroes(at, len, ZeroOptions::default()).await?,
                1 => image.discard(at, len).await?,
                2 => {
                    let at = at / cluster_size * cluster_size;
                    let data = Buf::copy_of(&vec![7; cluster_size.min(image.size() - at) as usize]);
                    image.write_compressed(at, data).await?;
                }
                _ => {
                    let data = Buf::copy_of(&vec![5; len as usize]);
                    image.write(at, data, Durability::Cached).await?;
                }
            }
        }
        let extents = image.extents(0, image.size(), usize::MAX).await?;
        image.close().await?;
        Ok::<_, Error>(extents)
    });
    (memory.contents(), extents.unwrap())
}

/// Returns the extent that block status reports for a part.
fn as_extent(part: &Part) -> Extent {
    let blank = Extent {
        start: part.start,
        len: part.len,
        depth: 0,
        present: true,
        zero: false,
        data: false,
        compressed: false,
        host_offset: None,
    };
    match part.kind {
        PartKind::Below { space } => Extent {
            present: false,
            zero: true,
            host_offset: space,
            ..blank
        },
        PartKind::Zero { space } => Extent {
            zero: true,
            host_offset: space,
            ..blank
        },
        PartKind::Data(host) => Extent {
            data: true,
            host_offset: Some(host),
            ..blank
        },
        PartKind::Compressed { .. } => Extent {
            data: true,
            compressed: true,
            ..blank
        },
    }
}

/// Adjacent parts that block status does not distinguish.
fn joined(extents: impl Iterator<Item = Extent>) -> Vec<Extent> {
    let mut out: Vec<Extent> = Vec::new();
    for extent in extents {
        if let Some(last) = out.last_mut() {
            let follows = match (last.host_offset, extent.host_offset) {
                (Some(a), Some(b)) => a + last.len == b,
                (a, b) => a == b,
            };
            let kind = |e: &Extent| (e.depth, e.present, e.zero, e.data, e.compressed);
            if follows && kind(last) == kind(&extent) {
                last.len += extent.len;
                continue;
            }
        }
        out.push(extent);
    }
    out
}

/// Returns the clusters that are referenced according to the layout.
fn reported_clusters(parts: &[Part], areas: &[Area], cluster: u64) -> Vec<u64> {
    let of_parts = parts.iter().filter_map(|part| match part.kind {
        PartKind::Below { space } | PartKind::Zero { space } => Some((space?, part.len)),
        PartKind::Data(host) => Some((host, part.len)),
        PartKind::Compressed { start, len } => Some((start, len)),
    });
    let of_areas = areas.iter().map(|area| (area.offset, area.len));
    let mut clusters: Vec<u64> = of_parts
        .chain(of_areas)
        .flat_map(|(start, len)| start / cluster..(start + len).div_ceil(cluster))
        .collect();
    clusters.sort_unstable();
    clusters.dedup();
    clusters
}

/// The clusters with a refcount, read by hand.
fn counted_clusters(bytes: &[u8], header: &Header) -> Vec<u64> {
    let word =
        |at: u64| u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().unwrap());
    let geometry = header.geometry();
    let mut counted = Vec::new();
    for index in 0..header.refcount_table_bytes() / 8 {
        let block = word(header.refcount_table_offset + index * 8);
        if block == 0 {
            continue;
        }
        let block = &bytes[block as usize..][..geometry.cluster_bytes() as usize];
        for at in 0..geometry.refcounts_per_block() {
            if refcount_at(block, at as usize, geometry.refcount_order()) > 0 {
                counted.push(index * geometry.refcounts_per_block() + at);
            }
        }
    }
    counted
}

#[test]
fn parts_agree_with_block_status_and_all_of_it_with_the_refcounts() {
    for (cluster_size, extended_l2) in [(512, false), (4096, false), (65536, false), (65536, true)]
    {
        for seed in 1..=4 {
            let (bytes, extents) = scribbled(cluster_size, extended_l2, seed * 77);
            let (parts, areas, header) = layout(bytes.clone()).unwrap();
            let case = format!("{cluster_size} {extended_l2} {seed}");
            let mut at = 0;
            for part in &parts {
                assert_eq!(part.start, at, "{case}: no gaps");
                at += part.len;
            }
            assert_eq!(at, header.size, "{case}");
            let reported = joined(parts.iter().map(as_extent));
            assert_eq!(reported, joined(extents.into_iter()), "{case}");
            let reported = reported_clusters(&parts, &areas, cluster_size);
            assert_eq!(reported, counted_clusters(&bytes, &header), "{case}");
            assert!(areas.is_sorted_by_key(|area| area.offset), "{case}");
        }
    }
}

#[test]
fn snapshots_and_bitmaps_of_qemu_are_metadata() {
    if !support::peers_are_installed() {
        return;
    }
    let mut image = support::Image::create("cluster_size=4k", "16M", &["write 1M 4M"]);
    image.img(&["snapshot", "-c", "one", "image.qcow2"]);
    image.img(&["bitmap", "--add", "-g", "64k", "image.qcow2", "dirty"]);
    // Clusters of the snapshot alone are not reported, so none of them is written again.
    image.io(&["write 9M 64k"]);
    let (parts, areas, header) = layout(image.bytes.clone()).unwrap();
    let reported = reported_clusters(&parts, &areas, 4096);
    assert_eq!(reported, counted_clusters(&image.bytes, &header));
    let kinds: Vec<String> = areas
        .iter()
        .map(|area| area.structure.to_string())
        .collect();
    for kind in [
        "the header",
        "a snapshot's L1 table",
        "the snapshot table",
        "the bitmap directory or a bitmap table",
    ] {
        assert!(kinds.iter().any(|known| known == kind), "{kind}: {kinds:?}");
    }
}

#[test]
fn entries_that_cannot_be_right_are_named_by_their_place() {
    let (bytes, _) = scribbled(4096, false, 9);
    let header = Header::parse(&bytes, bytes.len() as u64, "image").unwrap();
    let l1 = header.l1_table_offset as usize;
    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut changed = bytes.clone();
        change(&mut changed);
        layout(changed).unwrap_err().to_string()
    };
    let reserved = refused(&|bytes| bytes[l1 + 7] |= 1);
    assert!(reserved.contains("L1 table"), "{reserved}");
    let beyond = refused(&|bytes| bytes[l1 + 2] = 0x10);
    assert!(beyond.contains("beyond the end"), "{beyond}");
    let l2 = bytes[l1..l1 + 8]
        .iter()
        .fold(0, |word, &byte| word << 8 | u64::from(byte));
    let l2 = (l2 & support::OFFSET_MASK) as usize;
    let unaligned = refused(&|bytes| {
        bytes[l2..l2 + 8].copy_from_slice(&(support::COPIED | 512).to_be_bytes());
    });
    assert!(unaligned.contains("L2 table"), "{unaligned}");
}

/// Bytes of metadata that are anything: an answer or an error, never a panic, and parts that cover
/// the disk.
#[test]
fn hostile_tables_are_an_answer_or_an_error() {
    let (bytes, _) = scribbled(512, false, 5);
    let (_, areas, _) = layout(bytes.clone()).unwrap();
    let mut random = Random(99);
    let (mut answers, mut errors) = (0, 0);
    for _ in 0..1500 {
        let mut changed = bytes.clone();
        for _ in 0..random.next() % 4 + 1 {
            let area = areas[(random.next() % areas.len() as u64) as usize];
            let at = (area.offset + random.next() % area.len) as usize;
            if let Some(byte) = changed.get_mut(at) {
                *byte = random.next() as u8;
            }
        }
        match layout(changed) {
            Ok((parts, _, header)) => {
                answers += 1;
                assert_eq!(parts.iter().map(|part| part.len).sum::<u64>(), header.size);
            }
            Err(_) => errors += 1,
        }
    }
    assert!(
        answers > 50 && errors > 50,
        "{answers} answers, {errors} errors"
    );
}

#[test]
fn a_snapshot_whose_table_is_nowhere_is_an_error() {
    if !support::peers_are_installed() {
        return;
    }
    let mut image = support::Image::create("cluster_size=4k", "16M", &["write 1M 4M"]);
    image.img(&["snapshot", "-c", "one", "image.qcow2"]);
    let at = image.snapshots();
    image.set_word(at, u64::MAX << 12);
    let error = layout(image.bytes.clone()).unwrap_err().to_string();
    assert!(error.contains("snapshot's L1 table"), "{error}");
}
